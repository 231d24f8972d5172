"""Commands that list and print: ``ls``, ``show``, ``cp``."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

from gen.core.errors import GenError
from gen.core.tables import EMPTY, columns

# for --json and the pages; a line must fit a terminal
LONG = ("params", "reference", "papers", "paper", "title", "presets", "options", "tested", "limit")
# kinds of parts that ``ls parts`` lists
PARTS = (
    "coupling",
    "initialiser",
    "drafter",
    "length_policy",
    "verifier",
    "proposer",
    "order",
    "schedule",
    "selector",
    "remasker",
    "stop",
    "block_schedule",
    "cache_policy",
    "scorer",
    "constraint",
)


def ls(args: argparse.Namespace) -> int:
    table = {
        "samplers": samplers,
        "presets": presets,
        "parts": parts,
        "tokenizers": lambda: simple("tokenizer"),
        "layouts": lambda: simple("layout"),
        "modalities": modalities,
        "models": models,
        "families": families,
        "configs": configs,
    }[args.kind]()
    if args.json:
        print(json.dumps(table, ensure_ascii=False, indent=2))
        return 0
    if not table:
        print(f"no {args.kind}")
        return 0
    keys = [k for k in table[0] if k not in LONG]
    rows = [[k.replace("_", " ") for k in keys], *([_cell(row[k]) for k in keys] for row in table)]
    print(columns(rows))
    return 0


def samplers() -> list[dict[str, Any]]:
    """Lists samplers with their parameters, guarantees, papers and presets."""
    from gen.core.registry import registry

    table, named = [], presets()
    for name, cls in registry.table("sampler").items():
        params = {f.name: _default(f) for f in dataclasses.fields(cls)}
        table.append(
            {
                "name": name,
                "protocol": cls.protocol,
                "kinds": list(cls.kinds),
                "guarantee": _guarantee(name),
                "reference": cls.reference,
                "papers": list(cls.papers),
                "presets": [
                    {k: p[k] for k in ("name", "guarantee", "reference", "paper", "about")}
                    for p in named
                    if p["sampler"] == name
                ],
                "params": params,
                "about": first_line(cls),
            }
        )
    return table


def presets() -> list[dict[str, Any]]:
    """Lists presets: published methods by name."""
    from gen.core.registry import registry

    return [
        {
            "name": name,
            "sampler": p.sampler,
            "guarantee": _guarantee(name),
            "reference": registry.get("sampler", p.sampler).reference,
            "paper": p.paper,
            "title": p.title,
            "limit": _limit(p.limit),
            "params": dict(p.params),
            "sampling": dict(p.sampling),
            "about": p.about,
        }
        for name, p in registry.table("preset").items()
    ]


def parts() -> list[dict[str, Any]]:
    """Lists the parts that samplers are made of, with the parameters that they declare."""
    from gen.core.registry import registry

    table = []
    for kind in PARTS:
        for name, obj in registry.table(kind).items():
            declared = registry.params_of(kind, name)
            fields = dataclasses.fields(declared) if declared else ()
            table.append(
                {
                    "kind": kind,
                    "name": name,
                    "params": {f.name: _default(f) for f in fields},
                    "about": first_line(obj),
                }
            )
    return table


def modalities() -> list[dict[str, Any]]:
    from gen.core.registry import registry

    return [
        {
            "name": name,
            "files": cls.extension,
            "default_sampling": dict(cls.default_sampling),
            "about": first_line(cls),
        }
        for name, cls in registry.table("modality").items()
    ]


def simple(kind: str) -> list[dict[str, Any]]:
    from gen.core.registry import registry

    return [{"name": name, "about": first_line(obj)} for name, obj in registry.table(kind).items()]


def models() -> list[dict[str, Any]]:
    """Lists the models that come with gen. A folder or hub id of your own goes wherever a name of
    these does."""
    table = []
    for folder in zoo():
        config = _json_of(folder / "config.json")
        size = sum(p.stat().st_size for p in folder.glob("*.safetensors"))
        about = next(
            (
                line.strip()
                for line in _readable(folder / "README.md").splitlines()
                if _is_prose(line)
            ),
            "",
        )
        kind = (
            config.get("model_type")
            or config.get("_class_name")
            or config.get("frontend_class")
            or EMPTY
        )
        table.append(
            {"name": folder.name, "type": kind, "megabytes": round(size / 1e6, 2), "about": about}
        )
    return table


def families() -> list[dict[str, Any]]:
    """Lists the families that published checkpoints are recognised as. ``tested``: the checkpoint
    that a family's loader was tested on."""
    from gen.contracts.checkpoint import options_of
    from gen.core.registry import registry

    return [
        {
            "name": name,
            "modalities": list(cls.modalities),
            "protocols": list(cls.protocols),
            "kind": cls.kind,
            "options": options_of(cls),
            "tested": cls.tested,
            "about": first_line(cls),
        }
        for name, cls in registry.table("checkpoint").items()
    ]


