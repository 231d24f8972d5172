"""Continuous image tokens: a KL autoencoder, causal and masked (MAR) models of its latents, and a
small draft model.

    python -m gen.recipes.image.latents all --work DIR            the run that made gen/zoo/image-kl
    python -m gen.recipes.image.latents all --work DIR --quick    a smoke run of the same path

Stages: ``kl``, ``latents``, ``causal``, ``mar``, ``draft``, ``export``, ``evaluate``; ``all`` runs
them in this order. Training stages resume from their checkpoints in ``--work``. Images and captions
are those of ``recipes/image/recipe.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKL
from torch import Tensor

from gen.contracts.frontend import codebook_digest
from gen.modalities.image import captions as shapes
from gen.models.load.locate import locate, save_model
from gen.models.nets.grid import GridLlamaForCausalLM
from gen.models.nets.grid_latent import GridLatentConfig, GridLatentModel
from gen.recipes.common.data import encode_dataset
from gen.recipes.common.grid_models import tidy
from gen.recipes.common.recipe import Recipe
from gen.recipes.common.train import TrainConfig, fit_average
from gen.recipes.image.latents_evaluation import evaluate
from gen.recipes.image.recipe import drawn, drop_words, images, reconstruction
from gen.tokenizers.image.kl import KL


@dataclass(frozen=True)
class LatentsPlan:
    """Sizes of the latents recipe."""

    kl_steps: int = 1000
    kl_batch: int = 16
    images: int = 72_000
    steps: int = 3000
    cooldown: tuple[int, int] | None = (1250, 1750)
    mar_cooldown: tuple[int, int] | None = (1500, 2000)
    batch: int = 64
    width: int = 160
    layers: int = 5
    draft_steps: int = 1600
    draft_width: int = 96
    draft_layers: int = 2
    held_out: int = 200
    # start from the trunks of the zoo's token models, which already relate captions to shapes
    warm: bool = True


QUICK = LatentsPlan(
    kl_steps=4,
    kl_batch=4,
    images=96,
    steps=4,
    cooldown=(3, 4),
    mar_cooldown=None,
    batch=8,
    width=32,
    layers=2,
    draft_steps=3,
    draft_width=32,
    draft_layers=1,
    held_out=2,
    warm=False,
)

# of the autoencoder; 2x2 of its vectors are one latent
CHANNELS, PATCH, GRID = 4, 2, (8, 8)
# noise in the latents costs about half of this in mean squared error: 39 dB on its own
KL_WEIGHT = 1e-3


def new_kl():
    """Create the autoencoder."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(32, 32, 64),
        layers_per_block=1,
        latent_channels=CHANNELS,
        norm_num_groups=16,
        sample_size=64,
        mid_block_add_attention=False,
        scaling_factor=1.0,
    )


def train_kl(work: Path, plan: LatentsPlan, log=print) -> None:
    """Train the autoencoder on reconstruction plus a small price per nat of the posterior. The
    scale that brings latents to unit variance is measured at the end and becomes the model's
    ``scaling_factor``.
    """
    torch.manual_seed(0)
    model = new_kl()

    def loss_fn(m, x):
        sampling = m.encode(x).latent_dist
        mean, logvar = sampling.mean.float(), sampling.logvar.float()
        z = mean + (0.5 * logvar).exp() * torch.randn(mean.shape)
        y = m.decode(z).sample.float()
        nats = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
        pixels, figures = reconstruction(y, x)
        return pixels + KL_WEIGHT * nats, {**figures, "nats": nats.item()}

    fit_average(
        model,
        images(plan.kl_batch, seed=1),
        loss_fn,
        TrainConfig(steps=plan.kl_steps, lr=0.002, weight_decay=0.0, autocast=True),
        out=work / "kl",
        log=log,
    )
    model.eval()
    with torch.no_grad():
        z = torch.cat(
            [
                model.encode(x).latent_dist.mean
                for x, _ in zip(images(32, seed=2), range(8), strict=False)
            ]
        )
    model.register_to_config(scaling_factor=float(1 / z.std()), patch_size=PATCH)
    save_model(model, work / "kl" / "model")


