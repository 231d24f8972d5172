"""Captions from images: train a model that describes images of captioned shapes; measure it, and
edits by instruction, which begin with a description.

    python -m gen.recipes.image.captioner all --work DIR           the run that made image-captions
    python -m gen.recipes.image.captioner all --work DIR --quick   a smoke run of the same path

Stages: ``tokens``, ``train``, ``more`` (a second round), ``deeper_tokens``, ``deeper`` (a third
round with two more layers, on other images), ``export``, ``evaluate``. The prompt of the captioner
is the codes of an image by ``image-vq``; it writes a caption with the shapes in reading order. On 2
cores the rounds take 80 minutes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gen.contracts.frontend import codebook_digest
from gen.modalities.image import captions as shapes
from gen.modalities.image.reading import IMAGE_POSITIONS, IMAGE_SLOTS, IMAGE_WORDS, ordered
from gen.models.load.locate import ZOO
from gen.models.nets.grid import GridLlamaForCausalLM
from gen.recipes.common.data import encode_dataset
from gen.recipes.common.grid_models import Run, Shape, tidy, train_lm
from gen.recipes.common.recipe import Recipe
from gen.recipes.image.captioner_evaluation import CAPTIONER, CAPTIONER_WORDS, evaluate
from gen.recipes.image.recipe import drawn
from gen.tokenizers.image.vq import VQ
from gen.tokenizers.text.words import TextWords

CODES = 128


@dataclass(frozen=True, kw_only=True)
class CaptionPlan:
    """Sizes of the recipe."""

    images: int = 40_000
    deeper_images: int = 80_000
    model: Run = Run(2000, 96, 3, batch=32)
    more: Run = Run(2200, 96, 3, batch=32, seed=1, start="captions/model", lr=1.5e-3)
    deeper: Run = Run(3000, 96, 5, batch=32, seed=2, start="../more/model", lr=1.5e-3)
    held_out: int = 200


QUICK = CaptionPlan(
    images=64,
    deeper_images=64,
    model=Run(3, 32, 1, batch=8),
    more=Run(3, 32, 1, batch=8, start="captions/model"),
    deeper=Run(3, 32, 2, batch=8, start="../more/model"),
    held_out=4,
)


def caption_shape() -> Shape:
    """Return the shape of the captioner: words of captions, codes of an image, mask."""
    return Shape((IMAGE_POSITIONS,), IMAGE_SLOTS, len(IMAGE_WORDS) + 1, CODES)


def caption_words() -> TextWords:
    """Return the frontend of the captioner."""
    return TextWords.of(IMAGE_WORDS, IMAGE_POSITIONS)


def caption_of(slots: list[int]) -> shapes.Caption:
    """Return the caption of eight slots, its shapes in reading order."""
    named = [shapes.WORDS[s] for s in slots]
    items = [
        shapes.Item(shape, colour, size, location)
        for size, colour, shape, location in (named[:4], named[4:])
        if size != shapes.WORDS[shapes.NONE]
    ]
    return ordered(shapes.Caption(tuple(items)))


def unchanged(slots: Tensor, generator: torch.Generator) -> Tensor:
    """Return the prompt [B, P] as it is: nothing of an image is left out in training."""
    return slots


class CaptionRecipe(Recipe):
    """Captioner of images, and edits that use it."""

    doc, full, quick = __doc__, CaptionPlan(), QUICK

    def stages(self):
        return {
            "tokens": lambda: self.make_tokens(self.work, self.plan.images, 7),
            "train": lambda: self.train(self.work, self.plan.model, "captions"),
            "more": lambda: self.train(self.work, self.plan.more, "more"),
            "deeper_tokens": lambda: self.make_tokens(self.deep, self.plan.deeper_images, 8),
            "deeper": lambda: self.train(self.deep, self.plan.deeper, "deeper"),
            "export": self.export,
            "evaluate": lambda: evaluate(self.zoo, self.plan.held_out, self.log),
        }

    @property
    def deep(self) -> Path:
        """Folder of the third round."""
        return self.work / "third"

    def make_tokens(self, work: Path, images: int, seed: int) -> None:
        """Render images that are not held out; save their codes as prompts, their captions as
        codes."""
        frontend = VQ.from_pretrained(ZOO / "image-vq", torch.device("cpu"), torch.float32)
        words = caption_words()

        @torch.no_grad()
        def encode(x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return frontend.encode(x).flatten(1).to(torch.uint8)

        path = work / "images.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        encode_dataset(path, "codes", drawn(32, seed), images, 32, encode, self.log)
        made = torch.load(path, weights_only=True)
        said = []
        for slots in made["slots"].tolist():
            ids = words.ids(str(caption_of(slots)))
            said.append(ids + [words.eos_token_id] * (words.positions - len(ids)))
        codes = torch.tensor(said, dtype=torch.uint8)
        torch.save({"codes": codes, "slots": made["codes"]}, work / "tokens.pt")

    def train(self, work: Path, run: Run, name: str) -> None:
        train_lm(work, caption_shape(), run, name, unchanged, self.log)

    def export(self) -> None:
        """Write the half-precision model and its words."""
        words = caption_words()
        words.save_pretrained(self.zoo / CAPTIONER_WORDS)
        model = GridLlamaForCausalLM.from_pretrained(self.deep / "deeper" / "model").half()
        model.config.frontend = CAPTIONER_WORDS
        model.config.codebook_digest = codebook_digest(words.fingerprint)
        model.config.reads, model.config.media_frontend = ["images"], "image-vq"
        model.save_pretrained(self.zoo / CAPTIONER)
        tidy(self.zoo)


main = CaptionRecipe.main


if __name__ == "__main__":
    main()
