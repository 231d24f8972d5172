"""Training of low-rank additions to a model's matrices, and of its norms.

W' = W + up down    up [out, r] begins at zero, down [r, in] at random
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gen.models.load.locate import locate
from gen.models.load.low_rank import DOWN, UP, write_low_rank

LAYERS, NORM = ".layers.", "norm"


class Addition(nn.Module):
    """Parametrization W -> W + up down.

    Args:
        weight: W [out, in].
        rank: r.
        generator: source of the random numbers.
    """

    def __init__(self, weight: Tensor, rank: int, generator: torch.Generator):
        super().__init__()
        rows, columns = weight.shape
        noise = torch.randn(rank, columns, generator=generator)
        self.down = nn.Parameter(noise / columns**0.5)
        self.up = nn.Parameter(torch.zeros(rows, rank))

    def forward(self, weight: Tensor) -> Tensor:
        """Compute W + up down."""
        return weight + self.up @ self.down


def attach(model: nn.Module, rank: int, seed: int = 0) -> None:
    """Freeze a model but for its norms, and add to the matrices of its layers."""
    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and LAYERS in name:
            addition = Addition(module.weight, rank, generator)
            parametrize.register_parametrization(module, "weight", addition)
        elif NORM in name.rpartition(".")[2]:
            module.requires_grad_(True)


def trained(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of ``gen.models.load.low_rank`` of a model with additions."""
    out = {}
    for name, module in model.named_modules():
        if isinstance(module, Addition):
            matrix = name.removesuffix(".parametrizations.weight.0") + ".weight"
            out |= {f"{matrix}.{UP}": module.up, f"{matrix}.{DOWN}": module.down}
        elif NORM in name.rpartition(".")[2]:
            out |= {f"{name}.{key}": p for key, p in module.named_parameters(recurse=False)}
    return out


def export(model: nn.Module, base: str, folder: Path) -> None:
    """Write what was trained, with a config that names the base.

    Args:
        model: the model with additions.
        base: name of the base in the zoo.
        folder: folder to write.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((Path(locate(base)) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"base": base}, indent=2) + "\n")
    write_low_rank(folder, trained(model))
