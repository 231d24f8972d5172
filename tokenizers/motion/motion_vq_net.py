"""A 1-D convolutional VQ-VAE of motion features (Zhang et al., "T2M-GPT", arXiv 2301.06052), four
frames per code.

The body may come in parts, each with an encoder and codebooks of its own, so that one can be made
anew while the others stay (Pinyoanuntapong et al., "MMM", arXiv 2312.03596, do so with the upper
and the lower body). One decoder looks at all parts. ``residual`` codebooks per part quantise what
those before them left over (Guo et al., "MoMask", arXiv 2312.00063).
"""

from __future__ import annotations

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import Tensor, nn

STRIDE = 4  # frames per code


class _Residual(nn.Module):
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
    """``parts``: the features of every part, which together are all; ``codebook_size`` and
    ``code_channels`` of every codebook.

    ``mean`` and ``std`` [features] belong to the model: features go in and come out normalised by
    them.
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
        """Normalised features [B, F, features] -> per part [B, F / 4, C], not quantised."""
        return [
            encode(x[..., part].mT).mT
            for encode, part in zip(self.encoders, self.config.parts, strict=True)
        ]

    def chain(self, part: int) -> list[nn.Parameter]:
        """The codebooks of a part, coarse one first."""
        n = self.config.residual
        return list(self.tables[part * n : (part + 1) * n])

    def features(self, latents: list[Tensor]) -> Tensor:
        """Per part [B, T, C], quantised -> normalised features [B, 4 T, features]."""
        return self.decoder(torch.cat(latents, -1).mT).mT
