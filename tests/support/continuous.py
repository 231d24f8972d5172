"""Models of latents in closed form: conditioning vectors are linear in what stands before,
transitions are linear Gaussians, so every latent is a Gaussian given those before it.

As with ``tabular``, the cache behaves like a production one: one slot per absolute position,
overwritten by later calls, and a slot that was never written is NaN, so that a missing or stale one
is seen.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.adapters.base import ModelAdapter
from gen.models.adapters.protocols import ModelCache
from gen.models.targets.latent import CausalLatentTarget


class LinearHead:
    """x_{k+1} ~ N(decay x_k + gain z + turn z', s_k^2), with z' the components of z the other way
    round."""

    def __init__(
        self,
        channels: int = 1,
        sigmas: tuple[float, ...] = (0.5,),
        decay: float = 0.4,
        gain: float = 1.0,
        turn: float = 0.3,
        shift: float = 0.0,
    ):
        self.channels, self.sigmas, self.steps = channels, sigmas, len(sigmas)
        self.decay, self.gain, self.turn, self.shift = decay, gain, turn, shift

    def predict(self, x: Tensor, k: int, z: Tensor) -> Tensor:
        return self.gain * z + self.turn * z.flip(-1) + self.shift

    def posterior(self, x: Tensor, k: int, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.decay * x + v, torch.full_like(x, math.log(self.sigmas[k]))

    def moments(self, z: Tensor, temperature: float = 1.0) -> tuple[Tensor, float]:
        """Mean [..., C] and standard deviation of each component of the latent given z [..., C]."""
        mean, variance = torch.zeros_like(z), 1.0
        for k, sigma in enumerate(self.sigmas):
            mean = self.decay * mean + self.predict(z, k, z)
            variance = self.decay**2 * variance + (temperature * sigma) ** 2
        return mean, math.sqrt(variance)


class VectorBuffer(ModelCache):
    """A cache: which vector was last written to which slot."""

    def __init__(self, slots: int):
        self.slots, self.vectors = slots, None

    def write(self, inputs: Tensor, positions: Tensor) -> Tensor:
        if self.vectors is None:
            self.vectors = inputs.new_full(
                (len(inputs), self.slots, inputs.shape[-1]), float("nan")
            )
        self.vectors = self.vectors.clone()
        self.vectors.scatter_(1, positions[..., None].expand_as(inputs), inputs)
        return self.vectors

    def keep(self, rows: Tensor) -> None:
        if self.vectors is not None:  # rows may end before anything was written
            self.vectors = self.vectors[rows]


class LinearLatent(ModelAdapter):
    """What ``CausalLatentTarget`` asks of an adapter. z after position s is ``memory`` sum_j
    2^-(s-j) input_j over j <= s, bent by ``bend`` sin(3 z)."""

    device, dtype = torch.device("cpu"), torch.float64

    def __init__(self, head: LinearHead | None = None, memory: float = 0.8, bend: float = 0.0):
        self.head, self.memory, self.bend, self.calls = head or LinearHead(), memory, bend, 0

    def new_cache(self, slots: int) -> VectorBuffer:
        return VectorBuffer(slots)

    def embed_words(self, ids: Tensor) -> Tensor:
        return torch.stack(
            [torch.sin(ids.double() * (1.3 + c)) for c in range(self.head.channels)], -1
        )

    def embed_latents(self, latents: Tensor) -> Tensor:
        return latents

    def forward(self, inputs: Tensor, positions: Tensor, cache: VectorBuffer) -> Tensor:
        self.calls += 1
        state, states = 0.0, []
        for vector in cache.write(inputs, positions).unbind(1):
            state = 0.5 * state + vector
            states.append(state)
        z = self.memory * torch.stack(states, 1)
        z = z + self.bend * torch.sin(3 * z)
        return z.gather(1, positions[..., None].expand(-1, -1, z.shape[-1]))


PROMPTS = ((3,), (1, 2, 5), (4, 6))  # contexts of different lengths


def latent_target(
    model, length: int, context: list[int], sampling: SamplingParams | None = None
) -> CausalLatentTarget:
    """A production target whose row i has the context ``context[i]``; padded with words that are
    wrong on purpose."""
    sampling = sampling or SamplingParams()
    width = max(len(p) for p in PROMPTS)
    prompt = torch.tensor([[*PROMPTS[c], *([7] * (width - len(PROMPTS[c])))] for c in context])
    lengths = torch.tensor([len(PROMPTS[c]) for c in context])
    uncond = (
        (torch.full((len(context), 1), 8), torch.ones(len(context), dtype=torch.long))
        if sampling.guided
        else (None, None)
    )
    space = TokenSpace.latents((length,), model.head.channels)
    return CausalLatentTarget(model, prompt, space, sampling, uncond[0], lengths, uncond[1])


def teacher_forced(model, latents: Tensor, context: list[int]) -> Tensor:
    """z [B, T, C] of every place from the latents before it, without a cache. For a distribution
    that is not guided."""
    z = torch.empty_like(latents)
    for c in set(context):
        rows = torch.tensor([k == c for k in context])
        words = model.embed_words(torch.tensor([PROMPTS[c]])).expand(int(rows.sum()), -1, -1)
        inputs = torch.cat([words, latents[rows]], 1)[:, :-1]
        at = torch.arange(inputs.shape[1]).expand(len(inputs), -1)
        z[rows] = model.forward(inputs, at, model.new_cache(inputs.shape[1]))[
            :, len(PROMPTS[c]) - 1 :
        ]
    return z


# --- Kolmogorov and Smirnov


def ks(x: Tensor) -> float:
    """The probability of a larger distance between the empirical distribution of x [N] and the
    standard normal one."""
    n = len(x)
    cdf = torch.special.ndtr(x.double().sort().values)
    at = torch.arange(n + 1, dtype=torch.float64) / n
    distance = float(torch.maximum((at[1:] - cdf).max(), (cdf - at[:-1]).max()))
    t = distance * (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n))  # Stephens' correction
    if t < 0.2:
        return 1.0
    return min(
        1.0, max(0.0, 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * t) ** 2) for k in range(1, 101)))
    )
