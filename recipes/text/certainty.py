"""Certainty-forcing distillation of the masked text model, which also learns to correct tokens.

    python -m gen.recipes.text.certainty all --work DIR --zoo DIR            the whole run
    python -m gen.recipes.text.certainty all --work DIR --zoo DIR --quick    a smoke run, in seconds

Stages: ``answers``, ``train``, ``answers-own``, ``train-own``, ``evaluate``; ``all`` runs them in
this order. The model is ``text-masked`` in ``--zoo``; without such a folder there, the one in the
package. Training resumes from its checkpoint in ``--work``. The result, ``text-masked-fast`` in
``--zoo`` (default ``WORK/zoo``), is low-rank additions to that model
(``gen.models.load.low_rank``).

    answers    training tasks, decoded by the model at temperature 0; those that the checker
               accepts. ``answers-own`` are those of the model that ``train`` made, which has
               drifted to answers that it decodes in few passes
    train      an answer y twice, with complementary masks, and wrong tokens among the visible:

                   L = CE + CE' + beta (H + H') + edit (E + E')

               CE   mean cross-entropy of y at the masked positions
               H    mean over the masked positions of the entropy of softmax(logits / tau), zero
                    where the likeliest token is not yet that of y
               E    mean cross-entropy of y at the visible positions, wrong tokens or not
    evaluate   accuracy and forward passes on held-out tasks, before and after

Without E this is dParallel (arXiv 2509.26488). Its code masks half of a block of 32; here the
masked share of a block is uniform, since answers are one block, which begins masked as a whole.
E is for samplers that change committed tokens: ``llada2`` edits what it sees, so the model must
have seen wrong tokens (LLaDA2.1). They are drawn at random; in ``train-own``, half of the rows are
what the model makes of a masked block in one forward pass of ``llada2``. ``train-own`` has a lower
beta: entropies that are lowered where y is one of several right answers make the model commit to a
mixture of them.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gen.modalities.text import tasks as text_tasks
from gen.modalities.text.modality import POSITIONS, TextModality
from gen.models.load.locate import zoo
from gen.models.nets.grid import GridLlamaForCausalLM
from gen.pipeline.pipeline import Pipeline
from gen.recipes.common import low_rank
from gen.recipes.common.grid_models import WEIGHTS, Shape
from gen.recipes.common.recipe import Recipe
from gen.recipes.common.train import TrainConfig, fit_average
from gen.recipes.text.data import drawn
from gen.recipes.text.recipe import SHAPE

MODEL, TRAINED = "text-masked", "text-masked-fast"
FIRST, SECOND, WEIGHTS_FILE = "certainty-1", "certainty-2", "weights.pt"
TEACHER = {"name": "fast_dllm"}  # how the answers are decoded
# factors on the frequency of ops: parallel decoding mixes the right answers of those with several
SEVERAL_ANSWERS = {"shuffle": 6, "replace": 5, "insert": 3}
DECODERS: dict[str, Any] = {
    "llada, one position per pass": {"name": "llada", "steps": POSITIONS},
    **{name: name for name in ("dparallel", "fast_dllm", "eb", "learn2pd", "llada2", "wino")},
    **{f"{name}, 8 steps": {"name": name, "steps": 8} for name in ("llada", "rcr", "ddvla")},
    "llada, 2 steps": {"name": "llada", "steps": 2},
}


@dataclass(frozen=True)
class Round:
    """A training on the answers of one model.

    Attributes:
        seed: seed of the tasks.
        steps: updates.
        lr: peak learning rate.
        beta: weight of the entropies.
        own: whether the visible tokens of half of the rows are those that the model commits.
    """

    seed: int
    steps: int
    lr: float
    beta: float = 2.0
    own: bool = False


@dataclass(frozen=True)
class CertaintyPlan:
    """Sizes and weights of the distillation.

    Attributes:
        tasks: training tasks to answer, in each round.
        first: the training on the base's answers.
        second: the training on the answers of the model that the first one made.
        batch: answers per update, each of them twice.
        rank: rank of what is added to a matrix.
        block: positions per block.
        tau: temperature of the distributions whose entropy is lowered.
        edit: weight of the visible positions.
        wrong: largest share of visible positions that hold a wrong token.
        held_out: tasks to measure on.
        rows: tasks that are decoded together.
    """

    tasks: int = 60_000
    first: Round = Round(31, 2500, 3e-3)
    second: Round = Round(41, 1600, 2e-3, beta=0.1, own=True)
    batch: int = 64
    rank: int = 4
    block: int = POSITIONS
    tau: float = 0.5
    edit: float = 1.0
    wrong: float = 0.3
    held_out: int = 500
    rows: int = 100


QUICK = CertaintyPlan(
    tasks=12, first=Round(31, 4, 1e-3), second=Round(41, 4, 1e-3, own=True), batch=4, held_out=4
)


def complementary(
    shape: tuple[int, int], block: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw the masks of one block per row, and their complements in that block.

    Args:
        shape: rows and positions, (B, T).
        block: positions per block.
        generator: source of the random numbers.

    Returns:
        Masked positions, bool [B, T], twice: they are disjoint, and together all positions from the
        block on. Later blocks are in both, since nothing of them is known yet.
    """
    rows, total = shape
    count = -(-total // block)
    active = torch.randint(count, (rows, 1), generator=generator)
    number = torch.arange(total) // block
    share = torch.rand(rows, 1, generator=generator)
    drawn = torch.rand(rows, total, generator=generator) < share
    inside, later = number == active, number > active
    return (inside & drawn) | later, (inside & ~drawn) | later


def corrupted(
    codes: Tensor, hidden: Tensor, most: float, size: int, generator: torch.Generator
) -> Tensor:
    """Put wrong tokens at some visible positions of answers.

    A row gets a share of them that is uniform up to ``most``. Half of them come from another
    position of the row, as errors of parallel decoding do, and half are any token.

    Args:
        codes: answers, long [B, T].
        hidden: masked positions, bool [B, T], which stay as they are.
        most: largest share of wrong tokens.
        size: number of tokens to draw from.
        generator: source of the random numbers.
    """
    shape = codes.shape
    share = most * torch.rand(shape[0], 1, generator=generator)
    chosen = (torch.rand(shape, generator=generator) < share) & ~hidden
    elsewhere = codes.gather(1, torch.randint(shape[1], shape, generator=generator))
    anything = torch.randint(size, shape, generator=generator)
    swaps = torch.rand(shape, generator=generator) < 0.5
    return torch.where(chosen, torch.where(swaps, elsewhere, anything), codes)


def committed(logits: Tensor, inside: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Commit the likeliest tokens where a model is confident, as a forward pass of ``llada2`` does.

    A row's confidence threshold is uniform, so that some rows are full and some nearly empty.

    Args:
        logits: of a canvas whose block is masked, [B, T, V'] of the codes.
        inside: positions of the block, bool [B, T].
        generator: source of the random numbers.

    Returns:
        Tokens, long [B, T], and where they are committed, bool [B, T].
    """
    top, tokens = logits.softmax(-1).max(-1)
    threshold = torch.rand(len(logits), 1, generator=generator)
    return tokens, inside & (top > threshold)


def mean_at(values: Tensor, at: Tensor) -> Tensor:
    """Average values [B, T] over some positions, bool [B, T]; 0 where there are none."""
    return (values * at).sum() / at.sum().clamp_min(1)


def certainty_losses(
    logits: Tensor, codes: Tensor, hidden: Tensor, counted: Tensor, tau: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute CE, H and E of the module.

    Args:
        logits: of all positions, [B, T, V].
        codes: answers, long [B, T].
        hidden: masked positions, bool [B, T].
        counted: positions of the losses, bool [B, T]; masked ones of later blocks are not.
        tau: temperature of H.
    """
    nats = F.cross_entropy(logits.flatten(0, 1), codes.flatten(), reduction="none")
    nats = nats.view(codes.shape)
    entropy = torch.special.entr((logits / tau).softmax(-1)).sum(-1)
    right = logits.argmax(-1) == codes
    masked, visible = hidden & counted, ~hidden & counted
    return mean_at(nats, masked), mean_at(entropy * right, masked), mean_at(nats, visible)


def canvas_logits(m: Any, shape: Shape, words: Tensor, canvas: Tensor) -> Tensor:
    """Run a masked model on words [B, P] and a canvas [B, T]: float32 logits [B, T, V]."""
    ids = torch.cat([shape.codes + words, canvas], 1)
    full = torch.zeros(1, 1, ids.shape[1], ids.shape[1], dtype=WEIGHTS)
    out = m(input_ids=ids, attention_mask=full, logits_to_keep=shape.length, use_cache=False)
    return out.logits.float()


def certainty_loss(shape: Shape, plan: CertaintyPlan, stage: Round, generator: torch.Generator):
    """Loss of the module for batches of words [B, P] and answers [B, T]."""

    def loss(m, batch):
        words, codes = batch
        rows = len(codes)
        masks = complementary(tuple(codes.shape), plan.block, generator)
        block, unknown = masks[0] ^ masks[1], masks[0] | masks[1]
        hidden, counted = torch.cat(masks), ~(masks[0] & masks[1]).repeat(2, 1)
        words, codes = words.repeat(2, 1), codes.repeat(2, 1)
        seen = corrupted(codes, hidden, plan.wrong, shape.codes, generator)
        if stage.own:
            some = slice(0, rows, 2)
            canvas = codes[some].masked_fill(unknown[some], shape.mask)
            with torch.no_grad():
                logits = canvas_logits(m, shape, words[some], canvas)[..., : shape.codes]
            for copy in (some, slice(rows, 2 * rows, 2)):
                tokens, known = committed(logits, block[some], generator)
                seen[copy] = torch.where(known, tokens, codes[some])
                hidden[copy] = unknown[some] & ~known
        logits = canvas_logits(m, shape, words, seen.masked_fill(hidden, shape.mask))
        # every mean is over both copies, which is half of the sum of the paper
        ce, entropy, edits = certainty_losses(logits, codes, hidden, counted, plan.tau)
        total = ce + stage.beta * entropy + plan.edit * edits
        return total, {"ce": ce.item(), "entropy": entropy.item(), "edits": edits.item()}

    return loss


def answer_batches(
    words: Tensor, codes: Tensor, batch: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches of words [B, P] and answers [B, T]."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        rows = torch.randint(len(codes), (batch,), generator=generator)
        yield words[rows].long(), codes[rows].long()


def measured(
    pipe: Pipeline, decoders: dict[str, Any], tasks: Sequence[text_tasks.Task], rows: int
) -> dict[str, dict[str, float]]:
    """Per decoder: the share of right answers and the forward passes per text."""
    found = {}
    for name, sampler in decoders.items():
        out = pipe([str(t) for t in tasks], sampler, seed=0, batch_size=rows)
        right = [text_tasks.check(t, m).passed for t, m in zip(tasks, out.media, strict=True)]
        passes = statistics.mean(s.nfe for s in out.stats)
        found[name] = {"right": statistics.mean(right), "passes": passes}
    return found


def comparison(before: dict[str, dict[str, float]], after: dict[str, dict[str, float]]) -> str:
    """Table of two models' figures by decoder."""
    head = (
        "| sampler | right before | after | forward passes before | after | fewer |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
    )
    return head + "".join(
        f"| {name} | {old['right']:.3f} | {after[name]['right']:.3f} | {old['passes']:.2f}"
        f" | {after[name]['passes']:.2f} | {old['passes'] / after[name]['passes']:.2f}x |\n"
        for name, old in before.items()
    )


class CertaintyRecipe(Recipe):
    """The masked text model, trained on its own answers to be decoded in fewer forward passes."""

    doc, full, quick = __doc__, CertaintyPlan(), QUICK

    def stages(self):
        first, second = self.plan.first, self.plan.second
        return {
            "answers": lambda: self.answer(self.base(), first),
            "train": lambda: self.train(first),
            "answers-own": lambda: self.answer(self.work / FIRST / TRAINED, second),
            "train-own": lambda: self.train(second, self.work / FIRST / WEIGHTS_FILE),
            "evaluate": self.evaluate,
        }

    def base(self) -> Path:
        """Folder of the model to start from."""
        local = self.zoo / MODEL
        return local if local.is_dir() else zoo()[MODEL]

    def answer(self, model: Path, plan: Round) -> None:
        """Decode training tasks and save the right answers: words [N, P] and tokens [N, T]."""
        began, pipe = time.time(), Pipeline("text", model)
        tasks = [task for task, _ in drawn(self.plan.tasks, plan.seed, weights=SEVERAL_ANSWERS)]
        out = pipe([str(t) for t in tasks], TEACHER, seed=0, batch_size=self.plan.rows)
        right = [text_tasks.check(t, m).passed for t, m in zip(tasks, out.media, strict=True)]
        kept, modality = torch.tensor(right), TextModality()
        words = torch.tensor([modality.prompt_words(task) for task in tasks], dtype=torch.uint8)
        codes = torch.as_tensor(out.tokens).to(torch.int16)
        answers = {"words": words[kept], "codes": codes[kept]}
        torch.save(answers, self.work / f"answers-{plan.seed}.pt")
        share, seconds = kept.double().mean(), time.time() - began
        self.log(f"{int(kept.sum())} answers, {share:.3f} of them right; {seconds:.0f} s")

    def train(self, plan: Round, start: Path | None = None) -> None:
        """Distil the model, from weights of an earlier round, and write it."""
        sizes, folder = self.plan, self.work / (SECOND if start else FIRST)
        data = torch.load(self.work / f"answers-{plan.seed}.pt", weights_only=True)
        model = GridLlamaForCausalLM.from_pretrained(self.base(), dtype=torch.float32)
        low_rank.attach(model, sizes.rank)
        if start is not None:
            model.load_state_dict(torch.load(start, weights_only=True))
        fit_average(
            model,
            answer_batches(data["words"], data["codes"], sizes.batch, seed=5),
            certainty_loss(SHAPE, sizes, plan, torch.Generator().manual_seed(6)),
            TrainConfig(
                steps=plan.steps, lr=plan.lr, bfloat16_weights=True, log_every=50, save_every=500
            ),
            out=folder,
            log=self.log,
        )
        torch.save(model.state_dict(), folder / WEIGHTS_FILE)
        local = (self.zoo / MODEL).is_dir()
        written = (self.zoo if start else folder) / TRAINED
        low_rank.export(model, str(self.base()) if local else MODEL, written)
        self.log(f"wrote {written}")

    def evaluate(self) -> None:
        """Compare the models on held-out tasks and write the figures and the table."""
        tasks = text_tasks.tasks(self.plan.held_out, 123, held=True)
        before, after = (
            measured(Pipeline("text", folder), DECODERS, tasks, self.plan.rows)
            for folder in (self.base(), self.zoo / TRAINED)
        )
        figures = {"held_out": len(tasks), "before": before, "after": after}
        (self.work / "evaluation-certainty.json").write_text(json.dumps(figures, indent=1) + "\n")
        self.log(comparison(before, after))


main = CertaintyRecipe.main


if __name__ == "__main__":
    main()
