"""Speculative Jacobi decoding: the drafter is the previous iterate of the model itself. Needs no
training.

Each forward pass computes a window of positions at once; the drafts in it are what the last call
made of them. A ``coupling`` verifies them and makes the next iterate (see ``couplings``), an
``init`` fills positions that enter the window (see ``initialisers``).

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
import torch.nn.functional as F
from torch import Tensor

from gen.core.distributions import wide_dtype
from gen.core.method import Limit, presets
from gen.core.params import Rule, choice, number, param, part
from gen.core.registry import register
from gen.samplers.causal.couplings import Coupling, Fresh, without_ends
from gen.samplers.causal.drafters.base import draft_model
from gen.samplers.causal.initialisers.base import Entering, Initialiser
from gen.samplers.causal.proactive import Siblings, num_siblings
from gen.samplers.engine.causal_loop import CausalSampler
from gen.samplers.engine.draft import Draft, Verdict
from gen.samplers.engine.outputs import CALL, ITEM
from gen.samplers.engine.rows import RowState, RowStore
from gen.samplers.engine.window import AUTO, AutoWidth, Windowed, width_of

if TYPE_CHECKING:
    from gen.models.targets.base import StepOutput
    from gen.models.targets.causal import CausalTarget
    from gen.samplers.engine.step_context import CausalStep
    from gen.samplers.verifiers.base import Token

REPLACE = "replace"  # of ``redraft``
ASKING = "init.needs_draft_model"  # initialisers that ask a draft model


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

    drafted = RowState(start=False)  # drafts that are carried over from the last step, bool [b, n]
    carried = RowState(start=0)  # how many, int64 [b], as the host knows after a step
    tokens = RowState()  # [b, n]
    logq: RowState = RowState()  # their distributions [b, n, V]
    guessed = RowState()  # drafts that no model made, bool [b, n]
    before = RowState()  # with a ``trend``: what the target said there last, [b, n, V]

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
        self.ends, self.targets = target.space.ends, init.targets
        self.captures = init.guesses and tree is None
        self.carried = np.zeros(target.rows, dtype=np.int64)
        nothing = target.legal.new_zeros(target.rows, 0, target.legal.shape[1])
        self.drafted = self.guessed = nothing[..., 0]
        self.tokens = self.drafted.long()
        self.logq = self.before = nothing.to(wide_dtype(target.model.dtype))

    @property
    def stores(self) -> tuple[RowStore, ...]:
        return (self.store, *self.init.stores)

    @property
    def nfe(self) -> list[int] | None:
        return self.init.nfe

    def propose(self, step: CausalStep, tokens: Tensor) -> Draft:
        if self.tree is not None and step.positions.shape[1] == 1:
            return Draft.none(tokens, step.valid)  # a tree has no draft of the last position
        length = min(self.window - 1, step.positions.shape[1])
        draft = Draft(_resize(self.tokens, length), step.valid[:, :length])
        if self.coupling.compares or self.init.corrects:
            draft.logq, draft.guessed = _resize(self.logq, length), _resize(self.guessed, length)
        if self.targets:
            draft.failed = torch.zeros_like(draft.exists)
        # a CPU computes what enters and no more; elsewhere shapes do not depend on it
        whole = self.init.redrafts or (self.init.guesses and not tokens.is_cpu)
        if length and (whole or (self.carried < np.minimum(step.widths, length)).any()):
            self._fill(step, tokens, draft, whole)
        return draft if self.tree is None else self.tree.beside(step, draft)

    def _fill(self, step: CausalStep, tokens: Tensor, draft: Draft, whole: bool) -> None:
        """Write the drafts of the positions that enter the iterate so far, and those that are
        drafted again; of all columns where ``whole``, else from the first that enters on."""
        init, exists, length = self.init, draft.exists, draft.tokens.shape[1]
        first = 0 if whole else min(int(self.carried.min()), length)
        enters = exists & ~_resize(self.drafted, length)
        active = exists if init.redrafts else enters[:, first:]

        def canvas() -> Tensor:
            # what is not carried goes to a position behind all others
            at = torch.where(exists & ~enters, step.positions[:, :length], tokens.shape[1])
            return torch.cat([tokens, tokens[:, :1]], 1).scatter_(1, at, draft.tokens)

        compares, logp = self.coupling.compares, draft.logq if init.corrects else None
        filled = init.fill(Entering(step, first, active, enters[:, first:], compares, canvas, logp))
        ids = draft.tokens[:, first:]
        draft.tokens[:, first:] = torch.where(active, filled.tokens, ids)
        if filled.failed is not None:
            draft.failed = F.pad(filled.failed, (first, 0))
        if compares:
            assert draft.logq is not None and draft.guessed is not None
            draft.guessed[:, first:] = torch.where(active, init.guesses, draft.guessed[:, first:])
            here, logq = active[..., None], draft.logq[:, first:]
            if filled.logq is not None:
                torch.where(here, filled.logq.to(logq.dtype), logq, out=logq)
            else:  # chosen, not drawn
                ids = filled.tokens[..., None]
                certain = torch.where(here, 0.0, logq.gather(-1, ids))
                logq.masked_fill_(here, -torch.inf).scatter_(-1, ids, certain)

    def verify(self, step: CausalStep, draft: Draft, output: StepOutput) -> Verdict:
        logp = output.logprobs
        if not draft.tokens.shape[1]:
            ids = step.categorical(logp, "token", step.valid, shared=True)
            verdict = Verdict(torch.zeros_like(step.start), ids)
            self.drafted = torch.zeros_like(self.drafted)
        elif self.tree is not None:
            verdict, ids, following = self.tree.verify(step, draft, logp, self.ends)
            inside = torch.arange(ids.shape[1], device=ids.device) < step.left[:, None]
            self._carry(ids, verdict.num_accepted, inside, following)
        else:
            said = without_ends(logp, self.ends)
            following = self._extrapolated(said) if self.trend else said
            verdict = self.coupling.step(step, draft, logp, following)
            draft.logq = None  # one distribution less while the next one is made
            columns = self._carry(verdict.tokens, verdict.num_accepted, step.valid, following)
            if self.trend:
                self.before = _take(said, columns)
        self.init.accept(step, verdict)
        return verdict

    def _carry(self, ids: Tensor, accepted: Tensor, valid: Tensor, following: Tensor) -> Tensor:
        """Keep what lies past the token that follows the ``accepted`` drafts, long [b]: the next
        iterate, of the step's tokens ``ids`` [b, W] in columns that are ``valid``, and the
        distributions ``following`` [b, W, V] that they came from. Returns its columns, long [b,
        W]."""
        width = ids.shape[1]
        columns = accepted[:, None] + torch.arange(1, width + 1, device=ids.device)
        self.drafted = columns < valid.sum(1, keepdim=True)
        columns = columns.clamp_max_(width - 1)
        self.tokens = ids.gather(1, columns)
        if self.coupling.compares or self.init.corrects:
            self.logq = None
            self.logq = _take(following, columns)
            self.guessed = torch.zeros_like(self.tokens, dtype=torch.bool)
        return columns

    def _extrapolated(self, logp: Tensor) -> Tensor:
        """Raise what rose since the target was last asked: log norm(p (p / before) ** trend), and p
        where it was not asked. Tokens without mass before or now keep what they have."""
        width = logp.shape[1]
        before, is_known = _resize(self.before, width), _resize(self.drafted, width)
        rise = torch.where(logp.isfinite() & before.isfinite(), logp - before, 0.0)
        moved = (logp + self.trend * rise).log_softmax(-1)
        return torch.where(is_known[..., None], moved, logp)

    def observe(self, step: CausalStep, num_accepted: np.ndarray, num_drafted: np.ndarray) -> None:
        super().observe(step, num_accepted, num_drafted)
        columns = np.minimum(step.widths, self.tokens.shape[1])
        self.carried = np.maximum(columns - num_accepted - 1, 0)


@register("sampler", "speculative_jacobi")
@dataclass(frozen=True)
class SpeculativeJacobi(CausalSampler):
    """Several tokens per forward pass, drafted by the model's own previous iterate.

    ``window``: positions computed per forward pass, or auto: as many as make the time per token
    least (``auto_width``). ``coupling``: fresh, maximal, gumbel_shared or gumbel. ``init``:
    uniform, random, repeat, repeat_above, model, table or model_table.

    Of model and model_table: ``drafter``, whose model it is. model is ``draft_model``, a model's
    name; None for the modality's own. layer_skip (``kept_layers``), early_exit (``exit_layer``) and
    the trained exit, skip, router and lora_drop (``drafter_weights``) are layers of the target.
    ``draft_rounds``: its forward passes per round at most; None for as many as change a draft.

    Of table and model_table: ``table``, a table's file or the name of the model that it lies
    beside, or empty; None for the one beside the model's weights. ``scope``: item, or call to count
    the call's finished items as well, which takes a coupling whose tokens do not depend on the
    drafts (gumbel).

    ``tree_width``, of the coupling maximal: candidates at every node of the first ``tree_levels``
    levels of a window; 1 is a chain. ``window`` counts them.

    ``keep_threshold``, of the coupling fresh: drafts past the first rejection stay if they would be
    accepted with a higher probability; 1 keeps none. ``trend``: power of a token's rise since the
    target was last asked, by which the next iterate's distribution is multiplied.

    Of these three: ``redraft``, whether the drafts that are carried on are corrected as well; None
    where the coupling keeps the noise of positions (gumbel, gumbel_shared), the others cannot.
    replace puts drafts of the draft model or the table alone in their stead.
    """

    coupling: str = part("gumbel", "coupling")
    window: int | str = param(64, int, 1, also=(AUTO,))
    init: str = part("uniform", "initialiser")
    draft_model: str | None = draft_model(of=f"{ASKING} drafter=model")
    draft_rounds: int | None = param(3, int, 1, also=(None,), of=ASKING)
    redraft: bool | str | None = param(None, bool, also=(REPLACE, None))
    table: str | None = param(
        None,
        str,
        also=(None,),
        of="init.has_table",
        expected="a file, the name of a model, empty, or None",
    )
    scope: str = choice(ITEM, (ITEM, CALL))
    tree_width: int = param(1, int, 1, each="column")
    tree_levels: int = param(2, int, 1)
    keep_threshold: float = number(1.0, most=1)
    trend: float = param(0.0, float, 0, expected="a finite number of at least 0")
    drafter: str = part("model", "drafter", of=ASKING)
    drafter_weights: str | None = None
    kept_layers: str = param("1/2", of="drafter=layer_skip")  # as that drafter
    exit_layer: int = param(1, of="drafter=early_exit")  # as that drafter

    papers = ("2410.01699", "2002.09928")
    reference = "plain autoregression"
    rules = (
        Rule("drafter", lambda s: s.parts.drafter.is_model, "one that is a model: {drafter?}"),
        Rule(
            "init",
            lambda s: s.drafter == "model" or s.asks_model,
            "{init?} with sampler.drafter {drafter}",
        ),
        Rule(
            "drafter_weights",
            lambda s: (
                s.drafter_weights is None
                or (s.parts.drafter.is_model and s.parts.drafter.needs_weights)
            ),
            "None, or a folder with sampler.drafter {drafter?}",
        ),
        Rule(
            "keep_threshold",
            lambda s: s.keep_threshold == 1 or s.coupling == "fresh",
            "1, because the coupling {coupling} has a rule of its own; {coupling?} has none",
        ),
        Rule(
            "init",
            lambda s: s.scope == ITEM or s.parts.init.has_table,
            "{init?} with sampler.scope call; {init} has no table",
        ),
        Rule(
            "scope",
            lambda s: s.scope == ITEM or s.parts.coupling.guarantee == "same_tokens",
            "item with the coupling {coupling}, or {coupling?}, whose tokens do not depend on which"
            " items were finished before",
        ),
        Rule(
            "tree_width",
            lambda s: s.tree_width == 1 or s.coupling == "maximal",
            "1 with the coupling {coupling}, or the coupling {coupling?}",
        ),
        Rule(
            "window",
            lambda s: s.tree_width == 1 or (s.window != AUTO and s.window >= s.least_window),
            lambda s: f"a number of at least {s.least_window}, which the tree and its chain take",
        ),
        Rule(
            "redraft",
            lambda s: not s.redraft or s.parts.coupling.keeps_noise,
            "false or None, because the coupling {coupling} draws drafts with new noise;"
            " {coupling?and} keep that of their positions",
        ),
    )

    @property
    def least_window(self) -> int:
        """Least window with a tree at its beginning."""
        return 2 + self.tree_levels + num_siblings(self.tree_width, self.tree_levels)

    @property
    def redrafts(self) -> bool:
        """True where drafts that are carried on are drafted again."""
        return self.parts.coupling.keeps_noise if self.redraft is None else bool(self.redraft)

    @property
    def corrects(self) -> bool:
        """True where they are drawn from the target's distribution, as the draft's has changed."""
        return self.redrafts and self.redraft != REPLACE

    @property
    def guarantee(self) -> str:
        return "approximate" if self.keep_threshold < 1 else self.parts.coupling.guarantee

    @property
    def asks_model(self) -> bool:
        """True where a model drafts, be it of the target's own layers."""
        return self.parts.init.needs_draft_model

    @property
    def drafted(self) -> bool:
        return self.asks_model and self.parts.drafter.needs_draft_model

    @property
    def mixes_sampling(self) -> bool:
        """True without a draft model, whose sampling parameters are one set for all items."""
        return not self.asks_model

    @property
    def timed(self) -> bool:
        return self.window == AUTO

    def window_drafter(
        self,
        target: CausalTarget,
        draft: CausalTarget | None,
        verifier: Token | None = None,
        window: int | AutoWidth | None = None,
    ) -> JacobiDrafter:
        """Make the drafter of one call. ``draft``: target of the draft model, where ``init`` needs
        one. The verifier and the window are the coupling's own and that of the parameters where
        they are None."""
        init = self.parts.init.make(self, target, draft)
        coupling = self.parts.coupling(*(() if verifier is None else (verifier,)))
        if isinstance(coupling, Fresh):
            coupling.keep_threshold = self.keep_threshold
        tree = None
        if self.tree_width > 1:
            tree = Siblings(self.tree_width, self.tree_levels)
            window = min(int(self.window) - tree.count, target.length)
        window = width_of(self.window, self, target) if window is None else window
        return JacobiDrafter(target, window, coupling, init, self.trend, tree)

    def make_drafter(self, target, draft):
        return self.window_drafter(target, draft)


def _take(x: Tensor, columns: Tensor) -> Tensor:
    """Take columns, long [b, n], of x [b, W, V]: [b, n, V]."""
    if len(x) == 1:
        return x.index_select(1, columns[0])
    return x.gather(1, columns[..., None].expand(-1, -1, x.shape[-1]))


def _resize(x: Tensor, length: int) -> Tensor:
    """Cut x [b, n, ...], or pad a copy with zeros, to [b, length, ...]."""
    if x.shape[1] >= length:
        return x[:, :length]
    return F.pad(x, (0, 0) * (x.ndim - 2) + (0, length - x.shape[1]))


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
