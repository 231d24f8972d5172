"""``gen sample -o``, formats, overrides and texts on the command line, with a closed-form pipe."""

from __future__ import annotations

import json
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from gen.__main__ import main
from gen.core.registry import registry
from gen.core.stats import Stats
from gen.media.images import read_image_info
from gen.store.ledger import read_rows

RING = "a small blue ring in the centre"


class Pipe:
    """Makes an image of the seed's colour, or the prompt as text."""

    device = torch.device("cpu")

    def __init__(self, name: str):
        self.modality = registry.get("modality", name)()

    def prompt_lengths(self, items, sampler):
        return [0] * len(items)

    def guarantee(self, sampler):
        return sampler.guarantee

    def turns(self, sampler):
        return 1

    def plan(self, prompts, num_samples, seed):
        return [
            types.SimpleNamespace(prompt=p, seed=seed + j, max_new_tokens=None)
            for p in prompts
            for j in range(num_samples)
        ]

    def model_name(self, sampler):
        return "closed-form"

    def medium(self, item):
        if self.modality.name == "text":
            return f"{item.prompt} {item.seed}"
        return Image.fromarray(np.full((64, 64, 3), 10 * item.seed, np.uint8))

    def generate(self, items, sampler, sampling, **how):
        return types.SimpleNamespace(
            media=[self.medium(i) for i in items],
            stats=[Stats(3, 12, 12, 12, 4, seconds=0.1) for _ in items],
            traces=None,
            logprobs=None,
            items=items,
            model="closed-form",
            grid=(),
        )


@pytest.fixture(autouse=True)
def pipe(monkeypatch, tmp_path):
    monkeypatch.setattr("gen.pipeline.pipeline.load", lambda modality, **how: Pipe(modality))
    monkeypatch.setattr(
        "gen.gallery.write.write_gallery",
        lambda folder: (folder / "index.html").write_text("gallery") and folder / "index.html",
    )
    monkeypatch.delenv("GEN_DEBUG", raising=False)
    monkeypatch.chdir(tmp_path)


def gen(capsys, *argv) -> tuple[int, str, str]:
    code = main([str(a) for a in argv])
    out, err = capsys.readouterr()
    return code, out, err


def refused(capsys, *argv) -> str:
    code, out, err = gen(capsys, *argv)
    assert code == 2 and out == "" and err.count("\n") == 1, err
    return err


@pytest.mark.parametrize("suffix, kind", [("png", "PNG"), ("webp", "WEBP"), ("jpeg", "JPEG")])
def test_one_file_in_the_format_of_its_name_and_nothing_beside_it(capsys, suffix, kind):
    code, out, _ = gen(capsys, "sample", "image", RING, "--seed", 3, "-o", f"ring.{suffix}")
    assert (code, out) == (0, f"ring.{suffix}\n") and [p.name for p in Path().iterdir()] == [
        f"ring.{suffix}"
    ]
    with Image.open(f"ring.{suffix}") as image:
        assert image.format == kind and image.size == (64, 64)
        assert np.abs(np.asarray(image.convert("RGB")).astype(int) - 30).max() <= 2
    assert read_image_info(f"ring.{suffix}")["prompt"] == RING


def test_several_samples_are_numbered_and_a_folder_is_kept_where_it_is_named(capsys):
    code, out, _ = gen(capsys, "sample", "image", RING, "-n", 2, "-o", "a.png", "--out", "kept")
    assert code == 0 and out.split() == ["a-0.png", "a-1.png"]
    rows = read_rows(Path("kept"))
    assert [r["seed"] for r in rows] == [0, 1]
    for row, name in zip(rows, out.split(), strict=True):
        assert Path("kept", row["file"]).read_bytes() == Path(name).read_bytes()


def test_a_file_that_exists_stays(capsys):
    Path("a.png").write_text("mine")
    assert "a.png exists" in refused(capsys, "sample", "image", RING, "-o", "a.png")
    assert Path("a.png").read_text() == "mine"


