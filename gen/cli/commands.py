"""The commands that make or read media: ``sample``, ``run``, ``gallery``, ``check``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gen.cli.info import columns
from gen.contracts.modality import kind_of, suggested_sampling
from gen.core.edit_spec import EDIT_FIELDS
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.sampler import resolve_sampler

SAMPLING = ("guidance_scale", "temperature", "top_k", "top_p", "min_p")
SAMPLER = "speculative_jacobi"


def sample(args: argparse.Namespace) -> int:
    from gen.config.job import fingerprint, make_job
    from gen.store.ledger import slug

    sampler = args.sampler or SAMPLER
    tree: dict[str, Any] = {
        "modality": args.modality,
        "prompts": [args.prompt],
        "sampler": sampler,
        "sampling": sampling_of(args, sampler),
    }
    for key in (
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
        # another prompt or knob is another folder, the same command the same one
        job = replace(job, out=f"out/{args.modality}/{slug(args.prompt)}-{fingerprint(job)[:6]}")
    return _run(job)


def sampling_of(args: argparse.Namespace, sampler: str) -> dict[str, Any]:
    """What the user said, over what the preset implies, over what the modality suggests."""
    from gen.contracts.checkpoint import family_of, published
    from gen.models.load.locate import model_kind

    modality = registry.get("modality", args.modality, "the command line")
    implied = getattr(registry.table("preset").get(sampler), "sampling", {})
    said = {k: getattr(args, k) for k in SAMPLING if getattr(args, k) is not None}
    files = published(args.model) if args.model else None
    if files is not None:
        return {**family_of(files, args.modality).sampling, **implied, **said}
    kind = model_kind(args.model) if args.model else kind_of(resolve_sampler(sampler)[0], modality)
    return {**suggested_sampling(modality, kind), **implied, **said}


def run(args: argparse.Namespace) -> int:
    from gen.config.job import load_config

    job = load_config(args.config, args.overrides)
    return _dry_run(job) if args.dry_run else _run(job)


def _run(job: Any) -> int:
    from gen.jobs.progress.report import Silent, for_terminal
    from gen.jobs.rank import place
    from gen.jobs.run import run_job
    from gen.jobs.signals import STOPPED, stoppable

    leader = place().leader
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
            f"{name}: {s['items']} items, {s['nfe']:g} forward calls and {s['seconds']:.3g} s per"
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
    from gen.jobs.progress.report import Silent
    from gen.jobs.run import join_job
    from gen.jobs.signals import STOPPED, stoppable

    class Notes(Silent):
        def note(self, text: str) -> None:
            print(f"gen: {text}", file=sys.stderr, flush=True)

    with stoppable(Notes().note) as stop:
        report = join_job(
            args.folder, slot=args.slot, device=args.device, progress=Notes(), stop=stop
        )
    return STOPPED if report.stopped else 1 if report.failed else 0


def _dry_run(job: Any) -> int:
    from pathlib import Path
    from types import SimpleNamespace

    from gen.config.job import fingerprint
    from gen.contracts.checkpoint import family_of, published
    from gen.jobs.plan import check_target, make_plan

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


def gallery(args: argparse.Namespace) -> int:
    from gen.gallery.write import write_gallery
    from gen.store.ledger import require_job, writing

    folder = require_job(args.folder)
    with writing(folder):
        print(write_gallery(folder))
    return 0


def check(args: argparse.Namespace) -> int:
    from gen.cli.check import check_folder

    report = check_folder(args.folder)
    if args.json:
        print(json.dumps(report, ensure_ascii=False, indent=2))
    else:
        _print_report(report)
    return 1 if report["broken"] else 0


def _print_report(report: dict[str, Any]) -> None:
    rows: list[Sequence[str]] = [("sampler", "items", "passed", "valid")]
    groups = [
        *report["by_sampler"].items(),
        *([("all", report)] if len(report["by_sampler"]) > 1 else []),
    ]
    rows += [
        (name, str(s["items"]), f"{s['passed']:.1%}", f"{s['valid']:.1%}") for name, s in groups
    ]
    print(columns(rows))
    for item in report["failed"][:10]:
        print(f"{item['id']} {item['prompt']!r}: {item['detail']}")
    if len(report["failed"]) > 10:
        print(f"... and {len(report['failed']) - 10} more (--json lists all)")


def positive(text: str, name: str) -> list[int]:
    """``1,8,32`` as integers of at least 1."""
    try:
        values = [int(x) for x in text.split(",")]
    except ValueError:
        values = [0]
    if min(values) < 1:
        raise GenError(f"{name} is {text!r}; expected integers of at least 1, separated by commas")
    return list(dict.fromkeys(values))
