"""Kind ``json_schema``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gen.constraints.byte_dfa import ByteDFA
from gen.constraints.grammar import schema_constraint
from gen.constraints.json_schema import MAX_DEPTH, schema_dfa
from gen.constraints.kind import ConstraintKind, Context
from gen.contracts.constraint import Constraint
from gen.core.errors import GenError, bad_value
from gen.core.registry import register

ENGINES = ("automaton", "llguidance")


@register("constraint", "json_schema")
@dataclass(frozen=True)
class JsonSchema(ConstraintKind):
    """JSON texts that satisfy a schema.

    Attributes:
        schema: the schema, as ``json.loads`` returns it.
        max_depth: recursive ``$ref`` inside each other, at most.
        engine: ``automaton`` (causal and masked models), or ``llguidance`` (causal models) for
            schemas that an automaton does not express or that make it too large.
    """

    schema: Any
    max_depth: int = MAX_DEPTH
    engine: str = "automaton"

    def language(self, context: Context) -> ByteDFA | Constraint:
        context.require_text("json_schema")
        if self.engine not in ENGINES:
            raise bad_value("structured.engine", self.engine, " or ".join(ENGINES))
        if not isinstance(self.schema, (dict, bool)):
            raise bad_value("structured.json_schema", self.schema, "an object or a boolean")
        if self.engine == "llguidance":
            return schema_constraint(self.schema, context)
        try:
            return schema_dfa(self.schema, max_depth=self.max_depth)
        except GenError as error:
            raise GenError(f"structured.json_schema: {error}") from None
