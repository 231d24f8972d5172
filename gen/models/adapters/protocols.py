"""CausalModel, MaskedModel, CacheableModel, BlockModel, ScalesModel, LatticeModel, FramesModel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from gen.core.graphs import Graph
from gen.core.token_space import TokenSpace
from gen.models.adapters.lead import Mirrored

if TYPE_CHECKING:  # networks take long to import
    from gen.models.nets.residual_scales import ResidualScales


class ModelCache(Mirrored):
    """Base class of caches that ``new_cache`` returns; they have ``keep(rows)``.

    Attributes:
        ran: bool [B], the rows whose network ran in the last forward pass; None where it ran for
            all of them.
        nbytes: bytes that it holds.
        has_slots: whether keys and values lie in one slot per absolute position
            (``gen.models.adapters.slot_cache``).
        is_empty: whether the first call is still to come, which says how many rows there are.
        select: restricts the following calls to some rows, long [n], or lifts that (None); None
            where the cache takes calls about all rows alone.
        copy_rows: writes what it holds for some rows, long [n], over that of others, long [n]; None
            where it cannot.
        starts: slot of the last token of each prompt in the next call, long [B, 1]; None where
            nothing has said so.
    """

    ran: Tensor | None = None
    nbytes: int = 0
    has_slots: bool = False
    is_empty: bool = False
    select: Callable[[Tensor | None], None] | None = None
    copy_rows: Callable[[Tensor, Tensor], None] | None = None
    starts: Tensor | None = None


class CausalModel(Protocol):
    """tokens [B, L] at absolute positions [B, L] against a cache -> logits [B, L, V] of the
    positions after them. One whose ``keeps`` is true takes ``keep=n`` as well: logits of the last n
    tokens alone. One whose ``superposes`` is true is a ``SuperposedModel`` as well.
    ``trained_at_mask``: see ``ModelAdapter``."""

    vocab_size: int
    device: torch.device
    dtype: torch.dtype
    keeps: bool
    superposes: bool
    trained_at_mask: bool

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
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: Any,
        layers: Sequence[str],
        parents: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Run ``CausalModel.forward``; return logits and the output [B, L, D] of each layer.

        With ``parents`` it runs ``TreeModel.forward_tree``.
        """
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


