"""Oasis in the published layout: weights written by the test, and a forward written beside it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from gen.core.errors import GenError
from gen.models.published import oasis
from gen.models.published.oasis import OasisConfig, load_oasis, shift_actions

TINY = OasisConfig(height=4, width=6, channels=3, hidden=32, depth=2, heads=2, actions=5, window=4)


def published(config: OasisConfig, seed: int = 0) -> dict[str, Tensor]:
    """Random tensors by the keys and shapes of the published file."""
    generator = torch.Generator().manual_seed(seed)
    d, patch = config.hidden, config.patch
    shapes = {
        "x_embedder.proj.weight": (d, config.channels, patch, patch),
        "x_embedder.proj.bias": (d,),
        "t_embedder.mlp.0.weight": (d, 256),
        "t_embedder.mlp.0.bias": (d,),
        "t_embedder.mlp.2.weight": (d, d),
        "t_embedder.mlp.2.bias": (d,),
        "external_cond.weight": (d, config.actions),
        "external_cond.bias": (d,),
        "final_layer.linear.weight": (patch**2 * config.channels, d),
        "final_layer.linear.bias": (patch**2 * config.channels,),
        "final_layer.adaLN_modulation.1.weight": (2 * d, d),
        "final_layer.adaLN_modulation.1.bias": (2 * d,),
        "spatial_rotary_emb.freqs": (d // config.heads // 4,),
        "temporal_rotary_emb.freqs": (d // config.heads // 2,),
    }
    for n in range(config.depth):
        for axis in "st":
            shapes |= {
                f"blocks.{n}.{axis}_attn.to_qkv.weight": (3 * d, d),
                f"blocks.{n}.{axis}_attn.to_out.weight": (d, d),
                f"blocks.{n}.{axis}_attn.to_out.bias": (d,),
                f"blocks.{n}.{axis}_attn.rotary_emb.freqs": (8,),
                f"blocks.{n}.{axis}_mlp.fc1.weight": (4 * d, d),
                f"blocks.{n}.{axis}_mlp.fc1.bias": (4 * d,),
                f"blocks.{n}.{axis}_mlp.fc2.weight": (d, 4 * d),
                f"blocks.{n}.{axis}_mlp.fc2.bias": (d,),
                f"blocks.{n}.{axis}_adaLN_modulation.1.weight": (6 * d, d),
                f"blocks.{n}.{axis}_adaLN_modulation.1.bias": (6 * d,),
            }
    return {k: 0.2 * torch.randn(shape, generator=generator) for k, shape in shapes.items()}


def silu(v: Tensor) -> Tensor:
    return v / (1 + (-v).exp())


def gelu(v: Tensor) -> Tensor:
    return v * (1 + (math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)).tanh()) / 2


def norm(v: Tensor) -> Tensor:
    return (v - v.mean()) / (v.var(correction=0) + 1e-6).sqrt()


def rotated(v: Tensor, angles: list[float]) -> Tensor:
    """Rotate the pairs (0, 1), (2, 3), ... of a head."""
    out = v.clone()
    for i, angle in enumerate(angles):
        a, b = v[2 * i], v[2 * i + 1]
        out[2 * i] = a * math.cos(angle) - b * math.sin(angle)
        out[2 * i + 1] = b * math.cos(angle) + a * math.sin(angle)
    return out


class Plain:
    """The network position by position, from its description, in float64."""

    def __init__(self, w: dict, config: OasisConfig):
        self.w, self.config = {k: v.double() for k, v in w.items()}, config
        self.dim = config.hidden // config.heads
        self.rows, self.columns = config.height // config.patch, config.width // config.patch

    def linear(self, name: str, v: Tensor) -> Tensor:
        bias = self.w.get(f"{name}.bias")
        return v @ self.w[f"{name}.weight"].T + (0 if bias is None else bias)

    def location_angles(self, r: int, c: int) -> list[float]:
        pixel = torch.linspace(1, 128, self.dim // 4, dtype=torch.float64) * math.pi
        y = torch.linspace(-1, 1, self.rows, dtype=torch.float64)[r]
        z = torch.linspace(-1, 1, self.columns, dtype=torch.float64)[c]
        return torch.cat([y * pixel, z * pixel]).tolist()

    def time_angles(self, f: int) -> list[float]:
        return [f * 10_000.0 ** (-2 * i / self.dim) for i in range(self.dim // 2)]

    def attend(self, name: str, x: Tensor, seen: list, angle: list, angles: list) -> Tensor:
        """Attention of one vector to several, with their angles."""
        d, out = self.config.hidden, []
        query = self.linear(f"{name}.to_qkv", x)[:d]
        both = [self.linear(f"{name}.to_qkv", v) for v in seen]
        for h in range(self.config.heads):
            part = slice(h * self.dim, (h + 1) * self.dim)
            q = rotated(query[part], angle)
            keys = [rotated(v[d : 2 * d][part], g) for v, g in zip(both, angles, strict=True)]
            score = torch.stack([q @ k / math.sqrt(self.dim) for k in keys]).softmax(0)
            out.append(sum(s * v[2 * d :][part] for s, v in zip(score, both, strict=True)))
        return self.linear(f"{name}.to_out", torch.cat(out))

    def condition(self, t: Tensor, a: Tensor) -> Tensor:
        angle = t.double() * torch.exp(-math.log(10_000) * torch.arange(128).double() / 128)
        e = self.linear("t_embedder.mlp.0", torch.cat([angle.cos(), angle.sin()]))
        return silu(self.linear("t_embedder.mlp.2", silu(e)) + self.linear("external_cond", a))

    def block(self, name: str, axis: str, h: dict, cond: list[Tensor]) -> dict:
        """One attention and its MLP over all positions (frame, row, column)."""
        m = [self.linear(f"{name}_adaLN_modulation.1", v).chunk(6) for v in cond]
        inner = {k: norm(v) * (1 + m[k[0]][1]) + m[k[0]][0] for k, v in h.items()}
        new = {}
        for f, r, c in h:
            if axis == "s":
                keys = [k for k in h if k[0] == f]
                angles, here = (
                    [self.location_angles(*k[1:]) for k in keys],
                    self.location_angles(r, c),
                )
            else:
                keys = [(g, r, c) for g in range(f + 1)]
                angles, here = [self.time_angles(g) for g in range(f + 1)], self.time_angles(f)
            seen = [inner[k] for k in keys]
            made = self.attend(f"{name}_attn", inner[f, r, c], seen, here, angles)
            new[f, r, c] = h[f, r, c] + m[f][2] * made
        for k, v in new.items():
            hidden = self.linear(f"{name}_mlp.fc1", norm(v) * (1 + m[k[0]][4]) + m[k[0]][3])
            new[k] = v + m[k[0]][5] * self.linear(f"{name}_mlp.fc2", gelu(hidden))
        return new

    def __call__(self, x: Tensor, t: Tensor, a: Tensor) -> Tensor:
        p, h = self.config.patch, {}
        cond = [self.condition(*pair) for pair in zip(t, a, strict=True)]
        for f in range(len(x)):
            for r in range(self.rows):
                for c in range(self.columns):
                    square = x[f, :, r * p : r * p + p, c * p : c * p + p]
                    entered = (self.w["x_embedder.proj.weight"] * square).sum((1, 2, 3))
                    h[f, r, c] = entered + self.w["x_embedder.proj.bias"]
        for n in range(self.config.depth):
            for axis in "st":
                h = self.block(f"blocks.{n}.{axis}", axis, h, cond)
        out = torch.zeros_like(x)
        for (f, r, c), v in h.items():
            shift, scale = self.linear("final_layer.adaLN_modulation.1", cond[f]).chunk(2)
            patch = self.linear("final_layer.linear", norm(v) * (1 + scale) + shift)
            patch = patch.view(p, p, self.config.channels).permute(2, 0, 1)
            out[f, :, r * p : r * p + p, c * p : c * p + p] = patch
        return out


def reference(w: dict, x: Tensor, t: Tensor, a: Tensor, config: OasisConfig) -> Tensor:
    return Plain(w, config)(x, t, a)


def inputs(seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (3, TINY.channels, TINY.height, TINY.width)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    a = torch.randn(3, TINY.actions, generator=generator, dtype=torch.float64)
    return x, torch.tensor([14, 14, 700]), a


@pytest.fixture
def file(tmp_path):
    save_file(published(TINY), tmp_path / "oasis.safetensors")
    return tmp_path / "oasis.safetensors"


def test_published_weights_give_the_velocity_of_the_description(file, monkeypatch):
    model, (x, t, a) = load_oasis(file, TINY, dtype=torch.float64), inputs()
    expected = reference(published(TINY), x, t, shift_actions(a[None])[0], TINY)

    def error(actions: Tensor) -> float:
        return float((model(x[None], t[None], actions)[0] - expected).abs().max())

    assert error(shift_actions(a[None])) < 1e-5
    # actions that are not shifted, and time that runs both ways, are found out
    assert error(a[None]) > 1e-3
    attention = oasis.F.scaled_dot_product_attention
    monkeypatch.setattr(
        oasis.F, "scaled_dot_product_attention", lambda q, k, v, is_causal: attention(q, k, v)
    )
    assert error(shift_actions(a[None])) > 1e-3


def test_actions_are_shifted_by_one_frame_with_zeros_first():
    actions = torch.arange(1.0, 7).view(1, 3, 2)
    assert shift_actions(actions).tolist() == [[[0, 0], [1, 2], [3, 4]]]


def test_no_frame_sees_a_later_one(file):
    model, (x, t, a) = load_oasis(file, TINY, dtype=torch.float64), inputs()
    y, b = x.clone(), a.clone()
    y[2] += 1
    b[2] += 1
    one, two = model(x[None], t[None], a[None]), model(y[None], t[None], b[None])
    assert torch.equal(one[:, :2], two[:, :2]) and not torch.equal(one[:, 2], two[:, 2])


@pytest.mark.parametrize("fault", ["missing", "extra", "mis-shaped"])
def test_weights_of_another_layout_are_refused(tmp_path, fault):
    weights = published(TINY)
    name = "blocks.1.t_attn.to_qkv.weight"
    if fault == "missing":
        del weights[name]
    elif fault == "extra":
        weights["blocks.2.t_attn.to_qkv.weight"] = weights[name].clone()
    else:
        weights[name] = weights[name][:-1].clone()
    save_file(weights, tmp_path / "oasis.safetensors")
    with pytest.raises(GenError, match=fault):
        load_oasis(tmp_path / "oasis.safetensors", TINY)


def test_a_ddim_step_is_an_euler_step_along_the_signal_levels():
    """In z = x / (sqrt(a) + sqrt(1 - a)) coordinates, with the level sqrt(a) of both."""
    kept = oasis.kept_signal()
    steps = oasis.ddim_timesteps(10)
    assert steps[0] == 999 and steps[-1] == -1 and len(steps) == 11
    x = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for t, u in itertools.pairwise(steps):
        v = torch.sin(3 * x)
        a, b = (float(kept[n]) if n >= 0 else 1.0 for n in (t, u))
        start = oasis.clean(x, v, t)
        noise = math.sqrt(1 - a) * x + math.sqrt(a) * v
        ddim = math.sqrt(b) * start + math.sqrt(1 - b) * noise
        here, there = oasis.signal(t), oasis.signal(u)
        z = x / (math.sqrt(a) + math.sqrt(1 - a))
        euler = z + (there - here) * (start - z) / (1 - here)
        assert torch.allclose(euler * (math.sqrt(b) + math.sqrt(1 - b)), ddim, atol=1e-9)
        x = ddim
