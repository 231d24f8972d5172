"""Source of drafts: how a sampler that verifies drafts of token ids gets its drafter.

``@register("drafter", name)`` on a subclass in one file is all that a new one takes; the samplers
``speculative`` and ``relaxed_acceptance`` then accept ``drafter: name``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from gen.samplers.engine.causal_loop import Drafter
from gen.samplers.engine.window import AUTO

if TYPE_CHECKING:
    from gen.samplers.verifiers.base import Verifier


class DraftSource:
    """Makes the drafter of one call of a sampler.

    Attributes:
        needs_draft_model: whether the sampler must be given a draft model.
        params: parameters of the sampler that it reads, where not every sampler has them.
        width: the sampler's parameter that says how many drafts a forward pass verifies; empty for
            a fixed number.
    """

    needs_draft_model: ClassVar[bool] = False
    params: ClassVar[tuple[str, ...]] = ()
    width: ClassVar[str] = ""

    @classmethod
    def is_timed(cls, sampler: Any) -> bool:
        """Says whether a clock decides how many drafts there are."""
        return bool(cls.width) and getattr(sampler, cls.width) == AUTO

    @classmethod
    def make(cls, sampler: Any, target: Any, draft: Any, verifier: Verifier) -> Drafter:
        """Makes the drafter.

        Args:
            sampler: the sampler, with its parameters.
            target: the model.
            draft: target of the draft model, where one is needed.
            verifier: decides which drafts are accepted.
        """
        raise NotImplementedError
