"""A text model that is causal and masked at once: it drafts with masks and verifies as a causal
model.

    python -m gen.recipes.text.dual all --work DIR --zoo DIR            the whole run
    python -m gen.recipes.text.dual all --work DIR --zoo DIR --quick    a smoke run, in seconds

Stages: ``tokens``, ``train``, ``evaluate``; ``all`` runs them in this order. It starts from
``text-causal`` in ``--zoo``; without such a folder there, from the embedded one. ``train`` resumes
from its checkpoint in ``--work`` and writes ``text-dual`` to ``--zoo`` (default ``WORK/zoo``).

The dual stream of WeDLM: a prompt is followed by x0, an answer, and xt, the same answer with some
positions masked. In every block of xt the known tokens come first and the masks behind them, each
with its own position:

    query      attends to
    prompt     earlier columns of the prompt, and itself
    x0         the prompt, x0 up to itself
    xt         the prompt, x0 of earlier blocks, xt of its own block up to itself

    L = (A + M) / 2    A   cross-entropy of the next token, on x0
                       M   cross-entropy of a mask's own token; a block with a share s of masks has
                           weight 1 / s

In half of the rows the masks are the last positions of their block, as in drafting; in the others
they are any, uniform in number. So the network has an exact autoregressive distribution, and masks
behind a prefix draft what follows it (``gen.samplers.causal.drafters.parallel``), or are filled
where the network is certain (``gen.samplers.causal.wedlm``).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gen.modalities.text import tasks as text_tasks
from gen.models.load.locate import save_model, zoo
from gen.models.nets.grid import GridLlamaForCausalLM
from gen.pipeline.pipeline import Pipeline
from gen.recipes.common.grid_models import WEIGHTS, Shape, tidy, token_batches
from gen.recipes.common.recipe import Recipe
from gen.recipes.common.train import TrainConfig, fit_average
from gen.recipes.text.recipe import SHAPE, TextPlan, make_tokens, words

MODEL, TRAINED = "text-causal", "text-dual"
DRAFTS = (3, 5, 7, 11)
THRESHOLDS = (0.0, 0.1, 0.2, 0.4, 0.8)  # of the preset wedlm
COLD = 0.2  # temperature at which WeDLM decodes


@dataclass(frozen=True)
class DualPlan:
    """Sizes of the recipe.

    Attributes:
        tasks: training tasks.
        steps: updates.
        batch: answers per update.
        block: positions per block.
        lr: peak learning rate.
        held_out: tasks to measure on.
        rows: tasks that are decoded together.
    """

    tasks: int = 400_000
    steps: int = 2400
    batch: int = 128
    block: int = SHAPE.length
    lr: float = 1e-3
    held_out: int = 500
    rows: int = 100


QUICK = DualPlan(tasks=40, steps=4, batch=4, held_out=4)


@dataclass(frozen=True)
class DualStream:
    """Layout of xt for B answers of T positions.

    Attributes:
        order: position of every column of xt, long [B, T].
        masked: masked columns of xt, bool [B, T].
        weight: weight of every column in M, [B, T]; 0 at known tokens.
        sees: attention of P + 2 T columns, bool [B, P + 2 T, P + 2 T].
    """

    order: Tensor
    masked: Tensor
    weight: Tensor
    sees: Tensor


def masked_positions(shape: tuple[int, int], block: int, generator: torch.Generator) -> Tensor:
    """Choose masked positions, bool [B, T]: from one to all of every block, the last ones in the
    first half of the rows and any in the others."""
    rows, total = shape
    number = torch.arange(total) // block
    score = torch.rand(shape, generator=generator)
    score[: rows // 2] = torch.arange(total, dtype=score.dtype) / total
    out = torch.zeros(shape, dtype=torch.bool)
    for at in range(int(number[-1]) + 1):
        inside = (number == at).nonzero()[:, 0]
        count = torch.randint(1, len(inside) + 1, (rows, 1), generator=generator)
        rank = score[:, inside].argsort(1, descending=True).argsort(1)
        out[:, inside] = rank < count
    return out


def dual_stream(masked: Tensor, prefix: int, block: int) -> DualStream:
    """Lay out the streams.

    Args:
        masked: masked positions, bool [B, T].
        prefix: columns P of the prompt.
        block: positions per block.
    """
    rows, total = masked.shape
    at = torch.arange(total)
    number = at // block
    order = (number * 2 * total + masked * total + at).argsort(1)
    physical, sorted_mask = number[order], masked.gather(1, order)
    past = torch.ones(prefix + total, prefix + total, dtype=torch.bool).tril()
    sees = torch.zeros(rows, prefix + 2 * total, prefix + 2 * total, dtype=torch.bool)
    sees[:, : prefix + total, : prefix + total] = past
    below = sees[:, prefix + total :]
    below[:, :, :prefix] = True
    below[:, :, prefix : prefix + total] = number < physical[..., None]
    same = physical[..., None] == physical[:, None]
    below[:, :, prefix + total :] = same & past[:total, :total]
    share = (same * sorted_mask[:, None]).sum(-1) / same.sum(-1)
    weight = torch.where(sorted_mask, 1 / share.clamp_min(1e-9), 0.0)
    return DualStream(order, sorted_mask, weight, sees)


def dual_inputs(shape: Shape, words: Tensor, codes: Tensor, layout: DualStream) -> dict[str, Any]:
    """Arguments of the network for words [B, P] and answers [B, T]."""
    xt = codes.gather(1, layout.order).masked_fill(layout.masked, shape.mask)
    at = torch.arange(shape.prefix + shape.length).expand(len(codes), -1)
    sees = layout.sees[:, None]
    least = torch.finfo(WEIGHTS).min
    return {
        "input_ids": torch.cat([shape.codes + words, codes, xt], 1),
        "position_ids": torch.cat([at, shape.prefix + layout.order], 1),
        "attention_mask": torch.zeros(sees.shape, dtype=WEIGHTS).masked_fill(~sees, least),
        "use_cache": False,
    }


def dual_loss(shape: Shape, block: int, generator: torch.Generator):
    """Loss of the module for batches of words [B, P] and answers [B, T]."""
    total = shape.length

    def loss(m, batch):
        words, codes = batch
        layout = dual_stream(
            masked_positions(tuple(codes.shape), block, generator), shape.prefix, block
        )
        inputs = dual_inputs(shape, words, codes, layout)
        logits = m(logits_to_keep=2 * total + 1, **inputs).logits.float()
        causal = F.cross_entropy(logits[:, :total].flatten(0, 1), codes.flatten())
        nats = F.cross_entropy(
            logits[:, total + 1 :].flatten(0, 1),
            codes.gather(1, layout.order).flatten(),
            reduction="none",
        ).view(codes.shape)
        masked = (nats * layout.weight).sum() / layout.weight.sum()
        return (causal + masked) / 2, {"causal": causal.item(), "masked": masked.item()}

    return loss


def measured(
    pipe: Pipeline,
    samplers: dict[str, Any],
    tasks: Sequence[text_tasks.Task],
    rows: int,
    **sampling: float,
) -> dict[str, dict[str, float]]:
    """Per sampler: the share of right answers, passes of the target, and passes that draft."""
    found = {}
    for name, sampler in samplers.items():
        out = pipe([str(t) for t in tasks], sampler, seed=0, batch_size=rows, **sampling)
        right = [text_tasks.check(t, m).passed for t, m in zip(tasks, out.media, strict=True)]
        found[name] = {
            "right": statistics.mean(right),
            "passes": statistics.mean(s.nfe for s in out.stats),
            "draft_passes": statistics.mean(s.draft_nfe or 0 for s in out.stats),
        }
    return found


class DualRecipe(Recipe):
    """The text model of the dual stream."""

    doc, full, quick = __doc__, DualPlan(), QUICK

    def stages(self):
        tokens = TextPlan(tasks=self.plan.tasks)
        return {
            "tokens": lambda: make_tokens(self.work, tokens, self.log),
            "train": self.train,
            "evaluate": self.evaluate,
        }

    def base(self) -> Path:
        """Folder of the model to start from."""
        local = self.zoo / MODEL
        return local if local.is_dir() else zoo()[MODEL]

    def train(self) -> None:
        """Train the model and write it to ``zoo``."""
        plan = self.plan
        model = GridLlamaForCausalLM.from_pretrained(self.base(), dtype=torch.float32)
        fit_average(
            model,
            token_batches(self.work / "tokens.pt", plan.batch, 12, words),
            dual_loss(SHAPE, plan.block, torch.Generator().manual_seed(13)),
            TrainConfig(
                steps=plan.steps, lr=plan.lr, bfloat16_weights=True, log_every=50, save_every=50
            ),
            out=self.work / "dual",
            log=self.log,
        )
        model.config.trained_at_mask = True
        save_model(model.half(), self.zoo / TRAINED)
        tidy(self.zoo)
        self.log(f"wrote {self.zoo / TRAINED}")

    def evaluate(self) -> None:
        """Measure both models as causal ones, self-speculation by the number of drafts, and WeDLM
        by its threshold."""
        plan, tasks = self.plan, text_tasks.tasks(self.plan.held_out, 123, held=True)
        plain = {"autoregressive": "autoregressive"}
        drafted = {
            f"{drafter}, {n} drafts": {
                "name": "speculative",
                "drafter": drafter,
                "num_speculative_tokens": n,
            }
            for drafter in ("dual_stream", "streaming")
            for n in DRAFTS
        }
        windows = {
            f"wedlm, {nats:g} nats": {"name": "wedlm", "entropy_threshold": nats}
            for nats in THRESHOLDS
        }
        before, after = Pipeline("text", self.base()), Pipeline("text", self.zoo / TRAINED)
        figures = {
            "held_out": len(tasks),
            "before": measured(before, plain, tasks, plan.rows),
            "before, cold": measured(before, plain, tasks, plan.rows, temperature=COLD),
            "after": measured(after, plain | drafted, tasks, plan.rows),
            "after, cold": measured(after, plain | windows, tasks, plan.rows, temperature=COLD),
        }
        text = json.dumps(figures, indent=1) + "\n"
        (self.work / "evaluation-dual.json").write_text(text)
        self.log(text)


main = DualRecipe.main


if __name__ == "__main__":
    main()
