"""CSM: a conversational speech model (Sesame, "Crossing the uncanny valley of conversational
voice", 2025; `sesame/csm-1b`).

A backbone reads the ids of "[speaker]words" and then frames. A frame's input is the sum of the
embeddings of its Q Mimi codes. The backbone's state before frame t gives the distribution of the
first code, and a small depth decoder gives those of the others:

    p(c_t | before) = p(c_{t,0} | h_t) prod_q p(c_{t,q} | h_t, c_{t,0}, ..., c_{t,q-1})

All drafted codes of a frame go through the depth decoder in one forward pass. The model ends an
utterance with a frame of zeros, which has no id of its own. The token space here adds an eos token,
which is the only id allowed after such a frame and is allowed nowhere else, so the distribution of
the codes does not change.

Earlier turns of a conversation may stand before the words, each with its sound:

    words of turn 1, codes of its sound, a frame of zeros, words of turn 2, ..., words to speak

so that speakers keep the voices of their earlier turns.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import pad

from gen.contracts.checkpoint import FROM_PRETRAINED, Checkpoint, CheckpointFiles, LoadOptions
from gen.contracts.condition import Condition
from gen.contracts.layouts import make_layout, space
from gen.contracts.modality import Binding
from gen.core.errors import GenError, bad_value
from gen.core.registry import register
from gen.core.tables import plural
from gen.core.token_space import TokenSpace
from gen.media.given import GivenMedia
from gen.modalities.checkpoints.options import is_integer
from gen.modalities.checkpoints.sounds import mono_wave
from gen.modalities.open_vocabulary import FreeAudio
from gen.models.adapters.conditioning import Conditions
from gen.models.load.cache_argument import with_cache
from gen.models.load.pretrained import pretrained, tokenizer_of
from gen.models.published.frame_lm import FrameCache, FrameLM
from gen.tokenizers.audio.mimi import Mimi
from gen.tokenizers.base.codec import lasting

SECONDS = 10.0
SPOKEN = re.compile(r"\[(\d+)\](.*)", re.DOTALL)
FRAMES = 1 << 14  # ids in prompts that stand for the frames of one sound


@dataclass(frozen=True)
class Line:
    """Number and words of a speaker. Its string is the text that the model reads."""

    speaker: int
    words: str

    def __str__(self) -> str:
        return f"[{self.speaker}]{self.words}"


@dataclass(frozen=True)
class Dialogue:
    """Line to speak after earlier ones, each with its sound."""

    earlier: tuple[tuple[Line, GivenMedia], ...]
    line: Line

    def __str__(self) -> str:
        return "\n".join([*(f"{line} | {sound}" for line, sound in self.earlier), str(self.line)])


@dataclass(frozen=True)
class AfterSilence:
    """Constraint: the eos token follows a frame whose codes are all ``silent``, the last one not
    counted (transformers' rule), and follows no other.
    """

    streams: int
    eos_token_id: int
    silent: int
    vocab_size: int

    def legal(self, history: Tensor, positions: Tensor) -> Tensor:
        """Allowed tokens bool [..., vocab_size] at ``positions`` after ``history`` [B, T]."""
        frame_positions = (
            positions[..., None]
            - self.streams
            + torch.arange(self.streams - 1, device=positions.device)
        )
        codes = history.gather(1, frame_positions.clamp_min(0).flatten(1)).view(
            frame_positions.shape
        )
        ended = (
            (codes == self.silent).all(-1)
            & (positions >= self.streams)
            & (positions % self.streams == 0)
        )
        is_eos = torch.arange(self.vocab_size, device=positions.device) == self.eos_token_id
        return ended[..., None] == is_eos


class SpokenFrames(FrameLM):
    """Adapter of ``CsmForConditionalGeneration`` whose steps are the backbone's.

    Prompt id V + FRAMES n + j, V the size of the text vocabulary, is frame j of sound n.

    Attributes:
        depth_calls: forward passes of the depth decoder.
    """

    specials = 1

    def __init__(self, model: torch.nn.Module, sounds: Conditions):
        c = model.config
        self.sounds = sounds
        super().__init__(model, c.num_codebooks, c.codec_config.codebook_size, c.num_hidden_layers)
        self.backbone, self.depth, self.depth_calls = model.backbone_model, model.depth_decoder, 0

    @property
    def output_heads(self) -> list[torch.nn.Linear]:
        """See ``ModelAdapter``. The heads of the depth decoder are one tensor, and none of them."""
        return [self.model.lm_head]

    def begin(self, prompt: Tensor, length: Tensor, cache: FrameCache) -> tuple[Tensor, Tensor]:
        frame_ids = prompt - self.model.config.text_vocab_size
        inputs = self.model.embed_text_tokens(prompt.masked_fill(frame_ids >= 0, 0))
        return self.sounds.placed(inputs, frame_ids, FRAMES, "frames"), length

    def embed(self, codes: Tensor) -> Tensor:
        # inputs behind the eos token are never used
        return self.backbone.embed_tokens(codes.clamp_max(self.size - 1))

    def run(self, inputs: Tensor, slots: Tensor, cache: FrameCache) -> Tensor:
        mask = cache.slots.at(slots, self.dtype)
        out = self.backbone(
            inputs_embeds=inputs,
            attention_mask=mask,
            position_ids=slots,
            use_cache=True,
            **with_cache(self.backbone, cache.slots),
        )
        return out.last_hidden_state

    def heads(self, states: Tensor, codes: Tensor, steps: Tensor, streams: Tensor) -> Tensor:
        out = states.new_zeros(*streams.shape, self.size)
        first, later = streams == 0, streams > 0
        if bool(first.any()):
            out[first] = self.model.lm_head(states[first])[..., : self.size]
        if bool(later.any()):
            out[later] = self._deep(states, codes, steps, streams, later)
        return out

    def _deep(
        self, states: Tensor, codes: Tensor, steps: Tensor, streams: Tensor, later: Tensor
    ) -> Tensor:
        """Logits [m, size] at the m positions that ``later`` marks. Every frame goes through the
        depth decoder once.
        """
        row = torch.arange(len(steps), device=steps.device)[:, None].expand_as(steps)
        frame = row[later] * (int(steps.max()) + 1) + steps[later]
        frames, frame_index = frame.unique(return_inverse=True)
        # one of the positions of every frame
        first_position = torch.zeros_like(frames).scatter_(
            0, frame_index, torch.arange(len(frame_index), device=frame_index.device)
        )
        deepest = int(streams[later].max())
        # the depth decoder replaces its first input by the backbone's state
        ids = pad(codes[later][first_position][:, :deepest].clamp_max(self.size - 1), (1, 0))
        # without a mask the class reads its own position ids as those of packed rows
        attention_mask = torch.ones_like(ids)
        logits = self.depth(
            input_ids=ids,
            attention_mask=attention_mask,
            backbone_last_hidden_state=states[later][first_position],
            use_cache=False,
        ).logits
        self.depth_calls += 1
        return logits[frame_index, streams[later] - 1, : self.size]


def spoken_words(content: str | list[Mapping[str, str]], name: str) -> str:
    """Return the words of a turn, whose content is a text or a list of parts of type ``text``.

    Args:
        content: content of the turn.
        name: its name, for messages.

    Raises:
        GenError: a part of another type, or no words.
    """
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    for part in parts:
        if part["type"] != "text":
            raise bad_value(name, part["type"], "parts of type 'text', since turns are spoken")
    words = "".join(part["text"] for part in parts).strip()
    if not words:
        raise bad_value(name, words, "words")
    return words


class Speech(FreeAudio):
    """Waves at Mimi's sampling rate."""

    def layout(self, sizes, grid):
        return make_layout("depth", sizes=sizes, grid=grid)


@register("checkpoint", "csm")
class CSM(Checkpoint):
    """CSM-1B as a folder of transformers. The prompt is a speaker's line; "[0]Hello." is said by
    speaker 0.

    Messages are a conversation: the role of a turn is the number of its speaker, the last turn is
    spoken, and ``audio`` holds the sound of every earlier one, in their order.

    Classifier-free guidance compares with a speaker who says nothing, without earlier turns.

    Args:
        seconds: longest utterance (10 seconds); the model may end it earlier.
        frames: longest utterance in frames, instead of ``seconds``.
        speaker: speaker of prompts that name none.
    """

    accepts = frozenset({"text", "messages", "audio"})
    takes = FROM_PRETRAINED - {"device_map"}
    modalities = ("speech",)
    protocols = ("causal",)
    sampling = {"temperature": 0.9, "top_k": 50}
    tested = (
        "tiny random weights against transformers' CsmForConditionalGeneration and its `generate`"
    )

    @classmethod
    def matches(cls, files: CheckpointFiles) -> bool:
        return files.model_type == "csm"

    def __init__(
        self,
        files: CheckpointFiles,
        modality: str,
        load: LoadOptions,
        *,
        seconds: float | None = None,
        frames: int | None = None,
        speaker: int = 0,
    ):
        if not is_integer(speaker):
            raise bad_value("speaker", speaker, "an integer of at least 0")
        self.speaker = speaker
        self.tokenizer = tokenizer_of(files.path, name=files.name)
        self.model = pretrained(
            transformers.CsmForConditionalGeneration,
            files.path,
            **load.pretrained_keywords,
            name=files.name,
        )
        c, codec = self.model.config, self.model.codec_model.config
        q, size, silent = c.num_codebooks, codec.codebook_size, c.codebook_eos_token_id
        if codec.model_type != "mimi" or codec.num_quantizers < q or size > c.vocab_size or q < 2:
            raise GenError(
                f"model {files.name} has {q} streams of {c.vocab_size} ids and the codec"
                f" {codec.model_type!r} with {codec.num_quantizers} codebooks of {size};"
                " expected at least 2 streams, and Mimi with at least as many codebooks, each"
                f" of at most {c.vocab_size} codes"
            )
        if not isinstance(silent, int) or not 0 <= silent < size:
            raise bad_value(
                f"codebook_eos_token_id of model {files.name}", silent, f"one code below {size}"
            )
        self.silent, self.streams = silent, q
        self.frontend = Mimi(self.model.codec_model, q)
        length = lasting(self.frontend, seconds, frames, SECONDS)
        if length >= c.max_position_embeddings:
            raise bad_value(
                "the length in frames",
                length,
                f"below {c.max_position_embeddings}, the positions of the model",
            )
        self.modality = Speech(self)
        self.sounds = Conditions(self._frames)
        self.size, self.room = size, c.max_position_embeddings - length
        self.binding = Binding(
            self._token_space(length), self._prompt, self._prompt(Line(speaker, ""))
        )

    def _token_space(self, length: int) -> TokenSpace:
        """Space of ``length`` frames that may end after a silent one. The eos token is ``size``."""
        q, size = self.streams, self.size
        codes = space(self.modality.layout((size,) * q, (length,)), vocab_size=size + 1)
        legal = codes.legal.clone()
        legal[q:, size] = True
        return TokenSpace(
            codes.grid,
            size + 1,
            legal,
            eos_token_id=size,
            constraint=AfterSilence(q, size, self.silent, size + 1),
        )

    def condition(self, prompt: str) -> Line:
        match = SPOKEN.fullmatch(super().condition(prompt))
        line = (
            Line(int(match[1]), match[2].strip()) if match else Line(self.speaker, prompt.strip())
        )
        if not line.words:
            raise GenError(
                f"the prompt {prompt!r} has no words; expected words, such as '[0]Hello.'"
            )
        return line

    def parse(self, condition: Condition) -> Line | Dialogue:
        """Return the line that a text states, or that ends a conversation.

        Raises:
            GenError: both came, the role of a turn is no number, or there is not one readable sound
                for every earlier turn.
        """
        condition.require(self.accepts, "the model")
        if condition.messages is None:
            condition.require(self.accepts - {"audio"}, "a model that got no messages")
            return self.condition(condition.text or "")
        condition.require(self.accepts - {"text"}, "a model that got messages")
        lines = [self._turn(turn, i) for i, turn in enumerate(condition.messages)]
        if len(condition.audio) != len(lines) - 1:
            raise GenError(
                f"the condition has {plural(len(lines), 'message')} and"
                f" {plural(len(condition.audio), 'sound')}; expected one sound for every message"
                " but the last"
            )
        sounds = condition.media("audio")
        for i, sound in enumerate(sounds):
            mono_wave(sound, self.frontend.rate, f"audio.{i}")  # an unusable sound fails here
        earlier = tuple(zip(lines[:-1], sounds, strict=True))
        return Dialogue(earlier, lines[-1]) if earlier else lines[-1]

    def _turn(self, turn: Mapping[str, Any], index: int) -> Line:
        """Return the line of a turn of a conversation."""
        role, words = turn["role"], spoken_words(turn["content"], f"messages.{index}.content")
        if not (role.isascii() and role.isdigit()):
            raise bad_value(f"messages.{index}.role", role, "the number of a speaker, such as '0'")
        return Line(int(role), words)

    @torch.no_grad()
    def _frames(self, sound: GivenMedia) -> dict[str, Tensor]:
        """Inputs of the backbone [n + 1, D] for a sound of n frames, and the end of a turn."""
        wave = mono_wave(sound, self.frontend.rate)
        signal = torch.from_numpy(wave).to(self.model.device, self.model.dtype)
        codes = self.frontend.encode(signal[None, None])
        codes = pad(codes, (0, 1), value=self.silent)
        return {"frames": self.model.backbone_model.embed_tokens(codes.transpose(1, 2))[0]}

    def _prompt(self, condition: Line | Dialogue) -> list[int]:
        earlier, line = (
            (condition.earlier, condition.line)
            if isinstance(condition, Dialogue)
            else ((), condition)
        )
        ids: list[int] = []
        for spoken, sound in earlier:
            number = self.sounds.number(sound)
            count = len(self.sounds.of(torch.tensor([number]))[0]["frames"])
            first = self.model.config.text_vocab_size + FRAMES * number
            ids += [*self.tokenizer(str(spoken))["input_ids"], *range(first, first + count)]
        ids += self.tokenizer(str(line))["input_ids"]
        if len(ids) > self.room:
            raise GenError(
                f"the prompt has {len(ids)} tokens; expected at most {self.room}, the model's"
                " positions less those of the frames"
            )
        return [self.size + 1 + i for i in ids]

    def adapter(self, protocol: str) -> SpokenFrames:
        return SpokenFrames(self.model, self.sounds)

    def to_codes(self, tokens: Tensor, space: TokenSpace) -> Tensor:
        """Tokens [B, T Q] of whole frames -> codes [B, Q, T], cut where silence begins in all rows.
        One frame stays at least.
        """
        codes = tokens.view(len(tokens), -1, self.streams).transpose(1, 2)
        spoken = (codes != self.silent).any(1).long().cumprod(1).sum(1)
        return codes[..., : max(1, int(spoken.max()))]
