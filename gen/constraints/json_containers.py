"""Languages of arrays and objects that satisfy several schemas together.

An object is a path through its properties in order: each is written or, where it is optional, left
out. Nodes of the path count what was written, as far as the schemas limit it. An array is a path
through its items.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from gen.constraints.budget import check, require_states
from gen.constraints.byte_dfa import (
    ByteDFA,
    Nfa,
    any_of,
    concat,
    difference,
    empty,
    literal,
    nothing,
)
from gen.constraints.json_member import Member
from gen.constraints.json_scalars import quoted, separator, spelled, texts

ANY_DEPTH = 2  # levels of arrays that no schema describes
MOST_UNIQUE = 8  # values of an array whose items differ, at most
Edges = list[tuple[int, ByteDFA, int]]
Language = Callable[[Sequence[Member]], ByteDFA]


def array_language(members: Sequence[Member], language: Language) -> ByteDFA:
    """Return the arrays that satisfy schemas. ``language``: of values, by their schemas."""
    least, most = _limits(members, "Items")
    prefixes = [_prefix(m) for m in members]
    length = max(map(len, prefixes))
    if any(m.get("uniqueItems") is True for m in members) and (most is None or most > 1):
        return _unique(members, language, least, most, length)
    items = []
    for position in range(length + 1):  # the last one is that of all items from there on
        item = _item(members, prefixes, position, language)
        if item.is_empty and position >= least:
            most = position if most is None else min(most, position)
            break
        if item.is_empty:
            return nothing()
        items.append(item)
    if most is not None and most < least:
        return nothing()
    last = most if most is not None else max(least, length, 1)
    require_states(2 * last)
    # node 2 n + 1: n items were written; 2 n: the next sign is that of item n
    edges: Edges = [(-1, literal(b"["), 1)]
    comma, closed = separator(b","), -2
    for n in range(1, last + 1):
        edges.append((2 * n - 1, comma if n > 1 else empty(), 2 * n))
        edges.append((2 * n, items[min(n - 1, len(items) - 1)], 2 * n + 1))
    if most is None:
        edges += [(2 * last + 1, comma, 2 * last + 2), (2 * last + 2, items[-1], 2 * last + 1)]
    edges += [(2 * n + 1, literal(b"]"), closed) for n in range(least, last + 1)]
    return _graph(edges, closed, start=-1)


def _prefix(member: Member) -> list[Member]:
    """Return the schemas of the first items; ``items`` was a list in older drafts."""
    for keyword in ("prefixItems", "items"):
        found = member.get(keyword)
        if isinstance(found, list):
            return [member.child(schema, keyword, n) for n, schema in enumerate(found)]
    return []


def _item(
    members: Sequence[Member], prefixes: Sequence[list[Member]], position: int, language: Language
) -> ByteDFA:
    """Return the values of the item at a position."""
    found: list[Member] = []
    for member, prefix in zip(members, prefixes, strict=True):
        keyword = "additionalItems" if isinstance(member.get("items"), list) else "items"
        if position < len(prefix):
            found.append(prefix[position])
        elif member.get(keyword) is not None:
            found.append(member.child(member.get(keyword), keyword))
    if not any(m.is_generated for m in found):
        generated = [m for m in members if m.is_generated]
        level = 1 + max(m.level for m in generated)
        if level > ANY_DEPTH:
            return nothing()
        found.append(Member({}, generated[0].pointer + "/items", level=level))
    return language(found)


def _unique(
    members: Sequence[Member], language: Language, least: int, most: int | None, length: int
) -> ByteDFA:
    """Return arrays of different items out of a few: paths through sets of items.

    Raises:
        GenError: there are too many items to tell sets of them apart.
    """
    member = next(m for m in members if m.get("uniqueItems") is True)
    item = _item(members, [_prefix(m) for m in members], 0, language)
    words = _words(item, MOST_UNIQUE) if not length else None
    if words is None or any(word[:1] in (b"[", b"{") for word in words):
        raise member.refused(
            "uniqueItems", f" (supported: items out of at most {MOST_UNIQUE} scalars)"
        )
    most = len(words) if most is None else min(most, len(words))
    if most < least:
        return nothing()
    chosen = [set(c) for n in range(most + 1) for c in itertools.combinations(range(len(words)), n)]
    node = {frozenset(c): 1 + i for i, c in enumerate(chosen)}
    closed = len(chosen) + 1
    edges: Edges = [(0, literal(b"["), 1)]
    for written, begin in node.items():
        if len(written) >= least:
            edges.append((begin, literal(b"]"), closed))
        for i, word in enumerate(words):
            end = node.get(written | {i})
            if i not in written and end is not None:
                text = literal(word)
                edges.append((begin, concat(separator(b","), text) if written else text, end))
    return _graph(edges, closed)


def _words(language: ByteDFA, most: int) -> list[bytes] | None:
    """Return all texts of a language, None where there are more than ``most``."""
    found: list[bytes] = []
    waiting = [] if language.is_empty else [(0, b"")]
    while waiting:
        state, text = waiting.pop()
        if language.accepting[state]:
            found.append(text)
        steps = language.next[state, language.byte_class]
        waiting += [(int(s), text + bytes([b])) for b, s in enumerate(steps) if s >= 0]
        # minimal automata have a text behind every state
        if len(found) + len(waiting) > most or len(text) > language.num_states:
            return None
    return sorted(found)


def object_language(members: Sequence[Member], language: Language, names: Language) -> ByteDFA:
    """Return the objects that satisfy schemas.

    Args:
        members: schemas without combinators.
        language: function that returns the language of values, by their schemas.
        names: the same in canonical spelling, for names of properties.
    """
    generated = [m for m in members if m.is_generated]
    declared = dict.fromkeys(
        name for k in ("properties", "required") for m in generated for name in m.get(k, [])
    )
    extra = _extra(generated, set(declared), language, names)
    asked = generated if extra else members
    required = {name for m in asked for name in m.get("required", [])}
    least, most = _limits(asked, "Properties")
    if not required <= set(declared):
        return nothing()
    if extra and least > len(required) + 1:
        raise generated[0].refused("minProperties", " beside names that the schema does not list")
    values: dict[str, ByteDFA] = {}
    for name in sorted(declared, key=lambda n: n not in required):  # those end early if empty
        value = _property(members, name, language, names)
        if not value.is_empty:
            values[name] = value
        elif name in required:
            return nothing()
    entries = [(n, values[n], n in required) for n in declared if n in values]
    return _path(entries, extra, least, most)


def _property(members: Sequence[Member], name: str, language: Language, names: Language) -> ByteDFA:
    """Return the values of a property, none where a schema forbids it."""
    found: list[Member] = []
    for m in members:
        properties, others = m.get("properties", {}), m.get("additionalProperties")
        if name in properties:
            found.append(m.child(properties[name], "properties", name))
        elif others is not None:
            found.append(m.child(others, "additionalProperties"))
        elif m.get("unevaluatedProperties") is False and not any(
            name in other.get("properties", {}) for other in members
        ):
            return nothing()
        if m.get("propertyNames") is not None:
            allowed = names([m.child(m.get("propertyNames"), "propertyNames")])
            if not allowed.accepts(spelled(name).encode()):
                return nothing()
    if not any(m.is_generated for m in found):
        found.append(Member({}, members[0].pointer))
    return language(found)


def _extra(
    members: Sequence[Member], declared: set[str], language: Language, names: Language
) -> ByteDFA | None:
    """Return a property whose name the schemas do not list; None where there is none."""
    others = [m for m in members if m.get("additionalProperties") is not None]
    schemas = [m.get("additionalProperties") for m in others]
    if not any(isinstance(schema, dict) and schema for schema in schemas) or False in schemas:
        return None
    value = language(
        [m.child(m.get("additionalProperties"), "additionalProperties") for m in others]
    )
    asked = [
        m.child(m.get("propertyNames"), "propertyNames") for m in members if m.get("propertyNames")
    ]
    name = names(asked) if asked else quoted(texts(1))
    name = difference(name, any_of(spelled(n).encode() for n in declared)) if declared else name
    found = concat(name, separator(b":"), value)
    return None if found.is_empty else found


def _path(
    entries: Sequence[tuple[str, ByteDFA, bool]],
    extra: ByteDFA | None,
    least: int,
    most: int | None,
) -> ByteDFA:
    """Return objects of entries in order.

    Args:
        entries: name, values, and True where the property is required.
        extra: properties after them, any number of them; None for none.
        least: properties, at least.
        most: properties, at most; None for any number.
    """
    top = max(1, least) if most is None else most
    number: dict[tuple[Any, ...], int] = {}

    def node(*what: Any) -> int:
        return number.setdefault(what, len(number))

    comma, nothing_written = separator(b","), empty()
    edges: Edges = [(node("start"), literal(b"{"), node(0, 0))]
    counts = {0}
    for i, (name, value, is_required) in enumerate(entries):
        key = spelled(name).encode() + b":"
        after = set()
        for count in sorted(counts):
            check()
            if not is_required:
                edges.append((node(i, count), nothing_written, node(i + 1, count)))
                after.add(count)
            if count < top or most is None:
                then = min(count + 1, top)
                sign = comma if count else nothing_written
                edges.append((node(i, count), sign, node("entry", i, then)))
                after.add(then)
        for then in sorted(after - {0}):
            edges.append(
                (node("entry", i, then), any_of([key, key + b" "]), node("value", i, then))
            )
            edges.append((node("value", i, then), value, node(i + 1, then)))
        counts = after
    last = len(entries)
    if extra is not None:
        for count in range(min(counts, default=0), top + 1):
            if count < top or most is None:
                then = min(count + 1, top)
                entry = concat(comma, extra) if count else extra
                edges.append((node(last, count), entry, node(last, then)))
                counts = counts | {then}
    edges += [
        (node(last, count), literal(b"}"), node("end"))
        for count in counts
        if count >= min(least, top) and count >= least
    ]
    return _graph(edges, node("end"))


def _limits(members: Sequence[Member], what: str) -> tuple[int, int | None]:
    """Return the least and the most items or properties."""
    least = max([0, *(int(m.get(f"min{what}", 0)) for m in members)])
    limits = [int(m.get(f"max{what}")) for m in members if m.get(f"max{what}") is not None]
    return least, min(limits, default=None)


def _graph(edges: Edges, end: int, start: int = 0) -> ByteDFA:
    """Return the texts along the paths from the node ``start`` to the node ``end``."""
    nfa = Nfa()
    nodes = {start: nfa.start}
    for node in (end, *(node for begin, _, after in edges for node in (begin, after))):
        if node not in nodes:
            nodes[node] = nfa.state()
    for begin, language, after in edges:
        check()
        first, following = nfa.add(language)
        nfa.link([nodes[begin]], first)
        nfa.link(following, nodes[after])
    nfa.accept([nodes[end]])
    return nfa.determinize()
