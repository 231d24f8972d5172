"""Measurements and model card of the frame model, called by ``recipes/world/recipe.py``.

Positions are read from pixels (``modalities/world/checker.py``) and compared with the simulator.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from gen.modalities.world import board, checker
from gen.pipeline.output import PipelineOutput
from gen.pipeline.pipeline import Pipeline, load
from gen.play.world import World
from gen.recipes.common.grid_evaluation import CARD_HEAD

HELD_OUT_SEED = 1_000_000  # of the first start; training draws starts from streams of its own
STEPS = (1, 2, 4)
AHEAD = 4
COMPARED = 30  # sequences of variants that are compared with the plain one
LONG_ENOUGH = 20  # actions that a sequence has to be right for
PERSISTENCES = (0.5, 0.9, 0.98)
RUNS = (4, 9)  # shortest run of equal actions of the timed sequence, and one more than the longest
QUALITY = (0.5, 0.9)  # persistences at which joint is compared with one by one


def evaluate(zoo: Path, name: str, held_out: int, horizon: int, log: Callable = print) -> dict:
    """Measure the model ``zoo / name``; write ``evaluation-world.json`` and the model card.

    Args:
        zoo: folder of the models.
        name: folder of the model in it.
        held_out: sequences of actions.
        horizon: actions of each.
        log: receives progress.
    """
    pipe = load("world", zoo / name, device="cpu")
    result: dict[str, Any] = {"sequences": held_out, "actions": horizon, "quality": {}}
    for persistence in QUALITY:
        for steps, speculate in itertools.product(STEPS, ("none", "joint")):
            main = persistence == QUALITY[0] and speculate == "none"
            count = held_out if main else min(held_out, COMPARED)
            spec = {"name": "next_frame", "steps": steps, "speculate": speculate, "ahead": AHEAD}
            prompts = sequences(count, horizon, persistence)
            row = {"clips": count, **quality(pipe(prompts, spec, seed=HELD_OUT_SEED))}
            result["quality"][f"{steps} {speculate} at {persistence:g}"] = row
            log(f"{steps} {speculate}, persistence {persistence:g}: {row}")
    result["kept"] = {f"{r:g}": kept(pipe, min(held_out, 20), horizon, r) for r in PERSISTENCES}
    result["speed"] = speed(pipe, repeats=5 if held_out >= 100 else 1)
    log(json.dumps(result["speed"]))
    (zoo / "evaluation-world.json").write_text(json.dumps(result, indent=1) + "\n")
    write_card(zoo / name, name, result)
    return result


def sequences(count: int, length: int, persistence: float) -> list[str]:
    """Draw held-out prompts; every one gets a start of its own, that of its seed."""
    rng = np.random.default_rng([HELD_OUT_SEED, int(1000 * persistence)])
    drawn = board.persistent_actions(count, length, persistence, rng)
    return [" ".join(board.ACTIONS[a] for a in row) for row in drawn]


def quality(out: PipelineOutput) -> dict[str, float]:
    """Compare clips with the simulator.

    Returns:
        For the agent, the box and whole boards: ``*_long``, the share of clips that are right for
        ``LONG_ENOUGH`` actions; ``*_all``, for all of them; ``*_step``, the share of frames that
        are right; ``*_first_error_tenth``, actions before the first error that nine of ten clips
        reach.
    """
    right: dict[str, list[np.ndarray]] = {"agent": [], "box": [], "board": []}
    for media, item in zip(out.media, out.items, strict=True):
        actions = np.array([board.ACTIONS.index(a) for a in item.condition.actions])
        shown = checker.read(media)
        truth = checker.expected(shown, actions)
        assert truth is not None, "a start is drawn by the simulator"
        right["agent"].append((shown.agent == truth.agent).all(1))
        right["box"].append((shown.box == truth.box).all(1))
        right["board"].append((shown.cells == truth.cells).all((1, 2)))
    row: dict[str, float] = {}
    for name, rows in right.items():
        until = np.array([r[1:].cumprod().sum() for r in rows])  # actions before the first error
        row[f"{name}_long"] = float((until >= min(LONG_ENOUGH, len(rows[0]) - 1)).mean())
        row[f"{name}_all"] = float((until == len(rows[0]) - 1).mean())
        row[f"{name}_step"] = float(np.stack(rows)[:, 1:].mean())
        row[f"{name}_first_error_tenth"] = float(np.quantile(until, 0.1, method="lower"))
    rates = [s.draft_acceptance_rate for s in out.stats if s.draft_acceptance_rate is not None]
    return {**row, **({"accepted": float(np.mean(rates))} if rates else {})}


def kept(pipe: Pipeline, count: int, length: int, persistence: float) -> dict[str, float]:
    """Measure the frames that a round of ``AHEAD`` keeps, beside (1 - r^N) / (1 - r).

    With one step, a round that makes its frames together is one forward pass.
    """
    spec = {"name": "next_frame", "steps": 1, "speculate": "joint", "ahead": AHEAD}
    out = pipe(sequences(count, length, persistence), spec, seed=HELD_OUT_SEED)
    rounds = sum(s.nfe for s in out.stats)
    hits = sum(s.draft_acceptance_rate is not None for s in out.stats)
    rate = sum(s.draft_acceptance_rate or 0.0 for s in out.stats) / max(1, hits)
    return {
        "frames_per_round": count * length / rounds,
        "expected": (1 - persistence**AHEAD) / (1 - persistence),
        "ahead_frames_shown": rate,
    }


def speed(pipe: Pipeline, repeats: int) -> dict[str, dict[str, float]]:
    """Time worlds on one sequence of runs, one row, variants interleaved.

    Returns:
        By steps and speculation: frames per second over all work, and the median time of a step in
        milliseconds where frames ahead are made between steps.
    """
    rng = np.random.default_rng(HELD_OUT_SEED)
    actions: list[str] = []
    while len(actions) < 40:
        last = actions[-1] if actions else ""
        action = rng.choice([a for a in board.ACTIONS if a != last])
        actions += [str(action)] * int(rng.integers(*RUNS))
    seconds: dict[str, list[float]] = {}
    waits: dict[str, list[float]] = {}
    for _ in range(repeats):
        for steps in STEPS:
            for speculate in ("none", "prefetch", "joint"):
                world = World(pipe, HELD_OUT_SEED, steps, speculate, AHEAD)
                name, began, took = f"{steps} {speculate}", time.perf_counter(), []
                for action in actions:
                    before = time.perf_counter()
                    world.step(action)
                    took.append(1000 * (time.perf_counter() - before))
                    if speculate == "prefetch":
                        world.ahead()
                seconds.setdefault(name, []).append(time.perf_counter() - began)
                waits.setdefault(name, []).append(median(took))
    return {
        name: {
            "frames_per_second": len(actions) / median(values),
            "step_milliseconds": median(waits[name]),
        }
        for name, values in seconds.items()
    }


def write_card(folder: Path, name: str, result: dict) -> None:
    """Write README.md into the model's folder."""
    rows, fast, near = result["quality"], result["speed"], f"{QUALITY[0]:g}"

    def line(steps: int, speculate: str) -> str:
        label = f"{steps} {speculate}"
        row, time_of = rows[f"{label} at {near}"], fast[label]
        return (
            f"| {steps} | {speculate} | {row['agent_long']:.3f} | {row['box_long']:.3f} |"
            f" {row['agent_all']:.3f} | {row['agent_first_error_tenth']:.0f} |"
            f" {time_of['frames_per_second']:.0f} |\n"
        )

    table = "".join(line(k, s) for k in STEPS for s in ("none", "joint"))
    ahead = "".join(
        f"| {r} | {row['frames_per_round']:.2f} | {row['expected']:.2f} |"
        f" {row['ahead_frames_shown']:.2f} |\n"
        for r, row in result["kept"].items()
    )
    (folder / "README.md").write_text(
        f"{CARD_HEAD}# {name}\n\nFrames of 16x16 pixels given an action and the seven frames"
        " before, a factorised transformer\n(`gen/models/nets/frames.py`) trained by shortcut"
        " forcing (`gen/models/nets/shortcut.py`). Trained from scratch\non roll-outs of a"
        " simulator (`modalities/world/board.py`), with\n`python -m gen.recipes.world all --work"
        " DIR`. No other data were used.\n\n"
        f"Measured on {result['sequences']} held-out starts (joint: the first {COMPARED}) with"
        f" {result['actions']} actions each, half of them repeated.\n*Agent*, *box*: share of clips"
        f" whose position is right for {LONG_ENOUGH} actions. *All*: the agent for all of them."
        "\n*Tenth*: actions before the agent's first error that nine of ten clips reach. Frames per"
        f" second: one row, one\nthread, actions in runs of {RUNS[0]} to {RUNS[1] - 1}.\n\n"
        "| steps | ahead | agent | box | all | tenth | frames per second |\n"
        "| --- | --- | --- | --- | --- | --- | --- |\n"
        f"{table}\n"
        f"Frames that a round of {AHEAD} keeps if an action is repeated with probability r:\n\n"
        "| r | frames per round | (1 - r^N) / (1 - r) | share of frames ahead shown |\n"
        "| --- | --- | --- | --- |\n"
        f"{ahead}"
    )
