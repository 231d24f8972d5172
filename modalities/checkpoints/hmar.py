"""HMAR: images of ImageNet classes, scale by scale, each refined in some masked passes (arXiv
2506.04421). The published weights are for non-commercial use.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gen.contracts.checkpoint import CheckpointFiles, LoadOptions
from gen.core.errors import GenError, bad_value
from gen.core.registry import register
from gen.modalities.checkpoints.var import NextScaleImages, one_of, weights_among
from gen.models.load.weights import LazyWeights, Weights
from gen.models.published.var import (
    MergedWeights,
    depth_of,
    is_mask_model,
    is_merged,
    is_next_scale,
)

NAME = re.compile(r"hmar-d\d+.*")
# guidance and top-k of the published evaluation, by number of blocks; other models get the first.
# Its cfg is guidance_scale - 1
SAMPLING = {
    16: (2.7, 1000),
    20: (2.9, 950),
    24: (3.1, 900),
    30: (2.6, 650),
}


@register("checkpoint", "hmar")
class HMARImages(NextScaleImages):
    """HMAR d16 to d30: classes of ImageNet, scale by scale with masked passes inside a scale.

    A prompt is the number of a class. The autoencoder is that of VAR. The published weights are for
    non-commercial use (NVIDIA One-Way Noncommercial License).

    Args:
        transformer: file name of the model, where a folder holds several.
        vae: file of the autoencoder. The default is ``vae_ch160v4096z32.pth`` in the folder, beside
            it, or in a folder ``var`` beside it.
        base: file of the next-scale model, where the model is the file of the masked training
            alone. The default is the only such file in the folder.
        scales: sides of the square scales, coarse to fine. The default is a published list.
        heads: attention heads, needed where the weights do not state them and a head has not 64
            channels.
        leak: masked tokens reach their neighbours in masked passes, as the published weights were
            trained. False hides them.
    """

    protocols = ("scales", "refined_scales")
    takes = frozenset({"device_map"})
    runs_from_disk = False
    tested = (
        "tiny random weights in the published layouts, in one file and in two, against a plain"
        " forward"
    )

    @classmethod
    def matches(cls, files: CheckpointFiles) -> bool:
        return bool(_candidates(files))

    @classmethod
    def sampling_of(cls, files: CheckpointFiles, options: Mapping[str, Any]) -> Mapping[str, Any]:
        return _sampling(_weights(files, options.get("transformer"), options.get("base")))

    def __init__(
        self,
        files: CheckpointFiles,
        modality: str,
        load: LoadOptions,
        *,
        transformer: str | None = None,
        vae: str | Path | None = None,
        base: str | Path | None = None,
        scales: Sequence[int] | None = None,
        heads: int | None = None,
        leak: bool = True,
    ):
        if not isinstance(leak, bool):
            raise bad_value("leak", leak, "true or false")
        weights = _weights(files, transformer, base)
        self.load(files, weights, load, vae=vae, scales=scales, heads=heads, leak=leak)
        self.sampling = _sampling(weights)


def _sampling(weights: LazyWeights) -> dict[str, Any]:
    """Return the sampling parameters of the published evaluation."""
    guidance, top_k = SAMPLING.get(depth_of(weights.shapes), SAMPLING[16])
    return {"guidance_scale": guidance, "top_k": top_k, "top_p": 0.99}


def _candidates(files: CheckpointFiles) -> list[Path]:
    """Return the single files and the files of the masked training."""
    return weights_among(files, NAME, lambda shapes: is_merged(shapes) or is_mask_model(shapes))


def _weights(
    files: CheckpointFiles, transformer: str | None, base: str | Path | None
) -> LazyWeights:
    """Return the weights of a checkpoint, those of two files under the keys of the single one.

    Args:
        files: the checkpoint.
        transformer: option of the family.
        base: option of the family.

    Raises:
        GenError: several files could be meant, or the next-scale model is missing.
    """
    weights = Weights(one_of(files, _candidates(files), transformer))
    if not is_mask_model(weights.shapes):
        if base is not None:
            raise GenError(
                f"model {files.name} holds both passes and got the option base={str(base)!r};"
                " expected no such option"
            )
        return weights
    return MergedWeights(Weights(_base_file(files, weights.path, base)), weights)


def _base_file(files: CheckpointFiles, mask: Path, base: str | Path | None) -> Path:
    """Return the file of the next-scale model that belongs to a file of the masked training."""
    if base is not None:
        for path in (files.folder / base, Path(base).expanduser()):
            if path.is_file():
                return path
        raise GenError(
            f"base is {str(base)!r}, which exists neither in {files.folder} nor as a path; expected"
            " the file of the next-scale model"
        )
    beside = CheckpointFiles(files.name, files.folder)
    found = weights_among(beside, None, is_next_scale)
    if len(found) != 1:
        listing = " and ".join(p.name for p in found) or "no next-scale model"
        raise GenError(
            f"{mask} is the masked training of HMAR alone and has {listing} beside it; expected"
            " one, or the option base with the path of one"
        )
    return found[0]
