"""Conditions of different lengths, for every masked sampler and preset that there is: a row is the
same beside longer ones, however they are padded; no call goes backwards; and the condition stays
what it is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cache_bench import MASK, ROWS, SPACE, Seen, T, V, canvas, conditions, model

from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.models.adapters.language_models import CausalLM
from gen.models.targets.causal import CausalTarget
from gen.models.targets.masked import MaskedTarget
from gen.testing.specs import SPECS, TRAINED

NEEDS = replace(SPACE, eos_token_id=7, delimiters=(2,), rarity=torch.arange(1, V + 1) / 2)
NAMES = [
    n
    for kind in ("sampler", "preset")
    for n in registry.table(kind)
    if resolve_sampler(n)[0].protocol == "masked" and "codes" in resolve_sampler(n)[0].kinds
]


def run(name: str, rows: list[int], extra: int = 0, adapter=None):
    sampler, sampling = resolve_sampler(name)
    if vars(sampler).get("proposer") in TRAINED["proposer"]:  # for another model
        sampler, sampling = resolve_sampler(SPECS[name])
    sampling = replace(sampling, temperature=sampling.temperature and 1.5)
    prompt, length = conditions(rows, True, extra=extra)
    before = prompt.clone()
    net = model("llama", adapter=adapter) if adapter else model("llama")
    rng, known = CounterRNG([31 * r + 7 for r in rows]), {}
    if sampler.drafted:
        known = {
            "draft": CausalTarget(
                CausalLM(net.model),
                prompt,
                replace(NEEDS, eos_token_id=None),
                sampling,
                prompt_length=length,
            )
        }
    out = sampler(
        MaskedTarget(net, prompt, NEEDS, sampling, prompt_length=length),
        rng,
        canvas=canvas(rows),
        trace=True,
        **known,
    )
    assert torch.equal(prompt, before)
    return out


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.thinned(9)
def test_padding_is_nothing_to_a_sampler(name):
    whole, more = run(name, list(range(ROWS))), run(name, list(range(ROWS)), extra=3)
    assert torch.equal(whole.tokens, more.tokens)
    for row in range(ROWS):
        alone = run(name, [row])
        assert torch.equal(alone.tokens[0], whole.tokens[row])
        assert (alone.stats[0].nfe, alone.stats[0].tokens) == (
            whole.stats[row].nfe,
            whole.stats[row].tokens,
        )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.thinned(3)
def test_no_call_goes_backwards(name):
    """But for calls in a full block, of which a remasker may ask for ``max_post_steps``."""
    out, sampler = run(name, list(range(ROWS))), resolve_sampler(name)[0]
    assert not bool((out.tokens == MASK).any())
    spare = (
        getattr(sampler, "max_post_steps", 0)
        if getattr(sampler, "remasker", "none") == "edit"
        else 0
    )
    for row, (trace, stats) in enumerate(zip(out.traces, out.stats, strict=True)):
        state = canvas([row])[0].tolist()
        empty = state.count(MASK)
        assert stats.nfe <= empty + spare * T
        full = 0
        for step in trace:
            for position in step.removed:
                state[position] = MASK
            for position, value in step.committed.items():
                state[position] = value
            full += state.count(MASK) >= empty
            empty = state.count(MASK)
        assert full <= spare * T and state == out.tokens[row].tolist()


def test_control_a_model_that_sees_padding_is_found():
    whole = run("fast_dllm", list(range(ROWS)), adapter=Seen)
    assert any(
        not torch.equal(run("fast_dllm", [row], adapter=Seen).tokens[0], whole.tokens[row])
        for row in range(ROWS)
    )
