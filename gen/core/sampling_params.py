"""The law p: the distribution that tokens are drawn from, made from logits once, here, in this
order.

    guidance    z = u + s (c - u)          c, u: logits with and without the condition, s =
                guidance_scale
    legal ids   z = -inf where an id may not stand
    temperature z = z / temperature        0: all mass on the argmax
    top-k       the k largest
    top-p       the smallest set of largest ids whose mass reaches p
    min-p       ids with at least min_p times the mass of the largest

Drafts are judged against this law and residuals are taken from it; nothing is warped a second time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gen.core.errors import bad_value

PIECE = {
    True: 1 << 15,
    False: 1 << 22,
}
# numbers of a law that are worked on at a time, on a CPU or elsewhere: what lies between is as
# large as that


@dataclass(frozen=True)
class SamplingParams:
    """The knobs of the law. ``top_k`` 0, ``top_p`` 1, ``min_p`` 0 and ``guidance_scale`` 1 switch
    each part off.

    Raises ``GenError`` for a value out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    guidance_scale: float = 1.0

    def __post_init__(self) -> None:
        def number(x):
            return isinstance(x, (int, float)) and not isinstance(x, bool) and x == x

        if not number(self.temperature) or self.temperature < 0 or self.temperature == float("inf"):
            raise bad_value("sampling.temperature", self.temperature, "a number of at least 0")
        if not isinstance(self.top_k, int) or isinstance(self.top_k, bool) or self.top_k < 0:
            raise bad_value(
                "sampling.top_k", self.top_k, "an integer of at least 0 (0 keeps all ids)"
            )
        if not number(self.top_p) or not 0 < self.top_p <= 1:
            raise bad_value("sampling.top_p", self.top_p, "a number above 0 and at most 1")
        if not number(self.min_p) or not 0 <= self.min_p <= 1:
            raise bad_value("sampling.min_p", self.min_p, "a number between 0 and 1")
        if not number(self.guidance_scale) or abs(self.guidance_scale) == float("inf"):
            raise bad_value(
                "sampling.guidance_scale", self.guidance_scale, "a finite number (1 is no guidance)"
            )

    @property
    def guided(self) -> bool:
        return self.guidance_scale != 1.0

    def __call__(
        self,
        logits: Tensor,
        uncond: Tensor | None = None,
        legal: Tensor | None = None,
        *,
        consume: bool = False,
    ) -> Tensor:
        """Log-probabilities [..., V] of the law, -inf where it has no mass; float64 for float64
        logits, else float32.

        ``uncond``: logits without the condition, like ``logits``. ``legal``: bool, broadcastable to
        ``logits``. ``consume``: the logits are not needed any more, so that the law may be written
        over them.
        """
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        rows = max(1, PIECE[logits.is_cpu] // logits.shape[-1])
        if logits.numel() <= rows * logits.shape[-1]:
            return self._of(logits, uncond, legal)
        out = (
            logits
            if consume and logits.dtype == wide and logits.is_contiguous()
            else torch.empty(logits.shape, dtype=wide, device=logits.device)
        )

        def flat(x):
            return None if x is None else x.expand(logits.shape).reshape(-1, logits.shape[-1])

        parts = [flat(x) for x in (out, logits, uncond, legal)]
        for first in range(0, len(parts[0]), rows):
            here = [None if x is None else x[first : first + rows] for x in parts]
            here[0].copy_(self._of(*here[1:]))
        return out

    def _of(self, logits: Tensor, uncond: Tensor | None, legal: Tensor | None) -> Tensor:
        z = logits if logits.dtype == torch.float64 else logits.float()
        if uncond is not None:
            u = uncond.to(z.dtype)
            z = u + self.guidance_scale * (z - u)
        if legal is not None:
            z = z.masked_fill(~legal, float("-inf"))
        if self.temperature == 0:
            best = z.argmax(-1, keepdim=True)
            return torch.full_like(z, float("-inf")).scatter_(-1, best, 0.0)
        if self.temperature != 1:
            z = z / self.temperature
        if 0 < self.top_k < z.shape[-1]:
            kept = z.topk(self.top_k, -1, sorted=False)  # exactly k ids, whatever the ties
            z = torch.full_like(z, float("-inf")).scatter_(-1, kept.indices, kept.values)
        if self.top_p < 1:
            ordered, ids = z.sort(dim=-1, descending=True, stable=True)
            mass = ordered.softmax(-1)
            before = (
                mass.cumsum(-1) - mass
            )  # an id stays while the larger ones do not reach p yet, so one always does
            z = z.masked_fill(
                torch.zeros_like(z, dtype=torch.bool).scatter_(-1, ids, before >= self.top_p),
                float("-inf"),
            )
        if self.min_p > 0:
            logp = z.log_softmax(-1)
            floor = logp.amax(-1, keepdim=True) + torch.tensor(self.min_p, dtype=z.dtype).log()
            z = z.masked_fill(logp < floor, float("-inf"))
        return z.log_softmax(-1)
