"""A benchmark that is killed goes on where it ended, and mixes nothing; times that are noise are
not printed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gen.bench import records as ledger
from gen.bench import report
from gen.bench.records import Records
from gen.bench.run import bench
from gen.bench.speed import Cost
from gen.bench.speed import measured as measure_speed
from gen.bench.spread import noise
from gen.bench.table import NOTHING, render, tabulate
from gen.bench.variants import Variant
from gen.cli.parser import build
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.stats import Stats

MODALITY = "action"
PLAIN = ("bench", MODALITY, "--prompts", "2", "--repeats", "3", "--batch-sizes", "1,2")


class Pipe:
    """Counts what it decodes, and is killed at one of the calls."""

    device = torch.device("cpu")
    model = "toy"

    def __init__(self, killed_at: int | None = None):
        self.modality = registry.get("modality", MODALITY)()
        self.modality.judge = lambda media, given: SimpleNamespace(passed=True, valid=True)
        self.calls, self.killed_at = Counter(), killed_at

    def plan(self, prompts, num_samples, seed):
        return [SimpleNamespace(prompt=p, seed=seed, given=None) for p in prompts]

    def model_name(self, sampler):
        return "toy"

    def generate(self, items, sampler, sampling, **_):
        if sum(self.calls.values()) == self.killed_at:
            raise KeyboardInterrupt
        self.calls[sampler["name"], len(items), items[0].seed] += 1
        passes = 12 if sampler["name"] == "autoregressive" else 4
        return SimpleNamespace(
            media=[None for _ in items], stats=[Stats(passes, 12, 19, 19, 1.0) for _ in items]
        )


def run(pipe: Pipe, capsys, *argv: str) -> tuple[dict, str]:
    """Return the report of a benchmark, and what it said on stderr."""
    args = build().parse_args([*PLAIN, "--samplers", "sjd", "--json", *argv])
    assert bench(args, load=lambda name, **_: pipe) == 0
    out, err = capsys.readouterr()
    return json.loads(out), err


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- it goes on


@pytest.mark.parametrize("killed_at", [7, 10, 16])
def test_a_killed_benchmark_goes_on_where_it_ended(killed_at, here, capsys):
    whole = Pipe()
    wanted, _ = run(whole, capsys)
    cut = Pipe(killed_at)
    with pytest.raises(KeyboardInterrupt):
        run(cut, capsys)
    [path] = (here / "out/bench").glob("*.jsonl")
    made = [line for line in lines(path) if "run" in line]
    assert made, "they were written as they were made"
    rest = Pipe()
    found, said = run(rest, capsys)
    assert f"{len(made)} measurements are those of" in said
    counted = {key: n for key, n in (cut.calls + rest.calls).items()}
    assert sum(counted.values()) < sum(whole.calls.values()) + 6, "a call that was cut, a warm-up"
    keys = ("sampler", "batch_size", "repeat", "nfe", "tokens")
    assert [[r[k] for k in keys] for r in found["runs"]] == [
        [r[k] for k in keys] for r in wanted["runs"]
    ]
    which = ("sampler", "batch_size", "repeat")
    times = {tuple(r[k] for k in which): r["seconds"] for r in found["runs"]}
    first = {tuple(m["what"][k] for k in which): m["run"]["seconds"] for m in made}
    assert first.items() <= times.items(), "their times are those of the first run"
    assert not path.exists(), "the benchmark is over"


def test_control_without_its_file_all_is_measured_again(here, capsys):
    with pytest.raises(KeyboardInterrupt):
        run(Pipe(16), capsys)
    for path in (here / "out/bench").glob("*.jsonl"):
        path.unlink()
    rest, whole = Pipe(), Pipe()
    run(rest, capsys)
    run(whole, capsys)
    assert rest.calls == whole.calls


def test_a_named_file_stays_and_more_repeats_add_to_it(here, capsys):
    run(Pipe(), capsys, "--runs", "mine/runs.jsonl")
    first = lines(here / "mine/runs.jsonl")
    more = Pipe()
    found, _ = run(more, capsys, "--runs", "mine/runs.jsonl", "--repeats", "4")
    assert lines(here / "mine/runs.jsonl")[: len(first)] == first
    assert len(found["runs"]) == 4 * 2 * 2 and {seed for *_, seed in more.calls} == {0, 4}
    nothing = Pipe()
    run(nothing, capsys, "--runs", "mine/runs.jsonl", "--repeats", "4")
    assert not nothing.calls


def test_the_file_lies_beside_the_report(here, capsys):
    with pytest.raises(KeyboardInterrupt):
        run(Pipe(16), capsys, "--out", "b.json")
    assert (here / "b.jsonl").exists() and not (here / "b.json").exists()
    run(Pipe(), capsys, "--out", "b.json")
    assert (here / "b.json").exists() and not (here / "b.jsonl").exists()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("machine", lambda m: m.setattr(report, "device_name", lambda device: "another card")),
        ("source", lambda m: m.setattr(ledger, "source", lambda: "another commit")),
        ("weights", lambda m: m.setattr(ledger, "weights", lambda model: ["other weights"])),
    ],
)
def test_measurements_of_another_machine_or_commit_are_not_mixed_in(
    name, change, here, capsys, monkeypatch
):
    run(Pipe(), capsys, "--runs", "runs.jsonl")
    with monkeypatch.context() as patch:
        change(patch)
        other, fresh = Pipe(), Pipe()
        _, said = run(other, capsys, "--runs", "runs.jsonl")
        assert f"12 measurements in runs.jsonl are not used: other {name}" in said
        run(fresh, capsys)
        assert other.calls == fresh.calls
    back = Pipe()  # control: at home all are used
    run(back, capsys, "--runs", "runs.jsonl")
    assert not back.calls


@pytest.mark.parametrize("flag", [("--seed", "5"), ("--prompts", "1"), ("--dtype", "float64")])
def test_another_request_is_measured(flag, capsys):
    run(Pipe(), capsys, "--runs", "runs.jsonl")
    other = Pipe()
    run(other, capsys, "--runs", "runs.jsonl", *flag)
    assert other.calls


def test_a_line_that_was_not_written_whole_is_cut_off(here):
    path = here / "runs.jsonl"
    first = Records(path, {"seed": 0})
    first.add({"repeat": 0}, {"seconds": 1.0})
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"id": "torn')
    again = Records(path, {"seed": 0})
    assert len(again) == 1 and again.find({"repeat": 0}) == {"seconds": 1.0}
    again.add({"repeat": 1}, {"seconds": 2.0})
    assert len(lines(path)) == 3 and len(Records(path, {"seed": 0})) == 2


@pytest.mark.parametrize("text", ["[1]\n", '{"a": 1}\n', "words\n"])
def test_a_file_of_something_else_is_refused_and_kept(text, here):
    (here / "runs.jsonl").write_text(text)
    with pytest.raises(GenError, match="runs.jsonl holds something else; expected measurements"):
        Records(here / "runs.jsonl", {})
    assert (here / "runs.jsonl").read_text() == text


def test_runs_are_refused_where_nothing_is_timed():
    args = build().parse_args(["bench", MODALITY, "--oracle", "--runs", "runs.jsonl"])
    with pytest.raises(GenError, match="--runs is given; expected it without"):
        bench(args)


@pytest.mark.slow
def test_a_process_that_is_killed_loses_no_measurement(here):
    command = [sys.executable, "-m", "gen", *PLAIN, "--samplers", "sjd", "--runs", "runs.jsonl"]
    path = here / "runs.jsonl"
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while (not path.exists() or path.read_bytes().count(b"\n") < 4) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    made = [line for line in path.read_text().split("\n")[:-1]]
    assert 4 <= len(made) < 13
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"{len(made) - 1} measurements are those of runs.jsonl" in done.stderr
    found = path.read_text().split("\n")[:-1]
    assert found[: len(made)] == made
    whats = Counter(json.dumps(json.loads(line)["what"]) for line in found[1:])
    assert len(whats) == 12 and set(whats.values()) == {1}


def test_the_protocol_speed_goes_on_too(here, monkeypatch):
    decoded = []

    def decode(pipe, variant, items, size):
        decoded.append(variant.label)
        return [(4, 0, 12, 1.0) for _ in items]

    monkeypatch.setattr("gen.bench.speed.decoded", decode)
    monkeypatch.setattr(
        "gen.bench.speed.entropy_buckets", lambda *_: {("math", 0): "low", ("math", 1): "high"}
    )
    rows = [Variant(n, {"name": n}, {}, n) for n in ("autoregressive", "speculative")]
    about = Pipe(), rows, [1], {"math": ["a", "b"]}, 3, 0
    first = measure_speed(*about, Records(here / "runs.jsonl", {}))
    assert len(decoded) == 4 * 2 and all(isinstance(c, Cost) for c in first)
    assert measure_speed(*about, Records(here / "runs.jsonl", {})) == first and len(decoded) == 8


# --- where, and what is noise


def test_a_report_says_the_name_of_the_device(capsys, monkeypatch):
    _, said = run(Pipe(), capsys)
    name = report.device_name(torch.device("cpu"))
    assert name and f"on {name}, torch {torch.__version__}" in said
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA of the test")
    pipe = Pipe()
    pipe.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 0)
    found, said = run(pipe, capsys)
    assert "on NVIDIA of the test, torch" in said
    assert found["machine"]["device"] == "NVIDIA of the test"


def test_repeats_that_agree_are_no_noise():
    assert noise([1.0, 1.05, 1.1]) is None and noise([1.0, 1.0, 1.0, 1.0, 9.0]) is None
    assert noise([1.0, 1.5, 2.0]) == "the middle half of the repeats differs by 40%"
    assert noise([1.0]) == "1 of 3 repeats that a time needs"


def table_of(plain: list[float], fast: list[float], passes=(12.0, 12.0, 12.0)) -> str:
    usual = {
        "batch_size": 1, "items": 1, "draft_nfe": None, "tokens": 12, "tokens_computed": 12.0,
        "positions_computed": 12.0, "peak_memory": None, "acceptance_histogram": [],
        "passed": None, "valid": None, "unchecked": None,
    }  # fmt: skip
    runs = [
        {**usual, "sampler": name, "repeat": n, "seconds": s, "nfe": p / (1 + (name == "sjd"))}
        for name, times in (("autoregressive", plain), ("sjd", fast))
        for n, (s, p) in enumerate(zip(times, passes, strict=False))
    ]
    rows = [Variant(n, {"name": n}, {}, n) for n in ("autoregressive", "sjd")]
    return render(tabulate(runs, {}, rows))


def cells(text: str, sampler: str) -> list[str]:
    [line] = [line for line in text.splitlines() if line.startswith(sampler + " ")]
    return line.split()


def test_ratios_have_their_spread():
    text = table_of([1.0, 1.02, 1.04], [0.5, 0.5, 0.5])
    assert "2.04x (2.00-2.08)" in text and "0.5000 (0.5000-0.5000)" in text and " -: " not in text


def test_times_that_are_noise_leave_their_columns_empty_with_the_reason():
    text = table_of([1.0, 1.0, 1.0], [0.5, 1.0, 1.5])
    assert "2.00x" in text and cells(text, "sjd")[5:9] == [NOTHING, "2.00x", NOTHING, NOTHING]
    assert "\nfaster -: the middle half of the repeats differs by" in text
    assert "\ns per item -: the middle half of the repeats differs by 67% (sjd, batch 1)" in text
    assert cells(text, "autoregressive")[5] == "1.0000", "its own are printed"


def test_one_repeat_has_no_times():
    text = table_of([1.0], [0.5])
    assert "1.0000" not in text and text.count("1 of 3 repeats that a time needs") == 2


def test_a_machine_that_slows_down_evenly_leaves_the_ratio():
    text = table_of([1.0, 2.0, 3.0], [0.5, 1.0, 1.5])
    assert "2.00x (2.00-2.00)" in text and "s per item -" in text


def test_repeats_with_more_passes_are_no_noise():
    longer = (12.0, 24.0, 36.0)
    text = table_of([1.0, 2.0, 3.0], [0.5, 1.0, 1.5], longer)
    assert "2.0000 (1.0000-3.0000)" in text and " -: " not in text
    assert "s per item -" in table_of([1.0, 2.0, 3.0], [0.5, 1.0, 1.5])  # control
