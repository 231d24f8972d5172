"""Video from nothing: render captioned moving shapes, train the video VQ, a causal model, and one
that is masked and of frame blocks, measure them.

    python -m gen.recipes.video all --work DIR            the run that made gen/zoo/video-*
    python -m gen.recipes.video all --work DIR --quick    a smoke run of the same path, a minute

Stages: ``vq``, ``tokens``, ``causal``, ``masked``, ``draft``, ``export``, ``evaluate``; ``all``
runs them in this order. Training stages resume from their checkpoints in ``--work``; ``masked``
starts from the weights of ``causal``. ``export`` writes half-precision weights to ``--zoo``
(default ``WORK/zoo``), ``evaluate`` measures those.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Emu3VQVAE, Emu3VQVAEConfig
from transformers.models.emu3.modeling_emu3 import (
    Emu3VQVAEResnetBlock,
    Emu3VQVAESpatialNorm,
    Emu3VQVAETemporalResnetBlock,
)

from gen.contracts.frontend import codebook_digest
from gen.modalities.video import captions as moving
from gen.modalities.video import checker as moving_check
from gen.models.load.locate import save_model
from gen.recipes.common.codebooks import Chain
from gen.recipes.common.data import drop_mask, encode_dataset, training_conditions
from gen.recipes.common.grid_evaluation import CAUSAL, MINOR, World
from gen.recipes.common.grid_models import Run, Shape
from gen.recipes.common.recipe import GridPlan, GridRecipe, draft_card
from gen.recipes.common.train import TrainConfig, fit_average
from gen.tokenizers.video.video_vq import VideoVQ

CODES, CHANNELS, STRIDE = 128, 16, (2, 4, 4)  # frames, rows and columns per code
GRID = (moving.FRAMES // STRIDE[0], moving.SIZE // STRIDE[1], moving.SIZE // STRIDE[2])
SHAPE = Shape(GRID, moving.SLOTS, CODES, moving.PAIRS)
FRAME = GRID[1] * GRID[2]  # codes of one frame of the grid


@dataclass(frozen=True, kw_only=True)
class VideoPlan(GridPlan):
    """Sizes of the video recipe."""

    vq_steps: int = 1400
    # last steps on whole images; earlier ones see windows of 16x16 pixels, at a quarter of the cost
    vq_whole: int = 400
    vq_batch: int = 8
    clips: int = 34_500
    causal: Run = Run(6000, 128, 4, seed=5, batch=8, lr=1e-3)
    masked: Run = Run(
        4000,
        128,
        4,
        causal=False,
        start="causal/model",
        seed=4,
        batch=8,
        lr=1.5e-3,
        block=FRAME,
        share=1 / 3,
    )
    draft: Run = Run(800, 64, 2, seed=7, batch=8, tied=True)


_TINY = dict(width=32, layers=1, batch=4)
QUICK = VideoPlan(
    vq_steps=6,
    vq_whole=2,
    vq_batch=2,
    clips=32,
    causal=Run(4, seed=5, **_TINY),
    masked=Run(4, causal=False, start="causal/model", seed=4, block=FRAME, share=0.5, **_TINY),
    draft=Run(4, seed=7, **_TINY),
    held_out=1,
)


def drawn(batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless fresh clips, never of a held-out caption: float [batch, F, 3, h, w] in [-1, 1], and
    caption slots uint8 [batch, P]. Two of three bounce, which takes longer to learn.
    """
    rng = np.random.default_rng(seed)
    while True:
        captions = training_conditions(
            batch,
            lambda: moving.random_caption(rng),
            lambda caption: caption.bounces or rng.random() < 0.5,
        )
        x = (
            torch.from_numpy(np.stack([moving.draw(c, rng) for c in captions]))
            .permute(0, 1, 4, 2, 3)
            .float()
            / 127.5
            - 1
        )
        yield x, torch.tensor([c.slots() for c in captions], dtype=torch.uint8)


def new_vq(codes: int = CODES, width: int = 32) -> Emu3VQVAE:
    """Create the VQ. ``codes``: vectors of its codebook. ``width``: channels of the first layer."""
    return Emu3VQVAE(
        Emu3VQVAEConfig(
            codebook_size=codes,
            embed_dim=CHANNELS,
            latent_channels=CHANNELS,
            temporal_downsample_factor=STRIDE[0],
            base_channels=width,
            channel_multiplier=[1, 1, 2],
            num_res_blocks=1,
            attn_resolutions=[],
            hidden_size=64,
            num_attention_heads=1,
        )
    )


