"""Layer that adjusts the hidden states of a masked model to tokens that it has not seen (ADJUST,
arXiv 2509.22738).

A masked model gives every masked position a distribution of its own. After one of them has got a
token, this layer updates the others without another pass of the model:

    u  = W [rms(e(x)) ; rms(h)]        x the canvas with the new token, h the last hidden states
    h' = h + rms(layer(u))
    p' = softmax(head(h'))             e and head are the masked model's

``layer`` is a transformer layer with attention over all positions and rotary positions. The next
token uses h' in place of h, so that one layer serves any number of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gen.core.errors import GenError, unknown
from gen.models.load.locate import read_config, readable, zoo

MODEL_TYPE = "gen_adjust"
SIZES = ("width", "heads", "intermediate")


class AdjustLayer(nn.Module):
    """Layer of the module.

    Args:
        width: D, channels of the masked model.
        heads: heads of the attention.
        intermediate: channels of the feed-forward part.
        target: digest of the masked model's weights; empty for any model.

    Raises:
        GenError: the heads do not divide the width into even parts.
    """

    def __init__(self, width: int, heads: int, intermediate: int, target: str = ""):
        super().__init__()
        if width % (2 * heads):
            raise GenError(
                f"an adjust layer of width {width} has {heads} heads; expected heads of an even"
                " number of channels"
            )
        self.width, self.heads, self.intermediate = width, heads, intermediate
        self.target = target
        self.token_norm, self.state_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * intermediate, bias=False)
        self.shrink = nn.Linear(intermediate, width, bias=False)
        self.result_norm = nn.RMSNorm(width)

    def forward(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor, seen: Tensor | None = None
    ) -> Tensor:
        """Adjust hidden states.

        Args:
            embedded: embedded tokens [B, L, D], as the masked model embeds them.
            hidden: its last hidden states, or the result of this layer, [B, L, D].
            positions: long [B, L] or [1, L].
            seen: columns that are attended to, bool [B, L]; None for all.

        Returns:
            Hidden states [B, L, D].
        """
        x = self.down(torch.cat([self.token_norm(embedded), self.state_norm(hidden)], -1))
        shape = (*x.shape[:2], self.heads, self.width // self.heads)
        parts = self.qkv(self.attention_norm(x)).chunk(3, -1)
        q, k, v = (part.view(shape).transpose(1, 2) for part in parts)
        q, k = rotated(q, positions), rotated(k, positions)
        mask = None if seen is None else seen[:, None, None]
        attended = F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return hidden + self.result_norm(x + self.shrink(F.silu(gate) * up))

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json``, and ``model.safetensors`` in half precision."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        halves = {k: v.detach().half().contiguous().cpu() for k, v in self.state_dict().items()}
        save_file(halves, path / "model.safetensors")
        sizes = {"width": self.width, "heads": self.heads, "intermediate": self.intermediate}
        config = {"model_type": MODEL_TYPE, **sizes, "target": self.target}
        (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        """Load a layer.

        Args:
            folder: folder, or name of an embedded layer.
            device: device of the weights.
            dtype: dtype of the weights.

        Raises:
            GenError: there is no such layer, or its files cannot be read.
        """
        path = zoo().get(str(folder)) or Path(folder).expanduser()
        if not str(folder) or not (path / "config.json").is_file():
            raise unknown("layer", str(folder), embedded(), "sampler.adjust_layer; it is no folder")
        layer = cls(**_arguments(read_config(path), path))
        with readable("adjust layer", folder):
            layer.load_state_dict(load_file(path / "model.safetensors"))
        return layer.to(device, dtype).eval().requires_grad_(False)


def _arguments(config: Any, path: Path) -> dict[str, Any]:
    """Read the arguments of a layer from its config. Raises ``GenError`` for another config."""
    known = config if isinstance(config, Mapping) else {}
    sizes = {name: known.get(name) for name in SIZES}
    fine = all(type(v) is int and 0 < v <= 65536 for v in sizes.values())
    if known.get("model_type") != MODEL_TYPE or not fine or type(known.get("target")) is not str:
        raise GenError(
            f"the config of adjust layer {path} is {str(config)[:200]}; expected model_type"
            f" {MODEL_TYPE!r}, {', '.join(SIZES)} and target"
        )
    return {**sizes, "target": known["target"]}


def embedded() -> list[str]:
    """List the names of the layers in the zoo."""
    names = (n for n, path in zoo().items() if read_config(path).get("model_type") == MODEL_TYPE)
    return list(names) or ["none that is embedded"]


def rotated(x: Tensor, positions: Tensor, base: float = 10000.0) -> Tensor:
    """Rotate x [B, H, L, d] by positions [B, L]: rotary position embeddings."""
    half = x.shape[-1] // 2
    rates = base ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angles = positions[:, None, :, None].double() * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
