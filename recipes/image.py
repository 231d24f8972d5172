"""Image from nothing: draw captioned shapes, train the VQ frontend, a causal and a masked model, measure them.

    python -m gen.recipes.image all --work DIR            what gen/zoo/image-* was made with
    python -m gen.recipes.image all --work DIR --quick    the same path in about a minute, for a look

Stages: ``vq``, ``tokens``, ``causal``, ``masked``, ``export``, ``evaluate``; ``all`` runs them in this order. Each
stage resumes from its checkpoint in ``--work``. ``causal`` and ``masked`` may run at the same time.
Measured on 2 cores of a Xeon with bfloat16 matrix instructions, one thread per stage: see the model cards.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gen.modalities import shapes
from gen.train import fit


@dataclass(frozen=True)
class Plan:
    """How much of everything; ``quick`` shrinks it."""

    vq_steps: int = 2600
    vq_batch: int = 16
    pictures: int = 80_000
    lm_steps: int = 6000
    lm_batch: int = 48
    width: int = 160
    layers: int = 5


QUICK = Plan(vq_steps=6, vq_batch=4, pictures=96, lm_steps=4, lm_batch=8, width=32, layers=1)


def pictures(batch: int, seed: int) -> Iterator[Tensor]:
    """Endless fresh pictures, never of a held-out caption: float [batch, 3, 64, 64] in [-1, 1]."""
    rng = np.random.default_rng(seed)
    while True:
        made = []
        while len(made) < batch:
            caption = shapes.random_caption(rng)
            if not shapes.held_out(caption):
                made.append(shapes.draw(caption, rng))
        yield torch.from_numpy(np.stack(made)).permute(0, 3, 1, 2).float() / 127.5 - 1


def new_vq():
    from diffusers import VQModel

    return VQModel(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(32, 32, 64),
        layers_per_block=1,
        latent_channels=8,
        num_vq_embeddings=512,
        vq_embed_dim=8,
        norm_num_groups=16,
        sample_size=64,
        mid_block_add_attention=False,
    )


def train_vq(work: Path, plan: Plan, log=print) -> None:
    """The codebook starts from encoder outputs after a warm-up without quantisation; unused codes are re-seeded."""
    torch.manual_seed(0)
    model = new_vq()
    generator = torch.Generator().manual_seed(0)
    warm, settle = plan.vq_steps // 16, plan.vq_steps * 3 // 4
    used = torch.zeros(512)
    step_now, last_latents = [0], [torch.empty(0, 8)]

    def loss_fn(m, x):
        h = m.quant_conv(m.encoder(x)).float()
        flat = h.permute(0, 2, 3, 1).reshape(-1, 8).detach()
        keep = torch.randperm(len(flat), generator=generator)[:1024]
        last_latents[0] = torch.cat([last_latents[0], flat[keep]])[-8192:]
        figures = {}
        if step_now[0] < warm:
            z, commit = h, h.new_zeros(())
        else:
            z, commit, (_, _, ids) = m.quantize(h)
            used.mul_(0.99).index_add_(0, ids.flatten(), torch.ones(ids.numel()))
            figures["codes"] = float((used > 1).sum())
        y = m.decoder(m.post_quant_conv(z)).float()
        mse = F.mse_loss(y, x)
        figures["psnr"] = 10 * math.log10(4 / mse.item())
        return mse + 0.2 * F.l1_loss(y, x) + commit, figures

    def on_step(step, m):
        step_now[0] = step + 1
        pool = last_latents[0]
        if step + 1 == warm:
            m.quantize.embedding.weight.data.copy_(kmeans(pool, 512, generator))
            used.fill_(10)
        elif warm < step + 1 < settle and (step + 1) % 50 == 0:
            dead = (used < 1).nonzero().flatten()
            if len(dead):
                pick = torch.randint(len(pool), (len(dead),), generator=generator)
                m.quantize.embedding.weight.data[dead] = pool[pick]
                used[dead] = 10

    average = fit(
        model, pictures(plan.vq_batch, seed=1), loss_fn, steps=plan.vq_steps, lr=2e-3, weight_decay=0.0,
        out=work / "vq", autocast=True, on_step=on_step, log=log,
    )
    model.load_state_dict(average.state)
    model.save_pretrained(work / "vq" / "model")


def kmeans(points: Tensor, k: int, generator: torch.Generator, rounds: int = 10) -> Tensor:
    """Lloyd's algorithm; an empty cluster restarts at a random point. [N, D] -> [k, D]."""
    draw = lambda n: points[torch.randint(len(points), (n,), generator=generator)]  # noqa: E731
    centres = draw(k)
    for _ in range(rounds):
        near = torch.cdist(points, centres).argmin(1)
        count = torch.bincount(near, minlength=k)
        total = torch.zeros_like(centres).index_add_(0, near, points)
        centres = torch.where(count[:, None] > 0, total / count[:, None].clamp_min(1), draw(k))
    return centres


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["vq"])
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints and data")
    parser.add_argument("--quick", action="store_true", help="a smoke run of the same path")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    plan = QUICK if args.quick else Plan()
    args.work.mkdir(parents=True, exist_ok=True)
    train_vq(args.work, plan)


if __name__ == "__main__":
    main()
