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

from gen.samplers.engine.hypotheses import Item, Text


@dataclass(frozen=True)
class PoolParams:
    """Parameters of a pool: ``size`` k, ``length_penalty``, ``early_stopping``."""

    size: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def width(self, num_ends: int) -> int:
        """Number of extensions that a step looks at."""
        return (1 + max(1, num_ends)) * self.size


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


class Pool:
    """Live and finished hypotheses of one item.

    Attributes:
        live: texts that go on, the best one first.
        scores: their scores.
        finished: finished texts, the best one first.
        is_open: whether the search goes on.
    """

    def __init__(self, params: PoolParams, item: Item):
        self.params, self.item = params, item
        self.live: list[Text] = [()]
        self.scores = [0.0]
        self.finished: list[Finished] = []
        self.is_open = True

    def extend(self, candidates: list[Candidate]) -> tuple[list[Candidate], list[int]]:
        """Extend the hypotheses by one token.

        Args:
            candidates: extensions of the live hypotheses; equal scores are settled by the lower
                number of the hypothesis, then by the lower token.

        Returns:
            Extensions that live on, and the tokens that were chosen, those that end a text too.
        """
        params, item, position = self.params, self.item, len(self.live[0])
        ordered = sorted(candidates, key=lambda c: (-c.score, c.hypothesis, c.token))
        alive: list[Candidate] = []
        chosen: list[int] = []
        for rank, candidate in enumerate(ordered[: params.width(len(item.ends))]):
            if not item.is_over(candidate.token, position):
                alive.append(candidate)
            elif rank < params.size:
                self._finish(candidate, position + 1)
                chosen.append(candidate.token)
        alive = alive[: params.size]
        self.live = [(*self.live[c.hypothesis], c.token) for c in alive]
        self.scores = [c.score for c in alive]
        self.finished = sorted(self.finished, key=lambda f: -f.score)[: params.size]
        self.is_open = bool(alive) and not self._is_over(position + 1)
        return alive, chosen + [c.token for c in alive]

    def _finish(self, candidate: Candidate, length: int) -> None:
        score = candidate.score / length**self.params.length_penalty
        self.finished.append(Finished(score, (*self.live[candidate.hypothesis], candidate.token)))

    def _is_over(self, length: int) -> bool:
        """Tell whether nothing better can come: ``length`` tokens are there."""
        params = self.params
        if len(self.finished) < params.size:
            return False
        if params.early_stopping is True:
            return True
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = self.item.length
        best = self.scores[0] / length**params.length_penalty
        return best <= self.finished[-1].score
