"""Writer of a worker, in a thread of its own: the next microbatch is made while the last one is
encoded and written.

The files of every item come first, then, for all of a microbatch together, the lines of the
journal that commit them.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from gen.core.errors import GenError, cut, describe
from gen.core.files import Puts, sha256, writing
from gen.core.logprobs import as_dicts
from gen.gallery import write as gallery
from gen.jobs.pins import pinned_options
from gen.jobs.searched import ENDING, load_shown, save_search
from gen.jobs.types import Lost, Stopped, Work, WorkerState
from gen.store.ledger import RUNTIME, SHARDS, Journal, Row, holds, shard_folder, trace_path
from gen.store.manifest import digest_of
from gen.store.stored_tokens import save_tokens

TOLD = 10  # failures that a worker tells of one by one
AHEAD = 2  # microbatches that may wait to be written: enough to overlap, and memory stays bounded
SYNCS = 8  # fsyncs at a time
OF_ROWS = ("condition", "adapter", "overrides", "input_id", "meta")  # keys of an input row
COUNTS = (
    "nfe",
    "tokens",
    "tokens_computed",
    "positions_computed",
    "mean_acceptance_length",
    "draft_acceptance_rate",
)


class Writer:
    """Queue of finished microbatches. Leaving the context waits until everything is written, and
    raises what went wrong there."""

    def __init__(self, worker: WorkerState, shard: int, journal: Journal):
        self.worker, self.shard, self.journal = worker, shard, journal
        self.commits = worker.plan.get("commits", {})
        self.target = shard_folder(worker.folder, shard) if worker.tars else worker.folder
        self._pool, self._syncs = ThreadPoolExecutor(1, "writer"), ThreadPoolExecutor(SYNCS, "sync")
        self._waiting: deque[Future] = deque()
        self.lost = False  # the shard is somebody else's by now

    def submit(self, out: Any, batch: list[Work], keep: set[str] | None = None) -> None:
        """Write a finished microbatch, or the items of it that are in ``keep``."""
        while len(self._waiting) >= AHEAD:
            self._waiting.popleft().result()
        load_shown(out)  # here, where the models are at work
        self._waiting.append(self._pool.submit(self._commit, out, batch, keep))

    def fail(self, batch: list[Work], errors: list[str]) -> None:
        """Write the rows of items that failed, with one error each."""
        self._waiting.append(self._pool.submit(self._fail, batch, errors))

    def _commit(self, out: Any, batch: list[Work], keep: set[str] | None) -> None:
        if self._lost():
            return
        with writing(self.target):
            self.target.mkdir(parents=True, exist_ok=True)
        puts = Puts(self._syncs)
        try:
            self._put(out, batch, keep, puts)
        except (OSError, GenError):
            # who took the shard over may have removed its folder
            if not self._lost():
                raise
        finally:
            puts.drop()

    def _put(self, out: Any, batch: list[Work], keep: set[str] | None, puts: Puts) -> None:
        """Write a finished microbatch; arguments as of ``submit``."""
        rows: list[Row] = []
        outdated: list[Path] = []
        try:
            for i, work in enumerate(batch):
                if keep is None or work.item["id"] in keep:
                    before = len(puts)
                    try:
                        rows.append(self._save(out, i, work, puts, outdated))
                    except BaseException:
                        puts.drop(before)
                        raise
        finally:  # a disk that is full in the middle takes nothing back
            if rows and puts.commit(lambda: self._fenced(outdated)):
                self._add(rows)

    def _fail(self, batch: list[Work], errors: list[str]) -> None:
        with self._fenced() as mine:
            pass
        if mine:
            rows = zip(batch, errors, strict=True)
            self._add([self._row(work, None, 0, "failed", error) for work, error in rows])

    @contextmanager
    def _fenced(self, outdated: Sequence[Path] = ()) -> Iterator[bool]:
        """Keep the shard while the context is open, and remove ``outdated`` files; yields False if
        the shard is another worker's."""
        with ExitStack() as stack:
            with writing(self.worker.claims.folder):
                mine = stack.enter_context(self.worker.claims.fence(f"{self.shard:05d}"))
            if mine := not self._lost(mine):
                with writing(self.target):
                    for path in outdated:
                        path.unlink(missing_ok=True)
            yield mine

    def _lost(self, mine: bool | None = None) -> bool:
        """Return True if another worker took the shard over, for example after a long pause.
        Results produced since are dropped."""
        if mine is None:
            mine = self.worker.claims.mine(f"{self.shard:05d}")
        if not self.lost and not (mine and holds(self.worker.folder, self.worker.plan)):
            self.lost = True
            self.worker.log.event("lost", shard=self.shard)
        return self.lost

    def _add(self, rows: list[Row]) -> None:
        self.journal.add(rows)
        failed = [r for r in rows if r["status"] == "failed"]
        for before, row in enumerate(failed, self.worker.report.failed):
            if before < TOLD:
                self.worker.progress.note(f"item {row['index']} failed: {cut(row['error'])}")
            elif before == TOLD:
                self.worker.progress.note("more items failed; gen status lists the errors")
            self.worker.log.event("failed", id=row["id"], index=row["index"], error=row["error"])
        self.worker.report.made += len(rows) - len(failed)
        self.worker.report.failed += len(failed)
        self.worker.progress.items(
            len(rows), failed=len(failed), nfe=sum(r["nfe"] or 0 for r in rows)
        )

    def _save(self, out: Any, i: int, work: Work, puts: Puts, outdated: list[Path]) -> Row:
        """Write the files of an item and return its row; an output that cannot be encoded is one
        failed item, whose files of an earlier attempt are ``outdated``."""
        modality = self.worker.pipe(work.item["entry"]).modality
        stem, before = work.item["stem"], len(puts)
        row, job = self._row(work, out, i, "ok", None), recipe(work, self.commits)
        also, info = row.get("also", ()), info_of(row, job)
        tokens = row.get("tokens_file")
        try:
            medium = puts.add(
                self.target / f"{stem}.{extension_of(work, modality)}",
                lambda path: modality.save(out.media[i], path, info),
            )
            beside = [
                puts.add(
                    self.target / name, lambda path: modality.save_also(out.media[i], path, info)
                )
                for name in also
            ]
            sheet = save_search(out, i, row, modality, self.target / stem, puts)
            beside += sheet
            if tokens:
                beside.append(
                    puts.add(self.target / tokens, lambda path: save_tokens(path, out, i))
                )
        except GenError:
            raise
        except Exception as problem:
            puts.drop(before)
            names = (f"{stem}.{extension_of(work, modality)}", f"{stem}.json", *also)
            outdated += [self.target / n for n in (*names, f"{stem}.{ENDING}", tokens) if n]
            return self._row(work, None, 0, "failed", f"could not be saved: {describe(problem)}")
        row.update(sha256=sha256(medium), bytes=medium.stat().st_size)
        logprobs = {} if out.logprobs is None else {"logprobs": as_dicts(out.logprobs[i])}
        stated = {k: v for k, v in row.items() if k not in RUNTIME}
        about = json.dumps({**stated, "job": job, **logprobs}, ensure_ascii=False) + "\n"
        sidecar = puts.add(
            self.target / f"{stem}.json", lambda path: path.write_text(about, encoding="utf-8")
        )
        row["beside_sha256"] = digest_of([*beside, sidecar])
        trace = trace_path(self.worker.folder, row)
        if work.trace and out.traces:
            with writing(trace):
                trace.parent.mkdir(exist_ok=True)
            steps = json.dumps([_trace_step(s) for s in out.traces[i]]) + "\n"
            row["trace_sha256"] = sha256(puts.add(trace, lambda path: path.write_text(steps)))
        elif work.attempt > 1:
            outdated.append(trace)
        if self.worker.tars:
            gallery.preview_of(medium, self.worker.folder, row)
            if sheet:
                gallery.preview_sheet(sheet[0], self.worker.folder, row)
        gallery.preview_start(work.entry.start, self.worker.folder, row)
        return row

    def _row(self, work: Work, out: Any, i: int, status: str, error: str | None) -> Row:
        """Build the manifest line of an item; ``out`` is None for one that failed."""
        item, stats = work.item, vars(out.stats[i]) if out is not None else {}
        modality = self.worker.pipe(item["entry"]).modality
        name = f"{item['stem']}.{extension_of(work, modality)}" if out is not None else None
        where = (
            {"file": name}
            if not self.worker.tars or name is None
            else {"file": f"{SHARDS}/{self.shard:05d}.tar", "member": name}
        )
        also = [f"{item['stem']}.{extension}" for extension in modality.also]
        tokens = (
            {"tokens_file": f"{item['stem']}.tokens.npz"}
            if out is not None and self.worker.job.run.tokens
            else {}
        )
        return {
            "id": item["id"],
            "index": item["index"],
            "modality": work.entry.modality,
            "prompt": item["prompt"],
            "seed": item["seed"],
            "sampler": work.label,
            "model": out.model if out is not None else work.entry.model,
            **where,
            "sha256": None,
            "bytes": None,
            **{k: stats.get(k) for k in COUNTS},
            "status": status,
            "error": error,
            "guarantee": work.guarantee,
            **({"grid": list(out.grid)} if out is not None and out.grid else {}),
            **({"also": also} if out is not None and also else {}),
            **tokens,
            **{k: item[k] for k in OF_ROWS if k in item},
            "attempt": work.attempt,
            "turn": self.worker.claims.turns[f"{self.shard:05d}"],
            "seconds": stats.get("seconds"),
            "batch": 1 if out is None else work.at_once or len(out.stats),
            "worker": self.worker.name,
        }

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        self._pool.shutdown(wait=True)
        self._syncs.shutdown(wait=True)
        if kind is None or issubclass(kind, (Stopped, Lost)):
            for future in self._waiting:
                future.result()


