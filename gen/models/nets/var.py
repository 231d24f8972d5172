"""Transformers of VAR (Tian et al., arXiv 2404.02905) and HMAR (Kumbong et al., arXiv 2506.04421),
which predict the token maps of a residual quantiser, coarse to fine.

A position of scale k >= 1 reads the sum of all earlier scales, reduced to the sides of scale k, and
those of scale 0 read the class. The output of a position is the token of that position. The class
drives the norms of every block too:

    gamma1, gamma2, scale1, scale2, shift1, shift2 = Linear(SiLU(class))
    x = x + gamma1 attention((1 + scale1) LN(x) + shift1)
    x = x + gamma2 mlp((1 + scale2) LN(x) + shift2)

VAR attends to its own scale and to all earlier ones. HMAR attends to its own scale alone, and its
last blocks exist twice: those of ``fill`` predict a scale, those of ``refine`` predict its masked
tokens, given the others of that scale.

The null class is the last row of ``class_emb``. Keys of attention have no bias.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gen.core.errors import GenError
from gen.models.load.transformers_compat import Cache
from gen.models.nets.residual_scales import Sides

EPS = 1e-6
MAX_LOG_SCALE = math.log(100)  # of attention between unit vectors


@dataclass(frozen=True)
class VARConfig:
    """Sizes of a model.

    Attributes:
        sides: (height, width) of every scale, coarse to fine.
        codes: vectors V of the codebook.
        channels: floats D of a vector.
        classes: classes without the null class.
        width: channels C of the transformer.
        hidden: channels inside the MLPs.
        heads: attention heads.
        blocks: blocks of both passes.
        tail: last blocks that each of the two passes of HMAR has; 0 for VAR.
        shared: one map from the class to the norms of all blocks, with an offset per block.
        l2_norm: attention between unit vectors, with a learned scale per head.
        markov: a scale does not attend to the earlier ones.
    """

    sides: Sides
    codes: int
    channels: int
    classes: int
    width: int
    hidden: int
    heads: int
    blocks: int
    tail: int = 0
    shared: bool = False
    l2_norm: bool = True
    markov: bool = False

    @property
    def lengths(self) -> list[int]:
        """Positions of every scale."""
        return [h * w for h, w in self.sides]


class Attention(nn.Module):
    """Attention without a bias of the keys."""

    def __init__(self, config: VARConfig):
        super().__init__()
        width, self.heads = config.width, config.heads
        self.mat_qkv = nn.Linear(width, 3 * width, bias=False)
        self.q_bias, self.v_bias = (nn.Parameter(torch.zeros(width)) for _ in range(2))
        self.scale_mul_1H11 = None
        self.scale = 0.25 * (width // self.heads) ** -0.5
        if config.l2_norm:
            self.scale_mul_1H11 = nn.Parameter(torch.full((1, self.heads, 1, 1), math.log(4)))
            self.scale = 1.0
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None, cache: Cache | None, block: int) -> Tensor:
        bias = torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])
        qkv = (self.mat_qkv(x) + bias).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        if self.scale_mul_1H11 is not None:
            factor = self.scale_mul_1H11.clamp_max(MAX_LOG_SCALE).exp()
            q, k = F.normalize(q, dim=-1) * factor, F.normalize(k, dim=-1)
        if cache is not None:
            k, v = cache.update(k, v, block)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        return self.proj(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Transformer block whose norms the class drives."""

    def __init__(self, config: VARConfig):
        super().__init__()
        width = config.width
        self.attn, self.ada_lin = Attention(config), None
        self.ffn = nn.ModuleDict(
            {"fc1": nn.Linear(width, config.hidden), "fc2": nn.Linear(config.hidden, width)}
        )
        if config.shared:
            self.ada_gss = nn.Parameter(torch.zeros(1, 1, 6, width))
        else:
            self.ada_lin = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(
        self,
        x: Tensor,
        norms: Tensor,
        mask: Tensor | None = None,
        cache: Cache | None = None,
        block: int = 0,
    ) -> Tensor:
        """Transform x [B, L, C].

        Args:
            x: inputs.
            norms: embedded classes [B, C], or [B, 1, 6, C] of a model with ``shared`` norms.
            mask: [L, S], positions to attend to, bool or to be added; None for all.
            cache: keys and values of earlier scales, which grow; None for none.
            block: number of the block in the cache.
        """
        if self.ada_lin is None:
            six = norms + self.ada_gss
        else:
            six = self.ada_lin(norms).view(len(norms), 1, 6, -1)
        gamma1, gamma2, scale1, scale2, shift1, shift2 = six.unbind(2)
        x = x + gamma1 * self.attn(modulate(x, scale1, shift1), mask, cache, block)
        h = F.gelu(self.ffn["fc1"](modulate(x, scale2, shift2)), approximate="tanh")
        return x + gamma2 * self.ffn["fc2"](h)


class Pass(nn.Module):
    """Last blocks, norm and head of one pass."""

    def __init__(self, config: VARConfig):
        super().__init__()
        width = config.width
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.tail))
        self.head_nm = nn.ModuleDict(
            {"ada_lin": nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))}
        )
        self.head = nn.Linear(width, config.codes)

    def logits(self, x: Tensor, label: Tensor) -> Tensor:
        """Return the logits [B, L, V] of x [B, L, C] and embedded classes [B, C].

        They are computed in the dtype of the head.
        """
        scale, shift = self.head_nm["ada_lin"](label).view(len(label), 1, 2, -1).unbind(2)
        dtype = self.head.bias.dtype  # that of a quantised weight may be one of integers
        return self.head(modulate(x.to(dtype), scale.to(dtype), shift.to(dtype)))


