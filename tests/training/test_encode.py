"""Folders of media become shards of tokens: those of the frontend, each sample once, whatever
interrupts the encoding."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import byte_folders
import numpy as np
import own_media
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from gen.__main__ import main
from gen.core.errors import GenError
from gen.media.video import write_lossless
from gen.modalities.grid_base import GridModality
from gen.training import encode as encoding
from gen.training import shards as stored
from gen.training.encode import EncodeOptions, encode_folder
from gen.training.frontends import load_encoder, size_of
from gen.training.shards import MANIFEST, fingerprint, read_folder, shard_path

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    return own_media.images(tmp_path_factory.mktemp("media") / "images", 6)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", own_media.FOLDERS)
def test_tokens_are_those_of_the_frontend(name, tmp_path):
    folder = own_media.FOLDERS[name](tmp_path / "media", 3)
    manifest = encode_folder(name, folder, tmp_path / "D")
    _, shards = read_folder(tmp_path / "D")
    encoder = load_encoder(name)
    assert manifest["samples"] == 3 == sum(len(s.tokens) for s in shards)
    assert manifest["captioned"] == 3 and manifest["frontend"]["digest"] == encoder.digest
    size = size_of(encoder)
    for source in encoding.find_sources(folder, name).sources:
        medium = encoding.read_source(source, encoder.modality, encoder.horizon)[0]
        signal = encoder.frontend.preprocess(size.fit(medium.media, source.name)[0])
        codes = encoder.frontend.encode(signal[None])
        if isinstance(encoder.modality, GridModality):
            sizes = encoder.frontend.config.codebook_sizes
            layout = encoder.modality.layout(sizes, tuple(codes.shape[2:]))
            back = layout.from_sequence(found(shards, source.name)[None])
        else:
            back = found(shards, source.name).view_as(codes)
        assert torch.equal(back, codes)


def found(shards, name: str) -> torch.Tensor:
    return next(s.tokens[s.sources.index(name)] for s in shards if name in s.sources)


def test_captions_come_from_files_beside_and_from_metadata(images, tmp_path):
    folder = shutil.copytree(images, tmp_path / "media")
    (folder / "0001.txt").unlink()
    rows = [
        {"file_name": "0000.png", "text": "a red circle", "extra": 1},
        {"file_name": "0003.png", "prompt": "a blue ring"},  # as gen export --dataset writes it
    ]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    encode_folder("image", folder, tmp_path / "D")
    conditions = read_folder(tmp_path / "D")[1][0].conditions
    beside = {"text": (images / "0002.txt").read_text().strip()}
    assert conditions[:3] == [{"text": "a red circle"}, None, beside]
    assert conditions[3] == {"text": "a blue ring"}


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_an_interrupted_encoding_goes_on_without_loss_or_duplicates(
    kept, images, tmp_path, monkeypatch
):
    options = EncodeOptions(shard_items=2)
    encode_folder("image", images, tmp_path / "whole", options)
    write, written = encoding.write_shard, []

    def dies(path, shard, mark):
        if len(written) == kept:
            raise KeyboardInterrupt
        written.append(path)
        write(path, shard, mark)

    monkeypatch.setattr(encoding, "write_shard", dies)
    with pytest.raises(KeyboardInterrupt):
        encode_folder("image", images, tmp_path / "D", options)
    assert not (tmp_path / "D" / MANIFEST).exists()
    monkeypatch.undo()
    encode_folder("image", images, tmp_path / "D", options)
    assert files_of(tmp_path / "D") == files_of(tmp_path / "whole")


@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_interrupted_shard_goes_on_behind_the_files_that_were_encoded(
    at, images, tmp_path, monkeypatch
):
    monkeypatch.setattr(encoding, "BATCH", 2)
    monkeypatch.setattr(encoding, "measured", lambda *a: {})  # reads the first files, too
    encode_folder("image", images, tmp_path / "whole")
    read, seen = encoding.read_source, []

    def stops(source, *args, **options):
        if len(seen) == 2 * at + 1:
            raise KeyboardInterrupt
        seen.append(source.name)
        return read(source, *args, **options)

    monkeypatch.setattr(encoding, "read_source", stops)
    with pytest.raises(KeyboardInterrupt):
        encode_folder("image", images, tmp_path / "D")
    seen.clear()
    monkeypatch.setattr(encoding, "read_source", lambda s, *a: seen.append(s.name) or read(s, *a))
    encode_folder("image", images, tmp_path / "D")
    assert seen == [f"{i:04d}.png" for i in range(2 * at, 6)]
    assert files_of(tmp_path / "D") == files_of(tmp_path / "whole")


def test_control_a_part_of_another_encoding_is_not_gone_on_with(images, tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "BATCH", 2)
    encode_folder("image", images, tmp_path / "whole")
    _, shards = read_folder(tmp_path / "whole")
    shards[0].read = 2
    part = stored.part_path(tmp_path / "D", 0)
    part.parent.mkdir()
    (tmp_path / "D" / stored.PLAN).write_bytes((tmp_path / "whole" / stored.PLAN).read_bytes())
    stored.write_shard(part, shards[0], "another plan")
    encode_folder("image", images, tmp_path / "D")
    assert files_of(tmp_path / "D") == files_of(tmp_path / "whole")


@pytest.mark.slow
def test_three_times_ctrl_c_and_kill_9_lose_no_file_that_was_encoded(tmp_path):
    """Real processes are stopped within one shard, and the same command goes on."""
    media = own_media.images(tmp_path / "media", 160)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    part, kept = stored.part_path(tmp_path / "D", 0), 0

    def command(out: str) -> list[str]:
        return [sys.executable, "-m", "gen", "encode", "image", str(media), "--out", out]

    def there() -> int:
        mark = fingerprint(json.loads((tmp_path / "D" / stored.PLAN).read_text()))
        found = stored.read_shard(part, mark) if part.is_file() else None
        return 0 if found is None else found.read

    for number in (signal.SIGINT, signal.SIGINT, signal.SIGKILL, signal.SIGINT):
        with subprocess.Popen(command(str(tmp_path / "D")), env=env) as process:
            until = time.monotonic() + 200
            while time.monotonic() < until and (not part.is_file() or there() == kept):
                time.sleep(0.01)
            process.send_signal(number)
        assert process.returncode == (-number if number == signal.SIGKILL else 130)
        assert kept < there() < 160
        kept = there()
    subprocess.run(command(str(tmp_path / "D")), env=env, check=True, timeout=300)
    subprocess.run(command(str(tmp_path / "whole")), env=env, check=True, timeout=300)
    assert files_of(tmp_path / "D") == files_of(tmp_path / "whole")


def test_a_damaged_shard_is_made_again_and_refused_by_readers(images, tmp_path):
    options = EncodeOptions(shard_items=3)
    encode_folder("image", images, tmp_path / "D", options)
    before = files_of(tmp_path / "D")
    path = shard_path(tmp_path / "D", 1)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1  # one bit of a token
    path.write_bytes(data)
    with pytest.raises(GenError, match=r"tokens-00001.safetensors is missing or damaged"):
        read_folder(tmp_path / "D")
    encode_folder("image", images, tmp_path / "D", options)
    assert files_of(tmp_path / "D") == before


def test_a_full_disk_is_one_error_and_keeps_nothing_half_written(images, tmp_path, monkeypatch):
    options = EncodeOptions(shard_items=3)
    encode_folder("image", images, tmp_path / "whole", options)
    full = Path.write_bytes

    def half(path, data):
        if "tokens-00001" in path.name:
            full(path, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return full(path, data)

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(GenError, match=r"tokens-00001.safetensors: No space left on device"):
        encode_folder("image", images, tmp_path / "D", options)
    names = {p.name for p in (tmp_path / "D").iterdir()}
    assert names == {"plan.json", "tokens-00000.safetensors", "reconstruction"}
    monkeypatch.undo()
    encode_folder("image", images, tmp_path / "D", options)
    assert files_of(tmp_path / "D") == files_of(tmp_path / "whole")


def test_unreadable_files_are_named_counted_and_skipped_only_if_asked(images, tmp_path):
    folder = shutil.copytree(images, tmp_path / "media")
    (folder / "0001.png").write_bytes(b"no image")
    (folder / "0004.txt").write_text("a purpel circle")
    with pytest.raises(GenError) as error:
        encode_folder("image", folder, tmp_path / "D", EncodeOptions(shard_items=2))
    text = str(error.value)
    assert text.startswith("2 of 6 sources cannot be read: 0001.png (")
    assert "0004.png" in text and "purpel" in text and "--skip-unreadable" in text
    assert not (tmp_path / "D" / MANIFEST).exists()
    manifest = encode_folder(
        "image", folder, tmp_path / "D", EncodeOptions(shard_items=2, skip_unreadable=True)
    )
    assert manifest["samples"] == 4 and set(manifest["skipped"]) == {"0001.png", "0004.png"}
    sources = [n for s in read_folder(tmp_path / "D")[1] for n in s.sources]
    assert sources == ["0000.png", "0002.png", "0003.png", "0005.png"]
    with pytest.raises(GenError, match="2 of 6 sources cannot be read"):  # as before, without it
        encode_folder("image", folder, tmp_path / "D", EncodeOptions(shard_items=2))


def test_a_folder_in_which_nothing_can_be_read_says_why_for_the_first_files(tmp_path):
    folder = tmp_path / "media"
    folder.mkdir()
    for i in range(5):
        (folder / f"{i}.png").write_bytes(b"no image")
    with pytest.raises(GenError) as error:
        encode_folder("image", folder, tmp_path / "D", EncodeOptions(skip_unreadable=True))
    text = str(error.value)
    assert "none of the 5 sources of" in text and text.count("it is none of PNG, JPEG") == 3
    assert all(f"{i}.png (" in text for i in range(3)) and "3.png (" not in text


def test_files_of_other_kinds_are_counted(images, tmp_path, capsys):
    folder = shutil.copytree(images, tmp_path / "media")
    (folder / "metadata.jsonl").write_text('{"file_name": "0003.png", "text": "a red ring"}\n')
    assert encode_folder("image", folder, tmp_path / "A")["left_out"] == {}  # captions are read
    (folder / "deeper").mkdir()
    for name in ("a.HEIC", "b.heic", "deeper/c.heic", "notes", "lonely.txt", ".hidden"):
        (folder / name).write_bytes(b"?")
    assert main(["encode", "image", str(folder), "--out", str(tmp_path / "B")]) == 0
    assert json.loads((tmp_path / "B" / MANIFEST).read_text())["left_out"] == {
        ".heic": 3,
        ".txt": 1,
        "": 1,
    }
    said = capsys.readouterr().err
    assert "left out 5 files of other kinds: 3 .heic, 1 .txt, 1 without an extension" in said


def test_a_photo_has_the_tokens_of_what_it_shows(images, tmp_path):
    """Turned and transparent, or of 16 bits: the tokens of the same pixels in a plain file."""
    with Image.open(images / "0000.png") as image:
        plain = np.asarray(image.convert("RGB"))
    grey = plain[..., :1].repeat(3, -1)
    folder = tmp_path / "media"
    folder.mkdir()
    Image.fromarray(plain).save(folder / "plain.png")
    exif = Image.Exif()
    exif[274] = 3
    turned = np.dstack([plain[::-1, ::-1], np.full(plain.shape[:2], 255, np.uint8)])
    Image.fromarray(turned).save(folder / "turned.png", exif=exif)
    Image.fromarray(turned).save(folder / "stored.png")
    Image.fromarray(grey).save(folder / "grey.png")
    Image.fromarray(grey[..., 0].astype(np.uint16) * 257).save(folder / "grey16.tif")
    encode_folder("image", folder, tmp_path / "D")
    _, shards = read_folder(tmp_path / "D")
    tokens = {n: found(shards, n) for s in shards for n in s.sources}
    assert torch.equal(tokens["turned.png"], tokens["plain.png"])
    assert torch.equal(tokens["grey16.tif"], tokens["grey.png"])
    assert not torch.equal(tokens["stored.png"], tokens["plain.png"])  # control


@pytest.mark.parametrize(
    ("name", "make", "came", "expected"),
    [
        ("image", lambda: Image.new("RGB", (80, 60)), "60x80", "64x64"),
        ("speech", lambda: np.zeros(16_000, np.float32), "16000 samples", "38400 samples"),
        ("video", lambda: np.zeros((20, 32, 32, 3), np.uint8), "20x32x32", "16x32x32"),
    ],
)
def test_media_of_another_size_are_refused_or_resized(name, make, came, expected, tmp_path):
    folder = own_media._keep(name, tmp_path / "media", [(make(), None)])
    with pytest.raises(GenError) as error:
        encode_folder(name, folder, tmp_path / "D")
    text = str(error.value)
    assert f"has {came}; expected {expected}" in text and "--resize" in text
    manifest = encode_folder(name, folder, tmp_path / "R", EncodeOptions(resize="crop"))
    own = own_media.FOLDERS[name](tmp_path / "own", 1)
    usual = encode_folder(name, own, tmp_path / "O")
    assert manifest["tokens"] == usual["tokens"] and manifest["grid"] == usual["grid"]


def test_another_size_is_another_grid(tmp_path):
    folder = own_media._keep("image", tmp_path / "media", [(Image.new("RGB", (32, 48)), None)])
    manifest = encode_folder("image", folder, tmp_path / "D", EncodeOptions(size="48x32"))
    assert manifest["grid"] == [12, 8] and manifest["tokens"] == 96
    with pytest.raises(GenError, match=r"size is '50x32'; expected multiples of 4x4"):
        encode_folder("image", folder, tmp_path / "E", EncodeOptions(size="50x32"))
    with pytest.raises(GenError, match=r"size is '64'; expected 2 numbers"):
        encode_folder("image", folder, tmp_path / "E", EncodeOptions(size="64"))


def test_episodes_are_cut_into_chunks_with_the_state_they_start_from(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    data = own_media.episodes(2, 0, held=False)
    (tmp_path / "media").mkdir()
    actions = np.concatenate([*data.actions, np.zeros((3, 2), np.float32)])  # an incomplete one
    states = np.repeat(data.states, 16, 0).tolist() + data.states[:1].tolist() * 3
    tasks = [str(t) for t in data.tasks for _ in range(16)] + [str(data.tasks[0])] * 3
    table = {"action": actions.tolist(), "observation.state": states, "task": tasks}
    parquet.write_table(pyarrow.table(table), tmp_path / "media" / "episode.parquet")
    np.save(tmp_path / "media" / "more.npy", actions[:16])
    manifest = encode_folder("action", tmp_path / "media", tmp_path / "D")
    shard = read_folder(tmp_path / "D")[1][0]
    assert shard.sources == ["episode.parquet#0", "episode.parquet#1", "more.npy"]
    assert manifest["captioned"] == 2 and torch.equal(shard.tokens[0], shard.tokens[2])
    assert shard.conditions[1]["observation"]["task"] == str(data.tasks[1])


def test_texts_of_a_published_tokenizer_end_with_its_end(tmp_path):
    model = byte_folders.causal(tmp_path / "model")
    (tmp_path / "media").mkdir()
    (tmp_path / "media" / "a.txt").write_text("hello\nsay\tworld!\n\n")
    options = EncodeOptions(frontend=str(model))
    manifest = encode_folder("text", tmp_path / "media", tmp_path / "D", options)
    shard = read_folder(tmp_path / "D")[1][0]
    tokenizer = byte_folders.byte_tokenizer()
    texts = [tokenizer.decode(t[:-1]) for t in shard.tokens]
    assert texts == ["hello", "world!"] and manifest["frontend"]["kind"] == "ids"
    assert all(int(t[-1]) == byte_folders.END for t in shard.tokens)
    assert shard.conditions == [None, {"text": "say"}]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("empty", "holds nothing; expected media of modality 'image': .png"),
        ("other", r"holds 1 file \(1 .md\); expected media of modality 'image'"),
        ("missing", "is no folder; expected a folder of media"),
        ("lost", r"metadata.jsonl names 1 file that are not there: gone.png"),
        ("row", r"metadata.jsonl, line 1 is no JSON"),
        ("none", r"none of the 1 source of .* can be read"),
    ],
)
def test_folders_that_cannot_be_encoded(case, message, tmp_path):
    folder = tmp_path / "media"
    if case != "missing":
        folder.mkdir()
    if case == "other":
        (folder / "a.md").write_text("a")
    if case in ("lost", "row"):
        Image.new("RGB", (64, 64)).save(folder / "a.png")
        rows = {"lost": '{"file_name": "gone.png", "text": "a ring"}', "row": "{"}
        (folder / "metadata.jsonl").write_text(rows[case])
    if case == "none":
        (folder / "a.png").write_bytes(b"")
    with pytest.raises(GenError, match=message):
        encode_folder("image", folder, tmp_path / "D", EncodeOptions(skip_unreadable=True))


def test_a_folder_of_something_else_is_refused(images, tmp_path):
    encode_folder("image", images, tmp_path / "D")
    with pytest.raises(GenError, match="another encoding, which differs in shard_items"):
        encode_folder("image", images, tmp_path / "D", EncodeOptions(shard_items=2))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a").touch()
    with pytest.raises(GenError, match="is not empty and holds no tokens"):
        encode_folder("image", images, tmp_path / "mine")
    with pytest.raises(GenError, match="modality is 'world'; expected one of image"):
        encode_folder("world", images, tmp_path / "E")
    with pytest.raises(GenError, match=r"unknown frontend 'image-vk'.* Did you mean 'image-vq'"):
        encode_folder("image", images, tmp_path / "E", EncodeOptions(frontend="image-vk"))


def test_shards_are_ordinary_safetensors(images, tmp_path):
    encode_folder("image", images, tmp_path / "D", EncodeOptions(shard_items=4))
    parts = [load_file(shard_path(tmp_path / "D", i)) for i in (0, 1)]
    assert [p["lengths"].tolist() for p in parts] == [[256] * 4, [256] * 2]
    assert parts[0]["tokens"].dtype == torch.int32 and stored.FORMAT == 1


def test_a_clip_that_is_too_short_at_the_rate_of_the_model_is_refused_so(tmp_path):
    (tmp_path / "media").mkdir()
    write_lossless(tmp_path / "media" / "fast.mkv", np.zeros((16, 32, 32, 3), np.uint8), 240)
    with pytest.raises(GenError, match="has 1x32x32; expected 16x32x32, frames at the model's"):
        encode_folder("video", tmp_path / "media", tmp_path / "D")


@pytest.mark.parametrize("fit", ["crop", "pad", "bucket"])
def test_images_keep_their_aspect(fit, tmp_path):
    """A disc stays one, in a frame that is cut, laid on white, or made for the folder."""
    folder, size = tmp_path / "media", (320, 160)
    folder.mkdir()
    y, x = np.mgrid[: size[1], : size[0]]
    disc = ((x - 160) ** 2 + (y - 80) ** 2 < 60**2)[..., None]
    Image.fromarray(np.where(disc, [200, 0, 0], [0, 0, 90]).astype(np.uint8)).save(folder / "a.png")
    encoder = load_encoder("image")
    options = EncodeOptions(resize=fit)
    fitted = encoding.fitting(encoder, options, encoding.Survey.of(
        encoding.find_sources(folder, "image").sources, "image"
    ))  # fmt: skip
    with Image.open(folder / "a.png") as image:
        made = np.asarray(fitted.fit(image.convert("RGB"), "a.png")[0]).astype(int)
    assert made.shape[:2] == {"bucket": (44, 92)}.get(fit, (64, 64))
    red = made[..., 0] - made[..., 2] > 60
    white = made.min(-1) > 240
    wide, high = red.any(0).sum(), red.any(1).sum()
    assert abs(wide - high) <= 1 and high == pytest.approx(
        {"pad": 24, "crop": 48}.get(fit, 34), abs=2
    )
    assert white.mean() == pytest.approx(0.5 if fit == "pad" else 0, abs=0.02)
    squashed = np.asarray(Image.open(folder / "a.png").resize((64, 64))).astype(int)  # control
    red = squashed[..., 0] - squashed[..., 2] > 60
    assert red.any(1).sum() > 1.8 * red.any(0).sum()
    manifest = encode_folder("image", folder, tmp_path / "D", options)
    assert manifest["size"] == list(made.shape[:2]) and manifest["resize"] == fit


def test_a_transcript_is_of_a_whole_sound_and_of_no_window(tmp_path):
    wave = np.zeros(60_000, np.float32)
    folder = own_media._keep("speech", tmp_path / "media", [(wave, "one two"), (wave, None)])
    expected = (
        r"lasts 3.75 s, and its transcript is of all of it; expected at most 2.4 s \(--size 60160"
    )
    with pytest.raises(GenError, match=expected):
        encode_folder("speech", folder, tmp_path / "D", EncodeOptions(resize="crop"))
    options = EncodeOptions(resize="crop", skip_unreadable=True)
    manifest = encode_folder(
        "speech", folder, tmp_path / "D", options
    )  # the first try is no hurdle
    assert manifest["shards"][0]["sources"] == ["1.wav#0", "1.wav#1"]
    options = EncodeOptions(size="60160", resize="crop")
    manifest = encode_folder("speech", folder, tmp_path / "E", options)
    assert manifest["shards"][0]["sources"] == ["0.wav", "1.wav"] and manifest["grid"] == [94, 4]


def test_a_first_try_that_failed_leaves_a_folder_for_the_next(images, tmp_path):
    folder = shutil.copytree(images, tmp_path / "media")
    Image.new("RGB", (80, 60)).save(folder / "wide.png")
    with pytest.raises(GenError, match="wide.png has 60x80; expected 64x64"):
        encode_folder("image", folder, tmp_path / "D", EncodeOptions(shard_items=2))
    assert len([*(tmp_path / "D").glob("tokens-*")]) == 3  # those of the others
    options = EncodeOptions(resize="crop")
    encode_folder("image", folder, tmp_path / "D", options)
    encode_folder("image", folder, tmp_path / "whole", options)
    assert files_of(tmp_path / "D") == files_of(tmp_path / "whole")
    with pytest.raises(GenError, match="another encoding, which differs in resize"):  # control
        encode_folder("image", folder, tmp_path / "D", EncodeOptions(resize="pad"))
    with pytest.raises(GenError, match="unknown resize 'croop'.* Did you mean 'crop'"):
        encode_folder("image", folder, tmp_path / "E", EncodeOptions(resize="croop"))
