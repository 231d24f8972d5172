"""Nodes whose distributions heads compute from hidden states of the target's last forward pass.

A head of depth k gives the token k + 1 positions behind the last committed one, from the hidden
state that the last committed token was drawn from. A row that has seen no forward pass has no state
and drafts nothing. Nodes deeper than the heads get no children.

The state of a row is that of the accepted branch alone, so that trees need no second pass, and a
row's drafts depend on no other row.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gen.core.errors import GenError
from gen.core.sampling_params import SamplingParams
from gen.models.adapters.base import ModelAdapter
from gen.models.targets.base import legal_at
from gen.models.targets.causal import CausalTarget
from gen.samplers.causal.drafters.base import Nodes
from gen.samplers.causal.drafters.head_networks import DraftHeads
from gen.samplers.engine.draft import Draft, Verdict
from gen.samplers.engine.rows import RowState
from gen.samplers.engine.step_context import CausalStep

Net = TypeVar("Net", bound=nn.Module)


def unfiltered(sampling: SamplingParams) -> SamplingParams:
    """Return the temperature of sampling parameters without guidance and filters.

    A drafter that is trained on the final distribution has learned those.
    """
    return SamplingParams(temperature=sampling.temperature)


def network_of(target: CausalTarget, method: str) -> Any:
    """Return the network of a target. Raises ``GenError`` for a model without one."""
    if not isinstance(target.model, ModelAdapter):
        raise GenError(
            f"{method} needs a network with hidden states, and {type(target.model).__name__} has"
            " none; expected a causal language model of transformers"
        )
    return target.model.model


def projection(target: CausalTarget, method: str) -> Tensor:
    """Return the weights [V, D] by which the target makes logits of its last hidden states."""
    head = network_of(target, method).get_output_embeddings().weight
    return head[: target.legal.shape[-1]]


class HeadNodes(Nodes):
    """Distributions of heads.

    Args:
        target: the model with its items.
        heads: networks of K depths.
        layers: layers of the target whose hidden states the heads read.
    """

    state = RowState()  # states that the last committed tokens come from, [b, S D]
    known = RowState(start=False)  # rows that have one, bool [b]

    def __init__(self, target: CausalTarget, heads: DraftHeads, layers: tuple[str, ...]):
        self.heads, self.hidden_layers = heads, layers
        self.embedding = network_of(target, "a head that drafts").get_input_embeddings()
        self.legal, self.sampling = target.legal, unfiltered(target.sampling)
        width = len(layers) * self.embedding.weight.shape[1]
        self.state = self.embedding.weight.new_zeros(target.rows, width)
        self.known = torch.zeros(target.rows, dtype=torch.bool, device=target.device)

    def begin(self, step: CausalStep, tokens: Tensor) -> Tensor:
        row = torch.arange(len(tokens), device=tokens.device)
        last = tokens[row, (step.start - 1).clamp_min(0)]
        # tokens on the way to the root and to each draft, the last committed one first
        self.paths = last[:, None, None]
        return self._logq(step, 0, self.paths)

    def extend(self, step: CausalStep, tree: Draft, first: int) -> Tensor:
        row = torch.arange(len(tree.tokens), device=tree.tokens.device)[:, None]
        ids, depth = tree.tokens[:, first:], tree.depth[:, first:]
        above = self.paths[row, tree.parents[:, first:] + 1]  # [b, n, m]
        length = min(above.shape[-1] + 1, self.heads.depth + 1)
        more = length - above.shape[-1]
        new = F.pad(above, (0, more))
        new.scatter_(-1, depth.clamp_max(length - 1)[..., None], ids[..., None])
        self.paths = torch.cat([F.pad(self.paths, (0, more)), new], 1)
        shape = (*ids.shape, self.legal.shape[-1])
        out = torch.full(shape, -torch.inf, dtype=self.state.dtype, device=ids.device)
        deepest = min(length, self.heads.depth)
        # a chain grows by one depth at a time, and a tree of the loop may stop in the middle of one
        for k in range(first + 1 if tree.is_chain else 1, deepest):
            out = torch.where((depth == k)[..., None], self._logq(step, k, new), out)
        return out

    def _logq(self, step: CausalStep, depth: int, paths: Tensor) -> Tensor:
        """Return the log-probabilities [b, n, V] of one depth behind nodes.

        Args:
            step: context of the step.
            depth: the head.
            paths: tokens on the way to each node, long [b, n, m], m > depth.
        """
        embedded = self.embedding(paths)
        state = self.state[:, None].expand(*paths.shape[:2], -1)
        with torch.no_grad():
            logits = self.heads(depth, state, embedded)[..., : self.legal.shape[-1]]
        at = (step.start + depth).clamp_max(len(self.legal) - 1)[:, None]
        logq = self.sampling(logits, None, legal_at(self.legal, at))
        return torch.where(self.known[:, None, None], logq, -torch.inf)

    def accept(self, step: CausalStep, verdict: Verdict) -> None:
        assert step.hidden_states is not None, "the target was asked for them"
        states = torch.cat([step.hidden_states[name] for name in self.hidden_layers], -1)
        column = verdict.last_column
        row = torch.arange(len(column), device=column.device)
        self.state = states[row, column.clamp_max(states.shape[1] - 1)].to(self.state.dtype)
        self.known = torch.ones_like(self.known)


def checked_load(net: Net, weights: dict[str, Tensor], kind: str) -> Net:
    """Load the weights of a drafter's network.

    Args:
        net: the network, which is changed.
        weights: its parameters by name; the network takes their device and dtype.
        kind: kind of the drafter, for messages.

    Raises:
        GenError: names or shapes are not those of the network.
    """
    wanted = {name: tuple(p.shape) for name, p in net.named_parameters()}
    came = {name: tuple(w.shape) for name, w in weights.items()}
    wrong = [name for name in {**wanted, **came} if wanted.get(name) != came.get(name)]
    if wrong:
        name = wrong[0]
        raise GenError(
            f"the weights of the {kind} drafter have {name} of shape {came.get(name)}; expected"
            f" {wanted.get(name)}"
        )
    like = next(iter(weights.values()))
    net.to(like.device, like.dtype)
    net.load_state_dict(weights, strict=False)  # tied weights come once
    return net.eval()
