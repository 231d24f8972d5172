"""Contract of a metric over the media of a job folder.

A metric measures the items of one shard at a time and leaves a state: a few arrays that are enough
to compute the metric (its sufficient statistic). States are merged from the left in the order of
the shards, in float64, so the result does not depend on how many processes measured them.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import yaml

from gen.core.errors import GenError, bad_value, unknown
from gen.core.params import check_field
from gen.core.registry import registry

State = dict[str, np.ndarray]
Scores = dict[str, Any]


@dataclass(frozen=True)
class Item:
    """Finished item of a folder.

    Attributes:
        row: its row of the manifest; of a plain folder, ``id``, ``file`` and an empty prompt.
        path: its media file, which is there until the next item is asked for.
    """

    row: Mapping[str, Any]
    path: Path


@dataclass(frozen=True)
class Metric(ABC):
    """Metric whose fields are its parameters.

    Attributes:
        name: name in the registry.
        media: kinds of media that it measures: image, audio, video, text; empty for all.
        reference: True if it compares the folder with a reference.
        packages: packages of the extra ``eval`` that it imports.
    """

    name: ClassVar[str]
    media: ClassVar[tuple[str, ...]] = ()
    reference: ClassVar[bool] = False
    packages: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            check_field(f, getattr(self, f.name), self.name)

    def open(self, device: torch.device) -> Any:
        """Load and return the models that the metric asks, once per process."""
        return None

    def skip(self, row: Mapping[str, Any], folder: Any, model: Any) -> str | None:
        """Return the reason why an item cannot be judged, or None.

        Args:
            row: row of the manifest.
            folder: ``gen.eval.folders.MediaFolder`` of the item.
            model: result of ``open``.
        """
        return None

    @abstractmethod
    def read(self, item: Item, model: Any) -> Any:
        """Read what the metric needs of one item. An exception makes the item a broken one.

        Args:
            item: the item.
            model: result of ``open``.
        """

    @abstractmethod
    def measure(self, samples: Iterator[tuple[Item, Any]], model: Any) -> State:
        """Reduce the items of a shard to a state.

        Args:
            samples: items with what ``read`` returned; at least one.
            model: result of ``open``.
        """

    def merge(self, a: State, b: State) -> State:
        """Merge the states of two runs of items, ``a`` before ``b``; by default their sums."""
        return {key: a[key] + b[key] for key in a}

    def total(self, states: Iterable[State]) -> Any:
        """Merge the states of all shards, in their order."""
        return reduce(self.merge, states)

    @abstractmethod
    def scores(self, total: Any, reference: Any) -> Scores:
        """Compute the figures of the metric; ``reference`` is the total of the reference."""

    def read_reference(self, path: Path) -> Any:
        """Read the total of a reference from a file of statistics.

        Raises:
            GenError: the metric cannot compare with such a file.
        """
        raise GenError(
            f"--reference {path} is a file; metric {self.name} expected a job folder or a folder"
            " of media"
        )

    @property
    def settings(self) -> dict[str, Any]:
        """Parameters by name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


def make_metric(name: str, settings: Mapping[str, Any]) -> Metric:
    """Make a metric from its name and parameters.

    Args:
        name: name in the registry.
        settings: parameters by name.

    Raises:
        GenError: unknown name or parameter, wrong value, or a package that is not installed.
    """
    cls = registry.get("metric", name)
    known = [f.name for f in dataclasses.fields(cls)]
    for key in settings:
        if not known:
            raise GenError(f"{name}.{key} is given; metric {name} has no parameters")
        if key not in known:
            raise unknown(f"parameter of metric {name}", key, known)
    require_packages(name, cls.packages)
    return cls(**settings)


def require_packages(name: str, packages: Iterable[str]) -> None:
    """Raise ``GenError`` with a pip line for a package that is not installed."""
    for package in packages:
        if find_spec(package) is None:
            raise missing_package(f"metric {name}", package, "eval")


class Unavailable(GenError):
    """Raised where a package is not installed; no item is to blame."""


def missing_package(user: str, package: str, extra: str) -> Unavailable:
    """Return the error of a package that is not installed.

    Args:
        user: what needs the package.
        package: name of the package.
        extra: extra of gen that brings it.
    """
    return Unavailable(
        f'{user} needs the package {package}; install it with: pip install "gen-toolkit[{extra}]"'
    )


def parse_metrics(names: str, assignments: Iterable[str] = ()) -> list[Metric]:
    """Make the metrics of ``fid,clip_score`` with parameters such as ``fid.features=identity``.

    Raises:
        GenError: no name, an unknown one, or a parameter of a metric that is not asked for.
    """
    wanted = list(dict.fromkeys(n.strip() for n in names.split(",") if n.strip()))
    if not wanted:
        known = ", ".join(registry.table("metric"))
        raise GenError(f"--metrics is {names!r}; expected names separated by commas, of {known}")
    for name in wanted:
        registry.get("metric", name, "--metrics")
    settings: dict[str, dict[str, Any]] = {name: {} for name in wanted}
    for text in assignments:
        key, equals, value = text.partition("=")
        metric, dot, parameter = key.partition(".")
        if not equals or not dot or not parameter:
            raise bad_value("argument", text, f"METRIC.PARAMETER=VALUE, such as {wanted[0]}.x=1")
        if metric not in settings:
            raise unknown("metric", metric, wanted, f"the argument {text!r}; --metrics names")
        try:
            settings[metric][parameter] = yaml.safe_load(value)
        except yaml.YAMLError:
            settings[metric][parameter] = value
    return [make_metric(name, values) for name, values in settings.items()]
