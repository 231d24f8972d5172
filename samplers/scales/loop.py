"""Scale loop: what the samplers of next-scale models share.

Rows move in lockstep from scale to scale. A method decides the tokens of one scale in one or more
passes; the loop holds the tokens of all scales, keeps those that the caller's canvas knows, counts
the passes of every row, and reports them.

A row takes part in the passes of a scale where it has a position to decide. Of a model that keeps
the keys of earlier scales it also takes part in all scales before that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gen.contracts.layout_orders import halton_cells
from gen.core.errors import GenError
from gen.core.rng import RNG
from gen.core.stats import SampleOutput
from gen.models.targets.base import StepOutput
from gen.models.targets.scales import ScalesTarget
from gen.samplers.engine.failed import failed_draws, first_failed, refuse_failed
from gen.samplers.engine.stats import Counts, StatsRecorder
from gen.samplers.masked.batch import check_canvas

PURPOSE = "scale"  # of draws from the distribution of a pass


class ScalesRun:
    """State of one call of a sampler.

    Attributes:
        target: the target, whose rows are all items.
        rng: random numbers by item and position.
        tokens: long [B, T]; of positions that are not known, any.
        known: positions whose token is final, bool [B, T].
        prefilled: positions that the caller's canvas held, bool [B, T].
        rows: numbers of the rows, long [B].
        recorder: statistics and traces.

    Args:
        target: target of the items.
        rng: random numbers by item and position.
        canvas: tokens long [B, T], masked where a token is wanted; None means masked everywhere.
        trace: whether to record the positions of every pass.
        callback: called after every pass.

    Raises:
        GenError: the token space does not allow the canvas.
    """

    def __init__(
        self,
        target: ScalesTarget,
        rng: RNG,
        canvas: Tensor | None = None,
        trace: bool = False,
        callback: Callable[[dict[str, Any]], None] | None = None,
    ):
        self.began, space = time.perf_counter(), target.space
        self.target, self.rng, self.callback = target, rng, callback
        self.tokens = target.blank()
        self.known = torch.zeros_like(self.tokens, dtype=torch.bool)
        if canvas is not None:
            canvas = canvas.to(target.device)
            check_canvas(canvas, target.items, target.legal, space)
            self.known = ~space.is_masked(canvas)
            self.tokens = canvas.masked_fill(~self.known, 0)
        self.prefilled, self.steps = self.known.clone(), 0
        self.rows = torch.arange(target.rows, device=target.device)
        self.recorder = StatsRecorder(target.items, trace)
        # rows that take part in the passes of each scale, bool [B, S]
        self.wanted = torch.stack([~self.known[:, s].all(1) for s in target.slices], 1)
        self.taking = self.wanted
        if not target.model.markov:
            self.taking = self.wanted.flip(1).cummax(1).values.flip(1)

    @property
    def here(self) -> slice:
        """Positions of the scale that is decoded now."""
        return self.target.here

    @property
    def positions(self) -> Tensor:
        """Positions of the scale, long [B, n_k]."""
        at = torch.arange(self.here.start, self.here.stop, device=self.target.device)
        return at.expand(len(self.rows), -1)

    def some(self, rows: Tensor) -> Tensor | None:
        """Return different rows, long [n], as targets take them: None where they are all."""
        return None if len(rows) == len(self.rows) else rows

    def is_over(self) -> bool:
        """Return True where no row takes part in this or a later scale."""
        return not bool(self.taking[:, self.target.scale :].any())

    def draw(
        self,
        logprobs: Tensor,
        number: int,
        active: Tensor,
        rows: Tensor | None = None,
        otherwise: Tensor | None = None,
    ) -> Tensor:
        """Draw tokens of the scale: long [n, n_k].

        Args:
            logprobs: log-probabilities [n, n_k, V].
            number: number of the pass in its scale, the round of the random numbers.
            active: positions to draw, bool [n, n_k].
            rows: rows whose scales these are, long [n]; None means all.
            otherwise: tokens of the other positions, long [n, n_k]; None for those of the run.

        Raises:
            GenError: a distribution is none.
        """
        rows = self.rows if rows is None else rows
        positions, round = self.positions[rows], torch.full_like(rows, number)
        drawn = self.rng.categorical(logprobs, rows, positions, PURPOSE, round, active)
        failed = first_failed(failed_draws(drawn, logprobs) & active).cpu()
        shifted = torch.where(failed < 0, failed, failed + self.here.start)
        refuse_failed(self.target, rows.cpu().numpy(), shifted.numpy())
        given = self.tokens[rows][:, self.here] if otherwise is None else otherwise
        return torch.where(active, drawn, given)

    def record(
        self,
        output: StepOutput,
        window: Tensor,
        tokens: Tensor,
        committed: Tensor,
        rows: Tensor | None = None,
        accepted: Tensor | None = None,
        drafted: Counts = 0,
        idle: Tensor | None = None,
        drafting: bool = False,
    ) -> None:
        """Commit tokens of a pass, and note what it cost.

        Args:
            output: output of the pass.
            window: positions of the scale whose distribution it computed, bool [n, n_k].
            tokens: long [n, n_k].
            committed: positions that become known, bool [n, n_k].
            rows: rows of the pass, long [n]; None means all.
            accepted: positions whose draft was accepted, bool [n, n_k].
            drafted: drafts that were judged per row.
            idle: rows that were computed for the others alone, bool [n]; None means none.
            drafting: whether it was a pass of the draft model, which counts as none of the model.
        """
        rows = self.rows if rows is None else rows
        here, first = self.here, self.here.start
        old, known = self.tokens[rows][:, here], self.known[rows][:, here]
        self.tokens[rows, here] = torch.where(committed, tokens, old)
        self.known[rows, here] = known | committed
        ran = torch.ones_like(rows, dtype=torch.bool) if idle is None else ~idle
        self.recorder.add(
            rows.cpu().numpy(),
            0 if drafting else ran * output.num_computed_tokens,
            0 if drafting else output.num_computed_positions,
            committed.sum(1),
            0 if accepted is None else accepted.sum(1),
            drafted,
            0 if drafting else ran,
        )
        if self.recorder.traces is not None:
            taken = torch.zeros_like(committed) if accepted is None else accepted
            for n, row in enumerate(rows.tolist()):
                if not bool(ran[n]):
                    continue

                def at(mask: Tensor, n=n) -> list[int]:
                    return (mask[n].nonzero()[:, 0] + first).tolist()

                fixed = dict(zip(at(committed), tokens[n][committed[n]].tolist(), strict=True))
                self.recorder.add_trace(row, at(window), at(taken), fixed)

    def report(self) -> None:
        """Count a pass of the batch and tell the callback."""
        self.steps += 1
        if self.callback is not None:
            done, total = int(self.known.sum()), self.known.numel()
            info = {"step": self.steps, "done": done, "total": total}
            self.callback({**info, "tokens": self.tokens.clone(), "known": self.known.clone()})

    def output(self, draft_nfe: list[int] | None = None) -> SampleOutput:
        """Return tokens, statistics and traces."""
        made = (~self.prefilled).sum(1).tolist()
        seconds = time.perf_counter() - self.began
        return self.recorder.output(self.tokens, seconds, made, draft_nfe)


def fill_scale(run: ScalesRun, source: ScalesTarget | None = None) -> None:
    """Run the pass that fills the scale, draw its tokens and commit all of them.

    Args:
        run: the run.
        source: target of a draft model, in the same scale; None for the run's own.
    """
    idle, window = ~run.taking[:, run.target.scale], ~run.known[:, run.here]
    output = (source or run.target).predict()
    tokens = run.draw(output.logprobs, 0, window)
    run.record(output, window, tokens, window, idle=idle, drafting=source is not None)
    run.report()


def check_refines(target: ScalesTarget, name: str) -> None:
    """Refuse models without the pass that refines.

    Args:
        target: the target.
        name: name of the sampler.

    Raises:
        GenError: the model has no such pass, or its scales see the keys of earlier ones.
    """
    model = target.model
    if not model.refines or not model.markov:
        lacks = "has no refining pass" if not model.refines else "keeps the keys of earlier scales"
        raise GenError(
            f"the model {lacks}, and sampler {name} refines scales; expected a model of the HMAR"
            " form such as 'image-scales-masked', or sampler next_scale"
        )


def order_of(order: str, sides: tuple[int, int], device: torch.device) -> Tensor:
    """Return the rank of every cell of a scale in a fixed order: long [n_k].

    Args:
        order: ``halton`` or ``raster``.
        sides: height and width of the scale.
        device: device of the result.
    """
    cells = halton_cells(sides) if order == "halton" else range(sides[0] * sides[1])
    return torch.tensor(list(cells), device=device).argsort()
