"""Row of input: a prompt with the row's own keys, checked key by key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gen.config.canonical import plain, sampling_fields
from gen.config.condition_rows import CONDITION_KEYS, row_condition
from gen.config.yaml_text import check_bounds
from gen.core.edit_spec import EDIT_FIELDS, MEDIA
from gen.core.errors import GenError, bad_value, unknown
from gen.core.paths import expand_user

ROW_NODES = (
    "sampler",
    "sampling",
    "meta",
)  # keys with keys of their own, which may also be written as sampler.window
ROW_KEYS = (
    "prompt",
    *CONDITION_KEYS,
    "adapter",
    "id",
    "seed",
    "num_samples",
    *EDIT_FIELDS,
    *ROW_NODES,
)
LONGEST = 400  # characters of a message about one row
UNWRITABLE = (
    "the row holds what JSON in UTF-8 cannot (NaN, half of a surrogate pair, or an object that is"
    " no plain data)"
)


@dataclass(frozen=True)
class Row:
    """Row of input.

    Attributes:
        prompt: the text; empty where the condition has other parts alone, or none.
        line: of a file, from 1; in a list, its index.
        sampler: parameters of this row over those of its entry.
        sampling: sampling parameters of this row over those of its entry.
        start: source, mask, span, prefix and frames of this row, with absolute paths.
        condition: parts of the condition beside the prompt (see `gen.config.condition_rows`).
        adapter: name of one of the model's adapters; None for the model without one.
        meta: data to carry along.
        error: reason why the row cannot be made.
        raw: text of a row that could not be read, None for any other.
        origin: file and line, for a row of one of several files.
        foreign: columns of a data set that went to ``meta``.
    """

    prompt: str
    line: int
    id: str | None = None
    seed: int | None = None
    num_samples: int | None = None
    sampler: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    start: dict[str, Any] = field(default_factory=dict)
    condition: dict[str, Any] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    raw: str | None = None
    origin: str = ""
    foreign: tuple[str, ...] = ()
    adapter: str | None = None

    def tree(self) -> dict[str, Any]:
        """Build the object that a file would hold for this row."""
        named = (("adapter", self.adapter), ("id", self.id))
        said = (*named, ("seed", self.seed), ("num_samples", self.num_samples))
        nodes = (("sampler", self.sampler), ("sampling", self.sampling), ("meta", self.meta))
        return {
            "prompt": self.prompt,
            **{k: v for k, v in said if v is not None},
            **self.condition,
            **self.start,
            **{k: v for k, v in nodes if v},
        }


def located(path: Path, line: int, problem: object, origin: str = "") -> str:
    """Add the file and the line to a message; ``origin`` says both of one of several files."""
    text = " ".join(str(problem).split())
    text = text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."
    return f"{origin or line_of(path, line)}: {text}"


def line_of(path: Path, line: int) -> str:
    """Format ``prompts.jsonl, line 3``."""
    return f"{path.name}, {'row' if path.suffix.lower() == '.parquet' else 'line'} {line}"


def parse_row(got: Any, line: int, base: Path) -> Row:
    """Parse a text or a mapping as a row; paths are relative to ``base``. Raises ``GenError``
    that names the fault, without the location."""
    if isinstance(got, str):  # as most rows of large files are
        if got.isspace():
            raise bad_value("prompt", got, "a text")
        if not writable(got):
            raise GenError(UNWRITABLE)
        return Row(got, line)
    if not isinstance(got, (dict, Mapping)):
        raise bad_value("the row", got, "a text, or an object with a prompt")
    if any(isinstance(value, (Mapping, list, tuple)) for value in got.values()):
        check_bounds(got, "the row")
    v = nested(got)
    condition = row_condition(v, base)
    prompt = v.get("prompt", "" if condition else None)
    if prompt is None:
        raise GenError("there is no prompt; expected a text under 'prompt'")
    if not isinstance(prompt, str) or (prompt.isspace() and not condition):
        raise bad_value("prompt", prompt, "a text")
    if len(v) > 1:
        _check_types(v)
    start = {
        k: str((base / expand_user(v[k])).absolute()) if k in MEDIA else v[k]
        for k in EDIT_FIELDS
        if k in v
    }
    nodes = {k: plain(v[k]) for k in ROW_NODES if v.get(k)}
    row = Row(
        prompt,
        line,
        None if v.get("id") is None else str(v["id"]),
        v.get("seed"),
        v.get("num_samples"),
        start=start,
        condition=condition,
        adapter=v.get("adapter"),
        **nodes,
    )
    if not writable(prompt if len(v) == 1 else row.tree()):
        raise GenError(UNWRITABLE)
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
            "sampler.name is given; expected parameters only (all rows of an entry share its"
            " sampler)"
        )
    known = sampling_fields() if "sampling" in out else ()
    for param in out.get("sampling", ()):
        if param not in known:
            raise unknown("sampling parameter", param, known)
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
    if "adapter" in v and (not isinstance(v["adapter"], str) or not v["adapter"]):
        raise bad_value("adapter", v["adapter"], "the name of one of the model's adapters")
    if "span" in v and (not isinstance(v["span"], str) or not v["span"].strip()):
        raise bad_value("span", v["span"], "text such as '20:60'")


_STRICT = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


def writable(tree: Any) -> bool:
    """Return True for plain data that JSON in UTF-8 can hold."""
    if isinstance(tree, str) and tree.isascii():
        return True
    try:
        (tree if isinstance(tree, str) else _STRICT.encode(tree)).encode()
    except (TypeError, ValueError, RecursionError):
        return False
    return True
