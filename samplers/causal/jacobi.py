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

from gen.core.errors import bad_value
from gen.core.method import Limit
from gen.core.registry import register, registry
from gen.core.sampler import Preset, Sampler
from gen.core.token_space import TokenSpace
from gen.models.targets.base import StepOutput, legal_at
from gen.models.targets.causal import CausalTarget
from gen.samplers.causal.couplings import Coupling, Fresh, without_eos
from gen.samplers.causal.initialisers.base import Entering, Initialiser
from gen.samplers.engine.causal_loop import CausalStep, Draft, Verdict, decode_causal
from gen.samplers.engine.host import to_device
from gen.samplers.engine.rows import RowState, RowStore
from gen.samplers.engine.window import AUTO, AutoWidth, Windowed, checked, width_of
from gen.samplers.verifiers.base import ROW, PositionVerifier, Proposal


class JacobiDrafter(Windowed):
    """Drafter that holds the iterate: drafts, and the distribution each came from if the coupling
    compares distributions, for the positions after the last committed token."""

    # the first `carried` of the drafts below are carried over from the last step, int64 [b]
    carried = RowState(start=0)
    tokens = RowState()  # [b, n]
    logq: RowState = RowState()  # their distributions [b, n, V]
    kind = RowState()  # and which kind those are, [b, n]
    before = RowState()  # with a ``trend``: what the target said there last, [b, n, V]
    num_before = RowState(start=0)  # how many of them there are, int64 [b]

    def __init__(
        self,
        window: int | AutoWidth,
        coupling: Coupling,
        init: Initialiser,
        space: TokenSpace,
        legal: Tensor,
        trend: float = 0.0,
    ):
        super().__init__(window)
        self.coupling, self.init, self.space, self.legal = coupling, init, space, legal
        self.targets, self.trend = init.targets, trend
        self._nothing_legal = legal[None, :0]  # bool [1, 0, V]

    @property
    def stores(self) -> tuple[RowStore, ...]:
        return (self.store, *self.init.stores)

    @property
    def nfe(self) -> list[int] | None:
        return self.init.nfe

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
        compares, redrafts = self.coupling.compares, self.init.redrafts
        kind, logq, legal = self.kind, self.logq, self._nothing_legal
        if compares or redrafts:
            kind, logq = _resize(kind, length), _resize(logq, length)
        if compares and length:
            legal = self._legal(step.positions[:, :length])
        room, failed = np.minimum(step.widths, length), None
        if length and (redrafts or (self.carried < room).any()):
            entering = self._entering(step, tokens, drafts, drafted, legal)
            if redrafts:
                entering.logp = logq
            filled, first, active = self.init.fill(entering), entering.first, entering.active
            drafts[:, first:] = torch.where(active, filled.tokens, drafts[:, first:])
            if filled.failed is not None:
                failed = torch.zeros_like(drafted)
                failed[:, first:] = filled.failed
            if compares:
                kind[:, first:] = torch.where(active, filled.kind, kind[:, first:])
            if compares and filled.logq is not None:
                logq = logq.to(torch.promote_types(logq.dtype, filled.logq.dtype))
                new = filled.logq.to(logq.dtype)
                logq[:, first:] = torch.where(active[..., None], new, logq[:, first:])
        self.drafted, self.proposal = drafted, Proposal(drafts, kind, logq, legal)
        if failed is None and self.targets:
            failed = torch.zeros_like(drafted)
        return Draft(drafts, drafted, failed=failed)

    def _entering(
        self, step: CausalStep, tokens: Tensor, drafts: Tensor, drafted: Tensor, legal: Tensor
    ) -> Entering:
        """Describe the positions that are to be drafted.

        Args:
            step: context of the step.
            tokens: committed tokens [b, T].
            drafts: drafts so far [b, L].
            drafted: drafts that a row has or gets, bool [b, L].
            legal: allowed tokens of the drafts [b, L, V], where the coupling compares.
        """
        length = drafts.shape[1]
        begins, ends = np.minimum(self.carried, length), np.minimum(step.widths, length)
        entering = drafted & to_device(np.arange(length) >= begins[:, None], tokens.device)

        def canvas() -> Tensor:
            """Join committed tokens and drafts so far, [b, T]."""
            total = tokens.shape[1]  # what is not carried goes to a position behind all others
            at = torch.where(drafted & ~entering, step.positions[:, :length], total)
            return torch.cat([tokens, tokens[:, :1]], 1).scatter_(1, at, drafts)[:, :total]

        first = 0 if self.init.redrafts else int(begins.min())
        active = drafted if self.init.redrafts else entering[:, first:]
        compares = self.coupling.compares
        here = legal[:, first:] if compares else self._legal(step.positions[:, first:length])
        return Entering(step, first, begins, ends, active, here, compares, tokens, canvas)

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
        next_logprobs = said = without_eos(logp, self.space.eos_token_id)
        if self.trend:
            next_logprobs = self._extrapolated(said)
        verdict = self.coupling.step(step, proposal, self.drafted, logp, next_logprobs)
        accepted, ids = verdict.num_accepted, verdict.tokens
        # what lies past the token that follows the accepted drafts is the next iterate, drawn from
        # p or p without an end: q
        width = logp.shape[1]
        inside = (accepted[:, None] + torch.arange(1, width + 1, device=logp.device)).clamp_max_(
            width - 1
        )
        self.tokens = ids.gather(1, inside)
        if self.trend:
            self.before = said.gather(1, inside[..., None].expand(-1, -1, logp.shape[-1]))
        if compares or self.init.redrafts:
            # one distribution less while the next one is made
            self.logq = None
            del self.proposal, proposal
            self.logq = next_logprobs.gather(1, inside[..., None].expand(-1, -1, logp.shape[-1]))
            self.kind = torch.full_like(self.tokens, ROW)
        return verdict

    def _extrapolated(self, logp: Tensor) -> Tensor:
        """Raise what rose since the target was last asked: log norm(p (p / before) ** trend), and p
        where it was not asked. Tokens without mass before or now keep what they have."""
        before = self.before
        if before is None:
            return logp
        before = _resize(before, logp.shape[1])
        rise = torch.where(logp.isfinite() & before.isfinite(), logp - before, 0.0)
        column = torch.arange(logp.shape[1], device=logp.device)
        is_known = column < to_device(self.num_before, logp.device)[:, None]
        moved = (logp + self.trend * rise).log_softmax(-1)
        return torch.where(is_known[..., None], moved, logp)

    def observe(self, step: CausalStep, num_accepted: np.ndarray, num_drafted: np.ndarray) -> None:
        super().observe(step, num_accepted, num_drafted)
        self.carried = np.maximum(step.widths - num_accepted - 1, 0)
        if self.trend:
            self.num_before = self.carried


