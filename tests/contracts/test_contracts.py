"""What every registered sampler and preset must do, whatever it is called. New ones are found
through the registry.

The checks are plain functions, and the controls at the end run them on samplers that are broken on
purpose.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from contract_bench import MASK, MASKED, ROWS, Bench, bench, canvas_of, model_for

from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.resolve import params, protocol_of, resolve_sampler
from gen.core.sampler import Sampler
from gen.core.sampling_params import SamplingParams
from gen.models.targets.causal import CausalTarget
from gen.testing.contract import (
    CHECKS,
    PARTS,
    check_declaration,
    check_keys,
    check_rows,
    check_tokens,
    check_traces,
)
from gen.testing.specs import NAMES, SPECS, STOPS, TRAINED, sampling_for

# a spec gives only the parameters that its sampler reads
pytestmark = pytest.mark.filterwarnings("error:sampler.*has no effect:UserWarning")

# --- everything that is registered


def test_all_parts_are_exercised():
    """The lists above are made from the registry; this says that it is not empty."""
    least = {
        "sampler": 5,
        "preset": 26,
        "selector": 13,
        "proposer": 3,
        "coupling": 4,
        "initialiser": 4,
        "order": 4,
        "schedule": 4,
        "verifier": 8,
        "length_policy": 3,
        "shape": 7,
        "remasker": 3,
    }
    assert all(len(registry.table(kind)) >= n for kind, n in least.items())
    samplers = [resolve_sampler(spec, sampling_for(name))[0] for name, spec in SPECS.items()]
    assert {type(s) for s in samplers} == {
        s for s in registry.table("sampler").values() if "codes" in s.kinds
    }
    for kind, param in PARTS.items():
        if kind == "stop":
            continue  # STOPS, below
        chosen = {vars(s).get(param) for s in samplers} - {None}
        assert chosen == set(registry.table(kind)) - TRAINED.get(kind, set())
    assert {s.stop for s in samplers if hasattr(s, "stop")} == STOPS


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.thinned(21)
def test_contract(name, check):
    sampler, sampling = resolve_sampler(SPECS[name], sampling_for(name))
    check(bench(sampler.protocol, model_for(sampler)), sampler, sampling)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if i % 2 else []) for i, n in enumerate(NAMES)],
)
@pytest.mark.thinned(11)
def test_contract_with_the_embedded_architecture(name):
    sampler, sampling = resolve_sampler(SPECS[name], sampling_for(name))
    run = bench(sampler.protocol, "llama")
    for check in CHECKS:
        check(run, sampler, sampling)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n for n in NAMES if protocol_of(SPECS[n]) in ("causal", "masked")]
)
def test_contract_with_int8_weights(name):
    pytest.importorskip("torchao", reason="make test-quantization has torchao")
    sampler, sampling = resolve_sampler(SPECS[name], sampling_for(name))
    run = bench(sampler.protocol, "int8")
    for check in CHECKS:
        check(run, sampler, sampling)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["autoregressive", "speculative_jacobi", "maskgit"])
def test_control_int8_weights_with_rows_that_depend_on_each_other_fail(name):
    pytest.importorskip("torchao", reason="make test-quantization has torchao")
    sampler, sampling = resolve_sampler(SPECS[name], sampling_for(name))
    run = bench(sampler.protocol, "int8")
    layer = run.model.model.model.layers[0].mlp.down_proj
    assert type(layer.weight) is not torch.nn.Parameter
    check_rows(run, sampler, sampling)
    layer.register_forward_hook(lambda module, given, out: out + 3 * out.mean(0, keepdim=True))
    run.model.network_changed()  # a hook is not for the fast forward
    with pytest.raises(AssertionError, match="a row depends on its batch"):
        check_rows(run, sampler, sampling)


def test_control_a_parameter_that_nothing_reads_is_an_error_here():
    with pytest.raises(UserWarning, match="sampler.kl_threshold is 0.5 but has no effect"):
        resolve_sampler({"name": "fast_dllm", "kl_threshold": 0.5})


@pytest.mark.parametrize("name", SPECS)
def test_declaration(name):
    check_declaration(resolve_sampler(SPECS[name], sampling_for(name))[0])


@pytest.mark.parametrize("name", registry.table("preset"))
def test_presets_are_samplers_with_parameters(name):
    preset = registry.get("preset", name)
    assert preset.name == name and preset.about
    assert set(preset.params) <= set(params(registry.get("sampler", preset.sampler)))
    sampler, sampling = resolve_sampler(name)
    assert all(getattr(sampler, k) == v for k, v in preset.params.items())
    assert all(getattr(sampling, k) == v for k, v in preset.sampling.items())


# --- editing: a canvas to start from


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.thinned(5)
def test_a_canvas_keeps_what_it_holds(name):
    sampler, sampling = resolve_sampler(SPECS[name], sampling_for(name))
    run = bench("masked", model_for(sampler))
    canvas = canvas_of(run.space)
    given = canvas.clone()
    tokens = run(sampler, sampling, canvas=canvas).tokens
    assert torch.equal(canvas, given), "the caller's canvas was written to"
    known = given != MASK
    assert torch.equal(tokens[known], given[known])
    assert bool(run.space.legal[torch.arange(run.space.length), tokens].all())
    check_traces(run, sampler, sampling, canvas)
    for row in range(ROWS):  # alone and in the batch
        assert torch.equal(
            run(sampler, sampling, [row], canvas=canvas[row : row + 1]).tokens[0], tokens[row]
        )


@pytest.mark.parametrize("name", [n for n in MASKED if n in registry.table("sampler")])
def test_illegal_canvases_are_refused(name):
    sampler, sampling = resolve_sampler(name, sampling_for(name))
    run = bench("masked", "tabular")
    for bad in (7, 1, 400, -1):  # a condition word; an id that is legal elsewhere; no ids at all
        canvas = canvas_of(run.space)
        canvas[1, 7] = bad
        with pytest.raises(GenError, match=rf"id {bad} at position 7 of row 1"):
            run(sampler, sampling, canvas=canvas)
    with pytest.raises(GenError, match="shape"):
        run(sampler, sampling, canvas=canvas_of(run.space)[:, :5])


# --- controls: every check fails on a sampler that breaks it


def broken(call: Callable, protocol: str = "causal") -> Sampler:
    """A registered sampler whose call is replaced."""
    base = registry.get("sampler", "autoregressive" if protocol == "causal" else "masked_iterative")
    return type(
        "Broken",
        (base,),
        {"__call__": call, "good": lambda self, *a, **k: base.__call__(self, *a, **k)},
    )()


def row_zero_noise(self, target, rng, **kwargs):
    """All rows share the noise of row 0."""
    rng.keys = rng.keys[:1].expand(len(rng.keys))
    return self.good(target, rng, **kwargs)


def global_noise(self, target, rng, **kwargs):
    """Noise from torch's global generator."""
    rng.keys = torch.randint(1 << 60, rng.keys.shape)
    return self.good(target, rng, **kwargs)


