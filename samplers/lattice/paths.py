"""Dynamic programmes of decoding over the paths of a graph, in float64.

A path of n tokens is 0 = a_0 < a_1 < ... < a_n < L - 1, and vertex a_i emits token i. With the
allowed numbers of tokens A, the mass of what may follow when vertex j has emitted token n is

    W_n(j) = [n in A] E_j,L-1 + sum_{j<k<L-1} E_jk W_{n+1}(k)

so that a path is drawn given n in A by steps of E_jk W_{n+1}(k) / W_n(j). Where all numbers are
allowed, W = 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gen.core.errors import GenError


def log_product(x: Tensor, p: Tensor) -> Tensor:
    """Compute logsumexp_j (x_ij + log p_jk) as a product of matrices.

    Summands below e^-745 of the largest x_ij of a row i count as zero.

    Args:
        x: logarithms [B, K, L].
        p: probabilities [B, L, M].
    """
    top = x.amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0.0)
    return ((x - top).exp() @ p).log() + top


@dataclass(frozen=True)
class Links:
    """Links of the graphs of B rows.

    Attributes:
        inner: log E between vertices before the last one, -inf elsewhere, [B, L, L].
        last: log E from every vertex to the last one, [B, L].
        allowed: numbers of tokens that rows may have, bool [B, N + 1].
    """

    inner: Tensor
    last: Tensor
    allowed: Tensor

    @classmethod
    def of(cls, transitions: Tensor, lengths: Tensor, allowed: Tensor) -> Links:
        """Split transitions [B, L, L] of graphs of ``lengths`` vertices.

        N is at most the vertices between the first and the last one.
        """
        size = transitions.shape[1]
        column = torch.arange(size, device=lengths.device)
        end = (lengths - 1)[:, None]
        outside = column >= end
        inner = transitions.masked_fill(outside[:, None] | outside[..., None], -torch.inf)
        last = transitions.gather(2, end[:, None].expand(-1, size, 1))[..., 0]
        return cls(inner, last.masked_fill(outside, -torch.inf), allowed[:, : size - 1])

    @property
    def most(self) -> int:
        """Largest number of tokens N."""
        return self.allowed.shape[1] - 1

    def ending(self, count: int) -> Tensor:
        """Return the log E to the last vertex [B, L] where ``count`` tokens are allowed."""
        return self.last.masked_fill(~self.allowed[:, count, None], -torch.inf)

    def completions(self) -> Tensor:
        """Compute log W [B, N + 1, L].

        Raises:
            GenError: no path of a row has an allowed number of tokens.
        """
        w, back = [self.ending(self.most)], self.inner.exp().transpose(1, 2)
        for count in reversed(range(self.most)):
            onward = log_product(w[-1][:, None], back)[:, 0]
            w.append(torch.logaddexp(self.ending(count), onward))
        found = torch.stack(w[::-1], 1)
        self.require_path(found[:, 0, 0] > -torch.inf)
        return found

    def reachable(self) -> Tensor:
        """Find the vertices with an allowed number of tokens ahead, bool [B, N + 1, L].

        Raises:
            GenError: no path of a row has an allowed number of tokens.
        """
        links = (self.inner > -torch.inf).float()
        open_to = [self.ending(self.most) > -torch.inf]
        for count in reversed(range(self.most)):
            onward = (links @ open_to[-1][..., None].float())[..., 0] > 0
            open_to.append(onward | (self.ending(count) > -torch.inf))
        found = torch.stack(open_to[::-1], 1)
        self.require_path(found[:, 0, 0])
        return found

    def require_path(self, found: Tensor) -> None:
        """Raise ``GenError`` for the first row that has no path, of bool [B]."""
        if bool(found.all()):
            return
        row = int((~found).nonzero()[0])
        counts = self.allowed[row].nonzero()[:, 0].tolist()
        expected = f"{counts[0]} to {counts[-1]}" if counts else "a number that the graph has"
        raise GenError(
            f"no path of the graph of item {row} has as many tokens as the space allows"
            f" ({expected}); expected a longer source or another number of tokens"
        )


def best_paths(links: Links, rewards: list[Tensor], start: Tensor) -> tuple[Tensor, Tensor]:
    """Find the best path of every number of tokens.

    Args:
        links: links of the graphs.
        rewards: what a vertex adds as token n, [B, L] for every n in 1..N.
        start: what the first vertex adds, [B].

    Returns:
        Scores [B, N + 1], -inf for numbers that no path has, and vertices long [B, N + 1, N]: of
        row b and number n, entries 0..n - 1 are its path.
    """
    rows = len(links.last)
    a = torch.full_like(links.last, -torch.inf)
    a[:, 0] = start
    scores, ends, back = [], [], []
    for count in range(links.most + 1):
        if count:
            best, origin = (a[:, :, None] + links.inner).max(1)
            a = best + rewards[count - 1]
            back.append(origin)
        score, end = (a + links.ending(count)).max(1)
        scores.append(score)
        ends.append(end)
    paths = torch.zeros(rows, links.most + 1, links.most, dtype=torch.long, device=start.device)
    here = torch.stack(ends, 1)
    numbers = torch.arange(links.most + 1, device=start.device)
    for step in reversed(range(links.most)):
        walked = (numbers > step).expand(rows, -1)
        paths[:, :, step] = torch.where(walked, here, 0)
        here = torch.where(walked, back[step].gather(1, here), here)
    return torch.stack(scores, 1), paths
