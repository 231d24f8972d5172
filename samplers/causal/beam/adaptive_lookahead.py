"""Adaptive look-ahead: greedy decoding that tries out the likeliest tokens where it is undecided.

Of the distribution p of a position, with H its entropy in nats:

    H < entropy_threshold   x = argmax p
    else                    x = argmax over the ``candidates`` most likely tokens v of
                            (log p(v) + sum_{i=1..l} log max p_i(v)) / (l + 1)
                            p_i(v): distribution i positions further, after v and argmax tokens;
                            l = ``lookahead_length``, or less where the text ends before

The candidates of an item are rows of the batch, and their look-ahead is counted as forward passes.
What the winner has looked at is not computed again: its argmax tokens are taken up to the next
position without certainty, which changes no token.

Reference: He et al., "Towards Better Code Generation: Adaptive Decoding with Uncertainty Guidance"
(arXiv 2506.08980), "AdaDec". They learn the threshold of each model by logistic regression, 0.6 to
1.3; 3 candidates and 5 tokens are those of their code.
Guarantee: approximate, a deterministic rule: no seed changes the tokens. A threshold above the
entropy of every distribution is greedy decoding.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gen.core.method import GREEDY_DECODING, Limit, method
from gen.core.params import integer, number
from gen.core.registry import register
from gen.samplers.engine.hypotheses import Extension, Item, Scores, Search, SearchSampler, Text


@dataclass
class Trial:
    """Candidate that is tried out.

    Attributes:
        token: the candidate.
        score: sum of the log-probabilities of the candidate and the tokens behind it.
        row: row of the next step.
        is_over: whether the text is over with the tokens so far.
        path: distributions behind the candidate and behind each argmax token after it.
    """

    token: int
    score: float
    row: Extension
    is_over: bool
    path: list[Scores] = field(default_factory=list)

    @property
    def mean(self) -> float:
        """Score per token."""
        return self.score / (len(self.path) + 1)


class Lookahead(Search):
    """Greedy search of one item with trials."""

    def __init__(self, params: AdaptiveLookahead, item: Item):
        super().__init__(params, item)
        self.text: Text = ()
        self.trials: list[Trial] = []

    def extend(self, rows: list[Scores]) -> list[Extension]:
        if not self.trials:
            return self._follow(rows, 0)
        self._look_ahead(rows)
        length = max(len(t.path) for t in self.trials)
        going = [t for t in self.trials if not t.is_over]
        if going and length < self.params.lookahead_length:
            return [trial.row for trial in self.trials]
        best = max(range(len(self.trials)), key=lambda k: (self.trials[k].mean, -k))
        winner, self.trials = self.trials[best], []
        self.text = (*self.text, winner.token)
        if self.item.is_over(winner.token, len(self.text) - 1):
            return []
        return self._follow(winner.path, best)

    def _look_ahead(self, rows: list[Scores]) -> None:
        """Take the argmax token behind every trial whose text is not over.

        The row of a trial that is over waits: it repeats its last forward pass.
        """
        for n, (trial, scores) in enumerate(zip(self.trials, rows, strict=True)):
            if not trial.is_over:
                token, position = scores.ids[0], trial.row.position + 1
                trial.score += scores.logprobs[0]
                trial.path.append(scores)
                trial.is_over = self.item.is_over(token, position)
                if not trial.is_over:
                    trial.row = trial.row._replace(tokens=(token,), position=position)
            trial.row = trial.row._replace(row=n)

    def _follow(self, path: list[Scores], row: int) -> list[Extension]:
        """Take argmax tokens of ``path`` as long as they are certain, then try candidates out. The
        path has the distributions of the next positions, each behind the argmax tokens before it,
        which are in this row of the item."""
        for scores in path:
            position = len(self.text)
            is_last = position + 1 >= self.item.length
            if scores.entropy < self.params.entropy_threshold or is_last:
                self.text = (*self.text, scores.ids[0])
                if self.item.is_over(scores.ids[0], position):
                    return []
                continue
            count = self.params.candidates
            pairs = zip(scores.ids[:count], scores.logprobs[:count], strict=True)
            self.trials = [
                Trial(v, p, Extension(row, (v,), position), self.item.is_over(v, position))
                for v, p in pairs
            ]
            return [trial.row for trial in self.trials]
        return [Extension(row, self.text[-1:], len(self.text) - 1)]

    def possible(self) -> list[Text]:
        return [self.text]

    def result(self) -> Text:
        return self.text


@method(
    "adadec",
    sampler="adaptive_lookahead",
    about="greedy decoding that ranks the likeliest tokens by a look-ahead where it is undecided",
    paper="2506.08980",
    title="Towards Better Code Generation: Adaptive Decoding with Uncertainty Guidance",
    limit=Limit(
        GREEDY_DECODING,
        {"entropy_threshold": 1000.0},
        note="`entropy_threshold` above the entropy of every distribution",
    ),
)
@register("sampler", "adaptive_lookahead")
@dataclass(frozen=True)
class AdaptiveLookahead(SearchSampler):
    """Take the most likely token, and look ahead where the distribution is undecided.

    ``entropy_threshold``: entropy in nats from which candidates are tried out. ``candidates``: most
    likely tokens that are. ``lookahead_length``: tokens behind each of them.
    """

    entropy_threshold: float = number(1.0)
    candidates: int = integer(3, least=1, each="row")
    lookahead_length: int = integer(5, least=1)

    papers = ("2506.08980",)
    search = Lookahead

    def width(self, num_ends: int) -> int:
        return self.candidates
