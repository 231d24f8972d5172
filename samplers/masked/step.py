"""Masked step: what the parts of a masked sampler read about one forward pass.

The loop (``gen.samplers.masked.loop``) builds four frozen records per step, in this order:

    CanvasView      canvas before the step: tokens, prefilled and masked positions
    BlockProgress   block of every row, how far the row is in it, positions to commit now
    Prediction      log-probabilities of the forward pass
    TokenProposal   token proposed for every masked position, its log-probability and its score

``MaskedStep`` holds them, the rng, the sampler and the memory of the parts. Reading a field of a
record that is not built yet raises ``GenError``, which names the phase that builds it.

A part that reads more than its phase provides by default declares it with ``needs``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from gen.core.errors import GenError
from gen.core.rng import RNG
from gen.core.token_space import TokenSpace
from gen.models.targets.hidden import AdjustableCanvas
from gen.samplers.engine.host import may_be_any
from gen.samplers.engine.rows import RowStore

LOGPROBS = "logprobs"  # a block schedule with this need runs after the forward pass
LEFT_OUT_LOGP = "left_out_logp"  # a remasker with this need gets ``MaskedStep.left_out_logp``
ROUNDED_UP = "rounded_up"  # a schedule with this need has its number of masked positions rounded up
ANNOUNCED = "announced"  # a cache policy with this need gets the next positions (``announced``)
COUNTED = "counted"  # a selector with this need reads the scores and the number of the step alone
HIDDEN_STATES = "hidden_states"  # a proposer with this need gets ``MaskedStep.states``
ON_HOST = "on_host"  # a part with this need reads values on the host, so no step is recorded
LIKELIEST = "likeliest"  # a proposer with this need has the likeliest token for what may not stand

_NEEDS: dict[Callable, frozenset[str]] = {}
Part = TypeVar("Part", bound=Callable)
Record = TypeVar("Record")


def needs(*names: str) -> Callable[[Part], Part]:
    """Declare what a part needs of the loop beyond what its phase has by default.

    Args:
        names: ``LOGPROBS`` for a block schedule, ``LEFT_OUT_LOGP`` for a remasker, ``ROUNDED_UP``
            for a schedule, ``ANNOUNCED`` for a cache policy, ``COUNTED`` for a selector that takes
            the highest scores, as many as the number of the step says, ``HIDDEN_STATES`` for a
            proposer that is a class with ``digest``, that of the weights it was trained for;
            ``ON_HOST`` for any part that
            reads values of tensors on the host, or keeps numbers of its own from step to step;
            ``LIKELIEST`` for a proposer
            that takes the likeliest token: where its token may not stand beside others of the step,
            the loop draws none, but takes the likeliest that may.

    Returns:
        A decorator that returns the part unchanged.
    """

    def declare(part: Part) -> Part:
        _NEEDS[part] = frozenset(names)
        return part

    return declare


def needs_of(part: Callable) -> frozenset[str]:
    """Needs that a part declared, or its class, none by default."""
    return _NEEDS.get(part) or _NEEDS.get(type(part), frozenset())


@dataclass(frozen=True)
class CanvasView:
    """Canvas of b rows before a step.

    Attributes:
        tokens: tokens of the canvas, long [b, T], or latents, float [b, T, C].
        prefilled: positions that the caller's canvas holds, bool [b, T].
        masked: positions that are still masked, bool [b, T].
        committed_logp: log-probability of each token when it was committed, float64 [b, T].
        num_prompt_tokens: tokens of each row's prompt, in front of the canvas, long [b].
    """

    tokens: Tensor
    prefilled: Tensor
    masked: Tensor
    committed_logp: Tensor
    num_prompt_tokens: Tensor


@dataclass(frozen=True)
class BlockProgress:
    """Block of every row and how far the row is in it.

    Attributes:
        open: positions of the block, bool [b, T].
        is_first_step: rows whose block begins with this step, bool [b].
        steps_in_block: steps of the block before this one, long [b].
        num_masked_at_start: positions that were masked when the block began, long [b].
        steps: steps that the block is given, float64 [b].
        progress: share of the block's steps that is over after this one, float64 [b].
        is_last_step: rows whose ``progress`` is 1, bool [b].
        quota: positions that the schedule commits now, long [b].
    """

    open: Tensor
    is_first_step: Tensor
    steps_in_block: Tensor
    num_masked_at_start: Tensor
    steps: Tensor
    progress: Tensor
    is_last_step: Tensor
    quota: Tensor


@dataclass(frozen=True)
class Prediction:
    """Outcome of the forward pass.

    Attributes:
        logprobs: final log-probabilities [b, T, V], or conditioning vectors of latents.
        raw_logprobs: returns log-probabilities without temperature and filters, [b, T, V]; None
            where the target has none.
        fresh: positions that this forward pass computed, bool [b, T].
        left_out_logp: log-probability of each committed token of the block with its own position
            masked, float64 [b, T], 0 elsewhere; None unless the remasker declares the need.
        under: see ``gen.models.targets.base.StepOutput``.
        states: hidden states behind the canvases; None unless the proposer declares the need.
    """

    logprobs: Tensor
    raw_logprobs: Callable[[], Tensor] | None
    fresh: Tensor
    left_out_logp: Tensor | None = None
    under: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    states: AdjustableCanvas | None = None


@dataclass(frozen=True)
class TokenProposal:
    """Token proposed for every masked position.

    Attributes:
        tokens: proposed tokens, and at the other positions those of the canvas, [b, T(, C)].
        logp: log-probability of those tokens under ``MaskedStep.confidence_logprobs``,
            float64 [b, T].
        score: order of the positions, highest first, float64 [b, T]; None until the phase "score".
        logprobs: distribution that the tokens were proposed from, [b, T, V]; None for latents.
    """

    tokens: Tensor
    logp: Tensor
    score: Tensor | None = None
    logprobs: Tensor | None = None


@dataclass
class MaskedStep:
    """Step of b rows: T positions, V token ids.

    Attributes:
        rng: random numbers by item and position.
        rows: numbers of the rows among all items, long [b].
        step_index: forward passes of each row before this one, long [b].
        space: token space of the canvas.
        params: the sampler.
        memory: tensors that parts keep from step to step; the first axis is the rows.
        view: canvas before the step.
        block: block of every row; None before the phase "block progress".
        prediction: outcome of the forward pass; None before the phase "predict".
        proposal: proposed tokens; None before the phase "propose".
        constants: see ``constant``.
    """

    rng: RNG
    rows: Tensor
    step_index: Tensor
    space: TokenSpace
    params: Any
    memory: RowStore
    view: CanvasView
    block: BlockProgress | None = None
    prediction: Prediction | None = None
    proposal: TokenProposal | None = None
    constants: dict[str, Tensor] = field(default_factory=dict)

    def constant(self, name: str, make: Callable[[], Any]) -> Tensor:
        """Return numbers that are the same in every step as a tensor; a run makes them once, and
        copies them to the device once."""
        if name not in self.constants:
            made = torch.as_tensor(make()).to(self.rows.device, non_blocking=True)
            self.constants[name] = made
        return self.constants[name]

    # --- canvas view

    @property
    def canvas(self) -> Tensor:
        """Canvas before the step: [b, T(, C)]."""
        return self.view.tokens

    @property
    def prefilled(self) -> Tensor:
        """Positions that the caller's canvas holds: bool [b, T]."""
        return self.view.prefilled

    @property
    def masked(self) -> Tensor:
        """Positions that are masked before the step: bool [b, T]."""
        return self.view.masked

    @property
    def committed_logp(self) -> Tensor:
        """Log-probability of each token when it was committed: float64 [b, T]."""
        return self.view.committed_logp

    @property
    def num_prompt_tokens(self) -> Tensor:
        """Tokens of each row's prompt, in front of the canvas: long [b]."""
        return self.view.num_prompt_tokens

    @property
    def positions(self) -> Tensor:
        """Indices of the positions: long [b, T]."""
        return torch.arange(self.masked.shape[1], device=self.masked.device).expand(
            self.masked.shape
        )

    # --- block progress

    @property
    def open(self) -> Tensor:
        """Positions of the block: bool [b, T]."""
        return self._block("open").open

    @property
    def is_first_step(self) -> Tensor:
        """Rows whose block begins with this step: bool [b]."""
        return self._block("is_first_step").is_first_step

    @property
    def steps_in_block(self) -> Tensor:
        """Steps of the block before this one: long [b]."""
        return self._block("steps_in_block").steps_in_block

    @property
    def num_masked_at_start(self) -> Tensor:
        """Positions that were masked when the block began: long [b]."""
        return self._block("num_masked_at_start").num_masked_at_start

    @property
    def progress(self) -> Tensor:
        """Share of the block's steps that is over after this one: float64 [b]."""
        return self._block("progress").progress

    @property
    def is_last_step(self) -> Tensor:
        """Rows whose block has no steps left after this one: bool [b]."""
        return self._block("is_last_step").is_last_step

    @property
    def quota(self) -> Tensor:
        """Positions that the schedule commits now: long [b]."""
        return self._block("quota").quota

    # --- prediction

    @property
    def logprobs(self) -> Tensor:
        """Final log-probabilities [b, T, V], or conditioning vectors of latents."""
        return self._prediction("logprobs").logprobs

    def raw_logprobs(self) -> Tensor:
        """Log-probabilities without temperature and filters: [b, T, V]."""
        raw = self._prediction("raw_logprobs").raw_logprobs
        if raw is None:
            raise GenError(
                "step.raw_logprobs is read for a target that has none; expected a target of token"
                " ids, not of latents"
            )
        return raw()

    @property
    def fresh(self) -> Tensor:
        """Positions that this forward pass computed: bool [b, T]."""
        return self._prediction("fresh").fresh

    @property
    def left_out_logp(self) -> Tensor:
        """Log-probability of committed tokens with their own position masked: float64 [b, T]."""
        found = self._prediction(LEFT_OUT_LOGP).left_out_logp
        if found is None:
            raise GenError(
                f"step.{LEFT_OUT_LOGP} is read by a part that does not declare it; expected"
                f" @needs({LEFT_OUT_LOGP!r}) on the remasker"
            )
        return found

    @property
    def states(self) -> AdjustableCanvas:
        """Hidden states behind the canvases."""
        found = self._prediction("states").states
        if found is None:
            raise GenError(
                "step.states is read, and the forward pass kept no hidden states; expected"
                f" @needs({HIDDEN_STATES!r}) on the proposer, and a remasker without"
                f" {LEFT_OUT_LOGP!r}"
            )
        return found

    def confidence_logprobs(self) -> Tensor:
        """Log-probabilities [b, T, V] that ``params.confidence_on`` names."""
        return self.raw_logprobs() if self.params.confidence_on == "raw" else self.logprobs

    def replace_logprobs(self, logprobs: Tensor, raw_logprobs: Callable[[], Tensor] | None) -> None:
        """Change the prediction for all later phases of this step.

        Args:
            logprobs: final log-probabilities [b, T, V].
            raw_logprobs: returns those without temperature and filters, [b, T, V]; None where the
                target has none.
        """
        self.prediction = replace(
            self._prediction("logprobs"), logprobs=logprobs, raw_logprobs=raw_logprobs
        )

    def hold_back(self, ids: Sequence[int]) -> None:
        """Take the probability of some tokens away, for all later phases of this step."""
        size = self.logprobs.shape[-1]
        made = [token for token in ids if token < size]
        index = self.constant("held_back", lambda: torch.tensor(made, dtype=torch.long))

        def without(logprobs: Tensor) -> Tensor:
            rest = logprobs.index_fill(-1, index, -torch.inf)
            # where such a token has all of the mass, nothing has any
            return rest.log_softmax(-1).nan_to_num(nan=-torch.inf, neginf=-torch.inf)

        prediction = self._prediction("logprobs")
        raw = prediction.raw_logprobs
        self.replace_logprobs(
            without(prediction.logprobs), None if raw is None else lambda: without(raw())
        )

    # --- proposal

    @property
    def proposed_tokens(self) -> Tensor:
        """Tokens proposed for masked positions, and those of the canvas elsewhere: [b, T(, C)]."""
        return self._proposal("proposed_tokens").tokens

    @property
    def logp(self) -> Tensor:
        """Log-probability of ``proposed_tokens``: float64 [b, T]."""
        return self._proposal("logp").logp

    @property
    def confidence(self) -> Tensor:
        """Probability of ``proposed_tokens``: float64 [b, T]."""
        return self.logp.exp()

    @property
    def score(self) -> Tensor:
        """Order of the positions, highest first: float64 [b, T]."""
        return _built(self._proposal("score").score, "score", "score")

    # --- all records

    @property
    def eligible(self) -> Tensor:
        """Masked positions that may be committed now: bool [b, T]."""
        return self.masked & self.open & self.fresh

    @property
    def remaskable(self) -> Tensor:
        """Positions of the block that earlier steps committed: bool [b, T]."""
        return ~self.masked & ~self.prefilled & self.open & self.fresh

    def recall(self, name: str, start: Tensor) -> Tensor:
        """Tensor that a part stored under a name, or ``start`` in rows that stored nothing yet."""
        return self.memory.get(name, start)

    def _block(self, field: str) -> BlockProgress:
        return _built(self.block, field, "block progress")

    def _prediction(self, field: str) -> Prediction:
        return _built(self.prediction, field, "predict")

    def _proposal(self, field: str) -> TokenProposal:
        return _built(self.proposal, field, "propose")


