"""MAR (Li et al., "Autoregressive Image Generation without Vector Quantization", arXiv 2406.11838)
with its published keys: a masked transformer of latents with a diffusion head (``mar_head``).

    encoder   the class, as equal buffer tokens, and the known latents
    decoder   the encoder's outputs, with a mask token at every unknown position -> a conditioning
              vector z at every position

Blocks are those of a vision transformer: pre-norm, full attention, exact GELU. The published
evaluation raises guidance with the known positions: with k of T known after a step, its scale is 1
+ (s - 1) k / T, where k is at most T - 1. With ``constant`` the scale is s throughout.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from gen.core.errors import GenError, bad_value, unknown
from gen.models.adapters.slot_cache import SlotCache, SlotLayer
from gen.models.nets.mar_head import EPS, DiffLoss

HEADS = {768: 12, 1024: 16, 1280: 16}  # of attention, by width: base, large, huge
SCHEDULES = ("linear", "constant")


@dataclass(frozen=True)
class MARConfig:
    """Sizes of a model. ``encoder``, ``decoder``: width, number of blocks and width inside the
    MLPs. ``heads``: attention heads of encoder and decoder."""

    positions: int
    buffer: int
    classes: int
    latent_channels: int
    encoder: tuple[int, int, int]
    decoder: tuple[int, int, int]
    heads: tuple[int, int]
    head_width: int
    head_depth: int
    head_steps: int = 100
    sigma_floor: float = 1e-4
    guidance_schedule: str = "linear"

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]], heads: int | None = None, **options) -> Self:
        """Read the sizes from shapes of published weights by key.

        ``heads``: required for unpublished widths. Raises ``GenError`` for missing keys, and for a
        number of heads that does not fit.
        """
        ranks = {
            "class_emb.weight": 2,
            "z_proj.weight": 2,
            "encoder_pos_embed_learned": 3,
            "diffusion_pos_embed_learned": 3,
            "encoder_blocks.0.mlp.fc1.weight": 2,
            "decoder_blocks.0.mlp.fc1.weight": 2,
            "diffloss.net.input_proj.weight": 2,
        }
        wrong = [k for k, rank in ranks.items() if len(shapes.get(k, ())) != rank]
        if wrong:
            raise GenError(
                f"the weights are not those of MAR: {', '.join(wrong)} are missing or have another"
                " number of axes"
            )
        mlp = {half: shapes[f"{half}_blocks.0.mlp.fc1.weight"] for half in ("encoder", "decoder")}
        positions = shapes["diffusion_pos_embed_learned"][1]
        return cls(
            positions=positions,
            buffer=max(1, shapes["encoder_pos_embed_learned"][1] - positions),
            classes=shapes["class_emb.weight"][0],
            latent_channels=shapes["z_proj.weight"][1],
            encoder=(mlp["encoder"][1], _count(shapes, "encoder_blocks"), mlp["encoder"][0]),
            decoder=(mlp["decoder"][1], _count(shapes, "decoder_blocks"), mlp["decoder"][0]),
            heads=tuple(_heads(mlp[half][1], heads) for half in mlp),
            head_width=shapes["diffloss.net.input_proj.weight"][0],
            head_depth=_count(shapes, "diffloss.net.res_blocks"),
            **options,
        )


class MAR(nn.Module):
    """MAR network, for the adapter ``gen.models.adapters.language_models.MaskedLatentLM``.

    Word c below ``classes`` is class c; word ``classes`` is the null class.
    """

    def __init__(self, config: MARConfig):
        super().__init__()
        if config.guidance_schedule not in SCHEDULES:
            raise unknown("guidance_schedule", config.guidance_schedule, SCHEDULES)
        self.config = config
        (wide, layers, hidden), (wide2, layers2, hidden2) = config.encoder, config.decoder
        length = config.buffer + config.positions

        def table(*shape):
            return nn.Parameter(torch.zeros(*shape))

        self.class_emb = nn.Embedding(config.classes, wide)
        self.fake_latent = table(1, wide)
        self.z_proj = nn.Linear(config.latent_channels, wide)
        self.z_proj_ln = nn.LayerNorm(wide, eps=EPS)
        self.encoder_pos_embed_learned = table(1, length, wide)
        self.encoder_blocks = nn.ModuleList(
            _Block(wide, config.heads[0], hidden) for _ in range(layers)
        )
        self.encoder_norm = nn.LayerNorm(wide, eps=EPS)
        self.decoder_embed = nn.Linear(wide, wide2)
        self.mask_token = table(1, 1, wide2)
        self.decoder_pos_embed_learned = table(1, length, wide2)
        self.decoder_blocks = nn.ModuleList(
            _Block(wide2, config.heads[1], hidden2) for _ in range(layers2)
        )
        self.decoder_norm = nn.LayerNorm(wide2, eps=EPS)
        self.diffusion_pos_embed_learned = table(1, config.positions, wide2)
        self.diffloss = DiffLoss(
            config.latent_channels,
            wide2,
            config.head_width,
            config.head_depth,
            config.head_steps,
            config.sigma_floor,
        )

    @property
    def head(self) -> DiffLoss:
        """Diffusion head."""
        return self.diffloss

    @property
    def device(self) -> torch.device:
        return self.mask_token.device

    @property
    def dtype(self) -> torch.dtype:
        return self.mask_token.dtype

    counts_known = True

    def forward(self, words: Tensor, latents: Tensor, num_known: Tensor | None = None) -> Tensor:
        """Compute conditioning vectors [B, T, D + 1] of all positions.

        The last number of each is the share of the guidance that applies. The vectors are float32
        at least, the dtype of the paths.

        Args:
            words: Class words int64 [B, 1].
            latents: [B, T, C], NaN at unknown positions.
            num_known: Positions known after the step, int64 [B]; by default one more than now.
        """
        if words.shape[1:] != (1,) or latents.shape[1:] != (
            self.config.positions,
            self.config.latent_channels,
        ):
            raise GenError(
                f"words {tuple(words.shape)} and latents {tuple(latents.shape)} came; expected [B,"
                f" 1] and [B, {self.config.positions}, {self.config.latent_channels}]"
            )
        known = ~latents.isnan().any(-1)
        visible = F.pad(known, (self.config.buffer, 0), value=True)
        x = self.encoder_inputs(words, latents)
        # only known positions are computed: those of each row come first, and the surplus of a row
        # with fewer is masked from attention
        order = (~visible).long().argsort(dim=1, stable=True)[:, : int(visible.sum(1).max())]
        gather = order[..., None].expand(-1, -1, x.shape[-1])
        mask = visible.gather(1, order)[:, None, None]
        out = self.run_encoder(x.gather(1, gather), order, mask)
        encoded = out.new_zeros(*visible.shape, out.shape[-1])
        encoded = encoded.scatter(1, order[..., None].expand_as(out), out)
        x = self.decoder_inputs(encoded, visible)
        columns = torch.arange(x.shape[1], device=x.device).expand(len(x), -1)
        z = self.run_decoder(x, columns, None)[:, self.config.buffer :]
        return self.finish(z, known, num_known)

    @property
    def prefix_columns(self) -> int:
        """Buffer tokens, all of the class."""
        return self.config.buffer

    @property
    def decoder_width(self) -> int:
        """Width of the decoder's inputs."""
        return self.config.decoder[0]

    @property
    def depths(self) -> tuple[int, int]:
        """Blocks of encoder and decoder."""
        return self.config.encoder[1], self.config.decoder[1]

    def encoder_inputs(self, words: Tensor, latents: Tensor) -> Tensor:
        """Embed the class, once per buffer token, and latents [B, T, C]: [B, buffer + T, D]."""
        label = torch.where(
            words < self.config.classes,
            self.class_emb(words.clamp_max(self.config.classes - 1))[:, 0],
            self.fake_latent,
        )
        label = label[:, None].expand(-1, self.config.buffer, -1)
        x = torch.cat([label, self.z_proj(latents.nan_to_num())], 1)
        return self.z_proj_ln(x + self.encoder_pos_embed_learned)

    def run_encoder(
        self, x: Tensor, columns: Tensor, mask: Tensor | None, cache: SlotCache | None = None
    ) -> Tensor:
        """Encode inputs [B, L, D], and project them to the decoder's width."""
        return self.decoder_embed(self.encoder_norm(_run(self.encoder_blocks, x, mask, cache)))

    def decoder_inputs(self, encoded: Tensor, known: Tensor) -> Tensor:
        """Inputs of the decoder [B, buffer + T, D] from the encoder's outputs at ``known``
        columns."""
        x = torch.where(known[..., None], encoded, self.mask_token)
        return x + self.decoder_pos_embed_learned

    def run_decoder(
        self, x: Tensor, columns: Tensor, mask: Tensor | None, cache: SlotCache | None = None
    ) -> Tensor:
        """Decode inputs [B, L, D] at columns [B, L]: conditioning vectors at columns of the
        canvas."""
        z = self.decoder_norm(_run(self.decoder_blocks, x, mask, cache))
        location = F.pad(self.diffusion_pos_embed_learned, (0, 0, self.config.buffer, 0))[0]
        return z + location[columns]

    def finish(self, z: Tensor, known: Tensor, num_known: Tensor | None = None) -> Tensor:
        """Add the share of the guidance that applies to conditioning vectors [B, T, D]."""
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        share = torch.ones_like(known[:, 0], dtype=z.dtype)
        if self.config.guidance_schedule == "linear":
            num_known = known.sum(1) + 1 if num_known is None else num_known
            positions = self.config.positions
            share = (num_known.clamp_max(positions - 1) / positions).to(z.dtype)
        return torch.cat([z, share[:, None, None].expand(-1, self.config.positions, 1)], -1)


