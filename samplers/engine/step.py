"""One step of the causal loop as a function of tensors: draft, one forward pass, verify.

    draft    = drafter.propose(step, tokens)
    output   = target.predict(last committed token and drafts)     W columns, a chain or a tree
    verdict  = drafter.verify(step, draft, output)

What rows the step has, and what becomes of the verdict, is the host's business
(``gen.samplers.engine.causal_loop``). Where the drafter reads no value on the host
(``Drafter.captures``), a step is recorded once and replayed
(``gen.samplers.engine.captured_step``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gen.samplers.engine.failed import failed_draws

if TYPE_CHECKING:
    from gen.models.targets.base import StepOutput
    from gen.models.targets.causal import CausalTarget
    from gen.samplers.engine.draft import Draft, Verdict
    from gen.samplers.engine.step_context import CausalStep


@dataclass
class Columns:
    """What the host reads of a step, of which each is [b, n].

    Attributes:
        counts: accepted drafts, or tokens to commit, long [b, 1].
        drafted: drafts that there were, bool [b, L].
        failed: columns without a distribution, bool [b, W].
        token_ids: tokens of the verdict, long [b, W]; None for latents.
        draft_failed: drafts without a distribution, bool [b, L]; None without a draft model.
    """

    counts: Tensor
    drafted: Tensor
    failed: Tensor
    token_ids: Tensor | None
    draft_failed: Tensor | None

    def joined(self) -> Tensor:
        """Join all columns, long [b, n], so that they are copied at once."""
        return torch.cat([x.long() for x in vars(self).values() if x is not None], 1)

    def to_host(self, joined: Tensor | None = None) -> dict[str, np.ndarray | None]:
        """Copy them to the host: the only time that a step waits for the device. ``joined``: what
        the method of that name returned; None to join them."""
        known = {name: x for name, x in vars(self).items() if x is not None}
        if self.counts.is_cpu and joined is None:
            found = {name: x.numpy() for name, x in known.items()}
        else:
            joined = self.joined() if joined is None else joined
            ends = np.cumsum([x.shape[1] for x in known.values()])[:-1]
            parts = np.split(joined.cpu().numpy(), ends, axis=1)
            types = {torch.bool: np.bool_, torch.long: np.int64}
            found = {
                name: part.astype(types[x.dtype], copy=False)
                for (name, x), part in zip(known.items(), parts, strict=True)
            }
        return {name: found.get(name) for name in vars(self)}


@dataclass
class Computed:
    """What a step computed.

    Attributes:
        step: its context, whose columns are those of the forward pass.
        draft: drafts, of which those beyond the last position of a row do not exist.
        output: outcome of the forward pass.
        verdict: what the drafter made of them.
        columns: what the host reads of it.
        joined: its columns in one tensor, of a step that was replayed; None to join them.
    """

    step: CausalStep
    draft: Draft
    output: StepOutput
    verdict: Verdict
    columns: Columns
    joined: Tensor | None = None


def compute(
    step: CausalStep, drafter: Any, target: CausalTarget, tokens: Tensor, last: Tensor
) -> Computed:
    """Draft, run one forward pass and verify: a step, with the columns of a chain, of a
    ``gen.samplers.engine.causal_loop.Drafter``. ``tokens``: committed ones of the rows, [b, T(,
    C)], ``last`` the last one of each, [b, 1(, C)]."""
    draft = drafter.propose(step, tokens)
    step = branched(step, draft)
    own = {}
    if draft.positions is not None:
        column = torch.arange(step.valid.shape[1], device=last.device)
        own["own"] = step.valid & (column > 0)
    parents = None if draft.is_chain else draft.parents
    output = target.predict(inputs(step, draft, last), step.positions, parents, **own)
    step.hidden_states = output.hidden_states
    verdict = drafter.verify(step, draft, output)
    failed = failed_draws(verdict.tokens, output.logprobs)
    if verdict.columns is not None:
        failed = failed.gather(1, verdict.columns)
    elif verdict.path is not None:  # its columns in the order of the tokens
        failed = torch.cat([failed[:, :1], failed.gather(1, verdict.path + 1)], 1)
    if verdict.path is not None:  # keys and values of the accepted branch go to their positions
        target.commit_path(verdict.path, verdict.num_accepted)
    counts = verdict.num_accepted if verdict.num_committed is None else verdict.num_committed
    ids = verdict.tokens if verdict.tokens.ndim == 2 else None
    columns = Columns(counts[:, None], draft.exists, failed, ids, draft.failed)
    return Computed(step, draft, output, verdict, columns)


def branched(step: CausalStep, draft: Draft) -> CausalStep:
    """Lay the columns of a tree of drafts at the positions of their depth, and those of a draft
    with positions there; a chain lies there, and ends where the draft ends.

    Drafts beyond the last position do not exist (``draft.exists``).
    """
    if draft.positions is not None:
        positions = torch.cat([step.start[:, None], draft.positions], 1)
    elif draft.is_chain:
        width = 1 + draft.tokens.shape[1]
        if width >= step.valid.shape[1]:
            return step
        positions, valid = step.positions[:, :width], step.valid[:, :width]
        widths = np.minimum(step.widths, width)
        return replace(step, positions=positions, valid=valid, widths=widths)
    else:
        positions = step.start[:, None] + F.pad(draft.depth, (1, 0))
    inside = positions < (step.start + step.left)[:, None]
    draft.exists = draft.exists & inside[:, 1:]
    valid = torch.cat([inside[:, :1], draft.exists], 1)
    positions = torch.where(valid, positions, positions[:, :1])
    return replace(step, positions=positions, valid=valid, widths=step.room, is_full=False)


def inputs(step: CausalStep, draft: Draft, last: Tensor) -> Tensor:
    """Put the last committed token before the drafts: [b, W(, C)]; columns that do not exist repeat
    it."""
    if not draft.tokens.shape[1]:
        tokens = last
    else:
        tokens = torch.cat([last, draft.tokens], 1)[:, : step.valid.shape[1]]
    if step.is_full:
        return tokens
    return torch.where(step.valid if tokens.ndim == 2 else step.valid[..., None], tokens, last)
