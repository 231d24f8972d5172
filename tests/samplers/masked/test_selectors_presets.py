"""Parallel decoders by their papers' names: what every selector keeps, limits that are known, other
names of parameters, and broken ones that fail."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from masked_bench import MASK, MODEL, POSITIONS, ROWS, SPACE, canvas, check_given, check_rows, run
from selector_states import DARING, SUREST, states
from tabular import masked_target

from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.samplers.masked.step import highest

masked_iterative = registry.get("sampler", "masked_iterative")
SELECTORS = registry.table("selector")
DARING = DARING | {"filter": "text-filter", "filter_threshold": 0.5}
PRESETS = [
    n
    for n, p in registry.table("preset").items()
    if p.sampler == "masked_iterative"
    and p.params.get("selector") in SELECTORS
    and p.params.get("stop") != "end"
    and "cache" not in p.params
    and "adjust_layer" not in p.params
]  # test_learned.py and test_adjust.py have those
OURS = {
    "llada",
    "dream",
    "fast_dllm",
    "fast_dllm_factor",
    "eb",
    "localleap",
    "credit",
    "ccd",
    "klass",
    "r2",
    "hierarchy",
    "ete",
    "pc",
    "dparallel",
}
RARE = replace(SPACE, rarity=torch.tensor([0.5, 1.0, 1.5, 2.0, 2.5, 9.0]))
WANTED = (canvas() == MASK).sum(1).tolist()


def decode(sampler, space=RARE, sampling: SamplingParams | None = None, rows=range(ROWS), **kwargs):
    """Some rows, on a model that says how rare its ids are."""
    target = masked_target(MODEL, space, sampling or SamplingParams(), [r % 3 for r in rows])
    return sampler(
        target, CounterRNG([31 * r + 7 for r in rows]), canvas=canvas()[list(rows)], **kwargs
    )


def counts(sampler, **kwargs) -> list[list[int]]:
    """How many places every call committed, by row."""
    return [
        [len(step.committed) for step in trace]
        for trace in decode(sampler, trace=True, **kwargs).traces
    ]


# --- what all of them keep


def check_pace(sampler) -> None:
    """Every call commits at least one place, so that there are no more calls than places, and
    nothing stays empty."""
    out = decode(sampler, trace=True)
    assert not bool((out.tokens == MASK).any()), "a place was left empty"
    for trace, stats, wanted in zip(out.traces, out.stats, WANTED, strict=True):
        assert stats.nfe == len(trace) <= wanted, "more calls than places"
        assert (
            all(step.committed for step in trace) and sum(len(s.committed) for s in trace) == wanted
        )


@pytest.mark.parametrize(
    ("blocks", "params"),
    [("whole", {}), ("fixed", SUREST), ("lookahead", {"choice_temperature": 0.0})],
)
@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.thinned(9)
def test_what_every_selector_keeps(name, blocks, params):
    """Rows alone and in a batch are compared by the contract as well; here on blocks that rows go
    through at different speeds."""
    sampler = masked_iterative(
        selector=name, blocks=blocks, block_length=6, steps=7, **DARING | params
    )
    for check in (check_pace, check_given, *([check_rows] if blocks == "lookahead" else [])):
        check(sampler)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.thinned(3)
def test_what_every_preset_keeps(name):
    sampler, sampling = resolve_sampler(name)
    if sampler.remasker == "none":
        check_pace(sampler)
    whole = decode(sampler, sampling=sampling)
    assert torch.equal(whole.tokens[canvas() != MASK], canvas()[canvas() != MASK])
    if (
        sampler.proposer != "categorical" and sampler.remasker == "none"
    ):  # nothing is drawn: the seed says nothing
        target = masked_target(MODEL, RARE, sampling, [r % 3 for r in range(ROWS)])
        assert torch.equal(
            sampler(target, CounterRNG(range(50, 50 + ROWS)), canvas=canvas()).tokens,
            whole.tokens,
        )


def test_the_papers_are_here_and_a_short_canvas_is_one_block():
    assert set(PRESETS) >= OURS and all(registry.get("preset", n).about for n in OURS)
    for name in OURS - {"ete"}:  # its blocks are two at a time
        sampler = resolve_sampler({"name": name, "steps": 9})[0]
        assert torch.equal(
            decode(sampler, rows=[1, 2]).tokens,
            decode(replace(sampler, blocks="whole"), rows=[1, 2]).tokens,
        )
    short = replace(
        resolve_sampler("fast_dllm")[0], block_length=3
    )  # the control: a shorter block is felt
    assert not torch.equal(decode(short).tokens, decode(replace(short, blocks="whole")).tokens)


# --- known limits


@pytest.mark.parametrize(("blocks", "proposer"), [("whole", "argmax"), ("fixed", "categorical")])
@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("threshold", {"conf_threshold": 1.01}),
        ("factor", {"factor": 0.0}),
        ("entropy_bound", {"entropy_bound": 0.0}),
        ("entropy", {"entropy_bound": 0.0}),
        ("local", {"conf_threshold": 1.01, "low_threshold": 0.0}),
        ("runs", {"conf_threshold": 1.01, "low_threshold": 1.01}),
        ("klass", {"conf_threshold": 1.01}),
        ("klass", {"kl_threshold": 0.0}),
        ("klass", {"history": 99}),
        ("coherent", {"buffer_size": 1}),
        ("coherent", {"history": 99}),
        ("regions", {"conf_threshold": 1.01, "low_threshold": 1.01}),
        ("scheduled_threshold", {"conf_threshold": 1.01, "steps": POSITIONS, "schedule": "linear"}),
        ("even", {"steps": POSITIONS}),
    ],
)
@pytest.mark.thinned(3)
def test_a_threshold_that_nothing_reaches_means_one_place_per_call(name, params, proposer, blocks):
    base = SUREST | {"proposer": proposer, "blocks": blocks, "block_length": 7}
    one = decode(
        masked_iterative(selector="schedule", schedule="linear", steps=POSITIONS, **base),
        rows=[1, 2],
        trace=True,
    )
    found = decode(masked_iterative(selector=name, **base | params), rows=[1, 2], trace=True)
    assert [s.nfe for s in one.stats] == WANTED[1:3] == [10, 1]
    assert torch.equal(found.tokens, one.tokens) and [s.nfe for s in found.stats] == [10, 1]
    assert [[s.committed for s in t] for t in found.traces] == [
        [s.committed for s in t] for t in one.traces
    ]


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("threshold", {"conf_threshold": 0}),
        ("factor", {"factor": 99}),
        ("entropy_bound", {"entropy_bound": 99}),
        ("entropy", {"entropy_bound": 99}),
        ("local", {"conf_threshold": 0}),
        ("runs", {"conf_threshold": 0}),
        ("regions", {"conf_threshold": 0}),
        ("explore", {"conf_threshold": 0}),
        ("coherent", {"buffer_size": POSITIONS, "history": 1}),
        ("scheduled_threshold", {"conf_threshold": 0}),
        ("even", {"steps": 1}),
    ],
)
def test_a_threshold_that_everything_reaches_means_one_call_per_block(name, params):
    sampler = masked_iterative(selector=name, **SUREST | params)
    out = decode(sampler)
    assert [s.nfe for s in out.stats] == [min(1, w) for w in WANTED]
    target = masked_target(MODEL, RARE, SamplingParams(), [r % 3 for r in range(ROWS)])
    empty = canvas() == MASK
    assert torch.equal(out.tokens[empty], target.predict(canvas()).logprobs.argmax(-1)[empty])
    if name != "even":  # whose steps are shared out among the blocks, at least one each
        calls = [len({n // 7 for n in range(POSITIONS) if row[n]}) for row in empty]
        assert [
            s.nfe for s in decode(replace(sampler, blocks="fixed", block_length=7)).stats
        ] == calls


def test_klass_waits_for_as_many_distributions_as_its_history():
    def sampler(history):
        return masked_iterative(
            selector="klass", conf_threshold=0, kl_threshold=1e9, history=history, **SUREST
        )

    for history in (
        1,
        2,
        5,
    ):  # nothing has a distribution before, then one place more is known in each step
        assert counts(sampler(history)) == [
            [1] * min(history, w) + [w - history] * (w > history) for w in WANTED
        ]


def test_credit_without_weight_is_the_plain_threshold():
    plain, credit = (
        {"name": n, "conf_threshold": 0.6, "block_length": 7} for n in ("fast_dllm", "credit")
    )
    same = decode(resolve_sampler({**credit, "credit_weight": 0})[0], trace=True)
    assert torch.equal(same.tokens, decode(resolve_sampler(plain)[0]).tokens)
    assert [[len(s.committed) for s in t] for t in same.traces] == counts(resolve_sampler(plain)[0])
    assert counts(resolve_sampler(credit)[0]) != counts(resolve_sampler(plain)[0])


@pytest.mark.parametrize("confidence_on", ["raw", "shaped"])
def test_credit_is_forgotten_when_a_block_begins_and_its_distribution_is_what_is_judged(
    confidence_on,
):
    credit, moved, seen = registry.get("proposer", "credit"), 0, 0
    for seed in range(4):
        for step in states(
            seed,
            masked_iterative(
                **SUREST
                | {
                    "proposer": "credit",
                    "confidence_on": confidence_on,
                    "credit_weight": 3.0,
                }
            ),
        ):
            before = step.confidence_logprobs().argmax(-1)
            ids = credit(step)
            kept = (step.memory["credit"] > 0).sum(-1)
            assert bool((kept[step.is_first_step] == step.masked[step.is_first_step].long()).all())
            assert torch.equal(ids, step.confidence_logprobs().argmax(-1))
            for sampling in (step.logprobs, step.raw_logprobs()):
                assert torch.allclose(
                    sampling.exp().sum(-1), torch.ones(sampling.shape[:-1]).double()
                )
            moved, seen = moved + int((ids != before).sum()), seen + int((kept > 1).sum())
    assert moved > 0 and seen > 0


# --- LLaDA's numbers


def llada_counts(positions: int, steps: int) -> list[int]:
    return [k for s in range(steps) if (k := positions // steps + (s < positions % steps))]


@pytest.mark.parametrize("steps", [1, 2, 4, 6, 8, 14, 20, 40])
def test_the_numbers_of_llada(steps):
    """Two blocks of ten places, half of the steps each. The linear schedule does the same where
    that divides, and else it may not."""
    sampler = resolve_sampler({"name": "llada", "steps": steps, "block_length": 10})[0]
    of = max(1, steps // 2)
    assert counts(sampler)[0] == llada_counts(10, of) * 2
    linear = counts(replace(sampler, selector="schedule", schedule="linear"))[0]
    assert (
        linear == counts(sampler)[0]
        if 10 % of == 0
        else of not in (4, 7) or linear != counts(sampler)[0]
    )


# --- PC-Sampler's order


@pytest.mark.parametrize("decay", [0.0, 0.4])
def test_position_is_confidence_times_rarity_bounded_and_fading(decay):
    order, bounded = registry.get("order", "position"), 0
    for seed in range(4):
        for step in states(seed, masked_iterative(order="position", position_decay=decay)):
            step.space = replace(RARE, rarity=RARE.rarity * 20)
            score = order(step).exp()
            for b in range(len(step.rows)):
                for n in step.eligible[b].nonzero()[:, 0].tolist():
                    told = (
                        float(step.confidence[b, n])
                        * 20
                        * float(RARE.rarity[step.proposed_tokens[b, n]])
                    )
                    assert float(score[b, n]) == pytest.approx(
                        min(told, 10) * 2.718281828459045 ** (-decay * n)
                    )
                    bounded += told > 10
    assert bounded > 0


def test_position_between_confidence_and_left_to_right():
    one = SUREST | {"selector": "even", "steps": POSITIONS}

    def run(space, params):
        return decode(masked_iterative(**one | params), space, trace=True).traces

    def order(space=RARE, **params):
        return [[n for s in t for n in s.committed] for t in run(space, params)]

    level = replace(SPACE, rarity=torch.full((6,), 3.0))
    assert order(level, order="position") == order(order="confidence")
    assert (
        order(order="position", position_decay=60.0)
        == order(order="raster")
        != order(order="position")
        != order(order="confidence")
    )


def test_position_without_rarity_is_refused():
    with pytest.raises(
        GenError, match=r"sampler.order is 'position', which needs .*TokenSpace.rarity"
    ) as said:
        decode(resolve_sampler("pc")[0], replace(SPACE, rarity=None))
    assert "\n" not in str(said.value)


# --- other names of parameters


def test_names_of_other_libraries_are_understood():
    theirs = {
        "threshold": 0.7,
        "num_inference_steps": 8,
        "remasking": "low_confidence",
        "editing_threshold": 0.4,
        "block_size": 16,
        "history_length": 3,
    }
    ours = {
        "conf_threshold": 0.7,
        "steps": 8,
        "order": "confidence",
        "edit_threshold": 0.4,
        "block_length": 16,
        "history": 3,
    }
    for name in ("masked_iterative", "fast_dllm", "klass"):
        assert (
            resolve_sampler({"name": name, **theirs})
            == resolve_sampler({"name": name, **ours})
            != resolve_sampler(name)
        )
    assert resolve_sampler({"name": "dream", "alg": "topk_margin"})[0].order == "margin"
    assert (
        resolve_sampler({"name": "dparallel", "threshold": 0.3})[0].entropy_bound == 0.3
    )  # what that paper calls so
    assert resolve_sampler({"name": "dparallel", "conf_threshold": 0.3})[0].entropy_bound == 0.5


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            {"name": "fast_dllm", "threshold": 0.7, "conf_threshold": 0.8},
            "got 'threshold' and 'conf_threshold' in a.yaml, which are names of the same parameter",
        ),
        (
            {"name": "fast_dllm", "remasking": "random", "alg": "entropy"},
            "got 'remasking' and 'alg' in a.yaml, which are names of the same parameter, order",
        ),
        (
            {"name": "fast_dllm", "remasking": "entropy"},
            "sampler.remasking is 'entropy' in a.yaml; expected one of low_confidence, random",
        ),
        (
            {"name": "fast_dllm", "alg": ["entropy"]},
            "sampler.alg is ['entropy'] in a.yaml; expected one of maskgit_plus",
        ),
        (
            {"name": "fast_dllm", "threshold": -1},
            "sampler.conf_threshold is -1; expected a number of at least 0",
        ),
        (
            {"name": "speculative_jacobi", "threshold": 0.7},
            "unknown parameter of sampler 'speculative_jacobi': 'threshold'",
        ),
        (
            {"name": "ete", "block_length": 0},
            (
                "sampler.block_length is 0; expected an integer of at least 1, where blocks is"
                " 'lookahead'"
            ),
        ),
        (
            {"name": "ccd", "buffer_size": 0},
            "sampler.buffer_size is 0; expected an integer of at least 1",
        ),
    ],
)
def test_mistakes_are_named_in_one_line(spec, said):
    with pytest.raises(GenError) as error:
        resolve_sampler(spec, where="a.yaml")
    assert said in str(error.value) and "\n" not in str(error.value)


def test_any_sampler_may_say_what_else_its_parameters_are_called(monkeypatch):
    @dataclass(frozen=True)
    class Called(registry.get("sampler", "autoregressive")):
        pace: int = 3
        aliases: ClassVar = {"speed": "pace"}
        spellings: ClassVar = {"speed": {"fast": 9}}

    monkeypatch.setitem(registry._kinds["sampler"], "called", Called)
    assert resolve_sampler({"name": "called", "speed": "fast"})[0].pace == 9
    with pytest.raises(GenError, match="unknown parameter"):  # the control
        resolve_sampler({"name": "autoregressive", "speed": "fast"})


# --- controls: broken selectors fail the checks


def batch_mean(step):
    """A threshold that is the batch's mean."""
    return step.confidence > step.confidence[step.eligible].mean()


