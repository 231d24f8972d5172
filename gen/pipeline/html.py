"""Outputs in notebooks: media as HTML, inside the page and bounded in number and size."""

from __future__ import annotations

import base64
import html
import tempfile
from pathlib import Path
from typing import Any

from gen.contracts.modality import Modality

MAX_MEDIA = 16
MAX_BYTES = 8 << 20
MAX_TEXT = 2000
TAGS = {
    "png": '<img style="min-width:96px;image-rendering:pixelated"'
    ' src="data:image/png;base64,{data}">',
    "wav": '<audio controls src="data:audio/wav;base64,{data}"></audio>',
    "mp4": '<video controls loop muted src="data:video/mp4;base64,{data}"></video>',
}  # fmt: skip
FIGURE = (
    '<figure style="display:inline-block;margin:4px;vertical-align:top;max-width:320px">'
    "{medium}<figcaption><small>{caption}</small></figcaption></figure>"
)


def as_html(summary: str, media: list[Any], captions: list[str], modality: Modality | None) -> str:
    """Return media as a piece of HTML without links to files.

    Args:
        summary: line above the media.
        media: media of the items.
        captions: prompt and seed of the items.
        modality: writes the media; None shows the summary alone.
    """
    figures, size = [], 0
    for medium, caption in zip(media[:MAX_MEDIA], captions, strict=False):
        if modality is None:
            break
        shown = _text(medium) if isinstance(medium, str) else _file(medium, modality)
        size += len(shown)
        if size > MAX_BYTES:
            break
        figures.append(FIGURE.format(medium=shown, caption=html.escape(_short(caption))))
    left = len(media) - len(figures)
    more = f"<p><small>and {left} more</small></p>" if left and modality is not None else ""
    return f"<div><p>{html.escape(summary)}</p>{''.join(figures)}{more}</div>"


def _text(text: str) -> str:
    return f'<pre style="white-space:pre-wrap">{html.escape(_short(text, MAX_TEXT))}</pre>'


def _short(text: str, most: int = 120) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _file(medium: Any, modality: Modality) -> str:
    """Return a tag that holds the file of a medium, or that of its film."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"medium.{modality.extension}")
        if modality.extension in TAGS:
            modality.save(medium, path, {})
        elif "mp4" in modality.also:
            path = path.with_suffix(".mp4")
            modality.save_also(medium, path, {})
        else:
            return _text(repr(medium))
        data = base64.b64encode(path.read_bytes()).decode()
    return TAGS[path.suffix[1:]].format(data=data)
