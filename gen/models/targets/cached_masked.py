"""Target of masked models with a key-value cache: a forward pass computes some positions and
attends to the stored keys and values of others, as a policy decides (``partial``).

Keys have one slot per absolute position (``gen.models.adapters.slot_cache``) and are computed with
explicit position ids, so what is stored does not move. The distribution of a position that is not
computed is the one it had when it was computed last, or uniform over all legal tokens if it never
was. Inside a forward pass shorter rows repeat one of their positions, which changes nothing. A
causal model's cache is exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gen.core.errors import GenError
from gen.models.adapters.protocols import CacheableModel, PartialLatentModel, PartialModel
from gen.models.targets.base import StepOutput
from gen.models.targets.cached_latents import CachedLatentTarget
from gen.models.targets.latent import MaskedLatentTarget
from gen.models.targets.masked import MaskedTarget
from gen.models.targets.partial import PartialTarget, Policy


class CachedMaskedTarget(PartialTarget, MaskedTarget):
    """Masked target of token ids that computes what its policy decides.

    A ``predict`` with ``rows`` neither reads the cache nor changes it.
    """

    model: CacheableModel  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, *args, policy: Policy, **kwargs):
        super().__init__(*args, **kwargs)
        # of all items: columns keep their meaning, whatever items the rows hold
        self._all_prompts = self._aligned()[:2]
        # prompts of the rows, and the column of each prompt's first token, [H B]
        self._prompts, self._first_column = self._all_prompts
        prefix = self._prompts.shape[1]
        self._begin(policy, prefix, prefix + self.length)

    @property
    def captures(self) -> bool:
        """False: which positions a pass computes depends on values."""
        return False

    def _follow_items(self) -> None:
        super()._follow_items()
        items = torch.from_numpy(self.prompts.branch_items()).to(self.device)
        self._prompts, self._first_column = (x[items] for x in self._all_prompts)

    def keep(self, rows: Tensor) -> None:
        """See ``Target.keep``."""
        branch_rows = self.prompts.branch_rows(rows)
        super().keep(rows)
        self._prompts = self._prompts[branch_rows]
        self._first_column = self._first_column[branch_rows]

    def predict(self, canvas: Tensor, rows: Tensor | None = None) -> StepOutput:
        """Run the forward passes that were planned.

        Args:
            canvas: tokens long [B, T].
            rows: as in ``MaskedTarget.predict``; with it the cache is left alone.

        Returns:
            Log-probabilities [B, T, V] of all positions, and which of them are fresh.
        """
        if rows is not None:
            return super().predict(canvas, rows)
        fresh, num_computed, num_positions = self._run(canvas)
        outputs = self._state.outputs
        assert outputs is not None, "a row computes something in every forward pass"
        logits, legal = outputs.flatten(0, 1), self._allowed(canvas)
        return StepOutput(
            self._logprobs(logits, legal),
            num_computed,
            num_positions,
            raw=lambda: self._raw(logits, legal),
            fresh=fresh,
            under=self._under(logits),
        )

    def _columns(self, canvas: Tensor) -> Tensor:
        return torch.nn.functional.pad(canvas, (self._prefix, 0))

    def _computed(self, compute: Tensor, canvas: Tensor) -> Tensor:
        if not self.model.shift:
            return compute
        # the logits of a masked position come out one position before it
        masked = compute[:, self._prefix :] & self.space.is_masked(canvas)
        compute = compute.clone()
        compute[:, self._prefix - 1 : -1] |= masked
        return compute

    def _forward(
        self, rows: Tensor, compute: Tensor, attend: Tensor, canvas: Tensor, fresh: Tensor
    ) -> tuple[Tensor, int]:
        prefix, shift, branches = self._prefix, self.model.shift, self.branches
        branch_rows = torch.cat([rows + branch * self.rows for branch in range(branches)])
        tokens = torch.cat([self._prompts[branch_rows], canvas.repeat(branches, 1)], 1)
        start = self._first_column[branch_rows][:, None]
        column = torch.arange(tokens.shape[1], device=self.device)
        todo = compute.repeat(branches, 1) & (column >= start)
        width = int(todo.sum(1).max())
        # computed columns in their order, at the right end
        columns = todo.long().argsort(dim=1, stable=True)[:, -width:]
        real = todo.gather(1, columns)
        columns = torch.where(real, columns, columns[:, -1:])
        exists = column + start < len(column)
        slot = (column + start).clamp_max(len(column) - 1)
        seen = attend.repeat(branches, 1).gather(1, slot) & exists
        position = columns - prefix + shift
        real &= position >= 0
        keep = int(real.sum(1).max())
        some = None if len(rows) == self.rows else branch_rows
        logits = self.model.part(
            tokens.gather(1, columns), columns - start, seen, self.cache, keep, some
        )
        position, real = position[:, -keep:], (real & (position < canvas.shape[1]))[:, -keep:]
        stored = self._outputs(logits)
        row, slot = real.nonzero().unbind(1)
        stored.flatten(0, 1)[branch_rows[row], position[row, slot]] = logits[row, slot]
        fresh[branch_rows[row] % self.rows, position[row, slot]] = True
        return todo.sum(1).view(branches, -1).sum(0), width * branches


def cached(target, policy: Policy) -> PartialTarget:
    """Make a fresh target of the same model, prompts and sampling parameters with a cache.

    Args:
        target: masked target of token ids or latents whose model can compute some of its positions
            (``CacheableModel``, ``PartialLatentModel``).
        policy: decides what every forward pass computes.

    Raises:
        GenError: the target is another one.
    """
    if isinstance(target, MaskedTarget) and isinstance(target.model, PartialModel):
        return CachedMaskedTarget.made_of(target, policy, target.sampling)
    if isinstance(target, MaskedLatentTarget) and isinstance(target.model, PartialLatentModel):
        return CachedLatentTarget.made_of(target, policy, target.sampling)
    raise GenError(
        f"{type(target).__name__} of {type(target.model).__name__} keeps no keys and values"
        " between forward passes; expected a masked language model, or no cache"
    )
