"""CausalModel, MaskedModel, CacheableModel, BlockModel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


class ModelCache:
    """Base class of caches that ``new_cache`` returns; they have ``keep(rows)``.

    Attributes:
        ran: bool [B], the rows whose network ran in the last forward pass; None where it ran for
            all of them.
        select: restricts the following calls to some rows, long [n], or lifts that (None); None
            where the cache takes calls about all rows alone.
    """

    ran: Tensor | None = None
    select: Callable[[Tensor | None], None] | None = None


class CausalModel(Protocol):
    """tokens [B, L] at absolute positions [B, L] against a cache -> logits [B, L, V] of the
    positions after them. One whose ``keeps`` is true takes ``keep=n`` as well: logits of the last n
    tokens alone. One whose ``superposes`` is true is a ``SuperposedModel`` as well."""

    vocab_size: int
    device: torch.device
    dtype: torch.dtype
    keeps: bool
    superposes: bool

    def new_cache(self, slots: int) -> Any:
        """An empty cache, see ``ModelCache``."""

    def forward(self, tokens: Tensor, positions: Tensor, cache: Any) -> Tensor: ...


@runtime_checkable
class TreeModel(Protocol):
    """Causal model that takes a tree of drafts."""

    def forward_tree(
        self, tokens: Tensor, positions: Tensor, parents: Tensor, cache: Any
    ) -> Tensor:
        """Compute the logits [B, L, V] after the root and each draft.

        Args:
            tokens: the last committed token and the drafts, long [B, L].
            positions: absolute positions by depth, long [B, L].
            parents: draft that each draft follows, long [B, L - 1], -1 for the root.
            cache: made by ``new_cache``; it has ``commit_path(nodes, count)``.
        """
        ...


class SuperposedModel(Protocol):
    """Causal model that takes mixtures of tokens as inputs."""

    def forward_superposed(
        self, tokens: Tensor, weights: Tensor, positions: Tensor, cache: Any
    ) -> Tensor:
        """Compute the logits [B, L, V] after inputs that are weighted sums of embeddings.

        Args:
            tokens: long [B, L, K].
            weights: weights of their embeddings, [B, L, K], which sum to 1.
            positions: absolute positions, long [B, L].
            cache: made by ``new_cache``.
        """
        ...


@runtime_checkable
class HiddenStateModel(Protocol):
    """Causal model that can return the hidden states of its layers."""

    def check_layers(self, layers: Sequence[str]) -> None:
        """Raise ``GenError`` for a name that is no layer."""
        ...

    def forward_with_hidden_states(
        self, tokens: Tensor, positions: Tensor, cache: Any, layers: Sequence[str]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Run ``CausalModel.forward``; return logits and the output [B, L, D] of each layer."""
        ...


@runtime_checkable
class LayeredModel(Protocol):
    """Causal model some of whose layers can be left out."""

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        ...

    def with_layers(self, layers: Sequence[int]) -> CausalModel:
        """Return the same model with some of its layers, by their numbers from 0, upwards."""
        ...


class MaskedModel(Protocol):
    """ids [B, P + T], a condition and a partly filled canvas -> logits [B, T, V] of the canvas.

    A model whose ``ragged`` is true takes a third argument, ``pads`` long [B]: how many of the
    first columns of each row are nothing, neither seen nor counted as positions. Logits at position
    i of the prompt and canvas are about position i + ``shift``."""

    vocab_size: int
    device: torch.device
    dtype: torch.dtype
    ragged: bool
    shift: int

    def forward(self, ids: Tensor, canvas_length: int) -> Tensor: ...


@runtime_checkable
class CountsKnown(Protocol):
    """Masked network of latents whose ``forward`` takes ``num_known``, the positions known after a
    step, which its guidance grows with."""

    counts_known: bool


@runtime_checkable
class PartialModel(Protocol):
    """Masked model that computes some of the positions, see ``CacheableModel``."""

    def part(
        self,
        tokens: Tensor,
        positions: Tensor,
        seen: Tensor,
        cache: Any,
        keep: int,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Compute the logits [B, keep, V] of the last ``keep`` tokens."""
        ...


class CacheableModel(MaskedModel, PartialModel, Protocol):
    """A masked model that can compute some of the positions against a cache: tokens [B, L] at
    absolute positions [B, L], each seeing the slots in ``seen`` (bool [B, slots]) -> logits [B,
    keep, V] of the last ``keep`` tokens. ``rows`` long [B]: which rows of the cache these are, if
    not all."""

    def new_cache(self, slots: int) -> Any: ...


@runtime_checkable
class EncoderDecoder(Protocol):
    """Masked network of latents: an encoder of the condition and the known positions, and a decoder
    of all positions. Columns are ``prefix_columns`` positions of the condition, then the canvas.

    ``run_encoder`` and ``run_decoder`` take inputs [B, L, D] at columns [B, L], an additive mask of
    what they attend to, and a ``SlotCache`` or None. ``finish`` makes the result of ``forward`` of
    conditioning vectors [B, T, D] and known positions, bool [B, T]."""

    prefix_columns: int
    decoder_width: int
    depths: tuple[int, int]

    def encoder_inputs(self, words: Tensor, latents: Tensor) -> Tensor: ...

    def run_encoder(
        self, inputs: Tensor, columns: Tensor, mask: Tensor, cache: Any = None
    ) -> Tensor: ...

    def decoder_inputs(self, encoded: Tensor, known: Tensor) -> Tensor: ...

    def run_decoder(
        self, inputs: Tensor, columns: Tensor, mask: Tensor, cache: Any = None
    ) -> Tensor: ...

    def finish(self, z: Tensor, known: Tensor, num_known: Tensor | None = None) -> Tensor: ...


@runtime_checkable
class PartialLatentModel(Protocol):
    """Masked model of latents that computes some of the positions against a cache; see
    ``gen.models.adapters.partial_latents``."""

    prefix_length: int
    head: Any

    def new_cache(self, slots: int) -> Any: ...

    def part(
        self,
        words: Tensor,
        latents: Tensor,
        compute: Tensor,
        encoded: Tensor,
        seen: Tensor,
        cache: Any,
        rows: Tensor | None = None,
        num_known: Tensor | None = None,
    ) -> Tensor: ...


class BlockModel(Protocol):
    """tokens [B, L] at absolute positions [B, L], each seeing up to position ``last`` [B, L],
    against a cache -> logits [B, L, V] of the same positions."""

    vocab_size: int
    device: torch.device
    dtype: torch.dtype
    block_length: int

    def new_cache(self, slots: int) -> Any: ...

    def forward(self, tokens: Tensor, positions: Tensor, last: Tensor, cache: Any) -> Tensor: ...
