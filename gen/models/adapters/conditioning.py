"""Maps between a model's vocabulary and generated tokens, and conditions that are no tokens.

Generated token ids are 0 .. n - 1: the codes of the frontend in the order of its codebook, then the
special tokens allowed between them. The token ids of a model may be any; its id i is n + i in a
prompt. Distributions have n entries, because the words of the vocabulary are never allowed.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gen.core.errors import GenError
from gen.models.adapters.language_models import CausalLM

KEPT = 256  # number of encoded conditions in the cache


class Vocabulary:
    """Map between the token ids of a model and generated ones. ``ids`` long [n]: the model's token
    id of every generated one."""

    def __init__(self, ids: Tensor | Sequence[int], vocab_size: int):
        """Build both tables.

        Args:
            ids: the model's token id of every generated one.
            vocab_size: vocabulary size of the model.

        Raises:
            GenError: a token id is out of range, or stands for two codes.
        """
        self.ids = torch.as_tensor(ids, dtype=torch.long)
        if not len(self.ids) or int(self.ids.min()) < 0 or int(self.ids.max()) >= vocab_size:
            raise GenError(
                f"the codes stand for {len(self.ids)} ids from"
                f" {min(self.ids.tolist(), default=None)} to"
                f" {max(self.ids.tolist(), default=None)}; expected ids below {vocab_size}, the"
                " size of the model's vocabulary"
            )
        self._back = torch.full((vocab_size,), -1)
        self._back[self.ids] = torch.arange(len(self.ids))
        if len(self.ids.unique()) < len(self.ids):
            wrong = int((self._back[self.ids] != torch.arange(len(self.ids))).nonzero()[0])
            raise GenError(
                f"id {int(self.ids[wrong])} of the model stands for two codes, {wrong} and"
                f" {int(self._back[self.ids[wrong]])}; expected one each"
            )

    @property
    def size(self) -> int:
        return len(self.ids)

    def on(self, device: torch.device) -> Vocabulary:
        """Return a copy with its tables on a device."""
        moved = copy.copy(self)
        moved.ids, moved._back = self.ids.to(device), self._back.to(device)
        return moved

    def to_model(self, ids: Tensor) -> Tensor:
        """Convert generated and prompt token ids to the model's."""
        table = self.ids.to(ids.device)
        return torch.where(ids < self.size, table[ids.clamp_max(self.size - 1)], ids - self.size)

    def of_model(self, ids: Tensor) -> Tensor:
        """Convert the model's token ids to generated ones, -1 where there is none."""
        return self._back.to(ids.device)[ids]

    def prompt(self, ids: Iterable[int]) -> list[int]:
        """Convert the model's token ids to those of a prompt."""
        return [self.size + int(i) for i in ids]


class MappedLM(CausalLM):
    """Causal language model over the token ids of a ``Vocabulary``."""

    def __init__(self, model: torch.nn.Module, vocabulary: Vocabulary):
        super().__init__(model)
        self.vocabulary, self.vocab_size = vocabulary.on(self.device), vocabulary.size

    @torch.no_grad()
    def forward(self, tokens: Tensor, positions: Tensor, cache: Any, keep: int = 0) -> Tensor:
        logits = super().forward(self.vocabulary.to_model(tokens), positions, cache, keep)
        return logits[..., self.vocabulary.ids.to(logits.device)]

    @torch.no_grad()
    def forward_tree(
        self, tokens: Tensor, positions: Tensor, parents: Tensor, cache: Any
    ) -> Tensor:
        ids = self.vocabulary.to_model(tokens)
        logits = super().forward_tree(ids, positions, parents, cache)
        return logits[..., self.vocabulary.ids.to(logits.device)]

    @torch.no_grad()
    def forward_superposed(
        self, tokens: Tensor, weights: Tensor, positions: Tensor, cache: Any
    ) -> Tensor:
        ids = self.vocabulary.to_model(tokens)
        logits = super().forward_superposed(ids, weights, positions, cache)
        return logits[..., self.vocabulary.ids.to(logits.device)]


class Conditions:
    """Conditions as numbers in prompts. ``encode`` maps one condition to its tensors by name,
    without a batch axis."""

    def __init__(self, encode: Callable[[Any], dict[str, Tensor]]):
        self._encode = encode
        self._conditions: list[Any] = []
        self._number: dict[Hashable, int] = {}
        self._kept: OrderedDict[int, dict[str, Tensor]] = OrderedDict()

    def number(self, condition: Hashable) -> int:
        """Return the number of a condition in prompts, the same every time."""
        if condition not in self._number:
            self._number[condition] = len(self._conditions)
            self._conditions.append(condition)
        return self._number[condition]

    @torch.no_grad()
    def of(self, numbers: Tensor) -> list[dict[str, Tensor]]:
        """Return the tensors of the conditions with these numbers [B], one dict for each row."""
        features = [self._one(n) for n in numbers.tolist()]
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return features

    def stacked(self, numbers: Tensor) -> dict[str, Tensor]:
        """Return the tensors of ``of`` as [B, ...]; they need one shape."""
        rows = self.of(numbers)
        return {key: torch.stack([r[key] for r in rows]) for key in rows[0]}

    def placed(self, inputs: Tensor, ids: Tensor, span: int, name: str) -> Tensor:
        """Return inputs with vectors of conditions at some positions.

        Args:
            inputs: network inputs [B, T, D].
            ids: long [B, T]; id ``span`` n + j takes vector j of condition n, a negative one
                keeps its input.
            span: ids of one condition.
            name: tensor of the conditions, [n, D].
        """
        stands, numbers = ids >= 0, ids // span
        if not bool(stands.any()):
            return inputs
        inputs = inputs.clone()
        for number in numbers[stands].unique():
            chosen = stands & (numbers == number)
            inputs[chosen] = self.of(number[None])[0][name].to(inputs)[ids[chosen] % span]
        return inputs

    def _one(self, number: int) -> dict[str, Tensor]:
        if number not in self._kept:
            self._kept[number] = self._encode(self._conditions[number])
        self._kept.move_to_end(number)
        return self._kept[number]
