"""Import paths and code of model folders: a job file alone may not have them run."""

from __future__ import annotations

import json

import pytest

from gen.__main__ import main
from gen.config.job import load_config
from gen.core.errors import GenError

REWARD = "def reward(media, prompt):\n    return 1.0\n"


@pytest.fixture
def job(tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)

    def write(sampler: str, key: str = "sampler"):
        path = tmp_path / "job.yaml"
        path.write_text(f"modality: action\nprompts: [push the block]\n{key}: {sampler}\n")
        return path

    return tmp_path, write


@pytest.mark.parametrize(
    "sampler",
    [
        "{{name: best_of, scorer: '{0}/reward.py:reward'}}",
        "{{name: svdd, value: '{0}/reward.py:reward'}}",
        "{{name: best_of, base: {{name: best_of, scorer: '{0}/reward.py:reward'}}}}",
    ],
)
def test_an_import_path_in_a_job_file_is_refused(job, sampler):
    folder, write = job
    with pytest.raises(GenError, match=r"reward\.py:reward.*runs code.*--trust-job"):
        load_config(write(sampler.format(folder)))


def test_one_in_a_list_of_jobs_is_refused(job):
    folder, write = job
    path = write(f"[{{sampler: {{name: best_of, scorer: '{folder}/reward.py:reward'}}}}]", "jobs")
    with pytest.raises(GenError, match="runs code"):
        load_config(path)


@pytest.mark.parametrize(
    "key, value",
    [
        ("sweep", "{{sampler.scorer: ['{0}/reward.py:reward']}}"),
        ("sweep", "{{sampler: [{{name: best_of, scorer: '{0}/reward.py:reward'}}]}}"),
        ("model_options", "{{trust_remote_code: true}}"),
        ("model_options", "{{trust_remote_code: 'yes'}}"),
        ("sweep", "{{model_options.trust_remote_code: [true, false]}}"),
        ("jobs", "[{{model_options: {{trust_remote_code: true}}}}]"),
        ("jobs", "[{{sweep: {{model_options: [{{trust_remote_code: true}}]}}}}]"),
    ],
)
def test_code_in_sweeps_entries_and_model_folders_is_refused(job, key, value):
    folder, write = job
    with pytest.raises(GenError, match=r"runs code; expected it on the command line.*--trust-job"):
        load_config(write(value.format(folder), key))


def test_code_of_a_model_folder_does_not_run(job, capsys):
    """And it does for a trusted file: the canary is no trap that nothing would set off."""
    folder, write = job
    model, canary = folder / "model", folder / "canary"
    model.mkdir()
    (model / "own.py").write_text(f"open({str(canary)!r}, 'w').write('ran')\n")
    names = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (model / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": names}))
    path = write("{trust_remote_code: true}", "model_options")
    path.write_text(f"{path.read_text()}model: {model}\nout: {folder / 'out'}\n")
    path.write_text(path.read_text().replace("action", "text"))
    assert main(["run", str(path)]) == 2 and "--trust-job" in capsys.readouterr().err
    assert not canary.exists()
    assert main(["run", str(path), "--trust-job"]) != 0  # the code makes no model
    assert canary.exists()


def test_control_a_trusted_file_and_the_command_line_may_name_one(job):
    folder, write = job
    scorer = f"{folder}/reward.py:reward"
    path = write(f"{{name: best_of, scorer: '{scorer}'}}")
    assert load_config(path, trust_job=True)
    assert load_config(write("{name: best_of}"), [f"sampler.scorer={scorer}"])
