"""Presets against loops that are written out from their papers (``published_loops``), one forward
pass after the other: the tokens, where each was committed, and what was masked again."""

from __future__ import annotations

from dataclasses import replace

import published_loops as loops
import pytest
import torch
from closed_form import LeaningMasked
from tabular import _scramble
from torch import Tensor

from gen.contracts.layout_orders import halton_cells
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.core.stats import SampleOutput
from gen.core.token_space import TokenSpace
from gen.models.targets.masked import MaskedTarget
from gen.samplers.masked.loop import decode_masked

T, V, MASK, END, TURN = 24, 8, 7, 5, 6
ROWS = 4
SLOW = pytest.mark.slow
PROMPTS = torch.tensor([[r, 2 * r % 5, 3] for r in range(ROWS)])
KEYS = [31 * r + 7 for r in range(ROWS)]
LEGAL = torch.ones(T, V, dtype=torch.bool)
LEGAL[:, MASK] = False
SPACE = TokenSpace((T,), V, LEGAL, MASK, eos_token_id=END, end_token_ids=(END, TURN))


class Doubtful(LeaningMasked):
    """Positions are confident in part, and what stands elsewhere moves them."""

    own = 9.0


MODEL = Doubtful(V, 5, spread=2.5)


def logits_of(row: int, model: LeaningMasked = MODEL) -> loops.Logits:
    def logits(canvas: list[int]) -> Tensor:
        out = model.forward(torch.tensor([PROMPTS[row].tolist() + canvas]), T)[0]
        out[:, MASK] = -torch.inf
        return out

    return logits


def decode(spec, sampling: SamplingParams | None = None, rows=range(ROWS), **more) -> SampleOutput:
    sampler, default = resolve_sampler(spec)
    target = MaskedTarget(MODEL, PROMPTS[list(rows)], SPACE, sampling or default)
    return decode_masked(target, CounterRNG([KEYS[r] for r in rows]), sampler, trace=True, **more)


def steps_of(out: SampleOutput, row: int) -> loops.Steps:
    assert out.traces is not None
    return [(step.committed, sorted(step.removed)) for step in out.traces[row]]


def equal_rows(out: SampleOutput, loop) -> list[bool]:
    """Rows whose tokens and steps are those of a loop. ``loop``: logits of a row -> its result."""
    found = []
    for row in range(ROWS):
        tokens, steps = loop(logits_of(row))
        found.append(out.tokens[row].tolist() == tokens and steps_of(out, row) == steps)
    return found


def check(out: SampleOutput, loop) -> None:
    assert all(equal_rows(out, loop))


# --- LLaDA, and tokens that end a text


@pytest.mark.parametrize("steps", [6, 12, 24])
def test_llada_holds_back_the_tokens_that_end_a_text(steps):
    def loop(held):
        return lambda f: loops.llada(f, T, MASK, steps=steps, block=12, held=held)

    spec = {"name": "llada", "steps": steps, "block_length": 12}
    held = decode(spec | {"hold_end": True})
    theirs = spec | {"confidence_eos_eot_inf": True}
    assert resolve_sampler(theirs) == resolve_sampler(spec | {"hold_end": True})
    check(held, loop((END, TURN)))
    check(decode(spec), loop(()))
    if steps > 6:
        assert not all(equal_rows(held, loop(()))), "the ends decide nothing here"
        assert not all(equal_rows(held, loop((END,)))), "the end of a turn decides nothing here"


