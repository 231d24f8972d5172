"""Errors that users meet: what came, what was expected, and the nearest name."""

from __future__ import annotations

import difflib
import os
import reprlib
import traceback
from collections.abc import Iterable, Sequence

LONGEST = 200  # characters of a value in a message
LONGEST_MESSAGE = 10_000  # characters of a message
LISTED = 40  # names that a message lists at most
ALIKE = 0.7  # share of letters in order that a suggestion has in common with what came
LISTINGS = {"sampler": "gen ls samplers and gen ls presets", "config": "gen ls configs"}


class _ShortRepr(reprlib.Repr):
    """Repr that looks at a bounded part of a value."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = 20
        self.maxstring = self.maxlong = self.maxother = LONGEST

    def repr_int(self, x: int, level: int) -> str:
        """Describe an integer that Python refuses to write."""
        bits = x.bit_length()
        return f"an integer of {bits} bits" if bits > 4 * LONGEST else super().repr_int(x, level)


class GenError(ValueError):
    """Invalid input or a failed run, with a message for the user.

    The command line prints the message and exits with 2. A message is cut to ``LONGEST_MESSAGE``
    characters, since it may quote a file.
    """

    def __init__(self, message: str = ""):
        super().__init__(cut(message, most=LONGEST_MESSAGE))


class WrongType(GenError, TypeError):
    """Argument of another type than a call takes, or a keyword that it does not have."""


class Interrupt(Exception):
    """Raise it in a callback to end a call of a pipeline early.

    The call returns what is known so far; ``PipelineOutput.interrupted`` is True.
    """


def shown(value: object) -> str:
    """Return the repr of a value, cut to ``LONGEST`` characters; time and memory are bounded."""
    if isinstance(value, str):
        return cut(repr(value[: 2 * LONGEST]), len(value) > 2 * LONGEST)
    return cut(_ShortRepr().repr(value))


def cut(text: str, has_more: bool = False, most: int = LONGEST) -> str:
    """Cut a text to ``most`` characters. ``has_more``: mark a text that was cut already."""
    return f"{text[: most - 3]}..." if has_more or len(text) > most else text


def cut_list(lines: Sequence[str], most: int = 10) -> list[str]:
    """Return the first lines of many, and a last one that counts the others."""
    left = len(lines) - most
    return [*lines[:most], f"and {left:,} more"] if left > 0 else list(lines)


def nearest(got: str, options: Iterable[str]) -> str | None:
    """Find the option that a mistyped name most likely stands for, or None.

    It shares most of its letters, or contains the name. Of names in folders (``image/sjd``) those
    in the same folder are compared by their last part.
    """
    folder, _, last = got.rpartition("/")
    names = {
        o.rpartition("/")[2] if folder and o.startswith(f"{folder}/") else o: o for o in options
    }
    last = last if any(name != option for name, option in names.items()) else got
    close = difflib.get_close_matches(last, names, 1, ALIKE) or [
        n for n in difflib.get_close_matches(last, names, 3, 0.6) if len(n) == len(last)
    ]
    if not close and len(last) > 3:
        close = sorted((n for n in names if last in n), key=len)
    return names[close[0]] if close else None


def hint(got: object, options: Iterable[str]) -> str:
    """Format `` Did you mean 'sjd'?``, or nothing."""
    near = nearest(str(got)[:LONGEST], options)
    return f" Did you mean {near!r}?" if near else ""


def listed(options: Sequence[str], listing: str = "") -> str:
    """Format `` Known: a, b``, at most ``LISTED`` of them. ``listing``: command that lists all."""
    if not options:
        return ""
    left = len(options) - LISTED
    more = f" and {left} more" + (f" ({listing})" if listing else "") if left > 0 else ""
    return f" Known: {', '.join(options[:LISTED])}{more}"


def unknown(kind: str, got: object, options: Iterable[str], where: str = "") -> GenError:
    """Return the error ``unknown sampler 'sdj' in a.yaml. Did you mean 'sjd'? Known: ...``.

    Args:
        kind: kind of the name.
        got: name that came.
        options: known names.
        where: file or flag that the name came from.
    """
    options = sorted(str(o) for o in options)
    source = f" in {where}" if where else ""
    known = listed(options, LISTINGS.get(kind, ""))
    return GenError(f"unknown {kind} {shown(got)}{source}.{hint(got, options)}{known}")


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
    return ValueError(
        f"{cut(where)}: {shown(got)} is outside {what}.{hint(got, options)}"
        f" Known: {', '.join(options)}"
    )


def bad_type(name: str, got: object, expected: str) -> WrongType:
    """Return the error ``prompts is 3; expected a text``, which is a ``TypeError`` too.

    Args:
        name: name of the argument.
        got: value that came.
        expected: values that are taken, in words.
    """
    return WrongType(f"{name} is {shown(got)}, a {type(got).__name__}; expected {expected}")


def bad_value(name: str, got: object, expected: str, where: str = "") -> GenError:
    """Return the error ``window is 0; expected an integer of at least 1``.

    Args:
        name: name of the parameter.
        got: value that came.
        expected: values that are taken, in words.
        where: file or flag that the value came from.
    """
    source = f" in {where}" if where else ""
    return GenError(f"{name} is {shown(got)}{source}; expected {expected}")


def describe(problem: BaseException) -> str:
    """Return an exception as one line; with GEN_DEBUG set, print its traceback."""
    if os.environ.get("GEN_DEBUG"):
        traceback.print_exception(problem)
    text = " ".join(str(problem).split())[:300]
    return text if isinstance(problem, GenError) else f"{type(problem).__name__}: {text}"
