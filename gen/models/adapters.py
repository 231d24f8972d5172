"""Adapters: a transformers class seen through the model protocols. Nothing here knows a modality or a sampler."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from gen.errors import GenError
from gen.models.cache import SlotCache


class CausalModel(Protocol):
    """tokens [B, L] at absolute positions [B, L] against a cache -> logits [B, L, V] of the positions after them."""

    vocab_size: int
    device: torch.device
    dtype: torch.dtype

    def new_cache(self, slots: int) -> Any:
        """An empty cache; it has ``keep(rows)``."""

    def forward(self, tokens: Tensor, positions: Tensor, cache: Any) -> Tensor: ...


class MaskedModel(Protocol):
    """ids [B, P + T], a condition and a partly filled canvas -> logits [B, T, V] of the canvas.

    A model that has ``ragged`` and it is true takes a third argument, ``pads`` long [B]: how many of the first columns of each row are
    nothing, neither seen nor counted as positions."""

    vocab_size: int
    device: torch.device
    dtype: torch.dtype

    def forward(self, ids: Tensor, canvas_length: int) -> Tensor: ...


class CacheableModel(MaskedModel, Protocol):
    """A masked model that can compute some of the places against a cache: tokens [B, L] at absolute positions [B, L], each seeing the slots
    in ``seen`` (bool [B, slots]) -> logits [B, keep, V] of the last ``keep`` tokens. ``rows`` long [B]: which rows of the cache these are, if not
    all. Logits at position i are about position i + ``shift``."""

    shift: int

    def new_cache(self, slots: int) -> Any: ...

    def part(self, tokens: Tensor, positions: Tensor, seen: Tensor, cache: Any, keep: int, rows: Tensor | None = None) -> Tensor: ...


class BlockModel(Protocol):
    """tokens [B, L] at absolute positions [B, L], each seeing up to position ``last`` [B, L], against a cache -> logits
    [B, L, V] of the same positions."""

    vocab_size: int
    device: torch.device
    dtype: torch.dtype
    block_length: int

    def new_cache(self, slots: int) -> Any: ...

    def forward(self, tokens: Tensor, positions: Tensor, last: Tensor, cache: Any) -> Tensor: ...


class OnModel:
    """Where a ``model`` is, and in which type it reckons."""

    model: torch.nn.Module

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.model.parameters() if p.is_floating_point())


class LanguageModel(OnModel):
    """What the adapters of language models share."""

    def __init__(self, model: torch.nn.Module):
        self.model = model.eval()
        self.config = model.config.get_text_config()
        self.vocab_size: int = self.config.vocab_size


class CausalLM(LanguageModel):
    """Any causal language model of transformers whose attention takes a 4-D mask and explicit positions."""

    def new_cache(self, slots: int) -> SlotCache:
        """Raises ``GenError`` for more slots than layers with a sliding window see: the mask is one for all layers."""
        types = getattr(self.config, "layer_types", None) or ["sliding_attention" if getattr(self.config, "use_sliding_window", True) else "full_attention"]
        window = getattr(self.config, "sliding_window", None)
        if window and "sliding_attention" in types and slots > window:
            raise GenError(f"prompt and answer take {slots} places, and layers of this {self.config.model_type!r} see {window}; expected at most {window}")
        return SlotCache(self.config.num_hidden_layers, slots)

    @torch.no_grad()
    def forward(self, tokens: Tensor, positions: Tensor, cache: SlotCache) -> Tensor:
        inputs = dict(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=cache.at(positions, self.dtype),
            past_key_values=cache,
            use_cache=True,
        )
        return self.model(**inputs).logits


class MaskedLM(LanguageModel):
    """A transformers language model called with a full attention mask. Logits at i are about position i, or about i + 1 if its
    config says ``shifted``. An architecture whose condition has a fixed length takes no padding."""

    @property
    def shift(self) -> int:
        return int(getattr(self.config, "shifted", False))

    @property
    def ragged(self) -> bool:
        return not hasattr(self.config, "prefix_length")

    def new_cache(self, slots: int) -> SlotCache:
        return SlotCache(self.config.num_hidden_layers, slots)

    @torch.no_grad()
    def forward(self, ids: Tensor, canvas_length: int, pads: Tensor | None = None) -> Tensor:
        width, places = ids.shape[1], {}
        full = torch.zeros(1, 1, width, width, dtype=self.dtype, device=ids.device)
        mask = full.expand(len(ids), -1, -1, -1)
        if pads is not None:
            at = torch.arange(width, device=ids.device) - pads[:, None]
            places["position_ids"] = at.clamp_min(0)
            mask = mask.masked_fill((at < 0)[:, None, None], torch.finfo(self.dtype).min)
        keep = canvas_length + self.shift
        out = self.model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=keep, **places)
        return out.logits[:, :canvas_length]

    @torch.no_grad()
    def part(self, tokens: Tensor, positions: Tensor, seen: Tensor, cache: SlotCache, keep: int, rows: Tensor | None = None) -> Tensor:
        """See ``CacheableModel``."""
        mask = self._mask(positions, seen, cache, rows)
        return self.model(input_ids=tokens, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True,
                          logits_to_keep=keep).logits

    def _mask(self, positions: Tensor, seen: Tensor, cache: SlotCache, rows: Tensor | None) -> Tensor:
        return cache.among(positions, self.dtype, seen, rows)


class BlockLM(LanguageModel):
    """A transformers language model whose attention is full inside blocks and causal across them, as its config's
    ``block_length`` says. Logits at i are about position i."""

    @property
    def block_length(self) -> int:
        return self.config.block_length

    def new_cache(self, slots: int) -> SlotCache:
        return SlotCache(self.config.num_hidden_layers, slots)

    @torch.no_grad()
    def forward(self, tokens: Tensor, positions: Tensor, last: Tensor, cache: SlotCache) -> Tensor:
        mask = cache.at(positions, self.dtype, last)
        return self.model(input_ids=tokens, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True).logits


class _Latent(OnModel):
    """What both adapters of the embedded architecture of latents share."""

    def __init__(self, model: torch.nn.Module):
        self.model, self.config, self.head = model.eval(), model.config, model.head


class CausalLatentLM(_Latent):
    """Vectors [B, L, D] of words or latents at absolute positions [B, L] against a cache -> conditioning vectors [B, L, D] of
    the places after them."""

    def new_cache(self, slots: int) -> SlotCache:
        return SlotCache(self.config.num_hidden_layers, slots)

    @torch.no_grad()
    def embed_words(self, ids: Tensor) -> Tensor:
        return self.model.embed_words(ids)

    @torch.no_grad()
    def embed_latents(self, latents: Tensor) -> Tensor:
        return self.model.embed_latents(latents.to(self.dtype))

    @torch.no_grad()
    def forward(self, inputs: Tensor, positions: Tensor, cache: SlotCache) -> Tensor:
        mask = cache.at(positions, self.dtype)
        return self.model.run(inputs, positions, attention_mask=mask, past_key_values=cache, use_cache=True)


class MaskedLatentLM(_Latent):
    """Words [B, P] and a canvas of latents [B, T, C] with NaN at empty places -> conditioning vectors [B, T, D]."""

    @torch.no_grad()
    def forward(self, words: Tensor, canvas: Tensor) -> Tensor:
        return self.model(words, canvas.to(self.dtype))
