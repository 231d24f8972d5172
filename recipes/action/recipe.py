"""Actions from nothing: synthesise demonstrations on the tabletop, make the tokens, train a causal
and a masked model, measure them.

    python -m gen.recipes.action all --work DIR            the run that made gen/zoo/action-*
    python -m gen.recipes.action all --work DIR --quick    a smoke run of the same path, a minute

Stages: ``tokens``, ``causal``, ``masked``, ``causal-more``, ``masked-more`` (second rounds, in
which half of the tasks are pushes, the hardest ones), ``causal-last`` and ``causal-end`` (a third
and a fourth round), ``fast`` (a causal model of FAST ids), ``draft``, ``rvq`` (a residual VQ of
chunks, which no model here uses), ``export``, ``evaluate``; ``all`` runs them in this order.
Training stages resume from their checkpoints in ``--work``; ``masked`` starts from the weights of
``causal``. ``export`` writes half-precision weights to ``--zoo`` (default ``WORK/zoo``),
``evaluate`` measures those by rolling chunks out.
"""

from __future__ import annotations

import shutil
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gen.contracts.frontend import codebook_digest
from gen.interop.lerobot import Policy
from gen.modalities.action import checker as tabletop_check
from gen.modalities.action import tasks as tabletop_tasks
from gen.modalities.action import world as tabletop
from gen.modalities.action.modality import ANY, ActionChunk, ActionModality, Situation
from gen.recipes.common.codebooks import Chain
from gen.recipes.common.data import UNCONDITIONAL_SHARE
from gen.recipes.common.grid_evaluation import World, evaluate, pipe, sampler_figures, write_figures
from gen.recipes.common.grid_models import Run, Shape, export_lm, tidy, train_lm
from gen.recipes.common.recipe import GridPlan, GridRecipe, draft_card
from gen.recipes.common.train import TrainConfig, fit_average
from gen.tokenizers.action.base import ActionStatistics
from gen.tokenizers.action.bins import ActionBins
from gen.tokenizers.action.fast import ActionFast
from gen.tokenizers.action.rvq import ActionAutoencoder, ActionRVQ

BINS, FAST_IDS = 64, 256
STAGES = (
    "causal",
    "masked",
    "causal-more",
    "masked-more",
    "causal-last",
    "causal-end",
    "fast",
    "draft",
)
GRID = (tabletop.HORIZON, tabletop.DIMENSIONS)


@dataclass(frozen=True, kw_only=True)
class ActionPlan(GridPlan):
    """Sizes of the action recipe."""

    episodes: int = 100_000
    causal: Run = Run(2500, 64, 3, seed=5, batch=64, tied=True)
    masked: Run = Run(2500, 64, 3, causal=False, start="causal/model", seed=4, batch=64, tied=True)
    causal_more: Run = Run(
        3000, 64, 3, start="../causal/model", seed=15, batch=64, tied=True, cooldown=(1750, 2350)
    )
    masked_more: Run = Run(
        3000,
        64,
        3,
        causal=False,
        start="../masked/model",
        seed=14,
        batch=64,
        tied=True,
        cooldown=(1750, 2350),
    )
    causal_last: Run = Run(1500, 64, 3, start="../more/causal/model", seed=25, batch=64, tied=True)
    causal_end: Run = Run(2500, 64, 3, start="../last/causal/model", seed=35, batch=64, tied=True)
    fast: Run = Run(1500, 64, 3, seed=6, batch=64, tied=True)
    draft: Run = Run(600, 32, 1, seed=7, batch=64, tied=True)
    rvq_steps: int = 1000
    held_out: int = 500

    def run_of(self, name: str) -> Run:
        """Training of one of ``STAGES``."""
        return {
            "causal": self.causal,
            "masked": self.masked,
            "causal-more": self.causal_more,
            "masked-more": self.masked_more,
            "causal-last": self.causal_last,
            "causal-end": self.causal_end,
            "fast": self.fast,
            "draft": self.draft,
        }[name]


_TINY = dict(width=32, layers=1, batch=4, tied=True)
QUICK = ActionPlan(
    episodes=200,
    causal=Run(4, seed=5, **_TINY),
    masked=Run(4, causal=False, start="causal/model", seed=4, **_TINY),
    causal_more=Run(4, start="../causal/model", **_TINY),
    masked_more=Run(4, causal=False, start="../masked/model", **_TINY),
    causal_last=Run(4, start="../more/causal/model", **_TINY),
    causal_end=Run(4, start="../last/causal/model", **_TINY),
    fast=Run(4, seed=6, **_TINY),
    draft=Run(4, seed=7, **_TINY),
    rvq_steps=4,
    held_out=2,
)


def shape(frontend: ActionBins | ActionFast) -> Shape:
    """Prompt and grid of the models of a frontend's ids."""
    return Shape(
        frontend.grid, ActionModality.slots, frontend.config.codebook_sizes[0], ActionModality.words
    )


