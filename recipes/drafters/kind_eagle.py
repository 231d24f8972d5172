"""Kind ``eagle``: one layer on the target's hidden states (drafter ``eagle``).

Training runs several unrolls, of which all but the first feed on the layer's own outputs, as in
decoding; unroll i counts ``decay`` ** i. With ``method=eagle1`` it is trained as EAGLE (arXiv
2401.15077): one unroll on noised features, whose predicted head input is drawn to the target's.
``gated`` and ``aligned`` below 1 are the two parts of FSPAD (arXiv 2408.15562): features that the
token gates, and a pull to the target that leaves the other channels free.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gen.core.errors import GenError
from gen.models.draft_heads.eagle import EagleLayer, EagleShape
from gen.recipes.drafters.base import Kind, Net, Options
from gen.recipes.drafters.data import Batch, Teacher
from gen.recipes.drafters.losses import acceptance, mean_over
from gen.recipes.drafters.unrolls import unrolled

NOISE = 0.2  # range of the noise on features of EAGLE, times 512 / length


@dataclass(frozen=True)
class EagleOptions(Options):
    """Options of the kind.

    Attributes:
        width: channels of the layer, a multiple of 32.
        inner: channels of its MLP.
        unrolls: unrolls of training.
        decay: weight of an unroll, to the power of its number from 0.
        method: ``eagle3`` or ``eagle1``.
        gated: features pass a gate that the token opens.
        aligned: share of the channels that EAGLE's loss draws to the target's.
    """

    width: int = 64
    inner: int = 64
    unrolls: int = 4
    decay: float = 0.8
    method: str = "eagle3"
    gated: bool = False
    aligned: float = 1.0


class EagleKind(Kind):
    """One layer on the target's hidden states. Options: ``EagleOptions``."""

    name = "eagle"
    options_type = EagleOptions
    muon = ".weight"

    def __init__(self, teacher: Teacher, options: Any):
        if options.method not in ("eagle1", "eagle3"):
            raise GenError(f"method came as {options.method!r}; expected eagle1 or eagle3")
        if options.width % 32 or options.width < 32:
            raise GenError(f"width came as {options.width}; expected a multiple of 32")
        super().__init__(teacher, options)

    def layers(self, teacher: Teacher) -> tuple[str, ...]:
        last = teacher.model.num_layers
        if self.options.method == "eagle1":
            return ("model.norm",)
        numbers = sorted({last // 4, last // 2, last - 1})
        return tuple(f"model.layers.{n}" for n in numbers)

    def arguments(self) -> dict[str, Any]:
        net = self.teacher.model.model
        embedding = net.get_input_embeddings().weight.shape[1]
        out = net.get_output_embeddings().weight.shape[1]
        hidden = self.teacher.model.config.hidden_size
        one = self.options.method == "eagle1"
        shape = EagleShape(
            hidden * len(self.teacher.layers),
            embedding,
            out,
            self.options.width,
            self.options.inner,
            rereads=one,
            gated=self.options.gated,
        )
        return asdict(shape)

    def network(self) -> nn.Module:
        torch.manual_seed(0)
        return EagleLayer(EagleShape(**self.arguments()))

    def unrolled(self, net: Net, batch: Batch, unrolls: int, noise: float = 0.0) -> list[Tensor]:
        """Return what the target's head reads, [B, T, D], for every position by every unroll.

        Position t of unroll i is drafted from the hidden states up to position t - i.
        """
        return unrolled(self.teacher, net, batch, unrolls, noise=noise)

    def _head(self) -> Tensor:
        """Return the target's head, [V, D]."""
        return self.teacher.model.model.get_output_embeddings().weight

    def _logq(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the log-probabilities [B, T, V] of what the head reads, [B, T, D]."""
        logits = F.linear(outputs.float(), self._head().float())
        return self.logprobs(logits, self.positions(batch))

    def logq(self, net: Net, batch: Batch) -> Tensor:
        return self._logq(self.unrolled(net, batch, 1)[0], batch)

    def usable(self, batch: Batch) -> Tensor:
        first = torch.arange(batch.tokens.shape[1], device=batch.tokens.device) == 0
        return batch.weight.masked_fill(first, 0.0)

    def loss(self, net: Net, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        if self.options.method == "eagle1":
            return self._first_loss(net, batch)
        total = torch.zeros(())
        figures: dict[str, float] = {}
        column = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        made = self.unrolled(net, batch, self.options.unrolls)
        for i, outputs in enumerate(made):
            weight = batch.weight * (column > i)
            logq = self._logq(outputs, batch)
            loss = mean_over(self.divergence(batch.logp, logq), weight)
            total = total + self.options.decay**i * loss
            accepted = mean_over(acceptance(batch.logp, logq.detach()), weight)
            figures[f"acceptance {i + 1}"] = accepted.item()
        return total, figures

    def _first_loss(self, net: Net, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of EAGLE: smooth L1 to the head's true input, and cross-entropy."""
        weight = self.usable(batch)
        noise = NOISE * 512 / batch.tokens.shape[1]
        outputs = self.unrolled(net, batch, 1, noise)[0].float()
        aligned = max(1, round(self.options.aligned * outputs.shape[-1]))
        wanted = batch.states[self.teacher.layers[0]]
        gap = F.smooth_l1_loss(outputs[..., :aligned], wanted[..., :aligned], reduction="none")
        logq = self._logq(outputs, batch)
        crossed = -(batch.logp.exp() * logq.clamp_min(-1e4)).sum(-1)
        loss = mean_over(gap.mean(-1), weight) + 0.1 * mean_over(crossed, weight)
        accepted = mean_over(acceptance(batch.logp, logq.detach()), weight)
        return loss, {"acceptance 1": accepted.item()}
