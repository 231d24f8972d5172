"""Stops and block schedules of masked decoding: against plain Python in any state, and in the
loop."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from masked_steps import changed, masked_step
from tabular import TabularMasked, masked_target
from torch import Tensor

from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.core.stats import SampleOutput
from gen.core.token_space import TokenSpace
from gen.models.adapters.base import ModelAdapter
from gen.models.targets.masked import MaskedTarget
from gen.samplers.masked.step import MaskedStep

IDS, POSITIONS, MASK, END, ROWS = 5, 16, 5, 4, 5
SPACE = replace(
    TokenSpace.codes((POSITIONS,), IDS, IDS + 1, MASK), eos_token_id=END, delimiters=(1, 3)
)
BARE = replace(SPACE, eos_token_id=None, delimiters=())
MODEL = TabularMasked(IDS + 1, low=0.0)
masked_iterative = registry.get("sampler", "masked_iterative")


def canvas() -> Tensor:
    """Rows that are given nothing, every other place, all but one place, the beginning, and some of
    it."""
    out = (torch.arange(POSITIONS) * 3 % 4).repeat(ROWS, 1)
    out[0], out[1, ::2], out[2, 7], out[3, 4:], out[4, 2:6], out[4, 9:] = (
        MASK,
        MASK,
        MASK,
        MASK,
        MASK,
        MASK,
    )
    return out


def run(rows: list[int] | None = None, space: TokenSpace = SPACE, **params) -> SampleOutput:
    rows = list(range(ROWS)) if rows is None else rows
    target = masked_target(MODEL, space, SamplingParams(), [r % 3 for r in rows])
    return masked_iterative(**params)(
        target, CounterRNG([31 * r + 7 for r in rows]), canvas=canvas()[rows], trace=True
    )


def check_rows(**params) -> None:
    whole = run(**params)
    for row in range(ROWS):
        alone = run([row], **params)
        assert (
            torch.equal(alone.tokens[0], whole.tokens[row])
            and alone.stats[0].nfe == whole.stats[row].nfe
        )


def state(seed: int, rows: int = 40) -> MaskedStep:
    """Rows in the middle of something."""
    g = torch.Generator().manual_seed(seed)
    kind = torch.randint(0, 4, (rows, POSITIONS), generator=g).clamp_max(2)  # given, masked, filled
    kind[:, : seed % 4] = 2
    ids = torch.where(kind == 1, MASK, torch.randint(0, IDS, (rows, POSITIONS), generator=g))
    sampling = torch.randn(rows, POSITIONS, IDS + 1, generator=g).double().mul(2)
    sampling[..., MASK] = -math.inf
    sampling[:, 3, 1:] = -math.inf  # a place that has one id
    sampling = sampling.log_softmax(-1)
    row = torch.arange(rows)
    return masked_step(
        None,
        row,
        torch.randint(0, 14, (rows,), generator=g),
        SPACE,
        masked_iterative(block_length=4),
        canvas=ids,
        prefilled=kind == 0,
        masked=kind == 1,
        logprobs=sampling,
        raw_logprobs=lambda: sampling,
        committed_logp=sampling[..., 0],
        open=torch.rand(rows, POSITIONS, generator=g) < 0.8,
        proposed_tokens=torch.where(kind == 1, sampling.argmax(-1), ids),
    )


def after(step: MaskedStep, seed: int) -> Tensor:
    """The canvas once some of the empty places have been committed."""
    some = torch.rand(step.masked.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    return torch.where(some & step.masked, step.proposed_tokens, step.canvas)


# --- end


def ended(step: MaskedStep, canvas: list[int]) -> bool:
    return END in canvas and MASK not in canvas[: canvas.index(END)]


def check_end(stop) -> None:
    seen = set()
    for seed in range(6):
        step = state(seed)
        made = after(step, seed)
        over, rest = stop(step, made)
        for i, ids in enumerate(made.tolist()):
            assert bool(over[i]) == ended(step, ids)
            seen.add(bool(over[i]))
        assert bool((rest[over] == END).all())
    assert seen == {True, False}


def test_a_row_is_over_when_nothing_is_empty_before_its_end():
    check_end(registry.get("stop", "end"))
    with pytest.raises(AssertionError):  # the control does not look left
        check_end(lambda step, canvas: ((canvas == END).any(1), torch.full_like(canvas, END)))


def test_stopping_at_the_end_changes_nothing_before_it():
    params = {"steps": 8, "order": "raster", "schedule": "linear"}
    whole, short = run(**params), run(stop="end", **params)
    assert all(
        torch.equal(SPACE.before_end(a), SPACE.before_end(b))
        for a, b in zip(whole.tokens, short.tokens, strict=True)
    )
    fewer = [a.nfe - b.nfe for a, b in zip(whole.stats, short.stats, strict=True)]
    assert min(fewer) >= 0 and max(fewer) > 0
    for row, trace in enumerate(short.traces):
        made = canvas()[row].tolist()
        for step in trace:
            assert not any(made[n] != MASK for n in step.committed)
            made = [step.committed.get(n, x) for n, x in enumerate(made)]
        assert made == short.tokens[row].tolist()
    check_rows(stop="end", **params)


def test_without_an_end_it_says_what_is_missing():
    with pytest.raises(
        GenError,
        match=(
            "sampler.stop is 'end', which needs an id that ends a row .*; this model has none;"
            " expected filled"
        ),
    ):
        run(space=BARE, stop="end")


def test_what_a_remasker_took_back_and_a_stop_filled_is_in_the_trace():
    out = run(stop="end", steps=8, remasker="low_confidence")
    for row, trace in enumerate(out.traces):
        made = dict(enumerate(canvas()[row].tolist()))
        for step in trace:
            made |= dict.fromkeys(step.removed, MASK)
            assert all(made[n] == MASK for n in step.committed)
            made |= step.committed
        assert list(made.values()) == out.tokens[row].tolist()


# --- prophet


def leads(step: MaskedStep, i: int, made: list[int]) -> bool:
    """Prophet's rule for one row."""
    params, gaps = step.params, []
    for n in range(POSITIONS):
        asked = (
            params.answer_start <= n < params.answer_start + params.answer_length
            if params.answer_length
            else made[n] == MASK
        )
        first, second = sorted(step.raw_logprobs()[i, n].tolist())[:-3:-1]
        if asked and second > -math.inf:
            gaps.append(first - second)
    share = (int(step.step_index[i]) + 1) / params.steps
    need = params.gap_threshold * (1 if share < 0.33 else 2 / 3 if share < 0.67 else 1 / 3)
    return bool(gaps) and sum(gaps) / len(gaps) >= need


