"""Models that read and write whole frames of codes, through the causal protocol, which asks for one
code at a time.

Places stand in time-major order: place n = t Q + q is stream q of step t. The network takes one
vector per step, made of all Q codes of the step before, and gives a state h_t that depends on
nothing later:

    h_t = f(prefix, e(c_0), ..., e(c_{t-1}))        law of place (t, q) = g_q(h_t, c_{t,0}, ...,
                                                    c_{t,q-1})

Parallel streams (MusicGen) do not look at the codes of their own step, a depth decoder (CSM) does.
A call says which codes stand before the places that it asks about. The adapter keeps what was said
by place, and the states of all steps whose inputs have not changed since; a code of step t that is
another one than before makes the states of all later steps void. So the network runs over new steps
only, once per call at most, and not at all for the other Q - 1 places of a step: plain
autoregression over T Q places runs it T times.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from gen.models.adapters.language_models import ModelAdapter
from gen.models.adapters.slot_cache import SlotCache


class FrameCache:
    """What an adapter remembers of B rows: ``said`` long [B, places], ``states`` [B, steps, D], of
    which the first ``known`` long [B] hold, ``prompt`` long [B], the ids of the condition,
    ``prefix`` long [B], the inputs of the network before the first frame, and its own ``slots``.
    ``rows``: whatever else has one row per row, by name. ``ran`` bool [B]: which rows the last call
    ran the network for."""

    def __init__(self, slots: int):
        self.positions = slots
        self.said: Tensor | None = None
        self.states: Tensor | None = None
        self.slots: SlotCache | None = None
        self.ran: Tensor | None = None
        self.rows: dict[str, Tensor] = {}

    def keep(self, rows: Tensor) -> None:
        """Drops all rows but the given ones (long or bool [B])."""
        if self.said is None:
            return
        self.said, self.states, self.known = self.said[rows], self.states[rows], self.known[rows]
        self.prompt, self.prefix, self.first = (
            self.prompt[rows],
            self.prefix[rows],
            self.first[rows],
        )
        self.slots.keep(rows)
        self.rows = {name: x[rows] for name, x in self.rows.items()}


class FrameLM(ModelAdapter, ABC):
    """See the module. ``streams``: Q. ``size``: codes per stream. ``specials``: further ids, right
    after those of codes. ``offset``: whether every stream has ids of its own (``size * streams`` of
    them), or all use the same. Ids from ``vocab_size`` on are the condition's, from there counted.

    ``calls``: how often the network ran over steps.
    """

    specials: ClassVar[int] = 0
    offset: ClassVar[bool] = False

    def __init__(self, model: torch.nn.Module, streams: int, size: int, layers: int):
        self.model, self.streams, self.size, self.layers = model, streams, size, layers
        self.calls = 0

    @property
    def code_ids(self) -> int:
        return self.size * self.streams if self.offset else self.size

    @property
    def vocab_size(self) -> int:
        return self.code_ids + self.specials

    @abstractmethod
    def begin(self, prompt: Tensor, length: Tensor, cache: FrameCache) -> tuple[Tensor, Tensor]:
        """The condition's ids [B, P], of which ``length`` [B] count, -> the network's inputs before
        the first frame [B, P', D] and how many of them count [B], at least one. What else a row
        needs goes into ``cache.rows``."""

    @abstractmethod
    def embed(self, codes: Tensor) -> Tensor:
        """Codes [B, L, Q] of steps, ``size`` and up being specials, -> inputs [B, L, D]."""

    @abstractmethod
    def run(self, inputs: Tensor, slots: Tensor, cache: FrameCache) -> Tensor:
        """Inputs [B, L, D] at slots [B, L] against the cache -> states [B, L, D]."""

    @abstractmethod
    def heads(self, states: Tensor, codes: Tensor, steps: Tensor, streams: Tensor) -> Tensor:
        """Logits [B, L, size] of one place each: its stream's [B, L], its step's number [B, L],
        state [B, L, D] and codes [B, L, Q], of which those before the stream's own hold."""

    def new_cache(self, slots: int) -> FrameCache:
        return FrameCache(slots)

    @torch.no_grad()
    def forward(self, tokens: Tensor, positions: Tensor, cache: FrameCache) -> Tensor:
        """See ``gen.models.adapters.protocols.CausalModel``. The first call brings the condition
        along."""
        begun = None
        if cache.said is None:
            begun = self._begin(tokens, positions, cache)
        places = positions - cache.prompt[:, None]
        self._note(tokens, places, cache)
        asked = (places + 1).clamp_min(
            0
        )  # what is asked behind the ids of a condition is nobody's business
        steps, streams = asked // self.streams, asked % self.streams
        self._advance(steps.amax(1), cache, begun)
        logits = self.heads(_take(cache.states, steps), self._codes(steps, cache), steps, streams)
        first = streams * self.size if self.offset else torch.zeros_like(streams)
        out = logits.new_zeros(
            *asked.shape, self.vocab_size
        )  # places are never asked for ids that may not stand there
        return out.scatter_(
            -1, first[..., None] + torch.arange(self.size, device=out.device), logits
        )

    def _begin(self, tokens: Tensor, positions: Tensor, cache: FrameCache) -> Tensor:
        """The network's inputs before the first frame [B, P', D]."""
        condition = tokens >= self.vocab_size
        length = torch.where(condition, positions + 1, 0).amax(1)
        prompt = tokens.new_full((len(tokens), max(int(length.max()), 1) + 1), self.vocab_size)
        prompt.scatter_(
            1, torch.where(condition, positions, prompt.shape[1] - 1), tokens
        )  # the last column takes what is no condition
        inputs, prefix = self.begin(prompt[:, :-1] - self.vocab_size, length, cache)
        steps = -(-cache.positions // self.streams) + 1
        cache.prompt, cache.prefix, cache.first = (
            length,
            prefix,
            _take(inputs, prefix[:, None] - 1)[:, 0],
        )
        cache.said = tokens.new_zeros(len(tokens), steps * self.streams + 1)
        cache.known = torch.zeros_like(length)
        cache.slots = SlotCache(self.layers, inputs.shape[1] + steps)
        return inputs

    def _note(self, tokens: Tensor, positions: Tensor, cache: FrameCache) -> None:
        """Remembers codes, and forgets the states that follow from others."""
        stream, beyond = positions % self.streams, cache.said.shape[1] - 1
        code = tokens - stream * self.size if self.offset else tokens
        code = torch.where(tokens >= self.code_ids, tokens - self.code_ids + self.size, code)
        code = code.clamp(
            0, self.size + max(self.specials, 1) - 1
        )  # a draft may be what the law forbids; it is not kept
        at = torch.where(positions >= 0, positions, beyond)
        other = (cache.said.gather(1, at) != code) & (positions >= 0)
        cache.said.scatter_(1, at, code)
        self._forget(torch.where(other, positions, beyond).amin(1), cache)

    def _forget(self, position: Tensor, cache: FrameCache) -> None:
        """States of steps after that of a place [B] are void."""
        cache.known = torch.minimum(cache.known, position // self.streams + 1)

    def _advance(self, last: Tensor, cache: FrameCache, begun: Tensor | None) -> None:
        """Computes the states that are not known of the steps up to ``last`` [B]."""
        cache.ran = last + 1 > cache.known
        width = int((last + 1 - cache.known).max())
        if width <= 0:
            return
        # rows that need fewer steps repeat their last one, which changes nothing
        steps = torch.minimum(
            cache.known[:, None] + torch.arange(width, device=last.device), last[:, None]
        )
        inputs = self.embed(self._codes((steps - 1).clamp_min(0), cache))
        inputs = torch.where((steps == 0)[..., None], cache.first[:, None].to(inputs), inputs)
        slots = steps + cache.prefix[:, None] - 1
        if begun is not None:
            at = torch.arange(begun.shape[1] - 1, device=last.device)
            at = torch.minimum(at.expand(len(last), -1), cache.prefix[:, None] - 1)
            inputs, slots = (
                torch.cat([_take(begun, at).to(inputs), inputs], 1),
                torch.cat([at, slots], 1),
            )
        states = self.run(inputs, slots, cache)[:, -width:]
        self.calls += 1
        if cache.states is None:
            cache.states = states.new_zeros(
                len(states), cache.said.shape[1] // self.streams, states.shape[-1]
            )
        cache.states.scatter_(1, steps[..., None].expand_as(states), states)
        cache.known = torch.maximum(cache.known, last + 1)

    def _codes(self, steps: Tensor, cache: FrameCache) -> Tensor:
        """The codes said of steps [B, L]: [B, L, Q]."""
        at = steps[..., None] * self.streams + torch.arange(self.streams, device=steps.device)
        return cache.said.gather(1, at.flatten(1)).view(at.shape)


def parallel_heads(heads: Any, states: Tensor, streams: Tensor) -> Tensor:
    """Logits [B, L, size] of states [B, L, D], each by the head of its stream [B, L]."""
    out: Tensor | None = None
    for stream in streams.unique().tolist():
        where = streams == stream
        logits = heads[stream](states[where])
        out = logits.new_zeros(*streams.shape, logits.shape[-1]) if out is None else out
        out[where] = logits
    return out


def _take(x: Tensor, index: Tensor) -> Tensor:
    """x [B, S, ...] at index [B, L] -> [B, L, ...]."""
    return x[torch.arange(len(x), device=x.device)[:, None], index]
