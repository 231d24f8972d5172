"""What tests of compiled forward passes share."""

from __future__ import annotations

import shutil

import pytest
import torch

from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.adapters.graphs import compiled_forward
from gen.models.adapters.language_models import MaskedLM
from gen.models.targets.masked import MaskedTarget

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="no C++ compiler here, which torch.compile needs on a CPU"
)


def grown(net):
    """Weights that make a small network sure of its tokens, in float64."""
    for p in net.double().eval().parameters():
        p.data.mul_(4) if p.dim() > 1 else None
    return net


def masked_rows(net, backend: str | None, length: int, guided: bool) -> MaskedTarget:
    """Three rows with conditions of three lengths and 16 tokens; the last token of the vocabulary
    is the mask. ``backend`` None is without a graph."""
    adapter = MaskedLM(net)
    if backend:
        compiled_forward(adapter, backend)
    prompt, size = torch.arange(12).view(3, 4) % 16, adapter.vocab_size
    legal = torch.zeros(length, size, dtype=torch.bool)
    legal[:, :16] = True
    space = TokenSpace((length,), size, legal, mask_token_id=size - 1)
    lengths = torch.tensor([2, 4, 3])
    if not guided:
        return MaskedTarget(adapter, prompt, space, SamplingParams(), None, lengths)
    uncond, sampling = prompt.flip(1), SamplingParams(guidance_scale=2.0)
    return MaskedTarget(adapter, prompt, space, sampling, uncond, lengths, torch.tensor([4, 4, 2]))
