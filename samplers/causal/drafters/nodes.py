"""Drafter that grows a tree of drafts in some shape, from the distributions of any source."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gen.models.targets.base import StepOutput
from gen.samplers.causal.drafters.base import Nodes
from gen.samplers.causal.shapes.base import Shape
from gen.samplers.causal.shapes.builder import TreeBuilder
from gen.samplers.engine.causal_loop import Drafter
from gen.samplers.engine.draft import WITH_REPLACEMENT, Draft, Verdict
from gen.samplers.engine.rows import RowStore
from gen.samplers.engine.step_context import CausalStep
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
        if step.positions.shape[1] == 1:
            return Draft.none(tokens, step.valid)
        builder = TreeBuilder(step, tokens, self.nodes, self.draws, self.shape.is_chain)
        self.shape.grow(builder)
        self.nodes.count_passes(step, builder.passes)
        return builder.finish()

    def verify(self, step: CausalStep, draft: Draft, output: StepOutput) -> Verdict:
        logp = output.logprobs
        self.nodes.read(step, output)
        if not draft.tokens.shape[1]:
            ids = step.categorical(logp, "token", step.valid, shared=True)
            verdict = Verdict(torch.zeros_like(step.start), ids)
        else:
            self.nodes.learn(step, draft, output)
            verdict = self._judge(step, draft, logp)
            row = torch.arange(len(logp), device=logp.device)
            last = logp[row, verdict.last_column.clamp_max(logp.shape[1] - 1)]
            self.shape.learn(step, verdict.num_accepted, draft.exists.sum(1), last)
        self.nodes.accept(step, verdict)
        return verdict

    def _judge(self, step: CausalStep, draft: Draft, logp: Tensor) -> Verdict:
        """Let the verifier judge the drafts."""
        if self.draws == WITH_REPLACEMENT and not draft.is_chain:
            draft = draft.merged()
        return self.verifier.verify(step, draft, logp)

    def observe(self, step: CausalStep, num_accepted: np.ndarray, num_drafted: np.ndarray) -> None:
        self.nodes.observe(step, num_accepted, num_drafted)
        committed = np.minimum(num_accepted + 1, step.widths)
        self.shape.over(step.positions.shape[1], step.starts, committed)
