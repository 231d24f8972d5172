"""Load the built-in language models."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModel, AutoModelForCausalLM

import gen.models.nets.dag
import gen.models.nets.frames
import gen.models.nets.grid
import gen.models.nets.grid_latent
import gen.models.nets.grid_reader
import gen.models.nets.grid_scales
import gen.models.nets.grid_states  # noqa: F401  all register a built-in architecture
from gen.core.errors import GenError
from gen.models.load.libraries import LOADING
from gen.models.load.locate import locate, model_kind, quiet, read_config, readable


def load_lm(name: str | Path, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """Load a transformers causal language model, a masked one of the built-in architecture, a model
    of latents, of scales or of graphs.

    Raises ``GenError`` for missing, unreadable or incomplete weights.
    """

    path = locate(name)
    with LOADING, readable("model", name), quiet():
        config = read_config(name)
        is_graph = "vertices_per_word" in config
        is_headless = model_kind(name) == "latents" or config.get("scales") or is_graph
        auto = AutoModel if is_headless else AutoModelForCausalLM
        model, info = auto.from_pretrained(path, dtype=dtype, output_loading_info=True)
    if info["missing_keys"] or info["mismatched_keys"]:
        absent = sorted(str(k) for k in [*info["missing_keys"], *info["mismatched_keys"]])
        raise GenError(
            f"the weights of model {name} lack {len(absent)} tensors, {absent[0]!r} first"
        )
    return model.to(device).eval()
