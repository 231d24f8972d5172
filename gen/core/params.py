"""Parameters that a part of a sampler declares: a frozen dataclass with a check per field.

    @dataclass(frozen=True)
    class KlassParams(Params):
        kl_threshold: float = number(0.01)
        history: int = integer(2, least=1)

    @register("selector", "klass", params=KlassParams)

A sampler made of parts (``gen.core.sampler.PartSampler``) has the parameters of all parts that it
can be made of, under one flat name each. Parts that declare the same name share the parameter, so
they must agree on its type and default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field
from math import inf
from typing import Any

from gen.core.errors import GenError, bad_value
from gen.core.registry import registry

Check = Callable[[str, Any], None]


@dataclass(frozen=True)
class Params:
    """Base of the parameters of one part. Raises ``GenError`` for a value that its field's check
    refuses."""

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            check_field(f, getattr(self, f.name))

    def check_chosen(self, param: str, part: str) -> None:
        """Checks what holds only where the part is in use: ``sampler.<param>`` is ``part``. Raises
        ``GenError``."""


def check_field(f: Field, value: Any) -> None:
    """Checks the value of one parameter. Raises ``GenError`` that names it."""
    if "check" in f.metadata:
        f.metadata["check"](f"sampler.{f.name}", value)


def integer(default: int, least: int = 0) -> Any:
    """Declares an integer of at least ``least``."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise bad_value(name, value, f"an integer of at least {least}")

    return field(default=default, metadata={"check": check})


def optional_integer(least: int = 0) -> Any:
    """Declares None, which is the default, or an integer of at least ``least``."""

    def check(name: str, value: Any) -> None:
        is_integer = isinstance(value, int) and not isinstance(value, bool) and value >= least
        if value is not None and not is_integer:
            raise bad_value(name, value, f"an integer of at least {least}, or None")

    return field(default=None, metadata={"check": check})


def integer_or(default: int, word: str, least: int = 0) -> Any:
    """Declares an integer of at least ``least``, or one word."""

    def check(name: str, value: Any) -> None:
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if value != word and not (is_integer and value >= least):
            raise bad_value(name, value, f"an integer of at least {least}, or {word}")

    return field(default=default, metadata={"check": check})


def number(default: float, least: float = 0.0, most: float = inf) -> Any:
    """Declares a finite number between ``least`` and ``most``, both included."""
    if most < inf:
        expected = f"a number between {least:g} and {most:g}"
    elif 0 < least < 1e-6:
        expected = "a number above 0"
    else:
        expected = f"a number of at least {least:g}"

    def check(name: str, value: Any) -> None:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not least <= value <= most or value == inf:
            raise bad_value(name, value, expected)

    return field(default=default, metadata={"check": check})


def flag(default: bool) -> Any:
    """Declares true or false."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, bool):
            raise bad_value(name, value, "true or false")

    return field(default=default, metadata={"check": check})


def choice(default: str, options: Iterable[str]) -> Any:
    """Declares one of a few words."""
    options = tuple(options)

    def check(name: str, value: Any) -> None:
        if value not in options:
            raise bad_value(name, value, " or ".join(options))

    return field(default=default, metadata={"check": check, "options": options})


def text(default: str, expected: str) -> Any:
    """Declares a string; ``expected`` says what it stands for."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, str):
            raise bad_value(name, value, expected)

    return field(default=default, metadata={"check": check})


def part(default: str | None, kind: str) -> Any:
    """Declares the name of a registered part. A default of None leaves the choice to the
    sampler."""

    def check(name: str, value: Any) -> None:
        if (value, default) != (None, None):
            registry.get(kind, value, name)

    return field(default=default, metadata={"check": check, "kind": kind})


def part_kinds(params: type[Params]) -> dict[str, str]:
    """Kinds of the parts that a dataclass of parameters names, by the parameter."""
    fields = dataclasses.fields(params)
    return {f.name: f.metadata["kind"] for f in fields if "kind" in f.metadata}


def declared(kinds: Iterable[str]) -> dict[str, tuple[Field, list[tuple[str, str]]]]:
    """Collects the parameters that the registered parts of some kinds declare.

    Returns:
        By name, the field and all parts (kind, name) that declare it.

    Raises:
        GenError: two parts declare a name with another type or default.
    """
    found: dict[str, tuple[Field, list[tuple[str, str]]]] = {}
    for kind in kinds:
        for name in registry.table(kind):
            params = registry.params_of(kind, name)
            for f in dataclasses.fields(params) if params else ():
                first, owners = found.setdefault(f.name, (f, []))
                if (first.type, first.default) != (f.type, f.default):
                    raise GenError(
                        f"{kind} {name!r} declares {f.name}: {f.type} = {f.default!r}, and"
                        f" {' '.join(map(repr, owners[0]))} {f.name}: {first.type} ="
                        f" {first.default!r}; expected the same, or another name"
                    )
                owners.append((kind, name))
    return found


def subset(params: type[Params], values: Mapping[str, Any]) -> Params:
    """Makes the parameters of one part from those of the whole sampler."""
    return params(**{f.name: values[f.name] for f in dataclasses.fields(params)})
