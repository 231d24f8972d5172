"""Distributions that look back: what may stand at a place depends on the ids before it, and a row
may end early.

The toy language is one of exact length: ids 0, 1, 2 are 1, 2, 3 long, they must add up to a given
total, and id 3 is the end. What samplers make of it is computed exactly, on every outcome of their
draws, and held against the distribution written down from its definition. The controls break one
part each and must miss by more than 1e-3."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from block_bench import target_of as block_target
from constrained import SPACES, ExactLength, ends_at, exact_length, obeys, sampling_of, with_end
from constraint_bench import (
    COMBINED,
    CONTEXTS,
    COUPLINGS,
    EXACT,
    INITS,
    LONG,
    SAMPLING_CASES,
    WRONG,
    autoregressive,
    error,
    jacobi,
    models,
    run,
    speculative,
)
from enumeration import distance, enumerate_distribution
from tabular import (
    EMPTY,
    PROMPTS,
    TabularBlocks,
    TabularCausal,
    TabularMasked,
    causal_target,
    masked_target,
)

from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG, OffsetRNG
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.targets.causal import CausalTarget
from gen.testing.specs import SPECS

# --- the distribution


@pytest.mark.parametrize("sampling", SAMPLING_CASES.values(), ids=SAMPLING_CASES)
@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_distribution_of_autoregression(space, sampling):
    assert error(autoregressive(), space, sampling) < EXACT


@pytest.mark.parametrize("window", [1, 2, 3, 4])
@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.thinned(9)
def test_distribution_of_jacobi_for_every_window(coupling, window):
    spaces = (
        (exact_length(4, 4), with_end(4))
        if window < 3
        else (exact_length(4, 4, ids=2), with_end(4, ids=2))
    )
    for space in spaces:
        assert error(jacobi(coupling=coupling, window=window), space) < EXACT


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.thinned(9)
def test_distribution_of_jacobi_for_every_initialiser(coupling, init):
    """What enters the window knows nothing of the constraint, so most of it is illegal."""
    assert error(jacobi(coupling=coupling, window=3, init=init), exact_length(3, 3)) < EXACT


@pytest.mark.parametrize("sampling", SAMPLING_CASES.values(), ids=SAMPLING_CASES)
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_distribution_of_jacobi_for_every_distribution(coupling, sampling):
    assert error(jacobi(coupling=coupling, window=3), exact_length(3, 3), sampling) < EXACT


@pytest.mark.parametrize("told", [True, False], ids=["drafts obey", "drafts do not"])
@pytest.mark.parametrize(
    "policy",
    [
        n
        for n, p in registry.table("length_policy").items()
        if not (p.needs_same_tokens or p.needs_weights)
    ],
)
@pytest.mark.parametrize("verifier", ["token", "block"])
@pytest.mark.thinned(9)
def test_distribution_of_speculative_decoding(verifier, policy, told):
    """Also with a draft model that knows nothing of the constraint."""
    size = 4 if told and policy == "constant" else 3
    for space in (exact_length(size, size), with_end(size)):
        draft_space = None if told else replace(space, constraint=None, eos_token_id=None)
        sampler = speculative(verifier=verifier, policy=policy, num_speculative_tokens=size - 1)
        assert error(sampler, space, draft_space=draft_space) < EXACT


def test_distribution_of_guided_speculative_decoding():
    for guidance in (None, 1.0):
        sampler = speculative(num_speculative_tokens=2, draft_guidance=guidance)
        assert error(sampler, exact_length(4, 4), SAMPLING_CASES["guided"]) < EXACT


def test_drafts_that_are_all_illegal_leave_a_distribution():
    """Numbers, and the smallest legal set, after whatever was drafted; and the second call forgets
    what the first one drafted."""
    space = exact_length(4, 4)
    target = causal_target(models(space, SamplingParams())[0], space, COMBINED, [0, 1])
    at = torch.arange(4).expand(2, 4)
    sampling = target.predict(torch.tensor([[0, 2, 2, 2], [0, 3, 0, 3]]), at).logprobs
    assert not bool(sampling.isnan().any())
    assert torch.allclose(sampling.exp().sum(-1), torch.ones(2, 4, dtype=torch.float64))
    assert sampling[0, 2:].argmax(-1).tolist() == [3, 3] and sampling[1, 1:].argmax(
        -1
    ).tolist() == [3, 3, 3]
    sampling = target.predict(torch.tensor([[0, 0, 0, 0]] * 2), at).logprobs
    assert torch.equal(target.allowed[0], target.allowed[1])
    assert target.allowed[0].sum(-1).tolist() == [3, 3, 2, 1] and bool(
        (sampling.isfinite().sum(-1) > 0).all()
    )


# --- controls of the distribution


def stale(self, tokens, positions, parents=None, _true=CausalTarget._note):
    """Only the last committed id is noted, not the drafts after it."""
    _true(self, tokens[:, :1], positions[:, :1])


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_control_a_history_without_the_drafts(monkeypatch, coupling):
    monkeypatch.setattr(CausalTarget, "_note", stale)
    assert error(jacobi(coupling=coupling, window=3), exact_length(3, 3)) > WRONG
    assert error(autoregressive(), exact_length(3, 3)) < EXACT  # it drafts nothing


def test_control_a_history_that_keeps_its_first_drafts(monkeypatch):
    """Rejected drafts must be overwritten."""

    def note(self, tokens, positions, parents=None, _true=CausalTarget._note):
        fresh = torch.where(
            self.history.gather(1, positions) == self.blank_id,
            tokens,
            self.history.gather(1, positions),
        )
        _true(self, fresh, positions)

    def init(self, *args, _true=CausalTarget.__init__, **kwargs):
        _true(self, *args, **kwargs)
        self.blank_id = (
            self.space.eos_token_id
        )  # what no history of these rows holds before its end
        self.history[:] = self.blank_id

    monkeypatch.setattr(CausalTarget, "__init__", init)
    assert (
        error(jacobi(window=3), exact_length(3, 3)) < EXACT
    )  # what the slots start with is never looked at
    monkeypatch.setattr(CausalTarget, "_note", note)
    monkeypatch.setattr(CausalTarget, "refuse_illegal", lambda *a: None)
    assert error(jacobi(window=3), exact_length(3, 3)) > WRONG


def test_control_a_history_that_rows_do_not_leave(monkeypatch):
    """Rows that stay must keep their own history: here they are given that of the rows before
    them."""

    def keep(self, rows, _true=CausalTarget.keep):
        mine = self.history
        _true(self, rows)
        self.history = mine[: self.rows].clone()

    monkeypatch.setattr(CausalTarget, "keep", keep)
    assert error(autoregressive(), exact_length(4, 4)) > WRONG


def test_control_without_the_constraint_sequences_disobey(monkeypatch):
    assert disobedient(autoregressive()) == 0
    monkeypatch.setattr(
        TokenSpace, "apply_constraint", lambda self, legal, history, positions: legal
    )
    assert disobedient(autoregressive()) > 0


# --- what comes out

CAUSAL = [
    n
    for kind in ("sampler", "preset")
    for n in registry.table(kind)
    if n in SPECS and resolve_sampler(n)[0].protocol == "causal"
]


def disobedient(sampler) -> int:
    return sum(not obeys(LONG, ids) for ids in run(sampler).tokens.tolist())


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.thinned(9)
def test_every_causal_sampler_obeys_or_refuses(name):
    """Relaxed rules credit a draft with the mass of other ids, so some of them would pass one that
    is not legal."""
    sampler, sampling = resolve_sampler(SPECS[name])
    space = replace(LONG, codebook=torch.arange(4.0)[:, None])
    try:
        out = run(sampler, space, replace(sampling, guidance_scale=2.0))
    except GenError as refusal:
        assert sampler.guarantee == "approximate" and "constraint" in str(refusal)
        return
    assert all(obeys(LONG, ids) for ids in out.tokens.tolist())
    assert (
        sampling.temperature == 0
        or sampler.guarantee == "approximate"
        or len(out.tokens.unique(dim=0)) > 5
    )
    for row in (0, 7):  # alone and in the batch
        alone = run(sampler, space, replace(sampling, guidance_scale=2.0), rows=[row])
        assert (
            torch.equal(alone.tokens[0], out.tokens[row])
            and alone.stats[0].nfe == out.stats[row].nfe
        )


@pytest.mark.parametrize("window", [1, 3, 12])
@pytest.mark.parametrize("init", INITS)
def test_gumbel_gives_the_tokens_of_autoregression(window, init):
    expected = run(autoregressive())
    assert torch.equal(
        run(jacobi(coupling="gumbel", window=window, init=init)).tokens, expected.tokens
    )


# --- continuing what is there


@pytest.mark.parametrize(
    "sampler",
    [autoregressive(), jacobi(window=3), jacobi(coupling="fresh", window=3)],
    ids=["ar", "gumbel", "fresh"],
)
def test_continuation_has_the_distribution_of_what_follows(sampler):
    space, sampling, given = exact_length(6, 6), SAMPLING_CASES["guided"], torch.tensor([0, 1])
    model = models(space, sampling)[0]
    rest = space.suffix(given[:1]).suffix(given[1:])
    assert rest.length == 4 and rest.prefix.tolist() == [0, 1]
    known = [[(*p, 0, 1) for p in prompts] for prompts in (PROMPTS, EMPTY)]
    found = enumerate_distribution(
        lambda rng, c: sampler(causal_target(model, rest, sampling, c, *known), rng).tokens,
        CONTEXTS,
    )
    for context, one in enumerate(found):
        assert (
            len(one) > 2
            and distance(one, sampling_of(model, space, sampling, context, (0, 1))) < EXACT
        )
    forgetful = replace(rest, prefix=None)  # the control: the constraint counts from zero
    found = enumerate_distribution(
        lambda rng, c: sampler(causal_target(model, forgetful, sampling, c, *known), rng).tokens,
        CONTEXTS,
    )
    assert distance(found[0], sampling_of(model, space, sampling, 0, (0, 1))) > WRONG


def test_a_row_continued_from_its_own_beginning_is_the_same_row():
    space, sampling = LONG, SAMPLING_CASES["guided"]
    model = models(space, sampling)[0]
    whole = jacobi(window=4)(causal_target(model, space, sampling, [1]), CounterRNG([9])).tokens[0]
    for k in range(1, ends_at(whole.tolist(), 3)):
        given = whole[:k]
        prompts = [[(*p, *given.tolist()) for p in x] for x in (PROMPTS, EMPTY)]
        out = jacobi(window=4)(
            causal_target(model, space.suffix(given), sampling, [1], *prompts),
            OffsetRNG(CounterRNG([9]), k),
            trace=True,
        )
        assert torch.equal(out.with_prefix(given).tokens[0], whole)
        assert sorted(
            n for step in out.with_prefix(given).traces[0] for n in step.committed
        ) == list(range(k, 12))


def test_what_is_given_must_be_told_and_may_not_have_ended():
    with pytest.raises(ValueError, match="the given tokens themselves"):
        LONG.suffix(3)
    with pytest.raises(GenError, match="ends at position 1, with token 3"):
        LONG.suffix(torch.tensor([2, 3, 3]))
    plain = TokenSpace.codes((4, 3), 5, 5)
    for given in (3, torch.tensor([0, 1, 2])):
        assert plain.suffix(given).grid == (3, 3) and plain.suffix(given).prefix is None
    assert LONG.suffix(0).length == 12


# --- refusals


def test_models_that_do_not_go_left_to_right_refuse_a_constraint():
    masked = replace(TokenSpace.codes((4,), 3, 4, mask_token_id=3), constraint=ExactLength(3, 4))
    for make in (
        lambda s: masked_target(TabularMasked(4), s, SamplingParams(), [0]),
        lambda s: block_target(TabularBlocks(4, block_length=2), s, SamplingParams(), [0]),
    ):
        with pytest.raises(GenError, match="no automaton") as said:
            make(masked)
        assert "\n" not in str(said.value)
        make(replace(masked, constraint=None))


def test_a_masked_space_may_have_an_end_and_fills_nothing_by_it():
    space = replace(TokenSpace.codes((12,), 3, 4, mask_token_id=3), eos_token_id=2)
    plain = replace(space, eos_token_id=None)

    def sample(s):
        return registry.get("sampler", "masked_iterative")()(
            masked_target(TabularMasked(4), s, SamplingParams(), [0] * 8), CounterRNG(range(8))
        )

    assert torch.equal(sample(space).tokens, sample(plain).tokens)
    assert any(
        ids[ids.index(2) :] != [2] * (12 - ids.index(2))
        for ids in sample(space).tokens.tolist()
        if 2 in ids
    )


def test_spaces_that_make_no_sense_are_refused_in_one_line():
    legal = torch.ones(4, 3, dtype=torch.bool)
    legal[2, 2] = False
    late = torch.ones(4, 3, dtype=torch.bool)
    late[:2, 2] = False
    TokenSpace((4,), 3, late, eos_token_id=2)  # an end that may come from place 2 on
    replace(TokenSpace.codes((4,), 3, 4), eos_token_id=3)  # and one that may not come at all
    for make, said in (
        (
            lambda: TokenSpace((4,), 3, legal, eos_token_id=2),
            "eos_token_id 2 may not stand at position 2",
        ),
        (
            lambda: TokenSpace((4,), 3, ~late, eos_token_id=2),
            "eos_token_id 2 may not stand at position 3",
        ),
        (
            lambda: TokenSpace((4,), 3, legal, eos_token_id=3),
            "eos_token_id is 3; expected an id below 3",
        ),
        (
            lambda: replace(TokenSpace.latents((4,), 2), eos_token_id=0),
            "latents has a constraint or an eos token",
        ),
        (
            lambda: replace(TokenSpace.latents((4,), 2), constraint=ExactLength(2, 3)),
            "latents has a constraint or an eos token",
        ),
    ):
        with pytest.raises(GenError) as caught:
            make()
        assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_constraint_that_leaves_nothing_is_named_with_its_place():
    class Nothing:
        def legal(self, history, positions):
            out = torch.ones(*positions.shape, 3, dtype=torch.bool)
            out[positions == 2] = False
            return out

    space = replace(TokenSpace.codes((4,), 3, 3), constraint=Nothing())
    with pytest.raises(GenError, match=r"leaves no token for position 2 after \[\d, \d\]"):
        autoregressive()(
            causal_target(TabularCausal(3), space, SamplingParams(), [0]), CounterRNG([1])
        )
