"""PEARL: the draft model drafts on while the target verifies.

In each round the draft model draws ``num_speculative_tokens`` = g tokens, and beside it, at the
same time, the target computes one forward pass over the drafts of the round before.

    pre-verify    no drafts are left: the target has the committed tokens alone. The first of the g
                  new drafts is judged by the distribution after them
    post-verify   g - 1 drafts are left from the round before. The target judges them, and by the
                  distribution after the last of them the first of the g new drafts

Where the draft after those that the target saw is accepted, the other new drafts are those of the
next round, which is a post-verify one. Any rejection drops all of them and leads to a pre-verify
one. Each round therefore commits 1 token, or in post-verify up to g.

A round takes as long as the slower of its two sides, a speculative one as long as both: with g
draft passes per target pass in the same time, the rounds of drafting are all saved. ``nfe`` counts
the target's rounds, and ``draft_nfe`` the draft passes beside them. Here the two sides of a round
run one after the other, on one device: the schedule is exact, and the time that it would save on
two devices follows from the counts.

Reference: Liu et al., "PEARL: Parallel Speculative Decoding with Adaptive Draft Length" (arXiv
2408.11850).
Guarantee: that of the verifier. Every draft is judged by its own distribution, and what is dropped
follows a rejected token. A verifier of trees draws the token after the drafts that the target saw
by itself; the next drafts stay if it is their first.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gen.core.distributions import wide_dtype
from gen.core.method import method
from gen.core.params import Rule
from gen.core.registry import register
from gen.samplers.causal.drafters.base import DraftSource
from gen.samplers.causal.drafters.model import DraftModel
from gen.samplers.engine.causal_loop import Drafter
from gen.samplers.engine.draft import Draft, Verdict
from gen.samplers.engine.failed import failed_draws, refuse_failed
from gen.samplers.engine.host import to_device
from gen.samplers.engine.rows import RowState
from gen.samplers.engine.window import AUTO

if TYPE_CHECKING:
    from gen.models.targets.base import StepOutput
    from gen.models.targets.causal import CausalTarget
    from gen.samplers.engine.step_context import CausalStep
    from gen.samplers.verifiers.base import Verifier


class PearlDrafter(DraftModel, Drafter):
    """Drafter one round of ``length`` drafts ahead of the target."""

    # drafts that the target has not seen, long [b, g - 1], the log-probabilities [b, g - 1, V] that
    # they were drawn from, and how many there are, int64 [b] on the host
    left_tokens = RowState()
    left_logq = RowState()
    left = RowState(start=0)

    def __init__(self, draft: CausalTarget, verifier: Verifier, length: int):
        super().__init__(draft)
        self.verifier, self.length = verifier, length
        self.left = np.zeros_like(self.known)
        made = draft.legal.new_zeros(draft.rows, length - 1, draft.legal.shape[1])
        self.left_tokens = made[..., 0].long()
        self.left_logq = made.to(wide_dtype(draft.model.dtype))

    @property
    def window(self) -> int:
        return 1 + int(self.left.max())

    def propose(self, step: CausalStep, tokens: Tensor) -> Draft:
        # 1. The target sees what is left of the round before
        width, device = step.positions.shape[1], tokens.device
        self.seen = np.clip(step.widths - 1, 0, self.left)
        exists = to_device(np.arange(width - 1) < self.seen[:, None], device)
        # 2. Beside it, the draft model goes on behind that
        self.new = np.minimum(self.length, step.room - self.left)
        self._draft(step, tokens)
        return Draft(self.chain[:, : width - 1], exists)

    def _draft(self, step: CausalStep, tokens: Tensor) -> None:
        """Draw ``new`` [b] drafts behind the ``left`` ones of each row: ``chain`` [b, 2 g - 1] and
        ``logq`` [b, 2 g - 1, V] hold both."""
        b, device, left, new = len(tokens), tokens.device, self.left, self.new
        row, column = torch.arange(b, device=device), to_device(left, device)
        first = step.starts + left
        self.chain = F.pad(self.left_tokens, (0, self.length))
        self.logq = F.pad(self.left_logq, (0, 0, 0, self.length))
        self.failed = torch.zeros(b, dtype=torch.bool, device=device)
        given, at = self.unseen(step, tokens)
        if self.length > 1:
            last = self.left_tokens[row, (column - 1).clamp_min(0)]
            goes_on = to_device((left > 0) & (new > 0), device)[:, None]
            given = torch.where(goes_on, last[:, None], given)
            at = torch.where(goes_on, to_device(first, device)[:, None], at)
        for n in range(int(new.max())):
            logprobs = self.draft.predict(given, at).logprobs[:, -1:]
            active = to_device(n < new, device)[:, None]
            here = to_device(first + n, device)[:, None]
            key = torch.where(active, here, step.start[:, None])
            ids = step.rng.categorical(logprobs, step.rows, key, "draft", step.round, active)
            self.failed |= (active & failed_draws(ids, logprobs))[:, 0]
            # a row that is done writes to a column behind its own
            where = torch.where(active[:, 0], column + n, self.chain.shape[1] - 1)
            self.chain[row, where] = torch.where(active, ids, self.chain[row, where, None])[:, 0]
            self.logq[row, where] = torch.where(active, logprobs[:, 0], self.logq[row, where])
            goes_on = to_device(n + 1 < new, device)[:, None]
            given = torch.where(goes_on, ids, given[:, -1:])
            at = torch.where(goes_on, here + 1, at[:, -1:])
        self.count_passes(step, to_device(new, device))

    def verify(self, step: CausalStep, draft: Draft, output: StepOutput) -> Verdict:
        logp, device = output.logprobs, output.logprobs.device
        width, seen = logp.shape[1], to_device(self.seen, logp.device)
        # a verifier of trees draws the next token itself, a verifier of chains judges the first new
        # draft by the distribution that there is for it
        alone = self.verifier.judges_trees
        if alone and width == 1:
            ids = step.categorical(logp, "token", step.valid, shared=True)
            self.goes_on = ids[:, 0] == self.chain[:, 0]
            return Verdict(torch.zeros_like(step.start), ids)
        length = width - 1 if alone else width
        drafted = torch.arange(length, device=device) < (seen if alone else seen + 1)[:, None]
        drafted = drafted & step.valid[:, :length]  # a row that waits has none
        drafts = Draft(self.chain[:, :length], drafted, self.logq[:, :length])
        if not alone:  # no verdict draws a token behind the first new draft
            step = replace(step, valid=torch.zeros_like(step.valid))
        verdict = self.verifier.verify(step, drafts, logp)
        accepted = torch.minimum(verdict.num_accepted, seen)
        after = verdict.tokens.gather(1, accepted[:, None])[:, 0]
        if alone:
            first_new = self.chain.gather(1, seen[:, None])[:, 0]
            self.goes_on = (accepted == seen) & (after == first_new)
        else:
            self.goes_on = verdict.num_accepted > seen
        return Verdict(accepted, verdict.tokens)

    def observe(self, step: CausalStep, num_accepted: np.ndarray, num_drafted: np.ndarray) -> None:
        # one copy to the host, of values that are there once the round's counts are
        goes_on, failed = torch.stack([self.goes_on, self.failed]).cpu().numpy()
        if failed.any():
            refuse_failed(self.draft, step.items, np.where(failed, step.starts + self.left, -1))
        index = self.seen[:, None] + 1 + np.arange(self.length - 1)
        columns = to_device(np.minimum(index, self.chain.shape[1] - 1), self.chain.device)
        row = torch.arange(len(columns), device=columns.device)[:, None]
        self.left_tokens, self.left_logq = self.chain[row, columns], self.logq[row, columns]
        waits, end = step.widths == 0, step.starts + self.left + self.new - 1
        goes_on = goes_on.astype(bool) & ~waits
        known = np.where(goes_on, end, step.starts + num_accepted)
        self.known = np.where(waits, self.known, known)
        self.left = np.where(goes_on, self.left + self.new - self.seen - 1, 0)
        del self.chain, self.logq


@method(
    "pearl",
    sampler="speculative",
    about="PEARL: the draft model drafts the next round while the target verifies this one",
    paper="2408.11850",
    title="PEARL: Parallel Speculative Decoding with Adaptive Draft Length",
    params={"drafter": "pearl"},
)
@register("drafter", "pearl")
class Pearl(DraftSource):
    """Drafts with a smaller model, one round ahead of the target. Parameters: ``draft_model``,
    ``num_speculative_tokens``, ``draft_temperature``, ``draft_guidance``."""

    needs_draft_model = True
    shapes = False

    rules = (
        Rule(
            "num_speculative_tokens",
            lambda s: s.num_speculative_tokens != AUTO,
            "a number with the drafter pearl",
        ),
        Rule("policy", lambda s: s.policy == "constant", "constant with the drafter pearl"),
    )

    @classmethod
    def make(cls, sampler, target, draft, verifier):
        draft = sampler.draft_target(target, draft)
        return PearlDrafter(draft, verifier, sampler.num_speculative_tokens)
