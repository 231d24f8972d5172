"""Teachers and batches that kinds of drafters are tested with."""

from __future__ import annotations

import torch
from trained_drafters import target

from gen.models.targets.causal import CausalTarget
from gen.recipes.drafters.data import Batch, Teacher

V, LENGTH = 20, 8


def teacher(of: CausalTarget | None = None) -> Teacher:
    """A teacher of the small Llama."""
    of = target(LENGTH, V) if of is None else of
    made = Teacher.__new__(Teacher)
    vars(made).update(
        target=of, model=of.model, sampling=of.sampling, layers=(), pipe=None, items=[]
    )
    return made


def known_sequence() -> Batch:
    """Two sequences 1, 2, 3 ... that the target is certain of; states are numbered by the token
    that they predict."""
    tokens = torch.arange(1, LENGTH + 1).repeat(2, 1)
    logp = torch.where(torch.eye(V)[tokens] > 0, 0.0, -torch.inf)
    states = {"model.norm": torch.eye(16)[tokens - 1].float()}
    prompt, length = torch.zeros(2, 3, dtype=torch.long), torch.tensor([3, 2])
    return Batch(prompt, length, tokens, torch.ones(2, LENGTH), logp, states, {})


def drawn_batch(layers: tuple[str, ...] = ()) -> tuple[Teacher, Batch]:
    made = teacher().with_layers(layers)
    made.target.model.model.requires_grad_(False)
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(0, V, (3, LENGTH), generator=generator)
    return made, made.batch(torch.arange(3), tokens)
