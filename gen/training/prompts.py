"""Tokenizers of token data: the language of the modality, or one of a folder's own captions or
texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from gen.contracts.condition import Condition
from gen.contracts.modality import CAPTIONS, TEXT_ENCODER
from gen.core.checks import check_int
from gen.core.errors import GenError, cut
from gen.core.files import put
from gen.core.tables import plural
from gen.modalities.text_encoder import STATED, TextEncoder
from gen.tokenizers.text.trained import FILE, LEAST, TrainedTokenizer
from gen.training.frontends import Encoder
from gen.training.sources import Source

STATES = "captions.safetensors"  # states of captions, of an encoding with a text encoder
AUTO, BUILT_IN, OWN = "auto", "built-in", "own"
VOCAB_SIZE = 2048
MOST = 256  # tokens of a caption
ROOM, STEP = 32, 8  # slots of the shortest prompts, and the numbers they come in


@dataclass(frozen=True)
class Choice:
    """Tokenizer of an encoding.

    Attributes:
        name: ``built-in``, ``own``, or the folder of a tokenizer.
        reason: why, or what else there is, for people.
        vocab_size: most tokens of one that is trained.
    """

    name: str
    reason: str = ""
    vocab_size: int = VOCAB_SIZE

    @classmethod
    def of(cls, asked: str, vocab_size: int, encoder: Encoder, sources: list[Source]) -> Self:
        """Choose a tokenizer.

        Args:
            asked: ``auto``, ``built-in``, ``own``, or a folder. ``auto`` trains one where the
                modality's language lacks most captions or texts.
            vocab_size: most tokens of one that is trained.
            encoder: frontend of the media.
            sources: what is encoded.

        Raises:
            GenError: nothing to train one on, or a modality whose prompts are no captions.
        """
        check_int("vocab_size", vocab_size, LEAST)
        if encoder.is_open or (asked == AUTO and not _has_captions(encoder)):
            if asked not in (AUTO, BUILT_IN):
                raise GenError(
                    f"tokenizer is {asked!r}, and the texts have that of the frontend"
                    f" {encoder.name}; expected one of both"
                )
            return cls(BUILT_IN)
        if asked == BUILT_IN:
            return cls(BUILT_IN)
        if not _has_captions(encoder):
            raise GenError(
                f"tokenizer is {asked!r}; expected {BUILT_IN!r} for modality"
                f" {encoder.modality.name!r}, whose models are told a state, too"
            )
        texts = texts_of(sources)
        if asked == AUTO:
            outside = [text for s in sources if (text := _outside(encoder, s)) is not None]
            stated = sum(s.condition is not None or s.line is not None for s in sources)
            if 2 * len(outside) <= stated:  # misspelt ones are named
                hint = "; --tokenizer own takes captions and texts as they are"
                return cls(BUILT_IN, hint if outside else "")
            reason = (
                f"{len(outside)} of {plural(stated, 'text')} are outside of the language of the"
                f" built-in models, the first {cut(outside[0])!r}"
            )
            return cls(OWN, reason, vocab_size)
        if not texts:
            raise GenError(f"tokenizer is {asked!r}, and no medium has a caption; expected some")
        return cls(asked, vocab_size=vocab_size)

    @property
    def is_own(self) -> bool:
        """Whether captions or texts have another tokenizer than the modality's language."""
        return self.name != BUILT_IN

    def to_dict(self) -> dict[str, Any]:
        """Return what a plan says of a tokenizer that is not the modality's language."""
        return {"vocab_size": self.vocab_size} if self.is_own else {}

    def tokenizer(
        self, dest: Path, encoder: Encoder, sources: list[Source]
    ) -> TrainedTokenizer | None:
        """Return the tokenizer that an encoding has begun with, or train or load it; None for the
        language of the modality.

        Args:
            dest: folder of the encoding.
            encoder: frontend of the media.
            sources: what is encoded.

        Raises:
            GenError: a folder without a tokenizer.
        """
        if not self.is_own:
            return None
        if (dest / FILE).is_file():
            return TrainedTokenizer.from_folder(dest)
        if self.name != OWN:
            return TrainedTokenizer.from_folder(self.name)
        is_text = encoder.modality.name == "text"
        train = TrainedTokenizer.of_texts if is_text else TrainedTokenizer.of_captions
        return train(texts_of(sources), self.vocab_size)


