"""VAR, HMAR and their autoencoder written out a second time, in plain torch over the published
keys, image by image and without a cache. ``wrong`` breaks them on purpose. Not a test."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]


def linear(w: Weights, at: str, x: Tensor) -> Tensor:
    return x @ w[f"{at}.weight"].T + w[f"{at}.bias"]


def conv(w: Weights, at: str, x: Tensor, **options) -> Tensor:
    weight = w[f"{at}.weight"]
    options = {"padding": weight.shape[-1] // 2, **options}
    return F.conv2d(x[None], weight, w[f"{at}.bias"], **options)[0]


# --- the transformer


def norm(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def attention(w: Weights, at: str, x: Tensor, sees: Tensor, heads: int, wrong: str) -> Tensor:
    zeros = torch.zeros_like(w[f"{at}.q_bias"])
    k_bias = zeros + 0.3 * torch.arange(len(zeros)).cos() if wrong == "k bias" else zeros
    bias = torch.cat([w[f"{at}.q_bias"], k_bias, w[f"{at}.v_bias"]])
    q, k, v = (x @ w[f"{at}.mat_qkv.weight"].T + bias).chunk(3, -1)
    size = x.shape[-1] // heads
    out = []
    for h in range(heads):
        cut = slice(h * size, (h + 1) * size)
        mine, others = q[:, cut], k[:, cut]
        if f"{at}.scale_mul_1H11" in w:
            factor = w[f"{at}.scale_mul_1H11"][0, h, 0, 0].exp()
            factor = factor if wrong == "no limit" else factor.clamp(max=100)
            mine = mine / mine.norm(dim=-1, keepdim=True) * factor
            others = others / others.norm(dim=-1, keepdim=True)
        else:
            mine = mine * (1.0 if wrong == "usual scale" else 0.25) / math.sqrt(size)
        scores = (mine @ others.T).masked_fill(~sees, -math.inf)
        out.append(scores.softmax(-1) @ v[:, cut])
    return linear(w, f"{at}.proj", torch.cat(out, -1))


def gelu(x: Tensor) -> Tensor:
    return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def block(
    w: Weights, at: str, x: Tensor, label: Tensor, sees: Tensor, heads: int, wrong: str
) -> Tensor:
    active = label * label.sigmoid()
    if f"{at}.ada_gss" in w:
        six = linear(w, "shared_ada_lin.1", active).view(6, -1) + w[f"{at}.ada_gss"][0, 0]
    else:
        six = linear(w, f"{at}.ada_lin.1", active).view(6, -1)
    if wrong == "order":  # shift, scale, gamma of each half, as in other models of this kind
        six = six[[2, 5, 1, 4, 0, 3]]
    gamma1, gamma2, scale1, scale2, shift1, shift2 = six
    h = norm(x) * (1 + scale1) + shift1
    x = x + gamma1 * attention(w, f"{at}.attn", h, sees, heads, wrong)
    h = norm(x) * (1 + scale2) + shift2
    return x + gamma2 * linear(w, f"{at}.ffn.fc2", gelu(linear(w, f"{at}.ffn.fc1", h)))


def transformer(
    w: Weights,
    label: int,
    rows: list[Tensor],
    *,
    parts: tuple[str, ...] = ("blocks",),
    head: str = "head",
    heads: int,
    markov: bool = False,
    wrong: str = "",
) -> Tensor:
    """Logits [T, V] of one image from what its scales add to the position embeddings."""
    counts = [len(r) for r in rows]
    level = torch.tensor([k for k, n in enumerate(counts) for _ in range(n)])
    sees = level[:, None] == level if markov else level[:, None] >= level
    c = w["class_emb.weight"][label]
    x = torch.cat(rows) + w["pos_1LC"][0] + w["lvl_embed.weight"][level]
    for part in parts:
        for n in sorted({int(k.split(".")[1]) for k in w if k.startswith(f"{part}.")}):
            x = block(w, f"{part}.{n}", x, c, sees, heads, wrong)
    scale, shift = linear(w, f"{head}_nm.ada_lin.1", c * c.sigmoid()).chunk(2)
    return linear(w, head, norm(x) * (1 + scale) + shift)


def first_row(w: Weights, label: int) -> Tensor:
    return w["class_emb.weight"][label] + w["pos_start"][0]


def var_logits(w: Weights, vae: Weights, label: int, ids: Tensor, sides, **options) -> Tensor:
    """Logits [T, V] of VAR, and of the next-scale pass of HMAR."""
    bias = w.get("word_embed.bias", w.get("word_embed_bias"))
    rows = [x @ w["word_embed.weight"].T + bias for x in before(vae, ids, sides, options)]
    return transformer(w, label, [first_row(w, label), *rows], **options)


def mask_logits(
    w: Weights, vae: Weights, label: int, ids: Tensor, hidden: Tensor, sides, leak: bool, **options
) -> Tensor:
    """Logits [T, V] of HMAR's pass about masked tokens."""
    rows, at = [first_row(w, label)], sides[0] ** 2
    for k, x in enumerate(before(vae, ids, sides, options), 1):
        own = slice(at, at + sides[k] ** 2)
        vectors = vae["quantize.embedding.weight"][ids[own]].clone()
        if not leak:
            vectors[hidden[own]] = 0
        known = reduced(enlarged(vae, vectors, k, sides), sides[k]) @ w["word_embed.weight"].T
        known[hidden[own]] = w["mask_embed.weight"][0]
        rows.append(x @ w["word_embed.weight"].T + known + w["word_embed_bias"])
        at = own.stop
    parts, head = ("base_blocks", "mask_blocks"), "mask_head"
    return transformer(w, label, rows, parts=parts, head=head, markov=True, **options)


