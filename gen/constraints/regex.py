"""Regular expressions as automata over the bytes of UTF-8.

Python's own parser reads the pattern, so the syntax is that of ``re``. The language of a pattern
is that of ``re.fullmatch`` with the flag ``re.ASCII``: ``\\d``, ``\\w`` and ``\\s`` stand for
characters of ASCII. Flags ``a``, ``i``, ``s`` and ``x`` at the start of a pattern or a group count.
Greedy and lazy repetitions are the same language. What is no regular language, or looks around,
is refused by name.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from gen.constraints.budget import Unsupported, check
from gen.constraints.byte_dfa import ByteDFA, concat, empty, literal, union
from gen.constraints.characters import LAST, Ranges, characters, merged, others
from gen.core.errors import GenError, bad_type, shown

DIGITS = ((ord("0"), ord("9")),)
WORDS = (*DIGITS, (ord("A"), ord("Z")), (ord("_"), ord("_")), (ord("a"), ord("z")))
SPACES = ((9, 13), (32, 32))
CATEGORIES: dict[str, Ranges] = {
    "CATEGORY_DIGIT": DIGITS,
    "CATEGORY_NOT_DIGIT": others(DIGITS),
    "CATEGORY_WORD": WORDS,
    "CATEGORY_NOT_WORD": others(WORDS),
    "CATEGORY_SPACE": SPACES,
    "CATEGORY_NOT_SPACE": others(SPACES),
}
STARTS, ENDS = {"AT_BEGINNING", "AT_BEGINNING_STRING"}, {"AT_END", "AT_END_STRING"}
REFUSED = {
    "GROUPREF": "a back-reference",
    "GROUPREF_EXISTS": "a condition on a group",
    "ASSERT": "look-around",
    "ASSERT_NOT": "look-around",
    "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive repetition",
}
Items = Sequence[tuple[Any, Any]]


def regex(pattern: str, *, search: bool = False) -> ByteDFA:
    """Return the language of a regular expression.

    Args:
        pattern: expression in the syntax of ``re``. ``^`` and ``$`` may stand at the ends of the
            text alone.
        search: accept texts that contain a match, as ``re.search`` does, not matches alone.

    Raises:
        GenError: the pattern cannot be parsed, or is no regular expression in the strict sense.
    """
    if not isinstance(pattern, str):
        raise bad_type("regex", pattern, "a text")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # sets of sets, which `re` may add
            tree = _parser().parse(pattern)
    except re.error as error:
        where = "" if error.pos is None else f" at position {error.pos}"
        if "\n" in pattern:
            where = f" at line {error.lineno}, column {error.colno}"
        raise GenError(f"regex {shown(pattern)} cannot be parsed{where}: {error.msg}") from None
    except (OverflowError, RecursionError) as error:
        raise GenError(f"regex {shown(pattern)} cannot be parsed: {error}") from None
    flags = tree.state.flags
    if flags & re.MULTILINE:
        raise _refused(pattern, "the flag m", "flags a, i, s and x")
    reader = _Reader(pattern, search)
    return reader.sequence(list(tree), flags, reader.around, reader.around)


def _parser() -> Any:
    """Return the parser of ``re``: the module is the standard library's, but has no public name."""
    return import_module("re._parser")


def _refused(pattern: str, found: str, expected: str) -> GenError:
    return Unsupported(f"regex {shown(pattern)} has {found}; expected {expected}")


Around = ByteDFA | None


