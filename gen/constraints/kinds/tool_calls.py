"""Kind ``tool_calls``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gen.constraints.byte_dfa import (
    ByteDFA,
    anything,
    complement,
    concat,
    difference,
    literal,
    union,
)
from gen.constraints.json_schema import schema_dfa
from gen.constraints.kind import ConstraintKind, Context
from gen.constraints.regex import regex
from gen.core.condition_parts import read_tools
from gen.core.errors import GenError, bad_value, unknown
from gen.core.registry import register
from gen.core.tool_calls import DEFAULT, FORMATS, ToolFormat

AUTO, REQUIRED = "auto", "required"
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
    """

    tools: Sequence[Any]
    format: str = DEFAULT.name
    call: str = AUTO
    parallel: bool = True
    text: Mapping[str, Any] | bool | None = None

    def language(self, context: Context) -> ByteDFA:
        context.require_text("tool_calls")
        if self.format not in FORMATS:
            raise unknown("format of calls", self.format, FORMATS)
        functions = {t["function"]["name"]: t["function"] for t in read_tools(self.tools)}
        if not functions:
            raise bad_value("structured.tool_calls", self.tools, "at least one function")
        if self.call not in (AUTO, REQUIRED, *functions):
            raise unknown("function", self.call, (AUTO, REQUIRED, *functions))
        named = self.call not in (AUTO, REQUIRED)
        called = [functions[self.call]] if named else list(functions.values())
        form = FORMATS[self.format]
        calls = _calls(form, called, self.parallel and not named)
        if self.call != AUTO:
            return calls
        if self.text is not None:
            return union(schema_dfa(self.text), calls)
        return _with_text(form, calls)


def _calls(form: ToolFormat, functions: Sequence[Mapping[str, Any]], parallel: bool) -> ByteDFA:
    """Return calls of the functions with all that the format puts around them."""
    call = union(*(_call(form, function) for function in functions))
    if parallel:
        call = concat(call, concat(regex(form.separator), call).star())
    sign = () if form.is_whole else (literal(form.sign.encode()),)
    return concat(*sign, regex(form.opening), call, regex(form.closing))


def _call(form: ToolFormat, function: Mapping[str, Any]) -> ByteDFA:
    """Return the objects of calls of a function. Raises ``GenError``."""
    name, given = function["name"], function.get("parameters")
    schema = given or NO_PARAMETERS
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise bad_value(f"parameters of function {name!r}", given, "a JSON schema of an object")
    try:
        arguments = schema_dfa({**schema, "type": "object"})
    except GenError as error:
        raise GenError(f"parameters of function {name!r}: {error}") from None
    head = f'{{"name":@{json.dumps(name, ensure_ascii=False)},@"{form.key}":@'
    spaced = [literal(part.encode()) for part in head.split("@")]
    space = literal(b" ").optional()
    parts = [piece for part in spaced[:-1] for piece in (part, space)]
    return concat(*parts, arguments, literal(b"}"))


def _with_text(form: ToolFormat, calls: ByteDFA) -> ByteDFA:
    """Return texts without the sign of a call, and such texts with calls behind them."""
    sign = literal(form.sign.encode())
    if form.is_whole:
        return union(difference(anything(), concat(regex(r"\s*"), sign, anything())), calls)
    text = complement(concat(anything(), sign, anything()))
    return union(text, concat(text, calls))
