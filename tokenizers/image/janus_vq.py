"""Janus' image tokenizer: a frontend over ``transformers.JanusVQVAE`` (Wu et al., "Janus", arXiv
2410.13848; the network is LlamaGen's, arXiv 2406.06525).

Codes are directions: code k stands for e_k / |e_k|, so a latent z becomes the code

    argmin_k | z / |z| - e_k / |e_k| |    =    argmax_k  z . e_k / |e_k|

as in the published code. The quantiser of the transformers class compares z with the raw e_k, while
its ``decode`` looks up e_k / |e_k|, so its codes are not the nearest ones. ``encode`` here uses the
encoder of the class with the rule above.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from gen.contracts.frontend import FrontendConfig, require_codes
from gen.core.errors import GenError
from gen.core.registry import register
from gen.models.load.libraries import transformers
from gen.models.load.locate import locate
from gen.models.load.pretrained import pretrained
from gen.tokenizers.base.rgb import RGB


@register("tokenizer", "janus_vq")
class JanusVQ(RGB):
    """VQ image tokenizer: codes [B, 1, P, P] of square RGB images [B, 3, s, s] in [-1, 1].

    P = ``config.num_patches`` of the model is the only grid that it decodes.
    """

    architecture = "JanusVQVAE"

    def __init__(self, model):
        """``model``: a ``transformers.JanusVQVAE``."""
        self.model = model.eval()
        self.factor = 2 ** (len(model.config.channel_multiplier) - 1)
        self.side = model.config.num_patches
        self.config = FrontendConfig(
            "image", "codes", (model.config.num_embeddings,), (self.factor, self.factor)
        )

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        """Load a folder or Hub id in the transformers layout. Raises ``GenError`` if it cannot be
        read."""
        return cls(
            pretrained(
                getattr(transformers(), cls.architecture),
                locate(path, "frontend"),
                device=device,
                dtype=dtype,
                name=path,
            )
        )

    @property
    def codebooks(self) -> list[Tensor]:
        return [F.normalize(self.fingerprint, dim=-1)]

    @property
    def fingerprint(self) -> Tensor:
        return self.model.quantize.embedding.weight.detach()

    @torch.no_grad()
    def encode(self, x: Tensor) -> Tensor:
        if tuple(x.shape[-2:]) != (self.side * self.factor,) * 2:
            raise GenError(
                f"the images are {x.shape[-2]} x {x.shape[-1]} pixels; expected"
                f" {self.side * self.factor} x {self.side * self.factor}, the only size of this"
                " decoder"
            )
        z = F.normalize(self.model.quant_conv(self.model.encoder(x)), dim=1)
        return torch.einsum("bdhw,nd->bnhw", z, self.codebooks[0]).argmax(1)[:, None]

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        require_codes(codes, self.config)
        if tuple(codes.shape[2:]) != (self.side, self.side):
            raise GenError(
                f"codes have the grid {tuple(codes.shape[2:])}; expected {(self.side, self.side)},"
                " the only grid of this decoder"
            )
        return self.model.decode(codes.flatten(1).to(self.model.device))
