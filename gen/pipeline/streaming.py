"""Streaming: a chunk of media goes out as soon as its tokens are there and can change no more.

Chunks are decoded as whole media are (``StreamingFrontend``), so the chunks of an item, put
together, are its media bit for bit.
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

from gen.contracts.frontend import StreamingFrontend, TokenFrontend
from gen.contracts.modality import Modality
from gen.core.errors import GenError
from gen.core.sampler import Callback
from gen.core.token_space import TokenSpace
from gen.pipeline.output import ItemPlan

OnChunk = Callable[[int, Any], None]


@dataclass(frozen=True)
class Chunk:
    """Part of an item's media: what follows its chunks before.

    Attributes:
        item: plan of the item (index, prompt, seed).
        media: frames of a clip, or samples of a waveform.
    """

    item: ItemPlan
    media: Any


class MediaStream:
    """Decoder of the rows of a batch as far as their tokens are known.

    A silent end is held back until something follows it, since media are trimmed.
    """

    def __init__(
        self,
        modality: Modality,
        frontend: TokenFrontend,
        space: TokenSpace,
        rows: int,
        on_chunk: OnChunk,
    ):
        """Start with no row decoded.

        Args:
            modality: modality of the media.
            frontend: frontend of the model.
            space: token space of the rows.
            rows: number of rows.
            on_chunk: called with a row and what is new of its media.

        Raises:
            GenError: the frontend cannot decode chunk by chunk.
        """
        if not isinstance(frontend, StreamingFrontend):
            raise GenError(
                f"modality {modality.name!r} cannot be streamed: its decoder looks at all tokens at"
                " once"
            )
        self.modality, self.frontend, self.space = modality, frontend, space
        self.on_chunk = on_chunk
        self.parts: list[list[Any]] = [[] for _ in range(rows)]
        self.decoded_frames, self.sent_samples = [0] * rows, [0] * rows

    def following(self, callback: Callback | None, prefix: Tensor | None) -> Callback:
        """Return a callback for the sampler that decodes what is new.

        Args:
            callback: further callback to call after it.
            prefix: tokens [k] before those that the sampler knows of.
        """

        def follow(info: dict[str, Any]) -> None:
            tokens, known = info["tokens"], info["known"]
            if prefix is not None:
                tokens = torch.cat([prefix.to(tokens).expand(len(tokens), -1), tokens], 1)
                known = torch.cat([known.new_ones(len(known), len(prefix)), known], 1)
            for row in range(len(tokens)):
                self._decode(row, tokens[row], known[row])
            if callback:
                callback(info)

        return follow

    def _decode(self, row: int, tokens: Tensor, known: Tensor) -> None:
        """Decode the chunks of a row that became complete, from tokens [T] and known bool [T]."""
        size = self.space.length // self.space.grid[0]
        ready = int(known.view(-1, size).all(1).long().cumprod(0).sum())
        first, total, chunk = self.decoded_frames[row], self.space.grid[0], self.frontend.chunk
        if first >= total or ready < min(first + chunk, total):
            return
        codes = self.modality.to_codes(
            self.space.before_end(tokens[: ready * size])[None], self.space
        )
        if codes.shape[2] < ready:  # the row is over
            total = ready = codes.shape[2]
        while first < total and ready >= min(first + chunk, total):
            signal = self.frontend.decode_chunk(codes, first)[0]
            self.parts[row].append(self.frontend.postprocess(signal))
            first += chunk
        self.decoded_frames[row] = first
        media = self.modality.trim(np.concatenate(self.parts[row]))
        if len(media) > self.sent_samples[row]:
            start, self.sent_samples[row] = self.sent_samples[row], len(media)
            self.on_chunk(row, media[start:])

    def media(self) -> list[Any]:
        """Return the whole media of every row."""
        return [self.modality.trim(np.concatenate(parts)) for parts in self.parts]


class _ReaderLeft(Exception):
    """Raised in the working thread when nobody reads the chunks any more."""


def stream_chunks(work: Callable[[OnChunk], Any], items: Sequence[ItemPlan]) -> Iterator[Chunk]:
    """Run ``work(on_chunk)`` in a thread and yield its chunks.

    Errors of the work are raised here. A reader who leaves ends the work at its next chunk.
    """
    box: queue.Queue = queue.Queue()
    left = threading.Event()

    def on_chunk(row: int, media: Any) -> None:
        if left.is_set():
            raise _ReaderLeft
        box.put(Chunk(items[row], media))

    def run() -> None:
        try:
            work(on_chunk)
            box.put(None)
        except _ReaderLeft:
            pass
        except BaseException as error:  # to be raised where the chunks are read
            box.put(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        while (message := box.get()) is not None:
            if isinstance(message, BaseException):
                raise message
            yield message
    finally:
        left.set()
        thread.join()
