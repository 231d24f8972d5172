"""Fréchet distance between the Gaussians of two sets of features, from mergeable statistics.

A shard with fewer items than dimensions keeps its features, which are smaller than a covariance
matrix. Means and scatter matrices are merged by the update of Chan, Golub and LeVeque in float64:
sums of squares would lose the digits that a distance of similar sets consists of.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gen.core.errors import GenError
from gen.core.params import integer, text
from gen.eval.features import EXPECTED, Features, batches, load_features
from gen.eval.metric import Item, Metric, Scores, State
from gen.media.npz import read_npz

MOST_DIMENSIONS = 8192  # a covariance matrix of 512 MiB


@dataclass(frozen=True)
class Moments:
    """Count, mean [D] and scatter matrix [D, D] (sum of outer products of deviations), float64."""

    count: int
    mean: Tensor
    scatter: Tensor

    @classmethod
    def of(cls, features: Tensor) -> Moments:
        """Compute the moments of features [n, D]."""
        rows = features.double()
        mean = rows.mean(0)
        deviations = rows - mean
        return cls(len(rows), mean, deviations.T @ deviations)

    def __add__(self, other: Moments) -> Moments:
        count = self.count + other.count
        shift = other.mean - self.mean
        mean = self.mean + shift * (other.count / count)
        between = torch.outer(shift, shift) * (self.count * other.count / count)
        return Moments(count, mean, self.scatter + other.scatter + between)

    @property
    def covariance(self) -> Tensor:
        """Unbiased covariance matrix [D, D]."""
        return self.scatter / (self.count - 1)


def frechet_distance(mean_a: Tensor, cov_a: Tensor, mean_b: Tensor, cov_b: Tensor) -> float:
    """Compute |mean_a - mean_b|^2 + tr(A + B - 2 (A B)^(1/2)) of two Gaussians.

    The trace of (A B)^(1/2) is the sum of the singular values of A^(1/2) B^(1/2). Eigenvalues of
    A B would be off by the root of the machine precision where A or B is singular, as it is with
    fewer items than dimensions.

    Args:
        mean_a, mean_b: means [D], float64.
        cov_a, cov_b: covariance matrices A and B [D, D], float64.
    """
    roots = torch.linalg.svdvals(_root(cov_a) @ _root(cov_b)).sum()
    traces = cov_a.diagonal().sum() + cov_b.diagonal().sum()
    return float((mean_a - mean_b).square().sum() + traces - 2 * roots)


def _root(matrix: Tensor) -> Tensor:
    """Compute the symmetric root of a covariance matrix; eigenvalues that are rounding errors
    count as 0."""
    values, vectors = torch.linalg.eigh(matrix)
    least = values.max().clamp_min(0) * len(values) * torch.finfo(values.dtype).eps
    return (vectors * torch.where(values > least, values, 0).sqrt()) @ vectors.T


@dataclass(frozen=True)
class FrechetMetric(Metric):
    """Base of the Fréchet distances. ``features``: module of the features. ``batch_size``: items
    per call of it."""

    features: str = text("", EXPECTED)
    batch_size: int = integer(16, least=1)

    reference = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_features(self.name, self.features)

    def open(self, device: torch.device) -> Features:
        return load_features(self.features, device, f"{self.name}.features")

    def measure(self, samples: Iterator[tuple[Item, Any]], model: Any) -> State:
        kept: list[Tensor] = []
        moments: Moments | None = None
        for batch in batches(samples, self.batch_size):
            kept.append(model(batch))
            self._check_dimensions(kept[0].shape[1])
            if moments is not None or sum(map(len, kept)) > kept[0].shape[1]:
                part = Moments.of(torch.cat(kept))
                moments, kept = part if moments is None else moments + part, []
        if moments is None:
            return {"features": torch.cat(kept).numpy()}
        if kept:
            moments = moments + Moments.of(torch.cat(kept))
        return state_of(moments)

    def _check_dimensions(self, count: int) -> None:
        if count > MOST_DIMENSIONS:
            raise GenError(
                f"{self.name}.features has {count} dimensions; expected at most {MOST_DIMENSIONS},"
                " since the covariance matrix has their square"
            )

    def merge(self, a: State, b: State) -> State:
        return state_of(moments_of(a) + moments_of(b))

    def total(self, states: Any) -> State:
        return state_of(moments_of(super().total(states)))

    def scores(self, total: State, reference: State) -> Scores:
        for state, label in ((total, "the folder"), (reference, "the reference")):
            if "count" in state and int(state["count"]) < 2:
                raise GenError(f"{self.name}: {label} gives 1 feature vector; expected at least 2")
        (mean, cov), (mean_r, cov_r) = _gaussian(total), _gaussian(reference)
        if mean.shape != mean_r.shape:
            raise GenError(
                f"{self.name}: the reference has features of {len(mean_r)} dimensions; expected"
                f" {len(mean)}, as the folder's"
            )
        return {self.name: frechet_distance(mean_r, cov_r, mean, cov)}

    def read_reference(self, path: Path) -> State:
        """Read ``mu`` [D] and ``sigma`` [D, D] from an ``.npz`` file, as pytorch-fid writes it."""
        found = read_npz(path, ("mu", "sigma"))
        mean, cov = found["mu"].astype(np.float64), found["sigma"].astype(np.float64)
        if mean.ndim != 1 or cov.shape != (len(mean), len(mean)):
            raise GenError(
                f"{path} holds mu {mean.shape} and sigma {cov.shape}; expected [D] and [D, D]"
            )
        return {"mean": mean, "covariance": cov}


def require_features(name: str, features: str) -> None:
    """Raise ``GenError`` for a metric without a module of features."""
    if not features:
        raise GenError(f"{name}.features is missing; expected {EXPECTED}")


def moments_of(state: State) -> Moments:
    """Return the moments of a state."""
    if "features" in state:
        return Moments.of(torch.from_numpy(state["features"]))
    mean, scatter = torch.from_numpy(state["mean"]), torch.from_numpy(state["scatter"])
    return Moments(int(state["count"]), mean, scatter)


def state_of(moments: Moments) -> State:
    """Return moments as a state."""
    return {
        "count": np.asarray(moments.count),
        "mean": moments.mean.numpy(),
        "scatter": moments.scatter.numpy(),
    }


def _gaussian(state: State) -> tuple[Tensor, Tensor]:
    if "covariance" in state:
        return torch.from_numpy(state["mean"]), torch.from_numpy(state["covariance"])
    moments = moments_of(state)
    return moments.mean, moments.covariance
