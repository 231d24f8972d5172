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

from gen.core.checks import check_int
from gen.core.errors import bad_value
from gen.core.method import Limit
from gen.core.registry import register, registry
from gen.core.sampler import Preset
from gen.models.targets.causal import CausalTarget
from gen.samplers.causal.couplings import Coupling, Fresh
from gen.samplers.causal.drafters.base import part_params
from gen.samplers.causal.drafters.layer_skip import EarlyExitParams, LayerSkipParams
from gen.samplers.causal.jacobi_drafter import JacobiDrafter
from gen.samplers.causal.proactive import ProactiveDrafter, num_siblings
from gen.samplers.engine.causal_sampler import CausalSampler
from gen.samplers.engine.outputs import CALL, ITEM
from gen.samplers.engine.window import AUTO, AutoWidth, checked, width_of
from gen.samplers.verifiers.base import Token

REPLACE = "replace"  # of ``redraft``


def _is_number(x: object) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def _asking_models() -> list[str]:
    """List the initialisers that ask a draft model."""
    known = registry.table("initialiser").items()
    return [name for name, one in known if one.needs_draft_model]


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

    coupling: str = "gumbel"
    window: int | str = 64
    init: str = "uniform"
    draft_model: str | None = None
    draft_rounds: int | None = 3
    redraft: bool | str | None = None
    table: str | None = None
    scope: str = ITEM
    tree_width: int = 1
    tree_levels: int = 2
    keep_threshold: float = 1.0
    trend: float = 0.0
    drafter: str = "model"
    drafter_weights: str | None = None
    kept_layers: str = LayerSkipParams.kept_layers
    exit_layer: int = EarlyExitParams.exit_layer

    papers = ("2410.01699", "2002.09928")
    protocol = "causal"
    reference = "plain autoregression"

    def __post_init__(self) -> None:
        checked(self.window, "sampler.window")
        coupling = registry.get("coupling", self.coupling, "sampler.coupling")
        registry.get("initialiser", self.init, "sampler.init")
        self._check_drafter()
        if not _is_number(self.keep_threshold) or not 0 <= self.keep_threshold <= 1:
            raise bad_value(
                "sampler.keep_threshold", self.keep_threshold, "a number between 0 and 1"
            )
        if self.keep_threshold < 1 and self.coupling != "fresh":
            raise bad_value(
                "sampler.keep_threshold",
                self.keep_threshold,
                f"1, because the coupling {self.coupling} has a rule of its own; fresh has none",
            )
        if not _is_number(self.trend) or not 0 <= self.trend < float("inf"):
            raise bad_value("sampler.trend", self.trend, "a finite number of at least 0")
        if self.table is not None and not isinstance(self.table, str):
            raise bad_value(
                "sampler.table", self.table, "a file, the name of a model, empty, or None"
            )
        self._check_scope(coupling)
        self._check_tree()
        if self.redraft not in (None, REPLACE) and not isinstance(self.redraft, bool):
            raise bad_value("sampler.redraft", self.redraft, f"true, false, {REPLACE} or None")
        if self.redraft and not coupling.keeps_noise:
            raise bad_value(
                "sampler.redraft",
                self.redraft,
                f"false or None, because the coupling {self.coupling} draws drafts with new noise;"
                " gumbel and gumbel_shared keep that of their positions",
            )

    def _check_drafter(self) -> None:
        """Check what the initialiser drafts with. Raises ``GenError``."""
        rounds, model = self.draft_rounds, self.draft_model
        if model is not None and not isinstance(model, str):
            raise bad_value(
                "sampler.draft_model",
                model,
                "the name of a model, or None for the modality's own",
            )
        if rounds is not None and (type(rounds) is not int or rounds < 1):
            raise bad_value("sampler.draft_rounds", rounds, "an integer of at least 1, or None")
        source = registry.get("drafter", self.drafter, "sampler.drafter")
        sources = registry.table("drafter").items()
        if not source.is_model:
            models = " or ".join(name for name, one in sources if one.is_model)
            raise bad_value("sampler.drafter", self.drafter, f"one that is a model: {models}")
        asking = _asking_models()
        if self.drafter != "model" and self.init not in asking:
            expected = f"{' or '.join(asking)} with sampler.drafter {self.drafter}"
            raise bad_value("sampler.init", self.init, expected)
        if self.drafter_weights is not None and not source.needs_weights:
            able = " or ".join(n for n, one in sources if one.is_model and one.needs_weights)
            expected = f"None, or a folder with sampler.drafter {able}"
            raise bad_value("sampler.drafter_weights", self.drafter_weights, expected)
        part_params(self, "drafter", self.drafter)

    def _check_scope(self, coupling: type[Coupling]) -> None:
        """Check what the table learns from. Raises ``GenError``."""
        if self.scope not in (ITEM, CALL):
            raise bad_value("sampler.scope", self.scope, f"{ITEM} or {CALL}")
        if self.scope == ITEM:
            return
        known = registry.table("initialiser").items()
        able = [name for name, init in known if init.has_table]
        if self.init not in able:
            expected = f"{' or '.join(able)} with sampler.scope {CALL}; {self.init} has no table"
            raise bad_value("sampler.init", self.init, expected)
        if coupling.guarantee != "same_tokens":
            raise bad_value(
                "sampler.scope",
                self.scope,
                f"{ITEM} with the coupling {self.coupling}, or gumbel, whose tokens do not depend"
                " on which items were finished before",
            )

    def _check_tree(self) -> None:
        """Check the tree at the beginning of a window. Raises ``GenError``."""
        for name in ("tree_width", "tree_levels"):
            check_int(f"sampler.{name}", vars(self)[name], 1)
        if self.tree_width == 1:
            return
        if self.coupling != "maximal":
            expected = f"1 with the coupling {self.coupling}, or the coupling maximal"
            raise bad_value("sampler.tree_width", self.tree_width, expected)
        least = 2 + self.tree_levels + num_siblings(self.tree_width, self.tree_levels)
        if isinstance(self.window, str) or self.window < least:
            expected = f"a number of at least {least}, which the tree and its chain take"
            raise bad_value("sampler.window", self.window, expected)

    @property
    def redrafts(self) -> bool:
        """True where drafts that are carried on are drafted again."""
        keeps_noise = registry.get("coupling", self.coupling).keeps_noise
        return keeps_noise if self.redraft is None else bool(self.redraft)

    @property
    def corrects(self) -> bool:
        """True where they are drawn from the target's distribution, as the draft's has changed."""
        return self.redrafts and self.redraft != REPLACE

    @property
    def guarantee(self) -> str:
        if self.keep_threshold < 1:
            return "approximate"
        return registry.get("coupling", self.coupling).guarantee

    @property
    def drafted(self) -> bool:
        source = registry.get("drafter", self.drafter)
        return self._asks_model and source.needs_draft_model

    @property
    def mixes_sampling(self) -> bool:
        """True without a draft model, whose sampling parameters are one set for all items."""
        return not self._asks_model

    @property
    def _asks_model(self) -> bool:
        """True where a model drafts, be it of the target's own layers."""
        return registry.get("initialiser", self.init).needs_draft_model

    def chosen_parts(self):
        yield "coupling", "coupling", self.coupling
        yield "init", "initialiser", self.init
        yield "drafter", "drafter", self.drafter

    def unread(self, param):
        known = registry.table("initialiser").items()
        asking = [("initialiser", name) for name in _asking_models()]
        owners = {
            "drafter": asking,
            "draft_rounds": asking,
            "draft_model": [("drafter", "model")] if self._asks_model else asking,
            "table": [("initialiser", name) for name, one in known if one.has_table],
            "kept_layers": [("drafter", "layer_skip")],
            "exit_layer": [("drafter", "early_exit")],
        }.get(param, [])
        chosen = {(kind, name) for _, kind, name in self.chosen_parts()}
        return [] if chosen.intersection(owners) else owners

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
        """Make the drafter of one call.

        Args:
            target: the model.
            draft: target of the draft model, where ``init`` needs one.
            verifier: decides which drafts are accepted; None for the coupling's own.
            window: window of the drafter; None for that of the parameters.
        """
        coupling = registry.get("coupling", self.coupling)
        init = registry.get("initialiser", self.init).make(self, target, draft)
        coupling = coupling() if verifier is None else coupling(verifier)
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


