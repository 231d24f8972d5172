"""Rows of input: a prompt each, with the row's own seed, parameters, edit and data to carry along.

Rows come from a list in a job, from any Python iterable, or from a file (see
`gen.config.prompt_files` for the formats); the same rows are the same input in all of these. A
wrong row of a list is refused at once. A wrong row of a file does not stop the others: it stays
in order and its ``error`` names the fault and the line.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from gen.config.canonical import canonical
from gen.config.condition_rows import content_of
from gen.config.foreign import adopt_columns
from gen.config.prompt_files import prompt_paths, read_values
from gen.config.rows import Row, line_of, located, parse_row, writable
from gen.config.yaml_text import check_bounds
from gen.core.clock import SteadyClock
from gen.core.edit_spec import MEDIA
from gen.core.errors import GenError, bad_value
from gen.core.files import put, sha256
from gen.core.paths import is_file

ITEMS = 5_000_000  # of one job: a plan lists each of them, in about 500 bytes
FOREIGN_MOST = 1000  # columns that a census remembers
NOTED = 3.0  # seconds between two notes about a long file

# --- where rows come from


def iter_rows(path: str | Path, column: str | None = None) -> Iterator[Row]:
    """Read the rows of a file, or of all files of a pattern, one at a time.

    Args:
        path: a .txt, .jsonl, .csv, .tsv or .parquet file, or a pattern such as ``data/*.jsonl``.
        column: the column that holds the prompt; None for ``prompt``.

    Yields:
        Rows; wrong ones have an ``error``, and values of foreign columns are in ``meta``. Lines of
        several files are counted on.

    Raises:
        GenError: for a useless file: an unknown extension, no column of prompts, no row at all, or
            more rows than a job can have.
    """
    paths = prompt_paths(path) or [Path(path)]
    first: dict[str, str] = {}  # where an id was first
    count = line = 0
    for one in paths:
        for row in _file_rows(one, column):
            line = row.line if len(paths) == 1 else line + 1
            origin = line_of(one, row.line) if len(paths) > 1 else ""
            count += 1
            if count > ITEMS:
                raise GenError(f"{path} has more than {ITEMS:,} rows; expected at most so many")
            here = origin or f"line {row.line}"
            if row.id is not None and not row.error and first.setdefault(row.id, here) != here:
                problem = f"id {row.id!r} is a duplicate; {first[row.id]} has the same id"
                row = replace(row, error=located(one, row.line, problem))
            yield replace(row, line=line, origin=origin) if origin else row
    if not count:
        raise GenError(f"{path} is empty; expected at least one prompt")


def told(rows: Iterable[Row], what: str, note: Callable[[str], object]) -> Iterator[Row]:
    """Yield rows, and tell every ``NOTED`` seconds how many there were.

    Args:
        rows: the rows.
        what: what is being read, for the note.
        note: takes the text.
    """
    clock, noted = SteadyClock(), NOTED
    for count, row in enumerate(rows):
        if count % 1000 == 0 and clock() > noted:
            note(f"reading {what}: {count:,} rows")
            noted = clock() + NOTED
        yield row


def _file_rows(path: Path, column: str | None) -> Iterator[Row]:
    """Read the rows of one file."""
    for line, got, raw, error in read_values(path, column):
        foreign: list[str] = []
        try:
            if error:
                raise GenError(error)
            if isinstance(got, Mapping):
                check_bounds(got, "the row")
                got, foreign = adopt_columns(got, column)
            row = parse_row(got, line, path.parent)
        except GenError as problem:
            told = got if isinstance(got, Mapping) else {"prompt": got}

            def text(key, told=told):
                return told[key] if isinstance(told.get(key), str) and writable(told[key]) else None

            yield Row(
                text("prompt") or "", line, text("id"), error=located(path, line, problem), raw=raw
            )
            continue
        yield replace(row, foreign=tuple(foreign)) if foreign else row


def inline_rows(prompts: Any, base: Path, where: str) -> list[str | dict[str, Any]]:
    """Read and check a list or iterable of texts and mappings once: texts as they are, mappings
    with nested parameters and absolute paths. Raises ``GenError`` for a wrong row."""
    prompts = [prompts] if isinstance(prompts, str) else prompts
    if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
        raise bad_value("prompts", prompts, "at least one prompt", where)
    made: list[str | dict[str, Any]] = []
    first: dict[str, int] = {}
    for i, got in enumerate(prompts):
        if not isinstance(got, Mapping) and (not isinstance(got, str) or got.isspace()):
            raise bad_value(
                f"prompts.{i}",
                got,
                "a text (quote it if YAML reads it as something else)",
                where,
            )
        try:
            row = parse_row(got, i, base)
            if row.id is not None and first.setdefault(row.id, i) != i:
                raise GenError(
                    f"id {row.id!r} is a duplicate; prompts.{first[row.id]} has the same id"
                )
        except GenError as error:
            raise GenError(f"prompts.{i} in {where}: {error}") from None
        tree = row.tree()
        made.append(row.prompt if len(tree) == 1 else tree)
    if not made:
        raise bad_value("prompts", made, "at least one prompt", where)
    return made


def listed_rows(prompts: Iterable[str | Mapping[str, Any]]) -> Iterator[Row]:
    """Parse the rows of a list that ``inline_rows`` made."""
    for i, got in enumerate(prompts):
        yield parse_row(got, i, Path())


def write_rows(rows: Iterable[Row], path: Path) -> None:
    """Write rows as JSONL that reads back as the same rows. Raises ``GenError`` for a row with
    an error, whose text is incomplete."""

    def write(temporary: Path) -> None:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            for row in rows:
                if row.error:
                    raise GenError(f"an invalid row cannot be written to {path}: {row.error}")
                file.write(json.dumps(row.tree(), ensure_ascii=False) + "\n")

    put(path, write)


# --- all rows


@dataclass(frozen=True)
class Census:
    """Summary of all rows.

    Attributes:
        rows: their number.
        sha256: digest of all rows in order.
        first: the first valid row of every distinct set of parameters, edits and adapter; rows
            without any are one such set.
        error: of the first row that has one.
        stamp: time and size of the file, if it is one.
        counted: rows that say their own number of samples.
        own_samples: sum of those numbers.
        foreign: columns of a data set that went to ``meta``.
    """

    rows: int
    sha256: str
    first: dict[str, Row]
    error: str | None
    stamp: Any = None  # of the file, where it is one
    counted: int = 0
    own_samples: int = 0
    foreign: tuple[str, ...] = ()

    def samples(self, num_samples: int) -> int:
        """Return the number of items, with ``num_samples`` for each row that says none."""
        return (self.rows - self.counted) * num_samples + self.own_samples


def take_census(rows: Iterable[Row], content: Callable[[str], str] | None = None) -> Census:
    """Read the rows once and keep only those of ``first``. ``content`` digests a file, for media
    to start from."""
    once = cache(content or file_digest)
    first: dict[str, Row] = {}
    error, count, digest = None, 0, hashlib.sha256()
    counted = own_samples = 0
    foreign: dict[str, None] = {}
    for count, row in enumerate(rows, 1):  # noqa: B007 - read behind the loop
        digest.update(_content(row, once))
        counted += row.num_samples is not None
        own_samples += row.num_samples or 0
        if row.foreign and len(foreign) < FOREIGN_MOST:
            foreign.update(dict.fromkeys(row.foreign))
        if row.error:
            error = error or row.error
        else:
            own = [row.sampler, row.sampling, row.start, row.adapter]
            first.setdefault(_ENCODE(own) if any(own) else "null", row)
    return Census(
        count,
        digest.hexdigest(),
        first,
        error,
        counted=counted,
        own_samples=own_samples,
        foreign=tuple(foreign),
    )


_ENCODE = json.JSONEncoder(sort_keys=True).encode


def _content(row: Row, digest: Callable[[str], str]) -> bytes:
    """Encode what a row counts by, as one line of JSON."""
    tree = {"malformed": row.raw} if row.raw is not None else row.tree()
    if len(tree) == 1 and row.raw is None:  # a prompt alone, as most rows of large files are
        return b'{"prompt": %s}\n' % _ENCODE(row.prompt).encode()
    for key in MEDIA:
        if row.raw is None and key in row.start:
            tree[key] = digest(row.start[key])
    if row.raw is None and row.condition:
        tree |= content_of(row.condition, digest)
    return _ENCODE(canonical(tree)).encode() + b"\n"


def rows_digest(rows: Iterable[Row]) -> str:
    """Digest rows: one sha256 for the same rows in the same order, wherever they come from. A
    sample to start from counts by its content, an unreadable row by its text."""
    return take_census(rows).sha256


def file_digest(path: str) -> str:
    """Digest a file, or note that it is missing."""
    return sha256(Path(path)) if is_file(path) else f"missing {path}"
