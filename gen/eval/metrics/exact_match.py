"""Exact match: the share of texts that equal their answer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gen.core.errors import GenError
from gen.core.params import flag, text
from gen.core.registry import register
from gen.eval.metric import Item, Metric, Scores, State
from gen.eval.readers import read_text, text_of


@register("metric", "exact_match")
@dataclass(frozen=True)
class ExactMatch(Metric):
    """Share of texts that equal their answer, white space aside; higher is better. ``answer``: key
    of ``meta`` that holds it. ``ignore_case``: compare in lower case. ``pattern``: regular
    expression whose first group is compared, such as ``answer is (.*)``; the last match counts."""

    answer: str = text("answer", "a key of meta")
    ignore_case: bool = flag(False)
    pattern: str = text("", "a regular expression with a group")

    name, media = "exact_match", ("text",)

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise GenError(f"exact_match.pattern is {self.pattern!r}: {error}") from None
        if self.pattern and not groups:
            raise GenError(
                f"exact_match.pattern is {self.pattern!r}; expected a group, such as"
                " 'answer is (.*)'"
            )

    def skip(self, row: Mapping[str, Any], folder: Any, model: Any) -> str | None:
        return None if text_of(row, self.answer) is not None else f"its meta has no {self.answer!r}"

    def read(self, item: Item, model: Any) -> str:
        return read_text(item.path)

    def measure(self, samples: Iterator[tuple[Item, Any]], model: Any) -> State:
        equal = [
            self._normal(self._extract(output)) == self._normal(str(text_of(item.row, self.answer)))
            for item, output in samples
        ]
        return {"equal": np.asarray(sum(equal)), "count": np.asarray(len(equal))}

    def scores(self, total: State, reference: Any) -> Scores:
        return {"exact_match": int(total["equal"]) / int(total["count"])}

    def _extract(self, output: str) -> str:
        if not self.pattern:
            return output
        found = list(re.finditer(self.pattern, output))
        return (found[-1][1] or "") if found else ""

    def _normal(self, words: str) -> str:
        joined = " ".join(words.split())
        return joined.lower() if self.ignore_case else joined
