"""Drafts from mask tokens that ride in the pass that verifies the drafts before them.

Of a row, n tokens are committed, k drafts d_1 ... d_k follow, and behind every prefix of them
stands a group of mask tokens:

    root  d_1  d_2 ... d_k         verified: the target's distributions p of positions n ... n + k
    root  m m m ...                group 0, behind no draft
    root  d_1  m m m ...           group 1, behind one draft
    ...

If a drafts are accepted, the next drafts come from group a, which knows the committed tokens and
the accepted drafts. They are about positions n + a + 1 ... n + a + k, behind the token that this
pass adds and without knowing it. So every pass of the target verifies and drafts, and there are no
passes that draft alone. The first pass has no drafts, and masks in a chain behind the prompt.

Masks stand in slots of branches, which no committed token ever attends to: keys and values of the
committed tokens are those of plain autoregression.

    streaming    the target itself, trained to be causal and masked at once
                 (``gen.recipes.text.dual``), as WeDLM trains it. Mask i of a group is about its own
                 position n + a + i - 1, so that groups have k + 1 masks
    flexdraft    a causal model whose attention was tuned at mask tokens alone. For the input x of a
                 projection of attention (queries, keys, values, output) in the last layers,

                     W x               at tokens, as before
                     W x + U D x       at mask tokens; U [out, r] and D [r, in] are trained, and so
                                       is the embedding of the mask

                 so tokens give the target's own distribution, to the last bit. Mask i is about
                 position n + a + i, as a token there would be, so that groups have k masks.
                 "FlexDraft: Flexible Speculative Decoding via Attention Tuning and Bonus-Guided
                 Calibration" (arXiv 2605.20022). There whole projections are trained, which is r =
                 min(in, out); a small network corrects the drafts by the token that the pass adds,
                 which their masks do not know; and at large batches passes that draft and passes
                 that verify take turns. Those two are not here

Guarantee: that of the verifier, whatever the weights. Every draft is drawn from a distribution that
depends on committed tokens alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gen.core.lookup import take
from gen.core.method import method
from gen.core.registry import register, registry
from gen.models.targets.mask_tokens import mask_token, require_plain_history
from gen.samplers.causal.drafters.base import DepthNodes, DraftSource
from gen.samplers.causal.shapes.base import NodeDrafter
from gen.samplers.causal.shapes.static import Chain
from gen.samplers.engine.draft import DRAWS, Draft, Verdict
from gen.samplers.engine.rows import RowState

if TYPE_CHECKING:
    from gen.models.targets.base import StepOutput
    from gen.samplers.engine.step_context import CausalStep
    from gen.samplers.verifiers.base import Verifier

STREAMING, FLEXDRAFT = "streaming", "flexdraft"


class GroupNodes(DepthNodes):
    """Distributions of the next k = ``depth`` drafts, from the group of masks behind the accepted
    ones."""

    # log-probabilities of k drafts, [b, k, V]; -inf in rows whose first pass is still to come
    logq = RowState(start=-torch.inf)

    def __init__(self, depth: int):
        self.depth = depth

    def begin(self, step, tokens):
        return self.logq[:, :1]

    def read_group(self, logprobs: Tensor, first: Tensor) -> None:
        """Read the distributions of one group from those of a forward pass, [b, W, V]. ``first``:
        column of the mask of the first draft, long [b]; columns beyond the last are of positions
        that no draft is for."""
        column = first[:, None] + torch.arange(self.depth, device=first.device)
        self.logq = take(logprobs, column.clamp_max(logprobs.shape[1] - 1))


class OnePassDrafter(NodeDrafter):
    """Drafter of chains of ``depth`` drafts with a group of masks, tokens of the id ``mask``,
    behind every prefix; the first ``shift`` of a group stand before that of the first draft."""

    def __init__(self, mask: int, depth: int, verifier: Verifier, shift: int = 0):
        nodes = GroupNodes(depth)
        draws = next(draws for draws in DRAWS if draws in verifier.draws)
        super().__init__(nodes, Chain(None, depth), draws, verifier)
        self.groups, self.mask, self.size, self.shift = nodes, mask, depth + shift, shift

    @property
    def window(self) -> int:
        return 1 + self.size

    def propose(self, step: CausalStep, tokens: Tensor) -> Draft:
        if self.groups.logq is None:  # the first pass of all rows
            masks = torch.full_like(step.positions[:, 1:], self.mask)
            return Draft(masks, step.valid[:, 1:], num_drafts=0)
        draft = self.grow(step, tokens)
        rows, length = draft.tokens.shape
        if not length:  # one position is left
            return draft
        parents = self._parents(length).to(tokens.device)
        prefixes = torch.arange(length + 1, device=tokens.device).repeat_interleave(self.size)
        masks = draft.tokens.new_full((rows, len(prefixes)), self.mask)
        # a group exists where the drafts before it do
        exists = torch.cat([torch.ones_like(step.valid[:, :1]), draft.exists], 1)[:, prefixes]
        return Draft(
            torch.cat([draft.tokens, masks], 1),
            torch.cat([draft.exists, exists], 1),
            draft.logq,
            parents=parents.expand(rows, -1),
            failed=draft.failed,
            num_drafts=length,
        )

    def _parents(self, length: int) -> Tensor:
        """Parents of a chain of drafts and of its groups, long [L]."""
        group = torch.arange(length + 1)[:, None]
        columns = length + group * self.size + torch.arange(self.size - 1)
        return torch.cat([torch.arange(length) - 1, torch.cat([group - 1, columns], 1).flatten()])

    def verify(self, step: CausalStep, draft: Draft, output: StepOutput) -> Verdict:
        logp, length = output.logprobs, draft.num_drafts
        if not length:
            ids = step.categorical(logp, "token", step.valid, shared=True)
            self.groups.read_group(logp, torch.full_like(step.start, 1 + self.shift))
            return Verdict(torch.zeros_like(step.start), ids)
        drafts = Draft(draft.tokens[:, :length], draft.exists[:, :length], draft.logq)
        verdict = self._judge(step, drafts, logp[:, : length + 1])
        accepted = verdict.num_accepted
        self.groups.read_group(logp, length + 1 + accepted * self.size + self.shift)
        ids = verdict.tokens.new_zeros(logp.shape[:2])
        ids[:, : length + 1] = verdict.tokens
        path = torch.arange(logp.shape[1] - 1, device=ids.device)
        return Verdict(accepted, ids, path.expand(len(ids), -1))


@register("drafter", STREAMING)
class Streaming(DraftSource):
    """Drafts with mask tokens of a target that was trained to be causal and masked at once, in the
    pass that verifies the drafts before. Parameters: ``num_speculative_tokens``."""

    needs_weights = True  # those of the target
    shapes = False

    @classmethod
    def make(cls, sampler, target, draft, verifier):
        mask = mask_token(target, STREAMING, sampler.drafter_weights)
        require_plain_history(target, f"the drafter {STREAMING}")
        depth = int(sampler.num_speculative_tokens)
        return OnePassDrafter(mask, depth, verifier, shift=1)


@method(
    "flexdraft",
    sampler="speculative",
    about="drafts with mask tokens, at which alone attention is tuned, in the pass that verifies",
    paper="2605.20022",
    title="FlexDraft: Flexible Speculative Decoding via Attention Tuning and Bonus-Guided"
    " Calibration",
    params={"drafter": FLEXDRAFT, "num_speculative_tokens": 7},
)
@register("drafter", FLEXDRAFT)
class FlexDraft(DraftSource):
    """Drafts with mask tokens, at which alone the target's attention was tuned, in the pass that
    verifies the drafts before. Parameters: ``drafter_weights``, ``num_speculative_tokens``."""

    needs_weights = True
    shapes = False

    @classmethod
    def make(cls, sampler, target, draft, verifier):
        model = registry.get("drafting", FLEXDRAFT)(target, sampler.drafter_weights)
        require_plain_history(target, f"the drafter {FLEXDRAFT}")
        target.run_with(model)
        depth = int(sampler.num_speculative_tokens)
        return OnePassDrafter(model.config.vocab_size, depth, verifier)
