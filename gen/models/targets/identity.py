"""What trained weights that belong to a target remember of it: its weights, and the sampling
parameters of the distribution that they were trained for."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from gen.core.errors import GenError
from gen.models.adapters.base import ModelAdapter
from gen.models.load.digest import digest_of

if TYPE_CHECKING:
    from gen.core.sampling_params import SamplingParams
    from gen.models.targets.base import Target

# sampling parameters that make the distribution of a position from its logits alone
DISTRIBUTION = ("temperature", "top_k", "top_p", "min_p", "guidance_scale")


def distribution_of(sampling: SamplingParams) -> dict[str, float]:
    """Return the sampling parameters that weights are trained for, by name."""
    values = asdict(sampling)
    return {name: values[name] for name in DISTRIBUTION}


def target_digest(target: Target) -> str:
    """Digest the weights of a target's model.

    Raises:
        GenError: the model has no weights.
    """
    if not isinstance(target.model, ModelAdapter):
        raise GenError(
            "trained weights that belong to a model need one with weights, and"
            f" {type(target.model).__name__} has none"
        )
    return digest_of(target.model.model)


def require_trained_for(
    what: str, digest: str, name: str, sampling: dict[str, float], target: Target
) -> None:
    """Refuse trained weights of another model or distribution.

    Args:
        what: kind of the weights and where they are, for the message.
        digest: digest of the weights of the model that they were trained for.
        name: name of that model.
        sampling: sampling parameters that they were trained for, those of ``DISTRIBUTION``.
        target: the model and the sampling parameters that they came with.

    Raises:
        GenError: they belong to another model or distribution.
    """
    here = target_digest(target)
    if digest != here:
        raise GenError(
            f"{what} was trained for {name or 'a model'} with weights {digest}; expected {here}"
            f" ({target.name or 'the model'})"
        )
    wanted = distribution_of(target.sampling)
    other = [k for k in DISTRIBUTION if sampling.get(k) != wanted[k]]
    if other:
        trained = ", ".join(f"{k} {sampling.get(k)}" for k in other)
        came = ", ".join(f"{k} {wanted[k]}" for k in other)
        raise GenError(
            f"{what} was trained for {trained}, and the sampling parameters have {came}; expected"
            " equal ones, or weights trained for these"
        )
