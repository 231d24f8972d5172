"""The summary of ``gen demo``: five lines that compare images of the same prompts and seeds."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from gen.__main__ import main
from gen.cli import demo
from gen.cli.demo import COMPARED, summary
from gen.config.job import load_config
from gen.store.ledger import CHECK, MANIFEST
from tests.support.ledgers import write_rows


@pytest.fixture
def folder(tmp_path):
    """A checked folder of two images of each sampler, and one of another modality."""
    rows, verdicts = [], {}
    for sampler in COMPARED:
        for seed in (0, 1):
            name = f"{len(rows):06d}.png"
            colour = (9, 9, seed + 5 * (sampler == "maskgit"))
            Image.new("RGB", (8, 8), colour).save(tmp_path / name)
            rows.append(
                {
                    "id": f"{sampler}{seed}",
                    "index": len(rows),
                    "modality": "image",
                    "sampler": f"{sampler} modality=image",
                    "model": "image-masked" if sampler == "maskgit" else "image-causal",
                    "file": name,
                    "status": "ok",
                    "nfe": 256 if sampler == "autoregressive" else 40,
                    "seconds": 1.5,
                }
            )
    rows.append({**rows[0], "id": "text", "index": 6, "modality": "text"})
    verdicts = {r["id"]: {"passed": r["id"] != "maskgit1"} for r in rows}
    write_rows(tmp_path / MANIFEST, rows)
    (tmp_path / CHECK).write_text(json.dumps(verdicts))
    return tmp_path


def test_the_summary_has_five_lines_that_count_what_is_in_the_folder(folder):
    lines = summary(folder)
    assert len(lines) == 5
    assert lines[0].startswith("2 images from the same prompts and seeds")
    assert lines[1] == "  autoregressive       256 forward passes   2 of 2 as prompted"
    assert lines[2].endswith("2 of 2 as prompted, 2 of 2 the same images")
    assert lines[3].endswith("1 of 2 as prompted")
    assert lines[4] == "7 outputs of 2 modalities: 6 of 7 as prompted"


def test_an_image_that_differs_is_not_counted_as_the_same(folder):
    row = json.loads((folder / MANIFEST).read_text().splitlines()[3])
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(folder / row["file"])
    assert summary(folder)[2].endswith("1 of 2 the same images")


def test_the_packaged_job_starts_with_what_the_summary_compares():
    entries = load_config("demo").entries
    assert [e.sampler["name"] for e in entries[:3]] == list(COMPARED)
    assert all(e.batch_size == 1 for e in entries[:3])
    assert entries[0].prompts == entries[1].prompts == entries[2].prompts


def test_the_summary_tells_no_time_of_a_single_run(folder):
    assert not any("1.5" in line or " s " in line for line in summary(folder))


@pytest.mark.parametrize(
    ("argv", "out"),
    [
        (["--out", "D"], "D"),
        (["--out", "2026", "seed=7"], "2026"),
        (["out=E"], "E"),
        ([], "out/demo"),
    ],
)
def test_the_files_go_where_the_command_says(argv, out, monkeypatch):
    ran = []

    def run_job(job, **_):
        ran.append(job.out)
        return {"pending": 1}  # as if it had been stopped

    monkeypatch.setattr(demo, "run_job", run_job)
    assert main(["demo", *argv]) == demo.STOPPED and ran == [out]


def test_two_folders_are_refused(capsys):
    assert main(["demo", "--out", "D", "out=E"]) == 2
    assert "out comes as --out 'D' and as 'out=E'" in capsys.readouterr().err
