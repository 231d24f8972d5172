"""A worker pulls shards until all are done: claim one, make what is missing of it, give it back.

Any number of workers may be at one folder, join late, or die: what they finished stands in their
journals, what they had claimed is taken over. Every launcher runs `run_worker` (see
`gen.jobs.engines`), which is `Worker.try_shard` until nothing is left.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from gen.config.entries import Entry, Job, fingerprint
from gen.config.job import load_config
from gen.core.clock import SteadyClock, pause
from gen.core.errors import GenError, describe
from gen.core.files import writing
from gen.core.memory import give_back
from gen.core.processes import worker_name
from gen.core.resolve import resolve_sampler
from gen.gallery import write as gallery
from gen.jobs.determinism import deterministic
from gen.jobs.given import given_prompt
from gen.jobs.microbatch import Microbatches
from gen.jobs.pins import pinned_options
from gen.jobs.progress.report import Silent
from gen.jobs.types import Lost, Report, Stopped, Work
from gen.jobs.windows import is_auto, with_window
from gen.jobs.writer import Writer
from gen.pipeline import pipeline
from gen.pipeline.memory import BatchSizes
from gen.store.claims import Claims
from gen.store.joblog import JobLog
from gen.store.ledger import (
    CLAIMS,
    CONFIG,
    MANIFEST,
    SHARDS,
    WORK,
    Journal,
    Row,
    holds,
    journals,
    latest,
    parse_rows,
    read_plan,
)
from gen.store.manifest import publish, settled
from gen.store.sealed import Damaged
from gen.store.webdataset import commit_shard, is_committed

PAUSE = (0.05, 1.0)  # seconds between two looks at shards that others are at, growing
PUBLISH_EVERY, PUBLISH_SHARE = (
    5.0,
    50,
)  # seconds between two manifests at least, and so many times what one takes


def pipe_key(entry: Entry) -> tuple:
    """Return what entries must share to share a pipeline."""
    return (
        entry.modality,
        entry.model,
        json.dumps(entry.model_options, sort_keys=True),
        entry.device,
        entry.dtype,
        entry.compile,
    )


class Pipes:
    """Pipelines by entry, each loaded once, when an entry first needs it. ``device``: this
    worker's own, where the job says ``cuda``."""

    def __init__(self, load: Callable[..., Any] | None = None, device: str | None = None):
        self.load, self.device, self._made = load, device, {}
        self.commits: dict[str, str] = {}  # of the plan, once there is one

    def of(self, entry: Entry) -> Any:
        """Return the pipeline of an entry."""
        key = pipe_key(entry)
        if key not in self._made:
            if self.load is None:
                self.load = pipeline.load
            own = (
                self.device
                and ":" not in entry.device
                and self.device.partition(":")[0] == entry.device
            )
            device = self.device if own else entry.device
            self._made[key] = self.load(
                entry.modality,
                model=entry.model,
                device=device,
                dtype=entry.dtype,
                compile=entry.compile,
                **pinned_options(entry, self.commits),
            )
        return self._made[key]


