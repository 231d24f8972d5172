"""Reproducible ``.npz`` files: their bytes depend on the content alone, not on the time of
writing."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from gen.core.errors import GenError
from gen.media.bounds import SUFFIX, opened_arrays


def write_npz(path: Path, arrays: Mapping[str, np.ndarray | str]) -> None:
    """Write arrays by name, texts as arrays of one string. Every entry has the same date."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, array in arrays.items():
            entry = zipfile.ZipInfo(name + SUFFIX)  # dated 1980
            entry.compress_type = zipfile.ZIP_DEFLATED
            with file.open(entry, "w") as out:
                np.lib.format.write_array(out, np.asarray(array), allow_pickle=False)


def read_npz(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Read arrays by name. Raises ``GenError`` for a file that is no archive, is truncated, or
    lacks an array."""
    if not path.is_file():
        raise GenError(f"{path} does not exist, or is no regular file; expected an .npz file")
    try:
        with opened_arrays(path) as file:
            missing = [n for n in names if n not in file.files]
            if missing:
                raise GenError(
                    f"{path} has no {missing[0]!r}; it has {', '.join(file.files) or 'nothing'}"
                )
            return {n: file[n] for n in names}
    except GenError:
        raise
    except Exception as error:  # a damaged archive may raise anything
        raise GenError(
            f"{path} cannot be read as an .npz file: {' '.join(str(error).split())[:200]}"
        ) from None


def read_all(path: Path) -> dict[str, np.ndarray | str]:
    """Read all arrays of a file; an array of one text as the text. Errors as of ``read_npz``."""
    if not path.is_file():
        raise GenError(f"{path} does not exist, or is no regular file; expected an .npz file")
    try:
        with opened_arrays(path) as file:
            found = {name: file[name] for name in file.files}
    except GenError:
        raise
    except Exception as error:  # a damaged archive may raise anything
        raise GenError(
            f"{path} cannot be read as an .npz file: {' '.join(str(error).split())[:200]}"
        ) from None
    return {k: v.item() if v.dtype.kind == "U" and not v.ndim else v for k, v in found.items()}
