"""Base class of adapters: networks seen through the model protocols."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from gen.core.errors import GenError
from gen.models.adapters.lead import Mirrored
from gen.models.load.networks import device_of


class ModelAdapter(Mirrored):
    """Base class of adapters.

    Attributes:
        model: the network.
        features: features of each distinct condition of the batch.
        passes: methods of the adapter that run a forward pass of the network.
        keeps: a causal model takes ``keep=n``: logits of the last n tokens alone.
        superposes: a causal model takes weighted sums of embeddings as inputs
            (``gen.models.adapters.protocols.SuperposedModel``).
        trained_at_mask: a causal model was trained at the mask token of its vocabulary, if that has
            one; published ones with a mask token were.
        ragged: a masked model takes prompts of several lengths, with padding on the left.
        shift: logits of a masked model at position i are about position i + ``shift``.
        max_positions: positions that the model was made for; None where there is no such number.
        recomputed_past: length of text past which the network computes all keys anew; None where
            keys stay.
        learned_positions: positions that the network has vectors for; None where it computes what
            it needs of any position.
        is_batch_invariant: the bits of a pass do not depend on what runs beside a token
            (``gen.models.adapters.batch_invariant``).
        counts_known: a masked model of latents takes the positions known after a step.
        compiles: forward passes can run as graphs: ``network``, and of a masked model
            ``canvas_network``, are functions of tensors.
        constant_widths: widths of a pass, above 1, that ``torch.compile`` would take as constants
            in graphs of their own; such a pass is padded.
        takes_block_masks: the network's attention is ``flex_attention``, whose masks are block
            masks (``gen.models.adapters.masks``); other networks take what is added to scores.
        graphs: graphs of the forward passes (``gen.models.adapters.graphs``, ``captured``); None
            where they run without.
        captures: its caches can lie in the memory of captured passes.
        captured: its captured passes (``gen.models.adapters.captured``), which ``graphs`` are then;
            None where none are captured.
    """

    passes: ClassVar[tuple[str, ...]] = ("forward",)
    model: torch.nn.Module
    keeps: bool = False
    superposes: bool = False
    trained_at_mask: bool = True
    ragged: bool = False
    shift: int = 0
    max_positions: int | None = None
    learned_positions: int | None = None
    recomputed_past: int | None = None
    is_batch_invariant: bool = False
    counts_known: bool = False
    compiles: bool = False
    constant_widths: frozenset[int] = frozenset()
    takes_block_masks: bool = False
    graphs: Any = None
    captures: bool = False
    captured: Any = None
    features: Sequence[dict[str, Tensor]] = ()

    def condition_token(self, number: int) -> int:
        """Return the token id at the prompt positions of a condition with features.

        Raises:
            GenError: the model takes conditions as token ids alone.
        """
        raise GenError(
            f"the condition has features, and {type(self).__name__} takes only token ids"
        )

    def beside_prompts(self, prompts: Tensor) -> dict[str, Tensor]:
        """Return what another network of this architecture has to be given beside the token ids of
        prompts, long [B, P], by the names of its arguments.

        Raises:
            GenError: the conditions have features that no other network reads.
        """
        if not self.features:
            return {}
        raise GenError(
            f"the conditions of this model have features, and a network beside it reads token ids"
            f" alone ({type(self).__name__}); expected a drafter that reads the model's hidden"
            " states, such as of kind exit or eagle"
        )

    def conditioned(self, features: Sequence[dict[str, Tensor]]) -> Self:
        """Return the adapter of the same network with the features of a batch's conditions."""
        other = copy.copy(self)
        other.features = features
        return other

    def network(
        self, inputs: dict[str, Tensor], positions: Tensor, mask: Tensor | None, cache: Any
    ) -> Tensor:
        """Run the network on the inputs of a call that was announced to a slot cache.

        Args:
            inputs: arguments of the network, [B, L, ...] each.
            positions: absolute positions, long [B, L].
            mask: what is added to scores, [B, 1, L, S], or a block mask; None hides nothing.
            cache: ``SlotCache``, or ``FixedSlots`` inside a graph.

        Returns:
            Logits [B, L, V].
        """
        raise NotImplementedError(f"{type(self).__name__} does not compile")

    def canvas_network(
        self,
        inputs: dict[str, Tensor],
        positions: Tensor,
        mask: Tensor | None,
        tables: Any,
        keep: int,
    ) -> Tensor:
        """Run the network of a masked model with attention among the inputs.

        Args:
            inputs: arguments of the network, [B, L, ...] each.
            positions: positions, long [B, L].
            mask: what is added to scores, broadcastable to [B, 1, L, L]; None hides nothing.
            tables: tables of the fast forward; None where the module runs.
            keep: logits of the last ``keep`` positions alone; 0 means all.

        Returns:
            Logits [B, L or keep, V].
        """
        raise NotImplementedError(f"{type(self).__name__} does not compile")

    def run_network(
        self, inputs: dict[str, Tensor], positions: Tensor, mask: Tensor | None, cache: Any
    ) -> Tensor:
        """Run ``network``, as a graph where there are graphs: not in the first call, which makes
        the buffers of the cache, and not in calls about some of its rows."""
        if self.graphs is None or cache.is_empty or cache.rows is not None:
            return self.network(inputs, positions, mask, cache)
        return self.graphs.against_slots(self, inputs, positions, mask, cache)

    def network_changed(self) -> None:
        """Take note that layers of the network have other weights than before."""

    @property
    def output_heads(self) -> list[torch.nn.Linear]:
        """Linear layers that make logits of the last states: one, or one for each codebook or pass.

        Empty where there are none, such as in a model of latents.
        """
        return []

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    @property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.model.parameters() if p.is_floating_point())
