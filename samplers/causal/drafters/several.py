"""Drafts of several models at once, each along paths of its own.

The paths part at the last committed token, and path i is drawn from model i mod M (shape
``paths``). A path costs its model one forward pass per draft; the models do not see each other's
drafts. Where two paths have the same tokens they are one context, whose drafts come from different
distributions. Each draft is judged against the one that it was drawn from.

Models that know different things complement each other: a position is lost where all of them are
wrong. Miao et al., "SpecInfer: Accelerating Large Language Model Serving with Tree-based
Speculative Inference and Verification" (arXiv 2305.09781), trains them for that; any models of the
same tokens fit. With one model it is the drafter ``model``.

Guarantee: that of the verifier. The drafts of a node are independent of each other, whichever model
drew them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gen.core.errors import bad_value
from gen.core.method import Limit, method
from gen.core.params import Rule
from gen.core.registry import register
from gen.samplers.causal.drafters.base import DraftSource
from gen.samplers.causal.drafters.model import ModelNodes
from gen.samplers.engine.draft import RANKS, WITH_REPLACEMENT
from gen.samplers.engine.host import to_device

if TYPE_CHECKING:
    from gen.models.targets.causal import CausalTarget

REASON = "because sampler.drafter several has siblings of different models"


@method(
    "specinfer",
    sampler="speculative",
    about="SpecInfer: a path of every draft model, siblings judged one after the other",
    paper="2305.09781",
    title="SpecInfer: Accelerating Large Language Model Serving with Tree-based Speculative"
    " Inference and Verification",
    params={
        "drafter": "several",
        "shape": "paths",
        "verifier": "recursive",
        "paths": 2,
        "path_length": 4,
    },
    limit=Limit("rsd_c", {"paths": 1, "path_length": 3}, {"branching": "1-1-1"}),
    example={"paths": 2, "path_length": 2},
)
@register("drafter", "several")
class Several(DraftSource):
    """Drafts with several models, each along paths of its own. Parameters: ``draft_model``, names
    joined by commas; ``draft_temperature``, ``draft_guidance``.

    Path i of ``paths`` is of model i mod M.
    """

    needs_draft_model = True
    several = True
    draws = (WITH_REPLACEMENT,)
    rules = (
        Rule("shape", lambda s: s.parts.shape.parts_models, f"{{shape?}}, {REASON}"),
        Rule(
            "verifier",
            lambda s: s.parts.verifier.judges_trees and RANKS in s.parts.verifier.draws,
            f"{{verifier?}}, {REASON}",
        ),
        Rule(
            "trunk",
            lambda s: not s.trunk,
            "0 with sampler.drafter several, whose paths part at the root",
        ),
        Rule(
            "paths",
            lambda s: s.paths >= len(s.draft_names),
            lambda s: _expected_paths(len(s.draft_names)),
        ),
    )

    def __init__(self, drafts: Sequence[CausalTarget], paths: int):
        self.models = [ModelNodes(draft) for draft in drafts]
        self.targets, self.made_of = tuple(drafts), tuple(self.models)
        self.owners = [path % len(drafts) for path in range(paths)]

    @property
    def nfe(self) -> list[int]:
        return torch.stack([model.num_passes for model in self.models]).sum(0).tolist()

    def count_passes(self, step, passes):
        for model in self.models:
            model.count_passes(step, passes)

    def begin(self, step, tokens):
        return torch.cat([model.begin(step, tokens) for model in self.models], 1)

    def extend(self, step, tree, first):
        size = tree.tokens.shape[1]
        found: dict[int, Tensor] = {}  # by column; a level has a draft of every path
        for number, model in enumerate(self.models):
            columns = np.arange(size)[np.resize(self.owners, size) == number]
            own = tree.select(to_device(columns, step.start.device).expand(len(step.start), -1))
            own.is_chain = self.owners.count(number) == 1
            new = columns[columns >= first]
            logq = model.extend(step, own, len(columns) - len(new))
            found |= zip(new.tolist(), logq.unbind(1), strict=True)
        return torch.stack([found[column] for column in range(first, size)], 1)

    @classmethod
    def of(cls, sampler: Any, target: CausalTarget, draft: Any) -> Several:
        drafts = list(draft) if isinstance(draft, Sequence) else [draft]
        if sampler.paths < len(drafts):
            raise bad_value("sampler.paths", sampler.paths, _expected_paths(len(drafts)))
        models = [sampler.draft_target(target, one) for one in drafts]
        return cls(models, sampler.paths)


def _expected_paths(models: int) -> str:
    return f"at least {models}, a path for each draft model"
