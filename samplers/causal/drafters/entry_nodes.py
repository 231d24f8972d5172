"""Nodes whose distributions a layer makes of entries (``entry_layer``).

After every forward pass of the target the layer makes entries of the committed tokens, from the
hidden states and the tokens behind them; those of the prompt come with the first pass of a row,
before which nothing is drafted. From the last entry it drafts the next token, and from every draft
the one behind it, each at the cost of one pass of the one layer. Branches of a tree see the
committed entries and their own.

A layer with a block over the features of committed slots has a second cache, of that block's keys
and values. Drafts never enter it.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gen.core.sampling_params import SamplingParams
from gen.models.targets.base import StepOutput, legal_at
from gen.models.targets.causal import CausalTarget
from gen.samplers.causal.drafters.base import Nodes
from gen.samplers.causal.drafters.entry_layer import Entries, EntryLayer
from gen.samplers.causal.drafters.trained import language_model
from gen.samplers.engine.draft import Verdict
from gen.samplers.engine.host import to_device
from gen.samplers.engine.rows import RowState
from gen.samplers.engine.step_context import CausalStep


class EntryNodes(Nodes):
    """Distributions of a drafting layer.

    Args:
        target: the model with its items.
        kind: name of the drafter, for messages.
        layer: the layer.
        hidden_layers: layers of the target whose hidden states it reads.
        sampling: sampling parameters of the drafts.
    """

    known = RowState(start=False)  # rows with entries of all their tokens, bool [b] on the host
    # keys and values of the committed entries by slot, [b, S + 1, H, d]; the last takes what is not
    # committed
    keys = RowState()
    values = RowState()
    # of the block over features, the same
    block_keys = RowState()
    block_values = RowState()
    # of the last committed entry: query [b, 1, H, d], feature [b, 1, W] and tokens, long [b, 1, G]
    query = RowState()
    feature = RowState()
    recent = RowState()

    def __init__(
        self,
        target: CausalTarget,
        kind: str,
        layer: EntryLayer,
        hidden_layers: tuple[str, ...],
        sampling: SamplingParams,
    ):
        self.target, self.layer, self.hidden_layers = target, layer, hidden_layers
        self.model = language_model(target, kind)
        size = target.legal.shape[-1]
        self.head = self.model.output_weight[:size]
        self.sampling = sampling
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
            return self.head.new_full((rows, 1, size), -torch.inf, dtype=torch.float32)
        self.root = self._before + step.start[:, None] - 2  # slot of the last committed entry
        self.width = int(self._host_lengths.max() + step.starts.max()) - 1
        self.sees = tokens.new_zeros(rows, 1, 0, dtype=torch.bool)
        shape = rows, 0, *self.keys.shape[2:]
        self.node_keys = self.node_values = self.keys.new_empty(shape)
        self.node_tokens = self.recent  # last tokens of the root and of each draft, [b, n + 1, G]
        self.outputs = self._output(
            self.query, self.feature, self.sees, torch.zeros_like(self.root)
        )
        logq = self._logprobs(self.outputs, step.start[:, None])
        if self.known.all():
            return logq
        return torch.where(to_device(self.known, logq.device)[:, None, None], logq, -torch.inf)

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
        drafted = tree.tokens[:, first:, None]
        tokens = torch.cat([self.node_tokens[row, parents][..., 1:], drafted], -1)
        entries = self._entries(feature, tokens, slots)
        self.node_tokens = torch.cat([self.node_tokens, tokens], 1)
        self.node_keys = torch.cat([self.node_keys, entries.key], 1)
        self.node_values = torch.cat([self.node_values, entries.value], 1)
        # a draft sees the drafts that its parent sees, and itself
        wider = F.pad(self.sees, (0, count))
        own = torch.zeros_like(wider[:, :1]).expand(-1, count, -1).clone()
        own[:, range(count), range(first, first + count)] = True
        seen = wider[row, parents] | own
        self.sees = torch.cat([wider, seen], 1)
        made = self._output(entries.query, entries.feature, seen, depth)
        self.outputs = torch.cat([self.outputs, made], 1)
        return self._logprobs(made, step.start[:, None] + depth, depth)

    @torch.no_grad()
    def read(self, step, output):
        assert output.hidden_states is not None, "the loop asked for hidden states"
        self.states = self._fused(output.hidden_states)
        if output.prompt_states is not None:
            self._read_prompts(output)

    def _read_prompts(self, output: StepOutput) -> None:
        """Make the entries of prompts, all of whose tokens are known."""
        made = output.prompt_states
        assert made is not None
        ids, count = self.target.prompt[made.rows], self.layer.num_tokens
        tokens = F.pad(ids, (count - 1, 0)).unfold(1, count, 1)[:, 1:]
        slots = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[:2])
        rows = made.rows[:, None]
        feature = self._over_slots(self._fused(made.states), rows, slots, slots, tokens.shape[1])
        self._keep(self._entries(feature, tokens, slots), rows, slots)

    @torch.no_grad()
    def accept(self, step: CausalStep, verdict: Verdict) -> None:
        count, states = verdict.num_accepted, self.states
        row = torch.arange(len(states), device=states.device)[:, None]
        if verdict.path is not None:
            path = F.pad(verdict.path + 1, (1, 0))
            states = states[row, path[:, : verdict.tokens.shape[1]]]
        # the token behind each slot: the accepted drafts, and the one that follows them
        given = torch.cat([self._recent(), verdict.tokens[:, : states.shape[1]]], 1)
        tokens = given.unfold(1, self.layer.num_tokens, 1)[:, 1:]
        column = torch.arange(states.shape[1], device=states.device)
        slots = self._before - 1 + step.start[:, None] + column
        committed = (column <= count[:, None]) & (slots < self._num_slots)
        kept = torch.where(committed, slots, self._num_slots)
        slots = slots.clamp_max(self._num_slots - 1)
        width = int(self._host_lengths.max() + step.starts.max()) - 1 + states.shape[1]
        feature = self._over_slots(states, row, slots, kept, min(width, self._num_slots))
        entries = self._entries(feature, tokens, slots)
        self._keep(entries, row, kept)
        last = count[:, None]
        made = {
            "query": entries.query[row, last],
            "feature": entries.feature[row, last],
            "recent": tokens[row, last],
        }
        goes_on = step.widths > 0  # other rows wait, and commit nothing
        here = to_device(goes_on, states.device)
        for name, new in made.items():
            old = self.store.get(name)
            if old is not None and not goes_on.all():
                new = torch.where(here.view(-1, *[1] * (new.ndim - 1)), new, old)
            setattr(self, name, new)
        self.known = self.known | goes_on

    def _recent(self) -> Tensor:
        """Return the last committed tokens of the rows, long [b, G]: those of the prompt before the
        first pass of a row."""
        count, prompt = self.layer.num_tokens, self.target.prompt
        slots = self._before - count + torch.arange(count, device=prompt.device)
        of_prompt = prompt[: len(slots)].gather(1, slots.clamp_min(0))
        if self.recent is None:
            return of_prompt
        return torch.where(
            to_device(self.known, prompt.device)[:, None], self.recent[:, 0], of_prompt
        )

    def _over_slots(
        self, feature: Tensor, rows: Tensor, slots: Tensor, kept: Tensor, width: int
    ) -> Tensor:
        """Run the layer's block over features of slots that follow the known ones.

        Args:
            feature: [n, L, W].
            rows: rows of the batch, long [n, 1].
            slots: long [n, L].
            kept: where their keys and values are written, long [n, L].
            width: slots that any of them may see.
        """
        block = self.layer.block
        if block is None:
            return feature
        made = block.entries(feature, slots)
        if self.block_keys is None:
            self.block_keys, self.block_values = self._empty(made), self._empty(made)
        self.block_keys[rows, kept], self.block_values[rows, kept] = made.key, made.value
        keys, values = (x[rows[:, 0], :width] for x in (self.block_keys, self.block_values))
        seen = torch.arange(width, device=slots.device) <= slots[..., None]
        return block.output(feature, attention(made.query, keys, values, seen))

    def _keep(self, entries: Entries, rows: Tensor, slots: Tensor) -> None:
        """Write the keys and values of entries of rows, long [n, 1], to slots, long [n, L]."""
        if self.keys is None:
            self.keys, self.values = self._empty(entries), self._empty(entries)
        self.keys[rows, slots], self.values[rows, slots] = entries.key, entries.value

    def _empty(self, entries: Entries) -> Tensor:
        """Return room for the keys or the values of all slots, [b, S + 1, H, d]."""
        return entries.key.new_zeros(len(self.known), self._num_slots + 1, *entries.key.shape[2:])

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
        joined = torch.cat([states[name] for name in self.hidden_layers], -1)
        return self.layer.fuse(joined.to(self.layer.fuse.weight.dtype))

    def _entries(self, feature: Tensor, tokens: Tensor, slots: Tensor) -> Entries:
        """Make entries of slots, long [n, L], with the last tokens up to the ones behind them, long
        [n, L, G]."""
        count = tokens.shape[-1]
        at = slots[..., None] + 2 - count + torch.arange(count, device=slots.device)
        ids, where = tokens.flatten(1), at.flatten(1)
        embedding = self.model.embedded(ids, where.clamp_min(0)).to(feature.dtype)
        embedding = torch.where((where < 0)[..., None], 0.0, embedding)
        return self.layer.entries(feature, embedding.unflatten(1, (-1, count)).flatten(2), slots)

    def _output(self, query: Tensor, feature: Tensor, seen: Tensor, depth: Tensor) -> Tensor:
        """Return the outputs [b, n, W] of entries.

        Args:
            query: [b, n, H, d].
            feature: [b, n, W].
            seen: drafts that each of them attends to, bool [b, n, L].
            depth: drafts before the one that each output is about, long [b, n].
        """
        slot = torch.arange(self.width, device=query.device)
        before = (slot <= self.root)[:, None].expand(-1, query.shape[1], -1)
        keys = torch.cat([self.keys[:, : self.width], self.node_keys], 1)
        values = torch.cat([self.values[:, : self.width], self.node_values], 1)
        out = attention(query, keys, values, torch.cat([before, seen], -1))
        return self.layer.output(feature, out, depth)

    def _logprobs(self, outputs: Tensor, positions: Tensor, depth: Tensor | None = None) -> Tensor:
        """Return the log-probabilities [b, n, V] of positions, long [b, n], from outputs.

        Args:
            outputs: [b, n, W].
            positions: long [b, n].
            depth: drafts before each; None for none.
        """
        logits = F.linear(self.layer.head_input(outputs), self.head.to(outputs.dtype))
        at = positions.clamp_max(self.target.length - 1)
        logq = self.sampling(logits, None, legal_at(self.target.legal, at))
        if depth is None or self.layer.depth is None:
            return logq
        return torch.where((depth < self.layer.depth)[..., None], logq, -torch.inf)


def attention(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """Let queries [n, L, H, d] attend to keys and values [n, S, H, d] that are seen, bool
    [n, L, S].

    Returns:
        [n, L, H, d]; anything for a query that sees nothing.
    """
    mask = (seen | ~seen.any(-1, keepdim=True))[:, None]
    q, k, v = (x.transpose(1, 2) for x in (query, keys, values))
    return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)
