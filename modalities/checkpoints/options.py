"""Checks of options and prompts that several families of checkpoints share."""

from __future__ import annotations

import re
from typing import Any

from gen.contracts.checkpoint import CheckpointFiles
from gen.core.errors import GenError, bad_value

ANSWER = 128  # positions of an answer by default
POSITIONS = "max_position_embeddings"
CLASS = re.compile(r"\s*(?:class\s+)?(\d+)\s*", re.IGNORECASE)


def is_integer(value: Any, least: int = 0) -> bool:
    """Return whether ``value`` is an integer of at least ``least``. A bool is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def answer_length(files: CheckpointFiles, max_new_tokens: int | None) -> int:
    """Return the positions of an answer; no weights are loaded.

    Args:
        files: the checkpoint.
        max_new_tokens: what the user passed; None is 128, or half of the model's positions where
            that is less.

    Raises:
        GenError: it is no positive integer, or more than the positions of the model.
    """
    config = files.config
    limit = config.get(POSITIONS) or (config.get("text_config") or {}).get(POSITIONS)
    if max_new_tokens is None:
        return ANSWER if limit is None else max(1, min(ANSWER, limit // 2))
    if not is_integer(max_new_tokens, 1):
        raise bad_value("max_new_tokens", max_new_tokens, "an integer of at least 1")
    if limit is not None and max_new_tokens > limit:
        raise bad_value(
            "max_new_tokens", max_new_tokens, f"at most {limit}, the positions of {files.name}"
        )
    return max_new_tokens


def require_multiple(name: str, value: Any, step: int, unit: str = "") -> None:
    """Check that an option is a positive multiple of ``step``.

    Args:
        name: the option.
        value: what the user passed.
        step: pixels or frames per code.
        unit: words before "a multiple of" in the message.

    Raises:
        GenError: it is not.
    """
    if not is_integer(value, 1) or value % step:
        raise bad_value(name, value, f"{unit}a multiple of {step}")


def class_number(prompt: str, classes: int) -> int:
    """Class that a prompt such as '207' or 'class 207' names.

    Raises:
        GenError: the prompt is no number below ``classes``.
    """
    match = CLASS.fullmatch(prompt)
    if not match or int(match[1]) >= classes:
        raise GenError(
            f"the prompt is {prompt!r}; expected the number of a class, such as '207' or 'class"
            f" 207', below {classes}"
        )
    return int(match[1])
