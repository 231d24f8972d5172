"""Oasis (Decart and Etched, open weights of 2024): a diffusion transformer of game frames, in the
layout that it was published in.

    latents [B, F, C, h, w], timesteps [B, F] of 1000, actions [B, F, 25]  ->  v [B, F, C, h, w]

Patches of 2 x 2 are positions. A block is full attention inside a frame and causal attention over
the frames at the same position, each followed by an MLP and modulated by c = embedding of the
frame's timestep + projection of its action. Attention inside a frame turns queries and keys by row
and column (rotary, frequencies of pixels), attention over time by the frame's number.

Frames come with the action that leads to them: ``shift_actions`` puts a row of zeros first, since a
recording lists the action that is taken at each frame. ``levels`` and ``signal`` are those of its
DDIM sampler. In x = (1 - s) e + s x0 coordinates a DDIM step is an Euler step, so the rule of
``gen.samplers.worlds.rollout`` is the same one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gen.models.load.weights import Weights, fill, without_storage

TIMESTEPS, FREQUENCIES = 1000, 256
STABILIZATION = 15  # context frames are at timestep 14, without noise
CLAMP = 20.0  # largest magnitude of the noise that a frame starts from
PIXEL_FREQUENCY = 256.0  # twice the highest frequency of rows and columns
EPS = 1e-6
# frequencies of rotary embeddings, which every block lists again, follow from the sizes
DERIVED = (r"rotary_emb\.freqs$",)


@dataclass(frozen=True)
class OasisConfig:
    """Sizes, by default those of the published DiT-S/2.

    Attributes:
        height, width: rows and columns of latents.
        patch: latents of a position's side.
        channels: C.
        hidden: width.
        depth: blocks.
        heads: heads of attention.
        actions: numbers of an action.
        window: frames that are seen at a time.
    """

    height: int = 18
    width: int = 32
    patch: int = 2
    channels: int = 16
    hidden: int = 1024
    depth: int = 16
    heads: int = 16
    actions: int = 25
    window: int = 32


class Oasis(nn.Module):
    """Network; see the module."""

    def __init__(self, config: OasisConfig):
        super().__init__()
        c = self.config = config
        d, p = c.hidden, c.patch
        self.x_embedder = nn.ModuleDict({"proj": nn.Conv2d(c.channels, d, p, p)})
        self.t_embedder = nn.ModuleDict(
            {"mlp": nn.Sequential(nn.Linear(FREQUENCIES, d), nn.SiLU(), nn.Linear(d, d))}
        )
        self.external_cond = nn.Linear(c.actions, d)
        self.blocks = nn.ModuleList(OasisBlock(d, c.heads) for _ in range(c.depth))
        self.final_layer = nn.ModuleDict(
            {"linear": nn.Linear(d, p * p * c.channels), "adaLN_modulation": _modulation(d, 2)}
        )

    def forward(self, x: Tensor, timesteps: Tensor, actions: Tensor) -> Tensor:
        """Predict v [B, F, C, h, w]; ``actions`` [B, F, A] lead to the frames."""
        b, f = x.shape[:2]
        c = self.t_embedder["mlp"](_sinusoids(timesteps).to(x.dtype))
        c = F.silu(c + self.external_cond(actions))  # [B, F, D]
        h = self.x_embedder["proj"](x.flatten(0, 1))
        rows, columns = h.shape[-2:]
        h = h.flatten(2).transpose(1, 2).unflatten(0, (b, f))  # [B, F, P, D]
        dim = self.config.hidden // self.config.heads
        space = _axial_angles(rows, columns, dim, x.device).to(x.dtype)
        time = _time_angles(f, dim, x.device).to(x.dtype)
        for block in self.blocks:
            h = block(h, c, space, time)
        shift, scale = _chunks(self.final_layer["adaLN_modulation"], c, 2)
        h = self.final_layer["linear"](_normed(h) * (1 + scale) + shift)
        p, channels = self.config.patch, self.config.channels
        h = h.view(b, f, rows, columns, p, p, channels).permute(0, 1, 6, 2, 4, 3, 5)
        return h.reshape(b, f, channels, rows * p, columns * p)


class OasisBlock(nn.Module):
    """Attention inside frames and over time, each with its MLP. ``width``: D; ``heads``: H."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        for axis in "st":
            attention = {
                "to_qkv": nn.Linear(width, 3 * width, bias=False),
                "to_out": nn.Linear(width, width),
            }
            mlp = {"fc1": nn.Linear(width, 4 * width), "fc2": nn.Linear(4 * width, width)}
            self.add_module(f"{axis}_attn", nn.ModuleDict(attention))
            self.add_module(f"{axis}_mlp", nn.ModuleDict(mlp))
            self.add_module(f"{axis}_adaLN_modulation", _modulation(width, 6))

    def forward(self, x: Tensor, c: Tensor, space: Tensor, time: Tensor) -> Tensor:
        """Apply the block to x [B, F, P, D] under activated conditions c [B, F, D]."""
        for axis, angles in (("s", space), ("t", time)):
            m = _chunks(self.get_submodule(f"{axis}_adaLN_modulation"), c, 6)
            attention = self.get_submodule(f"{axis}_attn")
            mlp = self.get_submodule(f"{axis}_mlp")
            x = x + m[2] * self.attend(attention, _normed(x) * (1 + m[1]) + m[0], angles, axis)
            hidden = mlp.get_submodule("fc1")(_normed(x) * (1 + m[4]) + m[3])
            hidden = F.gelu(hidden, approximate="tanh")
            x = x + m[5] * mlp.get_submodule("fc2")(hidden)
        return x

    def attend(self, layers: nn.Module, x: Tensor, angles: Tensor, axis: str) -> Tensor:
        """Attend inside frames (``s``), or causally over time (``t``), [B, F, P, D]."""
        x = x if axis == "s" else x.transpose(1, 2)
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(-2, -3)
            for t in layers.get_submodule("to_qkv")(x).chunk(3, -1)
        )
        q, k = _turned(q, angles), _turned(k, angles)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=axis == "t")
        out = layers.get_submodule("to_out")(out.transpose(-2, -3).flatten(-2))
        return out if axis == "s" else out.transpose(1, 2)


