"""Kind ``longspec``: a layer over a window and the model's own keys and values (drafter
``longspec``).

Behind a round's last committed token the model has no keys, so that a query i tokens further sees
those of a slot and more before it alone. Every batch of training draws one such gap for all its
queries, from 1 to ``depth`` slots, which is what the drafts of a round see one after the other.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gen.core.errors import GenError
from gen.models.adapters.draft_models import longspec_shape
from gen.models.adapters.layer_calls import KeysValues, LayerCache, call_layer, decoder_layers
from gen.models.draft_heads.longspec import LongSpecLayer, LongSpecShape
from gen.recipes.drafters.base import DepthOptions, Kind, Net
from gen.recipes.drafters.data import Batch, Teacher
from gen.recipes.drafters.kind_exit import sequence_states
from gen.recipes.drafters.losses import acceptance, mean_over


@dataclass(frozen=True)
class LongSpecOptions(DepthOptions):
    """Options of the kind.

    Attributes:
        window: slots that the layer's own attention sees.
        inner: channels of its MLP.
        depth: drafts of a round, the widest gap of training.
        queries: positions of a sequence that a step trains on.
    """

    window: int = 32
    inner: int = 128
    depth: int = 8
    queries: int = 128


class LongSpecKind(Kind):
    """A layer over a window and the model's keys and values. Options: ``LongSpecOptions``."""

    name = "longspec"
    options_type = LongSpecOptions
    muon = ".weight"

    def __init__(self, teacher: Teacher, options: Any):
        if teacher.model.num_layers < 2:
            raise GenError("a model of 1 layer has no layer before its last; expected 2 or more")
        if min(options.window, options.depth, options.queries) < 1:
            raise GenError(f"options came as {options}; expected window, depth and queries above 0")
        super().__init__(teacher, options)
        self.generator = torch.Generator().manual_seed(29)

    def layers(self, teacher: Teacher) -> tuple[str, ...]:
        return (f"model.layers.{teacher.model.num_layers - 2}",)

    def arguments(self) -> dict[str, Any]:
        shape = longspec_shape(self.teacher.model, self.options.inner, self.options.window)
        return asdict(shape)

    def network(self) -> nn.Module:
        model = self.teacher.model
        torch.manual_seed(0)
        net = LongSpecLayer(LongSpecShape(**self.arguments()))
        # the queries of the model's last layer are those that its keys were made for
        last: Any = decoder_layers(model)[-1]
        with torch.no_grad():
            net.far_norm.weight.copy_(last.input_layernorm.weight)
            net.far_query.weight.copy_(last.self_attn.q_proj.weight)
            net.far_out.weight.copy_(last.self_attn.o_proj.weight)
        return net.float()

    @torch.no_grad()
    def far(self, batch: Batch) -> tuple[KeysValues, Tensor]:
        """Return the keys and values of the model's last layer and the slots of the inputs.

        Returns:
            Keys and values [B, G, S, d] by slot; and the slots of the positions' inputs, long
            [B, T].
        """
        model = self.teacher.model
        states, before = sequence_states(batch, self.teacher.layers[0])
        states = states.to(model.dtype)
        # keys and values of a token need no other, so that each is a sequence of its own
        rows, size = states.shape[:2]
        at = torch.arange(size, device=states.device).repeat(rows)[:, None]
        alone, cache = states.reshape(rows * size, 1, -1), LayerCache()
        number = model.num_layers - 1
        layer = decoder_layers(model)[number]
        call_layer(layer, alone, at, model.rotations(alone, at), cache=cache)
        keys, values = (x[:, :, 0].unflatten(0, (rows, size)) for x in cache.made[number])
        return (keys.transpose(1, 2), values.transpose(1, 2)), before

    def hidden(
        self, net: Net, batch: Batch, given: tuple[KeysValues, Tensor], at: Tensor, gap: int
    ) -> Tensor:
        """Return what the head reads, [B, Q, D], for positions.

        Args:
            net: the layer.
            batch: sequences.
            given: keys, values and slots of ``far``.
            at: positions next to each other, long [Q].
            gap: slots behind the last one whose keys are seen.
        """
        far, before = given
        ids, window = batch.inputs()[0], self.options.window
        slots = before[:, at]  # of the queries, long [B, Q]
        back = torch.arange(1 - window, 0, device=slots.device)
        own = torch.cat([slots[:, :1] + back, slots], 1)
        stands = own.clamp_min(0)
        with torch.no_grad():
            x = self.teacher.model.embedded(ids.gather(1, stands), stands)
            rotations = self.teacher.model.rotations(x, stands)
        seen = (own[:, None] <= slots[..., None]) & (own[:, None] > slots[..., None] - window)
        seen &= (own >= 0)[:, None]
        slot = torch.arange(far[0].shape[2], device=slots.device)
        sees_far = slot <= slots[..., None] - gap
        return net(x, rotations, len(at), seen, far, sees_far)

    def _logq(self, hidden: Tensor, at: Tensor) -> Tensor:
        """Return the log-probabilities [B, Q, V] of positions, long [Q]."""
        head = self.teacher.model.output_weight
        logits = F.linear(hidden.float(), head.float())
        return self.logprobs(logits, at.expand(hidden.shape[:2]))

    def logq(self, net: Net, batch: Batch) -> Tensor:
        given, every = self.far(batch), self.positions(batch)[0]
        parts = every.split(self.options.queries)
        made = [self._logq(self.hidden(net, batch, given, at, 1), at) for at in parts]
        return torch.cat(made, 1)

    def usable(self, batch: Batch) -> Tensor:
        first = torch.arange(batch.tokens.shape[1], device=batch.tokens.device) == 0
        return batch.weight.masked_fill(first, 0.0)

    def loss(self, net: Net, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        total, count = batch.tokens.shape[1], self.options.queries
        longest = int(batch.weight.sum(1).max())
        first = int(torch.randint(max(1, longest - count + 1), (), generator=self.generator))
        at = torch.arange(first, min(first + count, total), device=batch.tokens.device)
        gap = 1 + int(torch.randint(self.options.depth, (), generator=self.generator))
        logq = self._logq(self.hidden(net, batch, self.far(batch), at, gap), at)
        logp, weight = batch.logp[:, at], self.usable(batch)[:, at]
        loss = mean_over(self.divergence(logp, logq), weight)
        accepted = mean_over(acceptance(logp, logq.detach()), weight)
        return loss, {"acceptance": accepted.item()}
