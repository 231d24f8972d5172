"""Drafter that grows a tree of drafts in some shape, from the distributions of any source."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gen.models.targets.base import StepOutput
from gen.samplers.causal.drafters.base import Nodes
from gen.samplers.causal.shapes.base import Shape
from gen.samplers.causal.shapes.builder import TreeBuilder
from gen.samplers.engine.causal_loop import CausalStep, Draft, Drafter, Verdict
from gen.samplers.engine.rows import RowStore
from gen.samplers.engine.tree import WITH_REPLACEMENT, Tree
from gen.samplers.verifiers.base import Verifier


class NodeDrafter(Drafter):
    """Drafter of trees.

    Args:
        nodes: distributions of the drafts.
        shape: which nodes get children.
        draws: how siblings are drawn.
        verifier: decides which drafts are accepted.
    """

    def __init__(self, nodes: Nodes, shape: Shape, draws: str, verifier: Verifier):
        self.nodes, self.shape, self.draws, self.verifier = nodes, shape, draws, verifier
        self.targets = tuple(nodes.targets)
        if nodes.hidden_layers:
            self.needs, self.hidden_layers = frozenset({"hidden_states"}), nodes.hidden_layers
        self.tree: Tree | None = None

    @property
    def stores(self) -> tuple[RowStore, ...]:
        return (self.store, *self.nodes.stores, *self.shape.stores)

    @property
    def nfe(self) -> list[int] | None:
        return self.nodes.nfe

    @property
    def window(self) -> int:
        return 1 + self.shape.nodes

    def propose(self, step: CausalStep, tokens: Tensor) -> Draft:
        self.tree = None
        if step.positions.shape[1] == 1:
            nothing = step.valid[:, :0]
            return Draft(tokens[:, :0], nothing)
        builder = TreeBuilder(step, tokens, self.nodes, self.draws, self.shape.is_chain)
        self.shape.grow(builder)
        self.nodes.count_passes(step, builder.passes)
        self.tree = tree = builder.finish()
        parents = None if tree.is_chain else tree.parents
        return Draft(tree.tokens, tree.exists, parents, tree.failed)

    def verify(self, step: CausalStep, output: StepOutput) -> Verdict:
        tree, logp = self.tree, output.logprobs
        self.nodes.read(step, output)
        if tree is None:
            ids = step.categorical(logp, "token", step.valid, shared=True)
            verdict = Verdict(torch.zeros_like(step.start), ids)
        else:
            self.nodes.learn(step, tree, output)
            verdict = self._judge(step, tree, logp)
            row = torch.arange(len(logp), device=logp.device)
            last = logp[row, verdict.last_column.clamp_max(logp.shape[1] - 1)]
            self.shape.learn(step, verdict.num_accepted, tree.exists.sum(1), last)
        self.nodes.accept(step, verdict)
        return verdict

    def _judge(self, step: CausalStep, tree: Tree, logp: Tensor) -> Verdict:
        """Let the verifier judge the drafts."""
        if self.draws == WITH_REPLACEMENT and not tree.is_chain:
            tree = tree.merged()
        return self.verifier.verify(step, tree, logp)

    def observe(self, step: CausalStep, num_accepted: np.ndarray, num_drafted: np.ndarray) -> None:
        self.nodes.observe(step, num_accepted, num_drafted)
        committed = np.minimum(num_accepted + 1, step.widths)
        self.shape.over(step.positions.shape[1], step.starts, committed)
