"""Adapter folders that somebody damaged or made to harm: each is merged with finite weights, or is
refused in one sentence."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import pytest
import torch
from bounded import bounded
from byte_folders import causal
from foreign import changed, require_held
from safetensors.torch import save_file

import gen
from gen.models.load import peft_adapters

LAYER = "base_model.model.model.layers.0.self_attn.q_proj"
FIELDS = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "peft_type", "bias", "use_dora",
          "use_rslora", "target_modules", "modules_to_save", "lora_bias")  # fmt: skip
VALUES = (
    None, True, -1, 0, 10**9, 10**30, 1.5, math.nan, math.inf, "", "x", "../..", [], [1], {},
    {"a": 1}, {"a": "b"}, {"a": None}, [[]],
)  # fmt: skip
PATTERNS = ("(a+)+$", "(.*)*x", "(.*.*.*.*.*)x", "(", "\\", "(?P<a>x)(?P=a)", "(.)\\1", "x{99999}",
            "x" * 1000, "[", "(?i", "*", "a{1,99999999999}", "(?<=a+)b")  # fmt: skip


def weights(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    pair = {"A": (2, 32), "B": (32, 2)}
    found = {
        f"{LAYER}.lora_{name}.weight": torch.randn(*shape, generator=generator)
        for name, shape in pair.items()
    }
    return {**found, **more}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return causal(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, model):
    made = tmp_path_factory.mktemp("adapter") / "good"
    made.mkdir()
    (made / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]})
    )
    save_file(weights(), made / "adapter_model.safetensors")
    assert merged(model, made)()
    return made


def merged(model: Path, adapter: Path):
    """Return a call that loads a model with an adapter, and says whether its weights are finite."""

    def call() -> bool:
        pipe = gen.load("text", model=model, adapters=adapter, max_new_tokens=2)
        network = pipe.bound(pipe.model)[0].model
        assert all(p.isfinite().all() for p in network.parameters()), "silently wrong"
        return len(pipe("abc", seed=0).media) == 1

    return call


def with_config(**values):
    def change(target: Path) -> None:
        path = target / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


def with_tensors(tensors: dict[str, torch.Tensor]):
    return lambda target: save_file(tensors, target / "adapter_model.safetensors")


def with_bytes(file: str, change):
    return lambda target: (target / file).write_bytes(change((target / file).read_bytes()))


A, B = (f"{LAYER}.lora_{name}.weight" for name in "AB")
TENSORS = {
    "nan": weights(**{A: torch.full((2, 32), math.nan)}),
    "inf": weights(**{B: torch.full((32, 2), math.inf)}),
    "another rank": weights(**{A: torch.ones(3, 32), B: torch.ones(32, 3)}),
    "another shape": weights(**{A: torch.ones(2, 31)}),
    "one axis": weights(**{A: torch.ones(64)}),
    "three axes": weights(**{A: torch.ones(2, 32, 1)}),
    "integers": weights(**{A: torch.ones(2, 32, dtype=torch.int64)}),
    "no half": {A: torch.ones(2, 32)},
    "no tensors": {"x": torch.ones(1)},
    "another layer": {key.replace("q_proj", "nothing"): v for key, v in weights().items()},
    "large": weights(**{A: torch.full((2, 32), 3e38), B: torch.full((32, 2), 3e38)}),
}
BYTES = {
    "empty": lambda raw: b"", "half": lambda raw: raw[: len(raw) // 2], "zeros": lambda raw: b"\0",
    "huge header": lambda raw: struct.pack("<Q", 2**62) + raw[8:],
    "deep": lambda raw: b"[" * 200_000, "no UTF-8": lambda raw: b"\xff" * 99,
    "list": lambda raw: b"[]", "null": lambda raw: b"null",
}  # fmt: skip


def changes() -> dict[str, object]:
    found = {f"tensors: {name}": with_tensors(tensors) for name, tensors in TENSORS.items()}
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        found |= {f"{file}: {name}": with_bytes(file, change) for name, change in BYTES.items()}
    for name in FIELDS:
        found |= {f"{name}: {value!r}": with_config(**{name: value}) for value in VALUES}
    for table in ("rank_pattern", "alpha_pattern"):
        found |= {f"{table}: {key[:9]}": with_config(**{table: {key: 2}}) for key in PATTERNS}
    return found


@pytest.mark.slow
def test_adapters_are_held(model, adapter, tmp_path):
    seen = {}
    for name, change in changes().items():
        seen[name] = bounded(merged(model, changed(adapter, tmp_path / "bad", change)))
        require_held(name, seen[name], tmp_path)
    assert len(seen) > 200
    assert {ended.how for ended in seen.values()} == {"returned", "refused"}
    for name in ("tensors: nan", "tensors: inf", "tensors: large", "rank_pattern: (a+)+$"):
        assert seen[name].how == "refused", (name, seen[name])


@pytest.mark.parametrize("value", ["x", math.nan, -1, [1], None])
def test_a_wrong_scale_is_named(model, adapter, tmp_path, value):
    bad = changed(adapter, tmp_path / "bad", with_config(lora_alpha=value))
    with pytest.raises(gen.GenError, match=r"lora_alpha of adapter .* is .*; expected a number"):
        peft_adapters.read_adapter(bad)


@pytest.mark.slow
def test_control_patterns_hang_without_the_rule(model, adapter, tmp_path, monkeypatch):
    monkeypatch.setattr(peft_adapters, "_require_pattern", lambda *_: None)
    change = with_config(rank_pattern={"([a-z._0-9]+)+!": 2})
    ended = bounded(merged(model, changed(adapter, tmp_path / "bad", change)), seconds=5)
    assert ended.how == "hung"


@pytest.mark.slow
def test_control_a_merge_of_large_numbers_is_seen(model, adapter, tmp_path, monkeypatch):
    monkeypatch.setattr(peft_adapters, "_require_finite", lambda *_: None)
    change = with_tensors(TENSORS["large"])
    ended = bounded(merged(model, changed(adapter, tmp_path / "bad", change)))
    with pytest.raises(AssertionError, match="silently wrong"):
        require_held("control", ended, tmp_path)
