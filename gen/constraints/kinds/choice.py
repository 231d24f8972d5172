"""Kind ``choice``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gen.constraints.byte_dfa import any_of
from gen.constraints.ids import read_texts, spellings
from gen.constraints.kind import ConstraintKind, Context, Language, TokenLanguage
from gen.core.registry import register


@register("constraint", "choice")
@dataclass(frozen=True)
class Choice(ConstraintKind):
    """One of a list of texts, or of sequences of token ids."""

    texts: list[Any]

    def language(self, context: Context) -> Language:
        texts, are_ids = read_texts("structured.choice", self.texts, context, "choice")
        chosen = any_of(texts)
        return TokenLanguage(chosen, spellings(context.vocab_size)) if are_ids else chosen
