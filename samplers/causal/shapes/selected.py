"""Delayed trees whose trunk, paths and depth a trained network chooses in every round.

An action (n, K, L) is a trunk of n drafts and K independent paths of L drafts from its end; (n, 0,
0) is a chain. Of every action a small network predicts the tokens that a round commits, and

    action = argmax over (n, K, L) of tokens - rate (1 + draft_cost (n + L))

with the rate of tokens per time that this very rule attains on the recorded rounds: no rule that
knows the predictions has a higher one. Without a draft cost it is the action with most tokens.

The network reads what is known before anything is drafted: the three largest probabilities and the
entropy of the drafter's distribution at the root, how many drafts the round before had accepted and
whether it had one rejected, and the target's largest probability and entropy where the last
committed token was drawn. ``gen.recipes.tree_selector`` trains it on recorded rounds, whose tokens
per action it computes.

Reference: Thomas et al., "Dynamic Delayed Tree Expansion For Improved Multi-Path Speculative
Decoding" (arXiv 2602.16994), which predicts the drafts that are accepted from features of both
models. Its network and its features are larger.
Guarantee: that of the verifier, whatever the network says: a choice is a function of committed
tokens, of earlier rounds and of the distribution at the root, and of no draft's value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gen.core.errors import bad_value
from gen.core.params import Params, number, text
from gen.core.registry import register, registry
from gen.models.draft_heads import predictors
from gen.samplers.causal.shapes.base import Shape, TreeBuilder
from gen.samplers.engine.draft import WITH_REPLACEMENT
from gen.samplers.engine.rows import RowState

if TYPE_CHECKING:
    from gen.models.draft_heads.predictors import Action, SelectorNet
    from gen.models.targets.causal import CausalTarget

RECIPE = "python -m gen.recipes.tree_selector MODALITY --out FOLDER"


@dataclass(frozen=True)
class SelectedParams(Params):
    """Parameters of trees that a network chooses.

    Attributes:
        tree_selector: folder of a trained selector.
        draft_cost: time of a pass of the drafter, in passes of the target; 0 for the most tokens
            per pass of the target.
    """

    tree_selector: str = text("", "a folder with a trained selector")
    draft_cost: float = number(0.0, most=1.0)


@register("shape", "selected", params=SelectedParams)
class Selected(Shape):
    """Delayed trees whose trunk, paths and depth a trained network chooses in every round."""

    takes = (WITH_REPLACEMENT,)
    needs_weights = True
    history = RowState(start=0.0)  # of the round before, float32 [b, 5]

    @property
    def actions(self) -> tuple[Action, ...]:
        """Trees that it chooses among."""
        folder = self.params.tree_selector
        if not folder:
            expected = f"a folder that `{RECIPE}` writes"
            raise bad_value("sampler.tree_selector", folder, expected)
        return registry.get("drafting", "tree_actions")(folder)

    @property
    def nodes(self) -> int:
        return max(n + k * length for n, k, length in self.actions)

    def attach(self, sampler: Any, target: CausalTarget, draft: Any) -> None:
        folder, cost, read = self.params.tree_selector, self.params.draft_cost, registry.get
        net, rate = read("drafting", "tree_selector")(folder, sampler.drafter, target, draft, cost)
        self.use(net, self.actions, rate)

    def use(self, net: SelectorNet, actions: tuple[Action, ...], rate: float = 0.0) -> None:
        """Choose among actions with a network of as many outputs. ``rate``: tokens that a round has
        to commit for the time of a pass of the target."""
        self.net, (self.weight, *_) = net, net.parameters()
        self.table = torch.tensor(actions, device=self.weight.device)  # [A, 3]
        self.price = rate * predictors.times_of(self.table, self.params.draft_cost)
        self.most_trunk = max(n for n, _, _ in actions)
        most_paths = max(k for _, k, _ in actions)
        # drafts of path i in any action
        self.lengths = [max(x for _, k, x in actions if k > i) for i in range(most_paths)]
        self.most_nodes = max(n + k * length for n, k, length in actions)

    @torch.no_grad()
    def choose(self, builder: TreeBuilder) -> Tensor:
        """Return the action of each row, long [b, 3]."""
        root = predictors.root_features(builder.rest[:, 0])
        if self.history is None:
            self.history = root.new_zeros(len(root), predictors.HISTORY)
        tokens = self.net(torch.cat([root, self.history], -1).to(self.weight.dtype))
        return self.table[(tokens - self.price).argmax(-1)]

    def grow(self, builder: TreeBuilder) -> None:
        """Add the drafts of each row's action.

        Columns are those of all actions, so that the noise of a row's drafts does not depend on the
        other rows; what a row does not have is dropped.
        """
        trunk, paths, length = self.choose(builder)[..., None].unbind(1)  # [b, 1] each
        tip = root = builder.columns([-1])
        for n in range(self.most_trunk):
            on = trunk > n
            builder.expand_for(torch.where(on, tip, root))
            builder.add(torch.where(on, tip, root), active=on)
            tip = torch.where(on, builder.size - 1, tip)
        builder.expand_for(torch.where(paths > 0, tip, root))
        tips: dict[int, int] = {}
        for path in range(len(self.lengths)):
            tips[path] = builder.size
            builder.add(torch.where(paths > path, tip, root), active=paths > path)
        for level in range(1, max(self.lengths, default=0)):
            going = [path for path, most in enumerate(self.lengths) if most > level]
            on = torch.cat([(paths > path) & (length > level) for path in going], 1)
            above = torch.where(on, builder.columns([tips[path] for path in going]), root)
            builder.expand_for(above.amax(1, keepdim=True))
            first = builder.size
            builder.add(above, active=on)
            tips = {path: first + i for i, path in enumerate(going)}
        builder.compact(self.most_nodes)

    def learn(self, step, num_accepted, num_drafted, logp):
        made = predictors.round_features(num_accepted, num_drafted, logp)
        goes_on = (step.left > 0)[:, None]
        self.history = torch.where(goes_on, made, self.history)
