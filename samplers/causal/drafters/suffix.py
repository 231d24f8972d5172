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

from gen.core.method import method
from gen.core.params import integer, number
from gen.core.registry import register
from gen.models.targets.causal import CausalTarget
from gen.samplers.causal.drafters.base import part_params
from gen.samplers.causal.drafters.context import Text
from gen.samplers.causal.drafters.tables import ScopeParams, TableNodes, TableSource
from gen.samplers.engine.draft import Draft
from gen.samplers.engine.step_context import CausalStep

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


class SuffixNodes(TableNodes):
    """Nodes weighted by how often a token followed the path."""

    def __init__(self, target: CausalTarget, params: SuffixParams, most_depth: int):
        super().__init__(target, params.scope)
        self.params, self.most_depth = params, most_depth

    def weigh_root(self, step: CausalStep, text: Text) -> Tensor:
        lengths = text.matches(text.last(self.params.max_match)[:, None])[:, 0]
        own, others = lengths[:, text.own :], lengths[:, : text.own]
        found = [self._latest(others, 0), self._latest(own, text.own)]
        self.at = torch.cat([at for at, _ in found], 1)  # columns that follow, [b, K]
        length = torch.cat([length for _, length in found], 1)
        owner = torch.cat([torch.full_like(at[0], i) for i, (at, _) in enumerate(found)])
        self.alive, self.most = self._choose(text, length, owner)
        self.path = torch.ones_like(self.most, dtype=self.dtype)[:, None]
        self.alive = self.alive[:, None]
        return self._weights(self.alive, self.path, torch.zeros_like(self.most)[:, None])[:, 0]

    def weigh(self, step: CausalStep, tree: Draft, first: int) -> Tensor:
        row = torch.arange(len(self.at), device=self.at.device)[:, None]
        above = tree.parents[:, first:] + 1
        depth, tokens = tree.depth[:, first:], tree.tokens[:, first:]
        before = self.alive[row, above]
        here = self._next(depth - 1)
        alive = before & (here == tokens[..., None])
        among = (before & (here >= 0)).sum(-1).clamp_min(1)
        path = self.path[row, above] * alive.sum(-1) / among
        self.alive = torch.cat([self.alive, alive], 1)
        self.path = torch.cat([self.path, path], 1)
        return self._weights(alive, path, depth)

    def _latest(self, lengths: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Find the longest matches, the latest ones first: columns behind them, and lengths."""
        size = lengths.shape[1]
        column = torch.arange(size, device=lengths.device)
        order = torch.where(lengths > 0, lengths * size + column, column - size)
        best = order.topk(min(OCCURRENCES, size), -1).indices
        return best + 1 + first, lengths.gather(1, best)

    def _next(self, depth: Tensor) -> Tensor:
        """Return the tokens of all occurrences at ``depth`` [b, n] behind them, [b, n, K]."""
        return self.text.next(self.at[:, None] + depth[..., None])

    def _choose(self, text: Text, length: Tensor, owner: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the match length, and the texts that are looked at.

        Args:
            text: texts of the rows.
            length: length of every occurrence's match, long [b, K].
            owner: texts that the occurrences are in, long [K].

        Returns:
            Occurrences that count, bool [b, K], and how deep paths may be, long [b].
        """
        params = self.params
        match = torch.arange(1, params.max_match + 1, device=length.device)
        most = (match * params.match_factor + params.match_offset).floor().long()
        most = most.clamp_max(self.most_depth)
        alive = (length[:, None] >= match[:, None]) & (owner == owner.unique()[:, None, None])[
            :, None
        ]
        alive = alive.transpose(0, 1).flatten(1, 2)  # [b, texts * match lengths, K]
        most = most.repeat(alive.shape[1] // len(match))
        chosen, score, path = alive, 0.0, 1.0
        for depth in range(self.most_depth):
            tokens = text.next(self.at + depth)
            there = chosen & (tokens >= 0)[:, None]
            same = (tokens[:, :, None] == tokens[:, None]).to(self.dtype)
            counts = there.to(self.dtype) @ same
            best = torch.where(there, counts, -1.0).argmax(-1, keepdim=True)
            share = counts.gather(-1, best)[..., 0] / there.sum(-1).clamp_min(1)
            path = path * share
            score = score + path * ((path >= params.min_path_prob) & (depth < most))
            token = tokens[:, None].expand_as(there).gather(-1, best)
            chosen = there & (tokens[:, None] == token)
        # of equal scores the longest match
        score = torch.as_tensor(score).flip(1)
        which = alive.shape[1] - 1 - score.argmax(1)
        row = torch.arange(len(alive), device=alive.device)
        return alive[row, which], most[which]

    def _weights(self, alive: Tensor, path: Tensor, depth: Tensor) -> Tensor:
        """Weigh the tokens after nodes.

        Args:
            alive: occurrences that agree with the path, bool [b, n, K].
            path: probability of the path, [b, n].
            depth: depth of the nodes, long [b, n].
        """
        tokens = self._next(depth)
        there = alive & (tokens >= 0)
        counts = self.add_up(torch.where(there, tokens, -1), there.to(self.dtype))
        share = counts / there.sum(-1, keepdim=True).clamp_min(1)
        likely = path[..., None] * share >= self.params.min_path_prob
        return share * (likely & (depth < self.most[:, None])[..., None])


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
class Suffix(TableSource):
    """Drafts what followed the longest matches of the last tokens, by its counts."""

    @classmethod
    def nodes(cls, sampler, target, draft):
        chain = sampler.shape == "chain"
        depth = sampler.num_speculative_tokens if chain else sampler.tree_depth
        params = part_params(sampler, "drafter", "suffix")
        return SuffixNodes(target, params, int(depth))
