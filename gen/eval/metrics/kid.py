"""Kernel Inception distance (KID): the unbiased squared MMD of all features, with the kernel
(x y / D + 1)^3.

    KID = sum_{i != j} k(x_i, x_j) / m(m-1) + sum_{i != j} k(y_i, y_j) / n(n-1)
          - 2 sum_{i, j} k(x_i, y_j) / mn

All pairs count, so there is no subset to draw and no seed. The sums go over pairs of shards: two
shards of features are in memory at a time.

Paper: Binkowski et al., Demystifying MMD GANs (arXiv:1801.01401).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from gen.core.errors import GenError
from gen.core.params import integer, text
from gen.core.registry import register
from gen.eval.features import EXPECTED, Features, batches, load_features
from gen.eval.frechet import require_features
from gen.eval.metric import Item, Metric, Scores, State
from gen.eval.readers import read_image


@register("metric", "kid")
@dataclass(frozen=True)
class KID(Metric):
    """Squared MMD of image features to a reference; lower is better. ``features``: module of the
    features. ``batch_size``: images per call of it. ``degree``: of the polynomial kernel."""

    features: str = text("", EXPECTED)
    batch_size: int = integer(16, least=1)
    degree: int = integer(3, least=1)

    name, media, reference = "kid", ("image",), True
    packages = ("torchmetrics",)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_features(self.name, self.features)

    def open(self, device: torch.device) -> Features:
        return load_features(self.features, device, "kid.features")

    def read(self, item: Item, model: Any) -> Any:
        return read_image(item.path)

    def measure(self, samples: Iterator[tuple[Item, Any]], model: Any) -> State:
        kept = [model(batch) for batch in batches(samples, self.batch_size)]
        return {"features": torch.cat(kept).numpy()}

    def total(self, states: Iterable[State]) -> Iterable[State]:
        """Return the shards themselves: they are read again for every pair."""
        return states

    def scores(self, total: Iterable[State], reference: Iterable[State]) -> Scores:
        within, n = self._within(total)
        within_r, m = self._within(reference)
        if min(n, m) < 2:
            raise GenError(f"kid: {n} images and {m} of the reference; expected at least 2 each")
        between = sum(
            float(self._kernel(x, y).sum()) for x in _shards(total) for y in _shards(reference)
        )
        value = within / (n * (n - 1)) + within_r / (m * (m - 1)) - 2 * between / (n * m)
        return {"kid": value}

    def _within(self, states: Iterable[State]) -> tuple[float, int]:
        """Sum the kernel over all pairs of different items, and count the items."""
        value, count = 0.0, 0
        for i, x in enumerate(_shards(states)):
            kernel = self._kernel(x, x)
            value += float(kernel.sum() - kernel.diagonal().sum())
            value += sum(2 * float(self._kernel(x, y).sum()) for y in _shards(states, i + 1))
            count += len(x)
        return value, count

    def _kernel(self, x: Tensor, y: Tensor) -> Tensor:
        if x.shape[1] != y.shape[1]:
            raise GenError(f"kid: features of {x.shape[1]} and of {y.shape[1]} dimensions")
        # an extra: imported when it is asked for
        library = import_module("torchmetrics.image.kid")
        return library.poly_kernel(x, y, degree=self.degree)


def _shards(states: Iterable[State], first: int = 0) -> Iterator[Tensor]:
    for state in islice(states, first, None):
        yield torch.from_numpy(state["features"]).double()
