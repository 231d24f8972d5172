"""load_lm."""

from __future__ import annotations

from pathlib import Path

import torch

from gen.core.errors import GenError
from gen.models.load.locate import locate, model_kind, quiet, readable


def load_lm(name: str | Path, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """A transformers causal language model (masked ones of the embedded architecture are one too),
    or a model of latents.

    Raises ``GenError`` for missing, unreadable or incomplete weights.
    """
    from transformers import AutoModel, AutoModelForCausalLM

    import gen.models.nets.grid
    import gen.models.nets.grid_latent  # noqa: F401  both register an embedded architecture

    path = locate(name)
    with readable("model", name), quiet():
        auto = AutoModel if model_kind(name) == "latents" else AutoModelForCausalLM
        model, info = auto.from_pretrained(path, dtype=dtype, output_loading_info=True)
    if info["missing_keys"] or info["mismatched_keys"]:
        lost = sorted(str(k) for k in [*info["missing_keys"], *info["mismatched_keys"]])
        raise GenError(f"the weights of model {name} lack {len(lost)} tensors, {lost[0]!r} first")
    return model.to(device).eval()
