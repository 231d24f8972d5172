"""ATTS: a draft model draws the samples, and the target model redraws those that a conformal test
rejects.

    s(x)   score of a draft: mean log p_target(x_t | x_<t) of its tokens, or that of ``value``
    p(x)   (1 + #{c in calibration: c <= s(x)}) / (1 + m)      m calibration scores
    reject where p(x) <= alpha: the target draws that sample anew;   out = aggregation of all n

A draft that is exchangeable with the calibration set is rejected with probability at most alpha,
exactly floor(alpha (m + 1)) / (m + 1) where no scores tie, whatever the distribution of scores. The
calibration set of ``python -m gen.recipes.text.calibrate`` are right drafts of training tasks, so a
right draft is kept with probability 1 - alpha.

All drafts of an item are scored in one forward pass of the target each. Drafts and redrawn samples
have noise of their own.

Reference: Xiong et al., "ATTS: Asynchronous Test-Time Scaling via Conformal Prediction" (arXiv
2509.15148). Theirs calibrates online, runs asynchronously and lets the target go on from a draft;
here the set is given and a rejected sample is drawn anew.
Guarantee: approximate, relative to n samples of the target.
Parameters: ``n``, ``alpha``, ``calibration`` (scores, or the folder that holds them), ``threshold``
(instead: the least score that is kept), ``value``, ``draft_model``, ``aggregation``, ``budget``: an
item that has spent it keeps its drafts.
Preset: none; its name is the sampler's.
Limit: alpha = 1 is ``best_of`` of the target with the same aggregation, and n = 1 then ``base``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gen.contracts.scorer import read_scorer
from gen.core.errors import GenError, bad_type, bad_value
from gen.core.params import integer, number, param
from gen.core.registry import register
from gen.core.stats import SampleOutput, Stats
from gen.models.load.locate import locate
from gen.samplers.search.aggregations.base import read_aggregation
from gen.samplers.search.base import Particles, Search, SearchSampler, num_tokens
from gen.samplers.search.best_of import collect
from gen.samplers.search.progress import Progress
from gen.samplers.search.rounds import draw

FILE = "config.json"


@register("sampler", "atts")
@dataclass(frozen=True)
class ATTS(SearchSampler):
    """Keep the draft model's samples that pass a conformal test, and redraw the others.

    ``n``: samples. ``alpha``: probability of rejecting a draft like those of the calibration set.
    ``calibration``: scores, or the folder that holds them. ``threshold``: least score that is kept,
    instead of a calibration. ``value``: scorer of drafts; None for the target's likelihood.
    ``draft_model``: name of the draft model; None for the modality's own. ``aggregation``: rule
    that chooses among the samples.
    """

    n: int = integer(4, least=1, each="row")
    alpha: float = number(0.05, most=1.0)
    calibration: Any = None
    threshold: float | None = param(None, float, also=(None,))
    value: Any = None
    draft_model: str | None = None
    aggregation: Any = "majority"

    papers = ("2509.15148",)
    reference = "n samples of the target"

    def __post_init__(self) -> None:
        super().__post_init__()
        read_aggregation(self.aggregation)
        if self.value is not None:
            read_scorer(self.value, "sampler.value")
        if self.inner.drafted or self.inner.wraps or self.inner.protocol != "causal":
            raise GenError(
                f"sampler.base {self.base['name']!r} cannot run on a draft model; expected a causal"
                " sampler without a draft model, such as 'autoregressive'"
            )
        if self.calibration is not None and self.threshold is not None:
            raise GenError("sampler.calibration and sampler.threshold came; expected one of them")
        if self.calibration is not None:
            self.least_score()

    @property
    def drafted(self) -> bool:
        return True

    @property
    def draft_names(self) -> tuple[str | None, ...]:
        return (self.draft_model,)

    def least_score(self) -> float:
        """Return the score above which a draft is kept; at a threshold, with it.

        Raises:
            GenError: there is neither a calibration nor a threshold.
        """
        if self.threshold is not None:
            return float(np.nextafter(self.threshold, -np.inf))
        if self.calibration is None:
            raise GenError(
                "sampler.calibration is None, and sampler.threshold too; expected scores, or a"
                " folder made by python -m gen.recipes.text.calibrate"
            )
        return critical_score(read_calibration(self.calibration), self.alpha)

    def __call__(self, target, rng, *, draft=None, canvas=None, trace=False, callback=None):
        least, progress = self.least_score(), Progress(callback, 2)
        search = Search(self, target, rng)
        every = np.arange(target.items)
        # noise that the test has seen is not used again: drafts have branches behind the target's
        branches = np.tile(np.arange(self.n, 2 * self.n), (len(every), 1))
        told = progress.watch(self.inner, np.repeat(every, self.n))
        owners, drafts = self.drafts(search, told, draft, every, branches, trace)
        rejected = self.scores(search, owners, drafts.tokens) <= least
        rejected &= search.has_budget()[owners]
        which = rejected.nonzero()[0]
        if len(which):
            told = progress.watch(self.inner, owners[which])
            _, redrawn = draw(search, told, owners[which], (which % self.n)[:, None], trace=trace)
            tokens, traces = drafts.tokens.clone(), drafts.traces
            tokens[torch.from_numpy(which).to(tokens.device)] = redrawn.tokens
            if traces is not None and redrawn.traces is not None:
                for row, steps in zip(which.tolist(), redrawn.traces, strict=True):
                    traces[row] = steps
            drafts = replace(drafts, tokens=tokens, traces=traces)
        rule = read_aggregation(self.aggregation)
        out = collect(search, [(owners, drafts)], trace, rule)
        self.label(out, rejected)
        return out

    def drafts(
        self, search: Search, told: Any, draft: Any, items: np.ndarray, branches, trace: bool
    ) -> tuple[np.ndarray, SampleOutput]:
        """Draw the draft model's samples, whose passes count as those of a draft model."""
        made = Particles(search.target, search.rng, draft, None, items, branches)
        out = told(made.draft, made.rng, trace=trace)
        costs = [Stats(0, 0, 0, 0, 0.0, draft_nfe=s.nfe, seconds=s.seconds) for s in out.stats]
        search.add_costs(made.owners, costs)
        return made.owners, out

    def scores(self, search: Search, owners: np.ndarray, tokens: torch.Tensor) -> np.ndarray:
        """Score drafts: float64 [n]."""
        if self.value is not None:
            scorer = read_scorer(self.value, "sampler.value")
            return search.scores(tokens, owners, scorer=scorer)
        target = search.target
        if target.space.channels:
            raise GenError(
                "sampler.value is None, and the likelihood is that of tokens, not of latents;"
                " expected a scorer"
            )
        found, stats = likelihood(target.of_items(owners), tokens)
        search.add_costs(owners, stats)
        return found

    def label(self, out: SampleOutput, rejected: np.ndarray) -> None:
        """Say of every candidate which model drew it."""
        words = np.where(rejected, "target", "draft").reshape(-1, self.n)
        out.candidates = [
            [replace(c, label=str(word)) for c, word in zip(found, some, strict=True)]
            for found, some in zip(out.candidates or [], words, strict=True)
        ]


