"""Evaluation of a folder: every metric measures every shard once and keeps its state on disk.

States lie in ``DIR/eval/METRIC-SETTINGS/SHARD.npz``, written whole or not at all, so a killed
evaluation goes on with the shards that are missing. A state carries a stamp of the rows and files
that it was measured on, and is measured again when they change. In memory are the rows of the
folder, one batch of media per process, and two states.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gen.core.errors import GenError, describe
from gen.core.files import put, put_text, sweep_temporaries, writing
from gen.eval.folders import Broken, JobFolder, MediaFolder, digest, kind_of_file, open_reference
from gen.eval.metric import Item, Metric, State, Unavailable, make_metric
from gen.eval.stamps import settings_stamp
from gen.eval.threads import one_thread
from gen.media.npz import read_npz, write_npz
from gen.models.load.locate import pick_device

EVAL, RESULTS = "eval", "results.json"
VERSION = 1  # of the files of states


@dataclass(frozen=True)
class ShardState:
    """State of one shard on disk, by group of rows (their sampler).

    Attributes:
        path: the file.
        groups: labels, in the order in which they were first met.
        counts: items measured, by group.
        skipped: items that the metric cannot judge: label of the group and reason to count.
        broken: reason by id of an item without readable media.
    """

    path: Path
    groups: list[str]
    counts: list[int]
    skipped: list[list[Any]]
    broken: dict[str, str]

    def state(self, group: str) -> State:
        """Read the state of a group."""
        number = self.groups.index(group)
        with np.load(self.path, allow_pickle=False) as file:
            prefix = f"{number}/"
            return {k.removeprefix(prefix): file[k] for k in file.files if k.startswith(prefix)}


class States:
    """States of all shards in their order, read from disk whenever they are iterated."""

    def __init__(self, shards: Sequence[ShardState], groups: Sequence[str]):
        self._parts = [(s, g) for s in shards for g in s.groups if g in groups]

    def __iter__(self) -> Iterator[State]:
        return (shard.state(group) for shard, group in self._parts)

    def __len__(self) -> int:
        return len(self._parts)


class Measurement:
    """One metric over one folder, whose states lie in ``out``."""

    def __init__(self, metric: Metric, folder: MediaFolder, out: Path, device: str = "cpu"):
        self.metric, self.folder, self.out, self.device = metric, folder, out, device
        self.settings = settings_stamp(metric)
        self._model: Any = None
        self._is_open = False

    def path(self, number: int) -> Path:
        """Return the file of a shard's state."""
        return self.out / f"{number:05d}.npz"

    def stamp(self, rows: list[dict[str, Any]]) -> str:
        """Return the digest that a state of these rows carries."""
        return digest([VERSION, self.metric.name, self.settings, self.folder.stamp(rows)])

    def find(self, number: int, rows: list[dict[str, Any]]) -> ShardState | None:
        """Return the state of a shard if it is there and of these rows."""
        path = self.path(number)
        try:
            head = json.loads(str(read_npz(path, ("head",))["head"]))
        except (GenError, ValueError):  # missing or damaged: it is measured again
            return None
        if not isinstance(head, dict) or head.pop("stamp", None) != self.stamp(rows):
            return None
        return ShardState(path, **head)

    def measure(self, number: int, rows: list[dict[str, Any]]) -> None:
        """Measure a shard and write its state."""
        if not self._is_open:
            self._model, self._is_open = self.metric.open(pick_device(self.device)), True
        stamp = self.stamp(rows)
        groups: dict[str, list[dict[str, Any]]] = {}
        skipped: dict[tuple[str, str], int] = {}
        broken: dict[str, str] = {}
        for row in rows:
            group = str(row.get("sampler", ""))
            reason = self._skip(row)
            if reason is None:
                groups.setdefault(group, []).append(row)
            elif self._is_whole(row, broken):
                skipped[group, reason] = skipped.get((group, reason), 0) + 1
        counts: dict[str, int] = {}
        arrays: dict[str, Any] = {}
        for group, members in groups.items():
            samples = _Samples(self._read(members, broken))
            if samples.is_empty:
                continue
            state = self.metric.measure(samples, self._model)
            arrays |= {f"{len(counts)}/{key}": value for key, value in state.items()}
            counts[group] = samples.count
        head = {
            "stamp": stamp,
            "groups": list(counts),
            "counts": list(counts.values()),
            "skipped": [[*key, count] for key, count in skipped.items()],
            "broken": broken,
        }
        arrays = {"head": json.dumps(head, ensure_ascii=False), **arrays}
        with writing(self.out):
            self.out.mkdir(parents=True, exist_ok=True)
        put(self.path(number), lambda temporary: write_npz(temporary, arrays))

    def _skip(self, row: dict[str, Any]) -> str | None:
        name = row.get("member") or row.get("file") or ""
        if self.metric.media and name and kind_of_file(name) not in self.metric.media:
            return f"{self.metric.name} measures {' and '.join(self.metric.media)} files"
        return self.metric.skip(row, self.folder, self._model)

    def _is_whole(self, row: dict[str, Any], broken: dict[str, str]) -> bool:
        """Verify the file of an item that is not judged; enter a broken one in ``broken``."""
        try:
            with self.folder.media(row):
                return True
        except Broken as problem:
            broken[row["id"]] = str(problem)
            return False

    def _read(
        self, rows: list[dict[str, Any]], broken: dict[str, str]
    ) -> Iterator[tuple[Item, Any]]:
        """Yield the items that can be read; enter the others in ``broken``."""
        for row in rows:
            try:
                with self.folder.media(row) as path:
                    try:
                        sample = self.metric.read(Item(row, path), self._model)
                    except Unavailable:
                        raise
                    except Exception as problem:  # a decoder may raise anything on a broken file
                        raise Broken(
                            f"file {path.name} cannot be checked: {describe(problem)}"
                        ) from problem
                    yield Item(row, path), sample
            except Broken as problem:
                broken[row["id"]] = str(problem)


