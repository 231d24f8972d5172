"""The summary of ``gen demo``: five lines that compare images of the same prompts and seeds."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from gen.__main__ import main
from gen.bench.beside import REPEATS, relative
from gen.cli import demo
from gen.cli.demo import COMPARED, summary
from gen.config.job import load_config
from gen.jobs.worker import Pipes
from gen.store.ledger import MANIFEST, WINDOWS
from gen.store.sealed import seal
from tests.support.ledgers import write_rows, write_verdicts


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
    write_verdicts(tmp_path, verdicts)
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


def test_times_of_interleaved_repeats_stand_beside_the_passes(folder):
    seconds = {"autoregressive": [1.0, 2.0, 3.0], "speculative_jacobi": [0.5, 1.0, 1.6]}
    times, noise = relative({**seconds, "maskgit": [0.1, 0.2, 0.3]})
    lines = summary(folder, times)
    assert noise is None and len(lines) == 5
    assert lines[1].startswith("  autoregressive       256 forward passes   time 1.00 ")
    assert "40 forward passes   time 0.50 (0.50-0.53)   2 of 2 as prompted" in lines[2]
    assert "forward passes   time 0.10 (0.10-0.10)   1 of 2" in lines[3]


def test_repeats_that_disagree_leave_the_passes_alone(folder):
    seconds = {"autoregressive": [1.0, 1.0, 1.0], "speculative_jacobi": [0.5, 1.0, 1.6]}
    times, noise = relative(seconds)
    assert times == {} and summary(folder, times) == summary(folder)
    assert noise == "the middle half of the repeats differs by 73% (speculative_jacobi)"


def test_the_times_are_those_of_the_jobs_windows_warm_and_in_turns(tmp_path, monkeypatch):
    decoded = []

    def measure(pipe, items, row, size, callback, *, check):
        decoded.append((row.label, row.spec.get("window"), row.sampling))
        return {"seconds": 1.0}

    (tmp_path / WINDOWS).mkdir()
    (tmp_path / WINDOWS / "1.json").write_bytes(seal({"window": 7}))
    monkeypatch.setattr("gen.bench.beside.measure", measure)
    monkeypatch.setattr(Pipes, "of", lambda self, entry: SimpleNamespace(plan=lambda *_: ["item"]))
    job = load_config("demo", [f"out={tmp_path}"])
    times, noise = demo.timed(job)
    assert noise is None and list(times) == list(COMPARED)
    assert [name for name, *_ in decoded[:2]] == list(COMPARED[1:]), "the first of them warms up"
    names = [name for name, *_ in decoded[2:]]
    assert len(names) == 3 * REPEATS and names[::3] == [COMPARED[n % 3] for n in (1, 2, 3)]
    assert all(sorted(names[n : n + 3]) == sorted(COMPARED) for n in range(0, len(names), 3))
    assert {w for name, w, _ in decoded if name == "speculative_jacobi"} == {7}
    assert all(sampling == job.entries[0].sampling for *_, sampling in decoded)


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
