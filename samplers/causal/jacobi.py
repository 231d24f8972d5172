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

from gen.core.method import Limit, presets
from gen.core.params import Rule, choice, number, param, part
from gen.core.registry import register
from gen.models.targets.causal import CausalTarget
from gen.samplers.causal.couplings import Fresh
from gen.samplers.causal.drafters.model import draft_model
from gen.samplers.causal.drafters.own_layers import EarlyExitParams, LayerSkipParams
from gen.samplers.causal.jacobi_drafter import JacobiDrafter
from gen.samplers.causal.proactive import ProactiveDrafter, num_siblings
from gen.samplers.engine.causal_loop import CausalSampler
from gen.samplers.engine.outputs import CALL, ITEM
from gen.samplers.engine.window import AUTO, AutoWidth, width_of
from gen.samplers.verifiers.base import Token

REPLACE = "replace"  # of ``redraft``
ASKING = "init.needs_draft_model"  # initialisers that ask a draft model


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
    kept_layers: str = param(LayerSkipParams.kept_layers, of="drafter=layer_skip")
    exit_layer: int = param(EarlyExitParams.exit_layer, of="drafter=early_exit")

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
        if self.tree_width > 1:
            chain = int(self.window) - num_siblings(self.tree_width, self.tree_levels)
            chain, tree = min(chain, target.length), (self.tree_width, self.tree_levels)
            return ProactiveDrafter(tree, target, chain, coupling, init, self.trend)
        window = width_of(self.window, self, target) if window is None else window
        return JacobiDrafter(target, window, coupling, init, self.trend)

    def make_drafter(self, target, draft):
        return self.window_drafter(target, draft)


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
