"""What trained weights that belong to a target remember of it: its weights, and the sampling
parameters of the distribution that they were trained for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from torch import Tensor

from gen.core.errors import GenError
from gen.core.sampling_params import SamplingParams
from gen.models.adapters.base import ModelAdapter
from gen.models.adapters.protocols import SharedModel
from gen.models.load.digest import digest_of
from gen.models.load.networks import config_field

# sampling parameters that make the distribution of a position from its logits alone
DISTRIBUTION = ("temperature", "top_k", "top_p", "min_p", "guidance_scale")
# what the config of a draft model that was trained for one target calls its facts
CONFIG_KEY = "drafter"


class Known(Protocol):
    """What weights may remember of a target (``gen.models.targets.base.Target``)."""

    model: Any
    name: str
    sampling: SamplingParams
    legal: Tensor


def distribution_of(sampling: SamplingParams) -> dict[str, float]:
    """Return the sampling parameters that weights are trained for, by name."""
    values = asdict(sampling)
    return {name: values[name] for name in DISTRIBUTION}


def target_digest(target: Known) -> str:
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
    what: str, digest: str, name: str, sampling: dict[str, float], target: Known
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


@dataclass(frozen=True)
class DrafterFacts:
    """Facts of a trained drafter.

    Attributes:
        kind: name of the drafter that reads the folder.
        target: digest of the target's weights (``digest_of``).
        target_name: name of the target, for messages.
        vocab_size: number of token ids V.
        sampling: sampling parameters by name, those of ``DISTRIBUTION``.
        layers: names of the target's layers whose hidden states the drafter reads.
        net: arguments of the network.
    """

    kind: str
    target: str
    target_name: str
    vocab_size: int
    sampling: dict[str, float]
    layers: tuple[str, ...] = ()
    net: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        kind: str,
        target: Known,
        layers: tuple[str, ...] = (),
        net: Mapping[str, Any] | None = None,
    ) -> DrafterFacts:
        """State the facts of a drafter of a target, under the target's sampling parameters."""
        digest, sampling = target_digest(target), distribution_of(target.sampling)
        size = target.legal.shape[-1]
        return cls(kind, digest, target.name, size, sampling, layers, dict(net or {}))


def facts_of_model(target: Known, draft: Known) -> DrafterFacts | None:
    """Read what a draft model was trained for from its config.

    Args:
        target: the model with its sampling parameters.
        draft: target of the draft model.

    Returns:
        The facts; None for a draft model that was trained for no one target.

    Raises:
        GenError: it was trained for another model or distribution, or the config states no facts.
    """
    if not isinstance(draft.model, SharedModel):
        return None
    stated = config_field(draft.model.model.config, CONFIG_KEY)
    if stated is None:
        return None
    name = f"draft model {draft.name}"
    try:
        facts = DrafterFacts(**stated)
    except TypeError as error:
        raise GenError(f"{CONFIG_KEY!r} in the config of {name} cannot be read: {error}") from None
    require_trained_for(name, facts.target, facts.target_name, facts.sampling, target)
    return facts
