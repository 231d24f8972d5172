"""Running a job: plan, microbatches, resume, retries, and the folder that comes out.

An item is a prompt with a seed of its own, so what it becomes does not depend on the microbatch it runs in. That is
what makes everything here free of choices that would show in the media: microbatches shrink when memory runs out,
failed items are retried alone, and the same command again does only what is missing (see `gen.ledger` for commits).
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from gen.config import Entry, Job, difference, fingerprint, make_job, stored_job
from gen.errors import GenError
from gen.ledger import (
    CONFIG,
    INPUTS,
    MANIFEST,
    TEMPORARY,
    TRACES,
    Ledger,
    is_job,
    put,
    put_text,
    read_json,
    sha256,
    slug,  # fmt: skip
    writing,
)
from gen.progress import Silent
from gen.start import MEDIA

OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory",
                 "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")  # fmt: skip


@dataclass(frozen=True)
class Work:
    """One item of a job. ``plan``: what the pipeline planned, with its ``prompt`` and its own ``seed``."""

    id: str
    entry: Entry
    label: str
    plan: Any
    trace: bool
    file: str
    also: tuple[str, ...] = ()  # further files of the same medium


def run_job(job: Job, *, progress: Silent | None = None, load: Callable[..., Any] | None = None) -> dict[str, Any]:
    """Make everything of a job that is not there yet; returns the summary (see `summarise`).

    Raises ``GenError`` before anything is written if a prompt or value is wrong or the folder holds something else, and
    later if it cannot be written. Items that fail become rows with ``status`` ``failed``; the others go on.
    """
    if load is None:
        from gen.pipeline import load
    progress = progress or Silent()
    folder = Path(job.out)
    check_target(folder, job)
    pipes: dict[tuple, Any] = {}
    for entry in job.entries:
        key = _pipe_key(entry)
        if key not in pipes:
            pipes[key] = load(entry.modality, model=entry.model, device=entry.device, dtype=entry.dtype, **entry.model_options)
    works = plan_job(job, lambda entry: pipes[_pipe_key(entry)])
    made = open_folder(folder, job)
    with Ledger(folder, {w.id: w.file for w in works}) as ledger:
        progress.start(len(works), len(ledger.done))
        try:
            for entry in job.entries:
                due = [w for w in works if w.entry is entry and w.id not in ledger.done]
                run_entry(pipes[_pipe_key(entry)], entry, due, ledger, progress)
        except GenError:
            if made and not ledger.rows:
                leave(folder, [name for w in works for name in (w.file, *w.also)])  # so that the corrected command is not refused as another job
            raise
        finally:
            progress.close()
        rows = ledger.finish()
    return summarise(folder, rows, skipped=len(ledger.done))


def plan_job(job: Job, pipe_of: Callable[[Entry], Any]) -> list[Work]:
    """Every item, in an order that only the job decides. Planning checks every prompt."""
    works: list[Work] = []
    for entry, label in zip(job.entries, job.labels(), strict=True):
        pipe = pipe_of(entry)
        for i, plan in enumerate(pipe.plan(list(entry.prompts), entry.num_samples, entry.seed)):
            works.append(work_of(len(works), entry, label, plan, i < entry.trace, pipe.modality))
    return works


def work_of(number: int, entry: Entry, label: str, plan: Any, trace: bool, modality: Any) -> Work:
    stem = f"{number:06d}-{slug(plan.prompt)}-s{plan.seed}"
    also = tuple(f"{stem}.{extension}" for extension in getattr(modality, "also", ()))
    return Work(f"{number:06d}", entry, label, plan, trace, f"{stem}.{modality.extension}", also)


def run_entry(pipe: Any, entry: Entry, due: list[Work], ledger: Ledger, progress: Silent) -> None:
    """The items of one entry in microbatches. Running out of memory halves them for the rest of the entry."""
    size, queue = entry.batch_size, list(due)
    alone = 0  # so many items at the head of the queue run one by one, to find the one that fails
    while queue:
        batch = queue[: 1 if alone else size]
        progress.batch(batch[0].label, len(batch))
        out, error, full = None, "", False
        try:
            out = pipe.generate([w.plan for w in batch], dict(entry.sampler), dict(entry.law),
                                trace=any(w.trace for w in batch), callback=progress.step, start=entry.start)
        except (GenError, OSError):
            raise  # a wrong value or a broken disk, not a matter of one item
        except Exception as problem:  # what a model may raise is open
            full, error = is_out_of_memory(problem), describe(problem)
        if out is None:  # here, not in the handler: its traceback would keep the tensors alive
            if full:
                free_memory()
            if len(batch) > 1:
                if full:
                    size = max(1, len(batch) // 2)
                    progress.note(f"out of memory with {len(batch)} items at once; going on with {size}")
                else:
                    alone = len(batch)
                continue
            ledger.add(row_of(batch[0], None, 0, status="failed", error=error))
            progress.note(f"item {batch[0].id} failed: {error}")
        else:
            commit(out, pipe.modality, batch, ledger, progress)
        alone = max(0, alone - 1)
        del queue[: len(batch)]
        progress.items(len(batch))


def commit(out: Any, modality: Any, batch: list[Work], ledger: Ledger, progress: Silent) -> None:
    """Put a finished microbatch into the folder: traces first, then item by item media and row."""
    traces = {w.id: [_trace_step(s) for s in out.traces[i]] for i, w in enumerate(batch) if w.trace and out.traces}
    if traces:
        path = ledger.folder / TRACES
        known = {**read_json(path), **traces}
        put_text(path, json.dumps({k: known[k] for k in sorted(known)}) + "\n")
    for i, work in enumerate(batch):
        row = row_of(work, out, i)
        path = ledger.folder / work.file
        info = {"prompt": work.plan.prompt, "seed": work.plan.seed, "model": row["model"],
                "sampler": json.dumps(work.entry.sampler), "law": json.dumps(work.entry.law)}  # fmt: skip
        try:
            for name in work.also:
                put(ledger.folder / name, lambda temporary: modality.save_also(out.media[i], temporary, info))
            put(path, lambda temporary: modality.save(out.media[i], temporary, info))
        except GenError:
            raise
        except Exception as problem:  # a medium that cannot be encoded is one failed item
            for name in work.also:
                (ledger.folder / name).unlink(missing_ok=True)
            row = row_of(work, None, 0, status="failed", error=f"could not be saved: {describe(problem)}")
            progress.note(f"item {work.id} failed: {row['error']}")
        else:
            row["sha256"] = sha256(path)
        ledger.add(row)


def row_of(work: Work, out: Any, i: int, status: str = "ok", error: str | None = None) -> dict[str, Any]:
    """The manifest line of an item; ``out`` is ``None`` for one that failed."""
    stats = out.stats[i].to_dict() if out is not None else {}
    counts = ("nfe", "tokens", "tokens_computed", "mean_acceptance_length", "draft_acceptance_rate", "seconds")
    return {
        "id": work.id, "modality": work.entry.modality, "prompt": work.plan.prompt, "seed": work.plan.seed,
        "sampler": work.label, "model": out.model if out is not None else work.entry.model,
        "file": work.file if out is not None else None, "sha256": None, **{k: stats.get(k) for k in counts},
        "status": status, "error": error, "exactness": exactness(work.entry),
        "batch": len(out.stats) if out is not None else 1,
        **({"grid": list(out.grid)} if getattr(out, "grid", ()) else {}),
        **({"also": list(work.also)} if out is not None and work.also else {}),
    }  # fmt: skip


def exactness(entry: Entry) -> str:
    from gen.sampling import resolve_sampler

    return resolve_sampler(entry.sampler, entry.law)[0].exactness


# ------------------------------------------------------------------------------------------------------ the folder


def check_target(folder: Path, job: Job) -> None:
    """Refuse a folder that holds anything but this very job."""
    if folder.exists() and not folder.is_dir():
        raise GenError(f"out is {str(folder)!r}, which is a file; expected a folder")
    if is_job(folder):
        stored = stored_job(folder)
        if fingerprint(stored) != fingerprint(job):
            lines = difference(stored, job)
            more = f"; and {len(lines) - 4} more" if len(lines) > 4 else ""
            raise GenError(f"{folder} holds a different job ({'; '.join(lines[:4])}{more}). "
                           "Choose another out folder, or remove this one")  # fmt: skip
    elif folder.is_dir() and any(not (p.name.startswith(TEMPORARY) or p.name == INPUTS) for p in folder.iterdir()):
        raise GenError(f"{folder} is not empty and holds no job; expected a new or empty folder, or one to resume")


def open_folder(folder: Path, job: Job) -> bool:
    """Whether the job is new there."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    new = not is_job(folder)
    if new:
        head = f"# gen {_version('gen-toolkit')}, torch {_version('torch')}, fingerprint {fingerprint(job)}\n"
        put_text(folder / CONFIG, head + job.to_yaml())
    return new


