"""Kinds of media by the extension or the beginning of their files. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path

KINDS = {
    "image": ("png", "webp", "jpg", "jpeg"),
    "audio": ("wav", "flac", "mp3"),
    "video": ("mp4", "gif", "mkv"),
    "data": ("txt", "npz"),
}
# beginning of a file, position of it, and the extension that such files have
SIGNS = (
    (b"\x89PNG", 0, "png"),
    (b"\xff\xd8\xff", 0, "jpg"),
    (b"WEBP", 8, "webp"),
    (b"WAVE", 8, "wav"),
    (b"fLaC", 0, "flac"),
    (b"ID3", 0, "mp3"),
    (b"\xff\xfb", 0, "mp3"),
    (b"ftyp", 4, "mp4"),
    (b"GIF8", 0, "gif"),
    (b"\x1aE\xdf\xa3", 0, "mkv"),
    (b"PK\x03\x04", 0, "npz"),
    (b"HIERARCHY", 0, "bvh"),
)
EXTENSIONS = tuple(extension for names in KINDS.values() for extension in names)


def kind_of_file(name: str) -> str | None:
    """Return ``image``, ``audio`` or ``video``; None for any other file."""
    suffix = Path(name).suffix.lower().removeprefix(".")
    return next((k for k, names in KINDS.items() if suffix in names and k != "data"), None)


def extension_of(content: bytes) -> str | None:
    """Return the extension of the file that some bytes are of; None for no known one."""
    return next((e for sign, at, e in SIGNS if content[at : at + len(sign)] == sign), None)
