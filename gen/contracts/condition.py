"""Conditions of items: what generation starts from, and how it reaches a model.

A user gives a ``Condition`` and a modality parses it. A binding makes a prompt of token ids from
it, or a ``Prompt`` whose condition is encoded. A ``PromptBatch`` carries both to the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from gen.core.errors import GenError


@dataclass(frozen=True, eq=False)
class Condition:
    """Parts of a condition, as the user gives them; absent parts are None or empty.

    A plain string stands for ``Condition(text=...)`` wherever a condition is expected.

    Attributes:
        text: prompt.
        messages: turns of a conversation, ``{"role": ..., "content": ...}`` each.
        images: images, or paths of them.
        audio: waveforms, or paths of them.
        video: clips, or paths of them.
        observation: state and camera images of a robot, by name.
        tokens: token ids that are the condition themselves.
    """

    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    images: tuple[Any, ...] = ()
    audio: tuple[Any, ...] = ()
    video: tuple[Any, ...] = ()
    observation: Mapping[str, Any] | None = None
    tokens: tuple[int, ...] | None = None

    @classmethod
    def of(cls, prompt: object) -> Condition:
        """Return the condition of a prompt.

        Raises:
            GenError: the prompt is neither a string nor a condition.
        """
        if isinstance(prompt, Condition):
            return prompt
        if isinstance(prompt, str):
            return cls(text=prompt)
        raise GenError(f"prompt {prompt!r} is a {type(prompt).__name__}; expected a string")

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts that are there."""
        named = {f.name: self.__dict__[f.name] for f in fields(self)}
        return tuple(name for name, value in named.items() if value is not None and value != ())

    def require(self, accepted: frozenset[str], taker: str) -> None:
        """Check that something takes all parts of the condition.

        Args:
            accepted: names of the parts that are taken.
            taker: name of what takes them, for the message.

        Raises:
            GenError: a part is not taken, or there is none.
        """
        for part in self.parts or ("nothing",):
            if part not in accepted:
                raise GenError(
                    f"{taker} takes {' and '.join(sorted(accepted))} as its condition; got {part}"
                )


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
    ) -> PromptBatch:
        """Return the batch of some prompts; every distinct condition is encoded once.

        Args:
            prompts: token ids, or prompts with a condition to encode.
            suffix: tokens that all prompts end with.
            condition_token: token id at the positions of the condition with a number.
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
                numbers[prompt.condition] = len(features)
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
