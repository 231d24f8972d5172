"""Motion tokens of T2M-GPT's published ``.pth`` files: a frontend over
``gen.tokenizers.motion.t2m_vq_net``.

It takes features in the format of HumanML3D's files and returns joint positions. HumanML3D's
rotations turn the bone that leads to a joint, those of ``gen.media.motion.skeleton`` the bones that
leave it, so a ``Motion`` of these rotations would be a different motion.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from gen.core.errors import GenError
from gen.core.registry import register
from gen.media.bounds import load_array
from gen.media.motion import features as motion_features
from gen.models.load.weights import PICKLES, Weights, fill, unpickled, without_storage
from gen.tokenizers.motion.motion_vq import MotionVQ
from gen.tokenizers.motion.t2m_vq_net import DROPPED, RENAMES, T2MVQ, WRAPPER, sizes

# folders of mean and deviation, relative to the file
STATISTICS = (".", "meta", "..", "../meta")


@register("tokenizer", "t2m_vq")
class T2MVQTokens(MotionVQ):
    """T2M-GPT's motion tokenizer: codes [B, 1, T] of normalised features [B, stride T, 263]."""

    def __init__(self, model: T2MVQ):
        super().__init__(model)
        self.stride = model.stride
        self.config = type(self.config)(
            "motion", "codes", (model.config.codebook_size,), (self.stride,)
        )

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        statistics: tuple[Any, Any] | None = None,
    ) -> Self:
        """Load a checkpoint file.

        ``statistics``: mean and deviation of the training features, arrays [263] or files; by
        default ``mean.npy`` and ``std.npy`` (or ``Mean.npy`` ...) beside the file or in ``meta``
        there. Raises ``GenError`` for weights that do not fit, and for missing statistics.
        """
        path = Path(path)
        if path.suffix not in PICKLES or not path.is_file():
            raise GenError(
                f"frontend {path} is not a file that ends in {', '.join(PICKLES)}; expected a"
                " checkpoint of T2M-GPT's VQ-VAE"
            )
        content = unpickled(path)
        is_wrapped = isinstance(content, dict) and WRAPPER in content
        weights = Weights(path, WRAPPER if is_wrapped else None)
        shape = sizes(weights.shapes)
        if shape["features"] != motion_features.WIDTH:
            raise GenError(
                f"frontend {path} takes {shape['features']} features per frame; expected"
                f" {motion_features.WIDTH}, those of HumanML3D"
            )
        mean, std = statistics or tuple(_beside(path, name) for name in ("mean", "std"))
        model = fill(
            without_storage(lambda: T2MVQ(**shape)),
            weights,
            rename=RENAMES,
            drop=DROPPED,
            device=device,
            dtype=dtype,
            name=path,
        )
        for name, value in (("mean", mean), ("std", std)):
            array = load_array(value) if isinstance(value, (str, Path)) else np.asarray(value)
            if (
                array.shape != (shape["features"],)
                or not np.isfinite(array).all()
                or (name == "std" and not (array > 0).all())
            ):
                raise GenError(
                    f"the {name} of the features is {array.dtype} {array.shape}; expected"
                    f" {shape['features']} finite numbers{' above 0' if name == 'std' else ''}"
                )
            setattr(model, name, torch.as_tensor(array, dtype=dtype, device=device))
        return cls(model)

    def preprocess(self, media: Any) -> Tensor:
        """Normalise HumanML3D features float [F, 263], F a multiple of the stride. Raises
        ``GenError`` for anything else."""
        array = np.asarray(media) if isinstance(media, (np.ndarray, list, Tensor)) else np.empty(0)
        if (
            array.ndim != 2
            or array.shape[1] != motion_features.WIDTH
            or not len(array)
            or len(array) % self.stride
        ):
            raise GenError(
                f"the motion is {type(media).__name__} {array.shape}; expected an array of"
                f" HumanML3D features [F, {motion_features.WIDTH}] with F a multiple of"
                f" {self.stride}"
            )
        if not np.isfinite(array).all():
            raise GenError("the motion holds NaN or inf; expected finite features")
        return (torch.as_tensor(array).to(self.model.mean) - self.model.mean) / self.model.std

    def features(self, x: Tensor) -> np.ndarray:
        """Convert normalised features [F, 263] to the float32 format of HumanML3D's files."""
        return (x * self.model.std + self.model.mean).float().cpu().numpy()

    def postprocess(self, x: Tensor) -> np.ndarray:
        """Convert normalised features [F, 263] to joint positions float32 [F, 22, 3] in metres,
        from the origin, facing +z."""
        return motion_features.recover_joints(self.features(x))

    def grid_for(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        return (input_shape[0] // self.stride,)


def _beside(path: Path, name: str) -> Path:
    """Locate a statistics file near a checkpoint. Raises ``GenError`` if there is none."""
    for folder in STATISTICS:
        for stem in (name, name.capitalize(), name.upper()):
            file = path.parent / folder / f"{stem}.npy"
            if file.is_file():
                return file
    raise GenError(
        f"there is no {name}.npy beside {path} and in {path.parent / 'meta'}; expected the {name}"
        " of its training features, or statistics=(mean, std)"
    )
