"""Models that are another model and low-rank additions to its matrices.

A folder's config names the base. Its ``model.safetensors`` holds ``NAME.up`` [out, r] and
``NAME.down`` [r, in] for a matrix W [out, in] of the base, which becomes W + up down; and other
tensors of the base under their own names, which replace them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gen.core.errors import GenError
from gen.models.load.locate import readable

UP, DOWN = "up", "down"
FILE = "model.safetensors"


@torch.no_grad()
def add_low_rank(model: nn.Module, folder: str | Path) -> None:
    """Add a folder's tensors to a model.

    Args:
        model: the base, which is changed.
        folder: folder with ``model.safetensors``.

    Raises:
        GenError: the file cannot be read, or does not fit the base.
    """
    with readable("model", folder):
        tensors = load_file(Path(folder) / FILE)
    own = dict(model.named_parameters())
    for name, value in tensors.items():
        matrix, end = name.rpartition(".")[::2]
        if end == DOWN and f"{matrix}.{UP}" in tensors:
            continue
        is_added = end == UP and f"{matrix}.{DOWN}" in tensors
        if is_added:
            name, value = matrix, value.double() @ tensors[f"{matrix}.{DOWN}"].double()
        expected = tuple(own[name].shape) if name in own else None
        if expected != tuple(value.shape):
            raise GenError(
                f"the weights of model {folder} have {name} of shape {tuple(value.shape)}; expected"
                f" {expected or 'a parameter of the base'}"
            )
        value = value.to(own[name].device)
        own[name].copy_(own[name].double() + value if is_added else value)


def write_low_rank(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors of a folder in half precision."""
    halves = {k: v.detach().half().contiguous().cpu() for k, v in tensors.items()}
    save_file(halves, folder / FILE, metadata={"format": "pt"})
