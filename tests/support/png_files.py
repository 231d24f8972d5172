"""PNG files made chunk by chunk, so that what they show does not depend on any reader."""

from __future__ import annotations

import struct
import zlib

import numpy as np

GREY, RGB, PALETTE, GREY_ALPHA, RGBA = 0, 2, 3, 4, 6  # colour types
Chunk = tuple[bytes, bytes]


def png(levels: np.ndarray, kind: int, bits: int = 8, chunks: tuple[Chunk, ...] = ()) -> bytes:
    """Return a PNG of levels [h, w] or [h, w, channels], with some chunks before its pixels."""
    height, width = levels.shape[:2]
    if bits == 16:
        rows = [row.astype(">u2").tobytes() for row in levels]
    else:  # the first pixel of a byte has its highest bits
        wide = np.unpackbits(levels.astype(np.uint8)[..., None], axis=-1)[..., 8 - bits :]
        rows = [np.packbits(row.reshape(-1)).tobytes() for row in wide]
    head = struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + row for row in rows))
    parts = [(b"IHDR", head), *chunks, (b"IDAT", data), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(map(_chunk, parts))


def _chunk(chunk: Chunk) -> bytes:
    name, data = chunk
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