@pytest.mark.parametrize(
    "params",
    [{}, {"answer_start": 2, "answer_length": 5}, {"answer_start": 3, "answer_length": 1}],
    ids=str,
)
def test_prophet_is_the_rule_in_any_state(params):
    seen = set()
    for seed in range(6):
        step = state(seed)
        step.params = masked_iterative(steps=12, gap_threshold=2.5, **params)
        made = after(step, seed)
        over, rest = registry.get("stop", "prophet")(step, made)
        for i, ids in enumerate(made.tolist()):
            assert bool(over[i]) == leads(step, i, ids)
            seen.add(bool(over[i]))
        assert torch.equal(rest, step.proposed_tokens)
    assert seen == (
        {False} if params.get("answer_length") == 1 else {True, False}
    )  # place 3 has no second id


class Ahead(ModelAdapter):
    """At every place the first id leads by so much."""

    device, dtype, vocab_size = torch.device("cpu"), torch.float64, IDS + 1

    def __init__(self, gap: float):
        self.gap = gap

    def forward(self, ids: Tensor, canvas_length: int) -> Tensor:
        out = torch.zeros(len(ids), canvas_length, IDS + 1, dtype=torch.float64)
        out[..., 0] = self.gap
        return out


@pytest.mark.parametrize(("gap", "calls"), [(7.6, 1), (7.4, 4), (4.9, 9), (2.4, 12)])
def test_prophet_asks_for_less_in_each_phase(gap, calls):
    def sampler(stop):
        return masked_iterative(steps=12, schedule="linear", stop=stop)

    def target():
        return MaskedTarget(
            Ahead(gap), torch.zeros(2, 1, dtype=torch.long), BARE, SamplingParams(temperature=3.0)
        )  # which is not looked at

    assert [s.nfe for s in sampler("prophet")(target(), CounterRNG([1, 2])).stats] == [calls] * 2
    assert [s.nfe for s in sampler("filled")(target(), CounterRNG([1, 2])).stats] == [12] * 2


