"""Diffusion head of MAR (Li et al., arXiv 2406.11838) with its published keys: the distribution of
one latent given a conditioning vector.

The network predicts a noise e and, per channel, a number v that interpolates the variance between
its two bounds (Nichol & Dhariwal, arXiv 2102.09672). Of the cosine schedule of 1000 timesteps with
a_t (``diffusion_head.cosine_schedule``), S evenly spaced ones are kept; from one of them, t, to the
next smaller one, u:

    x ~ N((x_t - b / sqrt(1 - a_t) e) / sqrt(1 - b), s^2),   b = 1 - a_t / a_u,
    log s^2 = f log b + (1 - f) log(b (1 - a_u) / (1 - a_t)),   f = (v + 1) / 2

After the last kept timestep, with a_u = 1, published sampling adds no noise; here s is
``sigma_floor`` there, since paths need densities. Guidance acts on e alone, and v is that of the
conditional branch.
"""

from __future__ import annotations

import math
from itertools import accumulate, repeat

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gen.core.errors import bad_value
from gen.models.nets.diffusion_head import TRAIN_STEPS, cosine_schedule

EPS = 1e-6
WAVES = 256  # size of the sinusoidal timestep embedding


def spaced(steps: int) -> list[int]:
    """Return the kept timesteps, ascending: ``steps`` evenly spaced and rounded ones from 0 to the
    last of training. Raises ``GenError`` for a number out of range."""
    if not isinstance(steps, int) or isinstance(steps, bool) or not 2 <= steps <= TRAIN_STEPS:
        raise bad_value("num_sampling_steps", steps, f"an integer from 2 to {TRAIN_STEPS}")
    # the stride is summed and not multiplied, as in the published schedules: ties may round
    # differently otherwise
    return [
        round(t)
        for t in accumulate(repeat((TRAIN_STEPS - 1) / (steps - 1), steps - 1), initial=0.0)
    ]


class DiffLoss(nn.Module):
    """Diffusion head of MAR.

    ``channels``: C. ``condition``: D. ``steps``: S transitions of a path. ``sigma_floor``: s of the
    last one. Conditioning vectors [N, D + 1] end with the share of the guidance that applies, from
    0 to 1. Paths may have a wider dtype than the network.
    """

    def __init__(
        self,
        channels: int,
        condition: int,
        width: int,
        depth: int,
        steps: int = 100,
        sigma_floor: float = 1e-4,
    ):
        super().__init__()
        if not isinstance(sigma_floor, (int, float)) or not 0 < sigma_floor < 1:
            raise bad_value(
                "sigma_floor", sigma_floor, "a number between 0 and 1: a path has a density"
            )
        self.channels, self.steps, self.sigma_floor = channels, steps, sigma_floor
        self.timesteps = spaced(steps)[::-1]
        kept = cosine_schedule()
        self.kept = [*(kept[t] for t in self.timesteps), 1.0]
        self.net = _Net(channels, condition, width, depth)

    def predict(self, x: Tensor, k: int, z: Tensor) -> Tensor:
        """Predict noise and variance interpolation [N, 2 C] at the k-th transition of latents x [N,
        C] given z [N, D + 1]."""
        dtype = self.net.input_proj.weight.dtype
        return self.net(x.to(dtype), self.timesteps[k], z[:, :-1].to(dtype)).to(x.dtype)

    def guide(self, out: Tensor, z: Tensor, scale: float) -> Tensor:
        """Combine the predictions of both guidance branches, ``out`` [N, 2, 2 C] and z [N, 2, D +
        1]: [N, 2 C]."""
        noise, variance = out.split(self.channels, -1)
        scale = 1 + (scale - 1) * z[:, 0, -1:]
        return torch.cat([noise[:, 1] + scale * (noise[:, 0] - noise[:, 1]), variance[:, 0]], -1)

    def posterior(self, x: Tensor, k: int, out: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log standard deviation [N, C] of the k-th transition."""
        noise, variance = out.split(self.channels, -1)
        a, u = self.kept[k], self.kept[k + 1]
        b = 1 - a / u
        # a / u and not 1 - b, which is all rounding error for b close to 1
        mean = (x - b / math.sqrt(1 - a) * noise) / math.sqrt(a / u)
        if k + 1 == self.steps:
            return mean, torch.full_like(x, math.log(self.sigma_floor))
        most, least = math.log(b), math.log(b * (1 - u) / (1 - a))
        f = (variance + 1) / 2
        return mean, (f * most + (1 - f) * least) / 2


class _Net(nn.Module):
    """MLP with layers shifted, scaled and gated by timestep and condition; names are the published
    keys."""

    def __init__(self, channels: int, condition: int, width: int, depth: int):
        super().__init__()
        self.time_embed = nn.ModuleDict(
            {"mlp": nn.Sequential(nn.Linear(WAVES, width), nn.SiLU(), nn.Linear(width, width))}
        )
        self.cond_embed = nn.Linear(condition, width)
        self.input_proj = nn.Linear(channels, width)
        self.res_blocks = nn.ModuleList(_Block(width) for _ in range(depth))
        self.final_layer = _Last(width, 2 * channels)

    def forward(self, x: Tensor, t: int, z: Tensor) -> Tensor:
        y = self.time_embed["mlp"](_waves(t, x)) + self.cond_embed(z)
        x = self.input_proj(x)
        for block in self.res_blocks:
            x = block(x, y)
        return self.final_layer(x, y)


class _Block(nn.Module):
    """Residual MLP block with adaptive layer norm."""

    def __init__(self, width: int):
        super().__init__()
        self.in_ln = nn.LayerNorm(width, eps=EPS)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 3 * width))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        shift, scale, gate = self.adaLN_modulation(y).chunk(3, -1)
        return x + gate * self.mlp(self.in_ln(x) * (1 + scale) + shift)


class _Last(nn.Module):
    """Output layer with adaptive layer norm."""

    def __init__(self, width: int, outputs: int):
        super().__init__()
        self.linear = nn.Linear(width, outputs)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(y).chunk(2, -1)
        return self.linear(F.layer_norm(x, x.shape[-1:], eps=EPS) * (1 + scale) + shift)


def _waves(t: int, like: Tensor) -> Tensor:
    """Embed one timestep, shared by all rows: [1, WAVES]."""
    angles = [t * math.exp(-math.log(10_000) * i / (WAVES // 2)) for i in range(WAVES // 2)]
    return torch.tensor(
        [[*map(math.cos, angles), *map(math.sin, angles)]], dtype=like.dtype, device=like.device
    )