@dataclass(frozen=True)
class Captions:
    """Captions of token data as prompts of a fixed number of slots.

    Attributes:
        tokenizer: their tokenizer, or the text encoder that reads them.
        slots: tokens of a prompt.
        states: states of every caption by a text encoder, [n, width]; empty of a tokenizer.
    """

    tokenizer: TrainedTokenizer | TextEncoder
    slots: int
    states: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def encoder(self) -> TextEncoder | None:
        """Text encoder that reads the captions, if any."""
        return self.tokenizer if isinstance(self.tokenizer, TextEncoder) else None

    @property
    def kind(self) -> str:
        """What a model's config says of such conditions."""
        return CAPTIONS if self.encoder is None else TEXT_ENCODER

    @classmethod
    def fitted(cls, tokenizer: TrainedTokenizer | TextEncoder, sources: list[Source]) -> Self:
        """Return prompts with room for the longest caption, and for half more: words that the
        tokenizer has not seen take more tokens."""
        counts = [len(tokenizer.ids(text)) for text in texts_of(sources)]
        longest = max((n for n in counts if n <= MOST), default=1)
        slots = -(-(longest + longest // 2) // STEP) * STEP
        most = MOST
        if isinstance(tokenizer, TextEncoder):
            most = min(MOST, tokenizer.most or MOST)
        return cls(tokenizer, min(most, max(ROOM, slots)))

    @classmethod
    def read(cls, folder: Path, about: dict[str, Any]) -> Self:
        """Read the captions of an encoding.

        Args:
            folder: folder of the encoding.
            about: what ``to_dict`` returned.

        Raises:
            GenError: the tokenizer is missing, or another one.
        """
        if STATED in about:
            said = about[STATED]
            encoder = TextEncoder(said["folder"], said["digest"])
            return cls(encoder, about["slots"], read_states(folder / STATES))
        tokenizer = TrainedTokenizer.from_folder(folder)
        if tokenizer.digest != about["digest"]:
            raise GenError(
                f"{folder / FILE} has the digest {tokenizer.digest}; expected {about['digest']},"
                " that of the tokenizer that the captions were encoded with"
            )
        return cls(tokenizer, about["slots"])

    def to_dict(self) -> dict[str, Any]:
        """Return what a manifest says of captions."""
        if self.encoder is not None:
            return {STATED: self.encoder.to_dict(), "slots": self.slots}
        sizes = {"vocab_size": self.tokenizer.size, "slots": self.slots}
        return {"digest": self.tokenizer.digest, **sizes}

    def fitting(self, sources: list[Source]) -> list[str]:
        """Return the captions of sources that have no more tokens than a prompt."""
        return [t for t in texts_of(sources) if len(self.tokenizer.ids(t)) <= self.slots]

    def check(self, parts: dict[str, Any]) -> None:
        """Raise ``GenError`` for a caption of more tokens than a prompt has."""
        count = len(self.tokenizer.ids(parts.get("text", "")))
        if count > self.slots:
            raise GenError(
                f"the caption {cut(parts['text'])!r} has {count} tokens; expected at most"
                f" {self.slots}"
            )


def write_states(path: Path, encoder: TextEncoder, texts: Iterable[str]) -> None:
    """Write the states of captions, once each, unless the file holds them."""
    texts = list(dict.fromkeys(" ".join(text.split()) for text in texts))
    head = {"captions": json.dumps(texts, ensure_ascii=False), "digest": encoder.digest}
    if path.is_file():
        with suppress(OSError, SafetensorError), safe_open(path, "pt") as file:
            if file.metadata() == head:
                return
    states = [encoder.states(text) for text in texts]
    tensors = {
        "states": torch.cat(states).half(),
        "lengths": torch.tensor([len(s) for s in states], dtype=torch.int32),
    }
    data = save(tensors, head)
    put(path, lambda temporary: temporary.write_bytes(data))


def read_states(path: Path) -> dict[str, Tensor]:
    """Read what ``write_states`` wrote. Raises ``GenError`` if it cannot be read."""
    try:
        with safe_open(path, "pt") as file:
            texts = json.loads((file.metadata() or {})["captions"])
            flat, lengths = file.get_tensor("states"), file.get_tensor("lengths")
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise GenError(
            f"{path} cannot be read: {error}; the same gen encode makes it again"
        ) from None
    return dict(zip(texts, flat.float().split(lengths.tolist()), strict=True))


def texts_of(sources: list[Source]) -> list[str]:
    """Return the captions of sources, and the lines of texts."""
    found = [s.condition.get("text", "") for s in sources if s.condition is not None]
    found = [text for text in found if text.strip()]
    return found + [s.line for s in sources if s.line is not None]


def _has_captions(encoder: Encoder) -> bool:
    """Whether texts alone are the conditions of a modality."""
    return "observation" not in encoder.modality.accepts


def _outside(encoder: Encoder, source: Source) -> str | None:
    """Return the caption or text of a source that the modality's language lacks; None where it has
    both."""
    caption, line = source.condition, source.line
    try:
        if caption is not None and caption["text"].strip():
            encoder.modality.parse(Condition.of(caption))
    except GenError:
        return caption["text"] if caption else None
    try:
        if line is not None:
            encoder.frontend.preprocess(line)
    except GenError:
        return line
    return None
