"""Arguments that nobody can take: tensors, numbers beyond floating point, lists that contain
themselves, digits of other scripts ... Each is refused with the name of the argument."""

from __future__ import annotations

import dataclasses
import inspect
import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from byte_folders import causal

import gen
from gen.cli.parser import parse
from gen.contracts.condition import Condition
from gen.core import params
from gen.core.plain import is_digits, is_finite, require_plain
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.core.sampling_params import SAMPLING_FIELDS, SamplingParams
from gen.pipeline.pipeline import Pipeline


def looping() -> list:
    made: list = []
    made.append(made)
    return made


def nested(levels: int) -> list:
    made: list = []
    for _ in range(levels):
        made = [made]
    return made


def doubled(levels: int) -> list:
    """A list whose parts are shared, and would be 2^levels if they were not."""
    made: list = []
    for _ in range(levels):
        made = [made, made]
    return made


VALUES = {
    "tensor": torch.ones(3), "scalar tensor": torch.tensor(2), "no tensor": torch.ones(0),
    "array": np.ones(3), "objects": np.array([None, {}], dtype=object), "nan": math.nan,
    "inf": math.inf, "-inf": -math.inf, "huge": 10**400, "-huge": -(10**400), "null": "a\0b",
    "loop": looping(), "deep": nested(100_000), "doubled": doubled(60), "digits": "\u0663",
    "wide digits": "1\uff12", "bytes": b"x", "object": object(), "class": int, "half": "\ud800",
    "complex": 1j, "generator": (n for n in ()), "set": {1}, "none": None, "bool": True,
    "path": Path("/nonexistent/\0"), "nan of numpy": np.float64("nan"), "empty": "", "map": {1: 2},
}  # fmt: skip
ALIASES = {"prompts": "prompt", "torch_dtype": "dtype", "adapters": "adapter"}
FUNCTIONS = {"callback", "logits_processor"}  # what they raise is the caller's own
NAMES = {"model", "draft_model"}  # of what is not there


def refusals(name: str, call) -> int:
    """Call with every value; count those that are refused. All other errors fail, and so do
    messages without the argument's name."""
    found = 0
    for kind, value in VALUES.items():
        if name in FUNCTIONS and callable(value):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                call(value)
            except gen.GenError as error:
                said = str(error)
                found += 1
                named = ALIASES.get(name, name) in said or name in said
                assert named or name in NAMES or kind in ("none", "empty", "map"), (name, said)
                assert "\n" not in said and len(said) < 3000, (name, kind, said)
            except BaseException as error:
                pytest.fail(f"{name}={kind}: {type(error).__name__}: {error}")
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return causal(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def pipe(folder):
    return gen.load("text", model=folder, max_new_tokens=3)


@pytest.mark.parametrize("name", SAMPLING_FIELDS)
def test_sampling_parameters(name):
    assert refusals(name, lambda value: SamplingParams(**{name: value})) > 10


@pytest.mark.slow
@pytest.mark.parametrize("sampler", registry.table("sampler"))
def test_parameters_of_samplers(sampler):
    for field in dataclasses.fields(registry.get("sampler", sampler)):
        spec = {"name": sampler}
        found = refusals(field.name, lambda v, n=field.name: resolve_sampler({**spec, n: v}))
        assert found >= 8, field.name


CALL = [n for n in inspect.signature(Pipeline.__call__).parameters if n not in ("self", "options")]
MORE = ["adapter", "n", "num_images_per_prompt", "num_return_sequences", *SAMPLING_FIELDS]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CALL, *MORE])
def test_arguments_of_calls(pipe, name):
    assert refusals(name, lambda value: pipe(**{"prompts": "abc", "seed": 0, name: value})) >= 8


LOAD = (
    "modality", "model", "device", "dtype", "torch_dtype", "device_map", "trust_remote_code",
    "compile", "quantization", "adapters", "sparse_prefill", "batch_invariant", "cuda_graphs",
    "draft_model", "max_new_tokens", "chat", "generation_config", "revision", "token",
    "subfolder", "variant", "attn_implementation", "tp", "nothing",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", LOAD)
def test_options_of_load(folder, name):
    given = {"modality": "text", "model": folder}
    assert refusals(name, lambda value: gen.load(**{**given, name: value})) >= 8


@pytest.mark.parametrize("part", Condition.__dataclass_fields__)
def test_parts_of_conditions(part):
    refusals(part, lambda value: Condition.of({"text": "a", part: value}))


def test_contents_of_messages(pipe):
    for turn in ({"role": "user"}, {"content": "a"}):
        missing = "content" if "role" in turn else "role"

        def call(value, turn=turn, missing=missing):
            Condition.of({"messages": [{**turn, missing: value}]})

        refusals(missing, call)


@pytest.mark.parametrize("text", ["\u0663", "1\uff12", "1_0", " 1", "1e400", "0x10", "", "nan"])
def test_digits_of_flags_are_ascii(text):
    with pytest.raises(gen.GenError, match="num-samples"):
        parse(["sample", "image", "a ring", "-n", text])
    assert parse(["sample", "image", "a ring", "-n", "10"]).num_samples == 10


def test_trust_is_true_or_false_alone(folder):
    for value in ("no", "false", 1, 0, None, object()):
        with pytest.raises(gen.GenError, match="trust_remote_code"):
            gen.load("text", model=folder, trust_remote_code=value)


def test_plain_data():
    for value in (1, -1.5, "a", None, True, [1, {"a": (2, {3})}], Path("a"), len, int, {"a": []}):
        require_plain("x", value)
    for value in (VALUES["loop"], VALUES["deep"], [torch.ones(1)], {"a": [10**400]}, ["\0"]):
        with pytest.raises(gen.GenError, match="x is"):
            require_plain("x", value)
    assert is_finite(1) and is_finite(np.float32(2)) and not is_finite(True)
    assert not any(map(is_finite, (math.inf, 10**400, "1", 1j, None)))
    assert is_digits("10") and not any(map(is_digits, ("\u0663", "1\uff12", "", "-1", "\u00b2")))


def test_control_an_argument_that_nobody_checks_is_seen(monkeypatch):
    monkeypatch.setattr(params, "require_plain", lambda *_: None)
    monkeypatch.setattr("gen.core.resolve.require_plain", lambda *_: None)
    with pytest.raises(pytest.fail.Exception, match="window=array"):
        refusals("window", lambda v: resolve_sampler({"name": "speculative_jacobi", "window": v}))


def test_integers_of_more_than_64_bits_are_numbers(pipe):
    for name in ("temperature", "guidance_scale", "repetition_penalty", "presence_penalty"):
        assert getattr(SamplingParams(**{name: 10**30}), name) == 1e30
        assert isinstance(getattr(SamplingParams(**{name: 2}), name), int)
    for more in ({"temperature": 10**30}, {"logit_bias": {"7": -(10**30)}}):
        assert len(pipe("abc", seed=0, **more).media) == 1
    with pytest.raises(gen.GenError, match="logit_bias is .*expected a mapping of token ids"):
        SamplingParams(logit_bias={7: 10**400})


def test_a_message_is_cut():
    assert str(gen.GenError("a" * 9999)) == "a" * 9999
    assert len(str(gen.GenError("a" * 10**6))) == 10_000
