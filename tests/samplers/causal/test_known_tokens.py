"""Tokens that positions have to get, decoded from left to right: they are those of the output, and
the free positions keep the distribution given the tokens before them."""

from __future__ import annotations

import pytest
import torch
from constraint_bench import CONTEXTS, EXACT, WRONG
from enumeration import distance, enumerate_distribution
from small_llama import small_llama
from tabular import EMPTY, PROMPTS, TabularCausal, causal_target

from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.adapters.language_models import CausalLM
from gen.models.targets.causal import CausalTarget

MASK, LENGTH = 3, 4
KNOWN = torch.tensor([[MASK, 2, MASK, 0], [1, MASK, MASK, MASK], [MASK, MASK, 1, MASK]])
LEGAL = torch.tensor([True, True, True, False]).expand(LENGTH, -1)
SPACE = TokenSpace((LENGTH,), 4, LEGAL, MASK)
SAMPLING = {
    "plain": SamplingParams(temperature=0.9, guidance_scale=1.5),
    "penalty": SamplingParams(presence_penalty=0.8),
}
MODEL, DRAFT = TabularCausal(4, 0, 0.0, 1.5), TabularCausal(4, 5, 0.0, 1.5)
SAMPLERS = {
    "autoregressive": "autoregressive",
    "jacobi": {"name": "speculative_jacobi", "window": 3, "coupling": "gumbel"},
    "chain": {"name": "speculative", "num_speculative_tokens": 2},
    "tree": {
        "name": "speculative",
        "shape": "branching",
        "branching": "2-1",
        "verifier": "recursive",
        "draws": "without_replacement",
    },
}


def target(context, sampling, model=MODEL, known=KNOWN):
    made = causal_target(model, SPACE, sampling, context)
    made.known = None if known is None else known[torch.as_tensor(context)]
    return made


def found_by(spec, sampling, known=KNOWN, drafted=KNOWN):
    sampler = resolve_sampler(spec)[0]

    def decode(rng, context):
        draft = target(context, sampling, DRAFT, drafted) if sampler.drafted else None
        return sampler(target(context, sampling, known=known), rng, draft=draft).tokens

    return enumerate_distribution(decode, CONTEXTS)


def distribution(context: int, s: SamplingParams) -> dict[tuple[int, ...], float]:
    """The distribution from its definition: position after position."""
    out: dict[tuple[int, ...], float] = {(): 1.0}
    for position in range(LENGTH):
        token = int(KNOWN[context, position])
        longer = {}
        for before, mass in out.items():
            cond = MODEL.after([*PROMPTS[context], *before])
            uncond = MODEL.after([*EMPTY[context], *before]) if s.guided else None
            z = s.guide(cond, uncond)
            z = z - s.presence_penalty * torch.tensor(
                [float(v in before) for v in range(4)], dtype=z.dtype
            )
            p = SamplingParams(s.temperature)(z, None, LEGAL[0]).exp().tolist()
            if token != MASK:
                longer[(*before, token)] = mass
                continue
            longer |= {(*before, v): mass * p[v] for v in range(3)}
        out = longer
    return out


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
@pytest.mark.parametrize("spec", SAMPLERS.values(), ids=SAMPLERS)
@pytest.mark.thinned(3)
def test_free_positions_keep_their_distribution_given_the_tokens_before(spec, sampling):
    found = found_by(spec, sampling)
    right = [distribution(c, sampling) for c in range(CONTEXTS)]
    assert max(map(distance, found, right)) < EXACT


def test_the_draft_model_need_not_know_them():
    found = found_by(SAMPLERS["chain"], SAMPLING["plain"], drafted=None)
    right = [distribution(c, SAMPLING["plain"]) for c in range(CONTEXTS)]
    assert max(map(distance, found, right)) < EXACT


def test_without_known_tokens_the_distribution_is_another():
    found = found_by("autoregressive", SAMPLING["plain"], known=None)
    right = [distribution(c, SAMPLING["plain"]) for c in range(CONTEXTS)]
    assert min(map(distance, found, right)) > WRONG


def test_rows_that_other_items_replace_get_the_tokens_of_those():
    known = KNOWN[[0, 1, 2, 1, 0, 2]]
    network = CausalLM(small_llama(4))

    def decode(rows):
        prompt = torch.tensor([[1, 2], [0, 2], [2, 2], [1, 1], [0, 1], [2, 1]])
        made = CausalTarget(network, prompt, SPACE, SamplingParams())
        made.known = known
        made.at_most(rows)
        sampler = resolve_sampler("speculative_jacobi")[0]
        return sampler(made, CounterRNG(list(range(6)))).tokens

    together, replaced = decode(6), decode(2)
    assert torch.equal(together, replaced)
    assert torch.equal(torch.where(known == MASK, together, known), together)


def test_items_and_sampling_parameters_of_a_target_take_them_along():
    one = target([0, 1, 2], SAMPLING["plain"])
    greedy = one.with_params(SamplingParams(temperature=0))
    chosen = one.of_items(torch.tensor([2, 0]).numpy())
    assert torch.equal(greedy.known, KNOWN) and torch.equal(chosen.known, KNOWN[[2, 0]])
