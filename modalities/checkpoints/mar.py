"""MAR: images of ImageNet classes as continuous latents, in any order (arXiv 2406.11838)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gen.contracts.checkpoint import Checkpoint, CheckpointFiles, LoadOptions
from gen.contracts.modality import Binding
from gen.core.errors import GenError, bad_value
from gen.core.registry import register
from gen.core.token_space import TokenSpace
from gen.modalities.checkpoints.options import class_number
from gen.modalities.open_vocabulary import FreeImage
from gen.models.adapters.language_models import MaskedLatentLM
from gen.models.load.libraries import diffusers
from gen.models.load.pretrained import pretrained
from gen.models.load.weights import (
    PICKLES,
    Weights,
    fill,
    require_in_memory,
    unpickled,
    without_storage,
)
from gen.models.nets.ldm_vae import load_ldm_vae
from gen.models.published.mar import MAR, MARConfig
from gen.tokenizers.image.kl import KL

WEIGHTS = "checkpoint-last.pth"
SCALE = 0.2325  # scale that brings the latents of kl16.ckpt to unit variance
VAES = (
    "kl16.ckpt",
    "vae/kl16.ckpt",
    "../kl16.ckpt",
    "../vae/kl16.ckpt",
    "../../vae/kl16.ckpt",
    "vae/config.json",
    "../vae/config.json",
)
# guidance of the published evaluation, by width; other widths get the first
GUIDANCE = {
    768: 2.9,
    1024: 3.0,
    1280: 3.2,
}


@register("checkpoint", "mar")
class MARImages(Checkpoint):
    """MAR base, large and huge: classes of ImageNet as continuous latents, with its KL autoencoder.

    A prompt is the number of a class.

    Args:
        vae: autoencoder, a file with the keys of latent diffusion or a folder of diffusers'
            ``AutoencoderKL``. The default is kl16.ckpt in the folder, beside it, or where the
            published scripts put it.
        scaling_factor: factor on the latents. The default is 0.2325 for a file, and the config's
            for a folder.
        heads: attention heads, needed where the width is not a published one.
        num_sampling_steps: transitions of the diffusion head.
        sigma_floor: noise of the last transition; published sampling has none.
        guidance_schedule: ``linear`` in the share of known positions, as in the published
            evaluation, or ``constant``.
        ema: take the averaged weights where a file holds both.
    """

    modalities = ("image",)
    protocols = ("masked",)
    takes = frozenset({"device_map"})
    runs_from_disk = False
    kind = "latents"
    tested = (
        "tiny random weights in the published layout against a plain forward and the posterior's"
        " formula"
    )

    @classmethod
    def matches(cls, files: CheckpointFiles) -> bool:
        if files.path.is_file():
            return (
                files.path.name == WEIGHTS
                or re.match(r"mar[_-].*\.(pth|pt|safetensors)$", files.path.name) is not None
            )
        return files.has(WEIGHTS) and not files.has("config.json", "model_index.json")

    @classmethod
    def sampling_of(cls, files: CheckpointFiles, options: Mapping[str, Any]) -> Mapping[str, Any]:
        weights = _weights(files, options.get("ema", True))
        config = MARConfig.of(weights.shapes, options.get("heads"))
        return {"guidance_scale": GUIDANCE.get(config.decoder[0], GUIDANCE[768])}

    def __init__(
        self,
        files: CheckpointFiles,
        modality: str,
        load: LoadOptions,
        *,
        vae: str | Path | None = None,
        scaling_factor: float | None = None,
        heads: int | None = None,
        num_sampling_steps: int = 100,
        sigma_floor: float = 1e-4,
        guidance_schedule: str = "linear",
        ema: bool = True,
    ):
        weights = _weights(files, ema)
        config = MARConfig.of(
            weights.shapes,
            heads,
            head_steps=num_sampling_steps,
            sigma_floor=sigma_floor,
            guidance_schedule=guidance_schedule,
        )
        side = math.isqrt(config.positions)
        if side**2 != config.positions:
            raise GenError(
                f"model {files.name} has {config.positions} positions; expected a square number"
            )
        self.model = fill(
            without_storage(lambda: MAR(config)),
            weights,
            name=files.name,
            **load.fill_keywords,
        )
        require_in_memory(self.model, (), files.name)
        self.frontend = autoencoder(files, vae, scaling_factor, config.latent_channels, load)
        self.binding = Binding(
            TokenSpace.latents((side, side), config.latent_channels),
            lambda c: [c],
            [config.classes],
        )
        self.sampling = {"guidance_scale": GUIDANCE.get(config.decoder[0], GUIDANCE[768])}
        self.modality = FreeImage(self)

    def condition(self, prompt: str) -> int:
        return class_number(prompt, self.model.config.classes)

    def adapter(self, protocol: str) -> MaskedLatentLM:
        return MaskedLatentLM(self.model)


def autoencoder(
    files: CheckpointFiles,
    vae: str | Path | None,
    scaling_factor: float | None,
    channels: int,
    load: LoadOptions,
) -> KL:
    """Frontend of a model whose latents have ``channels`` floats, each made of as many neighbours
    as that takes.

    Args:
        files: the checkpoint.
        vae: file or folder of the autoencoder, or None to look for it.
        scaling_factor: factor on the latents, or None for the default.
        channels: floats of one latent of the model.
        load: device and dtype.

    Raises:
        GenError: no autoencoder is found, or it does not match the model.
    """
    is_number = isinstance(scaling_factor, (int, float)) and not isinstance(scaling_factor, bool)
    if scaling_factor is not None and not (is_number and 0 < scaling_factor < math.inf):
        raise bad_value("scaling_factor", scaling_factor, "a number above 0")
    if vae is None:
        file = next((files.folder / name for name in VAES if (files.folder / name).is_file()), None)
        if file is None:
            raise GenError(
                f"model {files.name} has no autoencoder: {files.folder} holds no {VAES[0]}, and"
                " none lies beside it; expected one, or the option vae with a file or folder"
            )
        path = file.parent if file.name == "config.json" else file
    else:
        path = CheckpointFiles.find(vae).path
    if path.is_dir() and (path / "config.json").is_file():
        model = pretrained(diffusers().AutoencoderKL, path, device=load.device, dtype=load.dtype)
        if scaling_factor is not None:
            model.register_to_config(scaling_factor=scaling_factor)
    else:
        scaling_factor = SCALE if scaling_factor is None else scaling_factor
        model = load_ldm_vae(
            path, scaling_factor=scaling_factor, device=load.device, dtype=load.dtype
        )
    patch = math.isqrt(max(1, channels // model.config.latent_channels))
    if patch**2 * model.config.latent_channels != channels:
        raise GenError(
            f"the autoencoder {path} has {model.config.latent_channels} channels and the"
            f" latents of model {files.name} have {channels}; expected a square multiple"
        )
    if patch > 1:
        model.register_to_config(patch_size=patch)
    return KL(model)


def _weights(files: CheckpointFiles, ema: bool) -> Weights:
    """Return the weights of a checkpoint, the averaged ones where ``ema`` and the file say so."""
    file = files.path if files.path.is_file() else files.file(WEIGHTS)
    return Weights(file, "model_ema" if ema and _averaged(file) else None)


def _averaged(file: Path) -> bool:
    if file.suffix not in PICKLES:
        return False
    contents = unpickled(file)
    return isinstance(contents, Mapping) and isinstance(contents.get("model_ema"), Mapping)
