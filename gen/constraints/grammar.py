"""Grammars that are no automata, through the library llguidance.

Context-free grammars in Lark's or GBNF's syntax, and JSON schemas that an automaton does not
express, say which token may come next; a matcher of llguidance follows each row. Such a constraint
serves causal models only. It does not know how long a text must still become: where the positions
of a row run out, the text ends unfinished.

Bytes that the grammar forces are split into the longest tokens, the only ones allowed there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from math import ceil
from typing import Any

import numpy as np

from gen.constraints.budget import check, share
from gen.constraints.kind import Context
from gen.contracts.constraint import BITS, Constraint, ConstraintState, pack_bools
from gen.core.errors import GenError, bad_value
from gen.media.containers import require_package

SYNTAXES = ("lark", "gbnf")
MOST_STATES = 50_000  # of the lexer of a row, about 1.5 kB each
MOST_ITEMS = 20_000  # of the parser in one step, about 1 ms
GRAMMAR_BYTES = 4_000_000  # of a small grammar's tables, measured
POSITION = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
# one spelling of white space, as the automata of schemas have it
SPACING = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


def grammar_constraint(text: str, context: Context, syntax: str = "lark") -> Constraint:
    """Return a grammar as a constraint.

    Args:
        text: grammar with a rule ``start`` (Lark) or ``root`` (GBNF).
        context: model and request.
        syntax: ``lark`` or ``gbnf``.

    Raises:
        GenError: the grammar does not parse, with line and column; llguidance is not installed; or
            the tokens of the model are no text.
    """
    library = _library()
    if not isinstance(text, str):
        raise bad_value("structured.grammar", text, "the text of a grammar")
    if syntax not in SYNTAXES:
        raise bad_value("structured.syntax", syntax, " or ".join(SYNTAXES))
    if syntax == "lark" and "::=" in text:
        raise GenError("the grammar has ::=, as GBNF does; expected syntax: gbnf, or Lark's rules")
    if syntax == "gbnf":
        text = _lark_of(text)
    return _Grammar(library.LLMatcher.grammar_from_lark(text), context, "grammar")


def schema_constraint(schema: Any, context: Context) -> Constraint:
    """Return a JSON schema as a constraint of llguidance.

    Args:
        schema: the schema, as ``json.loads`` returns it.
        context: model and request.

    Raises:
        GenError: llguidance does not support the schema or is not installed, or the tokens of the
            model are no text.
    """
    library = _library()
    if schema is False:
        raise GenError("the schema is satisfied by no text: it is false; expected another one")
    text = "{}" if schema is True else json.dumps(schema)
    try:
        grammar = library.LLMatcher.grammar_from_json_schema(text, overrides=SPACING)
    except ValueError as error:
        raise _refused("json_schema", str(error)) from None
    return _Grammar(grammar, context, "json_schema")


def _library() -> Any:
    return require_package("llguidance", '"gen-toolkit[structured]"', "a grammar")


def _lark_of(text: str) -> str:
    """Write a grammar of GBNF in Lark's syntax."""
    converter = import_module("llguidance.gbnf_to_lark")
    try:
        return converter.gbnf_to_lark(text)
    except converter.GbnfToLarkError as error:
        before = text[: error.pos.pos]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        message = str(error).partition(" at line ")[0]
        raise GenError(
            f"the grammar does not parse at line {line}, column {column}: {message}"
        ) from None
    except Exception as error:  # the converter raises bare Exceptions
        raise GenError(f"the grammar does not parse: {error}; expected GBNF") from None


def _refused(kind: str, message: str) -> GenError:
    """Return the error of a grammar or schema that the library refuses."""
    lines = [line for line in message.splitlines() if line.strip()]
    first = lines[0] if lines else "no message"
    found = POSITION.match(first)
    if kind == "json_schema":
        return GenError(f"the schema is none that llguidance supports: {first}")
    where = f" at line {found[1]}, column {found[2]}" if found else ""
    return GenError(
        f"the grammar does not parse{where}: {first[found.end() :] if found else first}"
    )


class _Tokens:
    """Vocabulary in the form that llguidance reads.

    Tokens that write other bytes at the start of a text are listed twice: their second id is that
    of the start.

    Attributes:
        at_start: id of every token at the start of a text, int64 [V]; -1 for tokens that are no
            text, or write nothing there.
        is_silent: tokens that write nothing at the start of a text, bool [V].
    """

    bos_token_id = None

    def __init__(self, first: Sequence[bytes | None], later: Sequence[bytes | None]):
        self.tokens = [part or b"" for part in later]
        self.at_start = np.arange(len(later))
        for token, (start, part) in enumerate(zip(first, later, strict=True)):
            if start != part:
                self.at_start[token] = len(self.tokens) if start else -1
                self.tokens += [start] if start else []
        self.is_silent = np.array([start == b"" for start in first])
        self.index = {part: i for i, part in reversed([*enumerate(later)]) if part}
        self.longest = max(map(len, self.index), default=1)
        self.eos_token_id = len(self.tokens)
        self.tokens.append(b"<end>")
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: bytes | str) -> list[int]:
        """Split bytes into the longest tokens."""
        text = text.encode() if isinstance(text, str) else text
        found, i = [], 0
        while i < len(text):
            for size in range(min(self.longest, len(text) - i), 0, -1):
                token = self.index.get(text[i : i + size])
                if token is not None:
                    break
            else:
                return found  # no token writes the next byte
            found.append(token)
            i += size
        return found


