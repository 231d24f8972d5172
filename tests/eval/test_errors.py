"""Each wrong argument of ``gen eval`` is one clear error; metrics are one file each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from evaljob import write_job
from PIL import Image

from gen.__main__ import main
from gen.eval import metric as metric_room

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 4, 4, 3), dtype=np.uint8)
    folder = tmp_path_factory.mktemp("jobs")
    write_job(folder / "job", lambda i, path: Image.fromarray(pixels[i]).save(path), 6)
    (folder / "empty").mkdir()
    (folder / "texts").mkdir()
    (folder / "texts" / "a.txt").write_text("a")
    (folder / "note.txt").write_text("no module")
    (folder / "half.npz").write_bytes(b"PK")
    return folder


WRONG = [
    ([], "--metrics is missing"),
    (["--metrics", ""], "--metrics is ''; expected names separated by commas, of checker, "),
    (["--metrics", "fidd"], "unknown metric 'fidd' in --metrics. Did you mean 'fid'?"),
    (["--metrics", "fid"], "fid.features is missing; expected module:name"),
    (["--metrics", "clip_score"], "clip_score.model is missing; expected a folder or hub id"),
    (["--metrics", "wer"], "wer.asr is missing; expected module:name"),
    (["--metrics", "geneval"], "geneval.results is missing; expected the results.jsonl"),
    (["--metrics", "fid", "fid.features=identity"], "fid compares with a reference; expected --re"),
    (["--metrics", "fid", "fid.feature=identity"], "unknown parameter of metric fid 'feature'."),
    (["--metrics", "fid", "fid.features=3"], "fid.features is 3; expected module:name"),
    (
        ["--metrics", "fid", "fid.features=identity", "fid.batch_size=0"],
        "fid.batch_size is 0; expected an integer of at least 1",
    ),
    (["--metrics", "fid", "kid.features=identity"], "unknown metric 'kid' in the argument"),
    (["--metrics", "fid", "features=identity"], "expected METRIC.PARAMETER=VALUE, such as fid."),
    (["--metrics", "checker", "checker.x=1"], "checker.x is given; metric checker has no param"),
    (["--metrics", "checker", "--reference", "{}/empty"], "none of checker compares with a refe"),
    (["--metrics", "checker", "--workers", "0"], "--workers is 0; expected an integer of at leas"),
    (["--metrics", "checker", "--workers", "x"], "invalid int value: 'x'"),
    (["--metrics", "checker", "--device", "gpu"], "gpu"),
    (["--metrics", "checker", "--metric", "x"], "unknown flag '--metric'. Did you mean '--metri"),
    (["--metrics", "exact_match"], "metric exact_match measures text files; "),
    (
        ["--metrics", "fad", "fad.features=identity", "--reference", "{}/empty"],
        "metric fad measures audio files; ",
    ),
    (
        ["--metrics", "fid", "fid.features=identity", "--reference", "{}/nowhere"],
        "nowhere does not exist; expected a job folder or a folder of media",
    ),
    (
        ["--metrics", "fid", "fid.features=identity", "--reference", "{}/texts"],
        "texts has no image file",
    ),
    (
        ["--metrics", "fid", "fid.features=identity", "--reference", "{}/half.npz"],
        "half.npz cannot be read as an .npz file",
    ),
    (
        ["--metrics", "kid", "kid.features=identity", "--reference", "{}/half.npz"],
        "half.npz is a file; metric kid expected a job folder or a folder of media",
    ),
    (
        ["--metrics", "fid", "fid.features=no.such:thing", "--reference", "{}/job"],
        "fid.features is 'no.such:thing', which cannot be imported: ModuleNotFoundError",
    ),
    (
        ["--metrics", "fid", "fid.features=math:pi", "--reference", "{}/job"],
        "fid.features is 'math:pi', a float; expected module:name",
    ),
    (
        ["--metrics", "fid", "fid.features={}/note.txt", "--reference", "{}/job"],
        "note.txt, which is not a TorchScript file",
    ),
    (
        ["--metrics", "fid", "fid.features={}/gone", "--reference", "{}/job"],
        "gone', which cannot be loaded",
    ),
    (["--metrics", "clip_score", "clip_score.model={}/empty"], "which cannot be loaded"),
    (["--metrics", "geneval", "geneval.results={}/gone"], "gone, which cannot be read"),
    (["--write-geneval", "{}/out", "--metrics", "checker"], "are two steps; expected one of them"),
    (["--write-geneval", "{}/out"], "has no tag in its meta"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=lambda x: str(x)[:40])
def test_wrong_arguments_are_one_error_each(job, capsys, arguments, message):
    arguments = [a.replace("{}", str(job)) for a in arguments]
    assert main(["eval", str(job / "job"), *arguments]) == 2
    said = capsys.readouterr()
    assert message in said.err and said.err.startswith("gen: ") and said.err.count("\n") == 1
    assert said.out == ""


def test_folders_without_a_job_are_refused(job, capsys):
    for folder, message in (("empty", "holds no plan.json"), ("gone", "is not a folder")):
        assert main(["eval", str(job / folder), "--metrics", "checker"]) == 2
        assert message in capsys.readouterr().err


def test_a_missing_package_names_the_extra(job, capsys, monkeypatch):
    monkeypatch.setattr(metric_room, "find_spec", lambda name: None)
    assert main(["eval", str(job / "job"), "--metrics", "kid", "kid.features=identity"]) == 2
    said = capsys.readouterr().err
    assert 'kid needs the package torchmetrics; install it with: pip install "gen-toolkit[' in said


def test_figures_are_printed_and_kept(job, capsys):
    command = ["eval", str(job / "job"), "fid.features=identity", "--metrics", "fid,checker"]
    command += ["--reference", str(job / "job")]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((job / "job" / "eval" / "results.json").read_text())
    assert abs(found["metrics"]["fid"]["scores"]["fid"]) < 1e-6  # a set against itself
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["metric", "sampler", "items", "figure", "value"]
    assert [line.split()[0] for line in lines[1:]] == ["fid", "checker", "checker"]


DROPPED = '''
"""Mean brightness of images."""
from dataclasses import dataclass
import numpy as np
from gen.core.registry import register
from gen.eval.metric import Metric
from gen.eval.readers import read_image

{declare}@register("metric", "brightness")
@dataclass(frozen=True)
class Brightness(Metric):
    """Mean brightness of images."""
    name, media = "brightness", ("image",)

    def read(self, item, model):
        return float(read_image(item.path).double().mean())

    def measure(self, samples, model):
        values = [value for _, value in samples]
        return {{"sum": np.asarray(sum(values)), "count": np.asarray(len(values))}}

    def scores(self, total, reference):
        return {{"brightness": float(total["sum"] / total["count"])}}
'''
REPORT = """
import json, sys
from gen.__main__ import main
main(["ls", "metrics"])
sys.exit(main(["eval", sys.argv[1], "--metrics", "brightness"]))
"""


def dropped(folder, job, declare):
    for room in ("samplers", "modalities", "tokenizers", "configs", "recipes"):
        (folder / room).symlink_to(ROOT / room)
    ignore = shutil.ignore_patterns("zoo", "__pycache__")
    shutil.copytree(ROOT / "gen", folder / "gen", symlinks=True, ignore=ignore)
    (folder / "gen" / "zoo").symlink_to(ROOT / "gen" / "zoo")
    path = folder / "gen" / "eval" / "metrics" / "brightness.py"
    path.write_text(DROPPED.format(declare=declare).lstrip())
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", REPORT, str(job / "job")],
        env={**os.environ, "PYTHONPATH": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_metric_is_one_file(tmp_path, job):
    done = dropped(tmp_path, job, "")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert any(line[:2] == ["brightness", "image"] for line in lines)  # gen ls metrics
    value = next(line[4] for line in lines if line[:2] == ["brightness", "all"])
    paths = sorted((job / "job").glob("*.png"))
    expected = np.mean([np.asarray(Image.open(path)).mean() for path in paths])
    assert abs(float(value) - expected) < 1e-3


@pytest.mark.slow
def test_control_without_its_declaration_a_metric_is_unknown(tmp_path, job):
    done = dropped(tmp_path, job, "# ")
    assert done.returncode == 2 and "unknown metric 'brightness'" in done.stderr
    assert "brightness" not in done.stdout
