"""Captions from images: train a model that describes images of captioned shapes; measure it, and
edits by instruction, which begin with a description.

    python -m gen.recipes.image.captioner all --work DIR           the run that made image-captions
    python -m gen.recipes.image.captioner all --work DIR --quick   a smoke run of the same path

Stages: ``tokens``, ``train``, ``more``, ``last`` (three rounds), ``export``, ``evaluate``. The
prompt of the captioner is the codes of an image by ``image-vq``; it writes a caption with the
shapes in reading order. On 2 cores the rounds take 50 minutes.

A caption that is held out is never written in training, and a model can learn just that: a colour,
a size and a location then speak against the one shape that the image shows. In the last round half
of the words that the model has written are masked, so that each is read from the image.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gen.contracts.frontend import codebook_digest
from gen.modalities.image import captions as shapes
from gen.modalities.image.reading import IMAGE_POSITIONS, IMAGE_SLOTS, IMAGE_WORDS, ordered
from gen.models.load.locate import ZOO
from gen.models.nets.grid import GridLlamaForCausalLM
from gen.recipes.common.data import encode_dataset
from gen.recipes.common.grid_models import Run, Shape, tidy, token_batches, train_lm
from gen.recipes.common.recipe import Recipe
from gen.recipes.common.train import TrainConfig, fit_average
from gen.recipes.image.captioner_evaluation import CAPTIONER, CAPTIONER_WORDS, evaluate
from gen.recipes.image.recipe import drawn
from gen.tokenizers.image.vq import VQ
from gen.tokenizers.text.words import TextWords

CODES = 128


@dataclass(frozen=True, kw_only=True)
class CaptionPlan:
    """Sizes of the recipe."""

    images: int = 88_000
    model: Run = Run(2000, 96, 3, batch=32)
    more: Run = Run(2200, 96, 3, batch=32, seed=1, start="captions/model", lr=1.5e-3)
    last: Run = Run(1500, 96, 3, batch=32, seed=2, start="more/model", lr=1.5e-3)
    held_out: int = 200


QUICK = CaptionPlan(
    images=64,
    model=Run(3, 32, 1, batch=8),
    more=Run(3, 32, 1, batch=8, start="captions/model"),
    last=Run(3, 32, 1, batch=8, start="more/model"),
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


def hidden_words_loss(shape: Shape, generator: torch.Generator):
    """Loss of next-word prediction after captions of which half of the words are masked."""

    def loss(m, batch):
        image, words = batch
        hidden = torch.rand(words[:, :-1].shape, generator=generator) < 0.5
        said = words[:, :-1].masked_fill(hidden, shape.mask)
        out = m(
            input_ids=torch.cat([shape.codes + image, said], 1),
            logits_to_keep=shape.length,
            use_cache=False,
        )
        return F.cross_entropy(out.logits.float().flatten(0, 1), words.flatten()), {}

    return loss


class CaptionRecipe(Recipe):
    """Captioner of images, and edits that use it."""

    doc, full, quick = __doc__, CaptionPlan(), QUICK

    def stages(self):
        return {
            "tokens": self.make_tokens,
            "train": lambda: self.train(self.plan.model, "captions"),
            "more": lambda: self.train(self.plan.more, "more"),
            "last": self.train_last,
            "export": self.export,
            "evaluate": lambda: evaluate(self.zoo, self.plan.held_out, self.log),
        }

    def make_tokens(self) -> None:
        """Render images that are not held out; save their codes as prompts, their captions as
        codes."""
        frontend = VQ.from_pretrained(ZOO / "image-vq", torch.device("cpu"), torch.float32)
        words = caption_words()

        @torch.no_grad()
        def encode(x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return frontend.encode(x).flatten(1).to(torch.uint8)

        path = self.work / "images.pt"
        encode_dataset(path, "codes", drawn(32, 7), self.plan.images, 32, encode, self.log)
        made = torch.load(path, weights_only=True)
        said = []
        for slots in made["slots"].tolist():
            ids = words.ids(str(caption_of(slots)))
            said.append(ids + [words.eos_token_id] * (words.positions - len(ids)))
        codes = torch.tensor(said, dtype=torch.uint8)
        torch.save({"codes": codes, "slots": made["codes"]}, self.work / "tokens.pt")

    def train(self, run: Run, name: str) -> None:
        train_lm(self.work, caption_shape(), run, name, unchanged, self.log)

    def train_last(self) -> None:
        """Train the last round, in which the model sees half of the words that it has written."""
        run, shape, out = self.plan.last, caption_shape(), self.work / "last"
        model = GridLlamaForCausalLM.from_pretrained(self.work / str(run.start))
        config = TrainConfig(
            steps=run.steps,
            lr=run.lr,
            muon=(".layers.", 3 * run.lr),
            weight_decay=0.05,
            bfloat16_weights=True,
        )
        batches = token_batches(self.work / "tokens.pt", run.batch, run.seed, unchanged)
        loss = hidden_words_loss(shape, torch.Generator().manual_seed(4))
        fit_average(model, batches, loss, config, out=out, log=self.log)
        model.save_pretrained(out / "model")

    def export(self) -> None:
        """Write the half-precision model and its words."""
        words = caption_words()
        words.save_pretrained(self.zoo / CAPTIONER_WORDS)
        model = GridLlamaForCausalLM.from_pretrained(self.work / "last" / "model").half()
        model.config.frontend = CAPTIONER_WORDS
        model.config.codebook_digest = codebook_digest(words.fingerprint)
        model.config.reads, model.config.media_frontend = ["images"], "image-vq"
        model.save_pretrained(self.zoo / CAPTIONER)
        tidy(self.zoo)


main = CaptionRecipe.main


if __name__ == "__main__":
    main()
