"""Kind ``json_schema``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from gen.constraints.budget import within
from gen.constraints.byte_dfa import ByteDFA
from gen.constraints.grammar import schema_constraint
from gen.constraints.json_schema import MAX_DEPTH, schema_dfa
from gen.constraints.kind import ConstraintKind, Context
from gen.contracts.constraint import Constraint
from gen.core.errors import GenError, bad_value
from gen.core.registry import register

ENGINES = ("automaton", "llguidance", "auto")


@register("constraint", "json_schema")
@dataclass(frozen=True)
class JsonSchema(ConstraintKind):
    """JSON texts that satisfy a schema.

    Attributes:
        schema: the schema, as ``json.loads`` returns it.
        max_depth: recursive ``$ref`` inside each other, at most.
        engine: ``automaton`` (causal and masked models), or ``llguidance`` (causal models) for
            schemas that an automaton does not express or that make it too large. ``auto`` is the
            automaton where it is supported and built in 40 % of the time of the budget, and else
            llguidance where it is installed and the model is causal.
    """

    schema: Any
    max_depth: int = MAX_DEPTH
    engine: str = "automaton"

    def language(self, context: Context) -> ByteDFA | Constraint:
        context.require_text("json_schema")
        if self.engine not in ENGINES:
            raise bad_value("structured.engine", self.engine, ", ".join(ENGINES))
        if not isinstance(self.schema, (dict, bool)):
            raise bad_value("structured.json_schema", self.schema, "an object or a boolean")
        if self.engine == "llguidance":
            return schema_constraint(self.schema, context)
        try:
            return schema_dfa(self.schema, max_depth=self.max_depth)
        except GenError as error:
            raise within("structured.json_schema", error) from None

    def alternative(self, context: Context) -> ConstraintKind | None:
        takes_any = context.left_to_right and context.ends and find_spec("llguidance")
        return replace(self, engine="llguidance") if self.engine == "auto" and takes_any else None
