"""Remaskers of diffusion language models: against a decoder in plain Python, which has one row,
lists, and a call of its own for every canvas.

What every remasker must keep is in test_remaskers.py, which walks the registry.
"""

from __future__ import annotations

import math

import pytest
import torch
from masked_bench import IDS, MASK, MODEL, POSITIONS, ROWS, SPACE, canvas, masked_iterative, run
from masked_steps import changed, masked_step

from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.samplers.masked.step import MaskedStep

SIZE = 10  # places of a block
GREEDY = {
    "proposer": "argmax",
    "choice_temperature": 0.0,
    "order": "confidence",
    "schedule": "linear",
    "confidence_on": "raw",
    "blocks": "fixed",
    "block_length": SIZE,
}
# values at which each remasker changes the output of a model whose answer changes in every step
PARAMETERS = {
    "edit": {"edit_threshold": 0.45, "max_post_steps": 3},
    "wino": {"remask_threshold": 0.2, "selector": "wide_in", "conf_threshold": 0.3},
    "below_threshold": {"remask_threshold": 0.3},
    "rcr": {},
    "remdm": {"remask_count": 2},
    "remdm_cap": {"remask_rate": 0.4},
}
OFF = {
    "edit": {"edit_threshold": 1.0},
    "wino": {"remask_threshold": 0.0},
    "below_threshold": {"remask_threshold": 0.0},
    "remdm": {"remask_count": 0},
    "remdm_cap": {"remask_rate": 0.0},
}


# --- the rules in plain Python: of places ``filled`` and ``empty``, and numbers per place; p, born
# and left are logarithms


def edit(s, k, params):
    new = {
        n: s["top"][n]
        for n in s["filled"]
        if s["top"][n] != s["ids"][n] and math.exp(s["best"][n]) > params.edit_threshold
    }
    s["posts"] += not s["empty"]
    again = (
        len(s["empty"]) == k
        and s["posts"] < params.max_post_steps
        and (bool(s["empty"]) or bool(new))
        and params.edit_threshold < 1
    )
    return [], k, new, again


def wino(s, k, params):
    return (
        sorted(
            (n for n in s["filled"] if math.exp(s["left"][n]) < params.remask_threshold),
            key=lambda n: (s["left"][n], n),
        )[: max(k - 1, 0)],
        k,
        {},
        False,
    )


def below_threshold(s, k, params):
    gone = sorted(
        (n for n in s["filled"] if math.exp(s["p"][n]) < params.remask_threshold),
        key=lambda n: (s["p"][n], n),
    )[: max(len(s["empty"]) - 1, 0)]
    gone = [] if s["last"] else gone
    return gone, max(k, len(gone) + 1), {}, False


def rcr(s, k, params):
    def worth(n):
        return (s["p"] if n in s["empty"] else s["born"])[n]

    gone = [
        n
        for n in sorted(s["empty"] + s["filled"], key=lambda n: (worth(n), n))[
            : len(s["empty"]) - k
        ]
        if n in s["filled"]
    ]
    return gone, k + (0 if s["last"] else len(gone)), {}, False


def remdm(s, k, params):
    late = s["r"] >= 7 / 8 or s["since"] + 2 >= s["steps"]
    gone = (
        sorted(s["filled"], key=lambda n: (s["born"][n], n))[
            : min(len(s["empty"]) - k, params.remask_count)
        ]
        if late
        else []
    )
    return gone, k + (0 if s["last"] else len(gone)), {}, False


def remdm_cap(s, k, params):
    left = len(s["empty"]) - k
    chance = min(params.remask_rate, left / max(len(s["filled"]), 1))
    gone = sorted((n for n in s["filled"] if s["u"][n] < chance), key=lambda n: s["u"][n])[:left]
    return gone, k + (0 if s["last"] else len(gone)), {}, False


RULES = {f.__name__: f for f in (edit, wino, below_threshold, rcr, remdm, remdm_cap)}


