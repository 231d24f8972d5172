"""Causal runs that go back: some particles advance while the others wait, and runs that begin with
tokens that are known.

    advance_some(run, particles, block)    these particles go on by a block, the others stay
    load(run, tokens, lengths)             every particle goes on from a prefix of its own

Particles that wait are computed for nothing while others go on, and are not counted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from gen.core.errors import GenError
from gen.samplers.engine.causal_loop import CausalRun


def require_causal(run: Any, search: str, base: str) -> CausalRun:
    """Return the run of a causal base.

    Args:
        run: run of the base sampler.
        search: name of the search that needs it, for messages.
        base: name of the base sampler.

    Raises:
        GenError: it is a run of another kind.
    """
    if not isinstance(run, CausalRun):
        raise GenError(
            f"sampler {search} goes back to earlier positions, and its base {base!r} does not"
            " decode from left to right; expected a causal sampler such as 'autoregressive'"
        )
    return run


def advance_some(run: CausalRun, particles: np.ndarray, block: int) -> None:
    """Take some unfinished particles to the next position that is a multiple of a block.

    Args:
        run: the run.
        particles: particles that go on, bool [N]; one of them is unfinished.
        block: positions.
    """
    items, start = run.slots.items, run.start
    bound = np.full(len(particles), run.total)
    further = np.minimum((start // block + 1) * block, run.total)
    bound[items] = np.where(particles[items], further, start)
    run.bound = bound
    try:
        while len(run.slots) and bool((run.start < bound[run.slots.items]).any()):
            run.step()
    finally:
        run.bound = run.total


def load(run: CausalRun, tokens: Tensor, lengths: np.ndarray) -> None:
    """Let every particle of a fresh run go on behind tokens that are known, in one forward pass.

    The pass brings prompts and tokens into the cache and counts for the particles that have tokens.

    Args:
        run: run without a step, whose rows are all its particles.
        tokens: [N, T(, C)], of which the first ones of each particle are known.
        lengths: their number, int64 [N], less than T.

    Raises:
        GenError: the base drafts with a model of its own, whose cache lacks the tokens.
    """
    width = int(lengths.max(initial=0))
    if not width:
        return
    if len(run.slots.targets) > 1:
        raise GenError(
            "the base drafts with a model of its own, which cannot begin behind known tokens;"
            " expected a causal base without a draft model, such as 'autoregressive'"
        )
    here, target = run.here, run.target
    counted = np.maximum(lengths, 1)[:, None]
    # a column behind a prefix repeats the last one that exists, token and position
    positions = np.minimum(np.arange(width), counted - 1)
    row = here(np.arange(len(tokens))[:, None])
    # the token before position 0 is the prompt's, whatever is passed
    before = tokens[row, here(np.maximum(positions - 1, 0))]
    output = target.predict(before, here(positions))
    computed = output.num_computed_tokens - (width - counted[:, 0]) * target.branches
    recorder, items = run.recorder, run.slots.items
    recorder.add(items, computed, output.num_computed_positions, ran=lengths > 0)
    known = here(np.arange(run.total) < lengths[:, None])
    run.tokens.copy_(tokens.where(known.view(*known.shape, *[1] * (tokens.ndim - 2)), run.tokens))
    run.start = lengths.copy()
    run.last = run.tokens[row, here(counted - 1)].clone()
    if run.ends.stops is not None:  # the states of stops follow the tokens
        ids = tokens[:, :width].cpu().numpy()
        run.ends.tokens_to_end(items, np.zeros_like(lengths), ids, lengths)
