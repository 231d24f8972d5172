"""Every family of checkpoints in int8: what the contract of families asks of a model holds for one
with quantised weights, and it is exactly the model of those weights."""

from __future__ import annotations

import re

import pytest
import tiny_checkpoints
import torch
from families import CAUSAL, WRITERS, Case
from family_checks import check_alone, check_media
from published import save_quietly, tiny_tokenizer
from weight_bytes import layer_bytes

import gen
from gen.core.errors import GenError
from gen.models.load.bits_and_bytes import BITS_AND_BYTES
from gen.models.load.quantize import block_linears

pytestmark = pytest.mark.slow
pytest.importorskip("torchao", reason="make test-quantization has torchao")
# In float32 two orders of summation differ by some 1e-6 of a logit. Two ids would have to be as
# close for a token to differ, which no prompt and seed here meets; log-probabilities of five
# layers of such sums are allowed 1e-4. Latents go through hundreds of steps of a diffusion head:
# without quantisation, too, an item alone differs by 1e-6 of the largest number.
NEAR, LATENTS = 1e-4, 1e-4


def text_kind(kind: str):
    def write(folder):
        save_quietly(tiny_checkpoints.tiny(kind), folder)
        save_quietly(tiny_tokenizer(), folder)
        return Case("text", folder, {"max_new_tokens": 5}, ("w1 w2 w3", "w9"), CAUSAL)

    return write


ALL = {
    **WRITERS,
    **{f"causal_lm:{k}": text_kind(k) for k in tiny_checkpoints.KINDS if k != "llama"},
}


HEAD = {"name": "int8", "head": True}
WITHOUT_HEAD = dict.fromkeys(("amused", "mar"), "no linear layers make its logits")
WITHOUT_HEAD |= dict.fromkeys(("described", "janus:text", "whisper"), "are one matrix, which keeps")
CASES = {
    f"{name}-{'head' if how == HEAD else 'blocks'}": (write, how)
    for name, write in ALL.items()
    for how in (["int8"] if name in WITHOUT_HEAD else ["int8", HEAD])
}


@pytest.fixture(scope="module", params=CASES)
def chosen(request, tmp_path_factory):
    write, how = CASES[request.param]
    return write(tmp_path_factory.mktemp(request.param.replace(":", "-"))), how


@pytest.fixture(scope="module")
def case(chosen):
    return chosen[0]


@pytest.fixture(scope="module")
def how(chosen):
    return chosen[1]


def load(case: Case, dtype: str, **more):
    return gen.load(case.modality, model=case.path, dtype=dtype, **case.options, **more)


def network_of(pipe) -> torch.nn.Module:
    checkpoint = pipe.bound(pipe.model)[0]
    return checkpoint.adapter(checkpoint.protocols[0]).model


def layers_of(pipe, head: bool) -> dict[str, torch.nn.Linear]:
    """Linear layers of the blocks, and those of the output head behind them."""
    checkpoint, network = pipe.bound(pipe.model)[0], network_of(pipe)
    seen = [checkpoint.adapter(protocol) for protocol in checkpoint.protocols]
    heads = {id(layer) for adapter in seen for layer in adapter.output_heads if head}
    return block_linears(network) | {n: m for n, m in network.named_modules() if id(m) in heads}


@pytest.fixture(scope="module")
def pipe(case, how):
    return load(case, "float32", quantization=how)


def with_numbers_of(case: Case, pipe, head: bool):
    """The same checkpoint in float64, with the numbers that the quantised weights stand for."""
    reference = load(case, "float64")
    checkpoint, layers = reference.bound(reference.model)[0], layers_of(pipe, head)
    with torch.no_grad():
        for key, layer in layers_of(reference, head).items():
            layer.weight.copy_(layers[key].weight.dequantize())
    for protocol in checkpoint.protocols:
        checkpoint.adapter(protocol).network_changed()
    return reference


@pytest.fixture(scope="module")
def dequantized(case, how, pipe):
    return with_numbers_of(case, pipe, how == HEAD)


def test_all_linear_layers_take_a_byte_per_number(case, how, pipe):
    layers, plain = layers_of(pipe, how == HEAD), load(case, "float32")
    assert layers and layers.keys() == layers_of(plain, how == HEAD).keys()
    assert (len(layers) > len(block_linears(network_of(pipe)))) == (how == HEAD)
    others = [m for n, m in network_of(pipe).named_modules() if n not in layers]
    kept = [m.weight for m in others if isinstance(m, torch.nn.Linear | torch.nn.Embedding)]
    assert kept and all(type(weight) is torch.nn.Parameter for weight in kept)
    for name, layer in layers.items():
        rows, width = layer.weight.shape
        # a float32 scale and a zero of one byte for each row
        assert layer_bytes(layer) == rows * (width + 5), name
        assert width < 25 or layer_bytes(layer) < 0.6 * 2 * rows * width, name


