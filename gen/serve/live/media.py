"""Media as the page shows them: plain data whose bytes are base64."""

from __future__ import annotations

import base64
import io
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from gen.contracts.modality import Modality
from gen.core.errors import GenError
from gen.media.motion.skeleton import FPS, PARENTS, Motion, kinematics
from gen.modalities.action.modality import ActionChunk
from gen.modalities.action.view import animate
from gen.modalities.action.world import CONTROL_HZ

STRIP = 16  # frames of one image
MIME = {"png": "image/png", "wav": "audio/wav", "mp4": "video/mp4", "txt": "text/plain"}


def as_base64(content: bytes) -> str:
    """Return bytes as base64."""
    return base64.b64encode(content).decode()


def as_png(image: Image.Image) -> str:
    """Return an image as a PNG in base64."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", compress_level=1)
    return as_base64(buffer.getvalue())


def as_strips(frames: np.ndarray) -> list[str]:
    """Return frames uint8 [T, H, W, 3] as PNGs, in which up to 16 of them stand in a column."""
    parts = (frames[first : first + STRIP] for first in range(0, len(frames), STRIP))
    return [
        as_png(Image.fromarray(np.ascontiguousarray(part.reshape(-1, *part.shape[2:]))))
        for part in parts
    ]


def as_samples(wave: np.ndarray) -> str:
    """Return a waveform as 16-bit integers, little-endian, in base64; channels are averaged."""
    wave = np.asarray(wave, np.float64)
    wave = wave if wave.ndim == 1 else wave.mean(int(wave.shape[0] > wave.shape[-1]))
    return as_base64(np.rint(np.clip(wave, -1, 1) * 32767).astype("<i2").tobytes())


def part(modality: Modality, media: Any) -> dict[str, Any]:
    """Return a part of media, or a preview of an image.

    Args:
        modality: modality of the media.
        media: an image, frames, samples or text.
    """
    if isinstance(media, str):
        return {"kind": "text", "text": media}
    if isinstance(media, Image.Image):
        return {"kind": "image", "png": as_png(media)}
    if isinstance(media, Motion):
        joints, _ = kinematics(media.root, media.rotations)
        return {
            "kind": "motion",
            "joints": as_base64(joints.astype("<f4").tobytes()),
            "frames": media.frames,
            "parents": list(PARENTS),
            "rate": FPS,
        }
    if isinstance(media, ActionChunk):
        frames = animate(media.situation.state, media.action)
        return {
            "kind": "action",
            "strips": as_strips(frames),
            "frames": len(frames),
            "rate": CONTROL_HZ,
            "actions": np.asarray(media.action, float).round(4).tolist(),
        }
    if modality.media_kind == "video":
        frames = np.asarray(media)
        rate = modality.frame_rate
        return {"kind": "frames", "strips": as_strips(frames), "frames": len(frames), "rate": rate}
    if modality.media_kind == "audio":
        return {"kind": "sound", "samples": as_samples(media)}
    return {"kind": "file"}


def whole(modality: Modality, media: Any) -> dict[str, Any]:
    """Return a whole output with its file.

    A file that this installation cannot write, such as an MP4 without PyAV, is left out, and
    ``note`` says why.

    Args:
        modality: modality of the output.
        media: the output.
    """
    shown = part(modality, media)
    try:
        shown["file"] = as_file(modality, media)
    except GenError as error:
        shown["note"] = str(error)
    return shown


def as_file(modality: Modality, media: Any, kept: bool = False) -> dict[str, str]:
    """Return the file of an output: ``name``, ``type`` and ``data``.

    Args:
        modality: modality of the output.
        media: the output.
        kept: write the file that outputs are read from again as they were.

    Raises:
        GenError: a package that writes the file is missing.
    """
    suffix = (modality.kept if kept else "") or modality.extension
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{modality.name}.{suffix}")
        if kept:
            modality.keep(media, path)
        else:
            modality.save(media, path, {})
        kind = MIME.get(suffix, "application/octet-stream")
        return {"name": path.name, "type": kind, "data": as_base64(path.read_bytes())}


def read_file(modality: Modality, file: dict[str, str], name: str) -> Any:
    """Return the media of a file that came as base64.

    Args:
        modality: modality of the media.
        file: ``name``, of which the ending alone counts, and ``data``.
        name: name of the part of the request, for messages.

    Raises:
        GenError: the file cannot be read.
    """
    try:
        content = base64.b64decode(file["data"], validate=True)
    except ValueError:
        raise GenError(f"{name}.data is no base64; expected that of a file") from None
    suffix = Path(file["name"]).suffix.lower()
    if not suffix[1:].isalnum():
        raise GenError(f"{name}.name is {file['name'][:80]!r}; expected one with an ending")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{name}{suffix}")
        path.write_bytes(content)
        media = modality.load(path)
        if isinstance(media, Image.Image):
            media.load()  # while the file is there
        return media
