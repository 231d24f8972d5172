"""Job folders after the run: saving an output of the Python API as one, and checking the media in
one."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from ledgers import write_rows
from toyjob import PROMPTS, Pipe, Toy, files, job, run

from gen.cli.check import check_folder
from gen.config.job import load_config
from gen.contracts.modality import Verdict
from gen.core.edit_spec import EditSpec
from gen.core.errors import GenError
from gen.core.files import sha256
from gen.core.sampling_params import SamplingParams
from gen.jobs.progress.report import Silent
from gen.jobs.run import save_output
from gen.store.ledger import read_rows

pytestmark = pytest.mark.usefixtures("toy")


def output(prompts=PROMPTS, num_samples=2, **keys):
    pipe = Pipe()
    sampler = job("x", num_samples=num_samples).entries[0].sampler
    items = pipe.plan(prompts, num_samples, 4)
    out = pipe.generate(items, sampler, {}, trace=True, callback=Silent().step)
    given = {
        "spec": sampler,
        "guarantee": "approximate",
        "sampling": SamplingParams(),
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "start": EditSpec(),
    }
    for key, value in {**given, **keys}.items():
        setattr(out, key, value)
    return out


def test_saving_an_output_leaves_the_folder_that_a_job_would(tmp_path):
    assert save_output(output(), tmp_path / "api") == tmp_path / "api/index.html"
    run(tmp_path / "job", num_samples=2, seed=4, model=None)
    assert files(tmp_path / "api") == files(tmp_path / "job")
    rows = read_rows(tmp_path / "api")
    assert [(r["prompt"], r["seed"]) for r in rows] == [(p, s) for p in PROMPTS for s in (4, 5)]
    made = load_config(tmp_path / "api/config.yaml").entries[0]
    assert (made.prompts, made.num_samples, made.seed, made.sampler["window"]) == (
        PROMPTS,
        2,
        4,
        16,
    )
    assert len(list((tmp_path / "api/traces").iterdir())) == 6
    save_output(output(), tmp_path / "api")
    assert len(read_rows(tmp_path / "api")) == 6


def test_saving_refuses_a_folder_with_something_else(tmp_path):
    save_output(output(), tmp_path)
    with pytest.raises(GenError, match="different job"):
        save_output(output(num_samples=1), tmp_path)


def test_saving_an_edit_keeps_what_it_started_from(tmp_path):
    save_output(output(start=EditSpec(["start"], ["where"])), tmp_path / "o")
    entry = load_config(tmp_path / "o/config.yaml").entries[0]
    assert Path(entry.source).read_text().startswith("['start']") and Path(
        entry.mask
    ).read_text().startswith("['where']")
    save_output(output(start=EditSpec(["start"], ["where"])), tmp_path / "o")


def test_checking_reports_shares_and_writes_the_verdicts(tmp_path):
    run(tmp_path)
    report = check_folder(tmp_path)
    assert (report["items"], report["passed"], report["valid"], report["failed"]) == (
        3,
        1.0,
        1.0,
        [],
    )
    assert json.loads((tmp_path / "check.json").read_text())[
        read_rows(tmp_path)[0]["id"]
    ] == asdict(Verdict(True, True, "looked"))
    assert run(tmp_path)[0]["skipped"] == 3  # a checked folder still resumes


def test_checking_reports_broken_media_instead_of_crashing(tmp_path, monkeypatch):
    run(tmp_path, Pipe(bad=["gamma"]))
    (tmp_path / "000000-alpha-s0.txt").unlink()
    (tmp_path / "000001-beta-s0.txt").write_text("altered")
    report = check_folder(tmp_path)
    assert report["valid"] == report["passed"] == 0 and report["by_sampler"]["sjd"]["items"] == 3
    assert [
        w in f["detail"]
        for f, w in zip(report["failed"], ("missing", "sha256", "KeyError"), strict=True)
    ] == [True] * 3
    run(tmp_path)
    monkeypatch.setattr(
        Toy, "load", lambda self, path: (_ for _ in ()).throw(SyntaxError("not an image"))
    )
    assert "not an image" in check_folder(tmp_path)["failed"][0]["detail"]


def test_checking_never_follows_a_manifest_out_of_its_folder(tmp_path):
    run(tmp_path / "o")
    (tmp_path / "secret.txt").write_text("alpha")
    rows = read_rows(tmp_path / "o")
    rows[0].update(file="../secret.txt", sha256=sha256(tmp_path / "secret.txt"))
    write_rows(tmp_path / "o/manifest.jsonl", rows)
    assert "missing" in check_folder(tmp_path / "o")["failed"][0]["detail"]


def test_checking_needs_a_job_folder(tmp_path):
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(GenError, match="expected"):
            check_folder(folder)
