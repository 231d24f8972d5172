"""Drafts along an order that looks at marginals alone: what the lossless decoders of masked models
share.

S(x): the k empty places of canvas x with the highest score under the laws p(. | x) of the places,
read off before any id is drawn. Sequential decoding fills S(x), asks for p at the new canvas, and
so on. A chain runs ahead of it:

    chain     x_0 = x, what is certain; x_j = x_j-1 and k more ids, drawn from a law q known before,
              at the places that q puts next
    call      p(. | x_0), ..., p(. | x_n), n < num_drafts, for all rows of the batch in one forward
              call
    judge     j = 0, 1, ...: is S(x_j) the places of the next draft, and does a method keep its ids
              under p(. | x_j)? Stop at the first no
    commit    the drafts kept, and ids at S(x_j) for the j it stopped at, whose law is there
              already. The next chain has q = p(. | x_j)

So every call commits k places at least (the last one what is left), and there are never more calls
than in sequential decoding. The order is asked before the ids of a draft are looked at: a draft
that is dropped because of its place says nothing about its ids, which is what keeps the law. An
order that looked at the drawn ids could not be asked first, so it is refused; with noise of the
place it would change the law even without any drafts.

Orders: ``confidence`` (or ``top``, the highest probability of a place; here nothing is drawn yet
that it could be the probability of), ``margin``, ``entropy``, and those that look at no law,
``random``, ``halton`` and ``raster`` (``orders``). ``confidence_on``: at temperature 0 the final
law is one id everywhere, and all places are equally sure under it; the order then says something
only of the ``raw`` law.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from gen.core.errors import GenError, bad_value, unknown
from gen.core.registry import registry
from gen.core.rng import RNG
from gen.core.sampler import Sampler
from gen.core.stats import SampleOutput, Stats, TraceStep
from gen.samplers.engine.causal_loop import CausalStep
from gen.samplers.masked.loop import check_canvas
from gen.samplers.masked.parts.orders import BLIND
from gen.samplers.masked.step import MaskedStep, Seats, ranked
from gen.samplers.verifiers.base import ROW, Proposal

ORDERS = ("confidence", "top", "margin", "entropy", *BLIND)


def marginal_order(name: str):
    """The order of that name as a function of a ``Step``. Raises ``GenError`` for one that looks at
    drawn ids, and for an unknown one."""
    if name in ORDERS:
        return registry.get("order", "top" if name == "confidence" else name)
    if isinstance(name, str) and name in registry.table("order"):
        raise bad_value(
            "sampler.order",
            name,
            f"an order that does not look at the ids drawn: {', '.join(ORDERS)}",
        )
    raise unknown("order", name, ORDERS, "sampler.order")


@dataclass(frozen=True)
class ChainSampler(Sampler):
    """A method of judging chains, and the knobs all of them have: ``num_drafts``, canvases per row
    and call; ``order``; ``confidence_on``, ``raw`` (the model's own law) or ``shaped`` (with
    temperature and filters)."""

    num_drafts: int = 4
    order: str = "confidence"
    confidence_on: str = "raw"

    protocol = "masked"
    kinds = ("codes",)
    reference = "one place per step in the same order"

    def __post_init__(self) -> None:
        at_least_one("num_drafts", self.num_drafts)
        marginal_order(self.order)
        if self.confidence_on not in ("raw", "shaped"):
            raise bad_value("sampler.confidence_on", self.confidence_on, "raw or shaped")

    @property
    def width(self) -> int:
        """k, places per step."""
        return 1

    @abstractmethod
    def draft(self, step: CausalStep, logprobs: Tensor) -> Tensor:
        """Ids [b, L] from the law [b, L, V] of the places ``now.positions`` [b, L], where
        ``now.valid``."""

    @abstractmethod
    def judge(self, step: CausalStep, drafts: Proposal, logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """``drafts``: L = n k of them, n at least 1, at ``now.positions`` [b, L]; ``law`` [b, L,
        V]: of each place given the drafts before its step; ``now.valid`` [b, L]: those whose turn
        it is if the ones before are kept. Returns how many steps are kept [b], and an id for the
        draft after them [b], or -1 to have one drawn from the law at the places whose turn it is.
        An id needs k = 1.
        """

    def __call__(
        self, target, rng, *, draft=None, canvas: Tensor | None = None, trace=False, callback=None
    ):
        return decode_chains(target, rng, self, canvas=canvas, trace=trace, callback=callback)


def at_least_one(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise bad_value(f"sampler.{name}", value, "an integer of at least 1")


@dataclass
class _Chain:
    """Drafts of b rows: ``places`` and ``ids`` [b, n, k], the law ``logq`` [b, n k, V] that they
    are from, and ``steps`` [b], how many of the n a row has. Those past ``steps`` mean nothing."""

    positions: Tensor
    ids: Tensor
    logq: Tensor
    steps: Tensor

    def canvases(self, canvas: Tensor) -> tuple[Tensor, Tensor]:
        """x_0, ..., x_n [b, n + 1, T], and which of them exist, bool [b, n + 1]."""
        out = [canvas]
        for positions, ids in zip(self.positions.unbind(1), self.ids.unbind(1), strict=True):
            out.append(out[-1].scatter(1, positions, ids))
        return (
            torch.stack(out, 1),
            torch.arange(len(out), device=canvas.device) <= self.steps[:, None],
        )


def decode_chains(
    target,
    rng: RNG,
    method: ChainSampler,
    *,
    canvas: Tensor | None = None,
    trace: bool = False,
    callback=None,
) -> SampleOutput:
    """Fills the empty places of ``canvas`` long [B, T], by default all. Raises ``GenError`` for
    latents, for a space without a mask id, and for a canvas that the space does not allow."""
    began = time.perf_counter()
    space, batch, device, k = target.space, target.items, target.device, method.width
    if space.channels:
        raise GenError(
            f"{type(method).__name__} compares probabilities of ids; this model makes latents,"
            " which have none; expected one of codes"
        )
    if space.mask_token_id is None:
        raise GenError(
            f"{type(method).__name__} needs a token space with a mask id; this model has none"
        )
    canvas = space.empty(batch, device) if canvas is None else canvas.to(device).clone()
    check_canvas(canvas, batch, target.legal, space)
    wanted = space.is_masked(canvas).sum(1)
    seats = Seats(target, wanted > 0)
    round_ = torch.zeros_like(seats.rows)
    none = round_.new_zeros(len(round_), 0, k)
    chain = _Chain(
        none, none, torch.zeros(len(round_), 0, target.legal.shape[1], device=device), round_
    )
    book, step = _Book(batch, trace), 0
    while len(rows := seats.rows):
        old, index = canvas[rows], torch.arange(len(rows), device=device)
        states, exists = chain.canvases(old)
        of = exists.nonzero()[:, 0]
        logprobs, to_device = target.predict(states[exists], of)
        flat = torch.zeros_like(
            exists, dtype=torch.long
        )  # which of the canvases sent is x_j of a row
        flat[exists] = torch.arange(len(of), device=device)
        score, empty = _score(method, target, rng, rows[of], round_[of], states[exists], logprobs)
        turn = ranked(score, empty).argsort(1)[:, :k]  # S of every canvas
        accepted, given = _judged(
            method, rng, rows, round_, chain, exists, turn[flat], logprobs, flat
        )
        # the law at the canvas where the chain stopped is there already
        last = flat.gather(1, accepted[:, None])[:, 0]
        before, logprobs, score, top, due = (
            states[index, accepted],
            logprobs[last],
            score[last],
            turn[last],
            empty[last],
        )
        fixed = given >= 0
        if bool(fixed.any()):
            top[fixed] = chain.positions[index[fixed], accepted[fixed]]
        due = due.gather(1, top)  # fewer than k are empty at the end
        drawn = rng.categorical(_at(logprobs, top), rows, top, "token", None, due & ~fixed[:, None])
        drawn = torch.where(
            fixed[:, None], given[:, None], torch.where(due, drawn, before.gather(1, top))
        )
        canvas[rows] = before.scatter(1, top, drawn)
        step += 1
        book.add(
            rows,
            space.is_masked(old),
            space.is_masked(canvas[rows]),
            canvas[rows],
            chain,
            accepted,
            torch.zeros_like(rows).index_add_(
                0, of, torch.as_tensor(to_device, device=device).expand(len(of))
            ),
        )
        if callback:
            known = ~space.is_masked(canvas)
            callback(
                {
                    "step": step,
                    "done": int(known.sum()),
                    "total": known.numel(),
                    "tokens": canvas,
                    "known": known,
                }
            )
        fresh = torch.zeros_like(fixed)
        if moved := seats.leave(~space.is_masked(canvas[rows]).any(1)):
            fresh, left = moved
            fresh, round_, logprobs, score = fresh[left], round_[left], logprobs[left], score[left]
        if len(rows := seats.rows):
            chain = _drafted(
                method, rng, rows, round_, logprobs, score, space.is_masked(canvas[rows]), fresh
            )
            round_ = (round_ + 1).masked_fill(fresh, 0)
    return book.output(canvas, wanted.tolist(), time.perf_counter() - began)


def _at(logprobs: Tensor, positions: Tensor) -> Tensor:
    """The law [b, T, V] at places [b, L]: [b, L, V]."""
    return logprobs[torch.arange(len(logprobs), device=logprobs.device)[:, None], positions]


def _score(method, target, rng, rows, round_, canvases, logprobs) -> tuple[Tensor, Tensor]:
    """The scores float64 [m, T] of m canvases, and their empty places, bool [m, T]."""
    empty = target.space.is_masked(canvases)
    no = torch.zeros_like(empty)
    step = MaskedStep(
        rng,
        rows,
        round_,
        target.space,
        method,
        canvases,
        no,
        empty,
        ~no,
        logprobs,
        getattr(target, "raw", None),
        {},
        no.double(),
    )
    return marginal_order(method.order)(step), empty


def same_places(turn: Tensor, positions: Tensor) -> Tensor:
    """Whether two times k places [..., k] are the same, in whatever order: bool [...]."""
    return (turn.sort(-1).values == positions.sort(-1).values).all(-1)


def _judged(
    method, rng, rows, round_, chain: _Chain, exists, turn, logprobs, flat
) -> tuple[Tensor, Tensor]:
    """Steps of the chain that are kept [b], and an id for the draft after them [b], or -1."""
    b, n, k = chain.positions.shape
    if not n:
        return torch.zeros_like(rows), torch.full_like(rows, -1)
    follows = (exists[:, 1:] & same_places(turn[:, :n], chain.positions)).long().cumprod(1).bool()

    def wide(x):
        return x.repeat_interleave(k, 1)

    positions, ids = chain.positions.view(b, n * k), chain.ids.view(b, n * k)
    step = CausalStep(rng, rows, round_, torch.zeros_like(rows), positions, wide(follows))
    drafts = Proposal(ids, torch.full_like(ids, ROW), chain.logq, chain.logq > -torch.inf)
    return method.judge(step, drafts, logprobs[wide(flat[:, :n]), positions])


def _drafted(method, rng, rows, round_, logprobs, score, empty, fresh) -> _Chain:
    """The next chain, from a law [b, T, V] and scores [b, T] known before; none in rows that are
    ``fresh`` (bool [b]), whose law is not known. The last step is never drafted: nothing comes
    after it."""
    k = method.width
    steps = ((empty.sum(1) - 1) // k).clamp_max(method.num_drafts - 1).masked_fill(fresh, 0)
    n = int(steps.max())
    positions = ranked(score, empty).argsort(1)[:, : n * k]
    active = torch.arange(n * k, device=logprobs.device) < steps[:, None] * k
    logq = _at(logprobs, positions)
    ids = method.draft(
        CausalStep(rng, rows, round_, torch.zeros_like(rows), positions, active), logq
    )
    return _Chain(positions.view(len(rows), n, k), ids.view(len(rows), n, k), logq, steps)


class _Book:
    """Statistics and traces per row."""

    def __init__(self, batch: int, trace: bool):
        self.computed, self.drafted = [0] * batch, [0] * batch
        self.kept: list[list[int]] = [[] for _ in range(batch)]  # drafts, call by call
        self.traces: list[list[TraceStep]] | None = [[] for _ in range(batch)] if trace else None

    def add(
        self,
        rows: Tensor,
        empty: Tensor,
        still: Tensor,
        canvas: Tensor,
        chain: _Chain,
        accepted: Tensor,
        computed: Tensor,
    ) -> None:
        """Places [b, T] that were ``empty`` before the call and ``still`` are, ``canvas`` [b, T]
        after it; places ``computed`` [b]."""
        k = chain.positions.shape[2]
        for i, (row, steps, to_device) in enumerate(
            zip(rows.tolist(), accepted.tolist(), computed.tolist(), strict=True)
        ):
            self.computed[row] += to_device
            self.drafted[row] += int(chain.steps[i]) * k
            self.kept[row].append(steps * k)
            if self.traces is not None:
                window, ids = empty[i].nonzero()[:, 0].tolist(), canvas[i].tolist()
                filled = (empty[i] & ~still[i]).nonzero()[:, 0].tolist()
                self.traces[row].append(
                    TraceStep(
                        window,
                        chain.positions[i, :steps].flatten().tolist(),
                        {n: ids[n] for n in filled},
                    )
                )

    def output(self, canvas: Tensor, wanted: list[int], seconds: float) -> SampleOutput:
        memory = (
            torch.cuda.max_memory_allocated(canvas.device) if canvas.device.type == "cuda" else None
        )
        stats = [
            Stats(
                nfe=len(kept),
                tokens=tokens,
                tokens_computed=computed,
                mean_acceptance_length=tokens / len(kept) if kept else 0.0,
                draft_acceptance_rate=sum(kept) / drafted if drafted else None,
                acceptance_histogram=(
                    [kept.count(k) for k in range(max(kept) + 1)] if drafted else []
                ),
                seconds=seconds / len(canvas),
                peak_memory=memory,
            )
            for kept, tokens, computed, drafted in zip(
                self.kept, wanted, self.computed, self.drafted, strict=True
            )
        ]
        return SampleOutput(canvas, stats, self.traces)
