"""Between every two system calls of a run: what is killed there, or refused there, loses nothing
and leaves nothing half done."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import traceback
from pathlib import Path

import pytest
from crashing import (
    Faults,
    Pipe,
    apart,
    audit,
    contents,
    damage,
    differences,
    fork,
    ground,  # noqa: F401  a fixture
    intact,
    run,
    wait,
)

pytestmark = pytest.mark.usefixtures("ground")
KEYS = {"shard_items": 2, "trace": 1}  # 3 items in 2 shards
AGAIN = {"batch_size": 3, "trace": 1, "shard_items": 2}


def nothing(out: Path, layout: str) -> None:
    pass


def one_failed(out: Path, layout: str) -> None:
    run(out, Pipe(bad=("beta", "gamma")), layout=layout, **KEYS)


def spoilt(out: Path, layout: str) -> None:
    run(out, layout=layout, **KEYS)
    damage(out)


def another(out: Path, layout: str) -> None:
    run(out, layout=layout, seed=7, **KEYS)


SCENES = {
    "new": (nothing, {}, ()),
    "retry": (one_failed, {"retry": "failed"}, ()),
    "mend": (spoilt, {}, ("alpha", "beta")),
    "overwrite": (another, {"overwrite": True}, ()),
}


class Scene:
    """A run that may be disturbed, from a folder prepared once, and what it has to come to."""

    def __init__(self, place: Path, name: str, layout: str):
        self.prepare, self.said, self.but = SCENES[name]
        self.place, self.layout, self.number = place, layout, 0
        self.before = place / "before"
        self.prepare(self.before, layout)
        run(place / "calm", layout=layout, **KEYS)
        self.want = contents(place / "calm")

    def folder(self) -> Path:
        self.number += 1
        out = self.place / str(self.number)
        if self.before.exists():
            shutil.copytree(self.before, out)
        return out

    def disturbed(self, out: Path, at: int, how: str | int):
        """A run in a process of its own; returns how it ended, and how many calls there were until
        then."""

        def body():
            faults = Faults(at, how).install()
            run(out, layout=self.layout, **KEYS, batch_size=1, **self.said)
            return faults.calls

        return apart(body)

    def resumed(self, out: Path) -> list[str]:
        """What is wrong after the next run, which keeps what was whole."""
        had = intact(out)
        run(out, layout=self.layout, **AGAIN, **self.said)
        now = intact(out)
        again = [
            f"item {i} was whole and made again"
            for i in had
            if now.get(i) != had[i] and "overwrite" not in self.said
        ]
        return again + differences(out, self.want)


def killed_everywhere(scene: Scene, step: int = 1, first: int = 1) -> tuple[int, list[str]]:
    """How many kills there were until a run survived, and what was wrong after them."""
    kills, wrong = 0, []
    for how in ("kill", "half"):
        at = first
        while True:
            out = scene.folder()
            ended = scene.disturbed(out, at, how)
            if ended.how != "killed":
                assert ended.how == "done", ended
                break
            kills += 1
            wrong += [f"{how} at {at}: {w}" for w in audit(out, scene.but)] if out.exists() else []
            try:
                wrong += [f"{how} at {at}, resumed: {w}" for w in scene.resumed(out)]
            except Exception as error:
                wrong.append(f"{how} at {at}, resumed: {type(error).__name__}: {error}")
            shutil.rmtree(out)
            at += step
    return kills, wrong


@pytest.mark.parametrize("layout", ["files", "shards"])
@pytest.mark.parametrize("name", SCENES)
@pytest.mark.thinned(2)
def test_a_kill_between_two_system_calls_loses_nothing_and_leaves_nothing(ground, name, layout):
    kills, wrong = killed_everywhere(
        Scene(ground, name, layout), step=29, first=1 + len(name + layout)
    )
    assert not wrong and kills >= 3, "\n".join(wrong[:20])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["files", "shards"])
@pytest.mark.parametrize("name", SCENES)
def test_a_kill_between_any_two_system_calls_loses_nothing_and_leaves_nothing(ground, name, layout):
    kills, wrong = killed_everywhere(Scene(ground, name, layout))
    print(f"{name} {layout}: {kills} places for a kill")
    assert not wrong and kills > 100, "\n".join(wrong[:20])


def refused_everywhere(scene: Scene, number: int, step: int, first: int) -> tuple[int, list[str]]:
    """As `killed_everywhere`, with a disk that refuses from some call on. How many runs ended
    because of it, and what was wrong."""
    ends, wrong, at = 0, [], first
    while True:
        out = scene.folder()
        ended = scene.disturbed(out, at, number)
        if ended.how == "done" and ended.said < at:
            return ends, wrong

        def say(text):
            return wrong.append(f"{errno.errorcode[number]} at {at}: {text}")

        if ended.how == "refused":
            ends += 1
            if os.strerror(number) not in ended.said or "\n" in ended.said:
                say(f"is not what went wrong: {ended.said}")
        elif ended.how != "done":
            say(ended.said)
        for text in audit(out, scene.but) if out.exists() else ():
            say(text)
        left = [p.name for p in out.rglob(".tmp-*")] if number == errno.ENOSPC else []
        if left:
            say(f"{left} are left")
        try:
            for text in scene.resumed(out):
                say(f"resumed: {text}")
        except Exception:
            say(f"resumed: {traceback.format_exc()}")
        shutil.rmtree(out)
        at += step


@pytest.mark.parametrize("layout", ["files", "shards"])
@pytest.mark.parametrize("name", ["new", "overwrite"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.thinned(5)
def test_a_disk_that_refuses_is_one_clear_error_and_the_next_run_goes_on(
    ground, name, layout, number
):
    ends, wrong = refused_everywhere(
        Scene(ground, name, layout), number, step=41, first=2 + number % 17
    )
    assert not wrong and ends >= 1, "\n".join(wrong[:9])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["files", "shards"])
@pytest.mark.parametrize("name", SCENES)
@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO], ids=errno.errorcode.get
)
def test_a_disk_that_refuses_at_any_call_is_one_clear_error_and_the_next_run_goes_on(
    ground, name, layout, number
):
    ends, wrong = refused_everywhere(Scene(ground, name, layout), number, step=4, first=1)
    print(f"{name} {layout} {errno.errorcode[number]}: {ends} runs ended")
    assert not wrong and ends > 10, "\n".join(wrong[:9])


# --- the system's own calls


def traced(scene: Scene, out: Path, call: str, at: int):
    """A run whose process the system kills at its ``at``-th call of this kind."""
    go, start = os.pipe()

    def body():
        os.read(go, 1)
        run(out, layout=scene.layout, **KEYS, batch_size=1, **scene.said)

    child = fork(body)
    line = [
        "strace",
        "-f",
        "-o",
        os.devnull,
        "-p",
        str(child[0]),
        "-e",
        f"trace={call}",
        "-e",
        f"inject={call}:signal=KILL:when={at}",
    ]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as tracer:
        said = tracer.stderr.readline()
        os.write(start, b"x")
        ended = wait(child)
        os.close(go)
        os.close(start)
        tracer.stderr.read()
    return ended, said


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["files", "shards"])
@pytest.mark.parametrize("name", ["new", "retry"])
def test_a_kill_by_the_system_itself_loses_nothing_and_leaves_nothing(ground, name, layout):
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    scene, kills, wrong = Scene(ground, name, layout), {}, []
    for call in (
        "fsync",
        "write",
        "rename",
        "link",
        "linkat",
        "unlink",
        "unlinkat",
        "mkdir",
        "rmdir",
        "openat",
    ):
        at, step = 1, {"write": 5, "openat": 17}.get(call, 3)
        while True:
            out = scene.folder()
            ended, said = traced(scene, out, call, at)
            if "attached" not in said:
                pytest.skip(f"strace is not permitted: {said.strip()}")
            if ended.how != "killed":
                assert ended.how == "done", ended
                shutil.rmtree(out)
                break
            kills[call] = kills.get(call, 0) + 1
            wrong += [f"{call} {at}: {w}" for w in (audit(out, scene.but) if out.exists() else [])]
            wrong += [f"{call} {at}, resumed: {w}" for w in scene.resumed(out)]
            shutil.rmtree(out)
            at += step
    print(f"{name} {layout}: {kills}")
    assert not wrong and sum(kills.values()) > 15, "\n".join(wrong[:9])
