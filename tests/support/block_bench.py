"""Closed-form targets of models that decode by blocks."""

from __future__ import annotations

import torch

from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.targets.block import BlockTarget


def target_of(
    model, space: TokenSpace, sampling: SamplingParams, contexts: list[int]
) -> BlockTarget:
    prompt = torch.tensor([[31 + c, 40] for c in contexts])
    uncond = torch.tensor([[50, 51 + c] for c in contexts]) if sampling.guided else None
    return BlockTarget(model, prompt, space, sampling, uncond)
