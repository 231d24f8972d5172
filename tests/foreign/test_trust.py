"""The list of what a foreign file can do (``gen.core.trust.POWERS``): each needs a word of its own,
wherever the file is read."""

from __future__ import annotations

import json

import pytest

from gen.__main__ import main
from gen.config.job import load_config
from gen.core import trust
from gen.core.errors import GenError
from gen.jobs.run import join_job
from gen.models.load.saved import RECORD, read_saved

# name of a power -> job files that use it; CANARY is a file that must not appear
INPUTS = {
    "engine options": (
        "engine: slurm\nengine_options: {local_setup: ['touch CANARY']}",
        "engine: slurm\nengine_options: {slurm_setup: ['touch CANARY']}",
        "engine: slurm\nengine_options: {slurm_additional_parameters: {wrap: touch CANARY}}",
        'engine: slurm\nengine_options: {slurm_partition: "gpu\\ntouch CANARY"}',
        "engine: slurm\nengine_options: {slurm_python: ./mine}",
        "engine: slurm\nengine_options: {name: [a, b]}",
        "engine: ray\nengine_options: {runtime_env: {pip: [mine]}}",
        "engine: ray\nengine_options: {resources: {a: {b: 1}}}",
        "engine: ray\nengine_options: {address: 'ray://elsewhere:1'}",
    ),
    "import paths": (
        "sampler: {name: best_of, scorer: 'OWN.py:reward'}",
        "sampler: {name: best_of, scorer: 'os:system'}",
        "sampler: {name: svdd, value: 'OWN.py:reward'}",
        "sampler: {name: best_of, base: {name: best_of, scorer: 'OWN.py:reward'}}",
        "sweep: {sampler.scorer: ['OWN.py:reward']}",
        "sweep: {sampler: [{name: best_of, scorer: 'OWN.py:reward'}]}",
        "jobs: [{sampler: {name: best_of, scorer: 'OWN.py:reward'}}]",
        "jobs: [{sweep: {sampler.scorer: ['OWN.py:reward']}}]",
    ),
    "code of a model folder": (
        "model: MODEL\nmodel_options: {trust_remote_code: true}",
        "model: MODEL\nmodel_options: {trust_remote_code: 'yes'}",
        "model: MODEL\nmodel_options: {trust_remote_code: 1}",
        "model: MODEL\nmodel_options: {trust_remote_code: [1]}",
        "model: MODEL\nmodel_options: {draft_model: {trust_remote_code: true}}",
        "model: MODEL\nsweep: {model_options.trust_remote_code: [true]}",
        "model: MODEL\nsweep: {model_options: [{trust_remote_code: true}]}",
        "model: MODEL\njobs: [{model_options: {trust_remote_code: true}}]",
        "model: MODEL\njobs: [{sweep: {model_options: [{trust_remote_code: true}]}}]",
    ),
    "kernels of the hub": (
        "model: MODEL\nmodel_options: {attn_implementation: somebody/kernel}",
        "model: MODEL\nmodel_options: {attn_implementation: 'somebody/kernel@main:flash'}",
        "model: MODEL\nsweep: {model_options.attn_implementation: [somebody/kernel]}",
        "model: MODEL\njobs: [{model_options: {attn_implementation: somebody/kernel}}]",
    ),
}
CASES = [(name, text) for name, texts in INPUTS.items() for text in texts]


@pytest.fixture
def place(tmp_path):
    """A folder with code that leaves a canary when it runs, and a function that writes a job."""
    canary, own = tmp_path / "canary", tmp_path / "own.py"
    own.write_text(f"open({str(canary)!r}, 'w')\ndef reward(media, prompt):\n    return 1.0\n")
    model = tmp_path / "model"
    model.mkdir()
    (model / "own.py").write_text(own.read_text())
    names = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (model / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": names}))

    def write(text: str):
        for word, path in (("CANARY", canary), ("OWN.py", own), ("MODEL", model)):
            text = text.replace(word, str(path))
        path = tmp_path / "job.yaml"
        path.write_text(f"modality: text\nprompts: ['sort 3 1 2 =']\nout: {tmp_path / 'o'}\n{text}")
        return path

    return canary, write


def test_every_power_of_the_list_has_inputs():
    assert {power.name for power in trust.POWERS} == INPUTS.keys()


@pytest.mark.parametrize(("name", "text"), CASES)
def test_a_foreign_job_file_is_refused_by_name_in_every_command(place, name, text, capsys):
    canary, write = place
    path = write(text)
    for command in (["run", str(path)], ["run", str(path), "--dry-run"], ["show", str(path)]):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert "--trust-job" in said and "\n" not in said.strip(), said
    with pytest.raises(GenError, match="--trust-job"):
        load_config(path)
    assert not canary.exists() and not (path.parent / "o").exists()


@pytest.mark.parametrize(("name", "text"), [c for c in CASES if "jobs:" not in c[1]])
def test_a_foreign_job_folder_is_refused_before_a_worker_begins(place, name, text):
    canary, write = place
    folder = write(text).parent
    (folder / "config.yaml").write_text((folder / "job.yaml").read_text())
    (folder / "plan.json").write_text("{}")
    with pytest.raises(GenError, match="--trust-job"):
        join_job(folder)
    with pytest.raises(GenError, match="plan.json"):  # the word reaches the next obstacle
        join_job(folder, trust_job=True)
    assert not canary.exists()


@pytest.mark.parametrize("options", [{"trust_remote_code": True}, {"attn_implementation": "a/b"}])
def test_the_record_of_a_saved_pipeline_is_held_to_the_list(tmp_path, options):
    tree = {"modality": "text", "model": "m", "dtype": "float32", "options": {}, "paths": []}
    (tmp_path / RECORD).write_text(json.dumps(tree))
    assert read_saved(tmp_path).options == {}
    (tmp_path / RECORD).write_text(json.dumps({**tree, "options": options}))
    with pytest.raises(GenError, match="gen_pipeline.json"):
        read_saved(tmp_path)


def test_the_code_consults_the_list(place, monkeypatch):
    """The control: with a power off the list, its code runs, and the canary shows it."""
    canary, write = place
    path = write(INPUTS["import paths"][0])
    kept = [p for p in trust.POWERS if p.name != "import paths"]
    monkeypatch.setattr(trust, "POWERS", tuple(kept))
    main(["run", str(path)])
    assert canary.exists()
