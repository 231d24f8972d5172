"""``gen check`` judges gen's own models by their modality's checker, and no published model."""

from __future__ import annotations

import json

import families
import numpy as np
import pytest
from evaljob import write_job
from PIL import Image

from gen.__main__ import main
from gen.eval.check import check_folder
from gen.eval.checkers import no_checker
from gen.eval.metric import parse_metrics
from gen.eval.run import evaluate


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A tiny checkpoint in a published layout."""
    return families.llamagen(tmp_path_factory.mktemp("published")).path


def images(folder, **keys):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 64, 64, 3), dtype=np.uint8)
    return write_job(folder, lambda i, path: Image.fromarray(pixels[i]).save(path), 6, **keys)


def test_a_published_model_is_not_judged_by_the_toy_checker(tmp_path, published, capsys):
    job = images(tmp_path / "job", model=str(published))
    report = check_folder(job)
    reason = f"no checker for this model: {published} is a published checkpoint"
    assert report["unjudged"] == {reason: 6}
    assert (report["items"], report["passed"], report["failed"]) == (0, None, [])
    assert json.loads((job / "check.json").read_text()) == {}
    assert "index.html" in {p.name for p in job.iterdir()}
    assert main(["check", str(job)]) == 0
    assert f"6 items not judged: {reason}" in capsys.readouterr().out
    found = evaluate(job, parse_metrics("checker"))["metrics"]["checker"]
    assert found["scores"] == {} and found["skipped"] == {reason: 6}


def test_control_the_same_media_of_an_embedded_model_are_judged(tmp_path):
    for name, model in (("own", None), ("zoo", "image-causal")):
        report = check_folder(images(tmp_path / name, model=model))
        assert (report["items"], report["passed"], report["unjudged"]) == (6, 0.0, {})


def test_broken_media_of_a_published_model_still_fail_the_check(tmp_path, published):
    job = images(tmp_path / "job", model=str(published))
    (job / "000002-item.png").write_bytes(b"altered")
    (job / "000003-item.png").unlink()
    assert main(["check", str(job)]) == 1
    report = check_folder(job)
    details = [item["detail"] for item in report["failed"]]
    assert report["broken"] == 2 and sum(report["unjudged"].values()) == 4
    assert "sha256 differs" in details[0] and "is missing" in details[1]


def test_models_that_are_not_here_have_no_checker_and_nothing_is_downloaded(tmp_path, monkeypatch):
    import huggingface_hub

    download = huggingface_hub.snapshot_download

    def refuse(*names, **how):
        assert how.get("local_files_only"), "a download"
        return download(*names, **how)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    assert no_checker(None) is None and no_checker("image-causal") is None
    assert "is a published checkpoint" in no_checker("somebody/something")
    assert "is not found here" in no_checker(str(tmp_path / "gone"))
    own = tmp_path / "mine"
    own.mkdir()
    (own / "config.json").write_text('{"model_type": "gen_grid_llama"}')
    assert no_checker(str(own)) is None


def test_check_and_eval_agree_in_either_layout(tmp_path):
    import gen

    for layout in ("files", "shards"):
        out = tmp_path / layout
        config = {
            "modality": "text",
            "prompts": ["sort 3 1 2 =", "1 + 1 ="],
            "num_samples": 2,
            "out": str(out),
            "layout": layout,
        }
        path = tmp_path / f"{layout}.yaml"
        path.write_text(json.dumps(config))
        assert gen and main(["run", str(path)]) == 0
        report = check_folder(out)
        found = evaluate(out, parse_metrics("checker"))["metrics"]["checker"]
        assert found["scores"] == {k: report[k] for k in ("passed", "valid")}
        assert found["items"] == report["items"] == 4


def test_no_control_character_of_a_job_reaches_the_terminal(tmp_path, capsys):
    escape = "\x1b[31mred"
    job = images(tmp_path / "job", prompts=(escape,), samplers=(f"s{escape}",), model=escape)
    (job / "000002-item.png").unlink()
    assert main(["check", str(job)]) == 1
    assert main(["eval", str(job), "--metrics", "checker"]) == 1
    said = capsys.readouterr().out
    assert "[31mred" in said and "\x1b" not in said
