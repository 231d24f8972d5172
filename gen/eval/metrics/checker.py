"""Prompt accuracy: the share of outputs that the modality's checker passes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gen.contracts.condition import Condition
from gen.contracts.modality import Verdict
from gen.core.registry import register, registry
from gen.eval.metric import Item, Metric, Scores, State


@register("metric", "checker")
@dataclass(frozen=True)
class Checker(Metric):
    """Shares of outputs that the modality's checker passes and finds valid. Outputs of published
    and foreign checkpoints are not judged."""

    name = "checker"

    def open(self, device: torch.device) -> dict[str, Any]:
        return {}  # modalities by name

    def skip(self, row: Mapping[str, Any], folder: Any, model: Any) -> str | None:
        return folder.without_checker(row)

    def read(self, item: Item, model: dict[str, Any]) -> Verdict:
        name = item.row["modality"]
        if name not in model:
            model[name] = registry.get("modality", name)()
        parts = {"text": item.row["prompt"], **item.row.get("condition", {})}
        return model[name].judge(model[name].load(item.path), Condition.of(parts))

    def measure(self, samples: Iterator[tuple[Item, Verdict]], model: Any) -> State:
        verdicts = {
            item.row["id"]: {
                "passed": bool(verdict.passed),
                "valid": bool(verdict.valid),
                "detail": verdict.detail,
            }
            for item, verdict in samples
        }
        return {"verdicts": np.asarray(json.dumps(verdicts, ensure_ascii=False))}

    def merge(self, a: State, b: State) -> State:
        """Join the verdicts."""
        both = verdicts_of(a) | verdicts_of(b)
        return {"verdicts": np.asarray(json.dumps(both, ensure_ascii=False))}

    def scores(self, total: State, reference: Any) -> Scores:
        return shares(list(verdicts_of(total).values()))


def verdicts_of(state: State) -> dict[str, dict[str, Any]]:
    """Return the verdicts of a state by the id of their item."""
    return json.loads(str(state["verdicts"]))


def shares(verdicts: list[dict[str, Any]]) -> dict[str, float]:
    """Compute the shares of verdicts that are passed and valid."""
    return {key: sum(v[key] for v in verdicts) / len(verdicts) for key in ("passed", "valid")}
