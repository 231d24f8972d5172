"""Modalities of models that were trained on media of one's own: their prompts are captions of a
tokenizer in the model's folder, or they have none.

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
from gen.modalities.text_encoder import STATED, TextEncoder
from gen.tokenizers.text.trained import TrainedTokenizer

EXAMPLES = "captions.txt"  # captions to measure with, beside the weights
SAMPLING_RATE = "sampling_rate"  # field of a model's config: that of its codec
EMPTY = 0  # word of a slot without a token of a caption


class OwnCaptions:
    """Mixin before a modality's class. A condition is the text of a caption; an empty one is the
    unconditional prompt.

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
    unconditional: list[int]
    tokenizer: TrainedTokenizer | TextEncoder | None = None

    def __init__(self, name: str, config: Mapping[str, Any], folder: Path):
        self.model_name, self.folder = name, folder
        self.rate = config.get(SAMPLING_RATE) or self.rate
        if config[CONDITIONS] == CAPTIONS:
            self.tokenizer = TrainedTokenizer.from_folder(folder)
        elif config[CONDITIONS] == TEXT_ENCODER:
            self.tokenizer = TextEncoder.of_model(name, folder, config[STATED])
        if self.tokenizer is not None:
            self.slots, self.words = config["prefix_length"], 1 + self.tokenizer.size
            self.unconditional = [EMPTY] * self.slots

    @property
    def text_encoder(self) -> TextEncoder | None:
        """Text encoder that reads the prompts, if any."""
        return self.tokenizer if isinstance(self.tokenizer, TextEncoder) else None

    def parse(self, condition: Condition) -> str:
        condition.require(self.accepts, f"model {self.model_name}", self.most)
        return self.condition(condition.text or "")

    def condition(self, prompt: str) -> str:
        """Return a caption with single spaces.

        Raises:
            GenError: it has more tokens than a prompt, or the model was trained without captions.
        """
        text = " ".join(prompt.split())
        if text and self.tokenizer is None:
            raise GenError(
                f"the prompt is {cut(text)!r}, and model {self.model_name} was trained without"
                " conditions; expected no prompt, or an empty one"
            )
        if len(words := self.prompt_words(text)) > self.slots:
            raise GenError(
                f"the prompt {cut(text)!r} has {len(words)} tokens; expected at most {self.slots},"
                f" the prompt of model {self.model_name}"
            )
        return text

    def prompt_words(self, condition: str) -> list[int]:
        """Return the slots of a caption, behind its tokens empty."""
        if self.tokenizer is None:
            return self.unconditional
        words = [1 + token for token in self.tokenizer.ids(condition)]
        return words + self.unconditional[len(words) :]

    def bind(self, config: Any, frontend: Any, model_name: str) -> Binding:
        """Bind a model whose prompts are tokens, or the states of a text encoder."""
        binding, encoder = super().bind(config, frontend, model_name), self.text_encoder
        if encoder is None:
            return binding
        nothing = [*binding.unconditional] if not callable(binding.unconditional) else []

        def prompt(caption: str) -> list[int] | Prompt:
            count = len(encoder.ids(caption))
            if not count:
                return nothing
            return Prompt([CONDITION] * count + nothing[count:], caption, encoder)

        return replace(binding, prompt=prompt)

    def prompt_sizes(self, config: Any) -> tuple[int, int]:
        return self.slots, self.words

    def ground(self, condition: str, seed: int) -> str:
        return condition

    def as_stated(self, condition: str) -> str:
        return condition

    def complete(self, media: Any, condition: str) -> Any:
        return media

    def own_edit(self, condition: str) -> None:
        return None

    def example_prompts(self, count: int, seed: int) -> list[str]:
        """Captions that were measured in training, or else trained on."""
        path = self.folder / EXAMPLES
        if self.tokenizer is None or not path.is_file():
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
