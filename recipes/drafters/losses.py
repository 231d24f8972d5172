"""Losses between the distribution p of a target and the distribution q of a drafter.

Rejection sampling accepts a draft with probability sum_v min(p_v, q_v), so that ``nla`` is the
negative logarithm of what is measured. The divergences are those of DistillSpec (Zhou et al., arXiv
2310.08461). p is the distribution that tokens are drawn from, after guidance, temperature and
filters; it may be 0 where q is not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# (log p, log q), both [..., V] -> loss of each position [...]
Divergence = Callable[[Tensor, Tensor], Tensor]
LEAST = 1e-9  # least overlap and least probability that logarithms see
HYBRID_DECAY = 3.0


def acceptance(logp: Tensor, logq: Tensor) -> Tensor:
    """Return the probability that a draft of q is accepted under p: [..., V] -> [...]."""
    return torch.minimum(logp.exp(), logq.exp()).sum(-1)


def nla(logp: Tensor, logq: Tensor) -> Tensor:
    """Return the negative logarithm of the acceptance; 0 where q = p alone."""
    return -acceptance(logp, logq).clamp_min(LEAST).log()


def forward_kl(logp: Tensor, logq: Tensor) -> Tensor:
    """Return KL(p | q)."""
    return _kl(logp, logq)


def reverse_kl(logp: Tensor, logq: Tensor) -> Tensor:
    """Return KL(q | p), with ``LEAST`` for the p of tokens that p leaves out.

    It would be infinite under top-k.
    """
    floor = torch.tensor(LEAST, dtype=logp.dtype, device=logp.device).log()
    return _kl(logq, logp.clamp_min(floor))


def jensen_shannon(logp: Tensor, logq: Tensor) -> Tensor:
    """Return the mean of KL(p | m) and KL(q | m) with m = (p + q) / 2."""
    middle = torch.logaddexp(logp, logq) - torch.log(torch.tensor(2.0, dtype=logp.dtype))
    return (_kl(logp, middle) + _kl(logq, middle)) / 2


def total_variation(logp: Tensor, logq: Tensor) -> Tensor:
    """Return half the L1 distance, which is 1 minus the acceptance."""
    return (logp.exp() - logq.exp()).abs().sum(-1) / 2


def hybrid(logp: Tensor, logq: Tensor) -> Tensor:
    """Return w KL(p | q) + (1 - w) TV(p, q), w = exp(-3 a) falling with the acceptance a."""
    weight = torch.exp(-HYBRID_DECAY * acceptance(logp, logq).detach())
    return weight * forward_kl(logp, logq) + (1 - weight) * total_variation(logp, logq)


def nla_and_kl(logp: Tensor, logq: Tensor) -> Tensor:
    """Return ``nla`` and a tenth of KL(p | q), whose gradient reaches tokens with q > p too."""
    return nla(logp, logq) + 0.1 * forward_kl(logp, logq)


def _kl(logp: Tensor, logq: Tensor) -> Tensor:
    """Return KL(p | q) of distributions that may be 0."""
    p = logp.exp()
    gap = torch.where(p > 0, logp - logq, 0.0)
    return (p * gap).sum(-1)


LOSSES: dict[str, Divergence] = {
    "nla": nla,
    "nla_fkl": nla_and_kl,
    "fkl": forward_kl,
    "rkl": reverse_kl,
    "jsd": jensen_shannon,
    "tvd": total_variation,
    "hybrid": hybrid,
}


def mean_over(values: Tensor, weights: Tensor) -> Tensor:
    """Return the mean of values, weighted by weights of the same shape; 0 where all weigh 0."""
    weights = weights.to(values.dtype)
    values = torch.where(weights > 0, values, 0.0)
    return (values * weights).sum() / weights.sum().clamp_min(LEAST)
