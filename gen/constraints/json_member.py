"""Schemas that a value must satisfy together, and their keywords read with checks.

A ``Member`` is one of these schemas. ``$ref``, ``allOf`` and the branches of a combinator make
lists of members out of one schema, so that every list is a conjunction.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from decimal import Decimal
from math import isfinite
from typing import Any

from gen.constraints.budget import Unsupported
from gen.constraints.json_scalars import FORMATS, FREE_FORMATS, INTEGER_FORMATS
from gen.core.errors import GenError, shown, unknown_word

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
REFUSED = (
    "patternProperties",
    "contains",
    "minContains",
    "maxContains",
    "unevaluatedItems",
    "$dynamicRef",
    "$recursiveRef",
)
LISTS = ("enum", "anyOf", "oneOf", "allOf", "prefixItems")
TABLES = ("properties", "dependentRequired", "dependentSchemas", "dependencies")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
NUMBERS = ("minimum", "maximum", "multipleOf")


@dataclass(frozen=True, eq=False)
class Member:
    """Schema of a conjunction.

    Attributes:
        schema: the schema, an object or a boolean.
        pointer: JSON pointer of the schema.
        depth: recursive ``$ref`` around it.
        level: levels of arrays around it that no schema describes.
        is_generated: False for the second language of a difference, see ``json_schema``.
        handled: keywords that other members stand for already.
    """

    schema: Any
    pointer: str
    depth: int = 0
    level: int = 0
    is_generated: bool = True
    handled: frozenset[str] = frozenset()

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes members equal, for tables."""
        return id(self.schema), self.depth, self.level, self.is_generated, self.handled

    def get(self, keyword: str, default: Any = None) -> Any:
        """Return the value of a keyword; the default if it is absent or handled."""
        if keyword in self.handled or not isinstance(self.schema, dict):
            return default
        return self.schema.get(keyword, default)

    def without(self, *keywords: str) -> Member:
        """Return the member with keywords handled."""
        return replace(self, handled=self.handled | {*keywords})

    def child(self, schema: Any, *path: str | int) -> Member:
        """Return a schema inside of the member."""
        steps = [str(step).replace("~", "~0").replace("/", "~1") for step in path]
        return replace(
            self, schema=schema, pointer="/".join([self.pointer, *steps]), handled=frozenset()
        )

    def types(self) -> set[str]:
        """Return the types of values that the schema allows; numbers include integers."""
        named = self.get("type", list(TYPES))
        found = set([named] if isinstance(named, str) else named)
        return found | {"integer"} if "number" in found else found

    def check(self) -> None:
        """Refuse keywords that are not supported, and values that no schema has.

        Raises:
            GenError: with the pointer of the keyword.
        """
        schema = self.schema
        if not isinstance(schema, dict):
            raise self.malformed("", schema, "an object or a boolean")
        for keyword in REFUSED:
            if keyword in schema:
                raise self.refused(keyword)
        named = schema.get("type", "null")
        for name in named if isinstance(named, list) else [named]:
            if name not in TYPES:
                raise GenError(str(unknown_word(str(name), TYPES, f"{self.pointer}/type")))
        self._check_shapes(schema)
        name = schema.get("format")
        if name is not None and not isinstance(name, str):
            raise self.malformed("format", name, "the name of a format")
        if name is not None and name not in {*FORMATS, *FREE_FORMATS, *INTEGER_FORMATS}:
            raise self.refused("format", f" {shown(name)}")

    def _check_shapes(self, schema: dict[str, Any]) -> None:
        for keyword in LISTS:
            if keyword in schema and not (isinstance(schema[keyword], list) and schema[keyword]):
                raise self.malformed(keyword, schema[keyword], "a list that is not empty")
        for keyword in TABLES:
            if not isinstance(schema.get(keyword, {}), dict):
                raise self.malformed(keyword, schema[keyword], "an object")
        for keyword in COUNTS:
            value = schema.get(keyword, 0)
            if not _is_number(value) or value < 0 or value != int(value):
                raise self.malformed(keyword, value, "an integer of at least 0")
        for keyword in NUMBERS:
            if not _is_number(schema.get(keyword, 1)):
                raise self.malformed(keyword, schema[keyword], "a number")
        for keyword in ("exclusiveMinimum", "exclusiveMaximum"):
            value = schema.get(keyword, 1)
            if not (_is_number(value) or isinstance(value, bool)):  # a boolean in draft 4
                raise self.malformed(keyword, value, "a number")
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(n, str) for n in required):
            raise self.malformed("required", required, "a list of names")
        if not isinstance(schema.get("pattern", ""), str):
            raise self.malformed("pattern", schema["pattern"], "a text")
        divisor = schema.get("multipleOf", 1)
        if divisor != int(divisor) or not 0 < divisor <= 10_000:
            raise self.refused("multipleOf", f" {divisor} (supported: integers of 1 to 10,000)")

    def refused(self, keyword: str, more: str = "") -> GenError:
        """Return the error of a keyword that is not supported."""
        return Unsupported(
            f"the schema has {keyword}{more} at {self.pointer}/{keyword}, which the automaton does"
            " not support; expected a schema without it, or the engine llguidance"
        )

    def malformed(self, keyword: str, value: Any, expected: str) -> GenError:
        """Return the error of a keyword with a wrong value."""
        where = f"{self.pointer}/{keyword}" if keyword else self.pointer
        return GenError(f"the schema at {where} is {shown(value)}; expected {expected}")

    def bound(self, side: str) -> tuple[Decimal, bool] | None:
        """Return the bound of numbers, and True where they may equal it.

        Args:
            side: ``imum`` keyword without its prefix: ``min`` or ``max``.
        """
        inclusive, exclusive = self.get(f"{side}imum"), self.get(f"exclusive{side.title()}imum")
        found = []
        if inclusive is not None:
            found.append((_decimal(inclusive), exclusive is not True))  # draft 4: a boolean
        if exclusive is not None and not isinstance(exclusive, bool):
            found.append((_decimal(exclusive), False))
        size = INTEGER_FORMATS.get(self.get("format"), 0) if self.is_generated else 0
        if size:
            found.append((Decimal(-size if side == "min" else size - 1), True))
        return tightest(found, side)


def tightest(
    bounds: Iterable[tuple[Decimal, bool] | None], side: str
) -> tuple[Decimal, bool] | None:
    """Return the bound that leaves the fewest numbers. ``side``: ``min`` or ``max``."""
    sign = 1 if side == "min" else -1
    found = [bound for bound in bounds if bound is not None]
    return max(found, key=lambda bound: (sign * bound[0], not bound[1]), default=None)


def _is_number(value: Any) -> bool:
    if isinstance(value, float):
        return isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _decimal(value: Any) -> Decimal:
    return Decimal(str(value))
