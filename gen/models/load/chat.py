"""Chat templates of tokenizers and processors: turns of a conversation become the text or the token
ids that a model was trained on.

The content of a turn is a text, or a list of parts such as ``{"type": "text", "text": ...}``. A
template takes one of both forms or both; the content is put into a form that it takes.

A template that takes tools, and writes calls in a format of ``gen.core.tool_calls``, gets them as
they are. For any other, tools, calls and results become texts of turns in the format of Hermes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gen.core.errors import GenError, bad_value
from gen.core.tool_calls import DEFAULT, ToolFormat, format_of
from gen.models.load.bounded_text import OverBudget, rendered, start

PROBE = "probe"  # a word that a template repeats if it takes the form of the content
Turns = Sequence[Mapping[str, Any]]
TOOLS_PROMPT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def uses_chat_template(tokenizer: Any, chat: bool | None, name: str | Path) -> bool:
    """Decide whether prompts go into the chat template of a tokenizer or processor: ``chat``, by
    default if it has one. Raises ``GenError`` for ``chat=True`` without a template."""
    if chat is not None and not isinstance(chat, bool):
        raise bad_value("chat", chat, "true, false or None")
    if chat and not tokenizer.chat_template:
        raise GenError(f"the tokenizer of {name} has no chat template; expected chat=False")
    uses = bool(tokenizer.chat_template) if chat is None else chat
    if uses:
        source_of(tokenizer)
        start()  # while the weights are read
    return uses


def chat_text(processor: Any, chat: str | Turns, image_token: str, tools: Turns = ()) -> str:
    """Return the text of a chat up to the start of the answer.

    Args:
        processor: processor or tokenizer of transformers that has a template.
        chat: turns of a conversation, or one message of the user.
        image_token: text that stands for an image where the template takes texts alone.
        tools: functions that the answer may call.

    Raises:
        GenError: the template refuses the conversation, or takes too much time or memory.
    """
    turns, more = _with_tools(processor, chat, tools)
    return _applied(processor, _turns(processor, turns, image_token), **more)


def own_format(templates: Any) -> ToolFormat | None:
    """Return the format in which a chat template writes calls; None where it takes no tools, or
    writes them in another format. ``templates``: tokenizer or processor that has the template."""
    source = templates.chat_template or ""
    if isinstance(source, Mapping):  # several templates by name
        source = source.get("tool_use", source.get("default", ""))
    return format_of(source) if "tools" in source else None


def _with_tools(
    templates: Any, chat: str | Turns, tools: Turns
) -> tuple[str | Turns, dict[str, Any]]:
    """Return turns whose calls and results the template takes, and its further arguments."""
    if isinstance(chat, str):
        chat = [{"role": "user", "content": chat}]
    form = own_format(templates)
    if form is not None:
        return _with_ids(form, chat), {"tools": list(tools)} if tools else {}
    turns = _calls_as_texts(chat)
    if not tools:
        return turns, {}
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    prompt = TOOLS_PROMPT.format(tools=listed)
    if turns[0]["role"] not in ("system", "developer"):
        if _takes(templates, PROBE, "system"):
            return [{"role": "system", "content": prompt}, *turns], {}
        prompt += "\n\n"
    first, is_system = turns[0], turns[0]["role"] in ("system", "developer")
    texts = [first["content"], f"\n\n{prompt}"] if is_system else [prompt, first["content"]]
    return [{**first, "content": _in_one(texts)}, *turns[1:]], {}


def _with_ids(form: ToolFormat, turns: Turns) -> Turns:
    """Return turns whose calls have ids that the template takes: templates of Mistral refuse other
    lengths than its own."""
    size = len(form.new_id())
    if form.name != "mistral":
        return turns

    def short(name: str) -> str:
        kept = "".join(letter for letter in name if letter.isalnum())
        return kept[-size:].rjust(size, "0")

    found = []
    for turn in turns:
        calls = [{**c, "id": short(c.get("id", ""))} for c in turn.get("tool_calls", ())]
        told = {"tool_call_id": short(turn["tool_call_id"])} if "tool_call_id" in turn else {}
        found.append({**turn, **({"tool_calls": calls} if calls else {}), **told})
    return found


def _calls_as_texts(turns: Turns) -> list[dict[str, Any]]:
    """Return turns whose calls and results are part of their texts, in the format of Hermes."""
    found: list[dict[str, Any]] = []
    for turn in turns:
        role, content = turn["role"], turn["content"]
        texts = [content] if content else []
        if role == "tool":
            texts = ["<tool_response>\n", *texts, "\n</tool_response>"]
            if found and found[-1].get("is_result"):  # results of one answer are one turn
                found[-1]["content"] = _in_one([found[-1]["content"], "\n", *texts])
                continue
            found.append({"role": "user", "content": _in_one(texts), "is_result": True})
            continue
        for call in turn.get("tool_calls", ()):
            function = call["function"]
            said = {"name": function["name"], DEFAULT.key: function["arguments"]}
            text = json.dumps(said, ensure_ascii=False)
            texts.append(f"{chr(10) if texts else ''}{DEFAULT.sign}\n{text}\n</tool_call>")
        found.append({"role": role, "content": _in_one(texts) if texts else content})
    return [{"role": turn["role"], "content": turn["content"]} for turn in found]


def _in_one(contents: Sequence[str | list[dict[str, str]]]) -> str | list[dict[str, str]]:
    """Return contents as one: a text, or a list of parts where one of them is a list."""
    if all(isinstance(content, str) for content in contents):
        return "".join(map(str, contents))
    return [p for c in contents for p in (_parts(c) if isinstance(c, str) else c)]


def turn_end(templates: Any, tokenizer: Any) -> int | None:
    """Return the token that a chat template puts right behind the content of an answer: the id of
    an added token such as ``<|im_end|>``; None where a text follows, or nothing.

    Args:
        templates: tokenizer or processor that has the template.
        tokenizer: its tokenizer.
    """
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE}]
    try:
        text = render(templates, _turns(templates, turns))
    except OverBudget:
        raise
    except GenError:  # a template that takes no answers ends none
        return None
    behind = text.rpartition(PROBE)[2]
    added = {str(token): i for i, token in tokenizer.added_tokens_decoder.items()}
    found = [word for word in added if word and behind.startswith(word)]
    return added[max(found, key=len)] if PROBE in text and found else None


def render(
    templates: Any, turns: Turns, prompt: bool = False, tools: Turns = (), source: str = ""
) -> str:
    """Return the text that a chat template makes of turns, within bounds of time and memory.

    Args:
        templates: tokenizer or processor that has the template.
        turns: turns of a conversation, of a form that the template takes.
        prompt: whether the answer begins behind it.
        tools: functions that the answer may call.
        source: another template than its own.

    Raises:
        GenError: the template raises an error, or takes too much time or memory.
    """
    tokenizer = getattr(templates, "tokenizer", templates)  # that of a processor
    words = {name: str(word) for name, word in tokenizer.special_tokens_map.items()}
    given = {
        **words,
        "conversations": [[{k: v for k, v in turn.items() if v is not None} for turn in turns]],
        "tools": list(tools) or None,
        "add_generation_prompt": prompt,
    }
    return rendered().of(source or source_of(templates, bool(tools)), given)


def source_of(templates: Any, has_tools: bool = False) -> str:
    """Return a chat template. Of several by name it is the default, or that of tools.

    Args:
        templates: tokenizer or processor that has the template.
        has_tools: whether there are functions that the answer may call.

    Raises:
        GenError: there are several, and none of them is the default.
    """
    source = templates.chat_template
    if isinstance(source, Mapping):
        usual = source.get("default")
        source = source.get("tool_use", usual) if has_tools else usual
    if not isinstance(source, str):
        expected = "a text, or several by name with one called 'default'"
        raise bad_value("the chat template of the model", templates.chat_template, expected)
    return source


def _applied(templates: Any, turns: Turns, tools: Turns = ()) -> str:
    try:
        return render(templates, turns, True, tools)
    except OverBudget:
        raise
    except GenError as error:
        raise GenError(
            f"the chat template of the model refuses the conversation: {error}; expected roles and"
            " an order of turns that it takes"
        ) from None


def _turns(tokenizer: Any, chat: str | Turns, image_token: str = "") -> list[dict[str, Any]]:
    """Return turns whose contents have a form that the template takes."""
    turns = [{"role": "user", "content": chat}] if isinstance(chat, str) else chat
    takes_text, takes_parts = _takes(tokenizer, PROBE), _takes(tokenizer, _parts(PROBE))
    found = []
    for turn in turns:
        content = turn["content"]
        if isinstance(content, str):
            content = _parts(content) if takes_parts and not takes_text else content
        elif takes_text and not takes_parts:
            content = _joined(content, image_token)
        found.append({**turn, "content": content})
    return found


def _takes(tokenizer: Any, content: str | list[dict[str, str]], role: str = "user") -> bool:
    """Return True if the template writes the text of a content of this form, and no more of it.
    ``role``: of the turn; one of the user follows another role."""
    turns = [{"role": role, "content": content}]
    if role != "user":
        turns.append({"role": "user", "content": "?"})
    try:
        text = render(tokenizer, turns)
    except OverBudget:
        raise
    except GenError:  # the template refuses the form
        return False
    is_quoted = f"'{PROBE}'" in text or f'"{PROBE}"' in text  # the list as a whole
    return PROBE in text and (isinstance(content, str) or not is_quoted)


def _parts(text: str) -> list[dict[str, str]]:
    """Return a text as a list of one part."""
    return [{"type": "text", "text": text}]


def _joined(content: Sequence[Mapping[str, str]], image_token: str) -> str:
    """Return the parts of a content as one text."""
    return "".join(image_token if p["type"] == "image" else p["text"] for p in content)
