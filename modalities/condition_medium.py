"""Media as conditions of models of one's own: an image, a sound or a clip as the codes of a
frontend, behind the caption in the prompt.

A medium is encoded alone, on the CPU and in 32 bits: its tokens depend on nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from gen.contracts.condition import Condition
from gen.contracts.frontend import TokenFrontend, codebook_digest
from gen.core.condition_parts import KINDS, NOUNS
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.tables import plural
from gen.media.fit import Size
from gen.media.given import GivenMedia
from gen.media.resample import resample
from gen.modalities.media_tokens import MediaTokens
from gen.models.load.libraries import LOADING
from gen.models.load.locate import ZOO

STATED = "condition_medium"  # key of what a config says of it
MODALITIES = {"images": "image", "audio": "speech", "video": "video"}  # whose frontends read parts


@dataclass(frozen=True)
class CaptionedMedium:
    """Condition of a medium and its caption, which may be empty.

    Attributes:
        caption: the caption.
        medium: the medium, or its tokens.
    """

    caption: str
    medium: GivenMedia | tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.caption}: {self.medium}" if self.caption else str(self.medium)


@dataclass(frozen=True)
class ConditionMedium:
    """What a model reads of a medium.

    Attributes:
        part: part of the condition that holds it: ``images``, ``audio`` or ``video``.
        frontend_name: zoo name or folder of its frontend; in the config of a model the name of a
            folder beside that of the model.
        digest: digest of the frontend's weights.
        axes, resize: size that the medium must have (``gen.media.fit.Size``).
        slots: its tokens.
        codes: ids of the tokens.
        is_shared: whether the outputs are of the same frontend, so that the tokens have the ids of
            theirs; else they have ids of their own.
        base: folder that ``frontend_name`` may lie in.
    """

    part: str
    frontend_name: str
    digest: str
    axes: tuple[int, ...]
    resize: str
    slots: int
    codes: int
    is_shared: bool
    base: Path | None = None

    @classmethod
    def of_frontend(
        cls, part: str, name: str, frontend: TokenFrontend, size: Size, is_shared: bool
    ) -> Any:
        """Return what a model reads of media of a size by the codes of a frontend; the attributes
        say more."""
        sizes, steps = frontend.config.codebook_sizes, frontend.config.compression
        cells = [n // s for n, s in zip(size.axes, steps, strict=True)]
        slots = len(sizes) * int(np.prod(cells))
        digest = codebook_digest(frontend.fingerprint)
        made = cls(part, name, digest, size.axes, size.resize, slots, sum(sizes), is_shared)
        made.__dict__["frontend"] = frontend  # what ``cached_property`` would keep
        return made

    @classmethod
    def of_dict(cls, about: Mapping[str, Any], base: Path | None = None) -> ConditionMedium:
        """Return what ``to_dict`` wrote into a manifest or a config."""
        return cls(**{**about, "axes": tuple(about["axes"])}, base=base)

    def to_dict(self) -> dict[str, Any]:
        """Return what a manifest or the config of a model says of it."""
        return {k: v for k, v in asdict(self).items() if k != "base"} | {"axes": list(self.axes)}

    @property
    def words(self) -> int:
        """Ids that the tokens add to those of the outputs."""
        return 0 if self.is_shared else self.codes

    @property
    def noun(self) -> str:
        """Kind of the medium with its article, for messages."""
        return NOUNS[KINDS[self.part]]

    @property
    def frontend_folder(self) -> Path:
        """Folder of the frontend."""
        beside = (self.base or Path()) / self.frontend_name
        return beside if beside.is_dir() else ZOO / self.frontend_name

    @cached_property
    def frontend(self) -> TokenFrontend:
        """The frontend. Raises ``GenError`` if it is missing, or has other weights."""
        folder = self.frontend_folder
        if not folder.is_dir():
            raise GenError(f"the frontend of {self.noun} is not there; expected {folder}")
        modality = registry.get("modality", MODALITIES[self.part])()
        with LOADING:
            made: TokenFrontend = modality.frontend(
                "codes", torch.device("cpu"), torch.float32, folder
            )
        found = codebook_digest(made.fingerprint)
        if found != self.digest:
            raise GenError(
                f"the frontend {folder} has the weights {found}; expected {self.digest}, with"
                " which the model was trained"
            )
        return made

    def read(self, condition: Condition) -> GivenMedia:
        """Read the medium of a condition that has one.

        Raises:
            GenError: it cannot be read, or has another kind, size, length or number of channels.
        """
        fps = registry.get("modality", MODALITIES[self.part]).frame_rate
        medium = condition.media(self.part, fps=fps)[0]
        self._fitted(medium)
        return medium

    def ids(self, medium: GivenMedia | tuple[int, ...]) -> list[int]:
        """Return the tokens of a medium that ``read`` returned, each in ``range(codes)``."""
        return [*medium] if isinstance(medium, tuple) else self._kept(medium)

    @cached_property
    def _kept(self) -> MediaTokens:
        return MediaTokens(self._encoded)

    @torch.no_grad()
    def _encoded(self, medium: GivenMedia) -> list[int]:
        signal = self.frontend.preprocess(self._fitted(medium))
        codes = self.frontend.encode(signal[None])[0].cpu()  # [Q, *grid]
        sizes = self.frontend.config.codebook_sizes
        first = torch.tensor([0, *itertools.accumulate(sizes[:-1])])
        ids = codes.movedim(0, -1) + first
        return [int(token) for token in ids.flatten()]

    def _fitted(self, medium: GivenMedia) -> Any:
        """Return a medium of the model's size, as its frontend takes it."""
        is_sound = medium.kind == "audio"
        array = self._wave(medium) if is_sound else medium.array
        size = Size(self.axes, resize=self.resize)
        came = array.shape[: len(self.axes)]
        unit = " samples" if is_sound else ""
        wanted = "x".join(map(str, self.axes)) + unit
        if came != self.axes and not self.resize:
            raise GenError(
                f"the {medium.kind} of the condition has {'x'.join(map(str, came))}{unit};"
                f" expected {wanted}: gen encode --resize trains models that take any size"
            )
        if medium.kind == "image":
            return size.fit(Image.fromarray(array), "")[0]
        if len(array) > self.axes[0]:
            unit = "sample" if is_sound else "frame"
            raise GenError(
                f"the {medium.kind} of the condition lasts {plural(len(array), unit)}; expected at"
                f" most {self.axes[0]}, all that the model reads"
            )
        return size.fit(array, "")[0]

    def _wave(self, medium: GivenMedia) -> np.ndarray:
        """Return a sound [n] at the rate of the frontend."""
        wave, rate = medium.array, self.frontend.rate
        if wave.shape[1] > 1 and not self.resize:
            raise GenError(
                f"the sound of the condition has {plural(wave.shape[1], 'channel')}; expected 1"
            )
        wave = wave.mean(1, keepdims=True)
        if medium.rate not in (None, rate):
            wave = resample(wave, int(medium.rate or rate), rate)
        return wave[:, 0]
