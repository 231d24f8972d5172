"""Probe of a causal model for the slot cache: the model is run, because a class that ignores masks
or positions does not say so.

Drafts are verified in two rows at different positions, and what comes of the accepted tokens is
compared with the class's own pass over them. What may differ is measured as well: the same pass
with every module's output rounded once more, that is moved by up to the machine epsilon of its
dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gen.core.errors import GenError
from gen.models.load.networks import config_field
from gen.models.load.transformers_compat import is_recurrent

# tokens of each call, and how many of them each of two rows accepts: a prompt, drafts some of which
# are left behind, more drafts and a single token; the rows part after the second call
Calls = tuple[tuple[int, tuple[int, int]], ...]
CALLS: Calls = ((5, (5, 5)), (4, (4, 1)), (3, (1, 3)), (6, (6, 6)), (1, (1, 1)))
GOLDEN = 0.6180339887498949  # its multiples spread evenly, modulo 1
# ids at both ends of a vocabulary may be special tokens, untrained, where rounding grows to no end
FIRST_ID, SHARE = 0.1, 0.8
# times the noise. Right caches of networks of 2 to 30 layers differ by up to 0.7 in 16 bits and 1.1
# in float32, and those that are one slot off by 3 or more in bfloat16, 25 in float16 and 100,000 in
# float32. Sums of 16-bit products are kept in float32; those of float32 have no wider type, and
# another order of a long sum may move them further.
LIMITS = {torch.bfloat16: 1.5, torch.float16: 1.5, torch.float32: 100.0, torch.float64: 100.0}
ERRORS = (
    TypeError,
    ValueError,
    AttributeError,
    RuntimeError,
    IndexError,
    KeyError,
    NotImplementedError,
)


@torch.no_grad()
def require_slots(adapter, name: str, plain: Callable[[Tensor], Tensor]) -> None:
    """Compare the class's own forward pass with those of the adapter against its cache.

    Args:
        adapter: adapter of the model.
        name: name of the model, for messages.
        plain: the class's own call, tokens [B, L] -> logits [B, L, V].

    Raises:
        GenError: the model is an encoder-decoder or recurrent, its logits are no numbers, the
            distributions differ, or the class does not take the call.
    """
    called = f"model {name} ({type(adapter.model).__name__})"
    _require_attention(adapter.model, called)
    calls = _calls(adapter.max_positions)
    right, drafts = _tokens(adapter.vocab_size, adapter.device)
    right = right[:, : max(sum(row) for row in zip(*(n for _, n in calls), strict=True))]
    try:
        whole = plain(right)
        with rounded(adapter.model):
            moved = plain(right)
        rows = _verified(adapter, calls, right, drafts)
    except ERRORS as error:
        raise GenError(
            f"{called} does not work with gen's KV cache:"
            f" {' '.join(str(error).split())[:200]}; expected an architecture whose attention takes"
            " a 4-D mask and position ids"
        ) from None
    if whole.isnan().any():
        dtype = str(adapter.dtype).removeprefix("torch.")
        raise GenError(
            f"{called} has logits that are no numbers in {dtype}; expected another dtype"
        )
    # without the prompt, which no cache has a part in
    behind = slice(calls[0][0] if len(calls) > 1 else 0, None)
    noise = float(_distance(moved, whole)[:, behind].median())
    far = max(
        float(_distance(row, x[: len(row)])[behind].median())
        for row, x in zip(rows, whole, strict=True)
    )
    if not far <= LIMITS[adapter.dtype] * noise:
        raise GenError(
            f"{called} changes its log-probabilities with gen's KV cache (by {far:.2g}, where"
            f" rounding changes them by {noise:.2g}); expected an architecture whose attention"
            " takes a 4-D mask and position ids"
        )


def _require_attention(model: nn.Module, called: str) -> None:
    """Raise ``GenError`` for a model whose state is not keys and values by position."""
    if config_field(model.config, "is_encoder_decoder"):
        raise GenError(
            f"{called} is an encoder-decoder model, whose prompt is read by an encoder; expected a"
            " decoder-only language model, or an encoder-decoder of a family that gen has"
        )
    if is_recurrent(model):
        raise GenError(
            f"{called} is recurrent: layers carry a state from token to token, which a rejected"
            " draft has already changed; expected a model whose layers are all attention"
        )


def _calls(room: int | None) -> Calls:
    """Return as many of ``CALLS`` as a model has positions for, at least the first."""
    fit = (n for n in range(len(CALLS), 1, -1) if room is None or _slots(CALLS[:n]) <= room)
    return CALLS[: next(fit, 1)]


def _slots(calls: Calls) -> int:
    """Count the positions that calls write to."""
    starts, most = (0, 0), 0
    for width, accepted in calls:
        most = max(most, *(start + width for start in starts))
        starts = (starts[0] + accepted[0], starts[1] + accepted[1])
    return most


def _tokens(vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the tokens that are accepted and drafts that are not, each [2, L], spread over the
    vocabulary."""
    length = sum(width for width, _ in CALLS)
    share = torch.arange(4 * length, dtype=torch.float64) * GOLDEN % 1
    ids = ((FIRST_ID + SHARE * share) * vocab_size).long().view(2, 2, length).to(device)
    return ids[0], ids[1]


def _verified(adapter, calls: Calls, right: Tensor, drafts: Tensor) -> list[Tensor]:
    """Run the calls against a cache, and return the logits [n, V] of each row's accepted tokens."""
    length, start = right.shape[1], right.new_zeros(2, 1)
    cache = adapter.new_cache(_slots(calls))
    found: list[list[Tensor]] = [[], []]
    for width, accepted in calls:
        column = torch.arange(width, device=right.device)
        positions, count = start + column, right.new_tensor(accepted)[:, None]
        wanted = right.gather(1, positions.clamp_max(length - 1))
        tokens = torch.where(column < count, wanted, drafts.gather(1, positions))
        logits = adapter.forward(tokens, positions, cache)
        for row, n in enumerate(accepted):
            found[row].append(logits[row, :n])
        start = start + count
    return [torch.cat(row) for row in found]


@contextmanager
def rounded(model: nn.Module) -> Iterator[None]:
    """Let every module without children move its output by a random part of the machine epsilon,
    as another kernel might round it."""
    generator = torch.Generator().manual_seed(0)

    def move(module: nn.Module, inputs: tuple, output: object) -> Tensor | None:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return None
        wide = output if output.dtype == torch.float64 else output.float()
        part = torch.rand(output.shape, generator=generator, dtype=wide.dtype).to(wide.device)
        # norms, rotations or routers of a network in float64 may be computed in float32
        eps = max(torch.finfo(output.dtype).eps, torch.finfo(torch.float32).eps)
        return (wide * (1 + eps * (2 * part - 1))).to(output.dtype)

    hooks = [m.register_forward_hook(move) for m in model.modules() if not list(m.children())]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """Return the root mean square over the vocabulary of the differences of log-probabilities of
    logits [..., V]: [...]."""
    a, b = (x.double().log_softmax(-1) for x in (a, b))
    return torch.where(a == b, 0.0, a - b).square().mean(-1).sqrt()
