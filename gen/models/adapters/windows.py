"""Kinds of attention layers: what a layer sees of the positions before a query's own.

    full_attention       0 .. p
    sliding_attention    p - size + 1 .. p
    chunked_attention    size floor(p / size) .. p

A model has one kind of layers, or several that take a mask each. Which they are is read from its
config, as transformers does when it makes masks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gen.core.errors import GenError
from gen.models.load.networks import config_field

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


@dataclass(frozen=True)
class Window:
    """Positions that a layer sees.

    Attributes:
        size: how many, the query's own included.
        chunked: True if the positions are cut into chunks of ``size`` and a query sees its chunk,
            False if it sees the last ``size`` positions.
    """

    size: int
    chunked: bool = False

    def first(self, positions: Tensor) -> Tensor:
        """Return the first positions that queries at ``positions`` (long, any shape) see."""
        if self.chunked:
            return positions // self.size * self.size
        return positions - (self.size - 1)


Windows = Mapping[str, Window | None]  # by kind of layer; None sees all positions before


def windows_of(config: Any) -> Windows:
    """Read the kinds of attention layers of a text model.

    Args:
        config: config of transformers.

    Returns:
        Windows by kind of layer; empty where every layer sees everything before it.
    """
    sliding = config_field(config, "sliding_window")
    if not config_field(config, "use_sliding_window", True):
        sliding = None
    chunk = config_field(config, "attention_chunk_size")
    known = {
        FULL: None,
        SLIDING: Window(sliding) if sliding else None,
        CHUNKED: Window(chunk, chunked=True) if chunk else None,
    }
    kinds = config_field(config, "layer_types")
    if kinds is None:
        kinds = [SLIDING if sliding else CHUNKED if chunk else FULL]
    windows = {kind: known.get(kind) for kind in sorted(set(kinds))}
    return windows if any(windows.values()) else {}


def narrowest(windows: Windows) -> int | None:
    """Return the size of the smallest window; None without one."""
    return min((w.size for w in windows.values() if w is not None), default=None)


def require_followed(config: Any, positions: int) -> None:
    """Refuse positions from which on a network's attention depends on how full its cache is, which
    is the position of no row where rows differ.

    Args:
        config: config of transformers of a text model.
        positions: positions of prompt and answer.

    Raises:
        GenError: some queries would see or weigh other positions than in ``generate``.
    """
    name, scale = config.model_type, config_field(config, "floor_scale")
    if "local" in (config_field(config, "attention_layers") or ()):  # GPT-Neo
        require_within({"local": Window(config.window_size)}, positions, name)
    if scale and config_field(config, "attn_temperature_tuning") and positions >= scale:  # Llama 4
        raise GenError(
            f"prompt and answer take {positions} positions, and {name!r} scales attention from"
            f" {scale} on (attn_temperature_tuning); expected at most {scale - 1}"
        )


def require_within(windows: Windows, positions: int, name: str) -> None:
    """Refuse more positions than the layers of a model see, where masks are not made by layer.

    Args:
        windows: kinds of layers of the model.
        positions: positions of prompt and answer.
        name: type of the model.

    Raises:
        GenError: some layers see fewer positions.
    """
    size = narrowest(windows)
    if size is not None and positions > size:
        raise GenError(
            f"prompt and answer take {positions} positions, and layers of this {name!r} see"
            f" {size}; expected at most {size}"
        )
