"""Load the built-in language models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

import gen.models.nets.grid
import gen.models.nets.grid_latent
import gen.models.nets.grid_reader
import gen.models.nets.grid_states  # noqa: F401  all register a built-in architecture
from gen.core.errors import GenError
from gen.models.load.libraries import LOADING
from gen.models.load.locate import locate, model_kind, quiet, read_config, readable
from gen.models.load.weights import require_in_memory
from gen.models.nets.dag import DagModel
from gen.models.nets.frames import FrameModel
from gen.models.nets.grid_scales import GridScalesModel
from gen.models.nets.speech_dag import SpeechDagModel

# modules whose weights a network reads itself, so that they cannot stay on disk
READ_BESIDE: dict[type[nn.Module], tuple[str, ...]] = {
    DagModel: ("target", "positions", "link_positions"),
    SpeechDagModel: ("target", "positions", "link_positions", "speaker.slots"),
    FrameModel: (),
    GridScalesModel: ("enter", "prefix", "positions", "levels", "quantize.embedding"),
}


def load_lm(
    name: str | Path, device: torch.device, dtype: torch.dtype, **more: Any
) -> torch.nn.Module:
    """Load a transformers causal language model, a masked one of the built-in architecture, a model
    of latents, of scales or of graphs.

    Args:
        name: zoo name or folder.
        device: device of the model, without a ``device_map``.
        dtype: floating-point type of the weights.
        more: further arguments of ``from_pretrained``, such as ``device_map``.

    Raises:
        GenError: missing, unreadable or incomplete weights.
    """
    path, placed = locate(name), more.get("device_map")
    with LOADING, readable("model", name), quiet():
        config = read_config(name)
        is_graph = "vertices_per_word" in config
        is_headless = model_kind(name) == "latents" or config.get("scales") or is_graph
        auto = AutoModel if is_headless else AutoModelForCausalLM
        model, info = auto.from_pretrained(path, dtype=dtype, output_loading_info=True, **more)
    if info["missing_keys"] or info["mismatched_keys"]:
        absent = sorted(str(k) for k in [*info["missing_keys"], *info["mismatched_keys"]])
        raise GenError(
            f"the weights of model {name} lack {len(absent)} tensors, {absent[0]!r} first"
        )
    if type(model) in READ_BESIDE:
        require_in_memory(model, READ_BESIDE[type(model)], str(name))
    return model.eval() if placed is not None else model.to(device).eval()
