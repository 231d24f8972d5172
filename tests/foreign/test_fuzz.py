"""Readers of foreign files under mutated inputs: what once was wrong stays right, and a few seconds
of fuzzing find nothing. ``fuzzing.py`` fuzzes for longer."""

from __future__ import annotations

import ast
import os
import time

import fuzz_readers
import fuzzing
import pytest
import yaml
from bounded import bounded
from fuzz_mutations import pack, unpack
from fuzzing import SEEDS, Bench, fuzz, kept

from gen.contracts import checkpoint
from gen.media import bounds
from gen.models.load import pretrained

SECONDS = 6.0
ONCE_WRONG = sorted(p.name for p in SEEDS.glob("*"))


@pytest.fixture(autouse=True)
def undone():
    yield
    fuzz_readers.PATCH.undo()
    fuzz_readers.crash_jobs.cache_clear()


def bench_of(name: str, tmp_path) -> Bench:
    if name == "gguf":
        pytest.importorskip("gguf", reason="make test-quantization has gguf")
    bench = Bench(fuzz_readers.READERS[name], tmp_path / "bench")
    bench.look(bench.seeds[0])  # what reading imports is imported once, before processes are forked
    return bench


def fuzzed(bench: Bench, seconds: float = SECONDS, seed: int = 0) -> tuple[int, set[str]]:
    """Fuzz in a process of its own; return the number of inputs and the kinds of findings."""

    def call():
        count, found = fuzz(bench, seconds, seed)
        return count, {finding.kind for finding in found}

    ended = bounded(call, seconds + 30)
    assert ended.how == "returned", ended
    return ast.literal_eval(ended.said)


@pytest.mark.parametrize("name", ONCE_WRONG)
def test_inputs_that_once_failed_are_read_or_refused(name, tmp_path):
    bench, inputs = bench_of(name, tmp_path), kept(name)
    ended = bounded(lambda: [f for one in inputs if (f := bench.look(one)[1])])
    assert inputs and ended.how == "returned" and ended.said == "[]", ended.said


@pytest.mark.slow
@pytest.mark.parametrize("name", fuzz_readers.READERS)
def test_seconds_of_fuzzing_find_nothing(name, tmp_path):
    count, found = fuzzed(bench_of(name, tmp_path))
    print(f"{name}: {count} inputs")
    assert count > 3 and not found


def test_an_input_survives_being_packed():
    files = {"a/b.json": b"{}", "c": None, "d": b""}
    assert unpack(pack(files)) == files and unpack(b"no archive") == {}


# --- controls: a broken guard is found


def unchecked(*_) -> None:
    pass


def without_arrays(patch) -> None:
    patch.setattr(bounds, "require_array", unchecked)


def without_fields(patch) -> None:
    for module in (checkpoint, pretrained):
        patch.setattr(module, "check_fields", unchecked)


def without_safety(patch) -> None:
    def load(text: str, Loader: type) -> object:
        return yaml.UnsafeLoader(text).get_single_data()

    patch.setattr("gen.config.yaml_text.yaml.load", load)


BROKEN = {
    "arrays": (without_arrays, "Error"),  # of memory, or of numpy's reader of headers
    "model_folder": (without_fields, "TypeError"),
    "job_files": (without_safety, "executed"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_control_a_broken_guard_is_found(name, tmp_path, monkeypatch):
    breaks, kind = BROKEN[name]
    monkeypatch.chdir(tmp_path)  # what runs may touch a file of a mutated name
    bench = bench_of(name, tmp_path)
    breaks(monkeypatch)
    _, found = fuzzed(bench)
    assert any(kind in said for said in found), found


def test_control_every_wrong_end_is_a_finding(tmp_path):
    def reads(path):
        data = (path / "a").read_bytes()
        if data == b"newline":
            raise fuzz_readers.GenError("two\nlines")
        if data == b"canary":
            (path.parent / "canary").touch()
        assert data != b"silent", "it says another thing"
        return 1 / len(data)

    inputs = {b"newline": "no sentence", b"canary": "executed", b"silent": "AssertionError",
              b"": "ZeroDivisionError", b"good": None}  # fmt: skip
    bench = Bench(fuzz_readers.Reader(lambda _: [{"a": b"good"}], reads, ()), tmp_path / "bench")
    for data, kind in inputs.items():
        finding = bench.look({"a": data})[1]
        assert (finding is None) if kind is None else finding.kind.startswith(kind)


@pytest.mark.slow
def test_control_a_process_ends_with_an_input_that_hangs(tmp_path, monkeypatch):
    def waits(path):
        time.sleep(60 * (not begun[0]))
        begun[0] -= 1

    begun = [2]  # the good file is read twice before
    reader = fuzz_readers.Reader(lambda _: [{"a": b"good"}] * 2, waits, ())
    monkeypatch.setitem(fuzz_readers.READERS, "waits", reader)
    monkeypatch.setattr(fuzzing, "SECONDS", 0.5)
    pid = os.fork()
    if not pid:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        fuzzing.child("waits", tmp_path, 30.0, 0)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == fuzzing.HUNG
    assert fuzzing.Log(tmp_path).inputs == 1 and (tmp_path / "current.zip").exists()
