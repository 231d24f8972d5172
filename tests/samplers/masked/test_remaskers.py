"""Remaskers: masked sampling that takes back. Against an independent reference, place by place; and
what each of them must keep.

The checks are plain functions, and the controls run them on remaskers that are broken on purpose.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from block_bench import target_of as block_target
from latent_bench import run as run_latents
from masked_bench import (
    IDS,
    MASK,
    MODEL,
    POSITIONS,
    ROWS,
    SAMPLING_CASES,
    SPACE,
    canvas,
    check_given,
    check_rows,
    masked_iterative,
    run,
)
from masked_steps import masked_step
from tabular import TabularBlocks
from torch import Tensor

from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.adapters.base import ModelAdapter
from gen.models.targets.masked import MaskedTarget
from gen.samplers.masked.step import LEFT_OUT_LOGP, MaskedStep, lowest, needs_of

REMASKERS = list(registry.table("remasker"))
REVISING = [name for name in REMASKERS if name != "none"]
PLAIN = [
    "none",
    "low_confidence",
    "secondary",
]  # the others have references in test_remaskers_text.py


# --- the rule


def reference(sampler, sampling: SamplingParams, row: int) -> list[int]:
    """One row, in plain Python: order ``confidence``, schedule ``cosine``."""
    state = canvas()[row].tolist()
    given = {n for n in range(POSITIONS) if state[n] != MASK}
    wanted, rng, born = POSITIONS - len(given), CounterRNG([31 * row + 7]), {}
    for step in range(sampler.steps):
        masked = [n for n in range(POSITIONS) if state[n] == MASK]
        filled = [n for n in range(POSITIONS) if state[n] != MASK and n not in given]
        if not masked:
            break
        r, last = (step + 1) / sampler.steps, step + 1 == sampler.steps

        def logits(prompt, state=state):
            return MODEL.forward(torch.tensor([[*prompt, *state]]), POSITIONS)

        logp = sampling(
            logits([31 + row % 3, 40]),
            logits([50, 51 + row % 3]) if sampling.guided else None,
            SPACE.legal,
        )[0]
        here = torch.tensor([0]), torch.arange(POSITIONS)[None]
        drawn = rng.categorical(logp[None], *here, "propose", torch.tensor([step]), here[1] >= 0)[
            0
        ].tolist()
        noise = rng.uniform(*here, "confidence", torch.tensor([step]))[0].tolist()
        ids = {n: drawn[n] if n in masked else state[n] for n in range(POSITIONS)}
        sure = {n: float(logp[n, ids[n]]) for n in range(POSITIONS)}
        score = {
            n: sure[n] - sampler.choice_temperature * (1 - r) * math.log(-math.log(noise[n]))
            for n in range(POSITIONS)
        }
        stay = (
            0
            if last
            else min(max(math.floor(wanted * math.cos(math.pi / 2 * r) + 1e-9), 1), len(masked) - 1)
        )
        commit, removed = len(masked) - stay, []
        if sampler.remasker == "low_confidence" and not last:
            removed = [
                n for n in sorted(masked + filled, key=lambda n: (sure[n], n))[:stay] if n in filled
            ]
            commit += len(removed)
        if sampler.remasker == "secondary" and not last:
            p = {n: math.exp(sure[n]) for n in filled}
            doubtful = [
                n
                for n in filled
                if p[n] < sampler.remask_threshold * r
                or math.exp(born[n]) - p[n] > sampler.remask_margin
            ]
            removed = sorted(doubtful, key=lambda n: (sure[n], n))[: commit - 1]
        for n in sorted(masked, key=lambda n: (-score[n], n))[:commit]:
            state[n], born[n] = ids[n], sure[n]
        for n in removed:
            state[n] = MASK
    return state


@pytest.mark.parametrize("sampling", SAMPLING_CASES.values(), ids=SAMPLING_CASES)
@pytest.mark.parametrize("temperature", [0.0, 4.5])
@pytest.mark.parametrize("remasker", PLAIN)
def test_tokens_are_those_of_the_reference(remasker, temperature, sampling):
    sampler = masked_iterative(steps=6, remasker=remasker, choice_temperature=temperature)
    found = run(sampler, sampling).tokens.tolist()
    assert found == [reference(sampler, sampling, row) for row in range(ROWS)]
    if remasker != "none":  # the control: without it, the tokens are others
        assert (
            found
            != run(
                masked_iterative(steps=6, choice_temperature=temperature), sampling
            ).tokens.tolist()
        )


@pytest.mark.parametrize("param", ["remask_threshold", "remask_margin"])
def test_the_parameters_of_secondary_are_felt_and_switch_it_off(param):
    off = {"remask_threshold": 0.0, "remask_margin": 1.0}

    def sampler(**params):
        return masked_iterative(steps=6, remasker="secondary", **(off | params))

    plain = run(masked_iterative(steps=6)).tokens
    assert torch.equal(run(sampler()).tokens, plain)
    tokens = run(sampler(**{param: 0.5 if param == "remask_threshold" else 0.1})).tokens
    assert not torch.equal(tokens, plain)
    assert tokens.tolist() == [
        reference(
            sampler(**{param: 0.5 if param == "remask_threshold" else 0.1}), SamplingParams(), row
        )
        for row in range(ROWS)
    ]


# --- what every remasker must keep


def check_progress(sampler) -> None:
    """Each step fills more places than it empties, the last one empties none, and steps are enough.
    In a row that is full, ids may be replaced."""
    out = run(sampler, trace=True)
    assert not bool((out.tokens == MASK).any()), "a place was left empty"
    for row, (trace, stats) in enumerate(zip(out.traces, out.stats, strict=True)):
        left, more = int((canvas()[row] == MASK).sum()), 0
        for n, step in enumerate(trace):
            more += not left
            assert not left or len(step.committed) > len(step.removed), "a step makes no progress"
            assert set(step.removed) <= set(step.committed) or n + 1 < min(
                len(trace), sampler.steps
            )
            left -= len(step.committed) - len(step.removed)
        assert (
            not left
            and more <= sampler.max_post_steps
            and stats.nfe == len(trace) <= sampler.steps + more
        )


def check_traces(sampler) -> None:
    """Replaying gives the tokens; what is emptied was committed by an earlier step; costs say the
    same."""
    out = run(sampler, trace=True)
    for row, (trace, stats) in enumerate(zip(out.traces, out.stats, strict=True)):
        state = dict(enumerate(canvas()[row].tolist()))
        for step in trace:
            assert all(state[n] != MASK for n in step.removed)
            state |= dict.fromkeys(step.removed, MASK)
            assert all(state[n] == MASK for n in step.committed) and set(step.committed) <= set(
                step.window
            )
            state |= step.committed
        assert list(state.values()) == out.tokens[row].tolist()
        assert (
            stats.tokens
            == int((canvas()[row] == MASK).sum())
            == sum(len(s.committed) - len(s.removed) for s in trace)
        )
    assert torch.equal(out.tokens, run(sampler).tokens), "tracing changes the tokens"


def check_final(sampler) -> None:
    """What the callback calls known never changes again, so that it may be shown; and it is all, in
    the end."""
    calls: list[tuple[Tensor, Tensor, int]] = []
    out = run(
        sampler,
        callback=lambda i: calls.append((i["tokens"].clone(), i["known"].clone(), i["done"])),
    )
    for tokens, known, _ in calls:
        assert torch.equal(tokens[known], out.tokens[known]), "a known place has changed"
    assert bool(calls[-1][1].all()) and calls[-1][2] == ROWS * POSITIONS
    assert [c[2] for c in calls] == sorted(c[2] for c in calls)


CHECKS = [check_given, check_progress, check_traces, check_rows, check_final]


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
@pytest.mark.parametrize(
    ("remasker", "steps"),
    [(r, n) for r in REMASKERS for n in ([1, 2, 7, 25] if r in PLAIN else [2, 9])],
)
@pytest.mark.thinned(9)
def test_what_every_remasker_keeps(remasker, steps, check):
    check(masked_iterative(steps=steps, remasker=remasker))


@pytest.mark.parametrize("order", registry.table("order"))
@pytest.mark.parametrize("remasker", REVISING)
@pytest.mark.thinned(12)
def test_remaskers_work_with_every_order_and_take_something_back(remasker, order):
    sampler = masked_iterative(steps=8, remasker=remasker, order=order)
    for check in CHECKS if order == "random" else [check_progress]:
        check(sampler)
    assert sum(len(step.removed) for trace in run(sampler, trace=True).traces for step in trace) > 0


def test_under_low_confidence_the_schedule_holds_and_under_secondary_it_is_caught_up_with():
    """Masked places after every step: those of the plain sampler; and at least as many, until the
    end."""
    left = {}
    for remasker in REMASKERS:
        trace = run(masked_iterative(steps=8, remasker=remasker), trace=True).traces[0]
        left[remasker] = [
            POSITIONS - sum(len(s.committed) - len(s.removed) for s in trace[: n + 1])
            for n in range(len(trace))
        ]
    assert left["low_confidence"] == left["none"] and left["none"][-1] == left["secondary"][-1] == 0
    assert len(left["secondary"]) == 8 and all(
        a >= b for a, b in zip(left["secondary"], left["none"], strict=True)
    )
    assert left["secondary"] != left["none"]


def random_state(seed: int) -> tuple[MaskedStep, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    kind = torch.randint(0, 3, (64, 9), generator=g)  # given, masked, filled
    kind[:, 0] = 1
    masked = kind == 1
    logp = torch.randint(-6, 1, (64, 9), generator=g).double()  # many are equal
    logp[torch.rand(64, 9, generator=g) < 0.2] = -math.inf
    commit = 1 + (torch.rand(64, generator=g) * masked.sum(1)).long()
    certainty = torch.randn(64, 9, generator=g).double().clamp_max(0)
    row, fresh, params = (
        torch.arange(64),
        torch.ones_like(masked),
        masked_iterative(remask_margin=0.2, remask_count=3),
    )
    sampling = torch.randn(64, 9, IDS + 1, generator=g).double().mul(3).log_softmax(-1)
    steps_in_block = torch.randint(0, 9, (64,), generator=g)
    step = masked_step(
        CounterRNG(range(64)),
        row,
        row,
        SPACE,
        params,
        canvas=masked.long(),
        prefilled=kind == 0,
        masked=masked,
        logprobs=sampling,
        committed_logp=certainty,
        left_out_logp=certainty,
        open=fresh,
        proposed_tokens=None,
        logp=logp,
        score=logp,
        is_last_step=row < 0,
        quota=commit,
        is_first_step=row < 0,
        steps_in_block=steps_in_block,
        progress=(steps_in_block + 1).double() / 10,
    )
    return step, commit


@pytest.mark.parametrize("name", REMASKERS)
def test_a_remasker_keeps_its_word_in_any_state(name):
    some = 0
    for seed in range(20):
        step, count = random_state(seed)
        removed, commit, *rest = registry.get("remasker", name)(step, count)
        assert not bool((removed & ~step.remaskable).any())
        assert bool((commit - removed.sum(1) >= 1).all()) and bool(
            (commit <= step.masked.sum(1)).all()
        )
        changed = rest[0] if rest else torch.full_like(step.canvas, -1)
        assert not bool(((changed >= 0) & ~step.remaskable).any())
        some += int(removed.sum()) + int((changed >= 0).sum())
    assert some > 0 or name == "none"


def test_lowest_takes_the_first_of_equal_ones_and_no_others():
    score = torch.tensor([[3.0, -math.inf, 1.0, 1.0, math.inf, -math.inf]])
    among = torch.tensor([[True, False, True, True, True, True]])
    for count, positions in (
        (0, []),
        (1, [5]),
        (2, [2, 5]),
        (3, [2, 3, 5]),
        (5, [0, 2, 3, 4, 5]),
        (9, [0, 2, 3, 4, 5]),
        (-1, []),
    ):
        assert lowest(score, among, torch.tensor([count]))[0].nonzero()[:, 0].tolist() == positions


# --- controls


@pytest.fixture
def broken(monkeypatch):
    def make(remasker, **params):
        monkeypatch.setitem(registry._kinds["remasker"], "broken", remasker)
        return masked_iterative(**{"steps": 8, "remasker": "broken", **params})

    return make


def touches_given(step, count):
    """It looks at all places that hold an id."""
    return lowest(step.logp, ~step.masked, count - 1), count


def never_gets_on(step, count):
    """It empties as many as it commits."""
    return lowest(step.logp, step.remaskable, count), count


def looks_at_others(step, count):
    """A threshold that is the batch's mean."""
    return (
        lowest(
            step.logp,
            step.remaskable & (step.logp < step.logp[step.logp.isfinite()].mean()),
            count - 1,
        ),
        count,
    )


