"""VAR: images of ImageNet classes, scale by scale (arXiv 2404.02905)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from gen.contracts.checkpoint import Checkpoint, CheckpointFiles, LoadOptions
from gen.contracts.modality import Binding
from gen.core.errors import GenError
from gen.core.registry import register
from gen.modalities.checkpoints.options import class_number
from gen.modalities.open_vocabulary import FreeImage
from gen.models.load.weights import PICKLES, LazyWeights, Weights
from gen.models.nets.var_vae import load_var_vae
from gen.models.published.var import (
    VARLM,
    hides_earlier_scales,
    is_autoencoder,
    is_mask_model,
    is_next_scale,
    load_var,
    shapes_in,
)
from gen.tokenizers.image.scale_vq import ScaleVQ, scale_space

ENDINGS = (*PICKLES, ".safetensors")
NAME = re.compile(r"var_d\d+.*")
VAE = "vae_ch160v4096z32.pth"
# where the published scripts put the autoencoder, from the folder of the model
VAE_FOLDERS = (".", "..", "../var")


class NextScaleImages(Checkpoint):
    """Shared part of families of next-scale models with the autoencoder of VAR."""

    modalities = ("image",)
    kind = "codes"

    def load(
        self,
        files: CheckpointFiles,
        weights: LazyWeights,
        load: LoadOptions,
        *,
        vae: str | Path | None,
        scales: Sequence[int] | None,
        heads: int | None,
        leak: bool = False,
    ) -> None:
        """Load the network, the autoencoder and the token space.

        The autoencoder and the quantiser run in single precision at least.

        Args:
            files: the checkpoint.
            weights: tensors of the network under published keys.
            load: device and dtype.
            vae: option of the families.
            scales: option of the families.
            heads: option of the families.
            leak: option of HMAR.

        Raises:
            GenError: weights that do not fit, or an autoencoder that is missing or another one.
        """
        model = load_var(
            weights,
            files.name,
            scales=scales,
            heads=heads,
            **load.fill_keywords,
        )
        config = model.config
        path = vae_file(files, vae)
        autoencoder = load_var_vae(
            path,
            config.sides,
            device=load.device,
            dtype=torch.promote_types(load.dtype, torch.float32),
        )
        codes, channels = autoencoder.quantize.embedding.weight.shape
        if (codes, channels) != (config.codes, config.channels):
            raise GenError(
                f"model {files.name} predicts {config.codes} codes of {config.channels} floats and"
                f" the codebook of {path} has {codes} codes of {channels}; expected equal numbers"
            )
        self.frontend = ScaleVQ(autoencoder)
        self.lm = VARLM(model, autoencoder.quantize, leak)
        space = scale_space(config.sides, codes, self.frontend.codebooks[0])
        self.binding = Binding(space, lambda number: [number], [config.classes])
        self.modality = FreeImage(self)

    def condition(self, prompt: str) -> int:
        return class_number(prompt, self.lm.config.classes)

    def adapter(self, protocol: str) -> VARLM:
        return self.lm


@register("checkpoint", "var")
class VARImages(NextScaleImages):
    """VAR d16 to d36: classes of ImageNet, scale by scale, with its residual autoencoder.

    A prompt is the number of a class.

    Args:
        transformer: file name of the model, where a folder holds several.
        vae: file of the autoencoder. The default is ``vae_ch160v4096z32.pth`` in the folder, beside
            it, or in a folder ``var`` beside it.
        scales: sides of the square scales, coarse to fine. The default is the published list (256,
            512 or 1024 pixels) that has as many scales and positions as the weights.
        heads: attention heads, needed where the weights do not state them and a head has not 64
            channels.
    """

    protocols = ("scales",)
    takes = frozenset({"device_map"})
    runs_from_disk = False
    tested = "tiny random weights in the published layouts against a plain forward"
    # those of the published evaluation, whose cfg is guidance_scale - 1
    sampling = {"guidance_scale": 2.5, "top_k": 900, "top_p": 0.96}

    @classmethod
    def matches(cls, files: CheckpointFiles) -> bool:
        return bool(weights_among(files, NAME, is_next_scale)) and not weights_among(
            files, None, is_mask_model
        )

    def __init__(
        self,
        files: CheckpointFiles,
        modality: str,
        load: LoadOptions,
        *,
        transformer: str | None = None,
        vae: str | Path | None = None,
        scales: Sequence[int] | None = None,
        heads: int | None = None,
    ):
        require_readable(files)
        weights = Weights(one_of(files, weights_among(files, NAME, is_next_scale), transformer))
        if hides_earlier_scales(weights):
            raise GenError(
                f"{weights.path} is the next-scale model of HMAR alone, whose scales do not see the"
                " earlier ones; expected the file of its masked training beside it"
            )
        self.load(files, weights, load, vae=vae, scales=scales, heads=heads)


def weights_among(
    files: CheckpointFiles,
    name: re.Pattern[str] | None,
    test: Callable[[Mapping[str, tuple[int, ...]]], bool],
) -> list[Path]:
    """Return the files of weights that a checkpoint could mean.

    Args:
        files: a file, or a folder without a config.
        name: names of the files of a family, which need not be opened; None where keys alone tell.
        test: test of the shapes by key, for files of other names.
    """
    if files.path.is_dir() and files.has("config.json", "model_index.json", "*.index.json"):
        return []
    return [
        p
        for p in weights_in(files.path)
        if (name is not None and name.fullmatch(p.name)) or test(shapes_in(p))
    ]


def weights_in(path: Path) -> list[Path]:
    """Return the files of weights of a folder, or a file that is one."""
    entries = [path] if path.is_file() else sorted(path.iterdir())
    return [p for p in entries if p.suffix in ENDINGS]


def require_readable(files: CheckpointFiles) -> None:
    """Raise ``GenError`` for a file of a folder that cannot be read: it might be the part that
    tells one family from the other."""
    for path in weights_in(files.path):
        Weights(path)


def one_of(files: CheckpointFiles, found: Sequence[Path], transformer: str | None) -> Path:
    """Return the file of a model.

    Args:
        files: the checkpoint.
        found: files that could be meant.
        transformer: file name that the user gave; None where there is one file.

    Raises:
        GenError: there are several files and no name, or none of that name.
    """
    listing = ", ".join(p.name for p in found)
    if transformer is not None:
        named = [p for p in found if p.name == transformer]
        if not named:
            raise GenError(
                f"transformer is {transformer!r}, which is no model in {files.folder}; expected"
                f" {listing}"
            )
        return named[0]
    if len(found) > 1:
        raise GenError(
            f"{files.path} holds {listing}; expected the path of one, or its name as the option"
            " transformer"
        )
    return found[0]


def vae_file(files: CheckpointFiles, vae: str | Path | None) -> Path:
    """Return the file of the autoencoder.

    Args:
        files: the checkpoint.
        vae: what the user passed; None means the published name, or keys that tell, in the folder
            or beside it.

    Raises:
        GenError: there is none, or there are several.
    """
    if vae is not None:
        for path in (files.folder / vae, Path(vae).expanduser()):
            if path.is_file():
                return path
        raise GenError(
            f"vae is {str(vae)!r}, which exists neither in {files.folder} nor as a path; expected a"
            f" file such as {VAE}"
        )
    named = [files.folder / folder / VAE for folder in VAE_FOLDERS]
    if found := next((path for path in named if path.is_file()), None):
        return found
    candidates = [p for p in weights_in(files.folder) if is_autoencoder(shapes_in(p))]
    if len(candidates) != 1:
        listing = " and ".join(p.name for p in candidates) or f"no {VAE}"
        raise GenError(
            f"model {files.name} has {listing} in {files.folder} or beside it; expected one"
            " autoencoder, or the option vae with the path of one"
        )
    return candidates[0]
