"""Modalities of models that were trained on media of one's own: their prompts are captions of a
tokenizer in the model's folder, a medium behind them, or nothing.

There is no checker for such media, and ``check`` refuses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from gen.contracts.condition import CONDITION, Condition, Prompt
from gen.contracts.modality import (
    BUILT_IN,
    CAPTIONS,
    CONDITIONS,
    NOTHING,
    TEXT_ENCODER,
    Binding,
    Modality,
    Verdict,
)
from gen.core.errors import GenError, cut
from gen.modalities.condition_medium import STATED as MEDIUM
from gen.modalities.condition_medium import CaptionedMedium, ConditionMedium
from gen.modalities.text_encoder import STATED, TextEncoder
from gen.tokenizers.text.trained import TrainedTokenizer

EXAMPLES = "captions.txt"  # captions to measure with, beside the weights
SAMPLING_RATE = "sampling_rate"  # field of a model's config: that of its codec
EMPTY = 0  # word of a slot without a token of a caption


class OwnCaptions:
    """Mixin before a modality's class. A condition is the text of a caption, an empty one the
    unconditional prompt; or a medium with a caption, whose slots stand behind those of the caption.

    Args:
        name: model as the user wrote it.
        config: content of its config.json.
        folder: folder of its files.
    """

    accepts = frozenset({"text"})
    most: Mapping[str, int] = {}
    needs_prompt = False
    rate: int
    slots: int
    words: int
    first_code: int
    unconditional: list[int]
    tokenizer: TrainedTokenizer | TextEncoder | None = None
    medium: ConditionMedium | None = None

    def __init__(self, name: str, config: Mapping[str, Any], folder: Path):
        self.model_name, self.folder = name, folder
        self.rate = config.get(SAMPLING_RATE) or self.rate
        if config[CONDITIONS] == CAPTIONS:
            self.tokenizer = TrainedTokenizer.from_folder(folder)
        elif config[CONDITIONS] == TEXT_ENCODER:
            self.tokenizer = TextEncoder.of_model(name, folder, config[STATED])
        if MEDIUM in config:
            self.medium = ConditionMedium.of_dict(config[MEDIUM], folder.parent)
            self.accepts, self.most = frozenset({"text", self.medium.part}), {self.medium.part: 1}
        if self.tokenizer is not None or self.medium is not None:
            self.slots = config["prefix_length"]
            self.words = 1 + (self.tokenizer.size if self.tokenizer is not None else 0)
            self.first_code = self.words
            if self.medium is not None:
                self.words += self.medium.words
                if self.medium.is_shared:  # words count from the ids behind those of the outputs
                    self.first_code = -config["codebook_size"]
            self.unconditional = [EMPTY] * self.slots

    @property
    def text_encoder(self) -> TextEncoder | None:
        """Text encoder that reads the prompts, if any."""
        return self.tokenizer if isinstance(self.tokenizer, TextEncoder) else None

    @property
    def has_examples(self) -> bool:
        """Whether captions alone are conditions, which are kept to measure with."""
        return self.tokenizer is not None and self.medium is None

    @property
    def caption_slots(self) -> int:
        """Slots of a caption."""
        return self.slots - (self.medium.slots if self.medium else 0)

    def parse(self, condition: Condition) -> str | CaptionedMedium:
        condition.require(self.accepts, f"model {self.model_name}", self.most)
        caption = self._caption(condition.text or "")
        if self.medium is None:
            return caption
        if self.medium.part not in condition.parts:
            also = ", with a caption or without" if self.tokenizer is not None else ""
            raise GenError(
                f"model {self.model_name} takes {self.medium.noun} as its condition{also}; got"
                f" {f'the text {cut(caption)!r} alone' if caption else 'nothing'}"
            )
        return CaptionedMedium(caption, self.medium.read(condition))

    def condition(self, prompt: str) -> str | CaptionedMedium:
        """Return a caption with single spaces; a model that reads media refuses one alone."""
        return self.parse(Condition(text=prompt))

    def _caption(self, prompt: str) -> str:
        """Return a caption with single spaces.

        Raises:
            GenError: it has more tokens than a prompt, or the model was trained without captions.
        """
        text = " ".join(prompt.split())
        if text and self.tokenizer is None:
            what = "captions" if self.medium else "conditions"
            raise GenError(
                f"the prompt is {cut(text)!r}, and model {self.model_name} was trained without"
                f" {what}; expected no prompt, or an empty one"
            )
        count = len(self.tokenizer.ids(text)) if self.tokenizer is not None else 0
        if count > self.caption_slots:
            raise GenError(
                f"the prompt {cut(text)!r} has {count} tokens; expected at most"
                f" {self.caption_slots}, the prompt of model {self.model_name}"
            )
        return text

    def prompt_words(self, condition: str | CaptionedMedium) -> list[int]:
        """Return the slots of a condition: the tokens of its caption, empty ones behind them, and
        the codes of its medium."""
        caption, codes = condition, []
        if isinstance(condition, CaptionedMedium):
            assert self.medium is not None, "made by a model that reads media"
            caption, codes = condition.caption, self.medium.ids(condition.medium)
        words = [1 + t for t in self.tokenizer.ids(caption)] if self.tokenizer is not None else []
        empty = self.unconditional[len(words) + len(codes) :]
        return words + empty + [self.first_code + code for code in codes]

    def bind(self, config: Any, frontend: Any, model_name: str) -> Binding:
        """Bind a model whose prompts are tokens, or the states of a text encoder."""
        binding, encoder = super().bind(config, frontend, model_name), self.text_encoder
        if encoder is None:
            return binding

        def prompt(condition: str | CaptionedMedium) -> list[int] | Prompt:
            is_medium = isinstance(condition, CaptionedMedium)
            caption = condition.caption if is_medium else condition
            others, count = binding.prompt(condition), len(encoder.ids(caption))
            if not count:
                return others
            return Prompt([CONDITION] * count + others[count:], caption, encoder)

        return replace(binding, prompt=prompt)

    def prompt_sizes(self, config: Any) -> tuple[int, int]:
        return self.slots, self.words

    def ground(self, condition: Any, seed: int) -> Any:
        return condition

    def as_stated(self, condition: Any) -> Any:
        return condition

    def complete(self, media: Any, condition: Any) -> Any:
        return media

    def own_edit(self, condition: Any) -> None:
        return None

    def example_prompts(self, count: int, seed: int) -> list[str]:
        """Captions that were measured in training, or else trained on. Raises ``GenError`` for a
        model that reads media."""
        if self.medium is not None:
            raise GenError(
                f"model {self.model_name} takes {self.medium.noun} as its condition, and has none"
                " to measure with; expected prompts of your own"
            )
        path = self.folder / EXAMPLES
        if not self.has_examples or not path.is_file():
            return [""] * count
        found = path.read_text(encoding="utf-8").splitlines()
        order = np.random.default_rng(seed).permutation(len(found))
        return [found[order[i % len(found)]] for i in range(count)]

    def category(self, prompt: str) -> str:
        return "all"

    def check(self, media: Any, prompt: str) -> Verdict:
        raise GenError(
            f"model {self.model_name} was trained on media of one's own, and no checker knows what"
            " they show; expected a built-in model"
        )

    def judge(self, media: Any, condition: Condition) -> Verdict:
        return self.check(media, condition.text or "")

    def grade(self, media: Any, prompt: str) -> float:
        return float(self.check(media, prompt).passed)


WITH_CAPTIONS = ("image", "speech", "audio", "video", "motion")


@cache
def with_own_captions(modality: type[Modality]) -> type[Any]:
    """Return the class of a modality whose prompts are captions of its own."""
    name = f"{modality.__name__}OfOwnCaptions"
    return type(name, (OwnCaptions, modality), {"__doc__": modality.__doc__})


def modality_of_model(
    modality: Modality, name: str, config: Mapping[str, Any], folder: Path
) -> Modality:
    """Return a modality as a model of gen's own architectures serves it.

    Args:
        modality: the modality.
        name: model as the user wrote it.
        config: content of its config.json.
        folder: folder of its files.

    Raises:
        GenError: the tokenizer of its captions cannot be read, or the modality has no captions.
    """
    conditions = config.get(CONDITIONS, BUILT_IN)
    if conditions == BUILT_IN or isinstance(modality, OwnCaptions):
        return modality
    if modality.name not in WITH_CAPTIONS:
        if conditions == NOTHING:
            return modality
        raise GenError(
            f"model {name} takes captions; expected one of modality {', '.join(WITH_CAPTIONS)}"
        )
    return with_own_captions(type(modality))(name, config, folder)
