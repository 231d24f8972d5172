"""Closed-form models whose acceptance rates and forward calls are known."""

from __future__ import annotations

from collections.abc import Callable

import torch
from continuous import LinearHead, LinearLatent
from tabular import TabularBlocks, TabularCausal, TabularMasked, TokenBuffer, _logits, _scramble
from tabular_lattice import TabularLattice
from tabular_scales import TabularRefinedScales, TabularScales
from torch import Tensor

from gen.core.registry import registry
from gen.core.rng import CounterRNG
from gen.core.sampler import Sampler
from gen.core.sampling_params import SamplingParams
from gen.core.stats import SampleOutput
from gen.core.token_space import TokenSpace
from gen.models.targets.latent import CausalLatentTarget, MaskedLatentTarget
from gen.testing.even_reward import EvenEvaluator


class Leaning:
    """Of a place's distribution, a good part is the place's own and does not depend on what stands
    elsewhere: so drafts are often right, as real ones are, and a sampler that makes less of them is
    seen. ``own``: how much."""

    own = 6.0

    def at(self, states: Tensor, positions: Tensor) -> Tensor:
        position = _logits(_scramble(positions), self.vocab_size, 0.0, self.own)
        return position + _logits(states, self.vocab_size, 0.0, self.spread)


class LeaningCausal(Leaning, TabularCausal):
    def forward(self, tokens, positions, cache):
        return self.at(self._states(cache.write(tokens, positions)).gather(1, positions), positions)

    def forward_tree(self, tokens, positions, parents, cache):
        branches = cache.tree(tokens, positions, parents)
        states = self._states(branches.flatten(0, 1)).view(branches.shape)
        return self.at(states.gather(2, positions[..., None])[..., 0], positions)


class LeaningBlocks(Leaning, TabularBlocks):
    def forward(self, tokens, positions, last, cache):
        return self.at(
            _scramble(self._states(cache.write(tokens, positions)).gather(1, last) + positions),
            positions,
        )


class LeaningMasked(Leaning, TabularMasked):
    """A ``CacheableModel``: what a slot was last computed from is what others see there."""

    shift, own = (
        0,
        40.0,
    )  # sure of some places, or nothing that waits for certainty would ever take two at once

    def forward(self, ids, canvas_length):
        positions = torch.arange(ids.shape[1])[-canvas_length:].expand(len(ids), -1)
        return self.at(_scramble(self._states(ids)[:, -1:] + positions), positions)

    def new_cache(self, slots: int) -> TokenBuffer:
        return TokenBuffer(slots)

    def part(self, tokens, positions, seen, cache, keep, rows=None):
        if cache.ids is None:
            cache.ids = torch.full((len(tokens), cache.slots), -1)
        rows = torch.arange(len(tokens)) if rows is None else rows
        cache.ids[rows[:, None], positions] = tokens
        state = self._states(torch.where(seen, cache.ids[rows], -1))[:, -1:]
        return self.at(_scramble(state + positions), positions)[:, -keep:]


class LeaningScales(Leaning, TabularScales):
    sides = ((1, 1), (2, 2), (2, 2), (3, 5))


class LeaningRefinedScales(Leaning, TabularRefinedScales):
    sides = LeaningScales.sides


class LeaningLattice(Leaning, TabularLattice):
    vertices = 30


class LinearMasked(LinearLatent):
    """A masked model of latents: z is what words and known latents add up to, bent by the place."""

    def forward(self, words, canvas):
        given = self.embed_words(words).sum(1, keepdim=True) + canvas.nan_to_num(0).mean(
            1, keepdim=True
        )
        return self.memory * given + torch.sin(torch.arange(canvas.shape[1]).double())[:, None]


ROWS, GRID, V, MASK = 6, (4, 6), 16, 15  # ids 0-11 are tokens, 12-14 words of conditions


PROMPTS = torch.tensor([[r, 2 * r % 5, 12] for r in range(ROWS)])


KEYS = [31 * r + 7 for r in range(ROWS)]


LEANING = {
    "Causal": LeaningCausal,
    "Masked": LeaningMasked,
    "Blocks": LeaningBlocks,
    "Scales": LeaningScales,
    "RefinedScales": LeaningRefinedScales,
    "Lattice": LeaningLattice,
}


PROTOCOLS: dict[str, tuple[type, Callable]] = {
    name: (p.targets["codes"], LEANING[p.closed_form])
    for name, p in registry.table("protocol").items()
    if "codes" in p.targets
}


def space() -> TokenSpace:
    legal = torch.zeros(GRID[0] * GRID[1], V, dtype=torch.bool)
    legal[:, :12] = True
    codebook = torch.stack([torch.arange(12) % 4, torch.arange(12) // 4], 1).float()
    return TokenSpace(
        GRID, V, legal, MASK, codebook, delimiters=(2, 4), rarity=torch.arange(1, V + 1) / 2
    )


def of_ids(sampler: Sampler, sampling: SamplingParams) -> SampleOutput:
    """A job on models in closed form. A draft model is the target's kin: the distribution of a
    place is the same in its greater part."""
    uncond = torch.tensor([13, 14, 12]).expand(ROWS, -1) if sampling.guided else None

    def make(protocol, seed):
        return PROTOCOLS[protocol][0](
            PROTOCOLS[protocol][1](V, seed, spread=2.0), PROMPTS, space(), sampling, uncond
        )

    draft = make(sampler.draft_protocol or sampler.protocol, 3) if sampler.drafted else None
    target = make(sampler.protocol, 1)
    target.evaluator = EvenEvaluator()
    return sampler(target, CounterRNG(KEYS), draft=draft)


def of_numbers(sampler: Sampler, sampling: SamplingParams) -> SampleOutput:
    """The same for latents: the draft's transitions are the target's, a little to one side."""
    masked = sampler.protocol == "masked"
    target, model = (
        (MaskedLatentTarget, LinearMasked) if masked else (CausalLatentTarget, LinearLatent)
    )
    uncond = torch.full_like(PROMPTS, 13) if sampling.guided else None

    def made(shift):
        return target(
            model(LinearHead(2, (0.9, 0.6), shift=shift), memory=0.1),
            PROMPTS,
            TokenSpace.latents(GRID, 2),
            sampling,
            uncond,
        )

    exact = made(0.0)
    exact.evaluator = EvenEvaluator()
    return sampler(exact, CounterRNG(KEYS), draft=made(0.2) if sampler.drafted else None)


PARAMETERS = {"prophet": {"gap_threshold": 3.0, "steps": 24}}  # what twelve ids can be sure of
