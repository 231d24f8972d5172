"""Sweeps: one entry per combination, in order, between the entry and the overrides; and many
entries stay quick."""

from __future__ import annotations

import time

import pytest

from gen.config.entries import fingerprint
from gen.config.job import load_config, make_job
from gen.core.errors import GenError

BASE = {"modality": "image", "prompts": ["a small blue ring"], "sampler": "sjd"}


def job(*overrides, **keys):
    return make_job({**BASE, **keys}, overrides, where="test")


def refusal(*overrides, **keys) -> str:
    with pytest.raises(GenError) as caught:
        job(*overrides, **keys)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_sweep_is_a_grid_in_the_order_written_and_its_labels_tell_the_entries_apart():
    made = job(sweep={"sampler.window": [8, 16], "sampling.temperature": [1.0, 0.5, 0.0]})
    assert [(e.sampler["window"], e.sampling["temperature"]) for e in made.entries] == [
        (8, 1),
        (8, 0.5),
        (8, 0),
        (16, 1),
        (16, 0.5),
        (16, 0),
    ]
    assert made.labels()[1] == "sjd window=8 temperature=0.5" and len(set(made.labels())) == 6
    turned = job(sweep={"sampling.temperature": [1.0, 0.5, 0.0], "sampler.window": [8, 16]})
    assert turned.labels() != made.labels() and sorted(turned.labels()) == sorted(made.labels())


@pytest.mark.parametrize(
    "key, values, read",
    [
        ("seed", [0, 7], lambda e: e.seed),
        ("num_samples", [1, 2], lambda e: e.num_samples),
        ("sampler", ["sjd", "maskgit"], lambda e: e.sampler["name"]),
        ("model", ["here", "there"], lambda e: e.model),
        ("frames", [4, None], lambda e: e.frames),
        ("prompts", [["a", "b"], ["c"]], lambda e: e.prompts),
        ("prompts", ["a", "b"], lambda e: e.prompts[0]),
        ("sampling", [{"top_k": 3}, {"top_k": 4}], lambda e: {"top_k": e.sampling["top_k"]}),
    ],
)
def test_any_key_of_an_entry_can_be_swept(key, values, read):
    assert [read(e) for e in job(sweep={key: values}).entries] == values


def test_prompts_of_a_sweep_may_be_iterables_that_can_be_read_once():
    swept = job(sweep={"prompts": [iter("ab"), iter("cd")], "seed": [0, 1]})
    assert [e.prompts for e in swept.entries] == [["a", "b"], ["a", "b"], ["c", "d"], ["c", "d"]]


def test_options_of_a_model_can_be_swept():
    made = job(model="here", sweep={"model_options.height": [256, 512]})
    assert [e.model_options for e in made.entries] == [{"height": 256}, {"height": 512}]


def test_a_swept_sampler_comes_before_its_swept_parameters_in_whatever_order_they_stand():
    for sweep in (
        {"sampler.window": [4], "sampler": ["sjd", "scd_mc"]},
        {"sampler": ["sjd", "scd_mc"], "sampler.window": [4]},
    ):
        assert [(e.sampler["name"], e.sampler["window"]) for e in job(sweep=sweep).entries] == [
            ("sjd", 4),
            ("scd_mc", 4),
        ]


def test_entries_of_jobs_sweep_for_themselves_and_inherit_a_sweep_they_do_not_replace():
    own = {"sampler": "scd_mc", "sweep": {"sampler.window": [4, 8]}}
    made = job(sweep={"seed": [1, 2]}, jobs=[{}, own, {"sampler": "maskgit", "sweep": None}])
    assert [(e.sampler["name"], e.seed) for e in made.entries] == [
        ("sjd", 1),
        ("sjd", 2),
        ("scd_mc", 0),
        ("scd_mc", 0),
        ("maskgit", 0),
    ]


