"""Word and character error rates of transcribed speech against its text.

    WER = (substitutions + deletions + insertions) / words of the reference

Errors are counted over all items, as jiwer does for a list of texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch

from gen.core.errors import GenError
from gen.core.import_paths import is_import_path, load_object
from gen.core.params import choice, text
from gen.core.registry import register
from gen.eval.metric import Item, Metric, Scores, State
from gen.eval.readers import read_wave, text_of
from gen.models.load.libraries import LOADING, transformers

EXPECTED = "module:name or file.py:name of a function (wave, rate) -> text, or a folder or hub id"
COUNTS = ("hits", "substitutions", "deletions", "insertions")


@dataclass(frozen=True)
class Recogniser:
    """Speech recogniser.

    Attributes:
        function: text of a wave float32 [n] and its rate.
        rate: samples per second that it takes; None for those of the file.
    """

    function: Callable[[np.ndarray, int], Any]
    rate: int | None = None


@register("metric", "wer")
@dataclass(frozen=True)
class WER(Metric):
    """Word and character error rate of speech by a speech recogniser; lower is better. ``asr``:
    folder of a recogniser such as Whisper, to whose rate files are resampled, or a function of a
    wave float32 [n] and its rate. ``text``: ``prompt``, or the key of ``meta`` that holds the
    words. ``normalize``: ``words`` (lower case, no punctuation) or ``none``."""

    asr: str = text("", EXPECTED)
    text: str = text("prompt", "prompt, or a key of meta")
    normalize: str = choice("words", ("words", "none"))

    name, media = "wer", ("audio",)
    packages = ("jiwer",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.asr:
            raise GenError(f"wer.asr is missing; expected {EXPECTED} of a transformers ASR model")

    def open(self, device: torch.device) -> Recogniser:
        if is_import_path(self.asr):
            found = load_object(self.asr, "wer.asr")
            if not callable(found):
                raise GenError(
                    f"wer.asr is {self.asr!r}, a {type(found).__name__}; expected a"
                    " function (wave, rate) -> text"
                )
            return Recogniser(found)
        try:
            with LOADING:
                recognise = transformers().pipeline(
                    "automatic-speech-recognition",
                    model=self.asr,
                    device=device,
                    # 16 bits take several times as long on a processor
                    dtype=torch.float32 if device.type == "cpu" else "auto",
                )
        except (OSError, ValueError, KeyError) as error:
            raise GenError(
                f"wer.asr is {self.asr!r}, which cannot be loaded:"
                f" {' '.join(str(error).split())[:200]}; expected {EXPECTED}"
            ) from None
        wanted = recognise.feature_extractor.sampling_rate
        return Recogniser(lambda wave, _: recognise(wave)["text"], wanted)

    def skip(self, row: Mapping[str, Any], folder: Any, model: Any) -> str | None:
        words = text_of(row, self.text)
        if words is None:
            return f"its meta has no {self.text!r}"
        return None if self._normal(words) else "its text has no words"

    def read(self, item: Item, model: Recogniser) -> tuple[np.ndarray, int]:
        return read_wave(item.path, model.rate)

    def measure(self, samples: Iterator[tuple[Item, Any]], model: Any) -> State:
        words = np.zeros(len(COUNTS), dtype=np.int64)
        characters = np.zeros(len(COUNTS), dtype=np.int64)
        for item, (wave, rate) in samples:
            heard = model.function(wave, rate)
            if not isinstance(heard, str):
                raise GenError(f"wer.asr returned a {type(heard).__name__}; expected a text")
            said, heard = self._normal(str(text_of(item.row, self.text))), self._normal(heard)
            words += _counts(jiwer().process_words(said, heard))
            characters += _counts(jiwer().process_characters(said, heard))
        return {"words": words, "characters": characters}

    def scores(self, total: State, reference: Any) -> Scores:
        return {"wer": _rate(total["words"]), "cer": _rate(total["characters"])}

    def _normal(self, words: str) -> str:
        library = jiwer()
        steps = [library.RemoveMultipleSpaces(), library.Strip()]
        if self.normalize == "words":
            steps = [library.ToLowerCase(), library.RemovePunctuation(), *steps]
        return library.Compose(steps)(words)


def jiwer() -> Any:
    """Import the package ``jiwer``, which is an extra."""
    return import_module("jiwer")


def _counts(output: Any) -> np.ndarray:
    return np.asarray([getattr(output, key) for key in COUNTS], dtype=np.int64)


def _rate(counts: np.ndarray) -> float:
    hits, substitutions, deletions, insertions = map(int, counts)
    return (substitutions + deletions + insertions) / (hits + substitutions + deletions)