def make_tokens(work: Path, plan: ActionPlan, log=print) -> None:
    """Save demonstrations from states that are not held out, as bins and as FAST ids (int16 [N,
    32]), with the words of their situations (uint8 [N, 8]). The statistics are those of all
    demonstrations.
    """
    data = tabletop_tasks.episodes(plan.episodes, seed=1, held=False)
    stats = ActionStatistics.from_data(data.actions, quantiles=(0, 1))
    bins = ActionBins(BINS, *GRID, stats)
    fast = ActionFast.train(data.actions[:20_000], vocab_size=FAST_IDS, statistics=stats)
    slots = torch.tensor(
        [Situation(t, s).words() for t, s in zip(data.tasks, data.states, strict=True)],
        dtype=torch.uint8,
    )
    x = torch.from_numpy(stats.normalise(data.actions)).float()
    kind = slots[:, 0]
    number = torch.arange(len(kind)) // len(tabletop.KINDS)
    pushes = (kind == 2) | (number % 2 == 0)  # half of the tasks
    for frontend, rows, folders in (
        (bins, kind > 0, [work]),
        (bins, pushes, [work / "more", work / "last", work / "end"]),
        (fast, kind > 0, [work / "fast"]),
    ):
        codes = torch.cat(
            [frontend.encode(part).flatten(1).to(torch.int16) for part in x[rows].split(1000)]
        )
        for folder in folders:
            frontend.save_pretrained(folder / "frontend")
            torch.save({"codes": codes, "slots": slots[rows]}, folder / "tokens.pt")
    length = float((codes != fast.eos_token_id).sum(1).float().mean())
    log(f"{len(x)} chunks; {length:.1f} FAST ids each")


def words(slots: Tensor, generator: torch.Generator) -> Tensor:
    """Words of situations [B, P], a tenth of them dropped whole, for classifier-free guidance."""
    return slots.masked_fill(
        torch.rand(len(slots), 1, generator=generator) < UNCONDITIONAL_SHARE, ANY
    )


def train_rvq(work: Path, plan: ActionPlan, log=print) -> None:
    """Train the residual VQ of chunks."""
    torch.manual_seed(0)
    stats = ActionBins.from_pretrained(work / "frontend").statistics
    x = torch.from_numpy(
        stats.normalise(
            tabletop_tasks.episodes(min(plan.episodes, 20_000), seed=1, held=False).actions
        )
    ).float()
    model = ActionAutoencoder(tabletop.DIMENSIONS, stages=3, width=48)
    chain = Chain(
        list(model.tables),
        plan.rvq_steps // 8,
        plan.rvq_steps * 3 // 4,
        torch.Generator().manual_seed(0),
    )
    generator = torch.Generator().manual_seed(2)

    def batches():
        while True:
            yield x[torch.randint(len(x), (64,), generator=generator)]

    def loss_fn(m, batch):
        z = m.encode_continuous(batch)
        q, loss = chain(z.flatten(0, 1))
        apart = F.mse_loss(m.decode_continuous(q.view(z.shape)), batch)
        return apart + loss, {"rms": apart.item() ** 0.5, "codes": chain.codes}

    fit_average(
        model,
        batches(),
        loss_fn,
        TrainConfig(steps=plan.rvq_steps, lr=0.002, weight_decay=0.0),
        out=work / "rvq",
        on_step=lambda s, _: chain.on_step(s),
        log=log,
    )
    ActionRVQ(model, tabletop.HORIZON, stats).save_pretrained(work / "rvq" / "frontend")


CAUSAL = {
    "autoregressive": "autoregressive",
    **{c: {"name": "speculative_jacobi", "coupling": c} for c in ("gumbel", "maximal", "fresh")},
    **{name: name for name in ("speculative", "typical", "distance")},
}
MASKED = {
    "maskgit, 8 steps": {"name": "maskgit", "steps": 8},
    "maskgit, 4 steps": {"name": "maskgit", "steps": 4},
    "ddvla, 8 steps": {"name": "ddvla", "steps": 8},
    "low_confidence, 8 steps": {"name": "maskgit", "steps": 8, "remasker": "low_confidence"},
}
FAST = {"autoregressive, FAST": "autoregressive", "gumbel, FAST": {"name": "speculative_jacobi"}}


def held(n: int, seed: int) -> list[tabletop_tasks.Task]:
    """Tasks that state all of a held-out state."""
    return [tabletop_tasks.described(s) for s in tabletop_tasks.episodes(n, seed, held=True).states]


def grounded(task: tabletop_tasks.Task) -> Situation:
    """Situation of a task that states all of its state."""
    return ActionModality().ground(task, 0)


def demonstration(task: tabletop_tasks.Task, rng: np.random.Generator) -> ActionChunk:
    """Demonstrated chunk of a task."""
    situation = grounded(task)
    return ActionChunk(tabletop.demonstrate(situation.state), situation)


