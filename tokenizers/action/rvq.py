"""Action chunks as residual codes of short segments (of whole chunks in VQ-BeT, Lee et al., arXiv
2403.03181).

A small convolutional encoder maps ``stride`` steps to one vector z; a stride as long as the chunk
gives one vector for all of it. With

    r_0 = z,   k_q = argmin_k |r_q - e_qk|,   r_(q+1) = r_q - e_q(k_q)

stage q encodes the residual of the stages before, and the decoder takes the sum of the vectors.
Coarse stages come first, so errors in late ones are small.

``ActionAutoencoder`` is the trained network: a recipe quantises between ``encode_continuous`` and
``decode_continuous``, and initialises and revives the codes in ``tables``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gen.contracts.frontend import FrontendConfig
from gen.core.errors import bad_value
from gen.core.registry import register
from gen.models.load.locate import readable
from gen.tokenizers.action.base import ActionFrontend, ActionStatistics, at_least

FILE = "model.safetensors"


class ActionAutoencoder(nn.Module):
    """Convolutional autoencoder with residual quantisation.

    ``stride``: steps per code. ``stages``: Q. ``codebook_size``: K. ``channels``: C, floats per
    code. ``width``: channels of the layers.
    """

    def __init__(
        self,
        dimensions: int,
        stride: int = 4,
        stages: int = 2,
        codebook_size: int = 64,
        channels: int = 8,
        width: int = 64,
    ):
        super().__init__()
        self.dimensions, self.stride = (
            at_least("dimensions", dimensions, 1),
            at_least("stride", stride, 1),
        )
        self.stages, self.codebook_size = (
            at_least("stages", stages, 1),
            at_least("codebook_size", codebook_size, 2),
        )
        self.channels, self.width = at_least("channels", channels, 1), at_least("width", width, 1)

        def near(a, b):
            return nn.Conv1d(a, b, 3, padding=1, padding_mode="replicate")

        shrink, grow = (
            nn.Conv1d(width, width, stride, stride),
            nn.ConvTranspose1d(width, width, stride, stride),
        )
        self.encoder = nn.Sequential(
            near(dimensions, width), nn.GELU(), shrink, nn.GELU(), nn.Conv1d(width, channels, 1)
        )
        self.decoder = nn.Sequential(
            near(channels, width), nn.GELU(), grow, nn.GELU(), near(width, dimensions)
        )
        self.tables = nn.ParameterList(
            torch.randn(codebook_size, channels) / 2**q for q in range(stages)
        )

    def encode_continuous(self, x: Tensor) -> Tensor:
        """Encode signals [B, H, D] to vectors [B, H / stride, C]."""
        return self.encoder(x.transpose(1, 2)).transpose(1, 2)

    def decode_continuous(self, z: Tensor) -> Tensor:
        """Decode vectors [B, H / stride, C] to signals [B, H, D], which may exceed [-1, 1]."""
        return self.decoder(z.transpose(1, 2)).transpose(1, 2)

    @torch.no_grad()
    def quantise(self, z: Tensor) -> Tensor:
        """Quantise vectors [B, n, C] to codes int64 [B, Q, n]."""
        residual, codes = z, []
        for table in self.tables:
            # differences and not products: the nearest code then does not depend on the batch size
            codes.append((residual[:, :, None] - table).square().sum(-1).argmin(-1))
            residual = residual - table[codes[-1]]
        return torch.stack(codes, 1)

    def embed(self, codes: Tensor) -> Tensor:
        """Look up codes int64 [B, Q, n] and sum over Q: vectors [B, n, C]."""
        return sum(table[codes[:, q]] for q, table in enumerate(self.tables))

    def forward(self, x: Tensor) -> Tensor:
        """Reconstruct signals [B, H, D] through the codes, with straight-through gradients."""
        z = self.encode_continuous(x)
        return self.decode_continuous(z + (self.embed(self.quantise(z)) - z).detach())


@register("tokenizer", "action_rvq")
class ActionRVQ(ActionFrontend):
    """Action tokenizer: codes [B, Q, H / stride] of chunks [B, H, D] in [-1, 1].

    ``model``: an ``ActionAutoencoder``.
    """

    name, keys = "action_rvq", ("stride", "stages", "codebook_size", "channels", "width")

    def __init__(
        self,
        model: ActionAutoencoder,
        horizon: int,
        statistics: ActionStatistics,
        device="cpu",
        dtype=torch.float32,
    ):
        super().__init__(horizon, model.dimensions, statistics, device, dtype)
        if horizon % model.stride:
            raise bad_value("horizon", horizon, f"a multiple of the stride {model.stride}")
        self.model = model.to(self.device, self.dtype).eval()
        self.stride, self.stages, self.codebook_size = (
            model.stride,
            model.stages,
            model.codebook_size,
        )
        self.channels, self.width = model.channels, model.width
        self.config = FrontendConfig(
            "action", "codes", (self.codebook_size,) * self.stages, (self.stride,)
        )

    @property
    def grid(self) -> tuple[int, ...]:
        return (self.horizon // self.stride,)

    @torch.no_grad()
    def encode(self, x: Tensor) -> Tensor:
        return self.model.quantise(
            self.model.encode_continuous(self.require_signals(x).to(self.dtype))
        )

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        return self.model.decode_continuous(self.model.embed(self.require_codes(codes))).clamp(
            -1, 1
        )

    @property
    def codebooks(self) -> list[Tensor]:
        return [t.detach() for t in self.model.tables]

    @property
    def fingerprint(self) -> Tensor:
        """Codebooks, and a digest of the config with its statistics."""
        return torch.cat([*(t.flatten().float().cpu() for t in self.codebooks), self.digest()])

    def save_parts(self, path: Path) -> None:

        save_file({k: v.contiguous() for k, v in self.model.state_dict().items()}, path / FILE)

    @classmethod
    def load_parts(cls, path: Path, config: dict[str, Any]) -> dict[str, Any]:

        model = ActionAutoencoder(config.pop("dimensions"), **{k: config.pop(k) for k in cls.keys})
        with readable("frontend", path):
            model.load_state_dict(load_file(path / FILE))
        return {"model": model}
