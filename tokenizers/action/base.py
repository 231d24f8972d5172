"""Normalisation of action chunks, and the base class of action tokenizers.

A chunk is a float array [H, D]: H steps (the horizon) of D dimensions, in physical units. Every
dimension d has two saved numbers, by default its 1% and 99% quantiles over the training data, and

    y = 2 (clip(a, low_d, high_d) - low_d) / (high_d - low_d) - 1  a = (low_d (1 - y) + high_d (1 +
        y)) / 2

so y is in [-1, 1], and values outside the two numbers are clipped to the nearer one. The numbers
belong to the frontend and are saved in its folder. They are never computed from a single chunk:
such a chunk could not be converted back to physical units, and a small movement would look like a
large one. Quantiles instead of extremes follow RT-2 (arXiv 2307.15818) and OpenVLA (arXiv
2406.09246).
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from gen.contracts.frontend import TokenFrontend, require_codes
from gen.core.errors import GenError, bad_value, unknown
from gen.core.registry import registry
from gen.models.load.locate import locate, pick_device, pick_dtype, read_config


@dataclass(frozen=True)
class ActionStatistics:
    """Range of every action dimension.

    ``low``, ``high``: D floats each in physical units, ``low <= high``. A constant dimension has
    ``low == high``: it becomes 0 and is restored to the last bit. Raises ``GenError`` for numbers
    that are not finite or not ordered.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            value = getattr(self, name)
            value = value.tolist() if isinstance(value, (np.ndarray, Tensor)) else value

            def number(x):
                return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)

            if not isinstance(value, (list, tuple)) or not value or not all(map(number, value)):
                raise bad_value(f"statistics.{name}", value, "one finite number per dimension")
            object.__setattr__(self, name, tuple(map(float, value)))
        if len(self.low) != len(self.high):
            raise GenError(
                f"the statistics have {len(self.low)} low and {len(self.high)} high numbers;"
                " expected as many of both"
            )
        for d, (low, high) in enumerate(zip(self.low, self.high, strict=True)):
            if low > high or math.isinf(high - low):
                raise GenError(
                    f"the statistics of dimension {d} are {low} to {high}; expected low <= high, a"
                    " finite distance apart"
                )

    @property
    def dimensions(self) -> int:
        """Number of dimensions, D."""
        return len(self.low)

    @classmethod
    def from_data(
        cls,
        actions: np.ndarray | Sequence[np.ndarray],
        quantiles: tuple[float, float] = (0.01, 0.99),
    ) -> Self:
        """Compute the statistics of actions [N, H, D], or of chunks [H, D] of different lengths.

        ``quantiles``: (0, 1) are minimum and maximum. Raises ``GenError`` for other shapes, and for
        a dimension that varies although its quantiles are equal (a gripper that hardly ever
        closes).
        """
        if len(quantiles) != 2 or not 0 <= quantiles[0] < quantiles[1] <= 1:
            raise bad_value("quantiles", quantiles, "two numbers, 0 <= first < second <= 1")
        chunks = [numbers(c, "the actions") for c in actions]
        if not chunks or any(c.ndim != 2 or c.shape[1:] != chunks[0].shape[1:] for c in chunks):
            raise GenError(
                f"the actions have shapes {sorted({c.shape for c in chunks})}; expected [N, H, D],"
                " or chunks [H, D] of one D"
            )
        flat = np.concatenate(chunks)
        if not flat.size:
            raise GenError("the actions are empty; expected at least one step of one dimension")
        low, high = np.quantile(flat, quantiles, axis=0)
        collapsed = np.flatnonzero((low == high) & (flat.min(0) < flat.max(0)))
        if len(collapsed):
            raise GenError(
                f"dimension {collapsed[0]} of the actions varies, but its quantiles {quantiles} are"
                f" both {low[collapsed[0]]}; expected two different ones: use quantiles (0, 1)"
            )
        return cls(low, high)

    def normalise(self, actions: np.ndarray) -> np.ndarray:
        """Convert physical units [..., D] to float64 in [-1, 1], clipped. Raises ``GenError`` for
        another D, NaN and inf."""
        low, width = np.array(self.low), np.subtract(self.high, self.low)
        a = np.clip(self._checked(actions), low, self.high)
        return np.where(width > 0, 2 * ((a - low) / np.where(width > 0, width, 1)) - 1, 0.0)

    def unnormalise(self, actions: np.ndarray) -> np.ndarray:
        """Convert values [..., D], clipped to [-1, 1], to float64 in physical units. Raises
        ``GenError`` as ``normalise`` does."""
        low, high = np.array(self.low), np.array(self.high)
        y = np.clip(self._checked(actions), -1, 1)
        return np.clip(low * ((1 - y) / 2) + high * ((1 + y) / 2), low, high)

    def _checked(self, actions: np.ndarray) -> np.ndarray:
        array = numbers(actions, "the action")
        if not array.ndim or array.shape[-1] != self.dimensions:
            raise GenError(
                f"the action has shape {array.shape}; expected [..., {self.dimensions}], the"
                " dimensions of the statistics"
            )
        return array

    def to_dict(self) -> dict[str, list[float]]:
        """Convert to JSON-serialisable lists; ``from_dict`` restores the same bits."""
        return {k: list(v) for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, saved: Any) -> Self:
        """Restore the statistics of ``to_dict``. Raises ``GenError`` for other keys."""
        if not isinstance(saved, Mapping) or set(saved) != {"low", "high"}:
            raise bad_value(
                "statistics", saved, "a mapping of 'low' and 'high' to one number per dimension"
            )
        return cls(saved["low"], saved["high"])


