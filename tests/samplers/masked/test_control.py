"""Automata over the canvas: masked samplers offer what some filling of the canvas completes, and
every row that comes out is accepted. Against enumeration of all rows."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import canvas_automata as small
import numpy as np
import pytest
import torch
from block_bench import target_of as block_target
from canvas_automata import MASK, ROWS, SPACE, accepts, offered, random_automaton, under
from contract_bench import bench, model_for, token_space
from enumeration import distance, enumerate_distribution
from tabular import TabularBlocks, TabularCausal, TabularMasked, causal_target, masked_target

import gen
from gen.constraints.canvas import RowCanvas
from gen.constraints.tokens import with_eos
from gen.contracts.constraint import Automaton, AutomatonConstraint
from gen.contracts.row_constraint import RowConstraint
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.core.sampler import Sampler
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.samplers.masked import loop
from gen.samplers.masked.constrained import Settled
from gen.samplers.masked.loop import decode_masked
from gen.samplers.masked.parts.orders import BLIND
from gen.samplers.masked.step import COUNTED, needs, needs_of
from gen.testing.specs import NAMES, SPECS, TRAINED, daring, sampling_for

SELECTORS = list(registry.table("selector"))
ORDERS = list(registry.table("order"))
CACHES = list(registry.table("cache_policy"))


def counts(selector: str) -> bool:
    """Whether a selector goes with a cache that has to know the positions of later steps."""
    return COUNTED in needs_of(registry.get("selector", selector))


COUNTING = [name for name in SELECTORS if counts(name)]


def combination(number: int) -> dict:
    """Parts number ``number`` of all orders, selectors and caches that go together; every order,
    selector and cache comes up within as many numbers as there are of its kind."""
    order, selector = ORDERS[number % len(ORDERS)], SELECTORS[number % len(SELECTORS)]
    cache = CACHES[number // 2 % len(CACHES)]
    if cache == "delayed_greedy" and order not in BLIND:
        order = BLIND[number % len(BLIND)]
    if cache == "partial" and not counts(selector):
        selector = COUNTING[number % len(COUNTING)]
    return {"order": order, "selector": selector, "cache": cache}


def sampler_of(**parts):
    blocks = {"blocks": "fixed"} if parts.get("cache", "none") != "none" else {}
    sampler = resolve_sampler(daring(**blocks, **parts))[0]
    return replace(sampler, block_length=3) if blocks else sampler


def decode(sampler, automaton, canvas=None, sampling=None, rows=range(ROWS), spy=None, **kwargs):
    """Decode with the production loop; ``spy`` gets every step before its tokens are proposed."""
    target = small.target(under(automaton), sampling, rows)
    overrides = {}
    if spy is not None:
        base = registry.get("proposer", sampler.proposer)

        @needs(*needs_of(base))
        def proposer(step):
            spy(step)
            return base(step)

        overrides = {"proposer": proposer}
    return decode_masked(
        target, small.keys(rows), sampler, canvas=canvas, overrides=overrides, **kwargs
    )


def check(sampler, automaton, canvas=None, sampling=None) -> list[np.ndarray]:
    """Decode, compare what every step offers with enumeration, and check the rows.

    Returns:
        Tokens [ROWS, T], and the forward passes [ROWS].
    """
    accepted = small.ALL[accepts(automaton, small.ALL)]
    seen = []

    def spy(step):
        for row, logprobs in zip(step.canvas.tolist(), step.logprobs, strict=True):
            offers = offered(accepted, row)
            assert np.array_equal(logprobs[:, : small.IDS].isfinite().numpy(), offers), (
                "the tokens offered are not those of enumeration"
            )
            assert not bool(logprobs[:, MASK].isfinite().any())
            seen.append(row)

    out = decode(sampler, automaton, canvas, sampling, spy=spy)
    assert seen and accepts(automaton, out.tokens.numpy()).all(), "a row is not accepted"
    if canvas is not None:
        assert torch.equal(out.tokens[canvas != MASK], canvas[canvas != MASK])
    return [out.tokens.numpy(), np.array([s.nfe for s in out.stats])]


# --- what is offered, and what comes out


@pytest.mark.parametrize("part", range(4))
@pytest.mark.thinned(4)
def test_random_automata_orders_selectors_and_caches(part):
    for seed in range(50 * part, 50 * part + 50):
        automaton = random_automaton(seed)
        accepted = small.ALL[accepts(automaton, small.ALL)]
        check(sampler_of(**combination(seed)), automaton, small.partly(accepted, seed))


@pytest.mark.slow
@pytest.mark.parametrize("cache", CACHES)
def test_every_order_with_every_selector_and_cache(cache):
    for seed, (order, selector) in enumerate(product(ORDERS, SELECTORS)):
        fits = cache != "partial" or counts(selector)
        if fits and (cache != "delayed_greedy" or order in BLIND):
            check(sampler_of(order=order, selector=selector, cache=cache), random_automaton(seed))


@pytest.mark.parametrize("remasker", registry.table("remasker"))
def test_remaskers_and_replaced_tokens(remasker):
    changed = 0
    for seed in range(3):
        params = {"remasker": remasker, "steps": 6, "remask_threshold": 0.6, "edit_threshold": 0.3}
        sampler = registry.get("sampler", "masked_iterative")(**params)
        automaton = random_automaton(seed)
        _, nfe = check(sampler, automaton)
        changed += int((nfe > 3).sum())
    assert changed, "no row was decoded in several passes"


@pytest.mark.parametrize("stop", ["end", "prophet"])
def test_stops_fill_what_may_stand(stop):
    ended = 0
    for seed in range(8):
        automaton = random_automaton(seed)
        space = replace(SPACE, eos_token_id=int(seed % small.IDS))
        sampler = registry.get("sampler", "masked_iterative")(
            stop=stop, order="raster", schedule="linear", steps=6, gap_threshold=0.3
        )
        target = small.target(under(automaton, space))
        out = decode_masked(target, small.keys(), sampler)
        assert accepts(automaton, out.tokens.numpy()).all()
        ended += sum(s.nfe < 6 for s in out.stats)
    assert ended, "nothing was stopped early"


@pytest.mark.parametrize(
    "proposer", [p for p in registry.table("proposer") if p not in TRAINED["proposer"]]
)
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(top_k=1),
        SamplingParams(temperature=0.8, top_p=0.7, guidance_scale=1.5),
    ],
    ids=["plain", "greedy", "one", "guided"],
)
def test_filters_leave_something_and_held_ends_stay(proposer, sampling):
    for seed in range(2):
        automaton = random_automaton(seed)
        space = replace(under(automaton), end_token_ids=(seed % small.IDS,))
        sampler = registry.get("sampler", "masked_iterative")(
            steps=2, proposer=proposer, hold_end=True
        )
        out = decode_masked(small.target(space, sampling), small.keys(), sampler)
        assert accepts(automaton, out.tokens.numpy()).all()


def test_greedy_presets_draw_nothing_when_a_token_may_no_longer_stand():
    sampler = registry.get("sampler", "masked_iterative")(steps=1, proposer="argmax")
    redrawn = 0
    for seed in range(10):
        automaton = random_automaton(seed)
        outs = []
        for key in (1, 2):
            target = small.target(under(automaton), rows=[0])
            outs.append(decode_masked(target, small.CounterRNG([key]), sampler).tokens)
        assert torch.equal(*outs)
        free = decode_masked(small.target(SPACE, rows=[0]), small.CounterRNG([1]), sampler).tokens
        redrawn += not torch.equal(free, outs[0])
    assert redrawn


# --- every registered masked sampler, preset and part: it keeps a constraint, or refuses by name


def is_of_canvas(name: str) -> bool:
    return resolve_sampler(SPECS[name], sampling_for(name))[0].protocol in ("masked", "blocks")


def bench_space(automaton: Automaton | None):
    """The space of the contract, whose constraint reads its twelve positions; with an automaton of
    ids that never come twice in a row, or of everything."""
    space = token_space()
    constraint = automaton and RowConstraint(AutomatonConstraint(automaton), space.length)
    return replace(space, constraint=constraint)


def no_repeats(ids: int, vocab_size: int, last: int) -> Automaton:
    """No token follows itself, and the row ends with ``last``."""
    following = np.tile(np.arange(1, ids + 1), (ids + 1, 1))
    following[np.arange(1, ids + 1), np.arange(ids)] = -1
    kinds = np.append(np.arange(ids), np.full(vocab_size - ids, -1))
    accepting = np.arange(ids + 1) == last + 1
    return Automaton(following.astype(np.int32), accepting, kinds.astype(np.int32))


NO_REPEATS = no_repeats(6, 9, 2)
FREE = Automaton(
    np.zeros((1, 1), dtype=np.int32), np.ones(1, dtype=bool), np.zeros(9, dtype=np.int32)
)


def contract_run(name: str, automaton: Automaton | None, rows=None, **kwargs):
    sampler, sampling = resolve_sampler(SPECS[name], sampling_for(name))
    run = bench(sampler.protocol, model_for(sampler))
    run.space = bench_space(automaton)
    return run(sampler, sampling, rows, **kwargs)


CANVAS_SPECS = [name for name in SPECS if is_of_canvas(name)]
CANVAS_NAMES = [name for name in CANVAS_SPECS if name in NAMES]


def check_kept(name: str) -> None:
    """Rows are accepted, a row alone is that of the batch, and what forbids nothing changes
    nothing."""
    out = contract_run(name, NO_REPEATS)
    assert accepts(NO_REPEATS, out.tokens.numpy()).all()
    for rows in ([3], [4, 1]):
        alone = contract_run(name, NO_REPEATS, rows)
        assert torch.equal(alone.tokens, out.tokens[rows])
        assert [s.nfe for s in alone.stats] == [out.stats[r].nfe for r in rows]
    free, plain = contract_run(name, FREE, trace=True), contract_run(name, None, trace=True)
    assert torch.equal(free.tokens, plain.tokens) and free.traces == plain.traces
    assert [(s.nfe, s.tokens_computed) for s in free.stats] == [
        (s.nfe, s.tokens_computed) for s in plain.stats
    ]
    assert not accepts(NO_REPEATS, plain.tokens.numpy()).all(), "the constraint says nothing here"


@pytest.mark.parametrize("name", CANVAS_NAMES)
@pytest.mark.thinned(6)
def test_every_name_keeps_a_constraint_or_refuses_it(name):
    sampler, _ = resolve_sampler(SPECS[name], sampling_for(name))
    if sampler.constraint_refusal:
        with pytest.raises(GenError, match=rf"sampler {name} refuses the constraint"):
            contract_run(name, NO_REPEATS)
    else:
        check_kept(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in CANVAS_SPECS if n not in CANVAS_NAMES])
def test_every_part_keeps_a_constraint(name):
    check_kept(name)


def test_only_chains_of_several_positions_per_step_refuse():
    refusing = {n for n in CANVAS_NAMES if resolve_sampler(n)[0].constraint_refusal}
    assert not refusing
    wide = resolve_sampler({"name": "freedave", "tokens_per_step": 2})[0]
    target = small.target(under(random_automaton(0)))
    with pytest.raises(GenError, match="freedave refuses the constraint.*2 positions per step"):
        wide(target, small.keys())
    assert resolve_sampler({"name": "freedave", "num_drafts": 3})[0].constraint_refusal == ""


def test_samplers_that_do_not_say_so_are_refused():
    base = registry.get("sampler", "masked_iterative")

    class Silent(base):
        """Says nothing about constraints."""

        constraint_refusal = Sampler.constraint_refusal

    with pytest.raises(GenError, match="Silent refuses the constraint.*checks no tokens"):
        Silent()(small.target(under(random_automaton(0))), small.keys())
    assert registry.get("sampler", "autoregressive")().constraint_refusal == ""


# --- canvases that hold something


def test_given_tokens_that_contradict_the_automaton_are_refused_with_their_position():
    refused = 0
    for seed in range(20):
        automaton = random_automaton(seed)
        accepted = small.ALL[accepts(automaton, small.ALL)]
        draw = np.random.default_rng(seed)
        canvas = draw.integers(0, small.IDS, (ROWS, small.T))
        canvas[draw.random(canvas.shape) > 0.2] = MASK
        fits = [((accepted == row) | (row == MASK)).all(1).any() for row in canvas]
        target = small.target(under(automaton))
        sampler = registry.get("sampler", "masked_iterative")(steps=3)
        if all(fits):
            out = decode_masked(target, small.keys(), sampler, canvas=torch.from_numpy(canvas))
            assert accepts(automaton, out.tokens.numpy()).all()
            continue
        row = fits.index(False)
        known = [n for n in range(small.T) if canvas[row, n] != MASK]
        agrees = (accepted[:, known] == canvas[row, known]).cumprod(1).any(0)
        position = known[int(agrees.argmin())]
        with pytest.raises(GenError, match=rf"at position {position} of row {row}, which the con"):
            decode_masked(target, small.keys(), sampler, canvas=torch.from_numpy(canvas))
        refused += 1
    assert 5 < refused < 20


def test_a_prefix_is_read_before_the_canvas():
    for seed in range(10):
        automaton = random_automaton(seed)
        accepted = small.ALL[accepts(automaton, small.ALL)]
        prefix = torch.from_numpy(accepted[0, :2])
        space = replace(SPACE, grid=(4,), legal=SPACE.legal[2:], prefix=prefix, eos_token_id=None)
        target = small.target(under(automaton, space))
        sampler = registry.get("sampler", "masked_iterative")(steps=2)
        out = decode_masked(target, small.keys(), sampler)
        whole = torch.cat([prefix.expand(ROWS, -1), out.tokens], 1)
        assert accepts(automaton, whole.numpy()).all()


def test_allowed_tokens_of_a_position_count_for_what_completes_a_row():
    """A filling has to be of tokens that the space allows at its positions."""
    for seed in range(8):
        automaton = random_automaton(seed)
        draw = np.random.default_rng(seed)
        legal = SPACE.legal & torch.from_numpy(draw.random(SPACE.legal.shape) < 0.8)
        rows = small.ALL[legal.numpy()[np.arange(small.T), small.ALL].all(1)]
        accepted = rows[accepts(automaton, rows)]
        space = replace(under(automaton), legal=legal)
        if not len(accepted):
            with pytest.raises(GenError, match="accepts no text of exactly 6 tokens"):
                small.target(space)
            continue
        found = small.target(space).canvases(torch.full((1, small.T), MASK)).allowed()
        want = offered(accepted, [MASK] * small.T)
        assert np.array_equal(found[0, :, : small.IDS].numpy(), want)


def test_banned_tokens_are_in_no_filling():
    sampler = registry.get("sampler", "masked_iterative")(steps=2)
    found = 0
    for seed in range(8):
        automaton, banned = random_automaton(seed), seed % small.IDS
        accepted = small.ALL[accepts(automaton, small.ALL)]
        accepted = accepted[(accepted != banned).all(1)]
        if not len(accepted):
            continue
        target = small.target(under(automaton), SamplingParams(bad_words=((banned,),)))
        tokens = decode_masked(target, small.keys(), sampler).tokens.numpy()
        assert all((accepted == row).all(1).any() for row in tokens)
        found += 1
    assert found


def test_a_space_without_any_other_rule_is_narrowed_too():
    space = replace(SPACE, legal=torch.ones_like(SPACE.legal))
    sampler = registry.get("sampler", "masked_iterative")(steps=2)
    for automaton in map(random_automaton, range(4)):
        out = decode_masked(small.target(under(automaton, space)), small.keys(), sampler)
        assert accepts(automaton, out.tokens.numpy()).all()


def test_what_is_no_automaton_or_has_other_tokens_is_refused():
    class Twice:
        def legal(self, history, positions):
            raise AssertionError("nobody asks")

    with pytest.raises(GenError, match="Twice of the token space is no automaton"):
        small.target(replace(SPACE, constraint=Twice()))
    automaton = random_automaton(0)
    wider = replace(automaton, token_class=np.append(automaton.token_class, 0))
    with pytest.raises(GenError, match="has 6 token ids; expected 5"):
        small.target(under(wider))
    never = replace(automaton, accepting=np.zeros_like(automaton.accepting))
    with pytest.raises(GenError, match="accepts no text of exactly 6 tokens"):
        small.target(under(never))


# --- exact samplers


FEW = np.array(list(product(range(3), repeat=4)))
FEW_SPACE = TokenSpace.codes((4,), 3, small.IDS + 1, MASK)
EXACT = {
    "one": {"name": "masked_iterative", "schedule": "linear", "steps": 4},
    "token": {"name": "exact_speculative", "num_drafts": 3},
    "block": {"name": "exact_speculative", "num_drafts": 3, "verifier": "block"},
    "freedave": {"name": "freedave", "num_drafts": 3},
}
EXACT_SAMPLING = {
    "plain": SamplingParams(),
    "guided": SamplingParams(temperature=0.8, top_k=2, guidance_scale=1.5),
}


def constrained_distribution(model, automaton, sampling, context):
    """Filling one place after the other from the left, each from the tokens that enumeration
    allows."""
    accepted = FEW[accepts(automaton, FEW)]

    def extend(canvas, mass, out):
        if MASK not in canvas:
            out[canvas] = mass
            return out
        position = canvas.index(MASK)
        legal = torch.from_numpy(np.append(offered(accepted, list(canvas))[position], False))
        cond = model.at([31 + context, 40, *canvas], 4, position)
        uncond = model.at([50, 51 + context, *canvas], 4, position)
        logprobs = sampling(cond, uncond if sampling.guided else None, legal)
        for token, p in enumerate(logprobs.exp().tolist()):
            if p > 0:
                extend((*canvas[:position], token, *canvas[position + 1 :]), mass * p, out)
        return out

    return extend((MASK,) * 4, 1.0, {})


def furthest(sampler, automaton, sampling) -> float:
    """The largest difference of a probability from the constrained distribution."""
    model = TabularMasked(small.IDS + 1, low=0.0, spread=1.5)

    def run(rng, context):
        target = masked_target(model, under(automaton, FEW_SPACE), sampling, context)
        return sampler(target, rng).tokens

    found = enumerate_distribution(run, 2)
    wanted = [constrained_distribution(model, automaton, sampling, c) for c in range(2)]
    return max(map(distance, found, wanted))


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("sampling", EXACT_SAMPLING)
@pytest.mark.thinned(4)
def test_exact_samplers_draw_from_the_constrained_distribution(name, sampling):
    sampler = resolve_sampler(EXACT[name] | {"order": "raster"})[0]
    automaton = random_automaton(1, rows=FEW)
    assert furthest(sampler, automaton, EXACT_SAMPLING[sampling]) < 1e-12


# --- block models and two models


@pytest.mark.parametrize("steps", [1, 2])
def test_blocks_know_the_blocks_behind_them(steps):
    model = TabularBlocks(small.IDS + 1, block_length=3, low=0.0)
    for seed in range(8):
        automaton = random_automaton(seed)
        accepted = small.ALL[accepts(automaton, small.ALL)]
        canvas = torch.full((ROWS, small.T), MASK)
        if seed % 2:
            canvas[:, :3] = torch.from_numpy(accepted[seed % len(accepted), :3])
        target = block_target(model, under(automaton), SamplingParams(), [0, 1, 2])
        sampler = registry.get("sampler", "frame_blocks")(steps=steps)
        out = sampler(target, small.keys(), canvas=canvas)
        assert accepts(automaton, out.tokens.numpy()).all()
        assert torch.equal(out.tokens[canvas != MASK], canvas[canvas != MASK])
    canvas = torch.full((ROWS, small.T), MASK)
    first = {tuple(row[:3]) for row in accepted}
    wrong = next(r for r in product(range(small.IDS), repeat=3) if r not in first)
    canvas[1, :3] = torch.tensor(wrong)
    canvas[[0, 2], :3] = torch.tensor(sorted(first)[0])
    with pytest.raises(GenError, match=r"at position \d of row 1, which the constraint"):
        sampler(
            block_target(model, under(automaton), SamplingParams(), [0, 1, 2]),
            small.keys(),
            canvas=canvas,
        )


@pytest.mark.parametrize("correction", [False, True])
def test_a_judge_has_the_constraint_of_the_masked_model(correction):
    judge = TabularCausal(small.IDS + 1, seed=5, low=0.0, spread=2.0)
    sampler = resolve_sampler(
        {"name": "guided_diffusion", "judge_top_k": 1, "commit_correction": correction}
    )[0]
    for seed in (0, 1, 3, 4, 5, 6, 7, 9, 10, 11):  # those that accept a text without token 0
        automaton = with_eos(random_automaton(seed), [0])
        target = small.target(under(automaton))
        draft = causal_target(judge, SPACE, SamplingParams(), [0, 1, 2])
        out = sampler(target, small.keys(), draft=draft)
        assert accepts(automaton, out.tokens.numpy()).all()
        if correction:
            greedy = causal_target(
                judge, under(automaton), SamplingParams(temperature=0), [0, 1, 2]
            )
            own = registry.get("sampler", "autoregressive")()(greedy, small.keys())
            assert torch.equal(out.tokens, own.tokens)
    other = causal_target(judge, under(automaton), SamplingParams(), [0, 1, 2])
    with pytest.raises(GenError, match="the judge's token space has a constraint that the masked"):
        sampler(target, small.keys(), draft=other)


# --- controls


def test_control_offering_by_the_tokens_before_a_position_alone_ends_in_dead_ends(monkeypatch):
    def left_alone(self, position):
        after = self.table.automaton.next[self.reached[position]]
        return (after >= 0).any(0) & self.table.kinds[position]

    monkeypatch.setattr(RowCanvas, "classes", left_alone)
    monkeypatch.setattr(loop, "settle", without_checks)
    one = registry.get("sampler", "masked_iterative")(order="random", schedule="linear", steps=6)
    dead = 0
    for seed in range(8):
        automaton = random_automaton(seed)
        out = decode(one, automaton)
        dead += int((~accepts(automaton, out.tokens.numpy())).sum())
    assert dead > 4


def without_checks(target, step, canvas, changes, takes_likeliest):
    """A loop that commits what was proposed."""
    nan = torch.full(changes.tokens.shape, torch.nan, dtype=torch.float64)
    return Settled(changes.tokens, changes.replaced, nan)


def test_control_positions_that_are_committed_without_checks_are_rejected(monkeypatch):
    monkeypatch.setattr(loop, "settle", without_checks)
    wide = registry.get("sampler", "masked_iterative")(steps=2)
    outs = [(a, decode(wide, a).tokens.numpy()) for a in map(random_automaton, range(8))]
    assert sum(int((~accepts(a, tokens)).sum()) for a, tokens in outs) > 4
    # one position at a time needs no check
    one = registry.get("sampler", "masked_iterative")(order="random", schedule="linear", steps=6)
    for automaton in map(random_automaton, range(4)):
        assert accepts(automaton, decode(one, automaton).tokens.numpy()).all()


def test_control_chains_of_several_positions_would_be_rejected(monkeypatch):
    wide = resolve_sampler({"name": "freedave", "tokens_per_step": 3, "order": "raster"})[0]
    monkeypatch.setattr(type(wide), "constraint_refusal", "")
    rejected = 0
    for seed in range(5):
        automaton = random_automaton(seed)
        out = wide(small.target(under(automaton)), small.keys())
        rejected += int((~accepts(automaton, out.tokens.numpy())).sum())
    assert rejected > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["maskgit", "wino", "window_diffusion", "guided_diffusion"])
def test_texts_of_a_pipeline_match(name):
    pipe = gen.load("text")
    structured = {"regex": "[0-3]( [4-7])*"}
    prompts = ["sort 3 1 2 =", "shuffle 4 0 7 5 ="]
    steps = {"steps": 1} if name == "maskgit" else {}
    out = pipe(prompts, sampler={"name": name, **steps}, structured=structured, seed=1)
    assert all(re.fullmatch(structured["regex"], text) for text in out.media)
    free = pipe(prompts, sampler={"name": name, **steps}, seed=1).media
    assert not any(re.fullmatch(structured["regex"], text) for text in free)