def one_row_for_all(step):
    """Where ``nonzero`` loses the rows."""
    return (
        (step.eligible & (step.confidence >= step.params.conf_threshold))
        .any(0)
        .expand_as(step.eligible)
    )


def first_rows_memory(step):
    """Memory that does not follow the rows."""
    step.memory["first"] = step.recall("first", torch.zeros_like(step.logp)) + step.confidence[:1]
    return step.memory["first"] > 1.2


@pytest.mark.parametrize("selector", [batch_mean, one_row_for_all, first_rows_memory])
def test_control_a_selector_that_looks_at_other_rows_fails(selector, monkeypatch):
    monkeypatch.setitem(registry._kinds["selector"], "broken", selector)
    check_rows(
        masked_iterative(selector="threshold", conf_threshold=0.6, **SUREST)
    )  # unbroken, it passes
    with pytest.raises(AssertionError, match=r"torch.equal|nfe"):
        check_rows(masked_iterative(selector="broken", conf_threshold=0.6, **SUREST))


def test_a_selector_cannot_take_what_is_given_or_of_another_block(monkeypatch):
    monkeypatch.setitem(
        registry._kinds["selector"], "all", lambda step: torch.ones_like(step.masked)
    )
    sampler = masked_iterative(selector="all", blocks="fixed", block_length=7, **SUREST)
    check_given(sampler)
    assert torch.equal(
        decode(sampler).tokens,
        decode(replace(sampler, selector="threshold", conf_threshold=0)).tokens,
    )


def test_an_empty_choice_is_the_best_place(monkeypatch):
    monkeypatch.setitem(
        registry._kinds["selector"], "none", lambda step: torch.zeros_like(step.masked)
    )
    monkeypatch.setitem(
        registry._kinds["selector"],
        "best",
        lambda step: highest(step.score, step.eligible, torch.ones_like(step.rows)),
    )
    nothing, best = (run(masked_iterative(selector=name, **SUREST)) for name in ("none", "best"))
    assert torch.equal(nothing.tokens, best.tokens) and [s.nfe for s in nothing.stats] == WANTED
