"""Commands that make media: ``sample``, ``run`` and ``work``."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gen.config.entries import Job, fingerprint
from gen.config.job import load_config, make_job
from gen.contracts.checkpoint import family_of, published
from gen.core.edit_spec import EDIT_FIELDS
from gen.core.files import slug
from gen.core.registry import registry
from gen.core.tables import columns
from gen.jobs.defaults import requested_sampling
from gen.jobs.plan import check_target, make_plan
from gen.jobs.progress.report import Silent
from gen.jobs.progress.terminal import for_terminal
from gen.jobs.rank import process_rank
from gen.jobs.run import join_job, run_job
from gen.jobs.signals import STOPPED, stoppable


def sample(args: argparse.Namespace) -> int:
    """Carry out ``gen sample``; return the exit code."""
    tree: dict[str, Any] = {
        "modality": args.modality,
        "prompts": [args.prompt],
        "sampling": requested_sampling(args),
    }
    for key in (
        "sampler",
        "num_samples",
        "seed",
        "out",
        *EDIT_FIELDS,
        "batch_size",
        "trace",
        "model",
        "device",
        "dtype",
        "compile",
    ):
        if getattr(args, key) is not None:
            tree[key] = getattr(args, key)
    job = make_job(tree, args.sets, where="the command line")
    if args.out is None and not any(s.startswith("out=") for s in args.sets):
        # another prompt or parameter is another folder, the same command the same one
        job = replace(job, out=f"out/{args.modality}/{slug(args.prompt)}-{fingerprint(job)[:6]}")
    return _run(job)


def run(args: argparse.Namespace) -> int:
    """Carry out ``gen run``; return the exit code."""
    job = load_config(args.config, args.overrides)
    return _dry_run(job) if args.dry_run else _run(job)


def _run(job: Job) -> int:
    leader = process_rank().leader
    progress = for_terminal() if leader else Silent()
    with stoppable(progress.note) as stop:
        summary = run_job(job, progress=progress, stop=stop)
    if not leader:
        # launchers end all processes when one of them returns anything else, and the leader is
        # still at the gallery
        return 0
    _tell(summary)
    if summary["pending"]:
        print(
            f"gen: stopped with {summary['pending']} items to make; the same command goes on",
            file=sys.stderr,
        )
        return STOPPED
    return 1 if summary["failed"] else 0


def _tell(summary: dict[str, Any]) -> None:
    made = summary["items"] - summary["skipped"]
    if not made and not summary["pending"]:
        print(f"all {summary['items']} items are there, nothing to do")
    for name, s in summary["by_sampler"].items():
        print(
            f"{name}: {s['items']} items, {s['nfe']:g} forward passes and {s['seconds']:.3g} s per"
            " item (medians)"
        )
    print(f"gallery: {summary['gallery']}")
    failed = summary["failed"]
    if failed:
        first = " ".join(f"{failed[0]['index']:06d}: {failed[0]['error']}".split())
        print(
            f"gen: {len(failed)} of {summary['items']} items failed ({first}); retry=failed tries"
            " just them again",
            file=sys.stderr,
        )


def work(args: argparse.Namespace) -> int:
    """Carry out ``gen work``; return the exit code."""

    class Notes(Silent):
        def note(self, text: str) -> None:
            print(f"gen: {text}", file=sys.stderr, flush=True)

    with stoppable(Notes().note) as stop:
        report = join_job(
            args.folder, slot=args.slot, device=args.device, progress=Notes(), stop=stop
        )
    return STOPPED if report.stopped else 1 if report.failed else 0


def _dry_run(job: Job) -> int:
    check_target(Path(job.out), job)
    any_prompt = SimpleNamespace(
        condition=str
    )  # of a published model: what its prompts may be only the loaded model knows

    def pipe_of(entry: Any) -> Any:
        files = published(entry.model) if entry.model else None
        if files is not None:
            family_of(files, entry.modality)
        return SimpleNamespace(
            modality=registry.get("modality", entry.modality)() if files is None else any_prompt
        )

    plan = make_plan(job, pipe_of)
    rows = [("sampler", "modality", "rows", "items")]
    for e, (entry, label) in enumerate(zip(job.entries, job.labels(), strict=True)):
        mine = [i for i in plan["items"] if i["entry"] == e]
        rows.append((label, entry.modality, str(len({i["line"] for i in mine})), str(len(mine))))
    print(columns(rows))
    for item in [i for i in plan["items"] if "error" in i][:10]:
        print(f"cannot be made: {item['error']}")
    print(
        f"items: {len(plan['items'])} in {len(plan['shards'])} shards"
        + (f", {plan['duplicates']} asked for twice" if plan["duplicates"] else "")
    )
    print(f"out: {job.out}  fingerprint: {fingerprint(job)}")
    return 0
