"""Small frame models: random weights, and a linear-Gaussian world in closed form."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from gen.core.rng import CounterRNG
from gen.models.adapters.frames import FrameLM
from gen.models.nets.frames import FrameConfig, FrameModel
from gen.samplers.worlds.rollout import Rollout


def tiny_net(window: int = 4, seed: int = 0, frame: int = 4) -> FrameModel:
    """Net of random weights in float64, whose outputs depend on all inputs."""
    torch.manual_seed(seed)
    config = FrameConfig(
        frame=(frame, frame, 3),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        window=window,
    )
    model = FrameModel(config)
    model.start()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model.double().eval()


class Unrounded(FrameLM):
    """Adapter that keeps frames as they are, so that errors of arithmetic show."""

    def settle(self, x: Tensor) -> Tensor:
        return x


def starts(model, rows: int = 1, seed: int = 1) -> Tensor:
    """First frames [rows, P, C]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, model.positions, model.channels)
    return torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1


def rollout(model, rows: int = 1, steps: int = 2, ahead: int = 1, rng=None) -> Rollout:
    """Roll-out of rows that begin with ``starts``."""
    rng = CounterRNG(range(10, 10 + rows)) if rng is None else rng
    return Rollout(model, starts(model, rows), rng, steps, ahead)


def save_tiny_world(folder: Path) -> Path:
    """Write a model of random weights for the modality ``world``."""
    model = tiny_net(window=8, frame=16).float()
    model.config.frontend = None
    model.save_pretrained(folder)
    return folder


class LinearGaussian:
    """World x' ~ N(A x + b_a, s^2) of one position, and its exact denoiser.

    Of z = (1 - t) e + t x' the posterior mean is m + t s^2 (z - t m) / v, v = (1 - t)^2 + t^2 s^2.
    """

    device, dtype = torch.device("cpu"), torch.float64
    window, finest, none_action, context_signal = 2, 8, 3, 1.0
    A, B, S = 0.7, torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64), 0.4

    def __init__(self, positions: int = 1):
        self.positions, self.channels = positions, 1
        self.before = None

    def levels(self, steps: int) -> list[float]:
        return [k / steps for k in range(steps + 1)]

    def empty(self, rows: int, frames: int):
        zeros = torch.zeros(rows, frames, self.positions, 1, dtype=self.dtype)
        return [(zeros, zeros.clone())]

    def settle(self, x: Tensor) -> Tensor:
        return x

    def forward(self, z, signal, steps, actions, past, known, keep=False):
        frames = torch.cat([past[0][0], z], 1)[:, -z.shape[1] - 1 : -1]  # the frame before each
        mean = self.A * frames + self.B[actions][..., None, None]
        t = signal[..., None, None]
        variance = (1 - t) ** 2 + t**2 * self.S**2
        return mean + t * self.S**2 * (z - t * mean) / variance, [(z, z)] if keep else []
