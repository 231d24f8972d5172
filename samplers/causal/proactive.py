"""Jacobi decoding whose window begins with a tree of drafts: SJD-PAC.

    window    the iterate x_1 .. x_L, a chain, and beside its first ``tree_levels`` drafts more
              candidates: every node above has ``tree_width`` children. The first child on the chain
              is the iterate; the others are drawn without replacement from the distribution q_n of
              the iterate at that position, the same one in all branches
    verdict   child after child, each against the residual of those before it (``recursive``)
    iterate   past the accepted tokens the chain goes on by maximal coupling: a draft stays with
              probability min(1, p / q), else it is drawn from the residual

Half of the passes of speculative Jacobi decoding commit one token, so that candidates are worth
most where a pass begins. Kang et al., "SJD-PAC: Accelerating Speculative Jacobi Decoding via
Proactive Drafting and Adaptive Continuation" (arXiv 2603.18599). The released code takes the
longest accepted path, and judges siblings as draws from p that are draws from a residual. Both
change the distribution. Here the first accepted sibling counts, and siblings come from q.

Guarantee: the distribution of the model. Past the accepted tokens no sibling was judged, so each
draft there is distributed as its q, given everything at lower positions.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gen.models.targets.base import StepOutput
from gen.samplers.causal.couplings import without_ends
from gen.samplers.causal.jacobi_drafter import JacobiDrafter
from gen.samplers.engine.draft import Draft, Verdict, node_positions, without
from gen.samplers.engine.host import to_device
from gen.samplers.engine.step_context import CausalStep
from gen.samplers.verifiers.base import TOKEN
from gen.samplers.verifiers.recursive import Recursive


def num_siblings(width: int, levels: int) -> int:
    """Count the drafts beside the chain: those of a tree of so many levels, without one of each."""
    return sum(width**level for level in range(1, levels + 1)) - levels


class ProactiveDrafter(JacobiDrafter):
    """Drafter of an iterate with further candidates at its first positions.

    Args:
        tree: children of a node, and levels of nodes with siblings.
        rest: arguments of ``JacobiDrafter``; its window is that of the chain.
    """

    def __init__(self, tree: tuple[int, int], *rest):
        super().__init__(*rest)
        self.tree_width, self.tree_levels = tree
        self.chain: list[int] = []  # columns of the chain within the tree

    def propose(self, step: CausalStep, tokens: Tensor) -> Draft:
        if step.positions.shape[1] == 1:  # a tree has no draft of the last position
            return Draft.none(tokens, step.valid)
        self.drafts = chain = super().propose(step, tokens)
        tree = self._with_siblings(step)
        if chain.failed is not None:
            tree.failed = torch.zeros_like(tree.exists)
            tree.failed[:, self.chain] = chain.failed
        return tree

    def _with_siblings(self, step: CausalStep) -> Draft:
        """Put siblings beside the first drafts of the chain, and the rest of the chain behind them.

        A draft has the same column in any batch: the noise and the coins of a column are its own.
        """
        chain, room = self.drafts, to_device(step.room, step.start.device)[:, None]
        self.room, (b, length), levels = room, chain.tokens.shape, self.tree_levels
        assert chain.logq is not None, "the coupling compares"
        q = F.pad(chain.logq, (0, 0, 0, levels), value=-torch.inf)  # [b, L + levels, V]
        column = torch.arange(max(length, levels), device=q.device).expand(b, -1)
        ids = F.pad(chain.tokens, (0, column.shape[1] - length))
        there = F.pad(chain.exists, (0, column.shape[1] - length))
        there = there & (column + 1 < room)
        head = slice(0, levels)
        tokens, parents, depth, exists = [ids[:, head]], [column[:, head] - 1], [], [there[:, head]]
        depth, drawn_from, level, size = [column[:, head] + 1], [q[:, head]], [-1], levels
        for number in range(levels):
            above = self._columns(level, column)
            alive = (above < 0) | torch.cat(exists, 1).gather(1, above.clamp_min(0))
            alive = alive & (number + 1 < room)
            rest = q[:, number, None].expand(-1, len(level), -1)
            following: list[list[int]] = [[] for _ in level]
            for turn in range(self.tree_width):
                first = 0 if turn else 1  # the chain has its child already
                active = (alive & ~rest.isneginf().all(-1))[:, first:]
                new_depth = torch.full_like(above[:, first:], number + 1)
                key, left = node_positions(step, new_depth, size), rest[:, first:]
                drawn = step.rng.categorical(left, step.rows, key, "draft", step.round, active)
                for index, children in enumerate(following):
                    children.append(size + index - first if index >= first else number)
                for parts, new in zip(
                    (tokens, parents, depth, exists, drawn_from),
                    (drawn, above[:, first:], new_depth, active, left),
                    strict=True,
                ):
                    parts.append(new)
                size += len(level) - first
                drawn = torch.cat([ids[:, number, None], drawn], 1) if first else drawn
                rest = without(rest, drawn)
            level = [child for children in following for child in children]
        tail = column[:, levels:]  # its first draft follows the last one of the head
        above = torch.where(tail == levels, levels - 1, tail - levels + size - 1)
        for parts, new in zip(
            (tokens, parents, depth, exists, drawn_from),
            (ids[:, levels:], above, tail + 1, there[:, levels:], q[:, levels : column.shape[1]]),
            strict=True,
        ):
            parts.append(new)
        self.chain = [*range(levels), *range(size, size + tail.shape[1])][:length]
        every = (torch.cat(x, 1) for x in (tokens, exists, parents, depth, drawn_from))
        tokens, exists, parents, depth, logq = every
        return Draft(tokens, exists, logq, parents=parents, depth=depth)

    def _columns(self, columns: list[int], like: Tensor) -> Tensor:
        """Return the same columns for every row, long [b, n]."""
        row = to_device(np.array(columns, dtype=np.int64), like.device)
        return row.expand(len(like), -1)

    def verify(self, step: CausalStep, draft: Draft, output: StepOutput) -> Verdict:
        if draft.is_chain:
            return super().verify(step, draft, output)
        chain, length = self.drafts, self.drafts.tokens.shape[1]
        logp = output.logprobs
        verdict = Recursive().verify(step, draft, logp)
        self.init.accept(step, verdict)
        accepted = verdict.num_accepted
        columns = self._columns([0, *(c + 1 for c in self.chain)], chain.tokens)[0]
        following = without_ends(logp.index_select(1, columns), self.space.ends)
        ids = self._continued(step, chain.tokens, following, accepted)
        width = length + 1
        inside = accepted[:, None] + torch.arange(1, width + 1, device=logp.device)
        inside = inside.clamp_max_(width - 1)
        self.tokens = ids.gather(1, inside)
        self.logq = following.gather(1, inside[..., None].expand(-1, -1, logp.shape[-1]))
        self.guessed = torch.zeros_like(self.tokens, dtype=torch.bool)
        self.num_columns = width
        return verdict

    def _continued(
        self, step: CausalStep, drafts: Tensor, logprobs: Tensor, accepted: Tensor
    ) -> Tensor:
        """Draw the next iterate [b, L + 1] past the accepted tokens; before, it is anything."""
        chain, length = self.drafts, drafts.shape[1]
        column = torch.arange(length + 1, device=drafts.device)
        at, rows = step.start[:, None] + column, step.rows
        past = (column < self.room) & (column > accepted[:, None])
        drafted = chain.exists & past[:, :length]
        chance = TOKEN.chance(chain, logprobs[:, :length])
        kept = step.rng.flip(chance, rows, at[:, :length], "keep", step.round, drafted) & drafted
        of_drafts = logprobs[:, :length]
        rest = TOKEN.residual(chain.drawn_from(slice(None), of_drafts), of_drafts)
        rest = torch.cat([rest, logprobs[:, length:]], 1)
        moved = past & ~F.pad(kept, (0, 1))
        new = step.rng.categorical(rest, rows, at, "redraft", step.round, moved)
        return torch.where(moved, new, F.pad(drafts, (0, 1)))

    def observe(self, step: CausalStep, num_accepted: np.ndarray, num_drafted: np.ndarray) -> None:
        super().observe(step, num_accepted, num_drafted)
        if step.positions.shape[1] > 1:
            columns = np.minimum(step.widths, self.num_columns)
            self.carried = np.maximum(columns - num_accepted - 1, 0)
