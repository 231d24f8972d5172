"""Output of ``/v1/responses``: items that grow with the text of the model, and events that tell of
it."""

from __future__ import annotations

import secrets
from typing import Any

from gen.core.tool_calls import Said
from gen.serve.api.tools import ToolUse

Event = dict[str, Any]


class Output:
    """Items of one answer.

    Attributes:
        items: the items, as a response shows them.

    Args:
        use: functions that the answer may call; None for nothing.
    """

    def __init__(self, use: ToolUse | None):
        self.items: list[dict[str, Any]] = []
        self.reader = None if use is None else use.reader()
        self.use = use

    def part(self, text: str) -> list[Event]:
        """Take a part of the text of the model; return what a stream says of it."""
        if self.reader is None:
            return self._text(text)
        return [event for said in self.reader.feed(text) for event in self._said(said)]

    def finish(self, is_whole: bool, logprobs: list[Any] | None) -> list[Event]:
        """End the answer; return what a stream says of it.

        Args:
            is_whole: whether the model ended it itself.
            logprobs: log-probabilities of its tokens; None where nobody asked for them.
        """
        events: list[Event] = []
        if self.reader is not None:
            events = [event for said in self.reader.finish() for event in self._said(said)]
            is_whole = is_whole or bool(self.reader.count and not self.reader.is_open)
        if not self.items:
            events += self._text("")
        first = next((i for i in self.items if i["type"] == "message"), None)
        if first is not None:
            first["content"][0]["logprobs"] = logprobs or []
        return events + self._close("completed" if is_whole else "incomplete")

    def _said(self, said: Said) -> list[Event]:
        """Take a part of a text or of a call."""
        if said.call is None:
            return self._text(said.text)
        events = [] if said.name is None else self._call(said.name)
        self.items[-1]["arguments"] += said.text
        if said.text:
            events.append(self._about("function_call_arguments.delta", delta=said.text))
        return events

    def _text(self, text: str) -> list[Event]:
        """Take a part of a text; the first one opens its item."""
        events: list[Event] = []
        if not self.items or self.items[-1]["type"] != "message":
            events = self._close("completed")
            item = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant"}
            events += self._open({**item, "status": "in_progress", "content": []})
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self.items[-1]["content"].append(part)
            events.append(self._about("content_part.added", content_index=0, part=dict(part)))
        self.items[-1]["content"][0]["text"] += text
        if text:
            about = {"content_index": 0, "delta": text, "logprobs": []}
            events.append(self._about("output_text.delta", **about))
        return events

    def _call(self, name: str) -> list[Event]:
        """Open the item of a call."""
        assert self.use is not None, "answers call what they may call"
        events = self._close("completed")
        item = {"id": f"fc_{secrets.token_hex(12)}", "type": "function_call"}
        call = {"call_id": self.use.form.new_id(), "name": name, "arguments": ""}
        return events + self._open({**item, "status": "in_progress", **call})

    def _open(self, item: dict[str, Any]) -> list[Event]:
        self.items.append(item)
        shown = {**item, "content": []} if item["type"] == "message" else dict(item)
        index = len(self.items) - 1
        return [{"type": "response.output_item.added", "output_index": index, "item": shown}]

    def _close(self, status: str) -> list[Event]:
        """End the last item, if there is one."""
        if not self.items:
            return []
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "message":
            part = dict(item["content"][0])
            said = {"text": part["text"], "logprobs": part["logprobs"]}
            events = [
                self._about("output_text.done", content_index=0, **said),
                self._about("content_part.done", content_index=0, part=part),
            ]
        else:
            whole = {"arguments": item["arguments"], "name": item["name"]}
            events = [self._about("function_call_arguments.done", **whole)]
        index = len(self.items) - 1
        done = {"type": "response.output_item.done", "output_index": index, "item": dict(item)}
        return [*events, done]

    def _about(self, kind: str, /, **what: Any) -> Event:
        """Return an event about the last item."""
        index = len(self.items) - 1
        about = {"item_id": self.items[-1]["id"], "output_index": index}
        return {"type": f"response.{kind}", **about, **what}
