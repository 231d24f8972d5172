"""Base class of causal samplers that follow a rule and draw nothing."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from gen.core.checks import check_int
from gen.core.errors import bad_value
from gen.core.params import check_field, integer, number
from gen.core.sampler import Sampler
from gen.samplers.causal.beam.pool import PoolParams


class DeterministicSampler(Sampler):
    """Causal sampler whose tokens follow from the distributions alone."""

    protocol = "causal"
    reference = "greedy decoding; a deterministic rule"
    guarantee = "approximate"

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            check_field(f, getattr(self, f.name))

    @property
    def deterministic(self) -> bool:
        return True

    @property
    def returns_logprobs(self) -> bool:
        return False  # a search takes tokens of several texts


def early_stopping() -> Any:
    """Declare ``early_stopping`` as transformers has it."""

    def check(name: str, value: Any) -> None:
        if value not in (True, False, "never"):
            raise bad_value(name, value, "true, false or 'never'")

    return field(default=False, metadata={"check": check})


@dataclass(frozen=True)
class PoolSampler(DeterministicSampler):
    """Rule that keeps several texts of an item, the best ones, and gives out one of them.

    ``length_penalty``: exponent of the length that scores of finished texts are divided by.
    ``early_stopping``: true, false or never, as in transformers. ``rank``: number of the text that
    comes out, 0 for the best one; where there are fewer, the last one does.
    """

    length_penalty: float = number(1.0, -100, 100)
    early_stopping: bool | str = early_stopping()
    rank: int = integer(0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("sampler.rank", self.rank, 0, self.num_texts - 1)

    @property
    def num_texts(self) -> int:
        """Texts of an item."""
        raise NotImplementedError

    def pool(self, size: int) -> PoolParams:
        """Return the parameters of a pool of so many texts."""
        return PoolParams(size, self.length_penalty, self.early_stopping)
