"""Frontends of one's own media: vector quantisation of images (``diffusers.VQModel``), clips
(``transformers.Emu3VQVAE``) and motions (``MotionVQVAE``), and residual vector quantisation of
sounds (``transformers.MimiModel``).

The losses and codebooks are those of the recipes that made the built-in frontends.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gen.core.errors import bad_value
from gen.core.files import put_text
from gen.media.motion.features import LOWER, UPPER, statistics
from gen.models.load.libraries import diffusers
from gen.models.load.locate import ZOO, locate, read_config, save_model
from gen.recipes.common.codebooks import Chain
from gen.recipes.common.train import fast_bfloat16
from gen.recipes.image.recipe import reconstruction
from gen.recipes.motion import recipe as motion
from gen.recipes.speech.recipe import CROP, HOP, Training, new_codec, spectral_distance
from gen.recipes.video import recipe as video
from gen.tokenizers.audio.mimi import Mimi
from gen.tokenizers.image.vq import VQ
from gen.tokenizers.motion.motion_vq import MotionVQ
from gen.tokenizers.motion.motion_vq_net import MotionVQVAE
from gen.tokenizers.video.video_vq import VideoVQ
from gen.training.config import BFLOAT16, FLOAT32, Frontend, TrainingConfig
from gen.training.frontends import MEDIA_SIZE, Encoder
from gen.training.media_data import MediaData
from gen.training.task import MODEL, Task, Written

FRAMES = 8  # of a clip that are trained on together
LATENTS = 8  # channels of an image before and after quantisation
NEW_CODES = 50  # steps before the codebook of a model to start from is replaced


def make_frontend_task(config: TrainingConfig, data: MediaData) -> FrontendTask:
    """Create the task that trains a frontend."""
    return TASKS[config.frontend.modality](config, data)


class FrontendTask(Task):
    """Autoencoder with codebooks. ``chains``: its quantisers."""

    casts = False
    chains: list[Chain]

    def __init__(self, config: TrainingConfig, data: MediaData):
        self.config, self.data, self.asked = config, data, config.frontend
        torch.manual_seed(config.seed)

    def on_step(self, step: int) -> None:
        for chain in self.chains:
            chain.on_step(step)

    def state(self) -> dict[str, Any]:
        return {"chains": [chain.state() for chain in self.chains]}

    def load_state(self, state: dict[str, Any]) -> None:
        for chain, saved in zip(self.chains, state["chains"], strict=True):
            chain.load_state(saved)

    def _schedule(self, keeps_codes: bool) -> tuple[int, int]:
        """Return the steps without quantisation, and the step that unused codes are revived to."""
        steps = self.config.steps
        warm = max(1, steps // 16)
        if self.asked.start:
            warm = 0 if keeps_codes else min(NEW_CODES, warm)
        return warm, steps * 3 // 4

    def _is_low(self, device: torch.device) -> bool:
        """Whether the forward pass runs in bfloat16."""
        asked = {FLOAT32: False, BFLOAT16: True}
        return asked.get(self.config.precision, fast_bfloat16(device))

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.config.seed)

    def signals(self, rows: Tensor) -> Tensor:
        """Return samples as the frontend's ``preprocess`` returns them, [B, ...]."""
        return self.data.batch(rows)

    def frontend(self) -> Encoder:
        """Return the frontend with the weights of now."""
        usual = self.data.encoder
        return Encoder(usual.modality, type(usual.frontend)(self.finished()), MODEL, usual.usual)

    def finished(self) -> Any:
        """Return the network of the frontend."""
        return self.model

    def save(self, out: Path) -> Written:
        self.model.eval()
        with torch.no_grad():
            save_model(self.finished(), out / MODEL)
        write_media_size(out / MODEL, self.data.size.axes)
        return Written(str(out / MODEL))


