"""``window: auto`` in a job: measured once, kept in the folder, and the same for all that go on."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import gen
from gen.config.job import make_job
from gen.jobs import windows
from gen.jobs.progress.report import Lines
from gen.jobs.run import run_job
from gen.samplers.engine.window import Widths
from gen.store.ledger import RUNTIME, WINDOWS, read_plan, read_rows

PROMPTS: list[str] = []


def job(out: Path, sampler: dict, **keys):
    tree = {"modality": "action", "sampler": sampler, "prompts": PROMPTS, "out": str(out)}
    usual = {"num_samples": 2, "batch_size": 2, "shard_items": 2, "trace": 0}
    return make_job({**tree, **usual, **keys}, where="test")


def results(folder: Path) -> dict[str, dict]:
    return {r["id"]: {k: v for k, v in r.items() if k not in RUNTIME} for r in read_rows(folder)}


def choose(monkeypatch, window: int) -> list[int]:
    """Let the measurement say so; returns the list that grows with every measurement."""
    asked: list[int] = []

    def measure(pipe, entry, plans, progress):
        asked.append(len(plans))
        return {"window": window, "seconds": {}, "items": len(plans)}

    monkeypatch.setattr(windows, "measure_windows", measure)
    return asked


SJD = {"name": "sjd", "window": "auto"}


@pytest.fixture(scope="module")
def prompts():
    PROMPTS[:] = gen.load("action").modality.example_prompts(2, 0)


def test_a_resumed_job_has_the_window_that_it_began_with(prompts, tmp_path, monkeypatch):
    asked = choose(monkeypatch, 4)
    run_job(job(tmp_path / "whole", SJD))
    assert asked == [2]
    stops = iter([False] * 3 + [True] * 99)
    assert run_job(job(tmp_path / "cut", SJD), stop=lambda: next(stops))["stopped"]
    begun = len(read_rows(tmp_path / "cut"))
    assert 0 < begun < 4 and asked == [2, 2]
    other = choose(monkeypatch, 16)  # the machine is another one now
    run_job(job(tmp_path / "cut", SJD))
    assert results(tmp_path / "cut") == results(tmp_path / "whole") and other == []
    kept = json.loads((tmp_path / "cut" / WINDOWS / "0.json").read_text())
    assert kept["window"] == 4
    row = next(iter(results(tmp_path / "cut").values()))
    assert "auto" not in json.dumps(row), "a row says with which window it was made"


def test_a_measured_window_is_kept_and_not_announced(prompts, tmp_path, monkeypatch, capsys):
    """It stands in the folder and in every row: numbers of entries say nothing to a reader."""
    choose(monkeypatch, 4)
    run_job(job(tmp_path / "out", SJD, num_samples=1), progress=Lines())
    said = capsys.readouterr().err
    assert "window" not in said and "jobs." not in said
    assert "forward passes/item" in said  # control: the rest is said


def test_control_without_the_file_the_rows_are_others(prompts, tmp_path, monkeypatch):
    choose(monkeypatch, 4)
    run_job(job(tmp_path / "a", SJD))
    choose(monkeypatch, 16)
    run_job(job(tmp_path / "b", SJD))
    assert results(tmp_path / "a") != results(tmp_path / "b")
    plans = [read_plan(tmp_path / x) for x in "ab"]
    assert plans[0] == plans[1], "the plan is the same on every machine"


def test_the_window_is_measured_with_the_items_of_the_job(prompts, tmp_path):
    spec = {"name": "speculative_jacobi", "window": "auto"}
    run_job(job(tmp_path / "out", spec, num_samples=1, tokens=True))
    kept = json.loads((tmp_path / "out" / WINDOWS / "0.json").read_text())
    seconds = {int(w): s for w, s in kept["seconds"].items()}
    assert kept["window"] == min(seconds, key=seconds.get) and kept["items"] == 2
    assert all(s > 0 for s in seconds.values()) and min(seconds) == 1 < len(seconds)
    # the tokens do not depend on it: those of plain autoregression
    run_job(job(tmp_path / "plain", {"name": "autoregressive"}, num_samples=1, tokens=True))
    for path in sorted((tmp_path / "out").glob("*.tokens.npz")):
        ours, plain = np.load(path), np.load(tmp_path / "plain" / path.name)
        assert ours.files and all(np.array_equal(ours[k], plain[k]) for k in ours.files)


@pytest.mark.parametrize(("accepted", "widths"), [(0, [8]), (2, [8, 1])])
def test_where_hardly_a_draft_is_accepted_one_batch_tells(accepted, widths):
    """A control accepts 20 drafts in 100 passes, or 200: the clock then judges each width."""
    tried = []

    class Pipe:
        device = torch.device("cpu")

        def generate(self, plans, sampler, sampling, callback):
            tried.append(sampler["window"])
            made = SimpleNamespace(nfe=100, tokens=120 + 100 * accepted, seconds=len(tried))
            return SimpleNamespace(stats=[made] * len(plans))

    entry = SimpleNamespace(sampler=dict(SJD), sampling={})
    found = windows.measure_windows(Pipe(), entry, ["a", "b"], Lines())
    assert found["window"] == 1 and found["items"] == 2 and tried[: len(widths)] == widths
    assert bool(found["seconds"]) == bool(accepted)


class Ticking:
    """Pipeline that decodes 256 tokens; its clock takes so long for a pass of a width, times noise.
    Drafts are accepted as those of the image model are."""

    device = torch.device("cpu")
    passes = {1: 256, 4: 143, 8: 103, 16: 70, 32: 51, 64: 40, 128: 38}

    def __init__(self, monkeypatch, cost, noise):
        self.cost, self.noise, self.now, self.decoded = cost, noise, 0.0, []
        on = Widths.on

        def ticking(device, branches):
            return replace(on(device, branches), clock=lambda: self.now)

        monkeypatch.setattr(windows.Widths, "on", ticking)

    def generate(self, plans, sampler, sampling, callback):
        width = sampler["window"]
        passes = self.passes[width]
        self.decoded.append(width)
        began = self.now
        for step in range(passes):
            self.now += self.cost(width) * self.noise()
            callback({"done": 256 * (step + 1) // passes, "total": 256})
        made = SimpleNamespace(nfe=passes, tokens=256, seconds=self.now - began)
        return SimpleNamespace(stats=[made])


def bent(width):
    return 1 + width / 24


def flat(width):
    return 1.0


def chosen(monkeypatch, cost, noise) -> tuple[dict, list[int]]:
    with monkeypatch.context() as patch:
        pipe = Ticking(patch, cost, noise)
        entry = SimpleNamespace(sampler={"name": "speculative_jacobi"}, sampling={})
        return windows.measure_windows(pipe, entry, ["a"], Lines()), pipe.decoded


@pytest.mark.parametrize("cost", [bent, flat])
def test_under_a_noisy_clock_every_job_has_the_same_window(monkeypatch, cost):
    found = set()
    for seed in range(20):
        rng = np.random.default_rng(seed)
        made, decoded = chosen(monkeypatch, cost, lambda rng=rng: rng.uniform(1, 2))
        found.add((made["window"], made["by"], *decoded))
    assert len(found) == 1 and next(iter(found))[:2] == (32, "count")


def test_control_single_timings_give_several(monkeypatch):
    monkeypatch.setattr(Widths, "is_clear", lambda known, *widths: True)
    monkeypatch.setattr(windows.Widths, "choose", lambda k, rows, ws, far: max(
        ws, key=lambda w: k.gain(w) / k.seconds[rows, w][-1][1]
    ))  # fmt: skip
    found = set()
    for seed in range(20):
        rng = np.random.default_rng(seed)
        noise = lambda rng=rng: rng.uniform(1, 2)  # noqa: E731
        found.add(chosen(monkeypatch, bent, noise)[0]["window"])
    assert len(found) > 1


def test_a_clear_clock_overrules_counting_once_it_has_said_so_twice(monkeypatch):
    made, decoded = chosen(monkeypatch, flat, lambda: 1.0)
    assert made["by"] == "clock" and made["window"] == 128 and decoded[-2:] == [128, 32]
    steps, once = itertools.count(), sum(Ticking.passes.values())
    made, decoded = chosen(
        monkeypatch, lambda width: 1.0 if next(steps) < once else width, lambda: 1.0
    )
    assert decoded[-2:] == [128, 32] and (made["by"], made["window"]) == ("count", 32)


def test_a_window_that_is_a_number_is_not_measured(prompts, tmp_path, monkeypatch):
    asked = choose(monkeypatch, 4)
    run_job(job(tmp_path / "out", {"name": "sjd", "window": 8}, num_samples=1))
    assert asked == [] and not (tmp_path / "out" / WINDOWS).exists()


def test_overwriting_forgets_the_window(prompts, tmp_path, monkeypatch):
    choose(monkeypatch, 4)
    run_job(job(tmp_path / "out", SJD, num_samples=1))
    choose(monkeypatch, 8)
    run_job(job(tmp_path / "out", SJD, num_samples=1, seed=5, overwrite=True))
    assert json.loads((tmp_path / "out" / WINDOWS / "0.json").read_text())["window"] == 8
