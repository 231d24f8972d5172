"""Base of samplers that run the causal loop: each makes a drafter, the loop does the rest."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from gen.core.rng import RNG
from gen.core.sampler import Callback, Sampler
from gen.core.stats import SampleOutput
from gen.samplers.engine.causal_loop import CausalRun, Drafter, decode_causal
from gen.samplers.engine.outputs import ITEM


class CausalSampler(Sampler):
    """Sampler that runs the causal loop (``gen.samplers.engine.causal_loop``)."""

    protocol = "causal"

    @property
    def opens(self) -> bool:
        """True where no item learns from finished ones (``scope: call``)."""
        return vars(self).get("scope", ITEM) == ITEM

    @abstractmethod
    def make_drafter(self, target: Any, draft: Any) -> Drafter:
        """Make the drafter of one call.

        Args:
            target: causal target of the items, of tokens or of latents.
            draft: target of the draft model, or of each where there are several; None without one.

        Raises:
            GenError: the target or the draft does not fit the parameters.
        """

    def __call__(
        self,
        target,
        rng: RNG,
        *,
        draft=None,
        canvas=None,
        trace: bool = False,
        callback: Callback | None = None,
    ) -> SampleOutput:
        drafter = self.make_drafter(target, draft)
        return decode_causal(target, rng, drafter, trace=trace, callback=callback)

    def begin(self, target, rng: RNG, *, draft=None, canvas=None, trace: bool = False) -> CausalRun:
        return CausalRun(target, rng, self.make_drafter(target, draft), trace)
