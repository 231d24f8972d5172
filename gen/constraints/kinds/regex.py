"""Kind ``regex``."""

from __future__ import annotations

from dataclasses import dataclass

from gen.constraints import regex
from gen.constraints.byte_dfa import ByteDFA
from gen.constraints.kind import ConstraintKind, Context
from gen.core.registry import register


@register("constraint", "regex")
@dataclass(frozen=True)
class Regex(ConstraintKind):
    """Texts that match a regular expression as a whole."""

    pattern: str

    def language(self, context: Context) -> ByteDFA:
        context.require_text("regex")
        return regex.regex(self.pattern)
