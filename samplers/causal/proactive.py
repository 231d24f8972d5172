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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gen.core.params import Rule, param
from gen.core.registry import registry
from gen.samplers.causal.couplings import without_ends
from gen.samplers.engine.causal_loop import CausalSampler
from gen.samplers.engine.draft import Draft, Verdict, node_positions, without
from gen.samplers.engine.host import to_device
from gen.samplers.engine.window import AUTO
from gen.samplers.verifiers.base import TOKEN

if TYPE_CHECKING:
    from gen.samplers.engine.step_context import CausalStep


def num_siblings(width: int, levels: int) -> int:
    """Count the drafts beside the chain: those of a tree of so many levels, without one of each."""
    return sum(width**level for level in range(1, levels + 1)) - levels


def siblings(width: int, levels: int) -> list[list[tuple[int, list[int]]]]:
    """List the draws of the siblings, by level and turn.

    Columns 0 .. levels - 1 are the chain's; siblings stand behind them in the order in which they
    are drawn.

    Returns:
        For each level, the draws of each turn: the column of the first one and the columns that
        they follow, -1 for the root. The first node of a level is the chain's, which has its first
        child already.
    """
    size, nodes, drawn = levels, [-1], []
    for level in range(levels):
        children: list[list[int]] = [[] for _ in nodes]
        children[0].append(level)
        turns = []
        for turn in range(width):
            following = nodes if turn else nodes[1:]
            turns.append((size, following))
            for column, own in enumerate(children if turn else children[1:], size):
                own.append(column)
            size += len(following)
        drawn.append(turns)
        nodes = [column for own in children for column in own]
    return drawn


class Siblings:
    """Further candidates at the first positions of an iterate: ``width`` children of a node, in
    ``levels`` levels of nodes with siblings."""

    def __init__(self, width: int, levels: int):
        self.levels, self.turns = levels, siblings(width, levels)
        self.count = num_siblings(width, levels)
        self.verifier = registry.get("verifier", "recursive")()

    def beside(self, step: CausalStep, chain: Draft) -> Draft:
        """Put siblings beside the first drafts of the iterate, and the rest of it behind them."""
        self.iterate, levels = chain, self.levels
        length = chain.tokens.shape[1]
        # the rest of the chain stands behind the siblings, and its first draft follows the head
        tail = np.arange(levels, max(length, levels)) + self.count
        self.columns = to_device(np.append(np.arange(levels), tail), step.start.device)
        tree = self._with_siblings(step)
        if chain.failed is not None:
            tree.failed = torch.zeros_like(tree.exists)
            tree.failed[:, self.columns[:length]] = chain.failed
        return tree

    def _with_siblings(self, step: CausalStep) -> Draft:
        """Lay out the tree. A draft has the same column in any batch: the noise and the coins of a
        column are its own."""
        chain, columns, device = self.iterate, self.columns, step.start.device
        room = step.left[:, None]
        assert chain.logq is not None, "the coupling compares"
        b, size = len(room), self.count + len(columns)
        more = len(columns) - chain.tokens.shape[1]
        q = F.pad(chain.logq, (0, 0, 0, more), value=-torch.inf)
        tokens = chain.tokens.new_zeros(b, size)
        exists, logq = tokens.bool(), q.new_empty(b, size, q.shape[-1])
        parents, depth = tokens.clone(), tokens.clone()
        number = torch.arange(len(columns), device=device)
        tokens[:, columns], logq[:, columns] = F.pad(chain.tokens, (0, more)), q
        exists[:, columns] = F.pad(chain.exists, (0, more)) & (number + 1 < room)
        parents[:, columns[1:]], depth[:, columns] = columns[:-1], number + 1
        parents[:, 0] = -1
        for level, turns in enumerate(self.turns):
            last = turns[-1][1]  # all nodes of the level
            rest = q[:, level, None].expand(-1, len(last), -1)
            for first, following in turns:
                new, skipped = slice(first, first + len(following)), len(last) - len(following)
                above = to_device(np.array(following, dtype=np.int64), device).expand(b, -1)
                logq[:, new], parents[:, new], depth[:, new] = rest[:, skipped:], above, level + 1
                alive = (above < 0) | exists.gather(1, above.clamp_min(0))
                there = alive & (level + 1 < room) & ~logq[:, new].isneginf().all(-1)
                at = node_positions(step, depth[:, new], first), "draft", step.round
                drawn = step.rng.categorical(logq[:, new], step.rows, *at, there)
                tokens[:, new], exists[:, new] = drawn, there
                taken = torch.cat([tokens[:, level : level + 1], drawn], 1) if skipped else drawn
                rest = without(rest, taken)
        return Draft(tokens, exists, logq, parents=parents, depth=depth)

    def verify(
        self, step: CausalStep, draft: Draft, logp: Tensor, ends: Sequence[int]
    ) -> tuple[Verdict, Tensor, Tensor, Tensor]:
        """Judge the tree by the distributions [b, W, V] behind root and drafts: the verdict,
        the next iterate [b, L + 1] past the accepted tokens, where it exists, and its distributions
        [b, L + 1, V], without ``ends``."""
        verdict = self.verifier.verify(step, draft, logp)
        columns = F.pad(self.columns[: self.iterate.tokens.shape[1]] + 1, (1, 0))
        following = without_ends(logp.index_select(1, columns), ends)
        column = torch.arange(len(columns), device=logp.device)
        exists, past = column < step.left[:, None], column > verdict.num_accepted[:, None]
        ids = self._continued(step, following, step.start[:, None] + column, exists & past)
        return verdict, ids, exists, following

    def _continued(self, step: CausalStep, logp: Tensor, at: Tensor, past: Tensor) -> Tensor:
        """Draw the next iterate ``past`` the accepted tokens; before, it is anything."""
        chain, rows = self.iterate, step.rows
        length = chain.tokens.shape[1]
        drafted, of_drafts = chain.exists & past[:, :length], logp[:, :length]
        chance = TOKEN.chance(chain, of_drafts)
        kept = step.rng.flip(chance, rows, at[:, :length], "keep", step.round, drafted) & drafted
        rest = TOKEN.residual(chain.drawn_from(slice(None), of_drafts), of_drafts)
        rest = torch.cat([rest, logp[:, length:]], 1)
        moved = past & ~F.pad(kept, (0, 1))
        new = step.rng.categorical(rest, rows, at, "redraft", step.round, moved)
        return torch.where(moved, new, F.pad(chain.tokens, (0, 1)))


@dataclass(frozen=True)
class Proactive(CausalSampler):
    """Base of samplers whose ``window`` may begin with a tree.

    Attributes:
        tree_width: of the coupling maximal: candidates at every node of the first levels of a
            window, which counts them; 1 is a chain.
        tree_levels: levels of nodes with so many candidates.
    """

    tree_width: int = param(1, int, 1, each="column")
    tree_levels: int = param(2, int, 1)

    rules = (
        Rule(
            "tree_width",
            lambda s: s.tree_width == 1 or s.coupling == "maximal",
            "1 with the coupling {coupling}, or the coupling {coupling?}",
        ),
        Rule(
            "window",
            lambda s: s.tree_width == 1 or (s.window != AUTO and s.window >= s.least_window),
            lambda s: f"a number of at least {s.least_window}, which the tree and its chain take",
        ),
    )

    @property
    def least_window(self) -> int:
        """Least window with a tree at its beginning."""
        return 2 + self.tree_levels + num_siblings(self.tree_width, self.tree_levels)
