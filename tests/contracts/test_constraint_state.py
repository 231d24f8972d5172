"""Constraints with a state per row, and blocks of a token space."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gen.contracts.constraint import FromHistory, pack_bitmask, unpack_bitmask
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.token_space import TokenSpace

V, T, ROWS = 70, 6, 3


class NoRepeat:
    """No token comes twice, and the first one is below 40."""

    def legal(self, history, positions):
        before = torch.arange(history.shape[1]) < positions[..., None]  # [n, L, T]
        used = torch.nn.functional.one_hot(history, V).bool()[:, None] & before[..., None]
        legal = ~used.any(2)
        legal[..., 40:] &= (positions > 0)[..., None]
        return legal


def recomputed(tokens: list[torch.Tensor]) -> torch.Tensor:
    """Return what the rule allows after some tokens [ROWS] each, from nothing: bool [ROWS, V]."""
    history = torch.zeros(ROWS, T, dtype=torch.long)
    for n, column in enumerate(tokens):
        history[:, n] = column
    return NoRepeat().legal(history, torch.full((ROWS, 1), len(tokens)))[:, 0]


def test_a_bitmask_is_the_dense_mask():
    legal = torch.rand(ROWS, V, generator=torch.Generator().manual_seed(0)) < 0.5
    legal[0, 31], legal[1, 31], legal[:, 63] = True, False, True
    packed = pack_bitmask(legal)
    assert packed.dtype == torch.int32 and packed.shape == (ROWS, 3)
    assert torch.equal(unpack_bitmask(packed, V), legal)
    assert int(packed[0, 0]) < 0 <= int(packed[1, 0])  # the sign is bit 31
    assert not torch.equal(unpack_bitmask(packed ^ 1, V), legal)  # control: one bit matters


def test_advancing_and_rolling_back_is_recomputing():
    state = registry.get("constraint", "from_history")(NoRepeat(), V, T).start(ROWS)
    tokens: list[torch.Tensor] = []
    generator = torch.Generator().manual_seed(1)
    seen = set()
    for move in (1, 1, 1, -2, 1, 1, 1, 1, -4, 1):
        if move < 0:
            state.rollback(-move)
            del tokens[move:]
        else:
            tokens.append(torch.randint(V, (ROWS,), generator=generator))
            state.advance(tokens[-1])
        allowed = unpack_bitmask(state.allowed_bitmask(), V)
        assert torch.equal(allowed, recomputed(tokens))
        seen.add(int(allowed.sum()))
    assert len(seen) > 2
    assert not torch.equal(allowed, recomputed(tokens[:-1]))  # control: the last token matters
    with pytest.raises(GenError, match="expected 0 to"):
        state.rollback(T + 1)


def test_a_state_takes_no_more_tokens_than_a_row_has():
    state = FromHistory(NoRepeat(), V, 1).start(ROWS)
    state.advance(torch.zeros(ROWS, dtype=torch.long))
    with pytest.raises(GenError, match="expected no further one"):
        state.advance(torch.zeros(ROWS, dtype=torch.long))


def test_unequal_blocks_cover_the_grid_in_order():
    space = TokenSpace.codes((21,), 8, 8)
    scales = (slice(0, 1), slice(1, 5), slice(5, 21))
    assert replace(space, blocks=scales).blocks == scales
    assert replace(space, blocks=scales).suffix(3).blocks == (slice(0, 2), slice(2, 18))
    for wrong in (scales[:2], scales[1:], (*scales, slice(21, 21)), (scales[0], slice(2, 21))):
        with pytest.raises(GenError, match="block"):
            replace(space, blocks=wrong)
