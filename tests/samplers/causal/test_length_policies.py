"""Length policies: the rules that they follow, and the distribution that none of them changes.

The controls break one rule each and must miss by more than 1e-3.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from constrained import with_end
from constraint_bench import COMBINED, EXACT, WRONG, autoregressive, error, run, speculative
from tabular import space_of

from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.samplers.causal.drafters.model import ModelDrafter
from gen.samplers.causal.length_policies.base import LengthPolicy
from gen.samplers.causal.length_policies.policies import JointConfidence
from gen.samplers.engine import window
from gen.samplers.engine.rows import SlotChange

SHORT = {"length_tiers": "1,2", "length_warmup": 0, "length_interval": 1, "acceptance_weight": 0.5}
CASES = {
    "draft": {"policy": "joint_confidence", "rejection_threshold": 0.5, "least_drafts": 1},
    "most_probable": {
        "policy": "joint_confidence",
        "rejection_threshold": 0.5,
        "least_drafts": 1,
        "confidence_of": "most_probable",
    },
    "average": {"policy": "acceptance_average", **SHORT},
    "batch_size": {"policy": "batch_size", "drafts_by_rows": "1-1:0,2-2:1,3-:2"},
}
VERIFIERS = [
    name
    for name, v in registry.table("verifier").items()
    if not v.relaxed and not v.needs_greedy and (v.judges_trees or name in ("token", "block"))
]


def cases():
    for name, params in CASES.items():
        policy = registry.get("length_policy", params["policy"])
        for verifier in VERIFIERS:
            same = registry.get("verifier", verifier).guarantee == "same_tokens"
            if same or not policy.needs_same_tokens:
                sampler = speculative(verifier=verifier, num_speculative_tokens=2, **params)
                fast = verifier == ("follow" if policy.needs_same_tokens else "block")
                marks = [] if fast else [pytest.mark.slow]
                yield pytest.param(sampler, id=f"{name}-{verifier}", marks=marks)


@pytest.mark.parametrize("sampler", cases())
@pytest.mark.thinned(2)
def test_no_policy_changes_the_distribution(sampler):
    assert error(sampler, space_of((4,), 3), COMBINED) < EXACT
    assert error(sampler, with_end(3, 3)) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("sampler", cases())
def test_no_policy_changes_the_distribution_without_filters(sampler):
    assert error(sampler, space_of((4,), 3)) < EXACT


def test_control_a_draft_that_the_rule_stops_at_is_dropped(monkeypatch):
    """Its own value decided about it."""

    def propose(self, step, tokens, _true=ModelDrafter.propose):
        draft = _true(self, step, tokens)
        kept = torch.zeros(len(tokens))
        for i in range(draft.exists.shape[1]):
            kept = kept + draft.logq[:, i].gather(1, draft.tokens[:, i, None])[:, 0]
            draft.exists[:, i] &= 1 - kept.exp() <= 0.5
        return draft

    monkeypatch.setattr(ModelDrafter, "propose", propose)
    sampler = speculative(num_speculative_tokens=2, **CASES["draft"])
    assert error(sampler, space_of((3,), 3)) > WRONG


def test_drafting_stops_where_a_rejection_has_become_likely():
    params = {"rejection_threshold": 0.5, "least_drafts": 2}
    policy = JointConfidence(3, 9, speculative(policy=NAME, **params).params_of("policy"))
    policy.begin()
    logprobs = torch.full((3, 4), 0.25).log()
    assert policy.stop(torch.tensor([0.9, 0.4, 0.8]), logprobs) is None
    # 0.9 * 0.9, 0.4 * 0.9 and 0.8 * 0.6
    assert policy.stop(torch.tensor([0.9, 0.9, 0.6]), logprobs).tolist() == [False, True, True]
    policy.begin()  # another round knows nothing of this one
    policy.stop(torch.tensor([0.9, 0.9, 0.9]), logprobs)
    assert policy.stop(torch.tensor([0.9, 0.9, 0.9]), logprobs).tolist() == [False] * 3


POLICIES = registry.table("length_policy")


def of(name: str):
    same = POLICIES[name].needs_same_tokens
    return speculative(policy=name, **({"verifier": "follow"} if same else {}))


def stops(name: str) -> bool:
    """Whether a policy stops rows whose drafts are next to impossible, in some of five columns."""
    policy = POLICIES[name](3, 9, of(name).params_of("policy"))
    if policy.needs_weights:  # in place of a trained network, which expects rejections here
        policy.net, policy.layer = lambda inputs: torch.full((3,), -9.0), "last"
        policy.read({"last": torch.zeros(3, 1, 2)})
    policy.begin()
    mass, logprobs = torch.full((3,), 1e-6), torch.full((3, 4), 1e-6).log()
    said = [policy.stop(mass, logprobs) for _ in range(5)]
    return any(x is not None and bool(x.any()) for x in said)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_declares_that_it_stops_early(name):
    """The flag decides whether it is asked at all."""
    own = POLICIES[name].stop is not LengthPolicy.stop
    assert POLICIES[name].stops_early == own == stops(name)


def test_control_a_policy_without_the_flag_is_not_asked(monkeypatch):
    def drafted() -> int:
        sampler = speculative(policy="confidence", confidence_threshold=1.0)
        return sum(stats.draft_nfe for stats in run(sampler, space_of((6,), 3)).stats)

    asked = drafted()
    monkeypatch.setattr(POLICIES["confidence"], "stops_early", False)
    assert drafted() > asked


NAME, BATCH = "joint_confidence", {"policy": "batch_size", "verifier": "follow"}
TIERS, RANGES = {"policy": "acceptance_average"}, "expected ranges of rows that follow each other"


def test_the_most_probable_token_can_stand_for_the_draft():
    params = {"least_drafts": 1, "confidence_of": "most_probable"}
    policy = JointConfidence(2, 9, speculative(policy=NAME, **params).params_of("policy"))
    policy.begin()
    logprobs = torch.tensor([[0.9, 0.1], [0.5, 0.5]]).log()
    assert policy.stop(torch.tensor([0.1, 0.5]), logprobs).tolist() == [False, True]


def test_more_doubt_makes_shorter_chains():
    passes = {}
    for threshold in (0.0, 0.5, 1.0):
        spec = {"name": "specdec_pp", "rejection_threshold": threshold, "least_drafts": 1}
        stats = run(resolve_sampler(spec)[0], space_of((12,), 5)).stats
        passes[threshold] = sum(s.draft_nfe for s in stats) / sum(s.nfe for s in stats)
    assert passes[0.0] <= 1 and passes[0.0] < passes[0.5] < passes[1.0]


def average_of(**params):
    sampler = speculative(policy="acceptance_average", **params)
    policy = registry.get("length_policy", "acceptance_average")
    return policy(2, 5, sampler.params_of("policy"))


def test_the_tier_follows_the_average_of_each_row():
    policy = average_of(acceptance_weight=0.5)
    assert policy.lengths.tolist() == [3, 3]  # the largest of 1, 3 and 7 that is at most 5
    seen = []
    for _ in range(30):
        policy.observe(policy.lengths, np.array([1, 0]) * policy.lengths)
        seen.append(policy.lengths.tolist())
    # ten rounds of warm-up, then a choice in every fifth
    assert seen[:14] == [[3, 3]] * 14 and seen[14] == [7, 1] and seen[-1] == [7, 1]
    # a margin keeps a row from going back and forth: 6.3 drafts are no reason to leave 7
    policy.average = np.array([2.3, 0.0])
    policy.observe(np.array([7, 1]), np.array([2, 0]))
    for _ in range(4):
        policy.observe(np.array([7, 1]), np.array([3, 0]))
    assert policy.lengths.tolist() == [7, 1]


def test_the_average_belongs_to_its_row():
    policy = average_of(**SHORT | {"length_tiers": "1,3,7"})
    for _ in range(3):
        policy.observe(policy.lengths, np.array([3, 0]))
    assert policy.lengths.tolist() == [7, 1]
    policy.store.follow(SlotChange(np.array([1])))
    assert policy.lengths.tolist() == [1]
    policy.store.follow(SlotChange(fresh=np.array([True])))
    assert policy.lengths.tolist() == [3] and policy.average.tolist() == [2.0]


def test_the_batch_says_how_many_drafts_there_are_and_no_token_changes():
    params = {"policy": "batch_size", "verifier": "follow", "drafts_by_rows": "1-3:4,4-:1"}
    sampler = speculative(**params)
    assert sampler.guarantee == "same_tokens"
    few, many = run(sampler, rows=[0, 1, 2]), run(sampler, rows=list(range(20)))
    assert torch.equal(few.tokens, many.tokens[:3])
    assert torch.equal(many.tokens, run(autoregressive()).tokens)
    assert max(len(s.acceptance_histogram) for s in few.stats) == 5
    drafts = [s.draft_nfe / s.nfe for s in many.stats]
    assert min(drafts) <= 1 < max(s.draft_nfe / s.nfe for s in few.stats)


@pytest.mark.parametrize("shape", ["best_first", "beam", "optimal"])
@pytest.mark.parametrize("verifier", ["follow", "recursive"])
@pytest.mark.thinned(3)
def test_a_tree_under_auto_has_as_many_drafts_as_pay(monkeypatch, shape, verifier):
    """Whatever the clock says, a row gets trees of the widths that were tried."""
    seen = []

    class Chosen(window.AutoWidth):
        def observe(self, width, starts, tokens):
            seen.append(width)
            super().observe(width, starts, tokens)

    monkeypatch.setattr(window, "AutoWidth", Chosen)
    params = {"shape": shape, "nodes": "auto", "tree_depth": 3, "verifier": verifier}
    sampler = speculative(**params)
    assert sampler.timed and sampler.reproducible == (verifier == "follow")
    context = list(range(40))
    out = run(sampler, space_of((30,), 5), rows=context)
    assert {1, 4, 8} & set(seen[:-1]) >= {1, 4} and set(seen) <= set(window.LADDER)
    if verifier == "follow":
        assert torch.equal(
            out.tokens, run(autoregressive(), space_of((30,), 5), rows=context).tokens
        )


@pytest.mark.parametrize("width", [1, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_a_tree_under_auto_keeps_the_distribution(monkeypatch, width):
    class Fixed(window.AutoWidth):
        def __init__(self, *args):
            super().__init__(*args)
            self.width = width

        def observe(self, *args):
            pass

    monkeypatch.setattr(window, "AutoWidth", Fixed)
    params = {"shape": "best_first", "nodes": "auto", "tree_depth": 2, "verifier": "recursive"}
    assert error(speculative(**params), space_of((3,), 3)) < EXACT


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"policy": "batch_size"}, "sampler.verifier is 'token'; expected follow or greedy"),
        (TIERS | {"length_tiers": "3,1"}, "sampler.length_tiers is '3,1'; expected numbers"),
        (TIERS | {"length_tiers": "1,x"}, "sampler.length_tiers is '1,x'; expected numbers"),
        (BATCH | {"drafts_by_rows": "1-4:5"}, "sampler.drafts_by_rows is '1-4:5'; expected"),
        (BATCH | {"drafts_by_rows": "1-4:5,6-:1"}, RANGES),
        (BATCH | {"drafts_by_rows": "1-0:5,1-:1"}, RANGES),
        ({"rejection_threshold": 2}, "rejection_threshold is 2; expected a number between 0 and 1"),
        ({"confidence_of": "token"}, "sampler.confidence_of is 'token'; expected draft or"),
        ({"nodes": "auto"}, "sampler.nodes is 'auto'; expected a number, because sampler.shape"),
        (
            {"nodes": "auto", "shape": "stochastic_beam", "verifier": "recursive"},
            "expected a number, because sampler.shape is not beam or best_first or optimal",
        ),
        ({"nodes": "many"}, "sampler.nodes is 'many'; expected an integer of at least 1, or auto"),
    ],
)
def test_mistakes_are_named(spec, words):
    with pytest.raises(GenError) as caught:
        resolve_sampler({"name": "speculative", **spec})
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_samplers_whose_tokens_depend_on_the_drafts_refuse_a_look_at_the_batch():
    for name in ("relaxed_acceptance", "continuous_speculative"):
        with pytest.raises(GenError, match="sampler.policy is 'batch_size'; expected"):
            resolve_sampler({"name": name, "policy": "batch_size"})
    with pytest.raises(GenError, match="a latent has no probability"):
        resolve_sampler({"name": "continuous_speculative", "policy": NAME})
