"""Drafts of the target itself, some of whose layers run at every n-th token alone.

    dropped layers    those whose number l is not a multiple of ``every``
    full tokens       the prompt, and every ``cycle``-th token behind its last one
    full token        y_t = layer(x_t), which attends to the full tokens before it
    token between     y_t = y_a + (alpha / r) B A x_t, a the last full token before t

B begins at 0. A dropped layer makes no keys and values between full tokens, and ``cycle`` 1 is the
target itself.

Rajabzadeh et al., "LoRA-Drop: Temporal LoRA Decoding for Efficient LLM Inference" (arXiv
2601.02569), whose code has ``every`` 4, ``cycle`` 4, r 8 and alpha 16. There what is left decodes
by itself, and is approximate; here it drafts. What a full token gave is held in the slot of its
position, as keys are, so that a rejected draft is overwritten.

Guarantee: that of the verifier, whatever the maps. ``gen.recipes.drafters`` trains them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gen.core.errors import GenError
from gen.core.registry import register
from gen.models.adapters.protocols import SharedModel
from gen.models.adapters.wrapped_layers import WrappedLayer, with_wrapped
from gen.samplers.causal.drafters.altered import altered_target
from gen.samplers.causal.drafters.model import ModelDrafts

KIND = "lora_drop"


class Corrections(nn.Module):
    """Low-rank maps of the dropped layers.

    Args:
        width: channels D.
        rank: rank r.
        alpha: the maps are multiplied by alpha / r.
        dropped: numbers of the layers.
    """

    def __init__(self, width: int, rank: int, alpha: float, dropped: tuple[int, ...]):
        super().__init__()
        self.scale = alpha / rank
        self.down = nn.ModuleDict({str(n): nn.Linear(width, rank, bias=False) for n in dropped})
        self.up = nn.ModuleDict({str(n): nn.Linear(rank, width, bias=False) for n in dropped})
        for weight in self.up.parameters():
            nn.init.zeros_(weight)

    def forward(self, number: int, states: Tensor) -> Tensor:
        """Return what is added between full tokens in one layer, for its input [B, L, D]."""
        down, up = self.down[str(number)], self.up[str(number)]
        dtype = next(down.parameters()).dtype
        return (self.scale * up(down(states.to(dtype)))).to(states.dtype)


def dropped_layers(num_layers: int, every: int) -> tuple[int, ...]:
    """Number the layers that are dropped between full tokens.

    Raises:
        GenError: there are none.
    """
    found = tuple(n for n in range(num_layers) if every > 0 and n % every)
    if not found:
        raise GenError(
            f"every came as {every}, which drops none of {num_layers} layers; expected at least 2,"
            " and a model of at least 2 layers"
        )
    return found


def corrections_of(model: SharedModel, net: Mapping[str, Any]) -> Corrections:
    """Make the maps from the arguments of a folder: ``every``, ``rank`` and ``alpha``."""
    torch.manual_seed(0)
    dropped = dropped_layers(model.num_layers, int(net["every"]))
    return Corrections(model.config.hidden_size, int(net["rank"]), float(net["alpha"]), dropped)


class DroppedLayer(WrappedLayer):
    """A layer that runs at full tokens.

    Args:
        layer: the decoder layer.
        number: its number.
        correct: maps the layer's input [B, L, D] to what is added to the last full token's output.
        cycle: tokens from one full token to the next.
    """

    def __init__(
        self, layer: nn.Module, number: int, correct: Callable[[Tensor], Tensor], cycle: int
    ):
        super().__init__(layer, number)
        self.correct, self.cycle = correct, cycle

    def _is_full(self, positions: Tensor, starts: Tensor) -> Tensor:
        """Tell which positions [B, L] are those of full tokens, bool."""
        return (positions < starts) | ((positions - starts) % self.cycle == 0)

    def states(self, call):
        states, cache, mask = call.states, call.cache, call.mask
        name, starts = f"output {self.number}", cache.starts.to(states.device)
        positions = call.positions.to(states.device)
        full = self._is_full(positions, starts)
        if bool(full.any()):
            whole = call.run(self._full_alone(mask, full, starts, cache))
            outputs = cache.note(name, whole)
        else:
            whole, outputs = None, cache.noted(name)
        slots = self._last_full(positions, starts, mask, cache)
        row = torch.arange(len(states), device=states.device)[:, None]
        between = outputs[row, slots] + self.correct(states)
        return between if whole is None else torch.where(full[..., None], whole, between)

    def _full_alone(self, mask: Tensor, full: Tensor, starts: Tensor, cache: Any) -> Tensor:
        """Hide the slots of other tokens in a mask [B, 1, L, S]."""
        slot = torch.arange(mask.shape[-1], device=mask.device)
        # drafts of a tree have slots above those of positions
        seen = self._is_full(slot, starts).scatter(1, cache.positions.to(mask.device), full)
        return torch.where(seen[:, None, None], mask, torch.finfo(mask.dtype).min)

    def _last_full(self, positions: Tensor, starts: Tensor, mask: Tensor, cache: Any) -> Tensor:
        """Find the slot of the last full token at or before each position, long [B, L]."""
        behind = starts + (positions - starts) // self.cycle * self.cycle
        at = torch.where(positions < starts, positions, behind)
        own = cache.positions.to(positions.device)
        if positions.shape[1] == 1 or torch.equal(own, positions):
            return at
        # of a tree, where it may be a draft on the same branch
        count = own.shape[1]
        seen = mask[:, 0].gather(-1, own[:, None].expand(-1, count, -1)) == 0
        found = seen & (positions[:, None] == at[..., None])
        drafted = own.gather(1, found.long().argmax(-1))
        return torch.where(found.any(-1), drafted, at)


def dropping_model(
    model: SharedModel, corrections: Callable[[int, Tensor], Tensor], net: Mapping[str, Any]
) -> SharedModel:
    """Make the model whose layers are dropped, with the arguments of a folder: ``every`` and
    ``cycle``."""
    dropped, cycle = dropped_layers(model.num_layers, int(net["every"])), int(net["cycle"])

    def wrap(layer: nn.Module, number: int) -> nn.Module:
        if number not in dropped:
            return layer
        return DroppedLayer(layer, number, partial(corrections, number), cycle)

    return with_wrapped(model, wrap)


@register("drafter", KIND)
class LoraDrop(ModelDrafts):
    """Drafts with the target, some of whose layers run at every n-th token alone and are corrected
    in between. Parameters: ``drafter_weights``, and those of the drafter model without
    ``draft_model``."""

    needs_draft_model = False
    needs_weights = True

    @classmethod
    def draft_of(cls, sampler, target, draft):
        folder = sampler.drafter_weights
        return altered_target(folder, KIND, target, corrections_of, dropping_model)
