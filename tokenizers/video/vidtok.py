"""VidTok video codes: a frontend over ``diffusers.AutoencoderVidTok`` with finite scalar
quantisation (Tang et al., "VidTok", arXiv 2412.13061; FSQ: Mentzer et al., arXiv 2309.15505),
causal in time.

Code i stands for a vector that no table of the checkpoint holds: with 8 levels in each of D
channels, component d is (floor(i / 8^d) mod 8 - 4) / 4.

The adapter handles the traps of the class: only ``forward`` pads the first frame (by r - 1 copies),
so ``encode`` alone loses frames; indices are truncated sums, here rounded ones; looked-up vectors
are single precision for every model; every convolution keeps its last input. VidTok cannot be
streamed: temporal upsampling looks one frame ahead.
"""

from __future__ import annotations

from functools import cached_property

import torch
from einops import rearrange
from torch import Tensor

from gen.contracts.frontend import FrontendConfig, require_codes
from gen.core.errors import GenError
from gen.core.registry import register
from gen.tokenizers.base.clips import Clips


@register("tokenizer", "vidtok")
class VidTok(Clips):
    """Video tokenizer: codes [B, 1, T, H, W] of clips [B, F, 3, h, w] in [-1, 1], F = 1 + r (T -
    1)."""

    architecture = "AutoencoderVidTok"

    def __init__(self, model):
        super().__init__(model)
        c = model.config
        if c.regularizer != "fsq" or not c.is_causal:
            raise GenError(
                f"the VidTok model has the regularizer {c.regularizer!r} and is"
                f" {'' if c.is_causal else 'not '}causal; expected 'fsq', which has codes, and a"
                " causal model"
            )
        side = 2 ** len(model.encoder.spatial_ds)
        self.levels = model.regularization
        self.config = FrontendConfig(
            "video",
            "codes",
            (self.levels.codebook_size,),
            (model.temporal_compression_ratio, side, side),
        )

    @cached_property
    def _table(self) -> Tensor:
        codes = torch.arange(self.config.codebook_sizes[0], device=self.model.device)
        return self.levels.indices_to_codes(codes).to(self.model.dtype)

    @property
    def codebooks(self) -> list[Tensor]:
        return [self._table]

    @property
    def fingerprint(self) -> Tensor:
        return self.model.decoder.conv_in.conv.weight

    @torch.no_grad()
    def encode(self, x: Tensor) -> Tensor:
        self._require_whole(x)
        first = x[:, :1].expand(-1, self.config.compression[0] - 1, -1, -1, -1)
        z, _ = self.model.encode(rearrange(torch.cat([first, x], 1), "b f c h w -> b c f h w"))
        self._clear_caches()
        half = self.levels._levels // 2
        level = (z.movedim(1, -1).double() * half + half).round().long()
        return (level * self.levels._basis).sum(-1)[:, None]

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        require_codes(codes, self.config)
        x = self.model.decode(
            rearrange(self._table[codes[:, 0]], "b t h w c -> b c t h w").contiguous()
        )
        self._clear_caches()
        return rearrange(x, "b c f h w -> b f c h w")

    def _clear_caches(self) -> None:
        """Free the inputs that convolutions keep; every call starts without them anyway."""
        for module in self.model.modules():
            if hasattr(module, "causal_cache"):
                module.causal_cache = None
