"""How many forward calls a fixed small job takes, for every sampler and preset. What needs more of
them than ``forward_calls.json`` says has become worse.

    closed  models in closed form, float64 (``tabular``): nothing depends on the processor, so a
            figure that rose at all is a failure
    zoo     the embedded models in float64 under the modality's own law, for the samplers that pages
            talk about. Another processor rounds differently, which may turn a draw: a rise of 2 %
            is allowed

A figure that fell fails as well (by more than 2 % in the zoo): the file has to be true, or the next
rise would hide behind the gain. Renew it with

    python tests/test_forward_calls.py --write [closed | image | text | ...]

all of it, or the parts that are named, and say in the change why a figure moved. A new sampler gets
its entry in the same way.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from functools import cache
from inspect import signature
from pathlib import Path

import pytest
import torch
from continuous import LinearHead, LinearLatent
from contract_specs import NAMES, SPECS, sampling_for
from tabular import TabularBlocks, TabularCausal, TabularMasked, TokenBuffer, _logits, _scramble
from test_grid_latent import of_latents
from torch import Tensor

from gen.core.registry import registry
from gen.core.rng import CounterRNG
from gen.core.sampler import Sampler, resolve_sampler
from gen.core.sampling_params import SamplingParams
from gen.core.stats import SampleOutput
from gen.core.token_space import TokenSpace
from gen.models.targets.latent import CausalLatentTarget, MaskedLatentTarget
from gen.pipeline.pipeline import Pipeline, load
from gen.samplers.causal.couplings import Gumbel

FILE = Path(__file__).with_name("forward_calls.json")
RENEW = "python tests/test_forward_calls.py --write"
Calls = dict[str, int]

# --- models in closed form


class Leaning:
    """Of a place's law, a good part is the place's own and does not depend on what stands
    elsewhere: so drafts are often right, as real ones are, and a sampler that makes less of them is
    seen. ``own``: how much."""

    own = 6.0

    def at(self, states: Tensor, positions: Tensor) -> Tensor:
        position = _logits(_scramble(positions), self.vocab_size, 0.0, self.own)
        return position + _logits(states, self.vocab_size, 0.0, self.spread)


class LeaningCausal(Leaning, TabularCausal):
    def forward(self, tokens, positions, cache):
        return self.at(self._states(cache.write(tokens, positions)).gather(1, positions), positions)


class LeaningBlocks(Leaning, TabularBlocks):
    def forward(self, tokens, positions, last, cache):
        return self.at(
            _scramble(self._states(cache.write(tokens, positions)).gather(1, last) + positions),
            positions,
        )


class LeaningMasked(Leaning, TabularMasked):
    """A ``CacheableModel``: what a slot was last computed from is what others see there."""

    shift, own = (
        0,
        40.0,
    )  # sure of some places, or nothing that waits for certainty would ever take two at once

    def forward(self, ids, canvas_length):
        positions = torch.arange(ids.shape[1])[-canvas_length:].expand(len(ids), -1)
        return self.at(_scramble(self._states(ids)[:, -1:] + positions), positions)

    def new_cache(self, slots: int) -> TokenBuffer:
        return TokenBuffer(slots)

    def part(self, tokens, positions, seen, cache, keep, rows=None):
        if cache.ids is None:
            cache.ids = torch.full((len(tokens), cache.slots), -1)
        rows = torch.arange(len(tokens)) if rows is None else rows
        cache.ids[rows[:, None], positions] = tokens
        state = self._states(torch.where(seen, cache.ids[rows], -1))[:, -1:]
        return self.at(_scramble(state + positions), positions)[:, -keep:]


class LinearMasked(LinearLatent):
    """A masked model of latents: z is what words and known latents add up to, bent by the place."""

    def forward(self, words, canvas):
        given = self.embed_words(words).sum(1, keepdim=True) + canvas.nan_to_num(0).mean(
            1, keepdim=True
        )
        return self.memory * given + torch.sin(torch.arange(canvas.shape[1]).double())[:, None]


ROWS, GRID, V, MASK = 6, (4, 6), 16, 15  # ids 0-11 are tokens, 12-14 words of conditions
PROMPTS = torch.tensor([[r, 2 * r % 5, 12] for r in range(ROWS)])
KEYS = [31 * r + 7 for r in range(ROWS)]
LEANING = {"Causal": LeaningCausal, "Masked": LeaningMasked, "Blocks": LeaningBlocks}
PROTOCOLS: dict[str, tuple[type, Callable]] = {
    name: (p.targets["codes"], LEANING[p.closed_form])
    for name, p in registry.table("protocol").items()
}


def space() -> TokenSpace:
    legal = torch.zeros(GRID[0] * GRID[1], V, dtype=torch.bool)
    legal[:, :12] = True
    codebook = torch.stack([torch.arange(12) % 4, torch.arange(12) // 4], 1).float()
    return TokenSpace(GRID, V, legal, MASK, codebook, rarity=torch.arange(1, V + 1) / 2)


def of_ids(sampler: Sampler, sampling: SamplingParams) -> SampleOutput:
    """A job on models in closed form. A draft model is the target's kin: the law of a place is the
    same in its greater part."""
    uncond = torch.tensor([13, 14, 12]).expand(ROWS, -1) if sampling.guided else None

    def make(protocol, seed):
        return PROTOCOLS[protocol][0](
            PROTOCOLS[protocol][1](V, seed, spread=2.0), PROMPTS, space(), sampling, uncond
        )

    draft = make(sampler.draft_protocol or sampler.protocol, 3) if sampler.drafted else None
    return sampler(make(sampler.protocol, 1), CounterRNG(KEYS), draft=draft)


def of_numbers(sampler: Sampler, sampling: SamplingParams) -> SampleOutput:
    """The same for latents: the draft's transitions are the target's, a little to one side."""
    masked = sampler.protocol == "masked"
    target, model = (
        (MaskedLatentTarget, LinearMasked) if masked else (CausalLatentTarget, LinearLatent)
    )
    uncond = torch.full_like(PROMPTS, 13) if sampling.guided else None

    def made(shift):
        return target(
            model(LinearHead(2, (0.9, 0.6), shift=shift), memory=0.1),
            PROMPTS,
            TokenSpace.latents(GRID, 2),
            sampling,
            uncond,
        )

    return sampler(made(0.0), CounterRNG(KEYS), draft=made(0.2) if sampler.drafted else None)


def counted(out: SampleOutput) -> Calls:
    """Forward calls, added up over rows; of the draft model too, where there is one."""
    found = {"nfe": sum(s.nfe for s in out.stats)}
    return (
        found
        if out.stats[0].draft_nfe is None
        else found | {"draft_nfe": sum(s.draft_nfe for s in out.stats)}
    )


KNOBS = {"prophet": {"gap_threshold": 3.0, "steps": 24}}  # what twelve ids can be sure of


def jobs() -> dict[str, Callable[[], Calls]]:
    """By name, everything that is registered, once per kind of token that it decodes."""

    def job(run: Callable, spec: Mapping, sampling: Mapping) -> Callable[[], Calls]:
        return lambda: counted(run(*resolve_sampler(spec, sampling)))

    found = {
        name: job(of_ids, SPECS[name] | KNOBS.get(name, {}), sampling_for(name)) for name in NAMES
    }
    plain = {name: spec for name, spec in of_latents().items() if set(spec) == {"name"}}
    return found | {
        f"{name} (latents)": job(of_numbers, spec, {"temperature": 0.9})
        for name, spec in plain.items()
    }


# --- models of the zoo

USUAL = signature(Pipeline.__call__).parameters["sampler"].default
JACOBI = [
    name
    for name, preset in registry.table("preset").items()
    if preset.sampler == "speculative_jacobi"
]
HEADLINE = list(
    dict.fromkeys(
        [USUAL, "autoregressive", "speculative_jacobi", *JACOBI, "speculative", "maskgit", "halton"]
    )
)
COUNT = {"image": 1, "text": 12, "action": 6}  # prompts of those that are quick; two of the others
MODALITIES = [
    name for name, cls in registry.table("modality").items() if getattr(cls, "models", None)
]


@cache
def pipeline(modality: str) -> Pipeline:
    return load(modality, dtype="float64")


def on_zoo(modality: str, sampler: str) -> Calls:
    pipe = pipeline(modality)
    out = pipe(pipe.modality.example_prompts(COUNT.get(modality, 2), 0), sampler, seed=5)
    return counted(SampleOutput(out.tokens, out.stats))


ZOO = [(m, s) for m in MODALITIES for s in HEADLINE]
MARKED = [pytest.param(m, s, marks=[] if m in COUNT else [pytest.mark.slow]) for m, s in ZOO]

# --- what the file says


def held() -> dict[str, dict[str, Calls]]:
    """Part -> name -> calls."""
    return json.loads(FILE.read_text())


def verdict(part: str, name: str, found: Calls, said: Mapping[str, Mapping[str, Calls]]) -> str:
    """What is wrong with one figure; empty if nothing is."""
    there = said.get(part, {}).get(name)
    if there is None:
        return (
            f"{part}: {name} is not in {FILE.name}; expected its forward calls ({found}): run"
            f" `{RENEW} {part}` and look at what it writes"
        )
    if there.keys() != found.keys():
        return (
            f"{part}: {name} counts {', '.join(found)} and {FILE.name} {', '.join(there)}; run"
            f" `{RENEW} {part}`"
        )
    slack = 0.0 if part == "closed" else 0.02
    for key, n in found.items():
        if n > there[key] * (1 + slack):
            return (
                f"{part}: {name} takes {n} forward calls ({key}), and it took {there[key]}: it has"
                " become worse"
            )
        if n < there[key] * (1 - slack):
            return (
                f"{part}: {name} takes {n} forward calls ({key}), fewer than the {there[key]} of"
                f" {FILE.name}; run `{RENEW} {part}` so that the gain is held"
            )
    return ""


def strangers(said: Mapping[str, Mapping[str, Calls]]) -> list[str]:
    """What is registered and not in the file, and the other way round."""
    wanted = {("closed", name) for name in jobs()} | set(ZOO)
    there = {(part, name) for part, names in said.items() for name in names}
    return [
        f"{part}: {name} is not in {FILE.name}; add it with `{RENEW} {part}`"
        for part, name in sorted(wanted - there)
    ] + [
        f"{part}: {name} is in {FILE.name} and not registered; take it out with `{RENEW} {part}`"
        for part, name in sorted(there - wanted)
    ]


def write(parts: list[str]) -> None:
    """Renews the file, or some parts of it; parts that are no longer there go."""
    everything = ["closed", *MODALITIES]
    if unknown := set(parts) - set(everything):
        sys.exit(f"no parts {', '.join(sorted(unknown))}; expected some of {', '.join(everything)}")
    before = held() if FILE.exists() else {}
    said = {}
    for part in everything:
        if parts and part not in parts:
            said[part] = before.get(part, {})
        else:
            said[part] = (
                {n: job() for n, job in jobs().items()}
                if part == "closed"
                else {s: on_zoo(m, s) for m, s in ZOO if m == part}
            )

    def lines(names):
        return ",\n".join(f"    {json.dumps(n)}: {json.dumps(names[n])}" for n in sorted(names))

    FILE.write_text(
        "{\n"
        + ",\n".join(f'  "{part}": {{\n{lines(names)}\n  }}' for part, names in said.items())
        + "\n}\n"
    )


# --- tests


@pytest.mark.parametrize("name", jobs())
def test_a_sampler_takes_no_more_forward_calls_than_it_took(name):
    assert not (problem := verdict("closed", name, jobs()[name](), held())), problem


@pytest.mark.parametrize(("modality", "sampler"), MARKED)
def test_a_headline_sampler_takes_no_more_forward_calls_of_the_zoo(modality, sampler):
    assert not (problem := verdict(modality, sampler, on_zoo(modality, sampler), held())), problem


def test_the_file_names_what_is_registered_and_nothing_else():
    assert not (found := strangers(held())), "\n".join(found)


def test_the_job_tells_samplers_apart():
    """A job in which drafts are never right, or always, would see no loss."""
    said = held()["closed"]
    plain, positions = said["autoregressive"]["nfe"], ROWS * GRID[0] * GRID[1]
    assert plain == positions
    fast = ["speculative_jacobi", *JACOBI, "speculative", "cspd (latents)"]
    assert all(0.02 * plain < said[name]["nfe"] < 0.9 * plain for name in fast), {
        name: said[name] for name in fast
    }


# --- controls


def cut(step: Callable, fewer: Callable[[Tensor], Tensor]) -> Callable:
    """A coupling's step that accepts fewer drafts than it could: what it commits is as right as
    before."""

    def shortened(self, *args, **kwargs):
        accepted, *rest = step(self, *args, **kwargs)
        return (fewer(accepted), *rest)

    return shortened


def test_control_a_sampler_that_accepts_one_draft_fewer_is_found(monkeypatch):
    """Most of what it loses it gets back in the next round, so this is a small loss."""
    monkeypatch.setattr(Gumbel, "step", cut(Gumbel.step, lambda n: (n - 1).clamp_min(0)))
    found = jobs()["speculative_jacobi"]()
    assert "become worse" in verdict("closed", "speculative_jacobi", found, held())
    assert found["nfe"] < 1.1 * held()["closed"]["speculative_jacobi"]["nfe"]


def test_control_a_sampler_that_accepts_half_of_its_drafts_is_found_on_the_zoo(monkeypatch):
    monkeypatch.setattr(Gumbel, "step", cut(Gumbel.step, lambda n: n // 2))
    assert "become worse" in verdict(
        "action", "speculative_jacobi", on_zoo("action", "speculative_jacobi"), held()
    )


def test_control_one_call_more_or_fewer_is_found_and_rounding_is_not():
    said = {"closed": {"a": {"nfe": 100}}, "image": {"a": {"nfe": 100}}}

    def wrong(part, n):
        return verdict(part, "a", {"nfe": n}, said)

    assert (
        not wrong("closed", 100)
        and "become worse" in wrong("closed", 101)
        and "fewer than the 100" in wrong("closed", 99)
    )
    assert not wrong("image", 102) and not wrong("image", 98)
    assert "become worse" in wrong("image", 103) and "fewer than the 100" in wrong("image", 97)
    assert "counts nfe, draft_nfe" in verdict("closed", "a", {"nfe": 100, "draft_nfe": 1}, said)


def test_control_a_missing_entry_and_a_stale_one_are_found():
    said = held()
    del said["closed"]["maskgit"]
    said["image"]["of-old"] = {"nfe": 1}
    found = strangers(said)
    assert (
        len(found) == 2
        and "maskgit is not in" in found[0]
        and "of-old is in" in found[1]
        and all(RENEW in x for x in found)
    )
    assert "expected its forward calls" in verdict("closed", "maskgit", {"nfe": 1}, said)


if __name__ == "__main__":
    if sys.argv[1:2] != ["--write"]:
        sys.exit(__doc__)
    torch.set_num_threads(1)
    write(sys.argv[2:])
