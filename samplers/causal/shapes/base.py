"""Trees of drafts: a shape says which nodes get children (``Shape``), whose distributions a source
gives (``TreeBuilder``), and a verifier judges the tree (``NodeDrafter``).

``@register("shape", name, params=...)`` on a subclass in one file is all that a new one takes; the
sampler ``speculative`` then accepts ``shape: name``, and the parameters of the shape.

Contract: whether a draft is submitted may depend on the drafts before it and on the distribution
that it is drawn from, never on its own value. A shape that drops random drafts once their values
are known changes the distribution of what is committed; it may drop drafts that are not random.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from gen.core.distributions import has_no_distribution
from gen.core.lookup import take
from gen.core.params import Params, integer, param
from gen.samplers.engine.causal_loop import Drafter
from gen.samplers.engine.draft import (
    NOTHING_DRAWN,
    POSITION,
    RANKS,
    WITH_REPLACEMENT,
    WITHOUT_REPLACEMENT,
    Draft,
    Verdict,
    node_positions,
    point,
    without,
)
from gen.samplers.engine.host import constant, may_be_any
from gen.samplers.engine.rows import RowOwner
from gen.samplers.engine.window import AUTO, LADDER, AutoWidth, auto_width

if TYPE_CHECKING:
    from gen.models.targets.base import StepOutput
    from gen.models.targets.causal import CausalTarget
    from gen.samplers.causal.drafters.base import DraftSource
    from gen.samplers.causal.drafters.trimmed import DraftVocab
    from gen.samplers.engine.step_context import CausalStep
    from gen.samplers.verifiers.base import Verifier

MOST_NODES = 1024  # of any tree


@dataclass(frozen=True)
class BudgetParams(Params):
    """Parameters of trees with a budget.

    Attributes:
        nodes: drafts of a round; auto for as many as make the time per token least.
        tree_depth: drafts of a path at most.
    """

    nodes: int | str = param(16, int, 1, also=(AUTO,), each="column")
    tree_depth: int = integer(8, least=1)


class Shape(RowOwner):
    """Shape of the drafts of a round.

    Args:
        params: those that the shape was registered with.
        auto: decides the budget of every round (``gen.samplers.engine.window``), by the time of
            rounds of so many positions and the tokens that they committed; None for a budget of
            ``nodes`` drafts.

    Attributes:
        is_chain: whether every node has one child.
        by_level: whether every level is whole before the distributions behind it are asked for.
        has_budget: whether the parameter ``nodes`` says how many drafts a round has.
        parts_models: whether it can draw each path from another draft model.
        needs_weights: whether it reads trained weights (``attach``).
        captures: whether it reads no value on the host (``Drafter.captures``).
        takes: ways to draw siblings (``gen.samplers.engine.draft``) that it can use, its usual one
            first.
    """

    is_chain: ClassVar[bool] = False
    by_level: ClassVar[bool] = True
    has_budget: ClassVar[bool] = False
    parts_models: ClassVar[bool] = False
    needs_weights: ClassVar[bool] = False
    captures: ClassVar[bool] = True
    takes: ClassVar[tuple[str, ...]] = (WITHOUT_REPLACEMENT, WITH_REPLACEMENT, RANKS, POSITION)

    def __init__(self, params: Any, auto: AutoWidth | None = None):
        self.params, self.auto = params, auto

    @classmethod
    def of(cls, sampler: Any, target: CausalTarget) -> Shape:
        """Make the shape of a call of a sampler."""
        params = sampler.params_of("shape")
        if not sampler.has_auto_budget:
            return cls(params)
        return cls(params, auto_width(sampler, target, 1 + cls.largest(params)))

    @property
    def budget(self) -> int:
        """Drafts of this round, where the shape ``has_budget``."""
        return self.params.nodes if self.auto is None else self.auto.width - 1

    @classmethod
    def largest(cls, params: Any) -> int:
        """Return the most drafts of a round, whatever the budget."""
        return cls(replace(params, nodes=LADDER[-1] - 1)).nodes

    @property
    def nodes(self) -> int:
        """Most drafts of a round."""
        return self.budget

    def grow(self, builder: TreeBuilder) -> None:
        """Add the drafts of a round to a tree that has only a root."""
        raise NotImplementedError

    def attach(self, sampler: Any, target: Any, draft: Any) -> None:
        """Read what belongs to the models of a call of a sampler; ``draft``: target of the draft
        model, None without one. Raises ``GenError``: trained weights are of other models."""

    def learn(
        self, step: CausalStep, num_accepted: Tensor, num_drafted: Tensor, logp: Tensor
    ) -> None:
        """Learn the outcome of a round: accepted drafts and drafts of each row, long [b], and the
        log-probabilities [b, V] of the target behind the last accepted one. Rows without room wait,
        and learn nothing."""

    def over(self, width: int, starts: np.ndarray, tokens: np.ndarray) -> None:
        """Learn how long a step took; see ``LengthPolicy.over``."""
        if self.auto is not None:
            self.auto.observe(width, starts, tokens)


class TreeBuilder:
    """Tree of drafts that grows column by column, behind committed tokens, long [b, T]. A
    distribution that is -inf everywhere has no children: the source knows nothing there.

    Attributes:
        draws: how siblings are drawn, one of ``DRAWS``.
        tree: drafts so far; their ``logq`` once they are finished.
        rest: distribution of the next child of the root, as each of M draft models sees it, and of
            each draft: [b, M + n, V].
        passes: times that each row asked the source, long [b]. A row counts what it would need
            alone: what the source said because other rows asked counts once the row needs it.
    """

    def __init__(self, step: CausalStep, tokens: Tensor, drafter: NodeDrafter):
        self.step, self.source, self.vocab = step, drafter.nodes, drafter.vocab
        self.draws, is_chain = drafter.draws, drafter.shape.is_chain
        none = tokens[:, :0].long()
        no = none.bool()
        self.tree = Draft(none, no, parents=none, depth=none, is_chain=is_chain, failed=no)
        logq, vocab = self.source.begin(step, tokens), self.vocab
        self.rest = logq.clone() if vocab is None else vocab.begin(step, tokens).trim(logq)
        self.num_models = self.rest.shape[1]
        self._failed = has_no_distribution(self.rest)  # nodes without one, bool [b, M + n]
        self._drawn: list[Tensor] = []  # what the columns were drawn from, [b, n, V] each
        self._asked = 0  # drafts whose own distribution is known
        self._alone = torch.zeros_like(step.start)  # drafts of which each row asked that
        self.passes = (step.left > 1).long()

    @property
    def size(self) -> int:
        """Drafts so far."""
        return self.tree.tokens.shape[1]

    @property
    def most_depth(self) -> int:
        """Most drafts that any row has room for."""
        return self.step.positions.shape[1] - 1

    def columns(self, columns: Sequence[int]) -> Tensor:
        """Return the same columns for every row, long [b, n]."""
        row = constant(tuple(columns), self.rest.device)
        return row.expand(len(self.rest), -1)

    def next_logq(self, parents: Tensor) -> Tensor:
        """Return the log-probabilities [b, n, V] of the next children of nodes, long [b, n]; -1 - m
        is the root as the draft model m sees it."""
        return take(self.rest, parents + self.num_models)

    def keep(self, columns: Tensor) -> None:
        """Keep some drafts, long [b, n], with all their ancestors; only where none is random."""
        assert self.draws == RANKS, "a random draft stays once its value is known"
        self.tree = self.finish().select(columns)

    def compact(self, most: int) -> None:
        """Drop drafts that a row does not have, where no row has more than ``most``."""
        if self.size > most:
            order = torch.argsort((~self.tree.exists).byte(), dim=1, stable=True)[:, :most]
            self.tree = self.finish().select(order.sort(1).values)

    def finish(self) -> Draft:
        """Return the tree with the distributions of its columns; it grows no more."""
        if self._drawn:
            del self.rest
            self.tree.logq, self._drawn = torch.cat(self._drawn, 1), []
        return self.tree

    @property
    def goes_on(self) -> bool:
        """Whether a row may have one of the newest drafts; without one the tree cannot grow."""
        return self._asked == self.size or may_be_any(self.tree.exists[:, self._asked :])

    def expand(self) -> None:
        """Ask the source for the distributions after the newest drafts, in one forward pass."""
        if self._asked < self.size:
            newest = self.tree.exists[:, self._asked :]
            if self.tree.is_chain:  # alone, a row's chain ends where it has no more room
                newest = newest & (self.tree.depth[:, self._asked :] + 1 < self.step.left[:, None])
            self._count(newest.any(1))
            self._ask()

    def expand_for(self, nodes: Tensor) -> None:
        """Ask the source where rows need the distribution of a draft that nobody asked for: the
        node that each needs, long [b, 1]; -1 for the root."""
        if self.size:
            column = nodes.clamp_min(0)
            exists = _taken(self.tree.exists, column)[:, 0]
            self._count((nodes[:, 0] >= self._alone) & exists)
            if self._asked < self.size and may_be_any(nodes >= self._asked):
                self._ask()

    def _count(self, needed: Tensor) -> None:
        self.passes = self.passes + needed
        self._alone = torch.where(needed, self.size, self._alone)

    def _ask(self) -> None:
        logq = self.source.extend(self.step, self.tree, self._asked)
        logq = logq if self.vocab is None else self.vocab.trim(logq)
        self.rest, self._asked = torch.cat([self.rest, logq], 1), self.size
        self._failed = torch.cat([self._failed, has_no_distribution(logq)], 1)

    def withhold_top(self, parents: Tensor, count: int) -> Tensor:
        """Take the ``count`` most probable children out of the distributions at nodes, whose
        columns are ``parents`` [b, n], -1 for the root. Returns the children, long [b, n,
        count]."""
        top = self.next_logq(parents).topk(count, -1).indices
        everywhere = torch.ones_like(parents, dtype=torch.bool)
        for rank in range(count):
            self._remove(parents, self.next_logq(parents), top[..., rank], everywhere)
        return top

    def add(
        self, parents: Tensor, chosen: Tensor | None = None, active: Tensor | None = None
    ) -> Tensor:
        """Add one child to each of n different nodes of every row.

        Args:
            parents: columns of the nodes, -1 for the root, long [b, n]; -1 - m for the root as the
                draft model m sees it.
            chosen: the children, long [b, n]; None to draw them.
            active: nodes that get a child, bool [b, n]; None for all.

        Returns:
            Log-probabilities of the children among what their earlier siblings left, [b, n].
        """
        tree = self.tree
        # looked at where that is no wait
        assert not parents.is_cpu or not may_be_any(parents >= self._asked), "expand comes first"
        above = parents.clamp_min(0)
        depth = torch.where(parents < 0, 0, _taken(tree.depth, above)) + 1
        exists = (parents < 0) | _taken(tree.exists, above)
        rest = self.next_logq(parents)
        exists = exists & (depth < self.step.left[:, None]) & ~rest.isneginf().all(-1)
        exists = exists if active is None else exists & active
        failed = exists & self._failed.gather(1, parents + self.num_models)
        if chosen is not None:
            ids = chosen
        elif self.draws == RANKS:
            ids = rest.argmax(-1)
        else:
            ids = self._draw(rest, depth, exists)
        logmass = rest.gather(-1, ids[..., None])[..., 0]
        if self.draws not in NOTHING_DRAWN:
            self._drawn.append(rest if chosen is None else point(rest, ids))
        if chosen is None and self.draws != WITH_REPLACEMENT:
            self._remove(parents, rest, ids, exists)
        columns = {"tokens": ids, "parents": parents.clamp_min(-1), "depth": depth}
        for name, new in {**columns, "exists": exists, "failed": failed}.items():
            setattr(tree, name, torch.cat([vars(tree)[name], new], 1))
        return logmass

    def _draw(self, rest: Tensor, depth: Tensor, exists: Tensor) -> Tensor:
        step = self.step
        if self.draws == POSITION:
            at = step.start[:, None] + depth - 1
            return step.rng.categorical(rest, step.rows, at, "token", None, exists)
        at = node_positions(step, depth, self.size)
        return step.rng.categorical(rest, step.rows, at, "draft", step.round, exists)

    def _remove(self, parents: Tensor, logq: Tensor, ids: Tensor, where: Tensor) -> None:
        """Take children, long [b, n], out of the distributions ``logq`` at their parents."""
        row = torch.arange(len(parents), device=parents.device)[:, None]
        rest = torch.where(where[..., None], without(logq, ids), logq)
        self.rest[row, parents + self.num_models] = rest


def _taken(x: Tensor, columns: Tensor) -> Tensor:
    """Take columns [b, n] of x [b, L]; zeros where there is no column at all."""
    return x.gather(1, columns) if x.shape[1] else torch.zeros_like(columns, dtype=x.dtype)


def trimmed(draft: Draft, by_column: bool) -> Draft:
    """Leave out columns that hold no draft. On a device nobody knows them without a wait, and all
    stay. ``by_column``: a draft's noise has the number of its column, so that only columns behind
    the last draft can go; else a row's drafts move to its first columns."""
    exists = draft.exists
    if not exists.is_cpu or not may_be_any(~exists):
        return draft
    has = exists.numpy()
    if not by_column and not draft.is_chain:
        order = np.argsort(~has, axis=1, kind="stable")[:, : has.sum(1).max()]
        return draft.select(torch.from_numpy(np.sort(order, axis=1)))
    most = int(np.flatnonzero(has.any(0)).max(initial=-1)) + 1
    logq, failed = draft.logq, draft.failed
    return Draft(
        draft.tokens[:, :most],
        exists[:, :most],
        None if logq is None else logq[:, :most],
        parents=draft.parents[:, :most],
        depth=draft.depth[:, :most],
        is_chain=draft.is_chain,
        failed=None if failed is None else failed[:, :most],
    )


