"""Source of drafts: which distribution follows each node of a tree of drafts.

``@register("drafter", name, params=...)`` on a subclass in one file is all that a new one takes;
the samplers ``speculative`` and ``relaxed_acceptance`` then accept ``drafter: name``. Every shape
and every verifier works with the distributions of any source.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from gen.core.errors import GenError
from gen.core.lookup import take
from gen.samplers.engine.draft import DRAWS, Draft, Verdict
from gen.samplers.engine.rows import RowOwner

if TYPE_CHECKING:
    from gen.core.params import Rule
    from gen.models.targets.base import StepOutput, Target
    from gen.samplers.engine.causal_loop import Drafter
    from gen.samplers.engine.step_context import CausalStep
    from gen.samplers.verifiers.base import Verifier


class DraftSource(RowOwner):
    """Distributions that the drafts of a tree are drawn from, node by node.

    An object serves one call of a sampler. A distribution that is -inf everywhere means that
    nothing is known there: the node gets no children. A source with a drafter of chains of its own
    overrides ``make``; one that has nothing else sets ``shapes`` to False.

    Attributes:
        needs_draft_model: whether the sampler must be given a draft model.
        needs_weights: whether it reads a folder of trained weights (``drafter_weights``).
        draws: ways to draw siblings (``gen.samplers.engine.draft``) that its distributions are good
            for; ``("ranks",)`` for a source that has tokens and no distribution.
        reads: parameters of the sampler that it reads, where not every sampler has them.
        shapes: whether it has distributions after nodes, so that every shape fits.
        several: whether it takes several draft models; ``draft`` is then a sequence of targets.
        is_model: whether its drafts are those of one model over the tokens (``draft_of``), which
            the windows of Jacobi decoding can begin with as well.
        rules: what must hold between the parameters of a sampler with this drafter.
        targets: draft models of the same items, whose rows follow the batch.
        hidden_layers: layers of the target whose hidden states ``observe`` gets.
        nfe: forward passes of the draft models together, of every item; None without one.
        captures: whether it reads no value on the host (``Drafter.captures``).
    """

    needs_draft_model: ClassVar[bool] = False
    needs_weights: ClassVar[bool] = False
    draws: ClassVar[tuple[str, ...]] = DRAWS
    reads: ClassVar[tuple[str, ...]] = ()
    shapes: ClassVar[bool] = True
    several: ClassVar[bool] = False
    is_model: ClassVar[bool] = False
    rules: ClassVar[tuple[Rule, ...]] = ()

    targets: Iterable[Target] = ()
    hidden_layers: tuple[str, ...] = ()
    nfe: list[int] | None = None
    captures: bool = False

    @classmethod
    def is_timed(cls, sampler: Any) -> bool:
        """Says whether a clock decides how many drafts there are."""
        return False

    @classmethod
    def makes_chains(cls) -> bool:
        """Says whether it has a drafter of chains of its own (``make``)."""
        return cls.make.__func__ is not DraftSource.make.__func__

    @classmethod
    def draft_of(cls, sampler: Any, target: Any, draft: Any) -> Any:
        """Returns the target of the model that drafts, where ``is_model``; arguments as in
        ``of``."""
        raise NotImplementedError

    @classmethod
    def of(cls, sampler: Any, target: Any, draft: Any) -> DraftSource:
        """Makes the source of a call of a sampler, with its parameters. ``draft``: target of the
        draft model, where one is needed."""
        raise GenError(f"{cls.__name__} drafts chains alone; expected sampler.shape chain")

    @classmethod
    def make(cls, sampler: Any, target: Any, draft: Any, verifier: Verifier) -> Drafter:
        """Makes the drafter of chains of a call, whose drafts the verifier judges; arguments as in
        ``of``."""
        raise NotImplementedError

    def begin(self, step: CausalStep, tokens: Tensor) -> Tensor:
        """Return the log-probabilities [b, M, V] that each of M draft models has for the token
        after the last committed one of ``tokens``, long [b, T]; M is 1 but for the drafter
        ``several``."""
        raise NotImplementedError

    def extend(self, step: CausalStep, tree: Draft, first: int) -> Tensor:
        """Return the log-probabilities [b, L - first, V] after the columns of a tree from ``first``
        on."""
        raise NotImplementedError

    def chain(self, step: CausalStep, tokens: Tensor) -> Draft | None:
        """Draft chains of tokens that are chosen, where that takes no distribution; else None.
        Arguments as in ``begin``."""
        return None

    def count_passes(self, step: CausalStep, passes: Tensor) -> None:
        """Add the forward passes that the drafts of a step took, where ``nfe`` has them: the times
        that each row asked ``begin`` and ``extend``, long [b]."""

    def observe(
        self, step: CausalStep, draft: Draft | None, output: StepOutput, verdict: Verdict
    ) -> None:
        """Learn from a step: its drafts, None where no row had room for one and nothing was asked;
        the outcome of the target's pass over the last committed token and the drafts; and the
        verdict. What follows an eos token is not committed."""


class DepthNodes(DraftSource):
    """Distributions of all depths at once, which know nothing of the drafts between.

    Attributes:
        logq: log-probabilities of k depths, [b, k, V].
    """

    logq: Any

    def extend(self, step, tree, first):
        depth, deepest = tree.depth[:, first:], self.logq.shape[1]
        found = take(self.logq, depth.clamp_max(deepest - 1))
        return torch.where((depth < deepest)[..., None], found, -torch.inf)
