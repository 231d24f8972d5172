"""Whole steps of the masked loop that are recorded once and replayed decode what steps without a
record do.

Tensors say that they lie on an accelerator (``host_waits``), so a step takes the ways that it takes
there.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from recording import TraceRecorder, recorded
from small_llama import small_llama
from torch import Tensor

from gen.bench.estimate.host_waits import ACCELERATOR, HostWaits
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.stats import SampleOutput
from gen.core.token_space import TokenSpace
from gen.models.adapters.captured import captured_forward
from gen.models.adapters.language_models import MaskedLM
from gen.models.targets.masked import MaskedTarget
from gen.samplers.masked import iterative, loop
from gen.samplers.masked.step import MaskedStep, highest

IDS, VOCAB, MASK, ROWS = 20, 24, 22, 5
SPACE = replace(
    TokenSpace.codes((4, 5), VOCAB, IDS),
    mask_token_id=MASK,
    eos_token_id=3,
    delimiters=(2, 4),
    rarity=torch.arange(1.0, VOCAB + 1),
)
ONE_LENGTH, LENGTHS = torch.full((ROWS,), 4), torch.tensor([4, 2, 4, 3, 1])
FILTERS = {"temperature": 0.9, "top_k": 6, "top_p": 0.95}
QUICK = [
    ("fast_dllm", LENGTHS, ROWS),
    ("maskgit_remask", ONE_LENGTH, ROWS),
    ("klass", LENGTHS, 2),  # items that wait for a row
]
# parts that read values on the host, or ask for a canvas for each token that is left out
PASSES = {"learned", "edit", "wino"}
# the same of presets, and those whose cache has a pass compute parts of a canvas
OF_PASSES = {"learn2pd", "llada2", "wino", "recap", "window_diffusion"}
TRAINED = {"adjust"}  # weights that were trained for another model
CHAINS = {"assd", "exact_speculative", "freedave"}  # in a loop of their own
PRESETS = [
    name
    for name, preset in registry.table("preset").items()
    if registry.get("sampler", preset.sampler).protocol == "masked" and name not in CHAINS | TRAINED
]
KINDS = {"blocks": "block_schedule"} | {
    kind: kind for kind in ("order", "schedule", "proposer", "selector", "remasker", "stop")
}
PARTS = [
    (param, name)
    for param, kind in KINDS.items()
    for name in registry.table(kind)
    if (param, name) != ("proposer", "adjusted")
]
MORE = {
    "learned": {"filter": "text-filter"},
    "fixed": {"block_length": 6},
    "adaptive": {"block_length": 6},
    "lookahead": {"block_length": 6, "align_blocks": True},
    "sliding": {"block_length": 6},
    "scheduled_threshold": {"block_length": 6},
}


@pytest.fixture(scope="module")
def net():
    net = small_llama(VOCAB)
    net.lm_head.weight.data *= 6  # so that some positions are confident
    return net


@pytest.fixture
def replays(monkeypatch):
    """The numbers of rows of the steps that were replayed."""
    replay, rows = loop.replay, []
    monkeypatch.setattr(
        loop, "replay", lambda run, steps: (rows.append(len(run.batch.slots)), replay(run, steps))
    )
    return rows


def decode(
    net, spec, lengths=LENGTHS, at_most: int = ROWS, **sampling
) -> tuple[SampleOutput, SampleOutput, TraceRecorder]:
    """Decode as usual, and from recorded steps: both outputs, and the recorder."""
    sampler, params = resolve_sampler(spec, {"guidance_scale": 2.0} | sampling)
    prompt, outputs, meter = torch.arange(ROWS * 4).view(ROWS, 4) % IDS, [], HostWaits()
    captured = recorded(meter)
    for watched in (False, True):
        target = MaskedTarget(
            MaskedLM(net), prompt, SPACE, params, prompt.flip(1), lengths, lengths.flip(0)
        )
        target.at_most(at_most)
        if watched:
            captured_forward(target.model, captured)
            target.device = ACCELERATOR
        with meter if watched else nullcontext():
            outputs.append(sampler(target, CounterRNG(range(ROWS))))
    return outputs[0], outputs[1], captured.recorder


def check_same(want: SampleOutput, got: SampleOutput) -> None:
    assert torch.equal(got.tokens, want.tokens)
    for name in ("nfe", "tokens", "tokens_computed", "positions_computed", "partial_nfe"):
        assert [getattr(s, name) for s in got.stats] == [getattr(s, name) for s in want.stats], name


@pytest.mark.parametrize("spec, lengths, at_most", QUICK, ids=lambda x: str(x))
def test_steps_are_recorded_once_and_decode_the_same_tokens(net, replays, spec, lengths, at_most):
    want, got, recorder = decode(net, spec, lengths, at_most)
    check_same(want, got)
    assert not recorder.reads
    # all rows, a half, a quarter, each of prompts with padding and without
    assert set(replays) <= {at_most >> n for n in range(3)} and at_most in replays
    assert recorder.traces <= 8 and len(replays) > 4


def check_captured(net, spec, replays, captures: bool, **sampling) -> None:
    want, got, recorder = decode(net, spec, **sampling)
    check_same(want, got)
    assert bool(replays) == captures
    if captures:
        assert not recorder.reads and recorder.traces < 10


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_decodes_the_same_from_recorded_steps(net, replays, name):
    spec = {"name": name, "stop": "filled"} if name == "learn2pd" else name
    check_captured(net, spec, replays, name not in OF_PASSES, **FILTERS)


@pytest.mark.slow
@pytest.mark.parametrize("param, name", PARTS)
def test_every_part_decodes_the_same_in_recorded_steps(net, replays, param, name):
    spec = {"name": "masked_iterative", param: name, "steps": 8, **MORE.get(name, {})}
    check_captured(net, spec, replays, name not in PASSES)


def test_tokens_that_end_a_row_wait_in_recorded_steps_too(net, replays):
    spec = {"name": "llada", "hold_end": True, "stop": "end", "steps": 10}
    check_captured(net, spec, replays, True)


# --- controls


def with_selector(monkeypatch, select) -> None:
    """Let all runs select positions by a function of the step."""
    make = loop.make_parts
    monkeypatch.setattr(loop, "make_parts", lambda *args: replace(make(*args), selector=select))


def test_control_a_part_that_reads_a_value_is_caught(net, monkeypatch):
    def reads(step: MaskedStep) -> Tensor:
        return highest(step.score, step.eligible, step.quota + step.quota.max().item() * 0)

    with_selector(monkeypatch, reads)
    with pytest.raises(RuntimeError, match="get value out of a tracing tensor"):
        decode(net, "maskgit")


def test_control_a_part_that_freezes_a_value_decodes_other_tokens(net, monkeypatch):
    def frozen(step: MaskedStep) -> Tensor:
        quota = torch.from_numpy(step.quota.numpy().copy())  # which a trace does not notice
        return highest(step.score, step.eligible, quota)

    with_selector(monkeypatch, frozen)
    want, got, recorder = decode(net, "maskgit")
    assert recorder.reads and not torch.equal(got.tokens, want.tokens)


def test_parts_that_a_caller_gives_run_as_they_are(net, monkeypatch, replays):
    """They may read values: forward passes alone are replayed."""

    def reads(step: MaskedStep) -> Tensor:
        return highest(step.score, step.eligible, step.quota + step.quota.max().item() * 0)

    given = partial(loop.decode_masked, overrides={"selector": reads})
    monkeypatch.setattr(iterative, "decode_masked", given)
    want, got, recorder = decode(net, "maskgit")
    check_same(want, got)
    assert not replays and recorder.replays == max(s.nfe for s in got.stats)
