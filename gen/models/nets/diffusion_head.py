"""Diffusion head: the distribution of one latent given a conditioning vector, as a small denoising
network (Li et al., "Autoregressive Image Generation without Vector Quantization", arXiv
2406.11838).

A latent x is noised to x_t = sqrt(a_t) x + sqrt(1 - a_t) e; the head learns v = sqrt(a_t) e -
sqrt(1 - a_t) x (Salimans & Ho, arXiv 2202.00512) and sampling takes S of the training timesteps
back. From x_t with the next kept timestep u < t:

    x ~ N(c_x x^ + c_t x_t, s^2),  x^ = sqrt(a_t) x_t - sqrt(1 - a_t) v,
    c_x = sqrt(a_u) b / (1 - a_t),  c_t = sqrt(a_t / a_u) (1 - a_u) / (1 - a_t),  s^2 = b (1 - a_u)
                                    / (1 - a_t),  b = 1 - a_t / a_u

with a_u = 1 after the last one, where s would be zero; ``sigma_floor`` is the smallest s.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TRAIN_STEPS = 1000


def cosine_schedule() -> list[float]:
    """Return a_t of every training timestep: Nichol & Dhariwal's cosine (arXiv 2102.09672), with at
    most 0.999 lost per step. Plain numbers, since models are also built on meta devices."""

    def bar(t):
        return math.cos((t / TRAIN_STEPS + 0.008) / 1.008 * math.pi / 2) ** 2

    product, out = 1.0, []
    for t in range(TRAIN_STEPS):
        product *= max(bar(t + 1) / bar(t), 0.001)
        out.append(product)
    return out


class DiffusionHead(nn.Module):
    """MLP with adaptive layer norm. ``channels``: C; ``condition``: D; ``steps``: S transitions of
    a path; ``sigma_floor``: the smallest s."""

    def __init__(
        self, channels: int, condition: int, width: int, depth: int, steps: int, sigma_floor: float
    ):
        super().__init__()
        self.channels, self.steps, self.sigma_floor = channels, steps, sigma_floor
        self.time = nn.Sequential(nn.Linear(128, width), nn.SiLU(), nn.Linear(width, width))
        self.condition = nn.Linear(condition, width)
        self.enter = nn.Linear(channels, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(depth))
        self.leave = nn.Linear(width, channels)
        self.shift = nn.Linear(width, 2 * width)
        self.kept = cosine_schedule()
        self.timesteps = [round((TRAIN_STEPS - 1) * (1 - k / steps)) for k in range(steps)]

    @torch.no_grad()
    def start(self) -> None:
        """Initialise for training: every block is the identity and v is zero."""
        for last in (self.leave, self.shift, *(b.modulate for b in self.blocks)):
            last.weight.zero_()
            last.bias.zero_()

    def forward(self, x: Tensor, t: Tensor, z: Tensor) -> Tensor:
        """Predict v [N, C] of noised latents x [N, C] at timesteps t [N] given z [N, D]."""
        frequency = torch.exp(-math.log(10_000) * torch.arange(64, device=x.device) / 64)
        angle = t[:, None] * frequency
        c = F.silu(
            self.time(torch.cat([angle.cos(), angle.sin()], 1).to(x.dtype)) + self.condition(z)
        )
        h = self.enter(x)
        for block in self.blocks:
            h = block(h, c)
        shift, scale = self.shift(c).chunk(2, -1)
        return self.leave(F.layer_norm(h, h.shape[-1:]) * (1 + scale) + shift)

    def loss(self, x: Tensor, z: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Compute the mean squared error of v at random timesteps, for latents x [N, C]."""
        t = torch.randint(TRAIN_STEPS, (len(x),), generator=generator, device=x.device)
        noise = torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)
        a = torch.tensor(self.kept, device=x.device, dtype=torch.float32)[t, None].to(x.dtype)
        v = a.sqrt() * noise - (1 - a).sqrt() * x
        return F.mse_loss(self(a.sqrt() * x + (1 - a).sqrt() * noise, t, z).float(), v.float())

    def predict(self, x: Tensor, k: int, z: Tensor) -> Tensor:
        """Predict v [N, C] at the k-th transition of a path."""
        return self(x, torch.full((len(x),), self.timesteps[k], device=x.device), z)

    def posterior(self, x: Tensor, k: int, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log standard deviation [N, C] of the k-th transition."""
        a = self.kept[self.timesteps[k]]
        u = self.kept[self.timesteps[k + 1]] if k + 1 < self.steps else 1.0
        b = 1 - a / u
        clean = math.sqrt(a) * x - math.sqrt(1 - a) * v
        mean = math.sqrt(u) * b / (1 - a) * clean + math.sqrt(a / u) * (1 - u) / (1 - a) * x
        sigma = max(math.sqrt(b * (1 - u) / (1 - a)), self.sigma_floor)
        return mean, torch.full_like(x, math.log(sigma))


class _Block(nn.Module):
    """Residual MLP block with adaptive layer norm."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.modulate = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale, gate = self.modulate(c).chunk(3, -1)
        return x + gate * self.mlp(self.norm(x) * (1 + scale) + shift)
