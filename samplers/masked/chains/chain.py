"""Chains of drafts for masked models: what their lossless decoders share.

S(x): the k masked positions of canvas x with the highest score under the distributions p(. | x),
found before any token is drawn. Sequential decoding commits S(x), computes p at the new canvas, and
so on. A chain runs ahead of it:

    chain     x_0 = x, the committed canvas; x_j = x_j-1 and k more tokens, drawn from a
              distribution q that is known before the forward pass, at the positions that q orders
              next
    predict   p(. | x_0), ..., p(. | x_n), n < num_drafts, for all rows of the batch in one forward
              pass
    judge     for j = 0, 1, ...: is S(x_j) the positions of the next draft, and does the method
              accept its tokens under p(. | x_j)? Stop at the first no
    commit    the accepted drafts, and tokens at S(x_j) for the j where it stopped, whose
              distribution is there already. The next chain has q = p(. | x_j)

So every forward pass commits at least k positions (the last one the rest), and there are never more
passes than in sequential decoding. The order is decided before the tokens of a draft are looked at:
a draft that is dropped for its position says nothing about its tokens, which keeps the
distribution. An order that looked at drawn tokens could not be decided first, so it is refused;
with noise of the position it would change the distribution even without any drafts.

Orders: ``confidence`` (or ``top``, the highest probability of a position; nothing is drawn yet that
it could be the probability of), ``margin``, ``entropy``, and those that read no distribution:
``random``, ``halton`` and ``raster`` (``gen.samplers.masked.parts.orders``). ``confidence_on``: at
temperature 0 the final distribution is one token everywhere, and all positions are equally sure;
then only the ``raw`` distribution can order them.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gen.core.distributions import has_no_distribution
from gen.core.errors import GenError, bad_value, unknown
from gen.core.params import choice, integer
from gen.core.registry import registry
from gen.core.rng import RNG
from gen.core.sampler import Sampler, require_constraint_kept
from gen.core.stats import SampleOutput
from gen.models.targets.base import StepOutput
from gen.samplers.engine.draft import Draft
from gen.samplers.engine.rows import RowStore
from gen.samplers.engine.stats import Counts, StatsRecorder
from gen.samplers.engine.step_context import StepContext
from gen.samplers.masked.batch import CanvasBatch, begin_batch, outcome_of, report
from gen.samplers.masked.parts.orders import BLIND
from gen.samplers.masked.step import CanvasView, MaskedStep, Prediction, ranked

ORDERS = ("confidence", "top", "margin", "entropy", *BLIND)


def marginal_order(name: str) -> Any:
    """Look up an order, a function of a ``MaskedStep``, by its name.

    Raises:
        GenError: the order is unknown or reads drawn tokens.
    """
    if name in ORDERS:
        return registry.get("order", "top" if name == "confidence" else name)
    if isinstance(name, str) and name in registry.table("order"):
        raise bad_value(
            "sampler.order",
            name,
            f"an order that does not look at the tokens drawn: {', '.join(ORDERS)}",
        )
    raise unknown("order", name, ORDERS, "sampler.order")


@dataclass(frozen=True)
class ChainSampler(Sampler):
    """Method of judging chains, with the parameters that all of them have.

    Attributes:
        num_drafts: canvases per row and forward pass.
        order: order of the positions, one of ``ORDERS``.
        confidence_on: distribution that the order reads: ``raw``, the model's own, or ``shaped``,
            with temperature and filters.
    """

    num_drafts: int = integer(4, least=1, each="row")
    order: str = "confidence"
    confidence_on: str = choice("raw", ("raw", "shaped"))

    protocol = "masked"
    kinds = ("codes",)
    reference = "one position per step in the same order"

    def __post_init__(self) -> None:
        super().__post_init__()
        marginal_order(self.order)  # which refuses an unknown one

    @property
    def width(self) -> int:
        """k, positions per step."""
        return 1

    @property
    def constraint_refusal(self) -> str:
        """Reason of chains with several positions per step, which nothing checks together."""
        if self.width == 1:
            return ""
        return f"it draws {self.width} positions per step from one distribution"

    @abstractmethod
    def draft(self, step: StepContext, logprobs: Tensor) -> Tensor:
        """Draw drafts.

        Args:
            step: ``step.positions`` [b, L] are those of the drafts, ``step.valid`` [b, L] those
                that exist.
            logprobs: distribution at these positions, [b, L, V].

        Returns:
            Tokens [b, L].
        """

    @abstractmethod
    def judge(self, step: StepContext, drafts: Draft, logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """Decide how many steps of a chain are accepted.

        Args:
            step: ``step.positions`` [b, L] are those of the drafts; ``step.valid`` [b, L] those
                that are next in order if the ones before them are accepted.
            drafts: L = n k of them, n at least 1.
            logprobs: distribution of each position given the drafts before its step, [b, L, V].

        Returns:
            Accepted steps [b]; and a token for the draft after them [b], or -1 to have one drawn
            from the distribution at the positions next in order. A token needs k = 1.
        """

    def __call__(
        self, target, rng, *, draft=None, canvas: Tensor | None = None, trace=False, callback=None
    ):
        """Decode every item of the target; see ``Sampler``."""
        return decode_chains(target, rng, self, canvas=canvas, trace=trace, callback=callback)


def decode_chains(
    target,
    rng: RNG,
    method: ChainSampler,
    *,
    canvas: Tensor | None = None,
    trace: bool = False,
    callback: Callable | None = None,
) -> SampleOutput:
    """Fill the masked positions of a canvas by chains of drafts.

    Args:
        target: masked model of token ids with its prompts.
        rng: random numbers by item and position.
        method: the sampler, which drafts and judges.
        canvas: tokens long [N, T], masked where one is wanted; None: masked everywhere.
        trace: whether to record the positions of every step.
        callback: called after every step with what ``report`` returns.

    Raises:
        GenError: the target makes latents or has no mask token, or its space does not allow the
            canvas.
    """
    began, recorder = time.perf_counter(), StatsRecorder(target.items, trace)
    run = begin_chains(target, rng, method, canvas)
    while len(run.batch.slots):
        chain = draft(run)  # 1. draft
        views = view_canvases(run, chain)  # 2. canvas views
        output = target.predict(views.canvases, views.row)  # 3. predict
        order = order_positions(run, views, output)  # 4. score
        verdict = judge(run, chain, views, order, output)  # 5. judge
        commit(run, chain, views, order, output, verdict)  # 6. commit
        record(recorder, run, chain, views, output, verdict)  # 7. record
        failed = failed_positions(views, order, output, verdict)
        run.batch.retire(outcome_of(~run.batch.masked.any(1), failed))  # 8. retire
        if callback:
            callback(report(run.batch, ~target.space.is_masked(run.batch.canvas)))
    seconds = time.perf_counter() - began
    return recorder.output(run.batch.canvas, seconds, run.batch.num_masked.tolist())


@dataclass(frozen=True)
class ChainRun:
    """State of one call of the loop.

    Attributes:
        batch: canvases and rows. Its memory has ``logprobs`` [b, T, V] and ``score`` [b, T] of the
            canvas where each chain stopped, and ``begins`` bool [b], rows that have none yet.
        rng: random numbers by item and position.
        method: the sampler.
    """

    batch: CanvasBatch
    rng: RNG
    method: ChainSampler


@dataclass(frozen=True)
class Chain:
    """Drafts of b rows, n steps of k tokens.

    Attributes:
        positions: positions of the drafts, long [b, n, k].
        tokens: drafted tokens, long [b, n, k].
        logq: distribution that each draft is from, [b, n k, V].
        steps: steps that each row has, long [b]; later ones mean nothing.
    """

    positions: Tensor
    tokens: Tensor
    logq: Tensor
    steps: Tensor


@dataclass(frozen=True)
class ChainViews:
    """Canvases x_0, ..., x_n of all rows, m of which exist.

    Attributes:
        chained: canvases along each chain, long [b, n + 1, T].
        exists: bool [b, n + 1].
        canvases: those that exist, long [m, T].
        row: row of each of them, long [m].
        index: which of the m canvases x_j of a row is, long [b, n + 1]; 0 where it does not exist.
    """

    chained: Tensor
    exists: Tensor
    canvases: Tensor
    row: Tensor
    index: Tensor


@dataclass(frozen=True)
class MarginalOrder:
    """Order of the masked positions of m canvases.

    Attributes:
        score: float64 [m, T].
        masked: bool [m, T].
        next_positions: S of every canvas, long [m, k].
    """

    score: Tensor
    masked: Tensor
    next_positions: Tensor


@dataclass(frozen=True)
class ChainVerdict:
    """Outcome of the judge.

    Attributes:
        accepted: accepted steps, long [b].
        token: token for the draft after them, or -1 to draw one at the next positions, long [b].
    """

    accepted: Tensor
    token: Tensor


def begin_chains(target, rng: RNG, method: ChainSampler, canvas: Tensor | None) -> ChainRun:
    """Check the target and give the first items a row; see ``decode_chains``."""
    if target.space.channels:
        raise GenError(
            f"{type(method).__name__} compares probabilities of tokens; this model makes latents,"
            " which have none; expected a model of token ids"
        )
    if target.space.mask_token_id is None:
        raise GenError(
            f"{type(method).__name__} needs a token space with a mask token; this model has none"
        )
    require_constraint_kept(method, target.space)
    batch = begin_batch(target, canvas)
    b, device = len(batch.slots), target.device
    batch.memory["logprobs"] = torch.zeros(b, 0, target.legal.shape[1], device=device)
    batch.memory["score"] = torch.zeros(b, target.length, dtype=torch.float64, device=device)
    batch.memory["begins"] = torch.ones(b, dtype=torch.bool, device=device)
    return ChainRun(batch, rng, method)


def draft(run: ChainRun) -> Chain:
    """Draw the chain of every row from the distribution where its last chain stopped.

    Rows that begin have no distribution yet and get no drafts. The last step of a canvas is never
    drafted: nothing comes after it.
    """
    batch, k = run.batch, run.method.width
    masked, logprobs = batch.masked, batch.memory["logprobs"]
    steps = ((masked.sum(1) - 1) // k).clamp_max(run.method.num_drafts - 1)
    steps = steps.masked_fill(batch.memory.get("begins", True), 0)
    n = int(steps.max())
    positions = ranked(batch.memory["score"], masked).argsort(1)[:, : n * k]
    exists = torch.arange(n * k, device=logprobs.device) < steps[:, None] * k
    # drafts have the random numbers of the forward pass that their distribution comes from
    index = (batch.step_index - 1).clamp_min(0)
    step = StepContext(run.rng, batch.rows, index, torch.zeros_like(index), positions, exists)
    logq = at_positions(logprobs, positions)
    tokens = run.method.draft(step, logq)
    b = len(positions)
    return Chain(positions.view(b, n, k), tokens.view(b, n, k), logq, steps)


def view_canvases(run: ChainRun, chain: Chain) -> ChainViews:
    """Write the drafts to the canvases, one more step in each."""
    canvases = [run.batch.tokens]
    for positions, tokens in zip(chain.positions.unbind(1), chain.tokens.unbind(1), strict=True):
        canvases.append(canvases[-1].scatter(1, positions, tokens))
    chained, device = torch.stack(canvases, 1), run.batch.canvas.device
    exists = torch.arange(len(canvases), device=device) <= chain.steps[:, None]
    row = exists.nonzero()[:, 0]
    index = torch.zeros_like(exists, dtype=torch.long)
    index[exists] = torch.arange(len(row), device=device)
    return ChainViews(chained, exists, chained[exists], row, index)


def order_positions(run: ChainRun, views: ChainViews, output: StepOutput) -> MarginalOrder:
    """Score the masked positions of every canvas, and find the k that are next."""
    batch, row = run.batch, views.row
    masked = batch.target.space.is_masked(views.canvases)
    none = torch.zeros_like(masked)
    prompt = batch.target.num_prompt_tokens[row]
    step = MaskedStep(
        run.rng,
        batch.rows[row],
        batch.step_index[row],
        batch.target.space,
        run.method,
        RowStore(),
        CanvasView(views.canvases, none, masked, none.double(), prompt),
        prediction=Prediction(output.logprobs, output.raw, ~none),
    )
    score = marginal_order(run.method.order)(step)
    return MarginalOrder(score, masked, ranked(score, masked).argsort(1)[:, : run.method.width])


def judge(
    run: ChainRun, chain: Chain, views: ChainViews, order: MarginalOrder, output: StepOutput
) -> ChainVerdict:
    """Ask the method how many steps of each chain are accepted.

    A draft is accepted only if its positions are those that are next at the canvas before it, which
    is decided before its tokens are looked at.
    """
    b, n, k = chain.positions.shape
    batch = run.batch
    if not n:
        return ChainVerdict(torch.zeros_like(batch.rows), torch.full_like(batch.rows, -1))
    next_positions = order.next_positions[views.index][:, :n]
    in_order = views.exists[:, 1:] & same_positions(next_positions, chain.positions)
    valid = in_order.long().cumprod(1).bool().repeat_interleave(k, 1)
    positions, tokens = chain.positions.view(b, n * k), chain.tokens.view(b, n * k)
    start = torch.zeros_like(batch.rows)
    step = StepContext(run.rng, batch.rows, batch.step_index, start, positions, valid)
    drafts = Draft(tokens, valid, chain.logq)
    canvas = views.index[:, :n].repeat_interleave(k, 1)
    return ChainVerdict(*run.method.judge(step, drafts, output.logprobs[canvas, positions]))


def commit(
    run: ChainRun,
    chain: Chain,
    views: ChainViews,
    order: MarginalOrder,
    output: StepOutput,
    verdict: ChainVerdict,
) -> None:
    """Commit the accepted drafts and one step more.

    The distribution at the canvas where a chain stopped is there already; the next chain is drafted
    from it.
    """
    batch, accepted = run.batch, verdict.accepted
    row = torch.arange(len(batch.slots), device=accepted.device)
    last = views.index[row, accepted]
    before, logprobs, positions = (
        views.chained[row, accepted],
        output.logprobs[last],
        order.next_positions[last],
    )
    is_decided = verdict.token >= 0
    if bool(is_decided.any()):
        drafted = chain.positions[row[is_decided], accepted[is_decided]]
        positions[is_decided] = drafted
    # fewer than k positions are masked in the last step of a canvas
    masked = order.masked[last].gather(1, positions)
    active = masked & ~is_decided[:, None]
    next_logprobs = at_positions(logprobs, positions)
    drawn = run.rng.categorical(next_logprobs, batch.rows, positions, "token", None, active)
    drawn = torch.where(masked, drawn, before.gather(1, positions))
    tokens = torch.where(is_decided[:, None], verdict.token[:, None], drawn)
    batch.canvas[batch.rows] = before.scatter(1, positions, tokens)
    begins = torch.zeros_like(is_decided)
    batch.memory.update(logprobs=logprobs, score=order.score[last], begins=begins)


def failed_positions(
    views: ChainViews, order: MarginalOrder, output: StepOutput, verdict: ChainVerdict
) -> Tensor:
    """Masked positions without a distribution, bool [b, T], of the canvases that the accepted
    drafts make."""
    failed = has_no_distribution(output.logprobs) & order.masked
    step = torch.arange(views.index.shape[1], device=failed.device)
    is_made = step <= verdict.accepted[:, None]
    return (failed[views.index] & is_made[..., None]).any(1)


def record(
    recorder: StatsRecorder,
    run: ChainRun,
    chain: Chain,
    views: ChainViews,
    output: StepOutput,
    verdict: ChainVerdict,
) -> None:
    """Note what the step computed and, where traces are recorded, what it committed."""
    items, k = run.batch.slots.items, chain.positions.shape[2]

    def of_rows(counts: Counts) -> Tensor:
        """Add up what the canvases of each row had computed, long [b]."""
        per_canvas = torch.as_tensor(counts, device=views.row.device).expand(len(views.row))
        return torch.zeros_like(verdict.accepted).index_add_(0, views.row, per_canvas)

    num_computed = of_rows(output.num_computed_tokens), of_rows(output.num_computed_positions)
    recorder.add(items, *num_computed, accepted=verdict.accepted * k, drafted=chain.steps * k)
    if recorder.traces is None:
        return
    is_masked, tokens = run.batch.target.space.is_masked, run.batch.tokens
    was_masked, masked = is_masked(views.chained[:, 0]), is_masked(tokens)
    for row, (item, steps) in enumerate(
        zip(items.tolist(), verdict.accepted.tolist(), strict=True)
    ):
        filled = (was_masked[row] & ~masked[row]).nonzero()[:, 0].tolist()
        values = tokens[row].tolist()
        recorder.add_trace(
            item,
            was_masked[row].nonzero()[:, 0].tolist(),
            chain.positions[row, :steps].flatten().tolist(),
            {n: values[n] for n in filled},
        )


def at_positions(logprobs: Tensor, positions: Tensor) -> Tensor:
    """Distribution [b, T, V] at positions [b, L]: [b, L, V]."""
    return logprobs[torch.arange(len(logprobs), device=logprobs.device)[:, None], positions]


def same_positions(some: Tensor, others: Tensor) -> Tensor:
    """Compare two times k positions [..., k] in whatever order: bool [...]."""
    return (some.sort(-1).values == others.sort(-1).values).all(-1)
