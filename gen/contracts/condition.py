"""Conditions of items: what generation starts from, and how it reaches a model.

A user gives a ``Condition`` and a modality parses it. A binding makes a prompt of token ids from
it, or a ``Prompt`` whose condition is encoded. A ``PromptBatch`` carries both to the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gen.core.condition_parts import (
    CAMERA,
    FILES,
    KINDS,
    read_json,
    read_messages,
    read_token_ids,
    read_tools,
    spelled_parts,
)
from gen.core.errors import GenError, bad_type, shown
from gen.core.plain import require_text
from gen.media.given import GivenMedia, is_data_uri, read_media
from gen.media.npz import read_all


@dataclass(frozen=True, eq=False)
class Condition:
    """Parts of a condition, as the user gives them; absent parts are None or empty.

    A plain string stands for ``Condition(text=...)`` wherever a condition is expected, and a
    mapping for the condition with these parts. Media are what ``gen.media.given.read_media`` reads.

    Attributes:
        text: prompt.
        messages: turns of a conversation, ``{"role": ..., "content": ...}`` each.
        tools: functions that the answer to a conversation may call.
        images: images, or paths of them.
        audio: waveforms, or paths of them.
        video: clips, or paths of them.
        observation: state and camera images of a robot, by name.
        tokens: token ids that are the condition themselves.
    """

    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    images: tuple[Any, ...] = ()
    audio: tuple[Any, ...] = ()
    video: tuple[Any, ...] = ()
    observation: Mapping[str, Any] | None = None
    tokens: tuple[int, ...] | None = None

    @classmethod
    def of(cls, prompt: object) -> Condition:
        """Return the condition of a prompt.

        Args:
            prompt: a text, a condition, or a mapping of parts, such as ``{"text": ..., "image":
                "a.png"}``. Observations and messages may be paths of files that hold them.

        Raises:
            GenError: an unknown part, a part of another type, or a file that cannot be read.
            WrongType: the prompt is none of these.
        """
        if isinstance(prompt, Condition):
            return prompt
        if isinstance(prompt, str):
            require_text("prompt", prompt)
            return cls(text=prompt)
        if not isinstance(prompt, Mapping):
            raise bad_type("a prompt", prompt, "a text, a Condition or a mapping of its parts")
        parts = spelled_parts(prompt)
        text = parts.get("text")
        if text is not None and not isinstance(text, str):
            raise bad_type("text", text, "a text")
        require_text("text", text or "")
        for part, read in READERS.items():
            if part in parts:
                parts[part] = read(parts[part])
        if not text and len(parts) > 1:  # an empty prompt beside other parts is none
            parts.pop("text", None)
        return cls(**parts)

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts that are there."""
        named = {f.name: self.__dict__[f.name] for f in fields(self)}
        return tuple(name for name, value in named.items() if value is not None and value != ())

    def require(
        self, accepted: frozenset[str], taker: str, most: Mapping[str, int] | None = None
    ) -> None:
        """Check that something takes all parts of the condition.

        Args:
            accepted: names of the parts that are taken.
            taker: name of what takes them, for the message.
            most: largest number of media of a part, where there is one.

        Raises:
            GenError: a part is not taken, has too many media, or there is none.
        """
        for part in self.parts or ("nothing",):
            if part not in accepted:
                raise GenError(
                    f"{taker} takes {' and '.join(sorted(accepted))} as its condition; got {part}"
                )
        for part, limit in (most or {}).items():
            count = len(getattr(self, part))
            if count > limit:
                raise GenError(f"{taker} takes at most {limit} {part}; got {count}")

    def media(
        self, part: str, size: tuple[int, int] | None = None, fps: float | None = None
    ) -> tuple[GivenMedia, ...]:
        """Read the media of a part.

        Args:
            part: ``images``, ``audio`` or ``video``.
            size: (h, w) that images and clips must have.
            fps: frames per second that clips of files are resampled to.

        Raises:
            GenError: a medium cannot be read, is of another kind or of another size.
        """
        values = getattr(self, part)
        names = [f"{part}.{i}" if len(values) > 1 else KINDS[part] for i in range(len(values))]
        return tuple(
            read_media(v, KINDS[part], n, size, fps) for v, n in zip(values, names, strict=True)
        )

    def cameras(self, size: tuple[int, int] | None = None) -> dict[str, GivenMedia]:
        """Read the camera images of the observation, by key; arguments and errors as of
        ``media``."""
        return {
            key: read_media(value, "image", key, size)
            for key, value in (self.observation or {}).items()
            if key.startswith(CAMERA)
        }

    def check_media(self) -> None:
        """Read all media once. Raises ``GenError`` for one that cannot be read."""
        for part in KINDS:
            self.media(part)
        self.cameras()

    def to_dict(self) -> dict[str, Any]:
        """Return the parts that are there as plain data; a medium in memory is only noted."""
        found = {part: getattr(self, part) for part in self.parts}
        for part in KINDS.keys() & found.keys():
            found[part] = [_plain_medium(value) for value in found[part]]
        for part in {"messages", "tools", "tokens"} & found.keys():
            found[part] = list(found[part])
        if "observation" in found:
            found["observation"] = {
                key: _plain_medium(v) if key.startswith(FILES) else _plain_value(v)
                for key, v in found["observation"].items()
            }
        return found