def numbers(array: Any, name: str) -> np.ndarray:
    """Convert to float64. Raises ``GenError`` for anything but real numbers, and for NaN and inf,
    with the index of the first one."""
    try:
        array = np.asarray(array)
    except ValueError:  # rows of different lengths
        array = np.empty(0, object)
    if array.dtype.kind not in "fiu":
        raise GenError(
            f"{name}: an array of {array.dtype} {array.shape}; expected real numbers of one shape"
        )
    array = array.astype(np.float64)
    if not np.isfinite(array).all():
        where = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
        raise GenError(f"{name}: {array[where]} at {where}; expected finite numbers")
    return array


def at_least(name: str, value: Any, least: int) -> int:
    """Return ``value``. Raises ``GenError`` unless it is an integer of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise bad_value(name, value, f"an integer of at least {least}")
    return value


class ActionFrontend(TokenFrontend):
    """Base class of action tokenizers: normalisation, checks and folders.

    Signals are [B, H, D] in [-1, 1] on ``device`` in ``dtype``. ``from_pretrained`` of this base
    class loads any action tokenizer. A subclass declares ``name``, its name in the registry, and
    ``keys``, its attributes that are saved in ``config.json`` and passed to the constructor besides
    ``horizon``, ``dimensions`` and ``statistics``. Files beside the config are handled by
    ``save_parts`` and ``load_parts``.
    """

    name: ClassVar[str]
    keys: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        horizon: int,
        dimensions: int,
        statistics: ActionStatistics,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | str = torch.float32,
    ):
        self.horizon, self.dimensions = (
            at_least("horizon", horizon, 1),
            at_least("dimensions", dimensions, 1),
        )
        if not isinstance(statistics, ActionStatistics):
            raise bad_value(
                "statistics",
                statistics,
                "an ActionStatistics, which restores physical units",
            )
        if statistics.dimensions != dimensions:
            raise GenError(
                f"the statistics are of {statistics.dimensions} dimensions; expected {dimensions},"
                " those of the frontend"
            )
        self.statistics, self.device, self.dtype = (
            statistics,
            pick_device(device),
            pick_dtype(dtype),
        )
        if not self.dtype.is_floating_point:
            raise bad_value("dtype", dtype, "a floating-point type")

    def preprocess(self, media: Any) -> Tensor:
        """Normalise a chunk [H, D] in physical units to [-1, 1]. Raises ``GenError`` for another
        shape, NaN and inf."""
        chunk = numbers(media, "the action chunk")
        if chunk.shape != (self.horizon, self.dimensions):
            raise GenError(
                f"the action chunk has shape {chunk.shape}; expected"
                f" {(self.horizon, self.dimensions)} (steps, dimensions)"
            )
        return torch.from_numpy(self.statistics.normalise(chunk)).to(self.dtype).to(self.device)

    def postprocess(self, x: Tensor) -> np.ndarray:
        """Convert a signal [H, D] to float32 [H, D] in physical units. Raises ``GenError`` for
        another shape."""
        if tuple(x.shape) != (self.horizon, self.dimensions):
            raise GenError(
                f"the signal has shape {tuple(x.shape)}; expected"
                f" {(self.horizon, self.dimensions)}, one without a batch axis"
            )
        return self.statistics.unnormalise(x.detach().cpu().double().numpy()).astype(np.float32)

    def grid_for(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        if tuple(input_shape[-2:]) != (self.horizon, self.dimensions):
            raise GenError(
                f"the signal has shape {tuple(input_shape)}; expected [..., {self.horizon},"
                f" {self.dimensions}]"
            )
        return self.grid

    @property
    @abstractmethod
    def grid(self) -> tuple[int, ...]:
        """Code grid of every chunk."""

    def require_signals(self, x: Tensor) -> Tensor:
        """Return signals [B, H, D] on the frontend's device. Raises ``GenError`` for another shape,
        and for values outside [-1, 1]."""
        if (
            x.ndim != 3
            or tuple(x.shape[1:]) != (self.horizon, self.dimensions)
            or not x.is_floating_point()
        ):
            raise GenError(
                f"the signals are {x.dtype} {tuple(x.shape)}; expected floats [B, {self.horizon},"
                f" {self.dimensions}]"
            )
        if not bool((x.abs() <= 1).all()):
            raise GenError(
                "the signals leave [-1, 1] or hold NaN; expected normalised signals, as preprocess"
                " returns them"
            )
        return x.to(self.device)

    def require_codes(self, codes: Tensor) -> Tensor:
        """Return codes [B, Q, *grid] on the frontend's device. Raises ``GenError`` for another
        shape, dtype or range."""
        require_codes(codes, self.config)
        if codes.dtype != torch.long or tuple(codes.shape[2:]) != self.grid:
            shape = ", ".join(map(str, (len(self.config.codebook_sizes), *self.grid)))
            raise GenError(
                f"the codes are {codes.dtype} {tuple(codes.shape)}; expected int64 [B, {shape}]"
            )
        return codes.to(self.device)

    # --- folders

    def to_dict(self) -> dict[str, Any]:
        """Return the content of ``config.json``."""
        fields = {k: getattr(self, k) for k in ("horizon", "dimensions", *self.keys)}
        return {"frontend_class": self.name, **fields, "statistics": self.statistics.to_dict()}

    def digest(self, *parts: Any) -> Tensor:
        """Digest the config and JSON-serialisable parts to 32 numbers of 0 to 255, exact in every
        floating-point dtype."""
        text = json.dumps([self.to_dict(), *parts], sort_keys=True)
        return torch.tensor(list(hashlib.sha256(text.encode()).digest()), dtype=torch.float32)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json`` and the files of ``save_parts``."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        self.save_parts(path)
        (path / "config.json").write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    def save_parts(self, path: Path) -> None:
        """Write files beside the config, by default none."""

    @classmethod
    def load_parts(cls, path: Path, config: dict[str, Any]) -> dict[str, Any]:
        """Read further constructor arguments from files beside the config; keys of the config that
        they replace are removed from it."""
        return {}

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | str = torch.float32,
    ) -> Self:
        """Load a zoo name or local folder. Raises ``GenError`` for a folder that is missing or
        holds another frontend, and for a config without statistics or another key."""
        path = locate(folder, "frontend")
        if not isinstance(path, Path):
            raise GenError(
                f"frontend {folder} is not a folder on this machine; expected one with config.json"
            )
        config = read_config(path)
        if not isinstance(config, dict):
            raise GenError(
                f"the config of frontend {folder} is {type(config).__name__}; expected a mapping"
            )
        name = config.pop("frontend_class", None)
        if cls is ActionFrontend:
            subclass = registry.get("tokenizer", str(name), f"frontend_class of {path}")
            if not issubclass(subclass, ActionFrontend):
                raise GenError(f"frontend {folder} is {name!r}; expected an action tokenizer")
            return subclass.from_pretrained(path, device, dtype)
        if name != cls.name:
            raise GenError(f"frontend {folder} is {name!r}; expected {cls.name!r}")
        if "statistics" not in config:
            raise GenError(
                f"frontend {folder} has no statistics; expected 'statistics' with 'low' and 'high'"
                " in its config.json, which map codes to physical actions"
            )
        expected = ("horizon", "dimensions", *cls.keys, "statistics")
        for key in (k for k in config if k not in expected):
            raise unknown("key", key, expected, f"config.json of frontend {folder}")
        for key in (k for k in expected if k not in config):
            raise GenError(
                f"the config of frontend {folder} lacks {key!r}; expected {', '.join(expected)}"
            )
        config["statistics"] = ActionStatistics.from_dict(config["statistics"])
        parts = cls.load_parts(path, config)
        return cls(**config, **parts, device=device, dtype=dtype)
