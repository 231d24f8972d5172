"""What generation starts from, where it does not start from nothing: a medium to edit, or one to
continue, or a length."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from gen.core.errors import GenError, bad_value


@dataclass(frozen=True)
class EditSpec:
    """``source``: a medium to edit, or its path; ``mask`` (a picture or its path) or ``span`` (such
    as ``20:60``) says what of it is made anew. ``prefix``: a medium, or its path, that every result
    begins with. ``frames``: how long results are to be, for modalities whose media have no fixed
    length.

    Raises ``GenError`` for a start that contradicts itself.
    """

    source: Any = None
    mask: Any = None
    span: str | None = None
    prefix: Any = None
    frames: int | None = None

    def __post_init__(self) -> None:
        where = [k for k in ("mask", "span") if getattr(self, k) is not None]
        if (self.source is None) != (not where) or len(where) > 1:
            raise GenError(
                f"editing needs a source and one of mask and span; {self._said() or 'none of them'}"
                " came"
            )
        if self.source is not None and self.prefix is not None:
            raise GenError(
                "a source to edit and a prefix to continue came together; expected one of them"
            )
        if self.source is not None and self.frames is not None:
            raise GenError(
                "a source to edit and a number of frames came together; what is edited keeps its"
                " length"
            )
        if self.span is not None and (not isinstance(self.span, str) or not self.span.strip()):
            raise bad_value("span", self.span, "text such as '20:60'")
        if self.frames is not None and (
            not isinstance(self.frames, int) or isinstance(self.frames, bool) or self.frames < 1
        ):
            raise bad_value("frames", self.frames, "an integer of at least 1")

    def _said(self) -> str:
        return ", ".join(k for k in ("source", "mask", "span") if getattr(self, k) is not None)


EDIT_FIELDS = tuple(f.name for f in fields(EditSpec))
MEDIA = ("source", "mask", "prefix")  # those that are media or paths
