"""Whole steps of the masked loop that are recorded once and replayed decode what steps without a
record do.

Tensors say that they lie on an accelerator (``host_waits``), so a step takes the ways that it takes
there.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from recording import TraceRecorder, recorded
from small_llama import small_llama

from gen.bench.estimate.host_waits import ACCELERATOR, HostWaits
from gen.core.registry import registry
from gen.core.rng import CounterRNG
from gen.core.sampler import resolve_sampler
from gen.core.stats import SampleOutput
from gen.core.token_space import TokenSpace
from gen.models.adapters.captured import captured_forward
from gen.models.adapters.language_models import MaskedLM
from gen.models.targets.masked import MaskedTarget
from gen.samplers.masked import loop
from gen.samplers.masked.step import MaskedStep

IDS, VOCAB, MASK, ROWS = 20, 24, 22, 5
SPACE = replace(
    TokenSpace.codes((4, 5), VOCAB, IDS),
    mask_token_id=MASK,
    eos_token_id=3,
    delimiters=(2, 4),
    rarity=torch.arange(1.0, VOCAB + 1),
)
LENGTHS = torch.tensor([4, 2, 4, 3, 1])
QUICK = ["fast_dllm", "maskgit_remask", "klass", "halton"]
# read values on the host; have a canvas for each token that is left out; compute parts of a canvas;
# read hidden states; judge chains of canvases in a loop of their own
STEPS_RUN = {"learn2pd", "llada2", "wino", "window_diffusion", "recap", "adjust"}
CHAINS = {"assd", "exact_speculative", "freedave"}
WEIGHTS = {"learn2pd": {"stop": "filled"}, "adjust": {"proposer": "categorical"}}
x = [
    n
    for n, p in registry.table("preset").items()
    if registry.get("sampler", p.sampler).protocol == "masked"
]


def target_of(net, spec, lengths, sampling, at_most) -> tuple:
    sampler, sampling = resolve_sampler(spec, {"guidance_scale": 2.0} | sampling)
    prompt = torch.arange(ROWS * 4).view(ROWS, 4) % IDS
    target = MaskedTarget(
        MaskedLM(net), prompt, SPACE, sampling, prompt.flip(1), lengths, lengths.flip(0)
    )
    target.at_most(at_most)
    return sampler, target


def decode(
    net, spec, lengths=LENGTHS, at_most: int = ROWS, **sampling
) -> tuple[SampleOutput, SampleOutput, TraceRecorder]:
    """Decode as usual, and from recorded steps: both outputs, and the recorder."""
    sampler, target = target_of(net, spec, lengths, sampling, at_most)
    want, meter = sampler(target, CounterRNG(range(ROWS))), HostWaits()
    sampler, target = target_of(net, spec, lengths, sampling, at_most)
    captured = captured_forward(target.model, recorded(meter))
    target.device = ACCELERATOR
    with meter:
        got = sampler(target, CounterRNG(range(ROWS)))
    return want, got, captured.recorder


def test_x():
    net = small_llama(VOCAB)
    print(x)
    for spec in x:
        try:
            want, got, recorder = decode(net, spec)
        except Exception as e:
            print(spec, type(e), str(e)[:300])
            continue
        print(spec, torch.equal(got.tokens, want.tokens), got.stats==want.stats,[s.nfe for s in got.stats], [s.nfe for s in want.stats], recorder.traces, recorder.replays, recorder.reads[:5])
