"""Prompts that skip layers: what is active is what the last tokens attend to most, skipped tokens
pass a layer as they are, and nothing sees them there.

The reference computes one row after the other without a cache. Controls choose the tokens that are
attended to least, or let later tokens see those that were skipped.
"""

from __future__ import annotations

import logging
import math

import pytest
import torch
from small_llama import small_llama
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

import gen
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.engine.engine import Engine
from gen.models.adapters.fast_llama import LeanLlama
from gen.models.adapters.language_models import CausalLM
from gen.models.adapters.sparse_prefill import SkippingLayer, SparsePrefill, sparse
from gen.models.targets.causal import CausalTarget

V, LENGTH, LAYERS, EXACT, WRONG = 24, 6, 3, 1e-9, 1e-3
LENGTHS = torch.tensor([9, 1, 6, 2])
PROMPTS = torch.randint(0, V, (4, 9), generator=torch.Generator().manual_seed(0))
HALF = SparsePrefill(0.5)


def target(how: SparsePrefill | None, rows: tuple[int, ...] = (0, 1, 2, 3)) -> CausalTarget:
    model, at = CausalLM(small_llama(V, layers=LAYERS)), list(rows)
    made = model if how is None else sparse(model, how, "small")
    space = TokenSpace.codes((LENGTH,), V, V)
    return CausalTarget(made, PROMPTS[at], space, SamplingParams(), None, LENGTHS[at])


def tokens_of(seed: int, rows: int = 4) -> Tensor:
    return torch.randint(0, V, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))


def stepped(of: CausalTarget, tokens: Tensor, widths: tuple[int, ...]) -> Tensor:
    before, found, first = torch.cat([tokens[:, :1], tokens[:, :-1]], 1), [], 0
    for width in widths:
        at = torch.arange(first, first + width).expand(len(tokens), -1)
        found.append(of.predict(before[:, first : first + width], at).logprobs)
        first += width
    return torch.cat(found, 1)


@torch.no_grad()
def reference(
    tokens: Tensor, how: SparsePrefill, least: bool = False, seen: bool = False
) -> tuple[Tensor, list[list[int]]]:
    """Log-probabilities of all rows, and the active prompt tokens of row 0 by layer.

    Args:
        tokens: output, long [B, T].
        how: parameters.
        least: choose the tokens that are attended to least.
        seen: let tokens behind the prompt see all of it.
    """
    net, probed, rows, chosen = (*(small_llama(V, layers=LAYERS) for _ in range(2)), [], [])
    probed.set_attn_implementation("eager")  # which says how much it attends to what
    for row, length in enumerate(LENGTHS.tolist()):
        ids = torch.cat([PROMPTS[row, :length], tokens[row, :-1]])[None]
        start, count = length - 1, ids.shape[1]
        at, states = torch.arange(count)[None], net.model.embed_tokens(ids)
        rotations = net.model.rotary_emb(states, at)
        for number, layer in enumerate(net.model.layers):
            active = set(range(start))
            if number >= how.first_layer and start:
                scores = attended(probed.model.layers[number], states, rotations, start)
                order = scores.argsort(descending=not least).tolist()
                order = [start - 1, *(n for n in order if n != start - 1)]
                active = set(order[: math.ceil((1 - how.ratio) * start)])
                if row == 0:
                    chosen.append(sorted(active))
            slot = torch.arange(count)
            hidden = slot > slot[:, None]
            for n in set(range(start)) - active:
                hidden[start if seen else 0 :, n] |= not seen
                hidden[:start, n] = True
            mask = hidden.to(states.dtype)[None, None] * torch.finfo(states.dtype).min
            out = layer(
                states,
                attention_mask=mask,
                position_ids=at,
                position_embeddings=rotations,
            )
            skipped = torch.tensor([n < start and n not in active for n in range(count)])
            states = torch.where(skipped[:, None], states, out)
        logits = net.lm_head(net.model.norm(states))[0, start:]
        rows.append(logits.log_softmax(-1))
    return torch.stack(rows), chosen


def attended(layer, states: Tensor, rotations, start: int) -> Tensor:
    """How much token ``start - 1`` attends to each before it, by the layer's own attention."""
    own = layer.self_attn
    found = own(
        layer.input_layernorm(states[:, :start]),
        position_embeddings=tuple(x[:, :start] for x in rotations),
        attention_mask=torch.full((start, start), -1e30, dtype=states.dtype).triu(1)[None, None],
    )
    return found[1][0, :, -1].mean(0)


@pytest.mark.parametrize("how", [HALF, SparsePrefill(0.7, 0), SparsePrefill(0.3, 2)])
def test_active_tokens_are_those_that_the_end_of_the_prompt_attends_to_most(how):
    tokens = tokens_of(1)
    wanted, chosen = reference(tokens, how)
    for widths in ((LENGTH,), (1,) * LENGTH, (2, 1, 3)):
        assert (stepped(target(how), tokens, widths) - wanted).abs().max() < EXACT
    assert len({tuple(c) for c in chosen}) == min(2, len(chosen))  # layers have their own
    assert (reference(tokens, how, least=True)[0] - wanted).abs().max() > WRONG
    assert (reference(tokens, how, seen=True)[0] - wanted).abs().max() > WRONG


