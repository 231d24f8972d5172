"""Bits that flip in any file of a job folder: a command says what it said before, or names the
file; and a run makes the folder again, to the bit, or names the file."""

from __future__ import annotations

import functools
import hashlib
import random
import re
import shutil
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bounded import bounded
from crashing import (
    Faults,
    Pipe,
    apart,
    contents,
    differences,
    ground,  # noqa: F401  a fixture
    run,
)

from gen.__main__ import main
from gen.config.entries import fingerprint
from gen.config.job import load_config
from gen.config.yaml_text import dump_yaml
from gen.core.errors import GenError
from gen.eval.check import check_folder
from gen.gallery.write import write_gallery
from gen.jobs.export import export_parquet
from gen.jobs.status import status_of
from gen.store import sealed
from gen.store.claims import Claims
from gen.store.ledger import CONFIG, MANIFEST, read_rows

Keys = dict[str, Any]
Heard = dict[str, tuple[str, str]]  # by command: how it ended, and what it said
LONG = [f"prompt {i}" for i in range(203)]  # so many that rows and page have files of their own
SHORT = {"prompts": LONG[:24], "shard_items": 6, "trace": 5, "batch_size": 2}
KEYS = {
    "finished": {"prompts": LONG, "shard_items": 41, "trace": 5, "batch_size": 41},
    "unfinished": SHORT,
}
SECONDS = 60.0
FLIPS = 56  # of each folder


def finished(out: Path, **keys: Any) -> None:
    """A complete job with its page and its verdicts."""
    run(out, **keys)
    write_gallery(out)
    check_folder(out)


def unfinished(out: Path, **keys: Any) -> None:
    """A run that was killed: journals, claims and media without a row."""
    for at in range(100, 2000, 40):  # system calls
        apart(lambda at=at: (Faults(at, "kill").install(), run(out, **keys)))
        if list(out.glob("_work/*.jsonl")) and 4 < len(read_rows(out)) < len(keys["prompts"]):
            return
        shutil.rmtree(out, ignore_errors=True)
    pytest.fail("no kill left some rows")


SCENES = {"finished": finished, "unfinished": unfinished}
CASES = [(name, layout) for name in SCENES for layout in ("files", "shards")]


@pytest.fixture(params=CASES, ids="-".join)
def scene(ground, request, monkeypatch):
    """A folder, the keys of its job, and what an undisturbed run leaves."""
    # a claim whose bits flipped may name another machine, whose workers are waited for
    monkeypatch.setattr("gen.jobs.worker.Claims", functools.partial(Claims, stale=1.0))
    name, layout = request.param
    keys = {**KEYS[name], "layout": layout}
    SCENES[name](ground / "before", **keys)
    run(ground / "calm", **keys)
    return ground / "before", keys, contents(ground / "calm")


def fresh(before: Path) -> Path:
    out = before.with_name("o")
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(before, out)
    return out


def targets(folder: Path) -> list[list[str]]:
    """The files of a folder by kind, such as all media."""
    kinds: dict[str, list[str]] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.stat().st_size):
        name = path.relative_to(folder).as_posix()
        kinds.setdefault(re.sub(r"[0-9a-f]{8,}|\d+", "", name), []).append(name)
    return list(kinds.values())


def readers(out: Path) -> dict[str, Callable[[], object]]:
    """The commands that look at a job folder; each returns all that it says."""
    beside = out.with_name("made.parquet")

    def gallery() -> object:
        write_gallery(out)
        scripts = sorted((out / "gallery").glob("*.js"))
        return [hashlib.sha256(p.read_bytes()).hexdigest() for p in [out / "index.html", *scripts]]

    def export() -> object:
        parquet = pytest.importorskip("pyarrow.parquet")
        beside.unlink(missing_ok=True)
        export_parquet(out, beside)
        return parquet.read_table(beside).to_pylist()

    def status() -> object:
        counts = ("items", "ok", "failed", "pending", "by_sampler", "by_modality", "errors")
        return {k: status_of(out)[k] for k in counts}  # the rest is of logs and claims

    def show() -> object:
        return fingerprint(load_config(out / CONFIG))

    return {
        "gallery": gallery, "export": export, "status": status, "show": show,
        "check": lambda: check_folder(out),
    }  # fmt: skip


def heard(out: Path) -> Heard:
    """How every command ends, and a digest of what it says, or its refusal."""
    found = {}
    for command, read in readers(out).items():
        try:
            found[command] = "returned", hashlib.sha256(repr(read()).encode()).hexdigest()
        except GenError as error:
            found[command] = "refused", str(error)
        except BaseException:
            found[command] = "failed", traceback.format_exc()[-600:]
    return found


def flip(path: Path, dice: random.Random) -> tuple[int, int]:
    """Flip a bit, and return its place."""
    data = bytearray(path.read_bytes())
    at, bit = dice.randrange(len(data)), dice.randrange(8)
    data[at] ^= 1 << bit
    path.write_bytes(data)
    return at, bit


