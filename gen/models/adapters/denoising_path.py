"""Distribution of a latent: a denoising path.

A latent is the last element x_S of a chain of S Gaussian transitions, given a conditioning vector
z:

    x_0 ~ N(0, I),    x_{k+1} ~ N(m_k(x_k, z), s_k(x_k, z)^2),    k = 0 .. S-1

``walk`` maps standard normal noise to a path, ``log_density`` computes the log density of a path.
Every s_k is above zero, including the last one, so densities exist and two models can be compared
on one path. The latent is used as it is; nothing is added or clipped afterwards.
"""

from __future__ import annotations

import math
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from gen.core.errors import GenError
from gen.core.sampling_params import GREEDY_BELOW, SamplingParams


class PathDistribution(Protocol):
    """Protocol of a chain of Gaussian transitions. ``steps``: S. ``channels``: C."""

    steps: int
    channels: int

    def transition(self, x: Tensor, k: int, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return m_k and log s_k, each [N, C], of x [N, C] given z [N, H, D]."""


def noise_size(paths: PathDistribution) -> int:
    """Return the number of standard normal numbers of one path."""
    return (paths.steps + 1) * paths.channels


@torch.no_grad()
def walk(paths: PathDistribution, z: Tensor, noise: Tensor) -> Tensor:
    """Map noise [..., (S + 1) C] to a path [..., S + 1, C], whose last element is the latent.

    z: conditioning vectors [..., H, D].
    """
    lead = z.shape[:-2]
    z, noise = z.flatten(0, -3), noise.reshape(-1, paths.steps + 1, paths.channels).to(z.dtype)
    x = noise[:, 0]
    path = [x]
    for k in range(paths.steps):
        mean, log_sigma = paths.transition(x, k, z)
        x = mean + log_sigma.exp() * noise[:, k + 1]
        path.append(x)
    return torch.stack(path, 1).view(*lead, paths.steps + 1, paths.channels)


@torch.no_grad()
def log_density(paths: PathDistribution, path: Tensor, z: Tensor) -> Tensor:
    """Compute the log density of paths [..., S + 1, C] given z [..., H, D]: float64 [...]."""
    lead = z.shape[:-2]
    z, path = z.flatten(0, -3), path.reshape(-1, paths.steps + 1, paths.channels)
    total = _log_normal(path[:, 0], torch.zeros_like(path[:, 0]), torch.zeros_like(path[:, 0]))
    for k in range(paths.steps):
        total = total + _log_normal(path[:, k + 1], *paths.transition(path[:, k], k, z))
    return total.view(lead)


def _log_normal(x: Tensor, mean: Tensor, log_sigma: Tensor) -> Tensor:
    x, mean, log_sigma = x.double(), mean.double(), log_sigma.double()
    score = (x - mean) * (-log_sigma).exp()
    return (-0.5 * score.square() - log_sigma - 0.5 * math.log(2 * math.pi)).sum(-1)


@runtime_checkable
class GuidedHead(Protocol):
    """Head of a denoising path that defines its own guidance."""

    def guide(self, out: Tensor, z: Tensor, scale: float) -> Tensor:
        """Combine predictions of both branches, [N, 2, E] for z [N, 2, D], to [N, E]."""
        ...


class HeadDistribution:
    """Path distribution of a diffusion head under sampling parameters.

    Classifier-free guidance (CFG) combines the head's predictions for z [N, 2, D] = (conditional,
    unconditional) to u + s (c - u). A head with ``guide(out [N, 2, E], z, s) -> [N, E]`` defines
    its own guidance. ``temperature`` multiplies every s_k. Raises ``GenError`` for sampling
    parameters of discrete tokens.
    """

    def __init__(self, head, sampling: SamplingParams):
        if sampling.top_k or sampling.top_p < 1 or sampling.min_p:
            name = "top_k" if sampling.top_k else "top_p" if sampling.top_p < 1 else "min_p"
            raise GenError(
                f"sampling.{name} is {getattr(sampling, name)}; it applies to discrete tokens, and"
                " this model generates latents; expected only temperature and guidance_scale"
            )
        if sampling.is_greedy:
            raise GenError(
                f"sampling.temperature is {sampling.temperature:g}; the most likely value of a"
                f" latent has no closed form; expected a number of at least {GREEDY_BELOW:g}"
            )
        self.head, self.sampling = head, sampling
        self.steps, self.channels = head.steps, head.channels
        self._guides = isinstance(head, GuidedHead)

    def transition(self, x: Tensor, k: int, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log standard deviation, each [N, C], of the k-th transition."""
        branches = z.shape[1]
        out = self.head.predict(x.repeat_interleave(branches, 0), k, z.flatten(0, 1)).view(
            len(x), branches, -1
        )
        guided = out[:, 0] if branches == 1 else self._guide(out, z)
        mean, log_sigma = self.head.posterior(x, k, guided)
        return mean, log_sigma + math.log(self.sampling.temperature)

    def _guide(self, out: Tensor, z: Tensor) -> Tensor:
        if self._guides:
            return self.head.guide(out, z, self.sampling.guidance_scale)
        return out[:, 1] + self.sampling.guidance_scale * (out[:, 0] - out[:, 1])
