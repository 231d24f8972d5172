"""Chat templates of tokenizers and processors: turns of a conversation become the text or the token
ids that a model was trained on.

The content of a turn is a text, or a list of parts such as ``{"type": "text", "text": ...}``. A
template takes one of both forms or both; the content is put into a form that it takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gen.core.errors import GenError, cut

PROBE = "probe"  # a word that a template repeats if it takes the form of the content
Turns = Sequence[Mapping[str, Any]]


def uses_chat_template(tokenizer: Any, chat: bool | None, name: str | Path) -> bool:
    """Decide whether prompts go into the chat template of a tokenizer or processor: ``chat``, by
    default if it has one. Raises ``GenError`` for ``chat=True`` without a template."""
    if chat and not tokenizer.chat_template:
        raise GenError(f"the tokenizer of {name} has no chat template; expected chat=False")
    return bool(tokenizer.chat_template) if chat is None else chat


def chat_token_ids(tokenizer: Any, chat: str | Turns) -> list[int]:
    """Return the token ids of a chat up to the start of the answer.

    Args:
        tokenizer: tokenizer of transformers that has a template.
        chat: turns of a conversation, or one message of the user.

    Raises:
        GenError: the template refuses the conversation.
    """
    encoded = _applied(tokenizer, _turns(tokenizer, chat), tokenize=True, return_dict=True)
    return list(encoded["input_ids"])


def chat_text(processor: Any, chat: str | Turns, image_token: str) -> str:
    """Return the text of a chat up to the start of the answer.

    Args:
        processor: processor or tokenizer of transformers that has a template.
        chat: as of ``chat_token_ids``.
        image_token: text that stands for an image where the template takes texts alone.

    Raises:
        GenError: the template refuses the conversation.
    """
    return _applied(processor, _turns(processor, chat, image_token), tokenize=False)


def turn_end(templates: Any, tokenizer: Any) -> int | None:
    """Return the token that a chat template puts right behind the content of an answer: the id of
    an added token such as ``<|im_end|>``; None where a text follows, or nothing.

    Args:
        templates: tokenizer or processor that has the template.
        tokenizer: its tokenizer.
    """
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE}]
    try:
        text = templates.apply_chat_template(_turns(templates, turns), tokenize=False)
    except Exception:  # a template that takes no answers ends none
        return None
    behind = text.rpartition(PROBE)[2]
    added = {str(token): i for i, token in tokenizer.added_tokens_decoder.items()}
    found = [word for word in added if word and behind.startswith(word)]
    return added[max(found, key=len)] if PROBE in text and found else None


def _applied(tokenizer: Any, turns: Turns, **more: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(list(turns), add_generation_prompt=True, **more)
    except Exception as error:  # templates are programs, and raise whatever they like
        reason = cut(" ".join(str(error).split()) or type(error).__name__)
        raise GenError(
            f"the chat template of the model refuses the conversation: {reason}; expected roles and"
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


def _takes(tokenizer: Any, content: str | list[dict[str, str]]) -> bool:
    """Return True if the template writes the text of a content of this form, and no more of it."""
    try:
        text = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    except Exception:  # the template refuses the form
        return False
    is_quoted = f"'{PROBE}'" in text or f'"{PROBE}"' in text  # the list as a whole
    return PROBE in text and (isinstance(content, str) or not is_quoted)


def _parts(text: str) -> list[dict[str, str]]:
    """Return a text as a list of one part."""
    return [{"type": "text", "text": text}]


def _joined(content: Sequence[Mapping[str, str]], image_token: str) -> str:
    """Return the parts of a content as one text."""
    return "".join(image_token if p["type"] == "image" else p["text"] for p in content)
