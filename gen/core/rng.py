"""Random numbers: every random decision goes through one injected object.

The production object is counter-based. A decision is an integer hash of (item key, purpose,
position, round), so an item gets the same random numbers whatever the batch, shard, worker or
window, on any device. ``round=None`` leaves the round out: the noise then belongs to the position,
and a second call with another distribution uses the same noise (Gumbel coupling).

Tests inject an object with the same methods that enumerates all outcomes of the production code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

_MASK53, _MASK64 = (1 << 53) - 1, (1 << 64) - 1
KEPT = 1 << 19  # bytes of noise kept per purpose
BLOCK = 16  # additional positions that noise is made for at a time
# Numbers made at a time, keyed by "on a CPU".
PIECE = {True: 1 << 15, False: 1 << 22}
# int64, or float64 between 0 and 1: an array on the host, a tensor elsewhere
Bits = np.ndarray | Tensor


class RNG(Protocol):
    """Random decisions for the rows of a batch.

    Arguments of all methods: ``rows`` [b] selects rows of the batch; ``positions`` long [b, L] is
    the grid position of each decision; ``purpose`` names independent streams; ``round`` is long [b]
    or None; ``active`` bool [b, L] marks decisions that count (the others may return anything).
    """

    def categorical(
        self,
        logp: Tensor,
        rows: Tensor,
        positions: Tensor,
        purpose: str,
        round: Tensor | None,
        active: Tensor,
    ) -> Tensor:
        """Draw tokens long [b, L] from log-probabilities [b, L, V]."""
        ...

    def noise(
        self, rows: Tensor, positions: Tensor, purpose: str, round: Tensor | None, size: int
    ) -> np.ndarray | None:
        """Make the noise [b, L, size] that ``categorical`` adds to log-probabilities, of decisions
        that are drawn one column after the other; None where ``categorical`` makes it itself."""
        ...

    def flip(
        self,
        p: Tensor,
        rows: Tensor,
        positions: Tensor,
        purpose: str,
        round: Tensor | None,
        active: Tensor,
    ) -> Tensor:
        """Draw bool [b, L], true with probability ``p`` [b, L]."""
        ...

    def uniform(
        self, rows: Tensor, positions: Tensor, purpose: str, round: Tensor | None
    ) -> Tensor:
        """Draw uniform float64 [b, L] in (0, 1)."""
        ...

    def normal(
        self, rows: Tensor, positions: Tensor, purpose: str, round: Tensor | None, size: int
    ) -> Tensor:
        """Draw independent standard normal float64 [b, L, size]."""
        ...

    def of_branches(self, items: np.ndarray, branches: np.ndarray) -> RNG:
        """Key the rows of a batch by (item, branch), int64 [b] each; branch 0 draws as its item."""
        ...


def item_key(*parts: object) -> int:
    """Hash the parts that identify an item, such as its prompt and seed, to a 63-bit key."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