def largest_difference(made, other) -> float:
    """The largest difference of the log-probabilities of two lists of rows."""
    return max(
        abs(a.logprob - b.logprob)
        for row, their_row in zip(made, other, strict=True)
        for a, b in zip(row, their_row, strict=False)
        if a is not None
    )


def test_a_quantised_model_is_the_model_of_its_weights(case, how, pipe, dequantized):
    given = {"sampler": case.samplers[0], "seed": 3}
    greedy = {"temperature": 0} if "causal" in pipe.bound(pipe.model)[0].protocols else {}
    ours = pipe(list(case.prompts), **given, **greedy)
    want = dequantized(list(case.prompts), **given, **greedy)
    if ours.tokens.is_floating_point():
        off = (ours.tokens - want.tokens).abs().max()
        assert off <= LATENTS * want.tokens.abs().max()
    else:
        assert torch.equal(ours.tokens, want.tokens)
    if not greedy:
        return
    controls = [load(case, "float64")]  # of other weights, or of another head
    controls += [with_numbers_of(case, pipe, False)] if how == HEAD else []
    made, *others = (
        x(list(case.prompts), logprobs=1, **given, **greedy).logprobs
        for x in (pipe, dequantized, *controls)
    )
    off, *far = (largest_difference(made, other) for other in others)
    assert [len(row) for row in made] == [len(row) for row in others[0]] and off < NEAR
    assert all(x > 10 * off for x in far)


def test_speculation_gives_its_own_greedy_and_drawn_tokens(case, pipe):
    if "causal" not in pipe.bound(pipe.model)[0].protocols:
        pytest.skip("a masked model has no autoregressive tokens")
    for temperature in (0.0, 1.0):
        plain, *fast = (
            pipe(list(case.prompts), sampler=sampler, seed=3, temperature=temperature).tokens
            for sampler in (
                "autoregressive",
                "speculative_jacobi",
                {"name": "speculative_jacobi", "window": 3},
            )
        )
        assert all(torch.equal(plain, tokens) for tokens in fast), temperature


def test_an_item_alone_is_the_item_of_a_batch(case, pipe):
    for sampler in case.samplers[:2]:
        check_alone(case, pipe, sampler, LATENTS)


def test_samplers_write_media_and_a_second_run_makes_what_is_missing(case, how, pipe, tmp_path):
    assert pipe.model_options["quantization"] == how
    check_media(case, pipe, tmp_path, case.samplers[:1])


@pytest.mark.parametrize("name", WITHOUT_HEAD)
def test_a_head_that_is_not_there_or_is_an_embedding_is_refused_in_one_sentence(name, tmp_path):
    with pytest.raises(GenError, match=f"has head true, but .*{WITHOUT_HEAD[name]}") as caught:
        load(ALL[name](tmp_path), "float32", quantization=HEAD)
    assert "expected head false" in str(caught.value) and "\n" not in str(caught.value)


REFUSED = (  # what a family cannot have in few bits, or not on a CPU
    r"int4 .* expect N to be dividable by 16",
    r"int4.* expected a group_size that divides",
    r"is a Router, which bitsandbytes does not quantise",
)


@pytest.mark.parametrize("how", [{"name": "int4", "group_size": 32}, *BITS_AND_BYTES], ids=str)
@pytest.mark.parametrize("name", WRITERS)
def test_fewer_bits_and_bitsandbytes_decode_or_are_refused_in_one_sentence(name, how, tmp_path):
    if how in BITS_AND_BYTES:
        pytest.importorskip("bitsandbytes")
    case = WRITERS[name](tmp_path)
    try:
        pipe = load(case, "float32", quantization=how)
    except GenError as error:
        assert re.search("|".join(REFUSED), str(error)) and "\n" not in str(error), error
        return
    assert any(
        type(m) is not torch.nn.Linear or type(m.weight) is not torch.nn.Parameter
        for m in block_linears(network_of(pipe)).values()
    )
    if "causal" not in pipe.bound(pipe.model)[0].protocols:
        assert len(pipe(list(case.prompts), sampler=case.samplers[0], seed=3).tokens) == 2
        return
    made = [
        pipe(list(case.prompts), sampler=sampler, seed=3, temperature=0).tokens
        for sampler in ("autoregressive", "speculative_jacobi")
    ]
    assert torch.equal(*made)
