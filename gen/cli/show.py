"""Command ``show``: a resolved config, or the parameters of a sampler or preset."""

from __future__ import annotations

import argparse
import json
import textwrap
from pathlib import Path
from typing import Any

from gen.config.entries import fingerprint
from gen.config.job import load_config
from gen.config.packaged import find_config, packaged
from gen.core.described import describe_sampler
from gen.core.errors import GenError, unknown
from gen.core.registry import registry
from gen.core.tables import columns

WIDTH = 100


def show(args: argparse.Namespace) -> int:
    """Carry out ``gen show``; return the exit code."""
    name = str(args.config)
    samplers = [*registry.table("sampler"), *registry.table("preset")]
    if Path(name).exists() or name.removesuffix(".yaml") in packaged():
        return _show_config(args)
    if name in samplers:
        return _show_sampler(name, args)
    if "/" not in name and "." not in name:
        raise unknown(
            "config or sampler", name, [*packaged(), *samplers], "the working directory, gen ls"
        )
    return _show_config(args)


def _show_config(args: argparse.Namespace) -> int:
    find_config(args.config)
    job = load_config(args.config, args.overrides, args.allow_env)
    if args.json:
        tree = {**job.to_dict(), "fingerprint": fingerprint(job)}
        print(json.dumps(tree, ensure_ascii=False, indent=2))
    else:
        print(job.to_yaml() + f"# fingerprint: {fingerprint(job)}")
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