class CounterRNG:
    """Counter-based random numbers; see the module. ``keys``: one integer per row of the batch.

    On a CPU, noise that belongs to positions is kept while it takes at most ``KEPT`` bytes, because
    every round reads the same positions. Elsewhere, or above that size, it is made again when it is
    read, ``PIECE`` numbers at a time.
    """

    def __init__(self, keys: Sequence[int], device: torch.device | str = "cpu"):
        self.keys = torch.tensor(
            [k - (1 << 64) if k >> 63 else k for k in keys], dtype=torch.int64, device=device
        )
        self._rows = len(keys)
        self._keyed: dict[str, Bits] = {}  # keys of all rows, mixed with a purpose
        # (purpose, V) -> first position, and float64 [rows of the batch, positions, V]
        self._kept: dict[tuple[str, int], tuple[int, np.ndarray]] = {}

    def put(self, items: Sequence[int], keys: Sequence[int]) -> None:
        """Give items that nothing was drawn for other keys.

        Args:
            items: indices of this object's keys.
            keys: their new keys.
        """
        fresh = CounterRNG(keys, self.keys.device).keys
        self.keys[torch.tensor(items, dtype=torch.long, device=self.keys.device)] = fresh
        self._kept.clear()
        for purpose, keyed in self._keyed.items():  # in place, where recorded steps read them
            bits: Any = _mix(_plain(self.keys) ^ _constant(purpose))
            keyed[...] = bits

    def _bits(self, rows: Tensor, positions: Tensor, purpose: str, round: Tensor | None) -> Bits:
        if purpose not in self._keyed:
            self._keyed[purpose] = _mix(_plain(self.keys) ^ _constant(purpose))
        if len(rows) == 1 and positions.is_cpu:
            return self._bits_of_row(rows, positions, purpose, round)
        h = self._keyed[purpose][_plain(rows)]
        if round is not None:
            h = _mix(h + (_plain(round) + 1) * _GOLDEN)
        return _mix(h[:, None] + (_plain(positions) + 1) * _ODD)

    def _bits_of_row(
        self, rows: Tensor, positions: Tensor, purpose: str, round: Tensor | None
    ) -> np.ndarray:
        """Make the bits of one row on a CPU: Python's integers take less time than small arrays."""
        h = int(self._keyed[purpose][int(rows.item())])
        if round is not None:
            h = _mix_int(h + (int(round.item()) + 1) * _GOLDEN)
        if positions.numel() == 1:
            return np.array([[_signed(_mix_int(h + (int(positions.item()) + 1) * _ODD))]])
        return _mix_unsigned(positions.numpy() * _ODD_64 + _signed(h + _ODD & _MASK64))

    def of_branches(self, items: np.ndarray, branches: np.ndarray) -> CounterRNG:
        """Key the rows of a batch by (item, branch).

        Args:
            items: index of this object's keys for each row of the batch, int64 [b].
            branches: branch of each row, int64 [b]; branch 0 has the item's own key.
        """
        keys = self.keys.cpu().numpy()[items]
        branched = _mix(_mix(keys ^ _constant("branch")) + branches * _GOLDEN)
        chosen = np.where(branches == 0, keys, branched)
        return CounterRNG([int(key) & ((1 << 64) - 1) for key in chosen], self.keys.device)

    def uniform(self, rows, positions, purpose, round) -> Tensor:
        return torch.as_tensor(_unit(_mix(self._bits(rows, positions, purpose, round))))

    def normal(self, rows, positions, purpose, round, size) -> Tensor:
        """Draw by inversion: one uniform number each, so that the first numbers do not depend on
        ``size``."""
        return torch.special.ndtri(
            torch.as_tensor(_units(self._bits(rows, positions, purpose, round), size))
        )

    def flip(self, p, rows, positions, purpose, round, active) -> Tensor:
        u = _unit(_mix(self._bits(rows, positions, purpose, round)))
        if isinstance(u, np.ndarray):
            return torch.from_numpy(u < p.numpy())
        return u < p

    def categorical(self, logp, rows, positions, purpose, round, active) -> Tensor:
        """Draw by the Gumbel-max rule: argmax of log p + G, with one G per (position, token)."""
        if round is None and positions.numel():
            noise = self._noise(rows, positions, purpose, logp.shape[-1])
            if noise is not None:
                return torch.from_numpy((noise + logp.numpy()).argmax(-1))
        bits, size = self._bits(rows, positions, purpose, round), logp.shape[-1]
        if isinstance(bits, np.ndarray):
            # noise takes most of the time, and reading ``active`` needs no synchronisation here
            return torch.from_numpy(_drawn_where(active.numpy(), logp.numpy(), bits))
        if logp.is_contiguous():
            return _drawn(logp.view(-1, size), bits.view(-1)).view(positions.shape)
        # a piece is copied at a time; launches must not grow with the rows of the batch
        many = max(1, PIECE[False] // max(1, logp[0].numel()))
        parts = [slice(i, i + many) for i in range(0, len(logp), many)]
        ids = [_drawn(logp[part].reshape(-1, size), bits[part].view(-1)) for part in parts]
        return torch.cat(ids).view(positions.shape)

    def noise(self, rows, positions, purpose, round, size) -> np.ndarray | None:
        if not positions.is_cpu or positions.numel() * size * 8 > KEPT:
            return None
        return np.asarray(_gumbel(self._bits(rows, positions, purpose, round), size))

    def _noise(self, rows: Tensor, positions: Tensor, purpose: str, size: int) -> np.ndarray | None:
        """Read the kept noise of these positions, [b, L, V]; None where it would be too large.

        Noise is made from the lowest position on and for ``BLOCK`` positions more than needed,
        which the next rounds read.
        """
        if not positions.is_cpu or self._rows * (1 + BLOCK) * size * 8 > KEPT:
            return None
        if positions.numel() == 1:
            low, together = int(positions.item()), True
            high = low
        else:
            at = positions.numpy()
            low, high, together = int(at[0, 0]), int(at[0, -1]), False
            if len(at) == 1 and bool((at[0, 1:] > at[0, :-1]).all()):
                together = high - low + 1 == at.shape[1]
            else:
                low, high = int(at.min()), int(at.max())
        begin, kept = self._kept.get((purpose, size), (0, None))
        if kept is None or low < begin or high >= begin + kept.shape[1]:
            length = high - low + 1 + BLOCK
            if self._rows * length * size * 8 > KEPT:
                return None
            kept = self._moved(begin, kept, low, length, purpose, size)
            begin = low
            self._kept[purpose, size] = begin, kept
        if together and self._rows == 1:
            return kept[:, low - begin : high - begin + 1]
        return kept[rows.numpy()[:, None], positions.numpy() - begin]

    def _moved(
        self, begin: int, kept: np.ndarray | None, low: int, length: int, purpose: str, size: int
    ) -> np.ndarray:
        """Make the noise of positions low .. low + length - 1, copying what ``kept`` has of it."""
        new = np.empty((self._rows, length, size))
        there = range(0)
        if kept is not None:
            there = range(max(begin, low), min(begin + kept.shape[1], low + length))
            if there:
                known = kept[:, there.start - begin : there.stop - begin]
                new[:, there.start - low : there.stop - low] = known
        every, missing = (
            torch.arange(self._rows),
            [n for n in range(low, low + length) if n not in there],
        )
        many = max(1, PIECE[True] // (self._rows * size))
        for first in range(0, len(missing), many):
            at = torch.tensor(missing[first : first + many])
            noise = _gumbel(self._bits(every, at.expand(self._rows, -1), purpose, None), size)
            new[:, at.numpy() - low] = noise
        return new


class OffsetRNG:
    """Random numbers for a part of a grid: its position 0 is position ``first`` of the whole grid
    and has the random numbers of that one."""

    def __init__(self, rng: RNG, first: int):
        self.rng, self.first = rng, first

    def categorical(self, logp, rows, positions, purpose, round, active) -> Tensor:
        return self.rng.categorical(logp, rows, positions + self.first, purpose, round, active)

    def flip(self, p, rows, positions, purpose, round, active) -> Tensor:
        return self.rng.flip(p, rows, positions + self.first, purpose, round, active)

    def uniform(self, rows, positions, purpose, round) -> Tensor:
        return self.rng.uniform(rows, positions + self.first, purpose, round)

    def noise(self, rows, positions, purpose, round, size) -> np.ndarray | None:
        return self.rng.noise(rows, positions + self.first, purpose, round, size)

    def normal(self, rows, positions, purpose, round, size) -> Tensor:
        return self.rng.normal(rows, positions + self.first, purpose, round, size)

    def of_branches(self, items, branches) -> OffsetRNG:
        return OffsetRNG(self.rng.of_branches(items, branches), self.first)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


_GOLDEN, _ODD = _signed(0x9E3779B97F4A7C15), _signed(0xD1342543DE82EF95)
_M1, _M2 = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


@cache
def _constant(purpose: str) -> int:
    return _signed(int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:8], "big"))


