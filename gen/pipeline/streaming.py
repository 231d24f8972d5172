"""Streaming: a part of the media goes out as soon as its tokens are there and can change no more.

Sound and video go out in chunks that are decoded as whole media are (``StreamingFrontend``), so the
chunks of an item, put together, are its media bit for bit. Text goes out in whole characters.
Images go out as previews, undecided regions grey, and then as they are.
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from gen.contracts.frontend import StreamingFrontend, TokenFrontend
from gen.contracts.modality import Modality
from gen.core.errors import GenError
from gen.core.sampler import Callback
from gen.core.token_space import TokenSpace
from gen.pipeline.control import held_back
from gen.pipeline.output import ItemPlan
from gen.pipeline.partial import fill, grey_where_unknown
from gen.tokenizers.base.text_bytes import TextBytes


@dataclass(frozen=True)
class Chunk:
    """Part of an item's media: what follows its chunks before.

    Attributes:
        item: plan of the item (index, prompt, seed).
        media: frames of a clip, samples of a waveform, characters of a text, or an image.
        preview: the media are those of unfinished tokens; a later chunk replaces them.
    """

    item: ItemPlan
    media: Any
    preview: bool = False


class OnChunk(Protocol):
    """Receiver of the parts of a row's media."""

    def __call__(self, row: int, media: Any, preview: bool = False) -> None:
        """Take a part, or a preview of the whole."""


Decode = Callable[[Tensor], Any]  # tokens [T(, C)] of a row to its media


class Stream(ABC):
    """Sender of the media of a batch while it is being decoded.

    Args:
        on_chunk: receiver of the parts.
        rows: number of rows.
    """

    def __init__(self, on_chunk: OnChunk, rows: int):
        self.on_chunk, self.rows = on_chunk, rows

    def following(self, callback: Callback | None, prefix: Tensor | None) -> Callback:
        """Return a callback for the sampler that sends what is new.

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
                self.step(row, tokens[row], known[row])
            if callback:
                callback(info)

        return follow

    @abstractmethod
    def step(self, row: int, tokens: Tensor, known: Tensor) -> None:
        """Send what a step has added to a row, tokens [T(, C)] of which some are known [T]."""

    def decoded(self) -> list[Any] | None:
        """Return the media of all rows, where their parts make them up."""
        return None

    def finish(self, media: Sequence[Any]) -> None:
        """Send what is left of the media of all rows; nothing where the steps have sent it all."""
        return


class TextStream(Stream):
    """Sender of texts: whole characters, never the first bytes of one.

    Args:
        on_chunk: receiver of the parts.
        rows: number of rows.
        decode: decodes the first tokens of a row.
        whole_words: the tokenizer tidies spaces up, so a word can change until the next one.
        stops: texts before which a text is cut off.
    """

    def __init__(
        self,
        on_chunk: OnChunk,
        rows: int,
        decode: Decode,
        whole_words: bool,
        stops: tuple[str, ...] = (),
    ):
        super().__init__(on_chunk, rows)
        self.decode, self.whole_words, self.stops = decode, whole_words, stops
        self.seen, self.sent = [0] * rows, [""] * rows

    def step(self, row: int, tokens: Tensor, known: Tensor) -> None:
        ready = int(known.long().cumprod(0).sum())
        if ready <= self.seen[row]:
            return
        self.seen[row] = ready
        # bytes of a character that is not whole decode to the replacement character
        text = self.decode(tokens[:ready]).rstrip("\ufffd")
        if self.whole_words:
            text = text.rstrip().rpartition(" ")[0]
        self._send(row, held_back(text, self.stops))

    def _send(self, row: int, text: str) -> None:
        """Send what a text adds to the parts before. Shorter ones wait for the next step."""
        if len(text) > len(self.sent[row]) and text.startswith(self.sent[row]):
            part, self.sent[row] = text[len(self.sent[row]) :], text
            self.on_chunk(row, part)

    def finish(self, media: Sequence[Any]) -> None:
        for row, text in enumerate(media):
            if not text.startswith(self.sent[row]):
                raise GenError(
                    f"the tokenizer changed the text {self.sent[row][-40:]!r}, which was already"
                    " sent; expected a tokenizer whose texts only grow"
                )
            self._send(row, text)


class ImageStream(Stream):
    """Sender of images: previews, then the image.

    Args:
        on_chunk: receiver of the parts.
        rows: number of rows.
        decode: decodes all tokens of a row.
        space: token space of the rows.
        in_order: positions are decoded from left to right.
        previews: previews of each row at most, after equal shares of its tokens.
    """

    def __init__(
        self,
        on_chunk: OnChunk,
        rows: int,
        decode: Decode,
        space: TokenSpace,
        in_order: bool,
        previews: int,
    ):
        super().__init__(on_chunk, rows)
        self.decode, self.space, self.in_order, self.previews = decode, space, in_order, previews
        self.sent = [0] * rows

    def step(self, row: int, tokens: Tensor, known: Tensor) -> None:
        total, done = known.numel(), int(known.sum())
        whole = self._whole_blocks(known)
        if self.space.blocks:
            total, done = len(self.space.blocks), whole
        reached = done * (self.previews + 1) // total
        if reached <= self.sent[row] or reached > self.previews:
            return
        self.sent[row] = reached
        if self.space.blocks:  # complete scales decode to a blurred image
            kept = tokens[: self.space.blocks[whole - 1].stop]
            self.on_chunk(row, self.decode(kept), preview=True)
            return
        filled = fill(tokens[None].clone(), known[None], self.space, self.in_order)[0]
        image = grey_where_unknown(self.decode(filled), known, self.space.grid)
        self.on_chunk(row, image, preview=True)

    def _whole_blocks(self, known: Tensor) -> int:
        """Count the leading blocks of the space that are known whole, bool [T]."""
        whole = [bool(known[block].all()) for block in self.space.blocks]
        return [*whole, False].index(False)

    def finish(self, media: Sequence[Any]) -> None:
        for row, image in enumerate(media):
            self.on_chunk(row, image)


class ChunkStream(Stream):
    """Decoder of the rows of a batch as far as their tokens are known.

    A silent end is held back until something follows it, since media are trimmed.
    """

    def __init__(
        self,
        modality: Modality,
        frontend: StreamingFrontend,
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
        """
        super().__init__(on_chunk, rows)
        self.modality, self.frontend, self.space = modality, frontend, space
        self.parts: list[list[Any]] = [[] for _ in range(rows)]
        self.decoded_frames, self.sent_samples = [0] * rows, [0] * rows

    def step(self, row: int, tokens: Tensor, known: Tensor) -> None:
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

    def decoded(self) -> list[Any]:
        return [self.modality.trim(np.concatenate(parts)) for parts in self.parts]