def wide_in(s, params):
    sure = sorted(
        (n for n in s["empty"] if math.exp(s["p"][n]) >= params.conf_threshold),
        key=lambda n: (-s["p"][n], n),
    )
    return sure[: min(max(7 * len(s["empty"]) // 10, 5), 20)]


# --- in any state


def random_step(
    g: torch.Generator, rows: int = 48, positions: int = 9
) -> tuple[MaskedStep, torch.Tensor]:
    """Draw a step of rows in any state, and how many steps the block of each takes.

    The first 7 positions are the block.
    """
    kind = torch.randint(0, 4, (rows, positions), generator=g).clamp_max(2)  # given, masked, filled
    kind[:, 0] = 1
    sampling = torch.randn(rows, positions, IDS + 1, generator=g).double().mul(2).log_softmax(-1)
    held = torch.where(kind == 1, MASK, torch.randint(0, IDS, (rows, positions), generator=g))
    born, left = (
        torch.randint(1, 9, (rows, positions), generator=g).double() / 9 for _ in range(2)
    )  # some are equal
    row = torch.arange(rows)
    params = masked_iterative(
        remask_threshold=0.4,
        edit_threshold=0.4,
        remask_count=2,
        remask_rate=0.6,
        conf_threshold=0.3,
        max_post_steps=2,
    )
    tokens = torch.where(kind == 1, sampling.argmax(-1), held)
    logp = sampling.gather(-1, tokens[..., None])[..., 0]
    steps_in_block = torch.randint(0, 6, (rows,), generator=g)
    steps = torch.randint(1, 10, (rows,), generator=g)
    progress = ((steps_in_block + 1).double() / steps).clamp_max(1)
    step = masked_step(
        CounterRNG(range(rows)),
        row,
        row,
        SPACE,
        params,
        canvas=held,
        prefilled=kind == 0,
        masked=kind == 1,
        logprobs=sampling,
        committed_logp=born.log(),
        left_out_logp=left.log(),
        open=(torch.arange(positions) < 7).expand(rows, -1),
        proposed_tokens=tokens,
        logp=logp,
        score=logp,
        steps_in_block=steps_in_block,
        progress=progress,
        is_last_step=progress >= 1,
        is_first_step=row % 3 == 0,
    )
    return step, steps


def state_of(step: MaskedStep, i: int, steps: torch.Tensor, noise: torch.Tensor) -> dict:
    """Describe row ``i`` in lists and numbers, as the rules in plain Python read it."""

    def of(x):
        return dict(enumerate(x[i].tolist()))

    def pick(mask):
        return mask[i].nonzero()[:, 0].tolist()

    return {
        "filled": pick(step.remaskable),
        "empty": pick(step.eligible),
        "ids": of(step.canvas),
        "p": of(step.logp),
        "born": of(step.committed_logp),
        "left": of(step.left_out_logp),
        "u": of(noise),
        "top": of(step.logprobs.argmax(-1)),
        "best": of(step.logprobs.amax(-1)),
        "r": float(step.progress[i]),
        "since": int(step.steps_in_block[i]),
        "steps": int(steps[i]),
        "last": bool(step.is_last_step[i]),
        "posts": 0 if step.is_first_step[i] else int(step.memory["edits"][i]),
    }


def random_state(seed: int) -> tuple[MaskedStep, torch.Tensor, list[dict]]:
    """Rows of 9 positions, as the loop has them and as lists, with the number to commit in each."""
    g = torch.Generator().manual_seed(seed)
    step, steps = random_step(g)
    row, size = step.rows, step.eligible.sum(1)
    count = (1 + torch.rand(len(row), generator=g) * size).long().clamp_max(size)
    full = row % 5 == 1  # nothing is left to do in some
    step = changed(step, open=step.open & ~(full[:, None] & step.masked))
    count = torch.where(full, 0, count)
    noise = step.rng.uniform(row, step.positions, "remask", row)
    step.memory["edits"] = torch.randint(0, 3, (len(row),), generator=g)
    return step, count, [state_of(step, i, steps, noise) for i in range(len(row))]


def check_rule(name: str, rule, remasker) -> None:
    for seed in range(8):
        step, count, states = random_state(seed)
        step.memory = dict(step.memory)
        removed, commit, *rest = remasker(step, count)
        replaced = rest[0] if rest else torch.full_like(step.canvas, -1)
        again = rest[1] if rest else torch.zeros_like(step.is_last_step)
        for i, s in enumerate(states):
            gone, k, new, more = rule(s, int(count[i]), step.params)
            assert set(removed[i].nonzero()[:, 0].tolist()) == set(gone)
            if s["empty"]:
                assert int(commit[i]) == k and (s["last"] or k - len(gone) >= 1)
            assert {n: x for n, x in enumerate(replaced[i].tolist()) if x >= 0} == new and bool(
                again[i]
            ) == more
            assert set(gone) | set(new) <= set(s["filled"])


@pytest.mark.parametrize("name", RULES)
def test_in_any_state_it_is_the_rule(name):
    check_rule(name, RULES[name], registry.get("remasker", name))
    with pytest.raises(AssertionError):  # the control: another rule
        check_rule(name, RULES["rcr" if name != "rcr" else "wino"], registry.get("remasker", name))


def test_wide_in_takes_what_is_sure_up_to_a_share():
    """The share matters for more than five places: here the block is 30 long."""
    g = torch.Generator().manual_seed(1)
    sampling = torch.randn(12, 40, 3, generator=g).double().mul(3).log_softmax(-1)
    row, masked = torch.arange(12), torch.rand(12, 40, generator=g) < 0.9
    step = masked_step(
        None,
        row,
        row,
        SPACE,
        masked_iterative(conf_threshold=0.6),
        canvas=masked.long(),
        prefilled=~masked,
        masked=masked,
        logprobs=sampling,
        open=torch.arange(40).expand(12, -1) < row[:, None] * 3 + 4,
        logp=sampling.amax(-1),
    )
    found = registry.get("selector", "wide_in")(step)
    capped = 0
    for i in range(12):
        s = {
            "empty": step.eligible[i].nonzero()[:, 0].tolist(),
            "p": dict(enumerate(step.logp[i].tolist())),
        }
        assert set(found[i].nonzero()[:, 0].tolist()) == set(wide_in(s, step.params))
        capped += len(wide_in(s, step.params)) < sum(math.exp(s["p"][n]) >= 0.6 for n in s["empty"])
    assert 0 < capped < 12


# --- in the loop


def logprobs_of(sampling: SamplingParams, row: int, state: list[int]) -> list[list[float]]:
    """Log-probabilities [T, V] of one canvas, by a forward pass of its own."""

    def logits(prompt):
        return MODEL.forward(torch.tensor([[*prompt, *state]]), POSITIONS)

    raw = SamplingParams(guidance_scale=sampling.guidance_scale)
    return raw(
        logits([31 + row % 3, 40]),
        logits([50, 51 + row % 3]) if sampling.guided else None,
        SPACE.legal,
    )[0].tolist()


def predict(logprobs, state: list[int], block: int, prefilled: set[int], left_out: bool) -> dict:
    """Positions of the block, and what ``logprobs`` (of a canvas) says of them."""
    masked = [n for n in range(POSITIONS) if state[n] == MASK]
    filled = [n for n in range(POSITIONS) if state[n] != MASK and n not in prefilled]
    filled = [n for n in filled if n // SIZE == block]
    p = logprobs(state)
    top = [max(range(len(x)), key=lambda v, x=x: (x[v], -v)) for x in p]
    ids = {n: top[n] if n in masked else state[n] for n in range(POSITIONS)}
    without = {n: [*state[:n], MASK, *state[n + 1 :]] for n in filled} if left_out else {}
    return {
        "filled": filled,
        "empty": [n for n in masked if n // SIZE == block],
        "ids": ids,
        "logprobs": p,
        "p": {n: p[n][ids[n]] for n in range(POSITIONS)},
        "left": {n: logprobs(canvas)[n][state[n]] for n, canvas in without.items()},
        "top": top,
        "best": [x[v] for x, v in zip(p, top, strict=True)],
    }


def choose(sampler, s: dict, wanted: int) -> tuple[list[int], list[int], dict[int, int], bool]:
    """Positions to commit and to mask again, tokens to replace, and the wish for another step."""
    empty = s["empty"]
    order = sorted(empty, key=lambda n: (-s["p"][n], n))
    stay = 0 if s["last"] else max(math.floor(wanted * (1 - s["r"]) + 1e-9), 1)
    chosen = (
        wide_in(s, sampler)
        if sampler.selector == "wide_in"
        else order[: len(empty) - min(stay, len(empty) - 1)]
    )
    chosen = chosen or order[:1]
    gone, k, new, again = RULES[sampler.remasker](s, len(chosen), sampler)
    chosen += [n for n in order if n not in chosen][: k - len(chosen)]
    return chosen, gone, new, again


def decode(
    sampler, sampling: SamplingParams, row: int, hold: bool = True
) -> tuple[list[int], int, int]:
    """One row's tokens, forward passes and computed positions.

    ``hold``: a row stays in a full block as long as its remasker asks.
    """
    state = canvas()[row].tolist()
    prefilled = {n for n in range(POSITIONS) if state[n] != MASK}
    total, rng = POSITIONS - len(prefilled), CounterRNG([31 * row + 7])
    nfe = computed = step = 0
    block, again, s = None, False, {"posts": 0, "born": {}}
    while MASK in state or again:
        masked = [n for n in range(POSITIONS) if state[n] == MASK]
        number = (masked[0] if masked else 0) // SIZE
        if not (again and hold) and number != block:
            block, since, wanted = number, 0, sum(n // SIZE == number for n in masked)
            s["posts"] = 0
        steps = max(1, math.ceil(sampler.steps * wanted / total - 1e-9))
        r = min((since + 1) / steps, 1)
        noise = rng.uniform(
            torch.tensor([0]), torch.arange(POSITIONS)[None], "remask", torch.tensor([step])
        )[0].tolist()
        s |= predict(
            lambda tokens: logprobs_of(sampling, row, tokens),
            state,
            block,
            prefilled,
            left_out=sampler.remasker == "wino",
        )
        s |= {"u": noise, "r": r, "since": since, "steps": steps, "last": r >= 1}
        chosen, gone, new, again = choose(sampler, s, wanted)
        for n, v in ({n: s["ids"][n] for n in chosen} | new).items():
            state[n], s["born"][n] = v, s["logprobs"][n][v]
        for n in gone if r < 1 else []:
            state[n] = MASK
        nfe, step, since = nfe + 1, step + 1, since + 1
        computed += (POSITIONS + 2) * (2 if sampling.guided else 1) * (1 + len(s["left"]))
    return state, nfe, computed


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(guidance_scale=1.5)], ids=["plain", "guided"]
)
@pytest.mark.parametrize("name", RULES)
@pytest.mark.thinned(3)
def test_decoding_is_that_of_the_reference(name, sampling):
    """Tokens, calls and places, in blocks, of rows that are given a part, all and nothing; the off
    switch is the control."""
    sampler = masked_iterative(steps=11, remasker=name, **(GREEDY | PARAMETERS[name]))
    rows = [0, 1, 4] if sampling.guided else range(ROWS)
    out = run(sampler, sampling)
    for row in rows:
        assert (
            out.tokens[row].tolist(),
            out.stats[row].nfe,
            out.stats[row].tokens_computed,
        ) == decode(sampler, sampling, row)
    plain = run(masked_iterative(steps=11, **(GREEDY | PARAMETERS[name])), sampling)
    assert not torch.equal(out.tokens, plain.tokens)


@pytest.mark.parametrize("name", OFF)
def test_switched_off_it_is_none(name):
    def sampler(**said):
        return masked_iterative(steps=11, **(GREEDY | PARAMETERS[name] | said))

    off, plain = run(sampler(remasker=name, **OFF[name])), run(sampler())
    assert torch.equal(off.tokens, plain.tokens) and [s.nfe for s in off.stats] == [
        s.nfe for s in plain.stats
    ]


def test_a_row_stays_in_its_block_while_it_is_edited():
    """The control is a loop that lets it go on: then other places are edited."""
    sampler = masked_iterative(steps=11, remasker="edit", **(GREEDY | PARAMETERS["edit"]))
    out = run(sampler, trace=True)
    assert out.tokens[0].tolist() != decode(sampler, SamplingParams(), 0, hold=False)[0]
    for trace in out.traces:
        blocks = [{n // SIZE for n in step.committed} for step in trace if step.committed]
        assert all(len(b) == 1 for b in blocks) and blocks == sorted(blocks, key=min)


def test_an_edited_place_is_removed_and_committed_in_one_step():
    out = run(
        masked_iterative(steps=11, remasker="edit", **(GREEDY | PARAMETERS["edit"])), trace=True
    )
    edits = 0
    for row, trace in enumerate(out.traces):
        state, late = (dict(enumerate(canvas()[row].tolist())) for _ in range(2))
        for step in trace:
            edits += len(step.removed)
            assert set(step.removed) <= set(step.committed) and all(
                step.committed[n] != state[n] for n in step.removed
            )
            state |= dict.fromkeys(step.removed, MASK)
            state |= step.committed
            late |= step.committed
            late |= dict.fromkeys(step.removed, MASK)
        assert list(state.values()) == out.tokens[row].tolist()
    assert (
        edits > 0 and MASK in late.values()
    )  # the control: the other way round, a trace says something else


def test_calls_after_the_last_mask_are_bounded_and_end_with_the_edits():
    calls = {}
    for most in (0, 1, 4):
        params = GREEDY | {"blocks": "whole", "edit_threshold": 0.3}
        trace = run(
            masked_iterative(steps=5, remasker="edit", max_post_steps=most, **params), trace=True
        ).traces[0]
        calls[most] = len(trace)
        assert len(trace) <= 5 + most and all(
            len(s.committed) == len(s.removed) > 0 for s in trace[5:-1]
        )
    assert calls[0] == 5 < calls[1] == 6 < calls[4]


def test_rows_with_shadows_are_the_same_alone():
    sampler = masked_iterative(steps=11, remasker="wino", **(GREEDY | PARAMETERS["wino"]))
    whole = run(sampler, trace=True)
    assert sum(len(step.removed) for trace in whole.traces for step in trace) > 0
    for row in (0, 4):
        alone = run(sampler, rows=[row])
        assert torch.equal(alone.tokens[0], whole.tokens[row])
        assert (alone.stats[0].nfe, alone.stats[0].tokens_computed) == (
            whole.stats[row].nfe,
            whole.stats[row].tokens_computed,
        )


def test_control_a_shadow_that_sees_itself_is_noticed(monkeypatch):
    """WINO without leaving anything out: what a place says of itself."""

    def sees_itself(step, count):
        step = changed(step, left_out_logp=step.logp)
        return registry.get("remasker", "wino")(step, count)

    monkeypatch.setitem(registry._kinds["remasker"], "broken", sees_itself)

    def sampler(name):
        return masked_iterative(steps=11, remasker=name, **(GREEDY | PARAMETERS["wino"]))

    assert (
        run(sampler("broken")).tokens[0].tolist() != decode(sampler("wino"), SamplingParams(), 0)[0]
    )


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"remask_rate": 1.5}, "sampler.remask_rate is 1.5; expected a number between 0 and 1"),
        ({"remask_count": -1}, "sampler.remask_count is -1; expected an integer of at least 0"),
        (
            {"max_post_steps": 2.0},
            "sampler.max_post_steps is 2.0; expected an integer of at least 0",
        ),
    ],
)
def test_mistakes_are_named(params, said):
    with pytest.raises(GenError, match=said):
        masked_iterative(**params)
