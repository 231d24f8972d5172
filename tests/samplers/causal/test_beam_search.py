"""Beam search: against transformers, against all texts, in groups, in any batch. The other rules
without draws are in ``test_rules_without_draws.py``."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import chain, product

import numpy as np
import pytest
import torch
from constrained import exact_length, obeys, with_end
from families import WRITERS
from searches import decode
from small_llama import small_llama
from tabular import EMPTY, PROMPTS, TabularCausal, causal_target, space_of

import gen
from gen.core.errors import GenError
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.adapters.language_models import CausalLM
from gen.models.targets.causal import CausalTarget
from gen.pipeline.pipeline import Pipeline
from gen.samplers.causal.beam import beam_search
from gen.samplers.causal.beam.beam_search import Beams, Pool
from gen.samplers.engine.hypotheses import first_largest
from gen.samplers.engine.rows import BatchSlots

GUIDED = SamplingParams(guidance_scale=1.5, temperature=0.7)


NET = small_llama(24)


def on_llama(spec, sampling, items, rows=None, **more):
    """Items with prompts of three lengths, ``rows`` of them at a time."""
    g = torch.Generator().manual_seed(3)
    prompt, uncond = (torch.randint(16, 24, (7, 5), generator=g)[items] for _ in range(2))
    lengths = torch.tensor([3, 5, 4, 3, 5, 4, 3])[items]
    space = replace(TokenSpace.codes((9,), 16, 24), eos_token_id=10)
    branches = (uncond, lengths, lengths.flip(0)) if sampling.guided else (None, lengths)
    target = CausalTarget(CausalLM(NET), prompt, space, sampling, *branches)
    target.at_most(rows or len(items))
    return resolve_sampler(spec)[0](target, CounterRNG(range(len(items))), trace=True)


def logprobs(model, space, sampling, context, prefix) -> list[float]:
    """The distribution behind a text, from its definition."""
    cond = model.after([*PROMPTS[context], *prefix])
    uncond = model.after([*EMPTY[context], *prefix]) if sampling.guided else None
    return sampling(cond, uncond, space.legal[len(prefix)]).tolist()


# --- transformers


@pytest.mark.parametrize("ends", [None, 3, [3, 5]])
@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 3},
        {"num_beams": 4, "length_penalty": 0.0, "early_stopping": True},
        {"num_beams": 2, "length_penalty": 2.0, "early_stopping": "never"},
        {"num_beams": 5, "length_penalty": -1.0},
    ],
    ids=lambda s: f"{s['num_beams']} beams",
)
@pytest.mark.thinned(3)
def test_tokens_are_those_of_transformers(settings, ends):
    model = small_llama(12, 4)
    for p in model.parameters():
        p.data.mul_(0.6)
    model.generation_config.eos_token_id = ends
    pad = 11  # transformers fills texts with the eos token where this is 0
    ids = torch.tensor([[pad, pad, 7, 2, 9], [4, 1, 8, 6, 2], [pad, 5, 0, 10, 1]])
    more = {"attention_mask": (ids != pad).long(), "max_new_tokens": 9, "do_sample": False}
    count = settings["num_beams"]
    theirs = model.generate(
        ids, pad_token_id=pad, num_return_sequences=count, **settings, **more
    ).view(3, count, -1)
    for rank in range(count):
        ours = model.generate(
            ids,
            pad_token_id=pad,
            custom_generate=gen.transformers_generate,
            sampler={"name": "beam", "rank": rank, **settings},
            **more,
        )
        wide = torch.full((3, theirs.shape[2]), pad)
        wide[:, : ours.shape[1]] = ours
        assert wide.equal(theirs[:, rank])


def test_control_rows_that_do_not_follow_their_hypothesis_are_found(monkeypatch):
    space, spec = space_of((5,), 6), {"name": "beam", "num_beams": 3}
    right = decode(spec, space).tokens
    continue_as = BatchSlots.continue_as

    def stay(self, rows, items):
        """The items are right, and the caches are those of the first hypothesis."""
        first = {item: row for row, item in reversed(list(enumerate(self.items.tolist())))}
        wrong = np.asarray([first[self.items[row]] for row in rows])
        return continue_as(self, wrong, items)

    monkeypatch.setattr(BatchSlots, "continue_as", stay)
    assert not decode(spec, space).tokens.equal(right)


# --- the most likely text


@pytest.mark.parametrize("sampling", [SamplingParams(), GUIDED], ids=["plain", "guided"])
@pytest.mark.parametrize("end", [False, True])
@pytest.mark.thinned(2)
def test_beams_that_hold_every_beginning_find_the_most_likely_texts(end, sampling):
    positions, ids = 4, 3
    space = with_end(positions, ids) if end else space_of((positions,), ids)
    model = TabularCausal(ids, low=0.0)
    for context in range(3):
        score: Counter[tuple[int, ...]] = Counter()
        for text in product(range(ids), repeat=positions):
            if end and ids - 1 in text:
                text = text[: text.index(ids - 1) + 1]
            terms = [
                logprobs(model, space, sampling, context, text[:n])[x] for n, x in enumerate(text)
            ]
            score[text] = sum(terms)
        spec = {"name": "beam", "num_beams": 60, "length_penalty": 0.0}
        for rank, (text, _) in enumerate(score.most_common(4)):
            out = decode({**spec, "rank": rank}, space, sampling, [context])
            assert out.tokens[0, : len(text)].tolist() == list(text)
            assert out.stats[0].tokens == len(text) and out.stats[0].nfe <= positions


def test_control_few_beams_miss_the_most_likely_text():
    space = space_of((6,), 4)
    found = [
        decode({"name": "beam", "num_beams": n, "length_penalty": 0.0}, space).tokens
        for n in (1, 400)
    ]
    assert not found[0].equal(found[1])


# --- groups


def reference_groups(model, space, context, groups, size, penalty):
    """Texts of every group, from the definition, without ends."""
    beams = [[((), 0.0)] for _ in range(groups)]
    for _ in range(space.length):
        taken: Counter[int] = Counter()
        for g in range(groups):
            extended = [
                ((*text, v), score + p - penalty * taken[v])
                for text, score in beams[g]
                for v, p in enumerate(logprobs(model, space, SamplingParams(), context, text))
                if p > -torch.inf
            ]
            beams[g] = sorted(extended, key=lambda x: -x[1])[:size]
            taken.update(text[-1] for text, _ in beams[g])
    return [text for text, _ in sorted(chain(*beams), key=lambda x: -x[1] / space.length)]


@pytest.mark.parametrize(("groups", "size"), [(4, 1), (2, 2)])
def test_later_groups_avoid_the_tokens_of_earlier_ones(groups, size):
    space = space_of((5,), 5)
    model = TabularCausal(5, low=0.0)
    spec = {"name": "diverse_beam", "num_beams": groups * size, "num_beam_groups": groups}
    for penalty in (0.5, 2.0):
        wanted = reference_groups(model, space, 1, groups, size, penalty)
        found = [
            decode({**spec, "diversity_penalty": penalty, "rank": n}, space, context=[1]).tokens
            for n in range(groups * size)
        ]
        assert [tuple(x[0].tolist()) for x in found] == wanted
    alike = reference_groups(model, space, 1, groups, size, 0.0)
    assert len(set(alike)) < len(set(wanted)), "the penalty changes nothing"


def test_control_a_group_that_does_not_count_the_tokens_of_earlier_ones_is_found(monkeypatch):
    space, spec = space_of((5,), 5), {"name": "diverse_beam", "diversity_penalty": 2.0}
    right = [decode({**spec, "rank": n}, space).tokens for n in range(4)]

    class Forgetful(Counter):
        def update(self, *tokens):
            pass

    monkeypatch.setattr(beam_search, "Counter", Forgetful)
    found = [decode({**spec, "rank": n}, space).tokens for n in range(4)]
    assert not all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


# --- rows, ends, constraints


SPECS = ("beam", "diverse_beam", "momentum", "adadec", "superposed")


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(SamplingParams(), marks=pytest.mark.slow, id="plain"),
        pytest.param(GUIDED, id="guided"),
    ],
)
@pytest.mark.thinned(3)
def test_an_item_is_the_same_in_any_batch_and_window_of_rows(name, sampling):
    every = list(range(7))
    early = {"early_stopping": True} if "beam" in name else {}
    spec = {"name": name, **early}
    whole = on_llama(spec, sampling, every)
    assert len(whole.tokens.unique(dim=0)) > 3
    assert len({s.nfe for s in whole.stats}) > 1 or name == "diverse_beam"
    for rows in (1, 2, 3):
        part = on_llama(spec, sampling, every, rows)
        assert part.tokens.equal(whole.tokens) and part.traces == whole.traces
        for a, b in zip(part.stats, whole.stats, strict=True):
            assert (a.nfe, a.tokens, a.tokens_computed) == (b.nfe, b.tokens, b.tokens_computed)


@pytest.mark.parametrize("name", ["beam", "diverse_beam", "momentum", "adadec"])
def test_texts_obey_a_constraint(name):
    space = exact_length(6, 8, ids=4)
    for sampling in (SamplingParams(), GUIDED):
        for row in decode(name, space, sampling).tokens.tolist():
            assert obeys(space, row)


@pytest.mark.parametrize("name", SPECS)
def test_a_model_without_a_distribution_is_refused(name):
    class Broken(TabularCausal):
        def forward(self, tokens, positions, cache):
            out = super().forward(tokens, positions, cache)
            return out.masked_fill((positions == 4)[..., None], torch.nan)

    target = causal_target(Broken(5), space_of((6,), 5), SamplingParams(), [0, 0])
    with pytest.raises(GenError, match="gives no distribution for item 0 at position 4"):
        resolve_sampler(name)[0](target, CounterRNG(range(2)))


@pytest.mark.parametrize("name", SPECS)
def test_known_tokens_of_a_callback_stay(name):
    seen = []
    out = decode(name, with_end(9, 5), callback=seen.append)
    for info in seen:
        assert info["tokens"][info["known"]].equal(out.tokens[info["known"]])
    assert [x["done"] for x in seen] == sorted(x["done"] for x in seen)
    assert bool(seen[-1]["known"].all()) and seen[-1]["step"] == max(s.nfe for s in out.stats)


def test_all_hypotheses_of_an_item_are_one_forward_pass_and_their_tokens_count():
    out = decode({"name": "beam", "num_beams": 3}, space_of((6,), 5), context=[0])
    # one row in the first pass, whose prompt has one token; three in each of the five others
    assert (out.stats[0].nfe, out.stats[0].tokens_computed) == (6, 1 + 5 * 3)


def test_equal_scores_go_to_the_lower_token_and_hypothesis():
    class Flat(TabularCausal):
        def forward(self, tokens, positions, cache):
            return torch.zeros_like(super().forward(tokens, positions, cache))

    target = causal_target(Flat(4), space_of((3,), 4), SamplingParams(), [0])
    for rank, wanted in enumerate(([0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 0, 3])):
        sampler = resolve_sampler({"name": "beam", "num_beams": 4, "rank": rank})[0]
        again = target.with_params(SamplingParams())
        assert sampler(again, CounterRNG([1])).tokens[0].tolist() == wanted
    index, largest = first_largest(torch.tensor([[1.0, 3, 3, 0, 3, 1]]), 4)
    assert index.tolist() == [[1, 2, 4, 0]] and largest.tolist() == [[3, 3, 3, 1]]


def test_rows_of_a_target_are_copied_with_their_cache_in_both_branches_of_guidance():
    prompt = torch.tensor([[1, 2], [3, 4]])
    net = small_llama(8)

    def fresh() -> CausalTarget:
        return CausalTarget(CausalLM(net), prompt, space_of((4,), 8), GUIDED, prompt.flip(1))

    def at(n):
        return torch.full((len(n), 1), len(n[0]))

    texts = [[5], [5], [6]]
    target, order = fresh(), torch.tensor([1, 0, 1])
    start = torch.zeros(2, 1, dtype=torch.long)
    target.predict(start, start)
    target.keep(order)
    copied = target.predict(torch.tensor(texts), at(texts)).logprobs
    for row, text in enumerate(texts):
        alone = fresh()
        alone.predict(start, start)
        alone.keep(order[row : row + 1])
        expected = alone.predict(torch.tensor([text]), at([text])).logprobs
        assert torch.allclose(copied[row], expected[0], atol=1e-12)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"num_beams": 0}, "sampler.num_beams is 0; expected an integer of at least 1"),
        ({"num_beams": 2, "rank": 2}, "sampler.rank is 2; expected 0 to 1"),
        ({"num_beams": 4, "num_beam_groups": 3}, "expected a divisor of num_beams 4"),
        ({"early_stopping": "sometimes"}, "expected true, false or 'never'"),
        ({"length_penalty": "long"}, "expected a number between -100 and 100"),
    ],
)
def test_bad_parameters_are_refused(spec, message):
    with pytest.raises(GenError, match=message):
        resolve_sampler({"name": "beam_search", **spec})


def test_control_a_pool_without_a_length_penalty_is_found(monkeypatch):
    space, spec = with_end(9, 4), {"name": "beam", "num_beams": 4, "length_penalty": 3.0}
    right = decode(spec, space).tokens

    def without(self, candidate, length, _true=Pool._finish):
        _true(self, candidate, 1)

    monkeypatch.setattr(Pool, "_finish", without)
    assert not decode(spec, space).tokens.equal(right)


@pytest.mark.parametrize(
    "family",
    [
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("chameleon", "csm", "janus")),
        "llamagen",
        "musicgen",
    ],
)
def test_scores_are_those_of_the_finished_text_on_every_kind_of_cache(
    family, tmp_path, monkeypatch
):
    """Hypotheses change rows in every step; the score of the text is computed again in one row."""
    scores, result, make = {}, Beams.result, Pipeline.target

    def noted(self):
        text = result(self)
        scores[text] = max(f.score for pool in self.pools for f in pool.finished)
        return text

    targets = []

    def target(self, *args, **more):
        targets.append(make(self, *args, **more))
        return targets[0]

    monkeypatch.setattr(Beams, "result", noted)
    monkeypatch.setattr(Pipeline, "target", target)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        case = WRITERS[family](tmp_path)
    pipe = gen.load(case.modality, model=case.path, dtype="float64", **case.options)
    spec = {"name": "beam", "num_beams": 3, "length_penalty": 0.0}
    out = pipe(list(case.prompts)[:2], sampler=spec, seed=1)
    fresh = targets[0].with_params(targets[0].sampling)
    tokens = out.tokens[:, -fresh.length :]
    before, total = torch.zeros_like(tokens[:, :1]), torch.zeros_like(tokens[:, 0]).double()
    made = torch.tensor([s.tokens for s in out.stats])
    for n in range(fresh.length):
        logprobs = fresh.predict(before, torch.full_like(before, n)).logprobs[:, 0]
        before = tokens[:, n : n + 1]
        total += torch.where(n < made, logprobs.gather(1, before)[:, 0], 0)
    for row, count, score in zip(tokens.tolist(), made.tolist(), total.tolist(), strict=True):
        assert scores[tuple(row[:count])] == pytest.approx(score, abs=1e-5)
