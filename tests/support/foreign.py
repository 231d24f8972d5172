"""What the tests of foreign files share: bounded calls, and a canary that nothing may touch. Not a
test."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bounded import Ended, bounded

import gen

CANARY = "CANARY"  # in an input, stands for the path of the file that it tries to make
HELD = ("returned", "refused")
SECONDS = 20.0
TURNS = [{"role": "user", "content": "one two"}]


def with_canary(text: str, folder: Path) -> str:
    """Return an input that tries to make a file in a folder."""
    return text.replace(CANARY, str(folder / "canary"))


def require_held(name: Any, ended: Ended, folder: Path, seconds: float = SECONDS) -> None:
    """Fail where a call ended otherwise than with a result or one sentence, or made the file."""
    assert ended.how in HELD, (name, ended)
    assert ended.seconds < seconds and "Traceback" not in ended.said, (name, ended)
    assert ended.how == "returned" or "\n" not in ended.said, (name, ended)
    assert not (folder / "canary").exists(), (name, "was executed")


def wrong_of_files(
    inputs: Mapping[str, tuple[str, bytes]], read: Callable[[Path], object], folder: Path
) -> list[str]:
    """Read files one after the other, each within limits; return what was wrong with the ends.

    Args:
        inputs: name and bytes of the file of every input, by the input's name.
        read: what reads a file.
        folder: folder of the files, and of the canary.
    """
    wrong, canary = [], folder / "canary"
    for name, (file, data) in inputs.items():
        path = folder / file
        path.write_bytes(data)
        ended = bounded(lambda path=path: read(path))
        if ended.how not in HELD or "\n" in ended.said:
            wrong.append(f"{name[:60]}: {ended.how} {ended.said[-600:]}")
        if canary.exists():
            wrong.append(f"{name}: was executed")
            canary.unlink()
        path.unlink()
    return wrong


def each(calls: Mapping[str, Callable[[], object]]) -> dict[str, Ended]:
    """Run calls one after the other in one process with limits, each with a time of its own.

    A call that hangs or ends the process fails all of them.
    """

    def run() -> object:
        found = {}
        for name, call in calls.items():
            began = time.monotonic()
            try:
                how, said = "returned", repr(call())[:300]
            except gen.GenError as error:
                how, said = "refused", str(error)
            except BaseException as error:
                how, said = "failed", f"{type(error).__name__}: {error}"[:300]
            found[name] = (how, said, time.monotonic() - began)
        (folder / "found.json").write_text(json.dumps(found))

    folder = Path(tempfile.mkdtemp())
    try:
        ended = bounded(run, SECONDS * len(calls))
        if ended.how != "returned":
            return {name: ended for name in calls}
        found = json.loads((folder / "found.json").read_text())
    finally:
        shutil.rmtree(folder)
    return {name: Ended(*values) for name, values in found.items()}


def texts_of(folder: Path, prompt: str = "abc", **options: Any) -> Callable[[], object]:
    """Return a call that loads a folder and decodes four tokens."""

    def call() -> object:
        pipe = gen.load("text", model=folder, max_new_tokens=4, **options)
        return pipe([prompt], seed=0).media

    return call


def changed(folder: Path, target: Path, change: Callable[[Path], None]) -> Path:
    """Copy a folder and change the copy."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder, target)
    change(target)
    return target