def _plain(x: Tensor) -> Bits:
    """View a tensor of the host as an array: with few numbers most of the time goes into the calls,
    and those of numpy take less."""
    return x.numpy() if x.is_cpu else x


def _shift(x: Tensor, n: int) -> Tensor:
    """Shift right logically: int64 has only the arithmetic shift."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def _mix(x: Bits) -> Bits:
    """Apply the finaliser of SplitMix64 (Steele, Lea & Flood 2014), on wrapping int64."""
    if isinstance(x, np.ndarray):
        return _mix_unsigned(x)
    x = (x ^ _shift(x, 30)) * _M1
    x = (x ^ _shift(x, 27)) * _M2
    return x ^ _shift(x, 31)


_LOW53, _ODD_64 = np.array(_MASK53), np.array(_ODD)
_30, _27, _31, _U1, _U2 = (np.array(n & _MASK64, dtype=np.uint64) for n in (30, 27, 31, _M1, _M2))


def _mix_int(x: int) -> int:
    """Apply ``_mix`` to one number, which may be any integer; the result is not negative."""
    x &= _MASK64
    x = (x ^ x >> 30) * _M1 & _MASK64
    x = (x ^ x >> 27) * _M2 & _MASK64
    return x ^ x >> 31


def _mix_unsigned(x: np.ndarray) -> np.ndarray:
    """Apply ``_mix`` as fewer operations: uint64 has the logical shift."""
    u = x.view(np.uint64)
    u = u ^ (u >> _30)
    u *= _U1
    u ^= u >> _27
    u *= _U2
    u ^= u >> _31
    return u.view(np.int64)


def _unit(bits: Bits) -> Bits:
    """Convert 53 bits to float64, strictly between 0 and 1."""
    on_host = isinstance(bits, np.ndarray)
    u = (bits & _LOW53).astype(np.float64) if on_host else (bits & _MASK53).double()
    u += 0.5
    u *= 2.0**-53
    return u


def _units(bits: Bits, size: int) -> Bits:
    """Make ``size`` numbers between 0 and 1 [..., size] from the bits [...] of a decision."""
    if isinstance(bits, np.ndarray):
        return _unit(_mix_unsigned(bits[..., None] + _steps(size)))
    index = torch.arange(1, size + 1, device=bits.device)
    return _unit(_mix(bits[..., None] + index * _GOLDEN))


@lru_cache(maxsize=8)
def _steps(size: int) -> np.ndarray:
    """Return the numbers that a decision's bits are shifted by, int64 [size]."""
    with np.errstate(over="ignore"):
        steps = np.arange(1, size + 1) * _GOLDEN
    steps.setflags(write=False)
    return steps


