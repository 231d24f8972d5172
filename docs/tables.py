"""Tables of the documentation that come from the registry.

    python docs/tables.py           rewrites them
    python docs/tables.py --check   exits with 1 if a page is not up to date

A table stands between ``<!-- table: NAME -->`` and ``<!-- end of table: NAME -->`` in a page. Rows
come from the declarations of methods and parts (``gen.core.method``), so a new method file adds its
row by itself.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from gen.cli.listings import methods as methods_listing
from gen.core.docstrings import first_line
from gen.core.method import SEQUENTIAL, Limit, Preset
from gen.core.params import part_kinds
from gen.core.registry import registry
from gen.samplers.masked.config import MaskedSampler
from gen.samplers.masked.parts.selection import GREEDY

PAGES = ("masked.md", "drafts.md", "samplers.md", "search.md", "glossary.md")
DECIDES = {
    "order": "the priority of positions",
    "schedule": "the number of masked positions after each of `steps` passes",
    "proposer": "the token proposed for each masked position",
    "selector": "the positions committed in this step",
    "remasker": "the committed tokens that are remasked or changed",
    "stop": "early end of a row before all positions are committed",
    "blocks": "the positions eligible for committing",
    "cache": "the positions that a pass computes ([below](#caches))",
}

GUARANTEED = {
    "same_tokens": "same tokens",
    "same_distribution": "exact",
}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Writes a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def parts() -> str:
    """Lists the kinds of parts of the masked loop, and what is registered of each."""
    rows = []
    for param, kind in part_kinds(MaskedSampler).items():
        names = ", ".join(f"`{name}`" for name in registry.table(kind))
        rows.append([f"`{param}`", DECIDES[param], names])
    return table(["parameter", "part decides", "registered"], rows)


def methods() -> str:
    """Lists the presets of the masked loop, with their papers, parameters and limits."""
    rows = []
    for name, preset in registry.table("preset").items():
        if preset.sampler == "masked_iterative":
            values, limit = _values(preset.params), _limit(preset.limit)
            rows.append([f"`{name}`", _paper(preset), values, limit])
    return table(["preset", "paper", "parts and parameters", "limit case"], rows)


def searches() -> str:
    """Lists the samplers that run another one, and their presets."""
    samplers = registry.table("sampler")
    found = {n: (cls.papers, first_line(cls)) for n, cls in samplers.items() if cls.wraps}
    for name, preset in registry.table("preset").items():
        if samplers[preset.sampler].wraps:
            papers = (preset.paper,) if preset.paper else ()
            found[name] = papers, f"`{preset.sampler}`: {preset.about}"
    rows = [
        [f"`{name}`", ", ".join(map(_link, papers)), about]
        for name, (papers, about) in found.items()
    ]
    return table(["search", "paper", "what it does"], rows)


def verifiers() -> str:
    """Lists the verifiers of drafts."""
    rows = [
        [
            f"`{name}`",
            "approximate" if verifier.relaxed else GUARANTEED[verifier.guarantee],
            "chains, trees" if verifier.judges_trees else "chains",
            first_line(verifier),
        ]
        for name, verifier in registry.table("verifier").items()
    ]
    return table(["verifier", "guarantee", "judges", "rule"], rows)


def shapes() -> str:
    """Lists the shapes of drafts, and how each can draw siblings."""
    rows = [
        [f"`{name}`", ", ".join(f"`{way}`" for way in shape.takes), first_line(shape)]
        for name, shape in registry.table("shape").items()
    ]
    return table(["shape", "ways to draw siblings", "drafts"], rows)


def policies() -> str:
    """Lists the length policies."""
    rows = []
    for name, policy in registry.table("length_policy").items():
        declared = registry.params_of("length_policy", name)
        params = ", ".join(f"`{f.name}`" for f in fields(declared)) if declared else ""
        rows.append([f"`{name}`", first_line(policy), params])
    return table(["policy", "drafts of a step", "parameters"], rows)


def drafters() -> str:
    """Lists the drafters."""
    rows = [
        [f"`{name}`", first_line(drafter)] for name, drafter in registry.table("drafter").items()
    ]
    return table(["drafter", "drafts"], rows)


def samplers() -> str:
    """Lists the samplers: models that they decode, guarantee, papers and rule."""
    rows = [
        [
            f"`{row['name']}`",
            f"{row['protocol']}, of {' and '.join(row['kinds'])}",
            row["guarantee"],
            row["about"].replace("``", "`"),
            ", ".join(_link(paper) for paper in row["papers"]),
        ]
        for row in methods_listing.samplers()
    ]
    return table(["sampler", "models", "guarantee by default", "rule", "papers"], rows)


def presets() -> str:
    """Lists the presets of all samplers."""
    rows = [
        [f"`{row['name']}`", f"`{row['sampler']}`", row["guarantee"], row["about"]]
        for row in methods_listing.presets()
    ]
    return table(["preset", "sampler", "guarantee", "rule"], rows)


def papers() -> str:
    """Lists the published methods by the titles of their papers."""
    rows = [
        [row["title"] or row["about"], _link(row["paper"]), f"`{row['name']}`"]
        for row in methods_listing.presets()
        if row["paper"]
    ]
    return table(["paper", "published as", "preset"], sorted(rows, key=str))


def _link(paper: str) -> str:
    is_arxiv = re.fullmatch(r"\d{4}\.\d{5}", paper)
    return f"[arXiv {paper}](https://arxiv.org/abs/{paper})" if is_arxiv else paper


def _paper(preset: Preset) -> str:
    if not preset.paper:
        return ""
    label = f"arXiv {preset.paper}" if preset.paper[0].isdigit() else preset.paper
    return f"{preset.title}, {label}" if preset.title else label


def _values(params: Mapping[str, Any]) -> str:
    """Lists the parameters of a preset, without those that all greedy presets share."""
    shown = {k: v for k, v in params.items() if GREEDY.get(k) != v or "proposer" not in params}
    samples = params.get("proposer", "categorical") not in ("argmax", "credit")
    values = ", ".join(f"`{k}` {_word(v)}" for k, v in shown.items())
    return values + ("; samples its tokens" if samples else "")


def _limit(limit: Limit | None) -> str:
    if limit is None:
        return ""
    values = ", ".join(f"`{k}: {_word(v)}`" for k, v in limit.params.items())
    equals = limit.equals if " " in limit.equals else f"`{limit.equals}`"
    plain = [f"`{k}: {_word(v)}`" for k, v in limit.preset.items()]
    if plain:
        equals += f" with {', '.join(plain)}"
    return (limit.note or values) + ("" if limit.equals == SEQUENTIAL else f": {equals}")


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


TABLES: dict[str, Callable[[], str]] = {
    "searches": searches,
    "parts": parts,
    "methods": methods,
    "verifiers": verifiers,
    "policies": policies,
    "drafters": drafters,
    "shapes": shapes,
    "samplers": samplers,
    "presets": presets,
    "papers": papers,
}


def fill(text: str) -> str:
    """Writes every table of a page anew."""
    for name, make in TABLES.items():
        begin, end = f"<!-- table: {name} -->", f"<!-- end of table: {name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        if pattern.search(text):
            filled = f"{begin}\n{make()}\n{end}"
            text = pattern.sub(lambda _, filled=filled: filled, text)
    return text


def main(args: Sequence[str]) -> int:
    """Fills the pages, or checks that they are up to date."""
    stale = []
    for name in PAGES:
        page = Path(__file__).parent / name
        text = page.read_text(encoding="utf-8")
        filled = fill(text)
        if filled != text:
            stale.append(name)
            if "--check" not in args:
                page.write_text(filled, encoding="utf-8")
    if stale and "--check" in args:
        print(f"{', '.join(stale)} not up to date; run: python docs/tables.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
