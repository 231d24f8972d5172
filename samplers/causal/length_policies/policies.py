"""Length policies: how many tokens a draft model drafts in a round.

constant            ``num_speculative_tokens`` drafts
auto                as many drafts as make the time per token least (``gen.samplers.engine.window``)
heuristic           two drafts more after a round in which all were accepted, one fewer after any
                    other; from 1 to 4 times ``num_speculative_tokens``. The rule of transformers'
                    assisted generation
confidence          none after a draft whose own probability q(x) is below ``confidence_threshold``;
                    the doubtful draft itself is submitted
joint_confidence    stop after draft n where 1 - c_1 c_2 ... c_n > rejection_threshold, n >=
                    least_drafts. c_i estimates the probability that draft i is accepted if those
                    before it are. The paper trains a head of the draft model for it
                    (``specdec_pp``); here it is a probability that the draft model has: of the
                    draft, or of its most probable token. Draft n itself is submitted. Huang et al.,
                    "SpecDec++: Boosting Speculative Decoding via Adaptive Candidate Lengths" (arXiv
                    2405.19715), whose code has a threshold of 0.3 and between 2 and 20 drafts
batch_size          a table of numbers of rows, "1-4:5,5-16:3,17-:1": five drafts for up to four
                    rows, one for 17 and more. Drafts of many rows fill the device that a few rows
                    leave idle. vLLM calls it ``num_speculative_tokens_per_batch_size``. Another
                    batch draws another sample of the same distribution, and a seed has to mean the
                    same result in any batch, so that it asks for a verifier whose tokens do not
                    depend on the drafts, such as ``follow``
acceptance_average  one of a few lengths, by a moving average of the drafts that were accepted:

                        a <- (1 - w) a + w n     n: drafts of the row that were accepted in a round
                        up a tier    while a > k - 0.5                 k: drafts of the tier
                        down a tier  while a <= k' - 0.5 - 0.25        k': drafts of the tier below

                    The first ``length_warmup`` rounds keep the first tier; then every
                    ``length_interval``-th round chooses anew. The quarter keeps a row from going
                    back and forth. The first tier is the largest of at most
                    ``num_speculative_tokens`` drafts. The adaptive speculation of SGLang, which has
                    one average for the batch; here every row has its own, so that a row's drafts do
                    not depend on the others

``@register("length_policy", name, params=...)`` on a subclass in one file is all that a new one
takes; the sampler ``speculative`` then accepts ``policy: name``, and the parameters of the policy.

Guarantee: that of the verifier. Whether a token is drafted depends on the drafts before it and on
rounds that are over, never on itself: the last draft is submitted, doubtful or not. Dropping it
once its value is known would bias the distribution.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from math import inf

import numpy as np
import torch
from torch import Tensor

from gen.core.errors import bad_value
from gen.core.method import method
from gen.core.params import Params, choice, integer, number, text
from gen.core.registry import register
from gen.samplers.causal.length_policies.base import LengthPolicy
from gen.samplers.engine.rows import RowState

ROWS = (
    "ranges of rows that follow each other from 1 on, the last one open, with their drafts, such"
    " as '1-4:5,5-16:3,17-:1'"
)
HALF, DOWN = 0.5, 0.25  # of a draft, between the averages of two tiers


@register("length_policy", "constant")
class Constant(LengthPolicy):
    """Same number of drafts in every step."""


@register("length_policy", "heuristic")
class Heuristic(LengthPolicy):
    """Number of drafts that follows what was accepted, row by row."""

    def observe(self, drafted, accepted):
        changed = self.lengths + np.where(accepted == drafted, 2, -1)
        self.lengths = changed.clip(1, 4 * self.length)


@dataclass(frozen=True)
class ConfidenceParams(Params):
    """Parameters of the policy.

    Attributes:
        confidence_threshold: probability of a draft below which drafting ends.
    """

    confidence_threshold: float = number(0.4, most=1)


@register("length_policy", "confidence", params=ConfidenceParams)
class Confidence(LengthPolicy):
    """Stop after the first draft that the draft model itself finds unlikely."""

    needs_probability = True
    stops_early = True

    def stop(self, mass, logprobs):
        return mass < self.params.confidence_threshold


@dataclass(frozen=True)
class JointConfidenceParams(Params):
    """Parameters of the policy.

    Attributes:
        rejection_threshold: probability of a rejection above which drafting ends.
        confidence_of: probability that stands for a draft's acceptance, that of the draft or of the
            most probable token.
        least_drafts: minimum number of drafts.
    """

    rejection_threshold: float = number(0.3, most=1)
    confidence_of: str = choice("draft", ("draft", "most_probable"))
    least_drafts: int = integer(2, least=1)


@method(
    "specdec_pp",
    sampler="speculative",
    about="SpecDec++: drafting stops where a rejection has become likely; probabilities of the"
    " draft model stand for the paper's trained head",
    paper="2405.19715",
    title="SpecDec++: Boosting Speculative Decoding via Adaptive Candidate Lengths",
    params={"policy": "joint_confidence", "num_speculative_tokens": 20},
)
@register("length_policy", "joint_confidence", params=JointConfidenceParams)
class JointConfidence(LengthPolicy):
    """Stop where the drafts so far are unlikely to be all accepted."""

    needs_probability = True
    stops_early = True

    def begin(self):
        self._log_kept: Tensor | None = None  # log of c_1 ... c_n, [b]
        self._count = 0

    def log_chance(self, mass: Tensor, logprobs: Tensor) -> Tensor:
        """Estimate log c_n, [b], of the newest draft; arguments as in ``stop``."""
        return mass.log() if self.params.confidence_of == "draft" else logprobs.amax(-1)

    def stop(self, mass, logprobs):
        log_c = self.log_chance(mass, logprobs)
        self._log_kept = log_c if self._log_kept is None else self._log_kept + log_c
        self._count += 1
        if self._count < self.params.least_drafts:
            return None
        return -torch.expm1(self._log_kept) > self.params.rejection_threshold


@dataclass(frozen=True)
class BatchSizeParams(Params):
    """Parameters of the policy.

    Attributes:
        drafts_by_rows: ranges of rows and their drafts, joined by commas.
    """

    drafts_by_rows: str = text("1-4:5,5-16:3,17-:1", ROWS)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.table()

    def table(self) -> list[tuple[int, int]]:
        """Return the first number of rows of each range, and its drafts."""
        entries = self.drafts_by_rows.split(",")
        found = [re.fullmatch(r"\s*(\d+)-(\d*):(\d+)\s*", entry) for entry in entries]
        ranges = [(int(m[1]), int(m[2]) if m[2] else inf, int(m[3])) for m in found if m]
        ends = [0, *(last for _, last, _ in ranges)]
        follow = all(first == end + 1 for (first, _, _), end in zip(ranges, ends, strict=False))
        some = all(first <= last for first, last, _ in ranges)
        if len(ranges) < len(entries) or not follow or not some or ends[-1] != inf:
            raise bad_value("sampler.drafts_by_rows", self.drafts_by_rows, ROWS)
        return [(first, drafts) for first, _, drafts in ranges]


@register("length_policy", "batch_size", params=BatchSizeParams)
class BatchSize(LengthPolicy):
    """Number of drafts chosen by the number of active rows."""

    needs_same_tokens = True

    def __init__(self, rows, length, params):
        super().__init__(rows, length, params)
        self.table = params.table()

    @property
    def most(self):
        rows = len(self.lengths)
        drafts = [k for first, k in self.table if first <= rows][-1] if rows else 0
        # rows may have left since the last step
        self.lengths = np.full(rows, drafts)
        return drafts


@dataclass(frozen=True)
class AcceptanceAverageParams(Params):
    """Parameters of the policy.

    Attributes:
        length_tiers: drafts of a round to choose from, upwards, joined by commas.
        acceptance_weight: weight of the newest round in the average.
        length_warmup: rounds that keep the first tier.
        length_interval: rounds from one choice to the next.
    """

    length_tiers: str = text("1,3,7", "numbers of drafts, upwards, such as '1,3,7'")
    acceptance_weight: float = number(0.2, most=1)
    length_warmup: int = integer(10)
    length_interval: int = integer(5, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tiers()

    def tiers(self) -> list[int]:
        """Return the numbers of drafts."""
        parts = self.length_tiers.split(",")
        known = [int(x) for x in parts if x.strip().isdigit()]
        upwards = all(a < b for a, b in pairwise(known))
        if len(known) < len(parts) or not upwards or known[0] < 1:
            expected = "numbers of drafts, upwards and at least 1, such as '1,3,7'"
            raise bad_value("sampler.length_tiers", self.length_tiers, expected)
        return known


@register("length_policy", "acceptance_average", params=AcceptanceAverageParams)
class AcceptanceAverage(LengthPolicy):
    """Length that follows a moving average of what was accepted, row by row."""

    average = RowState(start=lambda policy: policy.length - 1.0)  # [b]
    rounds = RowState(start=0)  # int64 [b]

    def __init__(self, rows, length, params):
        tiers = params.tiers()
        first = max([k for k in tiers if k <= length], default=tiers[0])
        super().__init__(rows, first, params)
        self.tiers = np.array(tiers)
        self.average, self.rounds = np.full(rows, first - 1.0), np.zeros(rows, dtype=np.int64)

    def observe(self, drafted, accepted):
        params, told = self.params, drafted > 0  # without drafts nothing is told
        weight = params.acceptance_weight
        new = (1 - weight) * self.average + weight * accepted
        self.average = np.where(told, new, self.average)
        self.rounds = self.rounds + told
        late = self.rounds - params.length_warmup
        due = told & (late > 0) & (late % params.length_interval == 0)
        at, average = np.searchsorted(self.tiers, self.lengths), self.average[:, None]
        least, most = ((average > self.tiers - gap).sum(1) for gap in (HALF, HALF + DOWN))
        at = np.where(due, at.clip(least, most), at)
        self.lengths = self.tiers[at.clip(max=len(self.tiers) - 1)]
