"""A target is a model with its condition and the law: all that a sampler sees of a model.
``gen.models.latent_targets`` holds those of latents.

Guidance runs both halves in one batched forward call. Rows leave the batch when they are finished
(``keep``), or become other items: ``at_most`` lets so many rows in at a time, and ``replace`` gives
the places of rows that are done to the next ones.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from gen.errors import GenError
from gen.law import Law
from gen.models.adapters import CausalModel, MaskedModel
from gen.types import TokenSpace


class Target:
    """What both kinds share. ``prompt`` long [B, P] padded on the right, ``prompt_length`` long
    [B]; ``uncond`` likewise, needed if the law is guided. Raises ``GenError`` for a space with a
    constraint if places are not filled left to right.
    """

    left_to_right: ClassVar[bool] = False

    def __init__(
        self,
        model,
        prompt: Tensor,
        space: TokenSpace,
        law: Law,
        uncond: Tensor | None = None,
        prompt_length: Tensor | None = None,
        uncond_length: Tensor | None = None,
    ):
        if law.guided and uncond is None:
            raise ValueError("a guided law needs the unconditional prompt")
        if space.constraint is not None and not self.left_to_right:
            raise GenError(
                "the token space has a constraint, which looks at the ids before a place; expected"
                " a causal model, which fills places left to right"
            )
        self.model, self.space, self.law = model, space, law
        self.device = model.device
        self.learned: dict[Any, Any] = {}

        # what samplers learned of this model and want to know next time; a pipeline hands it on
        def full(ids, n):
            return torch.full((len(ids),), ids.shape[1]) if n is None else n

        halves = [(prompt, full(prompt, prompt_length))]
        if law.guided:
            halves.append((uncond, full(uncond, uncond_length)))
        width = max(p.shape[1] for p, _ in halves)
        pad = [torch.nn.functional.pad(p, (0, width - p.shape[1])) for p, _ in halves]
        self.prompt = torch.cat(pad).to(self.device)  # [H B, P], H halves
        lengths = torch.cat([n for _, n in halves])
        self.prompt_length, self._lengths = (
            lengths.to(self.device),
            lengths.cpu().numpy(),
        )  # the host has those of all items
        self.halves = len(halves)
        self.items = self.rows = len(prompt)  # of all, and rows in the batch
        self._every = self.prompt, self.prompt_length  # of all items, those that wait included
        self._items = np.arange(self.rows)  # which of them the rows are
        self._next = self.rows
        # the law runs up to the last id that may come at all: behind it stand words of conditions
        # and the mask
        legal = space.legal[:, : space.reach].to(self.device)
        self.legal = legal[:1].expand(len(legal), -1) if space.even else legal
        self._narrow = not bool(self.legal.all())  # whether anything has to be kept out of the law

    def under(self, law: Law) -> Target:
        """A fresh target of the same model and items under another law. An unguided one drops the
        unconditional half; ``ValueError`` for a guided one where there is none."""
        fresh = type(self)(*self._made_of(law))
        fresh.at_most(self.rows)
        return fresh

    def _made_of(self, law: Law) -> tuple:
        """What another target of the same model and items is made of."""
        prompts, lengths = (x.chunk(self.halves) for x in self._every)
        uncond, uncond_length = (
            (prompts[-1], lengths[-1]) if law.guided and self.halves == 2 else (None, None)
        )
        return self.model, prompts[0], self.space, law, uncond, lengths[0], uncond_length

    @property
    def _even(self) -> bool:
        """Whether the conditions of all items have one length."""
        return bool((self._lengths == self._lengths[0]).all())

    @property
    def replaces(self) -> bool:
        """Whether rows can be replaced."""
        return False

    def at_most(self, rows: int) -> None:
        """Only so many rows at a time, the first ones first; before any call. Raises ``ValueError``
        where rows cannot be replaced."""
        if rows >= self.items:
            return
        if not self.replaces:
            keeper = type(getattr(self, "cache", self)).__name__
            raise ValueError(
                f"a {keeper} takes no calls about some of its rows; expected all items at once"
            )
        self._next = self.rows = rows
        self._items = self._items[:rows]
        self._choose()

    def replace(self, rows: Tensor, items: Tensor | None = None) -> None:
        """The given rows (bool [B]) become the next items, or those of the given numbers (long
        [n])."""
        again = rows.cpu().numpy()
        self._items = self._items.copy()
        self._items[again] = (
            range(self._next, self._next + int(again.sum()))
            if items is None
            else items.cpu().numpy()
        )
        self._next = int(self._items[again].max(initial=self._next - 1)) + 1
        self._choose()
        self._renew(again)

    def _renew(self, again: np.ndarray) -> None:
        """What is remembered of these rows (bool [B]) was another item's."""

    def _choose(self) -> None:
        """The prompts of the items that the rows are."""
        both = self._both()
        self.prompt, self.prompt_length = (x[both] for x in self._every)

    def _both(self) -> Tensor:
        """The rows' items among those of all halves, long [H B]."""
        return torch.from_numpy(self._numbers()).to(self.device)

    def _numbers(self) -> np.ndarray:
        """As ``_both``, on the host."""
        return np.concatenate([self._items + half * self.items for half in range(self.halves)])

    @property
    def length(self) -> int:
        """Positions to generate."""
        return self.space.length

    def blank(self) -> Tensor:
        """Tokens [N, T(, C)] of all items to be filled."""
        return self.space.blank(self.items, self.device)

    def keep(self, rows: Tensor) -> None:
        """Drops all rows but the given ones (bool [B])."""
        both = rows.repeat(self.halves)
        self.prompt, self.prompt_length = self.prompt[both], self.prompt_length[both]
        self._items = self._items[rows.cpu().numpy()]
        self.rows = len(self._items)

    def _law(
        self, logits: Tensor, legal: Tensor | None, law: Law | None = None, consume: bool = False
    ) -> Tensor:
        size = self.legal.shape[-1]
        logits = logits if logits.shape[-1] == size else logits[..., :size]
        cond, uncond = logits.chunk(2) if self.halves > 1 else (logits, None)
        return (law or self.law)(cond, uncond, legal, consume=consume)

    def _raw(self, logits: Tensor, legal: Tensor) -> Tensor:
        return self._law(logits, legal, Law(guidance_scale=self.law.guidance_scale))


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
            if self.looks_back
            else None
        )
        # the legal ids of the last call's positions, bool [B, L, V], if there is a history
        self.allowed: Tensor | None = None
        # for which rows the last call ran the network, bool [B], if a model can tell without it
        self.ran: Tensor | None = None
        self._fresh = np.ones(self.rows, dtype=bool)  # rows whose prompt is not in the cache
        self._waiting = True  # whether there are any
        self._shift = (self.prompt_length - 1)[
            :, None
        ]  # from places of the grid to slots of the cache
        self._brought = (
            (self._lengths - 1).reshape(self.halves, -1).sum(0)
        )  # of every item, places that its prompt brings into the cache

    @property
    def looks_back(self) -> bool:
        """Whether what may stand at a place depends on the ids before it."""
        return self.space.looks_back

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

    def predict(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, int | np.ndarray]:
        """Log-probabilities [B, L, V] of grid positions [B, L], given that ``tokens`` [B, L] stand
        one place before each (before position 0 the prompt does, whatever is given); and how many
        places of its own every row had sent through the model, one number or [B].

        A position may be repeated in a row if its token is repeated with it (padding of ragged
        windows).
        """
        width, given, fresh, keep = tokens.shape[1], positions, self._fresh, {}
        if self.history is not None:
            self._note(tokens, positions)
        if self.halves > 1:
            tokens, positions = (
                tokens.repeat(self.halves, *[1] * (tokens.ndim - 1)),
                positions.repeat(self.halves, 1),
            )
        tokens, slots = self._inputs(tokens), positions + self._shift
        waiting, places = self._waiting, width * self.halves
        # before position 0 stands each half's own prompt, which may end differently
        if (
            waiting
            or self.device.type != "cpu"
            or not (given.item() if given.numel() == 1 else given.numpy().min())
        ):
            first = self.first
            start = (positions == 0).view(*positions.shape, *[1] * (tokens.ndim - 2))
            tokens = torch.where(start, _take(first, self._shift), tokens)
        if waiting:
            if fresh.all():
                at = self._before()
                tokens, slots = torch.cat([_take(first, at), tokens], 1), torch.cat([at, slots], 1)
                keep = {"keep": width} if getattr(self.model, "keeps", False) else {}
            elif self.prompt.shape[1] > 1:
                self._fill(first, fresh)
            places = places + np.where(fresh, self._brought[self._items], 0)
            self._fresh, self._waiting = np.zeros_like(fresh), False
        out = self.model.forward(tokens, slots, self.cache, **keep)
        out = out if out.shape[1] == width else out[:, -width:]
        ran = getattr(self.cache, "ran", None)
        self.ran = None if ran is None else ran.view(self.halves, -1).any(0)
        return self._outcome(out, given), places

    def _before(self) -> Tensor:
        """Positions of the prompts without their last token, [H B, P - 1]; shorter prompts repeat
        their last."""
        at = torch.arange(self.prompt.shape[1] - 1, device=self.device).expand(len(self.prompt), -1)
        return torch.minimum(at, self.prompt_length[:, None] - 1)

    def _fill(self, first: Tensor, fresh: np.ndarray) -> None:
        """Brings the prompts of some rows into the cache, in a call of their own: the others are
        further on."""
        both = torch.from_numpy(np.tile(fresh, self.halves).nonzero()[0]).to(self.device)
        at = self._before()[both]
        self.cache.select(both)
        try:
            self.model.forward(
                _take(first[both], at),
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
        self.allowed = self.space.narrow(self.legal[positions], self.history[:, 1:], positions)
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
                " sampler whose guarantee is 'law' or 'sample'"
            )

    def keep(self, rows: Tensor) -> None:
        super().keep(rows)
        self.cache.keep(rows.repeat(self.halves))
        self._shift = (self.prompt_length - 1)[:, None]
        self._fresh = self._fresh[rows.cpu().numpy()]
        self._waiting = bool(self._fresh.any())
        if self.history is not None:
            self.history = self.history[rows]


