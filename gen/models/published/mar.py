"""MAR (Li et al., "Autoregressive Image Generation without Vector Quantization", arXiv 2406.11838)
with its published keys: a masked transformer of latents with a diffusion head (``mar_head``).

    encoder   the class, as so many equal buffer tokens, and the known latents; nothing else
    decoder   what the encoder made of them, a mask token at every unknown place -> a conditioning
              vector z of every place

Blocks are those of a vision transformer: pre-norm, full attention, exact GELU. The published
evaluation raises guidance with what is known: with k of T places known after a step, its scale is 1
+ (s - 1) k / T. Here k is what is known before the step, plus one: a law of the canvas alone,
whatever the sampler, and the same where a step fills one place. With ``constant`` it is s
throughout.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gen.core.errors import GenError, bad_value, unknown
from gen.models.nets.mar_head import EPS, DiffLoss

HEADS = {768: 12, 1024: 16, 1280: 16}  # of attention, by width: base, large, huge
SCHEDULES = ("linear", "constant")


@dataclass(frozen=True)
class MARConfig:
    """The sizes of a model. ``encoder``, ``decoder``: width, blocks and width inside the MLPs of
    each. ``heads``: of attention, of each."""

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
        """The sizes that published weights have, from the shapes by key. ``heads``: where the width
        is none of the published ones. Raises ``GenError`` for keys that say the sizes and are not
        there, and for heads that do not fit.
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
                f"these are no weights of MAR: {', '.join(wrong)} are missing or have another"
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
    """See the module; an adapter of masked models of latents
    (``gen.models.adapters.language_models.MaskedLatentLM``) takes it as it is.

    Word c below ``classes`` is class c, and word ``classes`` says nothing."""

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
        return self.diffloss

    @property
    def device(self) -> torch.device:
        return self.mask_token.device

    @property
    def dtype(self) -> torch.dtype:
        return self.mask_token.dtype

    def forward(self, words: Tensor, latents: Tensor) -> Tensor:
        """Conditioning vectors [B, T, D + 1] of all places from words long [B, 1] and latents [B,
        T, C], NaN at unknown places; the last number of each is how much of the guidance acts
        there. They are float32 at least, so that paths are walked in that.
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
        z = self._decode(*self._encode(words, latents, known))
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        share = torch.ones_like(known[:, 0], dtype=z.dtype)
        if self.config.guidance_schedule == "linear":
            share = ((known.sum(1) + 1) / self.config.positions).clamp_max(1).to(z.dtype)
        return torch.cat([z, share[:, None, None].expand(-1, self.config.positions, 1)], -1)

    def _encode(self, words: Tensor, latents: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        """What the encoder makes of the class and the known latents, laid out over all places [B,
        buffer + T, D]; and which are known."""
        label = torch.where(
            words < self.config.classes,
            self.class_emb(words.clamp_max(self.config.classes - 1))[:, 0],
            self.fake_latent,
        )
        label = label[:, None].expand(-1, self.config.buffer, -1)
        x = torch.cat([label, self.z_proj(latents.nan_to_num())], 1)
        x = self.z_proj_ln(x + self.encoder_pos_embed_learned)
        known = F.pad(known, (self.config.buffer, 0), value=True)
        # only known places are computed: each row's own come first, the rest of a shorter row is
        # hidden from everybody
        order = (~known).long().argsort(dim=1, stable=True)[:, : int(known.sum(1).max())]
        shown = known.gather(1, order)
        at = order[..., None].expand(-1, -1, x.shape[-1])
        x = x.gather(1, at)
        for block in self.encoder_blocks:
            x = block(x, shown)
        x = self.decoder_embed(self.encoder_norm(x))
        laid = x.new_zeros(*known.shape, x.shape[-1])
        return laid.scatter(1, order[..., None].expand_as(x), x), known

    def _decode(self, encoded: Tensor, known: Tensor) -> Tensor:
        x = torch.where(known[..., None], encoded, self.mask_token) + self.decoder_pos_embed_learned
        for block in self.decoder_blocks:
            x = block(x)
        return self.decoder_norm(x)[:, self.config.buffer :] + self.diffusion_pos_embed_learned


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=EPS), nn.LayerNorm(width, eps=EPS)
        self.attn = nn.ModuleDict(
            {"qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)}
        )
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, hidden), "fc2": nn.Linear(hidden, width)})

    def forward(self, x: Tensor, shown: Tensor | None = None) -> Tensor:
        """x [B, L, D]; ``shown``: bool [B, L], what may be attended to, by default everything."""
        q, k, v = (
            self.attn["qkv"](self.norm1(x))
            .unflatten(-1, (3, self.heads, -1))
            .permute(2, 0, 3, 1, 4)
        )
        seen = F.scaled_dot_product_attention(
            q, k, v, attn_mask=None if shown is None else shown[:, None, None]
        )
        x = x + self.attn["proj"](seen.transpose(1, 2).flatten(2))
        return x + self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.norm2(x))))


def _count(shapes: Mapping[str, tuple[int, ...]], name: str) -> int:
    """One more than the greatest number of a block, so that one in between that is not there is
    missed when weights are filled in."""
    found = [int(m[1]) for m in (re.match(rf"{re.escape(name)}\.(\d+)\.", k) for k in shapes) if m]
    return max(found, default=0) + 1


def _heads(width: int, heads: int | None) -> int:
    if heads is None and width not in HEADS:
        raise GenError(
            f"the model has width {width}, which is none of the published ones"
            f" ({', '.join(map(str, HEADS))}); expected the option heads, the number of heads of"
            " attention, which weights do not say"
        )
    heads = HEADS[width] if heads is None else heads
    if not isinstance(heads, int) or isinstance(heads, bool) or heads < 1 or width % heads:
        raise bad_value("heads", heads, f"an integer that divides the width {width}")
    return heads