def stream_of(
    modality: Modality,
    frontend: TokenFrontend,
    space: TokenSpace,
    rows: int,
    on_chunk: OnChunk,
    decode: Decode,
    in_order: bool,
    previews: int,
) -> Stream:
    """Return the sender of a batch's media.

    Args:
        modality: modality of the media.
        frontend: frontend of the model.
        space: token space of the rows.
        rows: number of rows.
        on_chunk: receiver of the parts.
        decode: decodes tokens of a row.
        in_order: positions are decoded from left to right.
        previews: previews of each image.

    Raises:
        GenError: the media can only be decoded as a whole, and are no images.
    """
    if isinstance(frontend, StreamingFrontend):
        return ChunkStream(modality, frontend, space, rows, on_chunk)
    if isinstance(frontend, TextBytes):
        return TextStream(on_chunk, rows, decode, frontend.rewrites_spaces, space.stop)
    if modality.media_kind == "image":
        return ImageStream(on_chunk, rows, decode, space, in_order, previews)
    raise GenError(
        f"modality {modality.name!r} cannot be streamed: its decoder needs all tokens at once"
    )


class _ReaderLeft(Exception):
    """Raised in the working thread when nobody reads the chunks any more."""


def stream_chunks(work: Callable[[OnChunk], Any], items: Sequence[ItemPlan]) -> Iterator[Chunk]:
    """Run ``work(on_chunk)`` in a thread and yield its chunks.

    Errors of the work are raised here. A reader who leaves ends the work at its next chunk.
    """
    box: queue.Queue = queue.Queue()
    left = threading.Event()

    def on_chunk(row: int, media: Any, preview: bool = False) -> None:
        if left.is_set():
            raise _ReaderLeft
        box.put(Chunk(items[row], media, preview))

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