def likelihood(target: Any, tokens: torch.Tensor) -> tuple[np.ndarray, list[Stats]]:
    """Score outputs by their mean log-probability per token, in one forward pass.

    Args:
        target: causal target of n items, fresh.
        tokens: long [n, T].

    Returns:
        Float64 [n], up to and including the eos token, and the cost of each.
    """
    count = np.asarray(num_tokens(tokens, target))
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand(len(tokens), -1)
    before = torch.cat([tokens[:, :1], tokens[:, :-1]], 1)
    output = target.predict(before, positions)
    logp = output.logprobs.gather(-1, tokens[..., None])[..., 0].double().cpu().numpy()
    counted = np.arange(tokens.shape[1]) < count[:, None]
    total = np.where(counted, logp, 0.0).sum(1)
    computed = np.broadcast_to(output.num_computed_tokens, len(tokens))
    positions_computed = np.broadcast_to(output.num_computed_positions, len(tokens))
    stats = [
        Stats(1, 0, int(c), int(p), 0.0) for c, p in zip(computed, positions_computed, strict=True)
    ]
    # a token of probability 0 is the least typical there is, and a score is finite
    return np.maximum(total / count, np.finfo(np.float64).min), stats


def p_value(calibration: np.ndarray, score: float) -> float:
    """Return the conformal p-value of a score among calibration scores, float64 [m]."""
    return (1 + int((calibration <= score).sum())) / (1 + len(calibration))


def critical_score(calibration: np.ndarray, alpha: float) -> float:
    """Return the highest score whose p-value is at most alpha: drafts up to it are rejected.

    It is minus infinity where none is, and infinity where all are.
    """
    rejected = int(np.floor(alpha * (len(calibration) + 1) + 1e-9)) - 1
    ordered = np.sort(calibration)
    if rejected < 0:
        return -np.inf
    if rejected >= len(ordered):
        return np.inf
    # so many calibration scores may lie at or below it: it lies just below the next one
    return float(np.nextafter(ordered[rejected], -np.inf))


def read_calibration(spec: Any) -> np.ndarray:
    """Return calibration scores, float64 [m].

    Args:
        spec: the scores, or the name or folder of a file of them.

    Raises:
        GenError: there are none, or one is not finite.
    """
    if isinstance(spec, str):
        file = Path(locate(spec, "calibration")) / FILE
        try:
            spec = json.loads(file.read_text(encoding="utf-8"))["scores"]
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise GenError(f"calibration {file} cannot be read: {error}") from None
    if not isinstance(spec, (Sequence, np.ndarray)):
        raise bad_type("sampler.calibration", spec, "scores, or the folder that holds them")
    try:
        scores = np.asarray(spec, dtype=np.float64)
    except (TypeError, ValueError):
        scores = np.empty(0)
    if scores.ndim != 1 or not len(scores) or not np.isfinite(scores).all():
        raise bad_value("sampler.calibration", spec, "at least one finite score")
    return scores


def save_calibration(folder: Path, scores: np.ndarray) -> None:
    """Write calibration scores to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"model_type": "calibration", "scores": np.sort(scores).round(6).tolist()}
    (folder / FILE).write_text(json.dumps(content) + "\n", encoding="utf-8")
