"""Training on tokens: losses fall, a killed run ends with the weights of one that was not, and what
does not fit is refused."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import own_media
import pytest
import torch
from diffusers import VQModel
from safetensors.torch import load_file

import gen
from gen.core.errors import GenError
from gen.training import loop as looping
from gen.training.config import make_training
from gen.training.data import Batches, load_data, split
from gen.training.encode import EncodeOptions, encode_folder
from gen.training.run import train
from gen.training.tasks import GridTask, make_task

ROOT = Path(__file__).parents[2]
TINY = {"model": {"width": 32, "layers": 1}, "batch_size": 4, "log_every": 2, "save_every": 2}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    """Tokens of texts, the smallest data."""
    root = tmp_path_factory.mktemp("texts")
    encode_folder("text", own_media.text(root / "media", 40), root / "D")
    return root / "D"


def config(data: Path, out: Path, **more):
    return make_training({**TINY, "data": str(data), "out": str(out), **more}, "here")


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model" / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def rows(out: Path) -> list[dict]:
    """The log without what depends on the clock."""
    lines = (out / "log.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(x).items() if k != "seconds"} for x in lines]


@pytest.mark.parametrize(
    ("objective", "more"),
    [("causal", {}), ("masked", {}), ("block", {"block": 4, "share": 0.5})],
)
def test_the_loss_falls_and_the_model_decodes(objective, more, tokens, tmp_path):
    out = tmp_path / "E"
    done = train(config(tokens, out, objective=objective, steps=40, lr=5e-3, **more))
    log = rows(out)
    start = math.log(load_data(tokens).encoder.frontend.config.codebook_sizes[0])
    assert log[0]["loss"] > start - 0.5 and log[-1]["loss"] < start - 0.8
    assert done["validation"] < start - 0.5
    assert [r["step"] for r in log] == list(range(2, 41, 2))
    page = (out / "index.html").read_text()
    assert "<svg" in page and "learning curve" in page and (out / "curve.svg").is_file()
    pipe = gen.load("text", str(out / "model"))
    assert {"causal": "causal", "masked": "masked", "block": "blocks"}[objective] in (
        pipe.config["protocols"]
    )
    assert len(pipe(["sort 3 1 2 ="], seed=0).tokens[0]) >= 1


class Killed(Exception):
    """Stands for the end of a process."""


@pytest.mark.parametrize("objective", ["causal", "masked"])
@pytest.mark.parametrize("at", [1, 4, 5])
@pytest.mark.thinned(3)
def test_a_killed_run_ends_with_the_weights_of_one_that_was_not(
    objective, at, tokens, tmp_path, monkeypatch
):
    more = {"objective": objective, "steps": 6}
    train(config(tokens, tmp_path / "whole", **more))
    update = looping.Loop._update

    def dies(loop):
        if loop.step == at:
            raise Killed
        update(loop)

    monkeypatch.setattr(looping.Loop, "_update", dies)
    with pytest.raises(Killed):
        train(config(tokens, tmp_path / "E", **more))
    monkeypatch.undo()
    said: list[str] = []
    train(config(tokens, tmp_path / "E", **more), said.append)
    assert said[0] == f"resumed at step {at // 2 * 2}" if at > 1 else "resumed" not in said[0]
    assert same(weights(tmp_path / "E"), weights(tmp_path / "whole"))
    assert rows(tmp_path / "E") == rows(tmp_path / "whole")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_asked_to_stop_keeps_its_last_step(number, tokens, tmp_path, monkeypatch):
    """Far from the next checkpoint, with the signal in the middle of a step."""
    more = {"steps": 7, "save_every": 100, "log_every": 3}
    train(config(tokens, tmp_path / "whole", **more))
    loss = GridTask.loss

    def asked(task, forward, rows, seed, drop):
        os.kill(os.getpid(), number)
        return loss(task, forward, rows, seed, drop)

    for at in (1, 2, 3):
        said: list[str] = []
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(GridTask, "loss", asked)
            train(config(tokens, tmp_path / "E", **more), said.append)
        assert said[0] == f"resumed at step {at - 1}" if at > 1 else "received" in said[0]
    train(config(tokens, tmp_path / "E", **more))
    assert same(weights(tmp_path / "E"), weights(tmp_path / "whole"))
    assert rows(tmp_path / "E") == rows(tmp_path / "whole")


def test_control_a_process_that_ends_without_a_signal_keeps_no_step_behind_a_checkpoint(
    tokens, tmp_path, monkeypatch
):
    def dies(*_):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(GridTask, "loss", dies)
        train(config(tokens, tmp_path / "E", steps=2))
    assert not (tmp_path / "E" / looping.CHECKPOINT).exists()


def test_control_other_seeds_give_other_weights(tokens, tmp_path):
    train(config(tokens, tmp_path / "a", steps=2))
    train(config(tokens, tmp_path / "b", steps=2, seed=1))
    assert not same(weights(tmp_path / "a"), weights(tmp_path / "b"))


@pytest.mark.slow
def test_three_times_ctrl_c_and_kill_9_lose_nothing(tokens, tmp_path):
    """Real processes are stopped after some steps, and the same command goes on."""
    keys = [f"data={tokens}", "objective=masked", "steps=100", "save_every=1000", "log_every=5"]
    keys += ["model.width=32", "model.layers=1", "batch_size=4"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

    def command(out: str) -> list[str]:
        config = str(ROOT / "configs" / "train" / "image-quick.yaml")
        return [sys.executable, "-m", "gen", "train", config, *keys, f"out={tmp_path / out}"]

    kept = 0
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGKILL, signal.SIGINT):
        with subprocess.Popen(command("E"), env=env, stderr=subprocess.PIPE, text=True) as process:
            lines = [process.stderr.readline() for _ in range(2 if kept == 0 else 3)]
            process.send_signal(number)
            lines += process.stderr.readlines()
        said = f"resumed at step {kept}\n"
        assert (said == lines[0]) if kept else not any("resumed" in line for line in lines)
        assert process.returncode == (-number if number == signal.SIGKILL else 130)
        at = torch.load(tmp_path / "E" / looping.CHECKPOINT, weights_only=True)["step"]
        assert at == kept if number == signal.SIGKILL else at >= kept + 5
        kept = at
    assert kept < 100 and not (tmp_path / "E" / "model").exists()
    again = subprocess.run(command("E"), env=env, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0 and f"resumed at step {kept}\n" in again.stderr
    subprocess.run(command("whole"), env=env, capture_output=True, check=True, timeout=300)
    assert same(weights(tmp_path / "E"), weights(tmp_path / "whole"))
    assert rows(tmp_path / "E") == rows(tmp_path / "whole")


@pytest.mark.slow
def test_several_processes_stop_together_and_go_on(tokens, tmp_path):
    """One of two processes is asked to stop."""
    keys = [f"data={tokens}", "steps=30", "save_every=1000", "log_every=5", "batch_size=4"]
    keys += ["model.width=32", "model.layers=1"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    run += ["--standalone", "-m", "gen", "train", "train/image-quick", *keys]

    def command(out: str) -> list[str]:
        return [*run, f"out={tmp_path / out}"]

    with subprocess.Popen(command("E"), env=env, stderr=subprocess.PIPE, text=True) as process:
        while "step 10/" not in (line := process.stderr.readline()) and line:
            pass
        process.send_signal(signal.SIGINT)
        process.stderr.read()
    kept = torch.load(tmp_path / "E" / looping.CHECKPOINT, weights_only=True, map_location="cpu")
    assert 10 <= kept["step"] < 30 and process.returncode != 0
    again = subprocess.run(command("E"), env=env, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0 and f"resumed at step {kept['step']}\n" in again.stderr
    subprocess.run(command("whole"), env=env, capture_output=True, check=True, timeout=300)
    assert same(weights(tmp_path / "E"), weights(tmp_path / "whole"))


def test_a_model_of_the_zoo_is_a_better_start_than_none(tokens, tmp_path):
    keys = {"steps": 2, "lr": 1e-5, "drop": 0.0}
    fresh = train(config(tokens, tmp_path / "fresh", **keys))
    tuned = train(config(tokens, tmp_path / "tuned", **keys, model="text-causal"))
    assert tuned["loss"][0] < 0.3 * fresh["loss"][0]
    folder = str(tmp_path / "tuned" / "model")  # a folder of one's own is a start too
    again = train(config(tokens, tmp_path / "again", **keys, model=folder))
    assert again["loss"][0] < 0.3 * fresh["loss"][0]


@pytest.mark.parametrize(
    ("start", "more"),
    [
        ("text-causal", {"objective": "masked"}),
        ("text-masked", {"objective": "masked"}),
        ("text-masked", {"objective": "block", "block": 4}),
        ("text-causal", {"objective": "block", "block": 4}),
    ],
)
def test_a_model_may_start_from_one_of_another_objective(start, more, tokens, tmp_path):
    keys = {"steps": 2, "lr": 1e-5, "drop": 0.0, "average": False, **more}
    done = train(config(tokens, tmp_path / "E", model=start, **keys))
    known = start == "text-masked"
    assert (done["loss"][0] < 1.0) if known else math.isfinite(done["loss"][0])
    key = "blocks" if "block" in more else "masked"
    assert key in gen.load("text", str(tmp_path / "E" / "model")).config["protocols"]


def test_hidden_tokens_are_masks_among_the_inputs_of_training_alone(tokens, tmp_path):
    data, rows = load_data(tokens), torch.arange(32)
    for hide in (0.5, 0.0):  # the second one is the control
        task = make_task(config(tokens, tmp_path / "E", hide=hide), data)
        shape, given = task.model.config, []

        def forward(input_ids, task=task, given=given, **options):
            given.append(input_ids[:, shape.prefix_length :])
            return task.model(input_ids=input_ids, **options)

        losses = [task.loss(forward, rows, seed, 0.0).item() for seed in (1, 1, 2)]
        with torch.no_grad():
            task.loss(forward, rows, 1, 0.0)
        shares = [(ids == shape.mask_token_id).float().mean(1) for ids in given]
        assert torch.equal(given[0], given[1]) and not shares[3].any()
        assert shape.trained_at_mask == (hide > 0)
        if hide:
            assert losses[0] == losses[1] != losses[2]
            assert 0.15 < shares[0].mean() < 0.35 and shares[0].max() > 0.4 > 0.1 > shares[0].min()
        else:
            assert losses[0] == losses[2] and not torch.stack(shares).any()


def test_a_language_model_has_no_mask_to_hide_tokens_behind(tmp_path):
    media = own_media.text(tmp_path / "media", 8)
    encode_folder("text", media, tmp_path / "D", EncodeOptions(tokenizer="own"))
    data = load_data(tmp_path / "D")
    with pytest.raises(GenError, match="hide is 0.5; expected 0 for a language model"):
        make_task(config(tmp_path / "D", tmp_path / "E", hide=0.5), data)
    make_task(config(tmp_path / "D", tmp_path / "E"), data)  # control


def test_a_frontend_of_ones_own_is_kept_beside_the_model(tmp_path, monkeypatch):
    """Another codebook size makes another vocabulary, and a frontend of the zoo does not fit."""
    torch.manual_seed(0)
    vq = VQModel(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 16, 16),
        layers_per_block=1,
        latent_channels=4,
        num_vq_embeddings=32,
        vq_embed_dim=4,
        norm_num_groups=8,
        sample_size=64,
        mid_block_add_attention=False,
    )
    vq.save_pretrained(tmp_path / "vq")
    monkeypatch.chdir(tmp_path)
    own_media.images(tmp_path / "media", 6)
    encode_folder("image", "media", "D", EncodeOptions(frontend="vq"))
    monkeypatch.chdir("/")
    train(config(tmp_path / "D", tmp_path / "E", steps=2))
    model = tmp_path / "E" / "model"
    settings = json.loads((model / "config.json").read_text())
    assert settings["codebook_size"] == 32 and settings["frontend"] == "frontend"
    pipe = gen.load("image", str(model))
    image = pipe("a small red circle in the centre", seed=0, top_k=0).images[0]
    assert image.size == (64, 64)
    with pytest.raises(GenError, match=r"model image-causal has codebook_size 128"):
        train(config(tmp_path / "D", tmp_path / "F", steps=2, model="image-causal"))


def test_a_full_disk_is_one_error(tokens, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    whole = Path.write_bytes
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(GenError, match=r"cannot write .*checkpoint.pt: No space left"):
        train(config(tokens, tmp_path / "E", steps=2))
    assert {p.name for p in (tmp_path / "E").iterdir()} == {"run.json", "log.jsonl"}
    monkeypatch.setattr(Path, "write_bytes", whole)
    monkeypatch.setattr(GridTask, "save", full)
    with pytest.raises(GenError, match=r"cannot write .*model: .*No space left"):
        train(config(tokens, tmp_path / "E", steps=2))
    monkeypatch.undo()
    train(config(tokens, tmp_path / "E", steps=2))
    train(config(tokens, tmp_path / "whole", steps=2))
    assert same(weights(tmp_path / "E"), weights(tmp_path / "whole"))


def test_lengths_that_differ_end_with_the_end(tmp_path):
    encode_folder("motion", own_media.motion(tmp_path / "media", 6), tmp_path / "D")
    task = GridTask(
        config(tmp_path / "D", tmp_path / "E", validation=0.0), load_data(tmp_path / "D")
    )
    lengths = [len(t) for t in task.data.tokens]
    assert len(set(lengths)) > 1 and task.codes.shape == (6, 98)
    end = task.model.config.codebook_size - 1
    for row, length in zip(task.codes, lengths, strict=True):
        assert bool((row[length:] == end).all()) and not bool((row[:length] == end).any())


def test_conditions_are_dropped_as_often_as_asked(tokens, tmp_path):
    task = GridTask(config(tokens, tmp_path / "E"), load_data(tokens))
    seen: list[torch.Tensor] = []

    def forward(input_ids, **_):
        seen.append(input_ids[:, : task.shape.prefix] - task.shape.codes)
        return task.model(input_ids=input_ids, **_)

    every = torch.arange(40)
    for drop in (0.0, 1.0, 0.5):
        task.loss(forward, every, 7, drop)
    assert torch.equal(seen[0], task.prompts) and torch.equal(seen[1], task.nothing)
    dropped = (seen[2] == task.nothing).all(1).float().mean()
    assert 0.2 < dropped < 0.8


def test_every_sample_comes_once_per_epoch_and_none_is_both_trained_on_and_measured():
    trained, held = split(20, 0.1, seed=3)
    assert sorted([*trained.tolist(), *held.tolist()]) == list(range(20)) and len(held) == 2
    batches = Batches(trained, 6, seed=3)
    epochs = [torch.cat([batches(3 * e + i) for i in range(3)]).tolist() for e in range(2)]
    assert all(sorted(e) == trained.tolist() for e in epochs) and epochs[0] != epochs[1]
    assert torch.equal(Batches(trained, 6, seed=3)(4), batches(4))  # of the step alone


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model": "motion-causal"}, r"model motion-causal has codebook_size 1025.* expected 58"),
        ({"model": "text-dag"}, r"model text-dag is a 'gen_dag.*'.* expected a model of gen's own"),
        ({"batch_size": 64}, r"the data have 38 samples to train on; expected at least 64"),
        ({"objective": "block", "block": 5}, r"block is 5; expected a divisor of 16 positions"),
        ({"lora": {"rank": 2}}, r"lora is .* expected none: the model of .* is small"),
        ({"data": "nowhere"}, r"nowhere holds no tokens; expected the folder of a finished"),
    ],
)
def test_what_does_not_fit_is_refused(keys, message, tokens, tmp_path):
    with pytest.raises(GenError, match=message):
        train(config(**{"data": tokens, "out": tmp_path / "E", **keys}))


def test_a_folder_of_another_run_is_refused(tokens, tmp_path):
    train(config(tokens, tmp_path / "E", steps=2))
    with pytest.raises(GenError, match="holds another run, which differs in lr, steps"):
        train(config(tokens, tmp_path / "E", steps=4, lr=1e-4))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a").touch()
    with pytest.raises(GenError, match="is not empty and holds no run"):
        train(config(tokens, tmp_path / "mine", steps=2))


def test_other_data_or_another_frontend_are_refused(tokens, tmp_path):
    train(config(tokens, tmp_path / "E", steps=2))
    encode_folder("text", own_media.text(tmp_path / "media", 20), tmp_path / "D")
    with pytest.raises(GenError, match="holds another run, which differs in data_digest"):
        train(config(tmp_path / "D", tmp_path / "E", steps=2))
    moved = shutil.copytree(tokens, tmp_path / "moved")
    train(config(moved, tmp_path / "E", steps=2))  # the same data elsewhere are the same
    manifest = json.loads((moved / "manifest.json").read_text())
    manifest["frontend"]["digest"] = "0" * 16
    (moved / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(GenError, match=r"made with codebook 0000000000000000 of the frontend"):
        train(config(moved, tmp_path / "F", steps=2))


def test_a_damaged_checkpoint_is_one_error(tokens, tmp_path):
    train(config(tokens, tmp_path / "E", steps=2))
    (tmp_path / "E" / "checkpoint.pt").write_bytes(b"nothing")
    with pytest.raises(GenError, match=r"checkpoint.pt cannot be read"):
        train(config(tokens, tmp_path / "E", steps=2))
