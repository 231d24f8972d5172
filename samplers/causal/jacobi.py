"""Speculative Jacobi decoding, without training: the drafter is the model's own previous iterate.

The iterate are drafts x_j ~ q_j of the positions behind the committed text. A forward pass computes
p_j, the distribution of the model given all that stands before j:

    propose   the iterate that is carried on, and drafts of an ``init`` where positions enter
    verify    a ``coupling`` of x_j ~ q_j and x_j' ~ p_j: it accepts the first few x, adds a token,
              and draws x' behind it
    observe   x <- x', q <- p; with a ``trend``, q <- norm(p (p / p of the last pass) ** trend)

Teng et al., "Accelerating Auto-regressive Text-to-Image Generation with Training-free Speculative
Jacobi Decoding" (arXiv 2410.01699); "Speculative Coupled Decoding" (arXiv 2510.24211); Wiggers &
Hoogeboom, "Predictive Sampling with Forecasting Autoregressive Models" (arXiv 2002.09928).

Guarantee, for every window, initialiser and batch: couplings ``fresh``, ``maximal`` and
``gumbel_shared`` sample from the model's distribution; ``gumbel`` gives the very tokens of plain
autoregression with the same seed. ``window`` 1 is plain autoregression in all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gen.core.distributions import wide_dtype
from gen.core.lookup import take
from gen.core.method import Limit, presets
from gen.core.params import Rule, listed, number, param, part
from gen.core.registry import register
from gen.samplers.causal.couplings import Coupling, risen, without_ends
from gen.samplers.causal.initialisers.base import Initialiser
from gen.samplers.causal.initialisers.params import Initialised
from gen.samplers.causal.proactive import Proactive, Siblings
from gen.samplers.engine.draft import Draft, Verdict, resized
from gen.samplers.engine.rows import RowState
from gen.samplers.engine.window import AUTO, AutoWidth, Windowed, width_of
from gen.samplers.verifiers.base import TOKEN

if TYPE_CHECKING:
    from gen.models.targets.base import StepOutput
    from gen.models.targets.causal import CausalTarget
    from gen.samplers.engine.step_context import CausalStep


class JacobiDrafter(Windowed):
    """Drafter that holds the iterate: drafts, and the distribution each came from if somebody
    compares distributions, for the positions after the last committed token.

    Args:
        target: the model with its items.
        window: positions of a forward pass.
        coupling: verifies the iterate and makes the next one.
        init: drafts the positions that enter.
        trend: power of a token's rise in the distribution of the next iterate.
        tree: further candidates at its first positions; None for none.
    """

    tokens = RowState()  # x [b, n]
    logq: RowState = RowState()  # q [b, n, V]
    is_carried = RowState(start=False)  # drafts that are carried on, bool [b, n]
    num_carried = RowState(start=0)  # how many, int64 [b], as the host knows after a step
    guessed = RowState()  # drafts that no model made, bool [b, n]
    before = RowState()  # with a ``trend``: p of the last step, [b, n, V]

    def __init__(
        self,
        target: CausalTarget,
        window: int | AutoWidth,
        coupling: Coupling,
        init: Initialiser,
        trend: float = 0.0,
        tree: Siblings | None = None,
    ):
        super().__init__(window)
        self.coupling, self.init, self.trend, self.tree = coupling, init, trend, tree
        self.compares = coupling.compares or init.corrects
        self.made_of, self.targets, self.ends = (init,), init.targets, target.space.ends
        self.captures = init.guesses and tree is None
        self.num_carried = np.zeros(target.rows, dtype=np.int64)
        nothing = target.legal.new_zeros(target.rows, 0, target.legal.shape[1])
        self.is_carried = self.guessed = nothing[..., 0]
        self.tokens = self.is_carried.long()
        self.logq = self.before = nothing.to(wide_dtype(target.model.dtype))

    @property
    def nfe(self) -> list[int] | None:
        return self.init.nfe

    def propose(self, step: CausalStep, tokens: Tensor) -> Draft:
        if self.tree is not None and step.positions.shape[1] == 1:
            return Draft.none(tokens, step.valid)  # a tree has no draft of the last position
        length = min(self.window - 1, step.positions.shape[1])
        draft = Draft(resized(self.tokens, length), step.valid[:, :length])
        if self.compares:
            draft.logq, draft.guessed = resized(self.logq, length), resized(self.guessed, length)
        is_carried, compares = resized(self.is_carried, length), self.coupling.compares
        self.init.enter(step, tokens, draft, is_carried, self.num_carried, compares)
        return draft if self.tree is None else self.tree.beside(step, draft)

    def verify(self, step: CausalStep, draft: Draft, output: StepOutput) -> Verdict:
        logp = output.logprobs
        if not draft.tokens.shape[1]:
            ids = step.categorical(logp, "token", step.valid, shared=True)
            verdict = Verdict(torch.zeros_like(step.start), ids)
            self.is_carried = torch.zeros_like(self.is_carried)
        elif self.tree is not None:
            verdict, *iterate = self.tree.verify(step, draft, logp, self.ends)
            self.carry(verdict.num_accepted, *iterate)
        else:
            said = without_ends(logp, self.ends)
            logq = risen(said, self.before, self.is_carried, self.trend) if self.trend else said
            verdict = self.coupling.step(step, draft, logp, logq)
            draft.logq = None  # one distribution less while the next one is made
            columns = self.carry(verdict.num_accepted, verdict.tokens, step.valid, logq)
            if self.trend:
                self.before = take(said, columns)
        self.init.accept(step, verdict)
        return verdict

    def carry(self, accepted: Tensor, ids: Tensor, exists: Tensor, logq: Tensor) -> Tensor:
        """Keep the next iterate: of ``ids`` [b, W] that exist, drawn from ``logq`` [b, W, V], those
        behind the token that follows the ``accepted`` drafts [b]. Returns their columns [b, W]."""
        width = ids.shape[1]
        columns = accepted[:, None] + torch.arange(1, width + 1, device=ids.device)
        self.is_carried = columns < exists.sum(1, keepdim=True)
        columns = columns.clamp_max_(width - 1)
        self.tokens = ids.gather(1, columns)
        if self.compares:
            self.logq = None
            self.logq = take(logq, columns)
            self.guessed = torch.zeros_like(self.tokens, dtype=torch.bool)
        return columns

    def observe(self, step: CausalStep, num_accepted: np.ndarray, num_drafted: np.ndarray) -> None:
        super().observe(step, num_accepted, num_drafted)
        columns = np.minimum(step.widths, self.tokens.shape[1])
        self.num_carried = np.maximum(columns - num_accepted - 1, 0)


ORDER = listed(
    "coupling window init draft_model draft_rounds redraft table scope tree_width tree_levels"
    " keep_threshold trend drafter drafter_weights kept_layers exit_layer"
)


@register("sampler", "speculative_jacobi")
@dataclass(frozen=True)
class SpeculativeJacobi(Initialised, Proactive, ORDER):
    """Several tokens per forward pass, drafted by the model's own previous iterate.

    Attributes:
        coupling: fresh, maximal, gumbel_shared or gumbel.
        window: positions computed per forward pass, or auto: as many as make the time per token
            least (``auto_width``).
        keep_threshold: of the coupling fresh: drafts past the first rejection stay if they would be
            accepted with a higher probability; 1 keeps none.
        trend: power of a token's rise since the last pass, by which the next iterate favours it.
    """

    coupling: str = part("gumbel", "coupling")
    window: int | str = param(64, int, 1, also=(AUTO,))
    keep_threshold: float = number(1.0, most=1)
    trend: float = param(0.0, float, 0, expected="a finite number of at least 0")

    papers = ("2410.01699", "2002.09928")
    reference = "plain autoregression"
    rules = (
        *Initialised.model_rules,
        Rule(
            "keep_threshold",
            lambda s: s.keep_threshold == 1 or s.coupling == "fresh",
            "1, because the coupling {coupling} has a rule of its own; {coupling?} has none",
        ),
        *Initialised.table_rules,
        *Proactive.rules,
        Initialised.redraft_rule,
    )

    @property
    def guarantee(self) -> str:
        return "approximate" if self.keep_threshold < 1 else self.parts.coupling.guarantee

    @property
    def timed(self) -> bool:
        return self.window == AUTO

    def make_drafter(self, target, draft, verifier=TOKEN, owner=None):
        """Make the drafter of one call. ``owner``: sampler that learns the width, None for self."""
        tree = Siblings(self.tree_width, self.tree_levels) if self.tree_width > 1 else None
        window = self.window if tree is None else int(self.window) - tree.count
        window = width_of(window, owner or self, target)
        coupling = self.parts.coupling(verifier, self.keep_threshold)
        init = self.parts.init.make(self, target, draft)
        return JacobiDrafter(target, window, coupling, init, self.trend, tree)


presets(
    "speculative_jacobi",
    SpeculativeJacobi,
    jacobi={
        "coupling": "gumbel",
        "init": "repeat",
        "sampling": {"temperature": 0.0},
        "paper": "2305.10427",
        "about": "greedy Jacobi decoding: the argmax tokens of plain autoregression",
    },
    sjd={
        "coupling": "fresh",
        "window": 16,
        "init": "random",
        "paper": "2410.01699",
        "about": "speculative Jacobi decoding with the paper's window and initialiser",
    },
    scd_mc={
        "coupling": "maximal",
        "window": 64,
        "paper": "2510.24211",
        "about": "speculative coupled decoding, maximal coupling; its scripts have a window of 32"
        " and random drafts",
    },
    scd_gs={
        "coupling": "gumbel_shared",
        "window": 64,
        "paper": "2510.24211",
        "about": "speculative coupled decoding, Gumbel sharing; its scripts have a window of 32 and"
        " random drafts",
    },
    sjd_pp={
        "coupling": "fresh",
        "keep_threshold": 0.5,
        "paper": "2512.07503",
        "about": "keeps confident drafts past the first rejection; a kept draft does not come from"
        " the distribution it is judged by, so the rule is not exact (scd_mc keeps drafts exactly)",
        "limit": Limit("plain autoregression", {"keep_threshold": 1.0}),
    },
    sjd_pac={
        "coupling": "maximal",
        "tree_width": 3,
        "paper": "2603.18599",
        "about": "a tree of candidates where a window begins, and maximal coupling behind it;"
        " exact, since the first accepted sibling counts and all come from the iterate's"
        " distribution",
        "example": {"window": 16},
    },
    sjd_vp={
        "coupling": "gumbel_shared",
        "trend": 0.1,
        "paper": "2603.27115",
        "about": "favours tokens whose probability rises from pass to pass, after the paper's"
        " abstract: in the next iterate and its distribution alone, so the rule is exact",
        "limit": Limit("plain autoregression", {"trend": 0.0}),
    },
)
