"""Mask tokens in forward passes of a causal model: whether it was trained at one, and whether a
request allows tokens that nobody can read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gen.core.errors import GenError
from gen.models.load.networks import config_field

if TYPE_CHECKING:
    from gen.models.targets.causal import CausalTarget


def require_plain_history(target: CausalTarget, method: str) -> None:
    """Refuse what reads the tokens before a position: masks are no tokens that one could read.

    Raises:
        GenError: there is a constraint, or a sampling parameter that looks back.
    """
    reads = "a constraint" if target.space.constraint is not None else None
    if target.sampling.looks_back:
        reads = f"sampling.{target.sampling.looks_back[0]}"
    if reads is not None:
        raise GenError(
            f"{method} came with {reads}, which reads the tokens before a position, and its masks"
            " are none; expected no constraint and no penalty, or another method"
        )


def learned_mask(target: CausalTarget, method: str, mask: int | None) -> int:
    """Return the mask token of a causal model that was trained at it.

    Args:
        target: the model with its items.
        method: drafter or sampler, for messages.
        mask: mask token of the model's vocabulary; None where it has none.

    Raises:
        GenError: there is none, or the model was never trained at it.
    """
    name = target.name or "this model"
    if mask is not None and target.model.trained_at_mask:
        return mask
    why = "has none" if mask is None else "has one in its vocabulary alone"
    raise GenError(
        f"{method} needs a causal model with a mask token that it was trained at, and {name} {why};"
        " expected one that was trained to be causal and masked at once (gen.recipes.text.dual)"
    )


def mask_token(target: CausalTarget, drafter: str, weights: str | None = None) -> int:
    """Return the mask token of a network that was trained to be causal and masked at once.

    Args:
        target: the model with its items.
        drafter: the drafter that it is itself.
        weights: folder of the drafter's weights, which it cannot have.

    Raises:
        GenError: there are weights; or see ``learned_mask``.
    """
    if weights is not None:
        raise GenError(
            f"sampler.drafter_weights is {weights!r}, and the drafter {drafter} is the target"
            " itself; expected None"
        )
    config = target.language_model(drafter).config
    mask = config_field(config, "mask_token_id")
    if mask is not None:
        mask = int(mask) if 0 <= mask < config.vocab_size else None
    return learned_mask(target, f"the drafter {drafter}", mask)
