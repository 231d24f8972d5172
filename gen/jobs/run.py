"""Running a job: plan or find the plan, let workers make what is missing, put the manifest and the
gallery together.

An item is a prompt with a seed of its own, so what it becomes does not depend on the microbatch,
the shard or the worker it runs in. That is what makes everything here free of choices that would
show in the media: see `gen.jobs.plan` for what is made, `gen.jobs.worker` for how, and
`gen.store.ledger` for what counts as done.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any
from zlib import crc32

from gen.config.entries import Entry, Job, fingerprint
from gen.config.inputs import write_rows
from gen.config.job import make_job
from gen.config.layers import read_yaml
from gen.core.clock import SteadyClock, pause
from gen.core.edit_spec import MEDIA
from gen.core.errors import GenError
from gen.core.files import TEMPORARY, put_text, sha256, sweep_temporaries, writing
from gen.core.processes import worker_name
from gen.core.registry import registry
from gen.core.seeds import sample_seeds
from gen.core.trust import refuse_untrusted
from gen.gallery import write as gallery_page
from gen.jobs.engines import run_engine
from gen.jobs.given import kept_file, kept_parts
from gen.jobs.pins import named_models
from gen.jobs.plan import changes, check_target, make_plan, mend_plan, write_plan
from gen.jobs.progress.report import Silent
from gen.jobs.rank import own_device, process_rank
from gen.jobs.types import Report
from gen.jobs.worker import Pipes, Worker, run_worker
from gen.pipeline import pipeline
from gen.pipeline.led import led
from gen.store.ledger import CONFIG, GALLERY, INPUTS, is_job, read_plan, read_rows, require_job
from gen.store.manifest import damaged, mark_due, mend, publish, remove_job
from gen.store.sealed import Damaged

PATIENCE = 300  # seconds
INLINE = 200  # rows of a job that its config shows one by one: YAML takes a millisecond for each


def run_job(
    job: Job,
    *,
    progress: Silent | None = None,
    load: Callable[..., Any] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Generate all missing items of a job and return the summary (see `summarise`).

    ``stop``: asked between microbatches; once it is true, current microbatches are finished, and
    the summary says ``stopped``. Raises ``GenError`` before anything is written if a prompt or
    value is invalid or the folder holds another job, and later if it cannot be written. Items that
    fail become rows with ``status`` ``failed``; the others continue. The processes of a launcher
    are workers of their own, or with a model with ``tp`` one worker together, of which rank 0
    returns the summary and the others the folder.
    """
    if all(entry.model_options.get("tp") is None for entry in job.entries):
        return _run(job, progress or Silent(), load, stop)
    with led() as leader:
        if leader is None:
            return {"folder": job.out, "stopped": False}  # rank 0 has the rest
        return _run(job, progress or Silent(), leader.load, stop)


def _run(
    job: Job,
    progress: Silent,
    load: Callable[..., Any] | None,
    stop: Callable[[], bool],
) -> dict[str, Any]:
    """Carry out ``run_job`` in this process."""
    folder, here = Path(job.out), process_rank()
    spoilt: Damaged | None = None
    try:
        plan = (
            _replan(folder, job, progress)
            if here.leader or not job.run.overwrite
            else _replanned(folder, job)
        )
    except Damaged as error:
        plan, spoilt = None, error
    new = plan is None
    if job.run.engine == "local" and job.run.workers == 1:
        load = _once(load)
    if new:
        on_cuda = here.launched and any(e.device == "cuda" for e in job.entries)
        device = own_device("cuda", here.local_rank) if on_cuda else None
        pipes, models = Pipes(load, device), named_models(job)
        pipes.commits = models.commits
        plan = make_plan(job, pipes.of, models, progress.note)
        if spoilt is not None:
            mend_plan(folder, plan, spoilt)
            progress.note(f"{spoilt.path}, line {spoilt.line} is damaged; rebuilding the plan")
        new = spoilt is None and write_plan(folder, plan)
        if spoilt is None and not new:  # another process was first
            plan = check_target(folder, job)
        elif new and plan["duplicates"]:
            twice = f"{plan['duplicates']} items were requested more than once"
            progress.note(f"{twice}; each is made once")
    job = keep_rows(job, folder)
    for damage in open_folder(folder, job, plan, new):
        progress.note(f"{damage.path}, line {damage.line} is damaged; generating its item again")
    done = len(read_rows(folder))
    progress.start(len(plan["items"]), done)
    try:
        report = run_engine(job.run.engine, folder, job, progress=progress, load=load, stop=stop)
    except GenError:
        if new and not read_rows(folder):
            with suppress(GenError, OSError):  # what went wrong first is what counts
                leave(folder, plan)  # so that the corrected command is not refused as another job
        raise
    finally:
        progress.close()
    publish(folder, plan)
    return {**summarise(folder, skipped=done, gallery=here.leader), "stopped": report.stopped}