def _limits() -> Any:
    """Return what llguidance may take; its own limits on grammars and regular expressions stay."""
    return _library().LLParserLimits(max_lexer_states=MOST_STATES, step_max_items=MOST_ITEMS)


@lru_cache(maxsize=4)
def _tokenizer(
    first: tuple[bytes | None, ...], later: tuple[bytes | None, ...]
) -> tuple[Any, _Tokens]:
    library = _library()
    tokens = _Tokens(first, later)
    return library.LLTokenizer(library.TokenizerWrapper(tokens)), tokens


class _Grammar(Constraint):
    """Grammar of llguidance with the tokens of a model; a copy by ``pickle`` is built anew."""

    def __init__(self, grammar: str, context: Context, kind: str):
        self.arguments = grammar, context, kind
        vocabulary = context.require_text(kind)
        if not context.ends:
            raise GenError(
                f"structured.{kind} of llguidance needs an eos token, and the model has none;"
                " expected a model whose texts may end"
            )
        self.vocab_size = len(vocabulary)
        self.ends = frozenset(context.ends)
        legal = context.legal.any(0)
        legal[list(context.ends)] = False
        kept = legal.tolist()
        first = tuple(t if ok else None for t, ok in zip(vocabulary.first, kept, strict=True))
        later = tuple(t if ok else None for t, ok in zip(vocabulary.later, kept, strict=True))
        self.first = first
        tokenizer, self.tokens = _tokenizer(first, later)
        self.is_text = pack_bools(np.array([part is not None for part in later]))
        self.ending = np.zeros(self.vocab_size, bool)
        self.ending[list(self.ends)] = True
        self.ending = pack_bools(self.ending)
        with share(0.5):  # where another process built it, it is built once more
            matcher = _library().LLMatcher(tokenizer, grammar, log_level=0, limits=_limits())
            check()
        if matcher.is_error():
            raise _refused(kind, matcher.get_error())
        self.matcher = matcher
        if not self.start().allowed_bitmask(1).any():
            raise GenError(
                f"structured.{kind} accepts no text that this vocabulary can spell; expected at"
                " least one"
            )

    @property
    def nbytes(self) -> int:
        return GRAMMAR_BYTES + 200 * len(self.arguments[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return _Grammar, self.arguments

    def start(self) -> ConstraintState:
        return _GrammarState(self, self.matcher.deep_copy())


class _GrammarState(ConstraintState):
    """Matcher of one row.

    Attributes:
        read: id that the matcher has read for every token of the row; -1 for tokens that it has
            not: eos tokens, and a first token that writes nothing.
        ends: eos tokens at the end of the row.
    """

    def __init__(self, grammar: _Grammar, matcher: Any):
        self.grammar, self.matcher = grammar, matcher
        self.read: list[int] = []
        self.ends = 0

    def allowed_bitmask(self, remaining: int) -> np.ndarray:
        grammar = self.grammar
        if self.ends:
            return grammar.ending.copy()
        mask = np.frombuffer(self.matcher.compute_bitmask(), "<i4")
        if self.matcher.is_error():
            raise GenError(f"llguidance stopped: {self.matcher.get_error().splitlines()[0]}")
        if self.read:
            mask = mask[: ceil(grammar.vocab_size / BITS)] & grammar.is_text
        else:
            mask = self._at_start(mask)
        return mask | grammar.ending if self.matcher.is_accepting() else mask

    def _at_start(self, mask: np.ndarray) -> np.ndarray:
        """Return the tokens that may come first, whose bytes differ from those of later ones."""
        ids = self.grammar.tokens.at_start
        allowed = (ids >= 0) & (mask[ids // BITS] >> (ids % BITS) & 1).astype(bool)
        if not allowed.any():  # forced bytes were split as after other tokens
            forced = self.matcher.compute_ff_bytes()
            allowed = np.array([bool(t) and forced.startswith(t) for t in self.grammar.first])
        later = mask[: ceil(self.grammar.vocab_size / BITS)] & self.grammar.is_text
        if later.any():
            allowed |= self.grammar.tokens.is_silent
        return pack_bools(allowed) & self.grammar.is_text

    def advance(self, token: int) -> bool:
        if token in self.grammar.ends:
            if not (self.ends or self.matcher.is_accepting()):
                return False
            self.ends += 1
            self.read.append(-1)
            return True
        tokens = self.grammar.tokens
        if self.ends:
            return False
        if not self.read and tokens.is_silent[token]:
            self.read.append(-1)
            return True
        known = token if self.read else int(tokens.at_start[token])
        if known < 0 or not tokens.tokens[known] or not self.matcher.try_consume_tokens([known]):
            return False
        self.read.append(known)
        return True

    def rollback(self, count: int) -> None:
        if not 0 <= count <= len(self.read):
            raise GenError(
                f"count is {count}; expected 0 to {len(self.read)}, the tokens of the row"
            )
        kept = len(self.read) - count
        if any(known >= 0 for known in self.read[kept:]):
            # the library's own rollback loses tokens: `[`, `9`, two back, `[[` offers no `]]`
            self.matcher = self.grammar.matcher.deep_copy()
            self.matcher.try_consume_tokens([known for known in self.read[:kept] if known >= 0])
        del self.read[kept:]
        self.ends = max(self.ends - count, 0)