def _resize(x: Tensor, length: int) -> Tensor:
    """[b, n, ...] cut, or a copy padded with zeros, to [b, length, ...]."""
    if x.shape[1] >= length:
        return x[:, :length]
    out = x.new_zeros(len(x), length, *x.shape[2:])
    n = min(length, x.shape[1])
    out[:, :n] = x[:, :n]
    return out


def _is_number(x: object) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


@register("sampler", "speculative_jacobi")
@dataclass(frozen=True)
class SpeculativeJacobi(Sampler):
    """Several tokens per forward pass, drafted by the model's own previous iterate.

    ``window``: positions computed per forward pass, or auto: as many as make the time per token
    least (``auto_width``). ``coupling``: fresh, maximal, gumbel_shared or gumbel. ``init``:
    uniform, random, repeat, repeat_above, model, table or model_table.

    Of model and model_table: ``draft_model``, a model's name; None for the modality's own.
    ``draft_rounds``: its forward passes per round at most; None for as many as change a draft.

    Of table and model_table: ``table``, a table's file or the name of the model that it lies
    beside, or empty; None for the one beside the model's weights.

    ``keep_threshold``, of the coupling fresh: drafts past the first rejection stay if they would be
    accepted with a higher probability; 1 keeps none. ``trend``: power of a token's rise since the
    target was last asked, by which the next iterate's distribution is multiplied.

    Of these three: ``redraft``, whether the drafts that are carried on are corrected as well; None
    where the coupling keeps the noise of positions (gumbel, gumbel_shared), the others cannot.
    """

    coupling: str = "gumbel"
    window: int | str = 64
    init: str = "uniform"
    draft_model: str | None = None
    draft_rounds: int | None = 3
    redraft: bool | None = None
    table: str | None = None
    keep_threshold: float = 1.0
    trend: float = 0.0

    papers = ("2410.01699", "2002.09928")
    protocol = "causal"
    reference = "plain autoregression"

    def __post_init__(self) -> None:
        checked(self.window, "sampler.window")
        coupling = registry.get("coupling", self.coupling, "sampler.coupling")
        registry.get("initialiser", self.init, "sampler.init")
        rounds, model = self.draft_rounds, self.draft_model
        if model is not None and not isinstance(model, str):
            raise bad_value(
                "sampler.draft_model",
                model,
                "the name of a model, or None for the modality's own",
            )
        if rounds is not None and (type(rounds) is not int or rounds < 1):
            raise bad_value("sampler.draft_rounds", rounds, "an integer of at least 1, or None")
        if not _is_number(self.keep_threshold) or not 0 <= self.keep_threshold <= 1:
            raise bad_value(
                "sampler.keep_threshold", self.keep_threshold, "a number between 0 and 1"
            )
        if self.keep_threshold < 1 and self.coupling != "fresh":
            raise bad_value(
                "sampler.keep_threshold",
                self.keep_threshold,
                f"1, because the coupling {self.coupling} has a rule of its own; fresh has none",
            )
        if not _is_number(self.trend) or not 0 <= self.trend < float("inf"):
            raise bad_value("sampler.trend", self.trend, "a finite number of at least 0")
        if self.table is not None and not isinstance(self.table, str):
            raise bad_value(
                "sampler.table", self.table, "a file, the name of a model, empty, or None"
            )
        if self.redraft is not None and not isinstance(self.redraft, bool):
            raise bad_value("sampler.redraft", self.redraft, "true, false or None")
        if self.redraft and not coupling.keeps_noise:
            raise bad_value(
                "sampler.redraft",
                self.redraft,
                f"false or None, because the coupling {self.coupling} draws drafts with new noise;"
                " gumbel and gumbel_shared keep that of their positions",
            )

    @property
    def redrafts(self) -> bool:
        """True where a draft model corrects drafts that are carried on."""
        keeps_noise = registry.get("coupling", self.coupling).keeps_noise
        return keeps_noise if self.redraft is None else self.redraft

    @property
    def guarantee(self) -> str:
        if self.keep_threshold < 1:
            return "approximate"
        return registry.get("coupling", self.coupling).guarantee

    @property
    def drafted(self) -> bool:
        return registry.get("initialiser", self.init).needs_draft_model

    @property
    def timed(self) -> bool:
        return self.window == AUTO

    def drafter(
        self,
        target: CausalTarget,
        draft: CausalTarget | None,
        verifier: PositionVerifier | None = None,
        window: int | AutoWidth | None = None,
    ) -> JacobiDrafter:
        """Make the drafter of one call.

        Args:
            target: the model.
            draft: target of the draft model, where ``init`` needs one.
            verifier: decides which drafts are accepted; None for the coupling's own.
            window: window of the drafter; None for that of the parameters.
        """
        coupling = registry.get("coupling", self.coupling)
        init = registry.get("initialiser", self.init).make(self, target, draft)
        coupling = coupling() if verifier is None else coupling(verifier)
        if isinstance(coupling, Fresh):
            coupling.keep_threshold = self.keep_threshold
        return JacobiDrafter(
            width_of(self.window, self, target) if window is None else window,
            coupling,
            init,
            target.space,
            target.legal,
            self.trend,
        )

    def __call__(self, target, rng, *, draft=None, canvas=None, trace=False, callback=None):
        drafter = self.drafter(target, draft)
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
    Preset(
        "sjd_pp",
        "speculative_jacobi",
        {"coupling": "fresh", "keep_threshold": 0.5},
        about=(
            "keeps confident drafts past the first rejection; a kept draft does not come from the"
            " distribution it is judged by, so the rule is not exact (scd_mc keeps drafts exactly)"
        ),
        paper="2512.07503",
        limit=Limit("plain autoregression", {"keep_threshold": 1.0}),
    ),
    Preset(
        "sjd_vp",
        "speculative_jacobi",
        {"coupling": "gumbel_shared", "trend": 0.1},
        about=(
            "favours tokens whose probability rises from pass to pass, after the paper's abstract:"
            " in the next iterate and its distribution alone, so the rule is exact"
        ),
        paper="2603.27115",
        limit=Limit("plain autoregression", {"trend": 0.0}),
    ),
):
    register("preset", _preset.name)(_preset)