def _built(record: Record | None, field: str, phase: str) -> Record:
    if record is None:
        raise GenError(
            f"step.{field} is read before the phase {phase!r} of the step, which computes it;"
            " expected a part that reads only what earlier phases computed"
        )
    return record


def ranked(score: Tensor, among: Tensor) -> Tensor:
    """Rank of every position by its score.

    Args:
        score: float [b, T].
        among: positions to rank, bool [b, T].

    Returns:
        Ranks [b, T], 0 for the highest score in ``among``, the first position of equal ones. The
        other positions come after them.
    """
    position = torch.arange(score.shape[1], device=score.device).expand_as(score)
    # positions outside ``among`` also come after scores of minus infinity
    order = score.masked_fill(~among, 0).argsort(dim=1, descending=True, stable=True)
    order = order.gather(1, (~among).gather(1, order).long().argsort(dim=1, stable=True))
    return torch.empty_like(order).scatter_(1, order, position)


def highest(score: Tensor, among: Tensor, count: Tensor) -> Tensor:
    """Positions in ``among`` (bool [b, T]) with the ``count`` [b] highest scores: bool [b, T]."""
    return among & (ranked(score, among) < count[:, None])


def at_least_one(step: MaskedStep, selected: Tensor) -> Tensor:
    """Take what may be committed of ``selected`` (bool [b, T]), and the position of highest score
    in rows where that is none: bool [b, T]."""
    selected = selected & step.eligible
    if may_be_any(~selected.any(1)):
        best = highest(step.score, step.eligible, torch.ones_like(step.rows))
        selected = torch.where(selected.any(1, keepdim=True), selected, best)
    return selected


def lowest(score: Tensor, among: Tensor, count: Tensor) -> Tensor:
    """Positions in ``among`` (bool [b, T]) with the ``count`` [b] lowest scores: bool [b, T]."""
    return highest(-score, among, count)
