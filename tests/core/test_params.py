"""Parameters of samplers: valid ones are taken, every mistake is named in one line."""

from __future__ import annotations

import pytest

from gen.core.errors import GenError
from gen.core.sampler import resolve_sampler
from gen.core.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("spec", "sampling", "said"),
    [
        ("speculative_jacoby", None, "Did you mean 'speculative_jacobi'"),
        ("scd_cm", None, "Did you mean 'scd_"),
        ("maskgti", None, "Did you mean 'maskgit'"),
        ({"name": "speculative_jacobi", "windw": 3}, None, "Did you mean 'window'"),
        ({"name": "sjd", "windows": 3}, None, "Did you mean 'window'"),
        ({"name": "masked_iterative", "step": 3}, None, "Did you mean 'steps'"),
        ({"name": "speculative_jacobi", "coupling": "gumble"}, None, "Did you mean 'gumbel'"),
        ({"name": "speculative_jacobi", "init": "repat"}, None, "Did you mean 'repeat'"),
        ({"name": "masked_iterative", "order": "haltom"}, None, "Did you mean 'halton'"),
        ({"name": "masked_iterative", "schedule": "cosin"}, None, "Did you mean 'cosine'"),
        ("sjd", {"temprature": 1.0}, "Did you mean 'temperature'"),
        ({"window": 3}, None, "has no name"),
        ({"name": 3}, None, "has no name"),
        ({"name": "speculative_jacobi", "window": 0}, None, "sampler.window is 0; expected"),
        ({"name": "speculative_jacobi", "window": 2.0}, None, "sampler.window is 2.0; expected"),
        ({"name": "speculative_jacobi", "window": True}, None, "sampler.window is True; expected"),
        ({"name": "masked_iterative", "steps": 0}, None, "sampler.steps is 0; expected"),
        ({"name": "masked_iterative", "exponent": 0}, None, "sampler.exponent is 0; expected"),
        (
            {"name": "masked_iterative", "choice_temperature": -1.0},
            None,
            "choice_temperature is -1.0; expected",
        ),
        (
            {"name": "masked_iterative", "choice_temperature": float("nan")},
            None,
            "choice_temperature is nan; expected",
        ),
        ("speculativ", None, "Did you mean 'speculative'"),
        (
            {"name": "speculative", "num_speculative_token": 3},
            None,
            "Did you mean 'num_speculative_tokens'",
        ),
        (
            {"name": "speculative", "num_speculative_tokens": 0},
            None,
            "sampler.num_speculative_tokens is 0; expected",
        ),
        ({"name": "speculative", "policy": "constnt"}, None, "Did you mean 'constant'"),
        ({"name": "speculative", "verifier": "blok"}, None, "Did you mean 'block'"),
        (
            {"name": "speculative", "verifier": "lantern"},
            None,
            "expected block or token; relaxed ones belong to",
        ),
        (
            {"name": "speculative", "confidence_threshold": 2},
            None,
            "sampler.confidence_threshold is 2; expected",
        ),
        (
            {"name": "speculative", "draft_temperature": -1.0},
            None,
            "sampler.draft_temperature is -1.0; expected",
        ),
        (
            {"name": "speculative", "draft_guidance": "2"},
            None,
            "sampler.draft_guidance is '2'; expected",
        ),
        ({"name": "speculative", "draft_model": 3}, None, "sampler.draft_model is 3; expected"),
        ({"name": "relaxed_acceptance", "verifier": "token"}, None, "expected a relaxed one"),
        ({"name": "relaxed_acceptance", "drafter": "jacoby"}, None, "Did you mean 'jacobi'"),
        (
            {"name": "relaxed_acceptance", "coupling": "gumbel"},
            None,
            "there is no acceptance to relax",
        ),
        (
            {"name": "lantern", "relaxation": 1.5},
            None,
            "sampler.relaxation is 1.5; expected a number between 0 and 1",
        ),
        (
            {"name": "gsd", "relaxation": 1.5},
            None,
            "sampler.relaxation is 1.5; expected a whole number",
        ),
        ({"name": "cool", "relaxation": -0.5}, None, "sampler.relaxation is -0.5; expected"),
        ({"name": "lantern", "window": 0}, None, "sampler.window is 0; expected"),
        (
            "jacobi",
            {"temperature": 1.0},
            "sampling.temperature is 1.0; the preset 'jacobi' means 0.0",
        ),
        ("sjd", {"top_p": 2}, "sampling.top_p is 2; expected"),
    ],
)
def test_mistakes_are_named_in_one_line(spec, sampling, said):
    with pytest.raises(GenError) as error:
        resolve_sampler(spec, sampling, "a.yaml")
    assert said in str(error.value) and "\n" not in str(error.value)


def test_what_is_right_is_taken():
    sampler, sampling = resolve_sampler({"name": "sjd", "window": 3}, {"top_k": 2})
    assert (sampler.window, sampler.coupling, sampling) == (3, "fresh", SamplingParams(top_k=2))
    assert (
        resolve_sampler("jacobi")[1].temperature
        == 0
        == resolve_sampler("jacobi", {"temperature": 0})[1].temperature
    )
    assert resolve_sampler(sampler, sampling) == (sampler, sampling)
