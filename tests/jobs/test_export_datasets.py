"""Exports that ``datasets.load_dataset`` shows as images, sounds and videos, read back offline."""

from __future__ import annotations

import io
import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from ledgers import write_plan, write_rows, write_verdicts
from PIL import Image

from gen.__main__ import main
from gen.core.errors import GenError
from gen.core.files import sha256
from gen.jobs.export import export_parquet
from gen.jobs.export_folder import export_dataset
from gen.media.audio import write_sound
from gen.media.images import write_image
from gen.media.video import write_video


def media_folder(out: Path, suffix: str, count: int = 3) -> Path:
    """Write a job folder of ``count`` closed-form media and one failed item."""
    out.mkdir(parents=True)
    rows = []
    for i in range(count):
        path = out / f"{i:06d}-x.{suffix}"
        if suffix in ("png", "jpg", "webp"):
            write_image(path, Image.fromarray(np.full((8, 8, 3), 40 * i, np.uint8)), {"seed": i})
        elif suffix in ("wav", "flac", "mp3"):
            write_sound(path, np.sin(np.arange(16_000) / (10 + i)), 16_000)
        elif suffix == "mp4":
            write_video(path, np.full((4, 16, 16, 3), 40 * i, np.uint8), 8)
        else:
            path.write_text(f"text {i}")
        rows.append(
            {
                "id": f"{i:016x}",
                "index": i,
                "modality": "toy",
                "prompt": f"prompt {i}",
                "seed": i,
                "sampler": "sjd",
                "file": path.name,
                "sha256": sha256(path),
                "bytes": path.stat().st_size,
                "status": "ok",
                "meta": {"tag": ["a", i]},
                "nfe": 3,
            }
        )
    rows.append(
        {**rows[0], "id": "f" * 16, "index": count, "file": None, "status": "failed", "error": "x"}
    )
    write_rows(out / "manifest.jsonl", rows)
    items = [{"id": r["id"], "index": r["index"], "stem": "x"} for r in rows]
    write_plan(out / "plan.json", items, shards=[[0, len(rows)]])
    write_verdicts(out, {f"{1:016x}": {"passed": True, "valid": True}})
    return out


@pytest.fixture
def datasets(monkeypatch, tmp_path):
    module = pytest.importorskip("datasets")
    monkeypatch.setattr(module.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return module


def raw(module, data, column: str):
    """Return bytes or path of a medium, not decoded: sounds need a decoder of their own."""
    feature = getattr(module, column.capitalize())(decode=False)
    return data.cast_column(column, feature)[column]


@pytest.mark.parametrize(
    "suffix, kind", [("png", "image"), ("webp", "image"), ("wav", "audio"), ("mp3", "audio"),
                     ("mp4", "video")]
)  # fmt: skip
def test_a_table_with_media_is_shown_as_what_they_are(datasets, tmp_path, suffix, kind):
    out = media_folder(tmp_path / "job", suffix)
    export_parquet(out, tmp_path / "a.parquet", media=True)
    data = datasets.load_dataset("parquet", data_files=str(tmp_path / "a.parquet"))["train"]
    assert type(data.features[kind]).__name__ == kind.capitalize() and len(data) == 4
    assert data["prompt"][:2] == ["prompt 0", "prompt 1"] and data["passed"][1] is True
    found = raw(datasets, data, kind)
    assert found[3] is None
    for i in range(3):
        assert found[i]["bytes"] == (out / f"{i:06d}-x.{suffix}").read_bytes()
    assert (
        data.cast_column(kind, getattr(datasets, kind.capitalize())(decode=False))[3][kind] is None
    )
    if kind == "image":
        assert data[1]["image"].size == (8, 8) and data[1]["image"].getpixel((0, 0)) == (40, 40, 40)


@pytest.mark.parametrize("suffix, kind", [("png", "image"), ("flac", "audio"), ("mp4", "video")])
def test_a_folder_is_shown_as_what_it_holds(datasets, tmp_path, suffix, kind):
    out = media_folder(tmp_path / "job", suffix)
    made = export_dataset(out, tmp_path / "set")
    assert (made["kind"], made["rows"], made["lost"]) == (kind, 3, [])
    builder = datasets.load_dataset_builder(str(tmp_path / "set"))
    assert type(builder).__name__.lower().startswith(f"{kind}folder")
    if kind == "audio" and find_spec("torchcodec") is None:
        lines = (tmp_path / "set" / "metadata.jsonl").read_text().splitlines()
        assert [json.loads(x)["file_name"] for x in lines] == [
            f"{i:06d}-x.{suffix}" for i in range(3)
        ]
        return  # datasets reads a folder of sounds with torchcodec only
    data = datasets.load_dataset(str(tmp_path / "set"))["train"]
    assert type(data.features[kind]).__name__ == kind.capitalize() and len(data) == 3
    assert data["prompt"] == [f"prompt {i}" for i in range(3)] or sorted(data["prompt"]) == [
        f"prompt {i}" for i in range(3)
    ]
    row = data.remove_columns([kind])[0]
    assert json.loads(row["meta"])["tag"][0] == "a" and row["sampler"] == "sjd"
    assert "file" not in row and "member" not in row
    for found in raw(datasets, data, kind):
        content = found["bytes"] or Path(found["path"]).read_bytes()
        assert content in [(out / f"{i:06d}-x.{suffix}").read_bytes() for i in range(3)]
    if kind == "image":
        assert {data[i]["image"].getpixel((0, 0))[0] for i in range(3)} == {0, 40, 80}


def test_media_of_no_or_several_kinds_stay_bytes(tmp_path):
    from pyarrow import parquet

    out = media_folder(tmp_path / "job", "txt")
    export_parquet(out, tmp_path / "a.parquet", media=True)
    table = parquet.read_table(tmp_path / "a.parquet")
    assert table["media"].to_pylist()[:2] == [b"text 0", b"text 1"]
    assert not (table.schema.metadata or {}).get(b"huggingface")
    with pytest.raises(GenError, match=r"media that end in \.txt; expected images alone"):
        export_dataset(out, tmp_path / "set")


def test_a_folder_that_holds_something_is_refused(tmp_path):
    out = media_folder(tmp_path / "job", "png")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a").write_text("b")
    for taken in (tmp_path / "mine", tmp_path / "mine" / "a", out):
        with pytest.raises(GenError, match="expected an unused name"):
            export_dataset(out, taken)
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["a"]


def test_altered_media_are_named_and_left_out(tmp_path, capsys):
    out = media_folder(tmp_path / "job", "png")
    (out / "000001-x.png").write_bytes(b"altered")
    assert main(["export", str(out), "--dataset", str(tmp_path / "set")]) == 1
    said = capsys.readouterr()
    assert "2 image files and metadata.jsonl" in said.out and f"{1:016x}" in said.err
    lines = (tmp_path / "set" / "metadata.jsonl").read_text().splitlines()
    assert [json.loads(x)["file_name"] for x in lines] == ["000000-x.png", "000002-x.png"]
    with Image.open(io.BytesIO((tmp_path / "set" / "000002-x.png").read_bytes())) as image:
        assert image.getpixel((0, 0)) == (80, 80, 80)


@pytest.mark.parametrize("flags", [[], ["--parquet", "a", "--dataset", "b"]])
def test_the_command_takes_one_kind_of_export(tmp_path, capsys, flags):
    assert main(["export", str(media_folder(tmp_path / "job", "png")), *flags]) == 2
    assert "one of --parquet FILE and --dataset FOLDER" in capsys.readouterr().err