def _gumbel(bits: Bits, size: int) -> Bits:
    """Make Gumbel noise float64 [..., V] from the bits [...] of a decision."""
    return _doubly_logged(_units(bits, size))


def _doubly_logged(u: Any) -> Any:
    """Turn numbers between 0 and 1, which are written over, into Gumbel noise."""
    if isinstance(u, Tensor):
        return u.log_().neg_().log_().neg_()
    for _ in range(2):
        np.negative(np.log(u, out=u), out=u)
    return u


def _drawn_where(active: np.ndarray, logprobs: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """Draw the ``active`` (bool [b, L]) of some tokens, int64 [b, L], and leave the others 0.

    Args:
        active: decisions that count.
        logprobs: [b, L, V].
        bits: bits of each decision, int64 [b, L].
    """
    out, size = np.zeros(bits.shape, dtype=np.int64), logprobs.shape[-1]
    row, column = active.nonzero()
    many = max(1, PIECE[True] // max(1, size))
    for first in range(0, len(row), many):
        at = row[first : first + many], column[first : first + many]
        out[at] = _scores(logprobs[at], bits[at]).argmax(-1)
    return out


def _scores(logprobs: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """Add the noise of decisions, of bits [n], to log-probabilities [n, V]: float64 [n, V]. Where
    most tokens have no mass, no noise is made of these."""
    size = logprobs.shape[-1]
    at = np.flatnonzero(logprobs != -np.inf)
    if 3 * len(at) > logprobs.size:
        return _gumbel(bits, size) + logprobs
    row = at // size
    noise = _doubly_logged(_unit(_mix_unsigned(bits[row] + _steps(size)[at - row * size])))
    scores = np.full(logprobs.shape, -np.inf)
    scores.reshape(-1)[at] = noise + logprobs.reshape(-1)[at]
    return scores


def _drawn(logprobs: Tensor, bits: Tensor) -> Tensor:
    """Draw tokens [n] from log-probabilities [n, V] and the bits [n] of each decision."""
    size = logprobs.shape[-1]
    many = max(1, PIECE[False] // max(1, size))
    # one part even without any decision, for the dtype of an empty result
    parts = [slice(i, i + many) for i in range(0, max(1, len(bits)), many)]
    ids = [(_gumbel(bits[part], size) + logprobs[part]).argmax(-1) for part in parts]
    return ids[0] if len(ids) == 1 else torch.cat(ids)
