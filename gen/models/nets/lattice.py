"""Dynamic programmes of training over the paths of a graph (DA-Transformer, arXiv 2205.07459).

For targets y_1 ... y_M and m_ij = log P(y_i | v_j), with paths a_1 = 0 < a_2 < ... < a_M = L - 1,

    f_1(0) = m_10, else -inf        f_i(j) = m_ij + logsumexp_{k<j} (f_{i-1}(k) + log E_kj)
    b_M(L-1) = m_M,L-1, else -inf   b_i(j) = m_ij + logsumexp_{k>j} (log E_jk + b_{i+1}(k))

and log P(y | x) = f_M(L-1) = b_1(0). The posterior of the vertex of target i is

    P(a_i = j | x, y) = exp(f_i(j) + b_i(j) - m_ij - log P(y | x))

since both f and b hold m_ij. The released code leaves m_ij in twice (``released=True``), which
makes it over-sharp. All take float32 or float64, and -inf for what cannot be.
"""

from __future__ import annotations

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """Return x in float32, or float64 if it is."""
    return x if x.dtype == torch.float64 else x.float()


def mixed_links(q: Tensor, k: Tensor, gate: Tensor, lengths: Tensor) -> Tensor:
    """Compute log E [B, L, L], mixed of the heads' transitions by a gate per vertex.

    Args:
        q: queries of the vertices, [B, L, H, d].
        k: keys, [B, L, H, d].
        gate: logits of the heads, [B, L, H].
        lengths: vertices of every row, long [B].
    """
    size = q.shape[1]
    column = torch.arange(size, device=q.device)
    allowed = (column[:, None] < column) & (column < lengths[:, None, None])
    scores = wide(q).transpose(1, 2) @ wide(k).permute(0, 2, 3, 1) / q.shape[-1] ** 0.5
    # the last vertex has no successor: a finite number keeps its softmax defined
    scores = scores.masked_fill(~allowed[:, None], torch.finfo(scores.dtype).min)
    gates = wide(gate).log_softmax(-1).transpose(1, 2)[..., None]
    mixed = (scores.log_softmax(-1) + gates).logsumexp(1)
    return mixed.masked_fill(~allowed, -torch.inf)


def log_sum(x: Tensor, dim: int) -> Tensor:
    """Compute the logsumexp of x over an axis; where all is -inf the gradient is zero, not nan."""
    top = x.amax(dim, keepdim=True).detach()
    top = top.masked_fill(top == -torch.inf, 0.0)
    total = (x - top).exp().sum(dim)
    some = total > 0
    return torch.where(some, total.masked_fill(~some, 1.0).log() + top.squeeze(dim), -torch.inf)


def chain_links(lengths: Tensor, step: int, like: Tensor, sharpness: float = 2.0) -> Tensor:
    """Make fixed log E [B, L, L] whose paths are chains of ``step`` vertices per target.

    From the first vertex they go to the next 2 ``step`` ones alike, from the others by ``step``
    vertices or nearly so, and to the last vertex from the last 3 ``step`` ones.

    Args:
        lengths: vertices of every row, long [B].
        step: vertices per target.
        like: transitions of that shape, for the type of the result.
        sharpness: logarithm that a vertex more or less costs.
    """
    column = torch.arange(like.shape[1], device=like.device)
    ahead = (column - column[:, None]).to(like)
    inner = torch.where(
        column[:, None] == 0, (ahead - 2 * step).clamp(min=0), (ahead - step).abs()
    ).expand_as(like)
    last = (column == lengths[:, None] - 1)[:, None]
    cost = torch.where(last, (ahead - 3 * step).clamp(min=0), inner)
    allowed = (ahead > 0) & (column < lengths[:, None, None])
    scores = (-sharpness * cost).masked_fill(~allowed, torch.finfo(like.dtype).min)
    return scores.log_softmax(-1).masked_fill(~allowed, -torch.inf)


def matches(emissions: Tensor, targets: Tensor) -> Tensor:
    """Gather m [B, M, L] from emissions [B, L, V] and targets, long [B, M]."""
    index = targets[:, None].expand(-1, emissions.shape[1], -1)
    return emissions.gather(2, index).transpose(1, 2)


def forward_scores(transitions: Tensor, m: Tensor) -> Tensor:
    """Compute f [B, M, L] from log E [B, L, L] and m [B, M, L]."""
    first = torch.full_like(m[:, 0], -torch.inf)
    first = torch.cat([m[:, 0, :1], first[:, 1:]], 1)
    f = [first]
    for i in range(1, m.shape[1]):
        f.append(m[:, i] + log_sum(f[-1][:, :, None] + transitions, 1))
    return torch.stack(f, 1)


