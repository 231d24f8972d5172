"""Commands that make media: ``sample``, ``run`` and ``work``."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gen.cli.one_file import STDOUT, file_names, job_folder, print_texts, write_files
from gen.config.entries import Job, fingerprint
from gen.config.job import load_config, make_job
from gen.config.model_options import read_options
from gen.contracts.checkpoint import Checkpoint, family_of, published
from gen.contracts.condition import Condition
from gen.core.condition_parts import KINDS
from gen.core.edit_spec import EDIT_FIELDS
from gen.core.errors import GenError, cut, cut_list, shown
from gen.core.files import slug
from gen.core.printable import printable
from gen.core.registry import registry
from gen.core.tables import columns, plural
from gen.jobs.defaults import requested_sampling
from gen.jobs.pins import hub_of, named_models
from gen.jobs.plan import check_target, make_plan
from gen.jobs.progress.report import Silent
from gen.jobs.progress.terminal import for_terminal
from gen.jobs.rank import process_rank
from gen.jobs.run import join_job, run_job
from gen.jobs.signals import STOPPED, stoppable
from gen.media.kinds import EXTENSIONS
from gen.modalities.own_captions import modality_of_model
from gen.models.load.hub import NotCached
from gen.models.load.locate import locate, read_config
from gen.store.ledger import read_plan, read_rows


def sample(args: argparse.Namespace) -> int:
    """Carry out ``gen sample``; return the exit code."""
    tree: dict[str, Any] = {
        "modality": args.modality,
        "prompts": [_row(args)],
        "sampling": requested_sampling(args),
    }
    for key in (
        "sampler",
        "num_samples",
        "seed",
        "out",
        "format",
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
    if args.model_option:
        tree["model_options"] = read_options(args.model_option, "--model-option")
    _refuse_twice(args, tree)
    if args.file is not None:
        return _sample_files(args, tree)
    if args.out is not None and Path(args.out).suffix.lstrip(".") in EXTENSIONS:
        raise GenError(f"--out is {args.out!r}; expected a folder (-o {args.out} writes one file)")
    job = make_job(tree, args.overrides, where="the command line", allow_env=args.allow_env)
    if args.out is None and not any(s.startswith("out=") for s in args.overrides):
        # another prompt or parameter is another folder, the same command the same one
        job = replace(job, out=f"out/{args.modality}/{slug(args.prompt)}-{fingerprint(job)[:6]}")
    return _run(job, shows_texts=args.modality == "text")


def _row(args: argparse.Namespace) -> str | dict[str, Any]:
    """Return the row of a job that the command line asks for: the prompt, and files of the
    condition."""
    parts = {key: getattr(args, key) for key in (*KINDS, "observation", "messages")}
    parts = {key: value for key, value in parts.items() if value is not None}
    return {"prompt": args.prompt, **parts} if parts else args.prompt


def _refuse_twice(args: argparse.Namespace, tree: dict[str, Any]) -> None:
    """Refuse a value that comes both as a flag and as an override."""
    sampling = {f"sampling.{k}": v for k, v in requested_sampling(args).items()}
    flags = {k: v for k, v in tree.items() if k not in ("prompts", "sampling", "sampler")}
    if args.sampler is not None:
        flags["sampler"] = args.sampler
    for text in args.overrides:
        key = text.partition("=")[0].strip()
        if key in {**flags, **sampling}:
            flag = "MODALITY" if key == "modality" else f"--{key.removeprefix('sampling.')}"
            raise GenError(
                f"{key} comes as {flag.replace('_', '-')} {shown({**flags, **sampling}[key])} and"
                f" as {shown(text)}; expected one of them"
            )


def _sample_files(args: argparse.Namespace, tree: dict[str, Any]) -> int:
    """Carry out ``gen sample -o FILE``; return the exit code."""
    suffix = Path(args.file).suffix.lstrip(".")
    if args.file != STDOUT and suffix:
        if args.format not in (None, suffix):
            raise GenError(
                f"--format is {args.format!r} and -o is {args.file!r}; expected one format"
            )
        tree["format"] = suffix
    with job_folder(tree.get("out")) as folder:
        job = make_job(
            {"trace": 0, **tree, "out": folder},
            args.overrides,
            where="the command line",
            allow_env=args.allow_env,
        )
        count = job.entries[0].num_samples
        if args.file == STDOUT and count > 1 and args.modality != "text":
            raise GenError(f"-o is - and num_samples is {count}; expected 1, or -o FILE")
        names = file_names(args.file, count)
        code = _run(job, quiet=True)
        if code != STOPPED and process_rank().leader:
            write_files(job, names)
        return code


def run(args: argparse.Namespace) -> int:
    """Carry out ``gen run``; return the exit code."""
    column = [] if args.prompt_column is None else [f"prompt_column={args.prompt_column}"]
    overrides = [*args.overrides, *column]
    told = for_terminal() if process_rank().leader else Silent()
    job = load_config(
        args.config, overrides, args.allow_env, args.trust_job, args.dry_run, note=told.note
    )
    return _dry_run(job) if args.dry_run else _run(job)


def _run(job: Job, *, quiet: bool = False, shows_texts: bool = False) -> int:
    """Run a job and print its summary; return the exit code.

    Args:
        job: the job.
        quiet: print nothing on stdout.
        shows_texts: print the texts that were made.
    """
    leader = process_rank().leader
    progress = for_terminal() if leader else Silent()
    with stoppable(progress.note) as stop:
        summary = run_job(job, progress=progress, stop=stop)
    if not leader:
        # launchers end all processes when one of them returns anything else, and the leader is
        # still at the gallery
        return 0
    if shows_texts:
        print_texts(job.out)
    _tell(summary, quiet)
    if summary["pending"]:
        print(
            f"gen: stopped with {plural(summary['pending'], 'item')} left; run the same command"
            " to resume",
            file=sys.stderr,
        )
        return STOPPED
    return 1 if summary["failed"] else 0


def _tell(summary: dict[str, Any], quiet: bool) -> None:
    """Print the summary of a run on stdout, and its failures on stderr."""
    made = summary["items"] - summary["skipped"]
    if not made and not summary["pending"] and not quiet:
        print(_nothing_to_do(summary["items"]))
    for name, s in summary["by_sampler"].items() if not quiet else ():
        each = "" if s["items"] == 1 else " per item (means)"
        print(
            f"{printable(name)}: {plural(s['items'], 'item')}, {passes(s['nfe'])} and"
            f" {s['seconds']:.3g} s{each}"
        )
    if not quiet:
        print(f"gallery: {summary['gallery']}")
    failed = summary["failed"]
    if failed:
        first = cut(" ".join(f"{failed[0]['index']:06d}: {failed[0]['error']}".split()))
        again = "" if quiet else "; retry=failed retries only those"
        print(
            f"gen: {len(failed)} of {summary['items']} items failed ({printable(first)}){again}",
            file=sys.stderr,
        )


def passes(count: float) -> str:
    """Format a number of forward passes: ``1 forward pass``, ``2.5 forward passes``."""
    return f"{count:.4g} forward pass{'' if count == 1 else 'es'}"


def _nothing_to_do(items: int) -> str:
    there = "the item exists" if items == 1 else f"all {items} items exist"
    return f"{there}, nothing to do"


def work(args: argparse.Namespace) -> int:
    """Carry out ``gen work``; return the exit code."""

    class Notes(Silent):
        def note(self, text: str) -> None:
            print(f"gen: {printable(text)}", file=sys.stderr, flush=True)

    with stoppable(Notes().note) as stop:
        report = join_job(
            args.folder,
            slot=args.slot,
            device=args.device,
            progress=Notes(),
            stop=stop,
            trust_job=args.trust_job,
        )
    if not report.made and not report.failed and not report.stopped:
        rows, planned = read_rows(Path(args.folder)), read_plan(Path(args.folder))["items"]
        left = len(planned) - len(rows)
        print(
            f"{plural(left, 'item')} of {len(planned)} left, all claimed by other workers"
            if left
            else _nothing_to_do(len(rows))
        )
    return STOPPED if report.stopped else 1 if report.failed else 0


class AnyPrompt:
    """Modality of a published model that is not loaded: it knows the parts of a condition that the
    family takes, and no more about prompts. ``family``: None where it is not known."""

    def __init__(self, family: type[Checkpoint] | None):
        self.family = family

    def condition(self, prompt: str) -> str:
        """Return a prompt as it is."""
        return prompt

    def parse(self, condition: Condition) -> str:
        """Return a text of all parts. Raises ``GenError`` for a part that is not taken."""
        if self.family is not None:
            condition.require(self.family.accepts, "the model", self.family.most)
        return str(condition.to_dict())


def _dry_run(job: Job) -> int:
    check_target(Path(job.out), job, local=True)
    models = named_models(job, local=True)

    def pipe_of(entry: Any) -> Any:
        modality: Any = registry.get("modality", entry.modality)()
        if entry.model:
            try:
                files = published(entry.model, hub_of(entry, entry.model))
            except NotCached:
                modality = AnyPrompt(None)
            else:
                if files:
                    modality = AnyPrompt(family_of(files, entry.modality))
                else:
                    config, folder = read_config(entry.model), Path(locate(entry.model))
                    modality = modality_of_model(modality, entry.model, config, folder)
        return SimpleNamespace(modality=modality)

    plan = make_plan(job, pipe_of, models, for_terminal().note)
    for note in job.notes():
        print(f"gen: {note}", file=sys.stderr)
    rows = [("sampler", "modality", "rows", "items")]
    for e, (entry, label) in enumerate(zip(job.entries, job.labels(), strict=True)):
        mine = [i for i in plan["items"] if i["entry"] == e]
        rows.append((label, entry.modality, str(len({i["line"] for i in mine})), str(len(mine))))
    print(printable(columns(rows)))
    for line in cut_list([i["error"] for i in plan["items"] if "error" in i]):
        print(f"invalid: {printable(line)}")
    print(
        f"items: {len(plan['items'])} in {plural(len(plan['shards']), 'shard')}"
        + (f", {plural(plan['duplicates'], 'duplicate')}" if plan["duplicates"] else "")
    )
    for label, commit in models.commits.items():
        print(f"model: {printable(label)} at commit {commit}")
    for label, missing in models.absent.items():
        count = (
            "how many files would be fetched is not known without the hub"
            if missing is None
            else f"{plural(missing, 'file')} would be fetched"
        )
        print(
            f"model: {printable(label)} is not in the local cache; {count}. Prompts, defaults and"
            " fingerprint are checked when it is there"
        )
    print(f"out: {job.out}  fingerprint: {fingerprint(job)}")
    return 0
