"""Bytes of media: files of what was made, and what a request brings.

A request brings media as bytes, base64 or ``data:`` URIs. A text is never taken for a path or an
address.
"""

from __future__ import annotations

import base64
import binascii
import io
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image

from gen.contracts.modality import Modality
from gen.core.errors import GenError, shown
from gen.media.bounds import MOST_PIXELS
from gen.media.given import DATA, data_bytes
from gen.media.images import read_image
from gen.media.kinds import extension_of
from gen.serve.api.errors import ApiError

OPENED = ("PNG", "JPEG", "WEBP")  # formats of images that a request brings
MOST_UNPACKED = 256_000_000  # bytes of the arrays of an archive
TYPES = {
    "png": "image/png",
    "webp": "image/webp",
    "jpg": "image/jpeg",
    "wav": "audio/wav",
    "flac": "audio/flac",
    "mp3": "audio/mpeg",
    "pcm": "audio/pcm",
    "mp4": "video/mp4",
    "gif": "image/gif",
    "mkv": "video/x-matroska",
    "npz": "application/octet-stream",
    "bvh": "text/plain",
}


def encoded(modality: Modality, media: Any, extension: str, info: Any = None) -> bytes:
    """Return the file of an output, as ``gen sample`` writes it.

    Args:
        modality: modality of the output.
        media: the output.
        extension: extension of the file, one of its formats or of ``also``.
        info: facts to write into the file.
    """
    with TemporaryDirectory(prefix="gen-serve-") as folder:
        path = Path(folder) / f"media.{extension}"
        write = modality.save_also if extension in modality.also else modality.save
        write(media, path, dict(info or {}))
        return path.read_bytes()


def as_base64(content: bytes) -> str:
    """Return bytes as base64."""
    return base64.b64encode(content).decode("ascii")


def wav_header(rate: int, channels: int = 1) -> bytes:
    """Return the header of a WAV stream whose length is unknown: both sizes are 0xFFFFFFFF."""
    unknown, block = b"\xff\xff\xff\xff", 2 * channels
    numbers = ((16, 4), (1, 2), (channels, 2), (rate, 4), (rate * block, 4), (block, 2), (16, 2))
    fields = b"".join(value.to_bytes(size, "little") for value, size in numbers)
    return b"RIFF" + unknown + b"WAVEfmt " + fields + b"data" + unknown


def given_bytes(value: Any, param: str) -> bytes:
    """Return the bytes of a medium: base64, or a ``data:`` URI.

    Args:
        value: what came.
        param: field that it came in.

    Raises:
        ApiError: it is neither, such as a path or an address.
    """
    expected = "base64, or data:TYPE;base64,... (no path and no address)"
    if isinstance(value, bytes):
        content = value
    elif not isinstance(value, str):
        raise ApiError(f"{param} is {shown(value)}; expected {expected}", param, "invalid_media")
    else:
        try:
            is_uri = value.startswith(DATA)
            content = data_bytes(value, param) if is_uri else base64.b64decode(value, validate=True)
        except (GenError, binascii.Error, ValueError):
            message = f"{param} is {shown(value)}; expected {expected}"
            raise ApiError(message, param, "invalid_media") from None
    if not content:
        raise ApiError(f"{param} is empty; expected the bytes of a file", param, "invalid_media")
    return content


def given_image(value: Any, param: str, alpha: bool = False) -> Image.Image:
    """Return an image that a request brings, as ``gen.media.images.read_image`` does. Raises
    ``ApiError`` for anything else."""
    content = given_bytes(value, param)
    try:
        return read_image(content, param, OPENED, MOST_PIXELS, alpha)
    except GenError as error:
        raise ApiError(str(error), param, "invalid_media") from None


def given_file(modality: Modality, value: Any, param: str) -> Any:
    """Return media of a modality that a request brings as a file.

    Args:
        modality: modality that reads the file.
        value: bytes, base64 or ``data:`` URI.
        param: field that it came in, for messages.

    Raises:
        ApiError: the file cannot be read, or is of another kind.
    """
    content = given_bytes(value, param)
    kind = extension_of(content)
    extensions = (modality.extension, *modality.formats, modality.kept, *modality.also)
    if kind not in extensions:
        raise ApiError(
            f"{param} is {kind or 'no known kind of file'}; expected {modality.extension}",
            param,
            "invalid_media",
        )
    if kind == "npz":
        require_small(content, param)
    with TemporaryDirectory(prefix="gen-serve-") as folder:
        path = Path(folder) / f"media.{kind}"
        path.write_bytes(content)
        try:
            return modality.load(path)
        except GenError as error:
            words = [word for word in str(error).split() if folder not in word]
            message = f"{param}: {' '.join(words)}"
        except Exception as error:  # a damaged file may raise anything in its library
            message = f"{param} cannot be read: {type(error).__name__}"
    raise ApiError(message, param, "invalid_media")


def require_small(content: bytes, param: str) -> None:
    """Refuse an archive that unpacks to too much. Raises ``ApiError``."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError):
        raise ApiError(f"{param} is a damaged archive", param, "invalid_media") from None
    if size > MOST_UNPACKED:
        raise ApiError(
            f"{param} unpacks to {size} bytes; expected at most {MOST_UNPACKED}",
            param,
            "invalid_media",
        )