class VAR(nn.Module):
    """Transformer of VAR, and of HMAR where the config has a ``tail``.

    Attributes:
        blocks: blocks of both passes.
        fill, refine: last blocks, norm and head of each pass; VAR has one, and it has no blocks.
    """

    def __init__(self, config: VARConfig):
        super().__init__()
        self.config, width = config, config.width
        lengths = config.lengths
        self.class_emb = nn.Embedding(config.classes + 1, width)
        self.pos_start = nn.Parameter(torch.zeros(1, lengths[0], width))
        self.pos_1LC = nn.Parameter(torch.zeros(1, sum(lengths), width))
        self.lvl_embed = nn.Embedding(len(lengths), width)
        self.word_embed = nn.Linear(config.channels, width)
        self.shared_ada_lin = None
        if config.shared:
            self.shared_ada_lin = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.fill, self.refine = Pass(config), None
        if config.tail:
            self.refine, self.mask_embed = Pass(config), nn.Embedding(1, width)

    @property
    def refines(self) -> bool:
        """True if the model has the pass that refines."""
        return self.refine is not None

    def last(self, refine: bool) -> Pass:
        """Return the last blocks, norm and head of a pass. Raises ``GenError`` if the model has no
        pass that refines."""
        if not refine:
            return self.fill
        if self.refine is None:
            raise GenError(
                "the model has no blocks that refine a scale; expected weights of HMAR, with"
                " mask_blocks"
            )
        return self.refine

    def embed(self, classes: Tensor, maps: Tensor | None, scale: int) -> Tensor:
        """Embed one scale: [B, n_k, C].

        Args:
            classes: long [B], which scale 0 reads.
            maps: reduced sum of the earlier scales, [B, n_k, D]; not read for scale 0.
            scale: the scale.
        """
        lengths = self.config.lengths
        first = sum(lengths[:scale])
        location = self.pos_1LC[:, first : first + lengths[scale]] + self.lvl_embed.weight[scale]
        if maps is None or not scale:
            return self.class_emb(classes)[:, None] + self.pos_start + location
        return self.word_embed(maps.to(location.dtype)) + location

    def embed_own(self, own: Tensor, hidden: Tensor) -> Tensor:
        """Embed the tokens of a scale that the refining pass reads, to be added to ``embed``.

        Args:
            own: reduced known tokens [B, n_k, D] (``ResidualScales.own``).
            hidden: bool [B, n_k], masked positions.

        Returns:
            [B, n_k, C].

        Raises:
            GenError: the model has no pass that refines.
        """
        self.last(refine=True)
        known = F.linear(own.to(self.word_embed.weight.dtype), self.word_embed.weight)
        masked = self.mask_embed(torch.zeros(1, dtype=torch.long, device=hidden.device))
        return torch.where(hidden[..., None], masked, known)

    def run(
        self,
        x: Tensor,
        classes: Tensor,
        mask: Tensor | None = None,
        cache: Cache | None = None,
        refine: bool = False,
    ) -> Tensor:
        """Return the logits [B, L, V] of embedded positions [B, L, C].

        Args:
            x: embedded scale, or all of them with a mask.
            classes: long [B].
            mask: [L, S], positions to attend to, bool or to be added; None for all.
            cache: keys and values of earlier scales, which grow; None for none.
            refine: run the pass that refines.
        """
        last = self.last(refine)
        label = norms = self.class_emb(classes)
        if self.shared_ada_lin is not None:
            norms = self.shared_ada_lin(label).view(len(label), 1, 6, -1)
        for number, block in enumerate([*self.blocks, *last.blocks]):
            x = block(x, norms, mask, cache, number)
        return last.logits(x, label)

    def forward(
        self,
        classes: Tensor,
        maps: Tensor,
        own: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Compute the logits [B, T, V] of all scales in one pass.

        Args:
            classes: long [B].
            maps: reduced sums of the earlier scales, of all scales but the first, [B, T - n_0, D]
                (``ResidualScales.inputs``).
            own: reduced known tokens of those scales, [B, T - n_0, D], for the pass that refines.
            hidden: bool [B, T - n_0], masked positions of the pass that refines.
        """
        lengths = self.config.lengths
        parts = [None, *maps.split(lengths[1:], 1)]
        x = torch.cat([self.embed(classes, part, k) for k, part in enumerate(parts)], 1)
        refine = own is not None and hidden is not None
        if refine:
            x = x + F.pad(self.embed_own(own, hidden), (0, 0, lengths[0], 0))
        level = torch.arange(len(lengths), device=x.device)
        level = level.repeat_interleave(torch.tensor(lengths, device=x.device))
        sees = level[:, None] == level if self.config.markov else level[:, None] >= level
        return self.run(x, classes, sees, refine=refine)


def modulate(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Normalise x [B, L, C] without weights, then scale by 1 + ``scale`` and shift, [B, 1, C]."""
    return F.layer_norm(x, x.shape[-1:], eps=EPS) * (1 + scale) + shift
