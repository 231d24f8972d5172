"""Parameters of samplers: valid ones are taken, every mistake is named in one line."""

from __future__ import annotations

import warnings
from dataclasses import FrozenInstanceError, asdict, dataclass, make_dataclass, replace

import pytest

from gen.core.errors import GenError
from gen.core.method import presets
from gen.core.params import Params, Rule, check, declared, integer, param, part
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
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
            "expected block or follow or greedy or k_seq or recursive or token or traversal",
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


# --- parameters that parts declare


def test_a_sampler_has_the_parameters_of_all_parts_it_can_be_made_of():
    sampler = resolve_sampler({"name": "klass", "history": 3})[0]
    assert (sampler.selector, sampler.kl_threshold, sampler.history) == ("klass", 0.01, 3)
    assert {"kl_threshold", "credit_weight", "cache_window"} <= set(asdict(sampler))
    changed = replace(sampler, kl_threshold=0.5)
    assert (changed.kl_threshold, changed.history) == (0.5, 3) and changed != sampler
    assert replace(changed, kl_threshold=0.01) == sampler
    assert hash(replace(sampler)) == hash(sampler)
    with pytest.raises(FrozenInstanceError):
        sampler.history = 4
    with pytest.raises(TypeError, match="no parameter 'histori'"):
        type(sampler)(histori=3)


def test_a_parameter_that_nothing_reads_is_named_with_the_parts_it_belongs_to():
    with pytest.warns(UserWarning, match="belongs to selector 'klass'; here selector is 'thres"):
        resolve_sampler({"name": "fast_dllm", "kl_threshold": 0.5})
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the control: what is read, and what is a preset's own
        resolve_sampler({"name": "fast_dllm", "conf_threshold": 0.5})
        resolve_sampler({"name": "klass", "kl_threshold": 0.5})
        resolve_sampler({"name": "eb", "choice_temperature": 0.0})


def test_what_holds_only_where_a_part_is_chosen_is_checked_there():
    with pytest.raises(GenError, match="block_length is 0; expected .* where blocks is 'sliding'"):
        resolve_sampler({"name": "masked_iterative", "blocks": "sliding"})
    resolve_sampler({"name": "masked_iterative", "blocks": "whole"})


@pytest.mark.parametrize("default", [2, 3])
def test_two_parts_must_agree_on_a_parameter_that_both_declare(default, monkeypatch):
    params = make_dataclass(
        "Other", [("history", "int", integer(default))], bases=(Params,), frozen=True
    )
    assert registry.get("selector", "klass")
    monkeypatch.setitem(registry._kinds["selector"], "zz_other", lambda step: step.masked)
    monkeypatch.setitem(registry._params, ("selector", "zz_other"), params)
    if default == 2:
        assert ("selector", "zz_other") in declared(["selector"])["history"][1]
    else:
        with pytest.raises(GenError, match="'zz_other' declares history: int = 3, and 'selector'"):
            declared(["selector"])


def test_parameters_check_themselves():
    with pytest.raises(GenError, match="sampler.kl_threshold is -1; expected a number of at least"):
        registry.params_of("selector", "klass")(kl_threshold=-1)
    assert registry.params_of("selector", "schedule") is None


# --- declarations


@dataclass(frozen=True)
class Declared:
    """Parameters of no sampler, with a rule between two of them."""

    verifier: str = part("token", "verifier")
    width: int | str = param(1, int, 1, also=("auto",))
    share: float | None = param(None, float, 0, 1, also=(None,))
    redraft: bool | str = param(False, bool, also=("replace",))

    rules = (
        Rule(
            "width",
            lambda s: s.width == 1 or s.verifier in ("follow", "recursive"),
            "1 with {verifier}; {verifier?}, {verifier?and} or {verifier?,} take {width}",
        ),
        Rule(
            "share",
            lambda s: s.share != 0.5,
            lambda s: f"another than {s.share:g}",
            got=lambda s: "half",
        ),
    )


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"width": 0}, "sampler.width is 0; expected an integer of at least 1, or auto"),
        ({"width": True}, "sampler.width is True; expected an integer of at least 1, or auto"),
        ({"share": 2}, "sampler.share is 2; expected a number between 0 and 1, or None"),
        ({"share": False}, "sampler.share is False; expected a number between 0 and 1, or None"),
        ({"redraft": 1}, "sampler.redraft is 1; expected true, false or replace"),
        ({"share": 0.5}, "sampler.share is 'half'; expected another than 0.5"),
        (
            {"width": 2},
            "sampler.width is 2; expected 1 with token; follow or recursive, follow and recursive"
            " or follow, recursive take 2",
        ),
    ],
)
def test_a_declaration_refuses_what_it_does_not_state(values, said):
    with pytest.raises(GenError) as error:
        check(Declared(**values))
    assert str(error.value) == said


def test_what_a_declaration_states_is_taken():
    check(Declared(width="auto", verifier="follow", share=1, redraft="replace"))
    check(Declared(width=3, verifier="recursive", share=0.0, redraft=True))


def test_a_table_of_presets_is_checked_when_it_is_made():
    for row, said in (({"widht": 2}, "Did you mean 'width'"), ({"width": 0}, "width is 0")):
        with pytest.raises(GenError, match=said):
            presets("none", Declared, zz_preset=row)
    assert "zz_preset" not in registry.table("preset")
