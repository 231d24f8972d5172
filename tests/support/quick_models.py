"""Models that a recipe makes in its quick form."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import torch


def quickly_trained(recipe: ModuleType, folder: Path) -> Path:
    """``folder``, with what the recipe leaves there and its models in ``zoo``. All stages but the
    residual VQ and the measuring."""
    torch.set_num_threads(1)

    make = recipe.main.__self__  # the class of the recipe
    for name, stage in make(folder, folder / "zoo", quick=True).stages().items():
        if name not in ("rvq", "evaluate"):
            stage()
    return folder
