"""Tool calls in texts: the formats that chat templates teach, and the reading of what was written.

A model calls functions by writing a JSON object of a name and arguments for each call. Formats
differ in what stands around the objects, and in the name of the key of the arguments. Constraints
(``gen.constraints.kinds.tool_calls``) hold a text to a format, templates
(``gen.models.load.chat``) tell a model of it, and ``CallReader`` reads it, whole or in parts.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass
from typing import Any

HEAD = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\S)'
)
SIGN = re.compile(r'["\\{}]')  # characters of a JSON object that matter to where it ends


@dataclass(frozen=True)
class ToolFormat:
    """Format of the calls of an answer.

    Attributes:
        name: name of the format.
        taught: text that a chat template of this format holds.
        foreign: text that a template of another format holds beside ``taught``.
        sign: text at which the calls of an answer have begun.
        opening: regular expression of what stands between the sign and the first object.
        separator: the same between two objects.
        closing: the same behind the last object.
        key: key of the arguments in the object of a call.
        is_whole: the sign is the beginning of the first object, and calls are a whole answer.
    """

    name: str
    taught: str
    foreign: str
    sign: str
    opening: str
    separator: str
    closing: str
    key: str = "arguments"
    is_whole: bool = False

    def new_id(self) -> str:
        """Return an id for a call; templates of Mistral take nine letters and digits."""
        size = 9 if self.name == "mistral" else 24
        return f"{'' if size == 9 else 'call_'}{secrets.token_hex(12)[:size]}"


FORMATS = {
    f.name: f
    for f in (
        ToolFormat(  # Hermes, Qwen, SmolLM2 and many others
            "hermes",
            "<tool_call>",
            "<function=",
            sign="<tool_call>",
            opening="\n?",
            separator="\n?</tool_call>\n?<tool_call>\n?",
            closing="\n?</tool_call>",
        ),
        ToolFormat(
            "mistral",
            "[TOOL_CALLS]",
            "[ARGS]",
            sign="[TOOL_CALLS]",
            opening=r" ?\[",
            separator=", ?",
            closing=r"\]",
        ),
        ToolFormat(
            "llama3",
            '{"name": function name, "parameters":',
            "<function=",
            sign='{"name":',
            opening="",
            separator="; ?",
            closing="",
            key="parameters",
            is_whole=True,
        ),
    )
}
# tokens that are text wherever they come, though a tokenizer may call them special
MARKERS = frozenset({"[TOOL_CALLS]", "<tool_call>", "</tool_call>"})
DEFAULT = FORMATS["hermes"]  # of a template that takes no tools, or writes calls in another format


def format_of(template: str) -> ToolFormat | None:
    """Return the format of the calls that a chat template writes; None for one of no format."""
    for found in FORMATS.values():
        if found.taught in template and found.foreign not in template:
            return found
    return None


@dataclass(frozen=True)
class Said:
    """Part of an answer: text, or a part of a call.

    Attributes:
        text: text beside the calls, or what follows in the arguments of a call.
        call: number of the call; None for text.
        name: name of the function, in the first part of a call.
    """

    text: str
    call: int | None = None
    name: str | None = None


class CallReader:
    """Reader of an answer that may hold calls, part by part.

    White space between text and calls is left out.

    Attributes:
        count: calls that have begun.
        is_open: the arguments of the last call are not over.

    Args:
        form: format of the calls.
    """

    def __init__(self, form: ToolFormat):
        self.form = form
        self.count, self.is_open = 0, False
        self._rest, self._read = "", self._text
        self._is_first, self._depth, self._is_quoted = True, 0, False

    def feed(self, text: str) -> list[Said]:
        """Return what a further part of the text adds."""
        self._rest += text
        found: list[Said] = []
        while (said := self._read()) is not None:
            found += said
        return found

    def finish(self) -> list[Said]:
        """Return what was held back, at the end of the text."""
        rest, self._rest = self._rest, ""
        is_text = self._read in (self._text, self._head)
        return [Said(rest)] if is_text and rest else []

    def _text(self) -> list[Said] | None:
        """Read text up to the sign of calls; None where more has to come."""
        form, rest = self.form, self._rest
        if form.is_whole and not self._is_first:
            self._rest = ""
            return [Said(rest)] if rest else None
        at = rest.find(form.sign)
        if at >= 0 and not (form.is_whole and rest[:at].strip()):
            before = rest[:at].rstrip()
            self._rest = rest[at + (0 if form.is_whole else len(form.sign)) :]
            self._read = self._between
            return [Said(before)] if before else []
        held = next((n for n in range(len(form.sign), 0, -1) if rest.endswith(form.sign[:n])), 0)
        if form.is_whole and rest[: len(rest) - held].strip():
            held = 0
        sure = rest[: len(rest) - held].rstrip()
        if not sure:
            return None
        self._rest, self._is_first = rest[len(sure) :], False
        return [Said(sure)]

    def _between(self) -> list[Said] | None:
        """Skip what stands in front of the object of a call."""
        at = self._rest.find("{")
        self._rest = self._rest[at:] if at >= 0 else ""
        if at < 0:
            return None
        self._read = self._head
        return []

    def _head(self) -> list[Said] | None:
        """Read the name of the function."""
        found = HEAD.match(self._rest)
        if found is None:
            return None
        self._rest, self._read = self._rest[found.end() :], self._arguments
        self.count, self.is_open, self._depth = self.count + 1, True, 0
        return [Said("", self.count - 1, json.loads(found[1]))]

    def _arguments(self) -> list[Said] | None:
        """Read what is there of the arguments, a JSON object."""
        rest, end = self._rest, None
        at = 0
        while end is None and (found := SIGN.search(rest, at)) is not None:
            at = found.end()
            if found[0] == "\\":
                if at == len(rest):  # what is escaped comes with the next part
                    rest, at = rest[:-1], at - 1
                    break
                at += 1
            elif found[0] == '"':
                self._is_quoted = not self._is_quoted
            elif not self._is_quoted:
                self._depth += 1 if found[0] == "{" else -1
                end = None if self._depth else at
        said = rest[:end]
        self._rest = self._rest[len(said) :]
        if end is not None:
            self.is_open, self._read = False, self._between
            return [Said(said, self.count - 1)]
        return [Said(said, self.count - 1)] if said else None


def read_calls(text: str, form: ToolFormat) -> tuple[str, list[dict[str, Any]], bool]:
    """Read an answer that may hold calls.

    Args:
        text: the answer.
        form: format of the calls.

    Returns:
        Text beside the calls; name and arguments of every call, the arguments as JSON text; and
        whether the arguments of the last one are over.
    """
    reader = CallReader(form)
    content, calls = "", []
    for said in [*reader.feed(text), *reader.finish()]:
        if said.call is None:
            content += said.text
        elif said.name is not None:
            calls.append({"name": said.name, "arguments": said.text})
        else:
            calls[-1]["arguments"] += said.text
    return content, calls, not reader.is_open
