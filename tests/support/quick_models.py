"""Models that a recipe makes in its quick form."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch


def quickly_trained(recipe: ModuleType, folder: Path) -> Path:
    """``folder``, with what the recipe leaves there and its models in ``zoo``. All stages but the
    residual VQ and the measuring."""
    torch.set_num_threads(1)

    def stages(doc, argv, make):
        return [
            do()
            for name, do in make(folder, folder / "zoo", True).items()
            if name not in ("rvq", "evaluate")
        ]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "run", stages)
        recipe.main([])
    return folder
