"""VQ image tokens of Chameleon (arXiv 2405.09818) and of MoVQGAN: a frontend over
``gen.tokenizers.image.taming_vq_net``.

Published files are Meta's ``vqgan.ckpt`` (8192 codes, 16 x 16 pixels each), which Chameleon, Anole
and Lumina-mGPT share, and ``movqgan_270M.ckpt`` (16384 codes, 8 x 8 pixels), of Lumina-mGPT 2.0,
each also as safetensors with the same keys. transformers' ``ChameleonVQVAE`` has the encoder and
the codebook of the former under the same names, and no decoder: a file with a decoder alone is
therefore completed from there.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import torch
from safetensors.torch import save_file
from torch import Tensor

from gen.contracts.frontend import FrontendConfig, require_codes
from gen.core.errors import GenError
from gen.core.registry import register
from gen.models.load.weights import Weights, fill, shapes_of, without_storage
from gen.tokenizers.base.rgb import RGB
from gen.tokenizers.image.taming_vq_net import DROP, Sizes, TamingVQ

CODEBOOK = "quantize.embedding.weight"
SAVED = "vqgan.safetensors"


class Below(Mapping):
    """Lazy view of the tensors whose keys begin with ``prefix``, with the prefix removed.

    ``shapes``: shapes by key.
    """

    def __init__(self, weights: Weights, prefix: str):
        self._weights, self._prefix = weights, prefix
        self.shapes = {
            k.removeprefix(prefix): v for k, v in weights.shapes.items() if k.startswith(prefix)
        }

    def __getitem__(self, key: str) -> Tensor:
        return self._weights[self._prefix + key]

    def __iter__(self):
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


class Joined(ChainMap):
    """Union of several mappings of tensors; the first mapping with a key wins."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by key."""
        return {k: v for m in reversed(self.maps) for k, v in shapes_of(m).items()}


@register("tokenizer", "chameleon_vq")
class ChameleonVQ(RGB):
    """VQ image tokenizer: codes [B, 1, H, W] of RGB images [B, 3, h, w] in [-1, 1]."""

    def __init__(self, model: TamingVQ):
        self.model, self.factor = model.eval(), model.factor
        self.config = FrontendConfig(
            "image", "codes", (model.sizes.codes,), (self.factor, self.factor)
        )

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        device: str | torch.device = "cpu",
        dtype=torch.float32,
        rest: Mapping[str, Tensor] | None = None,
    ) -> Self:
        """Load a weights file, or a folder with one.

        ``rest``: tensors of ``ChameleonVQVAE``, used for keys that the file lacks. Raises
        ``GenError`` for files that cannot be read, that lack a part, or whose codebook differs from
        that of ``rest``.
        """
        weights = Weights(path)
        if (
            rest
            and CODEBOOK in rest
            and CODEBOOK in weights
            and not _same(rest[CODEBOOK], weights[CODEBOOK])
        ):
            raise GenError(
                f"the codebook of {path} is not the model's own; expected the autoencoder that the"
                " model was trained with"
            )
        return cls.of(Joined(weights, rest or {}), path, device, dtype)

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, Tensor],
        name: str | Path,
        device: str | torch.device = "cpu",
        dtype=torch.float32,
    ) -> Self:
        """Build the frontend from tensors with their ``shapes``. Raises ``GenError`` for missing
        and for extra tensors."""
        try:
            sizes = Sizes.of(tensors.shapes)
        except GenError as error:
            raise GenError(f"{name} is not an image tokenizer: {error}") from None
        return cls(
            fill(
                without_storage(lambda: TamingVQ(sizes)),
                tensors,
                drop=DROP,
                device=device,
                dtype=dtype,
                name=name,
            )
        )

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write the weights with their published keys, and return the file."""

        path = Path(folder) / SAVED
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({k: v.contiguous() for k, v in self.model.state_dict().items()}, path)
        return path

    @property
    def codebooks(self) -> list[Tensor]:
        return [self.model.codebook.detach()]

    @property
    def fingerprint(self) -> Tensor:
        return self.codebooks[0]

    @torch.no_grad()
    def encode(self, x: Tensor) -> Tensor:
        return self.model.encode(x)[:, None]

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        require_codes(codes, self.config)
        return self.model.decode(codes[:, 0].to(self.model.device))


def _same(a: Tensor, b: Tensor) -> bool:
    """Compare two codebooks up to the rounding of one of them to half precision."""
    return a.shape == b.shape and bool(
        torch.allclose(
            a.float().cpu(), b.float().cpu(), rtol=2e-2, atol=1e-2 * float(b.float().std())
        )
    )
