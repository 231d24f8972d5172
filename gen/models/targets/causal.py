"""CausalTarget."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gen.core.errors import GenError
from gen.models.adapters.protocols import CausalModel
from gen.models.targets.base import StepOutput, Target, legal_at, take


class CausalTarget(Target):
    """The law of the next positions given drafts, against a cache of everything committed.

    Where what may stand at a place depends on the ids before it, they are kept beside the cache and
    in its way, with a slot per position: every call says which id stands before each of its
    positions, so a rejected draft is overwritten before anything after it is asked about again.
    """

    model: CausalModel
    left_to_right = True

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.cache = self.model.new_cache(self.prompt.shape[1] + self.length)
        # column n is the id before place n; what stands before place 0 is the prompt's and never
        # looked at
        self.history = (
            torch.zeros(self.rows, self.length + 1, dtype=torch.long, device=self.device)
            if self.is_history_dependent
            else None
        )
        # the legal ids of the last call's positions, bool [B, L, V], if there is a history
        self.allowed: Tensor | None = None
        self._fresh = np.ones(self.rows, dtype=bool)  # rows whose prompt is not in the cache
        self._waiting = True  # whether there are any
        self._shift = (self.prompt_length - 1)[
            :, None
        ]  # from places of the grid to slots of the cache
        self._brought = (
            (self._lengths - 1).reshape(self.branches, -1).sum(0)
        )  # of every item, places that its prompt brings into the cache

    @property
    def is_history_dependent(self) -> bool:
        """Whether what may stand at a place depends on the ids before it."""
        return self.space.is_history_dependent

    @property
    def replaces(self) -> bool:
        """Whether rows can be replaced: the cache has to take calls about some of its rows."""
        return getattr(self.cache, "select", None) is not None

    def at_most(self, rows: int) -> None:
        super().at_most(rows)
        self._fresh = self._fresh[: self.rows]
        self.history = None if self.history is None else self.history[: self.rows]

    def _choose(self) -> None:
        super()._choose()
        self._shift = (self.prompt_length - 1)[:, None]

    def _renew(self, again: np.ndarray) -> None:
        self._fresh, self._waiting = self._fresh | again, True

    def predict(self, tokens: Tensor, positions: Tensor) -> StepOutput:
        """Compute the distributions of grid positions [B, L].

        A position may be repeated in a row if its token is repeated with it, which pads ragged
        windows.

        Args:
            tokens: the token one position before each, [B, L(, C)]; before position 0 stands the
                prompt, whatever is passed.
            positions: long [B, L].
        """
        width, given, fresh, keep = tokens.shape[1], positions, self._fresh, {}
        if self.history is not None:
            self._note(tokens, positions)
        if self.branches > 1:
            tokens, positions = (
                tokens.repeat(self.branches, *[1] * (tokens.ndim - 1)),
                positions.repeat(self.branches, 1),
            )
        tokens, slots = self._inputs(tokens), positions + self._shift
        waiting, places = self._waiting, width * self.branches
        # before position 0 stands each half's own prompt, which may end differently
        if (
            waiting
            or self.device.type != "cpu"
            or not (given.item() if given.numel() == 1 else given.numpy().min())
        ):
            first = self.first
            start = (positions == 0).view(*positions.shape, *[1] * (tokens.ndim - 2))
            tokens = torch.where(start, take(first, self._shift), tokens)
        if waiting:
            if fresh.all():
                at = self._before()
                tokens, slots = torch.cat([take(first, at), tokens], 1), torch.cat([at, slots], 1)
                keep = {"keep": width} if getattr(self.model, "keeps", False) else {}
            elif self.prompt.shape[1] > 1:
                self._fill(first, fresh)
            places = places + np.where(fresh, self._brought[self._items], 0)
            self._fresh, self._waiting = np.zeros_like(fresh), False
        out = self.model.forward(tokens, slots, self.cache, **keep)
        out = out if out.shape[1] == width else out[:, -width:]
        ran = getattr(self.cache, "ran", None)
        ran = None if ran is None else ran.view(self.branches, -1).any(0)
        return StepOutput(self._outcome(out, given), places, ran)

    def _before(self) -> Tensor:
        """Positions of the prompts without their last token, [H B, P - 1]; shorter prompts repeat
        their last."""
        at = torch.arange(self.prompt.shape[1] - 1, device=self.device).expand(len(self.prompt), -1)
        return torch.minimum(at, self.prompt_length[:, None] - 1)

    def _fill(self, first: Tensor, fresh: np.ndarray) -> None:
        """Brings the prompts of some rows into the cache, in a call of their own: the others are
        further on."""
        both = torch.from_numpy(np.tile(fresh, self.branches).nonzero()[0]).to(self.device)
        at = self._before()[both]
        self.cache.select(both)
        try:
            self.model.forward(
                take(first[both], at),
                at,
                self.cache,
                **({"keep": 1} if getattr(self.model, "keeps", False) else {}),
            )
        finally:
            self.cache.select(None)

    @property
    def first(self) -> Tensor:
        """The prompt as the model takes it."""
        return self.prompt

    def _inputs(self, tokens: Tensor) -> Tensor:
        """Tokens as the model takes them."""
        return tokens

    def _outcome(self, out: Tensor, positions: Tensor) -> Tensor:
        """The law from what the model gave for positions [B, L]."""
        return self._law(out, self._legal(positions), consume=True)

    def _note(self, tokens: Tensor, positions: Tensor) -> None:
        """Remembers the tokens [B, L] one place before positions [B, L]."""
        self.history.scatter_(1, positions, tokens)

    def _legal(self, positions: Tensor) -> Tensor | None:
        """What may stand at positions [B, L]: bool [B, L, V]; None where that is everything."""
        if self.history is None:
            return legal_at(self.legal, positions) if self._narrow else None
        self.allowed = self.space.apply_constraint(
            self.legal[positions], self.history[:, 1:], positions
        )
        return self.allowed

    def refuse_illegal(self, ids: Tensor, positions: Tensor, new: Tensor) -> None:
        """Raises ``GenError`` for an id [B, L], where ``new`` (bool [B, L]), that may not follow
        those before it. ``positions``: of the last call, of a space that looks back. The exact
        samplers never commit one; one that accepts drafts by other ids' mass might.
        """
        wrong = new & ~self.allowed.gather(-1, ids[..., None])[..., 0]
        if bool(wrong.any()):
            row, column = wrong.nonzero()[0].tolist()
            raise GenError(
                f"the sampler accepted id {int(ids[row, column])} at place"
                f" {int(positions[row, column])}, which the constraint forbids there; expected a"
                " sampler whose guarantee is 'sampling' or 'sample'"
            )

    def keep(self, rows: Tensor) -> None:
        super().keep(rows)
        self.cache.keep(rows.repeat(self.branches))
        self._shift = (self.prompt_length - 1)[:, None]
        self._fresh = self._fresh[rows.cpu().numpy()]
        self._waiting = bool(self._fresh.any())
        if self.history is not None:
            self.history = self.history[rows]
