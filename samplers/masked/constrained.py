"""Tokens that are committed under an automaton over the canvas, one after the other.

The forward pass gives distributions over the tokens that may stand at each position, given what the
canvas holds (``gen.models.targets.canvas_rule``). Tokens for several positions may be allowed each,
and not together. So the loop writes what a step changes in this order:

    1. positions that are masked again, which only widens what may stand elsewhere
    2. selected positions, highest score first. A token that may not stand beside those written
       before it is redrawn: from the distribution of the step, restricted to the tokens that may;
       where its filters (top-k and so on) left none of these, from the distribution that the
       filters make of these alone
    3. replaced tokens, from the left; a replacement that may not stand is left out

After every write some filling of the masked positions is accepted, so that no canvas is a dead end.
Where all tokens of a row may stand together, none of them changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gen.core.distributions import has_no_distribution
from gen.core.errors import GenError
from gen.samplers.engine.failed import refuse_failed
from gen.samplers.masked.step import MaskedStep, ranked


@dataclass(frozen=True)
class Changes:
    """Changes of b canvases of T positions.

    Attributes:
        tokens: tokens of the selected and replaced positions, long [b, T].
        selected: masked positions to write, bool [b, T].
        removed: positions to mask again, bool [b, T].
        replaced: positions whose token changes, bool [b, T].
    """

    tokens: Tensor
    selected: Tensor
    removed: Tensor
    replaced: Tensor


@dataclass(frozen=True)
class Settled:
    """Changes that leave canvases which can be completed.

    Attributes:
        tokens: tokens of the changes, some of them redrawn, long [b, T].
        replaced: replaced positions that are left, bool [b, T].
        logp: log-probability of each redrawn token in the distribution that it was redrawn from,
            float64 [b, T]; NaN where none was redrawn.
    """

    tokens: Tensor
    replaced: Tensor
    logp: Tensor


def check_completable(target, canvas: Tensor) -> None:
    """Refuse canvases that no filling completes.

    Args:
        target: the masked target.
        canvas: long [N, T].

    Raises:
        GenError: the tokens of a canvas contradict the constraint of the token space; the message
            names the first position up to which they do.
    """
    states = target.canvases(canvas)
    if states is None:
        return
    for number, row in enumerate(states.rows):
        if not row.is_completable:
            whole = states.rule.first_contradiction(row)
            raise GenError(
                f"the canvas holds token id {row.tokens[whole]} at position"
                f" {whole - states.first} of row {number}, which the constraint forbids there after"
                " the tokens before it; expected a canvas that some filling completes"
            )


def settle(
    target, step: MaskedStep, canvas: Tensor, changes: Changes, takes_likeliest: bool
) -> Settled:
    """Write changes to canvases one after the other, in the order of the module.

    Args:
        target: the masked target.
        step: step with its proposal.
        canvas: canvases before the changes, long [b, T].
        changes: what the parts of the loop want to write.
        takes_likeliest: whether the likeliest token is taken instead of a draw.

    Raises:
        GenError: a position has no distribution over the tokens that may stand there.
    """
    states = target.canvases(canvas)
    assert step.proposal is not None and step.proposal.score is not None
    order = ranked(step.score, changes.selected).argsort(1)
    host = [x.cpu().numpy() for x in (order, changes.tokens, changes.selected)]
    orders, tokens, selected = host
    removed, replaced = changes.removed.cpu().numpy(), changes.replaced.cpu().numpy()
    tokens, replaced = tokens.copy(), replaced.copy()
    logp = np.full(tokens.shape, np.nan)
    for number, shared in enumerate(states.rows):
        positions = orders[number][selected[number][orders[number]]]
        row, first = shared.copy(), states.first
        row.write(removed[number].nonzero()[0] + first, -1)
        together = row.copy()
        together.write(positions + first, tokens[number, positions])
        if together.is_completable:
            row = together
        else:
            for position in positions:
                token = tokens[number, position]
                if not row.fits(position + first, token):
                    may = row.allowed(position + first)
                    token, logp[number, position] = redraw(
                        target, step, number, position, may, takes_likeliest
                    )
                    tokens[number, position] = token
                row.write(np.array([position + first]), token)
        for position in replaced[number].nonzero()[0]:
            token = tokens[number, position]
            replaced[number, position] = row.fits(position + first, token)
            if replaced[number, position]:
                row.write(np.array([position + first]), token)
        states.rule.remember(row)
    device = canvas.device
    return Settled(*(torch.from_numpy(x).to(device) for x in (tokens, replaced, logp)))


def redraw(
    target,
    step: MaskedStep,
    row: int,
    position: int,
    allowed: np.ndarray,
    takes_likeliest: bool,
) -> tuple[int, float]:
    """Draw a token for one position from those that may stand there now.

    Args:
        target: the masked target.
        step: step with its proposal.
        row: row of the batch.
        position: position of the canvas.
        allowed: tokens that may stand there, bool [V].
        takes_likeliest: whether to take the likeliest of them.

    Returns:
        The token and its log-probability in the distribution that it was drawn from.

    Raises:
        GenError: the position has no distribution over these tokens.
    """
    assert step.proposal is not None and step.proposal.logprobs is not None
    assert step.prediction is not None and step.prediction.under is not None
    device = step.rows.device
    may, number = torch.from_numpy(allowed).to(device), torch.tensor([row], device=device)
    at = torch.tensor([position], device=device)
    logprobs = step.proposal.logprobs[row, position].masked_fill(~may, -torch.inf)
    if bool(logprobs.amax() > -torch.inf):
        logprobs = logprobs.log_softmax(-1)
    else:
        logprobs = step.prediction.under(number, at, may[None])[0]
    if bool(has_no_distribution(logprobs)):
        failed = np.full(len(step.rows), -1)
        failed[row] = position
        refuse_failed(target, step.rows.cpu().numpy(), failed)
    if takes_likeliest:
        token = int(logprobs.argmax())
    else:
        rows, index = step.rows[number], step.step_index[number]
        active = torch.ones_like(at[None], dtype=torch.bool)
        drawn = step.rng.categorical(logprobs[None, None], rows, at[None], "redraw", index, active)
        token = int(drawn)
    return token, float(logprobs[token])
