"""Speculative decoding: a drafter proposes a chain or a tree of tokens, the target judges all of
them in one forward pass, and a verifier keeps a path of them and adds one token.

    drafter    which distribution follows a node (``drafters``): a small model, or no model at all
    shape      which nodes get children (``shapes``): a chain, or a tree
    draws      how the children of a node are drawn from that distribution
    policy     how long chains are (``length_policies``)
    verifier   which path is accepted (``gen.samplers.verifiers``)

Leviathan, Kalman & Matias, "Fast Inference from Transformers via Speculative Decoding" (arXiv
2211.17192); Chen et al. (arXiv 2302.01318); Sun et al., "Block Verification Accelerates Speculative
Decoding" (arXiv 2403.10444). Papers whose method is a choice of these parts are presets.

Guarantee: that of the verifier. With ``token``, ``block``, ``recursive``, ``k_seq`` and
``traversal`` the tokens are distributed as the target's, whatever the drafter, the shape and the
batch; with ``follow`` they are the very tokens of plain autoregression with the same seed. At
temperature 0 all of them give the argmax tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gen.core.errors import GenError, bad_value
from gen.core.method import method
from gen.core.params import Rule, param, part, require
from gen.core.registry import register
from gen.core.sampler import PartSampler, draft_models
from gen.samplers.causal.drafters.model import DraftsWithModel
from gen.samplers.causal.drafters.trimmed import DraftVocab
from gen.samplers.causal.shapes.base import MOST_NODES, NodeDrafter
from gen.samplers.engine.draft import DRAWS
from gen.samplers.engine.window import AUTO

if TYPE_CHECKING:
    from gen.samplers.verifiers.base import Verifier


@method(
    "drafter_invariant",
    sampler="speculative",
    about="drafter-invariant speculative decoding: draft and target share the noise of a position",
    paper="2408.07978",
    title="Coupling without Communication and Drafter-Invariant Speculative Decoding",
    params={"verifier": "follow", "draws": "position_noise"},
)
@register("sampler", "speculative")
class Speculative(PartSampler, DraftsWithModel):
    """A drafter proposes tokens, the target judges several of them per forward pass. The parameters
    are the following and those of all drafters, shapes and length policies.

    Attributes:
        drafter: part that says which distribution follows a node.
        shape: part that says which nodes get children.
        draws: how the children of a node are drawn, with_replacement, without_replacement, ranks,
            top_and_random or position_noise; None is the first that shape, verifier and drafter
            can all use.
        verifier: part that decides which drafts are accepted.
        policy: part that decides how long the chains of a draft model are.
        num_speculative_tokens: drafts of a chain per round; auto for a draft model alone.
        draft_model: name of a model; None for the modality's own. The drafter several takes a list
            of names, or names joined by commas.
        draft_temperature: temperature of the drafts' distribution; None is the target's.
        draft_guidance: guidance scale of the drafts' distribution; None is the target's, and 1
            spares the draft model its unconditional half.
        draft_vocab: number of tokens that may be drafted, the most frequent ones; None for all.
        drafter_weights: folder of a trained drafter, or the name of an embedded one; None for the
            model's own. Drafters with trained networks read it.
        draft_table: file of ``gen.recipes.common.draft_table``, with the frequencies and the
            successors of the model's tokens; None to count in the item's own text.
    """

    drafter: str = part("model", "drafter")
    shape: str = part("chain", "shape")
    draws: str | None = param(None, also=(*DRAWS, None), expected=" or ".join(DRAWS))
    verifier: str = part("token", "verifier")
    draft_vocab: int | None = param(None, int, 1, also=(None,))
    drafter_weights: str | None = None
    draft_table: str | None = None

    papers = ("2211.17192", "2302.01318", "2403.10444")
    reference = "plain autoregression"
    rules = (
        *DraftsWithModel.rules,
        Rule(
            "verifier",
            lambda s: not s.parts.verifier.relaxed,
            "{verifier?}; relaxed ones belong to the sampler relaxed_acceptance",
        ),
        Rule(
            "drafter",
            lambda s: all(name in vars(s) for name in s.parts.drafter.reads),
            lambda s: (
                f"one that does not read {', '.join(s.parts.drafter.reads)}; speculative has no"
                " such parameters, speculative_jacobi and relaxed_acceptance have"
            ),
        ),
        Rule(
            "verifier",
            lambda s: s.parts.shape.is_chain or s.parts.verifier.judges_trees,
            "one that judges trees ({verifier?,}), because sampler.shape is {shape}",
        ),
        Rule(
            "shape",
            lambda s: s.parts.shape.is_chain or s.parts.drafter.shapes,
            "chain with the drafter {drafter}",
        ),
        Rule(
            "nodes",
            lambda s: s.nodes != AUTO or s.parts.shape.has_budget,
            "a number, because sampler.shape is not {shape?}",
        ),
        Rule(
            "shape",
            lambda s: s.parts.shape.is_chain or s.has_auto_budget or s.num_nodes <= MOST_NODES,
            f"a tree of at most {MOST_NODES:,}",
            got=lambda s: f"{s.shape} with {s.num_nodes:,} drafts",
        ),
        Rule(
            "draft_model",
            lambda s: s.takes_several_drafts or len(draft_models(s.draft_model)) <= 1,
            "one model; sampler.drafter {drafter?} takes several",
        ),
        Rule(
            "verifier",
            lambda s: (
                not s.parts.policy.needs_same_tokens or s.parts.verifier.guarantee == "same_tokens"
            ),
            "{verifier?}, because sampler.policy {policy} looks at the batch",
        ),
        Rule(
            "num_speculative_tokens",
            lambda s: s.num_speculative_tokens != AUTO or not s.drafts_nodes,
            "a number; auto is for chains of a draft model without sampler.draws",
        ),
        Rule(
            "policy",
            lambda s: s.policy == "constant" or not s.drafts_nodes,
            "constant; others are for chains of a draft model without sampler.draws",
        ),
    )

    def __init__(self, **values):
        models = values.get("draft_model")
        if isinstance(models, (list, tuple)) and all(isinstance(m, str) for m in models):
            values["draft_model"] = ",".join(models)
        super().__init__(**values)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, self.parts.drafter.rules)
        self.way_to_draw()

    @property
    def drafts_nodes(self) -> bool:
        """True where drafts are drawn node by node, and not by a drafter of chains."""
        chains = self.parts.shape.is_chain and self.parts.drafter.makes_chains()
        return not (chains and self.draws is None and self.draft_vocab is None)

    @property
    def has_auto_budget(self) -> bool:
        """True where a clock decides how many drafts a tree has."""
        return self.parts.shape.has_budget and self.nodes == AUTO

    @property
    def num_nodes(self) -> int:
        """Most drafts of a round of a tree."""
        return self.parts.shape(self.params_of("shape")).nodes

    def way_to_draw(self) -> str:
        """Choose how siblings are drawn.

        Raises:
            GenError: shape, verifier and drafter have no way in common, or not the one asked for.
        """
        users = {
            f"sampler.shape {self.shape}": self.parts.shape.takes,
            f"sampler.verifier {self.verifier}": self.parts.verifier.draws,
            f"sampler.drafter {self.drafter}": self.parts.drafter.draws,
        }
        for one in self.parts.shape.takes if self.draws is None else (self.draws,):
            if all(one in known for known in users.values()):
                return one
        words = "; ".join(f"{user} takes {', '.join(known)}" for user, known in users.items())
        if self.draws is None:
            raise GenError(f"the drafts can be drawn in no way that all parts take: {words}")
        raise bad_value("sampler.draws", self.draws, f"a way that all parts take: {words}")

    @property
    def guarantee(self) -> str:
        return self.parts.verifier.guarantee

    @property
    def drafted(self) -> bool:
        return self.parts.drafter.needs_draft_model

    @property
    def takes_several_drafts(self) -> bool:
        return self.parts.drafter.several

    @property
    def draft_names(self) -> tuple[str | None, ...]:
        if not self.takes_several_drafts:
            return super().draft_names
        return draft_models(self.draft_model) or (None,)

    @property
    def timed(self) -> bool:
        return self.parts.drafter.is_timed(self) or self.has_auto_budget

    def make_verifier(self) -> Verifier:
        """Make the verifier of a call."""
        return self.parts.verifier()

    def make_drafter(self, target, draft):
        verifier = self.make_verifier().attach(target)
        if verifier.needs_greedy and target.sampling.temperature > 0:
            expected = f"0 with sampler.verifier {self.verifier}"
            raise bad_value("sampling.temperature", target.sampling.temperature, expected)
        if not self.drafts_nodes:
            return self.parts.drafter.make(self, target, draft, verifier)
        shape = self.parts.shape.of(self, target)
        shape.attach(self, target, draft)
        nodes, vocab = self.parts.drafter.of(self, target, draft), None
        if self.draft_vocab is not None:
            table = None if self.draft_table is None else target.token_table(self.draft_table)
            vocab = DraftVocab(target, self.draft_vocab, table)
        return NodeDrafter(nodes, shape, self.way_to_draw(), verifier, vocab)
