"""Text with media in it: one sequence of token ids whose segments have frontends of their own.

A segment that is no text has a token that begins it, the ids of its codes, and a token that ends it
(communication tokens, as in CoVLM, arXiv 2311.03354; Chameleon, arXiv 2405.09818, has such tokens
for images). The decoded text is Markdown: media stand in it as ``![image](data:image/png;base64,
...)``, and ``segments`` takes it apart again.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from gen.contracts.constraint import Automaton
from gen.contracts.frontend import TokenFrontend
from gen.core.errors import GenError
from gen.media.images import read_image
from gen.tokenizers.text.hf_text import HFText

MEDIUM = re.compile(r"!\[(\w+)\]\(data:([\w/+.-]+);base64,([A-Za-z0-9+/=]*)\)")
TEXT = "text"


@dataclass(frozen=True)
class SegmentKind:
    """Kind of segments that are no text.

    Attributes:
        name: name of the kind, such as ``image``.
        begin: token id that begins a segment.
        end: token id that ends it.
        codes: token ids of the frontend's codes, in the order of its codebook.
        grid: grid of the codes, which a segment has row by row.
        frontend: frontend that decodes them.
        write: writes a decoded medium as a MIME type and the bytes of a file.
    """

    name: str
    begin: int
    end: int
    codes: tuple[int, ...]
    grid: tuple[int, ...]
    frontend: TokenFrontend
    write: Callable[[Any], tuple[str, bytes]]

    @property
    def count(self) -> int:
        """Number of codes of a segment."""
        return int(np.prod(self.grid))


@dataclass(frozen=True)
class Segment:
    """Segment of a document: its kind, and a text, or the MIME type and bytes of a file."""

    kind: str
    text: str = ""
    mime: str = ""
    content: bytes = b""

    def image(self) -> Image.Image:
        """Return the image of the segment. Raises ``GenError`` for another kind."""
        if not self.mime.startswith("image/"):
            raise GenError(f"the segment is {self.mime or self.kind}; expected an image")
        return read_image(self.content, "the image of the segment")


def as_png(image: Image.Image) -> tuple[str, bytes]:
    """Write an image as the bytes of a PNG file."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return "image/png", buffer.getvalue()


def segments(document: str) -> list[Segment]:
    """Take a document apart into its segments, in their order."""
    found, at = [], 0
    for match in MEDIUM.finditer(document):
        if text := document[at : match.start()].strip():
            found.append(Segment(TEXT, text))
        found.append(Segment(match[1], mime=match[2], content=base64.b64decode(match[3])))
        at = match.end()
    if text := document[at:].strip():
        found.append(Segment(TEXT, text))
    return found


class SegmentedText(HFText):
    """Text tokenizer whose sequences hold segments of other kinds.

    Args:
        tokenizer: tokenizer of transformers.
        vocab_size: vocabulary of the model.
        ends: eos token ids.
        kinds: kinds of segments beside text.
        device: device of token ids.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        ends: tuple[int, ...],
        kinds: Sequence[SegmentKind],
        device: torch.device | str = "cpu",
    ):
        super().__init__(tokenizer, vocab_size, ends, device)
        self.kinds = tuple(kinds)
        self._kind_of = {kind.begin: kind for kind in self.kinds}

    def text(self, ids: list[int]) -> str:
        """Decode token ids up to the first eos token as Markdown.

        Every segment is decoded by its own frontend. One that ends early has no medium.
        """
        parts = [self._part(kind, part) for kind, part in self._split(ids)]
        return "\n\n".join(part for part in parts if part)

    def _split(self, ids: list[int]) -> Iterator[tuple[SegmentKind | None, list[int]]]:
        """Yield the token ids of every segment, and its kind; None for a text."""
        at, words = 0, []
        while at < len(ids) and ids[at] not in self.ends:
            kind = self._kind_of.get(ids[at])
            if kind is None:
                words.append(ids[at])
                at += 1
                continue
            yield None, words
            words = []
            yield kind, ids[at + 1 : at + 1 + kind.count]
            at += kind.count + 2
        yield None, words

    def _part(self, kind: SegmentKind | None, ids: list[int]) -> str:
        """Decode one segment."""
        if kind is None:
            return super().text(ids).strip()
        number = {token: code for code, token in enumerate(kind.codes)}
        if len(ids) < kind.count or not number.keys() >= set(ids):
            return f"[{kind.name} that ends early]"
        codes = torch.tensor([number[token] for token in ids], device=self.device)
        with torch.no_grad():
            decoded = kind.frontend.decode(codes.view(1, 1, *kind.grid))[0]
        mime, content = kind.write(kind.frontend.postprocess(decoded))
        return f"![{kind.name}](data:{mime};base64,{base64.b64encode(content).decode()})"


def segment_automaton(
    vocab_size: int, words: Collection[int], ends: Collection[int], kinds: Sequence[SegmentKind]
) -> Automaton:
    """Return the automaton of well-formed documents.

    A begin token is followed by exactly the codes of its kind and the end token. A document ends
    with eos tokens, outside of media.

    Args:
        vocab_size: number of tokens V.
        words: token ids of texts.
        ends: eos token ids.
        kinds: kinds of segments beside text.
    """
    token_class = np.full(vocab_size, -1, np.int32)
    token_class[list(words)], token_class[list(ends)] = 0, 1
    states = 2 + sum(kind.count + 1 for kind in kinds)  # 0 is text, 1 behind an eos token
    table = np.full((states, 2 + 3 * len(kinds)), -1, np.int32)
    table[0, 0], table[:2, 1] = 0, 1
    first = 2
    for n, kind in enumerate(kinds):
        begin, code, end = 2 + 3 * n, 3 + 3 * n, 4 + 3 * n
        for token, its_class in ((kind.begin, begin), (kind.end, end)):
            token_class[token] = its_class
        token_class[list(kind.codes)] = code
        table[0, begin] = first
        inside = np.arange(first, first + kind.count)
        table[inside, code] = inside + 1
        table[first + kind.count, end] = 0
        first += kind.count + 1
    accepting = np.zeros(states, bool)
    accepting[:2] = True
    return Automaton(table, accepting, token_class)