class _Samples:
    """Iterator of samples that counts them and looks one ahead."""

    def __init__(self, samples: Iterator[tuple[Item, Any]]):
        self._samples, self.count = samples, 0
        self._next = next(samples, None)

    @property
    def is_empty(self) -> bool:
        return self._next is None

    def __iter__(self) -> _Samples:
        return self

    def __next__(self) -> tuple[Item, Any]:
        if self._next is None:
            raise StopIteration
        found, self.count = self._next, self.count + 1
        self._next = next(self._samples, None)
        return found


# --- folders


def measured(measurement: Measurement, workers: int, *, fresh: bool = False) -> list[ShardState]:
    """Measure the shards of a folder that have no state yet; return the states of all.

    Args:
        measurement: metric and folder.
        workers: processes.
        fresh: measure every shard again.
    """
    shards = measurement.folder.shards()
    if measurement.out.is_dir():
        sweep_temporaries(measurement.out)
    todo = [n for n, rows in shards.items() if fresh or measurement.find(n, rows) is None]
    if workers > 1 and len(todo) > 1:
        _measure_in_processes(measurement, todo, min(workers, len(todo)))
    else:
        for number in todo:
            measurement.measure(number, shards[number])
    found = {n: measurement.find(n, rows) for n, rows in shards.items()}
    if changed := [n for n, state in found.items() if state is None]:
        raise GenError(
            f"the files of shard {changed[0]} of {measurement.folder.path} changed while they were"
            " measured; run the command again to measure them"
        )
    return [state for state in found.values() if state is not None]


def _measure_in_processes(measurement: Measurement, todo: list[int], workers: int) -> None:
    said = (
        measurement.metric.name,
        measurement.metric.settings,
        type(measurement.folder),
        measurement.folder.path,
        measurement.metric.media,
        measurement.out,
        measurement.device,
    )
    context = get_context("spawn")  # a fork would share the threads and devices of this process
    pool = ProcessPoolExecutor(workers, context, _begin, (os.getpid(), *said))
    try:
        for done in as_completed([pool.submit(_measure_one, number) for number in todo]):
            done.result()
    finally:
        pool.shutdown(cancel_futures=True)


_worker: dict[str, Any] = {}  # of a worker process, set once by ``_begin``


def _begin(
    parent: int, name: str, settings: dict, kind: type, path: Path, media: tuple, out: Path, device
) -> None:
    """Set up a worker process; it ends soon after its parent does, however that ends."""
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    torch.set_num_threads(1)
    metric = make_metric(name, settings)
    folder = JobFolder(path) if kind is JobFolder else open_reference(path, media)
    _worker["measurement"] = Measurement(metric, folder, out, device)
    _worker["shards"] = folder.shards()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _measure_one(number: int) -> None:
    with one_thread():
        _worker["measurement"].measure(number, _worker["shards"][number])


# --- results


