"""Fuzz of job files: every key with 25 wrong values ends as a job or as one error in one line."""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any

import pytest

from gen.config.job import make_job
from gen.config.layers import KEYS
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.sampling_params import SamplingParams

RING = "a small blue ring in the centre"
WRONG: list[Any] = [
    None, "", True, False, 0, -1, 1.5, 1e300, math.nan, math.inf, "x", "~", "\ud800", "a" * 5000,
    [], [1], ["a"], [[]], {}, {"a": 1}, {"name": [1]}, {"a": {"b": [1]}}, 2**70, "${x}", b"x",
]  # fmt: skip
ROW_KEYS = (
    "prompt id seed num_samples source mask span prefix frames sampler sampling meta"
    " sampler.window meta.a nope"
).split()


def sampler_keys(name: str) -> list[str]:
    own = [f.name for f in dataclasses.fields(registry.get("sampler", name))]
    return [f"sampler.{key}" for key in (*own, "aliases", "spellings", "protocol", "name", "nope")]


def tree(key: str, value: Any, sampler: str) -> dict[str, Any]:
    made: dict[str, Any] = {"modality": "image", "prompts": [RING], "sampler": {"name": sampler}}
    head, _, rest = key.partition(".")
    made[head] = {**made.get(head, {}), rest: value} if rest else value
    return made


def outcome(made: dict[str, Any], **how: Any) -> str:
    """Return the error of a job file, or an empty text. Any other exception fails the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            job = make_job(made, where="test", **how)
        except GenError as error:
            assert "\n" not in str(error) and 0 < len(str(error)) < 1500
            return str(error)
    job.to_yaml().encode()
    assert job.labels()
    return ""


def errors(keys: list[str], sampler: str = "speculative_jacobi") -> int:
    found = [outcome(tree(key, value, sampler)) for key in keys for value in WRONG]
    return sum(map(bool, found))


def test_every_key_of_a_job_file_takes_25_wrong_values_with_one_error_each():
    keys = [*KEYS, "model_options.a", "engine_options.a", "sweep.seed", "sweep.nope"]
    assert errors(keys) > 0.7 * len(keys) * len(WRONG)


def test_every_parameter_takes_25_wrong_values_with_one_error_each():
    keys = [f"sampling.{key}" for key in SamplingParams.__dataclass_fields__]
    keys += sampler_keys("speculative_jacobi")
    assert errors(keys) > 0.7 * len(keys) * len(WRONG)


@pytest.mark.slow
@pytest.mark.parametrize("name", registry.table("sampler"))
def test_every_sampler_takes_25_wrong_values_of_every_parameter(name):
    keys = sampler_keys(name)
    assert errors(keys, name) > 0.5 * len(keys) * len(WRONG)


def test_every_key_of_a_row_takes_25_wrong_values_with_one_error_each():
    base = {"modality": "image", "sampler": "sjd"}
    rows = [{"prompt": RING, key: value} for key in ROW_KEYS for value in WRONG]
    assert sum(bool(outcome({**base, "prompts": [row]})) for row in rows) > 0.6 * len(rows)


@pytest.mark.parametrize(
    "key, value",
    [
        ("modality", [1]),
        ("modality", {"a": 1}),
        ("sampler.coupling", ["gumbel", "maximal"]),
        ("sampler.init", {"a": 1}),
        ("sampler.aliases", 3),
        ("sampler.spellings", "x"),
    ],
)
def test_lists_and_class_attributes_are_refused_with_what_is_known(key, value):
    message = outcome(tree(key, value, "speculative_jacobi"))
    assert "Known: " in message or "expected" in message
    assert "aliases" not in message.partition("Known")[2]


@pytest.mark.parametrize("param", ["selector", "blocks", "cache", "order", "stop", "remasker",
                                   "schedule", "proposer"])  # fmt: skip
@pytest.mark.parametrize("value", [["a", "b"], {"a": 1}])
def test_a_part_of_a_masked_sampler_is_one_name(param, value):
    assert "Known: " in outcome(tree(f"sampler.{param}", value, "masked_iterative"))


@pytest.mark.parametrize("value", ["[", "[" * 3000, "{a", "!!x 1", "&a [*a]", "*b", "${x}", "@"])
@pytest.mark.parametrize("key", ["seed", "modality", "sampler.window", "out", "sweep.seed"])
def test_an_override_without_a_readable_value_is_refused(key, value):
    message = outcome({"modality": "image", "prompts": [RING]}, overrides=[f"{key}={value}"])
    assert message and key in message


def test_a_fault_that_is_no_error_of_a_user_fails_the_fuzz(monkeypatch):
    """Negative control."""
    monkeypatch.setattr("gen.config.job.plain", lambda value: value["nothing"])
    with pytest.raises(KeyError):
        errors(["model_options"])