def test_a_ratio_of_zero_is_the_model_itself():
    model = CausalLM(small_llama(V, layers=LAYERS))
    assert sparse(model, SparsePrefill(0.0), "small") is model
    tokens = tokens_of(2)
    plain = stepped(target(None), tokens, (LENGTH,))
    assert torch.equal(stepped(target(SparsePrefill(0.0)), tokens, (LENGTH,)), plain)
    gap = (stepped(target(HALF), tokens, (LENGTH,)) - plain).abs().flatten(1).amax(1)
    # prompts of one and two tokens have nothing to skip
    assert (gap[[0, 2]] > WRONG).all() and (gap[[1, 3]] < EXACT).all()


def test_a_row_is_the_same_alone_in_a_batch_and_where_another_was():
    sampler = registry.get("sampler", "autoregressive")()
    batch = sampler(target(HALF), CounterRNG([5, 6, 7, 8]))
    two = target(HALF)
    two.at_most(2)
    assert torch.equal(sampler(two, CounterRNG([5, 6, 7, 8])).tokens, batch.tokens)
    for row in range(4):
        alone = sampler(target(HALF, (row,)), CounterRNG([5 + row]))
        assert torch.equal(alone.tokens[0], batch.tokens[row])


def test_drafts_are_judged_by_the_model_that_skips():
    sampler = registry.get("sampler", "speculative")(drafter="early_exit", verifier="follow")
    plain = registry.get("sampler", "autoregressive")()
    keys = [5, 6, 7, 8]
    drafted = sampler(target(HALF), CounterRNG(keys)).tokens
    assert torch.equal(drafted, plain(target(HALF), CounterRNG(keys)).tokens)


def test_a_layer_runs_at_its_active_tokens_alone():
    of, widths = target(HALF), []
    for layer in of.model.model.model.layers:
        own = layer.layer if isinstance(layer, SkippingLayer) else layer
        own.mlp.register_forward_hook(lambda m, given, out: widths.append(given[0].shape[1]))
    stepped(of, tokens_of(3), (1, 1))
    # 8 prompt tokens, of which 4 stay, and the prompt's last one; then one token
    assert widths == [9, 5, 5, 1, 1, 1]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("half", "sparse_prefill is 'half', a str; expected a share"),
        (1.0, "sparse_prefill is 1.0; expected a share from 0 to below 1"),
        ({"ratio": 0.5, "first": 1}, "unknown key 'first'"),
        ({"ratio": 0.5, "first_layer": -1}, "sparse_prefill.first_layer is -1"),
        ({"first_layer": 1}, "expected a share such as 0.5"),
    ],
)
def test_wrong_values_are_named(value, words):
    with pytest.raises(GenError, match=words):
        SparsePrefill.of(value)


def test_models_that_cannot_skip_are_named():
    with pytest.raises(GenError, match=r"first_layer is 3; expected at most 2, the last layer"):
        sparse(CausalLM(small_llama(V, layers=LAYERS)), SparsePrefill(0.5, 3), "small")
    config = Qwen3Config(
        vocab_size=24,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    other = CausalLM(AutoModelForCausalLM.from_config(config))
    with pytest.raises(GenError, match="has layers Qwen3DecoderLayer; expected those of the Llama"):
        sparse(other, HALF, "other")
    with pytest.raises(GenError, match="is a Tensor; expected a causal language model"):
        sparse(torch.zeros(1), HALF, "nothing")


def test_a_pipeline_says_that_it_skips(caplog):
    task = "sort 3 1 2 ="
    plain = gen.load("text", model="text-causal")
    zero = gen.load("text", model="text-causal", sparse_prefill=0.0)
    assert torch.equal(zero(task, seed=3).tokens, plain(task, seed=3).tokens)
    with caplog.at_level(logging.WARNING):
        half = gen.load("text", model="text-causal", sparse_prefill=0.5)
        out = half([task, "copy 4 0 7 5 ="], seed=3, num_samples=8)
    assert sum("prompts skip layers of model text-causal" in m for m in caplog.messages) == 1
    assert out.model_options == {"sparse_prefill": {"ratio": 0.5, "first_layer": 1}}
    whole = plain([task, "copy 4 0 7 5 ="], seed=3, num_samples=8)
    assert not torch.equal(out.tokens, whole.tokens)
    with pytest.raises(GenError, match="MaskedLM; expected a causal language model"):
        gen.load("text", model="text-masked", sparse_prefill=0.5)(task)
    with pytest.raises(GenError, match="sparse_prefill and compile are given"):
        gen.load("text", model="text-causal", sparse_prefill=0.5, compile=True)
    assert LeanLlama.of(plain.components["model"]) is not None


def test_requests_that_share_a_batch_have_the_tokens_they_have_alone():
    pipe = gen.load("text", model="text-causal", dtype="float64", sparse_prefill=0.5)
    tasks = ["sort 3 1 2 =", "copy 4 0 7 5 =", "sort 3 1 2 =", "3 + 8 + 5 ="]
    engine = Engine({"text": pipe}, max_rows=2)
    try:
        tickets = [engine.submit("text", task, "autoregressive", seed=1) for task in tasks]
        made = [ticket.result(timeout=120) for ticket in tickets]
    finally:
        engine.close()
    for task, out in zip(tasks, made, strict=True):
        assert torch.equal(out.tokens, pipe(task, "autoregressive", seed=1).tokens)
