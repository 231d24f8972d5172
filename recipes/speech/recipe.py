"""Speech from nothing: synthesise spoken words, train the codec, a causal and a masked model,
measure them.

    python -m gen.recipes.speech all --work DIR            the run that made gen/zoo/speech-*
    python -m gen.recipes.speech all --work DIR --quick    a smoke run of the same path, a minute

Stages: ``codec``, ``decoder``, ``tokens``, ``causal``, ``masked``, ``draft``, ``export``,
``evaluate``; ``all`` runs them in this order. Training stages resume from their checkpoints in
``--work``; ``masked`` starts from the weights of ``causal``. ``export`` writes half-precision
weights to ``--zoo`` (default ``WORK/zoo``), ``evaluate`` measures those.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import MimiConfig, MimiModel
from transformers.audio_utils import mel_filter_bank

from gen.contracts.frontend import codebook_digest
from gen.modalities.speech import checker as spoken_check
from gen.modalities.speech import synth as spoken
from gen.models.load.locate import save_model
from gen.recipes.common.codebooks import Chain
from gen.recipes.common.data import drop_mask, encode_dataset, training_conditions
from gen.recipes.common.grid_evaluation import CAUSAL, MINOR, World
from gen.recipes.common.grid_models import Run, Shape
from gen.recipes.common.recipe import GridPlan, GridRecipe, draft_card
from gen.recipes.common.train import TrainConfig, fit_average
from gen.tokenizers.audio.mimi import Mimi

STREAMS, CODES, CHANNELS, HOP = 4, 128, 32, 640
FRAMES = spoken.SAMPLES // HOP
SHAPE = Shape((FRAMES, STREAMS), spoken.SLOTS, STREAMS * CODES, spoken.PAIRS)
GAIN = 1.2  # of the initial weights; ELU takes about as much away
CROP = 24  # frames of a training excerpt of the codec
SILENCE = 1e-6  # power below which sound is inaudible, 60 dB under full scale
WINDOWS = (128, 512, 1024)  # samples; short windows resolve clicks, long ones pitch


@dataclass(frozen=True, kw_only=True)
class SpeechPlan(GridPlan):
    """Sizes of the speech recipe."""

    codec_steps: int = 2000
    codec_batch: int = 12
    decoder_steps: int = 1500
    clips: int = 24_000
    causal: Run = Run(3000, 128, 5, seed=5, batch=32, cooldown=(1000, 1500))
    masked: Run = Run(1200, 128, 5, causal=False, start="causal/model", seed=4, batch=32)
    draft: Run = Run(1000, 64, 2, seed=6, batch=32)


_TINY = dict(width=32, layers=1, batch=4)
QUICK = SpeechPlan(
    codec_steps=6,
    codec_batch=2,
    decoder_steps=4,
    clips=16,
    causal=Run(4, seed=5, **_TINY),
    masked=Run(4, causal=False, start="causal/model", seed=4, **_TINY),
    draft=Run(4, seed=6, **_TINY),
    held_out=1,
)


def spoken_clips(batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless fresh clips, never of a held-out utterance: float [batch, 1, n] in [-1, 1], and their
    slots uint8 [batch, P].
    """
    rng = np.random.default_rng(seed)
    while True:
        utterances = training_conditions(batch, lambda: spoken.random_utterance(rng))
        waves = torch.from_numpy(np.stack([spoken.speak(u, rng) for u in utterances]))
        yield waves[:, None], torch.tensor([u.slots() for u in utterances], dtype=torch.uint8)


def excerpts(batch: int, seed: int) -> Iterator[Tensor]:
    """Excerpts of ``CROP`` frames, most from the part with words; every fourth from the start of a
    clip, where the codec has no left context.
    """
    generator = torch.Generator().manual_seed(seed)
    for waves, _ in spoken_clips(batch, seed):
        first = (torch.rand(batch, generator=generator) ** 2 * (FRAMES - CROP + 1)).long()
        first[::4] = 0
        yield torch.stack(
            [w[:, int(f) * HOP : (int(f) + CROP) * HOP] for w, f in zip(waves, first, strict=True)]
        )


def new_codec(streams: int = STREAMS, codes: int = CODES, filters: int = 12):
    """Create the codec: ``streams`` codebooks of ``codes`` vectors, and ``filters`` channels of the
    first layer."""
    return MimiModel(
        MimiConfig(
            sampling_rate=spoken.RATE,
            hidden_size=64,
            num_filters=filters,
            upsampling_ratios=[8, 5, 4, 2],  # and 2 more between codec and quantiser
            codebook_size=codes,
            codebook_dim=CHANNELS,
            vector_quantization_hidden_dimension=CHANNELS,
            num_quantizers=streams,
            num_semantic_quantizers=1,
            upsample_groups=64,
            num_hidden_layers=1,
            intermediate_size=128,
            num_attention_heads=2,
            num_key_value_heads=2,
            sliding_window=16,
        )
    )


