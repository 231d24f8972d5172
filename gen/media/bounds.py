"""Bounds of media, which are held against the header of a file before anything is decoded.

What a small file says of itself may be larger than any memory: an image of 100,000 x 100,000
pixels, a sound of 2^62 samples, an archive that unpacks to terabytes.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import IO

import numpy as np

from gen.core.errors import GenError, cut

MOST_PIXELS = 64_000_000  # of an image, or of one frame of a clip
MOST_BYTES = 1 << 30  # of one medium in memory
MOST_DECODED = 1 << 33  # pixels of all frames that are decoded of one clip
MOST_FRAMES = 100_000  # frames that are decoded of one clip


def require_pixels(said: str, width: int, height: int, most: int = MOST_PIXELS) -> None:
    """Raise ``GenError`` for an image or a frame of more than ``most`` pixels. ``said``: name."""
    if width * height > most:
        raise GenError(f"{said} has {width}x{height} pixels; expected at most {most} of them")


def require_bytes(said: str, count: int, what: str) -> None:
    """Raise ``GenError`` for a medium of more than ``MOST_BYTES`` in memory.

    Args:
        said: name of the medium.
        count: bytes that it takes.
        what: what it holds, for the message.
    """
    if count > MOST_BYTES:
        raise GenError(
            f"{said} holds {what}, {count:,} bytes in memory; expected at most {MOST_BYTES:,}"
        )


# --- arrays of numpy

SUFFIX, MAGIC = ".npy", b"\x93NUMPY"
LONGEST_HEADER = 1000  # characters; numpy takes seconds for longer ones that it cannot read


def load_array(path: str | Path) -> np.ndarray:
    """Read a ``.npy`` file.

    Raises:
        GenError: an array that is larger than its file or than ``MOST_BYTES``, or of objects.
        OSError: the file cannot be read.
        ValueError: it is none of numpy.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file")
    with path.open("rb") as file:
        require_array(file, path.stat().st_size, str(path))
    return np.load(path, allow_pickle=False)


@contextmanager
def opened_arrays(path: Path) -> Iterator[np.lib.npyio.NpzFile]:
    """Open an ``.npz`` file whose arrays were all judged by their headers.

    Raises:
        GenError: as of ``load_array``; of all arrays together, too.
        Exception: any, for a damaged archive.
    """
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        require_bytes(str(path), sum(e.file_size for e in entries), "arrays")
        for entry in entries:
            with archive.open(entry) as file:  # numpy reads an array under any name
                is_array = file.read(len(MAGIC)) == MAGIC
                if is_array or entry.filename.endswith(SUFFIX):
                    file.seek(0)
                    said = f"{path}, array {cut(entry.filename)}"
                    require_array(file, entry.file_size, said)
    with np.load(path, allow_pickle=False) as file:
        yield file


def require_array(file: IO[bytes], size: int, said: str) -> None:
    """Hold the header of an array against the size of its file.

    Args:
        file: file of the array, at its beginning.
        size: bytes of the file.
        said: name of the array.

    Raises:
        GenError: the array is of objects, or larger than its file or than ``MOST_BYTES``.
        ValueError: the header is none of numpy.
    """
    try:
        version = np.lib.format.read_magic(file)
        form = np.lib.format
        read = form.read_array_header_1_0 if version == (1, 0) else form.read_array_header_2_0
        shape, _, dtype = read(file, max_header_size=LONGEST_HEADER)
    except Exception as error:  # numpy takes the header apart as Python, which may raise anything
        raise ValueError(f"no header of an array: {cut(' '.join(str(error).split()))}") from None
    if dtype.hasobject:
        raise GenError(f"{said} holds Python objects, which are pickles; expected numbers or texts")
    if any(not 0 <= side < 2**63 for side in shape):
        raise GenError(
            f"{said} has the shape {cut(str(shape))}; expected sides of 0 to {2**63 - 1:,}"
        )
    count = prod(shape) * dtype.itemsize
    require_bytes(said, count, f"{dtype} {shape}")
    if count > size:
        raise GenError(f"{said} states {dtype} {shape}, {count:,} bytes; the file has {size:,}")
