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

from dataclasses import dataclass, replace

from gen.core.errors import GenError, bad_value
from gen.core.params import Params, optional_integer, part
from gen.core.registry import register, registry
from gen.core.sampler import PartSampler, Preset, draft_models
from gen.samplers.causal.drafters.base import DraftSource, part_params
from gen.samplers.causal.drafters.model import DraftsWithModel
from gen.samplers.causal.drafters.trimmed import DraftVocab, read_table
from gen.samplers.causal.shapes.base import MOST_NODES, Shape
from gen.samplers.causal.shapes.builder import NodeDrafter
from gen.samplers.causal.shapes.static import Chain
from gen.samplers.engine.causal_loop import Drafter
from gen.samplers.engine.causal_sampler import CausalSampler
from gen.samplers.engine.draft import DRAWS
from gen.samplers.engine.window import AUTO, LADDER, auto_width
from gen.samplers.verifiers.base import Verifier


@dataclass(frozen=True)
class SpeculativeParams(Params):
    """Parameters of speculative decoding itself.

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
    draws: str | None = None
    verifier: str = part("token", "verifier")
    policy: str = part("constant", "length_policy")
    num_speculative_tokens: int | str = 5
    draft_model: str | None = None
    draft_temperature: float | None = None
    draft_guidance: float | None = None
    draft_vocab: int | None = optional_integer(least=1)
    drafter_weights: str | None = None
    draft_table: str | None = None


@register("sampler", "speculative")
class Speculative(DraftsWithModel, CausalSampler, PartSampler, params=SpeculativeParams):
    """A drafter proposes tokens, the target judges several of them per forward pass. The parameters
    are those of ``SpeculativeParams`` and of all drafters, shapes and verifiers."""

    protocol = "causal"
    papers = ("2211.17192", "2302.01318", "2403.10444")
    reference = "plain autoregression"

    def __init__(self, **values):
        models = values.get("draft_model")
        if isinstance(models, (list, tuple)) and all(isinstance(m, str) for m in models):
            values["draft_model"] = ",".join(models)
        super().__init__(**values)
        self.check_drafting()
        verifier, source = self._rule(), self._source()
        if verifier.relaxed:
            exact = " or ".join(
                name for name, v in registry.table("verifier").items() if not v.relaxed
            )
            raise bad_value(
                "sampler.verifier",
                self.verifier,
                f"{exact}; relaxed ones belong to the sampler relaxed_acceptance",
            )
        lacking = [name for name in source.reads if name not in type(self).__dataclass_fields__]
        if lacking:
            raise bad_value(
                "sampler.drafter",
                self.drafter,
                f"one that does not read {', '.join(lacking)}; speculative has no such parameters,"
                " speculative_jacobi and relaxed_acceptance have",
            )
        self._check_tree()
        if not self.takes_several_drafts and len(draft_models(self.draft_model)) > 1:
            known = registry.table("drafter").items()
            able = " or ".join(name for name, source in known if source.several)
            expected = f"one model; sampler.drafter {able} takes several"
            raise bad_value("sampler.draft_model", self.draft_model, expected)
        source.check(self)
        self._draws()
        self._check_length()

    def _check_tree(self) -> None:
        """Check the parts of a tree of drafts. Raises ``GenError``."""
        verifier, source, shape = self._rule(), self._source(), self._shape_type()
        if not shape.is_chain and not verifier.judges_trees:
            known = registry.table("verifier").items()
            trees = ", ".join(name for name, v in known if v.judges_trees)
            raise bad_value(
                "sampler.verifier", self.verifier, f"one that judges trees ({trees}), because"
                f" sampler.shape is {self.shape}"
            )  # fmt: skip
        if not shape.is_chain and not source.shapes:
            raise bad_value("sampler.shape", self.shape, f"chain with the drafter {self.drafter}")
        if self.nodes == AUTO and not shape.has_budget:
            known = registry.table("shape").items()
            budgets = " or ".join(name for name, kind in known if kind.has_budget)
            raise bad_value(
                "sampler.nodes", AUTO, f"a number, because sampler.shape is not {budgets}"
            )
        if not shape.is_chain and not self._has_auto_budget():
            drafts = shape(self._shape_params()).nodes
            if drafts > MOST_NODES:
                tree = f"{self.shape} with {drafts:,} drafts"
                raise bad_value("sampler.shape", tree, f"a tree of at most {MOST_NODES:,}")

    def _check_length(self) -> None:
        """Check what decides how long chains are. Raises ``GenError``."""
        verifier, policy = self._rule(), registry.get("length_policy", self.policy)
        if policy.needs_same_tokens and verifier.guarantee != "same_tokens":
            known = registry.table("verifier").items()
            same = [name for name, v in known if v.guarantee == "same_tokens"]
            reason = f"because sampler.policy {self.policy} looks at the batch"
            raise bad_value("sampler.verifier", self.verifier, f"{' or '.join(same)}, {reason}")
        if self._drafts_nodes() and self.num_speculative_tokens == AUTO:
            expected = "a number; auto is for chains of a draft model without sampler.draws"
            raise bad_value("sampler.num_speculative_tokens", AUTO, expected)
        if self._drafts_nodes() and self.policy != "constant":
            expected = "constant; others are for chains of a draft model without sampler.draws"
            raise bad_value("sampler.policy", self.policy, expected)

    def _source(self) -> type[DraftSource]:
        return registry.get("drafter", self.drafter, "sampler.drafter")

    def _rule(self) -> type[Verifier]:
        return registry.get("verifier", self.verifier, "sampler.verifier")

    def _shape_type(self) -> type[Shape]:
        return registry.get("shape", self.shape, "sampler.shape")

    def _shape_params(self) -> Params | None:
        """Parameters of the shape, if it has some."""
        return part_params(self, "shape", self.shape)

    def _drafts_nodes(self) -> bool:
        """Whether drafts are drawn node by node, and not by a drafter of chains."""
        source = self._source()
        chains = self._shape_type().is_chain and source.makes_chains()
        return not (chains and self.draws is None and self.draft_vocab is None)

    def _draws(self) -> str:
        """Choose how siblings are drawn.

        Raises:
            GenError: shape, verifier and drafter have no way in common, or not the one asked for.
        """
        users = {
            f"sampler.shape {self.shape}": self._shape_type().takes,
            f"sampler.verifier {self.verifier}": self._rule().draws,
            f"sampler.drafter {self.drafter}": self._source().draws,
        }
        asked = self._shape_type().takes if self.draws is None else (self.draws,)
        if self.draws is not None and self.draws not in DRAWS:
            raise bad_value("sampler.draws", self.draws, " or ".join(DRAWS))
        for one in asked:
            if all(one in known for known in users.values()):
                return one
        words = "; ".join(f"{user} takes {', '.join(known)}" for user, known in users.items())
        if self.draws is None:
            raise GenError(f"the drafts can be drawn in no way that all parts take: {words}")
        raise bad_value("sampler.draws", self.draws, f"a way that all parts take: {words}")

    @property
    def guarantee(self) -> str:
        return self._rule().guarantee

    @property
    def drafted(self) -> bool:
        return self._source().needs_draft_model

    @property
    def takes_several_drafts(self) -> bool:
        return self._source().several

    @property
    def draft_names(self) -> tuple[str | None, ...]:
        if not self.takes_several_drafts:
            return super().draft_names
        return draft_models(self.draft_model) or (None,)

    @property
    def timed(self) -> bool:
        return self._source().is_timed(self) or self._has_auto_budget()

    def _has_auto_budget(self) -> bool:
        """Whether a clock decides how many drafts a tree has."""
        return self._shape_type().has_budget and self.nodes == AUTO

    def make_drafter(self, target, draft):
        verifier = self._rule()().on(target.space, target.device)
        if verifier.needs_greedy and target.sampling.temperature > 0:
            expected = f"0 with sampler.verifier {self.verifier}"
            raise bad_value("sampling.temperature", target.sampling.temperature, expected)
        return self._make(target, draft, verifier)

    def _make(self, target, draft, verifier: Verifier) -> Drafter:
        source = self._source()
        if not self._drafts_nodes():
            return source.make(self, target, draft, verifier)
        kind = self._shape_type()
        params = self._shape_params()
        if self._has_auto_budget():
            most = kind(replace(params, nodes=LADDER[-1] - 1)).nodes
            shape = kind(params, auto_width(self, target, 1 + most))
        elif kind is Chain:
            shape = Chain(None, int(self.num_speculative_tokens))
        else:
            shape = kind(params)
        shape.attach(self, target, draft)
        nodes, vocab = source.of(self, target, draft), None
        if self.draft_vocab is not None:
            table = None if self.draft_table is None else read_table(self.draft_table, target)
            vocab = DraftVocab(target, self.draft_vocab, table)
        return NodeDrafter(nodes, shape, self._draws(), verifier, vocab)


_preset = Preset(
    "drafter_invariant",
    "speculative",
    {"verifier": "follow", "draws": "position_noise"},
    about="drafter-invariant speculative decoding: draft and target share the noise of a position",
    paper="2408.07978",
    title="Coupling without Communication and Drafter-Invariant Speculative Decoding",
)
register("preset", _preset.name)(_preset)
