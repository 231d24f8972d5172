"""Pooling of hidden states to one vector per text, as folders of sentence-transformers state it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gen.core.errors import GenError
from gen.models.load.reads import note_file

MODULES = "modules.json"
# what is concatenated, in this order
MODES = (
    "cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens",
    "lasttoken",
)  # fmt: skip


@dataclass(frozen=True)
class Pooling:
    """How an embedding model makes a vector of the hidden states of a text.

    Attributes:
        modes: names of ``MODES``, whose vectors are concatenated.
        normalized: whether the vector has length 1.
        prompt: text that is put before every text.
        most: tokens of a text; None for the positions of the model.
        unsupported: what of the folder is not supported; empty where all is.
    """

    modes: tuple[str, ...]
    normalized: bool = False
    prompt: str = ""
    most: int | None = None
    unsupported: str = ""

    @classmethod
    def of(cls, folder: Path) -> Pooling | None:
        """Return the pooling that a folder states; None for a model that is no embedding model."""
        modules = _read(folder / MODULES)
        if not isinstance(modules, list):
            return None
        kinds = {str(m.get("type", "")).rpartition(".")[2]: m.get("path", "") for m in modules}
        others = [k for k in kinds if k not in ("Transformer", "Pooling", "Normalize")]
        config = _read(folder / str(kinds.get("Pooling", "")) / "config.json") or {}
        stated = config.get("pooling_mode")
        modes = tuple(m for m in MODES if config.get(f"pooling_mode_{m}") or stated in _names(m))
        said = _read(folder / "config_sentence_transformers.json") or {}
        prompt = (said.get("prompts") or {}).get(said.get("default_prompt_name")) or ""
        if prompt and not config.get("include_prompt", True):
            others.append("a prompt that is not pooled")
        if "Pooling" not in kinds or not modes:
            others.append("no known pooling")
        most = (_read(folder / "sentence_bert_config.json") or {}).get("max_seq_length")
        return cls(modes, "Normalize" in kinds, prompt, most, ", ".join(others))

    def __call__(self, states: Tensor, dimensions: int | None = None) -> Tensor:
        """Return the vector of a text, float32 [D].

        Args:
            states: hidden states of its tokens, [T, D].
            dimensions: first numbers that are kept; None keeps all.

        Raises:
            GenError: the folder asks for something else, or there are fewer numbers.
        """
        if self.unsupported:
            raise GenError(
                f"the embeddings of the model need {self.unsupported}; expected the modules"
                " Transformer, Pooling and Normalize alone"
            )
        states = states.float()
        weights = torch.arange(1, len(states) + 1, device=states.device)[:, None]
        found = {
            "cls_token": lambda: states[0],
            "max_tokens": lambda: states.amax(0),
            "mean_tokens": lambda: states.mean(0),
            "mean_sqrt_len_tokens": lambda: states.sum(0) / len(states) ** 0.5,
            "weightedmean_tokens": lambda: (states * weights).sum(0) / weights.sum(),
            "lasttoken": lambda: states[-1],
        }
        vector = torch.cat([found[mode]() for mode in self.modes])
        if dimensions is not None:
            if dimensions > len(vector):
                raise GenError(f"dimensions is {dimensions}; expected at most {len(vector)}")
            vector = vector[:dimensions]
        return F.normalize(vector, dim=0) if self.normalized else vector


def _names(mode: str) -> tuple[str, str]:
    """Return a mode as older and as newer files spell it."""
    return mode, mode.removesuffix("_tokens").removesuffix("_token")


def _read(path: Path) -> Any:
    """Read a JSON file; None where there is none that can be read."""
    if not path.is_file():
        return None
    note_file(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
