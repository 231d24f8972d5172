"""Guided diffusion: a masked model proposes, a causal one judges. Against plain Python, which has
no cache and one row; and the judge's own greedy tokens."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tabular import (
    EMPTY,
    PROMPTS,
    TabularCausal,
    TabularMasked,
    causal_target,
    masked_target,
    space_of,
)

from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.core.stats import SampleOutput
from gen.core.token_space import TokenSpace
from gen.pipeline.pipeline import Pipeline
from gen.samplers.masked.guided.guided_diffusion import Judge

IDS, POSITIONS, MASK, ROWS = 4, 10, 4, 5
SPACE = space_of((2, 5), IDS, masked=True)
ENDING = replace(SPACE, eos_token_id=3)
SAMPLING_CASES = {
    "plain": SamplingParams(),
    "guided": SamplingParams(temperature=0.8, top_k=3, guidance_scale=1.5),
}
MODEL, JUDGE = TabularMasked(IDS + 1, low=0.0), TabularCausal(IDS + 1, seed=5, low=0.0, spread=2.0)
guided = registry.get("sampler", "guided_diffusion")


def canvas() -> torch.Tensor:
    """Rows that are given nothing, the middle, all, the beginning, and every third place."""
    out = (torch.arange(POSITIONS) * 3 % 3).repeat(ROWS, 1)
    out[0], out[1, :3], out[1, 6:], out[3, 4:] = MASK, MASK, MASK, MASK
    out[4] = torch.where(torch.arange(POSITIONS) % 3 == 2, 1, MASK)
    return out


def run(
    sampler,
    sampling: SamplingParams = SAMPLING_CASES["plain"],
    rows: list[int] | None = None,
    space: TokenSpace = SPACE,
    start: torch.Tensor | None = None,
    **kwargs,
) -> SampleOutput:
    rows = list(range(ROWS)) if rows is None else rows
    contexts = [r % 3 for r in rows]
    judge = causal_target(JUDGE, space, sampling, contexts)
    given = (canvas() if start is None else start)[rows]
    return sampler(
        masked_target(MODEL, space, sampling, contexts),
        CounterRNG([31 * r + 7 for r in rows]),
        draft=judge,
        canvas=given,
        **kwargs,
    )


def decode(sampler, sampling: SamplingParams, row: int) -> tuple[list[int], int]:
    """One row: its tokens, and calls."""
    state, rng, calls = canvas()[row].tolist(), CounterRNG([31 * row + 7]), 0
    raw, at = SamplingParams(guidance_scale=sampling.guidance_scale), torch.arange(POSITIONS)[None]
    while MASK in state:

        def logits(prompt, state=state):
            return MODEL.forward(torch.tensor([[*prompt, *state]]), POSITIONS)

        logp = sampling(
            logits([31 + row % 3, 40]),
            logits([50, 51 + row % 3]) if sampling.guided else None,
            SPACE.legal,
        )
        drawn = rng.categorical(
            logp, torch.tensor([0]), at, "propose", torch.tensor([calls]), at >= 0
        )[0].tolist()
        ids = [drawn[n] if x == MASK else x for n, x in enumerate(state)]
        agreed, correction = {}, {}
        for n in (n for n in range(POSITIONS) if state[n] == MASK):
            cond = JUDGE.after([*PROMPTS[row % 3], *ids[:n]])
            q = raw(
                cond,
                JUDGE.after([*EMPTY[row % 3], *ids[:n]]) if sampling.guided else None,
                SPACE.legal[n],
            ).tolist()
            better = sum(x > q[ids[n]] for x in q)
            if better >= sampler.judge_top_k or (
                sampler.agree == "relative" and q[ids[n]] < max(q) + math.log(sampler.judge_ratio)
            ):
                correction = {n: q.index(max(q))}
                break
            agreed[n] = ids[n]
        if sampler.commit_correction:
            agreed |= correction
        if not agreed:
            best = min(
                (n for n in range(POSITIONS) if state[n] == MASK),
                key=lambda n: (-float(logp[0, n, ids[n]]), n),
            )
            agreed = {best: ids[best]}
        state, calls = [agreed.get(n, x) for n, x in enumerate(state)], calls + 1
    return state, calls


RULES = [
    {"judge_top_k": 1},
    {"judge_top_k": 2},
    {"judge_top_k": 2, "commit_correction": True},
    {"agree": "relative", "judge_ratio": 0.7, "judge_top_k": 3},
    {"agree": "relative", "judge_ratio": 0.4, "judge_top_k": 2, "commit_correction": True},
]


@pytest.mark.parametrize("sampling", SAMPLING_CASES.values(), ids=SAMPLING_CASES)
@pytest.mark.parametrize("params", RULES, ids=str)
def test_tokens_and_calls_are_those_of_the_reference(params, sampling):
    out = run(guided(**params), sampling)
    for row in range(ROWS):
        assert (out.tokens[row].tolist(), out.stats[row].nfe) == decode(
            guided(**params), sampling, row
        )
        assert out.stats[row].draft_nfe == out.stats[row].nfe
    assert not torch.equal(
        out.tokens, run(guided(judge_top_k=IDS), sampling).tokens
    )  # the control: a judge that takes everything


def greedy(space: TokenSpace, sampling: SamplingParams) -> torch.Tensor:
    return registry.get("sampler", "autoregressive")()(
        causal_target(
            JUDGE, space, replace(sampling, temperature=0.0), [r % 3 for r in range(ROWS)]
        ),
        CounterRNG(range(ROWS)),
    ).tokens


@pytest.mark.parametrize("space", [SPACE, ENDING], ids=["one length", "rows that end"])
@pytest.mark.parametrize("sampling", SAMPLING_CASES.values(), ids=SAMPLING_CASES)
def test_corrected_to_its_first_choice_it_is_the_judge(sampling, space):
    """Whatever is proposed, in at most a call per token; with two choices, or without the
    correction, it is not."""
    empty, expected = SPACE.empty(ROWS), greedy(space, sampling)
    out = run(guided(judge_top_k=1, commit_correction=True), sampling, space=space, start=empty)
    assert torch.equal(out.tokens, expected)
    assert max(s.nfe for s in out.stats) <= POSITIONS and min(s.nfe for s in out.stats) < POSITIONS
    for other in ({"judge_top_k": 2, "commit_correction": True}, {"judge_top_k": 1}):
        assert not torch.equal(
            run(guided(**other), sampling, space=space, start=empty).tokens, expected
        )


def test_a_judge_that_takes_everything_takes_it_at_once():
    out = run(guided(judge_top_k=IDS))
    assert [s.nfe for s in out.stats] == [1, 1, 0, 1, 1] == [s.draft_nfe for s in out.stats]
    masked = registry.get("sampler", "masked_iterative")(steps=1)
    alone = masked(
        masked_target(MODEL, SPACE, SamplingParams(), [r % 3 for r in range(ROWS)]),
        CounterRNG([31 * r + 7 for r in range(ROWS)]),
        canvas=canvas(),
    )
    assert torch.equal(out.tokens, alone.tokens)


@pytest.mark.parametrize("params", RULES[1:3], ids=str)
def test_a_row_alone_is_a_row_of_the_batch_and_traces_replay(params):
    whole = run(guided(**params), trace=True)
    for row in range(ROWS):
        alone = run(guided(**params), rows=[row])
        assert torch.equal(alone.tokens[0], whole.tokens[row])
        assert (alone.stats[0].nfe, alone.stats[0].draft_nfe) == (
            whole.stats[row].nfe,
            whole.stats[row].draft_nfe,
        )
        made = canvas()[row].tolist()
        for step in whole.traces[row]:
            assert (
                step.committed and not step.removed and all(made[n] == MASK for n in step.committed)
            )
            made = [step.committed.get(n, x) for n, x in enumerate(made)]
        assert made == whole.tokens[row].tolist()


def test_the_judge_reads_no_more_than_what_has_changed(monkeypatch):
    """And no less: the control starts at the first empty place, although a correction before it was
    never told."""
    widths: list[int] = []
    predict = type(causal_target(JUDGE, SPACE, SamplingParams(), [0])).predict
    monkeypatch.setattr(
        "gen.models.targets.causal.CausalTarget.predict",
        lambda self, ids, at: (widths.append(at.shape[1]), predict(self, ids, at))[1],
    )
    sampler, rows = guided(judge_top_k=1, commit_correction=True), [1, 4]
    out = run(sampler, rows=rows)
    assert (
        widths[0] == POSITIONS and widths == sorted(widths, reverse=True) and widths[-1] < POSITIONS
    )
    assert [t.tolist() for t in out.tokens] == [
        decode(sampler, SamplingParams(), row)[0] for row in rows
    ]

    good = Judge.first_stale

    def forgetful(self, step, tokens):
        first = "judged_tokens" not in step.memory
        start = good(self, step, tokens)
        return start if first else step.masked.long().argmax(1)

    monkeypatch.setattr(Judge, "first_stale", forgetful)
    wrong = [
        run(
            guided(commit_correction=True, judge_top_k=1), start=canvas()[[r] * ROWS]
        ).tokens.tolist()
        for r in (1, 4)
    ]
    monkeypatch.setattr(Judge, "first_stale", good)
    assert wrong != [
        run(
            guided(commit_correction=True, judge_top_k=1), start=canvas()[[r] * ROWS]
        ).tokens.tolist()
        for r in (1, 4)
    ]


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"agree": "topk"}, "sampler.agree is 'topk'; expected top_k or relative"),
        ({"judge_top_k": 0}, "sampler.judge_top_k is 0; expected an integer of at least 1"),
        ({"judge_ratio": 2}, "sampler.judge_ratio is 2; expected a number between 0 and 1"),
        ({"commit_correction": 1}, "sampler.commit_correction is 1; expected true or false"),
        ({"stop": "prophet"}, "sampler.stop is 'prophet'; expected filled or end"),
        ({"judge_topk": 2}, "Did you mean 'judge_top_k'"),
    ],
)
def test_mistakes_are_named_in_one_line(params, said):
    with pytest.raises(GenError) as error:
        resolve_sampler({"name": "guided_diffusion", **params})
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_judge_of_other_tokens_is_refused():
    def target():
        return masked_target(MODEL, SPACE, SamplingParams(), [0])

    with pytest.raises(GenError, match="needs a causal model to verify tokens"):
        guided()(target(), CounterRNG([1]))
    for space, said in (
        (
            space_of((2, 5), 6),
            "the judge has 6 token ids and 10 positions; expected the masked model's 5 and 10",
        ),
        (space_of((2, 5), 5), "the judge's legal token ids are not the masked model's"),
    ):
        with pytest.raises(GenError, match=said):
            guided()(
                target(),
                CounterRNG([1]),
                draft=causal_target(TabularCausal(space.vocab_size), space, SamplingParams(), [0]),
            )


def test_the_modality_s_causal_model_is_the_judge():
    pipe = Pipeline("image")
    assert pipe.model_name(guided()) == "image-masked"
    assert pipe.draft_names(guided()) == ["image-causal"]
    assert pipe.draft_names(guided(draft_model="image-draft")) == ["image-draft"]
    with pytest.raises(
        GenError, match="draft model image-masked is a masked one; expected a causal one"
    ):
        pipe.draft_names(guided(draft_model="image-masked"))
