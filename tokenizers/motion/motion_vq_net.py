"""A 1-D convolutional VQ-VAE of motion features (Zhang et al., "T2M-GPT", arXiv 2301.06052), four
frames per code.

The body may be split into parts with separate encoders and codebooks, so that one part can be
regenerated while the others stay (upper and lower body in Pinyoanuntapong et al., "MMM", arXiv
2312.03596). One decoder takes all parts. ``residual`` codebooks per part quantise the residual of
those before them (Guo et al., "MoMask", arXiv 2312.00063).
"""

from __future__ import annotations

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import Tensor, nn


class _Residual(nn.Module):
    """Residual block with a dilated convolution."""

    def __init__(self, width: int, dilation: int):
        super().__init__()
        self.wide = nn.Conv1d(width, width, 3, padding=dilation, dilation=dilation)
        self.mix = nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(nn.functional.silu(self.wide(nn.functional.silu(x))))


def _encoder(features: int, width: int, channels: int) -> nn.Sequential:
    def half():
        return [
            nn.Conv1d(width, width, 4, stride=2, padding=1),
            _Residual(width, 3),
            _Residual(width, 1),
        ]

    return nn.Sequential(
        nn.Conv1d(features, width, 3, padding=1),
        nn.SiLU(),
        *half(),
        *half(),
        nn.SiLU(),
        nn.Conv1d(width, channels, 3, padding=1),
    )


def _decoder(channels: int, width: int, features: int) -> nn.Sequential:
    def double():
        return [
            _Residual(width, 3),
            _Residual(width, 1),
            nn.Upsample(scale_factor=2),
            nn.Conv1d(width, width, 3, padding=1),
        ]

    return nn.Sequential(
        nn.Conv1d(channels, width, 3, padding=1),
        *double(),
        *double(),
        nn.SiLU(),
        nn.Conv1d(width, features, 3, padding=1),
    )


class MotionVQVAE(ModelMixin, ConfigMixin):
    """Motion VQ-VAE over normalised features.

    ``parts``: feature indices of every part, a partition of all features. ``codebook_size`` and
    ``code_channels``: of every codebook. ``width``: channels of the layers. ``residual``: codebooks
    per part. ``mean`` and ``std`` [features] normalise the features, in and out.
    """

    @register_to_config
    def __init__(
        self,
        parts: list[list[int]],
        codebook_size: int = 128,
        code_channels: int = 16,
        width: int = 64,
        residual: int = 1,
    ):
        super().__init__()
        features = sum(map(len, parts))
        if sorted(i for p in parts for i in p) != list(range(features)):
            raise ValueError(
                f"the parts name {features} features, not each of 0 to {features - 1} once"
            )
        self.encoders = nn.ModuleList(_encoder(len(p), width, code_channels) for p in parts)
        self.decoder = _decoder(code_channels * len(parts), width, features)
        self.tables = nn.ParameterList(
            torch.randn(codebook_size, code_channels) for _ in range(len(parts) * residual)
        )
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("std", torch.ones(features))

    def latents(self, x: Tensor) -> list[Tensor]:
        """Encode normalised features [B, F, features] to latents [B, F / 4, C] per part, before
        quantisation."""
        return [
            encode(x[..., part].mT).mT
            for encode, part in zip(self.encoders, self.config.parts, strict=True)
        ]

    def chain(self, part: int) -> list[nn.Parameter]:
        """Return the codebooks of a part, coarse first."""
        n = self.config.residual
        return list(self.tables[part * n : (part + 1) * n])

    def features(self, latents: list[Tensor]) -> Tensor:
        """Decode quantised latents [B, T, C] per part to normalised features [B, 4 T, features]."""
        return self.decoder(torch.cat(latents, -1).mT).mT
