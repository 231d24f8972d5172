"""Base classes of causal samplers that follow a rule and draw nothing."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from gen.core.sampler import Sampler
from gen.samplers.engine.hypotheses import Search, decode_hypotheses


class DeterministicSampler(Sampler):
    """Causal sampler whose tokens follow from the distributions alone."""

    protocol = "causal"
    reference = "greedy decoding; a deterministic rule"
    guarantee = "approximate"

    @property
    def deterministic(self) -> bool:
        return True


class SearchSampler(DeterministicSampler):
    """Rule that searches among several texts of an item (``gen.samplers.engine.hypotheses``)."""

    search: ClassVar[type[Search]]
    superposed: ClassVar[bool] = False  # whether a row may have several tokens as one input

    @property
    def returns_logprobs(self) -> bool:
        return False  # a search takes tokens of several texts

    @abstractmethod
    def width(self, num_ends: int) -> int:
        """Count the most likely tokens of each row that the search reads, of a token space with so
        many tokens that end a text."""

    def __call__(self, target, rng, *, draft=None, canvas=None, trace=False, callback=None):
        width = self.width(len(target.space.row_ends))
        if self.superposed:
            target.require_superposition("superposed decoding")
        return decode_hypotheses(
            target,
            lambda item: self.search(self, item),
            width,
            superposed=self.superposed,
            trace=trace,
            callback=callback,
        )
