"""Errors that users meet: what came, what was expected, and the nearest name."""

from __future__ import annotations

import difflib
import os
import traceback
from collections.abc import Iterable, Sequence


class GenError(ValueError):
    """Bad input or a failed run, with a message made for people.

    The command line prints the message and exits with 2.
    """


class WrongType(GenError, TypeError):
    """Argument of another type than a call takes, or a keyword that it does not have."""


class Interrupt(Exception):
    """Raise it in a callback to end a call of a pipeline early.

    The call returns what is known so far; ``PipelineOutput.interrupted`` is True.
    """


def unknown(kind: str, got: object, options: Iterable[str], where: str = "") -> GenError:
    """Return the error ``unknown sampler 'sdj' in a.yaml. Did you mean 'sjd'? Known: ...``.

    Args:
        kind: kind of the name.
        got: name that came.
        options: known names.
        where: file or flag that the name came from.
    """
    options = sorted(str(o) for o in options)
    near = difflib.get_close_matches(str(got), options, 1, 0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    source = f" in {where}" if where else ""
    return GenError(f"unknown {kind} {got!r}{source}.{hint} Known: {', '.join(options)}")


def unknown_word(
    got: str, options: Sequence[str], where: str, what: str = "the vocabulary"
) -> ValueError:
    """Return the error ``WHERE: 'squre' is outside WHAT. Did you mean 'square'? Known: ...``.

    Args:
        got: the word of a text.
        options: words that are allowed there.
        where: the text, for the message.
        what: name of ``options`` in the message.
    """
    near = difflib.get_close_matches(got, options, 1, 0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ValueError(f"{where}: {got!r} is outside {what}.{hint} Known: {', '.join(options)}")


def bad_type(name: str, got: object, expected: str) -> WrongType:
    """Return the error ``prompts is 3; expected a text``, which is a ``TypeError`` too.

    Args:
        name: name of the argument.
        got: value that came.
        expected: values that are taken, in words.
    """
    shown = repr(got)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return WrongType(f"{name} is {shown}, a {type(got).__name__}; expected {expected}")


def bad_value(name: str, got: object, expected: str, where: str = "") -> GenError:
    """Return the error ``window is 0; expected an integer of at least 1``.

    Args:
        name: name of the parameter.
        got: value that came.
        expected: values that are taken, in words.
        where: file or flag that the value came from.
    """
    source = f" in {where}" if where else ""
    return GenError(f"{name} is {got!r}{source}; expected {expected}")


def describe(problem: BaseException) -> str:
    """Return an exception as one line; with GEN_DEBUG set, print its traceback."""
    if os.environ.get("GEN_DEBUG"):
        traceback.print_exception(problem)
    text = " ".join(str(problem).split())[:300]
    return text if isinstance(problem, GenError) else f"{type(problem).__name__}: {text}"
