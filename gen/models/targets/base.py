"""A target is a model with its condition and the law: all that a sampler sees of a model.
``gen.models.targets.latent`` holds those of latents.

Guidance runs both halves in one batched forward call. Rows leave the batch when they are finished
(``keep``), or become other items: ``at_most`` lets so many rows in at a time, and ``replace`` gives
the places of rows that are done to the next ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from gen.core.errors import GenError
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace


@dataclass
class StepOutput:
    """Outcome of one forward pass of a target for B rows.

    Attributes:
        logprobs: final log-probabilities [B, L, V] of the positions asked for; of latents their
            conditioning vectors [B, L, H, D].
        num_computed_tokens: positions of its own that each row sent through the model: one number
            for all rows, or int64 [B], an array or a tensor.
        ran_network: bool [B], the rows whose network ran; None where it ran for all of them.
        hidden_states: hidden states by the name of the layer, [B, L, D] each; None unless asked
            for.
        raw: gives the log-probabilities [B, L, V] before temperature and filters; None where the
            target cannot.
        fresh: bool [B, L], the positions that this forward pass computed; None where it computed
            all of them.
    """

    logprobs: Tensor
    num_computed_tokens: int | np.ndarray | Tensor
    ran_network: Tensor | None = None
    hidden_states: dict[str, Tensor] | None = None
    raw: Callable[[], Tensor] | None = None
    fresh: Tensor | None = None


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
        sampling: SamplingParams,
        uncond: Tensor | None = None,
        prompt_length: Tensor | None = None,
        uncond_length: Tensor | None = None,
    ):
        if sampling.guided and uncond is None:
            raise ValueError("a guided law needs the unconditional prompt")
        if space.constraint is not None and not self.left_to_right:
            raise GenError(
                "the token space has a constraint, which looks at the ids before a place; expected"
                " a causal model, which fills places left to right"
            )
        self.model, self.space, self.sampling = model, space, sampling
        self.device = model.device
        self.learned: dict[Any, Any] = {}

        # what samplers learned of this model and want to know next time; a pipeline hands it on
        def full(ids, n):
            return torch.full((len(ids),), ids.shape[1]) if n is None else n

        branches = [(prompt, full(prompt, prompt_length))]
        if sampling.guided:
            branches.append((uncond, full(uncond, uncond_length)))
        width = max(p.shape[1] for p, _ in branches)
        pad = [torch.nn.functional.pad(p, (0, width - p.shape[1])) for p, _ in branches]
        self.prompt = torch.cat(pad).to(self.device)  # [H B, P], H halves
        lengths = torch.cat([n for _, n in branches])
        self.prompt_length, self._lengths = (
            lengths.to(self.device),
            lengths.cpu().numpy(),
        )  # the host has those of all items
        self.branches = len(branches)
        self.items = self.rows = len(prompt)  # of all, and rows in the batch
        self._every = self.prompt, self.prompt_length  # of all items, those that wait included
        self._items = np.arange(self.rows)  # which of them the rows are
        self._next = self.rows
        # the law runs up to the last id that may come at all: behind it stand words of conditions
        # and the mask
        legal = space.legal[:, : space.num_logits].to(self.device)
        self.legal = legal[:1].expand(len(legal), -1) if space.is_uniform else legal
        self._narrow = not bool(self.legal.all())  # whether anything has to be kept out of the law

    def with_params(self, sampling: SamplingParams) -> Target:
        """A fresh target of the same model and items under another law. An unguided one drops the
        unconditional half; ``ValueError`` for a guided one where there is none."""
        fresh = type(self)(*self._init_args(sampling))
        fresh.at_most(self.rows)
        return fresh

    def _init_args(self, sampling: SamplingParams) -> tuple:
        """What another target of the same model and items is made of."""
        prompts, lengths = (x.chunk(self.branches) for x in self._every)
        uncond, uncond_length = (
            (prompts[-1], lengths[-1]) if sampling.guided and self.branches == 2 else (None, None)
        )
        return self.model, prompts[0], self.space, sampling, uncond, lengths[0], uncond_length

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
        return np.concatenate([self._items + half * self.items for half in range(self.branches)])

    @property
    def length(self) -> int:
        """Positions to generate."""
        return self.space.length

    @property
    def num_prompt_tokens(self) -> Tensor:
        """Tokens of each row's prompt, without the unconditional one, long [B]."""
        return self.prompt_length[: self.rows]

    def prepare(self, step: Any) -> None:
        """Plan the next forward pass of a masked loop; without a cache there is nothing to plan.

        Args:
            step: ``MaskedStep`` with its canvas view and, where the block schedule reads no
                log-probabilities, its block progress.
        """

    def blank(self) -> Tensor:
        """Tokens [N, T(, C)] of all items to be filled."""
        return self.space.blank(self.items, self.device)

    def keep(self, rows: Tensor) -> None:
        """Drops all rows but the given ones (bool [B])."""
        both = rows.repeat(self.branches)
        self.prompt, self.prompt_length = self.prompt[both], self.prompt_length[both]
        self._items = self._items[rows.cpu().numpy()]
        self.rows = len(self._items)

    def _law(
        self,
        logits: Tensor,
        legal: Tensor | None,
        sampling: SamplingParams | None = None,
        consume: bool = False,
    ) -> Tensor:
        size = self.legal.shape[-1]
        logits = logits if logits.shape[-1] == size else logits[..., :size]
        cond, uncond = logits.chunk(2) if self.branches > 1 else (logits, None)
        return (sampling or self.sampling)(cond, uncond, legal, consume=consume)

    def _raw(self, logits: Tensor, legal: Tensor) -> Tensor:
        return self._law(logits, legal, SamplingParams(guidance_scale=self.sampling.guidance_scale))


def legal_at(legal: Tensor, positions: Tensor) -> Tensor:
    """``legal`` bool [T, V] at positions [B, L]: [B, L, V], a view where one table serves all
    places."""
    if legal.stride(0) == 0:
        return legal[0].expand(*positions.shape, -1)
    return legal[positions]


def take(x: Tensor, index: Tensor) -> Tensor:
    """x [B, S, ...] at index [B, L] -> [B, L, ...]."""
    return x[torch.arange(len(x), device=x.device)[:, None], index]
