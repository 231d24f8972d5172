"""Checksums of what a job writes: every line of the ledger and of the plan carries one, so that
damage is found where it is, and named with file and line.

A line of the ledger ends with ``"crc"``, the CRC-32 of the row without it. The last line of a plan
holds the CRC-32 of every line before it, and of itself. A checksum guards against bits that flip
and lines that are cut; a writer of such files can make the checksums too, so the values
behind them are looked at as well.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from zlib import crc32

from gen.core.errors import GenError

Row = dict[str, Any]
NUMBERS = (int, (int, float))
END = re.compile(rb', "crc": "([0-9a-f]{8})"\}')
EMPTY = b"{}"
SIZE = len(', "crc": "00000000"}')  # bytes that a line has more than its row
SUMS = re.compile(rb'"lines": "((?:[0-9a-f]{8})+)"\}')


class Damaged(GenError):
    """Raised for a file of a job that is not what gen wrote into it."""

    def __init__(self, path: Path, number: int, what: str, hint: str):
        super().__init__(f"{path}, line {number} is damaged: {what}; {hint}")
        self.path, self.line, self.what = path, number, what


# --- rows


def seal(row: Row) -> bytes:
    """Encode a row as one line of JSON with its checksum; an empty one needs none."""
    if not row:
        return EMPTY + b"\n"
    text = json.dumps(row, ensure_ascii=False).encode(errors="replace")
    return b'%s, "crc": "%08x"}\n' % (text[:-1], crc32(text))


def unseal(line: bytes) -> bytes | None:
    """Return the JSON of a line without its checksum; None if it does not fit."""
    if line == EMPTY:
        return line
    body, end = line[:-SIZE] + b"}", END.fullmatch(line[-SIZE:])
    return body if end and end[1] == b"%08x" % crc32(body) else None


ALL = {"id": str, "index": int}
FINISHED = {**ALL, "modality": str, "prompt": str, "sampler": str, "seed": int}
NEEDED = {
    "due": ALL,
    "failed": {**FINISHED, "error": str},
    "ok": {**FINISHED, "file": str, "sha256": str},
}
DIGESTS = ("shard_sha256", "beside_sha256", "trace_sha256")  # of files, in hexadecimal digits
OPTIONAL = {
    **dict.fromkeys(("attempt", "turn", "bytes", "nfe", "tokens", "tokens_computed", "batch"), int),
    **dict.fromkeys(("mean_acceptance_length", "draft_acceptance_rate", "seconds"), (int, float)),
    **dict.fromkeys(("model", "adapter", "guarantee", "worker", "tokens_file", *DIGESTS), str),
    **dict.fromkeys(("condition", "overrides", "meta", "decoded_with", "search"), dict),
    "also": list,
}
NAMES = {
    str: "a text",
    int: "an integer",
    (int, float): "a number",
    dict: "an object",
    list: "a list",
}


def problem_of(row: Any) -> str | None:
    """Return the first thing that is wrong with a row; None if nothing is."""
    if not isinstance(row, dict):
        return f"it holds a {type(row).__name__}; expected an object"
    status = row.get("status")
    if not isinstance(status, str) or status not in NEEDED:
        return f"status is {str(status)[:80]!r}; expected {', '.join(NEEDED)}"
    wrong = missing_from(row, NEEDED[status])
    optional = {k: kind for k, kind in OPTIONAL.items() if row.get(k) is not None}
    if "member" in row:
        optional["member"] = str
    return wrong or missing_from(row, optional)


def missing_from(tree: Row, needed: dict[str, Any]) -> str | None:
    """Name the first key that an object lacks, or that holds another type."""
    for key, kind in needed.items():
        value = tree.get(key)
        if not isinstance(value, kind) or (kind in NUMBERS and isinstance(value, bool)):
            said = f"is {str(value)[:80]!r}" if key in tree else "is missing"
            return f"{key} {said}; expected {NAMES[kind]}"
    return None


def parse(text: bytes) -> tuple[Any, str | None]:
    """Parse JSON.

    Returns:
        The value, and what is wrong with it: no JSON, nested too deeply, or a text with half a
        surrogate pair, which no file can hold.
    """
    try:
        tree = json.loads(text)
        if b"\\u" in text:
            json.dumps(tree, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return None, "it holds half a surrogate pair"
    except ValueError as error:
        return None, f"it is not JSON ({error})"
    except RecursionError:
        return None, "it is nested too deeply"
    return tree, None


# --- plans

PLAN_NEEDED = {
    "fingerprint": str,
    "items": list,
    "shards": list,
    "relevant": dict,
    "labels": list,
    "made_with": dict,
}
ITEM_NEEDED = {
    "id": str,
    "index": int,
    "entry": int,
    "prompt": str,
    "seed": int,
    "stem": str,
}


def plan_text(plan: dict[str, Any]) -> bytes:
    """Encode a plan with its checksums; one item per line, for people who look."""
    head = {k: v for k, v in plan.items() if k not in ("items", "shards")}
    items = ",\n".join(json.dumps(i, ensure_ascii=False) for i in plan["items"])
    shards = json.dumps(plan["shards"])
    text = f'{json.dumps(head, ensure_ascii=False)[:-1]},\n"items": [\n{items}\n],\n'.encode()
    text += f'"shards": {shards},'.encode()
    sums = b"".join(b"%08x" % crc32(line) for line in text.split(b"\n"))
    return b'%s\n"lines": "%s%08x"}\n' % (text, sums, crc32(sums))


def parse_plan(path: Path, data: bytes) -> dict[str, Any]:
    """Parse a plan. Raises ``Damaged`` with the line for one that is not as it was written."""

    def damaged(number: int, what: str) -> Damaged:
        hint = "gen run with the same job makes the plan again"
        return Damaged(path, number, what, hint)

    *lines, last, rest = data.split(b"\n") if b"\n" in data else (data, b"")
    said = SUMS.fullmatch(last)
    if said is None or rest or said[1][-8:] != b"%08x" % crc32(said[1][:-8]):
        raise damaged(len(lines) + 1, "it has no checksum of the lines before it")
    sums = [said[1][i : i + 8] for i in range(0, len(said[1]) - 8, 8)]
    for number, line in enumerate(lines, 1):
        if number > len(sums) or b"%08x" % crc32(line) != sums[number - 1]:
            raise damaged(number, "its checksum does not fit")
    if len(lines) != len(sums):
        raise damaged(len(lines), f"{len(sums) - len(lines)} lines behind it are missing")
    plan, wrong = parse(data)
    wrong = wrong or missing_from(plan, PLAN_NEEDED)
    if wrong:
        raise damaged(1, wrong)
    for number, item in enumerate(plan["items"]):
        wrong = problem_of_item(item, number, len(plan["labels"]))
        if wrong:
            raise damaged(number + 3, wrong)
    if not all(
        isinstance(s, list) and len(s) == 2 and all(isinstance(n, int) for n in s)
        for s in plan["shards"]
    ):
        raise damaged(len(lines), "shards are not pairs of integers")
    return {k: v for k, v in plan.items() if k != "lines"}


def problem_of_item(item: Any, index: int, entries: int) -> str | None:
    """Return the first thing that is wrong with an item of a plan; None if nothing is."""
    if not isinstance(item, dict):
        return f"it holds a {type(item).__name__}; expected an object"
    wrong = missing_from(item, ITEM_NEEDED)
    if wrong:
        return wrong
    if item["index"] != index or not 0 <= item["entry"] < entries:
        return f"index {item['index']} of entry {item['entry']} cannot be; expected index {index}"
    for key in ("stem", "id"):  # of files of the folder
        if item[key] in ("", ".", "..") or re.search(r"[/\\\0]", item[key]):
            return f"{key} is {item[key]!r}; expected the name of a file"
    return None
