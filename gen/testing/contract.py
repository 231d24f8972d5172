"""What every sampler and part of one must do, checked on small random networks.

A package of its own runs the checks in its tests::

    import pytest
    from gen.testing.contract import cases, check_contract

    @pytest.mark.parametrize("name", cases("my_package"))
    def test_contract(name):
        check_contract(name)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isclose
from typing import Any

import torch
from torch import Tensor

from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.resolve import describe_guarantee, resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampler import Sampler
from gen.core.sampling_params import SamplingParams
from gen.core.stats import SampleOutput, Stats, TraceStep
from gen.core.token_space import GUARANTEES, TokenSpace
from gen.models.nets.dag import DagConfig, DagModel
from gen.models.nets.grid import GridLlamaConfig, GridLlamaForCausalLM
from gen.models.nets.grid_scales import GridScalesConfig, GridScalesModel
from gen.testing.even_reward import EvenEvaluator
from gen.testing.specs import SPECS, sampling_for

V, GRID, MASK = 9, (3, 4), 8  # ids 0-5 are tokens, 6 and 7 words of conditions
ROWS = 5  # items of a call
SIDES = ((1, 1), (1, 2), (3, 3))  # scales of twelve positions


def token_space() -> TokenSpace:
    """Position n takes every id below 6 but one, and the mask is allowed nowhere. Tokens are codes
    in two dimensions."""
    legal = torch.zeros(12, V, dtype=torch.bool)
    legal[:, :6] = True
    legal[torch.arange(12), torch.arange(12) % 6] = False
    codebook = torch.tensor([[0, 0], [0, 1], [0, 3], [1, 0], [2, 2], [3, 3]]).float()
    return TokenSpace(
        GRID, V, legal, MASK, codebook, delimiters=(2, 4), rarity=torch.arange(1, V + 1) / 2
    )


PROTOCOLS = {  # target and adapter of models of codes, by protocol
    name: (p.targets["codes"], p.adapters["codes"])
    for name, p in registry.table("protocol").items()
    if "codes" in p.targets
}


def scales_llama(protocol: str, seed: int = 1):
    """The same of next-scale models."""
    torch.manual_seed(seed)
    refines = protocol == "refined_scales"
    config = GridScalesConfig(
        scales=SIDES,
        codes=V,
        channels=4,
        prefix_length=3,
        markov=refines,
        tail_layers=int(refines),
        vocab_size=V,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.6,
    )
    return PROTOCOLS[protocol][1](GridScalesModel(config).double())


def dag_net(seed: int = 1):
    """The same of models of graphs, of 15 vertices; unk is the mask."""
    torch.manual_seed(seed)
    config = DagConfig(
        source_words=V,
        max_source=3,
        vocab_size=V - 1,
        bos_id=7,
        eos_id=6,
        vertices_per_word=5,
        hidden_size=16,
        encoder_layers=1,
        decoder_layers=1,
        num_attention_heads=2,
    )
    return PROTOCOLS["lattice"][1](DagModel(config).double())


def llama(protocol: str, seed: int = 1):
    if protocol == "lattice":
        return dag_net(seed)
    if "scales" in protocol:
        return scales_llama(protocol, seed)
    torch.manual_seed(seed)
    config = GridLlamaConfig(
        grid=GRID,
        prefix_length=3,
        codebook_size=6,
        causal=protocol == "causal",
        mask_token_id=MASK,
        trained_at_mask=True,
        vocab_size=V,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.6,
        block_length=4 if protocol == "blocks" else 0,
    )
    return PROTOCOLS[protocol][1](GridLlamaForCausalLM(config).double())


@dataclass
class Bench:
    """A model, and items with prompts and keys of their own."""

    model: object
    target: type
    prompts: Tensor
    space: TokenSpace
    # other models, for samplers that draft with one: of the same protocol (None), and of others
    drafts: dict

    def __call__(
        self,
        sampler: Sampler,
        sampling: SamplingParams,
        rows: list[int] | None = None,
        keys: list[int] | None = None,
        **kwargs,
    ) -> SampleOutput:
        rows = list(range(ROWS)) if rows is None else rows
        keys = [31 * r + 7 for r in rows] if keys is None else keys
        prompt = self.prompts[rows].clone()
        uncond = torch.full_like(prompt, 7)
        uncond[:, -1] = 6
        before = prompt.clone(), uncond.clone()
        if sampler.drafted:
            make = PROTOCOLS[sampler.draft_protocol][0] if sampler.draft_protocol else self.target
            kwargs["draft"] = make(
                self.drafts[sampler.draft_protocol], prompt, self.space, sampling, uncond
            )
        target = self.target(self.model, prompt, self.space, sampling, uncond)
        target.evaluator = EvenEvaluator()
        out = sampler(target, CounterRNG(keys), **kwargs)
        assert torch.equal(prompt, before[0]) and torch.equal(uncond, before[1]), (
            "the sampler wrote into its condition"
        )
        return out


def network_bench(protocol: str) -> Bench:
    """Return small random networks of a protocol, and one to draft with.

    Raises:
        GenError: there is none of this protocol.
    """
    if protocol not in PROTOCOLS:
        raise GenError(f"no model for the protocol {protocol!r}; expected {', '.join(PROTOCOLS)}")
    drafts = {None: llama(protocol, 2), "causal": llama("causal", 2)}
    return Bench(llama(protocol), PROTOCOLS[protocol][0], bench_prompts(), token_space(), drafts)


def bench_prompts() -> Tensor:
    """Prompts of the items, long [ROWS, 3]."""
    return torch.tensor([[r % 6, r // 2, 6] for r in range(ROWS)])


# --- the checks


def check_tokens(run: Bench, sampler: Sampler, sampling: SamplingParams) -> None:
    """Every position is filled with an id that is allowed there. So not with the mask."""
    tokens = run(sampler, sampling).tokens
    assert tokens.shape == (ROWS, run.space.length) and tokens.dtype == torch.long
    assert not bool((tokens == MASK).any()), "the mask was left in the output"
    legal = run.space.legal[torch.arange(run.space.length), tokens]
    assert bool(legal.all()), "an id stands where it is not legal"


def check_rows(run: Bench, sampler: Sampler, sampling: SamplingParams) -> None:
    """A row is the same whether it is decoded in a batch or alone, and in any order."""
    whole = run(sampler, sampling)
    for rows in ([0], [3], [4, 1, 2]):
        part = run(sampler, sampling, rows)
        assert torch.equal(part.tokens, whole.tokens[rows]), "a row depends on its batch"
        policy = registry.table("length_policy").get(vars(sampler).get("policy"))
        if policy is not None and policy.needs_same_tokens:
            continue  # the batch decides how many drafts there are, and nothing else
        for a, row in zip(part.stats, rows, strict=True):
            b = whole.stats[row]
            assert (a.nfe, a.tokens, a.draft_acceptance_rate) == (
                b.nfe,
                b.tokens,
                b.draft_acceptance_rate,
            )
            assert (a.acceptance_histogram, a.draft_nfe) == (b.acceptance_histogram, b.draft_nfe)


def check_keys(run: Bench, sampler: Sampler, sampling: SamplingParams) -> None:
    """One prompt: equal keys, equal tokens; different keys, different tokens (unless ids are not
    drawn)."""
    out = run(sampler, sampling, [2] * 6, [11, 12, 13, 11, 14, 15]).tokens
    again = run(sampler, sampling, [2] * 6, [11, 12, 13, 11, 14, 15]).tokens
    assert torch.equal(out, again) and torch.equal(out[0], out[3]), (
        "equal keys gave different tokens"
    )
    if sampler.protocol == "masked" and not certain(
        sampler, sampling
    ):  # positions that a filtered distribution is sure of, taken first, may settle all others
        wide = replace(sampling, temperature=2.0, top_k=0, top_p=1.0, min_p=0.0, guidance_scale=1.0)
        out = run(sampler, wide, [2] * 6, [11, 12, 13, 11, 14, 15]).tokens
    assert certain(sampler, sampling) or len(out.unique(dim=0)) >= 4, (
        "different keys gave the same tokens"
    )


def certain(sampler: Sampler, sampling: SamplingParams) -> bool:
    """Whether ids are not drawn: keys may change nothing."""
    return sampler.deterministic or (
        sampling.temperature == 0
        if sampler.protocol == "causal"
        else getattr(sampler, "proposer", None) in ("argmax", "credit")
    )


def check_costs(trace: list[TraceStep], stats: Stats, accepted: int) -> None:
    """The costs of a row are those that its trace tells of."""
    assert len(trace) == stats.nfe
    mean = stats.tokens / stats.nfe if stats.nfe else 0.0
    assert isclose(stats.mean_acceptance_length, mean, rel_tol=1e-6)
    if stats.acceptance_histogram:
        assert sum(stats.acceptance_histogram) == stats.nfe
        assert sum(k * n for k, n in enumerate(stats.acceptance_histogram)) == accepted
        assert stats.draft_acceptance_rate is not None
        assert 0 <= stats.draft_acceptance_rate <= 1
    else:
        assert stats.draft_acceptance_rate is None


def check_traces(
    run: Bench, sampler: Sampler, sampling: SamplingParams, canvas: Tensor | None = None
) -> None:
    """Replaying a trace gives the tokens, and costs and traces tell the same story."""
    calls: list[dict[str, int]] = []
    extra = {} if canvas is None else {"canvas": canvas}
    out = run(sampler, sampling, trace=True, callback=calls.append, **extra)
    assert torch.equal(out.tokens, run(sampler, sampling, **extra).tokens), (
        "tracing changes the tokens"
    )
    assert out.traces is not None and len(out.traces) == len(out.stats) == ROWS
    for row, (trace, stats) in enumerate(zip(out.traces, out.stats, strict=True)):
        state = dict(
            enumerate([MASK] * run.space.length if canvas is None else canvas[row].tolist())
        )
        wanted = sum(x == MASK for x in state.values())
        accepted = 0
        for step in trace:
            assert set(step.accepted) <= set(step.window) and set(step.committed) <= set(
                step.window
            )
            state.update(dict.fromkeys(step.removed, MASK))
            assert all(state[n] == MASK for n in step.committed), "a position was committed twice"
            state.update(step.committed)
            accepted += len(step.accepted)
        assert list(state.values()) == out.tokens[row].tolist(), (
            "the trace does not replay to the tokens"
        )
        assert sum(len(s.committed) - len(s.removed) for s in trace) == stats.tokens == wanted
        assert stats.tokens_computed >= stats.nfe and stats.seconds >= 0
        # a drafter may be a part of the model itself
        assert stats.draft_nfe is not None or not sampler.drafted
        if sampler.wraps:  # its costs are those of all candidates, its trace that of one
            assert stats.nfe >= len(trace)
        else:
            check_costs(trace, stats, accepted)
    if sampler.wraps:
        assert calls and all(0 <= c["done"] <= c["total"] for c in calls)
        return
    longest = max(s.nfe for s in out.stats)
    # rows that move in lockstep wait for each other
    waits = not registry.get("protocol", sampler.protocol).replaces_rows
    steps = max(longest, len(calls)) if waits else longest
    assert [c["step"] for c in calls] == list(range(1, steps + 1))
    done = [c["done"] for c in calls]
    assert done == sorted(done) and all(c["total"] == ROWS * run.space.length for c in calls)
    assert not calls or done[-1] == calls[-1]["total"]


def check_declaration(sampler: Sampler) -> None:
    """It says what it guarantees, relative to what."""
    assert sampler.guarantee in GUARANTEES and sampler.protocol and sampler.reference
    said = describe_guarantee(sampler)
    assert GUARANTEES[sampler.guarantee] in said and sampler.reference in said
    assert (type(sampler).__doc__ or "").strip()
    try:  # parameters are what the manifest says they are, for good
        sampler.guarantee = "same_tokens"
    except AttributeError:
        return
    raise AssertionError("a sampler can be changed after it was made")


CHECKS: list[Callable] = [check_tokens, check_rows, check_keys, check_traces]


# --- for other packages

PARTS = {  # kind of a part: parameter of the sampler that chooses it
    "coupling": "coupling",
    "initialiser": "init",
    "order": "order",
    "schedule": "schedule",
    "verifier": "verifier",
    "shape": "shape",
    "drafter": "drafter",
    "length_policy": "policy",
    "remasker": "remasker",
    "selector": "selector",
    "proposer": "proposer",
    "block_schedule": "blocks",
    "stop": "stop",
}


def cases(package: str) -> list[str]:
    """List the specs that use a sampler or a part of a package, which ``check_contract`` takes.

    Args:
        package: name of an importable package or module whose entry point is installed.

    Raises:
        GenError: nothing of the package is registered, or nothing that the networks here fit.
    """
    found = [name for name in SPECS if any(_is_of(obj, package) for obj in _used(name))]
    if not found:
        raise GenError(
            f"no spec uses a sampler or part of {package}; expected a package with an entry point"
            " in the group gen.plugins"
        )
    return found


def _used(name: str) -> list[Any]:
    """Return the sampler of a spec and the parts that it chooses."""
    sampler = resolve_sampler(SPECS[name], sampling_for(name))[0]
    chosen = {kind: vars(sampler).get(param) for kind, param in PARTS.items()}
    parts = [registry.get(kind, value) for kind, value in chosen.items() if isinstance(value, str)]
    return [type(sampler), *parts]


def _is_of(obj: Any, package: str) -> bool:
    module = obj.__module__ if callable(obj) else type(obj).__module__
    return module == package or module.startswith(f"{package}.")


def check_contract(name: str) -> None:
    """Run all checks on a spec of ``cases``. Raises ``AssertionError`` that says what is broken."""
    sampler, sampling = resolve_sampler(SPECS[name], sampling_for(name))
    check_declaration(sampler)
    run = network_bench(sampler.protocol)
    for check in CHECKS:
        check(run, sampler, sampling)
