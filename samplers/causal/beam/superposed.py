"""Superposed decoding: k texts for the forward passes of one.

The k drafts d of an item share one row. The network is fed a mixture of their last tokens, and its
distribution p extends all of them:

    input       sum_d w_d E[x_d]                    w_d in proportion to exp(s_d), E: embeddings
    extension   s_d + (1 - a) log p(v) + a log g(v | d)       of the ``token_candidates`` most
                likely tokens v, p renormalised over them; the k best live on, as in beam search
                (``gen.samplers.causal.beam.beam_search``)
    n-grams     g(v | d) = sum_{i=1..6} c_i N(last i tokens of d, v) / N(last i tokens of d)
                c = 0.01, 0.04, 0.15, 0.18, 0.12, 0.5; a = ``ngram_weight``. Tokens without any are
                left out; a draft for which none has any keeps (1 - a) log p(v) - ``miss_penalty``

Reference: Shen et al., "Superposed Decoding: Multiple Generations from a Single Autoregressive
Inference Pass" (arXiv 2405.18400), whose code takes 3 drafts, 9 candidates, temperature 0.06,
a = 0.54 and a penalty of 200. Their N counts a corpus of 200,000 documents. Here it counts the
item's own prompt and draft, which say little, so a is 0 unless it is set.
Guarantee: approximate, a deterministic rule: no seed changes the tokens. With one draft and no
n-grams it is greedy decoding.
The model has to take embeddings as inputs, and the token space no constraint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gen.core.method import GREEDY_DECODING, Limit, method
from gen.core.params import integer, number
from gen.core.registry import register
from gen.samplers.causal.beam.beam_search import Candidate, Pool, PoolSampler, best_finished
from gen.samplers.engine.hypotheses import Extension, Item, Scores, Search, Text

NGRAM_WEIGHTS = (0.01, 0.04, 0.15, 0.18, 0.12, 0.5)  # of contexts of 1, 2, ... tokens


class Drafts(Search):
    """Drafts of one item in one row."""

    def __init__(self, params: Superposed, item: Item):
        super().__init__(params, item)
        self.pool = Pool(params, params.num_drafts, item)

    def extend(self, rows: list[Scores]) -> list[Extension]:
        pool, position = self.pool, len(self.pool.live[0])
        count = self.params.token_candidates
        ids, logprobs = rows[0].ids[:count], rows[0].logprobs[:count]
        total = log_sum(logprobs)
        logprobs = [x - total for x in logprobs]
        candidates = [
            Candidate(score + x, n, v)
            for n, (score, text) in enumerate(zip(pool.scores, pool.live, strict=True))
            for v, x in zip(ids, self._mixed(text, ids, logprobs), strict=True)
            if x > -math.inf
        ]
        pool.extend(candidates)
        if not pool.is_open:
            return []
        total = log_sum(pool.scores)
        weights = [math.exp(score - total) for score in pool.scores]
        return [Extension(0, [text[-1] for text in pool.live], position, weights)]

    def _mixed(self, text: Text, ids: list[int], logprobs: list[float]) -> list[float]:
        """Mix the log-probabilities of tokens with those of the n-grams behind a draft."""
        share = self.params.ngram_weight
        if not share:
            return logprobs
        ngrams = ngram_probabilities([*self.item.prompt, *text], ids)
        if not any(ngrams):
            return [(1 - share) * x - self.params.miss_penalty for x in logprobs]
        pairs = zip(logprobs, ngrams, strict=True)
        return [(1 - share) * x + share * math.log(g) if g else -math.inf for x, g in pairs]

    def possible(self) -> list[Text]:
        return self.pool.possible

    def result(self) -> Text:
        return best_finished([self.pool], self.params.rank)


def log_sum(values: list[float]) -> float:
    """Return log sum exp of some numbers."""
    largest = max(values)
    return largest + math.log(sum(math.exp(x - largest) for x in values))


def ngram_probabilities(text: list[int], ids: list[int]) -> list[float]:
    """Predict tokens ``ids`` from what followed the last tokens of a text before: g of each."""
    found = [0.0] * len(ids)
    for length, weight in enumerate(NGRAM_WEIGHTS, 1):
        context = text[-length:]
        ends = range(length, len(text))
        followers = [text[n] for n in ends if text[n - length : n] == context]
        if not followers:
            break  # a longer context has none either
        for n, token in enumerate(ids):
            found[n] += weight * followers.count(token) / len(followers)
    return found


@method(
    "superposed",
    sampler="superposed_decoding",
    about="several texts for the forward passes of one: their tokens are fed as a mixture",
    paper="2405.18400",
    title="Superposed Decoding: Multiple Generations from a Single Autoregressive Inference Pass",
    limit=Limit(GREEDY_DECODING, {"num_drafts": 1}),
)
@register("sampler", "superposed_decoding")
@dataclass(frozen=True)
class Superposed(PoolSampler):
    """Feed a mixture of the drafts' last tokens, and extend all drafts by one distribution.

    ``num_drafts``: drafts of an item. ``token_candidates``: most likely tokens that extend them.
    ``ngram_weight``, ``miss_penalty``: share of the n-grams of prompt and draft, and what a draft
    without any loses. ``length_penalty``, ``early_stopping``, ``rank``: those of ``PoolSampler``.
    """

    num_drafts: int = integer(3, least=1, each="row")
    token_candidates: int = integer(9, least=1)
    ngram_weight: float = number(0.0, most=1.0)
    miss_penalty: float = number(200.0)

    papers = ("2405.18400",)
    search, superposed = Drafts, True

    @property
    def num_texts(self) -> int:
        return self.num_drafts

    def width(self, num_ends: int) -> int:
        return self.token_candidates
