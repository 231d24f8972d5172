"""Job folders of searches: records, sheets, other batches, crashes and damage."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image

from gen.config.job import make_job
from gen.jobs.run import run_job
from gen.jobs.searched import ENDING, LEVELS, WIDTH, search_record, shown_candidates
from gen.pipeline.candidates import CandidateOutput
from gen.store.ledger import RUNTIME, read_rows

SEARCH = {"name": "svdd", "base": {"name": "maskgit", "steps": 2}, "m": 2, "scorer": "checker"}
TREE = {
    "modality": "image",
    "sampler": SEARCH,
    "prompts": ["a large red circle at the top left", "a small blue triangle at the top"],
    "num_samples": 2,
    "trace": 0,
}


def made(out: Path, **keys) -> Path:
    run_job(make_job({**TREE, "out": str(out), **keys}, where="test"))
    return out


def contents(folder: Path) -> dict[str, str]:
    """Digests of all files that hold results, and the rows without what differs between runs."""
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.suffix in (".png", ".json", ".txt") and path.name != "plan.json"
    }
    for row in read_rows(folder):
        kept = {k: v for k, v in row.items() if k not in RUNTIME}
        found[row["id"]] = json.dumps(kept, sort_keys=True)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return made(tmp_path_factory.mktemp("searches") / "out")


def test_rows_say_how_the_search_went(folder):
    for row in read_rows(folder):
        record = row["search"]
        assert record["candidates"] == 4 and record["levels"] == 2
        assert record["passes"] == row["nfe"]
        assert record["level"] == [0, 0, 1, 1]
        assert record["parent"][:2] == [None, None] and set(record["parent"][2:]) <= {0, 1}
        assert len(record["score"]) == 4 and record["chosen"]


def test_a_sheet_holds_a_thumbnail_of_every_candidate(folder):
    for row in read_rows(folder):
        record = row["search"]
        width, height = record["cell"]
        assert row["also"][-1] == record["sheet"] and record["sheet"].endswith(ENDING)
        with Image.open(folder / record["sheet"]) as sheet:
            assert sheet.size == (4 * width, height)
            last = record["chosen"][-1]
            cell = sheet.convert("RGB").crop((last * width, 0, (last + 1) * width, height))
        with Image.open(folder / row["file"]) as output:
            assert cell.tobytes() == output.convert("RGB").tobytes()


def test_any_batch_size_gives_the_same_folder(folder, tmp_path):
    assert contents(made(tmp_path / "out", batch_size=1)) == contents(folder)


def test_control_another_search_gives_another_folder(folder, tmp_path):
    other = made(tmp_path / "out", sampler={**SEARCH, "m": 1})
    assert contents(other) != contents(folder)


def test_a_lost_sheet_is_made_again(folder, tmp_path):
    out = made(tmp_path / "out", num_samples=1)
    whole = contents(out)
    sheet = out / read_rows(out)[0]["search"]["sheet"]
    sheet.unlink()
    run_job(make_job({**TREE, "num_samples": 1, "out": str(out)}, where="test"))
    assert contents(out) == whole


@pytest.mark.slow
def test_a_killed_job_resumes_to_the_undisturbed_folder(folder, tmp_path):
    out = tmp_path / "out"
    tree = {**TREE, "out": str(out), "batch_size": 1}
    code = (
        "import json, sys\nfrom gen.config.job import make_job\nfrom gen.jobs.run import run_job\n"
        "run_job(make_job(json.loads(sys.argv[1]), where='test'))"
    )
    process = subprocess.Popen([sys.executable, "-c", code, json.dumps(tree)])
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if list(out.glob(f"*{ENDING}")):
            break
        time.sleep(0.01)
    assert process.poll() is None, "the job was over before it could be killed"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = len(read_rows(out))
    assert before < 4
    run_job(make_job(tree, where="test"))
    assert contents(out) == contents(folder)


def test_a_tar_holds_the_sheet_and_the_page_a_copy(folder, tmp_path):
    import tarfile

    out = made(tmp_path / "out", layout="shards")
    for row in read_rows(out):
        name = row["search"]["sheet"]
        with tarfile.open(out / row["file"]) as archive:
            packed = archive.extractfile(name).read()
        assert packed == (folder / name).read_bytes() == (out / "preview" / name).read_bytes()


# --- large searches


def tree_of(levels: int, width: int) -> list[CandidateOutput]:
    """A tree whose candidates all go on from number ``level % width`` of the level before."""
    return [
        CandidateOutput(
            torch.zeros(1),
            1 / 3,
            level,
            None if not level else (level - 1) % width,
            number == level % width,
            None,
            "",
            None,
            lambda: "text",
        )
        for level in range(levels)
        for number in range(width)
    ]


def test_large_searches_are_thinned_out_and_keep_the_path_to_the_output():
    candidates = tree_of(50, 40)
    shown = shown_candidates(candidates)
    levels = sorted({c.level for c, _ in shown})
    assert len(levels) == LEVELS and (levels[0], levels[-1]) == (0, 49)
    assert all(sum(c.level == level for c, _ in shown) == WIDTH for level in levels)
    path = [n for n, (c, _) in enumerate(shown) if c.chosen]
    assert len(path) == LEVELS
    assert [shown[n][1] for n in path[1:]] == path[:-1]


def test_the_record_of_a_thinned_search_says_how_large_it_was():
    record = search_record(tree_of(50, 40), 123, "stem")
    assert (record["candidates"], record["levels"], record["passes"]) == (2000, 50, 123)
    assert len(record["level"]) == LEVELS * WIDTH
    assert record["score"][0] == 0.333333 and record["text"][0] == "text"


def test_small_searches_are_shown_whole():
    assert len(shown_candidates(tree_of(3, 4))) == 12