def _run(blocks: nn.ModuleList, x: Tensor, mask: Tensor | None, cache: SlotCache | None) -> Tensor:
    for n, block in enumerate(blocks):
        x = block(x, mask, None if cache is None else cache.layers[n])
    return x


class _Block(nn.Module):
    """Vision transformer block."""

    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=EPS), nn.LayerNorm(width, eps=EPS)
        self.attn = nn.ModuleDict(
            {"qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)}
        )
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, hidden), "fc2": nn.Linear(hidden, width)})

    def forward(
        self, x: Tensor, mask: Tensor | None = None, layer: SlotLayer | None = None
    ) -> Tensor:
        """Transform x [B, L, D]. ``mask`` [B, 1, 1 or L, S]: positions to attend to, bool or to be
        added, by default all. ``layer``: cache of keys and values of S positions."""
        qkv = self.attn["qkv"](self.norm1(x))
        q, k, v = rearrange(qkv, "b l (three h d) -> three b h l d", three=3, h=self.heads)
        if layer is not None:
            k, v = layer.update(k, v)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.attn["proj"](rearrange(out, "b h l d -> b l (h d)"))
        return x + self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.norm2(x))))


def _count(shapes: Mapping[str, tuple[int, ...]], name: str) -> int:
    """Return the greatest block number plus one, so that a gap is reported when weights are filled
    in."""
    pattern = re.compile(rf"{re.escape(name)}\.(\d+)\.")
    numbers = [int(m[1]) for key in shapes if (m := pattern.match(key))]
    return max(numbers, default=0) + 1


def _heads(width: int, heads: int | None) -> int:
    if heads is None and width not in HEADS:
        raise GenError(
            f"the model has width {width}, which is not one of the published widths"
            f" ({', '.join(map(str, HEADS))}); expected the option heads, the number of attention"
            " heads, which the weights do not show"
        )
    heads = HEADS[width] if heads is None else heads
    if not isinstance(heads, int) or isinstance(heads, bool) or heads < 1 or width % heads:
        raise bad_value("heads", heads, f"an integer that divides the width {width}")
    return heads