def make_latents(work: Path, plan: LatentsPlan, log=print) -> None:
    """Render the training images and save their latents (float16 [N, 64, C]) and caption slots
    (uint8 [N, 8]).
    """
    kl = KL.from_pretrained(work / "kl" / "model")

    def encode(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            z = kl.encode(x)
        return z.flatten(2).transpose(1, 2).half()

    encode_dataset(work / "latents.pt", "latents", drawn(32, seed=2), plan.images, 32, encode, log)


def batches(work: Path, batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (caption pairs [B, 8], latents [B, 64, C]), with captions dropped as for token
    models.
    """
    data = torch.load(work / "latents.pt", weights_only=True)
    generator = torch.Generator().manual_seed(seed)
    while True:
        for rows in torch.randperm(len(data["latents"]), generator=generator).split(batch):
            if len(rows) == batch:
                slots = drop_words(data["slots"][rows].long(), generator)
                yield torch.from_numpy(shapes.pairs(slots.numpy())), data["latents"][rows].float()


def new_model(width: int, layers: int, causal: bool):
    """Create a latent model."""
    model = GridLatentModel(
        GridLatentConfig(
            grid=GRID,
            prefix_length=shapes.SLOTS,
            vocab_size=shapes.PAIRS,
            latent_channels=CHANNELS * PATCH**2,
            causal=causal,
            encoder_layers=0 if causal else layers // 2,
            head_width=width * 6 // 5 // 32 * 32,
            head_depth=3 if layers > 2 else 2,
            head_steps=16,
            sigma_floor=0.01,
            hidden_size=width,
            intermediate_size=width * 8 // 3 // 32 * 32,
            num_hidden_layers=layers,
            num_attention_heads=width // 32,
            num_key_value_heads=width // 32,
            max_position_embeddings=shapes.SLOTS + 64,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    model.head.start()
    return model


def warm_start(model, name: str) -> None:
    """Copy words, positions and trunk from a token model of the zoo, whose grid has twice the rows
    and columns.
    """
    old = GridLlamaForCausalLM.from_pretrained(locate(name), dtype=torch.float32)
    first, config = old.config.codebook_size, model.config
    with torch.no_grad():
        model.words.weight.copy_(old.model.embed_tokens.weight[first : first + shapes.PAIRS])
        tables = [(model.prefix, model.axes)] + (
            [] if config.causal else [(model.decoder_prefix, model.decoder_axes)]
        )
        for prefix, axes in tables:
            prefix.weight.copy_(old.prefix.weight)
            for mine, theirs in zip(axes, old.axes, strict=True):
                mine.weight.copy_(theirs.weight.view(len(mine.weight), 2, -1).mean(1))
    trunk = [*(() if config.causal else model.encoder.layers), *model.model.layers]
    for mine, theirs in zip(trunk, old.model.layers, strict=True):
        mine.load_state_dict(theirs.state_dict())
    model.model.norm.load_state_dict(old.model.norm.state_dict())


class Training(torch.nn.Module):
    """Model whose forward is its loss. Every conditioning vector is used for four timesteps of the
    head.
    """

    def __init__(self, model, generator: torch.Generator):
        super().__init__()
        self.model, self.generator = model, generator

    def forward(self, words: Tensor, seen: Tensor, latents: Tensor, targets: Tensor) -> Tensor:
        """Loss of the latents at ``targets``.

        Args:
            words: caption words [B, 8].
            seen: latents [B, 64, C] that the model sees.
            latents: true latents [B, 64, C].
            targets: bool [B, 64], positions of the loss.
        """
        z = self.model(words, seen)
        z, x = (v[targets].repeat(4, 1) for v in (z, latents.to(z.dtype)))
        return self.model.head.loss(x, z, self.generator)


def train_model(work: Path, plan: LatentsPlan, name: str, log=print) -> None:
    """Train ``causal``, ``mar`` or ``draft``. The masked model's share of masked positions is
    MAR's, normal around 1, but truncated at 0.3, since the last positions are decoded with the
    others known.
    """
    torch.manual_seed(0)
    small = name == "draft"
    model = new_model(
        *((plan.draft_width, plan.draft_layers) if small else (plan.width, plan.layers)),
        name != "mar",
    )
    if plan.warm:
        warm_start(
            model, {"causal": "image-causal", "mar": "image-masked", "draft": "image-draft"}[name]
        )
    generator = torch.Generator().manual_seed(3)

    def loss_fn(m, batch):
        words, latents = batch
        seen, targets = latents, torch.ones(latents.shape[:2], dtype=torch.bool)
        if name == "mar":
            share = torch.nn.init.trunc_normal_(
                torch.empty(len(latents), 1), 1.0, 0.3, 0.3, 1.0, generator=generator
            )
            targets = (
                torch.rand(latents.shape[:2], generator=generator).argsort(1)
                < (share * latents.shape[1]).ceil()
            )
            seen = latents.masked_fill(targets[..., None], float("nan"))
        return m(words, seen, latents, targets), {}

    training = Training(model, generator)
    fit_average(
        training,
        batches(work, plan.batch, seed={"causal": 5, "mar": 4, "draft": 6}[name]),
        loss_fn,
        TrainConfig(
            steps=plan.draft_steps if small else plan.steps,
            lr=0.002,
            muon=(".layers.", 0.006),
            weight_decay=0.02,
            cooldown={"causal": plan.cooldown, "mar": plan.mar_cooldown, "draft": None}[name],
            save_every=250,
            bfloat16_weights=True,
        ),
        out=work / name,
        log=log,
    )
    save_model(model, work / name / "model")


class LatentsRecipe(Recipe):
    """KL autoencoder and latent models of images."""

    doc, full, quick = __doc__, LatentsPlan(), QUICK

    def stages(self):
        return {
            "kl": lambda: train_kl(self.work, self.plan, self.log),
            "latents": lambda: make_latents(self.work, self.plan, self.log),
            "causal": lambda: train_model(self.work, self.plan, "causal", self.log),
            "mar": lambda: train_model(self.work, self.plan, "mar", self.log),
            "draft": lambda: train_model(self.work, self.plan, "draft", self.log),
            "export": self.export,
            "evaluate": lambda: evaluate(self.zoo, self.plan.held_out, self.log),
        }

    def export(self) -> None:
        """Write half-precision weights of the autoencoder and of the models, which name it."""
        kl = AutoencoderKL.from_pretrained(self.work / "kl" / "model").half()
        save_model(kl, self.zoo / "image-kl")
        digest = codebook_digest(KL(kl).fingerprint)
        for name, folder in (
            ("causal", "image-causal-latents"),
            ("draft", "image-causal-latents-draft"),
            ("mar", "image-mar"),
        ):
            model = GridLatentModel.from_pretrained(self.work / name / "model").half()
            model.config.frontend = "image-kl"
            model.config.codebook_digest = digest
            save_model(model, self.zoo / folder)
        tidy(self.zoo)
        self.log(f"wrote {self.zoo}")


main = LatentsRecipe.main


if __name__ == "__main__":
    main()
