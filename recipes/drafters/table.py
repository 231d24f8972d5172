"""Compare drafters of a modality's model on held-out prompts, one item at a time.

    python -m gen.recipes.drafters.table text --drafter eagle=W/drafter --prompts 50

prints a row for plain autoregression, for Jacobi decoding, for drafters without a model, for an
untrained small model, for the modality's own draft model and for every trained drafter: parameters,
minutes of training, ``alpha`` (acceptance of a first draft on held-out prefixes, where the recipe
measured it), tokens per forward pass of the target, share of accepted drafts, passes of the drafter
per item, wall time per item, and items with the tokens of plain autoregression where the sampler
guarantees them. ``--spec`` adds a row for any sampler, as JSON. With ``--timed 2`` two items are
decoded one by one for their wall time, and the others in batches; what a drafter learns from the
items of a call (``scope: call``) then stays in a batch.

A drafter that is a model has rows for Jacobi decoding whose windows begin with its drafts too, with
3 rounds of drafts per pass and with as many as change one (``until fixed``). ``--only`` prints some
rows, by the beginning of their names.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from gen.core.errors import GenError, unknown
from gen.core.stats import Stats
from gen.pipeline.output import ItemPlan, PipelineOutput
from gen.pipeline.pipeline import Pipeline, load
from gen.pipeline.request import GenerationRequest
from gen.recipes.drafters.data import Teacher, held_out_prompts
from gen.recipes.drafters.kind_ar import Autoregressive, ModelOptions
from gen.recipes.drafters.kinds import KINDS

UNTRAINED = ("autoregressive", "speculative_jacobi", "prompt_lookup", "suffix", "token_recycling")
BATCH = 16  # items that are decoded together where they are not timed
HEAD = (
    "| drafter | parameters | minutes | alpha | tokens/pass | accepted | draft passes | ms | same |"
)
REFERENCE = {"name": "autoregressive"}


@dataclass(frozen=True)
class Row:
    """A row of the table: its name, the sampler, and the folder of a trained drafter."""

    name: str
    spec: dict[str, Any]
    folder: Path | None = None


def decode(
    pipe: Pipeline, items: Sequence[ItemPlan], spec: dict[str, Any], timed: int | None = None
) -> tuple[Tensor, list[Stats], float]:
    """Decode items.

    Args:
        pipe: pipeline of the modality.
        items: the items.
        spec: the sampler.
        timed: number of first items that are decoded one by one and timed; the others are decoded
            in batches, which changes no pass of an item. None times all.

    Returns:
        Tokens int64 [n, T], counts of every item, and the seconds of a timed one.
    """
    sampler, sampling = pipe.resolve(spec)

    def decoded(some: Sequence[ItemPlan], most: int) -> PipelineOutput:
        request = GenerationRequest(some, spec, sampler, sampling, max_batch=most)
        return pipe.run(pipe.prepare(request))

    alone, others = items[:timed], items[len(items[:timed]) :]
    decoded(items[:1], 1)
    began = time.perf_counter()
    parts = [decoded(alone, 1)]
    each = (time.perf_counter() - began) / len(alone)
    parts += [decoded(others[i : i + BATCH], BATCH) for i in range(0, len(others), BATCH)]
    return torch.cat([p.tokens for p in parts]), [s for p in parts for s in p.stats], each


def measured(
    pipe: Pipeline,
    items: Sequence[ItemPlan],
    spec: dict[str, Any],
    timed: int | None = None,
    reference: Tensor | None = None,
) -> list[str]:
    """Decode items: tokens per pass, accepted share, draft passes, milliseconds, and items with the
    same tokens.

    Args:
        pipe: pipeline of the modality.
        items: the items.
        spec: the sampler.
        timed: as of ``decode``.
        reference: tokens of plain autoregression, int64 [n, T]; None compares nothing.
    """
    tokens, stats, each = decode(pipe, items, spec, timed)
    per_pass = sum(s.tokens for s in stats) / sum(s.nfe for s in stats)
    rates = [s.draft_acceptance_rate for s in stats if s.draft_acceptance_rate is not None]
    passes = mean(s.draft_nfe or 0 for s in stats)
    accepted = f"{mean(rates):.3f}" if rates else ""
    same = ""
    if reference is not None and pipe.resolve(spec)[0].guarantee == "same_tokens":
        same = f"{int((tokens == reference).all(1).sum())} of {len(reference)}"
    drafted = f"{passes:.1f}" if passes else ""
    return [f"{per_pass:.2f}", accepted, drafted, f"{1000 * each:.0f}", same]


def trained_cells(folder: Path | None) -> list[str]:
    """Return parameters, minutes and alpha of a folder, as far as they are known."""
    if folder is None:
        return ["", "", ""]
    with safe_open(folder / "model.safetensors", "pt") as file:
        count = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    figures = folder.parent / "figures.json"
    known = json.loads(figures.read_text()) if figures.is_file() else {}
    return [f"{count:,}", str(known.get("minutes", "")), str(known.get("alpha", ""))]


def rows_of(pipe: Pipeline, asked: Sequence[str], untrained: Path) -> list[Row]:
    """List the rows of a modality.

    Args:
        pipe: pipeline of the modality.
        asked: trained drafters, as KIND=FOLDER.
        untrained: folder for a small model of random weights.
    """
    prompts = held_out_prompts(pipe.modality, 1)
    teacher = Teacher(pipe, prompts)
    random = Autoregressive(teacher, ModelOptions(start="none", width=32, depth=1))
    random.export(random.network(), untrained)
    rows = [Row(name, {"name": name}) for name in UNTRAINED]
    rows.append(Row("untrained model", random.sampler(untrained), untrained))
    rows.append(Row("own draft model", {"name": "speculative"}))
    rows += begun("own draft model", {"name": "speculative_jacobi", "init": "model"})
    for entry in asked:
        kind, _, folder = entry.partition("=")
        if kind not in KINDS:
            raise unknown("kind of drafter", kind, KINDS, "--drafter")
        if not (Path(folder) / "config.json").is_file():
            raise GenError(f"--drafter came with {entry!r}; expected KIND=FOLDER of a drafter")
        made = KINDS[kind](teacher, KINDS[kind].options_type())
        rows.append(Row(kind, made.sampler(Path(folder)), Path(folder)))
        if made.is_model:
            rows += begun(kind, made.initialiser(Path(folder)), Path(folder))
    return rows


def begun(name: str, spec: dict[str, Any], folder: Path | None = None) -> list[Row]:
    """List the rows of Jacobi decoding whose windows begin with drafts of a model.

    Args:
        name: the drafter.
        spec: the sampler.
        folder: folder of a trained drafter.
    """
    return [
        Row(f"{name}, init", spec, folder),
        Row(f"{name}, init until fixed", {**spec, "draft_rounds": None}, folder),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table of a command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modality")
    parser.add_argument("--model", help="name of the model (default: the modality's own)")
    parser.add_argument("--drafter", action="append", default=[], metavar="KIND=FOLDER")
    parser.add_argument("--spec", action="append", default=[], metavar="JSON")
    parser.add_argument("--only", nargs="*", help="names of the rows to print (default: all)")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument(
        "--timed", type=int, help="items that are decoded one by one and timed (default: all)"
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    pipe = load(args.modality, args.model)
    items = pipe.plan(held_out_prompts(pipe.modality, args.prompts))
    print(HEAD + "\n|" + " --- |" * HEAD.count(" | ") + " --- |")
    with tempfile.TemporaryDirectory() as folder:
        rows = rows_of(pipe, args.drafter, Path(folder) / "untrained")
        rows += [Row(text, json.loads(text)) for text in args.spec]
        reference = decode(pipe, items, REFERENCE, 1)[0]
        for row in rows:
            if args.only is None or any(row.name.startswith(name) for name in args.only):
                found = measured(pipe, items, row.spec, args.timed, reference)
                cells = trained_cells(row.folder) + found
                print(f"| `{row.name}` | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
