"""Quantised weights: a model decodes with them as any other, and they are part of what it is."""

from __future__ import annotations

import pytest
import torch
from families import WRITERS
from torch import nn

import gen
from gen.core.errors import GenError
from gen.models.load.quantize import Quantization, block_linears

CAUSAL = ("causal_lm", "llamagen", "chameleon", "emu3", "janus")


def stored_bytes(weight: torch.Tensor) -> int:
    """Bytes of a weight: those of its parts where it is quantised."""
    names = getattr(weight, "tensor_data_names", ())
    return sum(getattr(weight, n).nbytes for n in names) if names else weight.nbytes


def test_a_head_in_a_list_is_no_layer_of_a_block():
    block = nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)})
    heads = nn.ModuleList([nn.Linear(4, 3)])
    net = nn.ModuleDict({"layers": nn.ModuleList([block]), "heads": heads, "out": nn.Linear(4, 3)})
    assert set(block_linears(net)) == {"layers.0.up", "layers.0.down"}


def test_an_unknown_quantisation_is_refused_with_the_nearest_name():
    with pytest.raises(GenError, match="'int8'"):
        Quantization.of("int9")
    with pytest.raises(GenError, match="quantization"):
        Quantization.of(8)


@pytest.mark.slow
@pytest.mark.parametrize("name", CAUSAL)
def test_int8_speculation_gives_its_own_greedy_tokens(name, tmp_path):
    pytest.importorskip("torchao", reason="make test-quantization has torchao")
    case = WRITERS[name](tmp_path)
    how = {**case.options, "model": case.path, "dtype": "float32"}
    pipe = gen.load(case.modality, quantization="int8", **how)
    made = [
        pipe(list(case.prompts), sampler=sampler, seed=3, temperature=0).tokens
        for sampler in ("autoregressive", "speculative_jacobi")
    ]
    assert torch.equal(*made)
    network = pipe.bound(pipe.model)[0].adapter("causal").model
    layers = block_linears(network)
    plain = gen.load(case.modality, **how).bound(pipe.model)[0].adapter("causal").model
    assert layers and all("Int8" in type(m.weight).__name__ for m in layers.values())
    for key, layer in block_linears(plain).items():  # half of a step of the grid of each row
        off = (layers[key].weight.dequantize() - layer.weight).abs().amax(1)
        assert (off <= layer.weight.abs().amax(1) / 127 * 0.51 + 1e-7).all() and off.max() > 0
    assert pipe.model_options["quantization"] == "int8"


@pytest.mark.slow
def test_int8_weights_are_below_0_6_of_bfloat16(tmp_path):
    pytest.importorskip("torchao", reason="make test-quantization has torchao")
    pipe = gen.load("image", model="image-causal", quantization="int8", device="cpu")
    network = pipe.bound("image-causal")[0]
    layers = block_linears(network).values()
    taken = sum(stored_bytes(m.weight) for m in layers)
    assert taken < 0.6 * 2 * sum(m.weight.numel() for m in layers)
    total = sum(stored_bytes(p) for p in network.parameters())
    print("blocks", taken, "all", total, "bf16", 2 * sum(p.numel() for p in network.parameters()))


@pytest.mark.slow
def test_what_torchao_cannot_compute_is_one_error(tmp_path):
    pytest.importorskip("torchao", reason="make test-quantization has torchao")
    case = WRITERS["causal_lm"](tmp_path)
    with pytest.raises(GenError, match="torchao cannot run model .* in int8 on cpu"):
        gen.load("text", model=case.path, dtype="float64", quantization="int8")
