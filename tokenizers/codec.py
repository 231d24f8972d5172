"""What frontends over codecs of transformers share: loading, and where and in what precision signals go in."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor

from gen.errors import GenError
from gen.frontend import StreamingFrontend
from gen.models.loading import locate, quiet, readable


class Codec(StreamingFrontend):
    """A frontend over the class of transformers whose name is ``architecture``."""

    architecture: ClassVar[str]

    def __init__(self, model):
        self.model = model.eval()

    @classmethod
    def from_pretrained(cls, folder: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Self:
        """Raises ``GenError`` for a missing or unreadable folder, and for weights that lack a tensor."""
        import transformers

        path = locate(folder, "frontend")
        with readable("frontend", folder), quiet():
            model, info = getattr(transformers, cls.architecture).from_pretrained(path, dtype=dtype, output_loading_info=True)
        if info["missing_keys"]:
            raise GenError(f"frontend {folder} lacks the weight {min(info['missing_keys'])!r}")
        return cls(model.to(device))

    def _like_model(self, x: Tensor) -> Tensor:
        return x.to(self.model.device, self.model.dtype)