def leave(folder: Path, files: list[str]) -> None:
    """Take back what a new job wrote that has no item done yet."""
    for name in (CONFIG, MANIFEST, TRACES, *files):
        (folder / name).unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()


def summarise(folder: Path, rows: list[dict[str, Any]], skipped: int = 0) -> dict[str, Any]:
    """Writes the gallery, then: folder, gallery, items, skipped, failed, and per sampler items, nfe, seconds."""
    from gen.gallery import write_gallery

    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["status"] == "ok":
            groups[row["sampler"]].append(row)
    by_sampler = {
        name: {"items": len(g), "nfe": median(r["nfe"] for r in g), "seconds": median(r["seconds"] for r in g)}
        for name, g in groups.items()
    }
    failed = [{"id": r["id"], "prompt": r["prompt"], "error": r["error"]} for r in rows if r["status"] != "ok"]
    with writing(folder):
        gallery = write_gallery(folder)
    return {"folder": str(folder), "gallery": str(gallery), "items": len(rows), "skipped": skipped, "failed": failed,
            "by_sampler": by_sampler}  # fmt: skip


def save_output(out: Any, folder: str | Path) -> Path:
    """What ``out.save(folder)`` does: leaves the folder that a job with these prompts would leave. Returns its gallery.

    ``out``: media, stats, traces, items, modality, model, spec (the sampler's name and knobs), law, device, dtype, and start.
    """
    from gen.registry import registry

    folder, modality = Path(folder), out.served or registry.get("modality", out.modality)()
    prompts, samples = whole_run(out.items, modality)
    tree = {"modality": out.modality, "model": out.model, "model_options": dict(out.model_options), "sampler": dict(out.spec), "law": asdict(out.law),
            "prompts": prompts, "num_samples": samples, "seed": out.items[0].seed, "device": str(out.device),
            "dtype": str(out.dtype).removeprefix("torch."), "trace": len(out.items) if out.traces else 0,
            **{k: _as_file(getattr(out.start, k), folder, k, modality) for k in MEDIA},
            "span": out.start.span, "frames": out.start.frames, "out": str(folder)}  # fmt: skip
    job = make_job(tree, where="the output to save", name=folder.name)
    check_target(folder, job)
    open_folder(folder, job)
    entry, label = job.entries[0], job.labels()[0]
    works = [work_of(n, entry, label, item, bool(out.traces), modality) for n, item in enumerate(out.items)]
    with Ledger(folder, {w.id: w.file for w in works}) as ledger:
        commit(out, modality, works, ledger, Silent())
        rows = ledger.finish()
    summary = summarise(folder, rows)
    if summary["failed"]:
        raise GenError(f"item {summary['failed'][0]['id']} {summary['failed'][0]['error']}")
    return Path(summary["gallery"])


