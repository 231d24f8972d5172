"""Models over whole frames of codes, through the causal protocol of one code per position.

Positions are time-major: position n = t Q + q is codebook q of step t. The network takes one vector
per step, from all Q codes of the step before, and returns a causal state h_t:

    h_t = f(prefix, e(c_0), ..., e(c_{t-1}))        logits at (t, q) = g_q(h_t, c_{t,0}, ...,
                                                    c_{t,q-1})

Parallel codebooks (MusicGen) ignore the codes of their own step, a depth decoder (CSM) uses them. A
forward pass receives the codes before the requested positions. The adapter keeps all codes by
position and the states of all steps with unchanged inputs; a changed code of step t invalidates the
states of all later steps. The network therefore runs over new steps only, at most once per pass,
and not at all for the other Q - 1 positions of a step: plain autoregression over T Q positions runs
it T times.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from gen.models.adapters.base import ModelAdapter
from gen.models.adapters.protocols import ModelCache
from gen.models.adapters.slot_cache import SlotCache


class FrameCache(ModelCache):
    """Cache of an adapter for B rows.

    ``codes``: int64 [B, positions]. ``states``: [B, steps, D], of which the first ``known`` int64
    [B] are valid. ``prompt``: int64 [B], number of condition tokens. ``prefix``: int64 [B], number
    of network inputs before the first frame. ``slots``: KV cache of the network. ``rows``: further
    per-row tensors by name. ``ran``: bool [B], True for rows whose network ran in the last pass.
    """

    def __init__(self, slots: int):
        self.positions = slots
        self.codes: Tensor | None = None
        self.states: Tensor | None = None
        self.slots: SlotCache | None = None
        self.ran: Tensor | None = None
        self.rows: dict[str, Tensor] = {}

    def keep(self, rows: Tensor) -> None:
        """Keep only some rows (int64 or bool [B])."""
        if self.codes is None:
            return
        self.codes, self.states, self.known = self.codes[rows], self.states[rows], self.known[rows]
        self.prompt, self.prefix, self.first = (
            self.prompt[rows],
            self.prefix[rows],
            self.first[rows],
        )
        self.slots.keep(rows)
        self.rows = {name: x[rows] for name, x in self.rows.items()}


class FrameLM(ModelAdapter, ABC):
    """Base class of adapters of frame models.

    ``streams``: Q. ``size``: codes per codebook. ``specials``: number of special tokens after the
    codes. ``offset``: True if every codebook has its own token ids (``size * streams`` in all),
    False if all share them. Token ids from ``vocab_size`` on belong to the condition. ``calls``:
    number of network runs.
    """

    specials: ClassVar[int] = 0
    offset: ClassVar[bool] = False

    def __init__(self, model: torch.nn.Module, streams: int, size: int, layers: int):
        self.model, self.streams, self.size, self.layers = model, streams, size, layers
        self.calls = 0

    @property
    def code_ids(self) -> int:
        """Number of token ids of codes."""
        return self.size * self.streams if self.offset else self.size

    @property
    def vocab_size(self) -> int:
        """Number of token ids of codes and special tokens."""
        return self.code_ids + self.specials

    @abstractmethod
    def begin(self, prompt: Tensor, length: Tensor, cache: FrameCache) -> tuple[Tensor, Tensor]:
        """Encode the condition.

        Args:
            prompt: Condition token ids [B, P].
            length: Number of valid ones [B].
            cache: Receives further per-row tensors in ``cache.rows``.

        Returns:
            Network inputs before the first frame [B, P', D], and the number of valid ones [B], at
            least one.
        """

    @abstractmethod
    def embed(self, codes: Tensor) -> Tensor:
        """Embed the codes [B, L, Q] of steps (special tokens from ``size`` on): [B, L, D]."""

    @abstractmethod
    def run(self, inputs: Tensor, slots: Tensor, cache: FrameCache) -> Tensor:
        """Run the network on inputs [B, L, D] at slots [B, L] against the cache: states [B, L,
        D]."""

    @abstractmethod
    def heads(self, states: Tensor, codes: Tensor, steps: Tensor, streams: Tensor) -> Tensor:
        """Compute logits [B, L, size], one position each.

        Args:
            states: States of the steps [B, L, D].
            codes: Codes of the steps [B, L, Q], valid before the position's own codebook.
            steps: Step numbers [B, L].
            streams: Codebook numbers [B, L].
        """

    def new_cache(self, slots: int) -> FrameCache:
        """Create an empty cache of ``slots`` positions."""
        return FrameCache(slots)

    @torch.no_grad()
    def forward(self, tokens: Tensor, positions: Tensor, cache: FrameCache) -> Tensor:
        """Compute logits [B, L, V] (``gen.models.adapters.protocols.CausalModel``). The first pass
        includes the condition."""
        prefix_inputs = None
        if cache.codes is None:
            prefix_inputs = self._begin(tokens, positions, cache)
        positions = positions - cache.prompt[:, None]
        self._store_codes(tokens, positions, cache)
        # logits inside the condition are unused
        requested = (positions + 1).clamp_min(0)
        steps, streams = requested // self.streams, requested % self.streams
        self._advance(steps.amax(1), cache, prefix_inputs)
        logits = self.heads(_take(cache.states, steps), self.codes_at(steps, cache), steps, streams)
        first = streams * self.size if self.offset else torch.zeros_like(streams)
        # tokens of other codebooks are illegal at a position, so their logits are unused
        out = logits.new_zeros(*requested.shape, self.vocab_size)
        return out.scatter_(
            -1, first[..., None] + torch.arange(self.size, device=out.device), logits
        )

    def _begin(self, tokens: Tensor, positions: Tensor, cache: FrameCache) -> Tensor:
        """Start all rows, and return the network inputs before the first frame [B, P', D]."""
        condition = tokens >= self.vocab_size
        length = torch.where(condition, positions + 1, 0).amax(1)
        prompt = tokens.new_full((len(tokens), max(int(length.max()), 1) + 1), self.vocab_size)
        # the last column collects tokens outside the condition
        prompt.scatter_(1, torch.where(condition, positions, prompt.shape[1] - 1), tokens)
        inputs, prefix = self.begin(prompt[:, :-1] - self.vocab_size, length, cache)
        steps = -(-cache.positions // self.streams) + 1
        cache.prompt, cache.prefix, cache.first = (
            length,
            prefix,
            _take(inputs, prefix[:, None] - 1)[:, 0],
        )
        cache.codes = tokens.new_zeros(len(tokens), steps * self.streams + 1)
        cache.known = torch.zeros_like(length)
        cache.slots = SlotCache(self.layers, inputs.shape[1] + steps)
        return inputs

    def _store_codes(self, tokens: Tensor, positions: Tensor, cache: FrameCache) -> None:
        """Store codes by position, and invalidate states that depend on changed ones."""
        stream, beyond = positions % self.streams, cache.codes.shape[1] - 1
        code = tokens - stream * self.size if self.offset else tokens
        code = torch.where(tokens >= self.code_ids, tokens - self.code_ids + self.size, code)
        # a draft may be illegal; it is rejected later
        code = code.clamp(0, self.size + max(self.specials, 1) - 1)
        columns = torch.where(positions >= 0, positions, beyond)
        changed = (cache.codes.gather(1, columns) != code) & (positions >= 0)
        cache.codes.scatter_(1, columns, code)
        self._invalidate(torch.where(changed, positions, beyond).amin(1), cache)

    def _invalidate(self, position: Tensor, cache: FrameCache) -> None:
        """Invalidate the states of steps after the step of a position [B]."""
        cache.known = torch.minimum(cache.known, position // self.streams + 1)

    def _advance(self, last: Tensor, cache: FrameCache, prefix_inputs: Tensor | None) -> None:
        """Compute the missing states of steps up to ``last`` [B]."""
        cache.ran = last + 1 > cache.known
        width = int((last + 1 - cache.known).max())
        if width <= 0:
            return
        # rows that need fewer steps repeat their last one, which changes nothing
        steps = torch.minimum(
            cache.known[:, None] + torch.arange(width, device=last.device), last[:, None]
        )
        inputs = self.embed(self.codes_at((steps - 1).clamp_min(0), cache))
        inputs = torch.where((steps == 0)[..., None], cache.first[:, None].to(inputs), inputs)
        slots = steps + cache.prefix[:, None] - 1
        if prefix_inputs is not None:
            columns = torch.arange(prefix_inputs.shape[1] - 1, device=last.device)
            columns = torch.minimum(columns.expand(len(last), -1), cache.prefix[:, None] - 1)
            inputs = torch.cat([_take(prefix_inputs, columns).to(inputs), inputs], 1)
            slots = torch.cat([columns, slots], 1)
        states = self.run(inputs, slots, cache)[:, -width:]
        self.calls += 1
        if cache.states is None:
            cache.states = states.new_zeros(
                len(states), cache.codes.shape[1] // self.streams, states.shape[-1]
            )
        cache.states.scatter_(1, steps[..., None].expand_as(states), states)
        cache.known = torch.maximum(cache.known, last + 1)

    def codes_at(self, steps: Tensor, cache: FrameCache) -> Tensor:
        """Return the codes of steps [B, L]: [B, L, Q], the stored ones.

        A subclass whose first steps hold codes of the condition overrides it.
        """
        columns = steps[..., None] * self.streams
        columns = columns + torch.arange(self.streams, device=steps.device)
        return cache.codes.gather(1, columns.flatten(1)).view(columns.shape)


def parallel_heads(heads: Any, states: Tensor, streams: Tensor) -> Tensor:
    """Apply to states [B, L, D] the head of each position's codebook ``streams`` [B, L]: logits [B,
    L, size]."""
    out: Tensor | None = None
    for stream in streams.unique().tolist():
        selected = streams == stream
        logits = heads[stream](states[selected])
        out = logits.new_zeros(*streams.shape, logits.shape[-1]) if out is None else out
        out[selected] = logits
    return out


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Gather x [B, S, ...] at index [B, L]: [B, L, ...]."""
    return x[torch.arange(len(x), device=x.device)[:, None], index]