# --- the quantiser


def convolution(scale: int, scales: int, shared: int) -> int:
    """The convolution of a scale, by the ticks as the paper's code puts them."""
    first = 1 / 12 if shared == 4 else 1 / (2 * shared)
    ticks = [first + n * (1 - 2 * first) / (shared - 1) for n in range(shared)]
    return min(range(shared), key=lambda n: round(abs(ticks[n] - scale / (scales - 1)), 9))


def enlarged(vae: Weights, vectors: Tensor, scale: int, sides, wrong: str = "") -> Tensor:
    """What a scale's vectors [n, D] add to the sum: [D, H, W]."""
    h = vectors.T.reshape(1, -1, sides[scale], sides[scale])
    if sides[scale] != sides[-1]:
        h = F.interpolate(h, size=(sides[-1], sides[-1]), mode="bicubic")
    shared = len([k for k in vae if k.startswith("quantize.quant_resi") and k.endswith("weight")])
    n = convolution(scale, len(sides), shared)
    n = shared - 1 - n if wrong == "phi" else n
    return 0.5 * h[0] + 0.5 * conv(vae, f"quantize.quant_resi.qresi_ls.{n}", h[0])


def reduced(f: Tensor, side: int) -> Tensor:
    """A map [D, H, W] at fewer sides: [side * side, D]."""
    return F.interpolate(f[None], size=(side, side), mode="area")[0].flatten(1).T


def sums(vae: Weights, ids: Tensor, sides, wrong: str = "") -> list[Tensor]:
    """The sum [D, H, W] after every scale."""
    found, total = [], 0.0
    parts = ids.split([side**2 for side in sides])
    for scale, part in enumerate(parts):
        vectors = vae["quantize.embedding.weight"][part]
        total = total + enlarged(vae, vectors, scale, sides, wrong)
        found.append(total)
    return found


def before(vae: Weights, ids: Tensor, sides, options: dict) -> list[Tensor]:
    """What every scale but the first reads: [n_k, D]."""
    found = sums(vae, ids, sides, options.get("wrong", ""))
    return [reduced(f, side) for f, side in zip(found, sides[1:], strict=False)]


