"""GenEval: shares of images that GenEval's detector finds correct, by task.

The detector runs outside of gen. ``gen eval DIR --write-geneval OUT`` writes the images in its
layout, and this metric reads its verdicts. Scores are those of GenEval's ``summary_scores.py``:
the overall score is the mean over tasks, so a task with few prompts counts as much as any other.

Paper: Ghosh et al., GenEval: An Object-Focused Framework (arXiv:2310.11513).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from gen.core.errors import GenError
from gen.core.params import text
from gen.core.registry import register
from gen.eval.geneval import numbers_of, read_verdicts
from gen.eval.metric import Item, Metric, Scores, State

Counts = dict[str, list[int]]  # items and correct ones, by name
EXPECTED = "the results.jsonl that GenEval's evaluate_images.py wrote"


@register("metric", "geneval")
@dataclass(frozen=True)
class GenEval(Metric):
    """Shares of images that GenEval's detector finds correct, by tag; higher is better.
    ``results``: its file of verdicts."""

    results: str = text("", EXPECTED)

    name, media = "geneval", ("image",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.results:
            raise GenError(
                f"geneval.results is missing; expected {EXPECTED}, on a folder that gen eval DIR"
                " --write-geneval OUT made"
            )

    def open(self, device: Any) -> dict[str, Any]:
        return {"verdicts": read_verdicts(self.results)}

    def skip(self, row: Mapping[str, Any], folder: Any, model: Any) -> str | None:
        if "numbers" not in model:
            model["numbers"] = numbers_of(folder)
        if model["numbers"][row["id"]] in model["verdicts"] or row["status"] != "ok":
            return None
        return f"{self.results} has no verdict about it"

    def read(self, item: Item, model: dict[str, Any]) -> dict[str, Any]:
        prompt, sample = model["numbers"][item.row["id"]]
        return {"prompt": prompt, **model["verdicts"][prompt, sample]}

    def measure(self, samples: Iterator[tuple[Item, Any]], model: Any) -> State:
        counts: dict[str, Counts] = {"tags": {}, "prompts": {}}
        for _, verdict in samples:
            for table, key in (("tags", verdict["tag"]), ("prompts", str(verdict["prompt"]))):
                _add(counts[table], key, 1, int(verdict["correct"]))
        return {"counts": np.asarray(json.dumps(counts))}

    def merge(self, a: State, b: State) -> State:
        """Add the counts of tags and prompts; a prompt may go over several shards."""
        both, added = json.loads(str(a["counts"])), json.loads(str(b["counts"]))
        for table, rows in added.items():
            for key, (count, correct) in rows.items():
                _add(both[table], key, count, correct)
        return {"counts": np.asarray(json.dumps(both))}

    def scores(self, total: State, reference: Any) -> Scores:
        counts = json.loads(str(total["counts"]))
        tags = {tag: correct / count for tag, (count, correct) in sorted(counts["tags"].items())}
        images = [sum(column) for column in zip(*counts["tags"].values(), strict=True)]
        prompts = [correct > 0 for _, correct in counts["prompts"].values()]
        return {
            "overall": fmean(tags.values()),
            "correct_images": images[1] / images[0],
            "correct_prompts": sum(prompts) / len(prompts),
            **{f"tag:{tag}": share for tag, share in tags.items()},
        }


def _add(table: Counts, key: str, count: int, correct: int) -> None:
    before = table.get(key, [0, 0])
    table[key] = [before[0] + count, before[1] + correct]
