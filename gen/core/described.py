"""Parameters of one sampler or preset: default and meaning, from the declarations."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

from gen.core.docstrings import default_of, first_line, unquoted
from gen.core.params import declared, part_kinds
from gen.core.registry import registry
from gen.core.resolve import describe_guarantee, resolve_sampler
from gen.core.sampler import PartSampler

NAMES = re.compile(r"((?:``\w+``(?:\s\([^)]*\))?(?:,\s|\sand\s)?)+):\s")
ATTRIBUTE = re.compile(r"^    (\w+): (.*(?:\n        .*)*)", re.MULTILINE)


def describe_sampler(name: str) -> dict[str, Any]:
    """Describe a sampler or preset.

    Returns:
        ``name``, ``sampler``, ``about``, ``guarantee``, ``papers``, ``aliases``, ``sampling`` and
        ``params``: name, default and meaning of each.
    """
    sampler, _ = resolve_sampler(name)
    preset = registry.table("preset").get(name)
    cls = type(sampler)
    meaning = meanings_of(cls)
    return {
        "name": name,
        "sampler": preset.sampler if preset else name,
        "about": preset.about if preset else first_line(cls),
        "guarantee": describe_guarantee(sampler),
        "papers": [preset.paper] if preset and preset.paper else list(cls.papers),
        "aliases": {**cls.aliases, **(preset.aliases if preset else {})},
        "sampling": dict(preset.sampling) if preset else {},
        "params": [
            {
                "name": f.name,
                "default": getattr(sampler, f.name) if preset else default_of(f),
                "meaning": meaning.get(f.name, ""),
            }
            for f in dataclasses.fields(cls)
        ],
    }


def meanings_of(cls: type) -> dict[str, str]:
    """Collect the meaning of each parameter from the docstrings that declare it."""
    declaring = list(cls.__mro__)
    if issubclass(cls, PartSampler):
        for _, owners in declared(part_kinds(cls).values()).values():
            for kind, name in owners:
                params = registry.params_of(kind, name)
                declaring += params.__mro__ if params else ()
    found: dict[str, str] = {}
    mentioned: dict[str, str] = {}  # used only where no docstring states the parameter
    names = [f.name for f in dataclasses.fields(cls)]
    for source in declaring:
        # of the class itself; an inherited text comes in its turn
        text = inspect.cleandoc(source.__dict__.get("__doc__") or "")
        stated, named = _stated(text, names)
        found = {**stated, **found}
        mentioned = {**named, **mentioned}
    return {**mentioned, **found}


def _stated(text: str, names: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Read the parameters of a docstring.

    Returns:
        Those that it states, as ``name: meaning`` under "Attributes" or as ````name``: meaning`` in
        its sentences; and those that it only mentions, with the first sentence that does.
    """
    found = {m[1]: " ".join(m[2].split()) for m in ATTRIBUTE.finditer(text)}
    prose = " ".join(text.split())
    parts = NAMES.split(prose)
    for named, said in zip(parts[1::2], parts[2::2], strict=True):
        for name in re.findall(r"``(\w+)``", named):
            found.setdefault(name, said.strip())
    mentioned: dict[str, str] = {}
    for sentence in re.split(r"(?<=[.:])\s", prose):
        for name in re.findall(r"``(\w+)``", sentence):
            mentioned.setdefault(name, sentence)
    stated, named = (
        {k: unquoted(v) for k, v in texts.items() if k in names} for texts in (found, mentioned)
    )
    return stated, named
