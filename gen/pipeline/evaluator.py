"""Evaluator of a run: what the outputs of a search decode to, and how good they are."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gen.contracts.scorer import Sample, Scorer, checked_scores
from gen.pipeline.partial import fill


class RunEvaluator:
    """Evaluator of the outputs of one run (``gen.contracts.scorer.Evaluator``).

    Args:
        pipe: the pipeline.
        request: the request (``gen.pipeline.request.GenerationRequest``).
        space: token space of the results.
        frontend: frontend that decodes them.
        start: known tokens that generation starts from (``gen.pipeline.request.StartingPoint``).
        in_order: whether positions are decoded from left to right.
    """

    def __init__(
        self,
        pipe: Any,
        request: Any,
        space: Any,
        frontend: Any,
        start: Any,
        in_order: bool,
    ):
        self.pipe, self.request, self.space, self.frontend = pipe, request, space, frontend
        self.start, self.in_order = start, in_order
        self._attached: dict[int, tuple[Scorer, Scorer]] = {}

    def scores(
        self, scorer: Scorer, tokens: Tensor, items: np.ndarray, known: Tensor | None = None
    ) -> np.ndarray:
        if not len(tokens):
            return np.zeros(0)
        return checked_scores(self._attach(scorer), self.samples(tokens, items, known))

    def answers(self, tokens: Tensor, items: np.ndarray) -> list[Hashable]:
        found: list[Hashable] = []
        for sample in self.samples(tokens, items):
            is_text = isinstance(sample.media, str)
            found.append(sample.media.strip() if is_text else _key(sample.tokens))
        return found

    def samples(
        self, tokens: Tensor, items: np.ndarray, known: Tensor | None = None
    ) -> list[Sample]:
        """Decode outputs; see ``Evaluator.scores``."""
        prefix = self.start.prefix
        if prefix is not None and tokens.shape[1] < self.space.length:
            given = prefix.to(tokens).expand(len(tokens), *prefix.shape)
            tokens = torch.cat([given, tokens], 1)
            if known is not None:
                known = torch.cat([known.new_ones(known.shape[0], len(prefix)), known], 1)
        if known is not None and self.in_order:
            tokens = fill(tokens, known, self.space, True)
        media = self._decode(tokens)
        return [
            self._sample(media[k], row, int(item), None if known is None else known[k])
            for k, (row, item) in enumerate(zip(tokens, items, strict=True))
        ]

    def _decode(self, tokens: Tensor) -> list[Any]:
        """Decode rows [n, T(, C)] one at a time, rows of equal tokens once."""
        decoded: dict[Hashable, Any] = {}
        keys = [_key(self.space.before_end(row)) for row in tokens]
        for key, row in zip(keys, tokens, strict=True):
            if key not in decoded:
                decoded[key] = self.pipe.decode(row, self.space, self.frontend)
        return [decoded[key] for key in keys]

    def _sample(self, media: Any, tokens: Tensor, item: int, known: Tensor | None) -> Sample:
        modality, plan = self.pipe.modality, self.request.items[item]
        media = self.start.overlay(item, modality.complete(media, plan.condition))
        decided = None if known is None else known.cpu()
        return Sample(media, tokens.cpu(), plan.prompt, plan.condition, modality, item, decided)

    def _attach(self, scorer: Scorer) -> Scorer:
        """Return the scorer with what it needs of the call, made once."""
        if id(scorer) not in self._attached:
            attached = scorer.attach(self.pipe, self.request)
            self._attached[id(scorer)] = scorer, attached
        return self._attached[id(scorer)][1]


def _key(tokens: Tensor) -> Hashable:
    """Return equal values for equal tokens."""
    return tuple(tokens.flatten().tolist())
