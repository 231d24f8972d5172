"""KL-autoencoder latents: a frontend over ``diffusers.AutoencoderKL``, which loads weights
published for that class.

Latents leave the frontend shifted and scaled to about unit variance (``(z - shift_factor) *
scaling_factor``); decoding inverts this. ``encode`` returns the mean of the posterior and is
deterministic. With a ``patch_size`` p in the config, p x p neighbours form one latent with p^2
times the channels, the usual layout of models of latents.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gen.contracts.frontend import FrontendConfig
from gen.core.errors import GenError
from gen.core.registry import register
from gen.tokenizers.base.rgb import RGB


@register("tokenizer", "kl")
class KL(RGB):
    """KL image autoencoder: latents [B, C, H, W] of RGB images [B, 3, h, w] in [-1, 1]."""

    architecture = "AutoencoderKL"

    def __init__(self, model):
        super().__init__(model)
        self.patch = model.config.get("patch_size", 1)
        factor = self.factor * self.patch
        self.config = FrontendConfig(
            "image", "latents", (), (factor, factor), model.config.latent_channels * self.patch**2
        )

    @property
    def codebooks(self) -> list[Tensor]:
        return []

    @property
    def fingerprint(self) -> Tensor:
        return self.model.decoder.conv_in.weight

    @torch.no_grad()
    def encode(self, x: Tensor) -> Tensor:
        z = self.model.encode(x).latent_dist.mean
        return F.pixel_unshuffle(
            (z - (self.model.config.shift_factor or 0.0)) * self.model.config.scaling_factor,
            self.patch,
        )

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        if (
            codes.ndim != 4
            or codes.shape[1] != self.config.channels
            or not codes.is_floating_point()
        ):
            raise GenError(
                f"latents are {codes.dtype} of shape {tuple(codes.shape)}; expected floats [B,"
                f" {self.config.channels}, H, W]"
            )
        z = F.pixel_shuffle(
            codes.to(self.model.dtype), self.patch
        ) / self.model.config.scaling_factor + (self.model.config.shift_factor or 0.0)
        return self.model.decode(z).sample
