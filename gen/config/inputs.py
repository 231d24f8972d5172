"""Rows of input: a prompt each, with what that row alone says (a seed, a knob, a medium to start
from, data to carry along).

Rows come from a list in a job, from any Python iterable, or from a file (see
`gen.config.prompt_files` for the formats), and the same rows are the same input wherever they came
from. A wrong row of a list is refused at once. A wrong row of a file does not stop the others: it
keeps its place and says in ``error`` what is wrong with it, and where.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gen.config.canonical import canonical, plain, sampling_fields
from gen.core.edit_spec import EDIT_FIELDS, MEDIA
from gen.core.errors import GenError, bad_value, unknown

ROW_NODES = (
    "sampler",
    "sampling",
    "meta",
)  # keys with keys of their own, which may also be written as sampler.window
ROW_KEYS = ("prompt", "id", "seed", "num_samples", *EDIT_FIELDS, *ROW_NODES)
LONGEST = 400  # characters of a message about one row


@dataclass(frozen=True)
class Row:
    """One row. ``line``: of a file, from 1; in a list, its index. ``sampler`` and ``sampling``: knobs of
    this row over those of its entry; ``start``: those of source, mask, span, prefix and frames that
    it says, with absolute paths. ``error``: why it cannot be made. ``raw``: the text of a row that
    could not be read, ``None`` for any other."""

    prompt: str
    line: int
    id: str | None = None
    seed: int | None = None
    num_samples: int | None = None
    sampler: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    start: dict[str, Any] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    raw: str | None = None

    def tree(self) -> dict[str, Any]:
        """What a file would say for this row."""
        said = (("id", self.id), ("seed", self.seed), ("num_samples", self.num_samples))
        nodes = (("sampler", self.sampler), ("sampling", self.sampling), ("meta", self.meta))
        return {
            "prompt": self.prompt,
            **{k: v for k, v in said if v is not None},
            **self.start,
            **{k: v for k, v in nodes if v},
        }


# --- where rows come from


def iter_rows(path: str | Path) -> Iterator[Row]:
    """The rows of a .txt, .jsonl, .csv or .parquet file, one at a time; wrong ones with an
    ``error``.

    Raises ``GenError`` where the file as a whole is of no use: an unknown extension, a header with
    an unknown column, no row at all.
    """
    from gen.config.prompt_files import read_values

    path = Path(path)
    first: dict[str, int] = {}  # the line that had an id first
    empty = True
    for line, got, raw, error in read_values(path):
        empty = False
        try:
            if error:
                raise GenError(error)
            row = parse_row(got, line, path.parent)
        except GenError as problem:
            told = got if isinstance(got, Mapping) else {"prompt": got}

            def text(key, told=told):
                return (
                    told[key] if isinstance(told.get(key), str) and _writable(told[key]) else None
                )

            yield Row(
                text("prompt") or "", line, text("id"), error=located(path, line, problem), raw=raw
            )
            continue
        if row.id is not None and first.setdefault(row.id, line) != line:
            row = replace(
                row,
                error=located(
                    path,
                    line,
                    f"id {row.id!r} comes a second time; line {first[row.id]} has it already",
                ),
            )
        yield row
    if empty:
        raise GenError(f"{path} is empty; expected at least one prompt")


def inline_rows(prompts: Any, base: Path, where: str) -> list[str | dict[str, Any]]:
    """A list or iterable of texts and mappings, read once and checked: texts as they are, mappings
    with nested knobs and absolute paths. Raises ``GenError`` for a row that is wrong."""
    prompts = [prompts] if isinstance(prompts, str) else prompts
    if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
        raise bad_value("prompts", prompts, "at least one prompt", where)
    made: list[str | dict[str, Any]] = []
    first: dict[str, int] = {}
    for i, got in enumerate(prompts):
        if not isinstance(got, Mapping) and (not isinstance(got, str) or not got.strip()):
            raise bad_value(
                f"prompts.{i}",
                got,
                "a text that is not empty (quote it if YAML reads it otherwise)",
                where,
            )
        try:
            row = parse_row(got, i, base)
            if row.id is not None and first.setdefault(row.id, i) != i:
                raise GenError(
                    f"id {row.id!r} comes a second time; prompts.{first[row.id]} has it already"
                )
        except GenError as error:
            raise GenError(f"prompts.{i} in {where}: {error}") from None
        tree = row.tree()
        made.append(row.prompt if len(tree) == 1 else tree)
    if not made:
        raise bad_value("prompts", made, "at least one prompt", where)
    return made


def listed_rows(prompts: Iterable[str | Mapping[str, Any]]) -> Iterator[Row]:
    """The rows of a list that ``inline_rows`` made."""
    for i, got in enumerate(prompts):
        yield parse_row(got, i, Path())


def write_rows(rows: Iterable[Row], path: Path) -> None:
    """As JSONL that reads back as the same rows. Raises ``GenError`` for a row with an error, since
    its text is not all here."""
    from gen.store.ledger import put

    def write(temporary: Path) -> None:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            for row in rows:
                if row.error:
                    raise GenError(f"a wrong row cannot be written to {path}: {row.error}")
                file.write(json.dumps(row.tree(), ensure_ascii=False) + "\n")

    put(path, write)


def located(path: Path, line: int, problem: object) -> str:
    text = " ".join(str(problem).split())
    text = text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."
    return f"{path.name}, {'row' if path.suffix.lower() == '.parquet' else 'line'} {line}: {text}"


# --- one row


def parse_row(got: Any, line: int, base: Path) -> Row:
    """A text or a mapping as a row; paths are relative to ``base``. Raises ``GenError`` with what
    is wrong, not where."""
    if isinstance(got, str):
        got = {"prompt": got}
    if not isinstance(got, (dict, Mapping)):
        raise bad_value("the row", got, "a text, or an object with a prompt")
    v = nested(got)
    prompt = v.get("prompt")
    if prompt is None:
        raise GenError("there is no prompt; expected a text under 'prompt'")
    if not isinstance(prompt, str) or not prompt.strip():
        raise bad_value("prompt", prompt, "a text that is not empty")
    if len(v) > 1:
        _check_types(v)
    start = {
        k: str((base / v[k]).absolute()) if k in MEDIA else v[k] for k in EDIT_FIELDS if k in v
    }
    nodes = {k: plain(v[k]) for k in ROW_NODES if v.get(k)}
    row = Row(
        prompt,
        line,
        None if v.get("id") is None else str(v["id"]),
        v.get("seed"),
        v.get("num_samples"),
        start=start,
        **nodes,
    )
    if not _writable(prompt if len(v) == 1 else row.tree()):
        raise GenError(
            "the row holds what JSON in UTF-8 cannot (NaN, half of a surrogate pair, or an object"
            " that is no plain data)"
        )
    return row


def nested(got: Mapping[str, Any]) -> dict[str, Any]:
    """Known keys, with ``sampler.window`` under ``sampler``; a key without a value says nothing."""
    out: dict[str, Any] = {}
    for key, value in got.items():
        head, dot, rest = str(key).partition(".")
        if head not in ROW_KEYS or (dot and (head not in ROW_NODES or not rest)):
            raise unknown("key", key, (*ROW_KEYS, *(f"{n}.<key>" for n in ROW_NODES)))
        if value is None and not dot:
            continue
        if head not in ROW_NODES:
            out[head] = value
            continue
        if not dot and not isinstance(value, (dict, Mapping)):
            raise bad_value(head, value, "keys with values, such as {window: 8} for a sampler")
        node = out.setdefault(head, {})
        for inner, one in ({rest: value} if dot else value).items():
            if str(inner) in node:
                raise GenError(f"{head}.{inner} is given twice")
            node[str(inner)] = one
    if "name" in out.get("sampler", ()):
        raise GenError(
            "sampler.name is given; expected knobs only (the sampler is the same for all rows of an"
            " entry)"
        )
    known = sampling_fields() if "sampling" in out else ()
    for param in out.get("sampling", ()):
        if param not in known:
            raise unknown("knob of the law", param, known)
    return out


def _check_types(v: Mapping[str, Any]) -> None:
    def whole(x):
        return isinstance(x, int) and not isinstance(x, bool)

    for key, least in (("seed", 0), ("num_samples", 1), ("frames", 1)):
        if key in v and (not whole(v[key]) or v[key] < least or v[key] >= 2**62):
            raise bad_value(
                key,
                v[key],
                f"an integer of at least {least}" + (" and below 2**62" if key == "seed" else ""),
            )
    if "id" in v and not whole(v["id"]) and (not isinstance(v["id"], str) or not v["id"].strip()):
        raise bad_value("id", v["id"], "a text that is not empty")
    for key in MEDIA:
        if key in v and (not isinstance(v[key], (str, Path)) or not str(v[key])):
            raise bad_value(key, v[key], "a path")
    if "span" in v and (not isinstance(v["span"], str) or not v["span"].strip()):
        raise bad_value("span", v["span"], "text such as '20:60'")


def _writable(tree: Any) -> bool:
    try:
        (
            tree if isinstance(tree, str) else json.dumps(tree, ensure_ascii=False, allow_nan=False)
        ).encode()
    except (TypeError, ValueError, RecursionError):
        return False
    return True


# --- all rows


@dataclass(frozen=True)
class Census:
    """What one look at all rows tells. ``first``: by every distinct set of knobs and starts, the
    first row that says it (of rows without an error); ``error``: of the first row that has one.
    Rows that say neither are one such set.
    """

    rows: int
    sha256: str
    first: dict[str, Row]
    error: str | None
    stamp: Any = None  # of the file, where it is one


def take_census(rows: Iterable[Row], content: Callable[[str], str] | None = None) -> Census:
    """Reads the rows once and keeps none but those of ``first``. ``content``: the digest of a file,
    for media to start from."""
    content = content or file_digest
    known: dict[str, str] = {}
    first: dict[str, Row] = {}
    error, count, digest = None, 0, hashlib.sha256()
    for count, row in enumerate(rows, 1):  # noqa: B007 - read behind the loop
        tree = {"malformed": row.raw} if row.raw is not None else row.tree()
        for key in MEDIA:
            if row.raw is None and key in row.start:
                path = row.start[key]
                tree[key] = known[path] = known.get(path) or content(path)
        digest.update(json.dumps(canonical(tree), sort_keys=True).encode() + b"\n")
        if row.error:
            error = error or row.error
        else:
            own = (
                [row.sampler, row.sampling, row.start]
                if row.sampler or row.sampling or row.start
                else None
            )
            first.setdefault(json.dumps(own, sort_keys=True), row)
    return Census(count, digest.hexdigest(), first, error)


def rows_digest(rows: Iterable[Row]) -> str:
    """One sha256 for the same rows in the same order, wherever they come from. A medium to start
    from counts by its content, a row that could not be read by its text."""
    return take_census(rows).sha256


def file_digest(path: str) -> str:
    from gen.store.ledger import sha256

    return sha256(Path(path)) if Path(path).is_file() else f"missing {path}"