def leaves_the_mask(self, target, rng, **kwargs):
    """The last place is not filled."""
    out = self.good(target, rng, **kwargs)
    out.tokens[:, -1] = MASK
    return out


def ignores_legal_ids(self, target, rng, **kwargs):
    target.legal = torch.ones_like(target.legal)
    return self.good(target, rng, **kwargs)


def miscounts(self, target, rng, **kwargs):
    """One forward call is not counted."""
    out = self.good(target, rng, **kwargs)
    out.stats[1].nfe -= 1
    return out


def forgets_in_the_trace(self, target, rng, **kwargs):
    out = self.good(target, rng, **kwargs)
    if out.traces:
        out.traces[0][2].committed.clear()
    return out


def writes_into_the_prompt(self, target, rng, **kwargs):
    target.prompt[:] = 0
    return self.good(target, rng, **kwargs)


@pytest.mark.parametrize("protocol", ["causal", "masked"])
@pytest.mark.parametrize(
    ("call", "check"),
    [
        (row_zero_noise, check_rows),
        (row_zero_noise, check_keys),
        (global_noise, check_rows),
        (global_noise, check_keys),
        (global_noise, check_traces),
        (leaves_the_mask, check_tokens),
        (leaves_the_mask, check_traces),
        (ignores_legal_ids, check_tokens),
        (miscounts, check_traces),
        (forgets_in_the_trace, check_traces),
    ],
)
def test_control_a_broken_sampler_fails_its_check(call, check, protocol):
    run, sampling = bench(protocol, "tabular"), SamplingParams()
    check(
        run, broken(lambda self, *a, **k: self.good(*a, **k), protocol), sampling
    )  # unbroken, it passes
    with pytest.raises(AssertionError):
        check(run, broken(call, protocol), sampling)


class Aliased(CausalTarget):
    """Holds the caller's prompt itself."""

    def __init__(self, model, prompt, *args):
        super().__init__(model, prompt, *args)
        self.prompts.tokens = prompt


def test_control_a_sampler_may_not_write_into_the_prompt():
    run = bench("causal", "tabular")
    with pytest.raises(AssertionError, match="wrote into its condition"):
        Bench(run.model, Aliased, run.prompts, run.space, {})(
            broken(writes_into_the_prompt), SamplingParams()
        )
