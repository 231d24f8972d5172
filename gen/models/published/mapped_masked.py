"""Bidirectional models of transformers (BERT and its kind) over the ids of a ``Vocabulary``, whose
last id is the mask."""

from __future__ import annotations

import torch
from torch import Tensor

from gen.models.adapters.conditioning import Vocabulary
from gen.models.adapters.language_models import LanguageModel


class MappedMaskedLM(LanguageModel):
    """ids [B, P + T] -> logits [B, T, V] of the last T. Every id sees every other, at its place in
    the row. All conditions have one length."""

    def __init__(self, model: torch.nn.Module, vocabulary: Vocabulary):
        super().__init__(model)
        self.vocabulary, self.vocab_size = vocabulary.on(self.device), vocabulary.size

    @torch.no_grad()
    def forward(self, ids: Tensor, canvas_length: int) -> Tensor:
        own = self.vocabulary.to_model(ids)
        # said in full, since some classes take an id for padding otherwise
        out = self.model(input_ids=own, attention_mask=torch.ones_like(own)).logits[
            :, -canvas_length:
        ]
        return out[..., self.vocabulary.ids.to(out.device)]