def configs() -> list[dict[str, Any]]:
    from gen.config.packaged import packaged

    table = []
    for name, path in packaged().items():
        line = next(
            (x.lstrip("# ").strip() for x in _readable(path).splitlines() if x.startswith("#")), ""
        )
        table.append({"name": name, "about": line})
    return table


def show(args: argparse.Namespace) -> int:
    from gen.config.entries import fingerprint
    from gen.config.job import load_config

    job = load_config(args.config, args.overrides)
    print(job.to_yaml() + f"# fingerprint: {fingerprint(job)}")
    return 0


def cp(args: argparse.Namespace) -> int:
    from gen.config.packaged import find_config
    from gen.core.files import writing

    source, dest = find_config(args.config), Path(args.dest)
    if dest.is_dir():
        dest = dest / source.name
    with writing(dest):
        try:
            with dest.open("xb") as file:
                file.write(source.read_bytes())
        except FileExistsError as error:
            raise GenError(f"{dest} exists; expected a name that is free") from error
    print(dest)
    return 0


# --- small parts


def first_line(obj: Any) -> str:
    """Takes the first sentence of a docstring."""
    lines = inspect.cleandoc(obj.__doc__ or "").split("\n\n")[0].split()
    return " ".join(lines).split(". ")[0].removesuffix(".").rstrip() + "." if lines else ""


def zoo() -> list[Path]:
    """Finds the folders of the models that come with gen."""
    import gen

    roots = [Path(p) / "zoo" for p in gen.__path__]
    return sorted(
        f for r in roots if r.is_dir() for f in r.iterdir() if (f / "config.json").is_file()
    )


def _guarantee(name: str) -> str:
    """Guarantee with the default parameters."""
    from gen.core.sampler import resolve_sampler

    return resolve_sampler(name, None)[0].guarantee


def _limit(limit: Any) -> str:
    """Says where a method becomes a simpler one."""
    if limit is None:
        return ""
    values = ", ".join(f"{k}: {v}" for k, v in limit.params.items())
    return f"{limit.note.replace('`', '') or values} -> {limit.equals}"


def _default(f: dataclasses.Field) -> Any:
    if f.default is not dataclasses.MISSING:
        return f.default
    return f.default_factory() if f.default_factory is not dataclasses.MISSING else "required"


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{k}={v}" for k, v in value.items()) or EMPTY
    return (", ".join(map(str, value)) if isinstance(value, list) else str(value)) or EMPTY


def _readable(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _json_of(path: Path) -> dict[str, Any]:
    try:
        return json.loads(_readable(path))
    except ValueError:
        return {}


def _is_prose(line: str) -> bool:
    """Recognises a line of a model card that is neither its YAML head nor a heading."""
    return bool(line.strip()) and line[0] not in "#-|" and ":" not in line.split(" ")[0]
