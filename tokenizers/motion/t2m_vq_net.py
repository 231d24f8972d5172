"""The motion VQ-VAE of T2M-GPT (Zhang et al., arXiv 2301.06052) as its checkpoints hold it; MMM
(arXiv 2312.03596) uses the same network.

    encoder  conv3, ReLU, n times (conv4 of stride 2, residual blocks), conv3
    decoder  conv3, ReLU, n times (residual blocks, nearest x2, conv3), conv3, ReLU, conv3
    block    x + conv1(ReLU(conv3 of dilation 3^k (ReLU(x))))        k falls from depth - 1 to 0

One codebook. All sizes are those of the tensors. Everything but ReLU, the stride of 2 and the
dilations shows in the weights; checkpoints that were trained with other ones cannot be told apart,
and the published ones were not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from gen.core.errors import GenError

WRAPPER = "net"  # what the training script puts the weights under
DROPPED = (r"^quantizer\.(code_sum|code_count)$",)  # what the moving average of a codebook keeps
RENAMES = ((r"^(module\.)?(vqvae\.)?", ""), (r"^quantizer\.(codebook|embedding\.weight)$", "table"))
GROWTH = 3


class _Residual(nn.Module):
    def __init__(self, width: int, dilation: int):
        super().__init__()
        self.conv1 = nn.Conv1d(width, width, 3, padding=dilation, dilation=dilation)
        self.conv2 = nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(nn.functional.relu(self.conv1(nn.functional.relu(x))))


class _Stack(nn.Module):
    """Modules under the name that they have in the checkpoints."""

    def __init__(self, *modules: nn.Module):
        super().__init__()
        self.model = nn.Sequential(*modules)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


class T2MVQ(nn.Module):
    """``halvings``: how often the encoder halves the frames; ``depth``: residual blocks after each.
    It has the calls that ``gen.tokenizers.motion.motion_vq`` makes of a network, with one part of
    the body and one codebook."""

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
        return [self.table]

    def chain(self, part: int) -> list[Tensor]:
        return [self.table]

    def latents(self, x: Tensor) -> list[Tensor]:
        """Normalised features [B, F, features] -> [B, F / stride, C], not quantised."""
        return [self.encoder(x.mT).mT]

    def features(self, latents: list[Tensor]) -> Tensor:
        """[B, T, C], quantised -> normalised features [B, stride T, features]."""
        return self.decoder(latents[0].mT).mT


def sizes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """The arguments of ``T2MVQ`` that tensors of these shapes belong to. Raises ``GenError`` for
    tensors of something else."""
    own = {re.sub(RENAMES[0][0], "", key): shape for key, shape in shapes.items()}
    table = own.get("quantizer.codebook") or own.get("quantizer.embedding.weight")
    first = own.get("encoder.model.0.weight")
    if table is None or first is None or len(first) != 3 or len(table) != 2:
        raise GenError(
            f"the weights ({', '.join(list(shapes)[:4])} ...) are none of a T2M-GPT motion VQ-VAE;"
            " expected vqvae.encoder.model.0.weight and vqvae.quantizer.codebook among them"
        )
    stages = {m[1] for key in own if (m := re.match(r"encoder\.model\.(\d+)\.1\.model\.", key))}
    depth = {
        int(m[1]) for key in own if (m := re.match(r"encoder\.model\.\d+\.1\.model\.(\d+)\.", key))
    }
    return {
        "features": first[1],
        "codes": table[0],
        "channels": table[1],
        "width": first[0],
        "halvings": len(stages),
        "depth": len(depth),
    }
