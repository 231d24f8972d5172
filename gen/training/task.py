"""What a training run trains: its model, its loss and the folders that it writes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

MODEL, ADAPTER = "model", "adapter"  # folders of what a run makes


@dataclass(frozen=True)
class Written:
    """What a run has written.

    Attributes:
        model: folder of the trained model, or the base of an adapter that was not merged.
        adapter: folder of an adapter in PEFT's layout; None where all weights were trained.
        merged: whether ``model`` holds the trained weights.
    """

    model: str
    adapter: str | None = None
    merged: bool = True

    @property
    def load(self) -> dict[str, Any]:
        """Keys of a job that load the trained model."""
        options = {} if self.merged else {"model_options": {"adapters": self.adapter}}
        return {"model": self.model, **options}

    @property
    def folders(self) -> dict[str, str]:
        """Folders that were written, by what they hold."""
        found = {MODEL: self.model if self.merged else None, ADAPTER: self.adapter}
        return {name: folder for name, folder in found.items() if folder is not None}


class Task(ABC):
    """Model, loss and files of a training run.

    Attributes:
        model: the model, trained in place.
        casts: whether the forward pass may run with bfloat16 weights.
        base: digest of the weights under an adapter; empty where all weights are trained.
    """

    model: nn.Module
    casts: bool
    base: str = ""

    @abstractmethod
    def loss(self, forward: Any, rows: Tensor, seed: int, drop: float) -> Tensor:
        """Return the mean loss of samples.

        Args:
            forward: the model, or its forward pass with cast weights.
            rows: long [B], indices of the samples.
            seed: seed of masks and dropped conditions.
            drop: share of dropped conditions.
        """

    def on_step(self, step: int) -> None:  # noqa: B027 (most tasks do nothing)
        """Follow the update of the weights in a step, from 0."""

    def state(self) -> dict[str, Any]:
        """Return what later steps depend on beside the weights."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Go on from what ``state`` returned."""

    @abstractmethod
    def save(self, out: Path) -> Written:
        """Write what was trained into the folder of the run, so that the pipeline loads it."""
