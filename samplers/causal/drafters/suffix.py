"""Suffix decoding: draft what followed the longest matches of the last tokens, as often as it did.

For every match length m up to ``max_match``, the occurrences of the last m tokens and what followed
them are a tree with count ratios; the probability of a path is their product. A match of length m
is worth ``match_factor`` m + ``match_offset`` drafts of a path, and paths less likely than
``min_path_prob`` are not drafted. The m counts whose most probable path has the largest sum of path
probabilities; with ``scope: call``, over the item's own text and the texts of finished items apart.

Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications" (arXiv
2411.04975), whose suffix trees are here the ``OCCURRENCES`` longest and latest matches, found by
comparing tokens on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gen.core.lookup import take
from gen.core.method import method
from gen.core.params import integer, number
from gen.core.registry import register
from gen.samplers.causal.drafters.tables import ScopeParams, Table
from gen.samplers.engine.host import constant

OCCURRENCES = 32  # of the last tokens, in the item's own text and in those of finished items each


@dataclass(frozen=True)
class SuffixParams(ScopeParams):
    """Parameters of suffix decoding.

    Attributes:
        max_match: last tokens that are compared at most.
        match_factor: drafts of a path per token of the match.
        match_offset: drafts of a path beyond those.
        min_path_prob: least probability of a path that is drafted.
    """

    max_match: int = integer(16, least=1)
    match_factor: float = number(1.0)
    match_offset: float = number(0.0)
    min_path_prob: float = number(0.1, most=1.0)


@method(
    "suffix",
    about="drafts what followed the longest matches of the last tokens, by its counts",
    sampler="speculative",
    params={
        "drafter": "suffix",
        "shape": "best_first",
        "draws": "ranks",
        "verifier": "follow",
        "nodes": 16,
        "tree_depth": 16,
    },
    paper="2411.04975",
    title="SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications",
    aliases={
        "max_spec_factor": "match_factor",
        "max_spec_offset": "match_offset",
        "min_token_prob": "min_path_prob",
    },
)
@register("drafter", "suffix", params=SuffixParams)
class Suffix(Table):
    """Drafts what followed the longest matches of the last tokens, by its counts."""

    def __init__(self, target, params, most_depth: int):
        super().__init__(target, params)
        self.most_depth = most_depth

    @classmethod
    def of(cls, sampler, target, draft):
        chain = sampler.shape == "chain"
        depth = sampler.num_speculative_tokens if chain else sampler.tree_depth
        return cls(target, sampler.params_of("drafter"), int(depth))

    def look(self, text):
        """Find the occurrences: the columns ``at`` [b, K] behind them, those that count ``alive``
        [b, 1, K], the probability ``path`` [b, 1] of what was drafted, and how deep paths may be,
        ``most`` [b]."""
        lengths = text.matches(text.last(self.params.max_match)[:, None])[:, 0]
        size = lengths.shape[1]
        column = torch.arange(size, device=lengths.device)
        # the longest first, and of those the latest
        order = torch.where(lengths > 0, lengths * size + column, column - size)
        texts = [order[:, : text.own], order[:, text.own :]] if text.own > 1 else [order]
        best = [part.topk(min(OCCURRENCES, part.shape[1])).indices for part in texts]
        best[-1] = best[-1] + size - texts[-1].shape[1]
        last, counts = torch.cat(best, 1), [part.shape[1] for part in best]
        self.at = last + 1
        # which occurrences are in a text, and at least as long as a match: [b, texts * lengths, K]
        match = torch.arange(1, self.params.max_match + 1, device=lengths.device)
        long = lengths.gather(1, last)[:, None] >= match[:, None]
        owners = tuple(n for n, count in enumerate(counts) for _ in range(count))
        owner = constant(owners, long.device)
        alive = torch.cat([long & (owner == n) for n in range(len(counts))], 1)
        most = (match * self.params.match_factor + self.params.match_offset).floor().long()
        most = most.clamp_max(self.most_depth).repeat(len(counts))
        # of equal scores the longest match
        which = alive.shape[1] - 1 - self._score(alive, most).flip(1).argmax(1)
        row = torch.arange(len(alive), device=alive.device)
        self.alive, self.most = alive[row, which][:, None], most[which]
        self.path = torch.ones_like(self.most, dtype=self.dtype)[:, None]

    def _score(self, alive: Tensor, most: Tensor) -> Tensor:
        """Sum the probabilities of the most probable path, token by token, [b, M], of M sets of
        occurrences ``alive``, bool [b, M, K], whose paths may be ``most`` deep, long [M]."""
        path, score = torch.ones_like(alive[..., 0], dtype=self.dtype), 0.0
        for depth in range(self.most_depth):
            tokens = self.text.next(self.at + depth)[:, None]
            there = alive & (tokens >= 0)
            same = (tokens.transpose(1, 2) == tokens).to(self.dtype)
            counts = there.to(self.dtype) @ same
            best = torch.where(there, counts, -1.0).argmax(-1, keepdim=True)
            path = path * counts.gather(-1, best)[..., 0] / there.sum(-1).clamp_min(1)
            score = score + path * ((path >= self.params.min_path_prob) & (depth < most))
            alive = there & (tokens == tokens.expand_as(there).gather(-1, best))
        return torch.as_tensor(score)

    def weigh(self, tails, parents, depth):
        # 1. occurrences that agree with the path so far; all of them do with the last token
        before, last = take(self.alive, parents + 2), self._next(depth - 1)
        alive = before & (last == tails)
        among = (before & (last >= 0)).sum(-1).clamp_min(1)
        path = take(self.path, parents + 2) * alive.sum(-1) / among
        self.alive = torch.cat([self.alive, alive], 1)
        self.path = torch.cat([self.path, path], 1)
        # 2. tokens by how many of them they follow
        tokens = self._next(depth)
        there = alive & (tokens >= 0)
        counts = self.add_up(torch.where(there, tokens, -1), there)
        share = counts / there.sum(-1, keepdim=True).clamp_min(1)
        likely = path[..., None] * share >= self.params.min_path_prob
        return share * (likely & (depth < self.most[:, None])[..., None])

    def _next(self, depth: Tensor) -> Tensor:
        """Return the tokens of all occurrences at ``depth`` [b, n] behind them, [b, n, K]."""
        return self.text.next(self.at[:, None] + depth[..., None])
