"""Janus as a causal model of images: a language model with separate embeddings and a separate head
for codes (Wu et al., arXiv 2410.13848).

Let n be the number of codes. Codes are not part of the text vocabulary: token id k < n is code k
and uses the generation embeddings, token id k >= n is text token k - n and uses the embeddings of
the language model. The output is logits of the n codes alone.
"""

from __future__ import annotations

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

    @torch.no_grad()
    def forward(self, tokens: Tensor, positions: Tensor, cache: SlotCache) -> Tensor:
        return self._codes(tokens, positions, cache.at(positions, self.dtype), cache)

    @torch.no_grad()
    def forward_tree(
        self, tokens: Tensor, positions: Tensor, parents: Tensor, cache: SlotCache
    ) -> Tensor:
        mask = cache.tree(positions, parents, self.dtype)
        return self._codes(tokens, positions, mask, cache)

    def _codes(self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: SlotCache) -> Tensor:
        """Compute the logits [B, L, V] of codes."""
        inner = self.model.model
        out = inner.language_model(
            inputs_embeds=self.embed(tokens),
            position_ids=positions,
            attention_mask=mask,
            use_cache=True,
            **with_cache(inner.language_model, cache),
        )
        return inner.generation_head(out.last_hidden_state)
