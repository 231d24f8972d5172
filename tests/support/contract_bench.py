"""Closed-form targets of every kind, for the contract of all samplers."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import tabular as closed_form
import tabular_lattice
import tabular_scales
import torch
from contract_specs import SPECS, sampling_for
from even_reward import EvenEvaluator
from tabular import TabularCausal
from torch import Tensor

from gen.core.registry import registry
from gen.core.rng import CounterRNG
from gen.core.sampler import Sampler, resolve_sampler
from gen.core.sampling_params import SamplingParams
from gen.core.stats import SampleOutput
from gen.core.token_space import TokenSpace
from gen.models.load.quantize import Quantization, quantize
from gen.models.nets.dag import DagConfig, DagModel
from gen.models.nets.grid import GridLlamaConfig, GridLlamaForCausalLM
from gen.models.nets.grid_scales import GridScalesConfig, GridScalesModel

V, GRID, MASK = 9, (3, 4), 8  # ids 0-5 are tokens, 6 and 7 words of conditions


ROWS = 5


def token_space() -> TokenSpace:
    """Place n takes every id below 6 but one, and the mask stands nowhere. The tokens are codes in
    two dimensions."""
    legal = torch.zeros(12, V, dtype=torch.bool)
    legal[:, :6] = True
    legal[torch.arange(12), torch.arange(12) % 6] = False
    codebook = torch.tensor([[0, 0], [0, 1], [0, 3], [1, 0], [2, 2], [3, 3]]).float()
    return TokenSpace(
        GRID, V, legal, MASK, codebook, delimiters=(2, 4), rarity=torch.arange(1, V + 1) / 2
    )


PROTOCOLS = {
    name: (
        p.targets["codes"],
        p.adapters["codes"],
        {**vars(closed_form), **vars(tabular_scales), **vars(tabular_lattice)}[
            f"Tabular{p.closed_form}"
        ],
    )
    for name, p in registry.table("protocol").items()
    if "codes" in p.targets
}


def scales_llama(protocol: str, seed: int = 1):
    """The same of next-scale models."""
    torch.manual_seed(seed)
    refines = protocol == "refined_scales"
    config = GridScalesConfig(
        scales=tabular_scales.TWELVE,
        codes=V,
        channels=4,
        prefix_length=3,
        markov=refines,
        tail_layers=int(refines),
        vocab_size=V,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.6,
    )
    return PROTOCOLS[protocol][1](GridScalesModel(config).double())


def dag_net(seed: int = 1):
    """The same of models of graphs, of 15 vertices; unk is the mask."""
    torch.manual_seed(seed)
    config = DagConfig(
        source_words=V,
        max_source=3,
        vocab_size=V - 1,
        bos_id=7,
        eos_id=6,
        vertices_per_word=5,
        hidden_size=16,
        encoder_layers=1,
        decoder_layers=1,
        num_attention_heads=2,
    )
    return PROTOCOLS["lattice"][1](DagModel(config).double())


def llama(protocol: str, seed: int = 1):
    if protocol == "lattice":
        return dag_net(seed)
    if "scales" in protocol:
        return scales_llama(protocol, seed)
    torch.manual_seed(seed)
    config = GridLlamaConfig(
        grid=GRID,
        prefix_length=3,
        codebook_size=6,
        causal=protocol == "causal",
        mask_token_id=MASK,
        trained_at_mask=True,
        vocab_size=V,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.6,
        block_length=4 if protocol == "blocks" else 0,
    )
    return PROTOCOLS[protocol][1](GridLlamaForCausalLM(config).double())


def int8_llama(protocol: str, seed: int = 1):
    """The same in float32 with int8 weights, of causal and masked models."""
    adapter = llama(protocol, seed)
    adapter.model.float()
    how = Quantization.of({"name": "int8", "head": True})
    quantize(adapter.model, how, protocol, adapter.output_heads)
    adapter.network_changed()
    return adapter


@dataclass
class Bench:
    """A model, and items with prompts and keys of their own."""

    model: object
    target: type
    prompts: Tensor
    space: TokenSpace
    # other models, for samplers that draft with one: of the same protocol (None), and of others
    drafts: dict

    def __call__(
        self,
        sampler: Sampler,
        sampling: SamplingParams,
        rows: list[int] | None = None,
        keys: list[int] | None = None,
        **kwargs,
    ) -> SampleOutput:
        rows = list(range(ROWS)) if rows is None else rows
        keys = [31 * r + 7 for r in rows] if keys is None else keys
        prompt = self.prompts[rows].clone()
        uncond = torch.full_like(prompt, 7)
        uncond[:, -1] = 6
        before = prompt.clone(), uncond.clone()
        if sampler.drafted:
            make = PROTOCOLS[sampler.draft_protocol][0] if sampler.draft_protocol else self.target
            kwargs["draft"] = make(
                self.drafts[sampler.draft_protocol], prompt, self.space, sampling, uncond
            )
        target = self.target(self.model, prompt, self.space, sampling, uncond)
        target.evaluator = EvenEvaluator()
        out = sampler(target, CounterRNG(keys), **kwargs)
        assert torch.equal(prompt, before[0]) and torch.equal(uncond, before[1]), (
            "the sampler wrote into its condition"
        )
        return out


def bench(protocol: str, kind: str) -> Bench:
    if protocol not in PROTOCOLS:
        pytest.fail(
            f"no model for the protocol {protocol!r} here: add one, so that its samplers are"
            " checked"
        )
    target, _, tabular = PROTOCOLS[protocol]
    prompts = torch.tensor([[r % 6, r // 2, 6] for r in range(ROWS)])

    networks = {"llama": llama, "int8": int8_llama}

    def make(seed):
        return networks[kind](protocol, seed) if kind in networks else tabular(V, seed, low=0.1)

    other = networks[kind]("causal", 2) if kind in networks else TabularCausal(V, 2, low=0.1)
    return Bench(make(1), target, prompts, token_space(), {None: make(2), "causal": other})


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