class Training(nn.Module):
    """Codec with its codebooks as parameters; in the published layout they are sums and counts.

    Args:
        codec: the codec, of this architecture.
        is_new: draw its weights; false to go on from those that it has.
    """

    def __init__(self, codec: MimiModel, is_new: bool = True):
        super().__init__()
        self.codec = codec
        found = torch.zeros(codec.config.num_quantizers, codec.config.codebook_size, CHANNELS)
        if is_new:
            self._draw()
        else:
            found = torch.stack([layer.codebook.embed.detach() for layer in self._layers()])
        self.tables = nn.ParameterList(nn.Parameter(table) for table in found)

    def _draw(self) -> None:
        with torch.no_grad():
            # the class's own initialisation expects loaded weights and lets no signal through
            for module in self.codec.modules():
                if isinstance(module, (nn.Conv1d, nn.ConvTranspose1d)):
                    inputs = module.in_channels * module.kernel_size[0] // module.groups
                    inputs = (
                        inputs // module.stride[0]
                        if isinstance(module, nn.ConvTranspose1d)
                        else inputs
                    )
                    module.weight.normal_(0, GAIN / inputs**0.5)
                    if module.bias is not None:
                        module.bias.zero_()
            self.codec.decoder.decoder_seanet.layers[-1].conv.weight.mul_(0.05)

    def _layers(self) -> list[Any]:
        """Quantisers of the published layout, in order."""
        quantizer = self.codec.quantizer
        return [
            *quantizer.semantic_residual_vector_quantizer.layers,
            *quantizer.acoustic_residual_vector_quantizer.layers,
        ]

    def chains(self, warm: int, settle: int, generator: torch.Generator) -> list[Chain]:
        """Return the quantisers: Mimi's first codebook alone, and beside it a chain of the
        others."""
        halves = self.tables[:1], self.tables[1:]
        return [Chain(list(tables), warm, settle, generator) for tables in halves]

    def code(self, x: Tensor, chains: list[Chain], learn: bool = True) -> tuple[Tensor, Tensor]:
        """Encode and decode waves [B, 1, n]. Returns the decoded ones and the loss of codes."""
        quantizer = self.codec.quantizer
        z = self.codec.encoder(x).latents
        halves, loss = [], z.new_zeros(())
        for part, chain in zip(
            (
                quantizer.semantic_residual_vector_quantizer,
                quantizer.acoustic_residual_vector_quantizer,
            ),
            chains,
            strict=True,
        ):
            inside = part.input_proj(z)
            flat, more = chain(inside.transpose(1, 2).reshape(-1, CHANNELS), learn)
            halves.append(part.output_proj(flat.view(len(x), -1, CHANNELS).transpose(1, 2)))
            loss = loss + more
        return self.codec.decoder(halves[0] + halves[1]).audio_values, loss

    def finish(self):
        """Codec in the published layout."""
        for layer, table in zip(self._layers(), self.tables, strict=True):
            layer.codebook.embed_sum.copy_(table.detach())
            layer.codebook.cluster_usage.fill_(1.0)
            layer.codebook._embed = None  # the class keeps the quotient of both once it is asked
        return self.codec


@cache
def bands(size: int) -> Tensor:
    """Mel bands [frequencies, bands] of weight one; more of them for finer windows."""
    bank = mel_filter_bank(
        size // 2 + 1,
        12 + size // 16,
        0.0,
        spoken.RATE / 2,
        spoken.RATE,
        norm=None,
        mel_scale="htk",
    )
    table = torch.from_numpy(bank).float()
    return table / table.sum(0).clamp_min(1e-6)