def test_a_gap_that_is_never_reached_is_no_stop():
    plain, never = run(steps=7), run(steps=7, stop="prophet", gap_threshold=1e9)
    assert torch.equal(plain.tokens, never.tokens) and [s.nfe for s in plain.stats] == [
        s.nfe for s in never.stats
    ]
    at_once = run(steps=7, stop="prophet", gap_threshold=0.0)
    assert {s.nfe for s in at_once.stats} == {1}
    check_rows(steps=7, stop="prophet", gap_threshold=1.5)
    some = [s.nfe for s in run(steps=7, stop="prophet", gap_threshold=1.5).stats]
    assert some != [s.nfe for s in plain.stats] and max(some) > 1


# --- blocks


def blocks_of(step: MaskedStep, i: int, start: int, end: int) -> tuple[int, int]:
    """Where the block of one row begins and ends, in plain Python; ``start`` and ``end`` are those
    of the step before."""
    masked = [n for n in range(POSITIONS) if step.masked[i, n]]
    if not masked or masked[0] < end:
        return (
            (start, end)
            if masked and masked[0] < end
            else (end, min(end + step.params.block_length, POSITIONS))
        )
    first, size = masked[0], step.params.block_length
    while end + size <= first:
        end += size
    sampling = step.logprobs[i].exp().tolist()
    said = [
        (max(sampling[n]), -n)
        for n in masked
        if first <= n < first + POSITIONS // 4
        and sampling[n].index(max(sampling[n])) in step.space.delimiters
    ]
    sure, at = max(said, default=(0, 0))
    return end, (
        1 - at if said and sure >= step.params.delimiter_threshold else min(end + size, POSITIONS)
    )


def check_adaptive(schedule, space: TokenSpace = SPACE) -> int:
    found = 0
    for seed in range(4):
        known = [(0, 0)] * 40
        first = None
        for step in range(6):
            now = state(seed)
            now.space, now.params = (
                space,
                masked_iterative(block_length=3, delimiter_threshold=0.6, blocks="adaptive"),
            )
            now = changed(now, logprobs=now.logprobs.roll(step, 1))
            if first is not None:
                drawn = torch.rand(
                    first.masked.shape, generator=torch.Generator().manual_seed(step)
                )
                now = changed(now, masked=first.masked & (drawn < 0.7))
                now.memory = first.memory
            opened, number = schedule(now)
            for i in range(40):
                if not bool(now.masked[i].any()):  # such a row is not asked
                    continue
                known[i] = blocks_of(now, i, *known[i])
                assert (
                    opened[i].nonzero()[:, 0].tolist() == list(range(*known[i]))
                    and int(number[i]) == known[i][1]
                )
                found += known[i][1] % 3 != 0
            first = now
    return found


def test_adaptive_blocks_end_with_the_surest_delimiter_that_is_near():
    assert check_adaptive(registry.get("block_schedule", "adaptive")) > 20
    with pytest.raises(AssertionError):  # the control knows of no delimiters
        check_adaptive(lambda step: registry.get("block_schedule", "fixed")(step))


def test_without_delimiters_adaptive_blocks_are_refused():
    with pytest.raises(GenError, match="'adaptive', which needs tokens that end a unit of text"):
        run(space=BARE, blocks="adaptive", block_length=5)


