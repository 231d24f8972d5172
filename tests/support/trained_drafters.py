"""Untrained drafters of a small Llama, in the folders that samplers read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from small_llama import small_llama
from torch import nn

from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.adapters.draft_models import (
    PromptTokens,
    corrections_of,
    exit_layer,
    maps_of,
    masked_network,
    repairs_of,
    routers_of,
)
from gen.models.adapters.language_models import CausalLM
from gen.models.draft_heads.heads import MedusaHeads, hydra_of
from gen.models.draft_heads.longspec import LongSpecLayer, LongSpecShape
from gen.models.targets.causal import CausalTarget
from gen.models.targets.identity import DrafterFacts
from gen.models.targets.trained_drafters import projection, write_drafter

V, DEPTH, LAST = 24, 3, "model.norm"
NET = small_llama(V)
PROMPTS = torch.tensor([[7, 11, 19, 4], [2, 23, 9, 0], [19, 5, 6, 8]])
LENGTHS = torch.tensor([4, 3, 4])
UNCOND = torch.tensor([[1, 2], [1, 2], [1, 2]])
PLAIN = SamplingParams()
GUIDED = SamplingParams(temperature=0.7, top_k=2, guidance_scale=2.0)
# kind of drafter, layers that it reads and arguments of its network, by name
KINDS: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "medusa": ("medusa", (LAST,), {"depth": DEPTH}),
    "hydra": ("hydra", (LAST,), {"depth": DEPTH, "trunk": "heads", "states": 1}),
    "recurrent": (
        "hydra",
        ("model.layers.0", LAST),
        {"depth": DEPTH, "trunk": "recurrent", "states": 2},
    ),
    "trigram": ("hydra", (LAST,), {"depth": DEPTH, "trunk": "trigram", "states": 1}),
    "clover": ("hydra", ("model.layers.0", LAST), {"depth": DEPTH, "trunk": "clover", "states": 2}),
    "chimera": ("hydra", (LAST,), {"depth": DEPTH, "trunk": "chimera", "states": 1}),
    "exit": ("exit", (), {"exit_layer": 1}),
    "masked": ("masked", (), {"depth": DEPTH, "width": 32, "layers": 1}),
    "prompt": ("prompt", (), {"depth": DEPTH}),
    "skip": ("skip", (), {"kept_layers": "0", "rank": 4}),
    "router": ("router", (), {"rank": 4}),
    "lora_drop": ("lora_drop", (), {"every": 2, "cycle": 2, "rank": 4, "alpha": 8.0}),
    "hidden": ("hidden", ("model.layers.0",), {"depth": DEPTH, "layer": 1}),
    "longspec": (
        "longspec",
        (),
        {"width": 16, "heads": 2, "groups": 2, "dim": 8, "inner": 16, "window": 3},
    ),
}


def target(
    length: int, ids: int, sampling: SamplingParams = PLAIN, rows: tuple[int, ...] = (0, 1, 2)
) -> CausalTarget:
    at = list(rows)
    uncond = UNCOND[at] if sampling.guided else None
    space = TokenSpace.codes((length,), V, ids)
    return CausalTarget(CausalLM(NET), PROMPTS[at], space, sampling, uncond, LENGTHS[at])


def network(name: str, of: CausalTarget) -> nn.Module:
    """The untrained network of a drafter of a target."""
    kind, _, arguments = KINDS[name]
    if kind == "medusa":
        return MedusaHeads(projection(of, kind), DEPTH)
    if kind == "hydra":
        return hydra_of(arguments, projection(of, kind))
    if kind == "exit":
        return exit_layer(of.model, arguments["exit_layer"])
    if kind == "longspec":
        return LongSpecLayer(LongSpecShape(**arguments))
    if kind == "hidden":
        return maps_of(of.model, arguments)
    if kind == "skip":
        return repairs_of(of.model, arguments)
    if kind == "router":
        return routers_of(of.model, arguments)
    if kind == "lora_drop":
        return corrections_of(of.model, arguments)
    if kind == "masked":
        return masked_network(of.model, arguments)
    return PromptTokens(DEPTH, NET.get_input_embeddings().weight)


def scrambled(net: nn.Module) -> nn.Module:
    """The network with other weights, large enough to say something."""
    torch.manual_seed(7)
    net = net.double()
    for p in net.parameters():
        p.data.copy_(torch.randn(p.shape) * (0.5 if p.dim() > 1 else 0.2) + (p.dim() == 1))
    return net.eval()


def write(name: str, of: CausalTarget, folder: Path, net: nn.Module | None = None) -> str:
    """Write the folder of a drafter, with scrambled weights if none are given."""
    kind, layers, arguments = KINDS[name]
    net = scrambled(network(name, of)) if net is None else net
    facts = DrafterFacts.of(kind, of, layers, arguments)
    write_drafter(folder, facts, dict(net.named_parameters()))
    return str(folder)


def tokens_of(seed: int, length: int) -> torch.Tensor:
    """Random tokens of the three prompts."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, V, (3, length), generator=generator)


def stepped(of: CausalTarget, tokens: torch.Tensor, widths: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities of all positions, in passes of some widths."""
    before, found, first = torch.cat([tokens[:, :1], tokens[:, :-1]], 1), [], 0
    for width in widths:
        at = torch.arange(first, first + width).expand(3, -1)
        found.append(of.predict(before[:, first : first + width], at).logprobs)
        first += width
    return torch.cat(found, 1)
