"""Pool of hypotheses: the live and the finished texts of a beam search.

    step      of all extensions (hypothesis, token), the best 2 k by score, or (1 + e) k with e end
              tokens; finished ones among the first k are kept, the first k others live on
    score     of a finished text of n tokens: s / n ** length_penalty; the best k of them are kept
    over      all k are there, and early_stopping is True or the best live score, divided in the
              same way, is not above the worst of them; or no text lives

That is the rule of transformers' ``generate(num_beams=k)``. Its live score is divided by the number
of tokens so far; with early_stopping ``never`` and a positive length penalty, by the most there can
be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gen.core.params import Rule, integer, number, param
from gen.samplers.engine.hypotheses import Item, SearchSampler, Text


@dataclass(frozen=True)
class PoolSampler(SearchSampler):
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


def num_extensions(size: int, num_ends: int) -> int:
    """Count the extensions that a step of ``size`` hypotheses looks at."""
    return (1 + max(1, num_ends)) * size


class Candidate(NamedTuple):
    """Extension of a live hypothesis: ``score`` of the longer text, number of the ``hypothesis``,
    ``token``."""

    score: float
    hypothesis: int
    token: int


class Finished(NamedTuple):
    """Finished text: its score divided by its length, and its tokens."""

    score: float
    text: Text


def best_finished(pools: list[Pool], rank: int) -> Text:
    """Return the finished text of a rank, or the last one where there are fewer."""
    found = sorted((f for pool in pools for f in pool.finished), key=lambda f: -f.score)
    return found[min(rank, len(found) - 1)].text


class Pool:
    """Live and finished hypotheses of one item.

    Args:
        params: parameters of the method.
        size: number of hypotheses k.
        item: the item.

    Attributes:
        live: texts that go on, the best one first.
        scores: their scores.
        finished: finished texts, the best one first.
        is_open: whether the search goes on.
    """

    def __init__(self, params: PoolSampler, size: int, item: Item):
        self.params, self.size, self.item = params, size, item
        self.live: list[Text] = [()]
        self.scores = [0.0]
        self.finished: list[Finished] = []
        self.is_open = True

    @property
    def possible(self) -> list[Text]:
        """Texts of which one may come out or be the beginning of it."""
        return (self.live if self.is_open else []) + [f.text for f in self.finished]

    def extend(self, candidates: list[Candidate]) -> tuple[list[Candidate], list[int]]:
        """Extend the hypotheses by one token.

        Args:
            candidates: extensions of the live hypotheses; equal scores are settled by the lower
                number of the hypothesis, then by the lower token.

        Returns:
            Extensions that live on, and the tokens that were chosen, those that end a text too.
        """
        item, position = self.item, len(self.live[0])
        ordered = sorted(candidates, key=lambda c: (-c.score, c.hypothesis, c.token))
        alive: list[Candidate] = []
        chosen: list[int] = []
        for rank, candidate in enumerate(ordered[: num_extensions(self.size, len(item.ends))]):
            if not item.is_over(candidate.token, position):
                alive.append(candidate)
            elif rank < self.size:
                self._finish(candidate, position + 1)
                chosen.append(candidate.token)
        alive = alive[: self.size]
        self.live = [(*self.live[c.hypothesis], c.token) for c in alive]
        self.scores = [c.score for c in alive]
        self.finished = sorted(self.finished, key=lambda f: -f.score)[: self.size]
        self.is_open = bool(alive) and not self._is_over(position + 1)
        return alive, chosen + [c.token for c in alive]

    def _finish(self, candidate: Candidate, length: int) -> None:
        score = candidate.score / length**self.params.length_penalty
        self.finished.append(Finished(score, (*self.live[candidate.hypothesis], candidate.token)))

    def _is_over(self, length: int) -> bool:
        """Tell whether nothing better can come: ``length`` tokens are there."""
        stopping, penalty = self.params.early_stopping, self.params.length_penalty
        if len(self.finished) < self.size:
            return False
        if stopping is True:
            return True
        longest = self.item.length if stopping == "never" and penalty > 0 else length
        return self.scores[0] / longest**penalty <= self.finished[-1].score
