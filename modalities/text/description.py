"""Descriptions of images, clips and sounds: what a prompt such as "describe" with a medium asks
for.

The prompt of a captioner is the tokens of the medium by its frontend. The config of a captioner
has a field ``reads``, the parts of a condition that it describes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gen.contracts.condition import Condition
from gen.contracts.modality import Verdict
from gen.core.condition_parts import KINDS
from gen.core.errors import GenError, cut
from gen.media.given import GivenMedia
from gen.modalities.audio.balls import FPS
from gen.modalities.audio.description import check_caption
from gen.modalities.audio.prompts import caption_prompt as media_prompt
from gen.modalities.image import captions as shapes
from gen.modalities.image.checker import detect
from gen.modalities.image.reading import caption_prompt, image_codes
from gen.modalities.media_tokens import Description, MediaTokens
from gen.models.load.locate import ZOO
from gen.tokenizers.image.vq import VQ

ASKED = ("", "describe")  # prompts that ask for a description


def description_of(condition: Condition) -> Description:
    """Return the typed condition of a medium and a prompt that asks for its description.

    Raises:
        GenError: there are several media, one cannot be read, or the prompt asks something else.
    """
    parts = [part for part in condition.parts if part in KINDS]
    if len(parts) > 1:
        raise GenError(f"a description is of one medium; got {' and '.join(parts)}")
    asked = (condition.text or "").strip().lower().rstrip(".!?")
    if asked not in ASKED:
        raise GenError(
            f"the prompt beside the {KINDS[parts[0]]} is {cut(condition.text or '')!r}; expected"
            " 'describe'"
        )
    size = (shapes.IMAGE_SIZE, shapes.IMAGE_SIZE) if parts[0] == "images" else None
    return Description(parts[0], condition.media(parts[0], size, FPS)[0])


def prompt_of(config: Any, model_name: str) -> Callable[[Any], list[int]]:
    """Return the function that makes token ids of a captioner's prompt.

    Args:
        config: config of the captioner.
        model_name: name of the captioner, for messages.
    """
    reads = tuple(config.reads)
    frontend = None
    if "images" in reads:
        frontend = VQ.from_pretrained(ZOO / config.media_frontend, torch.device("cpu"))

    def encode(medium: GivenMedia) -> list[int]:
        if frontend is None:
            return media_prompt(medium.kind, medium)
        return caption_prompt(image_codes(medium, frontend), config)

    kept = MediaTokens(encode)

    def prompt(condition: Any) -> list[int]:
        if not isinstance(condition, Description) or condition.part not in reads:
            found = (
                f"{condition.part} to describe"
                if isinstance(condition, Description)
                else f"the prompt {str(condition)!r} and no medium"
            )
            raise GenError(f"model {model_name} describes {' and '.join(reads)}; got {found}")
        return kept(condition.medium)

    return prompt


def check_description(asked: Description, text: str) -> Verdict:
    """Judge a description: it names all shapes, or all balls, that the checker of the medium
    finds, in any order, and no other ones."""
    if asked.part != "images":
        return check_caption(text, asked)
    seen = {region.item for region in detect(asked.medium.array)}
    found = f"the image shows {shapes.Caption(tuple(seen))}" if seen else "the image shows no shape"
    try:
        said = shapes.parse(text)
    except ValueError as error:
        return Verdict(False, False, str(error))
    return Verdict(set(said.items) == seen, True, found)
