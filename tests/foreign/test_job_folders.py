"""Damage in a job folder, in any form: a run makes it again or names it, and every reader answers.

Damage is a file that is cut, flipped, empty or gone, and something else in its place: a pipe, a
device, a socket, a loop of links, a folder.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import socket
import sys
import traceback
from pathlib import Path

import pytest
from bounded import bounded
from crashing import (
    Pipe,
    contents,
    differences,
    ground,  # noqa: F401  a fixture
    run,
)

from gen.config.job import load_config
from gen.core.errors import GenError
from gen.eval.check import check_folder
from gen.gallery.write import write_gallery
from gen.jobs.decode import decode_folder
from gen.jobs.export import export_parquet
from gen.jobs.status import status_of
from gen.jobs.worker import run_worker
from gen.store.ledger import CHECK

KEYS = {"shard_items": 2, "trace": 1}
SECONDS = 20.0
DERIVED = (CHECK, "eval/")  # which no row speaks of


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def bound(path: Path) -> None:
    path.unlink()
    with socket.socket(socket.AF_UNIX) as made:
        here = os.open(path.parent, os.O_RDONLY)
        try:
            made.bind(f"/proc/self/fd/{here}/{path.name}")
        finally:
            os.close(here)


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def full_folder(path: Path) -> None:
    folder(path)
    (path / "kept").write_text("somebody's")


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: 2 * len(data) // 3])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def gone(path: Path) -> None:
    path.unlink()


def noise(path: Path) -> None:
    path.write_bytes(random.Random(path.name).randbytes(3000))


def flip(seed: int):
    def flipped(path: Path) -> None:
        data, dice = bytearray(path.read_bytes()), random.Random(f"{path.name}{seed}")
        if data:
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        path.write_bytes(data)

    return flipped


DAMAGE = {
    **{f.__name__: f for f in (fifo, device, bound, loop, folder, full_folder)},
    **{f.__name__: f for f in (cut, empty, gone, noise)},
    **{f"flip {seed}": flip(seed) for seed in range(4)},
}


def readers(out: Path):
    """The commands that look at a job folder, each as a call."""
    beside = out.with_name("made")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    return {
        "gallery": lambda: write_gallery(out),
        "check": lambda: check_folder(out),
        "status": lambda: status_of(out),
        "show": lambda: load_config(out / "config.yaml"),
        "decode": lambda: decode_folder(out, beside / "d"),
        "export": lambda: export_parquet(out, beside / "o.parquet"),
        "work": lambda: run_worker(out, load=Pipe().load),
    }


@pytest.fixture(params=["files", "shards"])
def calm(ground, request):
    """An undisturbed folder with its gallery, of one layout."""
    run(ground / "calm", layout=request.param, **KEYS)
    write_gallery(ground / "calm")
    check_folder(ground / "calm")
    return ground / "calm", request.param


def targets(calm: Path) -> list[str]:
    """One file of every kind that a job folder holds."""
    found = (p.relative_to(calm).as_posix() for p in sorted(calm.rglob("*")) if p.is_file())
    kinds = {re.sub(r"[0-9a-f]{8,}|\d+|-(alpha|beta|gamma)-", "", name): name for name in found}
    return list(kinds.values())


def wrong_after(calm: Path, layout: str, name: str, kind: str) -> list[str]:
    """What is wrong with the commands at a folder with one damaged file, and after a run."""
    out = calm.with_name("o")
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(calm, out)
    DAMAGE[kind](out / name)

    def look() -> list[str]:
        told = []
        for command, read in readers(out).items():
            try:
                read()
            except GenError:
                pass
            except BaseException:
                told.append(f"{command}: {traceback.format_exc()[-600:]}")
        return told

    wrong, looked = [], bounded(look, SECONDS)
    if looked.how != "returned" or looked.said != "[]":
        wrong.append(f"{kind} of {name}: {looked.how} {looked.said}")
    ended = bounded(lambda: run(out, layout=layout, **KEYS), SECONDS)
    said = f"{kind} of {name}, run: {ended.how} {ended.said[-600:]}"
    if ended.how == "returned":
        left = differences(out, contents(calm))
        wrong += [f"{kind} of {name}, run: {d}" for d in left if not d.startswith(DERIVED)]
    elif ended.how != "refused" or (name not in ended.said and out.name not in ended.said):
        wrong.append(said)
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_of_any_file_is_made_again_or_named(calm, kind):
    folder, layout = calm
    wrong = [w for name in targets(folder) for w in wrong_after(folder, layout, name, kind)]
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:12])


def test_a_reader_that_waits_for_a_pipe_is_seen(calm, monkeypatch):
    """The control: with the guard of pipes broken, a digest waits for ever."""
    folder, layout = calm
    monkeypatch.setattr("gen.store.manifest.sha256", lambda path: path.read_bytes())
    monkeypatch.setattr(sys.modules[__name__], "SECONDS", 1.0)
    name = "shards/00000.tar" if layout == "shards" else "000001-beta-s0.txt"
    assert any("hung" in w for w in wrong_after(folder, layout, name, "fifo"))
