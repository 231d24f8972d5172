"""Lossless decoding of masked models: FreeDave gives the tokens of one position per step, exact
speculation their distribution, both in fewer calls.

References are plain Python and know nothing of chains. Distributions are compared exactly
(``enumeration``): production code on every outcome of its draws. Each control breaks one rule and
must miss by more than 1e-3, or give other tokens."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import pytest
import torch
from enumeration import distance, enumerate_distribution, hashed
from tabular import PROMPTS, TabularMasked, masked_target, space_of
from torch import Tensor

from gen.contracts.layout_orders import halton_cells
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.core.stats import SampleOutput
from gen.core.token_space import TokenSpace
from gen.models.adapters.base import ModelAdapter
from gen.samplers.masked.chains import chain as marginal_orders
from gen.samplers.verifiers import base as verifiers

EXACT, WRONG = 1e-12, 1e-3
CONTEXTS = len(PROMPTS)
SAMPLING_CASES = {
    "plain": SamplingParams(),
    "greedy": SamplingParams(temperature=0.0),
    "guided": SamplingParams(guidance_scale=2.0),
    "combined": SamplingParams(temperature=0.7, top_k=3, guidance_scale=1.5),
}
ORDERS = ("confidence", "margin", "entropy", "random", "raster", "halton")
freedave = registry.get("sampler", "freedave")
exact = registry.get("sampler", "exact_speculative")


class Coupled(ModelAdapter):
    """A masked model whose places pull at each other a little: z_i = a_i + sum_j w(j, x_j)_i over
    the known places j. The order that its distributions give changes with what is known, but not
    altogether. Every condition has an a and a w of its own."""

    device, dtype = torch.device("cpu"), torch.float64

    def __init__(self, space: TokenSpace, coupling: float = 0.5, seed: int = 0):
        normal = torch.Generator().manual_seed(seed)
        self.vocab_size, self.mask, positions = space.vocab_size, space.mask_token_id, space.length
        self.alone = 1.5 * torch.randn(
            16, positions, self.vocab_size, dtype=torch.float64, generator=normal
        )
        self.pull = coupling * torch.randn(
            16,
            positions,
            self.vocab_size,
            positions,
            self.vocab_size,
            dtype=torch.float64,
            generator=normal,
        )
        self.pull[:, :, self.mask] = 0
        self.calls: list[int] = []

    def forward(self, ids: Tensor, canvas_length: int) -> Tensor:
        self.calls.append(len(ids))
        canvas, condition = ids[:, -canvas_length:], (ids[:, :1] * 5 + ids[:, 1:2]) % 16
        return self.alone[condition[:, 0]] + self.pull[
            condition, torch.arange(canvas_length), canvas
        ].sum(1)


def models(space: TokenSpace):
    """One that changes its mind altogether with every id, and one that does so a little. Rows have
    conditions, so models, of their own."""
    return TabularMasked(space.vocab_size, low=0.0, spread=1.5), Coupled(space, 0.2)


# --- the references


def distributions_at(
    model, space: TokenSpace, sampling: SamplingParams, context: int, canvas, raw: bool
) -> tuple[Tensor, Tensor]:
    """The final distribution, and the one that orders look at: [T, V] each."""

    def ask(*prompt):
        return model.forward(torch.tensor([[*prompt, *canvas]]), space.length)[0]

    branches = ask(31 + context, 40), ask(50, 51 + context) if sampling.guided else None
    final = sampling(*branches, space.legal)
    return final, SamplingParams(guidance_scale=sampling.guidance_scale)(
        *branches, space.legal
    ) if raw else final


def score(order: str, judged: Tensor, space: TokenSpace, position: int, number) -> float:
    p = sorted(judged[position].exp().tolist(), reverse=True)
    return {
        "confidence": lambda: p[0],
        "margin": lambda: p[0] - p[1],
        "entropy": lambda: math.fsum(x * math.log(x) for x in p if x > 0),
        "random": lambda: number(position),
        "raster": lambda: -position,
        "halton": lambda: -halton_cells(tuple(space.grid)).index(position),
    }[order]()


def turn(order: str, judged: Tensor, space: TokenSpace, canvas, number, k: int = 1) -> list[int]:
    empty = [n for n in range(space.length) if canvas[n] == space.mask_token_id]
    return sorted(empty, key=lambda n: (-score(order, judged, space, n, number), n))[:k]


def put(canvas, position: int, token: int) -> tuple[int, ...]:
    return (*canvas[:position], token, *canvas[position + 1 :])


def ordered_distribution(
    model, space: TokenSpace, sampling: SamplingParams, context: int, order: str, raw: bool = True
) -> dict[tuple[int, ...], float]:
    """The distribution of filling one place after the other, each time the one whose turn it is."""

    def number(n):
        return hashed(context, n, "order", None)

    found: dict[tuple[int, ...], float] = defaultdict(float)
    todo = [((space.mask_token_id,) * space.length, 1.0)]
    while todo:
        canvas, mass = todo.pop()
        if space.mask_token_id not in canvas:
            found[canvas] += mass
            continue
        final, judged = distributions_at(model, space, sampling, context, canvas, raw)
        (position,) = turn(order, judged, space, canvas, number)
        todo += [
            (put(canvas, position, v), mass * p)
            for v, p in enumerate(final[position].exp().tolist())
            if p > 0
        ]
    return dict(found)


def static(
    sampler, model, space: TokenSpace, sampling: SamplingParams, context: int, key: int, canvas
) -> list[int]:
    """Static decoding of one row: k places per call, with the noise of their places."""
    rng, canvas = CounterRNG([key]), tuple(canvas)
    uniform = rng.uniform(torch.tensor([0]), torch.arange(space.length)[None], "order", None)[
        0
    ].tolist()
    while space.mask_token_id in canvas:
        final, judged = distributions_at(
            model, space, sampling, context, canvas, sampler.confidence_on == "raw"
        )
        for n in turn(
            sampler.order,
            judged,
            space,
            canvas,
            uniform.__getitem__,
            getattr(sampler, "tokens_per_step", 1),
        ):
            at = torch.tensor([[n]])
            canvas = put(
                canvas,
                n,
                int(
                    rng.categorical(
                        final[None, n : n + 1], torch.tensor([0]), at, "token", None, at == n
                    )
                ),
            )
    return list(canvas)


# --- FreeDave: the same tokens


SPACE = space_of((2, 5), 5, masked=True)
ROWS = 18


def canvas_of(space: TokenSpace = SPACE) -> Tensor:
    """Rows with everything, half, one, nothing and a few places to fill, again and again."""
    out = (torch.arange(space.length) * 3 % 5).repeat(ROWS, 1)
    out[::3] = space.mask_token_id
    out[1::6, ::2], out[2::6, 7], out[4::6, 4:] = (
        space.mask_token_id,
        space.mask_token_id,
        space.mask_token_id,
    )
    return out


def run(
    sampler,
    model,
    sampling: SamplingParams,
    rows=range(ROWS),
    canvas: Tensor | None = None,
    **kwargs,
) -> SampleOutput:
    canvas = canvas_of() if canvas is None else canvas
    target = masked_target(model, SPACE, sampling, list(rows))
    return sampler(
        target, CounterRNG([7919 * r + 5 for r in rows]), canvas=canvas[list(rows)], **kwargs
    )


@pytest.mark.parametrize(
    ("order", "sampling"),
    [
        *itertools.product(ORDERS, ("plain", "greedy")),
        ("margin", "guided"),
        ("confidence", "combined"),
    ],
)
@pytest.mark.thinned(6)
def test_freedave_gives_the_tokens_of_static_decoding_in_no_more_calls(order, sampling):
    calls, fewer, sampling = 0, 0, SAMPLING_CASES[sampling]
    for model in models(SPACE):
        plain = freedave(num_drafts=1, order=order)
        expected = run(plain, model, sampling)
        wanted = (canvas_of() == SPACE.mask_token_id).sum(1).tolist()
        assert [s.nfe for s in expected.stats] == wanted
        for row in (1, 4, 15):
            assert expected.tokens[row].tolist() == static(
                plain, model, SPACE, sampling, row, 7919 * row + 5, canvas_of()[row].tolist()
            )
        for drafts in (2, 3, 8):
            found = run(freedave(num_drafts=drafts, order=order), model, sampling)
            assert torch.equal(found.tokens, expected.tokens)
            assert all(a.nfe <= b.nfe for a, b in zip(found.stats, expected.stats, strict=True))
            calls, fewer = calls + sum(wanted), fewer + sum(s.nfe for s in found.stats)
    assert fewer < calls


@pytest.mark.parametrize("k", [2, 3, 20])
def test_several_places_per_step_are_those_of_static_decoding_too(k):
    for model, sampling in itertools.product(
        models(SPACE), (SAMPLING_CASES["plain"], SAMPLING_CASES["greedy"])
    ):
        sampler = freedave(num_drafts=3, tokens_per_step=k)
        assert sampler.guarantee == "approximate" and freedave().guarantee == "same_tokens"
        found = run(sampler, model, sampling)
        for row, stats in list(enumerate(found.stats))[:5]:
            assert found.tokens[row].tolist() == static(
                sampler, model, SPACE, sampling, row, 7919 * row + 5, canvas_of()[row].tolist()
            )
            assert stats.nfe <= -(-stats.tokens // k)


def test_drafts_save_most_where_places_hardly_depend_on_each_other():
    calls = {
        c: sum(
            s.nfe
            for s in run(freedave(num_drafts=8), Coupled(SPACE, c), SAMPLING_CASES["plain"]).stats
        )
        for c in (0.0, 0.1, 2.0)
    }
    assert calls[0.0] < calls[0.1] < calls[2.0]
    # nothing to learn from the first call on: it fills one place, and all calls after it eight
    assert calls[0.0] == sum(
        1 + math.ceil((w - 1) / 8)
        for w in (canvas_of() == SPACE.mask_token_id).sum(1).tolist()
        if w
    )


def test_control_noise_of_the_step_costs_calls(monkeypatch):
    """Drafts with noise of their own are right by chance alone."""
    usual = sum(
        s.nfe for s in run(freedave(), Coupled(SPACE, 0.1), SamplingParams(temperature=2.0)).stats
    )
    monkeypatch.setattr(
        freedave,
        "draft",
        lambda self, step, sampling: step.categorical(sampling, "draft", step.valid),
    )
    found = run(freedave(), Coupled(SPACE, 0.1), SamplingParams(temperature=2.0))
    assert sum(s.nfe for s in found.stats) > 1.2 * usual
    assert torch.equal(
        found.tokens,
        run(freedave(num_drafts=1), Coupled(SPACE, 0.1), SamplingParams(temperature=2.0)).tokens,
    )


def test_control_without_the_order_check_the_tokens_are_others(monkeypatch):
    model = Coupled(SPACE, 1.0)
    expected = run(freedave(num_drafts=1), model, SAMPLING_CASES["greedy"]).tokens
    monkeypatch.setattr(
        marginal_orders,
        "same_positions",
        lambda turn, positions: torch.ones(positions.shape[:-1], dtype=torch.bool),
    )
    assert not torch.equal(
        run(freedave(num_drafts=8), model, SAMPLING_CASES["greedy"]).tokens, expected
    )


# --- exact speculation, and what both have


@pytest.mark.parametrize(
    ("order", "verifier"), [("confidence", "token"), ("entropy", "block"), ("random", "token")]
)
def test_at_temperature_zero_exact_speculation_is_freedave(order, verifier):
    for model in models(SPACE):
        one = run(freedave(order=order), model, SAMPLING_CASES["greedy"])
        other = run(exact(order=order, verifier=verifier), model, SAMPLING_CASES["greedy"])
        assert torch.equal(one.tokens, other.tokens) and [s.nfe for s in one.stats] == [
            s.nfe for s in other.stats
        ]


def test_a_single_draft_is_sequential_decoding():
    for model in models(SPACE):
        one, other = (
            run(s(num_drafts=1), model, SAMPLING_CASES["combined"]) for s in (freedave, exact)
        )
        assert torch.equal(one.tokens, other.tokens) and all(
            s.nfe == s.tokens and not s.acceptance_histogram for s in other.stats
        )


@pytest.mark.parametrize(
    "sampler",
    [freedave(), exact(), exact(verifier="block", order="random"), freedave(tokens_per_step=3)],
)
def test_a_row_is_the_same_alone_and_in_the_batch(sampler):
    for model in models(SPACE):
        whole = run(sampler, model, SAMPLING_CASES["combined"])
        for rows in ([4], [16, 3, 7]):
            part = run(sampler, model, SAMPLING_CASES["combined"], rows)
            assert torch.equal(part.tokens, whole.tokens[rows])
            for a, b in zip(part.stats, [whole.stats[r] for r in rows], strict=True):
                assert (a.nfe, a.tokens_computed, a.acceptance_histogram) == (
                    b.nfe,
                    b.tokens_computed,
                    b.acceptance_histogram,
                )


@pytest.mark.parametrize("drafts", [1, 4, 9])
@pytest.mark.parametrize("make", [freedave, exact])
def test_every_call_fills_a_place_and_no_more_than_it_has_canvases(make, drafts):
    """One forward call for all rows and their drafts; traces, statistics, reports and calls
    agree."""
    for model in (Coupled(SPACE, 0.2), Coupled(SPACE, 2.0)):
        reports: list[dict] = []
        model.calls.clear()
        out = run(
            make(num_drafts=drafts), model, SamplingParams(), trace=True, callback=reports.append
        )
        canvas, positions = canvas_of(), 2 + SPACE.length
        assert torch.equal(
            out.tokens[canvas != SPACE.mask_token_id], canvas[canvas != SPACE.mask_token_id]
        )
        assert len(model.calls) == len(reports) == max(s.nfe for s in out.stats)
        assert sum(model.calls) * positions == sum(s.tokens_computed for s in out.stats)
        assert [r["step"] for r in reports] == list(range(1, len(reports) + 1)) and reports[-1][
            "done"
        ] == canvas.numel()
        assert torch.equal(reports[-1]["tokens"], out.tokens)
        for row, (trace, stats) in enumerate(zip(out.traces, out.stats, strict=True)):
            state = canvas[row].clone()
            for step in trace:
                assert step.window == (state == SPACE.mask_token_id).nonzero()[:, 0].tolist()
                assert (
                    1 <= len(step.committed) <= drafts
                    and len(step.committed) == len(step.accepted) + 1
                )
                assert (
                    set(step.accepted) < set(step.committed) <= set(step.window)
                    and not step.removed
                )
                state[list(step.committed)] = torch.tensor(list(step.committed.values()))
            assert torch.equal(state, out.tokens[row]) and len(trace) == stats.nfe <= stats.tokens
            assert sum(n * k for k, n in enumerate(stats.acceptance_histogram)) == sum(
                len(s.accepted) for s in trace
            )


def test_confidence_is_of_the_raw_distribution_unless_the_final_one_is_asked_for():
    """At temperature 0 the final distribution is equally sure of every place, so that the first is
    next."""
    model, sampling = Coupled(SPACE, 1.0), SAMPLING_CASES["greedy"]
    raw, shaped, raster = (
        run(s, model, sampling).tokens
        for s in (freedave(), freedave(confidence_on="shaped"), freedave(order="raster"))
    )
    assert torch.equal(shaped, raster) and not torch.equal(raw, raster)
    assert torch.equal(run(freedave(order="top"), model, sampling).tokens, raw)


# --- exact distributions


def error(sampler, sampling: SamplingParams, model, space: TokenSpace, contexts: int = 1) -> float:
    """The largest error of a probability, over contexts that are decoded in one ragged batch."""
    found = enumerate_distribution(
        lambda rng, context: sampler(masked_target(model, space, sampling, context), rng).tokens,
        contexts,
    )
    expected = [
        ordered_distribution(
            model, space, sampling, c, sampler.order, sampler.confidence_on == "raw"
        )
        for c in range(contexts)
    ]
    assert all(len(x) > 1 and max(x.values()) < 0.95 for x in expected), (
        "the distribution is too simple to test anything"
    )
    return max(distance(a, b) for a, b in zip(found, expected, strict=True))


FOUR, THREE = space_of((2, 2), 3, masked=True), space_of((3,), 3, masked=True)
SHAPED = SamplingParams(temperature=0.7, top_k=2, guidance_scale=2.0)
# every rule matters in them: order check and residual, as the controls show
MODEL_FOUR, MODEL_THREE = Coupled(FOUR, 1.0, seed=1), Coupled(THREE, 1.0, seed=1)


@pytest.mark.parametrize(
    ("order", "verifier"),
    [*((order, "token") for order in ORDERS), ("confidence", "block"), ("random", "block")],
)
@pytest.mark.thinned(3)
def test_exact_speculation_has_the_distribution_of_sequential_decoding(order, verifier):
    assert (
        error(
            exact(num_drafts=3, order=order, verifier=verifier), SamplingParams(), MODEL_FOUR, FOUR
        )
        < EXACT
    )


@pytest.mark.parametrize("order", ["confidence", "entropy", "random"])
@pytest.mark.parametrize("make", [exact, freedave])
def test_distributions_of_models_that_change_their_mind_and_of_filtered_distributions(make, order):
    assert (
        error(
            make(num_drafts=3, order=order),
            SamplingParams(),
            TabularMasked(4, low=0.0, spread=1.5),
            THREE,
            CONTEXTS,
        )
        < EXACT
    )
    assert (
        error(make(num_drafts=3, order=order, confidence_on="shaped"), SHAPED, MODEL_THREE, THREE)
        < EXACT
    )


def test_assd_is_exact_in_random_order():
    sampler, _ = resolve_sampler({"name": "assd", "num_drafts": 3})
    assert sampler.order == "random" and sampler.guarantee == "same_distribution"
    assert error(sampler, SamplingParams(), MODEL_FOUR, FOUR, CONTEXTS) < EXACT


@pytest.mark.parametrize("order", ["confidence", "margin", "random"])
def test_freedave_has_the_distribution_of_sequential_decoding(order):
    assert error(freedave(num_drafts=2, order=order), SamplingParams(), MODEL_FOUR, FOUR) < EXACT


# --- controls


@pytest.mark.parametrize("order", ["confidence", "margin", "entropy"])
def test_control_no_order_check_loses_the_distribution(monkeypatch, order):
    monkeypatch.setattr(
        marginal_orders,
        "same_positions",
        lambda turn, positions: torch.ones(positions.shape[:-1], dtype=torch.bool),
    )
    assert error(exact(num_drafts=2, order=order), SamplingParams(), MODEL_FOUR, FOUR) > WRONG
    assert (
        error(exact(num_drafts=2, order="raster"), SamplingParams(), MODEL_THREE, THREE) < EXACT
    )  # where no order can change there is nothing to check


@pytest.mark.parametrize("order", ["confidence", "raster"])
def test_control_the_distribution_in_place_of_the_residual(monkeypatch, order):
    monkeypatch.setattr(verifiers.Token, "residual", lambda self, proposal, logp: logp)
    assert error(exact(num_drafts=3, order=order), SamplingParams(), MODEL_THREE, THREE) > WRONG


def test_control_all_drafts_kept_is_parallel_decoding(monkeypatch):
    monkeypatch.setattr(
        verifiers.Token,
        "chance",
        lambda self, proposal, logp: torch.ones(proposal.tokens.shape, dtype=torch.float64),
    )
    assert error(exact(num_drafts=3, order="raster"), SamplingParams(), MODEL_THREE, THREE) > WRONG


def sampled_distribution(
    model, space: TokenSpace, sampling: SamplingParams, context: int
) -> dict[tuple[int, ...], float]:
    """One place per step, the one whose id, drawn anew at every step, is the most likely."""
    found: dict[tuple[int, ...], float] = defaultdict(float)
    todo = [((space.mask_token_id,) * space.length, 1.0)]
    while todo:
        canvas, mass = todo.pop()
        empty = [n for n in range(space.length) if canvas[n] == space.mask_token_id]
        if not empty:
            found[canvas] += mass
            continue
        p = distributions_at(model, space, sampling, context, canvas, raw=False)[0].exp().tolist()
        for ids in itertools.product(range(space.mask_token_id), repeat=len(empty)):
            best = max(zip(empty, ids, strict=True), key=lambda x: (p[x[0]][x[1]], -x[0]))
            todo.append(
                (
                    put(canvas, *best),
                    mass * math.prod(p[n][v] for n, v in zip(empty, ids, strict=True)),
                )
            )
    return dict(found)


def test_control_noise_of_the_place_with_an_order_that_looks_at_ids(monkeypatch):
    """Even one place per call, without drafts: what is left behind was passed over because of its
    noise, which is asked again."""

    def looks(step):
        ids = step.rng.categorical(
            step.logprobs, step.rows, step.positions, "token", None, step.masked
        )
        return step.logprobs.gather(-1, ids[..., None])[..., 0]

    space = space_of((2,), 3, masked=True)
    model, sampler = Coupled(space), freedave(num_drafts=1)
    assert error(sampler, SamplingParams(), model, space) < EXACT
    monkeypatch.setitem(registry._kinds["order"], "top", looks)
    found = enumerate_distribution(
        lambda rng, context: (
            sampler(masked_target(model, space, SamplingParams(), context), rng).tokens
        ),
        CONTEXTS,
    )
    assert (
        max(
            distance(a, sampled_distribution(model, space, SamplingParams(), c))
            for c, a in enumerate(found)
        )
        > WRONG
    )


# --- what is refused


@pytest.mark.parametrize("name", ["freedave", "exact_speculative", "assd"])
def test_what_cannot_be_done_is_said(name):
    for param, value, said in (
        ("num_drafts", 0, "integer of at least 1"),
        ("num_drafts", True, "integer of at least 1"),
        ("order", "streams", "tokens drawn"),
        ("order", "marign", "Did you mean 'margin'"),
        ("confidence_on", "sampling", "raw or shaped"),
    ):
        with pytest.raises(GenError, match=said):
            resolve_sampler({"name": name, param: value})
    with pytest.raises(GenError, match="makes latents"):
        sampler = resolve_sampler(name)[0]
        target = masked_target(Coupled(SPACE), SPACE, SamplingParams(), [0])
        target.space = TokenSpace.latents((3, 4), 2)
        sampler(target, CounterRNG([1]))


def test_parameters_of_one_sampler_alone():
    with pytest.raises(GenError, match="token"):
        exact(verifier="typical")
    with pytest.raises(GenError, match="tokens_per_step is 0"):
        freedave(tokens_per_step=0)
