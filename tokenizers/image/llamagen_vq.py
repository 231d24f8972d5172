"""LlamaGen's image tokenizer (arXiv 2406.06525), from the published files ``vq_ds16_c2i.pt``,
``vq_ds8_c2i.pt`` and ``vq_ds16_t2i.pt``, or the same keys in safetensors.
``gen.tokenizers.image.llamagen_vq_net`` is the network."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from gen.contracts.frontend import FrontendConfig, require_codes
from gen.core.registry import register
from gen.models.load.weights import Weights, fill, without_storage
from gen.tokenizers.base.rgb import RGB
from gen.tokenizers.image.llamagen_vq_net import DROP, LlamaGenVQModel, vq_sizes_of


@register("tokenizer", "llamagen_vq")
class LlamaGenVQ(RGB):
    """VQ image tokenizer: codes [B, 1, H, W] of RGB images [B, 3, h, w] in [-1, 1].

    Codebook vectors have unit length.
    """

    def __init__(self, model: LlamaGenVQModel):
        self.model, self.factor = model.eval(), model.sizes.stride
        self.config = FrontendConfig(
            "image", "codes", (model.sizes.codes,), (self.factor, self.factor)
        )
        self._vectors = model.quantize.vectors

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        """Load a weights file, or a folder with one. Raises ``GenError`` for files that cannot be
        read, and for keys that do not fit."""
        weights = Weights(path)
        sizes = vq_sizes_of(weights.shapes, str(path))
        model = without_storage(lambda: LlamaGenVQModel(sizes))
        return cls(fill(model, weights, drop=DROP, device=device, dtype=dtype))

    @property
    def codebooks(self) -> list[Tensor]:
        return [self._vectors]

    @property
    def fingerprint(self) -> Tensor:
        return self._vectors

    @torch.no_grad()
    def encode(self, x: Tensor) -> Tensor:
        return self.model.encode(x)[:, None]

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        require_codes(codes, self.config)
        return self.model.decode(codes[:, 0])
