"""WeDLM's window: its distribution by recursion without a cache, what each mask sees, the cache of
what has left the window, and rows alone and together."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from enumeration import distance, enumerate_distribution

from gen.core.errors import GenError
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.adapters.language_models import CausalLM
from gen.models.load.transformers_compat import CACHE_NAME
from gen.models.nets.grid import GridLlamaConfig
from gen.models.targets.causal import CausalTarget
from gen.pipeline.pipeline import Pipeline
from gen.recipes.common.grid_models import Run, Shape, new_lm
from gen.samplers.causal.wedlm import MaskedWindow, MaskedWindowSampler
from gen.samplers.engine.causal_loop import CausalRun

PREFIX, IDS = 2, 2
PROMPT = torch.tensor([[IDS, IDS + 1]])
PENALTY = 0.02


def shaped(length: int) -> Shape:
    return Shape((length,), PREFIX, IDS, 2)


def tiny(length: int) -> CausalLM:
    torch.manual_seed(6)
    net = new_lm(shaped(length), Run(0, 32, 2, tied=True)).double()
    net.config.trained_at_mask = True
    with torch.no_grad():  # far from uniform, and what is attended to matters
        net.model.embed_tokens.weight.mul_(5)
        net.axes[0].weight.mul_(5)
        for name, weight in net.named_parameters():
            if "self_attn" in name:
                weight.mul_(12)
    return CausalLM(net)


def space_of(length: int, **more) -> TokenSpace:
    mask = shaped(length).mask
    return replace(TokenSpace.codes((length,), IDS, mask + 1, mask), **more)


def target_of(model, rows: int, length: int, sampling=None, **more) -> CausalTarget:
    space = space_of(length, **more)
    return CausalTarget(model, PROMPT.repeat(rows, 1), space, sampling or SamplingParams())


def spec(threshold: float, window: int = 16) -> dict:
    return {"name": "wedlm", "entropy_threshold": threshold, "window": window}


def recomputed(model, known: list[int], filled: dict[int, int], masks: list[int], length: int):
    """Log-probabilities [n, V] at masks, in a pass over the whole physical sequence."""
    inside = sorted(filled)
    ids = [*PROMPT[0].tolist(), *known, *(filled[i] for i in inside)]
    at = [*range(PREFIX + len(known)), *(PREFIX + i for i in (*inside, *masks))]
    # without a mask, transformers takes positions that are out of order for several texts
    hidden = torch.full((1, 1, len(at), len(at)), -1e300, dtype=torch.float64).triu(1)
    with torch.no_grad():
        logits = model.model(
            input_ids=torch.tensor([ids + [shaped(length).mask] * len(masks)]),
            position_ids=torch.tensor([at]),
            attention_mask=hidden,
            use_cache=False,
        ).logits[0, len(ids) :, :IDS]
    return logits.log_softmax(-1)


def by_recursion(
    model, length: int, threshold: float, window: int, gaps: list[float] | None = None
) -> dict:
    """The distribution by the rule of the module, without its code: text that has left, tokens in
    the window, and the tokens that follow the text leave one pass after they were filled.

    ``gaps`` receives the probabilities of passes with a filled token behind a mask.
    """
    out: dict[tuple[int, ...], float] = defaultdict(float)

    def go(known: list[int], filled: dict[int, int], p: float) -> None:
        n = len(known)
        masks = [i for i in range(n, min(n + window, length)) if i not in filled]
        if gaps is not None and any(i > masks[0] for i in filled):
            gaps.append(p)
        logp = recomputed(model, known, filled, masks, length)
        entropy = -(logp.exp() * logp).sum(-1)
        doubt = [float(h) + PENALTY * (i - masks[0]) for h, i in zip(entropy, masks, strict=True)]
        chosen = [k for k, d in enumerate(doubt) if d < threshold] or [doubt.index(min(doubt))]
        outcomes = [({}, 1.0)]
        for k in chosen:
            outcomes = [
                (made | {masks[k]: v}, q * float(logp[k, v].exp()))
                for made, q in outcomes
                for v in range(IDS)
            ]
        left = 0
        while n + left in filled:
            left += 1
        for made, q in outcomes:
            every = filled | made
            if all(i in every for i in range(n, length)):
                out[tuple(known + [every[i] for i in range(n, length)])] += p * q
                continue
            gone = left + (n + left in every)
            text = known + [every[n + k] for k in range(gone)]
            go(text, {i: v for i, v in every.items() if i >= n + gone}, p * q)

    go([], {}, 1.0)
    return dict(out)


def law_of(model, sampler_spec, length: int, **more) -> dict:
    sampler, _ = resolve_sampler(sampler_spec)

    def decode(rng, context):
        return sampler(target_of(model, len(context), length, **more), rng).tokens

    return enumerate_distribution(decode, 1)[0]


@pytest.mark.parametrize(
    ("threshold", "window"), [(0.0, 16), (0.0, 2), (0.0, 1), (0.63, 3), (0.63, 2), (5.0, 2)]
)
@pytest.mark.thinned(3)
def test_the_distribution_is_that_of_the_rule(threshold, window):
    length = 4
    model = tiny(length)
    gaps: list[float] = []
    wanted = by_recursion(model, length, threshold, window, gaps)
    assert sum(gaps) > 0.1 or threshold > 1 or window == 1, "filled out of order"
    assert sum(wanted.values()) == pytest.approx(1) and len(wanted) == IDS**length
    assert distance(law_of(model, spec(threshold, window), length), wanted) < 1e-12


def test_control_another_threshold_is_another_distribution():
    model = tiny(4)
    one, other = by_recursion(model, 4, 0.0, 3), by_recursion(model, 4, 5.0, 3)
    assert distance(one, other) > 1e-3
    assert distance(law_of(model, spec(5.0, 3), 4), one) > 1e-3


class Noted(MaskedWindow):
    """Window whose passes are noted."""

    def verify(self, step, draft, output):
        before = self.filled.clone()
        raw = output.raw().clone()
        verdict = super().verify(step, draft, output)
        self.seen.append((step, draft, before, raw, verdict))
        return verdict


def noted_run(length=10, rows=8, threshold=0.66, window=4, **more):
    model = tiny(length)
    target = target_of(model, rows, length, **more)
    sampler = MaskedWindowSampler(window, threshold, PENALTY)
    drafter = Noted(target, shaped(length).mask, sampler)
    drafter.seen = []
    return model, CausalRun(target, CounterRNG(range(rows)), drafter, False)


def test_a_cached_window_is_the_one_without_a_cache():
    """Logits of masks, and keys of tokens that left, against passes over the whole sequence."""
    length, window = 10, 4
    model, run = noted_run(length=length, window=window)
    logits = keys = gaps = 0
    while not run.is_over:
        items, tokens = run.slots.items.copy(), run.tokens.clone()
        run.step()
        step, draft, before, raw, _ = run.drafter.seen[-1]
        for row, n in enumerate(step.start.tolist()):
            filled = {n + k: v for k, v in enumerate(before[row].tolist()) if v >= 0}
            masks = [i for i in range(n, min(n + window, length)) if i not in filled]
            wanted = recomputed(model, tokens[items[row], :n].tolist(), filled, masks, length)
            # physical order: filled tokens first, both by position
            assert draft.positions[row, draft.exists[row]].tolist() == [*sorted(filled), *masks]
            found = raw[row, 1 + len(filled) :][: len(masks), :IDS]
            assert torch.allclose(found, wanted, atol=1e-9, rtol=0)
            logits += len(masks)
            gaps += bool(masks) and any(i > masks[0] for i in filled)
        if run.is_over or len(run.slots.items) != len(items):
            break
        for layer, cached in enumerate(run.target.cache.layers):
            for row, (item, at) in enumerate(zip(items, run.start, strict=True)):
                ids = torch.cat([PROMPT[0], run.tokens[item, : max(at - 1, 0)]])[None]
                with torch.no_grad():
                    cache = model.model(input_ids=ids, use_cache=True)[CACHE_NAME]
                exact = cache.layers[layer].keys[0].transpose(0, 1)
                known = PREFIX + max(at - 1, 0) - (at == 0)
                assert torch.allclose(cached.keys[row, :known], exact[:known], atol=1e-9, rtol=0)
                keys += known
    assert logits > 50 and keys > 50 and gaps > 3, "tokens were filled behind masks"


def test_every_mask_sees_the_known_tokens_and_the_masks_before_it():
    """Changing a token of the input changes the masks that attend to it, and no other."""
    length = 4
    model = tiny(length)
    filled, masks = {1: 0, 3: 1}, [0, 2]
    one = recomputed(model, [], filled, masks, length)
    for changed in filled:
        other = recomputed(model, [], filled | {changed: 1 - filled[changed]}, masks, length)
        assert ((one - other).abs().amax(1) > 1e-6).all(), "a later filled token is seen too"
    shorter = recomputed(model, [], filled, [0], length)
    assert torch.allclose(shorter, one[:1], atol=1e-12), "no mask sees one behind it"
    alone = recomputed(model, [], filled, [2], length)
    assert (alone - one[1:]).abs().max() > 1e-6, "a mask sees the masks before it"


def test_positions_are_filled_out_of_order_and_commit_in_order():
    _, run = noted_run(threshold=0.0, rows=4)
    while not run.is_over:
        run.step()
    out = run.output()
    stalled = [int((v.num_committed == 0).sum()) for *_, v in run.drafter.seen]
    assert sum(stalled) > 0, "some pass fills a position behind a mask"
    for stats in out.stats:
        assert stats.nfe == 10 and stats.tokens == 10, "one position per forward pass"


def test_rows_are_the_same_alone_and_in_a_batch():
    model, (sampler, _) = tiny(10), resolve_sampler(spec(0.69, 4))
    batch = sampler(target_of(model, 8, 10), CounterRNG(range(8)))
    assert len({s.nfe for s in batch.stats}) > 1
    two = target_of(model, 8, 10)
    two.at_most(3)
    replaced = sampler(two, CounterRNG(range(8)))
    assert torch.equal(batch.tokens, replaced.tokens)
    for row in range(8):
        alone = sampler(target_of(model, 1, 10), CounterRNG([row]))
        assert torch.equal(alone.tokens[0], batch.tokens[row])
        assert {made.stats[row].nfe for made in (batch, replaced)} == {alone.stats[0].nfe}


def test_nothing_behind_a_filled_eos_token_is_computed():
    _, run = noted_run(rows=16, threshold=0.5, eos_token_id=1)
    while not run.is_over:
        run.step()
    ends = 0
    for _, draft, before, *_ in run.drafter.seen:
        for row in range(len(before)):
            eos = (before[row] == 1).nonzero()[:, 0].tolist()
            if eos:
                assert int(draft.exists[row].sum()) <= eos[0] + 1
                ends += 1
    assert ends > 0
    for row in run.output().tokens.tolist():
        first = row.index(1) if 1 in row else 10
        assert set(row[first:]) <= {1}


def test_the_distribution_holds_with_an_eos_token():
    """A text that ends early is worth all its continuations."""
    model = tiny(3)
    wanted: dict[tuple[int, ...], float] = defaultdict(float)
    for text, p in by_recursion(model, 3, 0.0, 1).items():
        first = text.index(1) if 1 in text else 3
        wanted[(*text[:first], *[1] * (3 - first))] += p
    assert distance(law_of(model, spec(0.0, 1), 3, eos_token_id=1), dict(wanted)) < 1e-12


def test_certainty_is_that_before_temperature():
    """At temperature 0 no distribution has an entropy; what is filled stays one position."""
    model, (sampler, _) = tiny(6), resolve_sampler(spec(0.0))
    out = sampler(target_of(model, 1, 6, SamplingParams(temperature=0.0)), CounterRNG([0]))
    assert out.stats[0].nfe == 6
    sampler, _ = resolve_sampler(spec(0.3))
    cold = sampler(target_of(model, 1, 6, SamplingParams(temperature=0.0)), CounterRNG([0]))
    assert cold.stats[0].nfe > 1


def test_text_comes_as_growing_prefixes():
    model, (sampler, _) = tiny(10), resolve_sampler(spec(0.66, 4))
    seen: list[list[int]] = []

    def note(info):
        tokens, known = info["tokens"], info["known"]
        assert bool((known[:, 1:] <= known[:, :-1]).all()), "known tokens are a prefix"
        seen.append(tokens[0, known[0]].tolist())

    out = sampler(target_of(model, 1, 10), CounterRNG([3]), callback=note)
    assert len(seen) == out.stats[0].nfe and seen[-1] == out.tokens[0].tolist()
    assert all(b[: len(a)] == a for a, b in pairwise(seen))
    assert len({len(s) for s in seen}) > 1


def test_rows_that_wait_at_a_bound_go_on():
    sampler, _ = resolve_sampler(spec(0.66, 4))
    run = sampler.begin(target_of(tiny(10), 3, 10), CounterRNG(range(3)))
    while not run.is_over:
        run.advance(4)
    out = run.output()
    assert not bool((out.tokens == shaped(10).mask).any())
    for row in range(3):
        alone = sampler.begin(target_of(tiny(10), 1, 10), CounterRNG([row]))
        while not alone.is_over:
            alone.advance(4)
        assert torch.equal(alone.output().tokens[0], out.tokens[row])


def test_a_model_without_a_mask_token_is_refused():
    sampler, _ = resolve_sampler("wedlm")
    with pytest.raises(GenError, match="masked_window needs a causal model with a mask token"):
        sampler(target_of(tiny(4), 1, 4, mask_token_id=None), CounterRNG([0]))


@pytest.mark.parametrize("spec", ["wedlm", "dual_stream", "streaming"])
def test_a_mask_of_the_vocabulary_alone_is_refused(spec):
    """The built-in causal model has the words of the masked one, and was never trained at masks."""
    pipe = Pipeline("text", "text-causal")
    chosen = spec if spec == "wedlm" else {"name": "speculative", "drafter": spec}
    with pytest.raises(GenError, match="text-causal has one in its vocabulary alone; expected"):
        pipe(["sort 3 1 2 ="], chosen)
    config = pipe.bound("text-causal")[0].config
    assert config.mask_token_id is not None and not config.trained_at_mask


def test_masked_models_are_trained_at_their_mask():
    assert GridLlamaConfig(causal=False).trained_at_mask
    assert not GridLlamaConfig(causal=True).trained_at_mask
    kept = GridLlamaConfig.from_dict(GridLlamaConfig(trained_at_mask=True).to_dict())
    assert kept.causal and kept.trained_at_mask


def test_control_what_a_model_was_trained_at_is_all_that_differs():
    net = tiny(4).model
    sampler, _ = resolve_sampler("wedlm")
    assert sampler(target_of(CausalLM(net), 1, 4), CounterRNG([0])).tokens.shape == (1, 4)
    net.config.trained_at_mask = False
    with pytest.raises(GenError, match="this model has one in its vocabulary alone"):
        sampler(target_of(CausalLM(net), 1, 4), CounterRNG([0]))


def test_penalties_are_refused():
    sampler, _ = resolve_sampler("wedlm")
    held = target_of(tiny(4), 1, 4, SamplingParams(repetition_penalty=1.5))
    with pytest.raises(GenError, match=r"sampler masked_window came with sampling\.repetition"):
        sampler(held, CounterRNG([0]))


@pytest.mark.parametrize(
    "bad", [{"window": 0}, {"entropy_threshold": -1}, {"position_penalty": "much"}]
)
def test_bad_parameters_are_refused(bad):
    with pytest.raises(GenError, match=f"sampler.{next(iter(bad))}"):
        resolve_sampler({"name": "wedlm", **bad})


def test_the_names_of_the_paper_are_taken():
    sampler, _ = resolve_sampler({"name": "wedlm", "wedlm_entropy_threshold": 0.1})
    assert sampler.entropy_threshold == 0.1
