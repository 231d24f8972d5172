"""Image from nothing: draw captioned shapes, train the VQ frontend, a causal and a masked model, measure them.

    python -m gen.recipes.image all --work DIR            what gen/zoo/image-* was made with
    python -m gen.recipes.image all --work DIR --quick    the same path in about a minute, for a look

Stages: ``vq``, ``tokens``, ``causal``, ``masked``, ``draft``, ``export``, ``evaluate``; ``all`` runs
them in this order. Training stages resume from their checkpoints in ``--work``; ``masked`` can start when ``causal`` has
written ``average.pt``. ``export`` writes half-precision weights to ``--zoo`` (default ``WORK/zoo``), ``evaluate`` measures
those and writes their model cards. On 2 cores of a Xeon with bfloat16 matrix instructions, one thread per stage: vq 6
minutes, tokens 4, causal 45 and masked 35 side by side, draft 10, evaluate 30.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gen.modalities import shapes
from gen.modalities.image import codebook_digest
from gen.recipes.image_evaluation import evaluate
from gen.recipes.stages import run
from gen.train import fit


@dataclass(frozen=True)
class Plan:
    """How much of everything; ``quick`` shrinks it."""

    vq_steps: int = 1000
    vq_batch: int = 16
    pictures: int = 72_000
    lm_steps: int = 3600
    warm_steps: int = 800  # of the causal model, before the masked one starts from it
    masked_steps: int = 3000
    cooldown: tuple[int, int] | None = (2000, 2500)  # both reach their quality before the end of their schedules
    masked_cooldown: tuple[int, int] | None = (1250, 1900)
    lm_batch: int = 32
    width: int = 160
    layers: int = 5
    draft_steps: int = 2400
    draft_width: int = 96
    draft_layers: int = 2
    held_out: int = 200


QUICK = Plan(vq_steps=6, vq_batch=4, pictures=96, lm_steps=4, warm_steps=2, masked_steps=4, cooldown=(3, 4), masked_cooldown=(3, 4), lm_batch=8, width=32, layers=1,
             draft_steps=4, draft_width=32, draft_layers=1, held_out=2)

CODES = 128


def drawn(batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless fresh pictures, never of a held-out caption: float [batch, 3, 64, 64] in [-1, 1], and their caption slots uint8
    [batch, 8]."""
    rng = np.random.default_rng(seed)
    while True:
        captions = []
        while len(captions) < batch:
            caption = shapes.random_caption(rng)
            if not shapes.held_out(caption):
                captions.append(caption)
        x = torch.from_numpy(np.stack([shapes.draw(c, rng) for c in captions])).permute(0, 3, 1, 2).float() / 127.5 - 1
        yield x, torch.tensor([c.slots() for c in captions], dtype=torch.uint8)


def pictures(batch: int, seed: int) -> Iterator[Tensor]:
    """Those of ``drawn`` without their captions."""
    return (x for x, _ in drawn(batch, seed))


def new_vq():
    from diffusers import VQModel

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


def train_vq(work: Path, plan: Plan, log=print) -> None:
    """The codebook starts from encoder outputs after a warm-up without quantisation; unused codes are re-seeded."""
    torch.manual_seed(0)
    model = new_vq()
    generator = torch.Generator().manual_seed(0)
    warm, settle = plan.vq_steps // 16, plan.vq_steps * 3 // 4
    used = torch.zeros(CODES)
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
            m.quantize.embedding.weight.data.copy_(kmeans(pool, CODES, generator))
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
    draw = lambda n: points[torch.randint(len(points), (n,), generator=generator)]
    centres = draw(k)
    for _ in range(rounds):
        near = torch.cdist(points, centres).argmin(1)
        count = torch.bincount(near, minlength=k)
        total = torch.zeros_like(centres).index_add_(0, near, points)
        centres = torch.where(count[:, None] > 0, total / count[:, None].clamp_min(1), draw(k))
    return centres


def make_tokens(work: Path, plan: Plan, log=print) -> None:
    """Draws the training pictures and keeps their codes (uint16 [N, 256]) and caption slots (uint8 [N, 8])."""
    from diffusers import VQModel

    model = VQModel.from_pretrained(work / "vq" / "model").eval()
    chunk, codes, slots = 32, [], []
    for start, (x, said) in zip(range(0, plan.pictures, chunk), drawn(chunk, seed=2), strict=False):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            latents = model.encode(x).latents.float()
        with torch.no_grad():
            codes.append(model.quantize(latents)[2][2].view(len(x), -1).to(torch.int16))
        slots.append(said)
        if start // chunk % 250 == 0:
            log(f"{start}/{plan.pictures} pictures")
    torch.save({"codes": torch.cat(codes), "slots": torch.cat(slots)}, work / "tokens.pt")


