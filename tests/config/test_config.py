"""Job files: strictness, inheritance, round trips, and what the fingerprint sees."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from gen.config.canonical import difference
from gen.config.entries import Job, fingerprint, stored_job
from gen.config.job import load_config, make_job
from gen.config.packaged import find_config, packaged
from gen.core.errors import GenError

RING = "a small blue ring in the centre"
BASE = {"modality": "image", "prompts": [RING], "sampler": "sjd"}


def job(*overrides: str, **keys) -> Job:
    return make_job({**BASE, **keys}, overrides, where="test")


def refusal(*overrides: str, **keys) -> str:
    with pytest.raises(GenError) as caught:
        job(*overrides, **keys)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write(path: Path, tree: dict) -> Path:
    path.write_text(yaml.safe_dump(tree))
    return path


# --- strictness


@pytest.mark.parametrize(
    "override, nearest",
    [
        ("sede=7", "seed"),
        ("sampling.temperatur=1", "temperature"),
        ("sampler.windw=8", "window"),
        ("sampler=sjdd", "sjd"),
        ("modality=imag", "image"),
        ("dtype=float31", "float32"),
    ],
)
def test_a_typo_in_an_override_names_the_override_and_the_nearest_name(override, nearest):
    message = refusal(override)
    assert f"Did you mean {nearest!r}?" in message and f"override {override!r}" in message


@pytest.mark.parametrize(
    "tree, typo, nearest",
    [
        ({"promts": [RING]}, "promts", "prompts"),
        ({"sampler": {"name": "sjd", "windw": 8}}, "windw", "window"),
        ({"sampling": {"top_kk": 3}}, "top_kk", "top_k"),
        ({"jobs": [{"sampler": "sjd"}, {"smapler": "sjd"}]}, "smapler", "sampler"),
    ],
)
def test_a_typo_in_a_file_names_the_file_and_the_nearest_name(tmp_path, tree, typo, nearest):
    path = write(tmp_path / "a.yaml", {**BASE, **tree})
    with pytest.raises(GenError) as caught:
        load_config(path)
    assert (
        typo in str(caught.value)
        and f"{nearest!r}" in str(caught.value)
        and str(path) in str(caught.value)
    )


@pytest.mark.parametrize(
    "override",
    [
        "num_samples=0",
        "num_samples=1.5",
        "seed=-1",
        "seed=true",
        f"seed={2**62}",
        "batch_size=0",
        "trace=-1",
        "sampling.temperature=-1",
        "sampling.top_p=0",
        "sampler.window=0",
        "sampler.coupling=freshh",
        "prompts=[]",
        "prompts=['']",
        "prompts=[3]",
        "prompts=null",
        "device=warp",
        "compile=1",
        "compile=null",
        "dtype=null",
        "model=''",
        "out=''",
        "sampler=[]",
        "sampler=3",
        "sampling=3",
        "seed.x=1",
        "sampling.top_k.x=1",
        "jobs.0.seed=1",
        "seed",
        "=3",
        "sampler.=3",
        "prompts_file=absent.txt",
        "source=absent.png",
        "seed=[1",
    ],
)
def test_a_wrong_value_is_refused_in_one_line(override):
    key = override.split("=")[0].split(".")[-1]
    assert (key or override) in refusal(override)


def test_the_same_keys_with_right_values_pass():  # the negative control of the test above
    made = job(
        "num_samples=2",
        "seed=0",
        "batch_size=1",
        "trace=0",
        "sampling.temperature=0.5",
        "sampling.top_p=1",
        "sampler.window=1",
        "sampler.coupling=maximal",
        "device=cpu",
        "compile=true",
        "dtype=float64",
        "model=here",
        "out=there",
    ).entries[0]
    assert (made.num_samples, made.sampler["window"], made.sampling["temperature"], made.model) == (
        2,
        1,
        0.5,
        "here",
    )


def test_the_modality_must_be_said():
    with pytest.raises(GenError, match="modality is missing.*image"):
        make_job({"prompts": [RING]}, where="test")


def test_prompts_and_prompts_file_together_are_refused(tmp_path):
    path = tmp_path / "p.txt"
    path.write_text(RING)
    assert "both prompts and prompts_file" in refusal(prompts_file=str(path))


@pytest.mark.parametrize(
    "text", ["seed: 1\nseed: 2", "a: [", "- 1", "seed: ${nowhere}", "3", "\x00"]
)
def test_a_broken_file_is_refused_in_one_line(tmp_path, text):
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(GenError) as caught:
        load_config(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_an_unknown_config_names_the_nearest_packaged_one():
    with pytest.raises(GenError, match="Did you mean 'image/sjd'"):
        load_config("image/sjdd")


def test_editing_needs_image_and_mask(tmp_path):
    (tmp_path / "x.png").write_bytes(b"x")
    x = str(tmp_path / "x.png")
    assert "one of mask and span; got source" in refusal(source=x)
    assert "one of mask and span; got mask" in refusal(mask=x)
    assert "one of mask and span; got source, mask, span" in refusal(source=x, mask=x, span="1:2")
    assert "source and prefix are both given" in refusal(source=x, mask=x, prefix=x)
    assert "keeps its length" in refusal(source=x, span="1:2", frames=4)
    assert "span is 7; expected text" in refusal(source=x, span=7)
    assert "frames is 0; expected an integer of at least 1" in refusal(frames=0)
    assert "nowhere.wav" in refusal(prefix="nowhere.wav")


# --- merging


def test_a_sampler_by_name_replaces_the_node_and_a_parameter_extends_it():
    node = {"name": "speculative_jacobi", "coupling": "fresh", "window": 8}
    found = job("sampler.window=16", sampler=node).entries[0].sampler
    assert {key: found[key] for key in (*node, "init")} == {
        **node,
        "window": 16,
        "init": "uniform",
    }
    assert job("sampler=maskgit", sampler=node).entries[0].sampler["name"] == "maskgit"
    assert "window" not in job("sampler=maskgit", sampler=node).entries[0].sampler
    assert job("sampler.window=5", sampler="sjd").entries[0].sampler["window"] == 5
    assert job("sampler={name: scd_mc, window: 3}").entries[0].sampler["window"] == 3


def test_entries_inherit_and_overrides_win_over_both():
    jobs = [{"sampler": "autoregressive", "sampling": {"top_k": 5}}, {"seed": 3, "num_samples": 2}]
    first, second = job(sampling={"top_k": 9, "temperature": 0.7}, seed=1, jobs=jobs).entries
    assert (first.seed, first.sampling["top_k"], first.sampling["temperature"]) == (1, 5, 0.7)
    assert (second.seed, second.sampling["top_k"], second.sampler["name"]) == (3, 9, "sjd")
    assert [e.seed for e in job("seed=8", seed=1, jobs=jobs).entries] == [8, 8]
    assert [e.seed for e in job("jobs.1.seed=8", seed=1, jobs=jobs).entries] == [1, 8]


def test_a_parameter_that_one_entry_lacks_is_refused_rather_than_ignored():
    assert "'window'" in refusal(
        "sampler.window=8", jobs=[{"sampler": "sjd"}, {"sampler": "autoregressive"}]
    )


def test_the_same_job_twice_is_refused():
    assert "same job" in refusal("sampler=sjd", jobs=[{"sampler": "sjd"}, {"sampler": "scd_mc"}])


def test_what_a_loader_is_told_anyway_is_no_option_of_a_model():
    assert (
        "model_options.compile is given in override 'model_options.compile=true'; expected compile"
        " outside model_options" in refusal("model_options.compile=true", model="m")
    )


def test_an_override_reaches_one_of_several_adapters():
    """As OmegaConf merges: the others stay, at any depth."""
    named = {"adapters": {"critic": "a", "poet": "b"}, "height": 8}
    jobs = [{}, {"seed": 1}]
    keys = {"model": "m", "model_options": named, "jobs": jobs}
    for text in ("model_options.adapters.poet=c", "model_options={adapters: {poet: c}}"):
        for entry in job(text, **keys).entries:
            options = entry.model_options
            assert options == {"adapters": {"critic": "a", "poet": "c"}, "height": 8}
    first, second = job("jobs.1.model_options.adapters.poet=c", **keys).entries
    assert (first.model_options, second.model_options["adapters"]["poet"]) == (named, "c")
    (alone,) = job("model_options.adapters.poet=c", model="m").entries
    assert alone.model_options == {"adapters": {"poet": "c"}}
    (one,) = job("model_options.adapters=c", model="m", model_options=named).entries
    assert one.model_options["adapters"] == "c"


@pytest.mark.parametrize(
    "override, said",
    [
        ("model_optoins.adapters.poet=c", "Did you mean 'model_options'?"),
        ("sampling.temperature.x=1", "sampling.temperature has no keys of its own"),
        ("seed.x=1", "seed has no keys of its own"),
        ("model_options.adapters.poet.x=c", "the folder of a LoRA adapter, or folders by name"),
        ("model_options.adapters.poet=3", "the folder of a LoRA adapter, or folders by name"),
    ],
)
def test_a_key_too_deep_or_misspelt_is_refused_with_its_override(override, said):
    message = refusal(override, model="m")
    assert said in message and override in message


def test_entries_may_not_have_a_folder_of_their_own():
    assert "out" in refusal(jobs=[{"out": "x"}])


def test_labels_tell_entries_of_one_sampler_apart():
    made = job(
        jobs=[
            {"sampler": {"name": "sjd", "window": 8}},
            {"sampler": {"name": "sjd", "window": 16}},
            {"sampler": "scd_mc"},
        ]
    )
    assert made.labels() == ["sjd window=8", "sjd window=16", "scd_mc"]
    assert job().labels() == ["sjd"]


def test_prompts_file_is_relative_to_its_config_and_blank_lines_are_no_prompts(tmp_path):
    (tmp_path / "p.txt").write_text(f"{RING}\n\n  a red circle\n")
    path = write(tmp_path / "a.yaml", {"modality": "image", "prompts_file": "p.txt"})
    assert [(r.line, r.prompt) for r in load_config(path).entries[0].rows()] == [
        (1, RING),
        (3, "a red circle"),
    ]
    (tmp_path / "p.txt").write_text("\n\n")
    with pytest.raises(GenError, match="at least one prompt"):
        load_config(path)


def test_a_new_list_of_prompts_replaces_a_file_of_them(tmp_path):
    (tmp_path / "p.txt").write_text(RING)
    path = write(tmp_path / "a.yaml", {"modality": "image", "prompts_file": "p.txt"})
    assert load_config(path, ["prompts=[a red circle]"]).entries[0].prompts == ["a red circle"]


# --- resolution


def test_a_path_comes_before_a_packaged_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (
        find_config("image/sjd") == find_config("configs/image/sjd.yaml") == packaged()["image/sjd"]
    )
    (tmp_path / "image").mkdir()
    write(tmp_path / "image/sjd", {**BASE, "seed": 99})
    assert load_config("image/sjd").entries[0].seed == 99


@pytest.mark.parametrize("name", packaged())
def test_every_packaged_config_loads_and_says_what_it_is(name):
    head = packaged()[name].read_text().split("\n\n")[0]
    assert all(
        word in head for word in ("command", "hardware", "time", "expected", f"gen run {name}")
    )
    assert load_config(name).entries


TRICKY = [
    "null",
    "1e4",
    "yes",
    "a ${b} c",
    "x: y",
    "# no",
    "'",
    "été \u2603",
    "[1]",
    "-",
    "a\nb",
    "~",
    "0x1f",
    "1_000",
    " spaces ",
]


def test_resolved_yaml_loads_to_the_same_job(tmp_path):
    made = make_job(
        {
            **BASE,
            "prompts": TRICKY,
            "sampling": {"min_p": 0.05},
            "jobs": [{"sampler": "sjd"}, {"sampler": "maskgit", "prompts": [RING]}],
        },
        where="test",
    )
    path = tmp_path / "config.yaml"
    path.write_text(made.to_yaml(), encoding="utf-8")
    again = load_config(path)
    assert again == made and stored_job(tmp_path) == made
    assert again.entries[0].prompts == TRICKY
    assert fingerprint(again) == fingerprint(made)


# --- fingerprint


@pytest.mark.parametrize(
    "override",
    [
        "out=x",
        "device=cuda",
        "compile=true",
        "batch_size=3",
        "trace=4",
        "name=n",
        "sampler.window=16",
        "sampling.top_p=1",
        "sampling.min_p=0.0",
    ],
)
def test_the_fingerprint_ignores_where_and_in_which_batches_and_what_is_default_anyway(override):
    assert fingerprint(job(override)) == fingerprint(job())


@pytest.mark.parametrize(
    "override",
    [
        "seed=1",
        "num_samples=2",
        "dtype=bfloat16",
        "model=m",
        "sampler.window=15",
        "sampler=scd_mc",
        "sampling.top_k=3",
        "prompts=[a red circle]",
    ],
)
def test_the_fingerprint_sees_what_the_media_depend_on(override):
    assert fingerprint(job(override)) != fingerprint(job())
    lines = difference(job().relevant(), job(override).relevant())
    assert lines and any(line.startswith(override.split("=")[0]) for line in lines)
    assert difference(job().relevant(), job().relevant()) == []


def test_the_fingerprint_sees_the_content_of_an_image_and_not_its_path(tmp_path):
    for name, content in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        (tmp_path / name).write_bytes(content)
    prints = [
        fingerprint(job(f"source={tmp_path / n}", f"mask={tmp_path / 'a'}", sampler="maskgit"))
        for n in "abc"
    ]
    assert prints[0] == prints[1] != prints[2]
    prints = [fingerprint(job(f"prefix={tmp_path / n}")) for n in "abc"]
    assert prints[0] == prints[1] != prints[2] and prints[0] != fingerprint(job())


# --- keys of the run

COUNTED = ["layout=shards", "tokens=true", "shard_items=8", "deterministic=true"]
RUNTIME = [
    "workers=4",
    "engine=ray",
    "engine_options.partition=gpu",
    "retry=failed",
    "overwrite=true",
]


@pytest.mark.parametrize("override", COUNTED)
def test_keys_that_shape_the_folder_count_for_the_fingerprint(override):
    was, now = job(), job(override)
    assert fingerprint(was) != fingerprint(now)
    key, _, value = override.partition("=")
    assert f"{key}: was {getattr(was.run, key)}, now {getattr(now.run, key)}" in difference(
        was.relevant(), now.relevant()
    )
    assert str(getattr(now.run, key)).lower() == value and f"{key}: {value}" in now.to_yaml()


@pytest.mark.parametrize("override", RUNTIME)
def test_keys_of_one_command_do_not_count(override):
    now = job(override)
    assert now.run != job().run and fingerprint(now) == fingerprint(job())
    assert difference(job().relevant(), now.relevant()) == []
    key = override.partition("=")[0].partition(".")[0]
    assert (f"\n{key}:" in now.to_yaml()) == (key not in ("retry", "overwrite"))


def test_batch_size_counts_where_the_bits_depend_on_it():
    assert fingerprint(job("deterministic=true", "batch_size=3")) != fingerprint(
        job("deterministic=true")
    )
    assert fingerprint(job("batch_size=3")) == fingerprint(job())  # control
    lines = difference(
        job("deterministic=true").relevant(), job("deterministic=true", "batch_size=3").relevant()
    )
    assert lines == ["batch_size: was 8, now 3"]


def test_run_keys_load_again_and_defaults_go_unsaid(tmp_path):
    keys = [*COUNTED, "workers=4", "engine=ray", "engine_options.partition=gpu"]
    (tmp_path / "config.yaml").write_text(job(*keys).to_yaml())
    assert (
        load_config(tmp_path / "config.yaml", trust_job=True) == stored_job(tmp_path) == job(*keys)
    )
    assert not set(yaml.safe_load(job().to_yaml())) & {
        k.partition("=")[0].partition(".")[0] for k in (*COUNTED, *RUNTIME)
    }
    assert job("retry=none").run == job("retry=null").run == job().run
    assert job("engine_options.a=1", engine_options={"a": 0, "b": 2}).run.engine_options == {
        "a": 1,
        "b": 2,
    }


@pytest.mark.parametrize(
    "override, words",
    [
        ("layout=shard", "Did you mean 'shards'?"),
        ("engine=rai", "Did you mean 'ray'?"),
        ("retry=faild", "Did you mean 'failed'?"),
        ("worker=4", "Did you mean 'workers'?"),
        ("workers=0", "at least 1"),
        ("workers=null", "at least 1"),
        ("workers=true", "at least 1"),
        ("shard_items=0", "at least 1"),
        ("tokens=1", "true or false"),
        ("overwrite=yes please", "true or false"),
        ("engine_options=3", "options"),
        ("workers.x=1", "unknown key"),
        ("engine_options.a.b=1", "unknown key"),
    ],
)
def test_a_wrong_key_of_the_run_is_refused_with_what_was_expected(override, words):
    message = refusal(override)
    assert words in message and f"override {override!r}" in message


def test_keys_of_the_run_belong_to_no_entry():
    assert "a key of the whole run" in refusal(jobs=[{"workers": 2}])
    assert "a key of the whole run" in refusal("jobs.0.workers=2", jobs=[{"seed": 2}])
    assert "expected one of them" in refusal("retry=failed", "overwrite=true")


def test_difference_says_how_many_rows_there_were():
    def tree(*prompts):
        return job(prompts=list(prompts)).relevant()

    assert difference(tree("a", "b"), tree("a")) == ["prompts: was 2 rows, now 1 row"]
    assert difference(tree("a", "b"), tree("a", "c")) == ["prompts: the rows are not the same"]
    two = job(jobs=[{"seed": 1}, {"seed": 2}]).relevant()
    assert difference(tree("a"), two)[0] == "jobs: was 1, now 2"
    assert difference(two, job(jobs=[{"seed": 1}, {"seed": 3}]).relevant()) == [
        "jobs.1.seed: was 2, now 3"
    ]


def test_devices_and_dtypes_have_the_spellings_of_the_python_api():
    tree = {"modality": "text", "prompts": ["sort 3 1 2 ="]}
    made = make_job({**tree, "device": "auto", "dtype": "bf16"}, where="t").entries[0]
    assert made.device in ("cpu", "cuda") and made.dtype == "bfloat16"
    with pytest.raises(GenError, match="auto, cpu, cuda"):
        make_job({**tree, "device": "automatic"}, where="t")
