"""Losses of frame models: rectified flow with one signal level per frame (diffusion forcing, arXiv
2407.01392), and shortcut forcing of larger steps (Frans et al., arXiv 2410.12557; in the form of
Dreamer 4, arXiv 2509.24527).

With z = (1 - tau) e + tau x and a net x^ = f(z, tau, d), the velocity at z is b = (x^ - z) / (1 -
tau). The smallest step d is trained on x itself. A larger one is trained on two steps of half its
size,

    b' = b(z, tau, d/2),  z' = z + b' d/2,  b'' = b(z', tau + d/2, d/2),
    target: (1 - tau)^2 |b(z, tau, d) - (b' + b'')/2|^2 = |x^ - z - (1 - tau)(b' + b'')/2|^2

where the target takes no gradient. For the exact velocity field of straight paths it is zero.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# (z [B, F, P, C], signal levels [B, F], steps 1 / d [B, F]) -> predictions [B, F, P, C]
Predict = Callable[[Tensor, Tensor, Tensor], Tensor]


def noised(x: Tensor, noise: Tensor, signal: Tensor) -> Tensor:
    """Noise frames x [B, F, P, C] to signal levels [B, F]."""
    tau = signal[..., None, None].to(x.dtype)
    return (1 - tau) * noise + tau * x


def velocity(z: Tensor, predicted: Tensor, signal: Tensor) -> Tensor:
    """Compute b [B, F, P, C] from predictions at signal levels [B, F] below 1."""
    return (predicted - z) / (1 - signal[..., None, None].to(z.dtype))


@torch.no_grad()
def shortcut_target(
    predict: Predict, z: Tensor, signal: Tensor, steps: Tensor, moving: Tensor
) -> Tensor:
    """Compute what a net should predict for steps of size d, from two steps of half the size.

    Args:
        predict: the net.
        z: noised frames [B, F, P, C].
        signal: their levels [B, F]; at most 1 - d where moving.
        steps: 1 / d, powers of two, long [B, F].
        moving: frames that take the step, bool [B, F]; the others stand still as context.

    Returns:
        Targets [B, F, P, C]; undefined where not moving.
    """
    half = 0.5 / steps
    # frames at rest take no step: their level stays below 1 and divides nothing that is used
    tau = torch.where(moving, signal, torch.zeros_like(signal))
    first = velocity(z, predict(z, signal, 2 * steps), tau)
    go = (half * moving)[..., None, None].to(z.dtype)
    between = torch.where(moving, signal + half, signal)
    middle = z + first * go
    second = velocity(middle, predict(middle, between, 2 * steps), tau + half * moving)
    return z + (1 - tau[..., None, None].to(z.dtype)) * (first + second) / 2
