"""References in job files: other keys, and environment variables that the command line allows."""

from __future__ import annotations

import pytest

from gen.config.entries import stored_job
from gen.config.job import load_config, make_job
from gen.config.layers import read_yaml
from gen.core.errors import GenError

HEAD = "modality: image\nsampler: sjd\n"
RING = "a small blue ring"


@pytest.fixture
def config(tmp_path):
    def write(text: str):
        path = tmp_path / "job.yaml"
        path.write_text(HEAD + text)
        return path

    return write


def refusal(path, *overrides, **how) -> str:
    with pytest.raises(GenError) as caught:
        load_config(path, overrides, **how)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_environment_variable_is_read_only_by_leave_of_the_command_line(config, monkeypatch):
    monkeypatch.setenv("SECRET", "s3cret")
    path = config(f"prompts: [{RING}]\nname: run-${{oc.env:SECRET}}\n")
    for allowed in ((), ("OTHER",), ("secret",)):
        message = refusal(path, allow_env=allowed)
        assert "--allow-env SECRET" in message and "name in" in message
        assert "s3cret" not in message
    assert load_config(path, allow_env=("SECRET",)).name == "run-s3cret"
    monkeypatch.delenv("SECRET")
    assert "not set" in refusal(path, allow_env=("SECRET",))


@pytest.mark.parametrize(
    "text",
    [
        "model_options: {a: {b: ['${oc.env:SECRET}']}}",
        "sampler: {name: '${oc.env:SECRET}'}",
        "jobs: [{seed: 1}, {model: '${oc.env:SECRET}'}]",
        "sweep: {model: ['${oc.env:SECRET}']}",
        "out: '${ oc.env : SECRET }'",
        "out: ${oc.env:SECRET,default}",
        "model: ${oc.decode:${oc.env:SECRET}}",
        "model: ${oc.${x}:SECRET}",
        "engine_options: {a: '${oc.env:SECRET}'}",
    ],
)
def test_no_place_of_a_job_file_reads_the_environment_without_leave(config, monkeypatch, text):
    monkeypatch.setenv("SECRET", "s3cret")
    message = refusal(config(f"prompts: [{RING}]\n" + text.replace("sampler:", "sampling:")))
    assert "s3cret" not in message and "expected" in message


def test_an_override_asks_for_leave_too(config, monkeypatch):
    monkeypatch.setenv("HERE", "out/there")
    path = config(f"prompts: [{RING}]\n")
    assert "--allow-env HERE" in refusal(path, "out=${oc.env:HERE}")
    assert load_config(path, ["out=${oc.env:HERE}"], allow_env=["HERE"]).out == "out/there"


def test_a_default_stands_where_an_allowed_variable_is_not_set(config, monkeypatch):
    monkeypatch.delenv("NOWHERE", raising=False)
    path = config(f"prompts: [{RING}]\nout: ${{oc.env:NOWHERE, out/x}}\n")
    assert load_config(path, allow_env=["NOWHERE"]).out == "out/x"


def test_a_prompt_is_literal_text(config, monkeypatch):
    texts = ["sort ${oc.env:HOME} 1 =", "${", "${a", "\\${x}", "${seed}", "$${x}}"]
    lines = "".join(f"- '{t}'\n" for t in texts)
    path = config(f"prompts:\n{lines}- {{prompt: a, meta: {{b: '${{c}}'}}}}\n")
    made = load_config(path)
    assert made.entries[0].prompts == [*texts, {"prompt": "a", "meta": {"b": "${c}"}}]
    assert make_job(read_yaml(path), where="t").entries == made.entries
    override = load_config(path, ['prompts=["${oc.env:HOME}"]'])
    assert override.entries[0].prompts == ["${oc.env:HOME}"]


def test_a_stored_job_keeps_every_dollar(config, tmp_path):
    tree = {"modality": "image", "sampler": "sjd", "prompts": ["${a} $b", RING]}
    made = make_job({**tree, "name": "${oc.env:HOME}", "out": "o${x}"}, where="t")
    (tmp_path / "config.yaml").write_text(made.to_yaml())
    assert stored_job(tmp_path) == made == load_config(tmp_path / "config.yaml")


def test_a_reference_to_a_key_is_its_value(config):
    path = config(
        f"prompts: [{RING}]\nseed: 3\nname: s${{seed}}-${{sampling.top_k}}\n"
        "sampling: {top_k: 5}\njobs: [{num_samples: '${seed}'},"
        " {seed: '${jobs.0.trace}', trace: 2}, {trace: 2}]\n"
    )
    message = refusal(path)
    assert "jobs.1.seed" in message and "a key that is set" in message
    path.write_text(path.read_text().replace("jobs.0.trace", "jobs.2.trace"))
    made = load_config(path)
    assert made.name == "s3-5"
    assert [(e.num_samples, e.seed) for e in made.entries] == [(3, 3), (1, 2), (1, 3)]


@pytest.mark.parametrize(
    "text, says",
    [
        ("name: ${nowhere}", "a key that is set"),
        ("name: ${sampling}", "several values"),
        ("name: ${out}\nout: ${name}", "another reference"),
        ("name: ${name}", "another reference"),
        ("name: ${", "expected ${KEY}"),
        ("name: ${}", "expected ${KEY}"),
        ("name: ${x${y}}", "expected ${KEY}"),
        ("name: ${oc.create:1}", "no other function"),
    ],
)
def test_a_reference_that_leads_nowhere_is_refused(config, text, says):
    message = refusal(config(f"prompts: [{RING}]\nsampling: {{top_k: 5}}\n{text}\n"))
    assert says in message and "name" in message


def test_references_that_multiply_are_refused_with_the_count(config):
    path = config(f"prompts: [{RING}]\nmodel: {'m' * 100_000}\nname: {'${model}' * 1000}\n")
    assert "expected at most 10,000,000" in refusal(path)
