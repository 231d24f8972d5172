"""Calls on what model folders bring to make texts and tokens: run in a process that can be ended
(``gen.core.worker_process``), never in that of the user, which knows the functions by name."""

from __future__ import annotations

import json
import pickle
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from gen.core.errors import GenError, cut
from tokenizers import Tokenizer

_RULES: dict[str, Any] = {}  # of this process, which serves one tokenizer


def prepare() -> None:
    """Import what the calls need, which importing this module does: neither torch nor models."""


def render(data: bytes) -> str:
    """Return the text that a chat template makes of a conversation.

    Args:
        data: JSON of the arguments of ``render_jinja_template``.

    Raises:
        GenError: whatever the template raises, as one line.
    """
    try:
        return render_jinja_template(**json.loads(data))[0][0]
    except MemoryError:
        raise
    except Exception as error:  # templates are programs, and raise whatever they like
        raise GenError(_line(error)) from None


def load(data: bytes) -> None:
    """Read the rules of a tokenizer, which later calls use. ``data``: UTF-8 of its JSON."""
    try:
        _RULES["tokenizer"] = Tokenizer.from_str(data.decode())
    except MemoryError:
        raise
    except BaseException as error:  # panics of Rust are no ``Exception``
        raise GenError(_line(error)) from None


def apply(data: bytes) -> Any:
    """Call a method of the tokenizer that was loaded.

    Args:
        data: pickle of name, arguments, keywords and the settings of the tokenizer.
    """
    name, args, keywords, settings = pickle.loads(data)
    tokenizer = _RULES["tokenizer"]
    truncation, padding, special = settings
    tokenizer.encode_special_tokens = special
    tokenizer.no_truncation() if truncation is None else tokenizer.enable_truncation(**truncation)
    tokenizer.no_padding() if padding is None else tokenizer.enable_padding(**padding)
    try:
        return getattr(tokenizer, name)(*args, **keywords)
    except MemoryError:
        raise
    except BaseException as error:  # panics of Rust are no ``Exception``
        raise GenError(_line(error)) from None


def _line(error: BaseException) -> str:
    return cut(" ".join(str(error).split()) or type(error).__name__)