class ImageTask(FrontendTask):
    """VQ of images; half of the images of a batch are mirrored."""

    def __init__(self, config: TrainingConfig, data: MediaData):
        super().__init__(config, data)
        self.model: Any = (
            started(self.asked.start, VQ) if self.asked.start else new_vq(self.asked, data)
        )
        codes = self.model.config.num_vq_embeddings
        keeps = codes == self.asked.codes
        if not keeps:
            self._replace_codebook(self.asked.codes)
        table = self.model.quantize.embedding.weight
        self.chains = [Chain([table], *self._schedule(keeps), self._generator())]

    def _replace_codebook(self, codes: int) -> None:
        table = nn.Embedding(codes, self.model.config.vq_embed_dim)
        self.model.quantize.embedding, self.model.quantize.n_e = table, codes
        self.model.register_to_config(num_vq_embeddings=codes)

    def loss(self, forward: Any, rows: Tensor, seed: int, drop: float) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        x, learns = self.data.batch(rows), self.model.training
        if learns:
            mirrored = torch.rand(len(x), generator=generator) < 0.5
            x[mirrored] = x[mirrored].flip(-1)
        device = next(self.model.parameters()).device
        x, m = x.to(device), self.model
        with torch.autocast(device.type, torch.bfloat16, enabled=self._is_low(device)):
            h = m.quant_conv(m.encoder(x)).float()
            flat, loss = self.chains[0](h.permute(0, 2, 3, 1).flatten(0, 2), learns)
            z = flat.view(len(h), *h.shape[2:], -1).permute(0, 3, 1, 2)
            y = m.decoder(m.post_quant_conv(z)).float()
        return reconstruction(y, x)[0] + loss


class SoundTask(FrontendTask):
    """RVQ of sounds: Mimi's first codebook alone, and a residual chain of the others."""

    def __init__(self, config: TrainingConfig, data: MediaData):
        super().__init__(config, data)
        asked, keeps = self.asked, True
        if asked.start:
            codec = self._started()
            keeps = codec.config.codebook_size == asked.codes
            keeps = keeps and codec.config.num_quantizers == asked.streams
            if not keeps:
                codec = with_codebooks(codec, asked.streams, asked.codes)
            self.model: Any = Training(codec, is_new=False)
        else:
            filters = max(4, asked.width * 3 // 8)
            self.model = Training(new_codec(asked.streams, asked.codes, filters))
        self.chains = self.model.chains(*self._schedule(keeps), self._generator())

    def _started(self) -> Any:
        """Load the codec to start from. Raises ``GenError`` for another architecture."""
        name = self.asked.start
        folder, found = locate(name, "frontend"), read_config(name)
        is_own = isinstance(folder, Path) and found.get("model_type") == "mimi"
        if not is_own or found.get("upsampling_ratios") != read_config(ZOO / "speech-codec").get(
            "upsampling_ratios"
        ):
            raise bad_value("frontend.start", name, "a codec such as 'speech-codec'")
        return Mimi.from_pretrained(folder).model.train()

    def loss(self, forward: Any, rows: Tensor, seed: int, drop: float) -> Tensor:
        device = next(self.model.parameters()).device
        x = self.data.batch(rows).to(device)
        if self.model.training:
            x = excerpts(x, torch.Generator().manual_seed(seed))
        with torch.autocast(device.type, torch.bfloat16, enabled=self._is_low(device)):
            y, loss = self.model.code(x, self.chains, self.model.training)
        y = y.float()
        wave = F.l1_loss(y, x) / x.abs().mean().clamp_min(1e-4)
        return spectral_distance(x[:, 0], y[:, 0]) + 0.1 * wave + loss

    @torch.no_grad()
    def finished(self) -> Any:
        return self.model.finish()


class ClipTask(FrontendTask):
    """VQ of clips, on a few frames of each; half of the clips of a batch are mirrored."""

    def __init__(self, config: TrainingConfig, data: MediaData):
        super().__init__(config, data)
        keeps = True
        if self.asked.start:
            self.model: Any = started(self.asked.start, VideoVQ)
            keeps = self.model.config.codebook_size == self.asked.codes
        else:
            self.model = video.new_vq(self.asked.codes, self.asked.width)
            video.gentle_start(self.model)
        if not keeps:
            table = nn.Embedding(self.asked.codes, self.model.config.embed_dim)
            self.model.quantize.embedding = table
            self.model.config.codebook_size = self.asked.codes
        table = self.model.quantize.embedding.weight
        self.chains = [Chain([table], *self._schedule(keeps), self._generator())]

    def loss(self, forward: Any, rows: Tensor, seed: int, drop: float) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        x, learns = self.data.batch(rows), self.model.training
        if learns:
            steps = video.STRIDE[0]
            last = max(0, x.shape[1] - FRAMES) // steps
            first = steps * int(torch.randint(last + 1, (), generator=generator))
            x = x[:, first : first + FRAMES].contiguous()
            mirrored = torch.rand(len(x), generator=generator) < 0.5
            x[mirrored] = x[mirrored].flip(-1)
        device = next(self.model.parameters()).device
        x = x.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=self._is_low(device)):
            y, h, loss = video.code(self.model, self.chains[0], x, learns)
        return F.mse_loss(y, x) + 0.2 * F.l1_loss(y, x) + loss + video.agreement(x, h)


