"""Parameters of samplers and of their parts: what each takes, and what must hold between them.

    @dataclass(frozen=True)
    class KlassParams(Params):
        kl_threshold: float = number(0.01)
        history: int = integer(2, least=1)

    @register("selector", "klass", params=KlassParams)

A field says what it takes (``param``), as data: listings and pages read it, and ``check_field``
refuses everything else. A ``Rule`` says what must hold between the parameters of a sampler. A part
is a registered object that a parameter names (``part``); ``parts_of`` finds it.

A sampler made of parts (``gen.core.sampler.PartSampler``) has the parameters of all parts that it
can be made of, under one flat name each. Parts that declare the same name share the parameter, so
they must agree on its type and default.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field
from math import inf
from typing import Any, NamedTuple

from gen.core.errors import GenError, bad_value
from gen.core.plain import require_plain
from gen.core.registry import registry

LARGEST = 2**63  # smallest integer that no tensor holds


@dataclass(frozen=True)
class Params:
    """Base of the parameters of one part. Raises ``GenError`` for a value that its field does not
    take."""

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            check_field(f, getattr(self, f.name))

    def check_chosen(self, param: str, part: str) -> None:
        """Checks what holds only where the part is in use: ``sampler.<param>`` is ``part``. Raises
        ``GenError``."""


# --- what a parameter takes


def param(
    default: Any,
    type: type | None = None,
    least: float = -inf,
    most: float = inf,
    *,
    also: Iterable[Any] = (),
    part: str = "",
    of: str = "",
    expected: str = "",
    each: str = "",
) -> Any:
    """Declares a parameter.

    Args:
        default: its default.
        type: int, float, bool or str; None for any value that nothing else refuses.
        least: smallest number. Numbers are finite.
        most: largest number.
        also: values that it takes beside those of its type.
        part: kind of the registered part that it names. A default of None leaves the choice to the
            sampler.
        of: which parts read it, where not every one does: ``init.needs_draft_model`` for parts
            that say so themselves, ``drafter=model`` by name. All of several have to be in use.
        expected: what it takes in words, if not those made of type and bounds.
        each: what one more of it takes memory for, a key of ``gen.core.counts.BYTES``: such counts
            are bounded by the memory that is free.
    """
    also = tuple(also)
    stated: dict[str, Any] = {"type": type, "least": least, "most": most, "also": also, "of": of}
    stated["each"] = each
    if part:
        stated["kind"] = part
    if part or type or also:
        stated["expected"] = expected or _in_words(type, least, most, also)
    return field(default=default, metadata=stated)


def _in_words(kind: type | None, least: float, most: float, also: tuple[Any, ...]) -> str:
    """Say what a parameter takes."""
    if kind is int:
        words = [f"an integer of at least {least}"]
    elif kind is float and most < inf:
        words = [f"a number between {least:g} and {most:g}"]
    elif kind is float and least == -inf:
        words = ["a finite number"]
    elif kind is float:
        words = ["a number above 0" if 0 < least < 1e-6 else f"a number of at least {least:g}"]
    elif kind is bool:
        words = ["true, false" if also else "true or false"]
    else:
        return " or ".join(map(str, also))
    return ", ".join([*words, *map(str, also[:-1])]) + (
        f"{' or' if kind is bool else ', or'} {also[-1]}" if also else ""
    )


def check_field(f: Field, value: Any, owner: str = "sampler") -> None:
    """Refuses a value that a field does not take; ``owner`` is what has the field, for messages.

    Raises:
        GenError: the message names the field.
    """
    stated, name = f.metadata, f"{owner}.{f.name}"
    require_plain(name, value)
    if "expected" not in stated:
        return
    kind = stated["type"]
    if "kind" in stated:
        if (value, f.default) != (None, None):
            registry.get(stated["kind"], value, name)
    elif value not in stated["also"]:
        is_one = kind is not None and isinstance(value, (int, float) if kind is float else kind)
        if is_one and kind in (int, float):
            is_one = stated["least"] <= value <= stated["most"] and abs(value) != inf
            is_one = is_one and (kind is float or abs(value) < LARGEST)
        if not is_one or isinstance(value, bool) != (kind is bool):
            raise bad_value(name, value, stated["expected"])


def integer(default: int, least: int = 0, each: str = "") -> Any:
    """Declares an integer of at least ``least``; ``each`` as of ``param``."""
    return param(default, int, least, each=each)


def number(default: float, least: float = 0.0, most: float = inf) -> Any:
    """Declares a finite number between ``least`` and ``most``, both included."""
    return param(default, float, least, most)


def flag(default: bool) -> Any:
    """Declares true or false."""
    return param(default, bool)


def choice(default: Any, options: Iterable[Any]) -> Any:
    """Declares one of a few words."""
    return param(default, also=options)


def text(default: str, expected: str) -> Any:
    """Declares a string; ``expected`` says what it stands for."""
    return param(default, str, expected=expected)


def part(default: str | None, kind: str, of: str = "") -> Any:
    """Declares the name of a registered part; arguments as of ``param``."""
    return param(default, part=kind, of=of)


def listed(names: str) -> type[object]:
    """Makes a base class that states the order of a sampler's parameters, where its other bases
    declare some of them: a dataclass lists its fields by the first of its bases that has each."""
    return dataclasses.make_dataclass(
        "Listed", [(n, Any, None) for n in names.split()], frozen=True
    )


def draft_model(of: str = "") -> Any:
    """Declares the name of a draft model; ``of`` as of ``param``."""
    expected = "the name of a model, or None for the modality's own"
    return param(None, str, also=(None,), of=of, expected=expected)


# --- what must hold between parameters


class Rule(NamedTuple):
    """What must hold between the parameters of a sampler.

    Attributes:
        param: parameter that is refused otherwise.
        holds: says whether it does, for a sampler.
        expected: what is expected instead, or a function that says so for a sampler. ``{coupling}``
            in it is the value of a parameter, ``{coupling?}`` the names of the parts with which the
            rule would hold, joined by "or"; by commas in ``{coupling?,}``, by "and" in
            ``{coupling?and}``.
        got: says what came instead, where that is more than the value of ``param``.
    """

    param: str
    holds: Callable[[Any], bool]
    expected: str | Callable[[Any], str]
    got: Callable[[Any], str] | None = None

    def refusal(self, sampler: Any) -> GenError:
        """Makes the error for a sampler with which the rule does not hold."""
        expected = self.expected if isinstance(self.expected, str) else self.expected(sampler)
        words = expected.format_map(_Words(self, sampler))
        got = self.got(sampler) if self.got else getattr(sampler, self.param)
        return bad_value(f"sampler.{self.param}", got, words)


class _Words(dict):
    """What the names in ``Rule.expected`` stand for."""

    def __init__(self, rule: Rule, sampler: Any):
        super().__init__(vars(sampler))
        self.rule, self.sampler = rule, sampler

    def __missing__(self, key: str) -> str:
        name, _, separator = key.partition("?")
        known = registry.table(part_kinds(self.sampler)[name])
        between = ", " if separator == "," else f" {separator or 'or'} "
        return between.join(one for one in known if self._holds_with(name, one))

    def _holds_with(self, name: str, value: str) -> bool:
        """Whether the rule holds with another part."""
        other = copy.copy(self.sampler)
        object.__setattr__(other, name, value)
        return self.rule.holds(other)


class Parts:
    """The parts of a sampler: ``parts.coupling`` is what its parameter ``coupling`` names."""

    def __init__(self, sampler: Any):
        self._sampler, self._kinds = sampler, part_kinds(sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._kinds:
            raise AttributeError(f"{name} names no part")
        return registry.get(self._kinds[name], getattr(self._sampler, name), f"sampler.{name}")


def check(sampler: Any) -> None:
    """Refuses a sampler whose parameters break a declaration: those of its fields, of the parts in
    use, or its ``rules``. Raises ``GenError``."""
    for f in dataclasses.fields(sampler):
        check_field(f, getattr(sampler, f.name))
    for name in part_kinds(sampler):
        params = params_of(sampler, name)
        if params is not None:
            params.check_chosen(name, getattr(sampler, name))
    require(sampler, sampler.rules)


def require(sampler: Any, rules: Iterable[Rule]) -> None:
    """Refuses a sampler with which a rule does not hold, the first such rule. Raises
    ``GenError``."""
    for rule in rules:
        if not rule.holds(sampler):
            raise rule.refusal(sampler)


# --- parameters of parts


def part_kinds(declaring: Any) -> dict[str, str]:
    """Kinds of the parts that a dataclass names, by the parameter."""
    fields = dataclasses.fields(declaring)
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


def params_of(sampler: Any, param: str) -> Any:
    """Makes the parameters of the part that ``param`` names; see ``Sampler.params_of``."""
    chosen, values = getattr(sampler, param), vars(sampler)
    params = None if chosen is None else registry.params_of(part_kinds(sampler)[param], chosen)
    if params is None:
        return None
    names = [f.name for f in dataclasses.fields(params)]
    return params(**{name: values[name] for name in names if name in values})


def readers(f: Field, kinds: Mapping[str, str]) -> list[list[tuple[str, str]]]:
    """Parts (kind, name) that read a parameter, as its declaration says (``of``).

    Args:
        f: field of the parameter.
        kinds: kinds of the parts that the sampler names, by the parameter.

    Returns:
        A list for each entry of ``of``: the parameter is read if one of each is in use.
    """
    found = []
    for entry in f.metadata.get("of", "").split():
        param, _, names = entry.partition("=")
        param, _, says = param.partition(".")
        table = registry.table(kinds[param]).items()
        read = [n for n, one in table if n in names.split(",") or (says and getattr(one, says))]
        found.append([(kinds[param], name) for name in read])
    return found
