"""Architecture of the built-in models: Llama plus one learned embedding table per axis of the token
grid.

A sequence is a condition of ``prefix_length`` tokens followed by the grid in raster order. Rotary
positions alone make a small model draw stripes; learned row and column embeddings let it attend to
the token above directly.

Causal and masked models are both ``LlamaForCausalLM``; the masked one is called with a full
attention mask. A ``shifted`` model predicts position i + 1 at position i and adds the location of
that token. Causal models are shifted; a masked model is shifted if it was initialised from a causal
one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from gen.models.load.locate import locate
from gen.models.load.low_rank import add_low_rank


class GridLlamaConfig(LlamaConfig):
    """``LlamaConfig`` plus the token layout.

    ``grid``: sizes of the axes, slowest first. ``prefix_length``: condition tokens before the grid.
    ``codebook_size``: token ids ``[0, codebook_size)`` are codes, the rest condition words and the
    mask. ``causal``: attention in training. ``shifted``: position i predicts i + 1 (else i), by
    default if causal. ``block_length``: positions per block with full attention inside blocks and
    causal attention across them; else 0. ``whole``: True for a block model that was also trained
    with full attention over the whole grid. ``base``: name of the model that the folder's weights
    are added to (``gen.models.load.low_rank``); None for a folder with weights of its own.
    ``trained_at_mask``: whether the mask stood among the inputs in training, by default if not
    causal. The vocabulary has it in any case. Models of ``gen train`` state ``modality`` and
    ``conditions`` as well (``gen.contracts.modality``).
    """

    model_type = "gen_grid_llama"

    def __init__(
        self,
        grid=(16, 16),
        prefix_length=8,
        codebook_size=512,
        causal=True,
        shifted=None,
        mask_token_id=None,
        block_length=0,
        whole=False,
        base=None,
        trained_at_mask=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.grid, self.prefix_length, self.codebook_size = list(grid), prefix_length, codebook_size
        self.causal, self.mask_token_id = causal, mask_token_id
        self.shifted = causal if shifted is None else shifted
        self.block_length, self.whole, self.base = block_length, whole, base
        self.trained_at_mask = not causal if trained_at_mask is None else trained_at_mask


class Located:
    """Mixin with learned embeddings of grid locations: the tables ``axes`` and ``prefix``."""

    def add_tables(self, config) -> None:
        """Create the tables of a config."""
        self.axes = nn.ModuleList(nn.Embedding(n, config.hidden_size) for n in config.grid)
        self.prefix = nn.Embedding(config.prefix_length, config.hidden_size)

    def locate(
        self,
        position_ids: Tensor,
        axes: nn.ModuleList | None = None,
        prefix: nn.Embedding | None = None,
    ) -> Tensor:
        """Embed the grid locations of absolute positions [B, L]: [B, L, D].

        ``axes``, ``prefix``: other tables than the model's own.
        """
        axes, prefix = axes or self.axes, prefix or self.prefix
        n = self.config.prefix_length
        total = torch.Size(self.config.grid).numel()
        cell = position_ids + (1 if self.config.shifted else 0) - n
        rest, out = cell.clamp(0, total - 1), 0
        for axis, size in zip(reversed(axes), reversed(self.config.grid), strict=True):
            out = out + axis(rest % size)
            rest = rest // size
        return torch.where((cell < 0)[..., None], prefix(position_ids.clamp(0, n - 1)), out)


class GridLlamaForCausalLM(Located, LlamaForCausalLM):
    """Llama over a token grid. ``position_ids`` [B, L] are absolute: 0 is the first condition
    token."""

    config_class = GridLlamaConfig

    def __init__(self, config: GridLlamaConfig):
        super().__init__(config)
        self.add_tables(config)
        self.post_init()

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Embed token ids [B, L] at absolute positions [B, L]: [B, L, D]."""
        return self.model.embed_tokens(ids) + self.locate(positions)

    @classmethod
    def from_pretrained(cls, folder: str | Path, *args: Any, config: Any = None, **options: Any):
        """Load a model as transformers does, or one that is a base and what is added to it."""
        config = config or cls.config_class.from_pretrained(folder)
        if config.base is None:
            return super().from_pretrained(folder, *args, config=config, **options)
        loaded = super().from_pretrained(
            locate(config.base, "base"), *args, config=config, **options
        )
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        add_low_rank(model, folder)
        model.config.base = None  # saved again, it is whole
        return loaded

    def forward(self, input_ids=None, position_ids=None, inputs_embeds=None, **kwargs):
        """Run Llama with location embeddings added to the token embeddings."""
        if inputs_embeds is None:
            if position_ids is None:
                position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
                position_ids = position_ids[None].expand_as(input_ids)
            inputs_embeds = self.embed(input_ids, position_ids)
        return super().forward(inputs_embeds=inputs_embeds, position_ids=position_ids, **kwargs)


AutoConfig.register(GridLlamaConfig.model_type, GridLlamaConfig)
AutoModelForCausalLM.register(GridLlamaConfig, GridLlamaForCausalLM)
