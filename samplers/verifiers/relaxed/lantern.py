"""LANTERN: the nearest codes of a draft count as it.

    lantern      g(x) = p(x) + what its nearest codes have, nearest first, as long as that sums to
                 at most r
    lantern_pp   the same, to at most r p(x)

The release compares the codebook's rows as they are stored; gen compares the vectors that the
decoder sees, which are unit vectors in LlamaGen.

Reference: Jang et al., "LANTERN: Accelerating Visual Autoregressive Models with Relaxed Speculative
Decoding" (arXiv 2410.03355); Park et al., "LANTERN++" (arXiv 2502.06352).
Guarantee: r = 0 is exact. With a draft that was not random a step is at most r off
(``gen.samplers.verifiers.relaxed.base`` has the proof).
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gen.core.method import Limit, method
from gen.core.registry import register
from gen.samplers.verifiers.base import draft_logp
from gen.samplers.verifiers.relaxed.base import Relaxed

# codebook -> the nearest codes of every code; takes seconds for large ones
_tables: MutableMapping[Tensor, dict[int, Tensor]] = WeakIdKeyDictionary()


def nearest_codes(codebook: Tensor, most: int) -> Tensor:
    """Lists the nearest other codes of every code: codebook [n, D] -> [n, k], k = min(most, n - 1),
    nearest (L2) first."""
    tables = _tables.setdefault(codebook, {})
    if most not in tables:
        codes, k, out = codebook.float(), min(most, len(codebook) - 1), []
        for start in range(0, len(codes), 1024):
            far = torch.cdist(codes[start : start + 1024], codes)
            row = torch.arange(len(far), device=far.device)
            far[row, start + row] = math.inf
            out.append(far.topk(k, -1, largest=False).indices)
        tables[most] = torch.cat(out)
    return tables[most]


@method(
    "lantern",
    sampler="relaxed_acceptance",
    paper="2410.03355",
    title="LANTERN: Accelerating Visual Autoregressive Models with Relaxed Speculative Decoding",
    about="LANTERN: the probability of the nearest codes is added to the draft, up to a bound",
    params={"verifier": "lantern", "init": "repeat"},
    limit=Limit("plain autoregression", {"relaxation": 0}),
)
@register("verifier", "lantern")
@dataclass(frozen=True)
class Lantern(Relaxed):
    """Credit a draft with the probability of its nearest codes. ``relaxation``: the most that is
    added."""

    relaxation: float = 0.1
    most = 1.0
    needs_codebook = True
    neighbours: ClassVar[int] = 1000

    def credit(self, draft, logp):
        assert self.codebook is not None, "attach comes first"
        log_p, table = draft_logp(draft, logp), nearest_codes(self.codebook, self.neighbours)
        around = table[draft.tokens.clamp_max(len(table) - 1)]
        mass = logp.gather(-1, around).exp()
        taken = torch.where(mass.cumsum(-1) <= self.limit(log_p.exp())[..., None], mass, 0).sum(-1)
        # ids beyond the codebook are no codes and have no neighbours
        return torch.logaddexp(log_p, torch.where(draft.tokens < len(table), taken, 0).log())

    def limit(self, p: Tensor) -> Tensor:
        """Limits the mass that is taken, for drafts of probability ``p``."""
        return torch.full_like(p, self.relaxation)

    def excess(self, p, q):
        return torch.minimum(self.limit(p), 1 - p)


@method(
    "lantern_pp",
    sampler="relaxed_acceptance",
    paper="2502.06352",
    title="LANTERN++",
    about="LANTERN++: the same, up to a multiple of the draft's own probability",
    params={"verifier": "lantern_pp", "init": "repeat"},
    limit=Limit("plain autoregression", {"relaxation": 0}),
)
@register("verifier", "lantern_pp")
@dataclass(frozen=True)
class LanternPP(Lantern):
    """Credit a draft with the probability of its nearest codes. ``relaxation``: the most that is
    added, as a multiple of the draft's own probability."""

    relaxation: float = 10.0
    most = math.inf

    def limit(self, p):
        return self.relaxation * p
