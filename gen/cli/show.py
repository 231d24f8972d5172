"""Command ``show``: a resolved config, parameters of a sampler or preset, or a saved pipeline."""

from __future__ import annotations

import argparse
import json
import textwrap
from pathlib import Path
from typing import Any

from gen.config.canonical import plain
from gen.config.entries import fingerprint
from gen.config.job import load_config
from gen.config.packaged import find_config, packaged
from gen.config.yaml_text import dump_yaml
from gen.contracts.checkpoint import CheckpointFiles
from gen.contracts.defaults import Defaults
from gen.core.described import describe_sampler
from gen.core.errors import GenError, unknown
from gen.core.printable import printable
from gen.core.registry import registry
from gen.core.tables import columns
from gen.jobs.pins import named_models
from gen.jobs.progress.terminal import for_terminal
from gen.models.load.hub import HubOptions, NotCached

WIDTH = 100


def show(args: argparse.Namespace) -> int:
    """Carry out ``gen show``; return the exit code."""
    name = str(args.config)
    samplers = [*registry.table("sampler"), *registry.table("preset")]
    if Path(name).is_file() or name.removesuffix(".yaml") in packaged():
        return _show_config(args)
    if name in samplers:
        return _show_sampler(name, args)
    saved = _saved(name)
    if saved is not None:
        return _show_saved(saved, args)
    if Path(name).exists():
        return _show_config(args)
    if name in registry.table("modality"):
        configs = [config for config in packaged() if config.startswith(f"{name}/")]
        one = f"a config such as {configs[0]}" if configs else "a config"
        raise GenError(f"{name} is a modality; expected {one}, a sampler or a preset (see gen ls)")
    if "/" not in name and "." not in name:
        raise unknown(
            "config or sampler",
            name,
            [*packaged(), *samplers],
            "the working directory and those of gen ls",
        )
    return _show_config(args)


def _show_config(args: argparse.Namespace) -> int:
    find_config(args.config)
    note = for_terminal().note
    job = load_config(args.config, args.overrides, args.allow_env, args.trust_job, note=note)
    commits = named_models(job, local=True).commits
    if args.json:
        tree = {**job.to_dict(), "fingerprint": fingerprint(job), "commits": commits}
        print(json.dumps(tree, ensure_ascii=False, indent=2))
    else:
        print(job.to_yaml() + f"# fingerprint: {fingerprint(job)}")
        for label, commit in commits.items():
            print(f"# model: {printable(label)} at commit {commit}")
    return 0


def _saved(name: str) -> CheckpointFiles | None:
    """Return the files of a saved pipeline by its folder, or by its hub id from the local cache;
    None for anything else."""
    if not Path(name).is_dir() and name.count("/") != 1:
        return None
    try:
        files = CheckpointFiles.find(name, HubOptions(local_files_only=True))
    except NotCached:
        return None
    return files if files.saved else None


def _show_saved(files: CheckpointFiles, args: argparse.Namespace) -> int:
    """Print what a saved pipeline holds, and what a job of it is when nothing else is said."""
    saved = files.saved
    assert saved is not None, "files of a saved pipeline have its record"
    if args.overrides:
        raise GenError(
            f"{args.overrides[0]!r} is given with the saved pipeline {files.name}; expected"
            " overrides with a config only"
        )
    defaults = Defaults.named(saved.modality, files.name, {"local_files_only": True})
    sampler, sampling = defaults.complete(None, {})
    tree = {
        "modality": saved.modality,
        "model": files.name,
        "commit": files.commit,
        "dtype": saved.dtype,
        "model_options": dict(saved.options),
        "protocols": list(defaults.protocols),
        "sampler": sampler,
        "sampling": sampling,
    }
    tree = {k: plain(v) for k, v in tree.items() if v not in (None, {})}
    text = json.dumps(tree, ensure_ascii=False, indent=2) if args.json else dump_yaml(tree).rstrip()
    print(text)
    return 0


def _show_sampler(name: str, args: argparse.Namespace) -> int:
    if args.overrides:
        raise GenError(
            f"{args.overrides[0]!r} is given with the sampler {name!r}; expected overrides with a"
            " config only"
        )
    found = describe_sampler(name)
    if args.json:
        print(json.dumps(found, ensure_ascii=False, indent=2, default=str))
        return 0
    print("\n".join(_lines(found)))
    return 0


def _lines(found: dict[str, Any]) -> list[str]:
    kind = f"preset of {found['sampler']}" if found["sampler"] != found["name"] else "sampler"
    lines = [f"{found['name']} ({kind}): {found['about']}", f"guarantee: {found['guarantee']}"]
    for key in ("papers", "aliases", "sampling"):
        said = found[key]
        if said:
            pairs = said.items() if isinstance(said, dict) else ()
            text = ", ".join(f"{k}: {v}" for k, v in pairs) or ", ".join(said)
            lines.append(f"{key}: {text}")
    rows = [("parameter", "default", "meaning")]
    rows += [(p["name"], str(p["default"]), p["meaning"]) for p in found["params"]]
    left = [max(len(r[i]) for r in rows) for i in (0, 1)]
    room = max(40, WIDTH - sum(left) - 4)
    table = []
    for param, default, meaning in rows:
        first, *more = textwrap.wrap(meaning, room) or [""]
        table += [(param, default, first), *(("", "", line) for line in more)]
    return [*lines, "", columns(table)]
