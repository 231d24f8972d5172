"""Number of drafts by the number of rows in the batch, from a table.

    drafts_by_rows "1-4:5,5-16:3,17-:1": five drafts for up to four rows, one for 17 and more

Drafts of many rows fill the device that a few rows leave idle. vLLM calls the table
``num_speculative_tokens_per_batch_size``.

A row's drafts depend on how many other rows there are, so that another batch draws another sample
of the same distribution. A seed has to mean the same result in any batch. The policy therefore
asks for a verifier whose tokens do not depend on the drafts, such as ``follow``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from gen.core.errors import bad_value
from gen.core.params import Params, text
from gen.core.registry import register
from gen.samplers.causal.length_policies.base import LengthPolicy

EXPECTED = (
    "ranges of rows that follow each other from 1 on, the last one open, with their drafts, such"
    " as '1-4:5,5-16:3,17-:1'"
)


@dataclass(frozen=True)
class BatchSizeParams(Params):
    """Parameters of the policy.

    Attributes:
        drafts_by_rows: ranges of rows and their drafts, joined by commas.
    """

    drafts_by_rows: str = text("1-4:5,5-16:3,17-:1", EXPECTED)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.table()

    def table(self) -> list[tuple[int, int]]:
        """Return the first number of rows of each range, and its drafts."""
        found, following = [], 1
        for entry in self.drafts_by_rows.split(","):
            match = re.fullmatch(r"\s*(\d+)-(\d*):(\d+)\s*", entry)
            if match is None or int(match[1]) != following or following == 0:
                raise bad_value("sampler.drafts_by_rows", self.drafts_by_rows, EXPECTED)
            found.append((following, int(match[3])))
            following = int(match[2]) + 1 if match[2] else 0
            if following and following <= found[-1][0]:
                raise bad_value("sampler.drafts_by_rows", self.drafts_by_rows, EXPECTED)
        if following:
            raise bad_value("sampler.drafts_by_rows", self.drafts_by_rows, EXPECTED)
        return found


@register("length_policy", "batch_size", params=BatchSizeParams)
class BatchSize(LengthPolicy):
    """Number of drafts chosen by the number of active rows."""

    needs_same_tokens = True

    def __init__(self, rows, length, params):
        super().__init__(rows, length, params)
        self.table = params.table()

    @property
    def most(self):
        rows = len(self.lengths)
        drafts = [k for first, k in self.table if first <= rows][-1] if rows else 0
        # rows may have left since the last step
        self.lengths = np.full(rows, drafts)
        return drafts