def quantised(vae: Weights, f: Tensor, sides, wrong: str = "") -> Tensor:
    """Token ids [T] of a feature map [D, H, W]."""
    rest, ids, table = f, [], vae["quantize.embedding.weight"]
    for scale, side in enumerate(sides):
        z = reduced(rest, side)
        ids.append(torch.cdist(z, table).argmin(1))
        rest = rest - enlarged(vae, table[ids[-1]], scale, sides, wrong)
    return torch.cat(ids)


# --- encoder and decoder


def group_norm(w: Weights, at: str, x: Tensor) -> Tensor:
    return F.group_norm(x[None], 32, w[f"{at}.weight"], w[f"{at}.bias"], eps=1e-6)[0]


def silu(x: Tensor) -> Tensor:
    return x * x.sigmoid()


def resnet(w: Weights, at: str, x: Tensor) -> Tensor:
    h = conv(w, f"{at}.conv1", silu(group_norm(w, f"{at}.norm1", x)))
    h = conv(w, f"{at}.conv2", silu(group_norm(w, f"{at}.norm2", h)))
    return h + (conv(w, f"{at}.nin_shortcut", x) if f"{at}.nin_shortcut.weight" in w else x)


def attended(w: Weights, at: str, x: Tensor, wrong: str) -> Tensor:
    q, k, v = conv(w, f"{at}.qkv", group_norm(w, f"{at}.norm", x)).flatten(1).chunk(3)
    if wrong == "kqv":
        q, k = k, q
    seen = v @ (q.T @ k / math.sqrt(len(q))).softmax(-1).T
    return x + conv(w, f"{at}.proj_out", seen.view_as(x))


def middle(w: Weights, at: str, x: Tensor, wrong: str) -> Tensor:
    x = attended(w, f"{at}.attn_1", resnet(w, f"{at}.block_1", x), wrong)
    return resnet(w, f"{at}.block_2", x)


def stack(w: Weights, at: str, x: Tensor, wrong: str) -> Tensor:
    """The residual blocks of one level, with attention where there is one."""
    for j in range(len({k.split(".")[4] for k in w if k.startswith(f"{at}.block.")})):
        x = resnet(w, f"{at}.block.{j}", x)
        if f"{at}.attn.{j}.qkv.weight" in w:
            x = attended(w, f"{at}.attn.{j}", x, wrong)
    return x


def features(w: Weights, image: Tensor, wrong: str = "") -> Tensor:
    """Feature map [D, H, W] of an image [3, h, w] in [-1, 1]."""
    x = conv(w, "encoder.conv_in", image)
    for i in range(_levels(w)):
        x = stack(w, f"encoder.down.{i}", x, wrong)
        if f"encoder.down.{i}.downsample.conv.weight" in w:
            sides = (1, 0, 1, 0) if wrong == "left" else (0, 1, 0, 1)
            x = conv(w, f"encoder.down.{i}.downsample.conv", F.pad(x, sides), stride=2, padding=0)
    x = middle(w, "encoder.mid", x, wrong)
    x = conv(w, "encoder.conv_out", silu(group_norm(w, "encoder.norm_out", x)))
    return conv(w, "quant_conv", x)


def pixels(w: Weights, f: Tensor, wrong: str = "") -> Tensor:
    """Image [3, h, w] of a feature map [D, H, W]."""
    x = middle(w, "decoder.mid", conv(w, "decoder.conv_in", conv(w, "post_quant_conv", f)), wrong)
    for i in reversed(range(_levels(w))):
        x = stack(w, f"decoder.up.{i}", x, wrong)
        if f"decoder.up.{i}.upsample.conv.weight" in w:
            x = x.repeat_interleave(2, 1).repeat_interleave(2, 2)
            x = conv(w, f"decoder.up.{i}.upsample.conv", x)
    return conv(w, "decoder.conv_out", silu(group_norm(w, "decoder.norm_out", x)))


def _levels(w: Weights) -> int:
    return len({k.split(".")[2] for k in w if k.startswith("encoder.down.")})
