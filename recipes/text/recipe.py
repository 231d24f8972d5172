"""Text from nothing: draw tasks and answers, train a causal model, and one that is masked and of
blocks, measure them.

    python -m gen.recipes.text all --work DIR            the run that made gen/zoo/text-*
    python -m gen.recipes.text all --work DIR --quick    a smoke run of the same path, a minute

Stages: ``tokens``, ``causal``, ``masked``, ``draft``, ``export``, ``traces``, ``filter`` (those of
``gen.recipes.text.filter``), ``evaluate``; ``all`` runs them in this order. Training stages resume
from their checkpoints in ``--work``; ``masked`` starts from the weights of ``causal``. ``export``
writes half-precision weights to ``--zoo`` (default ``WORK/zoo``), ``evaluate`` measures those.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gen.contracts.frontend import codebook_digest
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.modalities.text import tasks as text_tasks
from gen.modalities.text.modality import NOTHING, POSITIONS, TextModality
from gen.recipes.common.data import UNCONDITIONAL_SHARE
from gen.recipes.common.grid_evaluation import World
from gen.recipes.common.grid_models import Run, Shape
from gen.recipes.common.recipe import GridPlan, GridRecipe, draft_card
from gen.recipes.text.data import drawn
from gen.recipes.text.filter import FilterRecipe
from gen.tokenizers.text.words import TextWords

BLOCK = 4
ONE = "one position per pass"  # reference of the presets
SHAPE = Shape((POSITIONS,), POSITIONS, len(text_tasks.WORDS) + 1, TextModality.words)


@dataclass(frozen=True, kw_only=True)
class TextPlan(GridPlan):
    """Sizes of the text recipe."""

    tasks: int = 400_000
    causal: Run = Run(3000, 96, 4, seed=5, batch=128, tied=True)
    masked: Run = Run(
        4000,
        96,
        4,
        causal=False,
        start="causal/model",
        seed=4,
        batch=128,
        tied=True,
        block=BLOCK,
        share=1 / 3,
    )
    draft: Run = Run(1500, 32, 1, seed=7, batch=128, tied=True)
    held_out: int = 500


_TINY = dict(width=32, layers=1, batch=4, tied=True)
QUICK = TextPlan(
    tasks=200,
    causal=Run(4, seed=5, **_TINY),
    draft=Run(4, seed=7, **_TINY),
    held_out=2,
    masked=Run(4, causal=False, start="causal/model", seed=4, block=BLOCK, share=0.5, **_TINY),
)


def text_codes(data: list[tuple[text_tasks.Task, tuple[str, ...]]]) -> tuple[Tensor, Tensor]:
    """Return the ids of answers and then the eos token (int16 [N, 16]), and the slots of prompts
    (uint8 [N, 16]).
    """
    id_of, modality = {w: i for i, w in enumerate(text_tasks.WORDS)}, TextModality()
    codes = torch.full((len(data), POSITIONS), len(id_of), dtype=torch.int16)
    for row, (_, answer) in zip(codes.numpy(), data, strict=True):
        row[: len(answer)] = [id_of[w] for w in answer]
    slots = [modality.prompt_words(task) for task, _ in data]
    return codes, torch.tensor(slots, dtype=torch.uint8)


def make_tokens(work: Path, plan: TextPlan, log=print) -> None:
    """Save tasks that are not held out: the ids of an answer and then the eos token (int16 [N,
    16]), and the slots of the prompt (uint8 [N, 16]).
    """
    frontend = TextWords.of(text_tasks.WORDS, POSITIONS)
    frontend.save_pretrained(work / "frontend")
    codes, slots = text_codes(drawn(plan.tasks, seed=1))
    torch.save({"codes": codes, "slots": slots}, work / "tokens.pt")
    length = float((codes != frontend.eos_token_id).sum(1).float().mean())
    log(f"{len(codes)} tasks; {length:.1f} words per answer")


def words(slots: Tensor, generator: torch.Generator) -> Tensor:
    """Words of prompts [B, P], a tenth of them dropped whole, for classifier-free guidance."""
    return slots.masked_fill(
        torch.rand(len(slots), 1, generator=generator) < UNCONDITIONAL_SHARE, NOTHING
    )


# presets with a fixed number of steps
COUNTED = (
    "llada",
    "dream",
    "pc",
    "rcr",
    "remdm",
    "window_diffusion",
    "maskgit",
    "halton",
    "maskgit_remask",
    "ddvla",
)


def masked_samplers(zoo: Path) -> dict[str, dict]:
    """Masked samplers of tokens by their name in tables; those with a number of steps get half as
    many as there are positions.
    """
    samplers = {ONE: {"name": "llada", "steps": POSITIONS}}
    for name in (*registry.table("preset"), *registry.table("sampler")):
        sampler, _ = resolve_sampler(name)
        if (
            sampler.protocol != "masked"
            or "codes" not in sampler.kinds
            or name in ("masked_iterative", "mar", "adjust")  # the layer is of one model
        ):
            continue
        if name in COUNTED:
            samplers[f"{name}, {POSITIONS // 2} steps"] = {"name": name, "steps": POSITIONS // 2}
        elif name == "prophet":  # its phases are shares of the steps
            samplers[name] = {"name": name, "steps": POSITIONS}
        elif name == "learn2pd":
            samplers[name] = {"name": name, "filter": str(zoo / "text-filter")}
        else:
            samplers[name] = {"name": name}
    return samplers


def world(zoo: Path) -> World:
    """Dataset, checker and samplers of the evaluation."""
    llama = (
        "A small Llama with a learned embedding per position (`gen/models/nets/grid.py`): the words"
        " of a prompt in 16 slots, then 16 words"
    )
    return World(
        "text",
        lambda n, seed: text_tasks.tasks(n, seed, held=True),
        lambda task, rng: " ".join(text_tasks.draw_answer(task, rng)),
        lambda media, tasks: [text_tasks.check(t, m) for m, t in zip(media, tasks, strict=True)],
        causal={
            "autoregressive": "autoregressive",
            **{
                c: {"name": "speculative_jacobi", "coupling": c}
                for c in ("gumbel", "maximal", "fresh")
            },
            **{name: name for name in ("speculative", "typical")},
        },
        masked=masked_samplers(zoo),
        blocks={"frame_blocks": {"name": "frame_blocks", "steps": BLOCK}},
        about={
            "text-words": (
                f"A word-level tokenizer of {len(text_tasks.WORDS)} words and the eos token, for"
                " `transformers.PreTrainedTokenizerFast`."
            ),
            "text-causal": f"{llama}\nand the eos token, left to right.",
            "text-masked": (
                f"{llama},\nany of them masked; or four by four, any of the four masked. The end"
                " fills what is left."
            ),
            "text-draft": draft_card("text"),
        },
        frontend="text-words",
        quarter=("maximal", "fresh", "speculative", "typical"),
        asked="held-out tasks",
    )


class TextRecipe(GridRecipe):
    """Words and token models of text, and the filter of Learn2PD."""

    doc, full, quick = __doc__, TextPlan(), QUICK
    name, frontend, shape, words = "text", "text-words", SHAPE, words

    def __init__(self, work: Path, zoo: Path, quick: bool = False, log=print):
        super().__init__(work, zoo, quick, log)
        self.filter = FilterRecipe(work, zoo, quick, log)

    def stages(self):
        return {
            "tokens": lambda: make_tokens(self.work, self.plan, self.log),
            **self.model_stages(),
            "export": self.export,
            "traces": self.filter.record,
            "filter": self.filter.learn,
            "evaluate": self.evaluate,
        }

    def export(self) -> None:
        """Write the words, and half-precision weights of the models, which name them."""
        words = self.work / "frontend"
        shutil.copytree(words, self.zoo / self.frontend, dirs_exist_ok=True)
        codes = torch.load(self.work / "tokens.pt", weights_only=True)["codes"]
        # one more of each, so that no id counts as impossible
        counts = 1 + codes.flatten().long().bincount(minlength=SHAPE.codes)
        self.export_models(codebook_digest(TextWords.from_pretrained(words).fingerprint), counts)

    def world(self) -> World:
        return world(self.zoo)


main = TextRecipe.main


if __name__ == "__main__":
    main()
