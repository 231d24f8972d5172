"""Kind ``grammar``."""

from __future__ import annotations

from dataclasses import dataclass

from gen.constraints.grammar import grammar_constraint
from gen.constraints.kind import ConstraintKind, Context
from gen.contracts.constraint import Constraint
from gen.core.registry import register


@register("constraint", "grammar")
@dataclass(frozen=True)
class Grammar(ConstraintKind):
    """Texts of a context-free grammar, for causal models; a text may end unfinished.

    Attributes:
        text: the grammar.
        syntax: ``lark`` or ``gbnf``.
    """

    text: str
    syntax: str = "lark"

    def language(self, context: Context) -> Constraint:
        context.require_text("grammar")
        return grammar_constraint(self.text, context, self.syntax)
