"""Frontends of token data: found by name, with the size of media and the order of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gen.contracts.frontend import TokenFrontend, codebook_digest
from gen.contracts.modality import Modality
from gen.core.errors import GenError, bad_value
from gen.core.plain import is_digits
from gen.core.registry import registry
from gen.media.fit import Size
from gen.modalities.grid_base import GridModality
from gen.models.load.locate import ZOO, locate, pick_device, read_config, zoo
from gen.tokenizers.action.base import ActionFrontend
from gen.tokenizers.text.hf_text import HFText
from gen.tokenizers.text.trained import FILE, TrainedTokenizer
from gen.tokenizers.text.words import TextWords
from gen.training.sources import SUFFIXES

MEDIA_SIZE = "media-size.txt"  # size of the media that a frontend was trained on, in its folder
MODELS = ("causal", "masked")  # keys of the models that token data can train


@dataclass(frozen=True)
class Encoder:
    """Frontend of a modality.

    Attributes:
        modality: the modality.
        frontend: its frontend.
        name: zoo name or folder of the frontend.
        usual: zoo name of the frontend that the modality's own models have.
    """

    modality: Modality
    frontend: TokenFrontend
    name: str
    usual: str

    @property
    def digest(self) -> str:
        """Digest of the frontend's weights."""
        return codebook_digest(self.frontend.fingerprint)

    @property
    def horizon(self) -> int:
        """Steps of a chunk of actions; 0 for other media."""
        return self.frontend.horizon if isinstance(self.frontend, ActionFrontend) else 0

    @property
    def is_open(self) -> bool:
        """Whether tokens are those of any text, in sequences of any length."""
        return isinstance(self.frontend, HFText)

    def sequences(self, signals: list[Tensor]) -> list[Tensor]:
        """Encode signals, together where they have one shape: token ids, long [T] each."""
        if len({s.shape for s in signals}) > 1:
            return [row for signal in signals for row in self.sequences([signal])]
        codes = self.frontend.encode(torch.stack(signals)).cpu()
        if self.is_open:
            end = torch.tensor(list(self.frontend.ends[:1]), dtype=torch.long)
            return [torch.cat([row, end]) for row in codes[:, 0]]
        if isinstance(self.modality, GridModality) and self.frontend.config.kind == "codes":
            sizes = self.frontend.config.codebook_sizes
            codes = self.modality.layout(sizes, tuple(codes.shape[2:])).to_sequence(codes)
        return list(codes.flatten(1))

    def grid(self, size: Size) -> tuple[int, ...]:
        """Return the token grid of media of a size, of the longest ones where lengths differ."""
        if self.frontend.grid or not size.axes:
            return tuple(self.frontend.grid)
        steps = self.frontend.config.compression
        cells = tuple(n // s for n, s in zip(size.axes, steps, strict=True))
        many = len(self.frontend.config.codebook_sizes)
        return (*cells, many) if isinstance(self.modality, GridModality) and many > 1 else cells


def modality_of(name: str) -> type[Modality]:
    """Return the class of a modality with token models. Raises ``GenError`` for any other name."""
    cls = registry.get("modality", name)
    if name not in SUFFIXES or "codes" not in cls.frontends:
        raise bad_value("modality", name, f"one of {', '.join(SUFFIXES)}, which have codes")
    return cls


def load_encoder(modality: str, name: str | None = None, device: str = "cpu") -> Encoder:
    """Load the frontend of a modality.

    Args:
        modality: name of the modality.
        name: zoo name or folder of a frontend, or of a model with a tokenizer for texts; None
            takes the modality's own.
        device: device of its weights.

    Raises:
        GenError: an unknown modality or frontend, or a modality without token models.
    """
    cls = modality_of(modality)
    made, usual = cls(), cls.frontends["codes"]
    where = pick_device(device)
    if name is None:
        folder = ZOO / usual
    else:
        found = locate(name, "frontend")
        if not isinstance(found, Path):
            raise bad_value("frontend", name, "a zoo name, or a folder on this machine")
        folder = found
    is_open = modality == "text" and read_config(folder).get("frontend_class") != TextWords.name
    if is_open:
        frontend: Any = HFText.from_pretrained(folder, where)
    else:
        frontend = made.frontend("codes", where, torch.float32, folder)
    if frontend.config.kind == "latents":
        raise bad_value("frontend", name, "a frontend of codes; it makes latents")
    known = folder.name if zoo().get(folder.name) == folder else str(folder.absolute())
    return Encoder(made, frontend, known, usual)


def own_encoder(tokenizer: TrainedTokenizer, built_in: Encoder) -> Encoder:
    """Return the encoder of texts with a tokenizer of their own, beside their tokens."""
    return Encoder(built_in.modality, tokenizer.frontend(), FILE, built_in.usual)


def usual_config(modality: Modality) -> dict[str, Any]:
    """Return the config of the modality's own model of tokens.

    Raises:
        GenError: it has none.
    """
    for key in MODELS:
        if key in modality.models:
            return read_config(modality.models[key])
    raise GenError(f"modality {modality.name!r} has no model of tokens to train")


def size_of(encoder: Encoder, asked: str | None = None, resize: str = "") -> Size:
    """Return the size that media must have: that of the modality's own models, or another one.

    Args:
        encoder: frontend of the media.
        asked: sizes such as ``64x64``, one per axis of the code grid.
        resize: how media of another size are made to fit; empty refuses them.

    Raises:
        GenError: sizes that are no numbers, or no whole number of codes.
    """
    frontend = encoder.frontend
    if encoder.horizon or encoder.modality.name == "text":
        if asked is not None:
            raise bad_value("size", asked, "none: the frontend decides how long these media are")
        return Size(resize=resize)
    grid = usual_config(encoder.modality)["grid"]
    own = encoder
    if encoder.name != encoder.usual:
        own = load_encoder(encoder.modality.name)
    steps = own.frontend.config.compression
    axes = tuple(n * s for n, s in zip(grid, steps, strict=False))
    if frontend.rate and frontend.rate != own.frontend.rate:  # as many seconds, in whole codes
        frame = frontend.config.compression[0]
        axes = (max(1, round(axes[0] * frontend.rate / own.frontend.rate / frame)) * frame,)
    stated = Path(encoder.name) / MEDIA_SIZE
    if asked is None and stated.is_file():
        asked = stated.read_text(encoding="utf-8").strip()
    if asked is not None:
        parts = asked.lower().split("x")
        if len(parts) != len(axes) or not all(is_digits(p) and int(p) for p in parts):
            raise bad_value(
                "size", asked, f"{len(axes)} numbers such as {'x'.join(map(str, axes))}"
            )
        axes = tuple(map(int, parts))
    steps = frontend.config.compression
    if any(n % s for n, s in zip(axes, steps, strict=True)):
        raise bad_value(
            "size", "x".join(map(str, axes)), f"multiples of {'x'.join(map(str, steps))}, one code"
        )
    shortest = 0
    if isinstance(encoder.modality, GridModality):
        shortest = encoder.modality.shortest * steps[0]
    return Size(axes, shortest, resize)
