"""Tiny random checkpoints of the Chameleon family as they are published: file names, key names,
ids, tokenizers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from torch import Tensor

CODES = 64
CHANNELS = (32,) * 5  # 16 x 16 pixels a code, as published
SMALL = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.3,
)
WORDS = (
    "Generate an image of 64x32 32x64 according to the following prompt: a red blue dog cat".split()
)

# keys of diffusers.VQModel -> keys of VQGAN, which counts the decoder's levels from the other end
# besides
FROM_DIFFUSERS = (
    (r"(en|de)coder\.mid_block\.resnets\.0\.", r"\1coder.mid.block_1."),
    (r"(en|de)coder\.mid_block\.resnets\.1\.", r"\1coder.mid.block_2."),
    (r"mid_block\.attentions\.0\.", "mid.attn_1."),
    (r"down_blocks\.(\d+)\.resnets\.", r"down.\1.block."),
    (r"down_blocks\.(\d+)\.attentions\.", r"down.\1.attn."),
    (r"down_blocks\.(\d+)\.downsamplers\.0\.", r"down.\1.downsample."),
    (r"up_blocks\.(\d+)\.resnets\.", r"up.\1.block."),
    (r"up_blocks\.(\d+)\.attentions\.", r"up.\1.attn."),
    (r"up_blocks\.(\d+)\.upsamplers\.0\.", r"up.\1.upsample."),
    (r"(attn[._]\d+\.)(group|spatial)_norm\.", r"\1norm."),
    (r"\.to_out\.0\.", ".proj_out."),
    (r"\.to_([qkv])\.", r".\1."),
    ("conv_norm_out", "norm_out"),
    ("conv_shortcut", "nin_shortcut"),
)


def shaken(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Norms and biases that are not all ones and zeros, so that one in another's place is noticed;
    float64."""
    g = torch.Generator().manual_seed(seed)
    for p in model.double().parameters():
        if p.ndim == 1:
            p.data.add_(0.3 * torch.randn(p.shape, generator=g))
    return model.eval()


def diffusers_vq(
    modulated: bool, seed: int = 0, channels: tuple[int, ...] = (32, 64), codes: int = CODES
):
    """A ``diffusers.VQModel`` of Chameleon's kind (attention in the middle alone), or of MoVQGAN's
    (and at the last level, norms modulated)."""
    from diffusers import VQModel

    torch.manual_seed(seed)
    levels = len(channels)
    last = (
        ("AttnDownEncoderBlock2D", "AttnUpDecoderBlock2D")
        if modulated
        else ("DownEncoderBlock2D", "UpDecoderBlock2D")
    )
    width = 4 if modulated else 8
    model = VQModel(
        down_block_types=("DownEncoderBlock2D",) * (levels - 1) + last[:1],
        up_block_types=last[1:] + ("UpDecoderBlock2D",) * (levels - 1),
        block_out_channels=channels,
        layers_per_block=1,
        latent_channels=width,
        vq_embed_dim=width,
        num_vq_embeddings=codes,
        norm_type="spatial" if modulated else "group",
    )
    model.quantize.embedding.weight.data.normal_(generator=torch.Generator().manual_seed(seed))
    return shaken(model, seed)


def vqgan_keys(model) -> dict[str, Tensor]:
    """The tensors of a ``diffusers.VQModel`` by the keys of VQGAN."""
    top = len(model.config.block_out_channels) - 1
    out = {}
    for key, value in model.state_dict().items():
        for pattern, new in FROM_DIFFUSERS:
            key = re.sub(pattern, new, key)
        key = re.sub(r"decoder\.up\.(\d+)", lambda m: f"decoder.up.{top - int(m[1])}", key)
        out[key] = (
            value[..., None, None]
            if re.search(r"attn[._]\d+\.(q|k|v|proj_out)\.weight", key)
            else value
        )
    return out


