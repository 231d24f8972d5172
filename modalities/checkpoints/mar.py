"""MAR: pictures of ImageNet classes as continuous latents, in any order (arXiv 2406.11838)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

from gen.contracts.checkpoint import Checkpoint, CheckpointFiles, LoadOptions
from gen.contracts.modality import Binding
from gen.core.errors import GenError, bad_value
from gen.core.registry import register
from gen.core.token_space import TokenSpace
from gen.modalities.open_vocabulary import FreeImage
from gen.models.adapters.language_models import MaskedLatentLM
from gen.models.load.pretrained import pretrained
from gen.models.load.weights import PICKLES, Weights, fill, unpickled, without_storage
from gen.models.nets.ldm_vae import load_ldm_vae
from gen.models.published.mar import MAR, MARConfig
from gen.tokenizers.image.kl import KL

WEIGHTS = "checkpoint-last.pth"
SCALE = 0.2325  # of the latents of kl16.ckpt, to unit variance
VAES = (
    "kl16.ckpt",
    "vae/kl16.ckpt",
    "../kl16.ckpt",
    "../vae/kl16.ckpt",
    "../../vae/kl16.ckpt",
    "vae/config.json",
    "../vae/config.json",
)
GUIDANCE = {
    768: 2.9,
    1024: 3.0,
    1280: 3.2,
}  # of the published evaluation, by width; others get the first


@register("checkpoint", "mar")
class MARPictures(Checkpoint):
    """MAR base, large and huge: classes of ImageNet as continuous latents, with its KL autoencoder.

    A prompt is the number of a class. ``vae``: the autoencoder, a file with the keys of latent
    diffusion or a folder of diffusers' ``AutoencoderKL``; by default kl16.ckpt in the folder,
    beside it, or where the published scripts put it. ``scaling_factor``: of its latents; by default
    0.2325 for a file, and what a folder's config says. ``heads``: of attention, where the width is
    none of the published ones. ``num_sampling_steps``: transitions of the diffusion head.
    ``sigma_floor``: the noise of the last one, where published sampling has none.
    ``guidance_schedule``: ``linear`` in what is known, as in the published evaluation, or
    ``constant``. ``ema``: whether averaged weights are taken where a file holds both.
    """

    modalities = ("image",)
    protocols = ("masked",)
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

    def __init__(
        self,
        files: CheckpointFiles,
        modality: str,
        how: LoadOptions,
        *,
        vae: str | Path | None = None,
        scaling_factor: float | None = None,
        heads: int | None = None,
        num_sampling_steps: int = 100,
        sigma_floor: float = 1e-4,
        guidance_schedule: str = "linear",
        ema: bool = True,
    ):
        if how.device_map is not None:
            raise GenError(
                f"model {files.name} came with a device_map; expected none: the family 'mar' runs"
                " on one device"
            )
        file = files.path if files.path.is_file() else files.file(WEIGHTS)
        weights = Weights(file, "model_ema" if ema and _averaged(file) else None)
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
                f"model {files.name} has {config.positions} places; expected a square of them"
            )
        self.model = fill(
            without_storage(lambda: MAR(config)),
            weights,
            device=how.device,
            dtype=how.dtype,
            name=files.name,
        )
        self.frontend = autoencoder(files, vae, scaling_factor, config.latent_channels, how)
        self.binding = Binding(
            TokenSpace.latents((side, side), config.latent_channels),
            lambda c: [c],
            [config.classes],
        )
        self.sampling = {"guidance_scale": GUIDANCE.get(config.decoder[0], GUIDANCE[768])}
        self.modality = FreeImage(self)

    def condition(self, prompt: str) -> int:
        found, classes = (
            re.fullmatch(r"\s*(?:class\s+)?(\d+)\s*", prompt, re.IGNORECASE),
            self.model.config.classes,
        )
        if not found or int(found[1]) >= classes:
            raise GenError(
                f"the prompt is {prompt!r}; expected the number of a class, such as '207' or 'class"
                f" 207', below {classes}"
            )
        return int(found[1])

    def adapter(self, protocol: str) -> MaskedLatentLM:
        return MaskedLatentLM(self.model)


def autoencoder(
    files: CheckpointFiles,
    vae: str | Path | None,
    scaling_factor: float | None,
    channels: int,
    how: LoadOptions,
) -> KL:
    """The frontend of a model of latents with ``channels`` floats, each of as many neighbours as
    that takes. Raises ``GenError``."""
    number = isinstance(scaling_factor, (int, float)) and not isinstance(scaling_factor, bool)
    if scaling_factor is not None and not (number and 0 < scaling_factor < math.inf):
        raise bad_value("scaling_factor", scaling_factor, "a number above 0")
    if vae is None:
        found = next(
            (files.folder / name for name in VAES if (files.folder / name).is_file()), None
        )
        if found is None:
            raise GenError(
                f"model {files.name} has no autoencoder: {files.folder} holds no {VAES[0]}, and"
                " none lies beside it; expected one, or the option vae, a file or folder"
            )
        path = found.parent if found.name == "config.json" else found
    else:
        path = CheckpointFiles.find(vae).path
    if path.is_dir() and (path / "config.json").is_file():
        from diffusers import AutoencoderKL

        model = pretrained(AutoencoderKL, path, device=how.device, dtype=how.dtype)
        if scaling_factor is not None:
            model.register_to_config(scaling_factor=scaling_factor)
    else:
        scaling_factor = SCALE if scaling_factor is None else scaling_factor
        model = load_ldm_vae(
            path, scaling_factor=scaling_factor, device=how.device, dtype=how.dtype
        )
    patch = math.isqrt(max(1, channels // model.config.latent_channels))
    if patch**2 * model.config.latent_channels != channels:
        raise GenError(
            f"the autoencoder {path} has {model.config.latent_channels} channels and the latents of"
            f" model {files.name} have {channels}; expected a square multiple"
        )
    if patch > 1:
        model.register_to_config(patch_size=patch)
    return KL(model)


def _averaged(file: Path) -> bool:
    if file.suffix not in PICKLES:
        return False
    found = unpickled(file)
    return isinstance(found, Mapping) and isinstance(found.get("model_ema"), Mapping)
