"""Project files agree with each other: versions, licence, workflows and the Makefile."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import gen

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
TARGETS = set(re.findall(r"^([a-z][\w-]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))


def steps(jobs: dict) -> list[str]:
    """The commands of a workflow's jobs."""
    return [s["run"] for job in jobs.values() for s in job["steps"] if "run" in s]


def called(text: str) -> set[str]:
    """The targets that a script makes."""
    lines = (line.partition("#")[0] for line in text.splitlines())
    found = (re.findall(r"\bmake ((?:[a-z][\w-]*\s*)+)", line) for line in lines)
    return {target for groups in found for group in groups for target in group.split()}


@pytest.fixture(scope="module")
def jobs() -> dict:
    return yaml.safe_load(WORKFLOW.read_text())["jobs"]


def test_workflows_call_targets_that_exist(jobs):
    commands = "\n".join(steps(jobs))
    assert {"check", "test", "test-slow", "wheel", "docs"} <= called(commands)
    assert called(commands) <= TARGETS


def test_workflows_do_what_the_local_script_does(jobs):
    local = called((ROOT / ".ci" / "run").read_text().partition("\nfi\n")[2])
    assert {"check", "test"} <= local <= called("\n".join(steps(jobs)))


def test_a_target_that_does_not_exist_would_be_found():
    assert called("make chekc  # make check\nmake test TORCH=x") - TARGETS == {"chekc"}


def test_tests_run_on_every_stated_python_and_on_two_versions_of_torch(jobs):
    stated = {c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)}
    matrix = jobs["tests"]["strategy"]["matrix"]
    assert set(matrix["python"]) == stated and min(stated, key=len) >= "3.11"
    assert PROJECT["requires-python"] == f">={sorted(stated)[0]}"
    torches = {*matrix["torch"], *(case["torch"] for case in matrix["include"])}
    assert len(torches) == 2
    (torch,) = (d for d in PROJECT["dependencies"] if d.startswith("torch>="))
    assert f"torch=={torch.partition('>=')[2]}.0" in torches  # the oldest
    assert re.search(r"^TORCH \?= (\S+)", (ROOT / "Makefile").read_text(), re.M)[1] in torches


def test_one_version_stands_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = re.search(r"^## \[(\d\S*)\] - (\d{4}-\d\d-\d\d)$", changelog(), re.MULTILINE)
    assert PROJECT["version"] == citation["version"] == newest[1]
    assert str(citation["date-released"]) == newest[2]


def changelog() -> str:
    return (ROOT / "CHANGELOG.md").read_text()


def test_code_and_models_have_one_licence():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text
    assert PROJECT["license"] == "Apache-2.0" and PROJECT["license-files"] == ["LICENSE"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["license"] == "Apache-2.0"
    cards = sorted((ROOT / "gen" / "zoo").glob("*/README.md"))
    assert len(cards) > 10
    for card in cards:
        head = yaml.safe_load(card.read_text().split("---\n")[1])
        assert head["license"] == "apache-2.0", card


def test_no_licence_classifier_stands_beside_the_expression():
    """Packaging tools refuse both at once."""
    assert not [c for c in PROJECT["classifiers"] if c.startswith("License")]


def test_the_version_is_read_from_the_metadata_and_importing_gen_imports_nothing_heavy():
    code = (
        "import sys, gen; print(gen.__version__, dir(gen));"
        "print([m for m in ('torch', 'transformers', 'numpy', 'psutil') if m in sys.modules])"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    first, second = done.stdout.splitlines()
    assert re.match(r"\d+\.\d+", first) and second == "[]", done.stderr
    assert "'__version__'" in first and "'transformers_generate'" in first
    assert not {"Path", "torchaudio_compat", "annotations"} & set(dir(gen))


def test_sources_that_were_never_installed_have_a_version_too(monkeypatch):
    from gen.core import versions

    monkeypatch.setattr(versions, "installed", lambda name: None)
    assert gen.__version__ == "0+unknown"


def test_contributors_find_what_the_page_names():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    links = re.findall(r"\]\(([^)#]+)", text)
    assert "docs/extending.md" in links
    assert [link for link in links if not (ROOT / link).is_file()] == []
    assert called(text) <= TARGETS