def test_held_ends_come_last_and_are_refused_where_a_model_has_none():
    out = decode({"name": "llada", "steps": T, "block_length": T, "hold_end": True})
    seen = 0
    for row in range(ROWS):
        order = [i for committed, _ in steps_of(out, row) for i in committed.values()]
        ends = [i in (END, TURN) for i in order]
        # once an end is committed, nothing but ends was proposed anywhere
        seen += any(ends)
        assert not any(ends[: len(ends) // 3])
    assert seen > 1
    bare = replace(SPACE, eos_token_id=None, end_token_ids=())
    target = MaskedTarget(MODEL, PROMPTS, bare, SamplingParams())
    with pytest.raises(GenError, match=r"sampler.hold_end is true, which needs .*TokenSpace.ends"):
        decode_masked(
            target, CounterRNG(KEYS), resolve_sampler({"name": "llada", "hold_end": True})[0]
        )
    certain = decode({"name": "maskgit", "hold_end": True}, SamplingParams(temperature=0))
    assert not bool((certain.tokens == MASK).any())


def test_cfg_scale_is_guidance_plus_one():
    sampler, sampling = resolve_sampler({"name": "llada", "cfg_scale": 0.5})
    assert sampling.guidance_scale == 1.5 and sampler == resolve_sampler("llada")[0]
    assert resolve_sampler({"name": "llada", "cfg_scale": 0})[1] == SamplingParams()
    assert resolve_sampler({"name": "masked_iterative", "cfg_scale": 1})[1].guidance_scale == 2
    same = {"guidance_scale": 1.5, "temperature": 0.5}
    assert resolve_sampler({"name": "klass", "cfg_scale": 0.5}, same)[1].guidance_scale == 1.5
    with pytest.raises(GenError, match=r"guidance_scale is 3, and sampler.cfg_scale 1 means 2"):
        resolve_sampler({"name": "llada", "cfg_scale": 1}, {"guidance_scale": 3})
    with pytest.raises(GenError, match=r"sampler.cfg_scale is 'x'; expected a number"):
        resolve_sampler({"name": "llada", "cfg_scale": "x"})
    with pytest.raises(GenError, match="cfg_scale"):  # other samplers' codes mean other things
        resolve_sampler({"name": "speculative_jacobi", "cfg_scale": 1})


# --- AdaBlock


@pytest.mark.parametrize("delimiter_threshold", [0.3, 0.6])
def test_adablock_ends_blocks_with_delimiters(delimiter_threshold):
    space = replace(SPACE, delimiters=(1, 2))
    spec = {"name": "adablock", "block_length": 8, "delimiter_threshold": delimiter_threshold}
    spec |= {"conf_threshold": 0.8}
    sampler, sampling = resolve_sampler(spec)
    target = MaskedTarget(MODEL, PROMPTS, space, sampling)
    out = decode_masked(target, CounterRNG(KEYS), sampler, trace=True)

    def loop(delimiters):
        return lambda f: loops.adablock(
            f,
            T,
            MASK,
            block=8,
            threshold=0.8,
            delimiters=delimiters,
            delimiter_threshold=delimiter_threshold,
        )

    check(out, loop((1, 2)))
    assert not all(equal_rows(out, loop(()))), "no delimiter is found here"
    with pytest.raises(GenError, match="'adaptive', which needs tokens that end a unit of text"):
        decode(spec)


# --- KLASS


@pytest.mark.parametrize(
    ("conf", "kl", "history"),
    [
        (0.6, 0.3, 2),
        (0.3, 1.0, 2),
        pytest.param(0.5, 0.6, 3, marks=SLOW),
        pytest.param(0.3, 9.0, 4, marks=SLOW),
    ],
)
def test_klass_waits_for_its_history_in_every_block(conf, kl, history):
    spec = {"name": "klass", "conf_threshold": conf, "kl_threshold": kl, "history": history}
    out = decode(spec | {"block_length": 6})

    def loop(guard):
        return lambda f: loops.klass(
            f, T, MASK, block=6, conf=conf, kl=kl, history=history, guard=guard
        )

    check(out, loop(True))
    # the control has the history of the block before from its first step on
    assert not all(equal_rows(out, loop(False)))


# --- Dream


@pytest.mark.parametrize("steps", [1, 2, 5, 8, 12, 23])
@pytest.mark.thinned(3)
def test_dream_takes_as_many_as_its_times_say(steps):
    spec = {"name": "dream", "steps": steps, "proposer": "argmax"}
    check(decode(spec), lambda f: loops.dream(f, T, MASK, steps=steps))
    linear = spec | {"selector": "schedule", "schedule": "linear"}
    differs = not all(equal_rows(decode(linear), lambda f: loops.dream(f, T, MASK, steps=steps)))
    assert differs == (steps > 1)


@pytest.mark.parametrize("steps", [T, 40])
def test_dream_commits_a_position_in_every_pass_where_the_release_commits_none(steps):
    """The release has passes without a commit, and takes what is left in its last one."""
    out = decode({"name": "dream", "steps": steps, "proposer": "argmax"})
    assert all(len(committed) == 1 for row in range(ROWS) for committed, _ in steps_of(out, row))
    _, theirs = loops.dream(logits_of(0), T, MASK, steps=steps)
    assert not theirs[0][0] and len(theirs[-1][0]) > 1


@pytest.mark.parametrize("cells", [16, 32, 64, 100, 128, 256, 512])
def test_dream_counts_are_those_of_single_precision(cells):
    """The release's times are of single precision; rounding decides about no count."""
    for steps in {1, 2, 3, 4, 8, 10, 16, 25, 32, 64, 100, 128, 256} & set(range(1, cells)):
        times = torch.linspace(1, 1e-3, steps + 1)
        left = exact = cells
        for i in range(steps - 1):
            left -= int(left * (1 - times[i + 1] / times[i]))
            fall = (1 - 1e-3) / steps
            exact -= int(exact * fall / (1 - fall * i) + 1e-9)
            assert left == exact, (cells, steps, i)


# --- Prophet


@pytest.mark.parametrize("steps", [12, 24])
@pytest.mark.parametrize("gap", [1.5, 3.0, 4.5, 6.0])
def test_prophet_stops_where_its_phases_say(gap, steps):
    region = 16, 5
    spec = {"name": "prophet", "steps": steps, "block_length": 12, "gap_threshold": gap}
    out = decode(spec | {"answer_start": region[0], "answer_length": region[1]})

    def loop(*shares):
        thresholds = tuple(gap * share for share in shares)
        return lambda f: loops.prophet(
            f, T, MASK, steps=steps, block=12, region=region, thresholds=thresholds
        )

    check(out, loop(1, 2 / 3, 1 / 3))


def test_prophet_without_an_answer_looks_at_all_that_is_masked():
    """A stop commits all blocks, so all of them are asked, and not the open one alone."""
    spec = {"name": "prophet", "steps": T, "block_length": 2, "gap_threshold": 6.0}
    out, never = decode(spec), decode({"name": "llada", "steps": T, "block_length": 2})
    for row in range(ROWS):
        x, calls = [MASK] * T, 0
        for committed, _ in steps_of(never, row):
            best = logits_of(row)(x).topk(2, -1).values
            x = [committed.get(i, token) for i, token in enumerate(x)]
            calls += 1
            left, r = loops.masked_in(x, MASK), calls / T
            need = 6.0 * (1 if r < 0.33 else 2 / 3 if r < 0.67 else 1 / 3)
            if left and float((best[left, 0] - best[left, 1]).mean()) >= need:
                break
        assert calls == len(steps_of(out, row))


# --- WINO


@pytest.mark.parametrize(
    ("threshold", "back"),
    [(0.6, 0.9), pytest.param(0.4, 0.7, marks=SLOW), pytest.param(0.3, 0.95, marks=SLOW)],
)
def test_wino_takes_back_fewer_than_it_commits(threshold, back):
    spec = {"name": "wino", "conf_threshold": threshold, "remask_threshold": back}
    out = decode(spec | {"block_length": 12})

    def loop(released):
        return lambda f: loops.wino(
            f, T, MASK, block=12, threshold=threshold, back=back, released_bound=released
        )

    check(out, loop(False))
    assert any(removed for row in range(ROWS) for _, removed in steps_of(out, row))
    # the release bounds by the step before: other steps
    assert not all(equal_rows(out, loop(True)))


# --- PC-Sampler


@pytest.mark.parametrize("decay", [0.0, 0.05, 0.25])
def test_pc_prefers_rare_tokens_and_early_positions(decay):
    counts, total = {0: 900, 1: 50, 2: 30, 4: 15}, 1000
    rarity = -torch.tensor([counts.get(i, 1) / total for i in range(V)], dtype=torch.float64).log()
    sampler, sampling = resolve_sampler({"name": "pc", "steps": 12, "position_decay": decay})
    target = MaskedTarget(MODEL, PROMPTS, replace(SPACE, rarity=rarity), sampling)
    out = decode_masked(target, CounterRNG(KEYS), sampler, trace=True)
    check(
        out,
        lambda f: loops.pc(f, T, MASK, steps=12, counts=counts, total=total, decay=decay),
    )


# --- dKV-Cache


def delayed_loop(
    row: int, *, block: int, reload: int, num_whole: int = 2
) -> tuple[list[int], loops.Steps, int]:
    """dKV-Cache-Decode around the most confident position of the block: what a pass does not
    compute keeps its keys. A block's first ``num_whole`` passes compute everything, and so does
    every ``reload``-th one. Returns the number of computed positions, too."""
    prompt, x, out = PROMPTS[row].tolist(), [MASK] * T, []
    keys = [-1] * (len(prompt) + T)
    logits, since, num_computed = torch.zeros(T, V, dtype=torch.float64), reload, 0
    for start in range(0, T, block):
        step = 0
        while left := loops.masked_in(x, MASK, start, start + block):
            is_whole = step < num_whole or since + 1 >= reload
            since = 0 if is_whole else since + 1
            now = prompt + x
            computed = [
                i
                for i in range(len(now))
                if is_whole or (i >= len(prompt) and (now[i] == MASK or keys[i] != now[i]))
            ]
            num_computed += len(computed)
            for i in computed:
                keys[i] = now[i]
            state = MODEL._states(torch.tensor([keys]))[0, -1]
            at = torch.tensor([i for i in computed if i >= len(prompt)])
            logits[at - len(prompt)] = MODEL.at(_scramble(state + at), at)
            logits[:, MASK] = -torch.inf
            p, tokens = logits.softmax(-1).max(-1)
            loops.write(x, out, tokens, loops.highest(p, left, 1))
            step += 1
    return x, out, num_computed


@pytest.mark.parametrize("reload", [3, 5, 99])
def test_the_delayed_cache_computes_the_first_two_passes_of_a_block_whole(reload):
    spec = {"name": "llada", "steps": T, "block_length": 6, "cache": "delayed"}
    out = decode(spec | {"cache_refresh": reload})
    for row in range(ROWS):
        tokens, steps, num_computed = delayed_loop(row, block=6, reload=reload)
        assert out.tokens[row].tolist() == tokens and steps_of(out, row) == steps
        assert out.stats[row].tokens_computed == num_computed
        *_, fewer = delayed_loop(row, block=6, reload=reload, num_whole=1)
        assert fewer != num_computed  # control: the first pass alone


# --- Halton


def on_grid(sampler, side: int, rows: int = 4, keys=KEYS) -> SampleOutput:
    legal = torch.ones(side * side, V, dtype=torch.bool)
    legal[:, MASK] = False
    space = TokenSpace((side, side), V, legal, MASK)
    target = MaskedTarget(MODEL, PROMPTS[:rows], space, SamplingParams())
    return decode_masked(target, CounterRNG(keys[:rows]), sampler, trace=True)


def order_of(out: SampleOutput, row: int) -> list[list[int]]:
    assert out.traces is not None
    return [sorted(step.committed) for step in out.traces[row]]


@pytest.mark.parametrize(("side", "steps"), [(6, 8), (6, 12), (6, 36), (8, 12), (16, 32)])
def test_halton_commits_the_counts_of_the_release_along_its_sequence(side, steps):
    sampler = resolve_sampler({"name": "halton", "order": "halton", "steps": steps})[0]
    cells, known = halton_cells((side, side)), loops.halton_counts(side * side, steps)
    wanted = [sorted(cells[a:b]) for a, b in zip([0, *known[:-1]], known, strict=True)]
    assert order_of(on_grid(sampler, side, 1), 0) == wanted
    if (side, steps) == (16, 32):
        assert [len(x) for x in wanted][:3] == [5, 5, 5] and len(wanted[-1]) == 41


def test_halton_sequences_are_rolled_per_item():
    side, steps = 6, 36
    sampler = resolve_sampler({"name": "halton", "steps": steps})[0]
    cells = halton_cells((side, side))
    rolled = [[*cells[-k:], *cells[:-k]] for k in range(len(cells))]  # torch.roll by k
    out = on_grid(sampler, side)
    shifts = []
    for row in range(4):
        order = [i for [i] in order_of(out, row)]
        assert order in rolled
        shifts.append(rolled.index(order))
        alone = on_grid(sampler, side, 1, KEYS[row:]) if row == 0 else None
        assert alone is None or order_of(alone, 0) == order_of(out, 0)
    assert len(set(shifts)) > 1


@pytest.mark.parametrize("steps", [1, 2, 8])
def test_halton_probabilities_sharpen_from_step_to_step(steps):
    seen = []
    sharpening = registry.get("proposer", "sharpening")

    def sharpened(step):
        plain = step.logprobs.clone()
        tokens = sharpening(step)
        seen.append((plain, step.logprobs))
        assert torch.equal(step.raw_logprobs(), plain)  # at temperature 1
        return tokens

    decode({"name": "halton", "steps": steps}, overrides={"proposer": sharpened})
    temperatures = torch.linspace(1, 1.2, steps, dtype=torch.float64)
    assert len(seen) == steps
    for temperature, (plain, now) in zip(temperatures, seen, strict=True):
        assert torch.allclose(now.exp(), (plain * temperature).softmax(-1), atol=1e-12)
    flat = {"name": "halton", "steps": steps, "sharpness_start": 1, "sharpness_end": 1}
    plain = decode({"name": "halton", "steps": steps, "proposer": "categorical"})
    assert torch.equal(decode(flat).tokens, plain.tokens)
