"""Models in closed form: the logits after every full prefix, or for every canvas, are numbers of
their own.

They behave like production models where it matters. The causal cache is a buffer with one slot per
absolute position that later calls overwrite, so a stale or missing slot changes the distribution,
and so does any mistake in a row's positions."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.adapters.base import ModelAdapter
from gen.models.adapters.protocols import ModelCache
from gen.models.targets.causal import CausalTarget
from gen.models.targets.masked import MaskedTarget

LOW = -1e3  # the logit of an impossible token
_A, _B, _C = 0x5DEECE66D, 0x2545F4914F6CDD1D, 0x369DEA0F31A53F85
_FACTORS, _ONE, _11, _29, _32 = (np.uint64(_B), np.uint64(_C)), *map(np.uint64, (1, 11, 29, 32))


def _mixed(x: np.ndarray) -> np.ndarray:
    """Wrapping uint64 arithmetic; the high bits of a product are the good ones. In numpy, whose
    calls cost less where there are few numbers."""
    for factor in _FACTORS:
        x = (x ^ (x >> _29)) * factor
    return x ^ (x >> _32)


def _bits(x: Tensor) -> np.ndarray:
    return x.numpy().view(np.uint64)


def _scramble(x: Tensor) -> Tensor:
    """The same of int64."""
    return torch.from_numpy(_mixed(_bits(x)).view(np.int64))


def _logits(state: Tensor, vocab_size: int, low: float, spread: float) -> Tensor:
    """[...] -> float64 [..., V]: within ``spread`` of each other, and a share ``low`` of them
    impossible."""
    bits = _mixed(
        _bits(state)[..., None] + np.arange(1, vocab_size + 1, dtype=np.uint64) * np.uint64(_A)
    )

    def unit(x):
        return (x >> _11) * 2.0**-53

    return torch.from_numpy(np.where(unit(_mixed(bits + _ONE)) < low, LOW, spread * unit(bits)))


class _Model(ModelAdapter):
    device, dtype = torch.device("cpu"), torch.float64

    def __init__(self, vocab_size: int, seed: int = 0, low: float = 0.15, spread: float = 4.0):
        self.vocab_size, self.seed, self.low, self.spread = vocab_size, seed, low, spread

    @classmethod
    def with_params(cls, sampling: SamplingParams, vocab_size: int):
        """One that leaves the distribution some choice: guidance would make a model with impossible
        tokens nearly certain."""
        return cls(vocab_size, low=0.0, spread=1.5) if sampling.guided else cls(vocab_size)

    def _states(self, ids: Tensor) -> Tensor:
        """ids [B, S] -> the state after every id [B, S]."""
        known, factor = _bits(ids + 2), np.uint64(_A)
        out, state = np.empty_like(known), np.full(len(ids), self.seed + 1, np.uint64)
        for position in range(ids.shape[1]):
            state = out[:, position] = _mixed(state * factor + known[:, position])
        return torch.from_numpy(out.view(np.int64))


class TokenBuffer(ModelCache):
    """A cache: which token was last written to which slot."""

    def __init__(self, slots: int):
        self.slots, self.ids = slots, None

    def write(self, tokens: Tensor, positions: Tensor) -> Tensor:
        if self.ids is None:
            self.ids = torch.full((len(tokens), self.slots), -1)
        self.ids = self.ids.clone()
        self.ids.scatter_(1, positions, tokens)
        return self.ids

    def keep(self, rows: Tensor) -> None:
        self.ids = None if self.ids is None else self.ids[rows]

    def tree(self, tokens: Tensor, positions: Tensor, parents: Tensor) -> Tensor:
        """Write the root, and return what every column of a tree stands on, [B, L, slots]."""
        ids = self.write(tokens[:, :1], positions[:, :1])
        self.branches = ids[:, None].repeat(1, tokens.shape[1], 1)
        row = torch.arange(len(tokens))
        for column in range(1, tokens.shape[1]):
            branch = self.branches[row, parents[:, column - 1] + 1].clone()
            # what a branch stands on ends at its own position
            branch.scatter_(1, positions[:, column, None], tokens[:, column, None])
            self.branches[:, column] = branch
        self.root = positions[:, 0]
        return self.branches

    def commit_path(self, nodes: Tensor, count: Tensor) -> None:
        """Copy the tokens of accepted drafts to their slots."""
        row = torch.arange(len(nodes))
        columns = torch.cat([torch.zeros_like(nodes[:, :1]), nodes + 1], 1)
        self.ids = self.branches[row, columns[row, count]]


class TabularCausal(_Model):
    """Implements ``gen.models.adapters.protocols.CausalModel``."""

    superposes = True

    def new_cache(self, slots: int) -> TokenBuffer:
        return TokenBuffer(slots)

    def forward_superposed(self, tokens, weights, positions, cache) -> Tensor:
        """The mixture of the distributions; the cache keeps the token that there is most of."""
        parts = [
            self.forward(ids, positions, cache).softmax(-1) * share[..., None]
            for ids, share in zip(tokens.unbind(-1), weights.unbind(-1), strict=True)
        ]
        cache.write(tokens.gather(-1, weights.argmax(-1, keepdim=True))[..., 0], positions)
        return sum(parts).clamp_min(1e-300).log()

    def forward(self, tokens: Tensor, positions: Tensor, cache: TokenBuffer) -> Tensor:
        ids = cache.write(tokens, positions)
        return _logits(
            self._states(ids).gather(1, positions), self.vocab_size, self.low, self.spread
        )

    def forward_tree(
        self, tokens: Tensor, positions: Tensor, parents: Tensor, cache: TokenBuffer
    ) -> Tensor:
        branches = cache.tree(tokens, positions, parents)
        states = self._states(branches.flatten(0, 1)).view(branches.shape)
        states = states.gather(2, positions[..., None])[..., 0]
        return _logits(states, self.vocab_size, self.low, self.spread)

    num_layers = 3

    def with_layers(self, layers) -> TabularCausal:
        """Another model for every plan."""
        seed = self.seed + 100 + sum(2**n for n in layers)
        return TabularCausal(self.vocab_size, seed, self.low, self.spread)

    def after(self, sequence: list[int]) -> Tensor:
        """The logits [V] after a sequence, without any cache."""
        return _logits(
            self._states(torch.tensor([sequence]))[0, -1], self.vocab_size, self.low, self.spread
        )


class TabularMasked(_Model):
    """Implements ``gen.models.adapters.protocols.MaskedModel``."""

    def forward(self, ids: Tensor, canvas_length: int) -> Tensor:
        state = self._states(ids)[:, -1:] + torch.arange(1, canvas_length + 1) * _C
        return _logits(_scramble(state), self.vocab_size, self.low, self.spread)

    def at(self, ids: list[int], canvas_length: int, position: int) -> Tensor:
        """The logits [V] of one place."""
        return self.forward(torch.tensor([ids]), canvas_length)[0, position]


class TabularBlocks(_Model):
    """Implements ``gen.models.adapters.protocols.BlockModel``: a place's distribution depends on
    its block as it stands and on all before it."""

    def __init__(self, *args, block_length: int = 4, **kwargs):
        super().__init__(*args, **kwargs)
        self.block_length = block_length

    def new_cache(self, slots: int) -> TokenBuffer:
        return TokenBuffer(slots)

    def forward(
        self, tokens: Tensor, positions: Tensor, last: Tensor, cache: TokenBuffer
    ) -> Tensor:
        states = self._states(cache.write(tokens, positions)).gather(1, last)
        return _logits(
            _scramble(states + (positions + 1) * _C), self.vocab_size, self.low, self.spread
        )


PROMPTS = (
    (19,),
    (12, 13, 19),
    (15, 19),
)  # three contexts of different lengths, with one begin-of-grid token
EMPTY = ((21, 19), (19,), (21, 22, 19))  # their unconditional prompts


def _padded(prompts, context: list[int]) -> tuple[Tensor, Tensor]:
    """On the right, with ids that are wrong on purpose."""
    width = max(len(p) for p in prompts)
    ids = torch.tensor([[*prompts[c], *([99] * (width - len(prompts[c])))] for c in context])
    return ids, torch.tensor([len(prompts[c]) for c in context])


def causal_target(
    model,
    space: TokenSpace,
    sampling: SamplingParams,
    context: list[int],
    prompts=PROMPTS,
    empty=EMPTY,
) -> CausalTarget:
    """A production target whose row i has the context ``context[i]``."""
    prompt, length = _padded(prompts, context)
    uncond, uncond_length = _padded(empty, context) if sampling.guided else (None, None)
    return CausalTarget(model, prompt, space, sampling, uncond, length, uncond_length)


def masked_target(
    model, space: TokenSpace, sampling: SamplingParams, context: list[int]
) -> MaskedTarget:
    """Masked models have conditions of one length."""
    prompt = torch.tensor([[31 + c, 40] for c in context])
    uncond = torch.tensor([[50, 51 + c] for c in context])
    return MaskedTarget(model, prompt, space, sampling, uncond if sampling.guided else None)


def causal_distribution(
    model: TabularCausal,
    space: TokenSpace,
    sampling: SamplingParams,
    context: int,
    prompts=PROMPTS,
    empty=EMPTY,
) -> dict[tuple[int, ...], float]:
    """The distribution of plain autoregression, straight from its definition."""

    def extend(prefix: tuple[int, ...], mass: float, out: dict) -> dict:
        n = len(prefix)
        if n == space.length:
            out[prefix] = mass
            return out
        cond = model.after([*prompts[context], *prefix])
        uncond = model.after([*empty[context], *prefix]) if sampling.guided else None
        for token, p in enumerate(sampling(cond, uncond, space.legal[n]).exp().tolist()):
            if p > 0:
                extend((*prefix, token), mass * p, out)
        return out

    return extend((), 1.0, {})


def masked_distribution(
    model: TabularMasked,
    space: TokenSpace,
    sampling: SamplingParams,
    context: int,
    order: list[int],
) -> dict[tuple[int, ...], float]:
    """The distribution of filling one place after the other in that order."""

    def extend(canvas: tuple[int, ...], mass: float, left: list[int], out: dict) -> dict:
        if not left:
            out[canvas] = mass
            return out
        position, *rest = left
        cond = model.at([31 + context, 40, *canvas], space.length, position)
        uncond = (
            model.at([50, 51 + context, *canvas], space.length, position)
            if sampling.guided
            else None
        )
        for token, p in enumerate(sampling(cond, uncond, space.legal[position]).exp().tolist()):
            if p > 0:
                extend((*canvas[:position], token, *canvas[position + 1 :]), mass * p, rest, out)
        return out

    return extend((space.mask_token_id,) * space.length, 1.0, order, {})


@cache
def space_of(grid: tuple[int, ...], vocab_size: int, masked: bool = False) -> TokenSpace:
    """All ids legal everywhere; for masked models one more id, the mask."""
    return TokenSpace.codes(grid, vocab_size, vocab_size + masked, vocab_size if masked else None)