def new_lm(width: int, layers: int, causal: bool):
    """A model whose vocabulary is the codes, the (word, place) pairs of conditions, and the mask."""
    from gen.models.grid import GridLlamaConfig, GridLlamaForCausalLM

    return GridLlamaForCausalLM(
        GridLlamaConfig(
            grid=(16, 16),
            prefix_length=shapes.SLOTS,
            codebook_size=CODES,
            causal=causal,
            shifted=True,
            mask_token_id=CODES + shapes.PAIRS,
            vocab_size=CODES + shapes.PAIRS + 1,
            hidden_size=width,
            intermediate_size=width * 8 // 3 // 32 * 32,
            num_hidden_layers=layers,
            num_attention_heads=width // 32,
            num_key_value_heads=width // 32,
            max_position_embeddings=shapes.SLOTS + 256,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def drop_words(slots: Tensor, generator: torch.Generator) -> Tensor:
    """Caption slots [B, 8] without a tenth of the captions, dropped whole, for guidance, and without a twentieth of the single
    words but the shape, so that a caption may leave them out."""
    drop = torch.rand(slots.shape, generator=generator) < 0.05
    drop[:, 2::4] = False
    drop |= torch.rand(len(slots), 1, generator=generator) < 0.1
    whole = drop.all(1, keepdim=True)
    return torch.where(drop & ((slots != shapes.NONE) | whole), shapes.ANY, slots)


def token_batches(work: Path, batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (caption slots [B, 8], codes [B, 256])."""
    data = torch.load(work / "tokens.pt", weights_only=True)
    generator = torch.Generator().manual_seed(seed)
    while True:
        for rows in torch.randperm(len(data["codes"]), generator=generator).split(batch):
            if len(rows) == batch:
                yield drop_words(data["slots"][rows].long(), generator), data["codes"][rows].long()


def losses(causal: bool, mask: int, generator: torch.Generator):
    """The loss of a model on a batch: next-token, or masked with MaskGIT's cosine-distributed share of masks."""

    def condition(slots: Tensor) -> Tensor:
        return CODES + torch.from_numpy(shapes.pairs(slots.numpy()))

    def causal_loss(m, batch):
        slots, codes = batch
        out = m(input_ids=torch.cat([condition(slots), codes[:, :-1]], 1), logits_to_keep=256, use_cache=False)
        return F.cross_entropy(out.logits.float().flatten(0, 1), codes.flatten()), {}

    def masked_loss(m, batch):
        slots, codes = batch
        share = torch.cos(math.pi / 2 * torch.rand(len(codes), 1, generator=generator))
        hidden = torch.rand(codes.shape, generator=generator).argsort(1) < (share * 256).ceil()
        ids = torch.cat([condition(slots), codes.masked_fill(hidden, mask)], 1)
        full = torch.zeros(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bfloat16)
        out = m(input_ids=ids, attention_mask=full, logits_to_keep=257, use_cache=False)
        return F.cross_entropy(out.logits[:, :-1][hidden].float(), codes[hidden]), {}

    return causal_loss if causal else masked_loss


def train_lm(work: Path, plan: Plan, name: str, log=print) -> None:
    """``causal``, ``masked``, or ``draft``, a small causal one for speculation. The masked model starts from the average
    weights that the causal one had after ``warm_steps``: what it has learned of captions and shapes carries over, and both
    can be trained side by side from there on."""
    torch.manual_seed(0)
    causal = name != "masked"
    steps = {"causal": plan.lm_steps, "masked": plan.masked_steps, "draft": plan.draft_steps}[name]
    cooldown = {"causal": plan.cooldown, "masked": plan.masked_cooldown, "draft": None}[name]
    size = (plan.draft_width, plan.draft_layers) if name == "draft" else (plan.width, plan.layers)
    model = new_lm(*size, causal)
    if not causal:
        model.load_state_dict(torch.load(work / "causal" / "average.pt", weights_only=True))
    average = fit(
        model, token_batches(work, plan.lm_batch, seed={"masked": 4, "causal": 5, "draft": 6}[name]),
        losses(causal, model.config.mask_token_id, torch.Generator().manual_seed(3)),
        steps=steps, lr=2e-3, muon=(".layers.", 6e-3), weight_decay=0.05, out=work / name, bfloat16_weights=True, save_every=250,
        cooldown=cooldown, keep_average_at=plan.warm_steps if name == "causal" else None, log=log,
    )
    model.load_state_dict(average.state)
    model.save_pretrained(work / name / "model")


def export(work: Path, zoo: Path, log=print) -> None:
    """Half-precision weights in the ordinary ``save_pretrained`` layout. A token model names its frontend and codebook."""
    from diffusers import VQModel

    from gen.models.grid import GridLlamaForCausalLM

    vq = VQModel.from_pretrained(work / "vq" / "model").half()
    vq.save_pretrained(zoo / "image-vq")
    for name in ("causal", "masked", "draft"):
        model = GridLlamaForCausalLM.from_pretrained(work / name / "model").half()
        model.config.frontend = "image-vq"
        model.config.codebook_digest = codebook_digest(vq.quantize.embedding.weight)
        model.save_pretrained(zoo / f"image-{name}")
    tidy(zoo)
    log(f"wrote {zoo}")


def tidy(zoo: Path) -> None:
    """Where the weights lay before is nobody's business."""
    for path in zoo.glob("*/config.json"):
        config = json.loads(path.read_text())
        config.pop("_name_or_path", None)
        path.write_text(json.dumps(config, indent=2) + "\n")


def main(argv: list[str] | None = None) -> None:
    def stages(work: Path, zoo: Path, quick: bool):
        plan = QUICK if quick else Plan()
        return {
            "vq": lambda: train_vq(work, plan),
            "tokens": lambda: make_tokens(work, plan),
            "causal": lambda: train_lm(work, plan, "causal"),
            "masked": lambda: train_lm(work, plan, "masked"),
            "draft": lambda: train_lm(work, plan, "draft"),
            "export": lambda: export(work, zoo),
            "evaluate": lambda: evaluate(zoo, plan.held_out),
        }

    run(__doc__, argv, stages)


if __name__ == "__main__":
    main()
