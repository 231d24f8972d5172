"""Judges of pairs of unfinished outputs: whether they will say the same in the end.

prefix     1 where what is decided is the same, else 0
trained    logistic regression of the features below, by ``python -m gen.recipes.text.judge``

features of a pair    share of their longest common beginning, share of positions that agree,
                      whether the last tokens agree, share of tokens in common, decided share
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gen.core.errors import GenError, bad_type
from gen.models.load.locate import locate

FEATURES = ("beginning", "agreement", "last", "overlap", "decided")
FILE = "config.json"


class Judge(ABC):
    """Judge of pairs."""

    @abstractmethod
    def probability(self, tokens: np.ndarray, known: np.ndarray, first: int, other: int) -> float:
        """Return the probability that two outputs will say the same.

        Args:
            tokens: tokens of an item's outputs, [n, T(, C)].
            known: decided positions, bool [n, T].
            first: number of one of them.
            other: number of the other one.
        """


class PrefixJudge(Judge):
    """Judge by equality of all that is decided."""

    def probability(self, tokens, known, first, other):
        if not (known[first] == known[other]).all():
            return 0.0
        at = known[first]
        return float((tokens[first][at] == tokens[other][at]).all())


@dataclass(frozen=True)
class TrainedJudge(Judge):
    """Logistic regression on the features of a pair.

    Attributes:
        weights: one per feature.
        bias: logit of a pair whose features are 0.
    """

    weights: tuple[float, ...]
    bias: float

    def probability(self, tokens, known, first, other):
        x = features(tokens, known, first, other)
        return float(1 / (1 + np.exp(-(x @ np.asarray(self.weights) + self.bias))))

    def save(self, folder: Path) -> None:
        """Write the judge to a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        content = {"features": FEATURES, "weights": self.weights, "bias": self.bias}
        (folder / FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, name: str) -> TrainedJudge:
        """Read a judge.

        Args:
            name: name in the zoo, or folder.

        Raises:
            GenError: there is no such judge, or its features are others.
        """
        file = Path(locate(name, "judge")) / FILE
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            weights = tuple(map(float, content["weights"]))
            found, bias = tuple(content["features"]), float(content["bias"])
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise GenError(
                f"sampler.judge {name!r} cannot be read from {file}: {error}; expected 'prefix', or"
                " a folder made by python -m gen.recipes.text.judge"
            ) from None
        if found != FEATURES or len(weights) != len(FEATURES):
            raise GenError(
                f"sampler.judge {name!r} reads the features {', '.join(found)}; expected"
                f" {', '.join(FEATURES)}"
            )
        return cls(weights, bias)


def features(tokens: np.ndarray, known: np.ndarray, first: int, other: int) -> np.ndarray:
    """Compute the features of a pair, float64 [F]; see the module."""
    decided = known[first] & known[other]
    count = max(1, int(decided.sum()))
    one, two = tokens[first][decided], tokens[other][decided]
    same = one == two
    same = same if same.ndim == 1 else same.all(-1)
    common = int(np.cumprod(same).sum())
    overlap = len(set(one.ravel().tolist()) & set(two.ravel().tolist()))
    union = len(set(one.ravel().tolist()) | set(two.ravel().tolist()))
    return np.asarray(
        [
            common / count,
            same.mean() if len(same) else 1.0,
            float(same[-1]) if len(same) else 1.0,
            overlap / max(1, union),
            decided.mean(),
        ]
    )


def read_judge(spec: Any) -> Judge:
    """Return the judge of a parameter: ``prefix``, the name or folder of a trained one, or a judge.

    Raises:
        GenError: there is no such judge.
    """
    if isinstance(spec, Judge):
        return spec
    if not isinstance(spec, str):
        raise bad_type("sampler.judge", spec, "'prefix', the name or folder of a judge, or a judge")
    return PrefixJudge() if spec == "prefix" else TrainedJudge.load(spec)
