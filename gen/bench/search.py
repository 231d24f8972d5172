"""Searches at equal cost, ``gen bench MODALITY --protocol search``.

Every search gets the forward passes of 1, 2, 4 and 8 samples of the same base, a masked one, and is
judged by what it steers by and by what it does not:

    reward           of the outputs; the mean of all items
    gain             mean difference to best of n of the same size, item by item
    log-likelihood   mean log-probability per token under the modality's causal model: a reward that
                     rises while this falls is over-optimised
    prompt accuracy  share of the outputs that pass the modality's checker

The passes of all candidates are counted. Rewards differ in their units: each is divided by the
standard deviation of the base's own samples before it becomes a weight.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from gen.bench.curve import put_page
from gen.bench.measure import prompts_of
from gen.bench.plots import COLOURS, Axis, Point, axis, panel
from gen.bench.report import ALL, deliver, machine
from gen.bench.table import laid_out
from gen.bench.variants import model_options
from gen.contracts.scorer import read_scorer
from gen.core.errors import GenError
from gen.core.resolve import spell
from gen.pipeline.output import PipelineOutput
from gen.pipeline.request import GenerationRequest

SIZES = (1, 2, 4, 8)  # samples whose passes a search gets
SHARPNESS = 1.0  # standard deviations of the reward that weigh as much as a factor e
BASE = "maskgit"
REFERENCE = "best_of"
# modality -> scorer, and forward passes between two decisions
REWARDS: dict[str, tuple[str, int]] = {
    "image": ("red_area", 1),
    "speech": ("pitch", 6),
    "video": ("travel", 8),
    "motion": ("foot_skate", 2),
    "action": ("goal_distance", 1),
    "text": ("checker", 1),
}
COLUMNS = ["search", "samples", "passes", "reward", "gain", "log-likelihood", "accuracy"]
REFUSED = ("oracle", "peers", "samplers", "sweep")  # flags of other protocols
ABOUT = """Every search gets the forward passes of 1, 2, 4 and 8 samples of the same base, those of
all candidates counted. Bars are standard errors over the items. The log-likelihood is that of the
modality's causal model; a reward that rises while it falls is over-optimised."""


def searches(size: int, block: int, unit: float) -> dict[str, dict[str, Any]]:
    """Return the searches that cost as much as so many samples.

    Args:
        size: number of samples, candidates per step, or particles.
        block: forward passes between two decisions.
        unit: difference of the reward that weighs as much as a factor e.
    """
    temperature, steered = {"alpha": unit}, {"block": block}
    return {
        REFERENCE: {"n": size},
        "svdd": {"m": size, **temperature, **steered},
        "svdd_greedy": {"m": size, **steered},
        "smc": {"particles": size, "lam": 1 / unit, **steered},
        "fk": {"particles": size, "lam": 1 / unit, **steered},
        "iad": {"n": 1, "rounds": size},
    }


def bench_search(args: argparse.Namespace, load: Callable[..., Any]) -> int:
    """Carry out the protocol; return the exit code.

    Raises:
        GenError: a flag belongs to another protocol, or the modality has no reward or no models.
    """
    given = [flag for flag in REFUSED if getattr(args, flag)]
    if given or args.modality == ALL:
        what = f"--{given[0]}" if given else f"gen bench {ALL}"
        raise GenError(f"{what} is given with --protocol search; expected it with another protocol")
    if args.modality not in REWARDS:
        expected = ", ".join(REWARDS)
        raise GenError(f"--protocol search has no reward for {args.modality}; expected {expected}")
    said = model_options(args)
    pipe = load(args.modality, **said)
    prompts = prompts_of(pipe.modality, args.modality, args.prompts, args.seed)
    rows = measured(pipe, args.modality, prompts, args.repeats, args.seed)
    report = {
        "protocol": "search", "modality": args.modality, **said, "seed": args.seed,
        "repeats": args.repeats, "prompts": prompts, "machine": machine(pipe.device),
        "reward": REWARDS[args.modality][0], "table": rows,
    }  # fmt: skip
    text = render(rows, args.markdown)
    if args.gallery:
        title = f"gen bench {args.modality} --protocol search"
        page = put_page(Path(args.gallery), title, ABOUT, drawn(rows, REWARDS[args.modality][0]))
        text += f"\ngallery: {page}"
    deliver(args, report, text)
    return 0