def whole_run(items: list[Any], modality: Any) -> tuple[list[str], int]:
    """The prompts and the samples per prompt that plan to these items. Raises ``GenError`` if none do."""
    for samples in range(len(items), 0, -1):
        prompts = [i.prompt for i in items[::samples]]
        used: dict[str, int] = {}
        seeds = []
        for prompt in prompts:
            first = used.setdefault(str(modality.condition(prompt)), items[0].seed)
            used[str(modality.condition(prompt))] += samples
            seeds += [(prompt, first + j) for j in range(samples)]
        if seeds == [(i.prompt, i.seed) for i in items]:
            return prompts, samples
    raise GenError("the items to save are no whole run; expected every prompt with the same number of seeds in a row")


def _as_file(value: Any, folder: Path, name: str, modality: Any) -> str | None:
    """A path as it is; a medium is kept with the job, under a name that says its content."""
    if value is None or modality.is_path(value):
        return None if value is None else str(value)
    with writing(folder):
        (folder / INPUTS).mkdir(parents=True, exist_ok=True)
    path = folder / INPUTS / f"{name}.{modality.kept or modality.extension}"
    put(path, lambda temporary: modality.keep(value, temporary))
    named = path.with_name(f"{name}-{sha256(path)[:12]}{path.suffix}")
    os.replace(path, named)
    return str(named)


# ------------------------------------------------------------------------------------------------------ small parts


def is_out_of_memory(problem: BaseException) -> bool:
    torch = sys.modules.get("torch")
    if isinstance(problem, MemoryError) or torch is not None and isinstance(problem, torch.OutOfMemoryError):
        return True
    return isinstance(problem, RuntimeError) and any(mark.lower() in str(problem).lower() for mark in OUT_OF_MEMORY)


def free_memory() -> None:
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def describe(problem: BaseException) -> str:
    if os.environ.get("GEN_DEBUG"):
        traceback.print_exception(problem)
    text = " ".join(str(problem).split())[:300]
    return text if isinstance(problem, GenError) else f"{type(problem).__name__}: {text}"


def _pipe_key(entry: Entry) -> tuple:
    return entry.modality, entry.model, json.dumps(entry.model_options, sort_keys=True), entry.device, entry.dtype


def _trace_step(step: Any) -> dict[str, Any]:
    tree = asdict(step) if is_dataclass(step) else dict(step)
    return {**tree, "committed": {str(k): v for k, v in tree["committed"].items()}}


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown"
