"""Speculative Jacobi decoding: the drafter is the previous iterate of the model itself. Needs no training.

Each forward call computes a window of positions at once; the drafts in it are what the last call made of them. A
``coupling`` verifies them and makes the next iterate (see ``couplings``), an ``init`` fills places that enter the
window (see ``initialisers``).

Teng et al., "Accelerating Auto-regressive Text-to-Image Generation with Training-free Speculative Jacobi Decoding"
(arXiv 2410.01699); Wiggers & Hoogeboom, "Predictive Sampling with Forecasting Autoregressive Models" (arXiv 2002.09928).

Guarantee, for every window, initialiser and batch: couplings ``fresh``, ``maximal`` and ``gumbel_shared`` sample from the
model's law; ``gumbel`` gives the very tokens of plain autoregression with the same seed. ``window`` 1 is plain
autoregression in all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gen.errors import bad_value
from gen.registry import register, registry
from gen.samplers.couplings import going_on
from gen.samplers.loop import Round, decode_causal
from gen.samplers.verifiers import ROW, Proposal
from gen.sampling import Preset, Sampler


class JacobiDrafter:
    """Holds the iterate: drafts, and the law each came from, for the places after the last committed token."""

    def __init__(self, window: int, coupling, init, space, legal: Tensor):
        self.window, self.coupling, self.init, self.space, self.legal = window, coupling, init, space, legal
        self.tokens: Tensor | None = None  # [b, n] drafts carried over from the last round, the first `carried` are real
        self.carried: Tensor | None = None  # [b]
        self.logq: Tensor | None = None  # [b, n, V]
        self.kind: Tensor | None = None  # [b, n]

    def propose(self, now: Round, tokens: Tensor) -> tuple[Tensor, Tensor]:
        b, width = now.positions.shape
        length = min(self.window - 1, width)
        device = tokens.device
        if self.tokens is None:
            self.tokens = torch.zeros(b, 0, dtype=torch.long, device=device)
            self.kind, self.carried = self.tokens.clone(), torch.zeros(b, dtype=torch.long, device=device)
            self.logq = torch.zeros(b, 0, self.legal.shape[1], device=device)
        drafts = _resize(self.tokens, length)
        kind = _resize(self.kind, length)
        logq = _resize(self.logq, length)
        drafted = now.valid[:, :length]
        column = torch.arange(length, device=device)
        entering = drafted & (column >= self.carried[:, None])
        legal = going_on(self.legal[now.positions[:, :length]], self.space.end_id)
        if bool(entering.any()):
            first = int(self.carried.min())
            canvas = tokens.clone()
            carried = drafted & ~entering
            row = torch.arange(b, device=device)[:, None].expand_as(carried)
            canvas[row[carried], now.positions[:, :length][carried]] = drafts[carried]
            new, new_kind = self.init(now, canvas, self.space, first, legal[:, first:], entering[:, first:])
            drafts[:, first:] = torch.where(entering[:, first:], new, drafts[:, first:])
            kind[:, first:] = torch.where(entering[:, first:], new_kind, kind[:, first:])
        self.drafted, self.proposal = drafted, Proposal(drafts, kind, logq, legal)
        return drafts, drafted

    def verify(self, now: Round, logp: Tensor) -> tuple[Tensor, Tensor]:
        proposal = self.proposal
        if proposal.logq.dtype != logp.dtype:
            proposal.logq = proposal.logq.to(logp.dtype)
        onward = going_on(logp, self.space.end_id)
        accepted, ids = self.coupling.step(now, proposal, self.drafted, logp, onward)
        # what lies past the token that follows the accepted drafts is the next iterate, drawn from p or p without an end: q
        shift = accepted + 1
        width = logp.shape[1]
        source = shift[:, None] + torch.arange(width, device=logp.device)
        inside = source.clamp_max(width - 1)
        self.tokens = ids.gather(1, inside)
        self.logq = onward.gather(1, inside[..., None].expand(-1, -1, logp.shape[-1]))
        self.kind = torch.full_like(self.tokens, ROW)
        self.carried = (now.valid.sum(1) - shift).clamp_min(0)
        return accepted, ids

    def keep(self, rows: Tensor) -> None:
        self.tokens, self.logq, self.kind, self.carried = (
            x[rows] for x in (self.tokens, self.logq, self.kind, self.carried)
        )


def _resize(x: Tensor, length: int) -> Tensor:
    """[b, n, ...] cut or zero-padded to [b, length, ...]; a copy."""
    out = x.new_zeros(len(x), length, *x.shape[2:])
    n = min(length, x.shape[1])
    out[:, :n] = x[:, :n]
    return out


@register("sampler", "speculative_jacobi")
@dataclass(frozen=True)
class SpeculativeJacobi(Sampler):
    """Several tokens per forward call, drafted by the model's own previous iterate.

    ``window``: places computed per forward call. ``coupling``: fresh, maximal, gumbel_shared or gumbel. ``init``:
    uniform, random, repeat or repeat_above.
    """

    coupling: str = "gumbel"
    window: int = 64
    init: str = "uniform"

    protocol = "causal"
    reference = "plain autoregression"

    def __post_init__(self) -> None:
        if not isinstance(self.window, int) or isinstance(self.window, bool) or self.window < 1:
            raise bad_value("sampler.window", self.window, "an integer of at least 1")
        registry.get("coupling", self.coupling, "sampler.coupling")
        registry.get("initialiser", self.init, "sampler.init")

    @property
    def exactness(self) -> str:
        return registry.get("coupling", self.coupling).exactness

    def __call__(self, target, draws, *, draft=None, canvas=None, trace=False, callback=None):
        coupling, init = registry.get("coupling", self.coupling)(), registry.get("initialiser", self.init)
        window = min(self.window, target.length)
        drafter = JacobiDrafter(window, coupling, init, target.space, target.legal)
        return decode_causal(target, draws, drafter, trace=trace, callback=callback)


for _preset in (
    Preset("jacobi", "speculative_jacobi", {"coupling": "gumbel", "init": "repeat"}, {"temperature": 0.0},
           "greedy Jacobi decoding: the argmax tokens of plain autoregression", paper="2305.10427"),
    Preset("sjd", "speculative_jacobi", {"coupling": "fresh", "window": 16, "init": "random"},
           about="speculative Jacobi decoding with the paper's window and initialiser", paper="2410.01699"),
    Preset("scd_mc", "speculative_jacobi", {"coupling": "maximal", "window": 64},
           about="speculative coupled decoding, maximal coupling"),
    Preset("scd_gs", "speculative_jacobi", {"coupling": "gumbel_shared", "window": 64},
           about="speculative coupled decoding, Gumbel sharing"),
):
    register("preset", _preset.name)(_preset)
