"""How often the causal loop waits for the device: nothing that drafts or verifies ids reads a value
on the host, beyond what it must know to go on.

The meter (``host_waits``) lets tensors say that they lie on an accelerator, so what is watched
takes the ways that it takes there; that these lead to the same tokens is asserted on the way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from constrained import with_end
from continuous import LinearHead, LinearLatent, latent_target
from small_llama import small_llama
from tabular import TabularCausal, causal_target

from gen.bench.estimate.host_waits import ACCELERATOR, HostWaits
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.token_space import TokenSpace
from gen.models.adapters.language_models import CausalLM, MaskedLM
from gen.models.targets.causal import CausalTarget
from gen.models.targets.masked import MaskedTarget
from gen.samplers.causal.drafters.model import ModelDrafter
from gen.samplers.causal.drafters.pearl import PearlDrafter
from gen.samplers.causal.initialisers.iterated import IteratedInitialiser
from gen.samplers.causal.shapes.base import NodeDrafter
from gen.samplers.engine import causal_loop
from gen.samplers.engine.causal_loop import CausalRun, Drafter
from gen.samplers.engine.step import Columns
from gen.samplers.verifiers import base as verifiers

IDS, POSITIONS = 6, 12
CODES = torch.randn(IDS - 1, 2, generator=torch.Generator().manual_seed(0))
SPACES = {
    "all": replace(TokenSpace.codes((3, 4), IDS, IDS), codebook=CODES),
    "legal": replace(
        TokenSpace((POSITIONS,), IDS, torch.eye(POSITIONS, IDS).roll(1, 0) < 1), codebook=CODES
    ),
    "end": replace(with_end(POSITIONS, IDS), codebook=CODES),
}
COUPLINGS, INITS, POLICIES, VERIFIERS = (
    registry.table(kind) for kind in ("coupling", "initialiser", "length_policy", "verifier")
)
POLICIES, VERIFIERS = (  # those of weights that were trained for one model are not of this one
    {name: part for name, part in parts.items() if not part.needs_weights}
    for parts in (POLICIES, VERIFIERS)
)
STOPPING = [name for name, policy in POLICIES.items() if policy.needs_probability]
POLICIES = [name for name, policy in POLICIES.items() if not policy.needs_same_tokens]
RELAXED = [name for name, rule in VERIFIERS.items() if rule.relaxed]

# initialisers whose drafts are corrected until they no longer change
ITERATED = [n for n, init in INITS.items() if issubclass(init, IteratedInitialiser)]
JACOBI = [
    {"name": "speculative_jacobi", "coupling": c, "init": i, "window": 4}
    for c in COUPLINGS
    for i, init in INITS.items()
    if not init.needs_draft_model and i not in ITERATED
]
JACOBI += [
    {"name": "relaxed_acceptance", "verifier": v, "coupling": c, "window": 4}
    for v in RELAXED
    for c in COUPLINGS
    if c != "gumbel"
]
CHAINS = [
    {"name": "speculative", "verifier": v, "policy": p, "num_speculative_tokens": 3}
    for v, rule in VERIFIERS.items()
    if not rule.relaxed and not rule.needs_greedy
    for p in POLICIES
]
TREES = [
    {"name": "speculative", "shape": s, "verifier": v, **params}
    for s, v, params in (
        ("branching", "recursive", {"branching": "2-2"}),
        ("branching", "recursive", {"branching": "3-1", "draws": "top_and_random"}),
        ("best_first", "traversal", {"nodes": 5, "tree_depth": 3}),
        ("best_first", "follow", {"nodes": 5, "draws": "ranks"}),
        ("paths", "k_seq", {"paths": 2, "path_length": 2}),
        ("paths", "traversal", {"paths": 2, "path_length": 2, "trunk": 1}),
        ("stochastic_beam", "recursive", {"beam_width": 2, "tree_depth": 3}),
        ("beam", "follow", {"beam_width": 2, "tree_depth": 3, "nodes": 5}),
        ("optimal", "traversal", {"nodes": 5, "tree_depth": 3}),
        ("paths", "recursive", {"drafter": "several", "paths": 2, "path_length": 2}),
        ("paths", "follow", {"drafter": "several", "paths": 3, "path_length": 2}),
    )
]
CHAINS += [
    {**spec, "name": "relaxed_acceptance", "verifier": v, "drafter": "model"}
    for v in RELAXED
    for spec in CHAINS[: len(POLICIES)]
]
PLAIN = [{"name": "autoregressive"}]
LATENT = [
    {"name": "continuous_jacobi", "window": 4, "init": i, "tolerance": t}
    for i in ("repeat", "zeros")
    for t in (0.0, 0.3)
]
TRIED = [
    {
        "name": "continuous_speculative",
        "mode": m,
        "policy": p,
        "num_speculative_tokens": 3,
        "relaxation": 0.3,
    }
    for m in ("exact", "relaxed")
    for p in ("constant", "heuristic")
]


def named(spec: dict) -> str:
    return "-".join(str(x) for x in spec.values())


def cases(specs: list[dict]) -> list:
    """Every one in every space, in turn in one of them where there is little time."""
    return [
        pytest.param(
            spec,
            space,
            id=f"{named(spec)}-{space}",
            marks=[pytest.mark.slow] if (i + j) % len(SPACES) else [],
        )
        for i, spec in enumerate(specs)
        for j, space in enumerate(SPACES)
    ]


@dataclass
class Watched(Drafter):
    """A drafter, and what each round of it waited for. What a model computes is not its
    business."""

    drafter: Drafter
    proposed: list[list[str]] = field(default_factory=list)
    verified: list[list[str]] = field(default_factory=list)
    learned: list[list[str]] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)  # of the draft model, per round
    blocks: list[int] = field(default_factory=list)  # of tries, per round
    same: list[bool] = field(
        default_factory=list
    )  # whether the rows of a round are those of the one before

    def __post_init__(self) -> None:
        self.meter, self.rows = HostWaits(), None
        if isinstance(self.drafter, (ModelDrafter, NodeDrafter, PearlDrafter)):
            for draft in self.drafter.targets:
                draft.predict = self._counted(draft.predict, self.calls, off=True)
        chain = getattr(self.drafter, "paths", None)
        if hasattr(chain, "attempt"):
            chain.attempt = self._counted(chain.attempt, self.blocks)

    def _counted(self, call: Callable, counts: list[int], off: bool = False) -> Callable:
        def counted(*args):
            counts[-1] += 1
            if not off:
                return call(*args)
            with self.meter.off():
                return call(*args)

        return counted

    def _seen(self, call: Callable, found: list[list[str]], *args):
        before = len(self.meter.waits)
        with self.meter:
            out = call(*args)
        found.append(self.meter.waits[before:])
        return out

    @property
    def window(self):
        return self.drafter.window

    @property
    def nfe(self):
        return self.drafter.nfe

    @property
    def targets(self):
        return self.drafter.targets

    @property
    def stores(self):
        return self.drafter.stores

    def propose(self, step, tokens):
        self.calls.append(0)
        self.same.append(step.rows is self.rows)
        self.rows = step.rows
        return self._seen(self.drafter.propose, self.proposed, step, tokens)

    def verify(self, step, draft, output):
        self.blocks.append(0)
        return self._seen(self.drafter.verify, self.verified, step, draft, output)

    def observe(self, step, accepted, drafted):
        self._seen(self.drafter.observe, self.learned, step, accepted, drafted)


def models(space: TokenSpace | None):
    """Target and draft of three items, whose rows go on at their own pace."""
    context = [0, 1, 2]
    if space is None:
        heads = LinearHead(2, (0.7, 0.5)), LinearHead(2, (0.7, 0.5), shift=0.4)
        return [latent_target(LinearLatent(h, bend=0.3), POSITIONS, context) for h in heads]
    return [
        causal_target(
            TabularCausal(IDS, seed, low=0.0, spread=1.5),
            space,
            resolve_sampler("autoregressive")[1],
            context,
        )
        for seed in (0, 5, 8)
    ]


def decoded(spec: dict, space: TokenSpace | None):
    sampler, _ = resolve_sampler(spec)
    target, draft, *others = models(space)
    draft = (draft, *others) if sampler.takes_several_drafts else draft
    out = sampler(
        target, CounterRNG([3, 14, 15]), draft=draft if sampler.drafted else None, trace=True
    )
    stats = [(s.nfe, s.draft_nfe, s.tokens, s.acceptance_histogram) for s in out.stats]
    return out.tokens, stats, [[(t.window, t.accepted) for t in row] for row in out.traces]


def watched(monkeypatch, spec: dict, space: TokenSpace | None, asks: bool = False) -> Watched:
    """The drafter of a decoding that gave the tokens, calls and traces that it gives when nobody
    watches. ``asks``: whether it may wait once the outcome of a round is known."""
    plain, seen = decoded(spec, space), []

    def watching(target, rng, drafter, *more):
        seen.append(Watched(drafter))
        return CausalRun(target, rng, seen[-1], *more)

    with monkeypatch.context() as patched:
        patched.setattr(causal_loop, "CausalRun", watching)
        found = decoded(spec, space)
    assert torch.equal(plain[0], found[0]) and plain[1:] == found[1:], (
        "on a device it would go another way"
    )
    (drafter,) = seen
    assert len(drafter.verified) > 1
    assert asks or not any(
        waits for waits, same in zip(drafter.learned, drafter.same, strict=True) if same
    ), "the host knew it already"
    return drafter


def none(rounds: list[list[str]]) -> bool:
    assert all(not waits for waits in rounds), rounds
    return True


@pytest.mark.parametrize(("spec", "space"), cases(PLAIN + JACOBI))
@pytest.mark.thinned(9)
def test_what_drafts_for_itself_never_waits(monkeypatch, spec, space):
    drafter = watched(monkeypatch, spec, SPACES[space])
    assert none(drafter.proposed) and none(drafter.verified)


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_corrected_drafts_wait_once_between_their_rounds(monkeypatch, coupling):
    """The rounds end where no draft changed, which the device alone knows."""
    spec = {"name": "speculative_jacobi", "coupling": coupling, "init": "table", "window": 4}
    drafter = watched(monkeypatch, {**spec, "draft_rounds": 3}, SPACES["all"])
    assert none(drafter.verified) and any(drafter.proposed)
    for waits in drafter.proposed:
        assert waits == ["cpu", "numpy"] * (len(waits) // 2) and len(waits) <= 2 * 2


@pytest.mark.parametrize(("spec", "space"), cases(CHAINS))
@pytest.mark.thinned(7)
def test_a_chain_waits_only_for_a_stop_rule_and_then_once_per_call(monkeypatch, spec, space):
    drafter = watched(monkeypatch, spec, SPACES[space])
    assert none(drafter.verified) and sum(drafter.calls) > 2
    if spec["policy"] in STOPPING:
        assert all(
            set(waits) <= {"_local_scalar_dense"} and len(waits) <= calls
            for waits, calls in zip(drafter.proposed, drafter.calls, strict=True)
        )
        assert any(drafter.proposed), "the host cannot know where it stops"
    else:
        assert none(drafter.proposed)


@pytest.mark.parametrize(("spec", "space"), cases(TREES))
@pytest.mark.thinned(6)
def test_a_tree_never_waits(monkeypatch, spec, space):
    drafter = watched(monkeypatch, spec, SPACES[space])
    assert none(drafter.proposed) and none(drafter.verified) and sum(drafter.calls) > 2


@pytest.mark.parametrize("verifier", ["token", "block", "recursive", "follow"])
@pytest.mark.thinned(2)
def test_pearl_waits_once_per_round_for_whether_its_drafts_go_on(monkeypatch, verifier):
    spec = {"name": "speculative", "drafter": "pearl", "num_speculative_tokens": 3}
    drafter = watched(monkeypatch, {**spec, "verifier": verifier}, SPACES["all"], asks=True)
    assert none(drafter.proposed) and none(drafter.verified) and sum(drafter.calls) > 2
    rounds = zip(drafter.learned, drafter.same, strict=True)
    assert all(waits == ["cpu", "numpy"] for waits, same in rounds if same)


@pytest.mark.parametrize("spec", PLAIN + LATENT, ids=named)
def test_latents_that_draft_for_themselves_never_wait(monkeypatch, spec):
    drafter = watched(monkeypatch, spec, None)
    assert none(drafter.proposed) and none(drafter.verified)


@pytest.mark.parametrize("spec", TRIED, ids=named)
@pytest.mark.thinned(2)
def test_latents_wait_for_what_was_rejected_and_then_once_per_block_of_tries(monkeypatch, spec):
    drafter = watched(monkeypatch, spec, None)
    assert none(drafter.proposed) and sum(drafter.blocks) > 0
    for waits, blocks in zip(drafter.verified, drafter.blocks, strict=True):
        assert len([w for w in waits if w == "numpy"]) <= 1 + blocks and set(waits) <= {
            "cpu",
            "numpy",
        }


def test_rows_that_stay_are_named_by_one_tensor(monkeypatch):
    """So that who wants their numbers on the host asks once, not once per round."""
    same = watched(monkeypatch, PLAIN[0], SPACES["all"]).same
    assert len(same) == POSITIONS and same == [False] + [True] * (POSITIONS - 1)


def test_every_causal_sampler_is_watched():
    causal = {
        name for name, sampler in registry.table("sampler").items() if sampler.protocol == "causal"
    }
    # a step of hypotheses copies its scores to the host: tests of the rules without draws
    hypotheses = {"adaptive_lookahead", "beam_search", "momentum_decoding", "superposed_decoding"}
    watched = {spec["name"] for spec in PLAIN + JACOBI + CHAINS + LATENT + TRIED}
    windows = {"masked_window"}  # of a network with a mask token, below
    assert watched | hypotheses | windows == causal and not watched & (hypotheses | windows)


def between_calls(sampler, target: Callable) -> list[list[str]]:
    """What a whole decoding of a network waits for, from one forward call to the next, in rounds
    that no row leaves after."""
    watched, meter, marks, left = target(), HostWaits(), [], set()
    predict, keep = watched.predict, watched.keep
    watched.device = ACCELERATOR
    watched.predict = lambda *args, **own: (marks.append(len(meter.waits)), predict(*args, **own))[
        1
    ]
    watched.keep = lambda rows: (left.add(len(marks) - 1), keep(rows))[1]
    with meter:
        out = sampler(watched, CounterRNG([3, 14, 15]))
    assert torch.equal(out.tokens, sampler(target(), CounterRNG([3, 14, 15])).tokens)
    rounds = [
        meter.waits[a:b] for i, (a, b) in enumerate(itertools.pairwise(marks)) if i not in left
    ]
    assert len(rounds) > 2
    return rounds


GUIDED, PROMPTS, WITHOUT = (
    {"guidance_scale": 2.0},
    torch.arange(12).view(3, 4),
    torch.zeros(3, 4, dtype=torch.long),
)


def causal_rounds(spec: dict | str) -> list[list[str]]:
    sampler, sampling = resolve_sampler(spec, GUIDED)
    space = TokenSpace.codes((4, 6), 24, 20)
    return between_calls(
        sampler,
        lambda: CausalTarget(CausalLM(small_llama(24)), PROMPTS, space, sampling, WITHOUT[:, :2]),
    )


WHOLE = [
    "autoregressive",
    *({"name": "speculative_jacobi", "coupling": c, "window": 4} for c in COUPLINGS),
]


@pytest.mark.parametrize("spec", WHOLE, ids=lambda x: x if isinstance(x, str) else x["coupling"])
@pytest.mark.thinned(2)
def test_a_round_of_a_network_waits_once_in_all(spec):
    """For one copy to the host, which is then an array there. The forward call, the distribution
    and guidance are in it."""
    assert all(waits == ["cpu", "numpy"] for waits in causal_rounds(spec))


def test_a_round_of_a_window_of_masks_waits_once_in_all():
    sampler, sampling = resolve_sampler({"name": "masked_window", "window": 4})
    space = TokenSpace.codes((4, 6), 20, 24, 23)
    rounds = between_calls(
        sampler, lambda: CausalTarget(CausalLM(small_llama(24)), PROMPTS, space, sampling)
    )
    assert all(waits == ["cpu", "numpy"] for waits in rounds)


LOOPS = {
    "assd",
    "exact_speculative",
    "freedave",
}  # judge chains of canvases in a loop of their own, which asks how long they are
ASK = {
    "adablock",
    "adjust",
    "llada2",
    "wino",
    "window_diffusion",
    "recap",
    "learn2pd",
    "pc",
}  # for what else the host has to know, or has a file of weights or an end for
STEPS = [
    name
    for name, p in registry.table("preset").items()
    if registry.get("sampler", p.sampler).protocol == "masked" and name not in LOOPS | ASK
]


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.thinned(7)
def test_a_step_of_a_masked_network_waits_once_in_all(name):
    """To know which rows are done. The distribution, what is proposed and chosen and the schedule
    are in it."""
    sampler, sampling = resolve_sampler(name, GUIDED)
    space = replace(TokenSpace.codes((4, 5), 24, 20), mask_token_id=22)
    steps = between_calls(
        sampler, lambda: MaskedTarget(MaskedLM(small_llama(24)), PROMPTS, space, sampling, WITHOUT)
    )
    assert all(waits == ["cpu", "numpy"] for waits in steps)


# --- controls


def test_control_a_loop_that_asks_for_the_counts_by_themselves_is_found(monkeypatch):
    copy = Columns.to_host

    def asking(self, *joined):
        self.counts.tolist()
        return copy(self, *joined)

    monkeypatch.setattr(Columns, "to_host", asking)
    assert all(waits == ["tolist", "cpu", "numpy"] for waits in causal_rounds("autoregressive"))


def test_control_a_coupling_that_asks_whether_something_was_rejected_is_found(monkeypatch):
    step = COUPLINGS["fresh"].step

    def asking(self, now, drafts, logp, next_logprobs):
        verdict = step(self, now, drafts, logp, next_logprobs)
        bool((verdict.num_accepted < drafts.exists.sum(1)).any())
        return verdict

    monkeypatch.setattr(COUPLINGS["fresh"], "step", asking)
    drafter = watched(
        monkeypatch, {"name": "speculative_jacobi", "coupling": "fresh", "window": 4}, SPACES["all"]
    )
    assert (
        none(drafter.proposed)
        and all(waits == ["_local_scalar_dense"] for waits in drafter.verified if waits)
        and any(drafter.verified)
    )


def test_control_a_residual_of_as_many_drafts_as_were_rejected_is_found(monkeypatch):
    def resampled(step, column, rejected, sampling):
        rest = torch.zeros_like(sampling)
        rest[rejected] = sampling[rejected]
        return recovered(step, column, rejected, rest)

    recovered = verifiers.recovered
    monkeypatch.setattr(verifiers, "recovered", resampled)
    drafter = watched(monkeypatch, {"name": "speculative"}, SPACES["all"])
    assert none(drafter.proposed) and {wait for waits in drafter.verified for wait in waits} == {
        "index",
        "index_put_",
    }


def test_control_a_policy_that_always_asks_is_found(monkeypatch):
    policy = registry.get("length_policy", "constant")
    monkeypatch.setattr(policy, "stops_early", True)
    monkeypatch.setattr(
        policy, "stop", lambda self, mass, logprobs: torch.zeros_like(mass, dtype=torch.bool)
    )
    drafter = watched(monkeypatch, {"name": "speculative"}, SPACES["all"])
    assert any(drafter.proposed)


X, MASK = torch.tensor([3.0, 0.0, 2.0]), torch.tensor([True, False, True])
WAITS = {
    "item": lambda: X[0].item(),
    "bool": lambda: bool(MASK.any()),
    "int": lambda: int(X.max()),
    "float": lambda: float(X.max()),
    "list": lambda: X.tolist(),
    "numpy": lambda: X.numpy(),
    "array": lambda: np.asarray(X),
    "cpu": lambda: X.cpu(),
    "to the host": lambda: X.to("cpu"),
    "nonzero": lambda: X.nonzero(),
    "where": lambda: torch.where(MASK),
    "a mask": lambda: X[MASK],
    "written by a mask": lambda: X.clone().__setitem__(MASK, X[:2].clone()),
    "masked_select": lambda: X.masked_select(MASK),
    "unique": lambda: X.unique(),
    "equal": lambda: torch.equal(X, X.clone()),
    "repeats": lambda: X.repeat_interleave(X.long()),
    "a range up to a value": lambda: torch.arange(X.sum(), device=X.device),
    "in": lambda: 2.0 in X,
    "from the host": lambda: torch.from_numpy(np.ones(3)).to(X.device),
    "made of numbers": lambda: torch.tensor([1, 2], device=X.device),
}
FREE = {
    "where": lambda: torch.where(MASK, X, 0.0),
    "an index": lambda: X[torch.arange(2, device=X.device)],
    "written by an index": (
        lambda: X.clone().__setitem__(torch.arange(2, device=X.device), X[:2].clone())
    ),
    "masked_fill": lambda: X.masked_fill(MASK, 1.0),
    "argmax": lambda: X.argmax(),
    "gather": lambda: X.gather(0, X.long().clamp_max(1)),
    "a number of repeats": lambda: X.repeat_interleave(2),
    "another type": lambda: X.to(torch.float64),
    "from the host, at leisure": (
        lambda: torch.from_numpy(np.ones(3)).to(X.device, non_blocking=True)
    ),
    "made there": lambda: torch.zeros(3, device=X.device),
    "a size": lambda: X.shape[0] + len(X) + X.numel(),
}


@pytest.mark.parametrize("what", WAITS)
def test_the_meter_sees_what_waits(what):
    with HostWaits() as meter:
        assert X.device.type == "cuda" and not X.is_cpu
        WAITS[what]()
    assert meter.waits and X.device.type == "cpu"
    with HostWaits() as meter, meter.off():
        WAITS[what]()
    assert not meter.waits


@pytest.mark.parametrize("what", FREE)
def test_the_meter_sees_nothing_where_nobody_waits(what):
    with HostWaits() as meter:
        FREE[what]()
    assert not meter.waits
