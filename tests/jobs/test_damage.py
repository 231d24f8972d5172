"""Damage to the plan and to the rows of a job: every reader names it with file and line, nothing is
kept in silence, and a run makes again what can be made."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from crashing import (
    contents,
    differences,
    ground,  # noqa: F401  a fixture
    job,
    run,
)

from gen.cli.check import check_folder
from gen.core.errors import GenError
from gen.gallery.write import write_gallery
from gen.jobs import run as jobs
from gen.jobs.decode import decode_folder
from gen.jobs.export import export_parquet
from gen.jobs.progress.report import Silent
from gen.jobs.status import status_of
from gen.store import sealed
from gen.store.ledger import parse_rows, read_plan, read_rows

KEYS = {"shard_items": 2, "trace": 1}
FILES = {"files": ["plan.json", "manifest.jsonl"], "shards": ["plan.json", "shards/00000.jsonl"]}


@pytest.fixture(params=["files", "shards"])
def calm(ground, request):
    """An undisturbed folder, of one layout."""
    run(ground / "calm", layout=request.param, **KEYS)
    return ground / "calm"


def layout_of(folder: Path) -> str:
    return read_plan(folder)["relevant"]["layout"]


def copy(calm: Path, name: str = "o") -> Path:
    out = calm.with_name(name)
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(calm, out)
    return out


def readers(folder: Path):
    """The commands that read a job folder, each as a call."""
    beside = folder.with_name("made")
    return {
        "gallery": lambda: write_gallery(folder),
        "status": lambda: status_of(folder),
        "check": lambda: check_folder(folder),
        "decode": lambda: decode_folder(folder, beside),
        "export": lambda: export_parquet(folder, beside.with_suffix(".parquet")),
    }


def spoil(path: Path, kind: str, dice: random.Random) -> int:
    """Damages a file, and returns the line where that is."""
    data = bytearray(path.read_bytes())
    lines = bytes(data).split(b"\n")[:-1]
    number = dice.randrange(len(lines))
    if kind == "flip":
        at = dice.randrange(len(data))
        data[at] ^= 1 << dice.randrange(8)
        path.write_bytes(data)
        return bytes(path.read_bytes()[:at]).count(b"\n") + 1
    if kind == "cut line":
        lines[number] = lines[number][: dice.randrange(len(lines[number]))] + b" "
    elif kind == "no key":
        lines[number] = lines[number].replace(b'": ', b'x": ', 1)
    elif kind == "cut file":
        start = sum(len(line) + 1 for line in lines[:number])
        path.write_bytes(data[: start + 1 + dice.randrange(len(lines[number]) - 1 or 1)])
        return number + 1
    path.write_bytes(b"\n".join(lines) + b"\n")
    return number + 1


@pytest.mark.parametrize("kind", ["flip", "cut line", "no key", "cut file"])
def test_a_damaged_plan_or_row_is_named_by_every_reader_and_made_again_by_a_run(calm, kind):
    pytest.importorskip("pyarrow.parquet")
    layout, want, dice = layout_of(calm), contents(calm), random.Random(kind)
    for name in FILES[layout] * 2:
        out = copy(calm)
        line, whole = spoil(out / name, kind, dice), (calm / name).read_bytes()
        if (out / name).read_bytes() == whole:
            continue
        for reader, read in readers(out).items():
            if (reader, name) == ("check", "plan.json"):  # which it does not read
                continue
            with pytest.raises(GenError) as error:
                read()
            said = str(error.value)
            assert f"{name}, line " in said and "is damaged" in said, (reader, said)
            if kind != "flip" and name != "plan.json":  # a plan tells of a missing line at its end
                assert f"line {line} " in said, (reader, said)
        told = Notes()
        jobs.run_job(job(out, layout=layout, **KEYS), progress=told, load=loader())
        assert not differences(out, want), (name, line)
        assert any(f"{name}, line " in note for note in told.notes), told.notes


def loader():
    from crashing import Pipe  # a new one for every run

    return Pipe().load


class Notes(Silent):
    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


@pytest.mark.slow
def test_without_checksums_flipped_bits_are_kept_in_silence(calm, monkeypatch):
    layout, dice = layout_of(calm), random.Random(3)
    monkeypatch.setattr("gen.store.ledger.unseal", lambda line: line[: -sealed.SIZE] + b"}")
    want, kept = read_rows(calm), 0
    for _ in range(60):
        out = copy(calm)
        spoil(out / FILES[layout][1], "flip", dice)
        try:
            kept += read_rows(out) != want
        except GenError:
            continue
    assert kept > 10


HOSTILE = {
    "nested": b'{"id": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "half a pair": b'{"id": "\\ud800", "index": 0, "status": "due"}',
    "a list": b"[1, 2]",
    "no row": b"{}",
    "status": b'{"id": "a", "index": 0, "status": ["ok"]}',
}


def with_checksum(text: bytes) -> bytes:
    return b'%s, "crc": "%08x"}\n' % (text[:-1], sealed.crc32(text))


@pytest.mark.parametrize("kind", HOSTILE)
def test_rows_that_somebody_made_with_their_checksums_are_no_internal_error(calm, kind):
    pytest.importorskip("pyarrow.parquet")
    layout, want = layout_of(calm), contents(calm)
    out = copy(calm)
    path = out / FILES[layout][1]
    path.write_bytes(with_checksum(HOSTILE[kind]) + path.read_bytes())
    for reader, read in readers(out).items():
        with pytest.raises(GenError, match="line 1 is damaged"):
            read()
            pytest.fail(reader)
    run(out, layout=layout, **KEYS)
    assert not differences(out, want)


@pytest.mark.slow
def test_rows_without_a_key_are_no_internal_error(calm):
    """Whatever the key is: a reader that needs it says so, and the others do their work."""
    pytest.importorskip("pyarrow.parquet")
    name = FILES[layout_of(calm)][1]
    rows, refused = parse_rows(calm / name), 0
    for key in rows[0]:
        for value in (3, "gone"):
            out = copy(calm)
            other = {k: v for k, v in rows[0].items() if k != key}
            changed = other if value == "gone" else {**other, key: value}
            (out / name).write_bytes(b"".join(sealed.seal(r) for r in [changed, *rows[1:]]))
            for read in readers(out).values():
                try:
                    read()
                except GenError:
                    refused += 1
    assert refused > 20


@pytest.mark.slow
def test_plans_without_a_key_are_no_internal_error(calm):
    layout, whole = layout_of(calm), read_plan(calm)
    cases = [{k: v for k, v in whole.items() if k != key} for key in whole]
    first, *rest = whole["items"]
    changed = [{k: v for k, v in first.items() if k != key} for key in first]
    changed += [{**first, "stem": "../../out"}, {**first, "entry": 7}, {**first, "index": -1}]
    cases += [{**whole, "items": [item, *rest]} for item in changed]
    refused = 0
    for plan in cases:
        out = copy(calm)
        text = {"items": [], "shards": [], **plan}
        (out / "plan.json").write_bytes(sealed.plan_text(text))
        for read in (*readers(out).values(), lambda out=out: run(out, layout=layout, **KEYS)):
            try:
                read()
            except GenError:
                refused += 1
    assert refused > 5 * 9


def test_a_plan_is_not_made_again_where_the_rows_are_of_another_job(calm):
    out = copy(calm)
    data = (out / "plan.json").read_bytes()
    (out / "plan.json").write_bytes(data[:-30])
    before = contents(out)
    with pytest.raises(GenError, match="plan.json, line .* is damaged"):
        run(out, layout=layout_of(calm), seed=99, **KEYS)
    assert contents(out) == before


@pytest.mark.parametrize("suffix", [".json", ".csv"])
def test_a_flipped_bit_in_a_file_beside_the_medium_is_made_again(ground, suffix):
    run(ground / "calm", **KEYS)
    out = copy(ground / "calm")
    path = sorted(out.glob(f"000001-*{suffix}"))[0]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    run(out, **KEYS)
    assert not differences(out, contents(ground / "calm"))
    assert [r["attempt"] for r in read_rows(out)] == [1, 2, 1]


def test_a_row_keeps_its_content_through_its_checksum():
    row = {"id": "a", "text": 'ünï "crc": "00000000"} \u2028', "n": [1, {"b": None}]}
    line = sealed.seal(row)
    assert json.loads(sealed.unseal(line[:-1])) == row
    for at in range(len(line) - 1):
        for bit in range(8):
            flipped = bytearray(line[:-1])
            flipped[at] ^= 1 << bit
            assert sealed.unseal(bytes(flipped)) is None
