"""Weighted particles: importance weights along paths, and resampling within an item.

    log w_j += log G_s(j)                    potential of particle j at level s
    log w_j += lam r(x_j) - sum_s log G_s    once particle j is finished, so that the potentials of
                                             every path multiply to exp(lam r(x))
    Z^      *= mean_j w_j, w_j = 1           at every resampling; else the weights are carried on
    Z^      *= mean_j w_j                    at the end

E[Z^] = Z = E_p[exp(lam r(x))], and a particle drawn by its weight, weighted by Z^, has the
distribution p(x) exp(lam r(x)) / Z, for any values, potentials and times of resampling.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from gen.samplers.search.base import Search
from gen.samplers.search.steering import Level, Rule

DUST = 1e-12  # a share this close to a multiple of 1 / P is one


class Potential(ABC):
    """Potential G of a particle, of the values v_0, ..., v_s of its path, times lam.

    Attributes:
        start: memory of a path before its first value.
    """

    start: float = 0.0

    @abstractmethod
    def __call__(self, value: np.ndarray, memory: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return log G and the memory of the path from now on, float64 [n, P] each.

        Args:
            value: lam v_s, float64 [n, P].
            memory: what the path remembers, float64 [n, P].
        """


class Difference(Potential):
    """log G_s = lam (v_s - v_(s-1)), with v_(-1) = 0."""

    def __call__(self, value, memory):
        return value - memory, value


class Highest(Potential):
    """log G_s = lam max(v_0, ..., v_s)."""

    start = -np.inf

    def __call__(self, value, memory):
        highest = np.maximum(value, memory)
        return highest, highest


class Total(Potential):
    """log G_s = lam (v_0 + ... + v_s)."""

    def __call__(self, value, memory):
        return value + memory, value + memory


class Newest(Potential):
    """log G_s = lam v_s."""

    def __call__(self, value, memory):
        return value, memory


POTENTIALS: dict[str, Potential] = {
    "diff": Difference(),
    "max": Highest(),
    "add": Total(),
    "rt": Newest(),
}


@dataclass(frozen=True)
class Weighting:
    """Parameters of weighted particles.

    Attributes:
        lam: inverse temperature of the reward; with 0 nothing is resampled or drawn, and the
            output is particle 0.
        potential: name of the potential, of ``POTENTIALS``.
        scheme: ``systematic`` or ``multinomial``.
        adaptive: whether to resample only where the effective sample size is below P / 2.
        select: ``draw``, a particle by its weight, or ``best``, the first of highest reward.
    """

    lam: float
    potential: str = "diff"
    scheme: str = "systematic"
    adaptive: bool = False
    select: str = "draw"