@runtime_checkable
class SharedModel(LayeredModel, HiddenStateModel, Protocol):
    """Causal model whose network drafters share: its embeddings, its layers and its head.

    Attributes:
        model: the network, of transformers.
        config: config of the language model.
    """

    model: Any
    config: Any

    @property
    def input_embeddings(self) -> Any:
        """Module of the token embeddings."""
        ...

    @property
    def output_weight(self) -> Tensor:
        """Matrix [V, D] that makes logits of the last hidden states."""
        ...

    def embedded(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Embed token ids [B, L] as the network does at positions [B, L]: [B, L, D]."""
        ...

    def rotations(self, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines [B, L, d] by which queries and keys at positions, long
        [B, L], are rotated, in the dtype of states."""
        ...

    def with_network(self, model: Any) -> Any:
        """Return the same kind of model with another network."""
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
class AdjustableModel(Protocol):
    """Masked model whose hidden states a layer can adjust."""

    shift: int
    digest: str

    def forward_with_states(
        self, ids: Tensor, canvas_length: int, left_padding: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run ``MaskedModel.forward``; return logits, and what its head reads at every column,
        [B, P + T, D]."""
        ...

    def embedded(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Embed tokens [B, L] at positions [B, L], as the first layer gets them: [B, L, D]."""
        ...

    def logits_of(self, hidden: Tensor) -> Tensor:
        """Compute the logits [B, L, V] of what the head reads, [B, L, D]."""
        ...


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


class ScalesState(Protocol):
    """Conditions of B rows, and keys and values of what they have computed."""

    def select(self, rows: Tensor) -> ScalesState:
        """Return the state of some rows, long [n], which may repeat; this one stays as it is."""
        ...


class ScalesModel(Protocol):
    """Token maps coarse to fine: the sum of all earlier scales -> logits of one scale.

    Attributes:
        vocab_size: codes V of the codebook, the width of the logits.
        device, dtype: those of the weights.
        quantize: quantiser of the frontend, which makes the sum.
        markov: a scale sees the earlier ones through their sum alone.
        refines: the model has the pass ``refine``.
        leak: the pass ``refine`` was trained with masked tokens that reach their neighbours
            (``ResidualScales.own``).
        prefix_length: positions of a condition that the first pass of a state computes beside
            those of the scale; 0 where the condition is the input of scale 0.
    """

    vocab_size: int
    device: torch.device
    dtype: torch.dtype
    quantize: ResidualScales
    markov: bool
    refines: bool
    leak: bool
    prefix_length: int

    def begin(self, prompt: Tensor, lengths: Tensor) -> ScalesState:
        """Make the state of new rows; nothing runs yet.

        Args:
            prompt: conditions, long [B, P], of both branches of guidance where it is on; class
                models have P = 1, and the number of classes as null class.
            lengths: their lengths, long [B].

        Raises:
            GenError: conditions of lengths that the model does not take.
        """
        ...

    def fill(self, state: Any, maps: Tensor, scale: int) -> Tensor:
        """Compute the logits [B, n_k, V] of all positions of a scale.

        Scales come in order, each once; the keys of a model that is not ``markov`` stay.

        Args:
            state: made by ``begin``.
            maps: sum of the earlier scales, reduced to this one, [B, n_k, D]; zeros at scale 0.
            scale: the scale k.
        """
        ...

    def refine(self, state: Any, maps: Tensor, ids: Tensor, hidden: Tensor, scale: int) -> Tensor:
        """Compute the logits [B, n_k, V] of a scale some of whose tokens are known.

        It may be called for any scale and any number of times, with a state of its own.

        Args:
            state: made by ``begin``.
            maps: as in ``fill``.
            ids: tokens, long [B, n_k]; those of masked positions are not read without ``leak``.
            hidden: bool [B, n_k], masked positions.
            scale: the scale k.
        """
        ...


class LatticeModel(Protocol):
    """A source -> a directed acyclic graph whose paths from the first vertex to the last one are
    outputs: a transition for every pair of vertices, a distribution of tokens for every vertex."""

    vocab_size: int
    device: torch.device
    dtype: torch.dtype

    def forward(self, source: Tensor, lengths: Tensor) -> Graph:
        """Compute the graphs of sources.

        Args:
            source: long [B, S], padded on the right.
            lengths: long [B].
        """
        ...


@runtime_checkable
class SpokenLatticeModel(Protocol):
    """A ``LatticeModel`` whose words are spoken after the graph is decoded.

    Attributes:
        words: token space of the words of an output; its last token is never emitted.
        slots: slots of sound per word.
    """

    words: TokenSpace
    slots: int

    def speak(self, graph: Graph, words: Tensor, counts: Tensor) -> Tensor:
        """Return the tokens of spoken words, long [B, T].

        Args:
            graph: graphs of the rows.
            words: words without bos and eos, long [B, N].
            counts: words of every row, long [B].
        """
        ...


class FramesModel(Protocol):
    """Noised latents of the next frames, their signal levels and actions, against keys and values
    of the frames before -> clean latents of the same frames.

    Attributes:
        device, dtype: those of the weights.
        positions: P, positions of a frame.
        channels: C, numbers of a position.
        window: frames that a frame attends to, itself included.
        finest: steps that finished frames enter with.
        none_action: action of a first frame, which has none.
        context_signal: signal level of finished frames, which later ones attend to.
    """

    device: torch.device
    dtype: torch.dtype
    positions: int
    channels: int
    window: int
    finest: int
    none_action: int
    context_signal: float

    def levels(self, steps: int) -> list[float]:
        """Return the signal levels that ``steps`` forward passes go along, from 0 to 1.

        Raises:
            GenError: a number of steps that the model does not take.
        """
        ...

    def forward(
        self,
        z: Tensor,
        signal: Tensor,
        steps: Tensor,
        actions: Tensor,
        past: list[tuple[Tensor, Tensor]],
        known: Tensor,
        keep: bool = False,
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Predict the clean latents of frames [B, F, P, C].

        Args:
            z: noised latents [B, F, P, C].
            signal: levels [B, F], 1 for no noise.
            steps: forward passes per frame that each level is one of, long [B, F].
            actions: action that leads to each frame, long [B, F].
            past: keys and values [B, W - 1, P, D] of every layer for the frames before.
            known: which of those frames exist, bool [B, W - 1].
            keep: also return keys and values [B, F, P, D] of every layer.
        """
        ...

    def empty(self, rows: int, frames: int) -> list[tuple[Tensor, Tensor]]:
        """Make keys and values [rows, frames, P, D] of every layer."""
        ...

    def settle(self, x: Tensor) -> Tensor:
        """Return finished latents [..., P, C] as they are kept, for instance in 8 bits."""
        ...
