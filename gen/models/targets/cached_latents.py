"""Target of masked models of latents with a key-value cache of encoder and decoder (``partial``).

The encoder has keys of known positions alone, each from the pass that computed it first as a known
one; the decoder has keys of all positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gen.models.adapters.protocols import PartialLatentModel
from gen.models.targets.base import StepOutput
from gen.models.targets.latent import MaskedLatentTarget
from gen.models.targets.partial import PartialTarget, Policy


class CachedLatentTarget(PartialTarget, MaskedLatentTarget):
    """Masked target of latents that computes what its policy decides."""

    model: PartialLatentModel  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, *args, policy: Policy, **kwargs):
        super().__init__(*args, **kwargs)
        prefix = self.model.prefix_length
        self._begin(policy, prefix, prefix + self.length)

    def predict(self, canvas: Tensor) -> StepOutput:
        """Run the forward passes that were planned for canvases [B, T, C]."""
        self._require_one_length()
        fresh, num_computed, num_positions = self._run(canvas)
        self.num_known = None
        outputs = self._state.outputs
        assert outputs is not None, "a row computes something in every forward pass"
        pairs = self._pair(outputs.flatten(0, 1))
        return StepOutput(pairs, num_computed, num_positions, fresh=fresh)

    def _columns(self, canvas: Tensor) -> Tensor:
        known = (~self.space.is_masked(canvas)).long()
        return torch.nn.functional.pad(known, (self._prefix, 0))

    def _forward(
        self, rows: Tensor, compute: Tensor, attend: Tensor, canvas: Tensor, fresh: Tensor
    ) -> tuple[Tensor, int]:
        prefix, branches = self._prefix, self.branches
        branch_rows = torch.cat([rows + branch * self.rows for branch in range(branches)])
        encoded = attend & (self._state.tokens[rows] == 1)
        encoded[:, :prefix] = attend[:, :prefix]
        more = (
            {} if self.num_known is None else {"num_known": self.num_known[rows].repeat(branches)}
        )
        z = self.model.part(
            self.prompt[branch_rows],
            canvas.repeat(branches, 1, 1),
            compute.repeat(branches, 1),
            encoded.repeat(branches, 1),
            attend.repeat(branches, 1),
            self.cache,
            None if len(rows) == self.rows else branch_rows,
            **more,
        )
        here = compute[:, prefix:]
        stored = self._outputs(z).flatten(0, 1)
        now = here.repeat(branches, 1)[..., None]
        stored[branch_rows] = torch.where(now, z, stored[branch_rows])
        fresh[rows] = here
        # the condition counts as its words, however many positions the model has for them
        words = compute[:, :prefix].any(1) * self.prompt.shape[1]
        num_computed = (here.sum(1) + words) * branches
        return num_computed, int(num_computed.max())
