"""Language models whose prompts hold vectors, such as those of an image encoder, at some
positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from gen.models.adapters.language_models import CausalLM, LanguageModel, MaskedLM
from gen.models.nets.grid_states import GridStatesForCausalLM

VECTORS, POSITIONS = "vectors", "positions"  # names of the features


class _FeaturePrompts(LanguageModel):
    """Language model that reads vectors in place of some token ids of a prompt.

    Let V be the size of the vocabulary. Token id V + n stands for condition n of the batch. Its
    features are ``vectors`` [m, D], inputs of the network, and ``positions`` long [m], those of the
    prompt that the vectors take.
    """

    def __init__(self, model: torch.nn.Module):
        super().__init__(model)
        self._vectors = torch.zeros(1, 1, dtype=self.dtype, device=self.device)
        self._rows = torch.zeros(1, 1, dtype=torch.long, device=self.device)

    def condition_token(self, number: int) -> int:
        return self.vocab_size + number

    def conditioned(self, features: Sequence[dict[str, Tensor]]) -> Self:
        other = super().conditioned(features)
        width = 1 + max(int(f[POSITIONS].max()) for f in features)
        rows, first = torch.zeros(len(features), width, dtype=torch.long), 0
        for number, f in enumerate(features):
            count = len(f[POSITIONS])
            rows[number, f[POSITIONS].cpu()] = torch.arange(first, first + count)
            first += count
        other._rows = rows.to(self.device)
        other._vectors = torch.cat([f[VECTORS] for f in features]).to(self.device, self.dtype)
        return other

    def _inputs(self, tokens: Tensor, positions: Tensor) -> dict[str, Any]:
        if not self.features:
            return super()._inputs(tokens, positions)
        return {"inputs_embeds": self.embedded(tokens, positions)}

    def embedded(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Embed token ids [B, L] at positions [B, L], those of conditions by their vectors:
        [B, L, D]. The host waits for nothing."""
        if not self.features:
            return super().embedded(ids.clamp_max(self.vocab_size - 1), positions)
        return self._placed(ids, positions, self._found(ids, positions))

    def _found(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return the vectors [B, L, D] that ids [B, L] at positions [B, L] stand for; those of
        other ids are anything."""
        slots = positions.clamp_max(self._rows.shape[1] - 1)
        numbers = (ids - self.vocab_size).clamp_min(0)
        return self._vectors[self._rows[numbers, slots]]

    def _placed(self, ids: Tensor, positions: Tensor, vectors: Tensor) -> Tensor:
        """Embed token ids [B, L], those of conditions by their vectors [B, L, D]."""
        own = super().embedded(ids.clamp_max(self.vocab_size - 1), positions)
        return torch.where((ids >= self.vocab_size)[..., None], vectors.to(own), own)


class FeaturePromptLM(_FeaturePrompts, CausalLM):
    """Causal language model whose prompts hold vectors."""


class _StatesPrompts(_FeaturePrompts):
    """Model of ``gen.models.nets.grid_states``, whose prompts are states."""

    model: GridStatesForCausalLM

    def _placed(self, ids: Tensor, positions: Tensor, vectors: Tensor) -> Tensor:
        return self.model.embed_prompted(ids, positions, vectors)

    def beside_prompts(self, prompts: Tensor) -> dict[str, Tensor]:
        if not self.features:
            return {}
        positions = torch.arange(prompts.shape[1], device=prompts.device).expand_as(prompts)
        return {"states": self._found(prompts, positions)}


class StatesMaskedLM(_StatesPrompts, MaskedLM):
    """Masked model whose prompts are states."""


class StatesLM(_StatesPrompts, CausalLM):
    """Causal model whose prompts are states."""


def causal_lm(model: torch.nn.Module) -> CausalLM:
    """Return the adapter of a causal language model."""
    return StatesLM(model) if isinstance(model, GridStatesForCausalLM) else CausalLM(model)


def masked_lm(model: torch.nn.Module) -> MaskedLM:
    """Return the adapter of a masked language model."""
    return StatesMaskedLM(model) if isinstance(model, GridStatesForCausalLM) else MaskedLM(model)
