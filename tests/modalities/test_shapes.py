"""The caption language, the drawing program, and the checker that judges every image gen reports
a quality for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gen.modalities.image import captions as shapes
from gen.modalities.image.captions import Caption, Item, parse
from gen.modalities.image.checker import MIN_IOU, check, check_many, detect


def drawn(captions: list[Caption], seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack([shapes.draw(c, rng) for c in captions])


@pytest.fixture(scope="module")
def data() -> tuple[list[Caption], np.ndarray]:
    captions = shapes.captions(75, 41, held=False) + shapes.captions(75, 42, held=True)
    return captions, drawn(captions, 43)


# --- The caption language


def test_every_caption_reads_back_as_itself():
    rng = np.random.default_rng(0)
    for _ in range(300):
        caption = shapes.random_caption(rng)
        partial = Caption(
            tuple(
                replace(
                    i, **{k: None for k in ("size", "colour", "location") if rng.random() < 0.4}
                )
                for i in caption.items
            )
        )
        assert parse(str(caption)) == caption
        assert parse(str(partial)) == partial


def test_equivalent_spellings_mean_the_same_caption():
    expected = parse("a large red circle in the centre")
    for text in (
        "A large red circle in the CENTER.",
        "large red circle centre",
        "the large red circle at the middle",
    ):
        assert parse(text) == expected


def test_slots_hold_each_stated_attribute_and_mark_the_rest():
    words = [shapes.WORDS[s] for s in parse("a small ring and a red cross at the top left").slots()]
    assert words == ["small", "<any>", "ring", "<any>", "<any>", "red", "cross", "top left"]
    words = [shapes.WORDS[s] for s in parse("a red ring").slots()]
    assert words == ["<any>", "red", "ring", "<any>"] + ["<none>"] * 4
    every = [shapes.random_caption(np.random.default_rng(i)).slots() for i in range(50)]
    assert {len(s) for s in every} == {shapes.SLOTS}
    assert len({tuple(s) for s in every}) > 45


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a large rad circle", ("'rad'", "'red'")),
        ("a red squaer", ("'squaer'", "'square'")),
        ("a red circle at the top lift", ("'top lift'", "'top left'")),
        ("a red", ("ends before its shape", "circle")),
        ("", ("empty", "a large red circle")),
        ("a ring and a cross and a circle", ("3 shapes", "one or two")),
        ("a red ring and a red cross", ("'red'", "two different colours")),
        ("a red ring at the top and a blue cross in the centre", ("'top'", "'centre'", "apart")),
    ],
)
def test_a_bad_caption_names_what_is_wrong_and_what_was_expected(text, names):
    with pytest.raises(ValueError) as error:
        parse(text)
    for name in names:
        assert name in str(error.value)


def test_the_held_out_tenth_is_disjoint_and_about_a_tenth():
    rng = np.random.default_rng(5)
    share = np.mean([shapes.held_out(shapes.random_caption(rng)) for _ in range(3000)])
    assert 0.06 < share < 0.14
    seen, unseen = (set(map(str, shapes.captions(400, 6, held=h))) for h in (False, True))
    assert seen.isdisjoint(unseen)
    assert all(shapes.held_out(parse(c)) for c in unseen)


def test_two_shapes_never_share_a_colour_or_overlap():
    rng = np.random.default_rng(7)
    pairs = [c.items for c in (shapes.random_caption(rng, two=1.0) for _ in range(300))]
    assert all(a.colour != b.colour and shapes.apart(a.location, b.location) for a, b in pairs)


# --- Drawing


def test_the_same_seed_draws_the_same_image_and_another_seed_another_one():
    caption = parse("a large red circle at the top left")
    first, again, other = (shapes.draw(caption, np.random.default_rng(s)) for s in (1, 1, 2))
    assert first.shape == (64, 64, 3) and first.dtype == np.uint8
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


# --- The checker


def test_drawn_images_fulfil_their_captions(data):
    captions, images = data
    assert all(v.passed and v.valid for v in check_many(images, captions))


def test_drawn_images_do_not_fulfil_other_captions(data):
    captions, images = data
    verdicts = check_many(images, captions[1:] + captions[:1])
    other = [str(a) != str(b) for a, b in zip(captions, captions[1:] + captions[:1], strict=True)]
    assert sum(other) > 140
    assert not any(v.passed for v, o in zip(verdicts, other, strict=True) if o)
    assert all(v.valid for v in verdicts)  # valid judges the image alone


def test_changing_any_one_stated_attribute_turns_the_verdict():
    caption = parse("a large red circle at the top left and a small blue ring at the bottom right")
    image = drawn([caption], 3)[0]
    options = {
        "shape": shapes.SHAPES,
        "colour": shapes.COLOURS,
        "size": shapes.SIZES,
        "location": shapes.LOCATIONS,
    }
    changed = [
        Caption(
            tuple(
                replace(item, **{name: value}) if k == n else item
                for n, item in enumerate(caption.items)
            )
        )
        for k in range(2)
        for name, values in options.items()
        for value in values
        if value != getattr(caption.items[k], name)
    ]
    assert len(changed) == 2 * (4 + 5 + 1 + 8)
    assert check(image, caption).passed
    assert not any(v.passed for v in check_many([image] * len(changed), changed))


def test_unsaid_attributes_match_anything_and_order_does_not_matter():
    image = drawn(
        [parse("a large red circle at the top left and a small blue ring at the bottom right")], 4
    )[0]
    for text in (
        "a circle and a ring",
        "a ring and a circle",
        "a small ring and a red circle at the top left",
    ):
        assert check(image, text).passed, text
    for text in ("a ring and a cross", "a ring", "a circle", "a large ring and a circle"):
        assert not check(image, text).passed, text


def test_one_shape_cannot_stand_for_two():
    image = drawn([parse("a large red circle at the left")], 5)[0]
    assert check(image, "a circle").passed
    assert not check(image, "a red circle and a circle").passed


def test_the_empty_background_shows_nothing():
    for seed in range(12):
        image = shapes.background(np.random.default_rng(seed)).round().clip(0, 255).astype(np.uint8)
        assert detect(image) == []
        verdict = check(image, "a circle")
        assert verdict.valid and not verdict.passed


def test_an_extra_shape_is_refused():
    two = parse("a large red circle at the left and a small yellow cross at the right")
    image = drawn([two], 6)[0]
    verdict = check(image, Caption(two.items[:1]))
    assert verdict.valid and not verdict.passed
    assert "yellow cross" in verdict.detail


def test_a_broken_shape_is_not_valid():
    image = drawn([parse("a large green square in the centre")], 8)[0]
    whole = detect(image)[0]
    image[34:] = shapes.background(np.random.default_rng(9))[34:].clip(0, 255).astype(np.uint8)
    broken = check(image, "a green square")
    assert whole.iou > 0.98 and detect(image)[0].iou < MIN_IOU
    assert not broken.valid and not broken.passed


def test_a_shape_in_no_known_colour_is_not_valid(monkeypatch):
    monkeypatch.setitem(shapes.PALETTE, "red", (60, 200, 210))
    image = drawn([parse("a large red circle in the centre")], 10)[0]
    monkeypatch.undo()
    assert not check(image, "a large red circle in the centre").valid


def test_radius_and_centre_are_read_to_a_quarter_of_a_pixel():
    flat = np.full((64, 64, 3), 80.0)
    for k, shape in enumerate(shapes.SHAPES):
        radius, x, y = 7.3 + k * 0.2, 20.3 + 5 * k, 44.6 - 5 * k
        alpha = shapes.coverage(shape, radius, x, y)[..., None]
        image = (
            (flat * (1 - alpha) + np.array(shapes.PALETTE["blue"]) * alpha).round().astype(np.uint8)
        )
        (found,) = detect(image)
        assert found.item.shape == shape
        assert np.allclose((found.radius, *found.centre), (radius, x, y), atol=0.25)


def test_noise_and_specks_do_not_turn_the_verdict(data):
    captions, images = (d[:60] for d in data)
    rng = np.random.default_rng(11)
    noisy = (images + rng.normal(0, 12, images.shape)).round().clip(0, 255).astype(np.uint8)
    noisy[:, 1:4, 60:63] = shapes.PALETTE["yellow"]
    assert all(v.passed for v in check_many(noisy, captions))


def test_a_blurred_image_still_reads(data):
    captions, images = data[0][:60], data[1][:60].astype(np.float32)
    for axis in (1, 2):  # binomial, sigma 1
        for _ in range(2):
            images = (np.roll(images, 1, axis) + 2 * images + np.roll(images, -1, axis)) / 4
    assert all(v.passed for v in check_many(images.round().astype(np.uint8), captions))


def test_pil_images_and_parsed_captions_are_welcome_and_wrong_sizes_are_not(data):
    from PIL import Image

    captions, images = data
    assert check(Image.fromarray(images[0]), str(captions[0])) == check(images[0], captions[0])
    with pytest.raises(ValueError, match=r"expected uint8 \[64, 64, 3\]"):
        check(np.zeros((32, 32, 3), np.uint8), "a circle")
    with pytest.raises(ValueError, match="one caption per image"):
        check_many(images[:2], captions[:1])
    assert isinstance(captions[0].items[0], Item)


def test_a_prompt_pairs_every_word_with_the_location_of_its_shape():
    n = len(shapes.LOCATIONS) + 1
    two = shapes.parse(
        "a large red circle at the top left and a small blue ring at the bottom right"
    ).pairs()
    assert [p % n for p in two] == [1] * 4 + [9] * 4
    assert [shapes.WORDS[p // n] for p in two[:3]] == ["large", "red", "circle"]
    assert shapes.parse("a red circle").pairs()[4:] == [shapes.NONE * n] * 4
    assert shapes.parse("a ring").pairs()[0] == 0  # nothing said, nowhere: what guidance is told
    swapped = shapes.parse(
        "a large red circle at the bottom right and a small blue ring at the top left"
    ).pairs()

    def words(pairs):
        return {p // n for p in pairs}

    assert words(two) == words(swapped) and not {*two[:3], *two[4:7]} & {
        *swapped[:3],
        *swapped[4:7],
    }
    assert max(two) < shapes.PAIRS
