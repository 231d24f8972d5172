"""Budgets of searches: how much an item may cost."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gen.core.errors import bad_value, unknown
from gen.core.stats import Stats

UNITS = ("passes", "tokens", "seconds")
EXPECTED = "a positive number of passes, tokens or seconds, such as '500 passes' or {passes: 500}"


@dataclass(frozen=True)
class Budget:
    """Most that an item may cost. A search that has spent it ends with what it has.

    Attributes:
        amount: how much.
        unit: ``passes``, forward passes of all candidates; ``tokens``, positions that they sent
            through the model; or ``seconds`` of wall time.
    """

    amount: float
    unit: str

    @classmethod
    def read(cls, value: Any) -> Budget | None:
        """Return the budget of a parameter: ``500 passes``, ``{passes: 500}`` or None.

        Raises:
            GenError: it is none, or not positive.
        """
        if value is None:
            return None
        given = value
        if isinstance(value, str):
            found = re.fullmatch(r"\s*([0-9.e+]+)\s*([a-z]+)\s*", value)
            if not found:
                raise bad_value("sampler.budget", value, EXPECTED)
            given = {found[2]: float(found[1])}
        if not isinstance(given, Mapping) or len(given) != 1:
            raise bad_value("sampler.budget", value, EXPECTED)
        unit, amount = next(iter(given.items()))
        if unit not in UNITS:
            raise unknown("unit of sampler.budget:", unit, UNITS)
        is_number = isinstance(amount, (int, float)) and not isinstance(amount, bool)
        if not is_number or not 0 < amount < float("inf"):
            raise bad_value("sampler.budget", value, EXPECTED)
        return cls(float(amount), unit)

    def is_spent(self, stats: Stats, seconds: float) -> bool:
        """Tell whether an item has spent it.

        Args:
            stats: cost of the item so far.
            seconds: wall time of the call so far.
        """
        spent = {"passes": stats.nfe, "tokens": stats.tokens_computed, "seconds": seconds}
        return spent[self.unit] >= self.amount
