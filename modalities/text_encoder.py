"""Text encoders of transformers (T5, CLIP, language models), whose states are the conditions of
models of one's own.

A caption's condition is the last hidden states of its tokens, each divided by its root mean square:
the encoders' states differ in size by orders of magnitude.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gen.contracts.condition import ConditionEncoder
from gen.core.errors import GenError, bad_value
from gen.core.registry import register
from gen.models.adapters.feature_prompts import POSITIONS, VECTORS
from gen.models.load.digest import digest_of
from gen.models.load.libraries import LOADING, transformers
from gen.models.load.locate import quiet, read_config, readable
from gen.models.load.pretrained import tokenizer_of

BESIDE = "text_encoder"  # folder of the encoder in that of the model
STATED = "caption_encoder"  # key of what a config says of it (text_encoder is transformers' own)
CLASSES = {  # of encoders that are a part of a larger model; others are read by AutoModel
    "t5": "T5EncoderModel",
    "mt5": "MT5EncoderModel",
    "umt5": "UMT5EncoderModel",
    "clip": "CLIPTextModel",
    "clip_text_model": "CLIPTextModel",
}
TINY = 1e-6  # added to a mean square


@register("condition_encoder", "text_encoder")
class TextEncoder(ConditionEncoder):
    """Frozen text encoder, loaded when first needed.

    Args:
        folder: its folder, with a tokenizer.
        digest: digest of the weights that are expected; empty for any.

    Raises:
        GenError: no folder, or one of a model that encodes no texts.
    """

    size = 0  # token ids that captions add to a vocabulary

    def __init__(self, folder: str | Path, digest: str = ""):
        self.folder, self.expected = Path(folder).expanduser().absolute(), digest
        if not self.folder.is_dir():
            raise bad_value("text encoder", str(folder), "the folder of a T5, a CLIP or a model")
        self.config = read_config(self.folder)
        self.kind = str(self.config.get("model_type", ""))
        is_seq2seq = self.config.get("is_encoder_decoder") and self.kind not in CLASSES
        if not self.kind or is_seq2seq:
            raise GenError(
                f"the text encoder {folder} is a {self.kind or 'folder without a model_type'!r};"
                " expected a T5, the text model of a CLIP, or a language model"
            )

    @classmethod
    def of_model(cls, name: str, folder: Path, about: Mapping[str, Any]) -> TextEncoder:
        """Return the encoder of a trained model: the folder ``text_encoder`` in its own, or the one
        that it was trained with.

        Args:
            name: model as the user wrote it.
            folder: folder of the model.
            about: what ``to_dict`` returned.

        Raises:
            GenError: neither is there.
        """
        for where in (folder / BESIDE, Path(about["folder"])):
            if where.is_dir():
                return cls(where, about["digest"])
        raise GenError(
            f"model {name} reads its prompts with the text encoder {about['folder']}"
            f" ({about['kind']}, {about['width']} channels), which is not there; expected it there,"
            f" or in {folder / BESIDE}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return what the config of a model says of its encoder."""
        return {
            "folder": str(self.folder),
            "kind": self.kind,
            "width": self.width,
            "digest": self.digest,
        }

    @cached_property
    def tokenizer(self) -> Any:
        """Tokenizer of the encoder."""
        return tokenizer_of(self.folder, name=self.folder)

    @cached_property
    def model(self) -> torch.nn.Module:
        """The network. Raises ``GenError`` for missing or other weights."""
        cls = getattr(transformers(), CLASSES.get(self.kind, "AutoModel"))
        with LOADING, readable("text encoder", self.folder), quiet():
            model, info = cls.from_pretrained(
                self.folder, dtype=torch.float32, output_loading_info=True, local_files_only=True
            )
        if missing := sorted(map(str, info["missing_keys"])):
            raise GenError(
                f"the weights of text encoder {self.folder} lack {len(missing)} tensors,"
                f" {missing[0]!r} first"
            )
        model = model.eval().requires_grad_(False)
        found = digest_of(model)
        if self.expected not in ("", found):
            raise GenError(
                f"the text encoder {self.folder} has the weights {found}; expected"
                f" {self.expected}, with which the model was trained"
            )
        return model

    @cached_property
    def digest(self) -> str:
        """Digest of the weights."""
        return digest_of(self.model)

    @property
    def width(self) -> int:
        """Channels of a state."""
        return int(self.model.config.get_text_config().hidden_size)

    @property
    def most(self) -> int | None:
        """Tokens of the longest text where positions are learned, such as in a CLIP; else None."""
        text = self.config.get("text_config") or self.config
        return text.get("max_position_embeddings") if self.kind.startswith("clip") else None

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a text; none of an empty one."""
        return list(self.tokenizer(text)["input_ids"]) if text.strip() else []

    @torch.no_grad()
    def states(self, text: str) -> Tensor:
        """Return the states of a text, float [n, width]."""
        ids = torch.tensor([self.ids(text)])
        found = self.model(input_ids=ids).last_hidden_state[0].float()
        return found * (found.square().mean(-1, keepdim=True) + TINY).rsqrt()

    def encode(self, condition: str) -> dict[str, Tensor]:
        """Return the ``vectors`` [n, width] of a caption, and their ``positions``."""
        states = self.states(condition)
        return {VECTORS: states, POSITIONS: torch.arange(len(states))}


def padded(states: Sequence[Tensor], slots: int) -> Tensor:
    """Return states [n, width] of several texts as [N, slots, width], zeros behind them."""
    out = torch.zeros(len(states), slots, states[0].shape[1])
    for row, some in zip(out, states, strict=True):
        row[: len(some)] = some
    return out
