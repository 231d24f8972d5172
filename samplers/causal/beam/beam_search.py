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
from gen.samplers.causal.beam.pool import (
    Candidate,
    Pool,
    PoolSampler,
    best_finished,
    num_extensions,
)
from gen.samplers.engine.hypotheses import Extension, Item, Scores, Search, Text


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
