"""Rotary embeddings whose angles depend on the length of the text.

    dynamic      angles shrink with every position past an original length
    longrope     one set of angles up to an original length, another one for longer texts

transformers takes the length of a forward pass: its largest position, of all rows. Here each token
has a length of its own, that of ``generate`` for its row alone: the prompt's tokens that of the
prompt, each later one its own. So a token gets the same angles whatever rows and drafts share its
pass, and rejected drafts leave no trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gen.core.errors import GenError
from gen.models.adapters.base import ModelAdapter
from gen.models.load.networks import config_field

# their ``generate`` computes the keys of the whole text again where the angles change
RECOMPUTES = "phi3", "phi4_multimodal", "phimoe"


def original_length(config: Any) -> int | None:
    """Return the length of text past which angles change; None where they never do.

    Args:
        config: config of transformers of a text model.
    """
    parameters = config_field(config, "rope_parameters") or {}
    each = parameters.values() if "rope_type" not in parameters else [parameters]
    lengths = [
        given["original_max_position_embeddings"]
        if given["rope_type"] == "longrope"
        else config.max_position_embeddings
        for given in each
        if isinstance(given, dict) and given.get("rope_type") in ("longrope", "dynamic")
    ]
    return min(lengths, default=None)


def recomputed_length(config: Any) -> int | None:
    """Return the length of text past which ``generate`` computes all of it again; None without."""
    return original_length(config) if config.model_type in RECOMPUTES else None


def require_kept_keys(model: Any, prompts: np.ndarray, length: int) -> None:
    """Refuse texts in the middle of which a network computes all keys anew.

    Args:
        model: adapter of the network.
        prompts: tokens of each prompt, int64 [n].
        length: positions of the output.

    Raises:
        GenError: a prompt ends before that length of text, and the output behind it.
    """
    limit = model.recomputed_past if isinstance(model, ModelAdapter) else None
    if limit is None:
        return
    # no pass reads the last token of the output
    crossing = (prompts <= limit) & (prompts + length - 1 > limit)
    if crossing.any():
        prompt = int(prompts[crossing.argmax()])
        raise GenError(
            f"the prompt has {prompt} tokens and the output {length} positions, and LongRoPE of"
            f" {type(model.model).__name__} changes all keys past {limit}; expected at most"
            f" {limit + 1 - prompt} new tokens, or a prompt of more than {limit}"
        )


@contextmanager
def angles_of(model: nn.Module, lengths: Tensor) -> Iterator[None]:
    """Let the rotary embeddings of a network take a length of text for each token.

    Args:
        model: network of transformers.
        lengths: of every token of the forward pass inside, long [B, L].
    """

    def angles(module: nn.Module, given: tuple[Any, ...], more: dict[str, Any], _: Any) -> Any:
        more = dict(more)
        x, positions = given[0], more.pop("position_ids", None)
        if positions is None:
            positions, given = given[1], (given[0], *given[2:])
        found: list[Tensor] | None = None
        for length in lengths.unique().tolist():
            # the class keeps the angles of longer texts until it meets a short one
            module.forward(x, torch.zeros_like(positions[:1, :1]), *given[1:], **more)
            here = lengths == length
            last = torch.full_like(positions[:, :1], length - 1)
            at = torch.cat([torch.where(here, positions, 0), last], 1)
            turns = [turn[:, :-1] for turn in module.forward(x, at, *given[1:], **more)]
            here = here[..., None]
            found = turns if found is None else list(map(torch.where, [here] * 2, turns, found))
        return tuple(found or ())

    rotary = [m for name, m in model.named_modules() if name.endswith("rotary_emb")]
    hooks = [m.register_forward_hook(angles, with_kwargs=True) for m in rotary]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
