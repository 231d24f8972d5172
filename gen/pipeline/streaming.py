"""Media while they are being made: a chunk goes out as soon as its tokens are there and nothing can
change it any more.

Chunks are decoded as a whole medium is (``StreamingFrontend``), so those of an item, put together,
are its medium bit for bit.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gen.contracts.frontend import StreamingFrontend
from gen.core.errors import GenError
from gen.core.sampler import Callback
from gen.core.token_space import TokenSpace

OnChunk = Callable[[int, Any], None]


@dataclass(frozen=True)
class Chunk:
    """``media``: what follows the item's chunks before it. ``item``: its plan (index, prompt,
    seed)."""

    item: Any
    media: Any


class MediaStream:
    """Decodes every row of a batch as far as its tokens are known; ``emit(row, media)`` gets what
    is new.

    A silent end is held back until something follows it, since media are trimmed.
    """

    def __init__(self, modality: Any, frontend: Any, space: TokenSpace, rows: int, emit: OnChunk):
        if not isinstance(frontend, StreamingFrontend):
            raise GenError(
                f"modality {modality.name!r} cannot be streamed: its decoder looks at all tokens at"
                " once"
            )
        self.modality, self.frontend, self.space, self.emit = modality, frontend, space, emit
        self.parts: list[list[Any]] = [[] for _ in range(rows)]
        self.frames, self.sent = [0] * rows, [0] * rows

    def following(self, callback: Callback | None, given: Tensor | None) -> Callback:
        """A callback for the sampler. ``given`` [k]: tokens before those that the sampler knows
        of."""

        def follow(info: dict[str, Any]) -> None:
            tokens, known = info["tokens"], info["known"]
            if given is not None:
                tokens = torch.cat([given.to(tokens).expand(len(tokens), -1), tokens], 1)
                known = torch.cat([known.new_ones(len(known), len(given)), known], 1)
            for row in range(len(tokens)):
                self._decode(row, tokens[row], known[row])
            if callback:
                callback(info)

        return follow

    def _decode(self, row: int, tokens: Tensor, known: Tensor) -> None:
        size = self.space.length // self.space.grid[0]
        ready = int(known.view(-1, size).all(1).long().cumprod(0).sum())
        first, total = self.frames[row], self.space.grid[0]
        if first >= total or ready < min(first + self.frontend.chunk, total):
            return
        codes = self.modality.to_codes(
            self.space.before_end(tokens[: ready * size])[None], self.space
        )
        if codes.shape[2] < ready:  # the row is over
            total = ready = codes.shape[2]
        while first < total and ready >= min(first + self.frontend.chunk, total):
            self.parts[row].append(
                self.frontend.postprocess(self.frontend.decode_chunk(codes, first)[0])
            )
            first += self.frontend.chunk
        self.frames[row] = first
        whole = self.modality.trim(np.concatenate(self.parts[row]))
        if len(whole) > self.sent[row]:
            start, self.sent[row] = self.sent[row], len(whole)
            self.emit(row, whole[start:])

    def media(self) -> list[Any]:
        return [self.modality.trim(np.concatenate(parts)) for parts in self.parts]


class _Stopped(Exception):
    """The reader has left."""


def streamed(work: Callable[[OnChunk], Any], items: Sequence[Any]) -> Iterator[Chunk]:
    """Runs ``work(on_chunk)`` in a thread and yields its chunks. What it raises is raised here; a
    reader who leaves ends it at its next chunk."""
    box: queue.Queue = queue.Queue()
    left = threading.Event()

    def on_chunk(row: int, media: Any) -> None:
        if left.is_set():
            raise _Stopped
        box.put(Chunk(items[row], media))

    def run() -> None:
        try:
            work(on_chunk)
            box.put(None)
        except _Stopped:
            pass
        except BaseException as error:  # to be raised where the chunks are read
            box.put(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        while (got := box.get()) is not None:
            if isinstance(got, BaseException):
                raise got
            yield got
    finally:
        left.set()
        thread.join()