class _Reader:
    """Languages of the nodes of a parsed pattern.

    ``before`` and ``after`` of a node are the texts that a search may skip at its side. They are
    None for a node inside of the pattern, where an anchor cannot be.
    """

    def __init__(self, pattern: str, search: bool):
        self.pattern = pattern
        self.around = characters([(0, LAST)]).star() if search else empty()
        self.nodes: dict[str, Callable[[Any, int, Around, Around], ByteDFA]] = {
            "LITERAL": lambda code, flags, *_: characters(_folded([(code, code)], flags)),
            "NOT_LITERAL": lambda code, flags, *_: characters(
                others(_folded([(code, code)], flags))
            ),
            "ANY": lambda _, flags, *__: characters(
                [(0, LAST)] if flags & re.DOTALL else others([(10, 10)])
            ),
            "IN": lambda members, flags, *_: characters(self.members(members, flags)),
            "BRANCH": self.branch,
            "SUBPATTERN": self.group,
            "MAX_REPEAT": self.repeat,
            "MIN_REPEAT": self.repeat,
        }

    def sequence(self, items: Items, flags: int, before: Around, after: Around) -> ByteDFA:
        """Return the language of nodes one after the other."""
        while before and items and _is_anchor(items[0], STARTS):
            items, before = items[1:], empty()
        while after and items and _is_anchor(items[-1], ENDS):
            items, after = items[:-1], empty()
        # a node with anchors decides by itself what may be skipped
        anchored_first, anchored_last = (bool(items) and _has_anchors(items[i]) for i in (0, -1))
        parts = [before] if before and not anchored_first else []
        text = ""
        for i, (op, value) in enumerate(items):
            check()
            if str(op) == "LITERAL" and not flags & re.IGNORECASE and not _is_surrogate(value):
                text += chr(value)
                continue
            if text:
                parts.append(literal(text.encode()))
                text = ""
            is_first, is_last = i == 0 and anchored_first, i == len(items) - 1 and anchored_last
            around = before if is_first else None, after if is_last else None
            parts.append(self.node(op, value, flags, *around))
        if text:
            parts.append(literal(text.encode()))
        return concat(*parts, after) if after and not anchored_last else concat(*parts)

    def node(self, op: Any, value: Any, flags: int, before: Around, after: Around) -> ByteDFA:
        """Return the language of one node."""
        name = str(op)
        if name in REFUSED:
            raise _refused(self.pattern, REFUSED[name], "an expression without any")
        if name == "AT":
            words = {"AT_BOUNDARY": "\\b", "AT_NON_BOUNDARY": "\\B"}
            found = words.get(str(value), "^" if str(value) in STARTS else "$")
            expected = "^ at the start and $ at the end of the text alone"
            raise _refused(self.pattern, f"{found} inside", expected)
        return self.nodes[name](value, flags, before, after)

    def branch(self, value: Any, flags: int, before: Around, after: Around) -> ByteDFA:
        """Return the language of alternatives."""
        return union(*(self.sequence(list(items), flags, before, after) for items in value[1]))

    def group(self, value: Any, flags: int, before: Around, after: Around) -> ByteDFA:
        """Return the language of a group."""
        _, added, removed, items = value
        if added & re.MULTILINE:
            raise _refused(self.pattern, "the flag m", "flags a, i, s and x")
        return self.sequence(list(items), (flags | added) & ~removed, before, after)

    def repeat(self, value: Any, flags: int, before: Around, after: Around) -> ByteDFA:
        """Return the language of a repetition, which has no anchors."""
        least, most, items = value
        once = self.sequence(list(items), flags, None, None)
        return once.repeat(least, None if str(most) == "MAXREPEAT" else most)

    def members(self, members: Items, flags: int) -> Ranges:
        """Return the characters of a set."""
        found: list[tuple[int, int]] = []
        negated = False
        for op, value in members:
            if str(op) == "NEGATE":
                negated = True
            elif str(op) == "LITERAL":
                found.append((value, value))
            elif str(op) == "RANGE":
                found.append(value)
            else:
                found += CATEGORIES[str(value)]
        folded = _folded(found, flags)
        return others(folded) if negated else folded


def _folded(ranges: Sequence[tuple[int, int]], flags: int) -> Ranges:
    """Return ranges with the other case of their letters where the case is ignored."""
    found = list(ranges)
    if flags & re.IGNORECASE:
        for first, last in ranges:
            for low, high, shift in ((65, 90, 32), (97, 122, -32)):
                if first <= high and last >= low:
                    found.append((max(first, low) + shift, min(last, high) + shift))
    return merged(found)


def _is_surrogate(code: int) -> bool:
    return 0xD800 <= code <= 0xDFFF


def _is_anchor(item: tuple[Any, Any], names: set[str]) -> bool:
    return str(item[0]) == "AT" and str(item[1]) in names


def _has_anchors(item: tuple[Any, Any]) -> bool:
    """Return True for an anchor, and for a group with alternatives that have one."""
    op, value = str(item[0]), item[1]
    if op == "AT":
        return True
    if op == "SUBPATTERN":
        return any(_has_anchors(i) for i in value[-1])
    if op == "BRANCH":
        return any(_has_anchors(i) for items in value[1] for i in items)
    return False
