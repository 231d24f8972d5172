"""Beam search: the k most probable hypotheses are kept at every step.

    s(x_1 .. x_n) = sum_i log p(x_i | x_<i)
    a step    of all extensions (hypothesis, token), the best 2 k by score, or (1 + e) k with e end
              tokens; finished ones among the first k are kept, the first k others live on
    score     of a finished text of n tokens: s / n ** length_penalty; the best k of them are kept
    over      all k are there, and early_stopping is True or the best live score, divided in the
              same way, is not above the worst of them; or no text lives

That is the rule of transformers' ``generate(num_beams=k)``. Its live score is divided by the number
of tokens so far; with early_stopping ``never`` and a positive length penalty, by the most there can
be.

Diverse beam search splits the k hypotheses into groups, which take each step in turn:

    s(x_1 .. x_n) += log p(x_n | x_<n) - diversity_penalty * c(x_n)
                     c(v): hypotheses of earlier groups that took token v in this step

Each group is a beam search of k / num_beam_groups hypotheses; scores keep their penalties, as in
the authors' code, and all finished texts compete.

References: Lowerre, "The HARPY Speech Recognition System" (1976); Vijayakumar et al., "Diverse Beam
Search: Decoding Diverse Solutions from Neural Sequence Models" (arXiv 1610.02424).
Guarantee: approximate, a deterministic rule: no seed changes the tokens. They are the most likely
text (by score) if the beams hold every beginning. The forward passes of all hypotheses of an item
run as one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from gen.core.method import GREEDY_DECODING, Limit, method
from gen.core.params import Rule, integer, number, param
from gen.core.registry import register
from gen.samplers.engine.hypotheses import Extension, Item, Scores, Search, SearchSampler, Text


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
    """Live and finished hypotheses of one item, at most ``size`` of each.

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


class Beams(Search):
    """Beam search of one item, in groups that are open or not."""

    def __init__(self, params: BeamSearch, item: Item):
        super().__init__(params, item)
        groups = range(params.num_beam_groups)
        self.pools = [Pool(params, params.group_size, item) for _ in groups]
        # row of each live hypothesis of each group; all begin with the prompt
        self.rows = [[0] for _ in groups]

    def extend(self, rows: list[Scores]) -> list[Extension]:
        taken: Counter[int] = Counter()
        following: list[Extension] = []
        for group, pool in enumerate(self.pools):
            if not pool.is_open:
                continue
            before, position = self.rows[group], len(pool.live[0])
            penalty = self.params.diversity_penalty
            candidates = [
                Candidate(pool.scores[n] + logprob - penalty * taken[token], n, token)
                for n, row in enumerate(before)
                for token, logprob in zip(rows[row].ids, rows[row].logprobs, strict=True)
            ]
            alive, chosen = pool.extend(candidates)
            taken.update(chosen)
            if pool.is_open:
                self.rows[group] = list(range(len(following), len(following) + len(alive)))
                following += [Extension(before[c.hypothesis], (c.token,), position) for c in alive]
        return following

    def possible(self) -> list[Text]:
        return [text for pool in self.pools for text in pool.possible]

    def result(self) -> Text:
        return best_finished(self.pools, self.params.rank)


@method(
    "diverse_beam",
    sampler="beam_search",
    about="beam search in groups, each of which avoids the tokens of those before it",
    paper="1610.02424",
    title="Diverse Beam Search: Decoding Diverse Solutions from Neural Sequence Models",
    params={"num_beams": 4, "num_beam_groups": 4, "diversity_penalty": 0.5},
    limit=Limit("beam", {"num_beam_groups": 1, "diversity_penalty": 0.0}),
)
@method(
    "beam",
    sampler="beam_search",
    about="beam search as in transformers' generate(num_beams=4)",
    params={"num_beams": 4},
    limit=Limit(GREEDY_DECODING, {"num_beams": 1}),
)
@register("sampler", "beam_search")
@dataclass(frozen=True)
class BeamSearch(PoolSampler):
    """Keep the most probable hypotheses at every step.

    ``num_beams``: hypotheses of an item, rows of the batch each. ``num_beam_groups``,
    ``diversity_penalty``: groups that avoid each other's tokens. ``length_penalty``,
    ``early_stopping``, ``rank``: those of ``PoolSampler``.
    """

    num_beams: int = integer(4, least=1, each="row")
    num_beam_groups: int = integer(1, least=1)
    diversity_penalty: float = number(0.0)

    papers = ("1610.02424",)
    search = Beams

    rules = (
        *PoolSampler.rules,
        Rule(
            "num_beam_groups",
            lambda s: not s.num_beams % s.num_beam_groups,
            "a divisor of num_beams {num_beams}",
        ),
    )

    @property
    def num_texts(self) -> int:
        return self.num_beams

    @property
    def group_size(self) -> int:
        """Hypotheses of a group."""
        return self.num_beams // self.num_beam_groups

    def width(self, num_ends: int) -> int:
        # so many tokens of a row may be penalised
        penalised = self.num_beams if self.diversity_penalty else 0
        return num_extensions(self.group_size, num_ends) + penalised
