"""Chameleon's language model (arXiv 2405.09818) with logits of image codes.

transformers' forward pass sets the logits of all codes to the smallest number, so the adapter
applies the head to the hidden states itself.

Checkpoints come in two layouts. Those of transformers have one row of query and key norms per
attention head; those of Lumina-mGPT (arXiv 2408.02657) have one per shard of the training run
(``model_parallel_size``), shared by heads / shards neighbouring heads, and no image encoder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import ChameleonConfig, ChameleonForConditionalGeneration

from gen.models.adapters.conditioning import MappedLM, Vocabulary
from gen.models.load.cache_argument import with_cache
from gen.models.load.locate import readable
from gen.models.load.weights import LazyWeights, Weights, fill, without_storage

IMAGES = "model.vqmodel."  # prefix of the image encoder's keys
TABLES = r"rotary_emb\.inv_freq$"
# the decoder, which the class of transformers lacks, and what its training left
DECODER = r"^model\.vqmodel\.(decoder|loss)\."
NORMS = re.compile(r"self_attn\.([qk])_norm\.(weight|bias)$")


class ChameleonLM(MappedLM):
    """Causal model of image codes and the special tokens between them, with these rows of the head
    only."""

    keeps = False
    superposes = False  # the module's own forward hides the image codes

    def __init__(self, model: nn.Module, vocabulary: Vocabulary):
        super().__init__(model, vocabulary)
        # The module makes [-1, heads, d] of [B, L, D] for the norms of queries and keys. Inductor
        # compares these shapes axis by axis, and an L that equals the heads becomes a constant.
        heads = self.config.num_attention_heads, self.config.num_key_value_heads
        self.constant_widths = frozenset(heads)
        self.network_changed()

    def network_changed(self) -> None:
        """See ``ModelAdapter``. The rows of the head are copied once."""
        super().network_changed()
        layer, ids = self.model.lm_head, self.vocabulary.ids
        # offloaded weights are loaded when the module is called, and others than a plain layer's
        # are read by it alone
        is_plain = type(layer) is nn.Linear and type(layer.weight) is nn.Parameter
        is_there = is_plain and not layer.weight.is_meta
        self._head = layer.weight[ids.to(layer.weight.device)] if is_there else None

    @torch.no_grad()
    def forward(self, tokens: Tensor, positions: Tensor, cache: Any) -> Tensor:
        mask = cache.at(positions, self.dtype)
        return self._logits(self.vocabulary.to_model(tokens), positions, mask, cache)

    @torch.no_grad()
    def forward_tree(
        self, tokens: Tensor, positions: Tensor, parents: Tensor, cache: Any
    ) -> Tensor:
        mask = cache.tree(positions, parents, self.dtype)
        return self._logits(self.vocabulary.to_model(tokens), positions, mask, cache)

    def network(
        self, inputs: dict[str, Tensor], positions: Tensor, mask: Tensor | None, cache: Any
    ) -> Tensor:
        """Compute the logits [B, L, V] of the vocabulary's codes; see ``ModelAdapter``."""
        states = self.model.model(
            **inputs,
            position_ids=positions,
            attention_mask=mask,
            use_cache=True,
            **with_cache(self.model.model, cache),
        ).last_hidden_state
        if self._head is None:
            logits = self.model.lm_head(states)
            return logits[..., self.vocabulary.ids.to(logits.device)].to(positions.device)
        return F.linear(states.to(self._head.device), self._head).to(positions.device)


class PerHead(LazyWeights):
    """Lazy mapping of weights, with query and key norms repeated to one row per head."""

    def __init__(self, weights: Weights, heads: Mapping[str, int]):
        """Wrap weights. ``heads``: number of heads of ``q`` and of ``k``."""
        self._weights, self._repeats = weights, {}
        self.shapes = dict(weights.shapes)
        for key, (rows, *rest) in weights.shapes.items():
            if (match := NORMS.search(key)) and heads[match[1]] % rows == 0:
                self._repeats[key] = heads[match[1]] // rows
                self.shapes[key] = (heads[match[1]], *rest)

    def __getitem__(self, key: str) -> Tensor:
        return self._weights[key].repeat_interleave(self._repeats.get(key, 1), 0)

    def __iter__(self):
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def model_weights(folder: Path, variant: str | None = None) -> Weights:
    """Open the language model's weights of a folder, which may also hold those of the image
    autoencoder. ``variant``: as in ``from_pretrained``. Raises ``GenError`` if there are none."""
    if variant is not None:
        return Weights(folder, variant=variant)
    unsharded = [
        folder / f"{stem}{ending}"
        for stem, ending in (("model", ".safetensors"), ("pytorch_model", ".bin"))
    ]
    return Weights(next((p for p in unsharded if p.is_file()), folder))


def language_model(
    weights: Weights,
    config: Mapping[str, Any],
    name: str,
    *,
    reads_images: bool = False,
    attn_implementation: str | None = None,
    **placement: Any,
) -> nn.Module:
    """Build transformers' ``ChameleonForConditionalGeneration``.

    Args:
        weights: tensors of the checkpoint.
        config: contents of its config.json.
        name: the checkpoint, for messages.
        reads_images: with the image encoder.
        attn_implementation: implementation of attention; None is the choice of transformers.
        **placement: device, dtype and so on, as of ``fill``.

    Raises:
        GenError: the weights do not fit.
    """
    vq_config = config.get("vq_config") if reads_images else None
    with readable("model", name):
        made = ChameleonConfig.from_dict(
            {
                **config,
                "vq_config": vq_config,
                "vocabulary_map": config.get("vocabulary_map") or {},
            },
            attn_implementation=attn_implementation,
        )

    def make() -> nn.Module:
        model = ChameleonForConditionalGeneration(made)
        if not reads_images:
            del model.model.vqmodel
        return model

    heads = {"q": made.num_attention_heads, "k": made.num_key_value_heads}
    return fill(
        without_storage(make),
        PerHead(weights, heads),
        drop=(TABLES, DECODER) if reads_images else (TABLES, rf"^{re.escape(IMAGES)}"),
        **placement,
        name=name,
    )
