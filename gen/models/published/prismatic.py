"""Vision backbone of OpenVLA: one vision transformer, or DINOv2 and SigLIP whose features stand
beside each other (Karamcheti et al., "Prismatic VLMs", arXiv 2402.07865).

Every transformer reads the image at its own size and normalisation. Its features are the patches
behind its last block but one, without a final norm:

    x_0     = patches of the image + positions, class and register tokens before them
    x_{i+1} = y + s'_i mlp(norm(y)),    y = x_i + s_i attention(norm(x_i))

The scales s exist in DINOv2 alone. Names of weights are those of timm, with ``scale_factor`` for
the scales.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from gen.core.errors import GenError, bad_value, unknown
from gen.models.load.weights import Weights, fill, without_storage

PREFIX = "vision_backbone."
TOWERS = ("featurizer", "fused_featurizer")
HEADS = {"tiny": 3, "small": 6, "base": 12, "large": 16, "so400m": 16}  # by the size in a name
NAME = re.compile(r"vit_([a-z0-9]+)_patch\d+_(?:(?:reg(\d+)_)?(dinov2)|siglip)(?![a-z0-9]).*")
INTERPOLATIONS = {
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
    "nearest": Image.Resampling.NEAREST,
}
STRATEGY = "resize-naive"  # both sides to the size of the transformer, whatever their ratio
EPSILON = 1e-6
# weights whose shapes say the sizes of a transformer
NEEDED = ("patch_embed.proj.weight", "pos_embed", "blocks.0.mlp.fc1.weight")
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Form:
    """What the name of a transformer in timm says and no shape does.

    Attributes:
        heads: attention heads.
        registers: register tokens of DINOv2; it has none in its first version.
        is_dino: DINOv2, with a class token and scales, else SigLIP.
    """

    heads: int
    registers: int
    is_dino: bool

    @classmethod
    def of(cls, name: str, where: str) -> Form:
        """Read a name, such as ``vit_large_patch14_reg4_dinov2.lvd142m``.

        Raises:
            GenError: it is no DINOv2 or SigLIP of a known size.
        """
        match = NAME.fullmatch(name)
        if not match or match[1] not in HEADS:
            raise bad_value(
                f"timm_model_ids of {where}",
                name,
                "a DINOv2 or SigLIP such as 'vit_so400m_patch14_siglip_224', of the sizes"
                f" {', '.join(HEADS)}",
            )
        return cls(HEADS[match[1]], int(match[2] or 0), match[3] is not None)


@dataclass(frozen=True)
class Pixels:
    """How a transformer gets its pixels: side in pixels, interpolation, mean and standard deviation
    of the channels."""

    size: int
    interpolation: str
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def of(self, image: np.ndarray) -> Tensor:
        """Convert an image uint8 [h, w, 3] to float32 [1, 3, size, size]."""
        method = INTERPOLATIONS[self.interpolation]
        resized = Image.fromarray(image).resize((self.size, self.size), method)
        x = torch.from_numpy(np.array(resized)).permute(2, 0, 1).float() / 255
        mean, std = torch.tensor(self.mean), torch.tensor(self.std)
        return ((x - mean[:, None, None]) / std[:, None, None])[None]


class Scale(nn.Module):
    """Factor of every channel."""

    def __init__(self, width: int):
        super().__init__()
        self.scale_factor = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale_factor


class Attention(nn.Module):
    """Full attention [B, T, D] -> [B, T, D]."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two layers with GELU between them."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(gelu(self.fc1(x)))


