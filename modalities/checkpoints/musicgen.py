"""MusicGen: music from text (Copet et al., "Simple and Controllable Music Generation", arXiv
2306.05284).

A T5 encoder reads the prompt. A decoder attends to its states and writes codes of EnCodec. Stream q
is q steps late:

    step s holds the codes (q, s - q), q = 0 ... Q - 1, or the pad where there is no frame s - q

so that T frames take T + Q - 1 steps. The codes of a step are independent given the steps before:
one forward pass of the decoder gives the distributions of all of them. The gaps hold the pad, which
is also the decoder's input before the first step. The unconditional branch of classifier-free
guidance attends to zeros.

A sound to continue stands before the frames, with the same delay. Its last codes then fill the gaps
of the first Q - 1 steps as the decoder's inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from gen.contracts.checkpoint import FROM_PRETRAINED, Checkpoint, CheckpointFiles, LoadOptions
from gen.contracts.condition import Condition
from gen.contracts.layouts import make_layout, space
from gen.contracts.modality import Binding, Modality
from gen.core.errors import GenError, bad_value
from gen.core.registry import register
from gen.core.token_space import TokenSpace
from gen.media.given import GivenMedia
from gen.modalities.checkpoints.sounds import mono_wave
from gen.modalities.open_vocabulary import FreeAudio
from gen.models.adapters.conditioning import Conditions
from gen.models.load.cache_argument import with_cache
from gen.models.load.pretrained import pretrained, tokenizer_of
from gen.models.published.frame_lm import FrameCache, FrameLM, parallel_heads
from gen.tokenizers.audio.encodec import Encodec
from gen.tokenizers.base.codec import lasting

SECONDS = 5.0
GUIDANCE, TOP_K = 3.0, 250  # sampling of the paper


@dataclass(frozen=True)
class Music:
    """Text, empty in the unconditional branch, and the sound to continue, if any."""

    text: str
    sound: GivenMedia | None = None

    def __str__(self) -> str:
        return self.text if self.sound is None else f"{self.text} | {self.sound}"


class _Cache(FrameCache):
    """Cache that also holds the keys and values of the condition, computed once per layer."""

    self_and_cross: Any = None

    def keep(self, rows: Tensor) -> None:
        super().keep(rows)
        if self.self_and_cross is not None:
            for layer in self.self_and_cross.cross_attention_cache.layers:
                layer.keys, layer.values = layer.keys[rows], layer.values[rows]


class MusicFrames(FrameLM):
    """Decoder of ``MusicgenForConditionalGeneration``. Ids are the codes of one stream after
    another, then the pad.
    """

    specials = 1
    offset = True

    def __init__(self, model: torch.nn.Module, conditions: Conditions):
        c = model.config.decoder
        super().__init__(model, c.num_codebooks, c.vocab_size, c.num_hidden_layers)
        self.decoder, self.conditions = model.decoder.model.decoder, conditions

    def new_cache(self, slots: int) -> _Cache:
        return _Cache(slots)

    def begin(self, prompt: Tensor, length: Tensor, cache: FrameCache) -> tuple[Tensor, Tensor]:
        conditions = self.conditions.of(prompt[:, 0])
        states = [c["states"] for c in conditions]
        cache.rows["states"] = pad_sequence(states, batch_first=True)
        cache.rows["unseen"] = self.unseen([len(x) for x in states])
        before = [delayed(c["codes"], self.size) for c in conditions]
        gaps = self.streams - 1
        cache.rows["gaps"] = torch.stack([x[len(x) - gaps :] for x in before])
        steps = [x[: len(x) - gaps] for x in before]
        inputs = self.embed(pad_sequence(steps, batch_first=True, padding_value=self.size))
        return inputs, torch.tensor([len(x) for x in steps], device=length.device)

    def codes_at(self, steps: Tensor, cache: FrameCache) -> Tensor:
        """Return the codes of steps [B, L]: [B, L, Q]; gaps hold the sound that is continued."""
        codes, gaps = super().codes_at(steps, cache), cache.rows["gaps"]
        if not gaps.shape[1]:
            return codes
        row = torch.arange(len(steps), device=steps.device)[:, None]
        is_gap = torch.arange(self.streams, device=steps.device) > steps[..., None]
        return torch.where(is_gap, gaps[row, steps.clamp_max(gaps.shape[1] - 1)], codes)

    def unseen(self, lengths: list[int]) -> Tensor:
        """Attention mask of conditions of these lengths: float [B, 1, 1, n], 0 at their states and
        minus infinity behind them.
        """
        beyond = (
            torch.arange(max(lengths), device=self.device)
            >= torch.tensor(lengths, device=self.device)[:, None]
        )
        return torch.zeros(beyond.shape, dtype=self.dtype, device=self.device).masked_fill(
            beyond, torch.finfo(self.dtype).min
        )[:, None, None]

    @property
    def output_heads(self) -> list[torch.nn.Linear]:
        """See ``ModelAdapter``."""
        return list(self.model.decoder.lm_heads)

    def embed(self, codes: Tensor) -> Tensor:
        return sum(table(codes[..., q]) for q, table in enumerate(self.decoder.embed_tokens))

    def run(self, inputs: Tensor, slots: Tensor, cache: _Cache) -> Tensor:
        if cache.self_and_cross is None:
            cache.self_and_cross = EncoderDecoderCache(cache.slots, DynamicCache())
        mask = cache.slots.at(slots, self.dtype)
        unseen = cache.rows["unseen"].expand(-1, -1, slots.shape[1], -1)
        x = inputs + self.decoder.embed_positions.weights[slots].to(inputs)
        condition = dict(encoder_hidden_states=cache.rows["states"], encoder_attention_mask=unseen)
        for layer in self.decoder.layers:
            kept = with_cache(layer, cache.self_and_cross)
            x = layer(x, attention_mask=mask, **kept, **condition)
        return self.decoder.layer_norm(x)

    def heads(self, states: Tensor, codes: Tensor, steps: Tensor, streams: Tensor) -> Tensor:
        return parallel_heads(self.model.decoder.lm_heads, states, streams)


def delayed(codes: Tensor, pad: int) -> Tensor:
    """Return the steps of codes [T, Q], before them the pads that start the decoder: long
    [1 + T + Q - 1, Q]. Step s of stream q holds frame s - q; ``pad`` stands in gaps.
    """
    frames, streams = codes.shape
    steps = codes.new_full((frames + streams, streams), pad)
    for q in range(streams):
        steps[1 + q : 1 + q + frames, q] = codes[:, q]
    return steps


class DelayedWaves(FreeAudio):
    """Waves at EnCodec's sampling rate."""

    def prefix(self, media: Any, frontend, space: TokenSpace) -> Tensor:
        # the streams of a prefix end at different steps, so no list of first tokens describes it
        return Modality.prefix(self, media, frontend, space)


