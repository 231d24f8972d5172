"""Captions from images: train a model that describes images of captioned shapes; measure it, and
edits by instruction, which begin with a description.

    python -m gen.recipes.image.captioner all --work DIR           the run that made image-captions
    python -m gen.recipes.image.captioner all --work DIR --quick   a smoke run of the same path

Stages: ``train``, ``export``, ``evaluate``. The prompt of the captioner is the codes of an image by
``image-vq``; it writes a caption with the shapes in reading order. No image is seen twice: the
codes of a shape change with every pixel that it moves, and a model that sees the same images again
learns those images. On 2 cores the training takes 30 minutes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gen.contracts.frontend import codebook_digest
from gen.modalities.image import captions as shapes
from gen.modalities.image.reading import IMAGE_POSITIONS, IMAGE_SLOTS, IMAGE_WORDS, ordered
from gen.models.load.locate import ZOO, save_model
from gen.models.nets.grid_reader import GridReaderConfig, GridReaderForCausalLM
from gen.recipes.common.data import training_conditions
from gen.recipes.common.grid_models import WEIGHTS, Run, Shape, causal_loss, sizes_of, tidy
from gen.recipes.common.recipe import Recipe
from gen.recipes.common.train import TrainConfig, fit_average
from gen.recipes.image.captioner_evaluation import CAPTIONER, CAPTIONER_WORDS, evaluate
from gen.tokenizers.image.vq import VQ
from gen.tokenizers.text.words import TextWords

CODES = 128
TWO = 0.5  # share of training images with two shapes


@dataclass(frozen=True, kw_only=True)
class CaptionPlan:
    """Sizes of the recipe."""

    model: Run = Run(2500, 96, 3, batch=32, seed=5)
    held_out: int = 200


QUICK = CaptionPlan(model=Run(3, 32, 1, batch=8), held_out=4)


def caption_shape() -> Shape:
    """Return the shape of the captioner: words of captions, codes of an image, mask.

    The last slot of a prompt is the mask, at which the caption begins.
    """
    return Shape((IMAGE_POSITIONS,), IMAGE_SLOTS + 1, len(IMAGE_WORDS) + 1, CODES)


def caption_words() -> TextWords:
    """Return the frontend of the captioner."""
    return TextWords.of(IMAGE_WORDS, IMAGE_POSITIONS)


def new_captioner(run: Run) -> GridReaderForCausalLM:
    """Create a captioner."""
    return GridReaderForCausalLM(GridReaderConfig(**sizes_of(caption_shape(), run)))


def described(batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Draw endless (prompts [B, P], captions [B, T]) of fresh images, never of a held-out caption.

    Prompts count from the first word behind those of captions.
    """
    frontend = VQ.from_pretrained(ZOO / "image-vq", torch.device("cpu"), torch.float32)
    words, rng = caption_words(), np.random.default_rng(seed)
    begin = torch.full((batch, 1), CODES)
    while True:
        said = training_conditions(batch, lambda: shapes.random_caption(rng, TWO))
        drawn = torch.from_numpy(np.stack([shapes.draw(c, rng) for c in said]))
        pixels = drawn.permute(0, 3, 1, 2).float() / 127.5 - 1
        fast = torch.bfloat16 == WEIGHTS
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=fast):
            codes = frontend.encode(pixels).flatten(1).long()
        ids = [words.ids(str(ordered(caption))) for caption in said]
        rows = [row + [words.eos_token_id] * (words.positions - len(row)) for row in ids]
        yield torch.cat([codes, begin], 1), torch.tensor(rows)


class CaptionRecipe(Recipe):
    """Captioner of images, and edits that use it."""

    doc, full, quick = __doc__, CaptionPlan(), QUICK

    def stages(self):
        return {
            "train": self.train,
            "export": self.export,
            "evaluate": lambda: evaluate(self.zoo, self.plan.held_out, self.log),
        }

    def train(self) -> None:
        """Train the captioner and save the average of its weights."""
        run = self.plan.model
        torch.manual_seed(run.seed)
        model = new_captioner(run)
        config = TrainConfig(
            steps=run.steps,
            lr=run.lr,
            muon=(".layers.", 3 * run.lr),
            weight_decay=0.05,
            bfloat16_weights=True,
            save_every=250,
        )
        loss, out = causal_loss(caption_shape()), self.work / "captions"
        batches = described(run.batch, run.seed)
        fit_average(model, batches, loss, config, out=out, log=self.log)
        save_model(model, out / "model")

    def export(self) -> None:
        """Write the half-precision model and its words."""
        words = caption_words()
        words.save_pretrained(self.zoo / CAPTIONER_WORDS)
        model = GridReaderForCausalLM.from_pretrained(self.work / "captions" / "model").half()
        model.config.frontend = CAPTIONER_WORDS
        model.config.codebook_digest = codebook_digest(words.fingerprint)
        model.config.reads, model.config.media_frontend = ["images"], "image-vq"
        save_model(model, self.zoo / CAPTIONER)
        tidy(self.zoo)


main = CaptionRecipe.main


if __name__ == "__main__":
    main()
