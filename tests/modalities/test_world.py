"""The board: its rules, its checker, and clips of the embedded model."""

from __future__ import annotations

import numpy as np
import pytest

import gen
from gen.core.errors import GenError
from gen.modalities.world import board, checker
from gen.modalities.world.board import ACTIONS, Boards
from gen.modalities.world.modality import Play, WorldModality, parse_actions, start_frame

RIGHT, STAY = ACTIONS.index("right"), ACTIONS.index("stay")


def drawn(count: int = 500, seed: int = 0) -> Boards:
    return board.draw(count, np.random.default_rng(seed))


def one(agent, box, walls=()) -> Boards:
    grid = np.zeros((1, 8, 8), bool)
    for cell in walls:
        grid[0][cell] = True
    return Boards(grid, np.array([agent]), np.array([box]))


# --- the simulator


def test_starts_have_an_agent_a_box_and_walls_at_different_cells():
    boards = drawn()
    n = np.arange(500)
    assert not boards.walls[n, *boards.agent.T].any() and not boards.walls[n, *boards.box.T].any()
    assert (boards.agent != boards.box).any(1).all()
    assert ((boards.box > 0) & (boards.box < 7)).all()
    counts = boards.walls.sum((1, 2))
    assert (counts.min(), counts.max()) == board.WALLS
    again = drawn()
    assert np.array_equal(board.render(boards), board.render(again))
    assert not np.array_equal(board.render(boards), board.render(drawn(seed=1)))


@pytest.mark.parametrize(
    "agent, box, walls, after, pushed",
    [
        ((3, 3), (6, 6), (), (3, 4), (6, 6)),  # free
        ((3, 7), (6, 6), (), (3, 7), (6, 6)),  # the rim
        ((3, 3), (6, 6), [(3, 4)], (3, 3), (6, 6)),  # a wall
        ((3, 3), (3, 4), (), (3, 4), (3, 5)),  # pushes
        ((3, 3), (3, 4), [(3, 5)], (3, 3), (3, 4)),  # the box is against a wall
        ((3, 6), (3, 7), (), (3, 6), (3, 7)),  # and against the rim
    ],
)
def test_a_move_is_stopped_or_pushes(agent, box, walls, after, pushed):
    made = board.step(one(agent, box, walls), np.array([RIGHT]))
    assert tuple(made.agent[0]) == after and tuple(made.box[0]) == pushed
    still = board.step(one(agent, box, walls), np.array([STAY]))
    assert tuple(still.agent[0]) == agent and tuple(still.box[0]) == box


def test_nothing_is_lost_on_the_way():
    boards, rng = drawn(), np.random.default_rng(1)
    for _ in range(50):
        boards = board.step(boards, rng.integers(5, size=500))
        n = np.arange(500)
        assert not boards.walls[n, *boards.agent.T].any()
        assert not boards.walls[n, *boards.box.T].any()
        assert (boards.agent != boards.box).any(1).all()


def test_actions_are_repeated_as_often_as_asked():
    drawn_actions = board.persistent_actions(2000, 30, 0.9, np.random.default_rng(0))
    repeats = (drawn_actions[:, 1:] == drawn_actions[:, :-1]).mean()
    assert abs(repeats - 0.9) < 4 * np.sqrt(0.09 / 58_000)


# --- the checker


def clip(seed: int = 0, actions=(RIGHT, RIGHT, 1, STAY)) -> tuple[np.ndarray, np.ndarray]:
    numbers = np.array(actions)
    return board.roll_out(drawn(1, seed), numbers[None])[0], numbers


def test_the_checker_reads_what_the_simulator_draws():
    boards = drawn()
    shown = checker.read(board.render(boards))
    assert np.array_equal(shown.agent, boards.agent) and np.array_equal(shown.box, boards.box)
    assert np.array_equal(shown.cells == board.WALL, boards.walls)
    frames, actions = clip()
    assert checker.check(frames, actions).passed and checker.grade(frames, actions) == 1.0


