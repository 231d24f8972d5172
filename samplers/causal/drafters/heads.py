"""Nodes whose distributions trained networks make of what the target has computed of a row.

    heads      read the hidden state that the last committed token was drawn from, and the drafts on
               the way. A head of depth k gives the token k + 1 positions behind the last committed
               one. The state of a row is that of the accepted branch alone, so that trees need no
               second pass
    entries    a layer (``gen.models.draft_heads.entries``) attends to entries of all committed
               tokens, made after every forward pass of the target of its hidden states and
               of the tokens behind them. From the last entry the layer drafts the next token, and
               from every draft the one behind it, each at the cost of one pass of the one layer.
               Branches of a tree see the committed entries and their own. A layer with a block over
               the features of committed slots has a second cache, of that block's keys and values,
               which drafts never enter

    medusa     a head for each depth, which reads no draft: the joint distribution of the drafts
               is a product. Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with
               Multiple Decoding Heads" (arXiv 2401.10774). There drafts are the most probable
               tokens of a static tree and typical acceptance decides
    hydra      heads that read the drafts before them too, of five kinds. The last two are entries,
               each depth of which counts as a pass of the drafter:

        heads      a head for each depth. Ankner et al., "Hydra: Sequentially-Dependent Draft Heads
                   for Medusa Decoding" (arXiv 2402.05109)
        recurrent  one head for all depths, which reads its own last feature. Xiao et al., "Clover:
                   Regressive Lightweight Speculative Decoding with Sequential Knowledge" (arXiv
                   2405.00263), without its attention
        trigram    a head for each depth, which reads the last three tokens alone. Zeng et al.,
                   "Chimera: A Lossless Decoding Method for Accelerating Large Language Models
                   Inference by Fusing all Tokens" (arXiv 2402.15758), without its layer
        clover     Clover whole: a layer over the target's states, and attention to it and to the
                   features of the depths before
        chimera    Chimera whole: a layer over the encodings of all tokens, and residual heads

    eagle      entries. Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language
               Models via Training-Time Test" (arXiv 2503.01840). There drafts are the most probable
               tokens of a tree

Every shape, every way to draw siblings and every verifier serves. The heads share the target's
projection to the vocabulary. A row that has seen no forward pass drafts nothing, nodes deeper than
a network goes get no children, and a row's drafts depend on no other row.

Guarantee: that of the verifier, whatever the weights. ``gen.recipes.drafters`` trains them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gen.core.errors import GenError
from gen.core.lookup import legal_at, take
from gen.core.method import method
from gen.core.registry import register, registry
from gen.core.sampling_params import SamplingParams
from gen.models.draft_heads.entries import Entries, EntryLayer, attention
from gen.samplers.causal.drafters.base import DraftSource
from gen.samplers.engine.host import to_device
from gen.samplers.engine.rows import RowState

if TYPE_CHECKING:
    from gen.models.adapters.layer_calls import KeysValues
    from gen.models.draft_heads.heads import DraftHeads
    from gen.models.targets.base import StepOutput
    from gen.models.targets.causal import CausalTarget
    from gen.samplers.engine.draft import Verdict
    from gen.samplers.engine.step_context import CausalStep


class StateNodes(DraftSource):
    """Distributions of a trained network that reads what the target has computed. ``method``: name
    of the drafter, for messages; ``sampling``: sampling parameters of the drafts, None for the
    target's temperature alone."""

    known = RowState(start=False)  # rows that have seen a forward pass, bool [b] on the host

    def __init__(self, target: CausalTarget, method: str, sampling: SamplingParams | None = None):
        self.target, self.model = target, target.language_model(method)
        self.head = self.model.output_weight[: target.legal.shape[-1]]
        self.sampling = sampling or target.sampling.unfiltered()
        self.known = np.zeros(target.rows, dtype=bool)
        passes = torch.zeros(target.items, dtype=torch.long, device=target.device)
        self.num_passes: Tensor | None = passes

    @property
    def nfe(self) -> list[int] | None:
        return None if self.num_passes is None else self.num_passes.tolist()

    def count_passes(self, step, passes):
        if self.num_passes is not None:
            passes = passes * to_device(self.known, passes.device)
            self.num_passes.index_add_(0, step.rows, passes)

    def observe(self, step, draft, output, verdict):
        self.known = self.known | (step.widths > 0)

    def nothing(self, *shape: int) -> Tensor:
        """Return the distributions of nodes, [*shape, V], of which nothing is known."""
        return self.head.new_full((*shape, len(self.head)), -torch.inf, dtype=torch.float32)

    def logprobs(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Return log-probabilities [b, n, V] of positions, long [b, n], from logits; -inf in rows
        that have seen no forward pass."""
        at = positions.clamp_max(self.target.length - 1)
        logq = self.sampling(logits, None, legal_at(self.target.legal, at))
        if self.known.all():
            return logq
        return torch.where(to_device(self.known, logq.device)[:, None, None], logq, -torch.inf)

    def require_slots(self, method: str) -> None:
        """Refuse a cache whose keys and values nobody else can read. Raises ``GenError``."""
        if not self.target.cache.has_slots:
            raise GenError(
                f"the drafter {method} reads the keys and values of a cache, and the model has a"
                f" {type(self.target.cache).__name__}; expected a causal language model of"
                " transformers"
            )

    def of_target(self, layer: int, rows: int) -> KeysValues:
        """Return the keys and values [b, G, S, d] of one of the target's layers, without those of
        guidance and of drafts."""
        cache: Any = self.target.cache
        written = cache.layers[layer].keys, cache.layers[layer].values
        keys, values = (x[:rows, : cache.slots].transpose(1, 2) for x in written)
        return keys, values

    def last_states(self, step: CausalStep, verdict: Verdict) -> Tensor:
        """Return the hidden states [b, D] that the last tokens of a step were drawn from."""
        assert step.hidden_states is not None, "the target was asked for them"
        states = torch.cat([step.hidden_states[name] for name in self.hidden_layers], -1)
        return take(states, verdict.last_column.clamp_max(states.shape[1] - 1)[:, None])[:, 0]


def kept_where_waiting(step: CausalStep, new: Tensor, old: Tensor | None) -> Tensor:
    """Return ``new`` [b, ...], with ``old`` in rows that wait at a bound and commit nothing."""
    goes_on = step.widths > 0
    if old is None or goes_on.all():
        return new
    return torch.where(to_device(goes_on, new.device).view(-1, *[1] * (new.ndim - 1)), new, old)


def with_drafts(seen: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
    """Let each of n new drafts see the drafts that its parent sees, and itself.

    Args:
        seen: drafts that the root and each of L drafts see, bool [b, 1 + L, L].
        parents: parents of the new drafts, 0 for the root, long [b, n].

    Returns:
        What the new drafts see, bool [b, n, L + n], and what all see, bool [b, 1 + L + n, L + n].
    """
    count = parents.shape[1]
    own = torch.eye(count, dtype=torch.bool, device=seen.device).expand(len(seen), -1, -1)
    new = torch.cat([take(seen, parents), own], 2)
    return new, torch.cat([F.pad(seen, (0, count)), new], 1)


class HeadNodes(StateNodes):
    """Distributions of heads, networks of K depths. ``layers``: layers of the target whose hidden
    states they read."""

    state = RowState()  # states that the last committed tokens come from, [b, S D]

    def __init__(self, target: CausalTarget, heads: DraftHeads, layers: tuple[str, ...]):
        super().__init__(target, "a head that drafts")
        self.heads, self.hidden_layers = heads, layers
        self.embedding = self.model.input_embeddings
        self.num_passes = None  # a head is no forward pass

    def begin(self, step, tokens):
        # tokens on the way to the root and to each draft, the last committed one first
        self.paths = take(tokens, (step.start - 1).clamp_min(0)[:, None])[..., None]
        return self._logq(step, 0, self.paths) if self.known.any() else self.nothing(len(tokens), 1)

    def extend(self, step, tree, first):
        ids, depth = tree.tokens[:, first:], tree.depth[:, first:]
        out = self.nothing(*ids.shape)
        if not self.known.any():
            return out
        above = take(self.paths, tree.parents[:, first:] + 1)  # [b, n, m]
        length = min(above.shape[-1] + 1, self.heads.depth + 1)
        more = length - above.shape[-1]
        new = F.pad(above, (0, more))
        new.scatter_(-1, depth.clamp_max(length - 1)[..., None], ids[..., None])
        self.paths = torch.cat([F.pad(self.paths, (0, more)), new], 1)
        # a chain grows by one depth at a time, and a tree of the loop may stop in the middle of one
        for k in range(first + 1 if tree.is_chain else 1, min(length, self.heads.depth)):
            out = torch.where((depth == k)[..., None], self._logq(step, k, new), out)
        return out

    @torch.no_grad()
    def _logq(self, step: CausalStep, depth: int, paths: Tensor) -> Tensor:
        """Return the log-probabilities [b, n, V] of the head of one depth behind nodes; ``paths``:
        tokens on the way to each, long [b, n, m], m > depth."""
        state = self.state[:, None].expand(*paths.shape[:2], -1)
        logits = self.heads(depth, state, self.embedding(paths))[..., : len(self.head)]
        return self.logprobs(logits, step.start[:, None] + depth)

    def observe(self, step, draft, output, verdict):
        state = self.last_states(step, verdict).to(self.embedding.weight.dtype)
        self.state = kept_where_waiting(step, state, self.state)
        super().observe(step, draft, output, verdict)


class EntryNodes(StateNodes):
    """Distributions of a layer that drafts from entries. ``layers``: layers of the target whose
    hidden states it reads; the rest as of ``StateNodes``."""

    # keys and values by slot, [b, S + 1, 2, H, d], of the committed entries and of the block over
    # their features; the last slot takes what is not committed
    cache, block_cache = RowState(), RowState()
    # of the last committed entry: query [b, 1, H, d], feature [b, 1, W] and tokens, long [b, 1, G]
    query, feature, recent = RowState(), RowState(), RowState()

    def __init__(
        self,
        target: CausalTarget,
        method: str,
        layer: EntryLayer,
        layers: tuple[str, ...],
        sampling: SamplingParams | None = None,
    ):
        super().__init__(target, method, sampling)
        self.layer, self.hidden_layers = layer, layers

    @property
    def num_slots(self) -> int:
        """Slots S of prompt and output."""
        return self.target.prompt.shape[1] + self.target.length

    @property
    def _before(self) -> Tensor:
        """Slots before position 0 of the rows, long [b, 1]."""
        return self.target.num_prompt_tokens[:, None]

    def _width(self, step: CausalStep) -> int:
        """Return the most slots of committed entries that any row has before a step."""
        prompts = self.target.prompts
        return int(prompts.host_lengths[prompts.row_items].max() + step.starts.max()) - 1

    @torch.no_grad()
    def begin(self, step, tokens):
        if not self.known.any():
            return self.nothing(len(tokens), 1)
        self.root = self._before + step.start[:, None] - 2  # slot of the last committed entry
        self.width = self._width(step)
        self.sees = tokens.new_zeros(len(tokens), 1, 0, dtype=torch.bool)
        self.node_cache = self.cache[:, :0]
        self.node_tokens = self.recent  # last tokens of the root and of each draft, [b, n + 1, G]
        depth = torch.zeros_like(self.root)
        self.outputs = self._output(self.query, self.feature, self.sees, depth)
        return self._logq(self.outputs, step.start[:, None])

    @torch.no_grad()
    def extend(self, step, tree, first):
        parents, depth = tree.parents[:, first:] + 1, tree.depth[:, first:]
        if not self.known.any():
            return self.nothing(*parents.shape)
        feature = self.layer.next_feature(take(self.outputs, parents))
        slots = torch.minimum(self.root + depth, self._before + self.target.length - 2)
        above = take(self.node_tokens, parents)[..., 1:]
        tokens = torch.cat([above, tree.tokens[:, first:, None]], -1)
        entries = self._entries(feature, tokens, slots)
        self.node_tokens = torch.cat([self.node_tokens, tokens], 1)
        self.node_cache = torch.cat([self.node_cache, entries.cache], 1)
        seen, self.sees = with_drafts(self.sees, parents)
        made = self._output(entries.query, entries.feature, seen, depth)
        self.outputs = torch.cat([self.outputs, made], 1)
        logq = self._logq(made, step.start[:, None] + depth)
        if self.layer.depth is None:
            return logq
        return torch.where((depth < self.layer.depth)[..., None], logq, -torch.inf)

    def _read_prompts(self, output: StepOutput) -> None:
        """Make the entries of prompts, all of whose tokens are known."""
        made = output.prompt_states
        assert made is not None
        ids, count = self.target.prompt[made.rows], self.layer.num_tokens
        tokens = F.pad(ids, (count - 1, 0)).unfold(1, count, 1)[:, 1:]
        slots = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[:2])
        rows = made.rows[:, None]
        feature = self._over_slots(self._fused(made.states), rows, slots, slots, tokens.shape[1])
        entries = self._entries(feature, tokens, slots)
        self.cache = self._written(self.cache, entries, rows, slots)

    @torch.no_grad()
    def observe(self, step, draft, output, verdict):
        assert output.hidden_states is not None, "the loop asked for hidden states"
        if output.prompt_states is not None:
            self._read_prompts(output)
        states, last = self._fused(output.hidden_states), verdict.num_accepted[:, None]
        if verdict.path is not None:
            path = F.pad(verdict.path + 1, (1, 0))
            states = take(states, path[:, : verdict.tokens.shape[1]])
        column = torch.arange(states.shape[1], device=states.device)
        # the token behind each slot: the accepted drafts, and the one that follows them
        given = torch.cat([self._recent(), verdict.tokens[:, : states.shape[1]]], 1)
        tokens = given.unfold(1, self.layer.num_tokens, 1)[:, 1:]
        slots = self._before - 1 + step.start[:, None] + column
        committed = (column <= last) & (slots < self.num_slots)
        kept = torch.where(committed, slots, self.num_slots)
        slots = slots.clamp_max(self.num_slots - 1)
        width = min(self._width(step) + states.shape[1], self.num_slots)
        rows = torch.arange(len(states), device=states.device)[:, None]
        feature = self._over_slots(states, rows, slots, kept, width)
        entries = self._entries(feature, tokens, slots)
        self.cache = self._written(self.cache, entries, rows, kept)
        made = {"query": entries.query, "feature": entries.feature, "recent": tokens}
        for name, new in made.items():
            new = kept_where_waiting(step, take(new, last), getattr(self, name))
            setattr(self, name, new)
        super().observe(step, draft, output, verdict)

    def _recent(self) -> Tensor:
        """Return the last committed tokens of the rows, long [b, G]: those of the prompt before the
        first pass of a row."""
        count, prompt = self.layer.num_tokens, self.target.prompt
        slots = self._before - count + torch.arange(count, device=prompt.device)
        of_prompt = prompt[: len(slots)].gather(1, slots.clamp_min(0))
        if self.recent is None:
            return of_prompt
        known = to_device(self.known, prompt.device)[:, None]
        return torch.where(known, self.recent[:, 0], of_prompt)

    def _over_slots(
        self, feature: Tensor, rows: Tensor, slots: Tensor, kept: Tensor, width: int
    ) -> Tensor:
        """Run the layer's block over features [n, L, W] of slots, long [n, L], that follow the
        known ones of rows, long [n, 1]. Their keys and values are written to ``kept``, long [n, L];
        the first ``width`` slots may be seen."""
        block = self.layer.block
        if block is None:
            return feature
        made = block.entries(feature, slots)
        self.block_cache = self._written(self.block_cache, made, rows, kept)
        keys, values = self.block_cache[rows[:, 0], :width].unbind(2)
        seen = torch.arange(width, device=slots.device) <= slots[..., None]
        return block.output(feature, attention(made.query, keys, values, seen))

    def _written(self, cache: Tensor | None, made: Entries, rows: Tensor, slots: Tensor) -> Tensor:
        """Return a cache with the keys and values of rows, long [n, 1], in slots, long [n, L]."""
        new = made.cache
        if cache is None:
            cache = new.new_zeros(len(self.known), self.num_slots + 1, *new.shape[2:])
        cache[rows, slots] = new
        return cache

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
        """Return the outputs [b, n, W] of entries with queries [b, n, H, d] and features [b, n, W].
        ``seen``: drafts that each attends to, bool [b, n, L]; ``depth``: drafts before the one that
        its output is about, long [b, n]."""
        slot = torch.arange(self.width, device=query.device)
        before = (slot <= self.root)[:, None].expand(-1, query.shape[1], -1)
        keys, values = torch.cat([self.cache[:, : self.width], self.node_cache], 1).unbind(2)
        out = attention(query, keys, values, torch.cat([before, seen], -1))
        return self.layer.output(feature, out, depth)

    def _logq(self, outputs: Tensor, positions: Tensor) -> Tensor:
        """Return the log-probabilities [b, n, V] of positions, long [b, n], from outputs."""
        head = self.head.to(outputs.dtype)
        return self.logprobs(F.linear(self.layer.head_input(outputs), head), positions)


@register("drafter", "medusa")
class Medusa(HeadNodes):
    """Drafts with a trained head for each depth, which read the target's last hidden state.
    Parameters: ``drafter_weights``."""

    needs_weights = True

    @classmethod
    def of(cls, sampler, target, draft):
        return cls(target, *registry.get("drafting", "medusa")(target, sampler.drafter_weights))


@register("drafter", "hydra")
class Hydra(HeadNodes):
    """Drafts with trained heads, which read the target's hidden states and the drafts before.
    Parameters: ``drafter_weights``."""

    needs_weights = True

    @classmethod
    def of(cls, sampler, target, draft):
        net, layers = registry.get("drafting", "hydra")(target, sampler.drafter_weights)
        if isinstance(net, EntryLayer):
            return EntryNodes(target, "hydra", net, layers)
        return cls(target, net, layers)


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
class Eagle(EntryNodes):
    """Drafts with a trained layer that reads the target's hidden states. Parameters:
    ``drafter_weights``, ``num_speculative_tokens``, ``draft_temperature``."""

    reads = ("drafter_weights",)
    needs_weights = True

    @classmethod
    def of(cls, sampler, target, draft):
        layer, layers = registry.get("drafting", "eagle")(target, sampler.drafter_weights)
        # a single branch makes the drafts: the target's filters without guidance
        s, temperature = target.sampling, sampler.draft_temperature
        temperature = s.temperature if temperature is None else temperature
        sampling = SamplingParams(temperature, s.top_k, s.top_p, s.min_p)
        return cls(target, "eagle", layer, layers, sampling)
