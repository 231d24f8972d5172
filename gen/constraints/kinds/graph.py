"""Kind ``graph``: well-formed paths of a knowledge graph.

Decoding on Graphs (Li et al., arXiv 2410.18415): a chain of triples of the graph in which every
triple starts from an entity of the question or of the triples before it. The set of entities that
were visited is part of the state, so a path of several hops may branch.
"""

from __future__ import annotations

from dataclasses import dataclass
from string import Formatter
from typing import Any

from gen.constraints.budget import check
from gen.constraints.byte_dfa import ByteDFA, any_of, literal, network
from gen.constraints.ids import ids_of, spell, spellings
from gen.constraints.kind import ConstraintKind, Context, Language, TokenLanguage
from gen.core.errors import GenError, bad_type, bad_value, unknown
from gen.core.registry import register

MOST_FRONTIERS = 5_000
DIRECTIONS = ("forward", "both")
PARTS = ("head", "relation", "tail")
Triple = tuple[Any, Any, Any]


@register("constraint", "graph")
@dataclass(frozen=True)
class Graph(ConstraintKind):
    """Paths in a graph of triples [head, relation, tail], each of texts or of token ids. The head
    of every triple after the first is an entity of an earlier one. ``hops``: triples of a path, at
    most. ``start``: entities that the first triple may start from (all). ``direction``: ``both``
    also follows triples from their tail. ``template``: text of a triple. ``separator``: text or
    token ids between triples."""

    triples: list[Any]
    hops: int = 3
    start: list[Any] | None = None
    direction: str = "forward"
    template: str = "{head} -> {relation} -> {tail}"
    separator: Any = None

    def language(self, context: Context) -> Language:
        if not isinstance(self.hops, int) or isinstance(self.hops, bool) or self.hops < 1:
            raise bad_value("structured.hops", self.hops, "an integer of at least 1")
        if self.direction not in DIRECTIONS:
            raise bad_value("structured.direction", self.direction, " or ".join(DIRECTIONS))
        triples = self._read()
        if all(isinstance(part, str) for triple in triples for part in triple):
            context.require_text("graph")
            separator = "; " if self.separator is None else self.separator
            if not isinstance(separator, str):
                raise bad_type("structured.separator", separator, "a text")
            texts = [self._written(t) for t in triples]
            return self._paths(triples, texts, separator.encode())
        named = [tuple(tuple(ids_of("structured.graph", p, context)) for p in t) for t in triples]
        ids = [spell((i for part in t for i in part), context.vocab_size) for t in named]
        between = ids_of("structured.separator", self.separator or [], context)
        paths = self._paths(named, ids, spell(between, context.vocab_size))
        return TokenLanguage(paths, spellings(context.vocab_size))

    def _read(self) -> list[Triple]:
        """Read the triples. Raises ``GenError``."""
        if not isinstance(self.triples, (list, tuple)) or not self.triples:
            raise bad_type("structured.graph", self.triples, "a list of [head, relation, tail]")
        for i, triple in enumerate(self.triples):
            if not isinstance(triple, (list, tuple)) or len(triple) != 3:
                raise bad_type(f"structured.graph[{i}]", triple, "[head, relation, tail]")
        return [tuple(triple) for triple in self.triples]

    def _written(self, triple: Triple) -> bytes:
        """Write a triple with the template. Raises ``GenError`` for one that lacks a part."""
        try:
            found = {name for _, name, _, _ in Formatter().parse(self.template)} - {None}
            if found == set(PARTS):
                return self.template.format(**dict(zip(PARTS, triple, strict=True))).encode()
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            pass  # the error below says what a template is
        expected = "a text with {head}, {relation} and {tail}"
        raise bad_value("structured.template", self.template, expected)

    def _paths(self, triples: list[Triple], texts: list[bytes], separator: bytes) -> ByteDFA:
        """Return the texts of all paths of at most ``hops`` triples.

        Args:
            triples: triples of entities that can be compared.
            texts: bytes of every triple.
            separator: bytes between two triples.

        Raises:
            GenError: a start is no entity of the graph, or the paths lead to too many frontiers.
        """
        # entities that no triple starts from make no difference
        ways = {t[0] for t in triples} | {t[2] for t in triples if self.direction == "both"}
        first = self._frontier(triples)
        edges: list[tuple[int, ByteDFA, int]] = []
        index = {(first, self.hops): 0}  # node in front of each triple
        waiting, ends = [(first, self.hops)], []
        for frontier, left in waiting:  # grows while it is read
            after: dict[frozenset[Any], list[bytes]] = {}
            for triple, text in zip(triples, texts, strict=True):
                check()
                if frontier is None or self._starts(triple, frontier):
                    visited = ((frontier or frozenset()) | {triple[0], triple[2]}) & ways
                    after.setdefault(visited if left > 1 else frozenset(), []).append(text)
            for visited, steps in after.items():
                end = -1 - len(ends)  # node behind a triple
                ends.append(end)
                edges.append((index[frontier, left], any_of(steps), end))
                if not visited:
                    continue
                following = (visited, left - 1)
                if following not in index:
                    index[following] = len(index)
                    waiting.append(following)
                edges.append((end, literal(separator), index[following]))
            if len(index) > MOST_FRONTIERS:
                raise GenError(
                    f"structured.graph leads to more than {MOST_FRONTIERS:,} sets of entities in"
                    f" {self.hops} hops; expected fewer hops, fewer triples or fewer starts"
                )
        return network(edges, ends)

    def _starts(self, triple: Triple, frontier: frozenset[Any]) -> bool:
        return triple[0] in frontier or (self.direction == "both" and triple[2] in frontier)

    def _frontier(self, triples: list[Triple]) -> frozenset[Any] | None:
        """Return the entities that a path may start from; None for all."""
        if self.start is None:
            return None
        if not isinstance(self.start, (list, tuple)) or not self.start:
            raise bad_type("structured.start", self.start, "a list of entities")
        known = {entity for triple in triples for entity in (triple[0], triple[2])}
        found = set()
        for entity in self.start:
            # parts of ids were read as tuples
            named = entity if isinstance(entity, str) else _as_ids(entity)
            if named not in list(known):  # lists inside of lists have no hash
                raise unknown("entity", entity, map(str, known), "structured.start")
            found.add(named)
        return frozenset(found)


def _as_ids(entity: Any) -> tuple[Any, ...]:
    return tuple(entity) if isinstance(entity, (list, tuple)) else (entity,)
