"""Starting points of generation: media to edit, media to continue, or a length."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from gen.core.errors import GenError, bad_value
from gen.core.plain import require_plain


@dataclass(frozen=True)
class EditSpec:
    """Starting point of a call; everything absent starts from nothing.

    Attributes:
        source: media to edit, or their path; with one of ``mask`` and ``span``.
        mask: region of an image that is made anew, as an image or its path.
        span: part that is made anew, such as ``20:60``.
        prefix: media, or their path, that every result begins with.
        frames: length of the results, for modalities whose media have no fixed one.

    Raises:
        GenError: the parts contradict each other.
    """

    source: Any = None
    mask: Any = None
    span: str | None = None
    prefix: Any = None
    frames: int | None = None

    def __post_init__(self) -> None:
        for name in MEDIA:
            if isinstance(getattr(self, name), Path):
                require_plain(name, str(getattr(self, name)))
        regions = [region for region in (self.mask, self.span) if region is not None]
        if (self.source is None) != (not regions) or len(regions) > 1:
            parts = {"source": self.source, "mask": self.mask, "span": self.span}
            came = ", ".join(name for name, part in parts.items() if part is not None)
            raise GenError(
                f"editing needs a source and one of mask and span; got {came or 'none of them'}"
            )
        if self.source is not None and self.prefix is not None:
            raise GenError(
                "source and prefix are both given; expected one of them, to edit or to continue"
            )
        if self.source is not None and self.frames is not None:
            raise GenError(
                "source and frames are both given; expected no frames, since an edit keeps its"
                " length"
            )
        if self.span is not None and (not isinstance(self.span, str) or not self.span.strip()):
            raise bad_value("span", self.span, "text such as '20:60'")
        if self.frames is not None and (
            not isinstance(self.frames, int) or isinstance(self.frames, bool) or self.frames < 1
        ):
            raise bad_value("frames", self.frames, "an integer of at least 1")


EDIT_FIELDS = tuple(f.name for f in fields(EditSpec))
MEDIA = ("source", "mask", "prefix")  # fields that are media or paths
