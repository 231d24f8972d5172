"""CLIPScore: 100 times the cosine between the embeddings of an image and of its text.

The formula is that of torchmetrics: the mean over all items, and 0 where it is negative.

Paper: Hessel et al., CLIPScore: A Reference-free Evaluation Metric (arXiv:2104.08718).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gen.core.errors import GenError
from gen.core.params import integer, text
from gen.core.registry import register
from gen.eval.metric import Item, Metric, Scores, State
from gen.eval.readers import read_image, text_of
from gen.models.load.libraries import LOADING, transformers

EXPECTED = "a folder or hub id of a CLIP model, such as openai/clip-vit-base-patch32"


@register("metric", "clip_score")
@dataclass(frozen=True)
class CLIPScore(Metric):
    """Agreement of images and their prompts by a CLIP model of transformers; higher is better.
    ``model``: folder or hub id. ``text``: ``prompt``, or the key of ``meta`` that holds the text.
    ``batch_size``: images per call of the model."""

    model: str = text("", EXPECTED)
    text: str = text("prompt", "prompt, or a key of meta")
    batch_size: int = integer(16, least=1)

    name, media = "clip_score", ("image",)
    packages = ("torchmetrics",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model:
            raise GenError(f"clip_score.model is missing; expected {EXPECTED}")

    def open(self, device: torch.device) -> Any:
        library = transformers()
        try:
            with LOADING:
                model = library.CLIPModel.from_pretrained(self.model).eval().to(device)
                processor = library.AutoProcessor.from_pretrained(self.model)
        except (OSError, ValueError) as error:
            raise GenError(
                f"clip_score.model is {self.model!r}, which cannot be loaded:"
                f" {' '.join(str(error).split())[:200]}; expected {EXPECTED}"
            ) from None
        # an extra: imported when it is asked for
        score = import_module("torchmetrics.multimodal.clip_score").CLIPScore
        return score(lambda: (Embeddings(model), processor)), device

    def skip(self, row: Mapping[str, Any], folder: Any, model: Any) -> str | None:
        return None if text_of(row, self.text) is not None else f"its meta has no {self.text!r}"

    def read(self, item: Item, model: Any) -> tuple[Tensor, str]:
        return read_image(item.path), str(text_of(item.row, self.text))

    def measure(self, samples: Iterator[tuple[Item, Any]], model: Any) -> State:
        score, device = model
        total, count = 0.0, 0
        while batch := list(islice(samples, self.batch_size)):
            images, texts = zip(*(sample for _, sample in batch), strict=True)
            score.reset()
            with torch.inference_mode():
                score.update([image.to(device) for image in images], list(texts))
            total += float(score.score)
            count += len(batch)
        return {"sum": np.asarray(total), "count": np.asarray(count)}

    def scores(self, total: State, reference: Any) -> Scores:
        return {"clip_score": max(float(total["sum"]) / int(total["count"]), 0.0)}


class Embeddings(torch.nn.Module):
    """CLIP model whose embeddings are tensors, as torchmetrics expects them.

    transformers 5 returns them in an output object.
    """

    def __init__(self, model: Any):
        super().__init__()
        self.model, self.config = model, model.config

    def get_image_features(self, *args: Any, **kwargs: Any) -> Tensor:
        """Embed images [B, D]."""
        return _tensor(self.model.get_image_features(*args, **kwargs))

    def get_text_features(self, *args: Any, **kwargs: Any) -> Tensor:
        """Embed texts [B, D]."""
        return _tensor(self.model.get_text_features(*args, **kwargs))


def _tensor(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.pooler_output
