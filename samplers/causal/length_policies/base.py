"""Base of length policies, and the one that follows a clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from torch import Tensor

from gen.samplers.engine.rows import RowOwner, RowState

if TYPE_CHECKING:
    from gen.models.targets.causal import CausalTarget
    from gen.samplers.engine.window import AutoWidth


class LengthPolicy(RowOwner):
    """Number of drafts of each of some rows. ``length``: the sampler's ``num_speculative_tokens``;
    ``params``: parameters of the policy, those that it was registered with.

    Attributes:
        lengths: drafts of each row in the next step at most, int64 [b], on the host.
        needs_probability: whether it reads probabilities of drafts, which latents do not have.
        needs_same_tokens: whether other rows of the batch decide about a row's drafts, so that a
            seed means one result only where drafts do not change the tokens.
        needs_weights: whether it reads trained weights.
        stops_early: whether ``stop`` may choose rows. Others are not asked, which spares them the
            probability of the draft and the host a wait.
    """

    lengths = RowState(start=lambda policy: policy.length)
    needs_probability: ClassVar[bool] = False
    needs_same_tokens: ClassVar[bool] = False
    needs_weights: ClassVar[bool] = False
    stops_early: bool = False

    def __init__(self, rows: int, length: int, params: Any = None):
        self.length, self.params = length, params
        self.lengths = np.full(rows, length)

    @property
    def most(self) -> int:
        """Most drafts of any row in the next step."""
        return int(self.lengths.max()) if len(self.lengths) else 0

    def attach(self, target: CausalTarget, draft: CausalTarget) -> None:
        """Learn which models draft and verify, before the first step. Raises ``GenError``: the
        policy needs weights that are not these models'."""

    def read(self, states: dict[str, Tensor]) -> None:
        """Read the draft model's hidden states [b, n, D] by layer, the last of which the newest
        draft's distribution comes from; it is called before ``stop`` where the policy asked for
        some."""

    def begin(self) -> None:
        """Begin a step: no row has a draft yet."""

    def stop(self, mass: Tensor, logprobs: Tensor) -> Tensor | None:
        """Choose the rows that draft no more in this step, bool [b], by the probability ``mass``
        [b] of each newest draft and the log-probabilities [b, V] that it was drawn from; asked
        where ``stops_early``. None: nothing is a reason to stop, which spares the host a wait."""
        return None

    def observe(self, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Learn the outcome of a step, each int64 [b]."""

    def over(self, width: int, starts: np.ndarray, tokens: np.ndarray) -> None:
        """Learn how long a step of ``width`` positions took, for policies that look at clocks: the
        rows had ``starts`` tokens before it and committed ``tokens`` in it, int64 [b] each."""


class AutoLength(LengthPolicy):
    """Draft length one below the positions of a step, of which ``auto`` knows how many pay; none at
    all if drafting does not."""

    def __init__(self, auto: AutoWidth, rows: int):
        super().__init__(rows, auto.width - 1)
        self.auto = auto

    def over(self, width, starts, tokens):
        self.auto.observe(width, starts, tokens)
        self.length = self.auto.width - 1
        self.lengths = np.full_like(self.lengths, self.length)
