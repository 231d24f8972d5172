"""Images, sounds and clips that users give as a condition, read from what they have.

A medium may be a path, the bytes of a file, a ``data:`` URI, an array of numpy or torch, an image
of Pillow, or a mapping as ``datasets`` makes them: ``{"bytes": ...}``, ``{"base64": ...}``,
``{"array": ..., "sampling_rate": ...}``. Its digest depends on pixels or samples alone: a file that
moves, and an array with the same content, are the same condition.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
from PIL import Image

from gen.core.condition_parts import NOUNS
from gen.core.errors import GenError, bad_value, shown
from gen.core.paths import expand_user
from gen.media.audio import open_sound
from gen.media.containers import existing_file, soundfile_module
from gen.media.images import as_rgb, over_white, read_image
from gen.media.kinds import kind_of_file
from gen.media.video import read_video, write_lossless

DATA = "data:"  # beginning of a URI that holds a file as base64
KEPT = {"image": "png", "audio": "wav", "video": "mkv"}  # lossless formats
KEPT_FPS = 8.0  # frames per second of a kept clip that came as an array


@dataclass(frozen=True, eq=False)
class GivenMedia:
    """Image, sound or clip of a condition. Equal content makes equal objects.

    Attributes:
        kind: ``image``, ``audio`` or ``video``.
        array: uint8 [h, w, 3], float32 [n, channels] or uint8 [T, h, w, 3].
        rate: samples per second of a sound; None where they are unknown.
        digest: sha256 of kind, shape, rate and content, as hexadecimal digits.
    """

    kind: str
    array: np.ndarray
    rate: int | None = None
    digest: str = ""

    def __post_init__(self) -> None:
        about = f"{self.kind} {self.array.shape} {self.rate}".encode()
        content = np.ascontiguousarray(self.array).tobytes()
        object.__setattr__(self, "digest", hashlib.sha256(about + content).hexdigest())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GivenMedia) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __str__(self) -> str:
        return f"{self.kind} {self.digest[:16]}"

    def write(self, path: Path) -> None:
        """Write the medium to a file that reads back as the same content. Raises ``GenError`` for a
        wave without a sampling rate."""
        if self.kind == "image":
            Image.fromarray(self.array).save(path, format="PNG")
        elif self.kind == "video":
            write_lossless(path, self.array, KEPT_FPS)
        else:
            if self.rate is None:
                raise GenError("a wave has no sampling rate to keep; expected (wave, rate)")
            soundfile_module().write(path, self.array, self.rate, subtype="FLOAT", format="WAV")


def read_media(
    value: Any,
    kind: str,
    name: str = "",
    size: tuple[int, int] | None = None,
    fps: float | None = None,
) -> GivenMedia:
    """Read a medium of a condition.

    Args:
        value: the medium as the user has it (see the module).
        kind: ``image``, ``audio`` or ``video``.
        name: name of the part, for messages.
        size: (h, w) that an image or clip must have.
        fps: frames per second that the clip of a file is resampled to; None keeps all frames.

    Raises:
        GenError: a file that is missing, unreadable or of another kind; an array of another shape
            or type; an image or clip of another size.
    """
    name = name or kind
    given = _unwrapped(value, name)
    media = _clip(given, name, fps) if kind == "video" else READERS[kind](given, name)
    shape = media.array.shape[-3:-1]
    if size is not None and kind != "audio" and shape != tuple(size):
        raise GenError(
            f"{name} is {shape[1]}x{shape[0]} (width x height); the model takes {size[1]}x{size[0]}"
        )
    return media


def given_bytes(value: Any, name: str) -> bytes | None:
    """Return the bytes of a file that a medium came as; None where it came as anything else.
    Raises ``GenError`` for bad base64."""
    given = _unwrapped(value, name)
    return given if isinstance(given, bytes) else None


def is_data_uri(value: Any) -> bool:
    """Return True for a text that holds a file as base64."""
    return isinstance(value, str) and value.startswith(DATA)


def data_uri(content: bytes) -> str:
    """Return the URI that holds the bytes of a file."""
    return f"{DATA};base64,{base64.b64encode(content).decode('ascii')}"


def data_bytes(uri: str, name: str) -> bytes:
    """Return the bytes of a ``data:`` URI. Raises ``GenError`` for one without base64."""
    head, comma, text = uri.partition(",")
    try:
        if not comma or not head.endswith(";base64"):
            raise ValueError("it is not data:TYPE;base64,...")
        return base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error) as error:
        raise GenError(f"{name} holds no base64: {error}; expected the bytes of a file") from None


def require_kind(path: str | Path, kind: str, name: str) -> None:
    """Raise ``GenError`` for a file whose name says that it is of another kind."""
    found = kind_of_file(str(path))
    animated = Path(path).suffix.lower() == ".gif" and kind in ("image", "video")
    if found is not None and found != kind and not animated:
        raise GenError(f"{name} is {shown(str(path))}, {NOUNS[found]}; expected {NOUNS[kind]}")


def _unwrapped(value: Any, name: str) -> Any:
    """Return a path, bytes, an array, an image or (wave, rate)."""
    if isinstance(value, Mapping):
        if value.get("bytes") is not None:
            return bytes(value["bytes"])
        if value.get("base64") is not None:
            return data_bytes(f"{DATA};base64,{value['base64']}", name)
        if value.get("array") is not None:
            return value["array"], value.get("sampling_rate")
        if value.get("path") is None:
            raise bad_value(name, value, "an object with base64, bytes, path or array")
        return expand_user(value["path"])
    if is_data_uri(value):
        return data_bytes(value, name)
    if isinstance(value, str):
        return expand_user(value)
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    if hasattr(value, "detach"):  # a tensor of torch, which this module does not import
        return value.detach().cpu().numpy()
    return value


def _image(value: Any, name: str) -> GivenMedia:
    """Read an image."""
    if isinstance(value, (Path, bytes)):
        if isinstance(value, Path):
            require_kind(value, "image", name)
        return GivenMedia("image", np.asarray(read_image(value, name)))
    if isinstance(value, Image.Image):
        return GivenMedia("image", np.asarray(as_rgb(value)))
    return GivenMedia("image", _pixels(value, name, 3))


def _pixels(value: Any, name: str, axes: int) -> np.ndarray:
    """Return pixels uint8 [(T,) h, w, 3] of an array; channels may come before rows."""
    kind = "image" if axes == 3 else "video"
    expected = f"{NOUNS[kind]}: a path, bytes, or an array uint8 or float in [0, 1]"
    expected += " [h, w, 3]" if axes == 3 else " [T, h, w, 3]"
    if isinstance(value, (str, tuple)) or value is None:
        raise bad_value(name, value, expected)
    array = np.asarray(value)
    if axes == 3 and array.ndim == 2:
        array = np.repeat(array[..., None], 3, -1)
    before, behind = (array.shape[-3], array.shape[-1]) if array.ndim == axes else (0, 0)
    if behind != 3 and (before == 3 or (before == 4 and behind != 4)):
        array = np.moveaxis(array, -3, -1)
    is_float = np.issubdtype(array.dtype, np.floating)
    if array.ndim != axes or array.shape[-1] not in (3, 4) or not array.size:
        raise GenError(f"{name} is an array of {array.dtype} {array.shape}; expected {expected}")
    if is_float and np.isfinite(array).all() and array.min() >= 0 and array.max() <= 1:
        array = np.rint(255 * array).astype(np.uint8)
    if array.dtype != np.uint8:
        raise GenError(f"{name} is an array of {array.dtype} {array.shape}; expected {expected}")
    return array if array.shape[-1] == 3 else over_white(array)


def _sound(value: Any, name: str) -> GivenMedia:
    """Read a sound."""
    if isinstance(value, Path):
        require_kind(value, "audio", name)
        existing_file(value, name)
    if isinstance(value, bytes):
        with _temporary(value, ".wav") as path:
            return _from_bytes(lambda: _sound(path, name), name)
    if isinstance(value, Path):
        try:
            wave, rate = open_sound(value)
        except GenError as error:
            raise GenError(f"{name}: {error}") from None
        return GivenMedia("audio", wave, rate)
    wave, rate = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    wave = _unwrapped(wave, name)
    try:
        samples = np.asarray(wave)
    except ValueError:
        samples = np.zeros(0)
    if samples.ndim == 2 and samples.shape[0] < samples.shape[1]:  # channels first
        samples = samples.T
    is_wave = np.issubdtype(samples.dtype, np.floating) and samples.ndim in (1, 2)
    if not is_wave or not samples.size or not np.isfinite(samples).all():
        raise GenError(
            f"{name} is {shown(wave)}; expected a sound: a path, bytes, or finite floats [n], alone"
            " or as (wave, rate)"
        )
    samples = samples.astype(np.float32).reshape(len(samples), -1)
    return GivenMedia("audio", samples, None if rate is None else int(rate))


def _clip(value: Any, name: str, fps: float | None) -> GivenMedia:
    """Read a clip; arrays have the rate of the model."""
    if isinstance(value, Path):
        require_kind(value, "video", name)
        existing_file(value, name)
        try:
            return GivenMedia("video", read_video(value, fps=fps))
        except GenError as error:
            raise GenError(f"{name}: {error}") from None
    if isinstance(value, bytes):
        with _temporary(value, ".mp4") as path:
            return _from_bytes(lambda: _clip(path, name, fps), name)
    if isinstance(value, (list, tuple)):
        value = np.stack([_image(frame, f"{name}.{i}").array for i, frame in enumerate(value)])
    return GivenMedia("video", _pixels(value, name, 4))


READERS = {"image": _image, "audio": _sound}


@contextmanager
def _temporary(content: bytes, suffix: str) -> Iterator[Path]:
    """Yield a file that holds some bytes, for libraries that read files."""
    with NamedTemporaryFile(suffix=suffix) as file:
        file.write(content)
        file.flush()
        yield Path(file.name)


def _from_bytes(read: Any, name: str) -> GivenMedia:
    """Read a temporary file. Raises ``GenError`` that does not name it."""
    try:
        return read()
    except GenError as error:
        words = [w for w in str(error).split() if "/" not in w]
        raise GenError(f"the bytes of {' '.join(words)}") from None