def test_a_sweep_wins_over_its_entry_and_overrides_reach_every_combination():
    made = job("num_samples=3", "sampling.top_k=5", seed=9, sweep={"seed": [1, 2]})
    assert [(e.seed, e.num_samples, e.sampling["top_k"]) for e in made.entries] == [
        (1, 3, 5),
        (2, 3, 5),
    ]
    assert [
        e.seed
        for e in job(
            "jobs.1.num_samples=2", jobs=[{"seed": 4}, {"sweep": {"seed": [1, 2]}}]
        ).entries
    ] == [4, 1, 2]


@pytest.mark.parametrize(
    "override",
    ["sampler.window=8", "sampler={window: 8}", "sampler=scd_mc", "sampler={name: scd_mc}"],
)
def test_an_override_of_a_swept_key_is_refused(override):
    assert "sampler.window is swept in test" in refusal(override, sweep={"sampler.window": [1, 2]})


def test_an_override_beside_a_swept_key_is_not():  # the negative control of the test above
    assert len(job("sampler={coupling: maximal}", sweep={"sampler.window": [1, 2]}).entries) == 2
    assert len(job("sampler.window=3", sweep={"sampler": ["sjd", "scd_mc"]}).entries) == 2


def test_a_sweep_can_be_said_on_the_command_line():
    assert [e.seed for e in job("sweep.seed=[3, 4]").entries] == [3, 4]
    assert [e.seed for e in job("sweep.seed=[3, 4]", sweep={"seed": [1]}).entries] == [3, 4]
    assert [e.sampler["window"] for e in job("sweep.sampler.window=[3, 4]", "seed=2").entries] == [
        3,
        4,
    ]
    assert len(job("sweep=null", sweep={"seed": [1, 2]}).entries) == 1
    assert "a list with at least one value" in refusal("sweep.seed=3")


@pytest.mark.parametrize(
    "sweep, words",
    [
        ({"sed": [1]}, "Did you mean 'seed'?"),
        ({"sampler.windw": [1]}, "Did you mean 'window'?"),
        ({"sampling.temperatur": [1]}, "Did you mean 'temperature'?"),
        ({"smapler.window": [1]}, "unknown key of sweep 'smapler.window'"),
        ({"seed.x": [1]}, "unknown key of sweep"),
        ({"workers": [1, 2]}, "unknown key of sweep"),
        ({"jobs": [1, 2]}, "unknown key of sweep"),
        ({"seed": []}, "at least one value"),
        ({"seed": 3}, "at least one value"),
        ({"seed": "12"}, "at least one value"),
        ({"seed": [1, "x"]}, "seed is 'x'"),
        ([1, 2], "sweep is [1, 2]"),
        ({"seed": list(range(101)), "num_samples": list(range(1, 101))}, "makes 10100 entries"),
        ({"prompts": ["a"], "prompts_file": ["b"]}, "both prompts and prompts_file"),
        ({"seed": [1, 1]}, "jobs.0 and jobs.1 (counted after its sweep)"),
    ],
)
def test_a_wrong_sweep_is_refused_in_one_line_that_names_the_place(sweep, words):
    message = refusal(sweep=sweep)
    assert words in message and "test" in message


def test_a_swept_job_is_written_as_its_entries_and_loads_again(tmp_path):
    made = job(sweep={"sampler": ["sjd", "maskgit"], "seed": [1, 2]})
    (tmp_path / "a.yaml").write_text(made.to_yaml())
    again = load_config(tmp_path / "a.yaml")
    assert (
        again.entries == made.entries
        and fingerprint(again) == fingerprint(made)
        and "sweep" not in made.to_yaml()
    )


def test_a_thousand_entries_are_checked_named_and_counted_in_near_linear_time():
    seconds = {}
    for n in (10, 100):
        start = time.perf_counter()
        made = job(sweep={"seed": list(range(10)), "sampling.top_k": list(range(1, n + 1))})
        assert len(set(made.labels())) == 10 * n and len(fingerprint(made)) == 64
        seconds[n] = time.perf_counter() - start
    assert seconds[100] < 4  # 0.4 s on one idle core
    assert seconds[100] < 40 * seconds[10] + 0.5  # quadratic would be 100 times