def spectral_distance(x: Tensor, y: Tensor) -> Tensor:
    """Mean distance of two waves [B, n] over several windows: of magnitudes, which resolve pitch,
    and of the logarithmic power in mel bands, which resolves the loudness of noise.
    """
    total = x.new_zeros(())
    for size in WINDOWS:
        window = torch.hann_window(size)
        a, b = (
            torch.stft(w, size, size // 4, window=window, return_complex=True).abs() for w in (x, y)
        )
        total = total + 0.5 * F.l1_loss(a, b) / a.mean().clamp_min(1e-3)
        loud = [
            ((m.square() / window.square().sum()).transpose(1, 2) @ bands(size) + SILENCE).log()
            for m in (a, b)
        ]
        total = total + 0.5 * F.l1_loss(*loud)
    return total / len(WINDOWS)


def train_codec(work: Path, plan: SpeechPlan, log=print) -> None:
    """Train Mimi's split quantiser: one codebook alone, and beside it a residual chain of the
    others, both on the encoder's output.
    """
    torch.manual_seed(0)
    model, steps = Training(new_codec()), plan.codec_steps
    chains = model.chains(steps // 12, steps * 3 // 4, torch.Generator().manual_seed(0))

    def loss_fn(m, x):
        y, loss = m.code(x, chains)
        wave, spectrum = F.l1_loss(y, x) / x.abs().mean(), spectral_distance(x[:, 0], y[:, 0])
        figures = {
            "wave": wave.item(),
            "spectrum": spectrum.item(),
            "quantiser": loss.item(),
            "codes": sum(c.codes for c in chains),
        }
        return spectrum + 0.1 * wave + loss, figures

    fit_average(
        model,
        excerpts(plan.codec_batch, seed=1),
        loss_fn,
        TrainConfig(steps=steps, lr=0.002, weight_decay=0.0, save_every=250),
        out=work / "codec",
        on_step=lambda step, m: [c.on_step(step) for c in chains],
        log=log,
    )
    save_model(model.finish(), work / "codec" / "model")


def train_decoder(work: Path, plan: SpeechPlan, log=print) -> None:
    """Train the decoder further on fixed codes, possible while models of the codes are trained."""
    torch.manual_seed(0)
    codec = MimiModel.from_pretrained(work / "codec" / "model").eval()

    def loss_fn(m, x):
        with torch.no_grad():
            z = codec.quantizer.decode(codec.encode(x).audio_codes)
        y = m(z).audio_values
        wave, spectrum = F.l1_loss(y, x) / x.abs().mean(), spectral_distance(x[:, 0], y[:, 0])
        return spectrum + 0.1 * wave, {"wave": wave.item(), "spectrum": spectrum.item()}

    fit_average(
        codec.decoder,
        excerpts(plan.codec_batch, seed=3),
        loss_fn,
        TrainConfig(steps=plan.decoder_steps, lr=0.001, weight_decay=0.0, save_every=250),
        out=work / "decoder",
        log=log,
    )
    save_model(codec, work / "decoder" / "model")


def make_tokens(work: Path, plan: SpeechPlan, log=print) -> None:
    """Synthesise the training clips and save their codes (int16 [N, T], frame by frame, stream q's
    shifted by q codebooks) and slots (uint8 [N, P]).
    """
    frontend = Mimi.from_pretrained(work / "codec" / "model")
    shift = CODES * torch.arange(STREAMS)

    def encode(x: Tensor) -> Tensor:
        return (frontend.encode(x).transpose(1, 2) + shift).flatten(1).to(torch.int16)

    clips = spoken_clips(16, seed=2)
    encode_dataset(work / "tokens.pt", "codes", clips, plan.clips, 16, encode, log)


def words(slots: Tensor, generator: torch.Generator) -> Tensor:
    """Slots [B, P] as words that carry their slot, some conditions, voices and paces dropped."""
    drop = drop_mask(slots, generator, 0.15, slice(0, spoken.MAX_WORDS))
    return torch.from_numpy(spoken.pairs(torch.where(drop, spoken.ANY, slots).numpy()))


def world() -> World:
    """Dataset, checker and samplers of the evaluation."""
    llama = (
        "A small Llama with frame and stream embeddings (`gen/models/nets/grid.py`): six slots of"
        " words, voice and pace, then 240 codes of\n`speech-codec`"
    )
    return World(
        "speech",
        lambda n, seed: spoken.utterances(n, seed, held=True),
        spoken.speak,
        spoken_check.check_many,
        causal=CAUSAL,
        masked={
            "maskgit, 30 steps": {"name": "maskgit", "steps": 30},
            "halton, 30 steps": {"name": "halton", "steps": 30},
            "streams, 30 steps": {"name": "masked_iterative", "steps": 30, "order": "streams"},
        },
        about={
            "speech-codec": (
                "`transformers.MimiModel`: 16 kHz speech to 25 frames a second of 4 codes of 128."
            ),
            "speech-causal": f"{llama}, left to right.",
            "speech-masked": f"{llama}, any of them masked.",
            "speech-draft": draft_card("speech"),
        },
        frontend="speech-codec",
        quarter=MINOR,
    )


class SpeechRecipe(GridRecipe):
    """Codec and token models of speech."""

    doc, full, quick = __doc__, SpeechPlan(), QUICK
    name, frontend, shape, words = "speech", "speech-codec", SHAPE, words

    def stages(self):
        return {
            "codec": lambda: train_codec(self.work, self.plan, self.log),
            "decoder": lambda: train_decoder(self.work, self.plan, self.log),
            "tokens": lambda: make_tokens(self.work, self.plan, self.log),
            **self.model_stages(),
            "export": self.export,
            "evaluate": self.evaluate,
        }

    def export(self) -> None:
        """Write half-precision weights of the codec and of the models, which name its codebook."""
        codec = MimiModel.from_pretrained(self.work / "decoder" / "model").half()
        save_model(codec, self.zoo / self.frontend)
        self.export_models(codebook_digest(Mimi(codec).fingerprint))

    def world(self) -> World:
        return world()


main = SpeechRecipe.main


if __name__ == "__main__":
    main()