class WeightedParticles(Rule):
    """Rule that resamples the particles of an item by their weights.

    Attributes:
        log_weights: log w, float64 [N, P].
        log_z: log Z^ of every item, float64 [N]; final after ``finish``.
    """

    def __init__(self, search: Search, items: int, count: int, weighting: Weighting):
        super().__init__(search, items, count)
        self.weighting, self.potential = weighting, POTENTIALS[weighting.potential]
        self.log_weights = np.zeros((items, count))
        self.log_z = np.zeros(items)
        # sum of log G along every path, what its potential remembers, and whether it has ended
        self.paid = np.zeros((items, count))
        self.memory = np.full((items, count), self.potential.start)
        self.ended = np.zeros((items, count), dtype=bool)
        self.shares = np.full((items, count), 1 / count)

    @property
    def decides(self) -> bool:
        return bool(self.weighting.lam) and self.count > 1

    def decide(self, level: Level) -> np.ndarray:
        items = level.items
        log_g = self.log_potential(level)
        self.log_weights[items] += log_g
        self.paid[items] += log_g
        self.ended[items] = level.done
        self.shares[items] = shares = normalised(self.log_weights[items])
        index = np.tile(np.arange(self.count), (len(items), 1))
        wanted = ~level.is_last & self.decides
        if self.weighting.adaptive:
            wanted &= 1 / (shares**2).sum(1) < self.count / 2
        if wanted.any():
            index[wanted] = self.resample(level.number, items[wanted], shares[wanted])
        return index

    def log_potential(self, level: Level) -> np.ndarray:
        """Return log G of every particle at a level, float64 [n, P].

        That of a path that ends makes the product of its potentials exp(lam r); afterwards G = 1.
        """
        items, value = level.items, self.weighting.lam * level.scores
        log_g, memory = self.potential(value, self.memory[items])
        self.memory[items] = memory
        return np.where(level.done, self.log_terminal(value, level), log_g)

    def log_terminal(self, value: np.ndarray, level: Level) -> np.ndarray:
        """Return lam r minus the log-potentials so far, float64 [n, P]; of an ended path 0.

        Args:
            value: lam r of the finished particles, float64 [n, P].
            level: the level.
        """
        return np.where(self.ended[level.items], 0.0, value - self.paid[level.items])

    def resample(self, number: int, items: np.ndarray, shares: np.ndarray) -> np.ndarray:
        """Draw ancestors, int64 [n, P], and begin with equal weights.

        Args:
            number: number of the level.
            items: items that resample, int64 [n].
            shares: normalised weights of their particles, float64 [n, P].
        """
        if self.weighting.scheme == "systematic":
            logp, vectors = systematic(shares)
            drawn = self.search.choose(logp, "ancestors", number, items)
            index = vectors[np.arange(len(items)), drawn]
        else:
            with np.errstate(divide="ignore"):
                logp = np.log(shares)
            slots = [
                self.search.choose(logp, "ancestor", number * self.count + j, items)
                for j in range(self.count)
            ]
            index = np.stack(slots, 1)
        index = in_place(index)
        self.log_z[items] += log_mean(self.log_weights[items])
        self.log_weights[items] = 0.0
        for state in (self.paid, self.memory, self.ended):
            state[items] = np.take_along_axis(state[items], index, 1)
        return index

    def finish(self, items: np.ndarray, scores: np.ndarray) -> np.ndarray:
        self.log_z[items] += log_mean(self.log_weights[items])
        if not self.weighting.lam:
            return np.zeros(len(items), dtype=np.int64)
        if self.weighting.select == "best":
            return scores.argmax(1)
        weights = self.log_weights[items]
        logp = weights - np.logaddexp.reduce(weights, axis=1, keepdims=True)
        return self.search.choose(logp, "output", 0, items)

    def weights(self, item: int) -> np.ndarray:
        return self.shares[item]

    def label(self, item: int) -> str:
        return f"log Z {self.log_z[item]:.4g}"


def normalised(log_weights: np.ndarray) -> np.ndarray:
    """Return weights [n, P] that add up to one."""
    weights = np.exp(log_weights - log_weights.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True)


def log_mean(log_weights: np.ndarray) -> np.ndarray:
    """Return the logarithm of the mean weight, float64 [n], of log-weights [n, P]."""
    return np.logaddexp.reduce(log_weights, axis=1) - np.log(log_weights.shape[1])


def systematic(shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the possible outcomes of systematic resampling.

    Slot i takes the particle that (u + i) / P falls on, with one u ~ U(0, 1). The ancestors change
    with u at most P - 1 times, so one categorical draw decides.

    Args:
        shares: normalised weights, float64 [n, P].

    Returns:
        Log-probabilities of P outcomes, float64 [n, P], and their ancestors, int64 [n, P, P].
    """
    n, count = shares.shape
    ends = np.cumsum(shares, axis=1) * count
    ends = np.where(abs(ends - ends.round()) < DUST, ends.round(), ends)
    ends[:, -1] = count
    edges = np.zeros((n, count + 1))
    edges[:, 1:-1] = np.sort(ends[:, :-1] % 1, axis=1)
    edges[:, -1] = 1.0
    widths, middles = np.diff(edges), (edges[:, 1:] + edges[:, :-1]) / 2
    points = middles[..., None] + np.arange(count)
    vectors = (points[..., None] >= ends[:, None, None]).sum(-1)
    with np.errstate(divide="ignore"):
        return np.log(widths), vectors


def in_place(index: np.ndarray) -> np.ndarray:
    """Reorder ancestors [n, P] so that a particle that survives keeps its slot.

    Slots of an item are exchangeable; a particle that stays is not copied.
    """
    out = np.full_like(index, -1)
    for row, ancestors in enumerate(index):
        counts = np.bincount(ancestors, minlength=len(ancestors))
        stays = counts > 0
        out[row, stays] = stays.nonzero()[0]
        out[row, ~stays] = np.repeat(np.arange(len(counts)), np.maximum(counts - 1, 0))
    return out
