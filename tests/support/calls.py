"""Calls of a pipeline."""

from __future__ import annotations

from typing import Any

from gen.core.sampling_params import SamplingParams


def only(**explicit: Any) -> dict[str, Any]:
    """Return keywords for all sampling parameters: the given ones, and all others switched off.

    A pipeline takes what is not said from the modality's default.
    """
    return SamplingParams(**explicit).to_dict()
