"""Motion tokens: a frontend over ``gen.tokenizers.motion.motion_vq_net``, from and to human
motions.

It works on HumanML3D's features (``gen.media.motion.features``), which drop origin and heading:
decoded motions start at the origin and face +z.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from gen.contracts.frontend import FrontendConfig, TokenFrontend, require_codes
from gen.core.errors import GenError
from gen.core.registry import register, registry
from gen.media.motion import features as motion_features
from gen.media.motion.skeleton import Motion
from gen.models.load.locate import locate
from gen.models.load.pretrained import strictly
from gen.models.load.weights import PICKLES

if TYPE_CHECKING:
    from gen.tokenizers.motion.motion_vq_net import MotionVQVAE

STRIDE = 4  # frames per code


@register("tokenizer", "motion_vq")
class MotionVQ(TokenFrontend):
    """Motion tokenizer: codes [B, Q, T] of normalised features [B, 4 T, 263].

    Codebook q belongs to body part q // residual.
    """

    architecture = "MotionVQVAE"

    def __init__(self, model: MotionVQVAE):
        self.model = model.eval()
        sizes = (model.config.codebook_size,) * len(model.tables)
        self.config = FrontendConfig("motion", "codes", sizes, (STRIDE,))

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        """Load a folder, or a ``.pth`` file of T2M-GPT (``gen.tokenizers.motion.t2m_vq``). Raises
        ``GenError`` for a missing or unreadable one, and for weights that lack a tensor."""
        if cls is MotionVQ and str(folder).endswith(PICKLES):
            return registry.get("tokenizer", "t2m_vq").from_pretrained(folder, device, dtype)
        # its base classes come from diffusers, which is slow to import
        from gen.tokenizers.motion.motion_vq_net import MotionVQVAE

        model = strictly(
            MotionVQVAE, locate(folder, "frontend"), "frontend", folder, torch_dtype=dtype
        )
        return cls(model.to(device))

    def preprocess(self, media: Any) -> Tensor:
        """Convert a ``Motion`` of 4 n or 4 n + 1 poses to normalised features [4 n, 263].

        The last pose of 4 n is repeated, since features need a following pose. Raises ``GenError``
        for anything else.
        """
        if not isinstance(media, Motion):
            raise GenError(
                f"the motion is a {type(media).__name__}; expected a"
                " gen.media.motion.skeleton.Motion (read_bvh makes one)"
            )
        if media.frames < STRIDE or media.frames % STRIDE > 1:
            raise GenError(
                f"the motion has {media.frames} poses; expected {STRIDE} n or {STRIDE} n + 1, such"
                f" as {max(media.frames // STRIDE, 1) * STRIDE}"
            )
        if media.frames % STRIDE == 0:

            def hold(a):
                return np.concatenate([a, a[-1:]])

            media = Motion(hold(media.root), hold(media.rotations))
        x = torch.from_numpy(motion_features.features(media)).to(self.model.mean)
        return (x - self.model.mean) / self.model.std

    @torch.no_grad()
    def encode(self, x: Tensor) -> Tensor:
        streams = []
        for part, z in enumerate(self.model.latents(x.to(self.model.mean))):
            for table in self.model.chain(part):
                streams.append(torch.cdist(z, table.expand(len(z), -1, -1)).argmin(-1))
                z = z - table[streams[-1]]
        return torch.stack(streams, 1)

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        require_codes(codes, self.config)
        n = self.model.config.residual
        vectors = [table[codes[:, q]] for q, table in enumerate(self.model.tables)]
        return self.model.features([sum(vectors[p : p + n]) for p in range(0, len(vectors), n)])

    def postprocess(self, x: Tensor) -> Motion:
        """Convert normalised features [4 n, 263] to a motion of 4 n poses from the origin, facing
        +z."""
        return motion_features.recover(
            (x * self.model.std + self.model.mean).double().cpu().numpy()
        )

    @property
    def codebooks(self) -> list[Tensor]:
        return [t.detach() for t in self.model.tables]

    @property
    def fingerprint(self) -> Tensor:
        return torch.cat(self.codebooks)

    def grid_for(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        return (input_shape[0] // STRIDE,)