def measured(
    pipe: Any, modality: str, prompts: Sequence[str], repeats: int, seed: int
) -> list[dict[str, Any]]:
    """Measure all searches: a row for each and each size.

    Args:
        pipe: pipeline of the modality.
        modality: its name.
        prompts: the prompts; each is sampled ``repeats`` times.
        repeats: samples per prompt.
        seed: seed of the first of them.
    """
    reward, block = REWARDS[modality]
    likelihood = {"name": "log_likelihood", "model": pipe.modality.models["causal"]}
    more = {"num_samples": repeats, "seed": seed, "progress": False}
    plain = scores_of(pipe, pipe(prompts, BASE, **more), reward)
    unit = SHARPNESS * float(plain.std()) or 1.0
    rows = []
    for size in SIZES:
        for name, params in searches(size, block, unit).items():
            spec = {"name": name, "base": BASE, "scorer": reward, **params}
            out = pipe(prompts, spec, **more)
            rewards = scores_of(pipe, out, reward)
            plain = rewards if name == REFERENCE else plain
            logp = scores_of(pipe, out, likelihood)
            pairs = zip(out.media, out.items, strict=True)
            passed = [pipe.modality.check(media, item.prompt).passed for media, item in pairs]
            rows.append(
                {
                    "search": name,
                    "samples": size,
                    "passes": float(np.mean([s.nfe for s in out.stats])),
                    **mean_of("reward", rewards),
                    **mean_of("gain", rewards - plain),
                    **mean_of("log-likelihood", logp),
                    "accuracy": float(np.mean(passed)),
                }
            )
    return rows


def mean_of(name: str, values: np.ndarray) -> dict[str, float]:
    """Return the mean of some values and its standard error, under their names."""
    return {
        name: float(values.mean()),
        f"{name}_error": float(values.std() / len(values) ** 0.5),
    }


def scores_of(pipe: Any, out: PipelineOutput, scorer: Any) -> np.ndarray:
    """Score the outputs of a call: float64 [N]."""
    spec = {"name": "best_of", "base": spell(out.spec).get("base", out.spec)}
    request = GenerationRequest(out.items, spec, *pipe.resolve(spec, out.sampling))
    evaluator = pipe.prepare(request).target.evaluator
    tokens = out.tokens.to(pipe.device)
    return evaluator.scores(read_scorer(scorer), tokens, np.arange(len(tokens)))


def render(rows: Sequence[Mapping[str, Any]], markdown: bool) -> str:
    """Lay the rows out as a table."""
    cells = [
        [
            f"`{row['search']}`" if markdown else row["search"],
            str(row["samples"]),
            f"{row['passes']:.1f}",
            *(f"{row[key]:.4g} ± {row[f'{key}_error']:.2g}" for key in COLUMNS[3:6]),
            f"{row['accuracy']:.3f}",
        ]
        for row in rows
    ]
    return laid_out([COLUMNS, *cells], markdown)


def drawn(rows: Sequence[Mapping[str, Any]], reward: str) -> str:
    """Draw reward and log-likelihood against forward passes."""
    names = list(dict.fromkeys(row["search"] for row in rows))
    colours = dict(zip(names, COLOURS, strict=False))
    x = axis([row["passes"] for row in rows], "forward passes per item", log=True)
    panels = []
    for key, title in (("reward", reward), ("log-likelihood", "log-likelihood per token")):
        low = min(row[key] - row[f"{key}_error"] for row in rows)
        high = max(row[key] + row[f"{key}_error"] for row in rows)
        margin = 0.08 * (high - low) or 1.0
        y = Axis(low - margin, high + margin, "", "{:.2g}".format)  # the title names it
        points = [
            Point(
                row["passes"],
                row[key],
                row["search"] if row["samples"] == max(SIZES) else "",
                f"{row['search']}, {row['samples']} samples: {row[key]:.4g}",
                colours[row["search"]],
                (row[key] - row[f"{key}_error"], row[key] + row[f"{key}_error"]),
                line=row["search"],
            )
            for row in rows
        ]
        panels.append(panel(title, points, x, y))
    marks = "".join(
        f'<li><i class="circle" style="--c: {colours[name]}"></i>{escape(name)}</li>'
        for name in names
    )
    return f'<div class="panels">{"".join(panels)}</div><ul class="legend">{marks}</ul>'
