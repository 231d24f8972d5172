"""Next-scale models in closed form: the logits of a scale are numbers of their own for every sum of
the scales before it.

They read what a network reads, reduced maps and not ids, so a wrong sum changes every distribution.
``TabularScales`` remembers the maps of earlier scales, ``TabularRefinedScales`` does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from tabular import _C, _logits, _Model, _scramble
from torch import Tensor

from gen.core.sampling_params import SamplingParams
from gen.models.nets.residual_scales import ResidualScales, Sides
from gen.models.targets.scales import ScalesTarget
from gen.tokenizers.image.scale_vq import scale_space

TWELVE: Sides = ((1, 1), (1, 2), (3, 3))  # twelve positions
TWO_SCALES: Sides = ((1, 1), (2, 2))


def quantiser(sides: Sides, codes: int, seed: int = 0, channels: int = 3) -> ResidualScales:
    """Create a random quantiser of float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ResidualScales(sides, codes, channels).double().requires_grad_(False)


class MapsState:
    """Prompts [B, P] and what a model has read of each row, long [B, S]."""

    def __init__(self, seen: Tensor):
        self.seen = seen

    def select(self, rows: Tensor) -> MapsState:
        return MapsState(self.seen[rows])


class TabularScales(_Model):
    """Implements ``gen.models.adapters.protocols.ScalesModel``."""

    markov = refines = leak = False
    prefix_length = 0
    sides: Sides = TWELVE

    def __init__(self, *args, sides: Sides | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        self.quantize = quantiser(sides or self.sides, self.vocab_size)

    def begin(self, prompt: Tensor, lengths: Tensor) -> MapsState:
        return MapsState(prompt)

    def fill(self, state: MapsState, maps: Tensor, scale: int) -> Tensor:
        seen = torch.cat([state.seen, _numbers(maps)], 1)
        if not self.markov:
            state.seen = seen
        return self.at(self._states(seen)[:, -1:], self._positions(maps, scale))

    def at(self, states: Tensor, positions: Tensor) -> Tensor:
        """The logits [B, n_k, V] of positions [B, n_k] in states [B, 1]."""
        mixed = _scramble(states + (positions + 1) * _C)
        return _logits(mixed, self.vocab_size, self.low, self.spread)

    def _positions(self, maps: Tensor, scale: int) -> Tensor:
        first = sum(self.quantize.lengths[:scale])
        return torch.arange(first, first + maps.shape[1]).expand(maps.shape[:2])


class TabularRefinedScales(TabularScales):
    """The same of a Markov model with a pass that refines."""

    markov = refines = True

    def refine(
        self, state: MapsState, maps: Tensor, ids: Tensor, hidden: Tensor, scale: int
    ) -> Tensor:
        own = self.quantize.own(ids, hidden, scale, self.leak)
        parts = [state.seen, _numbers(maps), _numbers(own), hidden.long() - 9]
        states = _scramble(self._states(torch.cat(parts, 1))[:, -1:])
        return self.at(states, self._positions(maps, scale))


def _numbers(maps: Tensor) -> Tensor:
    """Maps [B, n, D] as integers [B, n D], the same for equal maps up to rounding."""
    return (maps * 2**20).round().long().flatten(1)


def scales_target(
    model: TabularScales, sampling: SamplingParams, context: list[int]
) -> ScalesTarget:
    """A production target whose row i has the context ``context[i]``."""
    prompt = torch.tensor([[31 + c, 40] for c in context])
    uncond = torch.tensor([[50, 51 + c] for c in context])
    space = scale_space(model.quantize.sides, model.vocab_size)
    return ScalesTarget(model, prompt, space, sampling, uncond if sampling.guided else None)


class Chain:
    """The distributions of a model, straight from their definitions.

    Args:
        model: the model.
        sampling: sampling parameters.
        context: context of the prompt.
    """

    def __init__(self, model: TabularScales, sampling: SamplingParams, context: int):
        self.model, self.sampling = model, sampling
        self.prompts = [[31 + context, 40], [50, 51 + context]][: 1 + sampling.guided]
        self.space = scale_space(model.quantize.sides, model.vocab_size)

    def filled(self, before: Sequence[int], scale: int, guided: bool = True) -> Tensor:
        """Probabilities [n_k, V] of a scale given the tokens of those before it."""
        ratio = scale / (len(self.model.quantize.sides) - 1)
        weight = 1 + (self.sampling.guidance_scale - 1) * ratio
        branches = []
        for prompt in self.prompts:
            state = self.model.begin(torch.tensor([prompt]), torch.tensor([2]))
            for k in range(scale + 1):
                logits = self.model.fill(state, self._maps(before, k), k)[0]
            branches.append(logits)
        mixed = branches[0]
        if len(branches) > 1 and guided:
            mixed = weight * branches[0] + (1 - weight) * branches[1]
        return self._plain(mixed)

    def refined(self, before: Sequence[int], own: Sequence[int | None], scale: int) -> Tensor:
        """Probabilities [n_k, V] of a scale given those before it and some of its own tokens."""
        state = self.model.begin(torch.tensor([self.prompts[0]]), torch.tensor([2]))
        ids = torch.tensor([[0 if x is None else x for x in own]])
        hidden = torch.tensor([[x is None for x in own]])
        return self._plain(
            self.model.refine(state, self._maps(before, scale), ids, hidden, scale)[0]
        )

    def _plain(self, logits: Tensor) -> Tensor:
        return replace(self.sampling, guidance_scale=1.0)(logits).exp()

    def _maps(self, before: Sequence[int], scale: int) -> Tensor:
        quantize = self.model.quantize
        f_hat, first = quantize.zeros(1), 0
        for k, size in enumerate(quantize.lengths[:scale]):
            ids = torch.tensor([list(before[first : first + size])])
            f_hat, first = quantize.add(f_hat, ids, k), first + size
        return quantize.down(f_hat, scale).flatten(2).transpose(1, 2)
