"""Probe of a causal model for the slot cache: the model is run, because a class that ignores masks
or positions does not say so."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gen.core.errors import GenError

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}


@torch.no_grad()
def require_slots(adapter, name: str, plain: Callable[[Tensor], Tensor]) -> None:
    """Compare the class's own forward pass with those of the adapter over parts of five tokens, one
    of which has tokens that are replaced afterwards.

    Args:
        adapter: adapter of the model.
        name: name of the model, for messages.
        plain: the class's own call, tokens [1, L] -> logits [1, L, V].

    Raises:
        GenError: the distributions differ, or the class does not take the call.
    """
    ids = tuple(range(1, 6))
    tokens = torch.tensor([ids], device=adapter.device) % adapter.vocab_size
    positions = torch.arange(tokens.shape[1], device=adapter.device)[None]
    try:
        whole = plain(tokens)
        cache = adapter.new_cache(len(ids))
        adapter.forward(tokens[:, :2], positions[:, :2], cache)
        adapter.forward(tokens[:, :2].flip(1), positions[:, 2:4], cache)  # drafts that are rejected
        parts = adapter.forward(tokens[:, 2:], positions[:, 2:], cache)
    except (
        TypeError,
        ValueError,
        AttributeError,
        RuntimeError,
        IndexError,
        KeyError,
        NotImplementedError,
    ) as error:
        raise GenError(
            f"model {name} ({type(adapter.model).__name__}) does not work with gen's KV cache:"
            f" {' '.join(str(error).split())[:200]}; expected an architecture whose attention takes"
            " a 4-D mask and position ids"
        ) from None
    far = float((parts - whole[:, 2:]).abs().max())
    limit = TOLERANCE[adapter.dtype] * max(1.0, float(whole.abs().max()))
    if not far <= limit:
        raise GenError(
            f"model {name} ({type(adapter.model).__name__}) changes its log-probabilities with"
            f" gen's KV cache (by {far:.2g}); expected an architecture whose attention"
            " takes a 4-D mask and position ids"
        )
