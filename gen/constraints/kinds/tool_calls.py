"""Kind ``tool_calls``.

The language is an automaton where one expresses the schemas of the functions, and else a grammar of
llguidance.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from gen.constraints.budget import within
from gen.constraints.byte_dfa import (
    ByteDFA,
    anything,
    complement,
    concat,
    difference,
    literal,
    union,
)
from gen.constraints.grammar import SPACING, grammar_constraint
from gen.constraints.json_schema import schema_dfa
from gen.constraints.kind import ConstraintKind, Context
from gen.constraints.regex import regex
from gen.contracts.constraint import Constraint
from gen.core.condition_parts import read_tools
from gen.core.errors import GenError, bad_value, unknown
from gen.core.registry import register
from gen.core.tool_calls import DEFAULT, FORMATS, ToolFormat

AUTO, REQUIRED = "auto", "required"
ENGINES = ("auto", "automaton", "llguidance")
NO_PARAMETERS = {"type": "object", "properties": {}}


@register("constraint", "tool_calls")
@dataclass(frozen=True)
class ToolCalls(ConstraintKind):
    """Calls of functions, whose arguments satisfy a JSON schema each.

    Attributes:
        tools: the functions, as chat templates take them.
        format: name of the format that calls are written in.
        call: ``auto`` (a text, and calls behind it or none), ``required`` (calls alone), or the
            name of the function that is called.
        parallel: there may be several calls.
        text: JSON schema of a text without calls, where the call is ``auto``; None for any text.
        engine: ``automaton``, ``llguidance`` or ``auto``, as of ``json_schema``.
    """

    tools: Sequence[Any]
    format: str = DEFAULT.name
    call: str = AUTO
    parallel: bool = True
    text: Mapping[str, Any] | bool | None = None
    engine: str = AUTO

    def language(self, context: Context) -> ByteDFA | Constraint:
        context.require_text("tool_calls")
        if self.engine not in ENGINES:
            raise bad_value("structured.engine", self.engine, " or ".join(ENGINES))
        if self.format not in FORMATS:
            raise unknown("format of calls", self.format, FORMATS)
        functions = {t["function"]["name"]: t["function"] for t in read_tools(self.tools)}
        if not functions:
            raise bad_value("structured.tool_calls", self.tools, "at least one function")
        if self.call not in (AUTO, REQUIRED, *functions):
            raise unknown("function", self.call, (AUTO, REQUIRED, *functions))
        named = self.call not in (AUTO, REQUIRED)
        called = [functions[self.call]] if named else list(functions.values())
        form, parallel = FORMATS[self.format], self.parallel and not named
        schemas = {function["name"]: _schema(function) for function in called}
        if self.engine == "llguidance":
            text = _grammar(form, schemas, parallel, self.text, self.call == AUTO)
            return grammar_constraint(text, context)
        calls = _calls(form, schemas, parallel)
        if self.call != AUTO:
            return calls
        if self.text is not None:
            return union(schema_dfa(self.text), calls)
        return _with_text(form, calls)

    def alternative(self, context: Context) -> ConstraintKind | None:
        takes_any = context.left_to_right and context.ends and find_spec("llguidance")
        return replace(self, engine="llguidance") if self.engine == "auto" and takes_any else None


def _schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of the arguments of a function. Raises ``GenError`` for one of no
    object."""
    name, given = function["name"], function.get("parameters")
    schema = given or NO_PARAMETERS
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise bad_value(f"parameters of function {name!r}", given, "a JSON schema of an object")
    return {**schema, "type": "object"}


def _calls(form: ToolFormat, schemas: Mapping[str, Mapping[str, Any]], parallel: bool) -> ByteDFA:
    """Return calls of functions with all that the format puts around them. Raises ``GenError``."""
    found = []
    for name, schema in schemas.items():
        try:
            arguments = schema_dfa(dict(schema))
        except GenError as error:
            raise within(f"parameters of function {name!r}", error) from None
        found.append(concat(regex(_head(form, name)), arguments, literal(b"}")))
    call = union(*found)
    if parallel:
        call = concat(call, concat(regex(form.separator), call).star())
    sign = () if form.is_whole else (literal(form.sign.encode()),)
    return concat(*sign, regex(form.opening), call, regex(form.closing))


def _head(form: ToolFormat, name: str) -> str:
    """Return the regular expression of a call in front of its arguments."""
    spelt = re.escape(json.dumps(name, ensure_ascii=False))
    return rf'\{{"name": ?{spelt}, ?"{form.key}": ?'


def _with_text(form: ToolFormat, calls: ByteDFA) -> ByteDFA:
    """Return texts without the sign of a call, and such texts with calls behind them."""
    sign = literal(form.sign.encode())
    if form.is_whole:
        return union(difference(anything(), concat(regex(r"\s*"), sign, anything())), calls)
    text = complement(concat(anything(), sign, anything()))
    return union(text, concat(text, calls))


def _grammar(
    form: ToolFormat,
    schemas: Mapping[str, Mapping[str, Any]],
    parallel: bool,
    text: Mapping[str, Any] | bool | None,
    with_text: bool,
) -> str:
    """Return the language in Lark's syntax as llguidance has it; arguments as of ``ToolCalls``."""
    sign = re.escape(form.sign)
    rules = [f"call_{n}: {_terminal(_head(form, name))} {_json(schema)}"
             for n, (name, schema) in enumerate(schemas.items())]  # fmt: skip
    rules.append("call: " + " | ".join(f"call_{n}" for n in range(len(schemas))))
    more = f"({_terminal('}' + form.separator)} call)*" if parallel else ""
    opening = _terminal(form.opening) if form.opening else ""
    rules.append(f"calls: {opening} call {more} {_terminal('}' + form.closing)}")
    signed = "calls" if form.is_whole else f"{json.dumps(form.sign)} calls"
    if not with_text:
        start = signed
    elif text is not None:
        start = f"{_json(text)} | {signed}"
    elif form.is_whole:
        rules.append(rf"FREE: /(?s:.*)/ & ~/\s*{sign}(?s:.*)/")
        start = f"FREE | {signed}"
    else:
        rules.append(f"FREE: /(?s:.*)/ & ~{_terminal(f'(?s:.*){sign}(?s:.*)')}")
        rules.append(f"signed[lazy]: {_terminal(f'(?s:.*){sign}')}")
        start = "FREE | signed calls"
    return "\n".join([f"start: {start}", *rules])


def _terminal(pattern: str) -> str:
    """Return a regular expression as a terminal of a grammar."""
    return "/" + pattern.replace("/", r"\/").replace("\n", r"\n") + "/"


def _json(schema: Mapping[str, Any] | bool) -> str:
    """Return a JSON schema as a part of a grammar, spelt as automata spell it."""
    return "%json " + json.dumps({**({} if schema is True else schema), "x-guidance": SPACING})
