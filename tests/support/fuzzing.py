"""Fuzzing of the readers of foreign files.

    python tests/support/fuzzing.py images --minutes 10 --out /tmp/fuzz
    python tests/support/fuzzing.py images --minutes 0 --out /tmp/fuzz --coverage --keep

A reader returns, or raises ``GenError`` with one sentence. Another exception, more than 20 seconds,
more than 2 GB, a canary that was touched and a result that contradicts the file are findings.
Inputs are mutations (``fuzz_mutations``) of good files (``fuzz_readers``). Those that reach new
branches are mutated again where ``atheris`` is installed, those that are read otherwise. Not a
test.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzz_mutations import Files, mutate, pack, unpack

SECONDS, MEMORY = 20.0, 2 << 30  # of one input
LIFE = 200.0  # seconds of a process, so that what libraries keep does not count
FRESH = 0.2  # share of the inputs that are mutations of good files
POOL = 300  # inputs that are mutated again, without atheris
GUIDED = [
    "gen.config", "gen.contracts", "gen.media", "gen.models.load", "gen.store", "gen.jobs", "PIL",
    "gguf",
]  # fmt: skip
SEEDS = Path(__file__).parents[1] / "foreign" / "fuzz_seeds"
FINISHED, HUNG, FAILED = 0, 1, 3  # how a process ends


@dataclass(frozen=True)
class Finding:
    """What is wrong with the end of a reader.

    Attributes:
        kind: error and place, the same for inputs that show the same fault.
        said: all of it.
    """

    kind: str
    said: str


class Bench:
    """Folder in which inputs are read.

    Args:
        reader: a ``fuzz_readers.Reader``.
        root: its folder, which is made again.

    Attributes:
        base: good files of the input, by name.
        seeds: inputs that fuzzing begins with.
    """

    def __init__(self, reader: Any, root: Path):
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        self.reader, self.good, self.given = reader, root / "good", root / "given"
        self.canary = root / "canary"
        self.seeds: list[Files] = reader.make(self.good)
        self.good.mkdir(exist_ok=True)
        # readers of a single file begin with an empty folder
        is_folder = any(p.is_file() for p in self.good.rglob("*"))
        self.base: Files = dict(self.seeds[0]) if is_folder else {}

    def write(self, files: Files) -> None:
        """Write the good files and an input over them."""
        shutil.rmtree(self.given, ignore_errors=True)
        shutil.copytree(self.good, self.given)
        for name, data in files.items():
            path = self.given / name
            if data is None:
                path.unlink(missing_ok=True)
                continue
            data = data.replace(b"CANARY", str(self.canary).encode())
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    def look(self, files: Files) -> tuple[bool, Finding | None]:
        """Read an input; return whether it was read, and what was wrong."""
        self.write(files)
        found, is_read = None, False
        try:
            self.reader.read(self.given)
            is_read = True
        except BaseException as error:
            found = finding_of(error)
        if self.canary.exists():
            self.canary.unlink()
            found = Finding("executed", f"the canary was touched; {found}")
        return is_read, found


def finding_of(error: BaseException) -> Finding | None:
    """Return what is wrong with an error that a reader raised; None for a refusal."""
    from gen.core.errors import GenError

    if isinstance(error, KeyboardInterrupt):
        raise error
    if isinstance(error, GenError):
        said = str(error)
        if re.search("MemoryError|tried to allocate|Unable to allocate", said):
            return Finding("memory", said)
        wrong = "\n" in said or "Traceback" in said or len(said) > 20_000
        return Finding("no sentence", said) if wrong else None
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/site-" not in f.filename]
    place = frames[-1] if frames else None
    where = f"{Path(place.filename).stem}.{place.name}" if place else "nowhere"
    said = "".join(traceback.format_exception(error))[-6000:]
    return Finding(f"{type(error).__name__} in {where}", said)


def fuzz(bench: Bench, seconds: float, seed: int) -> tuple[int, list[Finding]]:
    """Mutate and read inputs in this process, without a bound of one input.

    Args:
        bench: the bench.
        seconds: when to end.
        seed: seed of the mutations.

    Returns:
        The number of inputs, and one finding of every kind.
    """
    dice, until = random.Random(seed), time.monotonic() + seconds
    pool, found, count = list(bench.seeds), {}, 0
    while time.monotonic() < until:
        files = mutate(bench.base, dice.choice(pool), dice)
        is_read, finding = bench.look(files)
        if is_read and len(pool) < POOL:
            pool.append(files)
        if finding is not None:
            found.setdefault(finding.kind, finding)
        count += 1
    return count, list(found.values())


# --- a process that is guided by branches


def ground(out: Path) -> Path:
    """Return the folder of a bench, in memory where there is one: a slow disk looks like a hang."""
    memory = Path("/dev/shm")
    return memory / f"gen-fuzz-{out.name}" if os.access(memory, os.W_OK) else out / "bench"


class Log:
    """What a fuzzing process leaves in a folder: its count, its input and its findings."""

    def __init__(self, out: Path):
        self.out, self.count = out, out / "count"
        for name in ("corpus", "findings"):
            (out / name).mkdir(parents=True, exist_ok=True)

    @property
    def inputs(self) -> int:
        return int(self.count.read_text() or 0) if self.count.exists() else 0

    def keep(self, data: bytes, finding: Finding) -> None:
        """Keep the smallest input of every kind."""
        name = re.sub(r"\W+", "-", finding.kind)[:80]
        path = self.out / "findings" / f"{name}.zip"
        if not path.exists() or len(data) < path.stat().st_size:
            path.write_bytes(data)
            path.with_suffix(".txt").write_text(finding.said, errors="replace")
            print(f"finding: {finding.kind}", flush=True)


def child(name: str, out: Path, seconds: float, seed: int) -> None:
    """Fuzz until the time is over, within the bounds of one input; do not return."""
    try:
        import atheris
    except ImportError:
        atheris = None
    with atheris.instrument_imports(include=GUIDED) if atheris else nullcontext():
        import fuzz_readers
    reader, log = fuzz_readers.READERS[name], Log(out)
    bench, count = Bench(reader, ground(out)), log.inputs
    for files in bench.seeds[:2]:  # what reading imports is imported before memory is bounded
        bench.look(files)
    born = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (born + MEMORY,) * 2)

    def one(data: bytes) -> None:
        nonlocal count
        count += 1
        (out / "current.zip").write_bytes(data)
        log.count.write_text(str(count))
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        finding = bench.look(unpack(data))[1]
        faulthandler.cancel_dump_traceback_later()
        if finding is not None:
            log.keep(data, finding)

    if atheris is None:
        dice, until = random.Random(seed), time.monotonic() + seconds
        while time.monotonic() < until:
            one(pack(mutate(bench.base, dice.choice(bench.seeds), dice)))
        os._exit(FINISHED)

    def mutator(data: bytes, most: int, seed: int) -> bytes:
        dice = random.Random(seed)
        # libraries in C have branches that are not seen, and good files that look the same
        given = dice.choice(bench.seeds) if dice.random() < FRESH else unpack(data)
        try:
            made = pack(mutate(bench.base, given, dice))
        except BaseException:  # which libFuzzer would wait for
            traceback.print_exc()
            os._exit(FAILED)
        return made if len(made) <= most else data

    for files in bench.seeds + kept(name):
        data = pack(files)
        (out / "corpus" / hashlib.sha1(data).hexdigest()).write_bytes(data)
    options = (f"-max_total_time={int(seconds)}", f"-seed={seed}", "-max_len=200000",
               "-rss_limit_mb=0", "-timeout=600", "-report_slow_units=600",
               "-verbosity=0")  # fmt: skip
    atheris.Setup([name, str(out / "corpus"), *options], one, custom_mutator=mutator)
    atheris.Fuzz()


def run(name: str, out: Path, seconds: float, seed: int) -> None:
    """Fuzz a reader in processes of its own, one after the other."""
    log, until = Log(out), time.monotonic() + seconds
    while (left := until - time.monotonic()) > 5:
        seed += 1
        command = [sys.executable, __file__, name, "--out", str(out.parent), "--seed", str(seed),
                   "--child", str(min(left, LIFE))]  # fmt: skip
        with (out / "log.txt").open("a") as file:
            ended = subprocess.run(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL)
        if ended.returncode == FAILED:
            raise SystemExit(f"the mutations failed; see {out / 'log.txt'}")
        if ended.returncode != FINISHED and (out / "current.zip").exists():
            told = (out / "log.txt").read_text(errors="replace")[-6000:]
            hung = ended.returncode == HUNG and "Timeout (" in told
            kind = "hung" if hung else f"died with {ended.returncode}"
            log.keep((out / "current.zip").read_bytes(), Finding(f"{kind} {seed}", told))
    shutil.rmtree(ground(out), ignore_errors=True)


# --- what is kept


def kept(name: str) -> list[Files]:
    """Return the inputs that once showed a fault of a reader."""
    return [unpack(p.read_bytes()) for p in sorted((SEEDS / name).glob("*.zip"))]


def smaller(
    bench: Bench, files: Files, is_wrong: Callable[[Files], bool], tries: int = 120
) -> Files:
    """Return an input with less that differs from the good files and is still wrong."""
    for name in list(files):
        less = {k: v for k, v in files.items() if k != name}
        if less and is_wrong(less):
            files = less
    for name in list(files):  # values and keys of trees
        good, bad = _tree_of(bench.base.get(name)), _tree_of(files[name])
        for key in [*bad] if isinstance(good, dict) and isinstance(bad, dict) else []:
            less = {k: v for k, v in bad.items() if k != key}
            less |= {key: good[key]} if key in good else {}
            if less != bad and is_wrong({**files, name: json.dumps(less).encode()}):
                bad = less
                files = {**files, name: json.dumps(less).encode()}
    for name, data in files.items():
        part = len(data or b"") // 2
        while data and part and part > len(data) // 64:
            at = 0
            while at < len(data) and tries:
                tries -= 1
                cut = {**files, name: data[:at] + data[at + part :]}
                if is_wrong(cut):
                    files, data = cut, cut[name] or b""
                else:
                    at += part
            part //= 2
    return files


def _tree_of(data: bytes | None) -> Any:
    try:
        return json.loads(data or b"")
    except (ValueError, RecursionError):
        return None


def keep(name: str, out: Path) -> None:
    """Make the findings that show again smaller, and keep them for the tests."""
    import fuzz_readers
    from bounded import bounded

    bench = Bench(fuzz_readers.READERS[name], out / "bench")
    bench.look(bench.seeds[0])  # what reading imports is imported once, before processes are forked
    for path in sorted((out / "findings").glob("*.zip")):
        first = str(bounded(lambda p=path: bench.look(unpack(p.read_bytes()))[1]).said)[:120]

        def is_wrong(files: Files) -> bool:
            ended = bounded(lambda: bench.look(files)[1])
            if ended.how != "returned":
                return True
            return ended.said != "None" and ended.said[:40] == first[:40]

        files = unpack(path.read_bytes())
        if not is_wrong(files):
            print(f"{path.stem}: does not show alone")
            continue
        data = pack(smaller(bench, files, is_wrong))
        (SEEDS / name).mkdir(parents=True, exist_ok=True)
        (SEEDS / name / path.name.lower()).write_bytes(data)
        print(f"{path.stem}: {len(data)} bytes")


def branches(name: str, out: Path) -> tuple[int, int]:
    """Read the inputs that fuzzing kept; return the branches of the reader's modules that they
    reach, and all of them."""
    import coverage

    measured = coverage.Coverage(branch=True, data_file=None)
    measured.start()
    import fuzz_readers

    reader = fuzz_readers.READERS[name]
    bench = Bench(reader, out / "bench")
    grown = [unpack(path.read_bytes()) for path in sorted((out / "corpus").iterdir())]
    for files in bench.seeds + grown:
        bench.look(files)
    measured.stop()
    files = [str(Path(sys.modules[m].__file__ or "").resolve()) for m in reader.modules]
    measured.json_report(include=files, outfile=str(out / "coverage.json"))
    total = json.loads((out / "coverage.json").read_text())["totals"]
    return total["covered_branches"], total["num_branches"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Fuzz a reader of foreign files.")
    parser.add_argument("reader")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="keep findings for the tests")
    parser.add_argument("--coverage", action="store_true", help="count branches")
    parser.add_argument("--child", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    out = given.out / given.reader
    if given.child:
        child(given.reader, out, given.child, given.seed)
    run(given.reader, out, 60 * given.minutes, given.seed)
    if given.keep:
        keep(given.reader, out)
    print(f"{given.reader}: {Log(out).inputs} inputs")
    for path in sorted((out / "findings").glob("*.txt")):
        print(f"  {path.stem}: {(path.read_text().strip().splitlines() or [''])[-1][:200]}")
    if given.coverage:
        print("  {} of {} branches".format(*branches(given.reader, out)))


if __name__ == "__main__":
    main()
