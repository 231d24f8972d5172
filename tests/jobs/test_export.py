"""``gen export``: the rows of a job as one Parquet file."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from ledgers import write_plan, write_rows, write_verdicts
from pyarrow import parquet

import gen.jobs.export
from gen.cli.export import export
from gen.core.errors import GenError
from gen.core.files import sha256
from gen.jobs.export import COLUMNS, export_parquet, schema


def folder_of(out: Path, count: int = 4, **changes) -> Path:
    """A folder of ``count`` items, written by hand; the last one failed. ``changes``: of the second
    row."""
    out.mkdir(parents=True)
    rows = []
    for i in range(count):
        (out / f"{i:06d}-x.txt").write_text(f"medium {i}")
        rows.append(
            {
                "id": f"{i:016x}",
                "index": i,
                "modality": "toy",
                "prompt": f"Ünï {i}",
                "seed": i,
                "sampler": "sjd",
                "model": None,
                "file": f"{i:06d}-x.txt",
                "sha256": sha256(out / f"{i:06d}-x.txt"),
                "bytes": 8,
                "nfe": 3,
                "tokens": 4,
                "tokens_computed": 9,
                "mean_acceptance_length": 2,
                "draft_acceptance_rate": None,
                "status": "ok",
                "error": None,
                "guarantee": "sampling",
                "grid": [2, 2],
                "attempt": 1,
                "seconds": 0.5,
                "batch": 2,
                "worker": "w",
            }
        )
    rows[1].update(changes)
    rows[-1].update(file=None, sha256=None, bytes=None, status="failed", error="KeyError: 'x'")
    write_rows(out / "manifest.jsonl", rows)
    items = [{"stem": f"{i:06d}-x"} for i in range(count + 2)]
    write_plan(out / "plan.json", items, shards=[[0, count + 2]])
    return out


def test_every_row_is_there_in_the_order_of_the_plan_with_its_types(tmp_path):
    more = {
        "overrides": {"sampler": {"window": 8}},
        "meta": {"who": ["a", 1]},
        "input_id": "r1",
        "coming": {"later": True},
    }
    out = folder_of(tmp_path / "job", **more)
    write_verdicts(out, {f"{1:016x}": {"passed": True, "valid": False, "detail": "looked"}})
    summary = export_parquet(out, tmp_path / "new" / "a.parquet")
    assert {k: summary[k] for k in ("rows", "failed", "pending", "lost")} == {
        "rows": 4,
        "failed": 1,
        "pending": 2,
        "lost": [],
    }
    table = parquet.read_table(tmp_path / "new" / "a.parquet")
    assert (
        table.schema.names == list(COLUMNS)
        and summary["bytes"] == (tmp_path / "new" / "a.parquet").stat().st_size
    )
    rows = table.to_pylist()
    assert [r["index"] for r in rows] == [0, 1, 2, 3] and [r["status"] for r in rows] == [
        "ok"
    ] * 3 + ["failed"]
    row = rows[1]
    assert (row["prompt"], row["seed"], row["seconds"], row["model"], row["input_id"]) == (
        "Ünï 1",
        1,
        0.5,
        None,
        "r1",
    )
    assert [json.loads(row[k]) for k in ("overrides", "meta", "grid", "other")] == [
        more["overrides"],
        more["meta"],
        [2, 2],
        {"coming": more["coming"]},
    ]
    assert (row["passed"], row["valid"], row["detail"]) == (True, False, "looked") and rows[0][
        "passed"
    ] is None
    assert isinstance(row["mean_acceptance_length"], float) and rows[3]["error"] == "KeyError: 'x'"


def test_files_of_different_jobs_are_one_table(tmp_path):
    for name, keys in (
        ("a", {}),
        ("b", {"draft_acceptance_rate": 0.5, "overrides": {"seed": 3}, "member": "x", "coming": 1}),
    ):
        export_parquet(folder_of(tmp_path / name, **keys), tmp_path / f"{name}.parquet")
    tables = [parquet.read_table(tmp_path / f"{n}.parquet") for n in "ab"]
    assert (
        tables[0].schema == tables[1].schema == schema(pa)
        and pa.concat_tables(tables).num_rows == 8
    )
    guessed = [
        pa.Table.from_pylist(
            [json.loads(x) for x in (tmp_path / n / "manifest.jsonl").read_text().splitlines()[:2]]
        )
        for n in "ab"
    ]
    assert (
        guessed[0].schema != guessed[1].schema
    )  # control: what a reader makes of the rows alone differs from job to job


@pytest.mark.parametrize(
    ("rows", "size", "groups"), [(3, 1 << 20, [3, 3, 2]), (100, 20, [3, 3, 2]), (100, 1 << 20, [8])]
)
def test_rows_are_written_in_groups(rows, size, groups, tmp_path, monkeypatch):
    monkeypatch.setattr(gen.jobs.export, "GROUP_ROWS", rows)
    monkeypatch.setattr(gen.jobs.export, "GROUP_BYTES", size)
    export_parquet(folder_of(tmp_path / "job", 8), tmp_path / "a.parquet", media=True)
    file = parquet.ParquetFile(tmp_path / "a.parquet")
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == groups
    assert file.read().column("index").to_pylist() == list(range(8))


@pytest.mark.parametrize("layout", ["files", "shards"])
def test_media_are_a_column_where_asked_for_and_only_whole_ones(layout, tmp_path):
    from gen.config.job import make_job
    from gen.jobs.run import run_job
    from gen.store.ledger import read_rows

    out = tmp_path / "job"
    tree = {
        "modality": "text",
        "prompts": ["close ( ["],
        "num_samples": 2,
        "out": str(out),
        "sampling": {},
        "layout": layout,
    }
    run_job(make_job(tree, where="a test"))
    assert (
        "media"
        not in parquet.read_table(export_parquet(out, tmp_path / "a.parquet")["file"]).column_names
    )
    assert export_parquet(out, tmp_path / "b.parquet", media=True)["lost"] == []
    rows = parquet.read_table(tmp_path / "b.parquet").to_pylist()
    assert [len(r["media"]) for r in rows] == [r["bytes"] for r in rows] and len(rows) == 2
    if layout == "files":
        (out / rows[0]["file"]).write_text("altered")
        (out / rows[1]["file"]).unlink()
        assert export_parquet(out, tmp_path / "c.parquet", media=True)["lost"] == [
            r["id"] for r in read_rows(out)
        ]
        assert [r["media"] for r in parquet.read_table(tmp_path / "c.parquet").to_pylist()] == [
            None,
            None,
        ]


def test_a_value_of_another_type_is_one_line_and_no_file(tmp_path):
    for number, (key, value) in enumerate(
        (
            ("nfe", "7"),
            ("nfe", True),
            ("nfe", 2.5),
            ("guarantee", 3),
            ("seconds", "1"),
            ("bytes", 2**63),
        )
    ):
        out = folder_of(tmp_path / str(number), **{key: value})
        with pytest.raises(GenError, match=rf"{key} .*is '?{value}'?; expected an? "):
            export_parquet(out, tmp_path / "a.parquet")
    assert not list(tmp_path.glob("*.parquet")) and not list(tmp_path.glob(".tmp*"))


def test_an_export_that_fails_leaves_no_file(tmp_path, monkeypatch):
    out, path = folder_of(tmp_path / "job"), tmp_path / "a.parquet"
    monkeypatch.setattr(gen.jobs.export, "cells_of", lambda folder, row: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export_parquet(out, path)
    assert not path.exists() and not list(tmp_path.glob(".tmp*"))
    monkeypatch.setattr(
        gen.jobs.export, "put", lambda path, write: write(path)
    )  # control: without the temporary name a part of it is left
    with pytest.raises(ZeroDivisionError):
        export_parquet(out, path)
    assert path.exists()


def test_a_file_that_exists_is_refused_and_stays(tmp_path):
    out, path = folder_of(tmp_path / "job"), tmp_path / "job.yaml"
    path.write_text("modality: image")
    with pytest.raises(GenError, match="job.yaml exists already; expected an unused name"):
        export_parquet(out, path)
    assert path.read_text() == "modality: image"


def test_what_cannot_be_exported_is_one_line(tmp_path, monkeypatch):
    out = folder_of(tmp_path / "job")
    with pytest.raises(GenError, match="expected a folder that gen run or gen sample wrote"):
        export_parquet(tmp_path, tmp_path / "a.parquet")
    with pytest.raises(GenError, match="is a folder; expected the name of a file"):
        export_parquet(out, tmp_path)
    with pytest.raises(GenError, match="cannot write"):
        export_parquet(out, out / "plan.json" / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        GenError,
        match=r'needs the package pyarrow; install it with: pip install "gen-toolkit\[parquet\]"',
    ):
        export_parquet(out, tmp_path / "a.parquet")


def test_the_command_says_what_is_in_the_file_and_what_is_not(tmp_path, capsys):
    out = folder_of(tmp_path / "job")
    args = argparse.Namespace(
        folder=str(out), parquet=str(tmp_path / "a.parquet"), media=False, dataset=None
    )
    assert export(args) == 0
    said = capsys.readouterr().out
    assert "a.parquet: 4 rows, 1 of them failed, " in said and "; 2 items still pending" in said
    (out / "000000-x.txt").unlink()
    args.media, args.parquet = True, str(tmp_path / "b.parquet")
    assert export(args) == 1
    assert "gen: the media of 0000000000000000 are missing or altered" in capsys.readouterr().err


def test_members_of_tars_are_read_as_one_by_one_and_a_tar_is_opened_once(tmp_path, monkeypatch):
    import tarfile

    from gen.config.job import make_job
    from gen.jobs.run import run_job
    from gen.store.ledger import read_rows
    from gen.store.shard_reader import Members

    out, opened, plain = tmp_path / "job", [], tarfile.open
    tree = {
        "modality": "text",
        "prompts": ["close ( ["],
        "num_samples": 4,
        "shard_items": 2,
        "out": str(out),
        "sampling": {},
        "layout": "shards",
    }
    run_job(make_job(tree, where="a test"))
    rows = read_rows(out)

    def read(path):
        return path.read_bytes() if path else None

    def every(path_of):
        found = []
        for row in rows:
            for name in (None, f"{Path(row['member']).stem}.json", "nothing.txt"):
                with path_of(row, name) as path:
                    found.append(read(path))
        return found

    tars = {row["file"]: plain(out / row["file"]) for row in rows}
    names = [
        (tars[r["file"]], n)
        for r in rows
        for n in (r["member"], f"{Path(r['member']).stem}.json", "nothing.txt")
    ]
    wanted = [t.extractfile(n).read() if n in t.getnames() else None for t, n in names]
    monkeypatch.setattr(tarfile, "open", lambda *a, **k: opened.append(a) or plain(*a, **k))
    with Members(out) as files:
        assert every(files.path) == wanted and wanted.count(None) == 4 and len(opened) == 2
        (out / rows[0]["file"]).unlink()
        with files.path(rows[0]) as path:
            assert path is None
