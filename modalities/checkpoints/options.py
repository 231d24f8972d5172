"""Checks of options and prompts that several families of checkpoints share."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gen.contracts.checkpoint import CheckpointFiles
from gen.core.errors import GenError, bad_type, bad_value
from gen.core.token_space import TokenSpace
from gen.models.load.chat import turn_end
from gen.models.load.generation_config import (
    GENERATION,
    config_ends,
    end_ids,
    sampling_of,
    warn_of_missing,
)
from gen.models.load.networks import config_field

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
    limit = _positions(files)
    if max_new_tokens is None:
        return ANSWER if limit is None else max(1, min(ANSWER, limit // 2))
    if not is_integer(max_new_tokens, 1):
        raise bad_value("max_new_tokens", max_new_tokens, "an integer of at least 1")
    if limit is not None and max_new_tokens > limit:
        raise bad_value(
            "max_new_tokens", max_new_tokens, f"at most {limit}, the positions of {files.name}"
        )
    return max_new_tokens


def _positions(files: CheckpointFiles) -> int | None:
    """Return the positions of a model, prompt and answer together; None where no one says."""
    config = files.config
    return config.get(POSITIONS) or (config.get("text_config") or {}).get(POSITIONS)


def stated_sampling(
    files: CheckpointFiles, options: Mapping[str, Any], usual: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the default sampling parameters of a language model: those that its generation config
    states before those of its family. No weights are loaded.

    Args:
        files: the checkpoint.
        options: options that the user gave; ``generation_config`` says whether the file counts, and
            ``max_new_tokens`` comes before it.
        usual: sampling parameters of the family.

    Raises:
        GenError: a setting of the file is out of range.
    """
    if not _takes_generation_config(options.get("generation_config", True)):
        return dict(usual)
    found = sampling_of(files.json(GENERATION), files.name)
    if options.get("max_new_tokens") is not None:
        found.pop("max_new_tokens", None)
    elif "max_new_tokens" in found:  # half of the positions are left to the prompt
        limit = _positions(files) or 2 * found["max_new_tokens"]
        found["max_new_tokens"] = max(1, min(found["max_new_tokens"], limit // 2))
    return {**usual, **found}


def stated_generation(files: CheckpointFiles, wanted: Any) -> dict[str, Any]:
    """Return the content of a generation config, warning of settings that gen lacks; empty where it
    is not wanted (``generation_config=False``).

    Raises:
        GenError: ``wanted`` is neither true nor false.
    """
    if not _takes_generation_config(wanted):
        return {}
    said = files.json(GENERATION)
    warn_of_missing(said, files.name)
    return said


def _takes_generation_config(wanted: Any) -> bool:
    if not isinstance(wanted, bool):
        raise bad_type("generation_config", wanted, "true or false")
    return wanted


def answer_space(
    length: int, size: int, ends: Sequence[int], first: Sequence[int], illegal: Sequence[int] = ()
) -> TokenSpace:
    """Return the token space of an answer.

    Args:
        length: positions.
        size: vocabulary size of the model.
        ends: token ids that end an answer.
        first: token ids that may not begin one.
        illegal: token ids that no answer has.

    Raises:
        GenError: a token id is not below ``size``.
    """
    for token in (*first, *illegal):
        if token >= size:
            raise bad_value("a suppressed token", token, f"an id below {size}")
    legal = torch.ones(1, size, dtype=torch.bool)
    legal[0, list(illegal)] = False
    legal = legal.expand(length, -1)
    if first:
        legal = legal.clone()
        legal[0, list(first)] = False
    eos = ends[0] if ends else None
    return TokenSpace((length,), size, legal, eos_token_id=eos, end_token_ids=tuple(ends))


def ends_of(
    files: CheckpointFiles, model: Any, tokenizer: Any, templates: Any = None
) -> tuple[int, ...]:
    """Return the ids that end a text, those of the generation config first.

    Args:
        files: the checkpoint.
        model: the model, a class of transformers.
        tokenizer: its tokenizer.
        templates: what has the chat template, where prompts go into it.
    """
    generation = config_field(config_field(model, "generation_config"), "eos_token_id")
    turn = None if templates is None else turn_end(templates, tokenizer)
    return end_ids(generation, config_ends(files.config), tokenizer.eos_token_id, turn)


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
