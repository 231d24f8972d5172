"""Drafting and verification in one pass: the distribution by enumeration on a tiny model, and what
the groups of masks say against recomputation without a cache."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from decoding import decode_causal
from enumeration import distance, enumerate_distribution

from gen.core.errors import GenError
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.adapters.language_models import CausalLM
from gen.models.adapters.mask_attention import MaskAttention, with_masks
from gen.models.load.transformers_compat import CACHE_NAME
from gen.models.targets.causal import CausalTarget
from gen.recipes.common.grid_models import Run, Shape, new_lm
from gen.samplers.causal.drafters.one_pass import GroupNodes, OnePassDrafter
from gen.samplers.engine.causal_loop import CausalRun
from gen.samplers.verifiers.base import Token

LENGTH, PREFIX, IDS = 4, 2, 2
PROMPT = torch.tensor([[IDS, IDS + 1]])


def shaped(length: int) -> Shape:
    return Shape((length,), PREFIX, IDS, 2)


def tiny(length: int, scale: float = 15) -> CausalLM:
    torch.manual_seed(0)
    net = new_lm(shaped(length), Run(0, 32, 2, tied=True)).double()
    net.config.trained_at_mask = True
    with torch.no_grad():  # far from uniform
        net.model.embed_tokens.weight.mul_(scale)
    return CausalLM(net)


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return tiny(LENGTH, 3)


def target_of(model: CausalLM, rows: int, length: int = LENGTH, **space) -> CausalTarget:
    mask = shaped(length).mask
    tokens = replace(TokenSpace.codes((length,), IDS, mask + 1, mask), **space)
    return CausalTarget(model, PROMPT.repeat(rows, 1), tokens, SamplingParams())


def streaming(drafts: int, **more) -> dict:
    return {
        "name": "speculative",
        "drafter": "streaming",
        "num_speculative_tokens": drafts,
        **more,
    }


def law_of(model: CausalLM, spec, **space) -> dict:
    sampler, _ = resolve_sampler(spec)

    def decode(rng, context):
        return sampler(target_of(model, len(context), **space), rng).tokens

    return enumerate_distribution(decode, 1)[0]


@pytest.mark.parametrize("verifier", ["token", "block"])
@pytest.mark.parametrize("drafts", [1, 2, 3])
@pytest.mark.thinned(3)
def test_the_distribution_is_that_of_autoregression(model, drafts, verifier):
    exact = law_of(model, "autoregressive")
    assert max(exact.values()) < 0.9 and min(exact.values()) > 1e-4
    assert distance(law_of(model, streaming(drafts, verifier=verifier)), exact) < 1e-12


@pytest.mark.slow
def test_the_distribution_holds_with_an_end(model):
    exact = law_of(model, "autoregressive", eos_token_id=1)
    assert distance(law_of(model, streaming(2), eos_token_id=1), exact) < 1e-12


def test_control_drafts_of_another_group(model, monkeypatch):
    """Claims what the group behind no draft says, whichever group the drafts were drawn from."""
    judge = OnePassDrafter._judge

    def claimed(self, step, tree, logp):
        tree.logq = torch.where(tree.logq.isneginf(), -torch.inf, -np.log(IDS))
        return judge(self, step, tree, logp)

    monkeypatch.setattr(OnePassDrafter, "_judge", claimed)
    assert distance(law_of(model, streaming(2)), law_of(model, "autoregressive")) > 1e-3


def flex_target(model: CausalLM, rows: int, length: int = LENGTH):
    """Target that takes the mask of untrained additions, and the id of the mask."""
    target = target_of(model, rows, length)
    torch.manual_seed(3)
    attention = MaskAttention(model, 1, 4).double()
    for p in attention.parameters():
        p.data.normal_()
    target.run_with(model.with_network(with_masks(model, attention).eval()))
    return target, model.config.vocab_size


def test_flexdraft_leaves_the_distribution_whatever_its_weights(model):
    def decode(rng, context):
        target, mask = flex_target(model, len(context))
        return decode_causal(target, rng, OnePassDrafter(mask, 2, Token())).tokens

    law = enumerate_distribution(decode, 1)[0]
    assert distance(law, law_of(model, "autoregressive")) < 1e-12


def test_additions_reach_masks_and_no_token(model):
    target, mask = flex_target(model, 1)
    network, ids = target.model.model, torch.cat([PROMPT, torch.tensor([[0, 1, 1]])], 1)
    with torch.no_grad():
        plain, tuned = (m(input_ids=ids, use_cache=False).logits for m in (model.model, network))
        assert torch.equal(plain, tuned)
        ids[0, -1] = mask
        masked = network(input_ids=ids, use_cache=False).logits
    assert torch.equal(masked[:, :-1], plain[:, :-1])
    assert not torch.allclose(masked[:, -1], plain[:, -1])


class Noted(GroupNodes):
    """Groups whose distributions are noted with the tokens that they stand behind."""

    def begin(self, step, tokens):
        self.seen.append((step.start.clone(), tokens.clone(), self.logq.clone()))
        return super().begin(step, tokens)


@pytest.mark.parametrize("kind", ["streaming", "flexdraft"])
def test_keys_and_drafts_are_those_of_recomputation(kind):
    """Keys of committed tokens, and drafts behind them, against passes without a cache."""
    length, depth, rows = 10, 3, 8
    net = tiny(length)
    if kind == "streaming":
        target, mask, shift = target_of(net, rows, length), shaped(length).mask, 1
    else:
        (target, mask), shift = flex_target(net, rows, length), 0
    network = target.model.model
    drafter = OnePassDrafter(mask, depth, Token(), shift)
    drafter.nodes = drafter.groups = Noted(depth)
    drafter.groups.seen = []
    run = CausalRun(target, CounterRNG(range(rows)), drafter, False)
    compared = checked = 0
    while not run.is_over:
        items = run.slots.items.copy()
        run.step()
        if run.is_over or len(run.slots.items) != len(items):
            break
        for layer in range(2):
            keys = target.cache.layers[layer].keys
            for row, (item, at) in enumerate(zip(items, run.start, strict=True)):
                if at >= length:
                    continue
                ids = torch.cat([PROMPT[0], run.tokens[item, : at - 1]])[None]
                wanted = keys_of(network, ids)[layer]
                known = PREFIX + at - 1
                assert torch.allclose(keys[row, :known], wanted, atol=1e-9, rtol=0)
                checked += known
    for start, tokens, logq in drafter.groups.seen:
        for row, at in enumerate(start.tolist()):
            known = tokens[row, : at - 1]  # the token that the pass added is not known to masks
            masks = torch.full((min(depth + shift, length - at),), mask)
            ids = torch.cat([PROMPT[0], known, masks])[None]
            with torch.no_grad():
                logits = network(input_ids=ids, use_cache=False).logits[0, :, :IDS]
            wanted = logits.log_softmax(-1)[PREFIX + at - 1 + shift :]
            some = min(len(wanted), depth)
            assert torch.allclose(logq[row, :some], wanted[:some], atol=1e-9, rtol=0)
            compared += some
    assert compared > 20 and checked > 50


def keys_of(network, ids):
    with torch.no_grad():
        cache = network(input_ids=ids, use_cache=True)[CACHE_NAME]
    return [layer.keys[0].transpose(0, 1) for layer in cache.layers]


def test_control_keys_that_saw_a_mask(model):
    """A mask among the committed tokens changes the keys behind it."""
    ids = torch.cat([PROMPT, torch.tensor([[0, 1, 1]])], 1)
    wrong = ids.clone()
    wrong[0, 2] = shaped(LENGTH).mask
    one, two = keys_of(model.model, ids)[1], keys_of(model.model, wrong)[1]
    assert (one[-1] - two[-1]).abs().max() > 1e-3


def test_rows_are_the_same_alone_and_in_a_batch():
    net = tiny(10)
    sampler, _ = resolve_sampler(streaming(3))
    batch = sampler(target_of(net, 5, 10), CounterRNG(range(5)))
    two = target_of(net, 5, 10)
    two.at_most(2)
    replaced = sampler(two, CounterRNG(range(5)))
    assert torch.equal(batch.tokens, replaced.tokens)
    for row in range(5):
        alone = sampler(target_of(net, 1, 10), CounterRNG([row]))
        assert torch.equal(alone.tokens[0], batch.tokens[row])
        assert {made.stats[row].nfe for made in (batch, replaced)} == {alone.stats[0].nfe}


def test_rows_that_wait_at_a_bound_go_on():
    sampler, _ = resolve_sampler(streaming(3, verifier="follow"))
    whole = sampler(target_of(tiny(10), 3, 10), CounterRNG(range(3)))
    plain = resolve_sampler("autoregressive")[0](target_of(tiny(10), 3, 10), CounterRNG(range(3)))
    assert torch.equal(whole.tokens, plain.tokens), "the guarantee of the verifier"
    run = sampler.begin(target_of(tiny(10), 3, 10), CounterRNG(range(3)))
    while not run.is_over:
        run.advance(4)
    assert torch.equal(run.output().tokens, whole.tokens)


def test_masks_are_not_counted_as_drafts():
    sampler, _ = resolve_sampler(streaming(3))
    out = sampler(target_of(tiny(10), 6, 10), CounterRNG(range(6)))
    for stats in out.stats:
        assert stats.draft_nfe is None, "no pass drafts alone"
        assert stats.draft_acceptance_rate is not None and stats.draft_acceptance_rate <= 1
        assert len(stats.acceptance_histogram) <= 2 + 3, "at most three drafts a pass"


def test_constraints_and_penalties_are_refused(model):
    sampler, _ = resolve_sampler(streaming(2))
    sampling = SamplingParams(repetition_penalty=1.5)
    target = target_of(model, 1)
    held = CausalTarget(model, PROMPT, target.space, sampling)
    with pytest.raises(GenError, match="reads the tokens before a position"):
        sampler(held, CounterRNG([0]))


def test_a_model_without_a_mask_is_refused(model):
    net = new_lm(shaped(LENGTH), Run(0, 32, 1, tied=True)).double()
    net.config.trained_at_mask = True
    net.config.mask_token_id = None
    sampler, _ = resolve_sampler(streaming(2))
    with pytest.raises(GenError, match="needs a causal model with a mask token"):
        sampler(target_of(CausalLM(net), 1), CounterRNG([0]))