class NodeDrafter(Drafter):
    """Drafter of trees: of nodes with distributions, in a shape, with a way to draw siblings and a
    verifier. ``vocab``: tokens that may be drafted; None for all."""

    def __init__(
        self,
        nodes: DraftSource,
        shape: Shape,
        draws: str,
        verifier: Verifier,
        vocab: DraftVocab | None = None,
    ):
        self.nodes, self.shape, self.draws = nodes, shape, draws
        self.verifier, self.vocab, self.made_of = verifier, vocab, (nodes, shape)
        self.targets, self.captures = tuple(nodes.targets), nodes.captures and shape.captures
        if nodes.hidden_layers:
            self.needs, self.hidden_layers = frozenset({"hidden_states"}), nodes.hidden_layers

    @property
    def nfe(self) -> list[int] | None:
        return self.nodes.nfe

    @property
    def window(self) -> int:
        return 1 + self.shape.nodes

    def propose(self, step: CausalStep, tokens: Tensor) -> Draft:
        self.drafts = step.positions.shape[1] > 1  # else no row has room
        if not self.drafts:
            return Draft.none(tokens, step.valid)
        draft = None
        if self.shape.is_chain and self.vocab is None:
            draft = self.nodes.chain(step, tokens)
        draft = self.grow(step, tokens) if draft is None else draft
        draft = trimmed(draft, by_column=self.verifier.guarantee != "same_tokens")
        return draft if draft.tokens.shape[1] else Draft.none(tokens, step.valid)

    def grow(self, step: CausalStep, tokens: Tensor) -> Draft:
        """Grow the tree of a step; arguments as in ``propose``."""
        builder = TreeBuilder(step, tokens, self)
        self.shape.grow(builder)
        self.nodes.count_passes(step, builder.passes)
        return builder.finish()

    def verify(self, step: CausalStep, draft: Draft, output: StepOutput) -> Verdict:
        logp = output.logprobs
        if draft.tokens.shape[1]:
            verdict = self._judge(step, draft, logp)
        else:
            ids = step.categorical(logp, "token", step.valid, shared=True)
            verdict = Verdict(torch.zeros_like(step.start), ids)
        if self.drafts:
            row = torch.arange(len(logp), device=logp.device)
            last = logp[row, verdict.last_column.clamp_max(logp.shape[1] - 1)]
            self.shape.learn(step, verdict.num_accepted, draft.exists.sum(1), last)
        self.nodes.observe(step, draft if self.drafts else None, output, verdict)
        return verdict

    def _judge(self, step: CausalStep, draft: Draft, logp: Tensor) -> Verdict:
        """Let the verifier judge the drafts."""
        if self.draws == WITH_REPLACEMENT and not draft.is_chain:
            draft = draft.merged()
        return self.verifier.verify(step, draft, logp)

    def observe(self, step: CausalStep, num_accepted: np.ndarray, num_drafted: np.ndarray) -> None:
        committed = np.minimum(num_accepted + 1, step.widths)
        self.shape.over(step.positions.shape[1], step.starts, committed)
