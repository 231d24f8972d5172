"""Scorers that are import paths run code, so a job file alone may not name one."""

from __future__ import annotations

import pytest

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


def test_control_a_trusted_file_and_the_command_line_may_name_one(job):
    folder, write = job
    scorer = f"{folder}/reward.py:reward"
    path = write(f"{{name: best_of, scorer: '{scorer}'}}")
    assert load_config(path, trust_job=True)
    assert load_config(write("{name: best_of}"), [f"sampler.scorer={scorer}"])
