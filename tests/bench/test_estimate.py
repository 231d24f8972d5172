"""The cost model: counts are those of arithmetic, times those of rates, and the kernels, bytes and
waits of a round do not grow unnoticed."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import gen
from gen.__main__ import main
from gen.bench.estimate.cost import Estimator
from gen.bench.estimate.count import Kernel, Meter
from gen.bench.estimate.devices import DEVICES, Device, find_device, interpolated, write_device
from gen.bench.estimate.host_waits import ACCELERATOR, HostWaits
from gen.bench.estimate.machine import ROWS, measure_machine
from gen.bench.estimate.record import Pass, count_pass, record
from gen.core.errors import GenError
from gen.core.rng import CounterRNG
from gen.models.load.inflate import Shape, enlarged_config, inflate
from gen.models.load.locate import read_config
from gen.pipeline.request import GenerationRequest

COUNTS = Path(__file__).parent / "counts.json"
SAMPLERS = {
    "autoregressive": {"name": "autoregressive"},
    "speculative_jacobi": {"name": "speculative_jacobi", "window": 16},
    "sjd": {"name": "sjd"},
    "scd_mc": {"name": "scd_mc"},
    "speculative": {"name": "speculative"},
    "typical": {"name": "typical"},
    "maskgit": {"name": "maskgit"},
}


@pytest.fixture(scope="module")
def batch():
    pipe = gen.load("action", device="cpu")
    return pipe, pipe.plan(pipe.modality.example_prompts(2, 0), 1, 0)


@pytest.fixture(scope="module")
def recordings(batch):
    pipe, items = batch
    return {name: recorded(pipe, spec, items) for name, spec in SAMPLERS.items()}


@pytest.fixture(scope="module")
def waits():
    """Waits of a round by the name of the sampler."""
    return cache(lambda name: waits_by_round(SAMPLERS[name]))


def recorded(pipe, spec, items, accelerator=False):
    usual, sampling = pipe.defaults.complete(spec["name"], {})
    return record(pipe, {**usual, **spec}, sampling, items, accelerator)


def test_a_product_and_a_sum_are_counted_by_hand():
    x, weight = torch.ones(3, 5), torch.ones(7, 5)
    with HostWaits() as host, Meter() as meter:
        y = F.linear(x, weight)
        y.t().view(7, 3)  # views
        y.add_(1)
        float(y.sum())
        y[y > 0]
    assert meter.kernels[Kernel("matmul", 3, 4 * (15 + 35 + 21), 2 * 3 * 5 * 7)] == 1
    assert meter.kernels[Kernel("other", 0, 4 * (21 + 21), 0)] >= 1
    assert host.waits == ["_local_scalar_dense", "index"] and host.synchronisations == 2
    with Meter() as other:
        y.t()
    assert not other.kernels
    with Meter() as paused, paused.paused():
        F.linear(x, weight)
    assert not paused.kernels


def test_counts_on_no_device_are_those_of_a_real_forward():
    """Control of the meta device: a real pass of the same shape has the same kernels."""
    config = read_config("action-causal")
    one = Pass("action-causal", 2, 4, 9, 0, True, True)
    meta = count_pass(config, one, "float32")
    flops = sum(k.flops * n for k, n in meta.items() if k.kind == "matmul")
    shape = Shape.of(config)
    tables = config["vocab_size"] * (1 if config["tie_word_embeddings"] else 2)
    tables += sum(config["grid"]) + config["prefix_length"]
    norms = (2 * shape.layers + 1) * shape.width
    weights = shape.parameters - tables * shape.width - norms
    assert flops == 2 * 2 * 4 * (weights + config["vocab_size"] * shape.width)
    attended = [k for k in meta if k.kind == "attention"]
    assert sum(meta[k] for k in attended) == shape.layers
    assert attended[0].flops == 4 * 2 * 4 * shape.heads * shape.dim * 9


def test_costs_grow_with_size_and_passes_do_not(recordings):
    estimator = Estimator(DEVICES["h200"], "bfloat16")
    one = recordings["autoregressive"]
    config = read_config("action-causal")
    costs = [
        estimator.cost(
            one,
            {"action-causal": enlarged_config(config, Shape.of(config).enlarged(size), 0)},
        )
        for size in (85_000_000, 300_000_000, 1_000_000_000)
    ]
    weights = [2 * 85e6, 2 * 300e6, 2 * 1e9]
    for cost, size in zip(costs, weights, strict=True):
        bound = one.rounds / one.items * size / 4.8e12  # the weights once per pass
        assert bound * 0.97 < cost.memory + cost.compute < 1.5 * bound
    assert costs[0].loop == costs[1].loop == costs[2].loop > 0
    assert costs[0].memory < costs[1].memory < costs[2].memory


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.thinned(3)
def test_an_accelerator_is_charged_for_its_own_loop(batch, recordings, waits, name):
    """As many rounds as on a CPU, the waits that the guard below counts per round, and the kernels
    of what numpy does on a CPU."""
    plain, other = recordings[name], recorded(batch[0], SAMPLERS[name], batch[1], accelerator=True)
    assert (other.nfe, other.tokens, other.rounds) == (plain.nfe, plain.tokens, plain.rounds)
    assert (plain.waits, plain.uploads) == (0, 0)  # nobody waits for a CPU
    rounds = [w for of_round in waits(name) for w in of_round if w != "numpy"]
    around = 16  # before the first pass, and decoding the media
    assert len(rounds) <= other.waits <= len(rounds) + around
    assert other.rounds <= other.waits and sum(other.loop.values()) > sum(plain.loop.values())


def test_each_wait_of_an_accelerator_costs_a_launch(batch, monkeypatch):
    pipe, items = batch
    estimator, spec = Estimator(DEVICES["h200"], "bfloat16"), SAMPLERS["autoregressive"]
    one = recorded(pipe, spec, items, accelerator=True)
    cost = estimator.cost(one, {})
    free = estimator.cost(replace(one, waits=0, uploads=0), {})
    spent = (one.waits + one.uploads) * estimator.device.launch / one.items
    assert cost.loop - free.loop == pytest.approx(spent) and cost.memory == free.memory

    plain = CounterRNG.categorical  # control: a loop that asks for a value at every draw

    def slow(self, logprobs, *args, **more):
        float(logprobs.max())
        return plain(self, logprobs, *args, **more)

    monkeypatch.setattr(CounterRNG, "categorical", slow)
    assert recorded(pipe, spec, items, accelerator=True).waits >= one.waits + one.rounds


def test_rates_are_interpolated_and_looked_up():
    assert interpolated({1: 1.0, 4: 4.0}, 2) == pytest.approx(2.0)
    assert interpolated({1: 1.0, 4: 4.0}, 9) == 4.0
    device = Device("x", 100.0, {"float32": 1000.0}, 0.5, "test")
    assert device.parts(Kernel("matmul", 1, 200, 1000), "float32") == (2.0, 0.0, 0.5)
    assert device.parts(Kernel("matmul", 1, 50, 1000), "float32") == (0.0, 1.0, 0.5)
    for name, card in DEVICES.items():
        assert card.bandwidth > 1e11 and card.flops["bfloat16"] > 1e14 and card.source, name
    with pytest.raises(GenError, match="h200"):
        find_device("h20")
    with pytest.raises(GenError, match="bfloat16"):
        Estimator(DEVICES["h200"], "float64")


def test_the_command_needs_no_weights(capsys, tmp_path):
    """A folder with a config alone is estimated."""
    (tmp_path / "bare").mkdir()
    config = read_config("action-causal")
    larger = enlarged_config(config, Shape.of(config).enlarged(10_000_000), 0)
    (tmp_path / "bare" / "config.json").write_text(json.dumps(larger))
    bare = f"{Shape.of(larger).parameters / 1e6:.1f}M"
    for args in (["--inflate", "20M,85M"], ["--model", str(tmp_path / "bare")]):
        command = ["bench", "action", "--estimate", "h200", "--batch-sizes", "1", "--json"]
        command += ["--samplers", "speculative_jacobi", "--prompts", "1", *args]
        assert main(command) == 0
        rows = json.loads(capsys.readouterr().out)["estimates"]
        assert {r["sampler"] for r in rows} == {"autoregressive", "speculative_jacobi"}
        for r in rows:
            ratio = r["fewer_passes"] / (r["dearer_pass"] * r["rest"])
            assert r["faster"] == pytest.approx(ratio)
        sizes = {r["size"] for r in rows}
        assert sizes == ({"20M", "85M"} if "--inflate" in args else {bare})


@pytest.mark.parametrize(
    "args, said",
    [
        (["--estimate", "h20"], "h200"),
        (["--measured"], "--estimate here"),
        (["--estimate", "h200", "--measured"], "--estimate here"),
        (["--estimate", "h200", "--dtype", "float64"], "bfloat16"),
        (["--estimate", "no.json"], "gen doctor --measure"),
    ],
)
def test_bad_input_is_one_clear_error(capsys, args, said):
    assert main(["bench", "action", *args]) != 0
    text = capsys.readouterr().err.strip().splitlines()
    assert len(text) == 1 and said in text[0]


def test_a_measured_machine_is_written_and_read(tmp_path, monkeypatch, capsys):
    for name, value in (("POOL", 2**24), ("REPEATS", 1), ("ROWS", (1, 8))):
        monkeypatch.setattr(f"gen.bench.estimate.machine.{name}", value)
    monkeypatch.setattr("gen.cli.doctor.try_import", lambda name: "works")
    assert main(["doctor", "--measure", "--json", "--out", str(tmp_path / "told.json")]) == 0
    told = json.loads(capsys.readouterr().out)["measured"]
    assert find_device(str(tmp_path / "told.json")).bandwidth == told["bandwidth"] > 1e8
    assert main(["doctor", "--out", "x.json"]) != 0
    assert "--measure" in capsys.readouterr().err
    made = measure_machine()
    assert set(made.matmul) == {1, 8} and len(ROWS) > 2 and made.threads == 1
    (tmp_path / "here.json").write_text(json.dumps(write_device(made)))
    assert find_device(str(tmp_path / "here.json")) == made


def counts(recording, rounds_of_waits) -> dict[str, float]:
    """Kernels and bytes of the loop on a CPU, outside of the networks, its forward passes, and how
    often it waits for an accelerator."""
    loop, rounds = recording.loop, recording.rounds
    return {
        "passes": sum(recording.passes.values()),
        "rounds": rounds,
        "kernels": sum(loop.values()),
        "bytes": sum(k.bytes * n for k, n in loop.items()),
        "waits": sum(map(len, rounds_of_waits)),
    }


def waits_by_round(spec) -> list[list[str]]:
    """What the loop waits for from one forward pass of the model to the next, where tensors say
    that they lie on an accelerator (``host_waits``)."""
    pipe = gen.load("action", device="cpu")
    items = pipe.plan(pipe.modality.example_prompts(2, 0), 1, 0)
    usual, sampling = pipe.defaults.complete(spec["name"], {})
    sampler, params = pipe.resolve({**usual, **spec}, sampling)
    prepared = pipe.prepare(GenerationRequest(items, {**usual, **spec}, sampler, params))
    target, meter, marks = prepared.target, HostWaits(), []
    predict = target.predict
    target.predict = lambda *args: (marks.append(len(meter.waits)), predict(*args))[1]
    for one in (target, *prepared.drafts):
        one.device = ACCELERATOR
    with meter:
        sampler(target, CounterRNG([pipe.draw_key(item) for item in items]), draft=prepared.draft)
    return [meter.waits[a:b] for a, b in itertools.pairwise([*marks, len(meter.waits)])]


def grown(now: dict, then: dict) -> list[str]:
    """What grew by more than 2 % per round."""
    return [
        f"{name}.{key}: {found[key] / found['rounds']:.1f} per round, was"
        f" {then[name][key] / then[name]['rounds']:.1f}"
        for name, found in now.items()
        for key in ("kernels", "bytes", "waits", "passes")
        if found[key] / found["rounds"] > 1.02 * then[name][key] / then[name]["rounds"]
    ]


def test_no_sampler_does_more_per_round_than_before(recordings, waits):
    """Regression guard without a clock. ``counts.json`` is written anew on purpose only: delete it
    and run this test."""
    now = {name: counts(one, waits(name)) for name, one in recordings.items()}
    if not COUNTS.exists():
        COUNTS.write_text(json.dumps(now, indent=1) + "\n")
        pytest.fail("counts.json was not there and has been written; look at it and commit it")
    then = json.loads(COUNTS.read_text())
    assert now.keys() == then.keys() and not grown(now, then)


def test_the_guard_notices_more_kernels_and_waits(recordings, monkeypatch):
    """Control: a loop that copies its logits and reads a value per forward pass."""
    plain = CounterRNG.categorical

    def slow(self, logprobs, *args, **more):
        float((logprobs + 0).max())
        return plain(self, logprobs, *args, **more)

    monkeypatch.setattr(CounterRNG, "categorical", slow)
    pipe = gen.load("action", device="cpu")
    items = pipe.plan(pipe.modality.example_prompts(2, 0), 1, 0)
    name = "speculative_jacobi"
    slower = waits_by_round(SAMPLERS[name])
    now = {name: counts(recorded(pipe, SAMPLERS[name], items), slower)}
    said = grown(now, json.loads(COUNTS.read_text()))
    assert any(f"{name}.kernels" in x for x in said) and any(f"{name}.waits" in x for x in said)


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.thinned(3)
def test_a_round_waits_for_one_copy_to_the_host(waits, name):
    """Rounds after which no row leaves, draft model and drafts of a window included."""
    rounds = waits(name)
    assert sum(one == ["cpu", "numpy"] for one in rounds[:-1]) >= len(rounds) - 2


@pytest.mark.slow
def test_the_estimate_is_near_the_clock(tmp_path, capsys):
    """Within a factor of 2 on a busy machine; the exact check is a command of docs/bench.md."""
    inflate("action-causal", 20_000_000, tmp_path / "action-causal")
    command = ["bench", "action", "--model", str(tmp_path / "action-causal")]
    command += ["--estimate", "here", "--measured", "--batch-sizes", "1", "--prompts", "1"]
    assert main([*command, "--samplers", "speculative_jacobi", "--json", "--repeats", "2"]) == 0
    for row in json.loads(capsys.readouterr().out)["estimates"]:
        assert 0.5 < row["seconds"] / row["measured"] < 2


def test_modules_without_a_fast_forward_are_refused():
    config = {**read_config("action-causal"), "mlp_bias": True}
    with pytest.raises(GenError, match="no plain Llama"):
        count_pass(config, Pass("x", 1, 1, 1, 0, True, False), "float32")


PAGE = Path(__file__).parents[2] / "docs" / "benchmarks-gpu.md"


@pytest.mark.slow
def test_the_page_of_accelerators_holds_what_its_command_prints(capsys):
    """At batch 1 and one window; published peaks and counted kernels leave nothing to chance."""
    command = ["bench", "image", "--estimate", "h200", "--inflate", "300M,1B", "--batch-sizes", "1"]
    command += ["--samplers", "speculative_jacobi", "--sweep", "window=16", "--markdown"]
    assert main(command) == 0
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    on_page = set(PAGE.read_text().splitlines())
    assert len(printed) == 6 and set(printed) <= on_page
    other = printed[-1].replace("3.66x", "3.67x")  # control
    assert other != printed[-1] and other not in on_page
