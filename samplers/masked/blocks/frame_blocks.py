"""Block by block, each block by masked steps: frames in order, all places of a frame in parallel.

    for block f of F:   x_f ~ masked decoding of p(. | x_<f, condition), in S forward calls

The model's attention is full inside a block and causal across blocks, so finished blocks stay in a
cache and a frame can be shown as soon as it is done (block diffusion: Arriola et al., arXiv
2503.09573; for video frames: Deng et al., "NOVA", arXiv 2412.14169). A canvas whose first blocks
are given is continued after them.

Guarantee: inside a block that of ``masked_iterative`` (none: places committed in one step are drawn
independently of each other), across blocks exact: a block is drawn given all of what came before
it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gen.core.errors import GenError
from gen.core.registry import register
from gen.core.rng import OffsetRNG
from gen.core.stats import SampleOutput, Stats, TraceStep
from gen.samplers.masked.iterative import MaskedIterative


@register("sampler", "frame_blocks")
@dataclass(frozen=True)
class FrameBlocks(MaskedIterative):
    """Frames in order, the places of a frame in ``steps`` forward calls. The other knobs are those
    of ``masked_iterative``."""

    steps: int = 8

    protocol = "blocks"
    kinds = ("codes",)
    reference = "one place per step in the same order"

    def __call__(
        self, target, rng, *, draft=None, canvas: Tensor | None = None, trace=False, callback=None
    ):
        space, batch = target.space, target.rows
        canvas = (
            space.empty(batch, target.device)
            if canvas is None
            else canvas.to(target.device).clone()
        )
        first = _given_blocks(canvas, space, target.block_length)
        if first:
            target.commit(canvas[:, :first])
        parts: list[SampleOutput] = []
        for at in range(first, target.length, target.block_length):
            here = slice(at, at + target.block_length)

            def inner(info, at=at, here=here):
                shown, known = canvas.clone(), ~space.is_masked(canvas)
                shown[:, here], known[:, here] = info["tokens"], info["known"]
                step = sum(max(s.nfe for s in p.stats) for p in parts) + info["step"]
                done = batch * at + info["done"]
                callback(
                    {
                        "step": step,
                        "done": done,
                        "total": batch * target.length,
                        "tokens": shown,
                        "known": known,
                    }
                )

            out = super().__call__(
                target.block(),
                OffsetRNG(rng, at),
                canvas=canvas[:, here],
                trace=trace,
                callback=inner if callback else None,
            )
            canvas[:, here] = out.tokens
            if at + target.block_length < target.length:
                target.commit(out.tokens)
            parts.append(out)
        starts = range(first, target.length, target.block_length)
        return SampleOutput(
            canvas,
            [_sum([p.stats[row] for p in parts]) for row in range(batch)],
            [_join(parts, starts, row) for row in range(batch)] if trace else None,
        )


def _given_blocks(canvas: Tensor, space, block: int) -> int:
    """Places of the leading blocks that every row holds whole. Raises ``GenError`` if later ones
    are given: they would not be seen."""
    known = ~space.is_masked(canvas)
    first = int(known.all(0).view(-1, block).all(1).long().cumprod(0).sum()) * block
    if bool(known[:, first + block :].any()):
        position = int(known[:, first + block :].any(0).nonzero()[0]) + first + block
        raise GenError(
            f"the canvas holds place {position}, but blocks are made in order and block"
            f" {first // block} is not complete; expected given places in the first blocks alone; a"
            " masked sampler takes any"
        )
    return first


def _sum(parts: list[Stats]) -> Stats:
    nfe, tokens = sum(p.nfe for p in parts), sum(p.tokens for p in parts)
    memory = [p.peak_memory for p in parts if p.peak_memory is not None]
    return Stats(
        nfe,
        tokens,
        sum(p.tokens_computed for p in parts),
        tokens / nfe if nfe else 0.0,
        seconds=sum(p.seconds for p in parts),
        peak_memory=max(memory) if memory else None,
    )


def _join(parts: list[SampleOutput], starts: range, row: int) -> list[TraceStep]:
    """The steps of all blocks, at their places in the grid."""
    return [
        step.shifted(at)
        for part, at in zip(parts, starts, strict=True)
        for step in part.traces[row]
    ]
