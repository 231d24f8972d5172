"""Janus as a causal model of images: a language model with separate embeddings and a separate head
for codes (Wu et al., arXiv 2410.13848).

Let n be the number of codes. Codes are not part of the text vocabulary: token id k < n is code k
and uses the generation embeddings, token id k >= n is text token k - n and uses the embeddings of
the language model. The output is logits of the n codes alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gen.models.adapters.language_models import CausalLM
from gen.models.adapters.slot_cache import SlotCache
from gen.models.load.cache_argument import with_cache


class JanusLM(CausalLM):
    """Causal model over ``transformers.JanusForConditionalGeneration``; ``vocab_size`` is the
    number of codes."""

    keeps = False
    superposes = False  # its inputs and its outputs are other layers than a language model's

    def __init__(self, model: torch.nn.Module):
        super().__init__(model)
        self.words = self.vocab_size
        self.vocab_size = model.config.vq_config.num_embeddings

    def prompt(self, words: list[int]) -> list[int]:
        """Shift text token ids to their ids in a prompt."""
        return [self.vocab_size + i for i in words]

    def embed(self, ids: Tensor) -> Tensor:
        """Embed codes and text tokens int64 [B, L]: [B, L, D]."""
        is_code = ids < self.vocab_size
        codes = self.model.prepare_embeddings_for_image_generation(torch.where(is_code, ids, 0))
        words = self.model.get_input_embeddings()(torch.where(is_code, 0, ids - self.vocab_size))
        return torch.where(is_code[..., None], codes.to(words.device), words)

    @property
    def output_heads(self) -> list[torch.nn.Linear]:
        """See ``ModelAdapter``."""
        return [self.model.model.generation_head.vision_head]

    def _inputs(self, tokens: Tensor, positions: Tensor) -> dict[str, Tensor]:
        return {"inputs_embeds": self.embed(tokens)}

    @torch.no_grad()
    def forward(self, tokens: Tensor, positions: Tensor, cache: SlotCache) -> Tensor:
        return self._logits(tokens, positions, cache.at(positions, self.dtype), cache)

    def network(
        self, inputs: dict[str, Tensor], positions: Tensor, mask: Tensor | None, cache: Any
    ) -> Tensor:
        """Compute the logits [B, L, V] of codes; see ``ModelAdapter``."""
        inner = self.model.model
        out = inner.language_model(
            **inputs,
            position_ids=positions,
            attention_mask=mask,
            use_cache=True,
            **with_cache(inner.language_model, cache),
        )
        return inner.generation_head(out.last_hidden_state)