def extension_of(work: Work, modality: Any) -> str:
    """Return the extension of an item's media: that of its entry, or the modality's own."""
    return work.entry.format or modality.extension


def recipe(work: Work, commits: Mapping[str, str]) -> dict[str, Any]:
    """Build the job that makes this one item again, from the same commits of models of the hub."""
    entry, item = work.entry, work.item
    start = {
        k: str(v) if isinstance(v, Path) else v
        for k, v in vars(entry.start).items()
        if v is not None
    }
    said = (
        {"model": entry.model, "model_options": pinned_options(entry, commits)}
        if entry.model
        else {}
    )
    row = {"prompt": item["prompt"], **item.get("condition", {})}
    row |= {"adapter": item["adapter"]} if "adapter" in item else {}
    return {
        "modality": entry.modality,
        **said,
        "sampler": entry.sampler,
        "sampling": entry.sampling,
        "prompts": [row if len(row) > 1 else item["prompt"]],
        "seed": item["seed"],
        "dtype": entry.dtype,
        **({"format": entry.format} if entry.format else {}),
        **start,
    }


def info_of(row: Row, job: dict[str, Any] | None) -> dict[str, Any]:
    """Collect the metadata of a media file; fewer if its job is not known."""
    said = {"sampler": job["sampler"], "sampling": job["sampling"], "job": job} if job else {}
    return {
        "prompt": row["prompt"],
        "seed": row["seed"],
        "model": row["model"],
        **{k: json.dumps(v) for k, v in said.items()},
    }


def _trace_step(step: Any) -> dict[str, Any]:
    tree = asdict(step) if is_dataclass(step) else dict(step)
    return {**tree, "committed": {str(k): v for k, v in tree["committed"].items()}}
