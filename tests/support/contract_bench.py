"""Closed-form targets of every kind, and quantised networks, for the contract of all samplers."""

from __future__ import annotations

import pytest
import tabular as closed_form
import tabular_lattice
import tabular_scales
from tabular import TabularCausal
from torch import Tensor

from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.core.sampler import Sampler
from gen.core.token_space import TokenSpace
from gen.models.load.quantize import Quantization, quantize
from gen.testing.contract import (
    MASK,
    PROTOCOLS,
    ROWS,
    Bench,
    V,
    bench_prompts,
    llama,
    token_space,
)
from gen.testing.specs import SPECS, sampling_for

TABULAR = {
    name: {**vars(closed_form), **vars(tabular_scales), **vars(tabular_lattice)}[
        f"Tabular{p.closed_form}"
    ]
    for name, p in registry.table("protocol").items()
    if "codes" in p.targets
}


def int8_llama(protocol: str, seed: int = 1):
    """The same in float32 with int8 weights, of causal and masked models."""
    adapter = llama(protocol, seed)
    adapter.model.float()
    how = Quantization.of({"name": "int8", "head": True})
    quantize(adapter.model, how, protocol, adapter.output_heads)
    adapter.network_changed()
    return adapter


def bench(protocol: str, kind: str) -> Bench:
    if protocol not in PROTOCOLS:
        pytest.fail(
            f"no model for the protocol {protocol!r} here: add one, so that its samplers are"
            " checked"
        )
    target, tabular = PROTOCOLS[protocol][0], TABULAR[protocol]

    networks = {"llama": llama, "int8": int8_llama}

    def make(seed):
        return networks[kind](protocol, seed) if kind in networks else tabular(V, seed, low=0.1)

    other = networks[kind]("causal", 2) if kind in networks else TabularCausal(V, 2, low=0.1)
    return Bench(make(1), target, bench_prompts(), token_space(), {None: make(2), "causal": other})


def model_for(sampler: Sampler) -> str:
    """One that keeps keys and values, for a sampler that asks for them."""
    return "tabular" if getattr(sampler, "cache", "none") == "none" else "llama"


MASKED = [
    n for n, s in SPECS.items() if resolve_sampler(s, sampling_for(n))[0].protocol == "masked"
]


def canvas_of(space: TokenSpace) -> Tensor:
    """Rows with all, some, one and no places to fill."""
    lowest = space.legal.long().argmax(1)
    canvas = lowest.expand(ROWS, -1).clone()
    canvas[0], canvas[1, ::2], canvas[2, 5], canvas[4, 3:] = MASK, MASK, MASK, MASK
    return canvas
