"""CSM: a conversational speech model (Sesame, "Crossing the uncanny valley of conversational
voice", 2025; `sesame/csm-1b`).

A backbone reads the ids of "[speaker]words" and then frames, the vectors of whose Q codes of Mimi
are summed; its state before frame t gives the law of the first code, and a small depth decoder that
of the others:

    p(c_t | before) = p(c_{t,0} | h_t) prod_q p(c_{t,q} | h_t, c_{t,0}, ..., c_{t,q-1})

Drafts of a whole frame go through the depth decoder at once. The model ends an utterance with a
frame of zeros, which is no id of its own: here an end id is the only one that may follow such a
frame, and may follow no other, so the law of the codes stays what it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from gen.contracts.checkpoint import Checkpoint, CheckpointFiles, LoadOptions
from gen.contracts.layouts import make_layout, space
from gen.contracts.modality import Binding
from gen.core.errors import GenError, bad_value
from gen.core.registry import register
from gen.core.token_space import TokenSpace
from gen.modalities.open_vocabulary import FreeAudio
from gen.models.load.pretrained import pretrained, tokenizer_of
from gen.models.published.frame_lm import FrameCache, FrameLM
from gen.tokenizers.audio.mimi import Mimi
from gen.tokenizers.base.codec import lasting

SECONDS = 10.0
SPOKEN = re.compile(r"\[(\d+)\](.*)", re.DOTALL)


@dataclass(frozen=True)
class Line:
    """What a speaker says; as a string, as the model reads it."""

    speaker: int
    words: str

    def __str__(self) -> str:
        return f"[{self.speaker}]{self.words}"


@dataclass(frozen=True)
class AfterSilence:
    """A constraint: the end follows a frame whose codes are all ``silent``, the last one not
    counted (transformers' rule), and nothing else does."""

    streams: int
    eos_token_id: int
    silent: int
    vocab_size: int

    def legal(self, history: Tensor, positions: Tensor) -> Tensor:
        back = (
            positions[..., None]
            - self.streams
            + torch.arange(self.streams - 1, device=positions.device)
        )
        before = history.gather(1, back.clamp_min(0).flatten(1)).view(back.shape)
        over = (
            (before == self.silent).all(-1)
            & (positions >= self.streams)
            & (positions % self.streams == 0)
        )
        end = torch.arange(self.vocab_size, device=positions.device) == self.eos_token_id
        return over[..., None] == end


class SpokenFrames(FrameLM):
    """``CsmForConditionalGeneration``: the steps are the backbone's. ``depth_calls``: how often the
    depth decoder ran."""

    specials = 1

    def __init__(self, model: torch.nn.Module):
        c = model.config
        super().__init__(model, c.num_codebooks, c.codec_config.codebook_size, c.num_hidden_layers)
        self.backbone, self.depth, self.depth_calls = model.backbone_model, model.depth_decoder, 0

    def begin(self, prompt: Tensor, length: Tensor, cache: FrameCache) -> tuple[Tensor, Tensor]:
        return self.model.embed_text_tokens(prompt), length

    def embed(self, codes: Tensor) -> Tensor:
        return self.backbone.embed_tokens(
            codes.clamp_max(self.size - 1)
        )  # behind an end nothing is asked

    def run(self, inputs: Tensor, slots: Tensor, cache: FrameCache) -> Tensor:
        mask = cache.slots.at(slots, self.dtype)
        out = self.backbone(
            inputs_embeds=inputs,
            attention_mask=mask,
            position_ids=slots,
            past_key_values=cache.slots,
            use_cache=True,
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
        """Logits [m, size] of the m places ``later``; every frame goes through the depth decoder
        once."""
        row = torch.arange(len(steps), device=steps.device)[:, None].expand_as(steps)
        frame = row[later] * (int(steps.max()) + 1) + steps[later]
        frames, of = frame.unique(return_inverse=True)
        one = torch.zeros_like(frames).scatter_(
            0, of, torch.arange(len(of), device=of.device)
        )  # a place of every frame
        deepest = int(streams[later].max())
        ids = pad(
            codes[later][one][:, :deepest].clamp_max(self.size - 1), (1, 0)
        )  # the first one is replaced by the state
        every = torch.ones_like(
            ids
        )  # without a mask the class takes its own position ids for those of packed rows
        logits = self.depth(
            input_ids=ids,
            attention_mask=every,
            backbone_last_hidden_state=states[later][one],
            use_cache=False,
        ).logits
        self.depth_calls += 1
        return logits[of, streams[later] - 1, : self.size]


class Speech(FreeAudio):
    """Waves at the rate of Mimi."""

    def layout(self, sizes, grid):
        return make_layout("depth", sizes=sizes, grid=grid)


@register("checkpoint", "csm")
class CSM(Checkpoint):
    """CSM-1B as a folder of transformers: what a speaker says, "[0]Hello." being speaker 0.

    ``seconds`` or ``frames``: how long an utterance is at most (10 seconds); the model may end it
    before. ``speaker``: of prompts that name none. Guidance compares with a speaker who says
    nothing.
    """

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
        how: LoadOptions,
        *,
        seconds: float | None = None,
        frames: int | None = None,
        speaker: int = 0,
    ):
        from transformers import CsmForConditionalGeneration

        if how.device_map is not None:
            raise GenError(
                f"model {files.name} came with a device_map; expected none, models of this family"
                " run on one device"
            )
        if not isinstance(speaker, int) or isinstance(speaker, bool) or speaker < 0:
            raise bad_value("speaker", speaker, "an integer of at least 0")
        self.speaker = speaker
        self.tokenizer = tokenizer_of(files.path, name=files.name)
        self.model = pretrained(
            CsmForConditionalGeneration,
            files.path,
            device=how.device,
            dtype=how.dtype,
            name=files.name,
        )
        c, codec = self.model.config, self.model.codec_model.config
        q, size, silent = c.num_codebooks, codec.codebook_size, c.codebook_eos_token_id
        if codec.model_type != "mimi" or codec.num_quantizers < q or size > c.vocab_size or q < 2:
            raise GenError(
                f"model {files.name} has {q} streams of {c.vocab_size} ids and the codec"
                f" {codec.model_type!r} with {codec.num_quantizers} codebooks of {size}; expected"
                " at least 2 streams, and Mimi with as many codebooks of at most as many codes"
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
        plain = space(self.modality.layout((size,) * q, (length,)), vocab_size=size + 1)
        legal = plain.legal.clone()
        legal[q:, size] = True
        found = TokenSpace(
            plain.grid,
            size + 1,
            legal,
            eos_token_id=size,
            constraint=AfterSilence(q, size, silent, size + 1),
        )
        self.size, self.room = size, c.max_position_embeddings - length
        self.binding = Binding(found, self._prompt, self._prompt(Line(speaker, "")))

    def condition(self, prompt: str) -> Line:
        found = SPOKEN.fullmatch(super().condition(prompt))
        line = (
            Line(int(found[1]), found[2].strip()) if found else Line(self.speaker, prompt.strip())
        )
        if not line.words:
            raise GenError(
                f"the prompt {prompt!r} has no words; expected some, such as '[0]Hello.'"
            )
        return line

    def _prompt(self, line: Line) -> list[int]:
        ids = self.tokenizer(str(line))["input_ids"]
        if len(ids) > self.room:
            raise GenError(
                f"the prompt has {len(ids)} ids; expected at most {self.room}, which the frames"
                " leave of the model's positions"
            )
        return [self.size + 1 + i for i in ids]

    def adapter(self, protocol: str) -> SpokenFrames:
        return SpokenFrames(self.model)

    def to_codes(self, tokens: Tensor, space: TokenSpace) -> Tensor:
        """Tokens [B, T Q] of whole frames -> [B, Q, T], without what begins with a frame of silence
        in all rows; one frame stays at least."""
        codes = tokens.view(len(tokens), -1, self.streams).transpose(1, 2)
        spoken = (codes != self.silent).any(1).long().cumprod(1).sum(1)
        return codes[..., : max(1, int(spoken.max()))]