class MotionTask(FrontendTask):
    """VQ of both parts of the body."""

    def __init__(self, config: TrainingConfig, data: MediaData):
        super().__init__(config, data)
        asked, keeps = self.asked, True
        if asked.start:
            self.model: Any = started(asked.start, MotionVQ)
            keeps = self.model.config.codebook_size == asked.codes
            if not keeps:
                self._replace_codebooks(asked.codes)
        else:
            parts = [LOWER.tolist(), UPPER.tolist()]
            self.model = MotionVQVAE(parts, asked.codes, motion.CHANNELS, asked.width)
            mean, std = statistics([*data.signals.numpy()])
            self.model.mean.copy_(torch.from_numpy(mean))
            self.model.std.copy_(torch.from_numpy(std))
        parts = range(len(self.model.config.parts))
        schedule = self._schedule(keeps)
        self.chains = [Chain(self.model.chain(p), *schedule, self._generator()) for p in parts]
        self.weights = motion.feature_weights()

    def _replace_codebooks(self, codes: int) -> None:
        for number, table in enumerate(self.model.tables):
            self.model.tables[number] = nn.Parameter(torch.randn(codes, table.shape[1]))
        self.model.register_to_config(codebook_size=codes)

    def signals(self, rows: Tensor) -> Tensor:
        return (self.data.batch(rows) - self.model.mean.cpu()) / self.model.std.cpu()

    def loss(self, forward: Any, rows: Tensor, seed: int, drop: float) -> Tensor:
        x = self.signals(rows).to(self.model.mean.device)
        weights = self.weights.to(x.device)
        y, loss = motion.code(self.model, self.chains, x, self.model.training)
        steps = motion.apart(y.diff(dim=1), x.diff(dim=1), weights)
        return motion.apart(y, x, weights) + 0.5 * steps + loss


TASKS: dict[str, type[FrontendTask]] = {
    "image": ImageTask,
    "speech": SoundTask,
    "video": ClipTask,
    "motion": MotionTask,
}


def started(name: str, cls: Any) -> Any:
    """Load the network of the frontend to start from, an instance of ``cls``.

    Raises:
        GenError: another architecture.
    """
    folder = locate(name, "frontend")
    config = read_config(name)
    stated = (config.get("_class_name"), *(config.get("architectures") or ()))
    if not isinstance(folder, Path) or cls.architecture not in stated:
        raise bad_value("frontend.start", name, f"one of class {cls.architecture} on this machine")
    return cls.from_pretrained(folder).model.train()


def with_codebooks(codec: Any, streams: int, codes: int) -> Any:
    """Return a codec with the layers of another one, and new codebooks.

    Args:
        codec: Mimi of transformers.
        streams: codebooks of a frame.
        codes: vectors of a codebook.
    """
    config = copy.deepcopy(codec.config)
    config.num_quantizers, config.codebook_size = streams, codes
    made = type(codec)(config)
    kept = {k: v for k, v in codec.state_dict().items() if ".codebook." not in k}
    made.load_state_dict(kept, strict=False)
    return made.train()


def excerpts(x: Tensor, generator: torch.Generator) -> Tensor:
    """Cut waves [B, 1, n] to excerpts of whole frames, every fourth one from the start, where a
    codec has no left context."""
    frames = x.shape[-1] // HOP
    length = min(CROP, frames)
    first = torch.randint(frames - length + 1, (len(x),), generator=generator)
    first[::4] = 0
    return torch.stack([w[:, f * HOP : (f + length) * HOP] for w, f in zip(x, first, strict=True)])


def new_vq(asked: Frontend, data: MediaData) -> Any:
    """Create a VQ whose codes are ``asked.factor`` pixels wide and high."""
    levels = asked.factor.bit_length()
    return diffusers().VQModel(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=(*(asked.width,) * (levels - 1), 2 * asked.width),
        layers_per_block=1,
        latent_channels=LATENTS,
        num_vq_embeddings=asked.codes,
        vq_embed_dim=LATENTS,
        norm_num_groups=16,
        sample_size=data.size.axes[0],
        mid_block_add_attention=False,
    )


def write_media_size(folder: Path, axes: tuple[int, ...]) -> None:
    """Write the size of the media that a frontend was trained on beside it."""
    put_text(folder / MEDIA_SIZE, "x".join(map(str, axes)) + "\n")
