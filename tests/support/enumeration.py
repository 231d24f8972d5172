"""The exact distribution of a sampler, by running its production code on every possible outcome of
its random decisions.

``ScriptedDraws`` stands in for ``gen.core.rng.CounterDraws``. Every row of a batch follows a
script: the outcomes of its decisions, in order. Where a script ends, the row takes the first
possible outcome and the others are noted as further scripts, so each row is one leaf of the
decision tree, with its probability. Rows advance independently, so thousands of leaves are decoded
in one batch.

Noise that belongs to a position (``round=None``) is asked again and again with different
distributions. It is never sampled, and it is not approximated either: with E_v independent Exp(1)
variables, argmax(log p_v + G_v) = argmin(E_v / p_v), so what the answers so far say about E is a
cone {E : E_v p_k >= E_k p_v}. A simplicial cone with generators r_i that each sum to one has
probability |det R|; cones are cut by bisecting edges, so they stay simplicial."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

DUST = 1e-14  # probabilities below are rounding, not outcomes
FLAT = 1e-13  # a generator this close to a cutting plane lies on it

Simplex = tuple[tuple[float, ...], ...]


def _determinant(rows: Simplex) -> float:
    if len(rows) == 2:
        return rows[0][0] * rows[1][1] - rows[0][1] * rows[1][0]
    first, *rest = rows
    return sum(
        (-1) ** i * x * _determinant(tuple(r[:i] + r[i + 1 :] for r in rest))
        for i, x in enumerate(first)
        if x
    )


def _clip(simplex: Simplex, win: int, lose: int, p: Sequence[float]) -> list[Simplex]:
    """The part of a simplicial cone where E_lose p_win >= E_win p_lose."""
    value = [r[lose] * p[win] - r[win] * p[lose] for r in simplex]
    low = min(range(len(value)), key=value.__getitem__)
    high = max(range(len(value)), key=value.__getitem__)
    if value[low] >= -FLAT:
        return [simplex]
    if value[high] <= FLAT:
        return []
    share = value[high] / (value[high] - value[low])
    cut = tuple(
        share * a + (1 - share) * b for a, b in zip(simplex[low], simplex[high], strict=True)
    )

    def replaced(i):
        return (*simplex[:i], cut, *simplex[i + 1 :])

    return _clip(replaced(low), win, lose, p) + _clip(replaced(high), win, lose, p)


class Noise:
    """What is known about the noise of one position: a union of simplicial cones. Remembers how it
    was split, since many rows share a history."""

    def __init__(self, cones: list[Simplex]):
        self.cones = cones
        self.mass = math.fsum(abs(_determinant(c)) for c in cones)
        self._splits: dict[tuple[float, ...], tuple[list[float], list[Noise]]] = {}

    @staticmethod
    def unknown(size: int) -> Noise:
        return Noise([tuple(tuple(float(i == j) for j in range(size)) for i in range(size))])

    def split(self, p: tuple[float, ...]) -> tuple[list[float], list[Noise]]:
        """Per id k: the probability that k wins under the distribution p given what is known, and
        what is known then."""
        if p not in self._splits:
            parts = []
            for k, mass in enumerate(p):
                cones = self.cones if mass > 0 else []
                for v in range(len(p)):
                    if v != k and p[v] > 0:
                        cones = [piece for cone in cones for piece in _clip(cone, k, v, p)]
                parts.append(Noise(cones))
            self._splits[p] = [x.mass / self.mass if x.mass > DUST else 0.0 for x in parts], parts
        return self._splits[p]


class _Row:
    def __init__(self, key: int, script: tuple[int, ...]):
        self.key, self.script, self._scripted = key, script, len(script)
        self.taken: list[int] = []
        self.siblings: list[tuple[int, ...]] = []
        self.weight = 1.0
        self.noise: dict[tuple, Noise] = {}
        self.used: set[tuple] = set()

    def decide(self, p: Sequence[float]) -> int:
        possible = [k for k, x in enumerate(p) if x > DUST]
        if len(possible) == 1:
            return possible[0]
        assert possible, f"a decision without any possible outcome: {p}"
        taken = self.taken
        if len(taken) < self._scripted:
            k = self.script[len(taken)]
        else:
            k = possible[0]
            self.siblings += [(*taken, other) for other in possible[1:]]
        taken.append(k)
        self.weight *= p[k]
        return k

    def once(self, *decision) -> None:
        """Counter-based draws would answer the same decision twice with the same noise."""
        assert decision not in self.used, f"two independent draws share their noise: {decision}"
        self.used.add(decision)


class ScriptedRNG:
    """The protocol of ``gen.core.rng.RNG`` for rows that follow scripts. What is not active gets
    the least likely id."""

    def __init__(
        self, rows: Sequence[tuple[int, tuple[int, ...]]], roots: dict[int, Noise] | None = None
    ):
        self.rows = [_Row(key, script) for key, script in rows]
        self._roots = {} if roots is None else roots
        # what the key of a decision has besides its position, purpose and round
        self.branches: list[tuple[int, ...]] = [()] * len(self.rows)

    def of_branches(self, items, branches) -> ScriptedRNG:
        """Return an object whose row i makes decisions of scripted row ``items[i]``, with the
        branch in the key of each; branch 0 has the keys of the row itself."""
        view = ScriptedRNG([], self._roots)
        view.rows = [self.rows[item] for item in items]
        view.branches = [
            self.branches[item] + ((int(branch),) if branch else ())
            for item, branch in zip(items, branches, strict=True)
        ]
        return view

    def categorical(
        self,
        logp: Tensor,
        rows: Tensor,
        positions: Tensor,
        purpose: str,
        round: Tensor | None,
        active: Tensor,
    ) -> Tensor:
        size = logp.shape[-1]
        root = self._roots.setdefault(size, Noise.unknown(size)) if round is None else None
        chances = logp[active].double().softmax(-1).tolist()
        decided = []
        for p, (row, branch, position, number) in zip(
            chances, self._active(active, rows, positions, round), strict=True
        ):
            if math.isnan(p[0]):  # behind a draft that cannot stand: token 0, whatever the noise
                k = 0
            elif round is None:
                where = (branch, position, purpose)
                wins, parts = row.noise.get(where, root).split(tuple(p))
                k = row.decide(wins)
                row.noise[where] = parts[k]
            else:
                row.once(branch, position, purpose, number)
                k = row.decide(p)
            decided.append(k)
        out = logp.argmin(-1)
        out[active] = torch.tensor(decided, dtype=out.dtype)
        return out

    def noise(self, rows, positions, purpose, round, size) -> None:
        """No draw has noise that could be made before."""

    def flip(
        self,
        p: Tensor,
        rows: Tensor,
        positions: Tensor,
        purpose: str,
        round: Tensor | None,
        active: Tensor,
    ) -> Tensor:
        assert round is not None, "coins are never shared between rounds"
        decided = []
        for chance, (row, branch, position, number) in zip(
            p[active].double().tolist(),
            self._active(active, rows, positions, round),
            strict=True,
        ):
            row.once(branch, position, purpose, number)
            decided.append(row.decide((1 - chance, chance)) == 1)
        out = torch.zeros_like(active)
        out[active] = torch.tensor(decided, dtype=torch.bool)
        return out

    def uniform(
        self, rows: Tensor, positions: Tensor, purpose: str, round: Tensor | None
    ) -> Tensor:
        rounds = [None] * len(rows) if round is None else round.tolist()
        table = [
            [hashed((self.rows[row].key, *self.branches[row]), at, purpose, r) for at in line]
            for row, line, r in zip(rows.tolist(), positions.tolist(), rounds, strict=True)
        ]
        return torch.tensor(table, dtype=torch.float64)

    def _active(
        self, active: Tensor, rows: Tensor, positions: Tensor, round: Tensor | None
    ) -> Iterator[tuple[_Row, tuple[int, ...], int, int | None]]:
        """Walk over what is to be decided: the row that it concerns, its branch, its position, its
        round."""
        at = active.nonzero()[:, 0]
        numbers = [None] * len(at) if round is None else round[at].tolist()
        each = rows[at].tolist()
        concerned = [self.rows[row] for row in each]
        branches = [self.branches[row] for row in each]
        yield from zip(concerned, branches, positions[active].tolist(), numbers, strict=True)


def hashed(key: int | tuple[int, ...], position: int, purpose: str, round: int | None) -> float:
    """The fixed number in (0, 1) that orders are made of."""
    if isinstance(key, tuple) and len(key) == 1:
        key = key[0]
    digest = hashlib.sha256(repr((key, position, purpose, round)).encode()).digest()
    return (int.from_bytes(digest[:6], "big") + 0.5) / 2**48


Decode = Callable[[ScriptedRNG, list[int]], Tensor]


def enumerate_distribution(
    decode: Decode, contexts: int, rows: int = 4096
) -> list[dict[tuple[int, ...], float]]:
    """The distribution of the tokens in every context. ``decode(draws, context)`` runs the sampler
    on a batch whose row i has the context ``context[i]`` and returns tokens [n, T]."""
    found: list[dict[tuple[int, ...], list[float]]] = [defaultdict(list) for _ in range(contexts)]
    todo: list[tuple[int, tuple[int, ...]]] = [(c, ()) for c in range(contexts)]
    roots: dict[int, Noise] = {}
    while todo:
        batch, todo = todo[:rows], todo[rows:]
        rng = ScriptedRNG(batch, roots)
        tokens = decode(rng, [context for context, _ in batch]).tolist()
        for row, ids in zip(rng.rows, tokens, strict=True):
            assert tuple(row.taken[: len(row.script)]) == row.script, "a replay took another course"
            found[row.key][tuple(ids)].append(row.weight)
            todo += [(row.key, script) for script in row.siblings]
    distributions = [
        {ids: math.fsum(weights) for ids, weights in sampling.items()} for sampling in found
    ]
    for sampling in distributions:
        total = math.fsum(sampling.values())
        assert abs(total - 1) < 1e-12, f"the outcomes have a total probability of {total!r}"
    return distributions


def distance(one: dict[tuple[int, ...], float], other: dict[tuple[int, ...], float]) -> float:
    """The largest difference of a probability."""
    return max(abs(one.get(ids, 0.0) - other.get(ids, 0.0)) for ids in one.keys() | other.keys())
