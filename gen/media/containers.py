"""Shared parts of audio and video files: metadata, truncation checks and optional packages.

Written bytes depend on the content alone: no date, no random ids, one encoder thread. The same seed
therefore gives the same file, and its hash can stand in a manifest. A file is read whole or
refused: a truncated file, or one that does not match the caller's format, raises a one-line
``GenError`` with the actual and the expected value.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from gen.core.errors import GenError
from gen.core.paths import exists, is_file

AUDIO_CHUNKS = (b"data", b"SSND")  # chunks with the samples of WAV and AIFF
# chunks with the frames or the index of MP4, AVI and Matroska
VIDEO_CHUNKS = (b"mdat", b"moov", b"moof", b"LIST", b"\x18\x53\x80\x67")

# formats of FFmpeg that files are opened as: none that names other files or addresses
READ = (
    *("mov", "mp4", "m4a", "3gp", "3g2", "mj2", "matroska", "webm", "avi", "gif", "mpegts", "mpeg"),
    *("mpegvideo", "flv", "asf", "ogg", "wav", "aiff", "flac", "mp3", "aac", "apng"),
    # single images, which are refused by name
    *("png_pipe", "jpeg_pipe", "webp_pipe", "bmp_pipe", "tiff_pipe"),
)


def require_package(module: str, package: str, needed_by: str) -> ModuleType:
    """Import an optional package when it is first needed. Raises ``GenError`` with a pip line."""
    try:
        return import_module(module)
    except (ImportError, OSError) as error:  # OSError: the C library behind soundfile is missing
        raise GenError(
            f"{needed_by} needs the package {module} ({error}); install it with: pip install"
            f" {package}"
        ) from None


def soundfile_module() -> ModuleType:
    """Import soundfile. Raises ``GenError`` if it is missing."""
    return require_package("soundfile", "soundfile", "a sound file")


def av_module(needed_by: str = "a video file") -> ModuleType:
    """Import PyAV. Raises ``GenError`` if it is missing."""
    return require_package("av", '"gen-toolkit[video]"', needed_by)


def opened(path: Path) -> Any:
    """Open a file of sound or video for reading, as a container of PyAV.

    Raises:
        GenError: the format is none of ``READ``, such as a playlist.
        av.FFmpegError: the file is damaged.
    """
    av = av_module()
    options = {"format_whitelist": ",".join(READ), "protocol_whitelist": "file"}
    try:
        return av.open(str(path), options=options, metadata_errors="replace")
    except av.error.ArgumentError:
        raise GenError(
            f"file {path} cannot be read: it is a playlist, or in another format than those of"
            " sound and video that are opened; expected a file such as MP4"
        ) from None


def unreadable(said: str, error: Exception, expected: str) -> GenError:
    """Return the refusal of a file that FFmpeg cannot read.

    Args:
        said: the file, such as ``video a.mp4``.
        error: what PyAV raised.
        expected: what the file should be.
    """
    reason = getattr(error, "strerror", None) or error  # without code and path
    # EAGAIN is what FFmpeg says where a thread of a decoder cannot be started
    if isinstance(error, (MemoryError, BlockingIOError)):
        reason = "memory is short, or the file is damaged and asks for too much of it"
    return GenError(f"{said} cannot be read: {reason}; expected {expected}")


def existing_file(path: str | Path, label: str) -> Path:
    """Return the path of a file. Raises ``GenError`` if it is missing, or something that is no
    file, such as a folder or a pipe, which may never end."""
    path = Path(path)
    if not is_file(path):
        there = exists(path)
        held = "is a folder" if there and path.is_dir() else "is no regular file"
        raise GenError(f"{label} {path} {held if there else 'does not exist'}; expected a file")
    return path


# --- Metadata


def read_info(path: str | Path) -> dict[str, Any]:
    """Read the ``info`` that a file was written with, or ``{}``.

    A comment of another program is returned as ``{"comment": text}``. Raises ``GenError`` if the
    file cannot be read.
    """
    path = existing_file(path, "file")
    with path.open("rb") as file:
        is_riff = file.read(4) == b"RIFF"
    if is_riff:
        comment = _riff_comment(path)
    else:
        av = av_module()
        try:
            with opened(path) as container:
                tags = {k.lower(): v for k, v in container.metadata.items()}
                comment = tags.get("comment", "")
        except av.FFmpegError as error:
            raise unreadable(f"file {path}", error, "sound or video") from None
    try:
        info = json.loads(comment) if comment else {}
    except ValueError:
        return {"comment": comment}
    return info if isinstance(info, dict) else {"comment": comment}


def info_to_comment(info: dict[str, Any]) -> str:
    """Serialise ``info`` as ASCII JSON, since formats differ in the letters they allow."""
    return json.dumps(info, sort_keys=True, default=str)


def append_riff_comment(path: Path, text: str) -> None:
    """Append a comment chunk to a RIFF file.

    Written by hand, because libsndfile drops long comments both when it writes and when it reads.
    """
    body = text.encode() + b"\0" * (2 - len(text.encode()) % 2)
    chunk = b"INFOICMT" + len(body).to_bytes(4, "little") + body
    with path.open("r+b") as file:
        file.seek(0, 2)
        file.write(b"LIST" + len(chunk).to_bytes(4, "little") + chunk)
        total = file.tell()
        file.seek(4)
        file.write((total - 8).to_bytes(4, "little"))


def _riff_comment(path: Path) -> str:
    """Read the comment of a RIFF file, or ``""``."""
    with path.open("rb") as file:
        for name, start, size in _chunks(path):
            if name == b"LIST":
                file.seek(start)
                body = file.read(size)
                i = 4 if body[:4] == b"INFO" else len(body)
                while i + 8 <= len(body):
                    size = int.from_bytes(body[i + 4 : i + 8], "little")
                    if body[i : i + 4] == b"ICMT":
                        return body[i + 8 : i + 8 + size].rstrip(b"\0").decode("utf-8", "replace")
                    i += 8 + size + size % 2
    return ""


# --- Truncation


def truncation(path: Path, names: tuple[bytes, ...]) -> str | None:
    """Describe the first chunk in ``names`` that extends past the end of the file.

    Returns text such as ``4096 bytes, and 100 are there``, or None for a complete file.
    """
    total = path.stat().st_size
    for name, start, size in _chunks(path):
        if name in names and start + size > total:
            return f"{size} bytes, and {total - start} are there"
    return None


def _chunks(path: Path) -> Iterator[tuple[bytes, int, int]]:
    """Yield name, start and stated size in bytes of the outer chunks of a file.

    RIFF, AIFF, MP4 and Matroska are known; other files yield nothing. A chunk without a size, which
    programs write when they stream, counts as empty and is the last one.
    """
    total = path.stat().st_size
    with path.open("rb") as file:
        magic = file.read(12)
        byte_order = {b"RIFF": "little", b"RIFX": "big", b"FORM": "big"}.get(magic[:4])
        is_mp4 = magic[4:8] in (b"ftyp", b"moov", b"mdat")
        is_matroska = magic[:4] == b"\x1a\x45\xdf\xa3"
        offset = 12 if byte_order else 0
        while (byte_order or is_mp4 or is_matroska) and offset + 8 <= total:
            file.seek(offset)
            head = file.read(16)
            if byte_order:
                name, start, size = head[:4], offset + 8, int.from_bytes(head[4:8], byte_order)
                size, pad = (0, total) if size == 2**32 - 1 else (size, size % 2)
            elif is_mp4:
                name, size, pad = head[4:8], int.from_bytes(head[:4], "big"), 0
                start = offset + (16 if size == 1 else 8)
                size = (int.from_bytes(head[8:], "big") if size == 1 else size) - (start - offset)
                size, pad = (0, total) if size < 0 else (size, pad)
            else:
                # the zeros before the first set bit give the number of bytes of the size
                width = 9 - head[4].bit_length()
                name, start = head[:4], offset + 4 + width
                size, pad = int.from_bytes(head[4 : 4 + width], "big"), 0
                size &= 2 ** (7 * width) - 1
                size, pad = (0, total) if size == 2 ** (7 * width) - 1 else (size, pad)
            yield name, start, size
            offset = start + size + pad
