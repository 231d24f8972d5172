"""Cosmos video latents: a frontend over ``diffusers.AutoencoderKLCosmos`` (NVIDIA, "Cosmos", arXiv
2501.03575), causal in time.

Latents leave the frontend with about zero mean and unit variance, (z - ``latents_mean``) /
``latents_std``, if the config has those, per channel and optionally per slice of time. Otherwise z
is multiplied by ``scaling_factor``. A further factor of a diffusion model (``sigma_data``) belongs
to that model. ``encode`` is deterministic: this autoencoder has no posterior.

Cosmos cannot be streamed: attention of its decoder reaches back to the first slice.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from gen.contracts.frontend import FrontendConfig
from gen.core.errors import GenError
from gen.core.registry import register
from gen.tokenizers.base.clips import Clips


@register("tokenizer", "cosmos")
class Cosmos(Clips):
    """Video autoencoder: latents [B, C, T, H, W] of clips [B, F, 3, h, w] in [-1, 1], F = 1 + r (T
    - 1)."""

    architecture = "AutoencoderKLCosmos"

    def __init__(self, model):
        super().__init__(model)
        c = model.config
        side = c.spatial_compression_ratio
        self.config = FrontendConfig(
            "video", "latents", (), (c.temporal_compression_ratio, side, side), c.latent_channels
        )
        if (c.latents_mean is None) != (c.latents_std is None):
            raise GenError(
                "the config has one of latents_mean and latents_std; expected both or none"
            )
        self._mean, self._std = (self._numbers(name) for name in ("latents_mean", "latents_std"))

    def _numbers(self, name: str) -> Tensor | None:
        """Read a statistic of the config per channel and, for n > 1, per slice: float64 [1, C, n,
        1, 1]. Raises ``GenError`` for another count of numbers."""
        values = self.model.config[name]
        if values is None:
            return None
        if not len(values) or len(values) % self.config.channels:
            raise GenError(
                f"{name} holds {len(values)} numbers; expected a multiple of"
                f" {self.config.channels}, the channels of latents"
            )
        return torch.tensor(values, dtype=torch.float64).view(1, self.config.channels, -1, 1, 1)

    def _scale(self, z: Tensor) -> tuple[Tensor | float, Tensor | float]:
        """Return mean and deviation of latents [B, C, T, H, W]."""
        if self._mean is None:
            return 0.0, 1 / self.model.config.scaling_factor
        slices, known = z.shape[2], self._mean.shape[2]
        if 1 < known < slices:
            raise GenError(
                f"latents have {slices} slices of time; expected at most {known}, for which the"
                " config has mean and deviation"
            )
        return tuple(x[:, :, :slices].to(z) for x in (self._mean, self._std))

    @property
    def codebooks(self) -> list[Tensor]:
        return []

    @property
    def fingerprint(self) -> Tensor:
        return self.model.decoder.conv_in.conv_s.weight

    @torch.no_grad()
    def encode(self, x: Tensor) -> Tensor:
        self._require_whole(x)
        z = self.model.encode(rearrange(x, "b f c h w -> b c f h w")).latent_dist.mode()
        mean, std = self._scale(z)
        return (z - mean) / std

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        if (
            codes.ndim != 5
            or codes.shape[1] != self.config.channels
            or not codes.is_floating_point()
        ):
            raise GenError(
                f"latents are {codes.dtype} of shape {tuple(codes.shape)}; expected floats [B,"
                f" {self.config.channels}, T, H, W]"
            )
        mean, std = self._scale(codes)
        return self.model.decode((codes * std + mean).to(self.model.dtype)).sample.transpose(1, 2)
