"""Networks that predict what becomes of drafts: whether one is accepted, and how many tokens a
round commits; and the inputs of these and of a judge's probe."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEAST = -20.0  # log-probability that stands for everything below
TOP, HISTORY = 3, 5  # probabilities at the root, and numbers about the round before
FEATURES = TOP + 1 + HISTORY

Action = tuple[int, int, int]  # trunk, paths, drafts of a path


class AcceptanceNet(nn.Module):
    """Network of an acceptance head.

    Args:
        width: channels D of the draft model's hidden states.
        blocks: residual blocks.
    """

    def __init__(self, width: int, blocks: int = 2):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width + 2, width + 2) for _ in range(blocks))
        self.out = nn.Linear(width + 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits [...] of inputs [..., D + 2] (``acceptance_inputs``)."""
        for block in self.blocks:
            x = x + F.silu(block(x))
        return self.out(x)[..., 0]


def acceptance_inputs(hidden: Tensor, mass: Tensor, logq: Tensor) -> Tensor:
    """Join the inputs of an acceptance head.

    Args:
        hidden: hidden states that the drafts' distributions come from, [..., D].
        mass: q(x) of the drafts, [...].
        logq: log-probabilities, [..., V].

    Returns:
        float32 [..., D + 2].
    """
    log_mass = mass.float().log().clamp_min(LEAST)
    entropy = torch.special.entr(logq.float().exp()).sum(-1)
    return torch.cat([hidden.float(), log_mass[..., None], entropy[..., None]], -1)


def acceptance_label(logp: Tensor, logq: Tensor, ids: Tensor) -> Tensor:
    """Compute min(1, p(x) / q(x)) of tokens.

    Args:
        logp: log-probabilities of the target, [..., V].
        logq: log-probabilities that the tokens were drawn from, [..., V].
        ids: the tokens, long [...].

    Returns:
        [...].
    """
    log_p, log_q = (x.gather(-1, ids[..., None])[..., 0] for x in (logp, logq))
    return (log_p - log_q).clamp_max(0).exp()


class SelectorNet(nn.Module):
    """Network of a selector.

    Args:
        actions: number of actions A.
        width: channels of its two inner layers.
    """

    def __init__(self, actions: int, width: int = 32):
        super().__init__()
        self.enter, self.inner = nn.Linear(FEATURES, width), nn.Linear(width, width)
        self.out = nn.Linear(width, actions)

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens [..., A] that a round is expected to commit, of features [..., F]."""
        x = F.silu(self.enter(x))
        return self.out(x + F.silu(self.inner(x)))


def root_features(logq: Tensor) -> Tensor:
    """Return what a selector reads of the distribution at the root.

    Args:
        logq: log-probabilities [b, V]; -inf everywhere where nothing is known.

    Returns:
        The largest probabilities and the entropy in nats, float32 [b, 4].
    """
    q = logq.float().exp()
    top = F.pad(q, (0, max(0, TOP - q.shape[-1]))).topk(TOP, -1).values
    return torch.cat([top, torch.special.entr(q).sum(-1, keepdim=True)], -1)


def round_features(num_accepted: Tensor, num_drafted: Tensor, logp: Tensor) -> Tensor:
    """Return what a selector reads of the round before.

    Args:
        num_accepted: accepted drafts, long [b].
        num_drafted: drafts that there were, long [b].
        logp: the target's log-probabilities behind the last accepted draft, [b, V].

    Returns:
        float32 [b, 5]; zeros stand for no round.
    """
    p = logp.float().exp()
    accepted, drafted = num_accepted.float(), num_drafted.float()
    ones = torch.ones_like(accepted)
    shares = [ones, accepted / 8, accepted / drafted.clamp_min(1)]
    return torch.stack([*shares, p.amax(-1), torch.special.entr(p).sum(-1)], -1)


def times_of(actions: Tensor, draft_cost: float) -> Tensor:
    """Return the times [A] of rounds of actions [A, 3], in passes of the target."""
    return 1 + draft_cost * (actions[:, 0] + actions[:, 2])


def probe_inputs(hidden: Tensor, logp: Tensor, ids: Tensor) -> Tensor:
    """Join the inputs of a probe.

    Args:
        hidden: the target's hidden states at drafts, [..., D].
        logp: the target's final log-probabilities where the drafts stand, [..., V].
        ids: the drafts, long [...].

    Returns:
        float32 [..., D + 3]: the hidden state, log p of the draft, the maximum of log p, and the
        entropy.
    """
    logp = logp.float().nan_to_num(-torch.inf, neginf=-torch.inf)
    log_p = logp.gather(-1, ids[..., None]).clamp_min(LEAST)
    most, entropy = logp.amax(-1, keepdim=True), torch.special.entr(logp.exp()).sum(-1)
    return torch.cat([hidden.float(), log_p, most.clamp_min(LEAST), entropy[..., None]], -1)
