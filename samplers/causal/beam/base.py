"""Base class of causal samplers that follow a rule and draw nothing."""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import Any

from gen.core.errors import bad_value
from gen.core.params import check_field
from gen.core.sampler import Sampler


class DeterministicSampler(Sampler):
    """Causal sampler whose tokens follow from the distributions alone."""

    protocol = "causal"
    reference = "greedy decoding; a deterministic rule"
    guarantee = "approximate"

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            check_field(f, getattr(self, f.name))

    @property
    def deterministic(self) -> bool:
        return True


def early_stopping() -> Any:
    """Declare ``early_stopping`` as transformers has it."""

    def check(name: str, value: Any) -> None:
        if value not in (True, False, "never"):
            raise bad_value(name, value, "true, false or 'never'")

    return field(default=False, metadata={"check": check})
