"""The motion VQ-VAE of T2M-GPT (Zhang et al., arXiv 2301.06052) as its checkpoints hold it; MMM
(arXiv 2312.03596) uses the same network.

    encoder  conv3, ReLU, n times (conv4 of stride 2, residual blocks), conv3
    decoder  conv3, ReLU, n times (residual blocks, nearest x2, conv3), conv3, ReLU, conv3
    block    x + conv1(ReLU(conv3 of dilation 3^k (ReLU(x))))        k falls from depth - 1 to 0

It has one codebook; all sizes are read from the tensors. ReLU, the stride of 2 and the dilations do
not show in the weights, so checkpoints trained with others cannot be told apart; the published ones
use these.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from gen.core.errors import GenError

WRAPPER = "net"  # key of the weights in the training script's checkpoints
DROPPED = (r"^quantizer\.(code_sum|code_count)$",)  # moving averages of the codebook
RENAMES = ((r"^(module\.)?(vqvae\.)?", ""), (r"^quantizer\.(codebook|embedding\.weight)$", "table"))
GROWTH = 3


class _Residual(nn.Module):
    """Residual block with a dilated convolution."""

    def __init__(self, width: int, dilation: int):
        super().__init__()
        self.conv1 = nn.Conv1d(width, width, 3, padding=dilation, dilation=dilation)
        self.conv2 = nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(nn.functional.relu(self.conv1(nn.functional.relu(x))))


class _Stack(nn.Module):
    """Sequence of modules under the checkpoints' name, ``model``."""

    def __init__(self, *modules: nn.Module):
        super().__init__()
        self.model = nn.Sequential(*modules)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


class T2MVQ(nn.Module):
    """T2M-GPT's motion VQ-VAE, with the interface of ``MotionVQVAE`` for one part and one codebook.

    ``halvings``: downsampling steps of the encoder. ``depth``: residual blocks after each.
    """

    def __init__(
        self,
        features: int,
        codes: int,
        channels: int,
        width: int,
        halvings: int = 2,
        depth: int = 3,
    ):
        super().__init__()
        self.config = SimpleNamespace(codebook_size=codes, residual=1)
        self.stride = 2**halvings

        def conv(a, b):
            return nn.Conv1d(a, b, 3, padding=1)

        def blocks():
            return _Stack(*(_Residual(width, GROWTH**k) for k in reversed(range(depth))))

        def half():
            return nn.Sequential(nn.Conv1d(width, width, 4, stride=2, padding=1), blocks())

        def double():
            return nn.Sequential(blocks(), nn.Upsample(scale_factor=2), conv(width, width))

        times = range(halvings)
        self.encoder = _Stack(
            conv(features, width), nn.ReLU(), *(half() for _ in times), conv(width, channels)
        )
        self.decoder = _Stack(
            conv(channels, width),
            nn.ReLU(),
            *(double() for _ in times),
            conv(width, width),
            nn.ReLU(),
            conv(width, features),
        )
        self.table = nn.Parameter(torch.randn(codes, channels))
        self.register_buffer("mean", torch.zeros(features), persistent=False)
        self.register_buffer("std", torch.ones(features), persistent=False)

    @property
    def tables(self) -> list[Tensor]:
        """Codebooks [codes, C]."""
        return [self.table]

    def chain(self, part: int) -> list[Tensor]:
        """Return the codebooks of a part, coarse first."""
        return [self.table]

    def latents(self, x: Tensor) -> list[Tensor]:
        """Encode normalised features [B, F, features] to latents [B, F / stride, C], before
        quantisation."""
        return [self.encoder(x.mT).mT]

    def features(self, latents: list[Tensor]) -> Tensor:
        """Decode quantised latents [B, T, C] to normalised features [B, stride T, features]."""
        return self.decoder(latents[0].mT).mT


def sizes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Read the arguments of ``T2MVQ`` from shapes by key. Raises ``GenError`` for another
    network."""
    by_key = {re.sub(RENAMES[0][0], "", key): shape for key, shape in shapes.items()}
    table = by_key.get("quantizer.codebook") or by_key.get("quantizer.embedding.weight")
    first = by_key.get("encoder.model.0.weight")
    if table is None or first is None or len(first) != 3 or len(table) != 2:
        raise GenError(
            f"the weights ({', '.join(list(shapes)[:4])} ...) are not those of a T2M-GPT motion"
            " VQ-VAE; expected vqvae.encoder.model.0.weight and vqvae.quantizer.codebook among them"
        )
    stage = re.compile(r"encoder\.model\.(\d+)\.1\.model\.")
    stages = {m[1] for key in by_key if (m := stage.match(key))}
    depth = {
        int(m[1])
        for key in by_key
        if (m := re.match(r"encoder\.model\.\d+\.1\.model\.(\d+)\.", key))
    }
    return {
        "features": first[1],
        "codes": table[0],
        "channels": table[1],
        "width": first[0],
        "halvings": len(stages),
        "depth": len(depth),
    }
