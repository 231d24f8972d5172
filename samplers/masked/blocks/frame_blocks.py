"""Frame blocks: blocks in order, each decoded by masked steps, all positions of a frame in
parallel.

    for block f of F:   x_f ~ masked decoding of p(. | x_<f, prompt), in S forward passes

The model's attention is full inside a block and causal across blocks, so finished blocks stay in a
cache and a frame can be shown as soon as it is done (block diffusion: Arriola et al., arXiv
2503.09573; for video frames: Deng et al., "NOVA", arXiv 2412.14169). A canvas whose first blocks
are prefilled is continued after them.

Guarantee: inside a block that of ``masked_iterative`` (approximate: positions committed in one step
are drawn independently of each other), across blocks the same distribution: a block is drawn given
all blocks before it.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from gen.core.errors import GenError
from gen.core.params import integer
from gen.core.registry import register
from gen.core.rng import OffsetRNG
from gen.core.sampler import Sampler
from gen.core.stats import SampleOutput, Stats, TraceStep
from gen.core.token_space import TokenSpace
from gen.samplers.masked.constrained import check_completable
from gen.samplers.masked.iterative import MaskedIterative


@register("sampler", "frame_blocks")
class FrameBlocks(MaskedIterative):
    """Decodes frames in order, and the positions of each frame in parallel. ``steps``: forward
    passes per frame. The other parameters are those of ``masked_iterative``."""

    steps: int = integer(8, least=1, each="step")

    papers = ("2503.09573", "2412.14169")
    protocol = "blocks"
    kinds = ("codes",)
    reference = "one position per step in the same order"

    def begin(self, target, rng, *, draft=None, canvas=None, trace=False):
        return Sampler.begin(self, target, rng)

    def __call__(
        self, target, rng, *, draft=None, canvas: Tensor | None = None, trace=False, callback=None
    ):
        """Decode every item of the target; see ``Sampler``."""
        space, batch, size = target.space, target.rows, target.block_length
        canvas = (
            space.empty(batch, target.device)
            if canvas is None
            else canvas.to(target.device).clone()
        )
        check_completable(target, canvas)
        first = num_prefilled(canvas, space, size)
        if first:
            target.commit(canvas[:, :first])
        outputs: list[SampleOutput] = []
        starts = range(first, target.length, size)
        for start in starts:
            block = slice(start, start + size)

            def report_block(info, start=start, block=block):
                assert callback is not None, "nothing is reported without a callback"
                tokens, known = canvas.clone(), ~space.is_masked(canvas)
                tokens[:, block], known[:, block] = info["tokens"], info["known"]
                step = sum(max(s.nfe for s in out.stats) for out in outputs) + info["step"]
                counts = {"done": batch * start + info["done"], "total": batch * target.length}
                callback({"step": step, **counts, "tokens": tokens, "known": known})

            now = target.block()
            out = super().__call__(
                now,
                OffsetRNG(rng, start),
                canvas=canvas[:, block],
                trace=trace,
                callback=report_block if callback else None,
            )
            canvas[:, block] = out.tokens
            if start + size < target.length:
                target.commit(out.tokens)
            outputs.append(with_idle_positions(out, now.num_idle_positions.tolist()))
        traces = [out.traces for out in outputs if out.traces is not None]
        return SampleOutput(
            canvas,
            [joint_stats([out.stats[row] for out in outputs]) for row in range(batch)],
            [joint_trace(traces, starts, row) for row in range(batch)] if trace else None,
        )


def num_prefilled(canvas: Tensor, space: TokenSpace, block: int) -> int:
    """Count the positions of the leading blocks that every row holds whole.

    Args:
        canvas: tokens long [B, T].
        space: token space of the canvas.
        block: positions per block.

    Raises:
        GenError: a later block is prefilled, which no block before it would see.
    """
    known = ~space.is_masked(canvas)
    first = int(known.all(0).view(-1, block).all(1).long().cumprod(0).sum()) * block
    if bool(known[:, first + block :].any()):
        position = int(known[:, first + block :].any(0).nonzero()[0]) + first + block
        raise GenError(
            f"the canvas holds position {position}, but blocks are decoded in order and block"
            f" {first // block} is not complete; expected prefilled positions in the first blocks"
            " alone, or a masked sampler, which takes any"
        )
    return first


def with_idle_positions(out: SampleOutput, idle: list[int]) -> SampleOutput:
    """Count what was computed for rows that wait for the others (``idle``) in the statistics."""
    stats = [
        replace(s, positions_computed=s.positions_computed + n)
        for s, n in zip(out.stats, idle, strict=True)
    ]
    return replace(out, stats=stats)


def joint_stats(parts: list[Stats]) -> Stats:
    """Add up the statistics of an item's blocks."""
    nfe, tokens = sum(part.nfe for part in parts), sum(part.tokens for part in parts)
    memory = [part.peak_memory for part in parts if part.peak_memory is not None]
    return Stats(
        nfe,
        tokens,
        sum(part.tokens_computed for part in parts),
        sum(part.positions_computed for part in parts),
        tokens / nfe if nfe else 0.0,
        seconds=sum(part.seconds for part in parts),
        peak_memory=max(memory) if memory else None,
    )


def joint_trace(traces: list[list[list[TraceStep]]], starts: range, row: int) -> list[TraceStep]:
    """Join the steps of all blocks of a row, at their positions in the grid."""
    return [
        step.shifted(start)
        for trace, start in zip(traces, starts, strict=True)
        for step in trace[row]
    ]
