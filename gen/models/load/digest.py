"""Digest of a model's weights, by which files made for one model tell it from another."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gen.core.errors import GenError
from gen.models.load.tensor_parallel import is_split

EDGE = 64  # values at both ends of a tensor that its digest reads


def digest_of(model: torch.nn.Module) -> str:
    """Digest a model's weights: names, shapes, and both ends of every tensor.

    Raises:
        GenError: this process has parts of the tensors alone.
    """
    if is_split(model):
        raise GenError(
            "the model is split by tp, and what was trained for its weights knows them as a whole;"
            " expected a sampler without trained weights, or a model without tp"
        )
    digest = hashlib.sha256()
    for name, x in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(x.shape)}\n".encode())
        for part in _parts(x.detach()):
            flat = part.flatten()
            ends = torch.cat([flat[:EDGE], flat[-EDGE:]]).double().cpu()
            digest.update(ends.numpy().tobytes())
    return digest.hexdigest()[:16]


def _parts(x: Tensor) -> list[Tensor]:
    """Return the tensors that hold the numbers of one: codes and scales of a quantised weight."""
    if not is_traceable_wrapper_subclass(x):
        return [x]
    names, _ = x.__tensor_flatten__()
    return [getattr(x, name) for name in names]
