"""The share of the time outside of forward passes: parts add up, and time that is spent on purpose
is found where it was spent."""

from __future__ import annotations

import json
import time
from importlib import import_module
from pathlib import Path

import pytest
import torch

import gen
from gen.__main__ import main
from gen.bench.measure import measure
from gen.bench.overhead import PassClock
from gen.bench.variants import Variant
from gen.core.errors import GenError
from gen.core.rng import CounterRNG
from gen.models.adapters.base import ModelAdapter
from gen.models.adapters.fast_llama import LeanLlama

PASSES = {"forward", "fill", "refine", "part"}


@pytest.fixture(scope="module")
def action():
    return gen.load("action", device="cpu")


def timed(pipe, name: str) -> dict:
    """Measurement of a sampler over one item."""
    items = pipe.plan(pipe.modality.example_prompts(1, 0), 1, 0)
    usual, sampling = pipe.defaults.complete(name, {})
    sampling = pipe.resolve(usual, sampling)[1].to_dict()
    variant = Variant(name, usual, sampling, name)
    return measure(pipe, items, variant, 1, None, check=False, overhead=True)


@pytest.mark.parametrize("name", ["autoregressive", "speculative", "maskgit"])
def test_passes_and_the_time_outside_are_the_time_of_the_loop(action, name):
    found = timed(action, name)
    parts = found["pass_seconds"], found["draft_seconds"], found["outside_seconds"]
    assert sum(parts) == pytest.approx(found["decoding_seconds"])
    assert all(x > 0 for x in (parts[0], parts[2])) and (parts[1] > 0) == (name == "speculative")
    assert found["decoding_seconds"] < found["seconds"]
    assert found["outside_share"] == pytest.approx(parts[2] / found["decoding_seconds"])


def slowed(monkeypatch, owner, name: str, seconds: float = 0.005) -> None:
    """Let every call of a method take longer."""
    method = getattr(owner, name)

    def slow(*args, **more):
        time.sleep(seconds)
        return method(*args, **more)

    monkeypatch.setattr(owner, name, slow)


def test_time_that_is_added_outside_or_inside_is_found_there(action, monkeypatch):
    """Control: one of the two sleeps is not in the other part."""
    plain = timed(action, "autoregressive")
    with monkeypatch.context() as patched:
        slowed(patched, CounterRNG, "categorical")
        outside = timed(action, "autoregressive")
    slowed(monkeypatch, LeanLlama, "run")
    inside = timed(action, "autoregressive")
    slept = 0.005 * plain["nfe"]
    assert outside["outside_seconds"] > slept > 4 * plain["outside_seconds"]
    assert outside["pass_seconds"] < slept and outside["outside_share"] > 0.5
    assert inside["pass_seconds"] > slept > inside["outside_seconds"]


def test_tokens_and_passes_are_those_of_a_plain_call(action):
    items = action.plan(action.modality.example_prompts(2, 0), 1, 0)
    spec = {"name": "speculative_jacobi"}
    clock, variant = PassClock(), Variant("x", spec, {}, "x")
    before = {kind: dict(vars(kind)) for kind in ModelAdapter.__subclasses__()}
    out, plain = clock.run(action, variant, items), action.generate(items, spec, {})
    assert torch.equal(out.tokens, plain.tokens)
    assert [s.nfe for s in out.stats] == [s.nfe for s in plain.stats]
    assert before == {kind: dict(vars(kind)) for kind in before}, "the classes are as they were"


def adapters(kind: type = ModelAdapter) -> list[type]:
    """All adapters of the package."""
    folder = Path(gen.__file__).parent / "models"
    for path in [*folder.glob("adapters/*.py"), *folder.glob("published/*.py")]:
        import_module(f"gen.models.{path.parent.name}.{path.stem}")
    found = [kind, *(x for sub in kind.__subclasses__() for x in adapters(sub))]
    return [x for x in found if x.__module__.startswith("gen.")]


def test_every_adapter_names_the_methods_that_run_its_network():
    kinds = adapters()
    assert len(kinds) > 10
    for kind in kinds:
        methods = {n for n in dir(kind) if n in PASSES or n.startswith("forward_")}
        if methods:
            assert set(kind.passes) == methods, kind


def test_the_command_prints_the_share(capsys, tmp_path):
    command = ["bench", "action", "--overhead", "--quick", "--batch-sizes", "1", "--prompts", "1"]
    command += ["--samplers", "sjd,maskgit", "--out", str(tmp_path / "o.json")]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].rstrip().endswith("outside of passes (min-max)")
    rows = json.loads((tmp_path / "o.json").read_text())["table"]
    assert [r["sampler"] for r in rows] == ["autoregressive", "sjd", "maskgit"]
    for row in rows:
        assert row["outside_least"] <= row["outside_share"] <= row["outside_most"] < 1
    assert main(["bench", "action", "--overhead", "--estimate", "h200"]) != 0
    assert "--overhead" in capsys.readouterr().err


def test_what_is_no_adapter_is_refused():
    class Plain:
        device = torch.device("cpu")

    with pytest.raises(GenError, match="ModelAdapter"), PassClock().watch([Plain()]):
        pass
