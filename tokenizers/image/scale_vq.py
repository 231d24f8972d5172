"""Image tokens of next-scale models: one token map per scale, coarse to fine, over one codebook.

The codes of all scales stand behind each other, T = sum h_k w_k of them. Their vectors, enlarged
and added up, are the feature map that the decoder reads (``gen.models.nets.residual_scales``).
The codes of the first scales alone decode to a blurred image.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from gen.contracts.frontend import FrontendConfig
from gen.core.errors import GenError
from gen.core.registry import register
from gen.core.token_space import TokenSpace
from gen.models.load.pretrained import strictly
from gen.models.nets.residual_scales import Sides
from gen.tokenizers.base.rgb import RGB


@register("tokenizer", "scale_vq")
class ScaleVQ(RGB):
    """Residual image tokenizer over scales: codes [B, 1, T] of RGB images [B, 3, h, w] in [-1, 1].

    Attributes:
        sides: (height, width) of every scale, coarse to fine.

    Args:
        model: network with ``quantize``, ``features``, ``pixels`` and ``factor``, as
            ``ScaleVQModel`` has them.
    """

    architecture = "ScaleVQModel"

    def __init__(self, model):
        self.model, self.factor = model.eval(), model.factor
        self.sides: Sides = model.quantize.sides
        self.grid = (sum(model.quantize.lengths),)
        codes = len(model.quantize.embedding.weight)
        self.config = FrontendConfig("image", "codes", (codes,), (self.factor, self.factor))

    @classmethod
    def from_pretrained(
        cls, path: str | Path, device: str | torch.device = "cpu", dtype=torch.float32
    ) -> Self:
        """Load a folder that ``ScaleVQModel.save_pretrained`` wrote. Raises ``GenError`` if it
        cannot be read, or if its weights do not fit."""
        # its parts come from diffusers, which is slow to import
        from gen.models.nets.scale_vq import ScaleVQModel

        options = {"torch_dtype": dtype, "low_cpu_mem_usage": False}
        return cls(strictly(ScaleVQModel, path, "tokenizer", **options).to(device))

    @property
    def codebooks(self) -> list[Tensor]:
        return [self.model.quantize.embedding.weight.detach()]

    @property
    def fingerprint(self) -> Tensor:
        return self.codebooks[0]

    def grid_for(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return (T,). Raises ``GenError`` for images of another size than the scales have."""
        side = tuple(n * self.factor for n in self.sides[-1])
        if tuple(input_shape[-2:]) != side:
            raise GenError(f"the image is {tuple(input_shape[-2:])}; expected {side}")
        return self.grid

    def regenerated(self, marks: Tensor) -> Tensor:
        """Return which positions of all scales an edit makes anew: bool [T].

        On the last scale they are those with any marked pixel, on the others those whose area is
        marked by half or more: a coarse token that mostly covers what is kept stays.

        Args:
            marks: pixels of the region, bool [h, w].
        """
        area, cells = marks.double()[None, None], []
        for sides in self.sides:
            share = F.interpolate(area, size=sides, mode="area").flatten()
            cells.append(share > 0 if sides == self.sides[-1] else share > 0.5 - 1e-9)
        return torch.cat(cells)

    @torch.no_grad()
    def encode(self, x: Tensor) -> Tensor:
        self.grid_for(tuple(x.shape))
        return self.model.quantize.encode(self.model.features(x))[:, None]

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """Decode codes [B, 1, t] of the first scales, or of all.

        Raises:
            GenError: codes of other shapes or out of range, or of a part of a scale.
        """
        quantize, top = self.model.quantize, self.config.codebook_sizes[0]
        ends = torch.tensor(quantize.lengths).cumsum(0).tolist()
        fits = codes.ndim == 3 and codes.shape[1] == 1 and codes.shape[2] in ends
        if not fits or int(codes.min()) < 0 or int(codes.max()) >= top:
            raise GenError(
                f"codes have shape {tuple(codes.shape)}; expected [B, 1, T] in 0..{top - 1} with T"
                f" one of {', '.join(map(str, ends))}, the ends of the scales"
            )
        return self.model.pixels(quantize.decode(codes[:, 0]))


def scale_space(sides: Sides, codes: int, codebook: Tensor | None = None) -> TokenSpace:
    """Return the token space of all scales behind each other, with one block per scale.

    Args:
        sides: (height, width) of every scale, coarse to fine.
        codes: vectors of the codebook; the mask token comes behind them.
        codebook: float [codes, D].
    """
    sizes = [height * width for height, width in sides]
    ends = torch.tensor(sizes).cumsum(0).tolist()
    blocks = tuple(slice(end - n, end) for n, end in zip(sizes, ends, strict=True))
    return replace(TokenSpace.codes((ends[-1],), codes, codes, codes, codebook), blocks=blocks)