def empties_what_is_empty(step, count):
    return lowest(step.logp, step.masked, count - 1), count


@pytest.mark.parametrize(
    ("remasker", "check"),
    [
        (touches_given, check_given),
        (never_gets_on, check_progress),
        (looks_at_others, check_rows),
        (empties_what_is_empty, check_traces),
    ],
)
def test_control_a_broken_remasker_fails_its_check(broken, remasker, check):
    with pytest.raises(AssertionError):
        check(broken(remasker))
    check(broken(registry.get("remasker", "secondary")))  # unbroken, it passes


def test_control_what_is_filled_is_not_yet_known():
    """Were every filled place shown as known, some would change under the eyes of who looks."""
    calls = []
    out = run(
        masked_iterative(steps=8, remasker="low_confidence"),
        callback=lambda i: calls.append(i["tokens"].clone()),
    )
    assert any(
        not torch.equal(tokens[tokens != MASK], out.tokens[tokens != MASK]) for tokens in calls
    )


def test_even_one_that_never_gets_on_ends_with_the_last_step(broken):
    """That is the sampler's own doing: the last step is not asked."""
    out = run(broken(never_gets_on))
    assert max(s.nfe for s in out.stats) == 8 and not bool((out.tokens == MASK).any())


# --- what it is good for


class Unanimous(ModelAdapter):
    """A model in which all places want the id that the others have, and know nothing else: ids
    committed in one step may disagree."""

    device, dtype, vocab_size = torch.device("cpu"), torch.float64, 3

    def forward(self, ids: Tensor, canvas_length: int) -> Tensor:
        canvas = ids[:, -canvas_length:]
        votes = torch.nn.functional.one_hot(canvas, 3).double()
        votes[..., 2] = 0
        return 2.5 * (votes.sum(1, keepdim=True) - votes)


