"""Base class of causal samplers that follow a rule and draw nothing."""

from __future__ import annotations

from dataclasses import dataclass

from gen.core.params import Rule, integer, number, param
from gen.core.sampler import Sampler
from gen.samplers.causal.beam.pool import PoolParams


class DeterministicSampler(Sampler):
    """Causal sampler whose tokens follow from the distributions alone."""

    protocol = "causal"
    reference = "greedy decoding; a deterministic rule"
    guarantee = "approximate"

    @property
    def deterministic(self) -> bool:
        return True

    @property
    def returns_logprobs(self) -> bool:
        return False  # a search takes tokens of several texts


@dataclass(frozen=True)
class PoolSampler(DeterministicSampler):
    """Rule that keeps several texts of an item, the best ones, and gives out one of them.

    ``length_penalty``: exponent of the length that scores of finished texts are divided by.
    ``early_stopping``: true, false or never, as in transformers. ``rank``: number of the text that
    comes out, 0 for the best one; where there are fewer, the last one does.
    """

    length_penalty: float = number(1.0, -100, 100)
    early_stopping: bool | str = param(
        False, also=(True, False, "never"), expected="true, false or 'never'"
    )
    rank: int = integer(0)

    rules = (Rule("rank", lambda s: s.rank < s.num_texts, lambda s: f"0 to {s.num_texts - 1}"),)

    @property
    def num_texts(self) -> int:
        """Texts of an item."""
        raise NotImplementedError

    def pool(self, size: int) -> PoolParams:
        """Return the parameters of a pool of so many texts."""
        return PoolParams(size, self.length_penalty, self.early_stopping)
