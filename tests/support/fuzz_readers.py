"""Readers of foreign files, with the good files that fuzzing begins with. Not a test."""

from __future__ import annotations

import functools
import io
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import byte_folders
import hostile_media
import numpy as np
import pytest
import torch
from fuzz_mutations import TAG, Files
from PIL import Image, ImageCms
from safetensors.torch import load_file, save_file

import gen
from gen.config.entries import fingerprint
from gen.config.inputs import iter_rows
from gen.config.job import load_config
from gen.core.errors import GenError
from gen.media import bounds
from gen.media.given import data_uri, read_media
from gen.media.images import ORIENTATION, image_size, read_image_info
from gen.media.motion.bvh import read_bvh
from gen.media.motion.retarget import KNOWN
from gen.media.npz import read_npz

PATCH = pytest.MonkeyPatch()  # what reading changes in this process; a test undoes it
CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


@dataclass(frozen=True)
class Reader:
    """Reader of files.

    Attributes:
        make: writes good files into a folder, and returns inputs: overlays of them, of which the
            first are the good files that are mutated.
        read: reads a folder with an input. Raises ``GenError`` for a refused one, and
            ``AssertionError`` for a result that contradicts the files.
        modules: modules whose branches are counted.
    """

    make: Callable[[Path], list[Files]]
    read: Callable[[Path], object]
    modules: tuple[str, ...]


def texts_of(folder: Path) -> list[str]:
    return gen.load("text", model=folder, max_new_tokens=2)(["abc 12"], seed=0).media


def only_file(folder: Path) -> Path:
    """Return the one file of an input. Raises ``GenError`` where it is gone."""
    found = [p for p in folder.iterdir() if p.is_file()]
    if not found:
        raise GenError("no file")
    return found[0]


# --- models


