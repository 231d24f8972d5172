"""Measurements on an accelerator: saved one by one, taken up again, without optional packages, and
against a network of the same mathematics."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gen.bench.card import __main__ as card
from gen.bench.card.minimal import Minimal
from gen.bench.card.plan import KINDS, Measurement, full, grid, quick
from gen.bench.card.tables import tables
from gen.core.errors import GenError
from gen.models.load.inflate import Shape

ROOT = Path(__file__).parents[2]
MISSING = ("accelerate", "diffusers", "omegaconf", "shtab", "soundfile", "torchaudio", "torchao")
# finds packages as little as if they were not installed, and then runs a module
WITHOUT = """
import runpy, sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        missing = name.split(".")[0] in missing_packages
        return None if missing else PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Finder if f is PathFinder else f for f in sys.meta_path]
del sys.argv[0]
missing_packages = sys.argv.pop(0).split(",")
runpy.run_module(sys.argv[0], run_name="__main__")
"""
QUICK = ["gen.bench.card", "--quick", "--device", "cpu", "--out"]


class Counted:
    """Part that counts its calls; see ``KINDS`` below."""

    calls: list[str] = []

    def __init__(self, device: str):
        self.device = device

    def measure(self, what: str, option: str = "none") -> dict[str, float]:
        self.calls.append(what)
        if what == "late":
            time.sleep(5)
        if what == "killed" and self.calls.count(what) == 1:
            raise KeyboardInterrupt
        if what == "broken":
            raise RuntimeError("no kernel")
        if what == "refused":
            raise GenError("no such device; expected another")
        return {"share": 0.25}


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setitem(KINDS, "counted", (f"{__name__}:Counted", "measure", 0.2))
    monkeypatch.setattr(card, "resolve_name", lambda where: Counted)
    Counted.calls = []
    return lambda card="a card": Results(tmp_path, card)


def Results(folder, name):
    return card.Results(folder, {"card": name, "quick": True})


def counted(*what: str) -> list[Measurement]:
    return list(grid("counted", what=list(what)))


def test_a_killed_run_goes_on_where_it_ended(results):
    plan = counted("first", "killed", "last")
    with pytest.raises(KeyboardInterrupt):
        card.run(plan, results(), "cpu", 1)
    assert list(results().made) == ["counted what first"]
    assert card.run(plan, results(), "cpu", 1) == 0
    assert Counted.calls == ["first", "killed", "killed", "last"]
    assert {r["found"]["share"] for r in results().made.values()} == {0.25}


def test_what_failed_is_measured_again_after_what_has_no_result(results):
    plan = counted("broken", "late", "refused", "last")
    for _ in range(2):
        assert card.run(plan, results(), "cpu", 1) == 0
    again = ["broken", "late", "refused"]
    assert Counted.calls == [*again, "last", *again]
    found = {r["args"]["what"]: r for r in results().made.values()}
    assert found["broken"]["found"] == {"error": "RuntimeError: no kernel"}
    assert found["late"]["found"] == {"error": "it took more than 0 s"}
    assert found["refused"]["found"] == {"refused": "no such device; expected another"}
    assert [k for k, r in found.items() if r["failed"]] == again
    plan = counted("broken", "new")
    card.run(plan, results(), "cpu", 1)
    assert Counted.calls[-2:] == ["new", "broken"]


def test_a_device_that_refuses_an_option_has_said_so(results):
    plan = list(grid("counted", what="refused", option="batch_invariant"))
    card.run(plan, results(), "cpu", 1)
    card.run(plan, results(), "cpu", 1)
    assert Counted.calls == ["refused"] and not any(r["failed"] for r in results().made.values())


def test_what_the_end_of_the_time_cuts_off_is_left(results):
    assert card.run(counted("first", "late", "last"), results(), "cpu", 0.1 / 60) == 2
    assert list(results().made) == ["counted what first"]


def test_nothing_begins_after_the_time_is_over(results):
    assert card.run(counted("first", "last"), results(), "cpu", 0) == 2
    assert Counted.calls == []


def test_another_card_has_a_file_of_its_own(results):
    card.run(counted("first"), results(), "cpu", 1)
    assert list(results().made) and not results("another").made
    assert results().path != results("another").path


def test_a_device_that_is_not_there_is_refused(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("the device is there")
    with pytest.raises(GenError, match="--device is cuda, and PyTorch sees none"):
        card.main(["--out", str(tmp_path)])


def test_tables_have_the_arguments_that_differ_and_what_was_found():
    made = [
        {"kind": "image", "args": {"dtype": "bfloat16", "batch": 1}, "found": {"equal": 0.5}},
        {"kind": "image", "args": {"dtype": "bfloat16", "batch": 3}, "found": {"refused": "no"}},
        {"kind": "wall", "args": {"rows": 2}, "found": {"step": {"ms": 2, "least": 1, "most": 4}}},
    ]
    text = tables({"card": "a card", "driver": None}, made)
    assert "card a card" in text and "driver" not in text
    assert "image: dtype bfloat16\n\n| batch | equal | refused |" in text
    assert "| 1 | 0.500 | - |\n| 3 | - | no |" in text
    assert "wall: rows 2\n\n| step |\n| --- |\n| 2.00 ms (1.00–4.00) |" in text


@pytest.mark.parametrize("plan", [full(), quick()], ids=["full", "quick"])
def test_plans_name_every_kind_and_every_measurement_once(plan):
    names = [one.name for one in plan]
    assert len(set(names)) == len(names)
    assert {one.kind for one in plan} == set(KINDS) - {"counted"}


def test_the_minimal_network_computes_a_llama():
    shape = Shape(width=32, layers=2, heads=4, groups=2, dim=8, inner=48, tables=0)
    ours = Minimal(shape, "cpu", torch.float64)
    config = LlamaConfig(
        vocab_size=ours.vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-6,
    )  # fmt: skip
    network = LlamaForCausalLM(config).double().eval()
    network.model.embed_tokens.weight.data = ours.embeddings
    network.lm_head.weight.data = ours.head
    for layer, (qkv, out, gate_up, down) in zip(network.model.layers, ours.layers, strict=True):
        q, k, v = qkv.split([32, 16, 16])
        gate, up = gate_up.chunk(2)
        mine = layer.self_attn, layer.self_attn, layer.self_attn, layer.self_attn
        names = ("q_proj", q), ("k_proj", k), ("v_proj", v), ("o_proj", out)
        for part, (name, weight) in zip(mine, names, strict=True):
            getattr(part, name).weight.data = weight
        for name, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
            getattr(layer.mlp, name).weight.data = weight
    ids, cache = torch.randint(ours.vocab, (3, 9)), ours.new_cache(3)
    parts = [
        ours.forward(ids[:, at : at + 4], torch.arange(at, min(at + 4, 9)), cache)
        for at in (0, 4, 8)
    ]
    with torch.no_grad():
        expected = network(ids).logits
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-5, atol=1e-5)


def started(*argv: str, missing: tuple[str, ...] = MISSING) -> subprocess.Popen:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WITHOUT, ",".join(missing), *argv]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def saved(folder: Path) -> dict[str, dict]:
    files = list(folder.glob("cpu-*.json"))  # temporary ones have another name
    return json.loads(files[0].read_text())["results"] if files else {}


@pytest.mark.slow
def test_without_transformers_the_minimal_network_is_measured(tmp_path):
    run = started(*QUICK, str(tmp_path), missing=(*MISSING, "transformers"))
    assert b"13 failed, 0 are left" in run.communicate()[0] and run.returncode == 1
    found = {r["kind"]: r["found"] for r in saved(tmp_path).values()}
    assert found.pop("bits")["chunks 1"] == 1
    assert {x["error"] for x in found.values()} == {
        "ModuleNotFoundError: No module named 'transformers'"
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", MISSING)
def test_packages_are_missing_where_the_command_runs(name):
    """The control of the next test."""
    run = started(name)
    assert b"No module named" in run.communicate()[0] and run.returncode == 1


@pytest.mark.slow
def test_the_quick_run_needs_no_optional_package_and_survives_a_kill(tmp_path):
    run = started(*QUICK, str(tmp_path))
    while len(saved(tmp_path)) < 2:
        assert run.poll() is None, run.communicate()[0].decode()
        time.sleep(0.05)
    run.send_signal(signal.SIGKILL)
    run.communicate()
    before = saved(tmp_path)

    run = started(*QUICK, str(tmp_path))
    told = run.communicate()[0].decode()
    assert run.returncode == 0, told
    after = saved(tmp_path)
    assert {name: after[name] for name in before} == before  # seconds too
    assert [name for name in before if f"{name}: done" in told] == []
    assert list(after) == [one.name for one in quick()]
    page = next(tmp_path.glob("*.md")).read_text().strip()
    assert page in told

    def found(kind, **args):
        mine = [
            r for r in after.values() if r["kind"] == kind and args.items() <= r["args"].items()
        ]
        assert mine
        return [r["found"] for r in mine]

    # parity, and what has none: other widths without the option, and altered weights
    assert all(x["equal tokens"] == 1 for x in found("image", option="batch_invariant"))
    assert found("image", option="none", window=16)[0]["equal tokens"] < 1
    assert all("cuda_graphs" in x["refused"] for x in found("image", option="cuda_graphs"))
    assert found("control", altered=0.0)[0]["equal tokens"] == 1
    assert found("control", altered=0.5)[0]["equal tokens"] < 0.9
    assert set(found("bits", rows=32)[0].values()) == {1}
    assert min(found("bits", rows=0)[0].values()) < 1
    texts = found("text")[0]
    assert texts["compared"] == texts["equal"] > 10
    for wall in found("wall"):
        assert wall["step / least minimal"] == wall["step"]["ms"] / wall["minimal"]["ms"]
        assert 0 < wall["pass"]["least"] <= wall["pass"]["ms"] <= wall["pass"]["most"]
    (decode,) = found("decode")
    assert decode["fewer passes"] > 2  # the enlarged model accepts what the small one does
    (launched,) = found("launches")
    assert launched["step"] > launched["pass"] > 50
