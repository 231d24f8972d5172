"""Self-speculation of a model that is causal and masked at once, by enumeration on a tiny one."""

from __future__ import annotations

import pytest
import torch
from enumeration import distance, enumerate_distribution

from gen.core.errors import GenError
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.adapters.language_models import CausalLM
from gen.models.targets.causal import CausalTarget
from gen.recipes.common.grid_models import Run, Shape, new_lm
from gen.samplers.causal.drafters.parallel import DualStream

LENGTH, PREFIX, IDS = 4, 2, 2
SHAPE = Shape((LENGTH,), PREFIX, IDS, 2)
SPACE = TokenSpace.codes((LENGTH,), IDS, SHAPE.mask + 1, SHAPE.mask)
PROMPT = torch.tensor([[SHAPE.codes, SHAPE.codes + 1]])


@pytest.fixture(scope="module")
def model() -> CausalLM:
    torch.manual_seed(0)
    net = new_lm(SHAPE, Run(0, 32, 2, tied=True)).double()
    net.config.trained_at_mask = True
    with torch.no_grad():  # far from uniform
        net.model.embed_tokens.weight.mul_(15)
    return CausalLM(net)


def target_of(model: CausalLM, rows: int, space: TokenSpace = SPACE) -> CausalTarget:
    return CausalTarget(model, PROMPT.repeat(rows, 1), space, SamplingParams())


def law_of(model: CausalLM, spec) -> dict:
    sampler, _ = resolve_sampler(spec)

    def decode(rng, context):
        return sampler(target_of(model, len(context)), rng).tokens

    return enumerate_distribution(decode, 1)[0]


def dual(drafts: int) -> dict:
    return {"name": "speculative", "drafter": "dual_stream", "num_speculative_tokens": drafts}


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_the_distribution_is_that_of_autoregression(model, drafts):
    exact = law_of(model, "autoregressive")
    assert max(exact.values()) < 0.9 and min(exact.values()) > 0
    assert distance(law_of(model, dual(drafts)), exact) < 1e-12


def test_a_draft_is_what_the_masks_say_without_a_cache(model, monkeypatch):
    """Draft 1 has the model's own next distribution; draft j that of mask j behind the prefix."""
    seen, begin = [], DualStream.begin

    def noted(self, step, tokens):
        first = begin(self, step, tokens)
        seen.append((step.start.clone(), tokens.clone(), self.logq.clone()))
        return first

    monkeypatch.setattr(DualStream, "begin", noted)
    sampler, _ = resolve_sampler(dual(3))
    out = sampler(target_of(model, 6), CounterRNG(range(6)))
    assert len(seen) > 1 and len({s.nfe for s in out.stats}) > 0
    compared = 0
    for start, tokens, logq in seen:
        for row, at in enumerate(start.tolist()):
            room = LENGTH - at
            masks = torch.full((room,), SHAPE.mask)
            ids = torch.cat([PROMPT[0], tokens[row, :at], masks])[None]
            with torch.no_grad():
                logits = model.model(input_ids=ids, use_cache=False).logits[0, :, :IDS]
            wanted = logits.log_softmax(-1)
            known = PREFIX + at
            assert torch.allclose(logq[row, 0], wanted[known - 1], atol=1e-9)
            for depth in range(1, min(3, room - 1)):
                assert torch.allclose(logq[row, depth], wanted[known + depth], atol=1e-9)
                compared += 1
    assert compared > 5


def test_the_first_draft_is_always_accepted(model):
    """Its distribution is the target's, so every pass of the target commits two tokens at least."""
    sampler, _ = resolve_sampler(dual(1))
    out = sampler(target_of(model, 64), CounterRNG(range(64)))
    assert {s.nfe for s in out.stats} == {LENGTH // 2}


def test_a_model_without_a_mask_is_refused(model):
    net = new_lm(SHAPE, Run(0, 32, 1, tied=True)).double()
    net.config.trained_at_mask = True
    net.config.mask_token_id = None
    sampler, _ = resolve_sampler(dual(2))
    with pytest.raises(GenError, match="needs a causal model with a mask token"):
        sampler(target_of(CausalLM(net), 1), CounterRNG([0]))


def test_weights_of_another_drafter_are_refused(model):
    sampler, _ = resolve_sampler({**dual(2), "drafter_weights": "text-causal-masked"})
    with pytest.raises(GenError, match="the target itself; expected None"):
        sampler(target_of(model, 1), CounterRNG([0]))
