"""Text through any tokenizer of transformers: ids of pieces of words, as many as a text takes.

The signal is the text's UTF-8 in bytes, filled up with zeros. What a tokenizer splits depends on
the whole text, so ids of a text's beginning need not begin the text's ids: generation stays in ids,
and only what is finished becomes text.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from gen.contracts.frontend import FrontendConfig
from gen.core.errors import GenError
from gen.core.registry import register
from gen.models.load.pretrained import tokenizer_of
from gen.tokenizers.base.text_bytes import TextBytes


@register("tokenizer", "hf_text")
class HFText(TextBytes):
    """Ids int64 [B, 1, T] of texts uint8 [B, bytes]. ``ends``: ids that end a text; what stands
    behind the first one is nothing. ``vocab_size``: of the model, which may have ids that the
    tokenizer never says; they read as nothing."""

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int | None = None,
        ends: tuple[int, ...] | None = None,
        device: torch.device | str = "cpu",
    ):
        """Raises ``GenError`` for a tokenizer with ids that the model does not have."""
        self.tokenizer, self.device = tokenizer, torch.device(device)
        self.size = len(tokenizer)
        vocab_size = vocab_size or self.size
        if self.size > vocab_size:
            raise GenError(
                f"the tokenizer has {self.size} ids; expected at most {vocab_size}, the size of the"
                " model's vocabulary"
            )
        own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self.ends = own if ends is None else ends
        self.config = FrontendConfig("text", "ids", (vocab_size,), (1,))

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        """Of a local folder. Raises ``GenError`` where there is no tokenizer in it."""
        return cls(tokenizer_of(path), device=device)

    def save_pretrained(self, folder: str | Path) -> None:
        self.tokenizer.save_pretrained(folder)

    def ids(self, text: str) -> list[int]:
        """The ids of a text, without the specials that the tokenizer would put around it."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def text(self, ids: list[int]) -> str:
        """The text of ids up to the first end, without specials."""
        stop = next((n for n, i in enumerate(ids) if i in self.ends), len(ids))
        return self.tokenizer.decode(
            [i for i in ids[:stop] if i < self.size], skip_special_tokens=True
        )

    def preprocess(self, media: Any) -> Tensor:
        if not isinstance(media, str):
            raise GenError(f"the text is a {type(media).__name__}; expected a string")
        return self._bytes(media)

    def encode(self, x: Tensor) -> Tensor:
        """Shorter texts are filled up with an end. Raises ``GenError`` where that is needed and
        there is none."""
        rows = [self.ids(self.postprocess(signal)) for signal in x]
        width = max(map(len, rows))
        if not self.ends and any(len(r) < width for r in rows):
            raise GenError(
                "texts of different lengths came, and the tokenizer has no end to fill them up"
                " with; expected one at a time"
            )
        return torch.tensor(
            [r + [self.ends[0] if self.ends else 0] * (width - len(r)) for r in rows],
            dtype=torch.long,
            device=self.device,
        )[:, None]

    def decode(self, codes: Tensor) -> Tensor:
        if codes.ndim != 3 or codes.shape[1] != 1:
            raise GenError(f"ids have shape {tuple(codes.shape)}; expected [B, 1, T]")
        return torch.nn.utils.rnn.pad_sequence(
            [self._bytes(self.text(row)) for row in codes[:, 0].tolist()], batch_first=True
        )

    @property
    def fingerprint(self) -> Tensor:
        """The vocabulary as 32 numbers of 0 to 255, which every type of float holds exactly."""
        text = json.dumps(sorted(self.tokenizer.get_vocab().items()))
        return torch.tensor(list(hashlib.sha256(text.encode()).digest()), dtype=torch.float32)

    def grid_for(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        raise GenError("how many ids a text has is not in the number of its bytes; expected encode")