def is_named(out: Path, name: str, said: str) -> bool:
    """Return True if a message speaks of the file, or of what holds it."""
    return Path(name).name in said or str(out) in said


def wrong_after(
    out: Path,
    name: str,
    keys: dict[str, Any],
    calm: dict[str, tuple[str, str]],
    want: dict[str, Any],
) -> list[str]:
    """What is wrong with the commands at a folder with a flipped bit, and after a run."""
    wrong = []
    looked = bounded(lambda: _told(heard(out), calm, out, name), SECONDS)
    if looked.how != "returned" or looked.said != "[]":
        wrong.append(f"{looked.how} {looked.said}")
    ended = bounded(lambda: run(out, **keys)["pending"], SECONDS)
    if ended.how == "returned":
        wrong += [f"run: {d}" for d in differences(out, want) if not _is_derived(d)]
        if not wrong:
            again = bounded(lambda: heard(out), SECONDS)
            wrong += [] if "failed" not in again.said else [f"after the run: {again.said}"]
    elif ended.how != "refused" or not is_named(out, name, ended.said):
        wrong.append(f"run: {ended.how} {ended.said[-600:]}")
    return wrong


def _is_derived(difference: str) -> bool:
    return difference.startswith(("check.json", "eval/"))  # which a run does not make


def _told(heard: Heard, calm: Heard, out: Path, name: str) -> list[str]:
    told = []
    for command, (how, said) in heard.items():
        is_same = (how, said) == calm[command]
        is_refusal = how == "refused" and is_named(out, name, said)
        # a verdict names the medium, and a config that was changed has another fingerprint
        names = command == "check" or (command, name) == ("show", CONFIG)
        is_page = command == "gallery" and Path(name).suffix == ".txt" and how == "returned"
        if not (is_same or is_refusal or (names and how == "returned") or is_page):
            told.append(f"{command}: {how} {said}")
    return told


def tried(
    before: Path, keys: dict[str, Any], want: dict[str, Any], flips: int
) -> tuple[Counter, list[str]]:
    """Flip bits in the files of a folder, one kind after the other; return how many of each kind,
    and what was wrong."""
    dice, counts, wrong = random.Random(keys["layout"]), Counter(), []
    calm = heard(fresh(before))
    assert all(how != "failed" for how, _ in calm.values()), calm
    kinds = targets(before)
    for number in range(flips):
        out, name = fresh(before), dice.choice(kinds[number % len(kinds)])
        at, bit = flip(out / name, dice)
        counts[re.sub(r"[0-9a-f]{8,}|\d+", "#", name)] += 1
        place = f"bit {bit} of byte {at} of {name}"
        wrong += [f"{place}: {w}" for w in wrong_after(out, name, keys, calm, want)]
    return counts, wrong


@pytest.mark.slow
def test_a_flipped_bit_is_made_again_or_named(scene):
    counts, wrong = tried(*scene, FLIPS)
    print(f"{counts.total()} flips: {dict(counts)}")
    assert counts.total() == FLIPS and len(counts) >= 8
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:12])


@pytest.mark.slow
def test_a_flipped_bit_of_the_config_is_one_sentence_in_every_command(ground, monkeypatch, capsys):
    monkeypatch.setattr("gen.pipeline.pipeline.load", Pipe().load)
    keys = {"modality": "crash", "sampler": "sjd", "out": str(ground / "o"), **SHORT}
    (ground / "job.yaml").write_text(dump_yaml(keys))
    finished(ground / "before", **SHORT)
    dice, codes, changed = random.Random(4), Counter(), 0
    for _ in range(60):
        out = fresh(ground / "before")
        flip(out / CONFIG, dice)
        data = (out / CONFIG).read_bytes()
        for command in ("check", "gallery", "status", "work", "show", "run"):
            (out / CONFIG).write_bytes(data)
            path = out / CONFIG if command in ("show", "run") else out
            code = main([command, str(path)])
            said = capsys.readouterr().err
            codes[code] += 1
            assert code in (0, 1, 2) and "Traceback" not in said, (command, data, said)
            assert code != 2 or said.count("\n") == 1, (command, said)
        assert main(["run", str(ground / "job.yaml")]) == 0, capsys.readouterr().err
        changed += (out / CONFIG).read_bytes() != data  # it was written again
    print(f"{codes.total()} commands: {dict(codes)}")
    assert codes[2] > 60 and changed == 60


def test_flips_in_rows_without_checksums_are_seen(ground, monkeypatch):
    """The control: without its checksums a row is taken for what it says."""
    monkeypatch.setattr("gen.store.ledger.unseal", lambda line: line[: -sealed.SIZE] + b"}")
    run(ground / "before", **SHORT)
    calm, dice, wrong = heard(fresh(ground / "before")), random.Random(1), []
    for _ in range(12):
        out = fresh(ground / "before")
        flip(out / MANIFEST, dice)
        wrong += _told(heard(out), calm, out, MANIFEST)
    assert wrong
