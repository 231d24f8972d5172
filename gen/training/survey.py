"""What is in a folder of media, by the headers of its files: counts, sizes, lengths, rates, and
what becomes of them at the size of a model.

Nothing is decoded, and no model is loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gen.core.errors import describe
from gen.core.printable import printable
from gen.core.tables import plural
from gen.media.audio import sound_header
from gen.media.fit import PAD, Size
from gen.media.images import image_header
from gen.media.video import clip_header
from gen.training.sources import Source

IMAGE, VIDEO, AUDIO = "image", "video", "audio"
NOUNS = {IMAGE: "image", VIDEO: "clip", AUDIO: "sound"}
NAMED = 3  # sizes or rates that are spelled one by one


@dataclass(frozen=True)
class Header:
    """Header of a file.

    Attributes:
        size: width and height of an upright image or of a clip.
        seconds: length of a sound or clip; 0 where the header does not state it.
        rate: samples or frames per second.
        channels: channels of a sound.
        traits: what is special about it, such as ``CMYK`` or ``turned by its orientation``.
        error: why it cannot be read, or empty.
    """

    size: tuple[int, int] | None = None
    seconds: float = 0.0
    rate: float = 0.0
    channels: int = 0
    traits: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class Survey:
    """Headers of the media of a folder, by the names of their sources.

    Attributes:
        kind: ``image``, ``video`` or ``audio``; other media have no headers.
        headers: headers by name.
    """

    kind: str
    headers: dict[str, Header] = field(default_factory=dict)

    @classmethod
    def of(cls, sources: Sequence[Source], kind: str) -> Survey:
        """Read the headers of sources. ``kind``: kind of the modality's media."""
        read = {IMAGE: _image, VIDEO: _clip, AUDIO: _sound}.get(kind)
        if read is None:
            return cls(kind)
        return cls(kind, {s.name: _header(read, s.path) for s in sources})

    @property
    def whole(self) -> list[Header]:
        """Headers of files that can be read."""
        return [h for h in self.headers.values() if not h.error]

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Widths and heights of images or clips."""
        return [h.size for h in self.whole if h.size is not None]

    def lines(self) -> list[str]:
        """Say what is there, in a few lines."""
        found = self.whole
        if not self.headers:
            return []
        noun = NOUNS[self.kind]
        parts = []
        if self.sizes:
            parts.append(counted([f"{w}x{h}" for w, h in self.sizes], "other sizes"))
        if self.kind != IMAGE and found:
            lengths = [h.seconds for h in found if h.seconds]
            if lengths:
                parts.append(f"{spread(lengths)} s, {sum(lengths) / 60:.1f} minutes in all")
            unit = "Hz" if self.kind == AUDIO else "frames per second"
            rates = [f"{h.rate:g}" for h in found if h.rate]
            if rates:
                parts.append(f"{counted(rates, 'other rates')} {unit}")
        if self.kind == AUDIO:
            parts.append(counted([plural(h.channels, "channel") for h in found], "others"))
        traits = Counter(trait for h in found for trait in h.traits)
        parts += [f"{n} {trait}" for trait, n in traits.most_common()]
        lines = [f"{plural(len(found), noun)}: {'; '.join(p for p in parts if p)}".rstrip(": ")]
        broken = [printable(f"{name} ({h.error})") for name, h in self.headers.items() if h.error]
        if broken:
            more = f"; and {len(broken) - NAMED} more" if len(broken) > NAMED else ""
            lines.append(f"cannot be read: {len(broken)}: {'; '.join(broken[:NAMED])}{more}")
        return lines

    def fitted(self, size: Size, rate: float = 0.0) -> list[str]:
        """Say how what is there is made to fit a size.

        Args:
            size: the size.
            rate: samples or frames per second of the model's media.
        """
        found = self.whole
        if not found or not size.axes:
            return []
        parts = []
        if self.kind != AUDIO:
            parts.append(self._framed(size))
        if self.kind != IMAGE:
            parts += [*self._timed(size, rate)]
        shape = "x".join(map(str, size.axes)) + (" samples" if self.kind == AUDIO else "")
        said = "; ".join(p for p in parts if p) or "all of them fit"
        return [f"to {shape}: {said}"]

    def _framed(self, size: Size) -> str:
        h, w = size.axes[-2:]
        other = [s for s in self.sizes if s != (w, h)]
        if not other:
            return ""
        if not size.resize:
            return f"{len(other)} of another size, which are refused (--resize makes them fit)"
        lost, cut, larger = 0.0, 0, 0
        for width, height in other:
            wide, high = size.scaled(width, height)
            larger += wide > width or high > height
            if size.resize == PAD:
                cut += wide * high < w * h
                lost += 1 - wide * high / (w * h)
            else:
                cut += wide * high > w * h
                lost += 1 - w * h / (wide * high)
        what = "on a ground of one colour" if size.resize == PAD else "cut at their edges"
        share = f" ({100 * lost / len(other):.0f} % of the pixels)" if cut else ""
        parts = [f"{len(other)} scaled, {cut} of them {what}{share}"]
        return parts[0] + (f", {larger} enlarged" if larger else "")

    def _timed(self, size: Size, rate: float) -> Iterable[str]:
        found, unit = self.whole, "Hz" if self.kind == AUDIO else "frames per second"
        other = [h for h in found if rate and abs(h.rate - rate) > 0.01]
        if other:
            yield f"{len(other)} resampled to {rate:g} {unit}"
        mixed = sum(h.channels > 1 for h in found)
        if mixed:
            yield f"{mixed} of several channels " + ("mixed" if size.resize else "refused")
        lengths = [round(h.seconds * rate) for h in found if h.seconds and rate]
        windows = [len(size.windows(n)) for n in lengths]
        if not size.resize:
            misfits = sum(abs(n - size.axes[0]) > 1 for n in lengths)
            if misfits:
                yield f"{misfits} of another length, which are refused (--resize makes them fit)"
            return
        longer, shorter = sum(n > 1 for n in windows), sum(n < size.axes[0] - 1 for n in lengths)
        seconds = f"{size.axes[0] / rate:g} s" if rate else "a window"
        if longer:
            more = sum(n for n in windows if n > 1)
            yield f"{longer} longer than {seconds}, cut into {more} windows"
        if shorter:
            yield f"{shorter} shorter, which end with " + (
                "silence" if self.kind == AUDIO else "their last frame"
            )


def counted(names: Sequence[str], others: str) -> str:
    """Spell how often each name occurs, the most frequent ones first."""
    found = Counter(names).most_common()
    if len(found) == 1:
        return found[0][0]
    shown = found if len(found) <= NAMED + 1 else found[:NAMED]
    parts = [f"{n} of {name}" for name, n in shown]
    rest = len(names) - sum(n for _, n in shown)
    return ", ".join(parts) + (f", {rest} of {len(found) - len(shown)} {others}" if rest else "")


def spread(values: Sequence[float]) -> str:
    """Spell the least and the largest of some numbers."""
    low, high = min(values), max(values)
    return f"{low:.3g}" if high - low < 0.005 * high else f"{low:.3g} to {high:.3g}"


def _header(read: Any, path: Path) -> Header:
    try:
        return read(path)
    except Exception as error:  # what a reader of headers raises is open
        return Header(error=describe(error).replace(f" {path} ", " "))


def _image(path: Path) -> Header:
    found = image_header(path)
    has = {
        "turned by their orientation": found.orientation > 1,
        "with a palette": found.mode in ("P", "PA"),
        "CMYK": found.mode == "CMYK",
        "of 1 bit": found.mode == "1",
        "of 16 bits or more": found.mode[0] in "IF",
        "transparent, put over white": found.is_transparent,
        "animated, of which the first frame is taken": found.is_animated,
    }
    return Header(found.size, traits=tuple(name for name, holds in has.items() if holds))


def _sound(path: Path) -> Header:
    seconds, rate, channels = sound_header(path)
    return Header(None, seconds, rate, channels)


def _clip(path: Path) -> Header:
    return Header(*clip_header(path))
