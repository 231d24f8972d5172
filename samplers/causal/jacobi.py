"""Speculative Jacobi decoding: the drafter is the previous iterate of the model itself. Needs no
training.

Each forward pass computes a window of positions at once; the drafts in it are what the last call
made of them. A ``coupling`` verifies them and makes the next iterate (see ``couplings``), an
``init`` fills positions that enter the window (see ``initialisers``).

Teng et al., "Accelerating Auto-regressive Text-to-Image Generation with Training-free Speculative
Jacobi Decoding" (arXiv 2410.01699); "Speculative Coupled Decoding" (arXiv 2510.24211); Wiggers &
Hoogeboom, "Predictive Sampling with Forecasting Autoregressive Models" (arXiv 2002.09928).

Guarantee, for every window, initialiser and batch: couplings ``fresh``, ``maximal`` and
``gumbel_shared`` sample from the model's distribution; ``gumbel`` gives the very tokens of plain
autoregression with the same seed. ``window`` 1 is plain autoregression in all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gen.core.registry import register, registry
from gen.core.sampler import Preset, Sampler
from gen.models.targets.base import StepOutput, legal_at
from gen.samplers.causal.couplings import without_eos
from gen.samplers.engine.causal_loop import CausalStep, Draft, Verdict, decode_causal
from gen.samplers.engine.host import to_device
from gen.samplers.engine.rows import RowState
from gen.samplers.engine.window import AUTO, AutoWidth, Windowed, checked, width_of
from gen.samplers.verifiers.base import ROW, Proposal


class JacobiDrafter(Windowed):
    """Drafter that holds the iterate: drafts, and the distribution each came from if the coupling
    compares distributions, for the positions after the last committed token."""

    # the first `carried` of the drafts below are carried over from the last step, int64 [b]
    carried = RowState(start=0)
    tokens = RowState()  # [b, n]
    logq: RowState = RowState()  # their distributions [b, n, V]
    kind = RowState()  # and which kind those are, [b, n]

    def __init__(self, window: int | AutoWidth, coupling, init, space, legal: Tensor):
        super().__init__(window)
        self.coupling, self.init, self.space, self.legal = coupling, init, space, legal
        self._nothing_legal = legal[None, :0]  # bool [1, 0, V]

    def propose(self, step: CausalStep, tokens: Tensor) -> Draft:
        b, width = step.positions.shape
        length = min(self.window - 1, width)
        if self.carried is None:
            self.carried = np.zeros(b, dtype=np.int64)
            self.tokens = torch.zeros(b, 0, dtype=torch.long, device=tokens.device)
            self.kind, self.logq = (
                self.tokens,
                torch.zeros(b, 0, self.legal.shape[1], device=tokens.device),
            )
        drafts, drafted = _resize(self.tokens, length), step.valid[:, :length]
        compares = self.coupling.compares
        kind, logq, legal = self.kind, self.logq, self._nothing_legal
        if compares:
            kind, logq = _resize(kind, length), _resize(logq, length)
            if length:
                legal = self._legal(step.positions[:, :length])
        room = np.minimum(step.widths, length)
        if (self.carried < room).any():
            first = int(self.carried.min())
            entering = drafted[:, first:] & to_device(
                np.arange(first, length) >= self.carried[:, None], tokens.device
            )

            def canvas() -> Tensor:
                """Join committed tokens and drafts so far, [b, T]."""
                carried = torch.cat([drafted[:, :first], drafted[:, first:] & ~entering], 1)
                total = tokens.shape[1]  # what is not carried goes to a position behind all others
                at = torch.where(carried, step.positions[:, :length], total)
                return torch.cat([tokens, tokens[:, :1]], 1).scatter_(1, at, drafts)[:, :total]

            here = legal[:, first:] if compares else self._legal(step.positions[:, first:length])
            new, new_kind = self.init(step, canvas, self.space, first, here, entering)
            drafts[:, first:] = torch.where(entering, new, drafts[:, first:])
            if compares:
                kind[:, first:] = torch.where(entering, new_kind, kind[:, first:])
        self.drafted, self.proposal = drafted, Proposal(drafts, kind, logq, legal)
        return Draft(drafts, drafted)

    def _legal(self, positions: Tensor) -> Tensor:
        """Look up the tokens that may be drafted at positions [b, n]: bool [b, n, V]."""
        return without_eos(legal_at(self.legal, positions), self.space.eos_token_id)

    def verify(self, step: CausalStep, output: StepOutput) -> Verdict:
        proposal, logp = self.proposal, output.logprobs
        if not self.drafted.shape[1]:
            ids = step.categorical(logp, "token", step.valid, shared=True)
            return Verdict(torch.zeros_like(step.start), ids)
        compares = self.coupling.compares
        if compares and proposal.logq.dtype != logp.dtype:
            proposal.logq = proposal.logq.to(logp.dtype)
        next_logprobs = without_eos(logp, self.space.eos_token_id)
        verdict = self.coupling.step(step, proposal, self.drafted, logp, next_logprobs)
        accepted, ids = verdict.num_accepted, verdict.tokens
        # what lies past the token that follows the accepted drafts is the next iterate, drawn from
        # p or p without an end: q
        width = logp.shape[1]
        inside = (accepted[:, None] + torch.arange(1, width + 1, device=logp.device)).clamp_max_(
            width - 1
        )
        self.tokens = ids.gather(1, inside)
        if compares:
            # one distribution less while the next one is made
            self.logq = None
            del self.proposal, proposal
            self.logq = next_logprobs.gather(1, inside[..., None].expand(-1, -1, logp.shape[-1]))
            self.kind = torch.full_like(self.tokens, ROW)
        return verdict

    def observe(self, step: CausalStep, num_accepted: np.ndarray, num_drafted: np.ndarray) -> None:
        super().observe(step, num_accepted, num_drafted)
        self.carried = np.maximum(step.widths - num_accepted - 1, 0)


def _resize(x: Tensor, length: int) -> Tensor:
    """[b, n, ...] cut, or a copy padded with zeros, to [b, length, ...]."""
    if x.shape[1] >= length:
        return x[:, :length]
    out = x.new_zeros(len(x), length, *x.shape[2:])
    n = min(length, x.shape[1])
    out[:, :n] = x[:, :n]
    return out


@register("sampler", "speculative_jacobi")
@dataclass(frozen=True)
class SpeculativeJacobi(Sampler):
    """Several tokens per forward pass, drafted by the model's own previous iterate.

    ``window``: positions computed per forward pass, or auto: as many as make the time per token
    least (``auto_width``). ``coupling``: fresh, maximal, gumbel_shared or gumbel. ``init``:
    uniform, random, repeat or repeat_above.
    """

    coupling: str = "gumbel"
    window: int | str = 64
    init: str = "uniform"

    papers = ("2410.01699", "2002.09928")
    protocol = "causal"
    reference = "plain autoregression"

    def __post_init__(self) -> None:
        checked(self.window, "sampler.window")
        registry.get("coupling", self.coupling, "sampler.coupling")
        registry.get("initialiser", self.init, "sampler.init")

    @property
    def guarantee(self) -> str:
        return registry.get("coupling", self.coupling).guarantee

    @property
    def timed(self) -> bool:
        return self.window == AUTO

    def __call__(self, target, rng, *, draft=None, canvas=None, trace=False, callback=None):
        coupling, init = (
            registry.get("coupling", self.coupling)(),
            registry.get("initialiser", self.init),
        )
        drafter = JacobiDrafter(
            width_of(self.window, self, target), coupling, init, target.space, target.legal
        )
        return decode_causal(target, rng, drafter, trace=trace, callback=callback)


for _preset in (
    Preset(
        "jacobi",
        "speculative_jacobi",
        {"coupling": "gumbel", "init": "repeat"},
        {"temperature": 0.0},
        "greedy Jacobi decoding: the argmax tokens of plain autoregression",
        paper="2305.10427",
    ),
    Preset(
        "sjd",
        "speculative_jacobi",
        {"coupling": "fresh", "window": 16, "init": "random"},
        about="speculative Jacobi decoding with the paper's window and initialiser",
        paper="2410.01699",
    ),
    Preset(
        "scd_mc",
        "speculative_jacobi",
        {"coupling": "maximal", "window": 64},
        about=(
            "speculative coupled decoding, maximal coupling; its scripts have a window of 32 and"
            " random drafts"
        ),
        paper="2510.24211",
    ),
    Preset(
        "scd_gs",
        "speculative_jacobi",
        {"coupling": "gumbel_shared", "window": 64},
        about=(
            "speculative coupled decoding, Gumbel sharing; its scripts have a window of 32 and"
            " random drafts"
        ),
        paper="2510.24211",
    ),
):
    register("preset", _preset.name)(_preset)
