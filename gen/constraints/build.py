"""Constraint of a request: what the key ``structured`` says, for one model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from gen.constraints.budget import Budget, BudgetExceeded, Limits, Unsupported, check
from gen.constraints.kind import ConstraintKind, Context, Language, TokenLanguage
from gen.constraints.lengths import PositionedConstraint
from gen.constraints.tokens import over_tokens, require_room, with_eos, within
from gen.contracts.constraint import Automaton, AutomatonConstraint, Constraint
from gen.contracts.vocabulary import Vocabulary
from gen.core.errors import GenError, bad_type, bad_value, hint, shown
from gen.core.registry import registry

if TYPE_CHECKING:
    from gen.core.token_space import TokenSpace

SHARE = 0.4  # of the time, after which another engine is tried


def build(
    structured: Mapping[str, Any],
    vocabulary: Vocabulary | None,
    space: TokenSpace,
    left_to_right: bool = True,
) -> Constraint:
    """Return the constraint of a request.

    Args:
        structured: one kind of constraint (``gen ls constraints``) with its value, options of that
            kind, and what building it may take (``gen.constraints.budget.Limits``):
            ``{"regex": "[a-z]+"}``, ``{"graph": triples, "hops": 2, "budget": {"seconds": 9}}``.
        vocabulary: bytes of every token; None where tokens are no text.
        space: positions of a row, allowed tokens and eos tokens.
        left_to_right: whether positions are filled in order.

    Raises:
        GenError: the keys or values are none that a kind takes, no text is accepted, the shortest
            one does not fit the positions, or the budget is exceeded.
    """
    return built(structured, context_of(vocabulary, space, left_to_right))


def context_of(vocabulary: Vocabulary | None, space: TokenSpace, left_to_right: bool) -> Context:
    """Return what a constraint depends on beside the rule; arguments as of ``build``."""
    legal = space.legal.cpu().numpy()
    return Context(vocabulary, space.vocab_size, space.ends, space.length, legal, left_to_right)


def built(
    structured: Mapping[str, Any],
    context: Context,
    most: Limits | None = None,
    interrupted: Callable[[], Exception | None] | None = None,
) -> Constraint:
    """Build a constraint within its budget.

    Args:
        structured: the rule, see ``build``.
        context: model and request.
        most: what building it may take, and the most that a rule may state; None takes the usual
            limits, and rules may state others.
        interrupted: returns an error that ends the construction, None while it goes on.

    Raises:
        GenError: see ``build``.
    """
    kind, limits = read(structured), limits_of(structured, most)
    name = next(key for key, cls in registry.table("constraint").items() if cls is type(kind))
    try:
        with Budget(limits, name, most, interrupted) as budget:
            return _with_alternative(kind, context, budget)
    except RecursionError:
        raise GenError(f"structured.{name} is nested too deeply; expected fewer levels") from None
    except ArithmeticError:
        raise GenError(
            f"structured.{name} has a number that is out of range; expected smaller ones"
        ) from None
    except MemoryError:
        raise budget.exceeded("megabytes") from None


def limits_of(structured: Mapping[str, Any], most: Limits | None) -> Limits:
    """Return what building a rule may take. Raises ``GenError`` for a wrong ``budget``."""
    return (most or Limits()).of(structured.get("budget"), most)


def _with_alternative(kind: ConstraintKind, context: Context, budget: Budget) -> Constraint:
    """Build a constraint, or that of another engine where it exceeds a share of the budget."""
    other = kind.alternative(context)
    if other is None:
        return _of_kind(kind, context)
    try:
        with budget.part(SHARE):
            return _of_kind(kind, context)
    except (BudgetExceeded, Unsupported) as error:
        first = error
    try:
        return _of_kind(other, context)
    except BudgetExceeded:
        raise
    except GenError as error:
        raise GenError(f"{first}; the other engine does not take it either: {error}") from None


def _of_kind(kind: ConstraintKind, context: Context) -> Constraint:
    """Build the constraint of a kind."""
    language = kind.language(context)
    found = language if isinstance(language, Constraint) else of_language(language, context)
    check()
    return found


def read(structured: Mapping[str, Any]) -> ConstraintKind:
    """Read the kind, its value and its options. Needs no model.

    Raises:
        GenError: there is no kind or more than one, or an option is none of the kind.
    """
    if not isinstance(structured, Mapping):
        raise bad_type("structured", structured, 'a mapping such as {"regex": "[a-z]+"}')
    kinds = registry.table("constraint")
    structured = {key: value for key, value in structured.items() if key != "budget"}
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
            known = (
                f"the options {', '.join([*options, 'budget'])}"
                if options
                else "no other key but budget"
            )
            raise GenError(
                f"structured has the key {shown(key)} beside {names[0]}; expected"
                f" {known}.{hint(key, [*options, 'budget'])}"
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
        automaton.distance  # noqa: B018 (within the budget, not in the first forward pass)
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
