"""Candidates of a search: what it looked at on the way to each output, with media on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from gen.core.stats import Candidate

if TYPE_CHECKING:  # it imports the items of an output, which has candidates
    from gen.pipeline.evaluator import RunEvaluator


@dataclass
class CandidateOutput:
    """Output, or part of one, that a search looked at.

    Attributes:
        tokens: tokens [T], or latents [T, C], with those of a given prefix.
        score: score that the search gave it; None where it gave none.
        level: number of the decision that it was a candidate of, from 0 on.
        parent: number of the candidate of the level before that it goes on from; None at level 0.
        chosen: whether it, or what came of it, is the output.
        weight: share of the answers or weight of the particle that it stands for, if any.
        label: words that a page shows beside it.
        known: decided positions, bool [T]; None where all are.
        decode: function that returns the media; it is called once, when they are first read.
    """

    tokens: Tensor
    score: float | None
    level: int
    parent: int | None
    chosen: bool
    weight: float | None
    label: str
    known: Tensor | None
    decode: Callable[[], Any]

    @cached_property
    def media(self) -> Any:
        """What the tokens decode to; undecided positions hold the model's estimate, or any allowed
        token."""
        return self.decode()

    def to_dict(self) -> dict[str, Any]:
        """Return the position in the tree, score and weight as plain data, without media."""
        found: dict[str, Any] = {
            "level": self.level,
            "parent": self.parent,
            "score": self.score,
            "chosen": self.chosen,
        }
        if self.weight is not None:
            found["weight"] = self.weight
        if self.label:
            found["label"] = self.label
        return found

    def __getstate__(self) -> dict[str, Any]:
        # a copy in another process has no models to decode with
        return {**vars(self), "media": self.media, "decode": None}


def decoded_on_demand(
    candidates: Sequence[Sequence[Candidate]] | None, evaluator: RunEvaluator | None
) -> list[list[CandidateOutput]] | None:
    """Return the candidates of each item of a run; None without a search.

    Args:
        candidates: candidates of the sampler, for each item.
        evaluator: evaluator of the run, which decodes them.
    """
    if candidates is None or evaluator is None:
        return None
    return [
        [_with_media(candidate, item, evaluator) for candidate in row]
        for item, row in enumerate(candidates)
    ]


def _with_media(candidate: Candidate, item: int, evaluator: RunEvaluator) -> CandidateOutput:
    tokens = candidate.tokens.cpu().clone()  # a view of it would keep all rows of the batch
    known = None if candidate.known is None else candidate.known.cpu().clone()
    return CandidateOutput(
        tokens,
        candidate.score,
        candidate.level,
        candidate.parent,
        candidate.chosen,
        candidate.weight,
        candidate.label,
        known,
        partial(_media_of, evaluator, tokens, item, known),
    )


def _media_of(evaluator: RunEvaluator, tokens: Tensor, item: int, known: Tensor | None) -> Any:
    """Decode one candidate alone, so that its media do not depend on a batch."""
    tokens = tokens.to(evaluator.pipe.device)
    rows = None if known is None else known[None].to(tokens.device)
    return evaluator.samples(tokens[None], np.array([item]), rows)[0].media