def read_observation(value: Any) -> dict[str, Any]:
    """Return an observation: a mapping as it is, or what a JSON or ``.npz`` file holds.

    Camera images of a JSON file are paths beside it.

    Raises:
        GenError: the file cannot be read, or holds no mapping.
    """
    base = Path()
    if isinstance(value, (str, Path)):
        base = Path(value).parent
        is_npz = Path(value).suffix.lower() == ".npz"
        value = read_all(Path(value)) if is_npz else read_json(value, "observation")
    if not isinstance(value, Mapping):
        raise bad_type("observation", value, "a mapping of names to values, or the path of a file")
    found = {str(key): v for key, v in value.items()}
    for key, v in found.items():
        if key.startswith(FILES) and isinstance(v, str) and not is_data_uri(v):
            found[key] = str(base / v)
    return found


READERS: dict[str, Callable[[Any], Any]] = {
    "observation": read_observation,
    "messages": read_messages,
    "tools": read_tools,
    "tokens": read_token_ids,
}


def _plain_medium(value: Any) -> Any:
    """Return a path or ``data:`` URI as a text; the type of anything else."""
    if isinstance(value, (str, Path)):
        return str(value)
    return {"unsaved": type(value).__name__}


def _plain_value(value: Any) -> Any:
    """Return a value of an observation as plain data."""
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    try:
        return np.asarray(value).tolist()
    except (TypeError, ValueError):
        return shown(value)


class ConditionEncoder(ABC):
    """Network that turns a typed condition into features (kind ``condition_encoder``).

    Features of one condition are named tensors without a batch axis: embeddings that stand at
    positions of the prompt, or states that the model attends to.
    """

    @abstractmethod
    def encode(self, condition: Any) -> dict[str, Tensor]:
        """Return the features of one typed condition."""


CONDITION = -1  # in a prompt: the features of the row's condition stand here


@dataclass(frozen=True)
class Prompt:
    """Prompt of one item whose condition is more than token ids.

    Attributes:
        tokens: token ids, and ``CONDITION`` at positions that the features take.
        condition: typed condition, hashable; items of one condition share its features.
        encoder: encoder of the condition.
    """

    tokens: list[int]
    condition: Hashable
    encoder: ConditionEncoder

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class PromptBatch:
    """Prompts of a batch.

    Attributes:
        tokens: token ids long [B, P], shorter rows with their last id repeated.
        lengths: tokens of each row, long [B].
        features: features of each distinct condition. The model knows which row has which by the
            token at the positions of the condition.
    """

    tokens: Tensor
    lengths: Tensor
    features: tuple[dict[str, Tensor], ...] = ()

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        prompts: Sequence[list[int] | Prompt],
        suffix: Sequence[int] = (),
        condition_token: Callable[[int], int] | None = None,
        first: int = 0,
    ) -> PromptBatch:
        """Return the batch of some prompts; every distinct condition is encoded once.

        Args:
            prompts: token ids, or prompts with a condition to encode.
            suffix: tokens that all prompts end with.
            condition_token: token id at the positions of the condition with a number.
            first: number of the first condition.
        """
        numbers: dict[Hashable, int] = {}
        features: list[dict[str, Tensor]] = []
        rows: list[list[int]] = []
        for prompt in prompts:
            if not isinstance(prompt, Prompt):
                rows.append([*prompt, *suffix])
                continue
            if condition_token is None:
                raise ValueError("a prompt with features came for a model that takes token ids")
            if prompt.condition not in numbers:
                numbers[prompt.condition] = first + len(features)
                features.append(prompt.encoder.encode(prompt.condition))
            token = condition_token(numbers[prompt.condition])
            rows.append([token if t == CONDITION else t for t in prompt.tokens] + list(suffix))
        width = max(map(len, rows))
        padded = [row + row[-1:] * (width - len(row)) for row in rows]
        return cls(
            torch.tensor(padded, dtype=torch.long),
            torch.tensor([len(row) for row in rows]),
            tuple(features),
        )