class Block(nn.Module):
    """Block of a vision transformer."""

    def __init__(self, width: int, hidden: int, heads: int, scaled: bool):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, EPSILON), nn.LayerNorm(width, EPSILON)
        self.attn, self.mlp = Attention(width, heads), MLP(width, hidden)
        self.ls1, self.ls2 = (Scale(width) if scaled else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class PatchEmbedding(nn.Module):
    """Pixels [B, 3, h, w] to patches [B, P, D]."""

    def __init__(self, width: int, patch: int):
        super().__init__()
        self.proj = nn.Conv2d(3, width, patch, patch)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.proj(pixels).flatten(2).transpose(1, 2)


class Tower(nn.Module):
    """Vision transformer up to its last block but one, with sizes from the shapes of its weights.

    ``length``: number of patches. ``width``: D.
    """

    def __init__(self, shapes: Shapes, form: Form):
        super().__init__()
        self.width, _, patch, _ = shapes["patch_embed.proj.weight"]
        hidden, positions = shapes["blocks.0.mlp.fc1.weight"][0], shapes["pos_embed"][1]
        # with registers, DINOv2 has positions for the patches alone, else for the class token too
        self.whole = form.is_dino and not form.registers
        self.length = positions - self.whole
        self.patch_embed = PatchEmbedding(self.width, patch)
        self.pos_embed = nn.Parameter(torch.zeros(1, positions, self.width))
        for name, count in (("cls_token", int(form.is_dino)), ("reg_token", form.registers)):
            token = nn.Parameter(torch.zeros(1, count, self.width)) if count else None
            self.register_parameter(name, token)
        self.blocks = nn.ModuleList(
            Block(self.width, hidden, form.heads, form.is_dino) for _ in range(depth_of(shapes) - 1)
        )

    def forward(self, pixels: Tensor) -> Tensor:
        """Features [B, P, D] of pixels [B, 3, size, size]."""
        x = self.patch_embed(pixels)
        x = x if self.whole else x + self.pos_embed
        tokens = [t for t in (self.cls_token, self.reg_token) if t is not None]
        x = torch.cat([*(t.expand(len(x), -1, -1) for t in tokens), x], 1)
        x = x + self.pos_embed if self.whole else x
        for block in self.blocks:
            x = block(x)
        return x[:, -self.length :]


class VisionBackbone(nn.Module):
    """One or two transformers over the same image. ``width``: channels of a patch's features."""

    def __init__(self, towers: Sequence[Tower], pixels: Sequence[Pixels]):
        super().__init__()
        for name, tower in zip(TOWERS, towers, strict=False):
            setattr(self, name, tower)
        self.pixels, self.width = tuple(pixels), sum(t.width for t in towers)

    @torch.no_grad()
    def features(self, image: np.ndarray) -> Tensor:
        """Return the features [P, width] of an image uint8 [h, w, 3] of any size."""
        found = []
        for tower, pixels in zip(self.children(), self.pixels, strict=True):
            weight = tower.patch_embed.proj.weight
            found.append(tower(pixels.of(image).to(weight.device, weight.dtype))[0])
        return torch.cat(found, -1)


def depth_of(shapes: Shapes) -> int:
    """Number of blocks of a transformer's weights."""
    return 1 + max(int(key.split(".")[1]) for key in shapes if key.startswith("blocks."))


def pixels_of(processor: Mapping, count: int, where: str) -> list[Pixels]:
    """Return how ``count`` transformers get their pixels, from ``preprocessor_config.json``.

    Raises:
        GenError: another way to resize, or not one entry for each transformer.
    """
    strategy = processor.get("image_resize_strategy")
    if strategy != STRATEGY:
        raise bad_value(
            f"image_resize_strategy in preprocessor_config.json of {where}", strategy, STRATEGY
        )
    rows = [processor.get(key) or [] for key in ("input_sizes", "interpolations", "means", "stds")]
    if any(len(row) != count for row in rows):
        raise GenError(
            f"preprocessor_config.json of {where} has {', '.join(str(len(r)) for r in rows)}"
            f" input_sizes, interpolations, means and stds; expected {count} of each, one for every"
            " vision transformer"
        )
    for interpolation in rows[1]:
        if interpolation not in INTERPOLATIONS:
            raise unknown("interpolation", interpolation, INTERPOLATIONS, where)
    return [
        Pixels(size[-1], interpolation, tuple(mean), tuple(std))
        for size, interpolation, mean, std in zip(*rows, strict=True)
    ]


def load_vision(
    weights: Weights,
    names: Sequence[str],
    processor: Mapping,
    device: torch.device,
    dtype: torch.dtype,
    where: str,
) -> VisionBackbone | None:
    """Load the vision backbone of a checkpoint; None where its files hold none.

    Args:
        weights: tensors of the checkpoint.
        names: names of its transformers in timm.
        processor: content of ``preprocessor_config.json``.
        device: device of the weights.
        dtype: floating-point type of the weights.
        where: name of the checkpoint, for messages.

    Raises:
        GenError: weights that do not fit, an unknown transformer, or unknown preprocessing.
    """
    own = [key.removeprefix(PREFIX) for key in weights.shapes if key.startswith(PREFIX)]
    if not own:
        return None
    count = len({key.partition(".")[0] for key in own})
    if len(names) != count or count > len(TOWERS):
        raise GenError(
            f"the weights of {where} have {count} vision transformers and timm_model_ids names"
            f" {len(names)}; expected equal numbers, at most {len(TOWERS)}"
        )
    drop, towers = [r"^language_model\.", r"^projector\."], []
    for tower, name in zip(TOWERS, names, strict=False):
        start = f"{PREFIX}{tower}."
        found = {k.removeprefix(start): s for k, s in weights.shapes.items() if k.startswith(start)}
        require_shapes(found, name, where)
        # what comes behind the features is never computed
        drop.append(rf"^{tower}\.(norm|attn_pool|blocks\.{depth_of(found) - 1})\.")
        towers.append((found, Form.of(name, where)))
    pixels = pixels_of(processor, count, where)
    backbone = fill(
        without_storage(lambda: VisionBackbone([Tower(*t) for t in towers], pixels)),
        weights,
        rename=((rf"^{re.escape(PREFIX)}", ""),),
        drop=drop,
        device=device,
        dtype=dtype,
        name=where,
    )
    require_one_grid(backbone, where)
    return backbone


def require_shapes(shapes: Shapes, name: str, where: str) -> None:
    """Raise ``GenError`` for weights of a transformer that do not tell its sizes, or whose channels
    are no multiple of its attention heads."""
    missing = [key for key in NEEDED if key not in shapes]
    if missing:
        raise GenError(
            f"the vision transformer {name} of {where} lacks {', '.join(missing)}; expected the"
            " weights of a vision transformer of timm"
        )
    width, heads = shapes["patch_embed.proj.weight"][0], Form.of(name, where).heads
    if width % heads:
        raise GenError(
            f"the vision transformer {name} of {where} has {width} channels; expected a multiple of"
            f" {heads}, its attention heads"
        )


def require_one_grid(backbone: VisionBackbone, where: str) -> None:
    """Raise ``GenError`` unless all transformers make the same number of patches out of the size
    that they read."""
    for tower, pixels in zip(backbone.children(), backbone.pixels, strict=True):
        side = tower.patch_embed.proj.kernel_size[0]
        patches = (pixels.size // side) ** 2
        if patches != tower.length or tower.length != backbone.featurizer.length:
            raise GenError(
                f"the vision transformers of {where} have positions for"
                f" {', '.join(str(t.length) for t in backbone.children())} patches, and one reads"
                f" {pixels.size} pixels in patches of {side}; expected one number of patches"
            )