def check_many(media: list, tasks: list[tabletop_tasks.Task]) -> list:
    """Judge chunks by rolling them out from the states of their tasks."""
    return tabletop_check.check_many(
        [np.asarray(m) for m in media], [grounded(t).state for t in tasks], tasks
    )


def latencies(zoo: Path, tasks: list, log=print) -> dict:
    """Seconds from an observation to a chunk, one at a time: median and 99th percentile, for every
    sampler.
    """
    out = {}
    for protocol, samplers in (("causal", CAUSAL), ("masked", MASKED), ("fast", FAST)):
        made = pipe(world(), zoo, protocol)
        for name, sampler in samplers.items():
            policy, seconds = Policy(made, sampler), []
            for task in tasks[:1] + tasks:  # the first one loads and warms up
                situation = grounded(task)
                seen, began = tabletop_tasks.observation(situation.state, task), time.perf_counter()
                policy.predict_action_chunk(seen)
                seconds.append(time.perf_counter() - began)
            out[name] = {
                "median": statistics.median(seconds[1:]),
                "p99": float(np.quantile(seconds[1:], 0.99)),
            }
            log(f"latency of {name}: {out[name]}")
    return out


def world() -> World:
    """Dataset, checker and samplers of the evaluation."""
    llama = (
        "A small Llama with step and dimension embeddings (`gen/models/nets/grid.py`): a task and"
        " seven numbers of a state, then"
    )
    return World(
        "action",
        held,
        demonstration,
        check_many,
        causal=CAUSAL,
        masked=MASKED,
        about={
            "action-bins": (
                "64 uniform bins per dimension, and the statistics of the demonstrations."
            ),
            "action-fast-ids": (
                "DCT and byte pairs (FAST): 256 ids, and the statistics of the demonstrations."
            ),
            "action-rvq": (
                "A residual VQ of four steps per frame, three codes of 64 each, and the statistics"
                " of the demonstrations."
            ),
            "action-causal": f"{llama}\n32 bins, left to right.",
            "action-masked": f"{llama}\n32 bins, any of them masked.",
            "action-fast": f"{llama}\nFAST ids until they make a chunk, left to right.",
            "action-draft": draft_card("action"),
        },
        frontend="action-bins",
        quarter=("maximal", "fresh", "speculative", "typical", "distance"),
    )


class ActionRecipe(GridRecipe):
    """Frontends and token models of action chunks."""

    doc, full, quick = __doc__, ActionPlan(), QUICK
    name, frontend, words = "action", "action-bins", words

    def stages(self):
        return {
            "tokens": lambda: make_tokens(self.work, self.plan, self.log),
            **{name: lambda name=name: self.train(name) for name in STAGES},
            "rvq": lambda: train_rvq(self.work, self.plan, self.log),
            "export": self.export,
            "evaluate": self.evaluate,
        }

    def train(self, name: str) -> None:
        """Train one of ``STAGES``, each in the folder of its round."""
        protocol, _, later_round = name.partition("-")
        folder, kind = self.work / later_round, ActionBins
        if name == "fast":
            protocol, folder, kind = "causal", self.work / "fast", ActionFast
        frontend = kind.from_pretrained(folder / "frontend")
        train_lm(folder, shape(frontend), self.plan.run_of(name), protocol, words, self.log)

    def export(self) -> None:
        """Write the frontends, half-precision weights of the models, which name them, and the
        residual VQ if it was trained.
        """
        for frontend, kind, folder, model, name in (
            ("bins", ActionBins, self.work, "draft", "draft"),
            ("bins", ActionBins, self.work / "more", "masked", "masked"),
            ("bins", ActionBins, self.work / "end", "causal", "causal"),
            ("fast-ids", ActionFast, self.work / "fast", "causal", "fast"),
        ):
            source = folder / "frontend"
            shutil.copytree(source, self.zoo / f"action-{frontend}", dirs_exist_ok=True)
            export_lm(
                folder / model / "model",
                self.zoo / f"action-{name}",
                f"action-{frontend}",
                codebook_digest(kind.from_pretrained(source).fingerprint),
            )
        if (self.work / "rvq" / "frontend").is_dir():
            source = self.work / "rvq" / "frontend"
            shutil.copytree(source, self.zoo / "action-rvq", dirs_exist_ok=True)
        tidy(self.zoo)
        self.log(f"wrote {self.zoo}")

    def world(self) -> World:
        return world()

    def evaluate(self) -> None:
        zoo, log, held_out = self.zoo, self.log, self.plan.held_out
        result = evaluate(world(), zoo, held_out, log)
        tasks = held(held_out, 123)
        result["samplers"] |= sampler_figures(world(), zoo, "fast", tasks, FAST, log)
        result["latency"] = latencies(zoo, tasks[: max(2, held_out // 5)], log)
        write_figures(world(), zoo, result)


main = ActionRecipe.main


if __name__ == "__main__":
    main()