for _preset in (
    Preset(
        "jacobi",
        "speculative_jacobi",
        {"coupling": "gumbel", "init": "repeat"},
        {"temperature": 0.0},
        "greedy Jacobi decoding: the argmax tokens of plain autoregression",
        paper="2305.10427",
    ),
    Preset(
        "sjd",
        "speculative_jacobi",
        {"coupling": "fresh", "window": 16, "init": "random"},
        about="speculative Jacobi decoding with the paper's window and initialiser",
        paper="2410.01699",
    ),
    Preset(
        "scd_mc",
        "speculative_jacobi",
        {"coupling": "maximal", "window": 64},
        about=(
            "speculative coupled decoding, maximal coupling; its scripts have a window of 32 and"
            " random drafts"
        ),
        paper="2510.24211",
    ),
    Preset(
        "scd_gs",
        "speculative_jacobi",
        {"coupling": "gumbel_shared", "window": 64},
        about=(
            "speculative coupled decoding, Gumbel sharing; its scripts have a window of 32 and"
            " random drafts"
        ),
        paper="2510.24211",
    ),
    Preset(
        "sjd_pp",
        "speculative_jacobi",
        {"coupling": "fresh", "keep_threshold": 0.5},
        about=(
            "keeps confident drafts past the first rejection; a kept draft does not come from the"
            " distribution it is judged by, so the rule is not exact (scd_mc keeps drafts exactly)"
        ),
        paper="2512.07503",
        limit=Limit("plain autoregression", {"keep_threshold": 1.0}),
    ),
    Preset(
        "sjd_pac",
        "speculative_jacobi",
        {"coupling": "maximal", "tree_width": 3},
        about=(
            "a tree of candidates where a window begins, and maximal coupling behind it; exact,"
            " since the first accepted sibling counts and all come from the iterate's distribution"
        ),
        paper="2603.18599",
        example={"window": 16},
    ),
    Preset(
        "sjd_vp",
        "speculative_jacobi",
        {"coupling": "gumbel_shared", "trend": 0.1},
        about=(
            "favours tokens whose probability rises from pass to pass, after the paper's abstract:"
            " in the next iterate and its distribution alone, so the rule is exact"
        ),
        paper="2603.27115",
        limit=Limit("plain autoregression", {"trend": 0.0}),
    ),
):
    register("preset", _preset.name)(_preset)
