"""A target is a model with its condition and the law: all that a sampler sees of a model. ``gen.models.latent_targets``
holds those of latents.

Guidance runs both halves in one batched forward call. Rows leave the batch when they are finished (``keep``).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from gen.errors import GenError
from gen.law import Law
from gen.models.adapters import CausalModel, MaskedModel
from gen.types import TokenSpace


class Target:
    """What both kinds share. ``prompt`` long [B, P] padded on the right, ``prompt_length`` long [B]; ``uncond`` likewise,
    needed if the law is guided. Raises ``GenError`` for a space with a constraint if places are not filled left to right."""

    left_to_right: ClassVar[bool] = False

    def __init__(self, model, prompt: Tensor, space: TokenSpace, law: Law, uncond: Tensor | None = None,
                 prompt_length: Tensor | None = None, uncond_length: Tensor | None = None):
        if law.guided and uncond is None:
            raise ValueError("a guided law needs the unconditional prompt")
        if space.constraint is not None and not self.left_to_right:
            raise GenError("the token space has a constraint, which looks at the ids before a place; expected a causal model, which "
                           "fills places left to right")
        self.model, self.space, self.law = model, space, law
        self.device = model.device
        full = lambda ids, n: torch.full((len(ids),), ids.shape[1]) if n is None else n
        halves = [(prompt, full(prompt, prompt_length))]
        if law.guided:
            halves.append((uncond, full(uncond, uncond_length)))
        width = max(p.shape[1] for p, _ in halves)
        pad = [torch.nn.functional.pad(p, (0, width - p.shape[1])) for p, _ in halves]
        self.prompt = torch.cat(pad).to(self.device)  # [H B, P], H halves
        self.prompt_length = torch.cat([n for _, n in halves]).to(self.device)
        self.halves = len(halves)
        self.rows = len(prompt)  # rows still in the batch
        self.legal = space.legal.to(self.device)

    def under(self, law: Law) -> Target:
        """A fresh target of the same model and condition under another law. An unguided one drops the unconditional half;
        ``ValueError`` for a guided one where there is none."""
        return type(self)(*self._made_of(law))

    def _made_of(self, law: Law) -> tuple:
        """What another target of the same model and condition is made of."""
        prompts, lengths = self.prompt.chunk(self.halves), self.prompt_length.chunk(self.halves)
        uncond, uncond_length = (prompts[-1], lengths[-1]) if law.guided and self.halves == 2 else (None, None)
        return self.model, prompts[0], self.space, law, uncond, lengths[0], uncond_length

    @property
    def length(self) -> int:
        """Positions to generate."""
        return self.space.length

    def blank(self) -> Tensor:
        """Tokens [B, T(, C)] to be filled."""
        return self.space.blank(self.rows, self.device)

    def keep(self, rows: Tensor) -> None:
        """Drops all rows but the given ones (bool [B])."""
        both = rows.repeat(self.halves)
        self.prompt, self.prompt_length = self.prompt[both], self.prompt_length[both]
        self.rows = int(rows.sum())

    def _law(self, logits: Tensor, legal: Tensor, law: Law | None = None) -> Tensor:
        cond, *uncond = logits.chunk(self.halves)
        return (law or self.law)(cond, uncond[0] if uncond else None, legal)

    def _raw(self, logits: Tensor, legal: Tensor) -> Tensor:
        return self._law(logits, legal, Law(guidance_scale=self.law.guidance_scale))


class CausalTarget(Target):
    """The law of the next positions given drafts, against a cache of everything committed.

    Where what may stand at a place depends on the ids before it, they are kept beside the cache and in its way, with a slot per
    position: every call says which id stands before each of its positions, so a rejected draft is overwritten before anything
    after it is asked about again.
    """

    model: CausalModel
    left_to_right = True

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.cache = self.model.new_cache(self.prompt.shape[1] + self.length)
        # column n is the id before place n; what stands before place 0 is the prompt's and never looked at
        self.history = torch.zeros(self.rows, self.length + 1, dtype=torch.long, device=self.device) if self.space.looks_back else None
        self.allowed: Tensor | None = None  # the legal ids of the last call's positions, bool [B, L, V], if there is a history
        self.ran: Tensor | None = None  # for which rows the last call ran the network, bool [B], if a model can tell without it
        self._started = False

    def predict(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, int]:
        """Log-probabilities [B, L, V] of grid positions [B, L], given that ``tokens`` [B, L] stand one place before each
        (before position 0 the prompt does, whatever is given); and the number of places per row sent through the model.

        A position may be repeated in a row if its token is repeated with it (padding of ragged windows).
        """
        width, given = tokens.shape[1], positions
        if self.history is not None:
            self._note(tokens, positions)
        tokens, positions = self._inputs(tokens.repeat(self.halves, *[1] * (tokens.ndim - 1))), positions.repeat(self.halves, 1)
        slots = positions + self.prompt_length[:, None] - 1
        # before position 0 stands each half's own prompt, which may end differently
        start = (positions == 0).view(*positions.shape, *[1] * (tokens.ndim - 2))
        tokens = torch.where(start, _take(self.first, self.prompt_length[:, None] - 1), tokens)
        if not self._started:  # the first call brings the prompt along; shorter prompts repeat their last token
            self._started = True
            at = torch.arange(self.prompt.shape[1] - 1, device=self.device).expand(len(self.prompt), -1)
            at = torch.minimum(at, self.prompt_length[:, None] - 1)
            tokens, slots = torch.cat([_take(self.first, at), tokens], 1), torch.cat([at, slots], 1)
        out = self.model.forward(tokens, slots, self.cache)[:, -width:]
        ran = getattr(self.cache, "ran", None)
        self.ran = None if ran is None else ran.view(self.halves, -1).any(0)
        return self._outcome(out, given), tokens.shape[1] * self.halves

    @property
    def first(self) -> Tensor:
        """The prompt as the model takes it."""
        return self.prompt

    def _inputs(self, tokens: Tensor) -> Tensor:
        """Tokens as the model takes them."""
        return tokens

    def _outcome(self, out: Tensor, positions: Tensor) -> Tensor:
        """The law from what the model gave for positions [B, L]."""
        return self._law(out, self._legal(positions))

    def _note(self, tokens: Tensor, positions: Tensor) -> None:
        """Remembers the tokens [B, L] one place before positions [B, L]."""
        self.history.scatter_(1, positions, tokens)

    def _legal(self, positions: Tensor) -> Tensor:
        """What may stand at positions [B, L]: bool [B, L, V]."""
        legal = self.legal[positions]
        if self.history is not None:
            legal = self.allowed = self.space.narrow(legal, self.history[:, 1:], positions)
        return legal

    def refuse_illegal(self, ids: Tensor, positions: Tensor, new: Tensor) -> None:
        """Raises ``GenError`` for an id [B, L], where ``new`` (bool [B, L]), that may not follow those before it. ``positions``:
        of the last call. The exact samplers never commit one; one that accepts drafts by other ids' mass might."""
        if self.history is None:
            return
        wrong = new & ~self.allowed.gather(-1, ids[..., None])[..., 0]
        if bool(wrong.any()):
            row, column = wrong.nonzero()[0].tolist()
            raise GenError(f"the sampler accepted id {int(ids[row, column])} at place {int(positions[row, column])}, which the "
                           "constraint forbids there; expected a sampler whose guarantee is 'law' or 'sample'")

    def keep(self, rows: Tensor) -> None:
        super().keep(rows)
        self.cache.keep(rows.repeat(self.halves))
        if self.history is not None:
            self.history = self.history[rows]


