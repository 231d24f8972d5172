"""Autoencoder of VAR and HMAR (arXiv 2404.02905), from the published file
``vae_ch160v4096z32.pth``, or the same keys in safetensors, as ``gen.models.nets.scale_vq``.

The file has the keys of latent diffusion (``gen.models.nets.ldm_vae``) with two differences: one
1 x 1 convolution gives queries, keys and values of attention, and no noise is predicted. It does
not state the sides of the scales, which the transformer's weights do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from gen.core.errors import GenError
from gen.models.load.weights import LazyWeights, Weights, fill, without_storage
from gen.models.nets import ldm_vae
from gen.models.nets.scale_vq import ScaleVQModel

# counts of the codes, which training records
DROP = (*ldm_vae.DROP, r"^quantize\.ema_vocab_hit_SV$")
_QKV = re.compile(r"(.*\.attn[._].*)\.qkv\.(weight|bias)")


class SeparateQKV(LazyWeights):
    """Lazy mapping of weights, with queries, keys and values under keys of their own.

    Raises:
        GenError: a convolution whose outputs are no three equal parts.
    """

    def __init__(self, weights: Weights):
        self.weights, self.shapes = weights, {}
        self._sources: dict[str, tuple[str, int | None]] = {}
        for key, shape in weights.shapes.items():
            match = _QKV.fullmatch(key)
            if match is None:
                self._add(key, shape, key, None)
                continue
            if not shape or shape[0] % 3:
                raise GenError(
                    f"{weights.path} has {key} of shape {shape}; expected three equal parts of rows"
                )
            for part, name in enumerate("qkv"):
                own = (shape[0] // 3, *shape[1:])
                self._add(f"{match[1]}.{name}.{match[2]}", own, key, part)

    def _add(self, key: str, shape: tuple[int, ...], source: str, part: int | None) -> None:
        self._sources[key], self.shapes[key] = (source, part), shape

    def __getitem__(self, key: str) -> Tensor:
        source, part = self._sources[key]
        value = self.weights[source]
        return value if part is None else value.chunk(3)[part].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


def load_var_vae(
    path: str | Path,
    sides: Sequence[Sequence[int]],
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> ScaleVQModel:
    """Load the autoencoder of a file; all sizes but the sides are read from the shapes.

    Args:
        path: file of weights.
        sides: (height, width) of every scale, coarse to fine.
        device: device of the autoencoder.
        dtype: its dtype.

    Raises:
        GenError: a file that cannot be read or holds more than plain tensors, and weights that do
            not fit.
    """
    weights = SeparateQKV(Weights(path))
    table = weights.shapes.get("quantize.embedding.weight", ())
    shared = [k for k in weights.shapes if re.fullmatch(r"quantize\.quant_resi\..*\.weight", k)]
    if len(table) != 2 or not shared:
        raise GenError(
            f"{path} is not the autoencoder of VAR: quantize.embedding.weight or"
            " quantize.quant_resi.qresi_ls.0.weight is missing or has another number of axes"
        )
    matrices = ldm_vae.Linear(weights)
    used = {k: s for k, s in matrices.shapes.items() if not any(re.search(p, k) for p in DROP)}
    config = ldm_vae.config_of(used)
    model = without_storage(lambda: scale_vq(config, used, sides, len(shared)))
    return fill(
        model,
        matrices,
        rename=ldm_vae.renames(len(config["block_out_channels"])),
        drop=DROP,
        device=device,
        dtype=dtype,
        name=path,
    )


def scale_vq(
    config: dict, shapes: dict[str, tuple[int, ...]], sides: Sequence[Sequence[int]], shared: int
) -> ScaleVQModel:
    """Create the autoencoder with the sizes of ``ldm_vae.config_of``.

    Args:
        config: sizes of encoder and decoder.
        shapes: shapes by published key.
        sides: (height, width) of every scale.
        shared: number of convolutions phi.
    """
    kinds = config["down_block_types"]
    return ScaleVQModel(
        scales=tuple(tuple(pair) for pair in sides),
        codes=shapes["quantize.embedding.weight"][0],
        latent_channels=config["latent_channels"],
        block_out_channels=config["block_out_channels"],
        layers_per_block=config["layers_per_block"],
        attention_levels=tuple(n for n, kind in enumerate(kinds) if kind.startswith("Attn")),
        mid_attention=any(k.startswith("decoder.mid.attn_1.") for k in shapes),
        norm_num_groups=config["norm_num_groups"],
        kernel=shapes["post_quant_conv.weight"][2],
        shared_phi=shared,
    )