def run_worker(
    folder: Path,
    *,
    job: Job | None = None,
    slot: int = 0,
    device: str | None = None,
    load: Callable[..., Any] | None = None,
    progress: Silent | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Report:
    """Pull shards of the job in ``folder`` until all are done or ``stop()`` is true.

    ``job``: with the batch sizes and devices of this run, by default those in the folder. ``slot``:
    which of several workers this is, so that they do not all begin at the same shard. Raises
    ``GenError`` for what no other item would survive either: a wrong value, a disk that cannot be
    written.
    """
    folder = Path(folder)
    with Worker(folder, job, slot, Pipes(load, device), progress or Silent(), stop) as worker:
        return worker.pull()


class Worker:
    """State of a worker in one folder; use as a context (see the module)."""

    def __init__(
        self,
        folder: Path,
        job: Job | None,
        slot: int,
        pipes: Pipes,
        progress: Silent,
        stop: Callable[[], bool],
    ):
        self.folder, self.plan, self.pipes, self.progress, self.stop = (
            folder,
            read_plan(folder),
            pipes,
            progress,
            stop,
        )
        pipes.commits = self.plan.get("commits", {})
        # a worker starts no engine, so the options of one run nothing here
        self.job = job or load_config(folder / CONFIG, trust_job=True, note=progress.note)
        if fingerprint(self.job) != self.plan["fingerprint"]:
            raise GenError(f"{folder / CONFIG} is not the job that {folder} was planned for")
        self.tars = self.job.run.layout == "shards"
        self.labels, self.first = self.plan["labels"], slot == 0
        count = len(self.plan["shards"])
        first = slot * count // max(1, self.job.run.workers) if count else 0
        self.order = [(first + i) % count for i in range(count)]
        self.firsts = {}  # entry -> index of its first item
        for item in self.plan["items"]:
            self.firsts.setdefault(item["entry"], item["index"])
        self.name, self.report, self.sizes, self.done = worker_name(), Report(), BatchSizes(), set()
        self._pipes: dict[int, Any] = {}
        self._guarantee: dict[tuple[int, str], str] = {}
        self.proven: set[int] = set()  # entries of which something was made
        self.claims = Claims(folder / WORK / CLAIMS, self.name)
        self.log = JobLog(
            folder,
            self.name,
            device=pipes.device or ", ".join(sorted({e.device for e in self.job.entries})),
        )
        self.clock = SteadyClock()
        self.next_publish = self.clock() + PUBLISH_EVERY
        self.base, self.base_of = {}, None  # what the manifest says, and which version of it
        self._look_again()

    def pull(self) -> Report:
        """Work on shards until all are done or a stop is requested; return the report."""
        delay = PAUSE[0]
        while not self.report.stopped and len(self.done) < len(self.order):
            busy = False
            for shard in self.order:
                if self.stop():
                    self.report.stopped = True
                    break
                if shard not in self.done:
                    busy |= self.try_shard(shard)
                    if self.report.stopped:
                        break
            if busy:
                delay = PAUSE[0]
            elif not self.report.stopped and len(self.done) < len(
                self.order
            ):  # the rest is with others, who may die
                pause(delay * random.uniform(0.7, 1.0))
                delay = min(2 * delay, PAUSE[1])
        self.log.event(
            "stop" if self.report.stopped else "done",
            made=self.report.made,
            failed=self.report.failed,
        )
        return self.report

    def try_shard(self, shard: int) -> bool:
        """Work on a shard if no other worker has it, and mark it if it is done.

        Returns:
            True if there was anything to do.
        """
        if self.is_done(shard):
            self.done.add(shard)
            return False
        with writing(self.claims.folder):
            how = self.claims.take(f"{shard:05d}")
        if how is None:
            return False
        try:
            if not holds(self.folder, self.plan):
                raise GenError(
                    f"{self.folder} now holds another job; another process has overwritten the job"
                    " of this worker"
                )
            if not self.is_done(shard):  # somebody may have finished it in between
                self.log.event("stolen" if how == "stolen" else "claim", shard=shard)
                self.run(shard)
        except Lost:  # its new owner makes the rest
            return True
        except Stopped:
            self.report.stopped = True
            return True
        finally:
            self.claims.release(f"{shard:05d}")
        if self.clock() >= self.next_publish:
            self._publish()
        return True

    def _publish(self) -> None:
        """Let readers see how far the job is: manifest and, by one of the workers, gallery."""
        began = self.clock()
        publish(self.folder, self.plan)
        if self.first:
            try:
                gallery.write_gallery(self.folder)
            # the page is made from the rest, and again at the end: no fault in it ends a worker
            except Exception as error:
                self.progress.note(f"the gallery is not up to date: {describe(error)}")
        give_back(len(self.plan["items"]))
        now = self.clock()
        self.next_publish = now + max(PUBLISH_EVERY, PUBLISH_SHARE * (now - began))

    def items(self, shard: int) -> list[dict[str, Any]]:
        """List the items of a shard, as the plan has them."""
        first, end = self.plan["shards"][shard]
        return self.plan["items"][first:end]

    def lines(self, shard: int) -> dict[str, Row]:
        """Collect the line that counts of every known item of a shard; damaged lines are none."""
        damage: list[Damaged] = []
        items = self.items(shard)
        found = {i["id"]: self.base[i["id"]] for i in items if i["id"] in self.base}
        if self.tars:
            latest(parse_rows(self.folder / SHARDS / f"{shard:05d}.jsonl", damage), found)
        for path in journals(self.folder, shard):
            latest(parse_rows(path, damage), found)
        return found

    def is_done(self, shard: int) -> bool:
        """Return True if every item of a shard is finished, and its tar committed."""
        ids = [i["id"] for i in self.items(shard)]
        lines = self.lines(shard)
        if not settled(lines, ids):
            # others may have put all into the manifest since this worker looked, and the journals
            # are gone then
            return self._look_again() and settled(self.lines(shard), ids)
        return not self.tars or is_committed(self.folder, shard, lines)

    def _look_again(self) -> bool:
        """Read the manifest if it has changed; return True if it had. In layout shards the rows
        beside the tars are read instead."""
        try:
            about = (self.folder / MANIFEST).stat()
        except OSError:  # none, or a link that leads nowhere
            return False
        version = about.st_ino, about.st_size, about.st_mtime_ns
        if self.tars or version == self.base_of:
            return False
        keep = ("id", "attempt", "turn", "status")  # all that is needed, of ten thousand rows
        self.base, self.base_of = (
            {r["id"]: {k: r.get(k) for k in keep} for r in parse_rows(self.folder / MANIFEST, [])},
            version,
        )
        give_back(len(self.base))
        return True

    def run(self, shard: int) -> None:
        """Make what is missing of a claimed shard."""
        items, lines = self.items(shard), self.lines(shard)
        due = {i["id"] for i in items if not settled(lines, [i["id"]])}
        journal = Journal(self.folder, shard, self.name)
        attempt = {i["id"]: (lines.get(i["id"], {}).get("attempt") or 0) + 1 for i in items}
        bad = [i for i in items if i["id"] in due and "error" in i]
        with Writer(self, shard, journal) as writer:
            if bad:
                writer.fail([self._work(i, attempt, None) for i in bad], [i["error"] for i in bad])
            fixed = self.job.run.deterministic
            groups: dict[tuple, list[Work]] = {}
            for item in items:
                if "error" in item or (item["id"] not in due and not fixed):
                    continue
                entry = self.entry_of(item)
                pipe = self.pipe(item["entry"])
                given = given_prompt(item["prompt"], item.get("condition"))
                planned = pipe.plan([given], 1, item["seed"])[0]
                if item.get("adapter") is not None:
                    planned = replace(planned, adapter=item["adapter"])
                work = self._work(item, attempt, planned, entry)
                groups.setdefault(_kind(item), []).append(work)
            for (number, _), works in groups.items():
                works = self._with_window(number, works)
                Microbatches(self, self.pipe(number), works, due, writer).run()
        with ExitStack() as stack:
            with writing(self.claims.folder):
                mine = stack.enter_context(self.claims.fence(f"{shard:05d}"))
            if not mine:
                raise Lost
            if self.tars:
                commit_shard(self.folder, self.plan, shard, self.lines(shard))

    def _with_window(self, number: int, works: list[Work]) -> list[Work]:
        """Put the folder's window in place of ``auto``; see ``gen.jobs.windows``."""
        entry, overrides = works[0].entry, works[0].item.get("overrides") or {}
        if not is_auto(entry):
            return works
        plans = [work.plan for work in works]
        about = self.folder, entry, number, overrides, self.pipe(number), plans, self.progress
        entry = with_window(*about)
        return [replace(work, entry=entry) for work in works]

    def pipe(self, number: int) -> Any:
        """Return the pipeline of an entry, loaded on first use."""
        if number not in self._pipes:
            self._pipes[number] = self.pipes.of(self.job.entries[number])
        return self._pipes[number]

    def keep(self, out: Any) -> None:
        """Commit an output whose items are those of the plan, in its order."""
        if self.claims.take("00000") is None:
            raise GenError(
                f"another process is writing to {self.folder}; expected a folder to save to alone"
            )
        attempt = {i: r["attempt"] + 1 for i, r in self.lines(0).items()}
        # a sampler of the call may hold a function, which its spec in the job only names
        self._guarantee = {_kind(item): out.guarantee for item in self.items(0)}
        works = [
            self._work(item, {item["id"]: attempt.get(item["id"], 1)}, planned)
            for item, planned in zip(self.items(0), out.items, strict=True)
        ]
        works = [replace(w, trace=bool(out.traces)) for w in works]
        with Writer(self, 0, Journal(self.folder, 0, self.name)) as writer:
            writer.submit(out, works)
        self.claims.release("00000")

    def entry_of(self, item: dict[str, Any]) -> Entry:
        """Return the entry of an item with the overrides of its input row."""
        entry, said = self.job.entries[item["entry"]], item.get("overrides") or {}
        start = {k: v for k, v in said.items() if k not in ("sampler", "sampling")}
        return (
            replace(
                entry,
                sampler={**entry.sampler, **said.get("sampler", {})},
                sampling={**entry.sampling, **said.get("sampling", {})},
                **start,
            )
            if said
            else entry
        )

    def _work(
        self,
        item: dict[str, Any],
        attempt: dict[str, int],
        planned: Any,
        entry: Entry | None = None,
    ) -> Work:
        entry = entry or self.job.entries[item["entry"]]
        trace = item["index"] - self.firsts[item["entry"]] < entry.trace
        return Work(
            item,
            entry,
            self.labels[item["entry"]],
            planned,
            trace,
            attempt[item["id"]],
            self.guarantee(item, entry),
        )

    def guarantee(self, item: dict[str, Any], entry: Entry) -> str:
        """Return the guarantee of an item, looked up once for all items that share it."""
        key = _kind(item)
        if key not in self._guarantee:
            sampler = resolve_sampler(entry.sampler, entry.sampling)[0]
            self._guarantee[key] = self.pipe(item["entry"]).guarantee(sampler)
        return self._guarantee[key]

    def __enter__(self) -> Worker:
        with ExitStack() as stack:
            stack.callback(self.log.close)
            stack.enter_context(self.claims)
            stack.enter_context(deterministic(self.job.run.deterministic))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)


def _kind(item: dict[str, Any]) -> tuple[int, str]:
    """Return the key of items that are made in one way: their entry and the overrides of their
    rows."""
    return item["entry"], json.dumps(item.get("overrides") or {}, sort_keys=True)
