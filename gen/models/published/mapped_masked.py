"""Bidirectional transformers models (BERT and similar) over a ``Vocabulary`` whose last token is
the mask."""

from __future__ import annotations

import torch
from torch import Tensor

from gen.models.adapters.conditioning import Vocabulary
from gen.models.adapters.language_models import LanguageModel


class MappedMaskedLM(LanguageModel):
    """Masked model: token ids [B, P + T] -> logits [B, T, V] of the last T, with full attention.

    All conditions have the same length.
    """

    compiles = False  # its module takes masks of its own

    def __init__(self, model: torch.nn.Module, vocabulary: Vocabulary):
        super().__init__(model)
        self.vocabulary, self.vocab_size = vocabulary.on(self.device), vocabulary.size

    @torch.no_grad()
    def forward(self, ids: Tensor, canvas_length: int) -> Tensor:
        """Compute logits [B, T, V] of token ids [B, P + T]."""
        model_ids = self.vocabulary.to_model(ids)
        # an explicit mask, since some classes would take a token for padding
        mask = torch.ones_like(model_ids)
        out = self.model(input_ids=model_ids, attention_mask=mask).logits[:, -canvas_length:]
        return out[..., self.vocabulary.ids.to(out.device)]
