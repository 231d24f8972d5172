"""What frontends of texts share: the signal is a text's UTF-8 in bytes, filled up with zeros, and
ids have no vectors."""

from __future__ import annotations

import torch
from torch import Tensor

from gen.contracts.frontend import TokenFrontend
from gen.core.errors import GenError


class TextBytes(TokenFrontend):
    """``device``: where signals and ids are."""

    device: torch.device

    def _bytes(self, text: str) -> Tensor:
        return torch.tensor(list(text.encode()), dtype=torch.uint8, device=self.device)

    def postprocess(self, x: Tensor) -> str:
        if x.dtype != torch.uint8 or x.ndim != 1:
            raise GenError(
                f"the signal is {x.dtype} {tuple(x.shape)}; expected uint8 [bytes], the UTF-8 of"
                " one text"
            )
        return bytes(x.tolist()).rstrip(b"\0").decode("utf-8", "replace")

    @property
    def codebooks(self) -> list[Tensor]:
        """None: ids stand for words or pieces of words, not for vectors."""
        return []
