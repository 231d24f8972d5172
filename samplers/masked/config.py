"""The knobs of masked decoding, all of them: which parts, and what the parts ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar

from gen.core.errors import bad_value
from gen.core.registry import registry

PARTS = {
    "order": "order",
    "schedule": "schedule",
    "proposer": "proposer",
    "selector": "selector",
    "remasker": "remasker",
    "stop": "stop",
    "blocks": "block_schedule",
    "cache": "cache_policy",
}  # knob -> kind of part
INTEGERS = {
    "steps": 1,
    "block_length": 0,
    "block_steps": 0,
    "history": 1,
    "buffer_size": 1,
    "radius": 0,
    "remask_count": 0,
    "max_post_steps": 0,
    "answer_start": 0,
    "answer_length": 0,
    "cache_refresh": 0,
    "cache_radius": 0,
    "cache_before": 0,
    "cache_after": 0,
    "cache_warmup": 0,
    "cache_window": 1,
    "cache_active": 1,
}  # the least
NUMBERS = {
    "exponent": (1e-9, inf),
    "choice_temperature": (0.0, inf),
    "conf_threshold": (0.0, inf),
    "low_threshold": (0.0, inf),
    "factor": (0.0, inf),
    "entropy_bound": (0.0, inf),
    "kl_threshold": (0.0, inf),
    "edit_threshold": (0.0, inf),
    "credit_weight": (0.0, inf),
    "credit_decay": (0.0, 1.0),
    "credit_power": (0.0, inf),
    "position_decay": (0.0, inf),
    "density_width": (1e-9, inf),
    "remask_threshold": (0.0, 1.0),
    "remask_margin": (0.0, 1.0),
    "remask_rate": (0.0, 1.0),
    "gap_threshold": (0.0, inf),
    "delimiter_threshold": (0.0, inf),
    "filter_threshold": (0.0, inf),
}  # from, to
# What other libraries call a knob. LLaDA2Pipeline of diffusers: threshold, editing_threshold,
# num_inference_steps; Fast-dLLM: threshold; LLaDA:
# remasking; Dream: alg; dInfer: block_size; KLASS: history_length
ALIASES = {
    "threshold": "conf_threshold",
    "editing_threshold": "edit_threshold",
    "num_inference_steps": "steps",
    "remasking": "order",
    "alg": "order",
    "block_size": "block_length",
    "history_length": "history",
}
SPELLINGS = {
    "remasking": {"low_confidence": "confidence", "random": "random"},
    "alg": {"maskgit_plus": "confidence", "topk_margin": "margin", "entropy": "entropy"},
}  # and their words for an order


@dataclass(frozen=True)
class MaskedParams:
    """``steps``: forward calls at most, where the selector is ``schedule``; with blocks, an equal
    part of them for each, or ``block_steps`` where that is not 0. ``align_blocks``: blocks
    ``fixed`` and ``lookahead`` are counted from the first id of the condition, not of the canvas.

    The parts, by name: ``order`` (by default confidence for ids and random for latents),
    ``schedule``, ``proposer``, ``selector``, ``remasker``, ``stop``, ``blocks``, ``cache``.
    ``confidence_on``: ``raw``, the model's own probabilities, or ``shaped``, those of the law. What
    each of the other knobs means is said by the part that asks for it. ``ALIASES`` are other names
    for them.
    """

    aliases: ClassVar[Mapping[str, str]] = ALIASES
    spellings: ClassVar[Mapping[str, Mapping[str, Any]]] = SPELLINGS

    steps: int = 12
    order: str | None = None
    schedule: str = "cosine"
    exponent: float = 2.0
    choice_temperature: float = 4.5
    proposer: str = "categorical"
    confidence_on: str = "shaped"
    selector: str = "schedule"
    conf_threshold: float = 0.9
    low_threshold: float = 0.6
    factor: float = 1.0
    entropy_bound: float = 0.1
    kl_threshold: float = 0.01
    history: int = 2
    buffer_size: int = 4
    radius: int = 4
    credit_weight: float = 0.7
    credit_decay: float = 0.8
    credit_power: float = 0.2
    density_width: float = 10.0
    position_decay: float = 0.0
    filter: str = ""
    filter_threshold: float = 0.96
    remasker: str = "none"
    remask_threshold: float = 0.3
    remask_margin: float = 0.3
    remask_count: int = 1
    remask_rate: float = 0.1
    edit_threshold: float = 0.5
    max_post_steps: int = 16
    stop: str = "filled"
    gap_threshold: float = 7.5
    answer_start: int = 0
    answer_length: int = 0
    blocks: str = "whole"
    block_length: int = 0
    block_steps: int = 0
    align_blocks: bool = False
    delimiter_threshold: float = 0.3
    cache: str = "none"
    cache_refresh: int = 0
    cache_radius: int = 4
    cache_before: int = 16
    cache_after: int = 16
    cache_warmup: int = 4
    cache_window: int = 64
    cache_active: int = 16
    cache_settle: bool = False

    def __post_init__(self) -> None:
        for name, low in INTEGERS.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise bad_value(f"sampler.{name}", value, f"an integer of at least {low}")
        for name, (low, high) in NUMBERS.items():
            value = getattr(self, name)
            if (
                not isinstance(value, (int, float))
                or isinstance(value, bool)
                or not low <= value <= high
                or value == inf
            ):
                said = (
                    f"a number between {low:g} and {high:g}"
                    if high < inf
                    else "a number above 0"
                    if 0 < low < 1e-6
                    else f"a number of at least {low:g}"
                )
                raise bad_value(f"sampler.{name}", value, said)
        for name, kind in PARTS.items():
            if getattr(self, name) is not None:
                registry.get(kind, getattr(self, name), f"sampler.{name}")
        if not isinstance(self.filter, str):
            raise bad_value(
                "sampler.filter",
                self.filter,
                "a folder with a trained filter, or the name of an embedded one",
            )
        for name in ("align_blocks", "cache_settle"):
            if not isinstance(getattr(self, name), bool):
                raise bad_value(f"sampler.{name}", getattr(self, name), "true or false")
        if self.confidence_on not in ("raw", "shaped"):
            raise bad_value("sampler.confidence_on", self.confidence_on, "raw or shaped")
        if self.blocks in ("fixed", "lookahead", "adaptive", "sliding") and not self.block_length:
            raise bad_value(
                "sampler.block_length",
                self.block_length,
                f"an integer of at least 1, where blocks is {self.blocks!r}",
            )