def join_job(
    folder: str | Path,
    *,
    slot: int = 0,
    device: str | None = None,
    progress: Silent | None = None,
    stop: Callable[[], bool] = lambda: False,
    trust_job: bool = False,
) -> Report:
    """Be one more worker of a job that has begun; returns what this one did.

    ``trust_job``: accept values of the folder's config that do more than being read
    (``gen.core.trust``).
    """
    folder = require_job(folder)
    refuse_untrusted(read_yaml(folder / CONFIG), str(folder / CONFIG), trust_job)
    report = run_worker(folder, slot=slot, device=device, progress=progress, stop=stop)
    if not report.stopped:
        publish(folder, read_plan(folder))
    return report


def _once(load: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return a loader that shares its models between planning and work."""
    made: dict[str, Any] = {}

    def loading(modality: str, **how: Any) -> Any:
        key = repr((modality, sorted(how.items())))
        if key not in made:
            made[key] = (load or pipeline.load)(modality, **how)
        return made[key]

    return loading


def _replan(folder: Path, job: Job, progress: Silent) -> dict[str, Any] | None:
    """Return the plan in the folder; None if the folder is free, or freed because the job says
    ``overwrite``."""
    for note in job.notes() if not is_job(folder) else ():
        progress.note(note)
    if job.run.overwrite and is_job(folder):
        old = read_plan(folder)
        if old["fingerprint"] != fingerprint(job):
            progress.note(f"overwriting {folder}: {'; '.join(changes(old, job)[:4])}")
            remove_job(folder, old)
            return None  # whatever else lies there is not ours, and stays
    return check_target(folder, job)


def _replanned(folder: Path, job: Job) -> dict[str, Any]:
    """Wait for the plan that the leader of this run puts into the folder; only the leader may
    overwrite."""
    clock = SteadyClock()
    while not is_job(folder) or read_plan(folder)["fingerprint"] != fingerprint(job):
        if clock() > PATIENCE:
            raise GenError(
                f"the first process of this run has not overwritten {folder} within {PATIENCE} s"
            )
        pause(0.2)
    return read_plan(folder)


def keep_rows(job: Job, folder: Path) -> Job:
    """Move long lists of prompts into files of the job: rows of a Python iterable must be there
    when the job resumes."""
    entries = []
    for entry in job.entries:
        if entry.prompts_file is None and len(entry.prompts) > INLINE:
            with writing(folder):
                (folder / INPUTS).mkdir(parents=True, exist_ok=True)
            path = (
                folder / INPUTS / f"{TEMPORARY}{worker_name()}-prompts.jsonl"
            )  # nobody else's, until its content names it
            write_rows(entry.rows(), path)
            named = path.with_name(f"prompts-{sha256(path)[:12]}.jsonl")
            os.replace(path, named)
            entry = replace(entry, prompts=[], prompts_file=str(named.absolute()))
        entries.append(entry)
    return replace(job, entries=entries)


def open_folder(folder: Path, job: Job, plan: dict[str, Any], new: bool) -> list[Damaged]:
    """Write the config of this run, and mark what is to be made again: damaged media, and failed
    items if they are to be retried. Returns the damaged rows, which are dropped."""
    made = plan["made_with"]
    keys = job.to_yaml()
    text = (
        f"# gen {made.get('gen')}, torch {made.get('torch')}, fingerprint"
        f" {plan['fingerprint']}, checksum {crc32(keys.encode()):08x}\n{keys}"
    )
    config = folder / CONFIG
    if not config.is_file() or config.read_bytes() != text.encode():
        put_text(config, text)
    if new:
        return []
    with writing(folder):
        for where in (folder, folder / INPUTS):
            sweep_temporaries(where)
    dropped = mend(folder)
    mark_due(folder, plan, damaged(folder, plan))
    if job.run.retry == "failed":
        mark_due(folder, plan, lambda row: row["status"] == "failed")
    return dropped


def leave(folder: Path, plan: dict[str, Any]) -> None:
    """Remove a new job that has no finished item yet."""
    remove_job(folder, plan)
    if not any(folder.iterdir()):
        folder.rmdir()


def summarise(folder: Path, skipped: int = 0, gallery: bool = True) -> dict[str, Any]:
    """Writes the gallery if it is to, then: folder, gallery, items, skipped, pending, failed, and
    per sampler items, and means of nfe and seconds."""
    rows, total = read_rows(folder), len(read_plan(folder)["items"])
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["status"] == "ok":
            groups[row["sampler"]].append(row)
    by_sampler = {
        name: {
            "items": len(g),
            "nfe": fmean(r["nfe"] for r in g),
            "seconds": fmean(r["seconds"] for r in g),
        }
        for name, g in groups.items()
    }
    failed = [
        {"id": r["id"], "index": r["index"], "prompt": r["prompt"], "error": r["error"]}
        for r in rows
        if r["status"] != "ok"
    ]
    if gallery:
        with writing(folder):
            gallery_page.write_gallery(folder)
    return {
        "folder": str(folder),
        "gallery": str(folder / GALLERY),
        "items": len(rows),
        "skipped": skipped,
        "pending": total - len(rows),
        "failed": failed,
        "by_sampler": by_sampler,
    }


# --- the output of a call


def save_output(out: Any, folder: str | Path) -> Path:
    """Write the folder that a job with these prompts would leave, and return its gallery.

    Args:
        out: a `PipelineOutput`.
        folder: the folder to write.

    Raises:
        GenError: if the items are no whole run, or the folder holds another job.
    """
    folder, modality = Path(folder), out.served or registry.get("modality", out.modality)()
    if any(i.max_new_tokens not in (None, out.sampling.max_new_tokens) for i in out.items):
        raise GenError(
            "max_new_tokens differs between the items to save, and a job has one number for all;"
            " expected one, or a prompts file whose rows say theirs"
        )
    prompts, samples = whole_run(out.items, modality, folder)
    tree = {
        "modality": out.modality,
        "model": out.model,
        "model_options": dict(out.model_options),
        "sampler": dict(out.spec),
        "sampling": out.sampling.to_dict(),
        "prompts": prompts,
        "num_samples": samples,
        "seed": out.items[0].seed,
        "device": str(out.device),
        "dtype": str(out.dtype).removeprefix("torch."),
        "trace": len(out.items) if out.traces else 0,
        **{k: _as_file(getattr(out.start, k), folder, k, modality) for k in MEDIA},
        "span": out.start.span,
        "frames": out.start.frames,
        "out": str(folder),
    }
    job = make_job(tree, where="the output to save", name=folder.name)
    pipes = PreloadedPipelines(SimpleNamespace(modality=modality))
    plan = check_target(folder, job)
    new = plan is None
    if new:
        plan = {**make_plan(job, pipes.of), "shards": [[0, len(out.items)]]}
        new = write_plan(folder, plan)
    open_folder(folder, job, plan, new)
    with Worker(folder, job, 0, pipes, Silent(), lambda: False) as worker:
        worker.keep(out)
    publish(folder, plan)
    summary = summarise(folder)
    if summary["failed"]:
        raise GenError(f"item {summary['failed'][0]['index']} {summary['failed'][0]['error']}")
    return Path(summary["gallery"])


class PreloadedPipelines:
    """A stand-in for `gen.jobs.worker.Pipes` with everything made already."""

    def __init__(self, pipe: Any):
        self.pipe = pipe

    device = None

    def of(self, entry: Entry) -> Any:
        """Return the one pipeline."""
        return self.pipe


def whole_run(items: list[Any], modality: Any, folder: Path) -> tuple[list[Any], int]:
    """Find the rows and the samples per row that plan to these items. Media in memory become files
    of the folder. Raises ``GenError`` if no rows do."""
    for samples in range(len(items), 0, -1):
        first = items[::samples]
        used: dict[str, int] = {}
        seeds = []
        for item in first:
            is_text = item.given is None
            parsed = modality.condition(item.prompt) if is_text else modality.parse(item.given)
            drawn = sample_seeds(used, str(parsed), samples, items[0].seed)
            seeds += [(item.prompt, id(item.given), item.adapter, seed) for seed in drawn]
        if seeds == [(i.prompt, id(i.given), i.adapter, i.seed) for i in items]:
            parts = [kept_parts(item.given, folder) for item in first]
            for item, part in zip(first, parts, strict=True):
                part |= {} if item.adapter is None else {"adapter": item.adapter}
            rows = zip(first, parts, strict=True)
            return [{"prompt": i.prompt, **p} if p else i.prompt for i, p in rows], samples
    raise GenError(
        "the items to save are not a whole run; expected every prompt with the same number of"
        " consecutive seeds"
    )


def _as_file(value: Any, folder: Path, name: str, modality: Any) -> str | None:
    """Return a path as it is; keep a sample with the job, under a name with its digest."""
    if value is None or modality.is_path(value):
        return None if value is None else str(value)
    extension = modality.kept or modality.extension
    return kept_file(folder, name, extension, lambda path: modality.keep(value, path))
