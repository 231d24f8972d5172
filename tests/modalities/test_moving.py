"""The caption language of moving shapes, the program that draws their clips, and the tracker that
judges clips."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest

from gen.modalities.video import captions as moving
from gen.modalities.video.captions import Caption, parse
from gen.modalities.video.checker import MAX_RESIDUAL, MIN_IOU, check, check_many, track

TIMES = np.arange(moving.FRAMES)
MIDDLE = (moving.SIZE - 1) / 2


def drawn(captions: list[Caption], seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack([moving.draw(c, rng) for c in captions])


def painted(
    shape: str,
    radius: float,
    x: np.ndarray,
    y: np.ndarray,
    colour: str | tuple[int, ...],
    under=None,
) -> np.ndarray:
    """Any shape on any path over a background or another clip."""
    rgb = moving.PALETTE[colour] if isinstance(colour, str) else colour
    alpha = moving.coverage(shape, radius, x + 0 * TIMES, y + 0 * TIMES)[..., None]
    under = moving.background(np.random.default_rng(0)) if under is None else under
    return (under * (1 - alpha) + np.array(rgb) * alpha).round().astype(np.uint8)


def share(clips: np.ndarray, captions: list[Caption]) -> float:
    return float(np.mean([v.passed for v in check_many(clips, captions)]))


@pytest.fixture(scope="module")
def data() -> tuple[list[Caption], np.ndarray]:
    captions = moving.captions(75, 41, held=False) + moving.captions(75, 42, held=True)
    return captions, drawn(captions, 43)


# --- The caption language


def test_every_caption_reads_back_as_itself():
    rng = np.random.default_rng(0)
    every = moving.every_caption()
    assert len(set(map(str, every))) == len(every) == 960
    for caption in every:
        partial = replace(
            caption, **{k: None for k in ("size", "colour", "speed") if rng.random() < 0.4}
        )
        assert parse(str(caption)) == caption
        assert parse(str(partial)) == partial


def test_equivalent_spellings_mean_the_same_caption():
    expected = Caption("circle", "up", "blue", "small", "quickly", True)
    assert str(expected) == "a small blue circle moves up quickly and bounces"
    for text in (
        "The small blue circle moving up quickly, and bounces.",
        "small blue circle goes up quickly and bounces",
    ):
        assert parse(text) == expected
    assert parse("a red square moves right") == Caption("square", "right", "red")


def test_slots_hold_each_stated_attribute_and_mark_the_rest():
    def words(caption):
        return [moving.WORDS[s] for s in caption.slots()]

    assert words(parse("a small ring moves left and bounces")) == [
        "small",
        "<any>",
        "ring",
        "left",
        "<any>",
        "bounces",
    ]
    assert words(parse("a red ring moves up slowly")) == [
        "<any>",
        "red",
        "ring",
        "up",
        "slowly",
        "passes",
    ]
    assert Caption("ring", "up", bounces=None).slots()[5] == moving.ANY
    every = [tuple(c.slots()) for c in moving.every_caption()]
    assert {len(s) for s in every} == {moving.SLOTS}
    assert len(set(every)) == len(every) and moving.ANY not in np.array(every)
    bare = np.array(parse("a ring moves up").slots())
    assert tuple(np.flatnonzero(bare == moving.ANY)) == moving.OPTIONAL


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a small rad circle moves up", ("'rad'", "'red'", "circle")),
        ("a red squaer moves up", ("'squaer'", "'square'")),
        ("a red ring movs up", ("'movs'", "'moves'")),
        ("a red ring moves rihgt", ("'rihgt'", "'right'", "left, up, down")),
        ("a red ring moves up quikly", ("'quikly'", "'quickly'", "slowly")),
        ("a red ring moves up and bonces", ("'bonces'", "'bounces'")),
        ("a red ring moves up bounces", ("'bounces'", "'and bounces'")),
        ("a red ring moves up and bounces slowly", ("'slowly'", "nothing after")),
        ("a red ring", ("the end of the caption", "moves")),
        ("a red ring moves", ("the end of the caption", "right, left")),
        ("a", ("the end of the caption", "circle")),
        ("  ", ("empty", "a small blue circle moves up")),
    ],
)
def test_a_bad_caption_names_what_is_wrong_and_what_was_expected(text, names):
    with pytest.raises(ValueError) as error:
        parse(text)
    for name in names:
        assert name in str(error.value)


def test_the_held_out_tenth_is_disjoint_and_about_a_tenth():
    assert 0.07 < np.mean([moving.held_out(c) for c in moving.every_caption()]) < 0.13
    seen, unseen = (set(map(str, moving.captions(300, 6, held=h))) for h in (False, True))
    assert seen.isdisjoint(unseen)
    assert all(moving.held_out(parse(c)) for c in unseen)


# --- Motion and drawing


def test_every_path_stays_in_the_image_and_only_one_that_bounces_touches_the_wall_ahead():
    for caption in moving.every_caption()[::3]:
        wall, step = (
            moving.walls(caption.shape, caption.size),
            np.array(moving.STEPS[caption.direction]),
        )
        for start in np.stack(np.meshgrid(*moving.starts(caption)), -1).reshape(-1, 2)[::7]:
            path = moving.trajectory(caption, tuple(start))
            ahead = step.sum() * wall[caption.direction] - path @ step
            assert path.shape == (moving.FRAMES, 2) and np.array_equal(path[0], start)
            assert (path >= [wall["left"], wall["up"]]).all() and (
                path <= [wall["right"], wall["down"]]
            ).all()
            moved, pace = np.diff(path @ step), moving.PACES[caption.speed]
            if caption.bounces:
                assert ahead.min() == 0 and ahead.argmin() == moving.TURN
                assert moved[0] == pace and moved[-1] == -pace
            else:
                assert (moved == pace).all()


def test_what_touches_a_wall_fills_its_outermost_pixels():
    for caption in moving.every_caption()[::11]:
        x, y = np.full(2, MIDDLE), np.full(2, MIDDLE)
        (x if caption.direction in ("right", "left") else y)[1] = moving.walls(
            caption.shape, caption.size
        )[caption.direction]
        c = moving.coverage(caption.shape, moving.RADII[caption.size], x, y)
        assert np.isclose(c[0].sum(), c[1].sum(), rtol=0.06)  # nothing of it is outside
        edge = {"right": c[1, :, -1], "left": c[1, :, 0], "up": c[1, 0], "down": c[1, -1]}[
            caption.direction
        ]
        assert edge.max() > 0.2


def test_the_same_seed_draws_the_same_clip_and_another_seed_another_one():
    caption = parse("a large red circle moves left slowly and bounces")
    first, again, other = (moving.draw(caption, np.random.default_rng(s)) for s in (1, 1, 2))
    assert first.shape == (16, 32, 32, 3) and first.dtype == np.uint8
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_backgrounds_are_few_and_far_from_every_colour():
    rng = np.random.default_rng(3)
    grounds = np.stack([moving.background(rng) for _ in range(1000)])
    assert len(np.unique(grounds.reshape(1000, -1), axis=0)) == len(moving.GROUNDS)
    apart = grounds[:64, :, :, None] - np.array(list(moving.PALETTE.values()))
    assert np.linalg.norm(apart, axis=-1).min() > 90


# --- The tracker: what must pass


def test_drawn_clips_fulfil_their_captions(data):
    captions, clips = data
    assert share(clips, captions) >= 0.99
    found = [track(c) for c in clips[:30]]
    assert min(f.iou for f in found) > 0.98 and max(f.residual for f in found) < 0.1


def test_unsaid_attributes_match_anything():
    clip = drawn([parse("a large red circle moves left slowly")], 4)[0]
    for text in (
        "a circle moves left",
        "a red circle moves left",
        "a large circle moves left slowly",
    ):
        assert check(clip, text).passed, text
    assert check(clip, Caption("circle", "left", bounces=None)).passed
    for text in (
        "a circle moves left and bounces",
        "a circle moves right",
        "a small circle moves left",
        "a ring moves left",
    ):
        verdict = check(clip, text)
        assert verdict.valid and not verdict.passed, text
        assert "saw a large red circle moves left slowly; expected" in verdict.detail


def test_noise_blur_and_compression_do_not_turn_the_verdict(data):
    from PIL import Image

    def compressed(frame: np.ndarray) -> np.ndarray:
        file = io.BytesIO()
        Image.fromarray(frame).save(file, "JPEG", quality=70)
        return np.asarray(Image.open(file))

    captions, clips = (d[40:110] for d in data)
    noise = np.random.default_rng(11).normal(0, 10, clips.shape)
    assert share((clips + noise).round().clip(0, 255).astype(np.uint8), captions) >= 0.97
    blurred = np.pad(clips.astype(np.float32), ((0, 0), (0, 0), (1, 1), (1, 1), (0, 0)), "edge")
    for axis in (2, 3):  # 3x3 box
        blurred = sum(np.take(blurred, range(i, i + moving.SIZE), axis) for i in range(3)) / 3
    assert share(blurred.round().astype(np.uint8), captions) >= 0.97
    assert share(np.array([[compressed(f) for f in c] for c in clips]), captions) >= 0.97


def test_one_bad_frame_is_forgiven_and_two_are_not():
    clip = painted("square", 7, 8 + TIMES, MIDDLE, "green")
    for bad in (1, 2):
        clip[5 * bad] = moving.background(np.random.default_rng(0))
        verdict = check(clip, "a green square moves right")
        assert verdict.passed == verdict.valid == (bad == 1)
    assert "2 of 16 frames" in verdict.detail


# --- The tracker: what must fail


def test_clips_fulfil_the_captions_of_other_clips_at_chance(data):
    captions, clips = data
    seen = [track(c).caption for c in clips]
    words = np.array([c.slots() for c in captions])
    chance, hits = (
        (words[:, None] == np.array([s.slots() for s in other])).all(-1)
        for other in (captions, seen)
    )
    others = ~np.eye(len(captions), dtype=bool)
    assert (
        abs(hits[others].mean() - chance[others].mean()) < 0.001
    )  # captions are sometimes drawn twice
    assert (
        chance[others].mean() < 0.01
    )  # 1/960 for training captions, ten times as much for the held-out tenth
    assert np.roll(hits, 1, axis=0).diagonal().mean() < 0.05  # the next clip's caption


def test_changing_any_one_stated_attribute_turns_the_verdict():
    caption = parse("a large red circle moves left slowly")
    clip = drawn([caption], 3)[0]
    options = {
        "shape": moving.SHAPES,
        "colour": moving.COLOURS,
        "size": moving.SIZES,
        "direction": moving.DIRECTIONS,
        "speed": moving.SPEEDS,
        "bounces": (False, True),
    }
    changed = [
        replace(caption, **{k: v})
        for k, values in options.items()
        for v in values
        if v != getattr(caption, k)
    ]
    assert len(changed) == 4 + 5 + 1 + 3 + 1 + 1
    assert check(clip, caption).passed
    assert not any(v.passed for v in check_many([clip] * len(changed), changed))


def test_only_the_true_order_of_time_passes(data):
    captions, clips = (d[40:110] for d in data)
    rng = np.random.default_rng(8)
    straight = [i for i, c in enumerate(captions) if not c.bounces]
    backwards = check_many(clips[straight][:, ::-1], [captions[i] for i in straight])
    assert len(straight) > 20 and all(v.valid and not v.passed for v in backwards)
    assert share(np.stack([c[rng.permutation(16)] for c in clips]), captions) == 0
    assert share(np.repeat(clips[:, :1], 16, axis=1), captions) == 0  # stands still


def test_a_second_shape_makes_a_clip_invalid():
    clip = painted("circle", 4.5, 8 + TIMES, 8, "red")
    assert check(clip, "a red circle moves right").passed
    for colour in moving.COLOURS:
        for path in (
            (8 + TIMES, 22),
            (23 - TIMES, 22),
            (22, 22),
        ):  # beside it, against it, standing
            assert not check(
                painted("square", 4.5, *path, colour, clip), "a red circle moves right"
            ).valid, (colour, path)


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (8 + 0.75 * TIMES, 16),
        (5 + 1.5 * TIMES, 16),
        (8 + 0.2 * TIMES, 16),  # no known speed
        (8 + TIMES, 8 + TIMES),  # aslant
        (8 + np.minimum(TIMES, 15 - TIMES), 16),  # turns where no wall is
        (8 + 15 * (TIMES > 7), 16),  # jumps
    ],
)
def test_an_unknown_path_is_not_valid(x, y):
    clip = painted("circle", 4.5, x, y, "red")
    verdict = check(clip, "a red circle moves right")
    assert not verdict.valid and not verdict.passed and "no known path" in verdict.detail
    assert track(clip).residual > MAX_RESIDUAL and track(clip).iou > 0.98


@pytest.mark.parametrize(
    "change",
    [("cross", 7, "red"), ("ring", 7, "red"), ("circle", 4.5, "red"), ("circle", 7, "purple")],
)
def test_a_shape_that_changes_on_its_way_is_not_valid(change):
    shape, radius, colour = change
    clip = painted("circle", 7, 8 + TIMES, MIDDLE, "red")
    clip[8:] = painted(shape, radius, 8 + TIMES, MIDDLE, colour)[8:]
    assert not check(clip, "a circle moves right").valid


def test_broken_shapes_and_unknown_colours_are_not_valid():
    half = painted("circle", 7, 8 + TIMES, MIDDLE, "blue")
    half[:, 16:] = moving.background(np.random.default_rng(0)).round()[16:]
    assert track(half).iou < MIN_IOU and not check(half, "a circle moves right").valid
    for rgb in ((230, 130, 45), (60, 200, 210), (240, 100, 180), (150, 150, 150), (20, 20, 20)):
        assert not check(
            painted("circle", 7, 8 + TIMES, MIDDLE, rgb), "a circle moves right"
        ).valid, rgb
    bright = painted("circle", 7, 8 + TIMES, MIDDLE, "blue", np.full((32, 32, 3), 190.0))
    assert not check(bright, "a circle moves right").valid


def test_no_shape_at_all_is_not_valid():
    rng = np.random.default_rng(9)
    empty = np.repeat(moving.background(rng)[None].round().astype(np.uint8), 16, axis=0)
    for clip in (
        empty,
        np.zeros_like(empty),
        np.full_like(empty, 255),
        rng.integers(0, 256, empty.shape).astype(np.uint8),
    ):
        verdict = check(clip, "a circle moves right")
        assert not verdict.valid and verdict.detail
    assert track(empty) is None


def test_lists_of_pil_frames_are_welcome_and_a_wrong_clip_says_what_came(data):
    from PIL import Image

    captions, clips = data
    assert check([Image.fromarray(f) for f in clips[0]], str(captions[0])) == check(
        clips[0], captions[0]
    )
    for clip, came in (
        (clips[0][:12], "uint8 [12, 32, 32, 3]"),
        (clips[0] / 255, "float64"),
        ([], "[0]"),
        (clips[0][0], "[32, 32, 3]"),
    ):
        verdict = check(clip, captions[0])
        assert not verdict.valid and not verdict.passed
        assert came in verdict.detail and "expected uint8 [16, 32, 32, 3]" in verdict.detail
    with pytest.raises(ValueError, match="one caption per clip"):
        check_many(clips[:2], captions[:1])


def test_pairs_join_every_word_with_the_motion_and_nothing_said_with_none():
    said = np.array([c.slots() for c in moving.every_caption()])
    joined = moving.pairs(said)
    assert (
        (joined // moving.MOTIONS == said).all()
        and (joined >= 0).all()
        and (joined < moving.PAIRS).all()
    )
    motions = {tuple(row) for row in said[:, 3:]}
    assert len(
        {
            (*tuple(row[3:]), m)
            for row, m in zip(said.tolist(), (joined[:, 0] % moving.MOTIONS).tolist(), strict=True)
        }
    ) == len(motions)
    assert moving.pairs(np.zeros((1, 6), int)).tolist() == [[0] * 6]
    unsaid = moving.parse("a square moves left").pairs()
    assert (
        len({p % moving.MOTIONS for p in unsaid}) == 1
        and unsaid != moving.parse("a square moves left slowly").pairs()
    )


def test_what_a_caption_leaves_open_is_drawn():
    rng = np.random.default_rng(5)
    caption = parse("a ring moves right")
    found = {track(moving.draw(caption, rng)).caption for _ in range(40)}
    assert {(c.shape, c.direction, c.bounces) for c in found} == {("ring", "right", False)}
    assert all(len({getattr(c, key) for c in found}) > 1 for key in ("colour", "size", "speed"))