class MaskedTarget(Target):
    """The law of every place of a partly filled canvas. The canvas stands right behind each row's
    own condition: where those are of different lengths, the shorter ones are moved to the right,
    and nothing is seen or counted in front of them.
    """

    model: MaskedModel

    @property
    def replaces(self) -> bool:
        return self._even or getattr(
            self.model, "ragged", False
        )  # else whoever comes may have a condition that does not fit in

    def predict(self, canvas: Tensor, of: Tensor | None = None) -> tuple[Tensor, int | Tensor]:
        """Canvas [B, T] -> log-probabilities [B, T, V]; and how many places of its own every row
        had computed, one number or long [B]. ``of`` long [n]: the rows whose conditions n canvases
        have, if there are others than one for each row. Raises ``GenError`` for conditions of
        different lengths where the model takes one length only."""
        prompt, pads, ragged = self._aligned()
        if of is not None:
            both = torch.cat([of + half * self.rows for half in range(self.halves)])
            prompt, pads = prompt[both], pads[both]
        canvas = canvas.repeat(self.halves, 1)
        extra, places = (), (prompt.shape[1] + canvas.shape[1]) * self.halves
        if ragged:
            places = places - pads.view(self.halves, -1).sum(0)
            column = torch.arange(prompt.shape[1], device=self.device)
            prompt = torch.where(
                column < pads[:, None], canvas[:, :1], prompt
            )  # padding may be any number; this is some id
            extra = (pads,)
        ids = torch.cat([prompt, canvas], 1)
        logits = self.model.forward(ids, canvas.shape[1], *extra)
        self._seen = logits
        return self._law(logits, self.legal if self._narrow else None), places

    def _aligned(self) -> tuple[Tensor, Tensor, bool]:
        """The conditions [H B, P] moved to the right, P the longest of them, the columns in front
        of each [H B], and whether there are any."""
        lengths = self._lengths[self._numbers()]
        width, shortest = int(lengths.max()), int(lengths.min())
        pads = width - self.prompt_length
        if not shortest and getattr(self.model, "shift", 0):
            raise GenError(
                "a condition is empty; expected at least one id, at which this model says what"
                " comes first"
            )
        if shortest == width:
            return self.prompt[:, :width], pads, False
        if not getattr(self.model, "ragged", False):
            raise GenError(
                f"the conditions have lengths from {shortest} to {width}; expected one length, all"
                " that this masked model takes"
            )
        at = torch.arange(width, device=self.device) - pads[:, None]
        return self.prompt.gather(1, at.clamp_min(0)), pads, True

    def raw(self) -> Tensor:
        """The law of the last call without temperature and filters: what the model itself holds for
        likely, guided and legal."""
        return self._raw(self._seen, self.legal)


def legal_at(legal: Tensor, positions: Tensor) -> Tensor:
    """``legal`` bool [T, V] at positions [B, L]: [B, L, V], a view where one table serves all
    places."""
    if legal.stride(0) == 0:
        return legal[0].expand(*positions.shape, -1)
    return legal[positions]


def _take(x: Tensor, index: Tensor) -> Tensor:
    """x [B, S, ...] at index [B, L] -> [B, L, ...]."""
    return x[torch.arange(len(x), device=x.device)[:, None], index]