@pytest.mark.parametrize("remasker", REVISING)
def test_what_disagrees_is_taken_back(remasker):
    space, prompt = TokenSpace.codes((8,), 2, 3, 2), torch.zeros(300, 1, dtype=torch.long)
    plain, taken = (
        masked_iterative(
            steps=4,
            order="random",
            schedule="linear",
            remasker=name,
            remask_count=2,
            remask_rate=0.9,
        )(MaskedTarget(Unanimous(), prompt, space, SamplingParams()), CounterRNG(range(300))).tokens
        for name in ("none", remasker)
    )

    def agree(tokens):
        return float((tokens == tokens[:, :1]).all(1).double().mean())

    assert agree(taken) > agree(plain) + 0.05


# --- other samplers, and refusals


@pytest.mark.parametrize("remasker", REVISING)
def test_blocks_take_back_within_a_block(remasker):
    model = TabularBlocks(SPACE.vocab_size, block_length=10)
    frame_blocks = registry.get("sampler", "frame_blocks")
    if LEFT_OUT_LOGP in needs_of(registry.get("remasker", remasker)):
        with pytest.raises(
            GenError,
            match=(
                f"{remasker!r}, which needs the log-probability of every token with its own"
                " position masked; a block model"
            ),
        ):
            frame_blocks(steps=5, remasker=remasker)(
                block_target(model, SPACE, SamplingParams(), [0]), CounterRNG([1])
            )
        return
    out = frame_blocks(steps=5, remasker=remasker)(
        block_target(model, SPACE, SamplingParams(), [0, 1, 2]), CounterRNG([1, 2, 3]), trace=True
    )
    removed = [n for trace in out.traces for step in trace for n in step.removed]
    assert removed and not bool((out.tokens == MASK).any())
    for ids, trace in zip(out.tokens.tolist(), out.traces, strict=True):
        state: dict[int, int] = {}
        for step in trace:
            state = {n: x for n, x in state.items() if n not in step.removed} | step.committed
            assert len({n // 10 for n in (*step.committed, *step.removed)}) == 1
        assert [state[n] for n in range(POSITIONS)] == ids


@pytest.mark.parametrize("remasker", REVISING)
def test_latents_refuse_all_but_none(remasker):
    with pytest.raises(
        GenError, match=f"'{remasker}', which looks at the probability of tokens; latents have none"
    ) as said:
        run_latents(masked_iterative(steps=3, order="random", remasker=remasker))
    assert "\n" not in str(said.value)
    assert run_latents(masked_iterative(steps=3, order="random")).tokens.shape[0] > 0


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"remasker": "secondry"}, "Did you mean 'secondary'"),
        (
            {"remask_threshold": 1.5},
            "sampler.remask_threshold is 1.5; expected a number between 0 and 1",
        ),
        (
            {"remask_margin": -0.1},
            "sampler.remask_margin is -0.1; expected a number between 0 and 1",
        ),
        ({"remask_margin": True}, "sampler.remask_margin is True; expected"),
        ({"remask_treshold": 0.5}, "Did you mean 'remask_threshold'"),
    ],
)
def test_mistakes_are_named_in_one_line(params, said):
    with pytest.raises(GenError) as error:
        resolve_sampler({"name": "ddvla", **params})
    assert said in str(error.value) and "\n" not in str(error.value)


def test_presets():
    assert resolve_sampler("ddvla")[0] == masked_iterative(
        steps=12, order="confidence", remasker="secondary"
    )
    assert resolve_sampler("maskgit_remask")[0] == replace(
        resolve_sampler("maskgit")[0], remasker="low_confidence"
    )