def evaluate(
    folder: str | Path,
    metrics: Sequence[Metric],
    *,
    reference: str | Path | None = None,
    workers: int = 1,
    device: str = "cpu",
    fresh: bool = False,
) -> dict[str, Any]:
    """Evaluate a job folder; write ``eval/results.json`` and return its content.

    Args:
        folder: job folder.
        metrics: metrics, as ``parse_metrics`` makes them.
        reference: job folder, folder of media, or file of statistics to compare with.
        workers: processes. The figures do not depend on their number.
        device: device of the metrics' models.
        fresh: measure again what was measured before.

    Returns:
        ``folder``, ``items``, ``metrics`` (per metric its settings, scores, items, broken and
        skipped items, and the scores by sampler) and ``broken`` (reason by item).

    Raises:
        GenError: the folder has no items, or a metric has no reference or nothing to measure.
    """
    job = JobFolder(folder)
    if not job.rows:
        raise GenError(f"{folder} has no items yet; expected a manifest with at least one")
    _check_reference(metrics, reference)
    for metric in metrics:
        _check_media(metric, job)
    broken: dict[str, str] = {}
    found: dict[str, Any] = {}
    try:
        with one_thread():
            for metric in metrics:
                out = job.path / EVAL / f"{metric.name}-{digest(settings_stamp(metric))}"
                shards = measured(Measurement(metric, job, out, device), workers, fresh=fresh)
                total = _reference_total(metric, reference, out, workers, device)
                found[metric.name] = _result(metric, shards, total)
                for shard in shards:
                    broken |= shard.broken
    finally:
        job.close()
    results = {
        "folder": str(job.path),
        "items": len(job.rows),
        **({"reference": str(reference)} if reference is not None else {}),
        "metrics": found,
        "broken": broken,
    }
    text = json.dumps(results, ensure_ascii=False, indent=2)
    put_text(job.path / EVAL / RESULTS, text + "\n")
    return results


def _check_reference(metrics: Sequence[Metric], reference: str | Path | None) -> None:
    compared = [m.name for m in metrics if m.reference]
    if compared and reference is None:
        raise GenError(
            f"metric {compared[0]} compares with a reference; expected --reference DIR, a job"
            " folder or a folder of media"
        )
    if reference is not None and not compared:
        names = ", ".join(m.name for m in metrics)
        raise GenError(f"--reference is given, but none of {names} compares with a reference")


def _check_media(metric: Metric, job: JobFolder) -> None:
    """Raise ``GenError`` if a metric measures none of the folder's kinds of media."""
    names = [r.get("member") or r.get("file") or "" for r in job.rows]
    kinds = {kind_of_file(name) for name in names if name}
    if metric.media and kinds and not kinds & set(metric.media):
        raise GenError(
            f"metric {metric.name} measures {' and '.join(metric.media)} files; {job.path} holds"
            f" {' and '.join(sorted(kinds))}"
        )


def _reference_total(
    metric: Metric, reference: str | Path | None, out: Path, workers: int, device: str
) -> Any:
    if not metric.reference or reference is None:
        return None
    path = Path(reference).expanduser()
    if path.is_file():
        return metric.read_reference(path)
    folder = open_reference(path, metric.media)
    try:
        there = out / f"reference-{digest(str(path.resolve()))}"
        shards = measured(Measurement(metric, folder, there, device), workers)
        if problem := next((p for s in shards for p in s.broken.items()), None):
            raise GenError(f"item {problem[0]} of --reference {reference}: {problem[1]}")
        groups = list(dict.fromkeys(g for s in shards for g in s.groups))
        if not groups:
            raise GenError(
                f"--reference {reference} has nothing that metric {metric.name} measures"
            )
        return metric.total(States(shards, groups))
    finally:
        folder.close()


def _result(metric: Metric, shards: list[ShardState], reference: Any) -> dict[str, Any]:
    """Compute the scores of all items and of each sampler's."""
    groups = list(dict.fromkeys(g for s in shards for g in s.groups))

    def scores(chosen: list[str]) -> dict[str, Any]:
        count = sum(
            c for s in shards for g, c in zip(s.groups, s.counts, strict=True) if g in chosen
        )
        total = metric.total(States(shards, chosen))
        return {"items": count, "scores": metric.scores(total, reference)}

    skipped: dict[str, int] = {}
    for shard in shards:
        for _, reason, count in shard.skipped:
            skipped[reason] = skipped.get(reason, 0) + count
    return {
        "settings": metric.settings,
        **(scores(groups) if groups else {"items": 0, "scores": {}}),
        "broken": sum(len(s.broken) for s in shards),
        "skipped": skipped,
        "by_sampler": {g: _try(scores, g) for g in groups} if len(groups) > 1 else {},
    }


def _try(scores: Callable[[list[str]], dict[str, Any]], group: str) -> dict[str, Any]:
    """Compute the scores of one sampler; a sampler with too few items gets the problem instead."""
    try:
        return scores([group])
    except GenError as problem:
        return {"scores": {}, "problem": str(problem)}