def load_oasis(
    path: str | Path,
    config: OasisConfig | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Load published weights into an ``Oasis``.

    Args:
        path: folder or file of the weights.
        config: sizes; None for the published ones.
        device: device of the model.
        dtype: floating-point type of the model.

    Raises:
        GenError: tensors are missing, unknown or of another shape.
    """
    model = without_storage(lambda: Oasis(config or OasisConfig()))
    return fill(model, Weights(path), drop=DERIVED, device=device, dtype=dtype)


def shift_actions(actions: Tensor) -> Tensor:
    """Return the action that leads to each frame [B, F, A], from those taken at each frame."""
    return F.pad(actions, (0, 0, 1, 0))[:, :-1]


def kept_signal() -> Tensor:
    """Return the share of the signal's variance at each timestep, float64 [1000]: the sigmoid
    schedule from -3 to 3."""
    t = torch.linspace(0, 1, TIMESTEPS + 1, dtype=torch.float64)
    curve = torch.sigmoid(-(t * 6 - 3))
    kept = (curve - curve[-1]) / (curve[0] - curve[-1])
    betas = (1 - kept[1:] / kept[:-1]).clamp(max=0.999)
    return (1 - betas).cumprod(0)


def ddim_timesteps(steps: int) -> list[int]:
    """Return the timesteps of ``steps`` DDIM steps, from noise to -1, which is no noise."""
    return torch.linspace(-1, TIMESTEPS - 1, steps + 1).long().flip(0).tolist()


def signal(timestep: int) -> float:
    """Return the level s of z = (1 - s) e + s x, a multiple of what the network sees, at a
    timestep; 1 at -1."""
    if timestep < 0:
        return 1.0
    kept = float(kept_signal()[timestep])
    return math.sqrt(kept) / (math.sqrt(kept) + math.sqrt(1 - kept))


def clean(x: Tensor, v: Tensor, timestep: int) -> Tensor:
    """Return the prediction of the clean latents from x and v at a timestep."""
    kept = float(kept_signal()[timestep])
    return math.sqrt(kept) * x - math.sqrt(1 - kept) * v


def _modulation(width: int, parts: int) -> nn.Sequential:
    """Projection of conditions; index 1, as published, follows an activation."""
    return nn.Sequential(nn.Identity(), nn.Linear(width, parts * width))


def _chunks(layers: nn.Module, c: Tensor, parts: int) -> tuple[Tensor, ...]:
    return layers(c)[:, :, None].chunk(parts, -1)


def _normed(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=EPS)


def _sinusoids(timesteps: Tensor) -> Tensor:
    half = FREQUENCIES // 2
    frequency = torch.exp(
        -math.log(10_000) * torch.arange(half, device=timesteps.device).double() / half
    )
    angle = timesteps[..., None].double() * frequency
    return torch.cat([angle.cos(), angle.sin()], -1)


def _axial_angles(rows: int, columns: int, dim: int, device: torch.device) -> Tensor:
    """Angles of positions in raster order, [P, dim]: half for the row, half for the column."""
    frequency = (
        torch.linspace(1, PIXEL_FREQUENCY / 2, dim // 4, device=device, dtype=torch.float64)
        * math.pi
    )
    frequency = frequency.repeat_interleave(2)
    y = torch.linspace(-1, 1, rows, device=device, dtype=torch.float64)[:, None] * frequency
    x = torch.linspace(-1, 1, columns, device=device, dtype=torch.float64)[:, None] * frequency
    shape = (rows, columns, dim // 2)
    return torch.cat([y[:, None].expand(shape), x[None].expand(shape)], -1).flatten(0, 1)


def _time_angles(frames: int, dim: int, device: torch.device) -> Tensor:
    """Angles of frames, [F, dim]."""
    frequency = 10_000.0 ** -(torch.arange(0, dim, 2, device=device, dtype=torch.float64) / dim)
    return (torch.arange(frames, device=device)[:, None] * frequency).repeat_interleave(2, -1)


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate neighbouring pairs of x [..., T, dim] by angles [T, dim]."""
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    crossed = torch.stack([-second, first], -1).flatten(-2)
    return x * angles.cos() + crossed * angles.sin()
