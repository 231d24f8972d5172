"""LLaVA: texts about images by a language model that reads the projected vectors of an image
encoder (Liu et al., arXiv 2304.08485; arXiv 2310.03744). LLaVA-NeXT encodes an image whole and in
tiles, as many as its size needs."""

from __future__ import annotations

from typing import Any

import transformers

from gen.contracts.checkpoint import CheckpointFiles, LoadOptions
from gen.core.registry import register
from gen.modalities.checkpoints.image_text import EmbeddedImages

NETWORKS = {
    "llava": transformers.LlavaForConditionalGeneration,
    "llava_next": transformers.LlavaNextForConditionalGeneration,
}


@register("checkpoint", "llava")
class LLaVA(EmbeddedImages):
    """LLaVA 1.5, LLaVA-NeXT and models of their layouts in transformers: text about images.

    Args:
        max_new_tokens: as in ``ImageText``.
        chat: as in ``ImageText``.
    """

    tested = (
        "tiny random folders against transformers' LlavaForConditionalGeneration,"
        " LlavaNextForConditionalGeneration, their processors and `generate`"
    )

    @classmethod
    def matches(cls, files: CheckpointFiles) -> bool:
        return files.model_type in NETWORKS

    def load(self, files: CheckpointFiles, load: LoadOptions) -> Any:
        self.network = NETWORKS[files.model_type]
        return super().load(files, load)
