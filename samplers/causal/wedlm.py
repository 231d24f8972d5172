"""WeDLM: mask tokens in a window behind the committed text, filled in any order by a causal model.

Of a row, n tokens have left the window. In the window, positions n ... n + W - 1, some tokens are
filled and the others masked. A forward pass computes

    x_(n-1)  filled tokens, by position  mask tokens, by position

with causal attention in this physical order, every token with its own position. So a mask attends
to all that is known and to the masks before it, and what a mask says is about its own position:

    H_i + position_penalty (i - i_0) < entropy_threshold    the positions i that are filled, i_0 the
                                                            first masked one; else the position of
                                                            the least value
    x_i ~ p_i                                               in one pass independently of each other

H_i is the entropy in nats before temperature and filters, so that temperature 0 says nothing about
certainty. No position behind a filled eos token is computed.

Filled tokens that follow the committed text without a gap leave the window in the pass that
computes them. They stand before everything that is not known yet, so that their keys and values in
the cache are those of plain autoregression: exact, and never computed again but for the last one.

Reference: Liu et al., "WeDLM: Reconciling Diffusion Language Models with Standard Causal Attention
for Fast Inference" (arXiv 2512.22737), whose temperature is 0.2. The model has to be trained to be
causal and masked at once (``gen.recipes.text.dual``).
Guarantee: approximate. ``entropy_threshold`` 0 fills one position per forward pass, the most
certain one, each from its distribution given all tokens before it in that order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gen.core.method import SEQUENTIAL, Limit, method
from gen.core.params import integer, number
from gen.core.registry import register
from gen.models.targets.mask_tokens import learned_mask, require_plain_history
from gen.samplers.engine.causal_loop import RAW_LOGPROBS, CausalSampler, Drafter
from gen.samplers.engine.draft import Draft, Verdict
from gen.samplers.engine.host import to_device
from gen.samplers.engine.rows import RowState
from gen.samplers.verifiers.base import num_accepted

if TYPE_CHECKING:
    from gen.models.targets.base import StepOutput
    from gen.models.targets.causal import CausalTarget
    from gen.samplers.engine.step_context import CausalStep

MASKED = -1  # in the window


class MaskedWindow(Drafter):
    """Window of filled and masked positions behind the committed tokens. ``mask``: id of the mask
    token."""

    needs = frozenset({RAW_LOGPROBS})
    # tokens of positions n ... n + W - 1 of each row, long [b, W]
    filled = RowState(start=MASKED)

    def __init__(self, target: CausalTarget, mask: int, sampler: MaskedWindowSampler):
        self.target, self.mask, self.sampler = target, mask, sampler
        self.size, self.window = sampler.window, 1 + sampler.window

    def propose(self, step: CausalStep, tokens: Tensor) -> Draft:
        device, is_first_pass = tokens.device, self.filled is None
        if is_first_pass:
            blank = (len(step.rows), self.size)
            self.filled = torch.full(blank, MASKED, dtype=torch.long, device=device)
        # 1. Positions that a row has, up to the first filled eos token
        left = np.minimum(step.room, self._left(step))
        self.room, width = to_device(step.room, device), min(self.size, max(left.tolist()))
        self.offset = torch.arange(self.size, device=device)
        eos = self._first_end(self.filled)
        exists = (self.offset < to_device(left, device)[:, None]) & (self.offset <= eos[:, None])
        self.known = (self.filled != MASKED) & exists
        # 2. Filled tokens first, then masks, then what does not exist
        kind = torch.where(self.known, 0, torch.where(exists, 1, 2))
        self.order = kind.argsort(stable=True, dim=1)
        ids = torch.where(self.known, self.filled, self.mask)
        ids, exists = (x.gather(1, self.order)[:, :width] for x in (ids, exists))
        positions = step.start[:, None] + self.order[:, :width]
        # 3. A chain in this order; of masks alone one in the slots of their positions
        parents = None
        if not is_first_pass:
            parents = torch.arange(-1, width - 1, device=device).expand(len(ids), -1)
        return Draft(ids, exists, parents=parents, num_drafts=0, positions=positions)

    def verify(self, step: CausalStep, draft: Draft, output: StepOutput) -> Verdict:
        assert output.raw is not None, "the loop asked for it"
        width = draft.tokens.shape[1]
        order = self.order[:, :width]
        # 1. Fill the positions that are certain enough, or the most certain one
        is_masked = draft.exists & ~self.known.gather(1, order)
        entropy = torch.special.entr(output.raw()[:, 1:].double().exp()).sum(-1)
        first = torch.where(is_masked, order, self.size).amin(1, keepdim=True)
        doubt = entropy + self.sampler.position_penalty * (order - first)
        doubt = doubt.masked_fill(~is_masked, torch.inf)
        fill = doubt < self.sampler.entropy_threshold
        least = (self.offset[:width] == doubt.argmin(1, keepdim=True)) & is_masked
        fill = torch.where(fill.any(1, keepdim=True), fill, least)
        logp = output.logprobs[:, 1:]
        ids = step.categorical(logp, "token", fill, first=1, shared=True)
        before = self.filled.gather(1, order)
        filled = self.filled.scatter(1, order, torch.where(fill, ids, before))
        # 2. Let the tokens leave that this pass computed, and the one behind them; all of a row
        # that is complete
        computed, known = num_accepted(self.known), num_accepted(filled != MASKED)
        end = to_device(self._left(step), ids.device)
        complete = (known >= end) | (self._first_end(filled) < known)
        leave = torch.where(complete, known, computed + (known > computed).long())
        leave = torch.minimum(leave, self.room)
        # 3. The window begins behind them
        shifted = self.offset + leave[:, None]
        self.filled = F.pad(filled, (0, self.size), value=MASKED).gather(1, shifted)
        # 4. Commit them, and keep the keys of those that were computed
        tokens = F.pad(filled.clamp_min(0), (0, 1))[:, : 1 + width]
        columns = F.pad(self.order.argsort(1) + 1, (0, 1))[:, : 1 + width].clamp_max(width)
        path = None if draft.is_chain else draft.parents + 1
        return Verdict(computed, tokens, path, leave, columns)

    def _first_end(self, filled: Tensor) -> Tensor:
        """Find the first filled end of each window, long [b]; W where there is none."""
        is_end = self.target.space.is_end(filled)
        return torch.where(is_end, self.offset, self.size).amin(1)

    def _left(self, step: CausalStep) -> np.ndarray:
        """Count the tokens that each row may still have, int64 [b]."""
        limits = self.target.limits
        total = self.target.length if limits is None else limits[step.items]
        return np.minimum(total, self.target.length) - step.starts


@method(
    "wedlm",
    sampler="masked_window",
    about="WeDLM: masks in a window behind the text, filled where a causal model is certain",
    paper="2512.22737",
    title="WeDLM: Reconciling Diffusion Language Models with Standard Causal Attention for Fast"
    " Inference",
    params={"window": 16, "entropy_threshold": 0.4, "position_penalty": 0.02},
    aliases={
        "wedlm_window_size": "window",
        "wedlm_entropy_threshold": "entropy_threshold",
        "wedlm_pos_penalty_factor": "position_penalty",
    },
    limit=Limit(SEQUENTIAL, {"entropy_threshold": 0.0}),
)
@register("sampler", "masked_window")
@dataclass(frozen=True)
class MaskedWindowSampler(CausalSampler):
    """Fill mask tokens in a window behind the committed text; for a causal model that was trained
    at masks too. ``window``: positions of the window. ``entropy_threshold``: nats below which a
    position is filled. ``position_penalty``: nats added per position behind the first mask."""

    window: int = integer(16, least=1)
    entropy_threshold: float = number(0.4)
    position_penalty: float = number(0.02)

    papers = ("2512.22737",)
    reference = "one position per forward pass"
    guarantee = "approximate"

    @property
    def returns_logprobs(self) -> bool:
        """False: the tokens of a step are from several forward passes."""
        return False

    def make_drafter(self, target, draft):
        require_plain_history(target, "sampler masked_window")
        mask = learned_mask(target, "sampler masked_window", target.space.mask_token_id)
        return MaskedWindow(target, mask, self)
