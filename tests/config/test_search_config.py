"""Searches in job files, overrides and sweeps: parameters of the base, digests and errors."""

from __future__ import annotations

import pytest

from gen.config.entries import fingerprint
from gen.config.job import make_job
from gen.core.errors import GenError


def job(sampler, *overrides, **keys):
    tree = {"modality": "image", "prompts": ["a red ring"], "sampler": sampler, **keys}
    return make_job(tree, overrides, where="job.yaml")


def sampler_of(*args, **keys):
    return job(*args, **keys).entries[0].sampler


def test_overrides_reach_the_parameters_of_the_base():
    said = sampler_of("best_of", "sampler.base=maskgit", "sampler.base.steps=5")
    assert said["name"] == "best_of"
    assert (said["base"]["name"], said["base"]["steps"]) == ("maskgit", 5)


def test_an_override_adds_to_the_base_of_the_file():
    base = {"name": "maskgit", "steps": 5, "choice_temperature": 3.0}
    said = sampler_of({"name": "best_of", "base": base}, "sampler.base.steps=7")["base"]
    assert (said["steps"], said["choice_temperature"]) == (7, 3.0)


def test_an_override_with_a_name_replaces_the_base():
    base = {"name": "maskgit", "steps": 5}
    said = sampler_of({"name": "best_of", "base": base}, "sampler.base=sjd")["base"]
    assert said["name"] == "sjd" and "steps" not in said


def test_the_default_base_is_that_of_the_model():
    assert sampler_of("best_of")["base"]["name"] == "speculative_jacobi"
    said = sampler_of("best_of", "sampler.base.steps=5", model="image-masked")["base"]
    assert (said["name"], said["steps"]) == ("maskgit", 5)


def test_a_budget_is_a_mapping_or_a_text():
    assert sampler_of("best_of", "sampler.budget.passes=500")["budget"] == {"passes": 500}
    assert sampler_of("best_of", "sampler.budget=500 passes")["budget"] == "500 passes"


def test_equal_searches_have_equal_digests():
    spelled = [
        job({"name": "best_of", "base": "sjd"}),
        job({"name": "best_of", "base": {"name": "sjd"}}),
        job({"name": "best_of", "base": {"name": "sjd", "window": 16}}),
        job("best_of", "sampler.base=sjd", "sampler.base.window=16"),
    ]
    assert len({fingerprint(one) for one in spelled}) == 1


def test_control_another_base_has_another_digest():
    one = fingerprint(job({"name": "best_of", "base": "sjd"}))
    assert one != fingerprint(job({"name": "best_of", "base": {"name": "sjd", "window": 8}}))
    assert one != fingerprint(job({"name": "best_of", "base": "autoregressive"}))


def test_a_job_survives_its_own_file():
    tree = job({"name": "svdd", "base": {"name": "maskgit", "steps": 3}, "m": 2}).to_dict()
    assert fingerprint(make_job(tree, where="again")) == fingerprint(
        job({"name": "svdd", "base": {"name": "maskgit", "steps": 3}, "m": 2})
    )


def test_sweeps_reach_the_base_and_name_entries_by_it():
    swept = job("best_of", sweep={"sampler.n": [1, 2], "sampler.base": ["sjd", "maskgit"]})
    assert swept.labels() == [
        "best_of base=sjd n=1",
        "best_of base=maskgit n=1",
        "best_of base=sjd n=2",
        "best_of base=maskgit n=2",
    ]
    deep = job(
        {"name": "best_of", "base": {"name": "maskgit"}}, sweep={"sampler.base.steps": [2, 4]}
    )
    assert [e.sampler["base"]["steps"] for e in deep.entries] == [2, 4]
    assert deep.labels() == ["best_of base.steps=2", "best_of base.steps=4"]


def test_a_row_sets_parameters_of_the_base():
    rows = [{"prompt": "a red ring", "sampler": {"base": {"steps": 3}}}]
    entry = job({"name": "best_of", "base": {"name": "maskgit", "steps": 9}}, prompts=rows)
    (row,) = entry.entries[0].rows()
    assert row.error is None
    assert (row.sampler["base"]["name"], row.sampler["base"]["steps"]) == ("maskgit", 3)


@pytest.mark.parametrize(
    ("sampler", "overrides", "words"),
    [
        ({"name": "best_of", "base": {"name": "maskgit", "setps": 5}}, (), ["'steps'", "job.yaml"]),
        ("best_of", ("sampler.base=maskgit", "sampler.base.setps=5"), ["'steps'", "override"]),
        ({"name": "best_of", "base": "sjdd"}, (), ["'sjd'", "job.yaml"]),
        ({"name": "best_of", "scorer": "chekcer"}, (), ["'checker'", "sampler.scorer"]),
        ({"name": "best_of", "budget": 0}, (), ["sampler.budget", "positive"]),
        ({"name": "best_of", "base": {"steps": {"a": 1}}}, (), ["steps"]),
        ({"name": "best_of", "scorer": "function <lambda>"}, (), ["Python call", "import path"]),
    ],
)
def test_wrong_values_in_a_base_are_errors_with_their_location(sampler, overrides, words):
    with pytest.raises(GenError) as error:
        job(sampler, *overrides)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_deterministic_job_refuses_a_budget_in_seconds():
    with pytest.raises(GenError, match=r"sampler\.budget\.seconds .* is 3"):
        job({"name": "best_of", "budget": {"seconds": 3}}, deterministic=True)
