"""Reader of images: the caption that the captioner writes for an image.

The prompt of the captioner is the codes of the image and the mask, at which it begins to write. It
writes the words of a caption, the most probable one at each position.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gen.contracts.condition import ConditionEncoder
from gen.core.errors import GenError
from gen.core.registry import register
from gen.media.given import GivenMedia
from gen.modalities.image import captions as shapes
from gen.modalities.media_tokens import KEPT, MediaTokens, Recent
from gen.models.load.locate import ZOO
from gen.models.zoo import load_lm
from gen.tokenizers.image.vq import VQ
from gen.tokenizers.text.words import TextWords

CAPTIONER = "image-captions"  # zoo folder of the captioner
IMAGE_SLOTS = 256  # codes of an image
# words of captions in the order of their ids; the end token follows
IMAGE_WORDS = (
    *("a", "and", "at", "in", "the", *shapes.SIZES, *shapes.COLOURS, *shapes.SHAPES),
    *("top", "bottom", "left", "right", "centre"),
)
IMAGE_POSITIONS = 18  # words of the longest caption, and the end token


def ordered(caption: shapes.Caption) -> shapes.Caption:
    """Return a caption with its shapes in reading order."""
    return shapes.Caption(
        tuple(sorted(caption.items, key=lambda i: shapes.LOCATIONS.index(i.location or "centre")))
    )


@torch.no_grad()
def image_codes(image: GivenMedia, frontend: VQ) -> list[int]:
    """Return the codes of an image, row by row."""
    pixels = frontend.preprocess(np.asarray(image.array))
    return frontend.encode(pixels[None]).flatten().tolist()


def caption_prompt(codes: list[int], config: Any) -> list[int]:
    """Return the prompt of a captioner with this config for the codes of an image."""
    return [config.codebook_size + code for code in codes] + [config.mask_token_id]


@register("condition_encoder", "shape_reader")
class ShapeReader(ConditionEncoder):
    """Captioner of images of captioned shapes."""

    def __init__(self) -> None:
        device, dtype = torch.device("cpu"), torch.float32
        self.model = load_lm(CAPTIONER, device, dtype)
        frontend = VQ.from_pretrained(ZOO / self.model.config.media_frontend, device, dtype)
        self.words = TextWords.from_pretrained(ZOO / self.model.config.frontend)
        self._codes = MediaTokens(lambda image: image_codes(image, frontend))
        self._captions = Recent(KEPT)

    @torch.no_grad()
    def encode(self, condition: GivenMedia) -> dict[str, Tensor]:
        """Return the ``tokens`` long [n] of the caption of an image."""
        size = self.words.eos_token_id + 1
        ids = caption_prompt(self._codes(condition), self.model.config)
        said: list[int] = []
        while len(said) < self.words.positions:
            logits = self.model(
                input_ids=torch.tensor([ids + said]), logits_to_keep=1, use_cache=False
            ).logits[0, -1, :size]
            token = int(logits.argmax())
            if token == self.words.eos_token_id:
                break
            said.append(token)
        return {"tokens": torch.tensor(said, dtype=torch.long)}

    def caption(self, image: GivenMedia) -> shapes.Caption:
        """Return the caption of an image.

        Raises:
            GenError: what the captioner writes is no caption.
        """

        def said() -> str:
            tokens = self.encode(image)["tokens"].tolist()
            return " ".join(self.words.words[token] for token in tokens)

        try:
            return shapes.parse(self._captions.of(image.digest, said))
        except ValueError as error:
            raise GenError(f"the image cannot be read as captioned shapes: {error}") from None


@cache
def shape_reader() -> ShapeReader:
    """Load the embedded captioner."""
    return ShapeReader()
