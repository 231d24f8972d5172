"""Speculative decoding of one scale: the pass that fills drafts it, the one that refines verifies.

A model of the HMAR form (arXiv 2506.04421) has two distributions of a scale: q_i, the product over
all positions of its filling pass, and the chain of its refining pass in a fixed order s,

    p_i = refine_k,s(i)(. | f_hat_<k, x_s(0), ..., x_s(i-1), the others masked)

which takes one pass per token. Here x_i ~ q_i are drafts of the whole scale from one pass, and one
batched call of the refining pass judges m of them: copy j of the scale has the drafts before s(i+j)
unmasked, and gives p_i+j. Every draft is accepted with probability min(1, p/q); at the first
rejection the token comes from norm((p - q)+) (arXiv 2211.17192). Drafts behind it are still draws
from q, which no token of the scale changes, and are judged in the next call.

Scales of one position are those of the filling pass.

Guarantee: the distribution of the refining chain in that order, whatever m. At m = 1 a call judges
one draft.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gen.core.params import choice, integer, number
from gen.core.registry import register
from gen.core.sampler import Sampler
from gen.samplers.engine.draft import Draft
from gen.samplers.scales.loop import ScalesRun, check_refines, order_of
from gen.samplers.verifiers.base import Token, num_accepted


@register("sampler", "scale_draft")
@dataclass(frozen=True)
class ScaleDraft(Sampler):
    """Draft a scale with one filling pass, and judge several tokens per refining call.

    ``num_speculative_tokens``: tokens m that one call judges. ``order``: the fixed order of the
    positions of a scale. ``refine_guidance``: guidance scale of the refining pass.
    """

    num_speculative_tokens: int = integer(8, least=1, each="column")
    order: str = choice("halton", ("halton", "raster"))
    refine_guidance: float = number(1.0)

    protocol = "refined_scales"
    papers = ("2506.04421", "2211.17192")
    reference = "one position per refining pass in the same order"
    guarantee = "same_distribution"

    def __call__(self, target, rng, *, draft=None, canvas=None, trace=False, callback=None):
        check_refines(target, "scale_draft")
        run = ScalesRun(target, rng, canvas, trace, callback)
        while target.scale < len(target.slices) and not run.is_over():
            ids = run.here
            DraftedScale(run, self).decode()
            target.commit(run.tokens[:, ids])
        return run.output()


class DraftedScale:
    """One scale that is drafted and judged.

    Attributes:
        order: unknown positions of the scale in the order of judgement, before the known ones, long
            [B, n_k].
        total: number of unknown positions, long [B].
        decided: how many of them are decided, long [B].
        drafts: drafts of the scale, long [B, n_k].
        logq: log-probabilities that they were drawn from, [B, n_k, V].
    """

    def __init__(self, run: ScalesRun, params: ScaleDraft):
        self.run, self.params = run, params
        known, sides = run.known[:, run.here], run.target.model.quantize.sides[run.target.scale]
        rank = order_of(params.order, sides, known.device)
        self.order = (rank + known.long() * known.shape[1]).argsort(1)
        self.total = (~known).sum(1)
        self.decided = torch.zeros_like(self.total)

    def decode(self) -> None:
        """Decide all unknown positions."""
        if not bool(self.total.any()):
            return
        self._draft()
        calls = 0
        while bool((self.decided < self.total).any()):
            calls += 1
            self._judge(calls)

    def _draft(self) -> None:
        """Draw all unknown positions; those of a scale of one position stay."""
        run, rows = self.run, self.total.nonzero()[:, 0]
        window = ~run.known[rows][:, run.here]
        output, final = run.target.predict(run.some(rows)), window.shape[1] == 1
        drawn = run.draw(output.logprobs, 0, window, rows)
        run.record(output, window, drawn, window & final, rows)
        run.report()
        self.drafts = run.tokens[:, run.here].index_copy(0, rows, drawn)
        shape = len(self.drafts), *output.logprobs.shape[1:]
        self.logq = output.logprobs.new_zeros(shape).index_copy(0, rows, output.logprobs)
        if final:
            self.decided = self.total.clone()

    def _judge(self, call: int) -> None:
        """Judge the next drafts of every row with one refining call."""
        run, width = self.run, self.params.num_speculative_tokens
        rows = (self.decided < self.total).nonzero()[:, 0]
        column = torch.arange(width, device=rows.device)
        counts = (self.total - self.decided)[rows].clamp_max(width)
        judged = column < counts[:, None]
        at = (self.decided[rows, None] + column).clamp_max(self.order.shape[1] - 1)
        at = self.order[rows].gather(1, at)  # positions in the scale, long [b, m]
        output, logp = self._refine(rows, judged)
        n = torch.arange(len(rows), device=rows.device)[:, None]
        drafts = self.drafts[rows].gather(1, at)
        logq = self.logq[rows][n, at]
        proposed = Draft(drafts, judged, logq)
        chance = Token().chance(proposed, logp)
        round, positions = torch.full_like(rows, call), at + run.here.start
        kept = run.rng.flip(chance, rows, positions, "accept", round, judged) & judged
        accepted = num_accepted(kept)
        rejected = judged & (column == accepted[:, None])
        at_last = accepted.clamp_max(width - 1)
        rest = Token().residual_at(proposed, logp, at_last)[:, None]
        where, again = positions.gather(1, at_last[:, None]), rejected.any(1, keepdim=True)
        drawn = run.rng.categorical(rest, rows, where, "residual", round, again)
        tokens = torch.where(rejected, drawn, drafts)
        self._commit(rows, at, (judged, column < accepted[:, None], rejected), tokens, output)

    def _refine(self, rows: Tensor, judged: Tensor):
        """Run the copies of the scale that judge drafts.

        Args:
            rows: rows with undecided positions, long [b].
            judged: drafts of each row to judge, bool [b, m].

        Returns:
            Output of the call, and log-probabilities [b, m, V] of the judged positions.
        """
        run, (row, column) = self.run, judged.nonzero(as_tuple=True)
        first = self.decided[rows][row] + column  # position in the order that a copy judges
        copies, rank = rows[row], self.order.argsort(1)
        hidden = (rank[copies] >= first[:, None]) & (rank[copies] < self.total[copies][:, None])
        ids = torch.where(run.known[:, run.here], run.tokens[:, run.here], self.drafts)[copies]
        ids = ids.masked_fill(hidden, 0)  # a model that leaks would read drafts that come later
        output = run.target.refine(ids, hidden, self.params.refine_guidance, copies)
        every = torch.arange(len(row), device=row.device)
        position = self.order[copies, first]
        logp = output.logprobs.new_zeros(*judged.shape, output.logprobs.shape[-1])
        logp[row, column] = output.logprobs[every, position]
        return output, logp

    def _commit(self, rows: Tensor, at: Tensor, verdict: tuple, tokens: Tensor, output) -> None:
        """Commit accepted drafts and the token of the rejected one.

        Args:
            rows: rows of the call, long [b].
            at: judged positions in the scale, long [b, m].
            verdict: drafts that were judged, accepted and rejected, bool [b, m] each.
            tokens: tokens of the judged positions, long [b, m].
            output: output of the call.
        """
        run, (judged, accepted, rejected) = self.run, verdict
        counts = judged.sum(1)
        spread = torch.zeros_like(self.drafts[rows])

        def on_scale(mask: Tensor) -> Tensor:
            return spread.scatter_add(1, at, (mask & judged).long()) > 0

        committed = on_scale(accepted | rejected)
        values = self.drafts[rows].scatter_add(
            1, at, torch.where(rejected & judged, tokens - self.drafts[rows].gather(1, at), 0)
        )
        per_row = replace(
            output,
            num_computed_tokens=counts * output.num_computed_tokens,
            num_computed_positions=counts * output.num_computed_positions,
        )
        window = on_scale(judged)
        run.record(per_row, window, values, committed, rows, on_scale(accepted), counts)
        run.report()
        self.drafts[rows] = torch.where(committed, values, self.drafts[rows])
        self.decided[rows] += ((accepted | rejected) & judged).sum(1)
