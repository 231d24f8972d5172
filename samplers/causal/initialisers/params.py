"""Parameters of initialisers, and what must hold between them."""

from __future__ import annotations

from dataclasses import dataclass

from gen.core.params import Rule, choice, draft_model, param, part
from gen.samplers.engine.causal_loop import CausalSampler
from gen.samplers.engine.outputs import CALL, ITEM

REPLACE = "replace"  # of ``redraft``
A_TABLE = "a file, the name of a model, empty, or None"
ASKING = "init.needs_draft_model"  # initialisers that ask a draft model


@dataclass(frozen=True)
class Initialised(CausalSampler):
    """Base of samplers whose ``coupling`` carries drafts on that an initialiser made.

    Attributes:
        init: part that drafts the positions that enter the window: uniform, random, repeat,
            repeat_above, model, table or model_table.
        draft_model: name of a model, of the drafter model; None for the modality's own.
        draft_rounds: forward passes of a draft model per round at most; None for as many as change
            a draft.
        redraft: whether the drafts that are carried on are corrected by the draft model or the
            table; None where the coupling keeps the noise of positions (gumbel, gumbel_shared), the
            others cannot. replace puts drafts of the model or the table alone in their stead.
        table: file of a context table, or the name of the model that it lies beside, or empty; None
            for the one beside the model's weights.
        scope: item, or call to count the call's finished items in the table as well, which takes a
            coupling whose tokens do not depend on the drafts (gumbel).
        drafter: whose model drafts: model is ``draft_model``, the others are layers of the target.
        drafter_weights: folder of the trained exit, skip, router or lora_drop.
        kept_layers: share of the layers that layer_skip keeps, or their numbers.
        exit_layer: layers before the head of early_exit.
    """

    init: str = part("uniform", "initialiser")
    draft_model: str | None = draft_model(of=f"{ASKING} drafter=model")
    draft_rounds: int | None = param(3, int, 1, also=(None,), of=ASKING)
    redraft: bool | str | None = param(None, bool, also=(REPLACE, None))
    table: str | None = param(None, str, also=(None,), of="init.has_table", expected=A_TABLE)
    scope: str = choice(ITEM, (ITEM, CALL))
    drafter: str = part("model", "drafter", of=ASKING)
    drafter_weights: str | None = None
    kept_layers: str = param("1/2", of="drafter=layer_skip")  # as that drafter
    exit_layer: int = param(1, of="drafter=early_exit")  # as that drafter

    model_rules = (
        Rule("drafter", lambda s: s.parts.drafter.is_model, "one that is a model: {drafter?}"),
        Rule(
            "init",
            lambda s: s.drafter == "model" or s.parts.init.needs_draft_model,
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
    )
    table_rules = (
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
    )
    redraft_rule = Rule(
        "redraft",
        lambda s: not s.redraft or s.parts.coupling.keeps_noise,
        "false or None, because the coupling {coupling} draws drafts with new noise;"
        " {coupling?and} keep that of their positions",
    )

    @property
    def redrafts(self) -> bool:
        """True where drafts that are carried on are drafted again."""
        return self.parts.coupling.keeps_noise if self.redraft is None else bool(self.redraft)

    @property
    def corrects(self) -> bool:
        """True where they are drawn from the target's distribution, as the draft's has changed."""
        return self.redrafts and self.redraft != REPLACE

    @property
    def drafted(self) -> bool:
        return self.parts.init.needs_draft_model and self.parts.drafter.needs_draft_model

    @property
    def mixes_sampling(self) -> bool:
        """True without a draft model, whose sampling parameters are one set for all items."""
        return not self.parts.init.needs_draft_model
