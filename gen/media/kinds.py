"""Kinds of media by the extension of their files. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path

KINDS = {
    "image": ("png", "webp", "jpg", "jpeg"),
    "audio": ("wav", "flac", "mp3"),
    "video": ("mp4", "gif", "mkv"),
    "data": ("txt", "npz"),
}
EXTENSIONS = tuple(extension for names in KINDS.values() for extension in names)


def kind_of_file(name: str) -> str | None:
    """Return ``image``, ``audio`` or ``video``; None for any other file."""
    suffix = Path(name).suffix.lower().removeprefix(".")
    return next((k for k, names in KINDS.items() if suffix in names and k != "data"), None)
