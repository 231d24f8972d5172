"""Closed-form masked models and recorders for tests of caches of masked samplers."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.adapters.language_models import MaskedLM
from gen.models.nets.grid import GridLlamaConfig, GridLlamaForCausalLM
from gen.models.targets.masked import MaskedTarget
from gen.samplers.masked.iterative import MaskedIterative

Sampler = MaskedIterative


V, MASK, GRID, T, P, ROWS = 12, 11, (4, 4), 16, 3, 4  # ids 0-7 are tokens, 8-10 words of conditions


SMALL = {
    "vocab_size": V,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.6,
    "max_position_embeddings": 128,
}


SAMPLING_CASES = {
    "plain": SamplingParams(),
    "guided": SamplingParams(temperature=0.9, guidance_scale=1.6),
}


SPACE = TokenSpace.codes(GRID, 8, V, MASK)


# small numbers, so that every policy keeps something on this canvas
BASE = {
    "steps": 8,
    "order": "random",
    "schedule": "linear",
    "blocks": "fixed",
    "block_length": 4,
    "cache_before": 2,
    "cache_after": 2,
    "cache_radius": 1,
    "cache_warmup": 2,
    "cache_active": 3,
}


@cache
def model(name: str, layers: int = 2, adapter=MaskedLM):
    torch.manual_seed(3)
    shape = {**SMALL, "num_hidden_layers": layers}
    shifted = name.endswith("shifted")
    if name.startswith("grid"):
        net = GridLlamaForCausalLM(
            GridLlamaConfig(
                GRID, P, codebook_size=8, causal=False, shifted=shifted, mask_token_id=MASK, **shape
            )
        )
    else:
        net = LlamaForCausalLM(LlamaConfig(**shape))
        net.config.shifted = shifted
    return adapter(net.double())


def conditions(
    rows: list[int], ragged: bool, base: int = 8, extra: int = 0
) -> tuple[Tensor, Tensor]:
    """Padded on the right with ``extra`` columns more than needed and an id that no model has."""
    lengths = torch.tensor([[P, 1, 2, P][r] if ragged else P for r in rows])
    ids = torch.tensor([[(base + r * 2 + i) % 3 + 8 for i in range(P)] for r in rows])
    ids = torch.where(torch.arange(P) < lengths[:, None], ids, 99)
    return torch.nn.functional.pad(ids, (0, extra), value=99), lengths


def target(
    net,
    sampling: SamplingParams = SAMPLING_CASES["plain"],
    rows: list[int] | None = None,
    ragged: bool = False,
    extra: int = 0,
    space=SPACE,
) -> MaskedTarget:
    rows = list(range(ROWS)) if rows is None else rows
    prompt, length = conditions(rows, ragged, extra=extra)
    uncond, uncond_length = (
        conditions([r + 1 - 4 * (r == 3) for r in rows], ragged, 9, extra)
        if sampling.guided
        else (None, None)
    )
    return MaskedTarget(net, prompt, space, sampling, uncond, length, uncond_length)


def canvas(rows: list[int] | None = None) -> Tensor:
    """Empty; every third known; the first half known; two known. So rows are in different blocks
    soon."""
    out = torch.full((ROWS, T), MASK)
    known = torch.arange(T) * 3 % 8
    out[1, ::3], out[2, :6], out[3, 9:11] = known[::3], known[:6], known[9:11]
    return out if rows is None else out[rows]


def decode(of: MaskedTarget, rows: list[int] | None = None, start: Tensor | None = None, **params):
    rows = list(range(ROWS)) if rows is None else rows
    return Sampler(**{**BASE, **params})(
        of,
        CounterRNG([31 * r + 7 for r in rows]),
        canvas=canvas(rows) if start is None else start,
    )


class Seen(MaskedLM):
    """A control: padding is looked at."""

    def forward(self, ids, canvas_length, left_padding=None):
        return super().forward(ids, canvas_length)
