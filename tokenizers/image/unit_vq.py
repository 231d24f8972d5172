"""VQ image tokens of autoencoders over pixels in [0, 1], such as aMUSEd's: ``diffusers.VQModel`` as
in ``vq``."""

from __future__ import annotations

from PIL import Image
from torch import Tensor

from gen.core.registry import register
from gen.tokenizers.image.vq import VQ


@register("tokenizer", "unit_vq")
class UnitVQ(VQ):
    """VQ image tokenizer: codes [B, 1, H, W] of RGB images [B, 3, h, w] in [0, 1]."""

    def preprocess(self, media) -> Tensor:
        return (super().preprocess(media) + 1) / 2

    def postprocess(self, x: Tensor) -> Image.Image:
        return super().postprocess(x * 2 - 1)
