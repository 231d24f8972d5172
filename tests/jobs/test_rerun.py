"""What a medium says of its making makes it again: the text chunk of a PNG, the comment of a clip,
the JSON beside every medium."""

from __future__ import annotations

import json
import shutil

import pytest
from PIL import Image

from gen.config.job import make_job
from gen.jobs.run import run_job
from gen.media.containers import read_info
from gen.store.ledger import read_rows

QUICK = {"image": "maskgit", "text": "fast_dllm", "speech": "maskgit"}
PROMPT = {
    "image": ["a small blue ring in the centre", "a large red circle at the top left"],
    "text": ["sort 3 1 2 ="],
    "speech": ["three seven"],
}


def made(out, **tree):
    run_job(make_job({"out": str(out), "dtype": "float64", **tree}, where="test"))
    rows = read_rows(out)
    return rows, [(out / r["file"]).read_bytes() for r in rows]


@pytest.mark.parametrize("modality", QUICK)
@pytest.mark.thinned(3)
def test_the_job_in_a_file_makes_the_same_file(modality, tmp_path):
    sampler = {"name": QUICK[modality], **({"steps": 4} if modality != "text" else {})}
    rows, media = made(
        tmp_path / "a",
        modality=modality,
        sampler=sampler,
        prompts=PROMPT[modality],
        num_samples=2,
        seed=5,
    )
    row, path = rows[-1], tmp_path / "a" / rows[-1]["file"]
    beside = json.loads(path.with_suffix(".json").read_text())
    inside = {
        "image": lambda: Image.open(path).text,
        "speech": lambda: read_info(path),
        "text": lambda: {"job": json.dumps(beside["job"])},
    }[modality]()
    assert (
        json.loads(inside["job"]) == beside["job"]
        and beside["id"] == row["id"]
        and beside["sha256"] == row["sha256"]
    )
    again, copies = made(tmp_path / "b", **beside["job"])
    assert (
        len(copies) == 1
        and copies[0] == media[-1]
        and again[0]["id"] == row["id"]
        and again[0]["sha256"] == row["sha256"]
    )
    other = {**beside["job"], "seed": beside["job"]["seed"] + 1}
    assert made(tmp_path / "c", **other)[0][0]["id"] != row["id"]  # the control


def test_a_job_goes_on_with_the_weights_that_it_began_with(tmp_path):
    from gen.core.errors import GenError
    from gen.models.load.locate import zoo

    shutil.copytree(zoo()["text-masked"], tmp_path / "text-masked")
    shutil.copytree(zoo()["text-words"], tmp_path / "text-words")
    tree = {
        "modality": "text",
        "sampler": "fast_dllm",
        "prompts": PROMPT["text"],
        "model": str(tmp_path / "text-masked"),
    }
    made(tmp_path / "a", **tree)
    made(tmp_path / "a", **tree)  # the control
    path = tmp_path / "text-masked" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))
    with pytest.raises(GenError, match="other weights of model .*text-masked"):
        made(tmp_path / "a", **tree)