class Continued(DelayedWaves):
    """Waves at EnCodec's sampling rate. They begin with the sound that is continued, if any."""

    def complete(self, media: np.ndarray, condition: Music) -> np.ndarray:
        if condition.sound is None:
            return media
        frontend = self.checkpoint.frontend
        wave = mono_wave(condition.sound, frontend.rate)
        gap = np.zeros(-len(wave) % frontend.frame, np.float32)
        return np.concatenate([wave, gap, media])


@register("checkpoint", "musicgen")
class MusicGen(Checkpoint):
    """MusicGen small, medium and large (mono), as folders of transformers.

    ``audio`` is a sound to continue: the music follows it, and the media begin with it. Stereo
    models are not supported.

    Args:
        seconds: length of the music (5 seconds), without a sound that it continues.
        frames: length in frames, instead of ``seconds``.
    """

    architecture: ClassVar[str] = "MusicgenForConditionalGeneration"
    accepts = frozenset({"text", "audio"})
    most = {"audio": 1}
    takes = FROM_PRETRAINED - {"device_map"}
    modalities = ("speech",)
    protocols = ("causal",)
    sampling = {"guidance_scale": GUIDANCE, "top_k": TOP_K}
    tested = (
        "tiny random weights against transformers' MusicgenForConditionalGeneration and its"
        " `generate`"
    )

    @classmethod
    def matches(cls, files: CheckpointFiles) -> bool:
        return files.model_type == "musicgen"

    @classmethod
    def sampling_of(cls, files: CheckpointFiles, options: Mapping[str, Any]) -> Mapping[str, Any]:
        guidance_scale = files.json("generation_config.json").get("guidance_scale")
        own = {} if guidance_scale is None else {"guidance_scale": float(guidance_scale)}
        return {**cls.sampling, **own}

    def __init__(
        self,
        files: CheckpointFiles,
        modality: str,
        load: LoadOptions,
        *,
        seconds: float | None = None,
        frames: int | None = None,
    ):
        decoder_config = files.config.get("decoder", {})
        if decoder_config.get("audio_channels", 1) != 1:
            raise GenError(
                f"model {files.name} makes {decoder_config['audio_channels']} channels;"
                " expected a mono model, stereo is not supported"
            )
        self.tokenizer = tokenizer_of(files.path, name=files.name)
        self.model = pretrained(
            _class(getattr(transformers, self.architecture)),
            files.path,
            **load.pretrained_keywords,
            name=files.name,
        )
        self._require_decoder(files.name)
        c = self.model.config.decoder
        self.frontend = Encodec(self.model.audio_encoder, c.num_codebooks)
        length = lasting(self.frontend, seconds, frames, SECONDS)
        longest = c.max_position_embeddings - c.num_codebooks + 1
        if length > longest:
            raise bad_value(
                "the length in frames",
                length,
                f"at most {longest}, the positions of the decoder less those of the delay",
            )
        self.longest, self.length = longest, length
        self.layout = make_layout(
            "delay",
            sizes=(c.vocab_size,) * c.num_codebooks,
            grid=(length,),
            delays=tuple(range(c.num_codebooks)),
            vocabulary="offset",
            flat=True,
        )
        self.conditions = Conditions(self._encode)
        self.modality = Continued(self)
        token_space = space(self.layout, codebook=self.modality.codebook(self.frontend))
        self.binding = Binding(token_space, self._prompt, self._unconditional)
        self.sampling = self.sampling_of(files, {})

    def _require_decoder(self, name: str) -> None:
        """Check that the decoder starts with the pad and writes the codes of its codec.

        Raises:
            GenError: it does not.
        """
        c, pad = self.model.config.decoder, self._pad()
        if pad != c.vocab_size:
            raise GenError(
                f"model {name} starts with id {pad}; expected {c.vocab_size}, the id after"
                " the codes"
            )
        codebooks = len(self.model.audio_encoder.quantizer.layers)
        if (
            codebooks < c.num_codebooks
            or self.model.audio_encoder.config.codebook_size != c.vocab_size
        ):
            raise GenError(
                f"model {name} writes {c.num_codebooks} streams of {c.vocab_size} codes"
                f" and its audio_encoder has {codebooks} codebooks of"
                f" {self.model.audio_encoder.config.codebook_size}; expected equal numbers"
            )

    def _pad(self) -> int | None:
        c, start = self.model.config.decoder, self.model.generation_config.decoder_start_token_id
        return start if start is not None else c.bos_token_id

    def parse(self, condition: Condition) -> Music:
        """Return the music that a text and a sound to continue state.

        Raises:
            GenError: the text is empty, or the sound cannot be read or leaves too few positions.
        """
        condition.require(self.accepts, "the model", self.most)
        music = self.condition(condition.text or "")
        if not condition.audio:
            return music
        music = replace(music, sound=condition.media("audio")[0])
        wave = mono_wave(music.sound, self.frontend.rate)
        frames = -(-len(wave) // self.frontend.frame)
        if frames + self.length > self.longest:
            raise GenError(
                f"audio has {frames} frames; expected at most {self.longest - self.length}, the"
                " positions of the decoder less those of the music"
            )
        return music

    def condition(self, prompt: str) -> Music:
        return Music(super().condition(prompt))

    def _prompt(self, condition: Music) -> list[int]:
        return [self.layout.vocab_size + self.conditions.number(condition)]

    def _unconditional(self, condition: Music) -> list[int]:
        return self._prompt(replace(condition, text=""))

    @torch.no_grad()
    def _encode(self, condition: Music) -> dict[str, Tensor]:
        """States [n, D] that the decoder attends to, and codes [T, Q] that the music follows."""
        return {"states": self._states(condition.text), "codes": self._codes(condition.sound)}

    def _codes(self, sound: GivenMedia | None) -> Tensor:
        device, streams = self.model.device, self.model.config.decoder.num_codebooks
        if sound is None:
            return torch.zeros(0, streams, dtype=torch.long, device=device)
        wave = torch.from_numpy(mono_wave(sound, self.frontend.rate))
        return self.frontend.encode(wave.to(device, self.model.dtype)[None, None])[0].T

    def _states(self, text: str) -> Tensor:
        width = self.model.config.decoder.hidden_size
        if not text:
            return torch.zeros(1, width, device=self.model.device, dtype=self.model.dtype)
        ids = self.tokenizer(text, return_tensors="pt").input_ids.to(self.model.device)
        states = self.model.text_encoder(
            input_ids=ids, attention_mask=torch.ones_like(ids)
        ).last_hidden_state[0]
        # transformers adds this layer only where the widths differ
        if hasattr(self.model, "enc_to_dec_proj"):
            states = self.model.enc_to_dec_proj(states)
        return states

    def adapter(self, protocol: str) -> MusicFrames:
        return MusicFrames(self.model, self.conditions)

    def to_codes(self, tokens: Tensor, space: TokenSpace) -> Tensor:
        return self.layout.from_sequence(tokens)


def _class(architecture: type) -> type:
    class Loaded(architecture):
        """MusicGen that accepts the position table of older files, which is computed today.

        Every other unexpected tensor is an error. The class itself would ignore all names with a
        decoder in them, since its text encoder would do so alone.
        """

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self._keys_to_ignore_on_load_unexpected = {
                r"^decoder\.model\.decoder\.embed_positions\.weights$"
            }

    Loaded.__name__ = architecture.__name__
    return Loaded
