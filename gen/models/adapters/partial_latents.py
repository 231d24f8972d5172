"""Masked models of latents that compute some of their positions: encoder and decoder, each with a
key-value cache whose slot is the column of the position.

Columns are the P positions that the network has before the canvas, then the T of the canvas. One
more slot takes what shorter rows write in their place; nothing attends to it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gen.models.adapters.protocols import EncoderDecoder, ModelCache
from gen.models.adapters.slot_cache import SlotCache


class LatentCache(ModelCache):
    """Keys and values of encoder and decoder. ``layers``: of both. ``slots``: P + T."""

    def __init__(self, layers: tuple[int, int], slots: int):
        self.slots = slots
        self.encoder, self.decoder = (SlotCache(n, slots + 1) for n in layers)

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but the given ones (long or bool [B])."""
        self.encoder.keep(rows)
        self.decoder.keep(rows)


def conditioning_part(
    net: EncoderDecoder,
    words: Tensor,
    latents: Tensor,
    compute: Tensor,
    encoded: Tensor,
    seen: Tensor,
    cache: LatentCache,
    rows: Tensor | None,
) -> Tensor:
    """Compute conditioning vectors of some positions against a cache.

    Args:
        net: the network.
        words: condition, long [B, W].
        latents: [B, T, C], NaN at masked positions.
        compute: columns to compute, bool [B, P + T], at least one per row.
        encoded: columns that the encoder attends to, bool [B, P + T]: known, and computed as such.
        seen: columns that the decoder attends to, bool [B, P + T].
        cache: made for P + T columns.
        rows: the rows of the cache that these are, long [B]; None means all.

    Returns:
        Conditioning vectors [B, T, D] of the computed positions; the others mean nothing.
    """
    known = torch.nn.functional.pad(~latents.isnan().any(-1), (net.prefix_columns, 0), value=True)
    inputs = net.encoder_inputs(words, latents)
    now = compute & known
    if bool(now.any()):
        out = _computed(net.run_encoder, inputs, now, encoded, cache.encoder, rows)
    else:
        out = inputs.new_zeros(*known.shape, net.decoder_width)
    inputs = net.decoder_inputs(out, known)
    z = _computed(net.run_decoder, inputs, compute, seen, cache.decoder, rows)
    return z[:, net.prefix_columns :]


def _computed(
    run: Callable[..., Tensor],
    inputs: Tensor,
    compute: Tensor,
    seen: Tensor,
    cache: SlotCache,
    rows: Tensor | None,
) -> Tensor:
    """Send some columns of ``inputs`` [B, P + T, D] through a stack; the outputs [B, P + T, E] of
    the others mean nothing."""
    width = int(compute.sum(1).max())
    columns = (~compute).long().argsort(dim=1, stable=True)[:, :width]
    slots = columns.masked_fill(~compute.gather(1, columns), inputs.shape[1])
    mask = cache.among(slots, inputs.dtype, torch.nn.functional.pad(seen, (0, 1)), rows)
    picked = inputs.gather(1, columns[..., None].expand(-1, -1, inputs.shape[-1]))
    out = run(picked, columns, mask, cache)
    everywhere = out.new_zeros(*compute.shape, out.shape[-1])
    return everywhere.scatter(1, columns[..., None].expand_as(out), out)
