"""Files with how often each token occurs, from which PC-Sampler's order takes how rare a token is.

Two formats are read:

    .json   ``{"num_token": N, "p_baseline_dict": {"198": 42, ...}}`` as in the release of
            PC-Sampler, or the mapping alone, whose counts then add up to N
    .npy    counts [V]

A token that does not occur counts as occurring once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gen.core.errors import GenError, bad_value
from gen.core.plain import is_digits
from gen.models.load.reads import note_file

EXPECTED = "counts by token id (.json), or one count per token id (.npy)"


def read_rarity(path: str | Path, vocab_size: int) -> Tensor:
    """Read token counts, and return minus the logarithm of each token's share: float32 [V].

    Raises:
        GenError: the file cannot be read, or has other content.
    """
    if not isinstance(path, (str, Path)):
        raise bad_value("token_counts", path, f"a file with {EXPECTED}")
    path = Path(path).expanduser()
    note_file(path)
    try:
        if path.suffix == ".npy":
            counts, total = _of_array(np.load(path, allow_pickle=False), path, vocab_size)
        else:
            counts, total = _of_json(json.loads(path.read_text("utf-8")), path, vocab_size)
    except (OSError, ValueError, RecursionError) as error:
        raise GenError(
            f"the token counts {path} cannot be read: {error}; expected {EXPECTED}"
        ) from None
    if total <= 0:
        raise GenError(f"the token counts {path} add up to {total}; expected at least one token")
    share = np.maximum(counts, 1.0) / total
    return -torch.from_numpy(share).log().float()


def _of_array(counts: np.ndarray, path: Path, vocab_size: int) -> tuple[np.ndarray, float]:
    fits = counts.ndim == 1 and len(counts) <= vocab_size and counts.dtype.kind in "iuf"
    if not fits or not np.isfinite(counts).all() or (counts < 0).any():
        raise GenError(
            f"the token counts {path} have shape {counts.shape} and dtype {counts.dtype}; expected"
            f" at most {vocab_size} numbers of at least 0"
        )
    found = np.zeros(vocab_size)
    found[: len(counts)] = counts
    return found, float(found.sum())


def _of_json(tree: Any, path: Path, vocab_size: int) -> tuple[np.ndarray, float]:
    given = tree.get("p_baseline_dict", tree) if isinstance(tree, Mapping) else None
    if not isinstance(given, Mapping):
        raise GenError(f"the token counts {path} are not a mapping; expected {EXPECTED}")
    found = np.zeros(vocab_size)
    for key, count in given.items():
        is_count = isinstance(count, (int, float)) and not isinstance(count, bool)
        if not is_digits(key) or int(key) >= vocab_size or not is_count or not 0 <= count < 1e18:
            raise GenError(
                f"the token counts {path} hold {count!r} for {key!r}; expected a count of at least"
                f" 0 for a token id below {vocab_size}"
            )
        found[int(key)] = count
    total = found.sum() if given is tree else tree.get("num_token", found.sum())
    if not isinstance(total, (int, float)) or isinstance(total, bool):
        raise GenError(f"num_token of the token counts {path} is {total!r}; expected a number")
    return found, float(total)