@torch.no_grad()
def gentle_start(model) -> None:
    """Initialise a model for training.

    The class's own initialisation expects loaded weights and gives images a hundred times too
    bright. Here residual branches start at zero, norms that the codes modulate at plain norms, and
    the convolutions around the codes at the identity, so that signals reach them.
    """
    for module in model.modules():
        if isinstance(module, (torch.nn.Conv2d, torch.nn.Conv3d)):
            module.reset_parameters()
    for module in model.modules():
        if isinstance(module, Emu3VQVAEResnetBlock):
            module.conv2.weight.zero_()
        elif isinstance(module, Emu3VQVAETemporalResnetBlock):
            module.conv2.conv.weight.zero_()
        elif isinstance(module, Emu3VQVAESpatialNorm):
            module.conv_y.weight.mul_(0.1)
            module.conv_y.bias.fill_(1.0)
    same = torch.eye(CHANNELS)
    for module in (model.quant_conv, model.post_quant_conv):
        module.conv.weight.zero_()[:, :, -1, 0, 0] = same
    for part in (model.encoder, model.decoder):
        for module in part.time_conv:
            # the layers behind it take half of it away
            module.conv.conv.weight[:, :, -1, 1, 1] += 2 * same


def windows(plan: VideoPlan) -> Iterator[Tensor]:
    """Clips for the codec: eight frames [B, 8, 3, h, w] from anywhere in a clip, a quarter of the
    image until the last ``vq_whole`` steps. Windows align with the cells of codes.
    """
    rng = np.random.default_rng(11)
    for step, (x, _) in enumerate(drawn(plan.vq_batch, seed=1)):
        first = STRIDE[0] * rng.integers(5)
        x = x[:, first : first + 8]
        if step < plan.vq_steps - plan.vq_whole:
            rows, columns = STRIDE[1] * rng.integers(5, size=2)
            x = x[..., rows : rows + 16, columns : columns + 16]
        yield x.contiguous()


def agreement(x: Tensor, h: Tensor) -> Tensor:
    """Difference of the vectors h [B, D, T, H, W] of neighbouring cells, along each axis, where
    both cells and their surroundings show the same pixels of x [B, F, 3, h, w].

    Such cells should get the same code; otherwise the codes of a plain background are noise to a
    language model.
    """
    frames, cell = STRIDE[:2]
    around = (
        F.pad(x.flatten(0, 1), (cell,) * 4, mode="replicate")
        .unfold(2, 3 * cell, cell)
        .unfold(3, 3 * cell, cell)
    )
    around = (
        around.permute(0, 2, 3, 1, 4, 5)
        .flatten(3)
        .unflatten(0, (len(x), -1, frames))
        .movedim(2, -2)
        .flatten(-2)
    )
    loss = h.new_zeros(())
    for axis in (1, 2, 3):
        n = around.shape[axis] - 1
        same = (around.narrow(axis, 1, n) - around.narrow(axis, 0, n)).abs().amax(-1) < 0.01
        apart = (h.narrow(axis + 1, 1, n) - h.narrow(axis + 1, 0, n)).square().mean(1)
        loss = loss + (apart * same).sum() / same.sum().clamp_min(1)
    return loss


