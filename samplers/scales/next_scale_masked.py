"""Next-scale decoding with masked refinement of HMAR (Kumbong et al., arXiv 2506.04421).

Scale k has a list of counts n_k = l_0 + ... + l_m:

    pass 0       x_i ~ fill_k,i(. | f_hat_<k) for all positions i; the l_0 highest scores stay
    pass j > 0   x_i ~ refine_k,i(. | f_hat_<k, tokens that stay) for all others; l_j of them stay

A list of one count is the pass that fills alone. ``schedule`` None refines the scales of 4 and of 9
positions, as the paper does: [1, 3] and [1, 1, 2, 5].

Scores: ``confidence``, the probability that the token was drawn with; ``halton``, a low-discrepancy
order; ``random``. Ties go to the first position. With ``conf_threshold`` all tokens of at least
that probability stay as well, and a scale may be over early.

Edits: a token that the canvas knows stays at every scale. Where a scale has known and unknown
positions, the refining pass takes the part of pass 0 with the guidance of the scale, since the
filling one sees no token of its own scale; l_j are shares of the unknown ones, rounded down.

Guarantee: none beyond the method's own; positions of one pass are independent of each other. With
``schedule`` fill, the product of the model's scales (``next_scale``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gen.core.errors import GenError, bad_value
from gen.core.params import choice, number, param
from gen.core.registry import register
from gen.core.sampler import Sampler
from gen.samplers.masked.step import highest
from gen.samplers.scales.loop import ScalesRun, check_refines, order_of

FILL = "fill"
ORDERS = ("confidence", "halton", "random")
REFINED = {4: (1, 3), 9: (1, 1, 2, 5)}  # published counts, by the positions of a scale
Schedule = tuple[tuple[int, ...], ...]


@register("sampler", "next_scale_masked")
@dataclass(frozen=True)
class NextScaleMasked(Sampler):
    """Fill a scale at once, then draw its least probable tokens again in a few passes.

    ``schedule``: counts of tokens that stay after each pass, one list per scale; ``fill`` for one
    pass per scale; None for the published counts. ``order``: which tokens stay. ``conf_threshold``:
    probability from which a token stays whatever its rank; None for none. ``refine_guidance``:
    guidance scale of the refining pass.
    """

    schedule: Any = None
    order: str = choice("confidence", ORDERS)
    conf_threshold: float | None = param(
        None, float, 0, 1, also=(None,), expected="a number from 0 to 1, or None"
    )
    refine_guidance: float = number(1.0)

    protocol = "refined_scales"
    papers = ("2506.04421",)
    reference = "one position per refining pass in the same order"
    guarantee = "approximate"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule not in (None, FILL):
            object.__setattr__(self, "schedule", read_schedule(self.schedule))

    def counts(self, lengths: Sequence[int]) -> Schedule:
        """Return the counts of scales with so many positions.

        Raises:
            GenError: the schedule is one of other scales.
        """
        if self.schedule in (None, FILL):
            usual = {} if self.schedule == FILL else REFINED
            return tuple(usual.get(n, (n,)) for n in lengths)
        sums = [sum(counts) for counts in self.schedule]
        if sums != list(lengths):
            raise GenError(
                f"sampler.schedule has lists that sum to {sums}; expected {list(lengths)}, the"
                " positions of the model's scales"
            )
        return self.schedule

    def __call__(self, target, rng, *, draft=None, canvas=None, trace=False, callback=None):
        check_refines(target, "next_scale_masked")
        counts = self.counts(target.model.quantize.lengths)
        run = ScalesRun(target, rng, canvas, trace, callback)
        while target.scale < len(counts) and not run.is_over():
            ids = run.here
            decode_scale(run, self, counts[target.scale])
            target.commit(run.tokens[:, ids])
        return run.output()


def read_schedule(schedule: Any) -> Schedule:
    """Read lists of counts. Raises ``GenError`` for anything else."""

    def is_list(x: Any) -> bool:
        return isinstance(x, (list, tuple)) and bool(x)

    counts = [n for part in schedule if is_list(part) for n in part] if is_list(schedule) else []
    whole = all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in counts)
    if not counts or not whole or not all(is_list(part) for part in schedule):
        expected = "a list of counts above 0 for every scale, such as [[1], [1, 3]], fill, or None"
        raise bad_value("sampler.schedule", schedule, expected)
    return tuple(tuple(part) for part in schedule)


def decode_scale(run: ScalesRun, params: NextScaleMasked, counts: Sequence[int]) -> None:
    """Decide the tokens of one scale in ``len(counts)`` passes at most."""
    known = run.known[:, run.here]
    hidden, drawn = ~known, run.tokens[:, run.here].clone()
    total, left = hidden.sum(1), sum(counts)
    partly_known = hidden.any(1) & known.any(1)
    for index, count in enumerate(counts):
        left -= count
        stay = (hidden.sum(1) - total * left // sum(counts)).clamp_min(1)
        open_rows = hidden.any(1)
        filling = open_rows & ~partly_known & (index == 0)
        for fills, group in ((True, filling), (False, open_rows & ~filling)):
            rows = group.nonzero()[:, 0]
            if not len(rows):
                continue
            window, some = hidden[rows], run.some(rows)
            if fills:
                output = run.target.predict(some)
            else:
                first = run.target.sampling_at(run.target.scale).guidance_scale
                guidance = params.refine_guidance if index else first
                output = run.target.refine(drawn[rows], window, guidance, some)
            drawn[rows] = run.draw(output.logprobs, index, window, rows, drawn[rows])
            logp = output.logprobs.gather(-1, drawn[rows][..., None])[..., 0]
            chosen = highest(score(run, params, logp, rows), window, stay[rows])
            if params.conf_threshold is not None:
                chosen |= window & (logp.exp() >= params.conf_threshold)
            run.record(output, window, drawn[rows], chosen, rows)
            hidden[rows] = window & ~chosen
        if bool(open_rows.any()):
            run.report()


def score(run: ScalesRun, params: NextScaleMasked, logp: Tensor, rows: Tensor) -> Tensor:
    """Score the positions of a scale, [n, n_k]; the highest stay.

    Args:
        run: the run.
        params: the sampler.
        logp: log-probability of the token of each position, [n, n_k].
        rows: rows of these, long [n].
    """
    if params.order == "confidence":
        return logp
    if params.order == "random":
        return run.rng.uniform(rows, run.positions[rows], "order", None)
    sides = run.target.model.quantize.sides[run.target.scale]
    return -order_of("halton", sides, logp.device).expand_as(logp).double()
