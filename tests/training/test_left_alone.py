"""Training that can be left alone: it stops early, in the precision and the parts that were asked
for, with samples as it learns."""

from __future__ import annotations

from pathlib import Path

import own_media
import pytest
import torch
from safetensors.torch import load_file

from gen.core.errors import GenError
from gen.training import loop as looping
from gen.training.config import SIZES, NewModel, load_training, make_training
from gen.training.encode import encode_folder
from gen.training.run import train

TINY = {"model": {"width": 32, "layers": 1}, "batch_size": 4, "log_every": 2, "save_every": 2}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("texts")
    encode_folder("text", own_media.text(root / "media", 24), root / "D")
    return root / "D"


def config(data: Path, out: Path, **more):
    return make_training({**TINY, "data": str(data), "out": str(out), **more}, "here")


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model" / "model.safetensors")


def distance(a: Path, b: Path) -> float:
    one, other = weights(a), weights(b)
    return max(float((one[k] - other[k]).abs().max()) for k in one)


# few samples, learned by heart: the held-out loss rises soon
BY_HEART = {
    "steps": 40, "patience": 6, "lr": 2e-2, "validation": 0.5, "average": False, "drop": 0.0,
    "warmup": 0,
}  # fmt: skip


class Killed(Exception):
    """Stands for the end of a process."""


def test_a_run_stops_early_with_the_weights_of_the_lowest_held_out_loss(
    tokens, tmp_path, monkeypatch
):
    said: list[str] = []
    done = train(config(tokens, tmp_path / "E", **BY_HEART), said.append)
    checkpoint = torch.load(tmp_path / "E" / looping.CHECKPOINT, weights_only=True)
    held = {r["step"]: r["validation"] for r in checkpoint["rows"] if "validation" in r}
    best = min(held, key=held.get)
    assert done["steps"] == best + 6 < 40 and max(held) == done["steps"]
    assert done["validation"] == pytest.approx(held[best], abs=1e-5)
    assert done["validation"] < held[done["steps"]]  # control: the last weights
    assert f"the weights of step {best}, whose validation" in said[-1]
    whole = train(config(tokens, tmp_path / "all", **BY_HEART | {"patience": 0}))  # control
    assert whole["steps"] == 40 and whole["validation"] > done["validation"]
    # a run that is killed goes on and stops after the same step; a finished one stays so
    update = looping.Loop._update

    def dies(loop):
        if loop.step == best + 3:
            raise Killed
        update(loop)

    monkeypatch.setattr(looping.Loop, "_update", dies)
    with pytest.raises(Killed):
        train(config(tokens, tmp_path / "K", **BY_HEART))
    monkeypatch.undo()
    for _ in range(2):
        assert train(config(tokens, tmp_path / "K", **BY_HEART))["steps"] == done["steps"]
        assert distance(tmp_path / "K", tmp_path / "E") == 0


def test_parts_of_a_batch_add_up_to_the_batch(tokens, tmp_path):
    more = {"steps": 3, "drop": 0.0, "precision": "float32", "average": False}
    for name, keys in {
        "whole": {},
        "parts": {"accumulate": 4},
        "smaller": {"batch_size": 2},
    }.items():
        train(config(tokens, tmp_path / name, **more, **keys))
    assert distance(tmp_path / "parts", tmp_path / "whole") < 1e-4
    assert distance(tmp_path / "smaller", tmp_path / "whole") > 1e-3  # control
    with pytest.raises(GenError, match="batch_size is 4; expected a multiple of 3: processes x ac"):
        train(config(tokens, tmp_path / "bad", accumulate=3))


def test_the_precision_is_the_one_that_was_asked_for(tokens, tmp_path, monkeypatch):
    seen: list[torch.dtype] = []
    linear = torch.nn.functional.linear

    def watched(x, weight, bias=None):
        seen.append(weight.dtype)
        return linear(x, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", watched)
    for precision, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        seen.clear()
        out = tmp_path / precision
        train(config(tokens, out, steps=1, precision=precision))
        assert set(seen) == {dtype}
        saved = torch.load(out / looping.CHECKPOINT, weights_only=True)["model"]
        assert {v.dtype for v in saved.values()} == {torch.float32}


def test_samples_are_on_the_page_as_it_learns_and_the_time_that_is_left(tokens, tmp_path):
    out, said, pages = tmp_path / "E", [], {}

    def say(text: str) -> None:
        said.append(text)
        if (out / "index.html").is_file():
            pages[len(said)] = (out / "index.html").read_text()

    more = {"steps": 6, "sample_every": 4, "samples": ["sort 3 1 2 ="]}
    train(config(tokens, out, **more), say)
    steps = [line for line in said if line.startswith("step ")]
    assert all(line.endswith(" left") for line in steps[:-1]) and not steps[-1].endswith("left")
    early = next(iter(pages.values()))
    assert "step 2 of 6" in early and "step-000004" not in early  # a page with the curve so far
    assert 'learning/step-000004/index.html"' in list(pages.values())[-1]
    last = (out / "index.html").read_text()
    assert 'href="samples/index.html"' in last and 'learning/step-000004/index.html"' in last
    assert (out / "learning" / "step-000004" / "manifest.jsonl").is_file()
    plain = tmp_path / "plain"  # control: samples change no weights
    train(config(tokens, plain, steps=6))
    assert distance(out, plain) == 0


def test_one_checkpoint_is_kept_and_does_not_grow(tokens, tmp_path):
    sizes = []
    for steps in (2, 6):
        train(config(tokens, tmp_path / str(steps), steps=steps))
        found = [p for p in (tmp_path / str(steps)).rglob("*") if p.suffix == ".pt"]
        sizes += [p.stat().st_size for p in found]
    assert len(sizes) == 2 and abs(sizes[1] - sizes[0]) < 2000  # rows of the log


def test_sizes_have_names(tmp_path):
    given = ["data=D", "out=E"]
    file = load_training("train/image-quick", given).model
    assert file == NewModel(64, 2)
    assert load_training("train/image-quick", [*given, "model.size=base"]).model == NewModel(256, 6)
    made = make_training({"data": "D", "out": "E", "model": {"size": "small", "layers": 9}}, "x")
    assert made.model == NewModel(128, 9) and all(w % 32 == 0 for w, _ in SIZES.values())
    with pytest.raises(GenError, match=r"unknown model.size 'smal'.* Did you mean 'small'"):
        load_training("train/image-quick", [*given, "model.size=smal"])


def test_patience_needs_held_out_samples(tokens, tmp_path):
    with pytest.raises(GenError, match="patience is set, and no samples are held out"):
        train(config(tokens, tmp_path / "E", patience=4, validation=0.0, steps=1))


def test_a_first_try_that_failed_leaves_a_folder_for_the_next(tokens, tmp_path):
    with pytest.raises(GenError, match="expected at least 64, the batch_size"):
        train(config(tokens, tmp_path / "E", batch_size=64, steps=1))
    assert train(config(tokens, tmp_path / "E", steps=1))["steps"] == 1
    with pytest.raises(GenError, match="another run, which differs in seed"):  # control
        train(config(tokens, tmp_path / "E", steps=1, seed=1))
