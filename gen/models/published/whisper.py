"""Whisper's decoder as a causal model of text (Radford et al., "Robust Speech Recognition via
Large-Scale Weak Supervision", arXiv 2212.04356).

Let V be the vocabulary. The decoder attends to the states of an encoder that heard 30 seconds. The
first token of a prompt names its sound beside itself: id V + V n + t is token t after sound n.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from gen.models.adapters.base import ModelAdapter
from gen.models.adapters.conditioning import Conditions
from gen.models.adapters.protocols import ModelCache
from gen.models.adapters.slot_cache import SlotCache
from gen.models.load.cache_argument import with_cache


class HeardCache(ModelCache):
    """Cache of the decoder for B rows.

    Attributes:
        slots: keys and values of the tokens.
        both: the same with those of the encoder's states, which each layer computes once.
        states: states of the encoder [B, S, D]; None before the first pass.
    """

    def __init__(self, layers: int, slots: int):
        self.slots = SlotCache(layers, slots)
        self.both = EncoderDecoderCache(self.slots, DynamicCache())
        self.states: Tensor | None = None

    def keep(self, rows: Tensor) -> None:
        """Keep only some rows (int64 or bool [B])."""
        if self.states is None:
            return
        self.states = self.states[rows]
        self.slots.keep(rows)
        for layer in self.both.cross_attention_cache.layers:
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]


class HearingLM(ModelAdapter):
    """Decoder of ``WhisperForConditionalGeneration``. ``sounds``: states [S, D] of the encoder, by
    the number of the sound."""

    def __init__(self, model: torch.nn.Module, sounds: Conditions):
        self.model, self.sounds = model, sounds
        self.decoder = model.model.decoder
        self.vocab_size: int = model.config.vocab_size
        self.max_positions: int = model.config.max_target_positions

    @property
    def output_heads(self) -> list[torch.nn.Linear]:
        """See ``ModelAdapter``."""
        return [self.model.proj_out]

    def new_cache(self, slots: int) -> HeardCache:
        """Create an empty cache of ``slots`` positions."""
        return HeardCache(len(self.decoder.layers), slots)

    @torch.no_grad()
    def forward(self, tokens: Tensor, positions: Tensor, cache: HeardCache) -> Tensor:
        """Compute logits [B, L, V] (``gen.models.adapters.protocols.CausalModel``). The first pass
        begins with the prompts of all rows."""
        if cache.states is None:
            rows = self.sounds.of(tokens[:, 0] // self.vocab_size - 1)
            cache.states = torch.stack([row["states"] for row in rows])
        ids = tokens % self.vocab_size
        mask = cache.slots.at(positions, self.dtype)
        x = self.decoder.embed_tokens(ids) + self.decoder.embed_positions.weight[positions]
        for layer in self.decoder.layers:
            x = layer(
                x,
                attention_mask=mask,
                encoder_hidden_states=cache.states,
                **with_cache(layer, cache.both),
            )
        return self.model.proj_out(self.decoder.layer_norm(x))