def test_slight_noise_passes_and_a_wrong_pixel_does_not():
    frames, actions = clip()
    noise = np.random.default_rng(0).integers(-9, 10, frames.shape)
    noisy = (frames.astype(int) + noise).clip(0, 255).astype(np.uint8)
    assert checker.check(noisy, actions).passed
    wrong = frames.copy()
    wrong[3, 0, 0] = 255 - wrong[3, 0, 0]
    verdict = checker.check(wrong, actions)
    assert not verdict.passed and verdict.valid and "frame 3" in verdict.detail
    assert checker.grade(wrong, actions) == pytest.approx(3 / 5)


@pytest.mark.parametrize(
    "change",
    [
        lambda f: f[::-1],
        lambda f: f[:-1],
        lambda f: f.repeat(2, 0)[: len(f)],
        lambda f: f.transpose(0, 2, 1, 3),
        lambda f: np.zeros_like(f),
    ],
)
def test_other_clips_do_not_pass(change):
    for seed in range(20):
        frames, actions = clip(seed, (RIGHT, 1, RIGHT, 1, 2, 0))
        moved = (frames[1:] != frames[:-1]).any((1, 2, 3))
        if moved.all():  # a clip that stands still is its own reverse
            assert not checker.check(change(frames), actions).passed


# --- the modality


def test_prompts_are_actions_and_their_repeats():
    assert parse_actions("right*3 down, stay") == ("right",) * 3 + ("down", "stay")
    assert str(WorldModality().condition("up*2 left")) == "up up left"


@pytest.mark.parametrize(
    "prompt, says",
    [
        ("rigth", "Did you mean 'right'?"),
        ("", "the prompt has no action"),
        ("up*0", "expected a number of at least 1"),
        ("up*-1", "expected a number of at least 1"),
        ("up*99999", "more than 10000 actions"),
        ("up * 3", "unknown action"),
    ],
)
def test_a_bad_prompt_is_one_error(prompt, says):
    with pytest.raises(GenError) as caught:
        parse_actions(prompt)
    assert says in str(caught.value)


def test_the_seed_decides_the_start_alone():
    modality = WorldModality()
    plays = [modality.ground(modality.condition(p), 7) for p in ("up", "left left")]
    assert np.array_equal(plays[0].start(), plays[1].start())
    assert not np.array_equal(start_frame(7), start_frame(8))
    assert modality.drawn_by(plays[0]) == modality.drawn_by(plays[1])
    assert Play(("up",)).seed is None


@pytest.mark.parametrize("ending", ["mp4", "mkv"])
def test_a_saved_clip_is_read_as_it_was(tmp_path, ending):
    frames, _ = clip(1)
    modality, path = WorldModality(), tmp_path / f"clip.{ending}"
    modality.save(frames, path, {})
    assert modality.check(modality.load(path), "right right down stay").passed
    assert not modality.check(modality.load(path), "left left down stay").passed


def test_the_embedded_model_plays_as_the_simulator_does():
    pipe = gen.load("world", device="cpu")
    prompts = ["right right down down left up", "up up up stay right right"]
    out = pipe(prompts, {"name": "next_frame", "steps": 1}, seed=0, num_samples=2)
    for media, item in zip(out.media, out.items, strict=True):
        verdict = pipe.modality.check(media, item.prompt)
        assert verdict.passed, verdict.detail
        # the same clip under other actions does not pass
        assert not pipe.modality.check(media, "down left left up up down").passed


def test_a_job_has_rows_and_a_verdict(tmp_path):
    pipe = gen.load("world", device="cpu")
    out = pipe(["right*3 down stay", "up"], {"name": "next_frame", "steps": 1}, seed=0)
    assert [media.shape for media in out.media] == [(6, 16, 16, 3), (2, 16, 16, 3)]
    page = out.save(tmp_path / "out")
    assert page.is_file() and len(list((tmp_path / "out").glob("*.mp4"))) == 2


@pytest.mark.parametrize(
    "more, says",
    [
        ({"frames": 9}, "one frame per action"),
        ({"sampler": "maskgit"}, "has no masked model"),
        ({"sampler": "autoregressive"}, "has no causal"),
    ],
)
def test_what_a_world_does_not_take_is_refused(more, says):
    with pytest.raises(GenError, match=says):
        gen.load("world", device="cpu")("up", seed=0, **more)