def test_without_a_confident_delimiter_adaptive_blocks_are_fixed_ones():
    params = {"steps": 9, "block_length": 5, "delimiter_threshold": 1.1}
    fixed, adaptive = (run(blocks=name, **params) for name in ("fixed", "adaptive"))
    assert torch.equal(fixed.tokens, adaptive.tokens) and [s.nfe for s in fixed.stats] == [
        s.nfe for s in adaptive.stats
    ]
    said = run(space=SPACE, blocks="adaptive", **params | {"delimiter_threshold": 0.3})
    assert not torch.equal(said.tokens, fixed.tokens)  # the control
    check_rows(space=SPACE, blocks="adaptive", **params | {"delimiter_threshold": 0.3})


def check_window(size: int, **params) -> int:
    """Every step commits among the first empty places, and a place left behind is never touched
    again. Returns steps that go beyond one block."""
    beyond = 0
    for row, trace in enumerate(run(**params).traces):
        made = canvas()[row].tolist()
        for step in trace:
            first = [n for n in range(POSITIONS) if made[n] == MASK][:size]
            assert set(step.committed) <= set(first), "a place outside the window"
            assert all(n > first[0] for n in step.removed), "a place that was left behind"
            beyond += len({n // size for n in step.committed}) > 1
            made = [
                MASK if n in step.removed else step.committed.get(n, x) for n, x in enumerate(made)
            ]
    return beyond


@pytest.mark.parametrize("remasker", ["none", "secondary"])
def test_a_sliding_window_holds_the_first_empty_places(remasker):
    params = {
        "steps": 6,
        "selector": "threshold",
        "conf_threshold": 0.35,
        "block_length": 4,
        "remasker": remasker,
    }
    assert check_window(4, blocks="sliding", **params) > 0
    with pytest.raises(AssertionError, match="outside the window"):  # the control
        check_window(4, **params | {"blocks": "whole"})
    check_rows(blocks="sliding", **params)


@pytest.mark.parametrize("selector", ["schedule", "even", "threshold"])
def test_a_window_of_the_whole_canvas_is_the_whole(selector):
    params = {"steps": 6, "selector": selector, "conf_threshold": 0.4}
    whole, wide, narrow = (
        run(**params),
        run(blocks="sliding", block_length=POSITIONS, **params),
        run(blocks="sliding", block_length=3, **params),
    )
    assert torch.equal(whole.tokens, wide.tokens) and whole.traces == wide.traces
    assert not torch.equal(whole.tokens, narrow.tokens)
    assert not bool((narrow.tokens == MASK).any())


@pytest.mark.parametrize("name", ["adaptive", "sliding"])
def test_blocks_need_a_length(name):
    with pytest.raises(
        GenError,
        match=(
            "sampler.block_length is 0; expected an integer of at least 1, where blocks is"
            f" {name!r}"
        ),
    ):
        masked_iterative(blocks=name)


def test_delimiters_are_ids():
    with pytest.raises(GenError, match="delimiters is 6; expected ids below 6"):
        replace(BARE, delimiters=(2, 6))


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("adablock", {"blocks": "adaptive", "selector": "threshold"}),
        ("dcd", {"blocks": "sliding", "selector": "threshold"}),
        ("prophet", {"stop": "prophet"}),
        ("llada2", {"remasker": "edit", "selector": "scheduled_threshold"}),
        ("wino", {"remasker": "wino", "selector": "wide_in"}),
        ("rcr", {"remasker": "rcr"}),
        ("remdm", {"remasker": "remdm"}),
    ],
)
def test_presets_decode_and_a_row_alone_is_a_row_of_the_batch(name, parts):
    sampler, sampling = resolve_sampler(name)
    assert all(getattr(sampler, k) == v for k, v in parts.items()) and sampling == SamplingParams()

    def rows(which):
        return sampler(
            masked_target(MODEL, SPACE, sampling, [r % 3 for r in which]),
            CounterRNG([7 + r for r in which]),
            canvas=canvas()[which],
        )

    whole = rows(list(range(ROWS)))
    assert not bool((whole.tokens == MASK).any())
    alone = rows([3])
    assert (
        torch.equal(alone.tokens[0], whole.tokens[3]) and alone.stats[0].nfe == whole.stats[3].nfe
    )