def write_vqgan(path: Path, tensors: dict[str, Tensor]) -> Path:
    """As Meta's ``vqgan.ckpt``: under ``state_dict``, with what the loss of the training left
    there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    left = {
        "loss.perceptual_loss.lin0.model.1.weight": torch.zeros(1, 8, 1, 1),
        "loss.discriminator.main.0.bias": torch.zeros(8),
    }
    torch.save({"state_dict": {**tensors, **left}, "global_step": 7}, path)
    return path


def name_of(code: int) -> str:
    """The name of a code in Chameleon's vocabulary."""
    return "IMGIMG" + "".join(chr(ord("A") + int(c)) for c in str(code)) + "Z"


def write_tokenizer(folder: Path, ids: dict[str, int]) -> None:
    """A fast tokenizer of whole words, its specials as added tokens, all with the ids given."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t in ids if t.startswith("<")]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "LlamaTokenizer"})
    )


def vocabulary(first: int = 8, codes: int = CODES, sizes: int = 3) -> dict[str, int]:
    """Specials, words and codes by name, the codes from id ``first`` on in no order. ``sizes``: the
    names of so many sizes."""
    order = torch.randperm(codes, generator=torch.Generator().manual_seed(5)).tolist()
    names = [
        "<s>",
        "<pad>",
        "</s>",
        "<unk>",
        "<racm3:break>",
        "<eoss>",
        "<image>",
        "<reserved08706>",
    ]
    assert first == len(names)
    ids = {n: i for i, n in enumerate(names)} | {name_of(c): first + i for i, c in enumerate(order)}
    for more in ["<reserved08799>", *(f"<reserved{8801 + n:05d}>" for n in range(sizes)), *WORDS]:
        ids[more] = len(ids)
    return ids


def as_lumina(folder: Path) -> None:
    """Rewrite a folder as Lumina-mGPT's are: one row of norms for all heads, another class name."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights = {k: v[:1].clone() if "_norm." in k and v.ndim == 2 else v for k, v in weights.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "architectures": ["ChameleonXLLMXForConditionalGeneration"],
        "mask_image_logits": False,
        "dropout": 0.05,
        "z_loss_weight": 1e-05,
        "rope_theta": 10000.0,
        "rope_scaling": None,
    }
    (folder / "config.json").write_text(json.dumps(config))


def write_chameleon(
    folder: Path,
    vq: dict[str, Tensor] | None = None,
    ids: dict[str, int] | None = None,
    lumina: bool = False,
    seed: int = 1,
    shard: str = "5GB",
    **config,
) -> Path:
    """A folder of ``ChameleonForConditionalGeneration``. ``vq``: what ``vqgan.ckpt`` holds, if
    there is one. ``lumina``: as those of Lumina-mGPT: without the encoder of images, one row of
    norms for all heads, another name of the class."""
    from transformers import ChameleonConfig, ChameleonForConditionalGeneration

    ids = ids or vocabulary()
    torch.manual_seed(seed)
    vq_config = dict(
        embed_dim=8,
        num_embeddings=CODES,
        latent_channels=8,
        resolution=32,
        base_channels=32,
        channel_multiplier=[1] * len(CHANNELS),
        num_res_blocks=1,
    )
    made = ChameleonConfig(
        vocab_size=max(ids.values()) + 1,
        vocabulary_map=ids,
        vq_config=vq_config,
        max_position_embeddings=512,
        pad_token_id=1,
        **{**SMALL, **config},
    )
    model = shaken(ChameleonForConditionalGeneration(made), seed)
    if vq is not None:
        model.model.vqmodel.load_state_dict(
            {k: v for k, v in vq.items() if not k.startswith("decoder.")}
        )
        write_vqgan(folder / ("tokenizer/vqgan.ckpt" if lumina else "vqgan.ckpt"), vq)
    if lumina:
        del model.model.vqmodel
        for layer in model.model.layers:
            for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
                for p in (norm.weight, norm.bias):
                    p.data[:] = p.data[:1]
    model.save_pretrained(folder, max_shard_size=shard)
    if lumina:
        as_lumina(folder)
    write_tokenizer(folder, ids)
    return folder
