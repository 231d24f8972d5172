"""JSON schemas as automata over bytes.

``schema_dfa`` reads a schema into the regular language of texts that satisfy it. Every accepted
text is valid. Of the valid texts, the language has those in this form:

* Properties come in the order of the schema, required ones that it does not declare at the end.
  Properties that it does not list are written only where ``additionalProperties`` is a schema with
  keywords, after the others; where it is absent or true, none are.
* At most one space stands after ``:`` and ``,``; there is no other white space between tokens.
* Arrays that no schema describes have at most ``ANY_DEPTH`` levels, and such objects are ``{}``.
* Recursive ``$ref`` are unrolled: at most ``max_depth`` of them stand inside each other.
* ``json_scalars`` says how strings and numbers are spelled.

``oneOf``, ``not`` and ``if`` are differences of languages. The second language of a difference has
all texts of the first one that satisfy more schemas: those schemas never cut recursions, and their
formats do not count.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from urllib.parse import unquote

from gen.constraints.budget import Unsupported, check, require_bytes
from gen.constraints.byte_dfa import ByteDFA, any_of, difference, nothing, union
from gen.constraints.json_containers import array_language, object_language
from gen.constraints.json_member import TYPES, Member
from gen.constraints.json_scalars import spelled, value_language
from gen.constraints.json_typed import (
    CONTAINER_KEYWORDS,
    scalar_holds,
    scalar_language,
    type_of,
)
from gen.core.errors import GenError, bad_value
from gen.core.plain import is_digits

MAX_DEPTH = 3  # recursive $ref inside each other
NO_SCHEMAS = ("const", "default", "enum", "example", "examples")  # their values are data


class Mode(NamedTuple):
    """Spelling of a language, see the module.

    Attributes:
        is_canonical: every value has one spelling.
        is_over: the language is the second one of a difference.
    """

    is_canonical: bool = False
    is_over: bool = False


OVER = Mode(True, True)
Members = tuple[Member, ...]


def schema_dfa(schema: dict[str, Any] | bool, *, max_depth: int = MAX_DEPTH) -> ByteDFA:
    """Return the texts that satisfy a JSON schema, see the module.

    Args:
        schema: the schema, as ``json.loads`` returns it.
        max_depth: recursive ``$ref`` that may stand inside each other.

    Raises:
        GenError: the schema is malformed, has keywords that are not supported, is satisfied by no
            text, or needs too large an automaton.
    """
    if not isinstance(max_depth, int) or isinstance(max_depth, bool) or max_depth < 1:
        raise bad_value("max_depth", max_depth, "an integer of at least 1")
    if not isinstance(schema, (dict, bool)):
        raise bad_value("json_schema", schema, "an object or a boolean")
    compiler = _Compiler(schema, max_depth)
    try:
        language = compiler.language((Member(schema, "#"),), Mode())
    except RecursionError:
        raise Unsupported(
            "the schema is nested too deeply, or has a $ref to itself without a value in between;"
            " expected fewer levels, and such a $ref inside of properties or items"
        ) from None
    if language.is_empty:
        first = compiler.unsatisfied[0] if compiler.unsatisfied else "#"
        is_cut = any(is_recursive for _, is_recursive in compiler.targets.values())
        depth = f" with at most {max_depth} recursive $ref inside each other" if is_cut else ""
        raise GenError(
            f"the schema is satisfied by no text: {first} has no value{depth}; expected a schema"
            " that a text can satisfy"
        )
    return language


class _Compiler:
    """Languages of conjunctions of schemas, each made once.

    Attributes:
        unsatisfied: pointers of schemas that no value satisfies, inner ones first.
    """

    def __init__(self, root: Any, max_depth: int):
        self.root, self.max_depth = root, max_depth
        self.unsatisfied: list[str] = []
        self.found: dict[tuple[Any, ...], ByteDFA] = {}
        self.held = 0  # bytes of their tables
        self.targets: dict[str, tuple[Any, bool]] = {}
        self.checked: set[int] = set()
        self.made: dict[tuple[int, str], list[Any]] = {}
        self.combinators = {
            "anyOf": self.any_of,
            "oneOf": self.one_of,
            "not": self.is_not,
            "if": self.conditional,
        }

    def language(self, members: Sequence[Member], mode: Mode) -> ByteDFA:
        """Return the values that satisfy all members; see ``Mode``."""
        flat = self.flat(members)
        if flat is None:
            return nothing()
        key = (tuple(m.key for m in flat), mode)
        if key not in self.found:
            self.found[key] = made = self.combined(flat, mode)
            self.held += made.next.nbytes
            require_bytes(self.held)
        return self.found[key]

    def flat(self, members: Sequence[Member]) -> Members | None:
        """Return members without ``$ref``, ``allOf`` and dependencies; None if one is false."""
        found: dict[tuple[Any, ...], Member] = {}
        for m in members:
            check()
            if m.schema is True:
                continue
            if m.schema is False or (m.is_generated and m.depth > self.max_depth):
                return None
            if id(m.schema) not in self.checked:
                m.check()
                self.checked.add(id(m.schema))
            inner = self.parts(m)
            if inner is None:
                found[m.key] = m
                continue
            deeper = self.flat(inner)
            if deeper is None:
                return None
            found |= {part.key: part for part in deeper}
        return tuple(found.values())

    def parts(self, m: Member) -> Members | None:
        """Return the members that one stands for; None if it is one itself."""
        if m.get("$ref") is not None:
            target, is_recursive = self.target(m)
            other = replace(
                m,
                schema=target,
                pointer=m.get("$ref"),
                depth=m.depth + is_recursive,
                handled=frozenset(),
            )
            return m.without("$ref"), other
        if m.get("allOf") is not None:
            branches = (m.child(b, "allOf", n) for n, b in enumerate(m.get("allOf")))
            return m.without("allOf"), *branches
        if isinstance(m.get("not"), dict) and set(m.get("not")) == {"not"}:
            return m.without("not"), m.child(m.get("not")["not"], "not", "not")
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            if m.get(keyword) is not None:
                clauses = self.made.setdefault(
                    (id(m.schema), keyword), [_clause(*pair) for pair in m.get(keyword).items()]
                )
                return m.without(keyword), *(m.child(clause, keyword) for clause in clauses)
        return None

    def target(self, m: Member) -> tuple[Any, bool]:
        """Return the schema of a ``$ref``, and True if it can contain itself.

        Raises:
            GenError: the schema has no such part.
        """
        name = str(m.get("$ref"))
        if name not in self.targets:
            schema = self.resolve(m.get("$ref"), m.pointer)
            reached, waiting = set(), [schema]
            while waiting:
                for other in _references(waiting.pop()):
                    if other not in reached:
                        reached.add(other)
                        waiting.append(self.resolve(other, m.pointer))
            self.targets[name] = schema, name in reached
        return self.targets[name]

    def resolve(self, name: Any, pointer: str) -> Any:
        """Return the part of the schema that a ``$ref`` names."""
        wrong = GenError(
            f"the schema has $ref {name!r} at {pointer}/$ref; expected #, or # and the JSON pointer"
            " of a part of the schema, such as #/$defs/address"
        )
        if not isinstance(name, str) or not (name == "#" or name.startswith("#/")):
            raise wrong
        found = self.root
        for step in name.split("/")[1:]:
            step = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and is_digits(step) and int(step) < len(found):
                found = found[int(step)]
            elif isinstance(found, dict) and step in found:
                found = found[step]
            else:
                raise wrong
        return found

    def combined(self, members: Members, mode: Mode) -> ByteDFA:
        """Return the language of members without ``$ref`` and ``allOf``."""
        for keyword, rule in self.combinators.items():
            for i, m in enumerate(members):
                if m.get(keyword) is not None:
                    rest = (*members[:i], m.without(keyword), *members[i + 1 :])
                    return rule(m, rest, mode)
        if not any(m.is_generated for m in members):
            members = (*members, Member({}, members[0].pointer if members else "#"))
        found = self.plain(members, mode)
        if found.is_empty and not mode.is_over:
            self.unsatisfied.append(next(m.pointer for m in members if m.is_generated))
        return found

    def any_of(self, m: Member, rest: Members, mode: Mode) -> ByteDFA:
        """Return the language of ``anyOf``: values that satisfy a branch."""
        branches = [m.child(b, "anyOf", n) for n, b in enumerate(m.get("anyOf"))]
        return union(*(self.language((*rest, b), mode) for b in branches))

    def one_of(self, m: Member, rest: Members, mode: Mode) -> ByteDFA:
        """Return the language of ``oneOf``: values that satisfy exactly one branch."""
        branches = [m.child(b, "oneOf", n) for n, b in enumerate(m.get("oneOf"))]
        found = []
        for branch in branches:
            members = (*rest, branch)
            others = [b for b in branches if b is not branch and not mode.is_over]
            found.append(self.without(members, [[b] for b in others], mode))
        return union(*found)

    def is_not(self, m: Member, rest: Members, mode: Mode) -> ByteDFA:
        """Return the language of ``not``: values that do not satisfy the schema."""
        refused = [] if mode.is_over else [[m.child(m.get("not"), "not")]]
        return self.without(rest, refused, mode)

    def conditional(self, m: Member, rest: Members, mode: Mode) -> ByteDFA:
        """Return the language of ``if`` with ``then`` and ``else``."""
        asked = m.child(m.get("if"), "if")
        then, otherwise = m.child(m.get("then", True), "then"), m.child(m.get("else", True), "else")
        yes = self.language((*rest, asked, then), mode)
        refused = [] if mode.is_over else [[asked]]
        return union(yes, self.without((*rest, otherwise), refused, mode))

    def without(self, members: Members, refused: Sequence[Sequence[Member]], mode: Mode) -> ByteDFA:
        """Return values that satisfy members and none of the refused conjunctions.

        Only where some value satisfies both, the language is a difference, and thereby canonical.
        """
        overlaps = []
        for others in refused:
            hidden = (replace(m, is_generated=False) for m in others)
            overlap = self.language((*members, *hidden), OVER)
            if not overlap.is_empty:
                overlaps.append(overlap)
        if not overlaps:
            return self.language(members, mode)
        return difference(self.language(members, Mode(True, mode.is_over)), union(*overlaps))

    def plain(self, members: Members, mode: Mode) -> ByteDFA:
        """Return the language of members without combinators."""
        if any(m.get(k, m) is not m for m in members for k in ("enum", "const")):
            values = self.values(members)
            scalars = [spelled(v).encode() for v in values if not isinstance(v, (list, dict))]
            others = [value_language(v) for v in values if isinstance(v, (list, dict))]
            return union(any_of(scalars), *others)
        kinds = set(TYPES).intersection(*(m.types() for m in members))
        if "number" in kinds:
            kinds.remove("integer")
        found = []
        for kind in sorted(kinds):
            if kind == "array":
                found.append(array_language(members, lambda inner: self.language(inner, mode)))
            elif kind == "object":
                found.append(
                    object_language(
                        members,
                        lambda inner: self.language(inner, mode),
                        lambda inner: self.names(inner, mode),
                    )
                )
            else:
                found.append(scalar_language(kind, members, mode.is_canonical, mode.is_over))
        return union(*found)

    def names(self, members: Sequence[Member], mode: Mode) -> ByteDFA:
        """Return the names of properties that satisfy schemas, in canonical spelling."""
        texts = Member({"type": "string"}, members[0].pointer)
        return self.language((texts, *members), Mode(True, mode.is_over))

    def values(self, members: Members) -> list[Any]:
        """Return the values of ``enum`` and ``const`` that satisfy all members."""
        found: dict[str, Any] | None = None
        for m in members:
            for keyword in ("enum", "const"):
                listed = m.get(keyword, m)
                if listed is m:
                    continue
                texts = {_key(v): v for v in (listed if keyword == "enum" else [listed])}
                found = texts if found is None else {k: v for k, v in found.items() if k in texts}
        return [v for v in (found or {}).values() if self.holds(v, members)]

    def holds(self, value: Any, members: Members) -> bool:
        """Return True where a listed value satisfies the other keywords.

        Raises:
            GenError: the value is an array or an object, and has more to satisfy than its type.
        """
        check()
        kind = type_of(value)
        if any(kind not in m.types() for m in members):
            return False
        if kind not in ("array", "object"):
            return scalar_holds(value, members)
        for m in members:
            beside = [k for k in CONTAINER_KEYWORDS if m.get(k) is not None]
            if beside:
                raise m.refused(beside[0], f" beside an {kind} in enum or const")
        return True


def _clause(name: str, needed: Any) -> dict[str, Any]:
    """Return a dependency as a choice: the property is absent, or what it needs holds."""
    schema = {"required": needed} if isinstance(needed, list) else needed
    return {"anyOf": [{"properties": {name: False}}, {"allOf": [{"required": [name]}, schema]}]}


def _references(schema: Any) -> Iterator[str]:
    """Yield the ``$ref`` of a schema and of its parts."""
    check()
    if isinstance(schema, list):
        for item in schema:
            yield from _references(item)
    elif isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        for keyword, value in schema.items():
            if keyword not in NO_SCHEMAS:
                yield from _references(value)


def _key(value: Any) -> str:
    """Return a text that equal values share."""
    if isinstance(value, list):
        return "[" + ",".join(map(_key, value)) + "]"
    if isinstance(value, dict):
        return json.dumps({k: _key(v) for k, v in value.items()}, sort_keys=True)
    return spelled(value)
