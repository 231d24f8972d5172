"""Motion from nothing: synthesise motions, train the motion VQ, a causal and a masked model,
measure them.

    python -m gen.recipes.motion all --work DIR            the run that made gen/zoo/motion-*
    python -m gen.recipes.motion all --work DIR --quick    a smoke run of the same path, a minute

Stages: ``vq``, ``rvq``, ``tokens``, ``causal``, ``masked``, ``draft``, ``export``, ``evaluate``;
``all`` runs them in this order. ``rvq`` is the variant with residual codebooks, which no model here
uses. Training stages resume from their checkpoints in ``--work``; ``masked`` starts from the
weights of ``causal``. ``export`` writes half-precision weights to ``--zoo`` (default ``WORK/zoo``),
``evaluate`` measures those.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gen.contracts.frontend import codebook_digest
from gen.media.motion.features import (
    CONTACT,
    LOWER,
    RIC,
    ROOT,
    ROTATIONS,
    UPPER,
    VELOCITY,
    WIDTH,
    features,
    start_of,
    statistics,
)
from gen.media.motion.skeleton import Motion
from gen.modalities.motion import captions as moves
from gen.modalities.motion import checker as moves_check
from gen.modalities.motion import synth as moves_draw
from gen.modalities.motion.modality import PARTS, MotionModality, placed
from gen.models.load.locate import save_model
from gen.recipes.common.codebooks import Chain
from gen.recipes.common.data import drop_mask
from gen.recipes.common.grid_evaluation import CAUSAL, MINOR, World
from gen.recipes.common.grid_models import Run, Shape
from gen.recipes.common.recipe import GridPlan, GridRecipe, draft_card
from gen.recipes.common.train import TrainConfig, fit_average
from gen.tokenizers.motion.motion_vq import STRIDE, MotionVQ
from gen.tokenizers.motion.motion_vq_net import MotionVQVAE

CODES, CHANNELS, FRAMES = 512, 16, (moves_draw.MAX_POSES - 1) // STRIDE
END = len(PARTS) * CODES
SHAPE = Shape((FRAMES, len(PARTS)), moves.SLOTS, END + 1, moves.PAIRS)
CROP = 16  # codes of a training window of the codec
# weights of features in the loss: motions are decoded from the first two
WEIGHTS = (
    (ROOT, 6.0),
    (ROTATIONS, 1.0),
    (RIC, 0.1),
    (VELOCITY, 0.1),
    (CONTACT, 0.1),
)
# share of training clips that join two motions, which no caption describes
JOINED = 0.15


@dataclass(frozen=True, kw_only=True)
class MotionPlan(GridPlan):
    """Sizes of the motion recipe."""

    vq_steps: int = 3500
    rvq_steps: int = 1500
    vq_batch: int = 32
    clips: int = 4000
    causal: Run = Run(1500, 64, 3, seed=5, batch=32, tied=True, cooldown=(750, 1000))
    masked: Run = Run(
        1500,
        64,
        3,
        causal=False,
        start="causal/model",
        seed=4,
        batch=32,
        tied=True,
        cooldown=(700, 1100),
    )
    draft: Run = Run(500, 32, 1, seed=6, batch=32, tied=True)
    held_out: int = 200


_TINY = dict(width=32, layers=1, batch=4, tied=True)
QUICK = MotionPlan(
    vq_steps=6,
    rvq_steps=6,
    vq_batch=2,
    clips=24,
    causal=Run(4, seed=5, **_TINY),
    masked=Run(4, causal=False, start="causal/model", seed=4, **_TINY),
    draft=Run(4, seed=6, **_TINY),
    held_out=1,
)


def follow(first: Motion, then: Motion) -> Motion:
    """Append a motion that starts where the first ends. The pose between them is in both."""
    then = placed(then, *start_of(first.cut(first.frames - 1)))
    return Motion(
        np.concatenate([first.root, then.root[1:]]),
        np.concatenate([first.rotations, then.rotations[1:]]),
    )


def drawn(seed: int, every: bool = False) -> Iterator[tuple[Motion, list[int]]]:
    """Endless motions of 4 n + 1 poses and their slots; held-out captions only with ``every``."""
    rng = np.random.default_rng(seed)

    def one() -> tuple[moves.Caption, Motion]:
        while moves.held_out(caption := moves.random_caption(rng)) and not every:
            pass
        return caption, moves_draw.draw(caption, rng)

    while True:
        caption, motion = one()
        if rng.random() >= JOINED:
            yield motion, caption.slots()
            continue
        both = follow(motion, one()[1])
        codes = (both.frames - 1) // STRIDE
        first = int(rng.integers(max(codes - FRAMES, 0) + 1))
        yield (
            both.cut(first * STRIDE, min(first + FRAMES, codes) * STRIDE + 1),
            [moves.ANY] * moves.SLOTS,
        )


def windows(batch: int, seed: int, mean: Tensor, std: Tensor) -> Iterator[Tensor]:
    """Normalised features [B, 4 CROP, 263] from anywhere in a clip; the last frame of a short clip
    is repeated.
    """
    clips, rng = drawn(seed), np.random.default_rng(seed + 1)
    kept = [features(next(clips)[0]) for _ in range(16 * batch)]
    while True:
        out = []
        for at in rng.integers(len(kept), size=batch):
            first = int(rng.integers(max(len(kept[at]) // STRIDE - CROP, 0) + 1)) * STRIDE
            x = kept[at][first : first + CROP * STRIDE]
            out.append(np.concatenate([x, np.repeat(x[-1:], CROP * STRIDE - len(x), 0)]))
        yield (torch.from_numpy(np.stack(out)) - mean) / std


def feature_weights() -> Tensor:
    """Return the weights of features in the loss, float [263]."""
    weights = torch.ones(WIDTH)
    for where, weight in WEIGHTS:
        weights[where] = weight
    return weights


def code(
    model: MotionVQVAE, chains: list[Chain], x: Tensor, learn: bool = True
) -> tuple[Tensor, Tensor]:
    """Encode, quantise and decode normalised features [B, F, 263].

    Args:
        model: the VQ.
        chains: codebooks of every part.
        x: the features.
        learn: as of ``Chain``.

    Returns:
        Decoded features as x, and the loss of the codes.
    """
    loss, quantised = x.new_zeros(()), []
    for chain, z in zip(chains, model.latents(x), strict=True):
        q, own = chain(z.flatten(0, 1).float(), learn)
        quantised.append(q.view(z.shape))
        loss = loss + own
    return model.features(quantised), loss


def apart(y: Tensor, x: Tensor, weights: Tensor) -> Tensor:
    """Return the distance of features [B, F, 263], ``weights`` as of ``feature_weights``."""
    return (weights * F.smooth_l1_loss(y, x, reduction="none")).mean()


def train_vq(work: Path, plan: MotionPlan, residual: int = 1, log=print) -> None:
    """Train the VQ by gradients; ``Chain`` starts the codebooks and keeps their codes in use. With
    residual codebooks the body is one part.
    """
    steps = plan.vq_steps if residual == 1 else plan.rvq_steps
    torch.manual_seed(0)
    clips = drawn(seed=1)
    mean, std = (
        torch.from_numpy(a)
        for a in statistics([features(next(clips)[0]) for _ in range(min(plan.clips, 300))])
    )
    parts = [LOWER.tolist(), UPPER.tolist()] if residual == 1 else [list(range(len(mean)))]
    model = MotionVQVAE(parts, CODES, CHANNELS, 48 if residual == 1 else 32, residual)
    model.mean.copy_(mean)
    model.std.copy_(std)
    chains = [
        Chain(model.chain(p), steps // 8, steps * 3 // 4, torch.Generator().manual_seed(p))
        for p in range(len(parts))
    ]

    weights = feature_weights()

    def loss_fn(m, x):
        y, loss = code(m, chains, x)
        distance = apart(y, x, weights)
        steps = apart(y.diff(dim=1), x.diff(dim=1), weights)
        figures = {"apart": distance.item(), "codes": sum(c.codes for c in chains)}
        return distance + 0.5 * steps + loss, figures

    def on_step(step: int, _) -> None:
        for chain in chains:
            chain.on_step(step)

    name = "vq" if residual == 1 else "rvq"
    fit_average(
        model,
        windows(plan.vq_batch, 2, mean, std),
        loss_fn,
        TrainConfig(steps=steps, lr=0.002, weight_decay=0.0),
        out=work / name,
        on_step=on_step,
        log=log,
    )
    save_model(model, work / name / "model")


def make_tokens(work: Path, plan: MotionPlan, log=print) -> None:
    """Synthesise the training clips and save their codes (int16 [N, T], then the eos token) and
    caption slots (uint8 [N, P]).

    The language has 93 full captions, too few to generalise from some of them to the others, so the
    token models see all of them; the codec does not.
    """
    frontend, modality = MotionVQ.from_pretrained(work / "vq" / "model"), MotionModality()
    codes = torch.full((plan.clips, SHAPE.length), END, dtype=torch.int16)
    slots = []
    for row, (motion, said) in zip(codes, drawn(seed=3, every=True), strict=False):
        found = frontend.encode(frontend.preprocess(motion)[None])
        ids = modality.layout(frontend.config.codebook_sizes, tuple(found.shape[2:])).to_sequence(
            found
        )[0]
        row[: len(ids)] = ids
        slots.append(said)
        if len(slots) % 1000 == 0:
            log(f"{len(slots)}/{plan.clips} clips")
    torch.save(
        {"codes": codes, "slots": torch.tensor(slots, dtype=torch.uint8)}, work / "tokens.pt"
    )


def words(slots: Tensor, generator: torch.Generator) -> Tensor:
    """Caption slots [B, P] as joint words, with a tenth of the captions dropped, and a tenth of the
    words that a caption may omit.
    """
    required = [i for i in range(moves.SLOTS) if i not in moves.OPTIONAL]
    drop = drop_mask(slots, generator, 0.1, required)
    return torch.from_numpy(moves.pairs(torch.where(drop, moves.ANY, slots).numpy()))


def conditions(n: int, seed: int) -> list[moves.Caption]:
    """Captions of any kind: none is held out from the token models."""
    rng = np.random.default_rng(seed)
    return [moves.random_caption(rng) for _ in range(n)]


def world() -> World:
    """Dataset, checker and samplers of the evaluation."""
    llama = (
        "A small Llama with frame and part embeddings (`gen/models/nets/grid.py`): five caption"
        " slots, then up to 49 frames of two\ncodes of `motion-vq` and the eos token"
    )
    return World(
        "motion",
        conditions,
        moves_draw.draw,
        moves_check.check_many,
        causal=CAUSAL,
        masked={
            "maskgit, 10 steps": {"name": "maskgit", "steps": 10},
            "halton, 10 steps": {"name": "halton", "steps": 10},
            "low_confidence, 10 steps": {
                "name": "maskgit",
                "steps": 10,
                "remasker": "low_confidence",
            },
        },
        about={
            "motion-vq": (
                "A 1-D convolutional VQ-VAE (`tokenizers/motion/motion_vq_net.py`) of 263 HumanML3D"
                " features, four frames per code, 512 codes for the\nlower and 512 for the upper"
                " body."
            ),
            "motion-rvq": "The same with three residual codebooks of 512 for the whole body.",
            "motion-causal": f"{llama}, left to right.",
            "motion-masked": f"{llama}, any of them masked.",
            "motion-draft": draft_card("motion"),
        },
        frontend="motion-vq",
        quarter=MINOR,
        asked="captions of its language, none of which was held out from training",
    )


class MotionRecipe(GridRecipe):
    """VQ frontend and token models of motion."""

    doc, full, quick = __doc__, MotionPlan(), QUICK
    name, frontend, shape, words = "motion", "motion-vq", SHAPE, words

    def stages(self):
        return {
            "vq": lambda: train_vq(self.work, self.plan, log=self.log),
            "rvq": lambda: train_vq(self.work, self.plan, residual=3, log=self.log),
            "tokens": lambda: make_tokens(self.work, self.plan, self.log),
            **self.model_stages(),
            "export": self.export,
            "evaluate": self.evaluate,
        }

    def export(self) -> None:
        """Write half-precision weights of the VQ, of the models, which name its codebook, and of
        the residual VQ if it was trained.
        """
        vq = self._export_vq("vq")
        if (self.work / "rvq" / "model").is_dir():
            self._export_vq("rvq")
        self.export_models(codebook_digest(torch.cat([t.detach() for t in vq.tables])))

    def _export_vq(self, name: str) -> MotionVQVAE:
        model = MotionVQVAE.from_pretrained(self.work / name / "model").half()
        save_model(model, self.zoo / f"motion-{name}")
        return model

    def world(self) -> World:
        return world()


main = MotionRecipe.main


if __name__ == "__main__":
    main()
