"""Pairs of media: what stands in the condition of every medium of a folder.

A medium's partner is the file of its name in a folder of conditions, which may be the same folder,
or what its row of the table says (``image``, ``audio`` or ``video``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gen.config.condition_rows import row_condition
from gen.core.condition_parts import ALIASES, KINDS, NOUNS
from gen.core.errors import GenError, cut_list, shown
from gen.core.paths import is_file
from gen.core.printable import printable
from gen.core.tables import plural
from gen.media.given import is_data_uri

NAMED = 3  # media of one problem that are named
NO_PARTNER, SEVERAL, OTHER_KIND, LOST = (
    "without a partner",
    "with several partners",
    "with a partner of another kind",
    "with a partner that is no file",
)
ROW_KEYS = tuple(name for name in (*KINDS, *ALIASES) if ALIASES.get(name, name) in KINDS)


@dataclass(frozen=True)
class Pairs:
    """Partners of the media of a folder.

    Attributes:
        part: part of a condition that they are: ``images``, ``audio`` or ``video``.
        partners: path or ``data:`` URI of the partner, by the name of the medium.
        problems: kind and sentence of what is wrong, by the name of a medium without one partner.
        unused: files of the folder of conditions that belong to no medium.
    """

    part: str
    partners: Mapping[str, str]
    problems: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    unused: Sequence[Path] = ()

    @classmethod
    def of(
        cls,
        found: Mapping[str, Sequence[tuple[str, str]]],
        where: str,
        unused: Sequence[Path] = (),
    ) -> Pairs:
        """Return the pairs of media.

        Args:
            found: part and path of every partner that is there, by the name of the medium.
            where: where partners are looked for, for messages.
            unused: files that belong to no medium.

        Raises:
            GenError: no medium has a partner.
        """
        parts = Counter(options[0][0] for options in found.values() if len(options) == 1)
        if not parts:
            raise GenError(f"none of {plural(len(found), 'file')} has one partner: {where}")
        part = parts.most_common(1)[0][0]
        partners: dict[str, str] = {}
        problems: dict[str, tuple[str, str]] = {}
        for name, options in found.items():
            problem = _problem(options, part, where)
            if problem is None:
                partners[name] = options[0][1]
            else:
                problems[name] = problem
        return cls(part, partners, problems, unused)

    @property
    def files(self) -> list[Path]:
        """Partners that are files."""
        return [Path(path) for path in self.partners.values() if not is_data_uri(path)]

    def lines(self) -> list[str]:
        """Say how many pairs there are, and what is wrong with the others."""
        noun = NOUNS[KINDS[self.part]]
        said = [f"{plural(len(self.partners), 'pair')}, {noun} in the condition of each"]
        for kind in (NO_PARTNER, SEVERAL, OTHER_KIND, LOST):
            names = [name for name, (k, _) in self.problems.items() if k == kind]
            if names:
                listed = printable("; ".join(cut_list(names, NAMED)))
                said.append(f"{len(names)} {kind}: {listed}")
        if self.unused:
            names = [path.name for path in self.unused]
            listed = printable("; ".join(cut_list(names, NAMED)))
            said.append(f"{len(names)} conditions of no medium, left out: {listed}")
        return said


def _problem(options: Sequence[tuple[str, str]], part: str, where: str) -> tuple[str, str] | None:
    """Return kind and sentence of what is wrong with the partners of a medium, if anything is."""
    if not options:
        return NO_PARTNER, f"it has no partner: {where}"
    if len(options) > 1:
        names = " and ".join(shown(Path(path).name) for _, path in options)
        return SEVERAL, f"it has {len(options)} partners, {names}; expected one"
    found, path = options[0]
    if found != part:
        return OTHER_KIND, (
            f"its partner {shown(Path(path).name)} is {NOUNS[KINDS[found]]}; expected"
            f" {NOUNS[KINDS[part]]}, as most partners are"
        )
    if not is_data_uri(path) and not is_file(path):
        return LOST, f"its partner is not a file: {shown(path)}"
    return None


def partners_in(folder: Path, root: Path, media: Iterable[Path], kinds: Mapping[str, str]) -> Pairs:
    """Find the partners of media in a folder of conditions, by their names without extensions.

    Args:
        folder: the conditions; the folder of the media itself for files beside them.
        root: folder of the media.
        media: the media.
        kinds: part of a condition by extension.

    Raises:
        GenError: no such folder, or no medium with a partner.
    """
    if not folder.is_dir():
        raise GenError(f"given is {shown(str(folder))}, which is no folder; expected one of media")
    media = [*media]
    mine = {path.resolve() for path in media}
    by_name: dict[str, list[Path]] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.resolve() not in mine):
        inside = path.relative_to(folder)
        if path.suffix.lower() in kinds and not any(x.startswith(".") for x in inside.parts):
            by_name.setdefault(inside.with_suffix("").as_posix(), []).append(path)
    found: dict[str, list[tuple[str, str]]] = {}
    used: set[Path] = set()
    for path in media:
        inside = path.relative_to(root)
        options = by_name.get(inside.with_suffix("").as_posix(), [])
        used |= {*options}
        found[inside.as_posix()] = [(kinds[p.suffix.lower()], str(p.absolute())) for p in options]
    others = [p for paths in by_name.values() for p in paths if p not in used]
    where = f"expected an image, a sound or a clip of the same name in {folder}"
    return Pairs.of(found, where, others)


def partners_of_row(row: Mapping[str, Any], root: Path) -> list[tuple[str, str]]:
    """Return part and path of the media that a row of a table states. Raises ``GenError`` for
    values that are no paths."""
    stated = {k: v for k, v in row.items() if k in ROW_KEYS and v not in (None, "")}
    return [(part, path) for part, paths in row_condition(stated, root).items() for path in paths]
