"""What tests of PEFT adapters share."""

from __future__ import annotations

import peft
import torch
from torch import nn

import gen
from gen.models.load.quantize import block_linears

SAMPLERS = ("autoregressive", "speculative_jacobi")


def network_of(pipe) -> nn.Module:
    return pipe.bound(pipe.model)[0].adapter("causal").model


def write_adapter(
    network: nn.Module, folder, seed: int = 1, embeddings: bool | str = "auto", **more
) -> dict[str, torch.Tensor]:
    """Write an adapter by PEFT, with embeddings and heads or not; return the merged weights that
    PEFT makes, float64."""
    torch.manual_seed(seed)
    names = sorted({name.rpartition(".")[2] for name in block_linears(network)})
    own = {"target_modules": names, "r": 3, "lora_alpha": 60, "init_lora_weights": False}
    made = peft.get_peft_model(network, peft.LoraConfig(**{**own, **more}))
    made.save_pretrained(folder, save_embedding_layers=embeddings)
    return made.merge_and_unload().state_dict()


def loaded(case, **more):
    return gen.load(case.modality, model=case.path, dtype="float64", **{**case.options, **more})


def write_adapters(case, root, **names: int) -> dict:
    """Write adapters of a checkpoint by name, of these ranks; return their folders."""
    found = {name: root / f"adapter-{name}" for name in names}
    for seed, (name, rank) in enumerate(names.items()):
        write_adapter(network_of(loaded(case)), found[name], seed, r=rank)
    return found
