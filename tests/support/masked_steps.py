"""Steps of the masked loop, made by hand for tests of parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch

from gen.samplers.engine.rows import RowStore
from gen.samplers.masked.step import (
    BlockProgress,
    CanvasView,
    MaskedStep,
    Prediction,
    TokenProposal,
)

RECORDS = {
    "view": CanvasView,
    "block": BlockProgress,
    "prediction": Prediction,
    "proposal": TokenProposal,
}
# fields of records that the step shows under another name
NAMES = {("view", "tokens"): "canvas", ("proposal", "tokens"): "proposed_tokens"}


def masked_step(rng, rows, step_index, space, params, memory: Any = None, **values) -> MaskedStep:
    """A step with the records that ``values`` have fields of; other fields of these are None."""
    values.setdefault("num_prompt_tokens", torch.zeros_like(rows))
    values.setdefault("committed_logp", None)
    if "logprobs" in values:
        values.setdefault("fresh", torch.ones_like(values["masked"]))
    memory = RowStore() if memory is None else memory
    records = {}
    for name, kind in RECORDS.items():
        names = {f.name: NAMES.get((name, f.name), f.name) for f in fields(kind)}
        if any(shown in values for shown in names.values()):
            records[name] = kind(**{own: values.pop(shown, None) for own, shown in names.items()})
    assert not values, f"unknown fields {list(values)}"
    return MaskedStep(rng, rows, step_index, space, params, memory, **records)


def changed(step: MaskedStep, **values) -> MaskedStep:
    """The step with other values of some fields of its records."""
    for name, kind in RECORDS.items():
        names = {NAMES.get((name, f.name), f.name): f.name for f in fields(kind)}
        new = {names[shown]: values.pop(shown) for shown in list(values) if shown in names}
        if new:
            step = replace(step, **{name: replace(getattr(step, name), **new)})
    assert not values, f"unknown fields {list(values)}"
    return step


def always(x: Any) -> Callable[[], Any]:
    """A function that returns ``x``."""
    return lambda: x
