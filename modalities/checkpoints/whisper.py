"""Whisper: text of what is said in a sound (Radford et al., arXiv 2212.04356).

    prompt   [<|startofprev|>, text before,] <|startoftranscript|>, language and task if the model
             knows several, <|notimestamps|>
    answer   the words, <|endoftext|>

An encoder hears 30 seconds, silence behind the sound, and the decoder attends to all of its states.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from gen.contracts.checkpoint import FROM_PRETRAINED, Checkpoint, CheckpointFiles, LoadOptions
from gen.contracts.condition import Condition
from gen.contracts.modality import Binding
from gen.core.errors import GenError, bad_value, unknown
from gen.core.registry import register
from gen.core.token_space import TokenSpace
from gen.media.given import GivenMedia
from gen.modalities.checkpoints.options import is_integer
from gen.modalities.checkpoints.sounds import mono_wave
from gen.modalities.open_vocabulary import FreeText
from gen.models.adapters.conditioning import Conditions
from gen.models.load.generation_config import GENERATION, config_ends, end_ids
from gen.models.load.locate import quiet
from gen.models.load.pretrained import pretrained, tokenizer_of
from gen.models.published.whisper import HearingLM
from gen.tokenizers.text.hf_text import HFText

TASKS = ("transcribe", "translate")
IDS = ("decoder_start_token_id", "no_timestamps_token_id")


@dataclass(frozen=True)
class Heard:
    """Sound, and the text that was said before it, if any."""

    sound: GivenMedia
    before: str = ""

    def __str__(self) -> str:
        return f"{self.before} | {self.sound}" if self.before else str(self.sound)


@register("checkpoint", "whisper")
class Whisper(Checkpoint):
    """Whisper of all sizes, multilingual or English, as a folder of transformers.

    The condition is ``audio``, of at most 30 seconds; a text beside it is what was said before, as
    transformers' ``prompt_ids``. The answer has no timestamps.

    Classifier-free guidance compares with silence.

    Args:
        language: of the sound, as a code or by its English name. By default a multilingual model
            detects it, item by item.
        task: ``transcribe``, or ``translate`` into English.
        max_new_tokens: positions of an answer (half of the model's).
    """

    accepts = frozenset({"audio", "text"})
    most = {"audio": 1}
    takes = FROM_PRETRAINED - {"device_map"}
    modalities = ("text",)
    protocols = ("causal",)
    sampling = {"temperature": 0.0}
    tested = (
        "tiny random folders against transformers' WhisperForConditionalGeneration and its"
        " `generate`"
    )

    @classmethod
    def matches(cls, files: CheckpointFiles) -> bool:
        return files.model_type == "whisper"

    def __init__(
        self,
        files: CheckpointFiles,
        modality: str,
        load: LoadOptions,
        *,
        language: str | None = None,
        task: str = TASKS[0],
        max_new_tokens: int | None = None,
    ):
        self.tokenizer = tokenizer_of(files.path, name=files.name)
        self.extractor = extractor_of(files)
        self.model = pretrained(
            transformers.WhisperForConditionalGeneration,
            files.path,
            **load.pretrained_keywords,
            name=files.name,
        )
        self.size: int = self.model.config.vocab_size
        said = files.json(GENERATION)
        stated, ends = {key: said.get(key) for key in IDS}, end_ids(said.get("eos_token_id"))
        for key, token in (*stated.items(), *(("eos_token_id", i) for i in ends or (None,))):
            if not is_integer(token) or token >= self.size:
                raise bad_value(
                    f"{key} in {GENERATION} of {files.name}",
                    token,
                    f"one of the ids below {self.size}",
                )
        ends = end_ids(ends, config_ends(files.config), self.tokenizer.eos_token_id)
        self.frontend = HFText(self.tokenizer, self.size, ends, load.device)
        self.start, self.no_timestamps = stated.values()
        self.previous = said.get("prev_sot_token_id")
        self.languages: Mapping[str, int] = said.get("lang_to_id") or {}
        self.task = self._task(task, said.get("task_to_id") or {}, files.name)
        self.language = self._language(language, files.name)
        positions = self.model.config.max_target_positions
        length = positions // 2 if max_new_tokens is None else max_new_tokens
        if not is_integer(length, 1) or length >= positions:
            raise bad_value(
                "max_new_tokens", max_new_tokens, f"an integer from 1 to {positions - 1}"
            )
        self.room = positions - length
        self.sounds = Conditions(self._encode)
        self.binding = Binding(self._space(said, length, ends), self.prompt, self._unconditional)
        self.modality = FreeText(self)

    def _space(self, said: Mapping[str, Any], length: int, ends: tuple[int, ...]) -> TokenSpace:
        """Space of texts without the tokens that the model's generation config suppresses, some of
        them at the first position alone."""
        legal = torch.ones(length, self.size, dtype=torch.bool)
        legal[:, said.get("suppress_tokens") or []] = False
        legal[0, said.get("begin_suppress_tokens") or []] = False
        return TokenSpace((length,), self.size, legal, eos_token_id=ends[0], end_token_ids=ends)

    def _task(self, task: str, tasks: Mapping[str, int], where: str) -> int | None:
        """Return the token id of a task; None where the model has one alone. Raises ``GenError``
        for a task that it does not have."""
        known = tasks if self.languages else {TASKS[0]: None}
        if task not in known:
            raise unknown("task", task, known, where)
        return known[task]

    def _language(self, language: str | None, where: str) -> int | None:
        """Return the token id of a language, by its code or English name; None for none. Raises
        ``GenError`` for a language that the model does not have."""
        if language is None:
            return None
        code = TO_LANGUAGE_CODE.get(language.lower(), language.lower())
        codes = {name.strip("<|>"): number for name, number in self.languages.items()}
        if not codes:
            raise GenError(f"model {where} knows one language; expected no option language")
        if code not in codes:
            raise unknown("language", language, codes, where)
        return codes[code]

    def parse(self, condition: Condition) -> Heard:
        """Return the sound and the text before it.

        Raises:
            GenError: there is no sound, it cannot be read or is too long, or the text holds special
                tokens or is too long.
        """
        condition.require(self.accepts, "the model", self.most)
        if not condition.audio:
            raise GenError("the condition has no sound; expected audio that the model writes down")
        heard = Heard(condition.media("audio")[0], (condition.text or "").strip())
        wave = mono_wave(heard.sound, self.extractor.sampling_rate)
        if len(wave) > self.extractor.n_samples:
            raise GenError(
                f"audio lasts {len(wave) / self.extractor.sampling_rate:.1f} seconds; expected at"
                f" most {self.extractor.chunk_length}, which the model hears at once"
            )
        self.prompt(heard)  # a text that is no prompt fails here
        return heard

    def prompt(self, heard: Heard) -> list[int]:
        """Token ids of a prompt, the first of which names the sound."""
        return self._prompt(heard, heard.sound)

    def _unconditional(self, heard: Heard) -> list[int]:
        """Token ids of the same prompt after silence."""
        silence = GivenMedia("audio", np.zeros((1, 1), np.float32), None)
        return self._prompt(heard, silence)

    def _prompt(self, heard: Heard, sound: GivenMedia) -> list[int]:
        """Token ids of the prompt of a condition, after ``sound``."""
        ids = [*self._before(heard.before), self.start]
        if self.languages:
            ids += [self._heard_language(heard.sound), self.task]
        ids.append(self.no_timestamps)
        if len(ids) > self.room:
            raise GenError(
                f"the prompt has {len(ids)} tokens; expected at most {self.room}, the model's"
                " positions less those of the answer"
            )
        return [self._after(sound, ids[0]), *ids[1:]]

    def _after(self, sound: GivenMedia, token: int) -> int:
        """Return the id of a prompt's first token, which names the sound."""
        return self.size * (1 + self.sounds.number(sound)) + token

    def _before(self, text: str) -> list[int]:
        """Token ids of the text that was said before. Raises ``GenError`` for special tokens, and
        for a model that takes none."""
        if not text:
            return []
        if not is_integer(self.previous):
            raise GenError(
                "the condition has a text and the model takes none before a sound; expected audio"
                " alone"
            )
        ids = self.tokenizer(f" {text}", add_special_tokens=False)["input_ids"]
        special = set(ids) & set(self.tokenizer.all_special_ids)
        if special:
            raise GenError(
                f"the text before the sound holds {self.tokenizer.decode([min(special)])!r};"
                " expected words, no special tokens"
            )
        return [self.previous, *ids]

    def _heard_language(self, sound: GivenMedia) -> int:
        """Return the token id of the language of the answer: the given one, else the most likely
        one after the start token."""
        if self.language is not None:
            return self.language
        adapter = self.adapter("causal")
        first = torch.tensor([[self._after(sound, self.start)]], device=self.model.device)
        logits = adapter.forward(first, torch.zeros_like(first), adapter.new_cache(1))[0, 0]
        known = torch.tensor(sorted(self.languages.values()), device=logits.device)
        return int(known[logits[known].argmax()])

    @torch.no_grad()
    def _encode(self, sound: GivenMedia) -> dict[str, Tensor]:
        """States [S, D] that the decoder attends to."""
        wave = mono_wave(sound, self.extractor.sampling_rate)
        features = self.extractor(
            wave, sampling_rate=self.extractor.sampling_rate, return_tensors="pt"
        ).input_features.to(self.model.device, self.model.dtype)
        return {"states": self.model.model.encoder(features).last_hidden_state[0]}

    def adapter(self, protocol: str) -> HearingLM:
        return HearingLM(self.model, self.sounds)


def extractor_of(files: CheckpointFiles) -> Any:
    """Load what makes spectrograms of waves. Raises ``GenError`` if it cannot be read."""
    try:
        with quiet():
            return transformers.WhisperFeatureExtractor.from_pretrained(
                files.path, local_files_only=True
            )
    except (OSError, ValueError, TypeError) as error:
        raise GenError(
            f"the feature extractor of {files.name} cannot be read:"
            f" {' '.join(str(error).split())[:200]}; expected preprocessor_config.json"
        ) from None