class MaskedTarget(Target):
    """The law of every place of a partly filled canvas. The canvas stands right behind each row's own condition: where those are of different
    lengths, the shorter ones are moved to the right, and nothing is seen or counted in front of them."""

    model: MaskedModel

    def predict(self, canvas: Tensor, of: Tensor | None = None) -> tuple[Tensor, int]:
        """Canvas [B, T] -> log-probabilities [B, T, V]; and the places per row that were sent through the model. ``of`` long [n]: the
        rows whose conditions n canvases have, if there are others than one for each row. Raises ``GenError`` for conditions of different
        lengths where the model takes one length only."""
        prompt, pads = self._aligned()
        if of is not None:
            both = torch.cat([of + half * self.rows for half in range(self.halves)])
            prompt, pads = prompt[both], pads[both]
        canvas = canvas.repeat(self.halves, 1)
        extra = ()
        if bool(pads.any()):
            column = torch.arange(prompt.shape[1], device=self.device)
            prompt = torch.where(column < pads[:, None], canvas[:, :1], prompt)  # padding may be any number; this is some id
            extra = (pads,)
        ids = torch.cat([prompt, canvas], 1)
        logits = self.model.forward(ids, canvas.shape[1], *extra)
        self._seen = logits
        return self._law(logits, self.legal), ids.shape[1] * self.halves

    def _aligned(self) -> tuple[Tensor, Tensor]:
        """The conditions [H B, P] moved to the right, P the longest of them, and the columns in front of each [H B]."""
        width = int(self.prompt_length.max())
        pads = width - self.prompt_length
        shortest = width - int(pads.max())
        if not shortest and getattr(self.model, "shift", 0):
            raise GenError("a condition is empty; expected at least one id, at which this model says what comes first")
        if shortest == width:
            return self.prompt[:, :width], pads
        if not getattr(self.model, "ragged", False):
            raise GenError(f"the conditions have lengths from {shortest} to {width}; expected one length, all that this masked model takes")
        at = torch.arange(width, device=self.device) - pads[:, None]
        return self.prompt.gather(1, at.clamp_min(0)), pads

    def raw(self) -> Tensor:
        """The law of the last call without temperature and filters: what the model itself holds for likely, guided and legal."""
        return self._raw(self._seen, self.legal)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """x [B, S, ...] at index [B, L] -> [B, L, ...]."""
    return x[torch.arange(len(x), device=x.device)[:, None], index]
