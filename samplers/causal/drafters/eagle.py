"""Drafts of a layer that goes on where the target's hidden states end.

After every forward pass of the target the layer makes entries of the committed tokens, from the
hidden states and the tokens behind them; those of the prompt come with the first pass of a row,
before which nothing is drafted. From the last entry it drafts the next token, and from every draft
the one behind it, each at the cost of one pass of the one layer. Branches of a tree see the
committed entries and their own.

    eagle    Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
             Training-Time Test" (arXiv 2503.01840). There drafts are the most probable tokens of a
             tree; here every shape and every way to draw siblings serves

Guarantee: that of the verifier, whatever the weights. ``gen.recipes.drafters`` trains them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gen.core.method import method
from gen.core.registry import register
from gen.core.sampling_params import SamplingParams
from gen.models.targets.base import StepOutput, legal_at
from gen.models.targets.causal import CausalTarget
from gen.samplers.causal.drafters.base import DraftSource, Nodes
from gen.samplers.causal.drafters.eagle_layer import EagleLayer, EagleShape, Entries
from gen.samplers.causal.drafters.trained import language_model, read_drafter
from gen.samplers.engine.causal_loop import CausalStep, Verdict
from gen.samplers.engine.host import to_device
from gen.samplers.engine.rows import RowState

KIND = "eagle"


class EagleNodes(Nodes):
    """Distributions of a drafting layer.

    Args:
        target: the model with its items.
        layer: the layer.
        hidden_layers: layers of the target whose hidden states it reads.
        temperature: that of the drafts; None is the target's.
    """

    known = RowState(start=False)  # rows with entries of all their tokens, bool [b] on the host
    # keys and values of the committed entries by slot, [b, S + 1, H, d]; the last takes what is not
    # committed
    keys = RowState()
    values = RowState()
    # of the last committed entry: query [b, 1, H, d] and feature [b, 1, W]
    query = RowState()
    feature = RowState()

    def __init__(
        self,
        target: CausalTarget,
        layer: EagleLayer,
        hidden_layers: tuple[str, ...],
        temperature: float | None = None,
    ):
        self.target, self.layer, self.hidden_layers = target, layer, hidden_layers
        self.model = language_model(target, KIND)
        size = target.legal.shape[-1]
        self.head = self.model.output_weight[:size]
        self.sampling = drafted_params(target.sampling, temperature)
        self.known = np.zeros(target.rows, dtype=bool)
        self.num_passes = torch.zeros(target.items, dtype=torch.long, device=target.device)
        self.states = torch.empty(0)

    @property
    def nfe(self) -> list[int]:
        return self.num_passes.tolist()

    def count_passes(self, step, passes):
        self.num_passes.index_add_(0, step.rows, passes * to_device(self.known, passes.device))

    @property
    def _before(self) -> Tensor:
        """Slots before position 0 of the rows, long [b, 1]."""
        return self.target.num_prompt_tokens[:, None]

    @torch.no_grad()
    def begin(self, step, tokens):
        rows, size = len(tokens), self.head.shape[0]
        if not self.known.any():
            return self.head.new_full((rows, size), -torch.inf, dtype=torch.float32)
        self.root = self._before + step.start[:, None] - 2  # slot of the last committed entry
        self.width = int(self._host_lengths.max() + step.starts.max()) - 1
        self.sees = tokens.new_zeros(rows, 1, 0, dtype=torch.bool)
        shape = rows, 0, self.layer.heads, self.keys.shape[-1]
        self.node_keys = self.node_values = self.keys.new_empty(shape)
        self.outputs = self._output(self.query, self.feature, self.sees)
        logq = self._logprobs(self.outputs, step.start[:, None])[:, 0]
        if self.known.all():
            return logq
        return torch.where(to_device(self.known, logq.device)[:, None], logq, -torch.inf)

    @torch.no_grad()
    def extend(self, step, tree, first):
        parents, depth = tree.parents[:, first:] + 1, tree.depth[:, first:]
        count = parents.shape[1]
        if not self.known.any():
            size = self.head.shape[0]
            return self.head.new_full((*parents.shape, size), -torch.inf, dtype=torch.float32)
        row = torch.arange(len(parents), device=parents.device)[:, None]
        feature = self.layer.next_feature(self.outputs[row, parents])
        last = self._before + self.target.length - 1
        slots = torch.minimum(self.root + depth, last - 1)
        entries = self._entries(feature, tree.tokens[:, first:], slots)
        self.node_keys = torch.cat([self.node_keys, entries.key], 1)
        self.node_values = torch.cat([self.node_values, entries.value], 1)
        # a draft sees the drafts that its parent sees, and itself
        wider = F.pad(self.sees, (0, count))
        own = torch.zeros_like(wider[:, :1]).expand(-1, count, -1).clone()
        own[:, range(count), range(first, first + count)] = True
        seen = wider[row, parents] | own
        self.sees = torch.cat([wider, seen], 1)
        made = self._output(entries.query, entries.feature, seen)
        self.outputs = torch.cat([self.outputs, made], 1)
        return self._logprobs(made, step.start[:, None] + depth)

    @torch.no_grad()
    def read(self, step, output):
        assert output.hidden_states is not None, "the loop asked for hidden states"
        self.states = self._fused(output.hidden_states)
        if self.keys is None:
            rows, width = len(self.states), self.states.shape[-1]
            empty = self.states.new_zeros(rows, self._num_slots + 1, width)
            self.keys = empty.unflatten(-1, (self.layer.heads, -1))
            self.values = self.keys.clone()
        if output.prompt_states is not None:
            self._read_prompts(output)

    def _read_prompts(self, output: StepOutput) -> None:
        """Make the entries of prompts, all of whose tokens are known."""
        made = output.prompt_states
        assert made is not None
        tokens = self.target.prompt[made.rows, 1:]
        slots = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        entries = self._entries(self._fused(made.states), tokens, slots)
        at = made.rows[:, None], slots
        self.keys[at], self.values[at] = entries.key, entries.value

    @torch.no_grad()
    def accept(self, step: CausalStep, verdict: Verdict) -> None:
        count, states = verdict.num_accepted, self.states
        row = torch.arange(len(states), device=states.device)[:, None]
        if verdict.path is not None:
            path = F.pad(verdict.path + 1, (1, 0))
            states = states[row, path[:, : verdict.tokens.shape[1]]]
        # the token behind each slot: the accepted drafts, and the one that follows them
        tokens = verdict.tokens[:, : states.shape[1]]
        column = torch.arange(states.shape[1], device=states.device)
        slots = self._before - 1 + step.start[:, None] + column
        committed = (column <= count[:, None]) & (slots < self._num_slots)
        entries = self._entries(states, tokens, slots.clamp_max(self._num_slots - 1))
        at = row, torch.where(committed, slots, self._num_slots)
        self.keys[at], self.values[at] = entries.key, entries.value
        last = count[:, None]
        query, feature = entries.query[row, last], entries.feature[row, last]
        goes_on = step.widths > 0  # other rows wait, and commit nothing
        if self.query is not None and not goes_on.all():
            here = to_device(goes_on, query.device)[:, None, None]
            query = torch.where(here[..., None], query, self.query)
            feature = torch.where(here, feature, self.feature)
        self.query, self.feature, self.known = query, feature, self.known | goes_on

    @property
    def _num_slots(self) -> int:
        return self.target.prompt.shape[1] + self.target.length

    @property
    def _host_lengths(self) -> np.ndarray:
        """Lengths of the rows' prompts, int64 [b]."""
        prompts = self.target.prompts
        return prompts.host_lengths[prompts.row_items]

    def _fused(self, states: dict[str, Tensor]) -> Tensor:
        """Fuse hidden states to features [n, L, W]."""
        return self.layer.fuse(torch.cat([states[name] for name in self.hidden_layers], -1))

    def _entries(self, feature: Tensor, tokens: Tensor, slots: Tensor) -> Entries:
        """Make entries of slots, long [n, L], with the tokens behind them."""
        embedding = self.model.embedded(tokens, slots + 1)
        return self.layer.entries(feature, embedding.to(feature.dtype), slots)

    def _output(self, query: Tensor, feature: Tensor, seen: Tensor) -> Tensor:
        """Return the outputs [b, n, W] of entries.

        Args:
            query: [b, n, H, d].
            feature: [b, n, W].
            seen: drafts that each of them attends to, bool [b, n, L].
        """
        slot = torch.arange(self.width, device=query.device)
        before = (slot <= self.root)[:, None].expand(-1, query.shape[1], -1)
        mask = torch.cat([before, seen], -1)[:, None]
        keys = torch.cat([self.keys[:, : self.width], self.node_keys], 1)
        values = torch.cat([self.values[:, : self.width], self.node_values], 1)
        # a row without entries attends to something, which nobody reads
        mask = mask | ~mask.any(-1, keepdim=True)
        out = F.scaled_dot_product_attention(
            query.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), mask
        )
        return self.layer.output(feature, out.transpose(1, 2))

    def _logprobs(self, outputs: Tensor, positions: Tensor) -> Tensor:
        """Return the log-probabilities [b, n, V] of positions, long [b, n], from outputs."""
        logits = F.linear(self.layer.head_input(outputs), self.head.to(outputs.dtype))
        at = positions.clamp_max(self.target.length - 1)
        return self.sampling(logits, None, legal_at(self.target.legal, at))


def drafted_params(sampling: SamplingParams, temperature: float | None) -> SamplingParams:
    """Return the parameters of drafts that a single branch makes: filters without guidance."""
    plain = SamplingParams(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    return plain if temperature is None else replace(plain, temperature=temperature)


@method(
    "eagle",
    sampler="speculative",
    about="drafts with a trained layer that reads the target's hidden states",
    paper="2503.01840",
    title="EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time"
    " Test",
    params={"drafter": "eagle"},
)
@register("drafter", "eagle")
class Eagle(DraftSource):
    """Drafts with a trained layer that reads the target's hidden states. Parameters:
    ``drafter_weights``, ``num_speculative_tokens``, ``draft_temperature``."""

    params = ("drafter_weights",)
    needs_weights = True

    @classmethod
    def nodes(cls, sampler, target, draft):
        language_model(target, KIND)
        facts, weights = read_drafter(sampler.drafter_weights, KIND, target)
        layer = EagleLayer(EagleShape(**facts.net))
        layer.load_state_dict(weights)
        layer = layer.to(target.device, next(iter(weights.values())).dtype).eval()
        return EagleNodes(target, layer, facts.layers, sampler.draft_temperature)
