"""Damage in a job folder, in any form: a run makes it again or names it, and every reader answers.

Damage is a file that is cut, flipped, empty or gone, and something else in its place: a pipe, a
device, a socket, a loop of links, a folder.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
from pathlib import Path

import pytest
from bounded import bounded
from crashing import (
    contents,
    differences,
    ground,  # noqa: F401  a fixture
    run,
)

from gen.config.job import load_config
from gen.eval.check import check_folder
from gen.gallery.write import write_gallery
from gen.jobs.decode import decode_folder
from gen.jobs.export import export_parquet
from gen.jobs.status import status_of
from gen.jobs.worker import run_worker

KEYS = {"shard_items": 2, "trace": 1}
SECONDS = 20.0


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


def readers(out: Path, layout: str):
    """The commands that look at a job folder, each as a call."""
    beside = out.with_name("made")
    return {
        "gallery": lambda: write_gallery(out),
        "check": lambda: check_folder(out),
        "status": lambda: status_of(out),
        "show": lambda: load_config(out / "config.yaml"),
        "decode": lambda: decode_folder(out, beside),
        "export": lambda: export_parquet(out, beside.with_suffix(".parquet")),
        "work": lambda: run_worker(out, load=_pipe()),
        "run": lambda: run(out, layout=layout, **KEYS),
    }


def _pipe():
    from crashing import Pipe

    return Pipe().load


@pytest.fixture(params=["files", "shards"])
def calm(ground, request):  # noqa: F811
    """An undisturbed folder with its gallery, of one layout."""
    run(ground / "calm", layout=request.param, **KEYS)
    write_gallery(ground / "calm")
    check_folder(ground / "calm")
    return ground / "calm", request.param


def targets(calm: Path) -> list[str]:
    return sorted(
        p.relative_to(calm).as_posix() for p in calm.rglob("*") if p.is_file() and p.stat().st_size
    )


def wrong_after(calm: Path, layout: str, name: str, kind: str) -> list[str]:
    """What is wrong with the commands at a folder with one damaged file, and after a run."""
    want, wrong = contents(calm), []
    out = calm.with_name("o")
    for command in readers(out, layout):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(calm, out)
        DAMAGE[kind](out / name)
        ended = bounded(readers(out, layout)[command], SECONDS)
        said = f"{kind} of {name}, {command}: {ended.how} {ended.said[-900:]}"
        if ended.how not in ("returned", "refused"):
            wrong.append(said)
        elif command == "run" and ended.how == "returned":
            wrong += [f"{said}: {d}" for d in differences(out, want)]
        elif command == "run" and Path(name).name not in ended.said and out.name not in ended.said:
            wrong.append(f"{said}, which does not name it")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_of_any_file_is_made_again_or_named(calm, kind):
    folder, layout = calm
    wrong = [w for name in targets(folder) for w in wrong_after(folder, layout, name, kind)]
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:12])
