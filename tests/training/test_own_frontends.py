"""Frontends of one's own media: trained, resumed, measured, and used by all that comes after."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import numpy as np
import own_media
import pytest
import soundfile as sf
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import EncodecConfig, EncodecModel

import gen
from gen.__main__ import main
from gen.core.errors import GenError
from gen.training import loop as looping
from gen.training.config import make_training
from gen.training.encode import EncodeOptions, encode_folder
from gen.training.frontend_tasks import FrontendTask
from gen.training.frontends import load_encoder
from gen.training.media_data import load_media
from gen.training.reconstruction import FOLDER, PAIRS, mel_distance, psnr, reconstruct, sheet
from gen.training.run import train
from gen.training.shards import read_json

KEYS = {"objective": "frontend", "batch_size": 2, "save_every": 2, "log_every": 2, "lr": 2e-3}
FRONTENDS = {
    "image": {"modality": "image", "start": "image-vq", "codes": 128},
    "speech": {"modality": "speech", "start": "speech-codec", "codes": 128},
    "video": {"modality": "video", "start": "video-vq", "codes": 128},
    "motion": {"modality": "motion", "start": "motion-vq", "codes": 512},
}
LENGTHS = {"image": 64, "speech": 38_400, "video": 16}  # of the first axis
NEW = {
    "image": {"modality": "image", "codes": 32, "factor": 8, "width": 16},
    "speech": {"modality": "speech", "codes": 16, "streams": 2, "width": 16},
    "video": {"modality": "video", "codes": 32, "width": 32},
    "motion": {"modality": "motion", "codes": 32, "width": 16},
}


@pytest.fixture(scope="module")
def media(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("media")
    return {name: own_media.FOLDERS[name](root / name, 6) for name in FRONTENDS}


def config(media: Path, out: Path, frontend: dict, **more):
    return make_training(
        {**KEYS, "data": str(media), "out": str(out), "frontend": frontend, **more}, "here"
    )


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(next((out / "model").glob("*.safetensors")))


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "video")) for n in FRONTENDS]
)
def test_a_frontend_of_ones_own_serves_all_that_comes_after(name, media, tmp_path, capsys):
    done = train(config(media[name], tmp_path / "F", FRONTENDS[name], steps=2), lambda text: None)
    assert done["reconstruction"]["media"] == 1  # the held-out one
    page = (tmp_path / "F" / "index.html").read_text()
    assert f"{FOLDER}/{PAIRS}" in page and (tmp_path / "F" / FOLDER / PAIRS).is_file()
    capsys.readouterr()
    assert main(shlex.split(done["use"])[1:]) == 0  # as printed
    tokens = tmp_path / "F-tokens"
    manifest = read_json(tokens / "manifest.json")
    assert manifest["frontend"]["name"] == done["model"] and manifest["samples"] == 6
    assert manifest["reconstruction"]["media"] == 6
    keys = {"model": {"width": 32, "layers": 1}, "batch_size": 2, "steps": 1}
    out = tmp_path / "E"
    train(make_training({**keys, "data": str(tokens), "out": str(out)}, "here"))
    shutil.rmtree(tmp_path / "F")  # the model stands alone
    prompt = next(media[name].glob("*.txt")).read_text().strip()
    medium = gen.load(name, str(out / "model"))(prompt, seed=0).media[0]
    if name == "motion":
        assert medium.frames % 4 == 0
    else:
        assert np.asarray(medium).shape[0] == LENGTHS[name]


class Killed(Exception):
    """Stands for the end of a process."""


def test_a_codec_starts_from_another_one_with_codebooks_of_its_own(media, tmp_path):
    asked = {"modality": "speech", "start": "speech-codec", "codes": 16, "streams": 3}
    train(config(media["speech"], tmp_path / "F", asked, steps=2, lr=1e-9), lambda text: None)
    start, made = load_encoder("speech").frontend, load_encoder("speech", tmp_path / "F" / "model")
    assert made.frontend.config.codebook_sizes == (16, 16, 16)
    layers, kept = start.model.state_dict(), made.frontend.model.state_dict()
    names = [k for k in kept if "codebook" not in k and kept[k].dtype.is_floating_point]
    assert all(torch.allclose(kept[k], layers[k].float(), atol=1e-6) for k in names)
    codes = made.frontend.encode(torch.randn(1, 1, 6400) * 0.1)
    assert codes.shape == (1, 3, 10) and codes.max() < 16


def test_the_figure_of_a_codec_is_that_of_the_folder_that_is_written(media, tmp_path):
    """Also behind a checkpoint, whose page asked for the codes of that step."""
    asked = {"modality": "speech", "start": "speech-codec", "codes": 16}
    keys = {"steps": 6, "validation": 0.0}
    done = train(config(media["speech"], tmp_path / "F", asked, **keys), lambda text: None)
    written = load_encoder("speech", tmp_path / "F" / "model")
    made = reconstruct(written, [*load_media(media["speech"], "speech").batch(torch.arange(6))])
    assert done["reconstruction"] == made.to_dict()


def test_the_size_of_sounds_is_a_number(media, tmp_path):
    made = config(media["speech"], tmp_path / "F", {"modality": "speech", "size": 48_000})
    assert made.frontend.size == "48000"
    with pytest.raises(GenError, match=r"frontend.size is 4.5 in here; expected a text"):
        config(media["speech"], tmp_path / "F", {"modality": "speech", "size": 4.5})


@pytest.mark.slow
@pytest.mark.parametrize("name", NEW)
def test_a_killed_training_of_a_frontend_ends_with_the_same_weights(
    name, media, tmp_path, monkeypatch
):
    """Behind the warm-up, when codes are in use; also the state of the codebooks goes on."""
    update = looping.Loop._update

    def dies(loop):
        if loop.step == 5:
            raise Killed
        update(loop)

    def run(out: str) -> dict[str, torch.Tensor]:
        train(config(media[name], tmp_path / out, NEW[name], steps=6), lambda text: None)
        return weights(tmp_path / out)

    whole = run("whole")
    for out in ("E", "control"):
        monkeypatch.setattr(looping.Loop, "_update", dies)
        with pytest.raises(Killed):
            run(out)
        monkeypatch.undo()
    assert same(run("E"), whole)
    monkeypatch.setattr(FrontendTask, "load_state", lambda task, state: None)
    assert not same(run("control"), whole)


@pytest.mark.slow
def test_training_a_frontend_keeps_more_of_ones_own_media(tmp_path):
    """Stripes are no shapes: the built-in frontend loses them."""
    folder, rng = tmp_path / "media", np.random.default_rng(0)
    folder.mkdir()
    for number in range(24):
        ramp = np.arange(64) * rng.uniform(0.5, 1.2) + rng.uniform(0, 6)
        level = 127 + 100 * np.sin(ramp)[:, None] * np.ones(64)
        colour = rng.uniform(0.3, 1, 3)
        Image.fromarray((level[..., None] * colour).astype(np.uint8)).save(folder / f"{number}.png")
    before = encode_folder("image", folder, tmp_path / "D")["reconstruction"]
    keys = {**FRONTENDS["image"], "codes": 64}
    done = train(config(folder, tmp_path / "F", keys, steps=60, batch_size=8, save_every=60))
    assert before["is_limit"] and done["reconstruction"]["mean"] > before["mean"] + 1.5


@pytest.mark.parametrize("name", ["video", "motion"])
def test_codebooks_of_another_size_replace_those_of_the_start(name, media, tmp_path):
    asked = {**FRONTENDS[name], "codes": 16}
    train(config(media[name], tmp_path / "F", asked, steps=2, lr=1e-9), lambda text: None)
    start, made = load_encoder(name).frontend, load_encoder(name, tmp_path / "F" / "model").frontend
    assert set(made.config.codebook_sizes) == {16} != set(start.config.codebook_sizes)
    layers, kept = start.model.state_dict(), made.model.state_dict()
    trained = (k for k in kept if kept[k].is_floating_point() and "running" not in k)
    names = [k for k in trained if kept[k].shape == layers[k].shape]
    assert len(names) > len(kept) // 2
    assert all(torch.allclose(kept[k], layers[k].float(), atol=1e-6) for k in names)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["video", "motion"])
def test_training_a_new_frontend_brings_clips_and_motions_nearer(name, media, tmp_path):
    figures = [
        train(config(media[name], tmp_path / f"{steps}", NEW[name], steps=steps), lambda text: None)
        for steps in (2, 60)
    ]
    few, many = (made["reconstruction"] for made in figures)
    assert few["measure"] == {"video": "PSNR in dB", "motion": "joint error in cm"}[name]
    gain = many["mean"] - few["mean"]
    assert gain > 2 if name == "video" else gain < -2


def test_the_limit_of_a_frontend_is_said(media, tmp_path, capsys):
    noise = tmp_path / "noise"
    noise.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(pixels).save(noise / "a.png")
    main(["encode", "image", str(noise), "--out", str(tmp_path / "D")])
    assert "the frontend is the limit" in capsys.readouterr().err
    main(["encode", "image", str(media["image"]), "--out", str(tmp_path / "E")])  # control
    assert "the frontend is the limit" not in capsys.readouterr().err


def test_distances_are_those_of_their_definitions():
    flat = np.full((8, 8, 3), 100, np.uint8)
    assert psnr(flat, flat) == 99.0
    assert psnr(flat, flat + np.uint8(10)) == pytest.approx(20 * np.log10(25.5))
    tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000)
    assert mel_distance(tone, tone, 16_000) == 0
    assert 0 < mel_distance(tone, tone / 2, 16_000) <= 20 * np.log10(2) + 1e-6


def test_a_published_codec_of_another_rate_speaks_at_its_rate(tmp_path):
    torch.manual_seed(0)
    sizes = {"num_filters": 4, "hidden_size": 16, "codebook_size": 16, "codebook_dim": 16}
    codec = EncodecModel(
        EncodecConfig(
            **sizes, sampling_rate=24_000, upsampling_ratios=[8, 5, 4], target_bandwidths=[1.2],
            num_lstm_layers=1, normalize=False, chunk_length_s=None,
        )
    )  # fmt: skip
    codec.save_pretrained(tmp_path / "codec")
    media = tmp_path / "media"
    media.mkdir()
    for number in range(3):
        sf.write(media / f"{number}.wav", np.random.default_rng(number).uniform(-1, 1, 8000), 8000)
    options = EncodeOptions(frontend=str(tmp_path / "codec"), size="4800", resize="crop")
    manifest = encode_folder("speech", media, tmp_path / "D", options)
    assert manifest["samples"] == 15  # a second at 24 kHz, in windows of 0.2 s
    keys = {"model": {"width": 32, "layers": 1}, "batch_size": 2, "steps": 1}
    train(make_training({**keys, "data": str(tmp_path / "D"), "out": str(tmp_path / "E")}, "here"))
    out = gen.load("speech", str(tmp_path / "E" / "model"))("", seed=0)
    assert out.audios[0].shape == (4800,)
    out.save(tmp_path / "O")
    assert sf.info(str(next((tmp_path / "O").glob("*.wav")))).samplerate == 24_000


@pytest.mark.parametrize(
    "frontend, message",
    [
        ({"modality": "action"}, "unknown frontend.modality 'action'"),
        (
            {"modality": "video", "width": 48},
            "frontend.width is 48 in here; expected a mult",
        ),
        ({"modality": "video", "start": "image-vq"}, "expected one of class Emu3VQVAE"),
        ({"modality": "motion", "start": "image-vq"}, "expected one of class MotionVQVAE"),
        ({"factor": 3}, r"frontend.factor is 3 in here; expected one of \(2, 4, 8, 16\)"),
        ({"width": 20}, "frontend.width is 20 in here; expected a multiple of 16"),
        ({"start": "speech-codec"}, "is 'speech-codec'; expected one of class VQModel"),
        ({"modality": "speech", "start": "image-vq"}, "expected a codec such as 'speech-codec'"),
        ({"size": "50x50"}, "size is '50x50'; expected multiples of 4x4"),
    ],
)
def test_what_is_no_frontend_is_refused(frontend, message, media, tmp_path):
    name = frontend.get("modality", "image")
    with pytest.raises(GenError, match=message):
        train(config(media.get(name, tmp_path), tmp_path / "F", frontend, steps=1))


def test_small_media_are_drawn_larger_and_large_ones_as_they_are():
    small, large = (Image.new("RGB", (side, side), "red") for side in (32, 100))
    assert sheet([(small, small)]).size == (128, 2 * 128 + 4)
    assert sheet([(large, small)]).size == (100, 2 * 100 + 4)
