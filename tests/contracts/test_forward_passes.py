"""How many forward calls a fixed small job takes, for every sampler and preset. What needs more of
them than ``forward_passes.json`` says has become worse.

    closed  models in closed form, float64 (``tabular``): nothing depends on the processor, so a
            figure that rose at all is a failure
    zoo     the embedded models in float64 under the modality's own distribution, for the samplers
    that pages
            talk about. Another processor rounds differently, which may turn a draw: a rise of 2 %
            is allowed

A figure that fell fails as well (by more than 2 % in the zoo): the file has to be true, or the next
rise would hide behind the gain. Renew it with

    PYTHONPATH=tests/support python tests/contracts/test_forward_passes.py --write [PART ...]

all of it, or the parts that are named (closed, image, text, ...), and say in the change why a
figure moved. A new sampler gets its entry in the same way.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from closed_form import GRID, PARAMETERS, ROWS, of_ids, of_numbers
from latent_bench import of_latents
from torch import Tensor

from gen.core.registry import registry
from gen.core.resolve import protocol_of, resolve_sampler
from gen.core.stats import SampleOutput
from gen.pipeline.pipeline import Pipeline, load
from gen.samplers.causal.couplings import Gumbel
from gen.testing.specs import NAMES, SPECS, sampling_for

FILE = Path(__file__).with_name("forward_passes.json")
RENEW = "PYTHONPATH=tests/support python tests/contracts/test_forward_passes.py --write"
Calls = dict[str, int]

# --- models in closed form


def counted(out: SampleOutput) -> Calls:
    """Forward calls, added up over rows; of the draft model too, where there is one."""
    found = {"nfe": sum(s.nfe for s in out.stats)}
    return (
        found
        if out.stats[0].draft_nfe is None
        else found | {"draft_nfe": sum(s.draft_nfe for s in out.stats)}
    )


def jobs() -> dict[str, Callable[[], Calls]]:
    """By name, everything that is registered, once per kind of token that it decodes."""

    def job(run: Callable, spec: Mapping, sampling: Mapping) -> Callable[[], Calls]:
        return lambda: counted(run(*resolve_sampler(spec, sampling)))

    found = {
        name: job(of_ids, SPECS[name] | PARAMETERS.get(name, {}), sampling_for(name))
        for name in NAMES
    }
    plain = {name: spec for name, spec in of_latents().items() if set(spec) == {"name"}}
    return found | {
        f"{name} (latents)": job(of_numbers, spec, {"temperature": 0.9})
        for name, spec in plain.items()
    }


# --- models of the zoo

JACOBI = [
    name
    for name, preset in registry.table("preset").items()
    if preset.sampler == "speculative_jacobi"
]
HEADLINE = list(
    dict.fromkeys(
        ["autoregressive", "speculative_jacobi", *JACOBI, "speculative", "maskgit", "halton"]
    )
)
COUNT = {"image": 1, "text": 12, "action": 6}  # prompts; two of the other modalities
# Without -m slow. Frozen outputs hold the counts of the others' usual samplers (test_frozen.py).
FAST = ("text", "action")
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


FRAMES = [
    name
    for kind in ("sampler", "preset")
    for name in registry.table(kind)
    if resolve_sampler(name)[0].protocol == "frames"
]


def of_modality(name: str) -> list[str]:
    """The samplers whose calls are held for a modality."""
    models = registry.get("modality", name).models
    if "frames-latents" in models:
        return FRAMES
    protocols = {key.partition("-")[0] for key in models}
    return [s for s in HEADLINE if protocol_of(s) in protocols]


ZOO = [(m, s) for m in MODALITIES for s in of_modality(m)]
MARKED = [pytest.param(m, s, marks=[] if m in FAST else [pytest.mark.slow]) for m, s in ZOO]

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
@pytest.mark.thinned(9)
def test_a_sampler_takes_no_more_forward_passes_than_it_took(name):
    assert not (problem := verdict("closed", name, jobs()[name](), held())), problem


@pytest.mark.parametrize(("modality", "sampler"), MARKED)
@pytest.mark.thinned(6)
def test_a_headline_sampler_takes_no_more_forward_passes_of_the_zoo(modality, sampler):
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
        verdict = step(self, *args, **kwargs)
        return replace(verdict, num_accepted=fewer(verdict.num_accepted))

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