def backward_scores(transitions: Tensor, m: Tensor, lengths: Tensor, counts: Tensor) -> Tensor:
    """Compute b [B, M, L].

    Args:
        transitions: log E [B, L, L].
        m: [B, M, L].
        lengths: vertices of every row, long [B].
        counts: targets of every row, long [B]; b is -inf behind the last one.
    """
    column = torch.arange(m.shape[2], device=m.device)
    is_last = column == lengths[:, None] - 1
    b = torch.full_like(m[:, 0], -torch.inf)
    out = []
    for i in reversed(range(m.shape[1])):
        end = m[:, i].masked_fill(~is_last, -torch.inf)
        b = torch.where(
            (counts == i + 1)[:, None], end, m[:, i] + log_sum(transitions + b[:, None], 2)
        )
        out.append(b)
    return torch.stack(out[::-1], 1)


def log_likelihood(transitions: Tensor, m: Tensor, lengths: Tensor, counts: Tensor) -> Tensor:
    """Compute log P(y | x) [B]; -inf for more targets than vertices.

    Args: those of ``backward_scores``.
    """
    f = forward_scores(transitions, m)
    return f[torch.arange(len(f), device=f.device), counts - 1, lengths - 1]


def lattice_loss(transitions: Tensor, m: Tensor, lengths: Tensor, counts: Tensor) -> Tensor:
    """Compute the mean over rows of -log P(y | x) / M.

    Rows that no path fits count as zero, with zero gradient.

    Args: those of ``backward_scores``.
    """
    found = log_likelihood(transitions, m, lengths, counts)
    fits = found > -torch.inf
    return (torch.where(fits, -found, 0.0) / counts).mean()


def posterior(
    transitions: Tensor, m: Tensor, lengths: Tensor, counts: Tensor, released: bool = False
) -> Tensor:
    """Compute P(a_i = j | x, y) [B, M, L]; rows behind the last target are zero.

    Args: those of ``backward_scores``, and
        released: count the emission twice as the released code does, which is another
            distribution.
    """
    f = forward_scores(transitions, m)
    b = backward_scores(transitions, m, lengths, counts)
    both = f + b if released else f + b - m.masked_fill(m == -torch.inf, 0.0)
    total = log_sum(both, 2)[..., None]
    return (both - total.masked_fill(total == -torch.inf, 0.0)).exp()


def best_alignment(transitions: Tensor, m: Tensor, lengths: Tensor, counts: Tensor) -> Tensor:
    """Find the most probable path of every row's targets: its vertices, long [B, M].

    Entries behind the last target, and those of rows that no path fits, are 0.

    Args: those of ``backward_scores``.
    """
    rows, depth = m.shape[:2]
    f = torch.full_like(m[:, 0], -torch.inf)
    f[:, 0] = m[:, 0, 0]
    scores, back = [f], []
    for i in range(1, depth):
        best, origin = (scores[-1][:, :, None] + transitions).max(1)
        scores.append(m[:, i] + best)
        back.append(origin)
    every = torch.arange(rows, device=m.device)
    fits = torch.stack(scores, 1)[every, counts - 1, lengths - 1] > -torch.inf
    here, path = lengths - 1, torch.zeros(rows, depth, dtype=torch.long, device=m.device)
    for i in reversed(range(depth)):
        path[:, i] = torch.where((i < counts) & fits, here, 0)
        if i:
            before = back[i - 1][every, here]
            here = torch.where(i < counts, before, here)
    return path


def glance(
    emissions: Tensor,
    path: Tensor,
    targets: Tensor,
    counts: Tensor,
    inputs: Tensor,
    ratio: float,
    generator: torch.Generator,
) -> Tensor:
    """Reveal targets at some vertices of their best path (glancing training, GLAT).

    Of a row with c of its M targets right on the path, round((M - c) ratio) are revealed, chosen
    uniformly.

    Args:
        emissions: log P of a first pass [B, L, V]. Both passes must share their dropout.
        path: vertices of the targets, long [B, M] (``best_alignment``).
        targets: long [B, M].
        counts: targets of every row, long [B].
        inputs: inputs of the decoder, long [B, L].
        ratio: share of the wrong ones.
        generator: generator of the choice.

    Returns:
        Inputs with the revealed targets, long [B, L].
    """
    depth = targets.shape[1]
    column = torch.arange(depth, device=targets.device)
    # a row that no path fits has vertex 0 for all of its targets
    known = (column < counts[:, None]) & ((path > 0) | (column == 0))
    right = (emissions.argmax(-1).gather(1, path) == targets) & known
    reveal = ((counts - right.sum(1)) * ratio).round()
    keys = torch.rand(targets.shape, generator=generator).to(targets.device)
    rank = keys.masked_fill(~known, 2.0).argsort(1).argsort(1)
    chosen = (rank < reveal[:, None]) & known
    shown = inputs.clone()
    row, column = chosen.nonzero(as_tuple=True)
    shown[row, path[row, column]] = targets[row, column]
    return shown
