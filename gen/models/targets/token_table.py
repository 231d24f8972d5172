"""Statistics of the tokens that a model generates, in a file that states which model it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gen.core.errors import GenError
from gen.models.adapters.base import ModelAdapter
from gen.models.load.digest import digest_of


@dataclass
class TokenTable:
    """Statistics of the tokens that a model generates.

    Attributes:
        counts: how often each token came, long [V].
        successors: tokens that follow each one most often, in their order, -1 behind the last,
            long [V, k].
    """

    counts: Tensor
    successors: Tensor


def write_table(path: Path, table: TokenTable, model: torch.nn.Module) -> None:
    """Write the statistics of a model's tokens, with the model's digest."""
    tensors = {"counts": table.counts, "successors": table.successors}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(path), metadata={"model": digest_of(model)})


def read_table(path: str, model: ModelAdapter, name: str, size: int) -> TokenTable:
    """Read the statistics of the tokens of a model.

    Args:
        path: the file.
        model: the model.
        name: its name, for messages.
        size: number of its tokens V.

    Raises:
        GenError: the file cannot be read, or is of another vocabulary or model.
    """
    try:
        with safe_open(path, "pt") as file:
            found = TokenTable(file.get_tensor("counts"), file.get_tensor("successors"))
            other = (file.metadata() or {}).get("model")
    except (OSError, SafetensorError) as error:
        raise GenError(f"sampler.draft_table {path} cannot be read: {error}") from None
    if len(found.counts) != size or len(found.successors) != size:
        raise GenError(
            f"sampler.draft_table {path} is of {len(found.counts)} tokens; expected {size}, those"
            " of the model"
        )
    here = digest_of(model.model)
    if other != here:
        raise GenError(
            f"sampler.draft_table {path} was made with another model, {other}; expected {here}"
            f" ({name or 'the model'})"
        )
    return TokenTable(found.counts.to(model.device), found.successors.to(model.device))