@pytest.mark.parametrize(
    "argv, says",
    [
        (["-o", "ring"], "expected a name with an extension"),
        (["-o", "ring.gif"], "format is 'gif'"),
        (["-o", "nowhere/ring.png"], "a folder that exists"),
        (["-o", "ring.png", "--format", "webp"], "expected one format"),
        (["-o", "-", "-n", "2"], "num_samples is 2"),
        (["--out", "ring.png"], "-o ring.png writes one file"),
        (["--format", "tiff"], "png or webp or jpg"),
        (["seed=5", "--seed", "6"], "seed comes as --seed 6 and as 'seed=5'"),
        (["sampler=sjd", "--sampler", "maskgit"], "expected one of them"),
        (["sampling.top_k=5", "--top-k", "6"], "sampling.top_k comes as --top-k 6"),
        (["--put", "seed=5"], "unknown flag '--put'"),
        (["--sampler", "sjd", "sampler.windw=3"], "Did you mean 'window'"),
    ],
)
def test_a_wrong_name_or_a_value_that_comes_twice_is_refused(capsys, argv, says):
    assert says in refused(capsys, "sample", "image", RING, *argv)
    assert not list(Path().iterdir())


def test_stdout_takes_the_bytes_of_a_medium_alone(capfdbinary):
    assert main(["sample", "image", RING, "-o", "-", "--format", "webp"]) == 0
    data = capfdbinary.readouterr().out
    assert data[:4] == b"RIFF" and data[8:12] == b"WEBP" and not list(Path().iterdir())


def test_overrides_and_underscores_work_as_flags_do(capsys):
    one = ["sample", "image", RING, "--num_samples=2", "--batch_size", "3", "--out", "a"]
    two = ["sample", "image", "num_samples=2", RING, "--out", "b", "batch_size=3"]
    two[2], two[3] = two[3], two[2]
    assert gen(capsys, *one)[0] == gen(capsys, *two)[0] == 0
    a, b = (yaml.safe_load(Path(x, "config.yaml").read_text()) for x in "ab")
    assert (a.pop("out"), b.pop("out")) == ("a", "b")
    assert a == b and (a["batch_size"], a["num_samples"]) == (3, 2)


def test_a_text_is_printed(capsys):
    code, out, _ = gen(capsys, "sample", "text", "sort 3 1 2 =", "-n", 2, "--out", "a")
    assert code == 0 and out.splitlines()[:2] == ["sort 3 1 2 = 0", "sort 3 1 2 = 1"]
    code, out, _ = gen(capsys, "sample", "text", "sort 3 1 2 =", "-n", 2, "-o", "-")
    assert (code, out) == (0, "sort 3 1 2 = 0\nsort 3 1 2 = 1\n")


def test_a_job_in_another_format_has_its_names_rows_and_fingerprint(capsys):
    for name in ("png", "webp"):
        argv = ["sample", "image", RING, "--format", name, "--out", name]
        assert gen(capsys, *argv)[0] == 0
    one, other = (read_rows(Path(n))[0] for n in ("png", "webp"))
    assert other["file"].endswith(".webp") and one["file"].endswith(".png")
    assert one["id"] != other["id"]
    about = json.loads(Path("webp", other["file"]).with_suffix(".json").read_text())
    assert about["job"]["format"] == "webp" and "different job" in refused(
        capsys, "sample", "image", RING, "--out", "png", "--format", "webp"
    )
    assert gen(capsys, "sample", "image", RING, "--format", "webp", "--out", "webp")[0] == 0


def test_words_of_a_summary_agree_with_their_numbers(capsys):
    _, out, err = gen(capsys, "sample", "image", RING, "--out", "a")
    assert "speculative_jacobi: 1 item, 3 forward passes and 0.1 s\n" in out
    assert "gen: 1 item\n" in err
    _, out, _ = gen(capsys, "sample", "image", RING, "--out", "a")
    assert "the item exists, nothing to do" in out
    assert "the item exists, nothing to do" in gen(capsys, "work", "a")[1]
    _, out, err = gen(capsys, "sample", "image", RING, "-n", 2, "--out", "b")
    assert "2 items, 3 forward passes and 0.1 s per item (means)" in out
    assert "3.0 forward passes/item" in err


def test_tilde_is_the_home_folder_everywhere(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    Path("home").mkdir()
    assert gen(capsys, "sample", "image", RING, "--out", "~/a")[0] == 0
    assert gen(capsys, "sample", "image", RING, "out=~/b")[0] == 0
    assert gen(capsys, "sample", "image", RING, "-o", "~/c.png")[0] == 0
    Path("job.yaml").write_text(f"modality: image\nprompts: [{RING}]\nout: ~/d\n")
    assert gen(capsys, "run", "job.yaml")[0] == 0
    Path("home/p.txt").write_text(RING + "\n")
    assert gen(capsys, "run", "job.yaml", "prompts_file=~/p.txt", "out=~/e")[0] == 0
    assert {p.name for p in Path("home").iterdir()} == {"a", "b", "c.png", "d", "e", "p.txt"}
    assert not Path("~").exists()
    assert gen(capsys, "status", "~/a")[0] == 0
