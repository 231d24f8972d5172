"""Constraint of a request: what the key ``structured`` says, for one model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from gen.constraints.kind import ConstraintKind, Context, Language, TokenLanguage
from gen.constraints.lengths import PositionedConstraint
from gen.constraints.tokens import over_tokens, require_room, with_eos, within
from gen.contracts.constraint import Automaton, AutomatonConstraint, Constraint
from gen.contracts.frontend import Vocabulary
from gen.core.errors import GenError, bad_type, bad_value, hint, shown
from gen.core.registry import registry
from gen.core.token_space import TokenSpace


def build(
    structured: Mapping[str, Any], vocabulary: Vocabulary | None, space: TokenSpace
) -> Constraint:
    """Return the constraint of a request.

    Args:
        structured: one kind of constraint (``gen ls constraints``) with its value, and options of
            that kind: ``{"regex": "[a-z]+"}``, ``{"graph": triples, "hops": 2}``.
        vocabulary: bytes of every token; None where tokens are no text.
        space: positions of a row, allowed tokens and eos tokens.

    Raises:
        GenError: the keys or values are none that a kind takes, no text is accepted, or the
            shortest one does not fit the positions.
    """
    kind = read(structured)
    legal = space.legal.cpu().numpy()
    context = Context(vocabulary, space.vocab_size, space.ends, space.length, legal)
    language = kind.language(context)
    if isinstance(language, Constraint):
        return language
    return of_language(language, context)


def read(structured: Mapping[str, Any]) -> ConstraintKind:
    """Read the kind, its value and its options. Needs no model.

    Raises:
        GenError: there is no kind or more than one, or an option is none of the kind.
    """
    if not isinstance(structured, Mapping):
        raise bad_type("structured", structured, 'a mapping such as {"regex": "[a-z]+"}')
    kinds = registry.table("constraint")
    names = [key for key in structured if key in kinds]
    if len(names) != 1:
        wrong = [key for key in structured if key not in kinds]
        near = hint(wrong[0], kinds) if wrong and not names else ""
        raise GenError(
            f"structured has the keys {shown(list(structured))}; expected exactly one of"
            f" {', '.join(kinds)}.{near}"
        )
    cls = kinds[names[0]]
    options = [f.name for f in dataclasses.fields(cls)][1:]
    for key in structured:
        if key != names[0] and key not in options:
            known = f"the options {', '.join(options)}" if options else "no other key"
            raise GenError(
                f"structured has the key {shown(key)} beside {names[0]}; expected"
                f" {known}.{hint(key, options)}"
            )
    given = {key: value for key, value in structured.items() if key != names[0]}
    return cls(structured[names[0]], **given)


def of_language(language: Language, context: Context) -> Constraint:
    """Return the texts of a language that a row can hold, ended by eos tokens, as a constraint.

    A row without eos tokens is filled to its last position by the text.

    Raises:
        GenError: no text is left, or none fits.
    """
    automaton = token_automaton(language, context)
    if context.ends:
        require_room(automaton, context.positions)
        automaton = with_eos(automaton, context.ends)
    is_uniform = bool((context.legal == context.legal[:1]).all())
    if context.ends and is_uniform:
        return AutomatonConstraint(automaton)
    return PositionedConstraint(automaton, context.legal)


def token_automaton(language: Language, context: Context) -> Automaton:
    """Return a language as an automaton over the tokens that are allowed anywhere.

    Raises:
        GenError: no text is left, or the vocabulary has another size.
    """
    legal = context.legal.any(0)
    legal[list(context.ends)] = False
    if isinstance(language, Automaton):
        return within(language, legal)
    if isinstance(language, TokenLanguage):
        return over_tokens(language.dfa, _allowed(language.tokens, legal))
    vocabulary = context.require_text("language")
    if len(vocabulary) != context.vocab_size:
        raise bad_value("vocabulary", len(vocabulary), f"{context.vocab_size} tokens")
    later, first = _allowed(vocabulary.later, legal), _allowed(vocabulary.first, legal)
    return over_tokens(language, later, first)


def _allowed(tokens: Any, legal: np.ndarray) -> list[bytes | None]:
    """Return the bytes of tokens that are allowed; None for the others."""
    return [text if ok else None for text, ok in zip(tokens, legal.tolist(), strict=True)]
