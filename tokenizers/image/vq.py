"""VQ image tokens: a frontend over ``diffusers.VQModel``, which loads weights published for that
class.

The adapter handles three traps of the class: ``encode`` returns latents before quantisation, codes
are flat over the batch, and ``decode`` quantises again by default.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from gen.contracts.frontend import FrontendConfig
from gen.core.errors import GenError
from gen.core.registry import register
from gen.tokenizers.base.rgb import RGB


@register("tokenizer", "vq")
class VQ(RGB):
    """VQ image tokenizer: codes [B, 1, H, W] of RGB images [B, 3, h, w] in [-1, 1]."""

    architecture = "VQModel"

    def __init__(self, model):
        super().__init__(model)
        self.config = FrontendConfig(
            "image", "codes", (model.config.num_vq_embeddings,), (self.factor, self.factor)
        )

    @property
    def codebooks(self) -> list[Tensor]:
        return [self.model.quantize.embedding.weight.detach()]

    @property
    def fingerprint(self) -> Tensor:
        return self.codebooks[0]

    @torch.no_grad()
    def encode(self, x: Tensor) -> Tensor:
        latents = self.model.encode(x).latents
        codes = self.model.quantize(latents)[2][2]
        return codes.view(len(x), 1, *latents.shape[-2:])

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        top = self.config.codebook_sizes[0]
        if (
            codes.ndim != 4
            or codes.shape[1] != 1
            or int(codes.min()) < 0
            or int(codes.max()) >= top
        ):
            raise GenError(
                f"codes have shape {tuple(codes.shape)}, range"
                f" {int(codes.min())}..{int(codes.max())}; expected [B, 1, H, W] in 0..{top - 1}"
            )
        table = self.codebooks[0]
        shape = (len(codes), *codes.shape[2:], table.shape[1])
        if self.model.config.lookup_from_codebook:
            return self.model.decode(codes.flatten(), force_not_quantize=True, shape=shape).sample
        latents = rearrange(table[codes[:, 0]], "b h w c -> b c h w")
        return self.model.decode(latents, force_not_quantize=True).sample
