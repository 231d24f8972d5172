"""States of a masked step as plain lists, for tests of selectors."""

from __future__ import annotations

import torch
from masked_bench import MASK, SPACE
from masked_steps import masked_step

from gen.core.rng import CounterRNG
from gen.samplers.engine.rows import RowStore
from gen.samplers.masked.step import MaskedStep

SUREST = {
    "proposer": "argmax",
    "confidence_on": "raw",
    "order": "confidence",
    "choice_temperature": 0.0,
}


DARING = {
    "conf_threshold": 0.5,
    "low_threshold": 0.4,
    "entropy_bound": 0.9,
    "factor": 1.6,
    "kl_threshold": 0.3,
    "radius": 2,
    "buffer_size": 3,
}


B, T, V = 24, 10, 4


def states(seed: int, sampler, steps: int = 4) -> list[MaskedStep]:
    """Steps that follow each other, of rows whose blocks begin anew now and then and whose
    distributions move a little; many values are equal."""
    g = torch.Generator().manual_seed(seed)
    kind = torch.randint(0, 3, (B, T), generator=g)  # prefilled, masked, committed
    memory, out = RowStore(), []
    kind[:, 3] = 1
    edges = torch.randint(0, 3, (B, 1), generator=g), torch.randint(7, T + 1, (B, 1), generator=g)
    position, logits, row = (
        torch.arange(T),
        torch.randint(0, 4, (B, T, V), generator=g).double(),
        torch.arange(B),
    )
    for step in range(steps):
        logits = logits + torch.randint(0, 2, (B, T, V), generator=g) * torch.randint(
            -1, 2, (B, T, 1), generator=g
        )
        sampling, masked = logits.log_softmax(-1), kind == 1
        is_open = (position >= edges[0]) & (position < edges[1])
        wanted = (masked & is_open).sum(1)
        drawn = sampling.argmax(-1) if seed % 2 else torch.randint(0, V, (B, T), generator=g)
        tokens = torch.where(masked, drawn, 0)
        logp = sampling.gather(-1, tokens[..., None])[..., 0]
        score = logp if seed % 3 else torch.randint(-3, 1, (B, T), generator=g).double()
        begins = torch.full((B,), True) if not step else torch.rand(B, generator=g) < 0.2
        steps_in_block = torch.randint(0, 4, (B,), generator=g)
        at_start = wanted + torch.randint(0, 4, (B,), generator=g)
        progress = (steps_in_block + 1) / torch.full((B,), 4.0).double()
        now = masked_step(
            CounterRNG(range(B)),
            row,
            row * 0 + step,
            SPACE,
            sampler,
            memory,
            canvas=torch.where(masked, MASK, 0),
            prefilled=kind == 0,
            masked=masked,
            logprobs=sampling,
            raw_logprobs=lambda sampling=sampling: sampling,
            committed_logp=torch.zeros(B, T).double(),
            open=is_open,
            proposed_tokens=tokens,
            logp=logp,
            score=score,
            is_first_step=begins,
            steps_in_block=steps_in_block,
            num_masked_at_start=at_start,
            progress=progress,
            is_last_step=progress >= 1,
            quota=1 + (torch.rand(B, generator=g) * wanted).long(),
        )
        out.append(now)
    return out
