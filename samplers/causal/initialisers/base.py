"""Interface of initialisers: what they are given and what they return.

``@register("initialiser", name)`` on a subclass in one file is all that a new one takes; the
samplers of Jacobi drafts then accept ``init: name``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from gen.models.targets.causal import CausalTarget
from gen.samplers.engine.draft import Verdict
from gen.samplers.engine.rows import RowOwner
from gen.samplers.engine.step_context import CausalStep


@dataclass
class Entering:
    """Positions that enter the window in a step: n columns of b rows.

    Attributes:
        step: context of the step.
        first: column of the step that the n columns begin with.
        begins: column of each row's first position that enters, int64 [b], on the host; rows
            differ, and ``first`` is the least of them.
        ends: column behind each row's last position that enters, int64 [b], on the host.
        active: columns that really enter, bool [b, n].
        legal: allowed tokens, bool [b, n, V].
        compares: whether the distribution of a draft is read (``Filled.logq``).
        committed: committed tokens, [b, T].
        canvas: makes committed tokens and drafts so far, a fresh [b, T].
        logp: distributions of the target that the drafts that are carried on come from, [b, n, V];
            None unless the initialiser ``corrects``.
    """

    step: CausalStep
    first: int
    begins: np.ndarray
    ends: np.ndarray
    active: Tensor
    legal: Tensor
    compares: bool
    committed: Tensor
    canvas: Callable[[], Tensor]
    logp: Tensor | None = None


@dataclass
class Filled:
    """Drafts of the positions that enter.

    Attributes:
        tokens: drafts [b, n]; anything in columns that do not enter.
        logq: log-probabilities [b, n, V] that they were drawn from, or one [1, 1, V]; None of
            drafts that were chosen, and where nobody compares.
        guessed: whether no model made them.
        failed: drafts whose model gave no distribution, bool [b, n]; None without a draft model.
    """

    tokens: Tensor
    logq: Tensor | None = None
    failed: Tensor | None = None
    guessed: bool = True


class Initialiser(RowOwner):
    """Rule for the first drafts of positions.

    Attributes:
        needs_draft_model: whether it asks a draft model, the sampler's or one of the target's own
            layers.
        has_table: whether it reads a context table.
        targets: draft models of the same items, whose rows follow the batch.
        redrafts: whether it drafts the positions again that are carried on; all columns are then
            ``active``.
        corrects: whether it does so from what the target said of them (``Entering.logp``).
    """

    redrafts: bool = False
    corrects: bool = False
    needs_draft_model: ClassVar[bool] = False
    has_table: ClassVar[bool] = False
    targets: tuple[CausalTarget, ...] = ()

    @classmethod
    def make(cls, sampler: Any, target: CausalTarget, draft: CausalTarget | None) -> Initialiser:
        """Make the initialiser of one call.

        Args:
            sampler: the sampler, with its parameters.
            target: the model.
            draft: target of the draft model, where one is needed.
        """
        raise NotImplementedError

    @property
    def nfe(self) -> list[int] | None:
        """Forward passes of the draft model, of every item; None without a draft model."""
        return None

    def fill(self, entering: Entering) -> Filled:
        """Draft the positions that enter."""
        raise NotImplementedError

    def accept(self, step: CausalStep, verdict: Verdict) -> None:
        """Read what the coupling made of the step; what follows an eos token is not committed."""
