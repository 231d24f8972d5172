"""Drafting by a draft model: a chain of its own forward passes, one token each, against its own
cache.

A round drafts positions n, n+1, ... of every row, n tokens being committed. The draft's cache has a
slot per position, as the target's has, so rejected drafts are overwritten and nothing is rolled
back. The first call of a round brings along what was committed since: after a rejection the token
that replaced the draft, after full acceptance also the last draft, which was drawn but never fed.
Rows differ in how many drafts they want; one that wants no more repeats its last token and position
while the others go on, and a round has as many calls as its longest chain. How long it is the host
knows beforehand, unless what is drafted decides (``LengthPolicy.stop``): then it asks the device
after every call.

Drafts are ids; latents have a drafter of their own (``gen.samplers.latent``). A draft must be drawn
from the distribution that it is judged by. The last position of a row is never drafted: the target
gives it for free. Nothing is drafted at positions that the draft model has no vectors for
(``CausalTarget.reach``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gen.core.errors import GenError, bad_value
from gen.core.lookup import take
from gen.core.params import Rule, draft_model, param, part
from gen.core.registry import register
from gen.samplers.causal.drafters.base import DraftSource
from gen.samplers.causal.length_policies.base import AutoLength, LengthPolicy
from gen.samplers.engine.causal_loop import CausalSampler, Drafter
from gen.samplers.engine.draft import Draft, Verdict
from gen.samplers.engine.failed import failed_draws
from gen.samplers.engine.host import to_device
from gen.samplers.engine.rows import RowOwner, RowState, RowStore
from gen.samplers.engine.window import AUTO, auto_width

if TYPE_CHECKING:
    from gen.models.targets.base import StepOutput
    from gen.models.targets.causal import CausalTarget
    from gen.samplers.engine.step_context import CausalStep
    from gen.samplers.verifiers.base import Verifier

TargetT = TypeVar("TargetT", bound="CausalTarget")


class DraftModel(RowOwner):
    """Who asks a draft model round by round, and brings along what was committed since. ``draft``:
    its fresh target, under the distribution that drafts are drawn from."""

    # the furthest position whose distribution the draft model has been asked for, given what is
    # committed, int64 [b]: its cache holds all tokens below. Before the first call not even the
    # prompt is there
    known = RowState(start=-1)

    def __init__(self, draft: CausalTarget):
        self.draft, self.targets = draft, (draft,)
        self.known = np.full(draft.rows, -1)
        self.num_passes = torch.zeros(draft.items, dtype=torch.long, device=draft.device)

    @property
    def nfe(self) -> list[int]:
        return self.num_passes.tolist()

    def count_passes(self, step: CausalStep, passes: Tensor) -> None:
        """Add the forward passes of each row, long [b]."""
        self.num_passes.index_add_(0, step.rows, passes)

    def unseen(
        self, step: CausalStep, tokens: Tensor, last: np.ndarray | None = None
    ) -> tuple[Tensor, Tensor]:
        """Find the tokens [b, n(, C)] that the draft model has not seen, and the positions after
        them, long [b, n]; rows with fewer repeat their first. ``last``: last position of each row
        that it is asked for, int64 [b]; None for the first one that is not committed."""
        last = step.starts if last is None else last
        # a row that waited is asked for its start again
        known = np.minimum(self.known, step.starts - 1)
        back = np.arange(int((last - known).max()) - 1, -1, -1)
        at = np.maximum(last[:, None] - back, known[:, None] + 1)
        before = to_device(np.maximum(at - 1, 0), tokens.device)
        return take(tokens, before), to_device(at, tokens.device)


class ModelDrafter(DraftModel, Drafter):
    """Drafter of chains of a draft model, whose length the policy decides."""

    def __init__(self, draft: CausalTarget, verifier: Verifier, policy: LengthPolicy):
        super().__init__(draft)
        self.verifier, self.policy = verifier, policy

    @property
    def stores(self) -> tuple[RowStore, ...]:
        return (self.store, *self.policy.stores)

    @property
    def window(self) -> int:
        return 1 + self.policy.most

    def propose(self, step: CausalStep, tokens: Tensor) -> Draft:
        length = step.positions.shape[1] - 1
        if not length:
            return Draft.none(tokens, step.valid)
        wanted = np.minimum(self.policy.lengths, step.widths - 1)
        if (reach := self.draft.reach) is not None:
            wanted = np.clip(wanted, 0, np.maximum(reach - step.starts, 0))
        made: list[tuple[Tensor, Tensor, Tensor]] = []  # drafts, who has them, what they are from
        self.policy.begin()
        given, at = self.unseen(step, tokens)
        asked, most = to_device(np.arange(length) < wanted[:, None], at.device), int(wanted.max())
        active, together = asked[:, 0], int(wanted.min())  # columns that all rows draft
        for column in range(max(1, most)):
            if most:
                output = self.draft.predict(given, at)
                logprobs = output.logprobs.select(1, -1)
                if output.hidden_states is not None:
                    self.policy.read(output.hidden_states)
            else:  # all rows are past the draft model's positions
                logprobs = torch.zeros(len(at), self.draft.space.vocab_size, device=at.device)
            drawn = self.draw(step, column, logprobs, active).to(tokens.dtype)
            ids = drawn if column < together else _where(active, drawn, drawn.new_zeros(1))
            made.append((ids, active, logprobs))
            if column + 1 >= most:
                break
            stop = self._stop(drawn, logprobs)
            if stop is None and column + 1 < together:
                given, at = drawn.unsqueeze(1), step.positions.narrow(1, column + 1, 1)
                continue
            active = active & asked[:, column + 1]
            if stop is not None:
                active, together = active & ~stop, 0
                if not bool(active.any()):
                    break
            given = _where(active, ids, given[:, -1])[:, None]
            at = torch.where(active, step.start + column + 1, at[:, -1])[:, None]
        ids, exists, logq = zip(*made, strict=True)
        exists = _padded(exists, length) if self.policy.stops_early else asked
        ids, logq = _padded(ids, length), _padded(logq, length)
        return Draft(ids, exists, logq, failed=exists & failed_draws(ids, logq))

    def draw(self, step: CausalStep, column: int, logprobs: Tensor, active: Tensor) -> Tensor:
        """Draw the drafts [b(, C)] of one column; columns come in order. ``logprobs``: the draft
        model's there, [b, V]; of latents conditioning vectors [b, H, D]. Rows that are not
        ``active`` (bool [b]) may get anything."""
        if not column:  # all columns' noise at once takes less time
            at, size = step.positions[:, :-1], logprobs.shape[-1]
            self._noise = step.rng.noise(step.rows, at, "draft", step.round, size)
        if self._noise is not None:
            return torch.from_numpy((self._noise[:, column] + logprobs.numpy()).argmax(-1))
        return step.categorical(logprobs[:, None], "draft", active[:, None], column)[:, 0]

    def _stop(self, drawn: Tensor, logprobs: Tensor) -> Tensor | None:
        """Ask the length policy which rows draft no more after the newest drafts [b(, C)], bool
        [b]; None where nothing stops them."""
        if not self.policy.stops_early:
            return None
        has_mass = drawn.ndim == 1  # latents have no probability
        mass = logprobs.gather(1, drawn[:, None]).exp() if has_mass else torch.ones_like(drawn)
        return self.policy.stop(mass[:, 0], logprobs)

    def verify(self, step: CausalStep, draft: Draft, output: StepOutput) -> Verdict:
        if not draft.tokens.shape[1]:
            ids = step.categorical(output.logprobs, "token", step.valid, shared=True)
            return Verdict(torch.zeros_like(step.start), ids)
        return self.verifier.verify(step, draft, output.logprobs)

    def observe(self, step: CausalStep, num_accepted: np.ndarray, num_drafted: np.ndarray) -> None:
        # the last draft was drawn, not fed
        seen = step.starts + np.minimum(num_accepted, num_drafted - 1)
        self.known = np.where(num_drafted > 0, seen, self.known)
        self.policy.observe(num_drafted, num_accepted)
        self.count_passes(step, to_device(num_drafted, step.rows.device))
        committed = np.minimum(num_accepted + 1, step.widths)
        self.policy.over(step.positions.shape[1], step.starts, committed)


def _padded(columns: Sequence[Tensor], length: int) -> Tensor:
    """Join columns [b, ...], and zeros as far as they lack of a length: [b, length, ...]."""
    zero = [torch.zeros_like(columns[0])] if len(columns) < length else []
    return torch.stack([*columns, *zero * (length - len(columns))], 1)


def _where(at: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """``one`` in the rows ``at`` (bool [b]), which may have channels."""
    return torch.where(at.view(-1, *[1] * (one.ndim - 1)), one, other)


def require_same_tokens(target: CausalTarget, draft: TargetT | None) -> TargetT:
    """Return the target of the draft model. Raises ``GenError``: it is missing, or speaks of other
    ids than the target."""
    if draft is None:
        raise GenError(
            "this sampler drafts with a second model and got none; name one in sampler.draft_model"
        )
    known = [(one.space.kind, one.space.channels, one.space.vocab_size) for one in (target, draft)]
    if known[0] != known[1]:
        ours, theirs = (f"{c} channels" if c else f"{ids} ids" for _, c, ids in known)
        raise GenError(f"the draft model has {theirs}; expected the target's {ours}")
    if not torch.equal(target.legal, draft.legal.to(target.device)):  # or of another shape
        raise GenError(
            "the draft model's positions or legal ids are not the target's; expected a model of"
            " the same tokens"
        )
    return draft


class ModelNodes(DraftModel, DraftSource):
    """Distributions of a draft model.

    A tree is computed again whenever it has grown: the draft model's cache holds what is committed,
    and branches live for one forward pass. Every row has one pass for the root, and one for each
    time that the tree grew where the row has new drafts.
    """

    def begin(self, step, tokens):
        given, at = self.unseen(step, tokens)
        self.root, self.known = given[:, -1:], step.starts
        return self._predict(given, at)[:, -1:]

    def extend(self, step, tree, first):
        if tree.is_chain:  # the cache holds the drafts before
            exists, depth = tree.exists[:, first:], tree.depth[:, first:]
            at = step.start[:, None] + torch.where(exists, depth, 0)
            return self._predict(torch.where(exists, tree.tokens[:, first:], self.root), at)
        valid, depth = F.pad(tree.exists, (1, 0), value=True), F.pad(tree.depth, (1, 0))
        at = step.start[:, None] + torch.where(valid, depth, 0)
        given = torch.where(valid, torch.cat([self.root, tree.tokens], 1), self.root)
        return self._predict(given, at, tree.parents)[:, first + 1 :]

    def _predict(self, given: Tensor, at: Tensor, parents: Tensor | None = None) -> Tensor:
        """Compute log-probabilities [b, L, V] of positions [b, L]; nothing is known of those that
        the draft model has no vectors for."""
        logprobs = self.draft.predict(given, at, parents).logprobs
        if (reach := self.draft.reach) is None:
            return logprobs
        beyond = at >= to_device(reach, at.device)[:, None]
        return logprobs.masked_fill(beyond[..., None], -torch.inf)


@dataclass(frozen=True)
class DraftsWithModel(CausalSampler):
    """Base of samplers that may draft with a model.

    ``draft_model``: a model's name; None for the modality's own. ``num_speculative_tokens``: drafts
    per round, or auto: as many as make the time per token least (``auto_width``). ``policy``: a
    length policy. ``draft_temperature``, ``draft_guidance``: of the distribution that drafts are
    drawn from; None is what the target has, and a ``draft_guidance`` of 1 spares the draft its
    unconditional half.
    """

    draft_model: str | None = draft_model()
    num_speculative_tokens: int | str = param(5, int, 1, also=(AUTO,), each="column")
    policy: str = part("constant", "length_policy")
    draft_temperature: float | None = param(None, float, 0, also=(None,))
    draft_guidance: float | None = param(None, float, also=(None,))

    rules = (
        Rule(
            "policy",
            lambda s: s.num_speculative_tokens != AUTO or s.policy == "constant",
            "constant, because sampler.num_speculative_tokens is auto",
        ),
    )

    @property
    def timed(self) -> bool:
        return self.num_speculative_tokens == AUTO

    def model_drafter(
        self, target: CausalTarget, draft: CausalTarget | None, verifier: Verifier
    ) -> ModelDrafter:
        """Make the drafter; arguments and errors as in ``draft_target``."""
        draft = self.draft_target(target, draft)
        policy = self.length_policy(target, draft.rows)
        policy.attach(target, draft)
        return ModelDrafter(draft, verifier, policy)

    def length_policy(self, target: CausalTarget, rows: int) -> LengthPolicy:
        """Make the policy that decides how long the chains of so many rows are."""
        if self.num_speculative_tokens == AUTO:
            return AutoLength(auto_width(self, target), rows)
        return self.parts.policy(rows, self.num_speculative_tokens, self.params_of("policy"))

    def draft_target(self, target: CausalTarget, draft: TargetT | None) -> TargetT:
        """Make a fresh target of the draft model, under the distribution that drafts are drawn
        from; it comes under the target's distribution. Raises ``GenError``: it is missing, speaks
        of other ids, or was trained for another target or other sampling parameters."""
        draft = require_same_tokens(target, draft)
        chosen = {"temperature": self.draft_temperature, "guidance_scale": self.draft_guidance}
        sampling = dataclasses.replace(
            draft.draft_sampling(target), **{k: v for k, v in chosen.items() if v is not None}
        )
        if sampling.guided and draft.branches == 1:
            raise bad_value(
                "sampler.draft_guidance",
                self.draft_guidance,
                "None or 1, because sampling.guidance_scale is 1",
            )
        return draft.with_params(sampling)


# for samplers whose verifiers let the drafts decide about the tokens
DRAFTS_DECIDE = Rule(
    "policy",
    lambda s: not s.parts.policy.needs_same_tokens,
    "{policy?}: here the tokens depend on the drafts",
)


@register("drafter", "model")
class ModelDrafts(ModelNodes):
    """Drafts with a smaller model. Parameters: ``draft_model``, ``num_speculative_tokens``,
    ``policy``, ``confidence_threshold``, ``draft_temperature``, ``draft_guidance``."""

    needs_draft_model = True
    is_model = True

    @classmethod
    def is_timed(cls, sampler):
        return sampler.num_speculative_tokens == AUTO

    @classmethod
    def draft_of(cls, sampler: Any, target: CausalTarget, draft: Any) -> CausalTarget:
        return draft

    @classmethod
    def of(cls, sampler, target, draft):
        draft = cls.draft_of(sampler, target, draft)
        return cls(sampler.draft_target(target, draft))

    @classmethod
    def make(cls, sampler, target, draft, verifier):
        draft = cls.draft_of(sampler, target, draft)
        return sampler.model_drafter(target, draft, verifier)
