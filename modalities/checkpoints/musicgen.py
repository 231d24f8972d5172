"""MusicGen: music after words (Copet et al., "Simple and Controllable Music Generation", arXiv
2306.05284).

A T5 encoder reads the prompt, a decoder attends to what it made of it, and writes codes of EnCodec.
Stream q is q steps late:

    step s holds the codes (q, s - q), q = 0 ... Q - 1, or the pad where there is no frame s - q

so that T frames take T + Q - 1 steps. The codes of a step do not look at each other: one forward
call of the decoder gives the law of all of them. What stands in the gaps is the pad, which is also
what the decoder sees before the first step. The unconditional half of guidance attends to zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gen.contracts.checkpoint import Checkpoint, CheckpointFiles, LoadOptions
from gen.contracts.layouts import make_layout, space
from gen.contracts.modality import Binding, Modality
from gen.core.errors import GenError, bad_value
from gen.core.registry import register
from gen.core.token_space import TokenSpace
from gen.modalities.open_vocabulary import FreeAudio
from gen.models.adapters.conditioning import Conditions
from gen.models.load.pretrained import pretrained, tokenizer_of
from gen.models.published.frame_lm import FrameCache, FrameLM, parallel_heads
from gen.tokenizers.audio.encodec import Encodec
from gen.tokenizers.base.codec import lasting

SECONDS = 5.0
GUIDANCE, TOP_K = 3.0, 250  # of the paper
UNSAID = ""  # the condition that says nothing; a prompt is never empty


class _Cache(FrameCache):
    """With the keys and values of the condition, which every layer computes once."""

    both: Any = None

    def keep(self, rows: Tensor) -> None:
        super().keep(rows)
        if self.both is not None:
            for layer in self.both.cross_attention_cache.layers:
                layer.keys, layer.values = layer.keys[rows], layer.values[rows]


class MusicFrames(FrameLM):
    """The decoder of ``MusicgenForConditionalGeneration``. Ids are the streams' codes one stream
    after another, then the pad."""

    specials = 1
    offset = True

    def __init__(self, model: torch.nn.Module, conditions: Conditions):
        c = model.config.decoder
        super().__init__(model, c.num_codebooks, c.vocab_size, c.num_hidden_layers)
        self.decoder, self.conditions = model.decoder.model.decoder, conditions

    def new_cache(self, slots: int) -> _Cache:
        return _Cache(slots)

    def begin(self, prompt: Tensor, length: Tensor, cache: FrameCache) -> tuple[Tensor, Tensor]:
        found = [c["states"] for c in self.conditions.of(prompt[:, 0])]
        cache.rows["states"] = torch.nn.utils.rnn.pad_sequence(found, batch_first=True)
        cache.rows["unseen"] = self.unseen([len(x) for x in found])
        left_padding = torch.full((len(prompt), 1, self.streams), self.size, device=prompt.device)
        return self.embed(left_padding), torch.ones_like(length)

    def unseen(self, lengths: list[int]) -> Tensor:
        """The mask of conditions of these lengths: float [B, 1, 1, n], 0 where there is something
        to see."""
        beyond = (
            torch.arange(max(lengths), device=self.device)
            >= torch.tensor(lengths, device=self.device)[:, None]
        )
        return torch.zeros(beyond.shape, dtype=self.dtype, device=self.device).masked_fill(
            beyond, torch.finfo(self.dtype).min
        )[:, None, None]

    def embed(self, codes: Tensor) -> Tensor:
        return sum(table(codes[..., q]) for q, table in enumerate(self.decoder.embed_tokens))

    def run(self, inputs: Tensor, slots: Tensor, cache: _Cache) -> Tensor:
        from transformers.cache_utils import DynamicCache, EncoderDecoderCache

        if cache.both is None:
            cache.both = EncoderDecoderCache(cache.slots, DynamicCache())
        mask = cache.slots.at(slots, self.dtype)
        unseen = cache.rows["unseen"].expand(-1, -1, slots.shape[1], -1)
        x = inputs + self.decoder.embed_positions.weights[slots].to(inputs)
        said = dict(encoder_hidden_states=cache.rows["states"], encoder_attention_mask=unseen)
        for layer in self.decoder.layers:
            x = layer(x, attention_mask=mask, past_key_values=cache.both, **said)
        return self.decoder.layer_norm(x)

    def heads(self, states: Tensor, codes: Tensor, steps: Tensor, streams: Tensor) -> Tensor:
        return parallel_heads(self.model.decoder.lm_heads, states, streams)


class Music(FreeAudio):
    """Waves at the rate of EnCodec."""

    def prefix(self, media: Any, frontend, space: TokenSpace) -> Tensor:
        # the streams of a beginning end at different steps, which no list of first tokens can say
        return Modality.prefix(self, media, frontend, space)


@register("checkpoint", "musicgen")
class MusicGen(Checkpoint):
    """MusicGen small, medium and large (mono), as folders of transformers.

    ``seconds`` or ``frames``: how long the music is (5 seconds). Stereo models, and prompts of
    sound, are not taken.
    """

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

    def __init__(
        self,
        files: CheckpointFiles,
        modality: str,
        how: LoadOptions,
        *,
        seconds: float | None = None,
        frames: int | None = None,
    ):
        if how.device_map is not None:
            raise GenError(
                f"model {files.name} came with a device_map; expected none, models of this family"
                " run on one device"
            )
        said = files.config.get("decoder", {})
        if said.get("audio_channels", 1) != 1:
            raise GenError(
                f"model {files.name} makes {said['audio_channels']} channels; expected a mono"
                " model, stereo is not supported"
            )
        self.tokenizer = tokenizer_of(files.path, name=files.name)
        self.model = pretrained(
            _class(), files.path, device=how.device, dtype=how.dtype, name=files.name
        )
        c, pad = self.model.config.decoder, self._pad()
        if pad != c.vocab_size:
            raise GenError(
                f"model {files.name} starts with id {pad}; expected {c.vocab_size}, the id after"
                " the codes"
            )
        there = len(self.model.audio_encoder.quantizer.layers)
        if there < c.num_codebooks or self.model.audio_encoder.config.codebook_size != c.vocab_size:
            raise GenError(
                f"model {files.name} writes {c.num_codebooks} streams of {c.vocab_size} codes, its"
                f" audio_encoder has {there} codebooks of"
                f" {self.model.audio_encoder.config.codebook_size}; expected as many"
            )
        self.frontend = Encodec(self.model.audio_encoder, c.num_codebooks)
        length = lasting(self.frontend, seconds, frames, SECONDS)
        longest = c.max_position_embeddings - c.num_codebooks + 1
        if length > longest:
            raise bad_value(
                "the length in frames",
                length,
                f"at most {longest}, the positions of the decoder less those of the delay",
            )
        self.layout = make_layout(
            "delay",
            sizes=(c.vocab_size,) * c.num_codebooks,
            grid=(length,),
            delays=tuple(range(c.num_codebooks)),
            vocabulary="offset",
            flat=True,
        )
        self.conditions = Conditions(self._encode)
        self.modality = Music(self)
        found = space(self.layout, codebook=self.modality.codebook(self.frontend))
        self.binding = Binding(found, self._prompt, self._prompt(UNSAID))
        own = files.json("generation_config.json").get("guidance_scale")
        self.sampling = {
            **type(self).sampling,
            **({} if own is None else {"guidance_scale": float(own)}),
        }

    def _pad(self) -> int | None:
        c, own = self.model.config.decoder, self.model.generation_config.decoder_start_token_id
        return own if own is not None else c.bos_token_id

    def _prompt(self, condition: str) -> list[int]:
        return [self.layout.vocab_size + self.conditions.number(condition)]

    @torch.no_grad()
    def _encode(self, condition: str) -> dict[str, Tensor]:
        """What the decoder attends to: states [n, D]."""
        width = self.model.config.decoder.hidden_size
        if condition == UNSAID:
            return {
                "states": torch.zeros(1, width, device=self.model.device, dtype=self.model.dtype)
            }
        ids = self.tokenizer(condition, return_tensors="pt").input_ids.to(self.model.device)
        states = self.model.text_encoder(
            input_ids=ids, attention_mask=torch.ones_like(ids)
        ).last_hidden_state[0]
        return {
            "states": (
                self.model.enc_to_dec_proj(states)
                if hasattr(self.model, "enc_to_dec_proj")
                else states
            )
        }

    def adapter(self, protocol: str) -> MusicFrames:
        return MusicFrames(self.model, self.conditions)

    def to_codes(self, tokens: Tensor, space: TokenSpace) -> Tensor:
        return self.layout.from_sequence(tokens)


def _class():
    from transformers import MusicgenForConditionalGeneration

    class Loaded(MusicgenForConditionalGeneration):
        """Older files hold the table of positions, which is computed today. Else nothing may be
        extra: the class itself passes over whatever has a decoder in its name, since its encoder of
        texts would alone."""

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self._keys_to_ignore_on_load_unexpected = {
                r"^decoder\.model\.decoder\.embed_positions\.weights$"
            }

    Loaded.__name__ = MusicgenForConditionalGeneration.__name__
    return Loaded
