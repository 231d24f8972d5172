"""YAML of job files, overrides and cells of tables: strict, and bounded before values are built.

The reader takes YAML 1.1 with ``1e-4`` as a number, and with ``20:50`` and ``2026-01-01`` as texts.
It refuses a key that comes twice, nesting beyond ``DEEPEST`` and aliases that multiply beyond
``ALIASED`` characters. ``find_problem`` reads the events of the parser, so a refused file costs
the memory of its text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

try:  # the parsers in C are optional parts of PyYAML
    from yaml import CSafeDumper as SafeDumper
    from yaml import CSafeLoader as SafeLoader
except ImportError:
    from yaml import SafeDumper, SafeLoader

from gen.core.errors import GenError

DEEPEST = 100  # lists and mappings inside of each other
ALIASED = 10_000_000  # characters of text that the aliases of a file may stand for, together
VALUES = 1_000_000  # values inside of one row
VALUE_SIZE = 8  # characters that a value counts for, beside those of its text
INTEGER = r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*)"
FLOAT = (
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)"
)
UNREAD = ("timestamp", "value", "int", "float")  # tags of YAML 1.1 that are read otherwise here


def _resolvers(kept: Mapping[str, list]) -> dict[str, list]:
    """Return the rules that give plain scalars their types."""
    tags = {f"tag:yaml.org,2002:{name}" for name in UNREAD}
    rules = {k: [r for r in v if r[0] not in tags] for k, v in kept.items()}
    for tag, pattern, first in (
        ("int", INTEGER, "-+0123456789"),
        ("float", FLOAT, "-+0123456789."),
    ):
        for letter in first:
            rules.setdefault(letter, []).append(
                (f"tag:yaml.org,2002:{tag}", re.compile(f"(?:{pattern})$"))
            )
    return rules


class _Loader(SafeLoader):
    """Loader of plain data."""

    yaml_implicit_resolvers = _resolvers(yaml.SafeLoader.yaml_implicit_resolvers)


class _Dumper(SafeDumper):
    """Dumper that quotes each text that the loader would read as something else."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

    def ignore_aliases(self, data: Any) -> bool:
        return True


def load_yaml(text: str) -> Any:
    """Read one YAML document as plain data.

    Raises:
        GenError: no YAML, more than one document, or a document beyond the bounds.
    """
    try:
        problem = find_problem(text)
        if problem is not None:
            raise GenError(problem)
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        if "nesting depth" in str(error):  # the parser's own bound, from PyYAML 6.0.4 on
            raise GenError(_too_deep(error.problem_mark.line)) from error
        raise GenError(" ".join(str(error).split())) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits
        if isinstance(error, GenError):
            raise
        raise GenError(f"a value cannot be read: {' '.join(str(error).split())}") from error


def dump_yaml(tree: Any) -> str:
    """Format plain data as YAML that ``load_yaml`` reads back."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000)


@dataclass
class _Frame:
    """List or mapping that the parser is in.

    Attributes:
        anchor: name of the node, for aliases.
        is_mapping: False for a list.
        size: characters, aliases expanded.
        count: nodes read so far; in a mapping, keys and values in turn.
    """

    anchor: str | None
    is_mapping: bool
    keys: set[str]
    size: int = VALUE_SIZE
    count: int = 0


def _too_deep(line: int) -> str:
    """Say that the text nests too deeply at a line, counted from 0."""
    return (
        f"line {line + 1}: lists and mappings nest more than {DEEPEST} deep; expected at most"
        f" {DEEPEST}"
    )


def find_problem(text: str) -> str | None:
    """Return the reason why a YAML text is refused, or None. Builds no values.

    Raises:
        yaml.YAMLError: the text is no YAML.
    """
    stack: list[_Frame] = []
    sizes: dict[str, int | None] = {}  # of anchors; None while the node is open
    aliased = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            stack.append(_Frame(event.anchor, isinstance(event, yaml.MappingStartEvent), set()))
            if len(stack) > DEEPEST:
                return _too_deep(event.start_mark.line)
            if event.anchor:
                sizes[event.anchor] = None
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            closed = stack.pop()
            size, anchor = closed.size, closed.anchor
        elif isinstance(event, yaml.ScalarEvent):
            size, anchor = VALUE_SIZE + len(event.value), event.anchor
            twice = _repeats(stack, event)
            if twice:
                return twice
        elif isinstance(event, yaml.AliasEvent):
            known = sizes.get(event.anchor or "", VALUE_SIZE)  # the composer refuses unknown ones
            if known is None:
                return f"line {event.start_mark.line + 1}: *{event.anchor} stands inside of itself"
            size, anchor = known, None
            aliased += size
        else:
            continue
        if anchor:
            sizes[anchor] = size
        if stack:
            stack[-1].size += size
            stack[-1].count += 1
        if aliased > ALIASED:
            return (
                f"line {event.start_mark.line + 1}: the aliases stand for {aliased:,} characters;"
                f" expected at most {ALIASED:,}"
            )
    return None


def _repeats(stack: list[_Frame], event: yaml.ScalarEvent) -> str | None:
    """Note a scalar that is a key; return a message for one that comes twice."""
    if not stack or not stack[-1].is_mapping or stack[-1].count % 2 or event.value == "<<":
        return None
    if event.value in stack[-1].keys:
        return f"line {event.start_mark.line + 1}: key {event.value!r} comes twice"
    stack[-1].keys.add(event.value)
    return None


def check_bounds(tree: Any, name: str) -> None:
    """Check the depth and the number of values of plain data.

    Args:
        tree: lists, mappings and values; shared parts count as often as they stand there.
        name: of the tree, for the message.

    Raises:
        GenError: deeper than ``DEEPEST``, or more than ``VALUES`` values.
    """
    todo, seen = [(tree, 1)], 0
    while todo:
        value, depth = todo.pop()
        if isinstance(value, (Mapping, list, tuple)):
            inner = list(value.values() if isinstance(value, Mapping) else value)
            if depth > DEEPEST:
                raise GenError(
                    f"{name} nests lists and objects more than {DEEPEST} deep; expected at most"
                    f" {DEEPEST}"
                )
            seen += len(inner)
            if seen > VALUES:
                raise GenError(f"{name} holds {seen:,} values or more; expected at most {VALUES:,}")
            todo += [(v, depth + 1) for v in inner if isinstance(v, (Mapping, list, tuple))]