def tiny(folder: Path) -> Path:
    """Write a model of few weights, with a chat template and its defaults of generation."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=byte_folders.VOCAB, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
        eos_token_id=byte_folders.END, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_folders.byte_tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(CHAT)
    said = {"temperature": 0.5, "top_k": 5, "top_p": 0.9, "eos_token_id": [256], "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(said))
    return folder


def taken(folder: Path, *names: str) -> list[Files]:
    """Return the named files of a folder as the input that is mutated."""
    return [{name: (folder / name).read_bytes() for name in names}]


def model_folder(folder: Path) -> list[Files]:
    tiny(folder)
    weights = {k: "model.safetensors" for k in load_file(folder / "model.safetensors")}
    index = json.dumps({"metadata": {"total_size": 1}, "weight_map": weights}).encode()
    (good,) = taken(folder, "config.json", "generation_config.json")
    return [good, good | {"model.safetensors.index.json": index}]


def tokenizer(folder: Path) -> list[Files]:
    tiny(folder)
    return taken(folder, "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def read_tokenizer(folder: Path) -> object:
    pipe = gen.load("text", model=folder, max_new_tokens=2)
    found = pipe("abc 12", seed=0).media
    turns = [{"role": "user", "content": "one two"}]
    return found, pipe({"messages": turns}, seed=0).media


def safetensors(folder: Path) -> list[Files]:
    return taken(tiny(folder), "model.safetensors")


def read_safetensors(folder: Path) -> object:
    pipe = gen.load("text", model=folder, max_new_tokens=2)
    network, stored = pipe.bound(pipe.model)[0].model, load_file(folder / "model.safetensors")
    for name, value in network.named_parameters():
        same = torch.allclose(value, stored[name].float(), 0, 0, equal_nan=True)
        assert same, f"{name} is not what the file has"
    return pipe("abc", seed=0).media


def adapter(folder: Path) -> list[Files]:
    tiny(folder / "model")
    (folder / "adapter").mkdir()
    said = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"],
            "rank_pattern": {}, "alpha_pattern": {}, "bias": "none"}  # fmt: skip
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(said))
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    pair = {f"{layer}.lora_A.weight": torch.ones(2, 8), f"{layer}.lora_B.weight": torch.ones(8, 2)}
    save_file(pair, folder / "adapter" / "adapter_model.safetensors")
    return taken(folder, "adapter/adapter_config.json", "adapter/adapter_model.safetensors")


def read_adapter(folder: Path) -> object:
    pipe = gen.load("text", model=folder / "model", adapters=folder / "adapter", max_new_tokens=2)
    network = pipe.bound(pipe.model)[0].model
    assert all(p.isfinite().all() for p in network.parameters()), "weights are not finite"
    return pipe("abc", seed=0).media


def gguf(folder: Path) -> list[Files]:
    import tiny_gguf  # it needs the package gguf
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=64, hidden_size=8, intermediate_size=8, num_hidden_layers=1, head_dim=4,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=48, bos_token_id=1,
        eos_token_id=2, pad_token_id=0, rope_parameters={"rope_type": "default", "rope_theta": 5.0},
    )  # fmt: skip
    folder.mkdir(exist_ok=True)
    tiny_gguf.write(LlamaForCausalLM(config), folder / "a.gguf")
    return taken(folder, "a.gguf")


def read_gguf(folder: Path) -> object:
    return gen.load("text", model=str(folder / "a.gguf"), max_new_tokens=2)(["abc"], seed=0).media


# --- media


def whole(files: dict[str, bytes]) -> list[Files]:
    """Return the small ones of hand-made media, the whole ones among them."""
    return [{name: data} for name, data in files.items() if len(data) < 20_000]


def images(folder: Path) -> list[Files]:
    """Return images of every mode, with the metadata that readers look at."""
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("XYZ")).tobytes()
    turned = Image.Exif()
    turned[ORIENTATION] = 6
    pixels = Image.fromarray(np.random.default_rng(0).integers(0, 255, (6, 8, 3), np.uint8))
    deep = Image.fromarray(np.arange(48, dtype=np.uint16).reshape(6, 8) * 1000)
    share = Image.fromarray(np.linspace(0, 1, 48, dtype=np.float32).reshape(6, 8))
    made = [
        *((pixels.convert(mode), "png", {}) for mode in ("1", "L", "LA", "P", "RGB", "RGBA")),
        *((pixels.convert(mode), "tiff", {}) for mode in ("L", "CMYK", "YCbCr")),
        (deep, "png", {}), (deep, "png", {"transparency": 1000}), (deep, "tiff", {}),
        (pixels.convert("P"), "png", {"transparency": 3}), (pixels, "webp", {"exif": turned}),
        (pixels, "jpeg", {"exif": turned}), (pixels, "png", {"icc_profile": profile}),
        (pixels.convert("CMYK"), "jpeg", {"icc_profile": profile}), (share, "tiff", {}),
        (pixels, "gif", {"save_all": True, "append_images": [pixels.rotate(90)]}),
    ]  # fmt: skip
    found = []
    for image, form, how in made:
        out = io.BytesIO()
        image.save(out, form, **how)
        found.append({f"a.{form}": out.getvalue()})
    gamma = hostile_media.chunk(b"gAMA", (30_000).to_bytes(4, "big"))
    return [
        *found, {"a.png": hostile_media.png(8, 8, gamma)},
        *whole(hostile_media.images(folder / "canary")),
    ]  # fmt: skip


def read_image(folder: Path) -> object:
    path = only_file(folder)
    array = read_media(path, "image").array
    same = read_media(data_uri(path.read_bytes()), "image").array
    assert np.array_equal(array, same), "its bytes are another image"
    assert array.dtype == np.uint8 and array.size <= 3 * bounds.MOST_PIXELS
    size = image_size(path)
    assert sorted(size) == sorted(array.shape[:2]), f"{size} and {array.shape}"
    return read_image_info(path)


def read_sound_or_clip(folder: Path) -> object:
    path = only_file(folder)
    if path.suffix in (".mp4", ".mkv", ".gif", ".webm"):
        array = read_media(path, "video", fps=8.0).array
        assert array.ndim == 4 and array.dtype == np.uint8
    else:
        array = read_media(path, "audio").array
        assert np.isfinite(array).all(), "samples are not finite"
    assert array.nbytes <= bounds.MOST_BYTES
    return array.shape


def arrays(folder: Path) -> list[Files]:
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / "a"
    found = [{name: data} for name, data in hostile_media.arrays(folder / "canary").items()]
    np.savez(place.with_suffix(".npz"), action=np.ones((3, 2), np.float32))
    found.append({"a.npz": place.with_suffix(".npz").read_bytes()})
    place.with_suffix(".npz").unlink()
    foreign = hostile_media.foreign_skeleton()
    own = foreign
    for joint, name in KNOWN["Mixamo"].items():
        own = re.sub(f" {name}\n", f" {joint}\n", own)
    found += [{"a.bvh": own.encode()}, {"a.bvh": foreign.encode()}]
    return [one for one in found if all(len(x or b"") < 20_000 for x in one.values())]


def read_arrays(folder: Path) -> object:
    path = only_file(folder)
    if path.suffix == ".bvh":
        motion = read_bvh(path)
        assert np.isfinite(motion.root).all() and len(motion.root) == len(motion.rotations)
        return len(motion.root)
    if path.suffix == ".npz":
        return read_npz(path, ("action",))["action"].shape
    try:
        array = bounds.load_array(path)
    except (OSError, ValueError, EOFError) as error:  # as every caller does
        raise GenError(" ".join(str(error).split())) from None
    assert not array.dtype.hasobject and array.nbytes <= path.stat().st_size
    return array.shape


# --- jobs

JOB = {
    "modality": "text", "model": "text-causal", "prompts": ["sort 3 =", {"prompt": "a", "seed": 3}],
    "sampler": {"name": "jacobi", "window": 4}, "sampling": {"temperature": 0.5, "top_p": 0.9},
    "num_samples": 2, "seed": 1, "batch_size": 2, "name": "a", "prefix": "b",
    "format": "txt", "layout": "files", "trace": 1, "dtype": "float32",
}  # fmt: skip
ENTRIES = {"modality": "text", "prompts": ["a"], "jobs": [{"seed": 1}, {"sampler": "fast_dllm"}]}
SWEEP = {"modality": "text", "prompts": ["a"], "sweep": {"seed": [1, 2], "sampling.top_p": [0.5]}}


def job_files(folder: Path) -> list[Files]:
    folder.mkdir(exist_ok=True)
    texts = [json.dumps(x, indent=1) for x in (JOB, ENTRIES, SWEEP)]
    plain = "modality: text\nsampler: &a fast_dllm\nname: *a\nprompts:\n- sort 3 1 2 =\n- b\n"
    return [{"job.yaml": t.encode()} for t in (plain, f"{plain}prefix: {TAG}\n", *texts)]


def read_job(folder: Path) -> object:
    job = load_config(only_file(folder))
    again = folder / "again.yaml"
    again.write_text(job.to_yaml(), encoding="utf-8")
    same = fingerprint(load_config(again)) == fingerprint(job)
    assert same, "what is written is read as something else"
    return job.name


ROWS = [
    {"prompt": f"sort {i} 8 9 =", "seed": i, "sampling": {"top_p": 0.5}, "meta": {"a": [i]}}
    for i in range(4)
]


def prompt_files(folder: Path) -> list[Files]:
    import pyarrow
    import pyarrow.parquet

    folder.mkdir(exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    table = b"prompt,seed,sampling.top_p,meta\n" + b'"sort, 1",3,0.5,a\nb,,,\n"c\nd",1,1,"x""y"\n'
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "a.parquet")
    packed = (folder / "a.parquet").read_bytes()
    (folder / "a.parquet").unlink()
    return [
        {"a.jsonl": lines}, {"a.csv": table}, {"a.tsv": table.replace(b",", b"\t")},
        {"a.txt": b"one\ntwo\n\nthree"}, {"a.parquet": packed},
        {"a.jsonl": b'{"prompt": "a", "id": "x", "sampler": {"window": 4}, "edit": null}\n'},
    ]  # fmt: skip


def read_prompts(folder: Path) -> object:
    path = only_file(folder)
    rows = list(iter_rows(path))
    if path.suffix in (".jsonl", ".txt"):
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
        assert len(rows) == sum(bool(line.strip()) for line in lines), "a row per line"
    return [row.error for row in rows]


@functools.cache
def crash_jobs() -> Any:
    """Register the modality of jobs that take no model, until ``PATCH`` is undone."""
    import crashing

    crashing.register_crash(PATCH)
    return crashing


def job_folder(folder: Path) -> list[Files]:
    crashing = crash_jobs()
    from gen.eval.check import check_folder
    from gen.gallery.write import write_gallery

    crashing.run(folder, layout="files", trace=1)
    write_gallery(folder)
    check_folder(folder)
    names = [p.relative_to(folder).as_posix() for p in sorted(folder.rglob("*")) if p.is_file()]
    return taken(folder, *(n for n in names if not n.endswith((".html", ".css", ".js", ".png"))))


def read_job_folder(folder: Path) -> object:
    crashing = crash_jobs()
    from gen.eval.check import check_folder
    from gen.gallery.write import write_gallery
    from gen.jobs.decode import decode_folder
    from gen.jobs.export import export_parquet
    from gen.jobs.status import status_of
    from gen.jobs.worker import run_worker

    beside = folder.with_name("beside")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    looks: tuple[Callable[[], object], ...] = (
        lambda: write_gallery(folder), lambda: check_folder(folder), lambda: status_of(folder),
        lambda: load_config(folder / "config.yaml"), lambda: decode_folder(folder, beside / "d"),
        lambda: export_parquet(folder, beside / "o.parquet"),
        lambda: run_worker(folder, load=crashing.Pipe().load),
    )  # fmt: skip
    for look in looks:
        try:
            look()
        except GenError as error:
            assert "\n" not in str(error), f"more than a sentence: {error}"
    crashing.run(folder, layout="files", trace=1)
    wrong = [x for x in crashing.audit(folder)]
    assert not wrong, "; ".join(wrong)[:300]
    return True


LOAD, MEDIA, CONFIG = "gen.models.load.", "gen.media.", "gen.config."
READERS = {
    "model_folder": Reader(model_folder, texts_of, (
        LOAD + "fields", LOAD + "locate", LOAD + "generation_config", LOAD + "pretrained",
        LOAD + "weights")),
    "adapter": Reader(adapter, read_adapter, (LOAD + "peft_adapters", LOAD + "low_rank")),
    "tokenizer": Reader(tokenizer, read_tokenizer, (
        LOAD + "text_rules", LOAD + "bounded_text", LOAD + "chat")),
    "gguf": Reader(gguf, read_gguf, (LOAD + "gguf", LOAD + "gguf_reader")),
    "safetensors": Reader(safetensors, read_safetensors, (LOAD + "weights", LOAD + "pretrained")),
    "images": Reader(images, read_image, (
        MEDIA + "images",)),
    "sounds_and_clips": Reader(
        lambda folder: whole(hostile_media.sounds(folder / "canary"))
        + whole(hostile_media.clips(folder / "canary")),
        read_sound_or_clip,
        (MEDIA + "audio", MEDIA + "video")),
    "arrays": Reader(arrays, read_arrays, (
        MEDIA + "bounds", MEDIA + "npz", MEDIA + "motion.bvh", MEDIA + "motion.retarget")),
    "job_files": Reader(job_files, read_job, tuple(CONFIG + name for name in (
        "yaml_text", "job", "keys", "layers", "entries", "run", "sampler_spec", "sweep", "rows",
        "row_check", "inputs"))),
    "prompt_files": Reader(prompt_files, read_prompts, tuple(CONFIG + name for name in (
        "inputs", "prompt_files", "rows", "row_check", "condition_rows", "foreign"))),
    "job_folder": Reader(job_folder, read_job_folder, (
        *("gen.store." + n for n in ("ledger", "manifest", "joblog", "sealed", "claims")),
        *("gen.jobs." + n for n in ("status", "worker", "export", "decode", "plan")))),
}  # fmt: skip
