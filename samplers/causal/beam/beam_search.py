"""Beam search: the k most probable hypotheses are kept at every step.

    s(x_1 .. x_n) = sum_i log p(x_i | x_<i)
    a step        the k best of all extensions of the k hypotheses live on; finished texts compete
                  by s / n ** length_penalty (``gen.samplers.causal.beam.pool``)

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
Parameters: ``num_beams``, ``length_penalty``, ``early_stopping`` (as in transformers),
``num_beam_groups``, ``diversity_penalty``, ``rank`` (0: the best text).
Presets: ``beam``, which at one beam is greedy decoding; ``diverse_beam``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from gen.core.method import GREEDY_DECODING, Limit, method
from gen.core.params import Rule, integer, number
from gen.core.registry import register
from gen.samplers.causal.beam.base import PoolSampler
from gen.samplers.causal.beam.pool import Candidate, Finished, Pool, PoolParams
from gen.samplers.engine.hypotheses import (
    Extension,
    Item,
    Scores,
    Search,
    Text,
    decode_hypotheses,
)


class Beams(Search):
    """Beam search of one item, in groups that are open or not.

    Args:
        item: the item.
        groups: number of groups.
        params: parameters of each group.
        penalty: strength of the diversity penalty.
        rank: number of the text that comes out.
    """

    def __init__(self, item: Item, groups: int, params: PoolParams, penalty: float, rank: int):
        self.pools = [Pool(params, item) for _ in range(groups)]
        self.penalty, self.rank = penalty, rank
        # row of each live hypothesis of each group; all begin with the prompt
        self.rows = [[0] for _ in range(groups)]

    def extend(self, rows: list[Scores]) -> list[Extension]:
        taken: Counter[int] = Counter()
        following: list[Extension] = []
        for group, pool in enumerate(self.pools):
            if not pool.is_open:
                continue
            candidates = [
                Candidate(pool.scores[n] + logprob - self.penalty * taken[token], n, token)
                for n, row in enumerate(self.rows[group])
                for token, logprob in zip(rows[row].ids, rows[row].logprobs, strict=True)
            ]
            position = len(pool.live[0])
            alive, chosen = pool.extend(candidates)
            taken.update(chosen)
            if not pool.is_open:
                continue
            before = self.rows[group]
            self.rows[group] = list(range(len(following), len(following) + len(alive)))
            following += [Extension(before[c.hypothesis], (c.token,), position) for c in alive]
        return following

    def possible(self) -> list[Text]:
        live = [text for pool in self.pools if pool.is_open for text in pool.live]
        return live + [f.text for f in self._finished()]

    def result(self) -> Text:
        finished = self._finished()
        return finished[min(self.rank, len(finished) - 1)].text

    def _finished(self) -> list[Finished]:
        found = [f for pool in self.pools for f in pool.finished]
        return sorted(found, key=lambda f: -f.score)


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

    num_beams: int = integer(4, least=1)
    num_beam_groups: int = integer(1, least=1)
    diversity_penalty: float = number(0.0)

    papers = ("1610.02424",)

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

    def __call__(self, target, rng, *, draft=None, canvas=None, trace=False, callback=None):
        size = self.num_beams // self.num_beam_groups
        params = self.pool(size)
        width = params.width(len(target.space.row_ends))
        if self.diversity_penalty:  # so many tokens of a row may be penalised
            width += self.num_beams

        def search(item: Item) -> Search:
            return Beams(item, self.num_beam_groups, params, self.diversity_penalty, self.rank)

        return decode_hypotheses(target, search, width, trace=trace, callback=callback)
