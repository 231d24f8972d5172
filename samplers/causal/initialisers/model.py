"""Drafts by a draft model, which continues the iterate and corrects it (``iterated``).

Its cache has a slot per position. The first forward pass of a round brings along what was committed
since the round before. The iteration begins with uniform tokens, or with those of a table
(``model_table``), and has ``draft_rounds`` forward passes at most.

The model is the one of a drafter (``drafter``): a small one, or some of the target's own layers
with what was trained for the others.

Guarantee: that of the coupling.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from torch import Tensor

from gen.core.registry import register, registry
from gen.core.sampling_params import SamplingParams
from gen.models.targets.causal import CausalTarget
from gen.samplers.causal.drafters.model import require_same_tokens, trained_sampling
from gen.samplers.causal.initialisers.base import Entering, Initialiser
from gen.samplers.causal.initialisers.copies import Uniform
from gen.samplers.causal.initialisers.iterated import IteratedInitialiser
from gen.samplers.causal.initialisers.table import TableInitialiser
from gen.samplers.engine.host import to_device
from gen.samplers.engine.rows import RowState

UNFILTERED = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


@register("initialiser", "model")
class ModelInitialiser(IteratedInitialiser):
    """A draft model continues the iterate and corrects it, from uniform tokens on."""

    needs_draft_model = True
    # the draft model was asked for positions up to this one given committed tokens, int64 [b]
    known = RowState(start=-1)

    def __init__(
        self,
        draft: CausalTarget,
        guess: Initialiser,
        rounds: int | None,
        redrafts: bool,
        filters: SamplingParams | None = None,
        corrects: bool = True,
    ):
        super().__init__(draft.space, guess, rounds, redrafts, filters, corrects)
        self.draft, self.targets = draft, (draft,)
        self.num_passes = np.zeros(draft.items, dtype=np.int64)
        self.known = np.full(draft.rows, -1)

    @classmethod
    def make(cls, sampler, target, draft):
        source = registry.get("drafter", sampler.drafter)
        draft = require_same_tokens(target, source.draft_of(sampler, target, draft))
        filtered, filters = trained_sampling(target, draft), None
        sampling = filtered
        if sampler.corrects:  # a filter would leave nothing to compare outside of it
            sampling = dataclasses.replace(filtered, **UNFILTERED)
        if sampling != filtered:
            filters = dataclasses.replace(filtered, temperature=1.0, guidance_scale=1.0)
        guess, rounds = cls.first_tokens(sampler, target), sampler.draft_rounds
        of = draft.with_params(sampling)
        return cls(of, guess, rounds, sampler.redrafts, filters, sampler.corrects)

    @classmethod
    def first_tokens(cls, sampler, target) -> Initialiser:
        """Make the initialiser that the iteration begins with."""
        return Uniform()

    @property
    def nfe(self) -> list[int]:
        return self.num_passes.tolist()

    def predict(self, entering: Entering, canvas: Tensor, is_first: bool) -> Tensor:
        n = entering.active.shape[1]
        if not is_first:
            at = entering.step.positions[:, entering.first : entering.first + n]
            return self.draft.predict(canvas.gather(1, (at - 1).clamp_min(0)), at).logprobs
        at, column = self._span(entering)
        q = self.draft.predict(canvas.gather(1, (at - 1).clamp_min(0)), at).logprobs
        return q.gather(1, column[..., None].expand(-1, -1, q.shape[-1]))

    def count(self, entering: Entering, passes: np.ndarray) -> None:
        np.add.at(self.num_passes, entering.step.items, passes)
        self.known = entering.step.starts.copy()

    def _span(self, entering: Entering) -> tuple[Tensor, Tensor]:
        """List the positions that the draft model is first asked for, [b, w], from the first one
        that it has not seen; and where among them the columns are, long [b, n].

        Shorter rows repeat their first position.
        """
        step, n = entering.step, entering.active.shape[1]
        first, last = self.known + 1, step.starts + entering.ends - 1
        width = int((last - first).max()) + 1
        at = np.maximum(last[:, None] - np.arange(width - 1, -1, -1), first[:, None])
        offset = step.starts + entering.first - last + width - 1
        column = np.clip(offset[:, None] + np.arange(n), 0, width - 1)
        return to_device(at, entering.active.device), to_device(column, entering.active.device)


@register("initialiser", "model_table")
class ModelTableInitialiser(ModelInitialiser):
    """A draft model continues the iterate and corrects it, from the tokens of a table on."""

    has_table = True

    @classmethod
    def first_tokens(cls, sampler, target) -> Initialiser:
        return TableInitialiser.make(dataclasses.replace(sampler, redraft=False), target, None)
