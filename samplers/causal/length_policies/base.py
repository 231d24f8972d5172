"""Length policy: how many tokens a draft model drafts in a round.

``@register("length_policy", name, params=...)`` on a subclass in one file is all that a new one
takes; the sampler ``speculative`` then accepts ``policy: name``, and the parameters of the policy.

Guarantee: no policy changes the distribution of what is committed. Whether a token is drafted
depends on the drafts before it and on rounds that are over, never on itself: the last draft is
submitted, doubtful or not. Dropping it once its value is known would bias the distribution.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from gen.models.targets.causal import CausalTarget
from gen.samplers.engine.rows import RowOwner, RowState


class LengthPolicy(RowOwner):
    """Number of drafts of each row.

    Args:
        rows: rows of the batch.
        length: the sampler's ``num_speculative_tokens``.
        params: parameters of the policy, those that it was registered with.

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
        """Learn which models draft and verify, before the first step.

        Raises:
            GenError: the policy needs weights that are not these models'.
        """

    def read(self, states: dict[str, Tensor]) -> None:
        """Read the draft model's hidden states [b, n, D] by layer, the last of which the newest
        draft's distribution comes from; it is called before ``stop`` where the policy asked for
        some."""

    def begin(self) -> None:
        """Begin a step: no row has a draft yet."""

    def stop(self, mass: Tensor, logprobs: Tensor) -> Tensor | None:
        """Choose the rows that draft no more in this step; asked where ``stops_early``.

        Args:
            mass: probability of every row's newest draft, [b].
            logprobs: log-probabilities that it was drawn from, [b, V].

        Returns:
            bool [b]; None where nothing is a reason to stop, which spares the host a wait.
        """
        return None

    def observe(self, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Learn the outcome of a step, each int64 [b]."""

    def over(self, width: int, starts: np.ndarray, tokens: np.ndarray) -> None:
        """Learn how long a step took, for policies that look at clocks.

        Args:
            width: positions of the step.
            starts: committed tokens of the rows before it, int64 [b].
            tokens: tokens that they committed in it, int64 [b].
        """
