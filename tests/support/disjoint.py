"""Models in closed form that cannot say some tokens, and have nothing to say behind one of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from constrained import with_end
from enumeration import distance, enumerate_distribution
from tabular import LOW, PROMPTS, TabularCausal, _logits, causal_target
from torch import Tensor

from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace

IDS, END = 4, 3
CODES = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])


class Limited(TabularCausal):
    """Model whose logits are -inf for tokens outside ``says`` and for a share of the others; of a
    target they are -inf for all tokens behind one that it cannot say.

    Args:
        seed: seed of the logits.
        says: tokens that it can say at all.
        holes: share of those that it cannot say after some prefixes; one is always left.
        is_target: whether it is the target.
    """

    def __init__(self, seed: int, says: tuple[int, ...], holes: float, is_target: bool):
        super().__init__(IDS, seed, low=holes, spread=1.5)
        self.is_target = is_target
        self.never = torch.ones(IDS, dtype=torch.bool)
        self.never[list(says)] = False

    def cut(self, states: Tensor) -> Tensor:
        """Logits [..., V] after prefixes, given their states [...]."""
        logits = _logits(states, IDS, self.low, self.spread)
        full = _logits(states, IDS, 0.0, self.spread).masked_fill(self.never, -torch.inf)
        best = torch.zeros_like(logits, dtype=torch.bool).scatter_(
            -1, full.argmax(-1, keepdim=True), True
        )
        return full.masked_fill((logits == LOW) & ~best, -torch.inf)

    def forward(self, tokens, positions, cache):
        ids = cache.write(tokens, positions)
        logits = self.cut(self._states(ids))
        known = ids[:, 1:].clamp(0, IDS - 1)
        is_said = logits[:, :-1].gather(-1, known[..., None])[..., 0] > -torch.inf
        is_said |= (ids[:, 1:] >= IDS) | (ids[:, 1:] < 0) | (ids[:, :-1] < 0)
        is_said |= not self.is_target
        impossible = torch.nn.functional.pad(~is_said, (1, 0)).cumsum(1) > 0
        logits = logits.masked_fill(impossible[..., None], -torch.inf)
        return logits.gather(1, positions[..., None].expand(-1, -1, IDS))

    def after(self, sequence):
        return self.cut(self._states(torch.tensor([sequence])))[0, -1]


@dataclass(frozen=True)
class Pair:
    """Target and draft model by the tokens that they can say."""

    target: tuple[int, ...]
    draft: tuple[int, ...]
    holes: float = 0.0

    def models(self) -> tuple[Limited, Limited]:
        target = Limited(0, self.target, self.holes, is_target=True)
        return target, Limited(5, self.draft, self.holes, is_target=False)


PAIRS = {
    "apart": Pair((0, 1), (2, 3)),
    "draft_ends": Pair((0, 1, 2), (0, 3)),
    "draft_only_ends": Pair((0, 1, 2), (3,)),
    "target_ends": Pair((0, 3), (1, 2)),
    "holes": Pair((0, 1, 2, 3), (0, 1, 2, 3), 0.4),
}


def space_of(length: int, end: bool) -> TokenSpace:
    """Space of four codes with vectors, the last of which may be the eos token."""
    space = with_end(length, IDS) if end else TokenSpace.codes((length,), IDS, IDS)
    return replace(space, codebook=CODES)


def exact_distribution(
    model: Limited, space: TokenSpace, sampling: SamplingParams, context: int
) -> dict:
    """The distribution of plain autoregression, from its definition."""

    def extend(before: tuple[int, ...], mass: float, out: dict) -> dict:
        if len(before) == space.length:
            out[before] = mass
        elif space.eos_token_id in before:
            extend((*before, END), mass, out)
        else:
            logprobs = sampling(model.after([*PROMPTS[context], *before]))
            for token, p in enumerate(logprobs.exp().tolist()):
                if p > 0:
                    extend((*before, token), mass * p, out)
        return out

    return extend((), 1.0, {})


def error(sampler, pair: Pair, space: TokenSpace, sampling: SamplingParams) -> float:
    """The largest error of a probability, over three contexts in one batch."""
    model, small = pair.models()

    def decode(rng, context):
        draft = causal_target(small, space, sampling, context) if sampler.drafted else None
        return sampler(causal_target(model, space, sampling, context), rng, draft=draft).tokens

    found = enumerate_distribution(decode, len(PROMPTS))
    expected = [exact_distribution(model, space, sampling, c) for c in range(len(PROMPTS))]
    assert all(len(x) > 1 and max(x.values()) < 0.95 for x in expected), (
        "a distribution without choice"
    )
    return max(distance(a, b) for a, b in zip(found, expected, strict=True))
