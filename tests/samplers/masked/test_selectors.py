"""Selectors of parallel decoders against their rules in plain Python: in random states, step after
step, and in whole runs.

A rule sees one row as lists (``Row``) and answers with a set of places; it shares no code with the
selectors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
from masked_bench import MASK, MODEL, POSITIONS, ROWS, SPACE, canvas, run
from masked_steps import changed
from selector_states import DARING, SUREST, B, states

from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.core.sampling_params import SamplingParams
from gen.samplers.masked.step import MaskedStep, highest

# the others: test_maskgit_step.py, test_learned.py, test_remaskers_text.py
SELECTORS = [n for n in registry.table("selector") if n not in ("schedule", "learned", "wide_in")]
masked_iterative = registry.get("sampler", "masked_iterative")


@dataclass
class Row:
    """A row in a step: ``eligible`` places, ``open`` ones, ``known`` ones; id, distribution
    (probabilities), confidence and score of each."""

    k: object
    eligible: list[int]
    open: set[int]
    known: set[int]
    ids: list[int]
    sampling: list[list[float]]
    conf: list[float]
    score: list[float]
    begins: bool
    since: int
    wanted: int
    steps: int  # of the block
    quota: int
    memory: dict = field(default_factory=dict)

    def best(self, n: int, by: list[float], among=None) -> set[int]:
        return set(
            sorted(self.eligible if among is None else among, key=lambda i: (-by[i], i))[
                : max(n, 0)
            ]
        )

    @property
    def sure(self) -> set[int]:
        return {i for i in self.eligible if self.conf[i] >= self.k.conf_threshold}

    @property
    def bits(self) -> list[float]:
        return [-sum(p * math.log(p) for p in sampling if p > 0) for sampling in self.sampling]


# --- the rules


def even(s: Row) -> set[int]:
    left = (
        len(s.eligible)
        if s.since + 1 >= s.steps
        else s.wanted // s.steps + (1 if s.since < s.wanted % s.steps else 0)
    )
    return s.best(left, s.score)


def dream(s: Row) -> set[int]:
    times = [1 - (1 - s.k.last_time) * i / s.steps for i in range(s.steps + 1)]
    if s.since + 1 >= s.steps:
        return set(s.eligible)
    return s.best(int(len(s.eligible) * (1 - times[s.since + 1] / times[s.since])), s.score)


def factor(s: Row) -> set[int]:
    sizes = [
        n
        for n in range(1, len(s.eligible) + 1)
        if (n + 1) * (1 - min(s.conf[i] for i in s.best(n, s.conf))) < s.k.factor
    ]
    return s.best(max(sizes, default=0), s.conf)


def entropy_bound(s: Row) -> set[int]:
    bits = s.bits

    def fits(n):
        return (
            sum(bits[i] for i in s.best(n, s.score)) - max(bits[i] for i in s.best(n, s.score))
            <= s.k.entropy_bound + 1e-12
        )

    return s.best(max(n for n in range(1, len(s.eligible) + 1) if fits(n)), s.score)


def local(s: Row) -> set[int]:
    return s.sure | {
        i
        for i in s.eligible
        if s.conf[i] >= s.k.low_threshold and any(abs(i - a) <= s.k.radius for a in s.sure)
    }


def gaps(positions, ids=None) -> list[list[int]]:
    """Runs of places that follow each other (and hold one id)."""
    out: list[list[int]] = []
    for i in sorted(positions):
        follows = out and out[-1][-1] == i - 1 and (ids is None or ids[i] == ids[i - 1])
        out[-1].append(i) if follows else out.append([i])
    return out


def runs(s: Row) -> set[int]:
    tops = {min(gap, key=lambda i: (-s.conf[i], i)) for gap in gaps(s.eligible)}
    return s.sure | {i for i in tops if s.conf[i] >= s.k.low_threshold}


def explore(s: Row) -> set[int]:
    found = s.sure or s.best(1, s.score)
    return found if len(found) >= 2 else found | s.best(1, s.bits, set(s.eligible) - found)


def klass(s: Row) -> set[int]:
    before, count = s.memory.get("sampling"), s.memory.setdefault("count", [0] * len(s.ids))
    for i, step in enumerate(s.sampling):
        moved = math.inf
        if before is not None and all(b > 0 for p, b in zip(step, before[i], strict=True) if p > 0):
            moved = sum(p * math.log(p / b) for p, b in zip(step, before[i], strict=True) if p > 0)
        count[i] = count[i] + 1 if moved < s.k.kl_threshold else 0
    s.memory["sampling"] = s.sampling
    has_history = s.since >= s.k.history - 1
    return {i for i in s.sure if has_history and count[i] >= s.k.history}


def same_id(s: Row, among) -> list[int]:
    """How often in a row each place was among them with one id, in this block."""
    past = [] if s.begins else s.memory.get("past", [])
    s.memory["past"] = past = [*past, {i: s.ids[i] for i in among}]

    def streak(i):
        return next(
            (n for n, step in enumerate(reversed(past)) if step.get(i) != s.ids[i]), len(past)
        )

    return [streak(i) for i in range(len(s.ids))]


def coherent(s: Row) -> set[int]:
    top = s.best(s.k.buffer_size, s.score)
    streak = same_id(s, top)
    return {i for i in top if streak[i] >= s.k.history}


def regions(s: Row) -> set[int]:
    low, chosen = s.k.low_threshold, s.sure or s.best(1, s.score)
    empty = set(s.eligible) - chosen
    for first in range(len(s.ids) - 2):
        window = {first, first + 1, first + 2}
        gap = window & empty
        if (
            window <= s.open & (empty | s.known | chosen)
            and len(gap) >= 2
            and sum(s.conf[i] for i in sorted(gap)) / len(gap) >= low
        ):
            chosen = chosen | gap
    for gap in gaps(set(s.eligible) - chosen, s.ids):
        top = min(gap, key=lambda i: (-s.conf[i], i))
        if len(gap) >= 2 and s.conf[top] >= low:
            chosen = chosen | {top}
    streak = same_id(s, s.eligible)
    return chosen | {i for i in s.eligible if streak[i] >= s.k.history and s.conf[i] >= low}


RULES = {
    "even": even,
    "dream": dream,
    "factor": factor,
    "entropy_bound": entropy_bound,
    "local": local,
    "runs": runs,
    "explore": explore,
    "klass": klass,
    "coherent": coherent,
    "adjusted": lambda s: s.best(s.k.adjust_commits, s.score),
    "regions": regions,
    "threshold": lambda s: s.sure,
    "entropy": lambda s: {i for i in s.eligible if s.bits[i] <= s.k.entropy_bound},
    "scheduled_threshold": lambda s: s.sure if len(s.sure) >= s.quota else s.best(s.quota, s.score),
}


def test_every_selector_has_a_rule():
    assert set(SELECTORS) == set(RULES) and len(RULES) >= 12


# --- in random states


def row_of(step: MaskedStep, b: int, memory: dict) -> Row:
    def where(x):
        return x[b].nonzero()[:, 0].tolist()

    return Row(
        step.params,
        where(step.eligible),
        set(where(step.open)),
        set(where(~step.masked)),
        step.proposed_tokens[b].tolist(),
        step.logprobs[b].exp().tolist(),
        step.confidence[b].tolist(),
        step.score[b].tolist(),
        bool(step.is_first_step[b]),
        int(step.steps_in_block[b]),
        int(step.num_masked_at_start[b]),
        4,
        int(step.quota[b]),
        memory,
    )


def check_rule(name: str, selector, rule) -> int:
    """The selector takes what its rule says, in every state; returns how many places that was."""
    taken = 0
    for seed in range(6):
        sampler = masked_iterative(selector=name, **DARING | SUREST)
        memories: list[dict] = [{} for _ in range(B)]
        for step in states(seed, sampler):
            found = selector(step) & step.eligible
            for b in range(B):
                assert set(found[b].nonzero()[:, 0].tolist()) == rule(
                    row_of(step, b, memories[b])
                ), (seed, b)
            taken += int(found.sum())
    return taken


@pytest.mark.parametrize("name", RULES)
@pytest.mark.thinned(3)
def test_a_selector_takes_what_its_rule_says_in_any_state(name):
    assert check_rule(name, registry.get("selector", name), RULES[name]) > 50


# --- in whole runs


def probabilities(logits_of, sampling: SamplingParams) -> list[list[float]]:
    """What the model itself holds for likely."""
    plain = SamplingParams(guidance_scale=sampling.guidance_scale)
    return (
        plain(logits_of(0), logits_of(1) if sampling.guided else None, SPACE.legal)[0]
        .exp()
        .tolist()
    )


def with_credit(s: Row) -> None:
    """The distribution, confidence and ids of a row after what was likely before has been added."""
    k = s.memory["credit"] = (
        {}
        if s.begins
        else {key: x * s.k.credit_decay for key, x in s.memory.get("credit", {}).items()}
    )
    empty = [i for i in range(POSITIONS) if i not in s.known]
    for i in empty:
        top = max(range(len(s.sampling[i])), key=lambda v: s.sampling[i][v])
        k[i, top] = k.get((i, top), 0) + s.sampling[i][top] ** s.k.credit_power
    for i in range(POSITIONS):
        fused = [
            p * (1 + k.get((i, v), 0)) ** s.k.credit_weight for v, p in enumerate(s.sampling[i])
        ]
        s.sampling[i] = [x / sum(fused) for x in fused]


def quota(wanted: int, since: int, steps: int, masked: int) -> int:
    """Positions that the linear schedule commits in a step of a block."""
    if since + 1 >= steps:
        return masked
    stay = max(math.floor(wanted * (1 - (since + 1) / steps) + 1e-9), 1)
    return masked - min(stay, masked - 1)


def take_likeliest(s: Row, state: list[int]) -> None:
    """Fill in the likeliest tokens of a row, their probabilities and the order by these."""
    p = s.sampling
    s.ids = [
        state[n] if n in s.known else max(range(len(p[n])), key=lambda v, n=n: p[n][v])
        for n in range(POSITIONS)
    ]
    s.conf = [p[n][s.ids[n]] for n in range(POSITIONS)]
    s.score = s.conf


def reference(
    sampler, sampling: SamplingParams, row: int, rule
) -> tuple[list[int], list[set[int]]]:
    """One row, decoded in plain Python: its ids, and the positions of every step."""
    state, memory, steps, last = canvas()[row].tolist(), {}, [], -1
    total = state.count(MASK)
    since = wanted = 0
    while MASK in state:
        masked = [n for n in range(POSITIONS) if state[n] == MASK]
        length = {"whole": POSITIONS}.get(sampler.blocks, sampler.block_length)
        number = masked[0] // length
        opened = {
            n
            for n in range(POSITIONS)
            if 0 <= n // length - number <= (sampler.blocks == "lookahead")
        }
        eligible = [n for n in masked if n in opened]
        begins, last = number != last, number
        since, wanted = (0, len(eligible)) if begins else (since + 1, wanted)
        of = max(1, math.ceil(sampler.steps * wanted / total - 1e-9))
        prompts = [31 + row % 3, 40], [50, 51 + row % 3]
        p = probabilities(
            lambda half, state=state, prompts=prompts: MODEL.forward(
                torch.tensor([[*prompts[half], *state]]), POSITIONS
            ),
            sampling,
        )
        s = Row(
            sampler,
            eligible,
            opened,
            set(range(POSITIONS)) - set(masked),
            [],
            p,
            [],
            [],
            begins,
            since,
            wanted,
            of,
            quota(wanted, since, of, len(eligible)),
            memory,
        )
        if sampler.proposer == "credit":
            with_credit(s)
        take_likeliest(s, state)
        chosen = rule(s) & set(eligible) or s.best(1, s.score)
        for n in chosen:
            state[n] = s.ids[n]
        steps.append(chosen)
    return state, steps


SAMPLING_CASES = {
    "plain": SamplingParams(),
    "guided": SamplingParams(temperature=0.7, top_k=3, guidance_scale=1.2),
}


def check_run(sampler, rule, sampling: SamplingParams) -> int:
    """Tokens and steps of a batch are those of the reference; returns in how many steps more than
    one place was committed."""
    out = run(sampler, sampling, trace=True)
    for row in range(ROWS):
        state, steps = reference(sampler, sampling, row, rule)
        assert [set(step.committed) for step in out.traces[row]] == steps, row
        assert out.tokens[row].tolist() == state
    return sum(len(step.committed) > 1 for trace in out.traces for step in trace)


@pytest.mark.parametrize(
    ("blocks", "sampling"),
    [
        ("whole", SAMPLING_CASES["plain"]),
        ("fixed", SAMPLING_CASES["guided"]),
        ("lookahead", SAMPLING_CASES["plain"]),
    ],
)
@pytest.mark.parametrize("name", RULES)
@pytest.mark.thinned(3)
def test_a_run_is_that_of_its_rule(name, blocks, sampling):
    sampler = masked_iterative(
        selector=name, blocks=blocks, block_length=7, steps=9, schedule="linear", **DARING | SUREST
    )
    several = check_run(sampler, RULES[name], sampling)
    assert several > 0 or name in (
        "klass",
        "coherent",
    )  # this model's distributions jump about; see the next test


@pytest.mark.parametrize("name", ["klass", "coherent"])
def test_what_is_steady_is_committed_together(name):
    """With a history of one step, as soon as that is enough; the control: with a longer one,
    later."""
    daring = DARING | {"kl_threshold": 2.0, "conf_threshold": 0.3, "history": 1}

    def sampler(**params):
        return masked_iterative(selector=name, **daring | SUREST | params)

    assert check_run(sampler(), RULES[name], SAMPLING_CASES["plain"]) > 0
    check_run(sampler(history=3), RULES[name], SAMPLING_CASES["plain"])

    def calls(s):
        return sum(x.nfe for x in run(s).stats)

    assert calls(sampler()) < calls(sampler(history=3))


@pytest.mark.parametrize("blocks", ["whole", "fixed"])
@pytest.mark.parametrize("selector", ["threshold", "factor"])
def test_credit_is_that_of_its_rule(selector, blocks):
    sampler = masked_iterative(
        selector=selector, blocks=blocks, block_length=7, **DARING | SUREST | {"proposer": "credit"}
    )
    check_run(sampler, RULES[selector], SAMPLING_CASES["plain"])
    plain = run(
        masked_iterative(selector=selector, blocks=blocks, block_length=7, **DARING | SUREST)
    )
    assert not torch.equal(run(sampler).tokens, plain.tokens)  # the control: it does something


# --- controls: broken rules fail the checks


def off_by_one(step: MaskedStep) -> torch.Tensor:
    """``factor`` as it was first released: if the first place that fails is the last of all, it is
    taken along."""
    number = registry.get("selector", "factor")(step).sum(1)
    total = step.eligible.sum(1)
    return highest(
        step.confidence,
        step.eligible,
        torch.where((number == 0) | (number == total - 1), number + 1, number),
    )


def no_best_of_all(step: MaskedStep) -> torch.Tensor:
    """The same with the first place always taken, which the loop does anyway: the rest of the
    difference is the bug."""
    number = registry.get("selector", "factor")(step).sum(1)
    return highest(step.confidence, step.eligible, number.clamp_min(1))


def test_control_the_off_by_one_of_factor_fails():
    def first(s):
        return factor(s) or s.best(1, s.conf)

    assert check_rule("factor", no_best_of_all, first) > 50
    with pytest.raises(AssertionError):
        check_rule("factor", off_by_one, first)
    row = Row(
        masked_iterative(factor=1.0),
        [0, 1],
        {0, 1},
        set(),
        [0, 0],
        [],
        [1.0, 0.37],
        [1.0, 0.37],
        True,
        0,
        2,
        1,
        1,
    )
    assert factor(row) == {0}  # a certain place and one at 0.37: the bug takes both


def batch_cummax(step: MaskedStep) -> torch.Tensor:
    """``entropy_bound`` with its running maximum over the batch."""
    order = step.score.argsort(1, descending=True)
    bits = torch.special.entr(step.logprobs.exp()).sum(-1).gather(1, order)
    fits = bits.cumsum(1) - bits.cummax(0).values <= step.params.entropy_bound
    return torch.zeros_like(fits).scatter(1, order, fits)


def over_edges(step: MaskedStep) -> torch.Tensor:
    """``runs`` without a look at the block."""
    from gen.samplers.masked.parts.selection import best_of_each, confident, runs_of

    return confident(step) | (
        best_of_each(step.confidence, step.masked, runs_of(step.masked))
        & (step.confidence >= step.params.low_threshold)
    )


def never_forgets(step: MaskedStep) -> torch.Tensor:
    """``coherent`` across blocks."""
    step = changed(step, is_first_step=step.is_first_step & (step.step_index == 0))
    return registry.get("selector", "coherent")(step)


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("entropy_bound", batch_cummax),
        ("runs", over_edges),
        ("coherent", never_forgets),
        ("factor", off_by_one),
        ("local", registry.get("selector", "threshold")),
    ],
)
def test_control_a_broken_selector_fails_its_rule(name, broken):
    with pytest.raises(AssertionError):
        check_rule(name, broken, RULES[name])


def test_control_a_broken_rule_fails_the_run():
    sampler = resolve_sampler({"name": "fast_dllm", "conf_threshold": 0.5, "block_length": 7})[0]
    check_run(sampler, RULES["threshold"], SAMPLING_CASES["plain"])
    with pytest.raises(AssertionError):
        check_run(
            sampler, lambda s: {i for i in s.eligible if s.conf[i] >= 0.6}, SAMPLING_CASES["plain"]
        )
