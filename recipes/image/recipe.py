"""Image from nothing: render captioned shapes, train the VQ frontend, a causal and a masked model,
measure them.

    python -m gen.recipes.image all --work DIR            the run that made gen/zoo/image-*
    python -m gen.recipes.image all --work DIR --quick    a smoke run of the same path, a minute

Stages: ``vq``, ``tokens``, ``causal``, ``masked``, ``draft``, ``export``, ``evaluate``; ``all``
runs them in this order. Training stages resume from their checkpoints in ``--work``; ``masked`` can
start when ``causal`` has written ``average.pt``. ``export`` writes half-precision weights to
``--zoo`` (default ``WORK/zoo``), ``evaluate`` measures those and writes their model cards. On 2
cores of a Xeon with bfloat16 matrix instructions, one thread per stage: vq 6 minutes, tokens 4,
causal 45 and masked 35 side by side, draft 10, evaluate 30.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import VQModel
from torch import Tensor

from gen.contracts.frontend import codebook_digest
from gen.modalities.image import captions as shapes
from gen.models.load.locate import save_model
from gen.recipes.common.codebooks import Chain
from gen.recipes.common.data import drop_mask, encode_dataset, training_conditions
from gen.recipes.common.grid_models import Run, Shape
from gen.recipes.common.recipe import GridPlan, GridRecipe
from gen.recipes.common.train import TrainConfig, fit_average
from gen.recipes.image.evaluation import evaluate


@dataclass(frozen=True, kw_only=True)
class ImagePlan(GridPlan):
    """Sizes of the image recipe. Causal and masked model reach their quality before the end of
    their schedules.
    """

    vq_steps: int = 1000
    vq_batch: int = 16
    images: int = 72_000
    causal: Run = Run(3600, 160, 5, seed=5, keep_average_at=800, cooldown=(2000, 2500))
    masked: Run = Run(
        3000, 160, 5, causal=False, start="causal/average.pt", seed=4, cooldown=(1250, 1900)
    )
    draft: Run = Run(2400, 96, 2, seed=6)


_TINY = dict(width=32, layers=1, batch=8)
QUICK = ImagePlan(
    vq_steps=6,
    vq_batch=4,
    images=96,
    causal=Run(4, seed=5, keep_average_at=2, cooldown=(3, 4), **_TINY),
    masked=Run(4, causal=False, start="causal/average.pt", seed=4, cooldown=(3, 4), **_TINY),
    draft=Run(4, seed=6, **_TINY),
    held_out=2,
)

CODES = 128
SHAPE = Shape((16, 16), shapes.SLOTS, CODES, shapes.PAIRS)


def drawn(batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless fresh images, never of a held-out caption: float [batch, 3, 64, 64] in [-1, 1], and
    their caption slots uint8 [batch, 8].
    """
    rng = np.random.default_rng(seed)
    while True:
        captions = training_conditions(batch, lambda: shapes.random_caption(rng))
        x = (
            torch.from_numpy(np.stack([shapes.draw(c, rng) for c in captions]))
            .permute(0, 3, 1, 2)
            .float()
            / 127.5
            - 1
        )
        yield x, torch.tensor([c.slots() for c in captions], dtype=torch.uint8)


def images(batch: int, seed: int) -> Iterator[Tensor]:
    """Images of ``drawn`` without their captions."""
    return (x for x, _ in drawn(batch, seed))


def reconstruction(y: Tensor, x: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Loss of reconstructed pixels y of images x, and their PSNR in dB."""
    mse = F.mse_loss(y, x)
    return mse + 0.2 * F.l1_loss(y, x), {"psnr": 10 * math.log10(4 / mse.item())}


def new_vq():
    """Create the VQ."""
    return VQModel(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(32, 32, 64),
        layers_per_block=1,
        latent_channels=8,
        num_vq_embeddings=CODES,
        vq_embed_dim=8,
        norm_num_groups=16,
        sample_size=64,
        mid_block_add_attention=False,
    )


def train_vq(work: Path, plan: ImagePlan, log=print) -> None:
    """Train the VQ by gradients; ``Chain`` starts its codebook and keeps the codes in use."""
    torch.manual_seed(0)
    model = new_vq()
    chain = Chain(
        [model.quantize.embedding.weight],
        plan.vq_steps // 16,
        plan.vq_steps * 3 // 4,
        torch.Generator().manual_seed(0),
    )

    def loss_fn(m, x):
        h = m.quant_conv(m.encoder(x)).float()
        flat, loss = chain(h.permute(0, 2, 3, 1).reshape(-1, h.shape[1]))
        z = flat.view(len(h), *h.shape[2:], -1).permute(0, 3, 1, 2)
        y = m.decoder(m.post_quant_conv(z)).float()
        pixels, figures = reconstruction(y, x)
        return pixels + loss, {**figures, "codes": chain.codes}

    fit_average(
        model,
        images(plan.vq_batch, seed=1),
        loss_fn,
        TrainConfig(steps=plan.vq_steps, lr=0.002, weight_decay=0.0, autocast=True),
        out=work / "vq",
        on_step=lambda step, m: chain.on_step(step),
        log=log,
    )
    save_model(model, work / "vq" / "model")


def make_tokens(work: Path, plan: ImagePlan, log=print) -> None:
    """Render the training images and save their codes (int16 [N, 256]) and caption slots (uint8
    [N, 8]).
    """
    model = VQModel.from_pretrained(work / "vq" / "model").eval()

    @torch.no_grad()
    def encode(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            latents = model.encode(x).latents.float()
        return model.quantize(latents)[2][2].view(len(x), -1).to(torch.int16)

    encode_dataset(work / "tokens.pt", "codes", drawn(32, seed=2), plan.images, 32, encode, log)


def drop_words(slots: Tensor, generator: torch.Generator) -> Tensor:
    """Caption slots [B, 8] with a tenth of the captions dropped, and a twentieth of the single
    words. Shapes are dropped with their caption only.
    """
    drop = drop_mask(slots, generator, 0.05, slice(2, None, 4))
    whole = drop.all(1, keepdim=True)
    return torch.where(drop & ((slots != shapes.NONE) | whole), shapes.ANY, slots)


def words(slots: Tensor, generator: torch.Generator) -> Tensor:
    """Caption slots [B, 8] as (word, location) pairs, some dropped."""
    return torch.from_numpy(shapes.pairs(drop_words(slots, generator).numpy()))


class ImageRecipe(GridRecipe):
    """VQ frontend and token models of images."""

    doc, full, quick = __doc__, ImagePlan(), QUICK
    name, frontend, shape, words = "image", "image-vq", SHAPE, words

    def stages(self):
        return {
            "vq": lambda: train_vq(self.work, self.plan, self.log),
            "tokens": lambda: make_tokens(self.work, self.plan, self.log),
            **self.model_stages(),
            "export": self.export,
            "evaluate": self.evaluate,
        }

    def export(self) -> None:
        """Write half-precision weights of the VQ and of the models, which name its codebook."""
        vq = VQModel.from_pretrained(self.work / "vq" / "model").half()
        save_model(vq, self.zoo / self.frontend)
        self.export_models(codebook_digest(vq.quantize.embedding.weight))

    def evaluate(self) -> None:
        evaluate(self.zoo, self.plan.held_out, self.log)


main = ImageRecipe.main


if __name__ == "__main__":
    main()