def code(model, chain: Chain, x: Tensor, learn: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Encode, quantise and decode clips.

    Args:
        model: the VQ.
        chain: its codebook.
        x: float [B, F, 3, h, w] in [-1, 1].
        learn: as of ``Chain``.

    Returns:
        Decoded clips as x, vectors of the cells [B, D, T, H, W], and the loss of the codes.
    """

    def swap(z):
        return z.permute(0, 2, 1, 3, 4)  # swaps frames and channels, there and back

    h = model.quant_conv(swap(model.encoder(x))).float()
    flat, loss = chain(h.permute(0, 2, 3, 4, 1).reshape(-1, CHANNELS), learn)
    z = flat.view(len(x), *h.shape[2:], CHANNELS).permute(0, 4, 1, 2, 3)
    y = model.decoder(swap(model.post_quant_conv(z)), swap(z)).float().view(x.shape)
    return y, h, loss


def train_vq(work: Path, plan: VideoPlan, log=print) -> None:
    """Train the VQ by gradients; ``Chain`` starts its codebook and keeps the codes in use."""
    torch.manual_seed(0)
    model = new_vq()
    gentle_start(model)
    chain = Chain(
        [model.quantize.embedding.weight],
        plan.vq_steps // 8,
        plan.vq_steps * 3 // 4,
        torch.Generator().manual_seed(0),
    )

    def loss_fn(m, x):
        y, h, loss = code(m, chain, x)
        mse, agree = F.mse_loss(y, x), agreement(x, h)
        figures = {
            "psnr": 10 * math.log10(4 / mse.item()),
            "codes": chain.codes,
            "agree": agree.item(),
            "spread": h.var().item(),
        }
        return mse + 0.2 * F.l1_loss(y, x) + loss + agree, figures

    fit_average(
        model,
        windows(plan),
        loss_fn,
        TrainConfig(steps=plan.vq_steps, lr=0.002, weight_decay=0.0, autocast=True, save_every=250),
        out=work / "vq",
        on_step=lambda step, m: chain.on_step(step),
        log=log,
    )
    save_model(model, work / "vq" / "model")


def make_tokens(work: Path, plan: VideoPlan, log=print) -> None:
    """Render the training clips and save their codes (int16 [N, T]) and caption slots (uint8 [N,
    P]).
    """
    frontend = VideoVQ.from_pretrained(work / "vq" / "model")

    def encode(x: Tensor) -> Tensor:
        return frontend.encode(x).flatten(1).to(torch.int16)

    encode_dataset(work / "tokens.pt", "codes", drawn(8, seed=2), plan.clips, 8, encode, log)


def drop_words(slots: Tensor, generator: torch.Generator) -> Tensor:
    """Caption slots [B, P] with a tenth of the captions dropped, and a twentieth of the words that
    a caption may omit.
    """
    required = [i for i in range(moving.SLOTS) if i not in moving.OPTIONAL]
    return torch.where(drop_mask(slots, generator, 0.05, required), moving.ANY, slots)


def words(slots: Tensor, generator: torch.Generator) -> Tensor:
    """Caption slots [B, P] as (word, motion) pairs, some dropped."""
    return torch.from_numpy(moving.pairs(drop_words(slots, generator).numpy()))


def world() -> World:
    """Dataset, checker and samplers of the evaluation."""
    llama = (
        "A small Llama with frame, row and column embeddings (`gen/models/nets/grid.py`): six"
        " caption slots, then 512 codes of\n`video-vq`"
    )
    return World(
        "video",
        lambda n, seed: moving.captions(n, seed, held=True),
        moving.draw,
        moving_check.check_many,
        causal=CAUSAL,
        masked={
            "maskgit, 64 steps": {"name": "maskgit", "steps": 64},
            "halton, 64 steps": {"name": "halton", "steps": 64},
        },
        blocks={"frame_blocks": "frame_blocks"},
        about={
            "video-vq": (
                "`transformers.Emu3VQVAE`: clips of 16 frames of 32x32 RGB pixels to 8x8x8 codes"
                f" of {CODES}, causal in time."
            ),
            "video-causal": f"{llama}, left to right.",
            "video-masked": (
                f"{llama}, any of them masked; or frame by frame, any of a frame's masked."
            ),
            "video-draft": draft_card("video"),
        },
        frontend="video-vq",
        quarter=(*MINOR, "maskgit, 64 steps", "halton, 64 steps"),
    )


class VideoRecipe(GridRecipe):
    """VQ frontend and token models of video."""

    doc, full, quick = __doc__, VideoPlan(), QUICK
    name, frontend, shape, words = "video", "video-vq", SHAPE, words

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
        vq = Emu3VQVAE.from_pretrained(self.work / "vq" / "model").half()
        save_model(vq, self.zoo / self.frontend)
        self.export_models(codebook_digest(vq.quantize.embedding.weight))

    def world(self) -> World:
        return world()


main = VideoRecipe.main


if __name__ == "__main__":
    main()
