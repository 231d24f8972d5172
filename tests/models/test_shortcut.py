"""Losses of frame models: targets of larger steps."""

from __future__ import annotations

import torch

from gen.models.nets.shortcut import noised, shortcut_target, velocity

S, MEAN = 0.4, 0.3


def inputs(steps: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    shape = (3, 5, 4, 2)
    z = torch.randn(shape, generator=generator, dtype=torch.float64)
    counts = torch.full((3, 5), steps)
    signal = torch.randint(steps, (3, 5), generator=generator).double() / steps
    return z, signal, counts


def spread(t):
    """Deviation of z = (1 - t) e + t x for x ~ N(MEAN, S^2)."""
    return ((1 - t) ** 2 + (t * S) ** 2).sqrt()


def straight(z, signal, steps):
    """Prediction of the exact field where the frame is known: paths are straight."""
    return torch.full_like(z, MEAN)


def flow(z, signal, steps):
    """Prediction of a step of any size along the exact field of a Gaussian: it ends where the
    field leads."""
    t, d = signal[..., None, None], (1 / steps)[..., None, None]
    end = MEAN * (t + d) + spread(t + d) / spread(t) * (z - MEAN * t)
    return z + (1 - t) * (end - z) / d


def euler(z, signal, steps):
    """Prediction of the field itself, whatever the size of the step."""
    t = signal[..., None, None]
    return MEAN + t * S**2 * (z - t * MEAN) / spread(t) ** 2


def loss(predict, steps: int) -> float:
    z, signal, counts = inputs(steps)
    moving = torch.ones_like(signal, dtype=torch.bool)
    target = shortcut_target(predict, z, signal, counts, moving)
    return float((predict(z, signal, counts) - target).square().max())


def test_the_target_of_an_exact_field_has_no_loss():
    for steps in (1, 2, 4):
        assert loss(straight, steps) < 1e-24
        assert loss(flow, steps) < 1e-22
        # large steps along a curved field do not end where small ones do
        assert loss(euler, steps) > 1e-6


def test_context_stands_still_in_both_half_steps():
    z, signal, counts = inputs(2)
    moving = torch.zeros_like(signal, dtype=torch.bool)
    moving[:, 3:] = True
    seen = []

    def predict(z, signal, steps):
        seen.append((z.clone(), signal.clone()))
        return torch.zeros_like(z)

    shortcut_target(predict, z, signal, counts, moving)
    (z_first, first), (z_second, second) = seen
    assert torch.equal(z_first[:, :3], z_second[:, :3]) and torch.equal(first[:, :3], second[:, :3])
    assert torch.equal(second[:, 3:], first[:, 3:] + 0.25)
    assert not torch.equal(z_first[:, 3:], z_second[:, 3:])


def test_noise_and_velocity_agree():
    x, signal, _ = inputs(4)
    noise = torch.randn_like(x)
    z = noised(x, noise, signal)
    assert torch.allclose(velocity(z, x, signal), x - noise)
