"""Every method that declares a limit is what the declaration says there: the simpler method, token
for token, or one position per forward pass, or the exact sampler."""

from __future__ import annotations

from dataclasses import replace

import pytest
from closed_form import GRID, PARAMETERS, of_ids, of_numbers

from gen.core.method import GREEDY_DECODING, SEQUENTIAL, Preset
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.samplers.causal.jacobi import SpeculativeJacobi
from gen.samplers.worlds.next_frame import ONE_AHEAD

PRESETS: dict[str, Preset] = {
    name: preset for name, preset in registry.table("preset").items() if preset.limit
}
EVERY = registry.table("preset")
POSITIONS = GRID[0] * GRID[1]
TWO, PLAIN = "two positions per forward pass", "plain autoregression"
KINDS = {SEQUENTIAL: 1, TWO: 2}
MORE = {"learn2pd": {"stop": "filled"}}  # the space has no eos token


def at_limit(name: str) -> dict:
    """Parameters of a preset at its limit."""
    limit = PRESETS[name].limit
    steps = {"steps": POSITIONS} if "as many `steps` as positions" in limit.note else {}
    return {"name": name, **PARAMETERS.get(name, {}), **MORE.get(name, {}), **limit.params, **steps}


def run(spec: dict):
    sampler, sampling = resolve_sampler(spec)
    bench = of_ids if "codes" in sampler.kinds else of_numbers
    return bench(sampler, sampling)


@pytest.mark.parametrize("name", [n for n, p in PRESETS.items() if p.limit.equals in KINDS])
@pytest.mark.thinned(3)
def test_positions_per_forward_pass(name):
    out = run(at_limit(name))
    least = POSITIONS // KINDS[PRESETS[name].limit.equals]
    assert [s.nfe for s in out.stats] == [least] * len(out.stats)


@pytest.mark.parametrize("name", [n for n, p in PRESETS.items() if p.limit.equals in EVERY])
@pytest.mark.thinned(3)
def test_a_simpler_preset(name):
    limit = PRESETS[name].limit
    steps = {k: v for k, v in at_limit(name).items() if k in ("steps", "gap_threshold")}
    found, simple = run(at_limit(name)), run({"name": limit.equals, **steps, **limit.preset})
    assert found.tokens.equal(simple.tokens)
    assert [s.nfe for s in found.stats] == [s.nfe for s in simple.stats]


@pytest.mark.parametrize(
    "name", [n for n, p in PRESETS.items() if p.limit.equals == GREEDY_DECODING]
)
def test_greedy_decoding(name):
    found = run(at_limit(name))
    greedy = of_ids(*resolve_sampler("autoregressive", {"temperature": 0.0}))
    assert found.tokens.equal(greedy.tokens)
    assert [s.nfe for s in found.stats] == [s.nfe for s in greedy.stats]
    assert not run({"name": name}).tokens.equal(greedy.tokens), "the limit changes nothing"


@pytest.mark.parametrize("name", [n for n, p in PRESETS.items() if p.limit.equals == PLAIN])
def test_the_exact_sampler(name):
    """With the same drafter and verifier ``token``, whose distribution is the model's."""
    sampler, sampling = resolve_sampler(at_limit(name))
    if isinstance(sampler, SpeculativeJacobi) or sampler.drafter == "jacobi":
        exact = {"coupling": sampler.coupling, "window": sampler.window, "init": sampler.init}
        wanted = run({"name": "speculative_jacobi", **exact})
    else:
        wanted = run({"name": "speculative", "drafter": sampler.drafter})
    found = of_ids(sampler, sampling)
    assert sampler.guarantee == "same_distribution" and found.tokens.equal(wanted.tokens)
    assert [s.nfe for s in found.stats] == [s.nfe for s in wanted.stats]


def test_every_limit_is_of_a_kind_that_is_tested():
    for name, preset in PRESETS.items():
        assert preset.limit.equals in (*KINDS, PLAIN, GREEDY_DECODING, ONE_AHEAD, *EVERY), name


def test_control_a_method_away_from_its_limit_is_another():
    limit = PRESETS["fast_dllm"].limit
    assert limit.equals == SEQUENTIAL and replace(limit, params={}) != limit
    out = run({"name": "fast_dllm", "conf_threshold": 0.3})
    assert all(s.nfe < POSITIONS for s in out.stats)
    relaxed, exact = run({"name": "typical"}), run(at_limit("typical"))
    assert not relaxed.tokens.equal(exact.tokens)
