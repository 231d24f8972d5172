"""Idefics3 and SmolVLM: texts about images of any size by a language model that reads the vectors
of an image and of its tiles (Laurencon et al., arXiv 2408.12637; Marafioti et al., arXiv
2504.05299)."""

from __future__ import annotations

import transformers

from gen.contracts.checkpoint import CheckpointFiles
from gen.core.registry import register
from gen.modalities.checkpoints.image_text import EmbeddedImages


@register("checkpoint", "idefics3")
class Idefics3(EmbeddedImages):
    """Idefics3 and SmolVLM-Instruct: text about images.

    Args:
        max_new_tokens: as in ``ImageText``.
        chat: as in ``ImageText``.
    """

    network = transformers.Idefics3ForConditionalGeneration
    tested = (
        "tiny random folders against transformers' Idefics3ForConditionalGeneration, its processor"
        " and its `generate`"
    )

    @classmethod
    def matches(cls, files: CheckpointFiles) -> bool:
        return files.model_type == "idefics3"
