"""Functions that an answer may call: fields of requests, the rule that holds an answer to them, and
the calls of an answer as OpenAI's API shows them.

``/v1/chat/completions`` and ``/v1/responses`` share it:

    use = ToolUse.of(modality, tools, choice, parallel)   # None: nothing may be called
    condition = Condition.of({"messages": turns, "tools": use.tools})
    sampling["structured"] = use.rule()
    content, calls, is_whole = use.read(text)             # or, of a stream, use.reader()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from gen.contracts.modality import Modality
from gen.core.errors import hint, shown
from gen.core.tool_calls import CallReader, ToolFormat, read_calls
from gen.serve.api.errors import ApiError
from gen.serve.api.fields import Fields, Text

MOST_TOOLS = 128
FunctionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class Function(Fields):
    """Function that an answer may call."""

    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of an object.")
    strict: bool | None = Field(None, description="Arguments satisfy the schema in any case.")


class Tool(Fields):
    """Tool that an answer may use."""

    type: Literal["function"]
    function: Function


class NamedFunction(Fields):
    """Name of a function."""

    name: FunctionName


class NamedChoice(Fields):
    """Choice of the one function that is called."""

    type: Literal["function"]
    function: NamedFunction


Tools = Annotated[list[Tool], Field(max_length=MOST_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedChoice


@dataclass(frozen=True)
class ToolUse:
    """Functions that an answer may call, and whether it has to.

    Attributes:
        form: format in which the model writes calls.
        tools: functions as chat templates take them, the value of ``Condition.tools``.
        choice: ``auto``, ``required``, or the name of the function that is called.
        parallel: an answer may have several calls.
    """

    form: ToolFormat
    tools: tuple[dict[str, Any], ...]
    choice: str = "auto"
    parallel: bool = True

    @classmethod
    def of(
        cls,
        modality: Modality,
        functions: Sequence[Mapping[str, Any]],
        choice: str | None = None,
        parallel: bool | None = None,
    ) -> ToolUse | None:
        """Return what an answer may call; None for nothing.

        Args:
            modality: modality of the model, as the model serves it.
            functions: name, description and parameters of each function.
            choice: ``none``, ``auto``, ``required`` or the name of a function; None for ``auto``.
            parallel: an answer may have several calls; None for True.

        Raises:
            ApiError: the model takes no tools, or the choice is none of the functions.
        """
        names = [function["name"] for function in functions]
        choice = "auto" if choice is None else choice
        is_named = choice not in ("none", "auto", "required")
        if (is_named and choice not in names) or (choice == "required" and not names):
            known = ", ".join(names) or "tools, of which there are none"
            message = f"tool_choice is {shown(choice)}; expected {known}.{hint(choice, names)}"
            raise ApiError(message, "tool_choice", "invalid_value")
        if twice := next((name for name in names if names.count(name) > 1), None):
            message = f"tools has the function {shown(twice)} twice; expected names that differ"
            raise ApiError(message, "tools", "invalid_value")
        if not names or choice == "none":
            return None
        if modality.tool_format is None:
            message = "the model takes no tools, since it has no chat template; expected none"
            raise ApiError(message, "tools", "unsupported_value")
        told = ("name", "description", "parameters")
        tools = tuple(
            {"type": "function", "function": {k: f[k] for k in told if f.get(k) is not None}}
            for f in functions
        )
        return cls(modality.tool_format, tools, choice, parallel is not False)

    def rule(self, text: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the rule that holds an answer to the functions, a value of ``structured``.

        Args:
            text: JSON schema of an answer without calls; None for any text.
        """
        more = {} if text is None else {"text": text}
        return {
            "tool_calls": list(self.tools),
            "format": self.form.name,
            "call": self.choice,
            "parallel": self.parallel,
            **more,
        }

    def reader(self) -> CallReader:
        """Return a reader of one answer that comes in parts."""
        return CallReader(self.form)

    def read(self, text: str) -> tuple[str, list[dict[str, Any]], bool]:
        """Read a whole answer, see ``gen.core.tool_calls.read_calls``; calls have an ``id`` too."""
        content, calls, is_whole = read_calls(text, self.form)
        return content, [{"id": self.form.new_id(), **call} for call in calls], is_whole


class ToolFields(Fields):
    """Fields of requests whose answers may call functions."""

    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    def tool_use(self, modality: Modality) -> ToolUse | None:
        """Return what the answer may call; None for nothing. Raises ``ApiError``."""
        choice = chosen(self.tool_choice)
        return ToolUse.of(modality, functions_of(self.tools), choice, self.parallel_tool_calls)


def chosen(choice: str | NamedChoice | None) -> str | None:
    """Return a choice as ``ToolUse.of`` takes it."""
    return choice.function.name if isinstance(choice, NamedChoice) else choice


def functions_of(tools: Sequence[Tool] | None) -> list[dict[str, Any]]:
    """Return functions as ``ToolUse.of`` takes them."""
    return [tool.function.model_dump() for tool in tools or ()]
