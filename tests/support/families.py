"""The smallest random checkpoint of every family in its published layout, for the contract that all
of them keep. Not a test.

``WRITERS`` has one writer per family, and further ones, ``family:kind``, where a family comes in
several layouts or modalities.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import image_text_folders
import mar_layout
import masked_folders
import tiny_amused
import tiny_checkpoints
import tiny_csm
import tiny_emu3
import tiny_generic
import tiny_janus
import tiny_llamagen
import tiny_musicgen
import tiny_musicgen_melody
import tiny_openvla
import tiny_whisper
import torch
import var_layout
from chameleon_files import CHANNELS, CODES, diffusers_vq, name_of, vqgan_keys, write_chameleon
from published import save_quietly, tiny_tokenizer
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from gen.modalities.checkpoints.llada import RENAMES as LLADA_KEYS
from gen.models.load.weights import PICKLES, WRAPPERS, Renames
from gen.models.nets import ldm_vae
from gen.models.published.var import HMAR_KEYS, VAR_KEYS

CAUSAL = ("speculative_jacobi", "autoregressive", "scd_mc")
SCALES = ("next_scale", {"name": "next_scale", "more_smooth": True})
MASKED = ("maskgit", "halton", "maskgit_remask")


@dataclass(frozen=True)
class Case:
    """A checkpoint: what it is loaded as, two prompts or conditions, three samplers. ``root``: a
    folder that holds all of its files, and ``path`` too."""

    modality: str
    path: Path
    options: Mapping[str, Any]
    prompts: tuple[Any, ...]
    samplers: tuple[Any, ...]
    root: Path = field(default=None)  # type: ignore[assignment]  by default the path

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", self.root or self.path)

    def copied(self, root: Path) -> Case:
        """The same checkpoint elsewhere."""
        shutil.copytree(self.root, root)
        return Case(
            self.modality,
            root / self.path.relative_to(self.root),
            self.options,
            self.prompts,
            self.samplers,
            root,
        )

    @property
    def weights(self) -> list[str]:
        """All files of weights, below the root."""
        found = [p for p in sorted(self.root.rglob("*")) if p.suffix in (".safetensors", *PICKLES)]
        return [str(p.relative_to(self.root)) for p in found]


def _steps(names: tuple[str, ...], steps: int = 3) -> tuple[Any, ...]:
    return tuple({"name": name, "steps": steps} for name in names)


def amused(folder: Path) -> Case:
    return Case(
        "image",
        tiny_amused.amused_folder(folder),
        {},
        ("a cat", "two red dogs"),
        _steps(("amused", "maskgit", "halton")),
    )


def causal_lm(folder: Path) -> Case:
    save_quietly(tiny_checkpoints.tiny("llama"), folder)
    save_quietly(tiny_tokenizer(), folder)
    return Case("text", folder, {"max_new_tokens": 5}, ("w1 w2 w3", "w9"), CAUSAL)


def chameleon(folder: Path, lumina: bool = False) -> Case:
    write_chameleon(folder, vqgan_keys(diffusers_vq(False, channels=CHANNELS)), lumina=lumina)
    return Case("image", folder, {"height": 64, "width": 32}, ("a red dog", "cat"), CAUSAL)


def csm(folder: Path) -> Case:
    return Case(
        "speech", tiny_csm.written(folder), {"frames": 3}, ("[0]hello", "[1]are you today"), CAUSAL
    )


def described(folder: Path, said: dict = tiny_generic.IMAGE) -> Case:
    image = said["modality"] == "image"
    samplers = CAUSAL if said["protocol"] == "causal" else _steps(MASKED)
    prompts = ("3", "class 0") if image else ("unconditional", "Unconditional")
    return Case(said["modality"], tiny_generic.written(folder, said), {}, prompts, samplers)


def emu3(folder: Path, modality: str = "image") -> Case:
    sizes = {"height": 4, "width": 4, **({"frames": 4} if modality == "video" else {})}
    return Case(modality, tiny_emu3.written(folder), sizes, ("a cat", "the red dog runs"), CAUSAL)


def hmar(folder: Path, pair: bool = False) -> Case:
    """As published, or as the two files of the training."""
    var_layout.write_hmar(folder)
    if pair:
        (folder / "hmar-d3.pth").unlink()
        for name, weights in zip(("ns", "mask"), var_layout.hmar_pair(), strict=True):
            torch.save(weights, folder / f"{name}.pth")
    samplers = ("next_scale_masked", *SCALES)
    return Case("image", folder, var_layout.OPTIONS, ("3", "class 7"), samplers)


def image_text(folder: Path, write: Callable[[Path], Path]) -> Case:
    """A folder of models that answer questions about images, and two questions."""
    write(folder)
    prompts = []
    for seed, size in enumerate([(10, 12), (16, 9)]):
        file = folder.with_name(f"{folder.name}-{seed}.png")
        image_text_folders.noise(seed, *size).save(file)
        prompts.append({"prompt": "What is this?", "image": str(file)})
    return Case("text", folder, {"max_new_tokens": 6}, tuple(prompts), CAUSAL)


def janus(folder: Path) -> Case:
    return Case("image", tiny_janus.written(folder), {}, ("a cat", "the red dog runs"), CAUSAL)


def masked_text(
    folder: Path,
    config: dict,
    weights: Callable,
    turn: str,
    samplers: tuple[str, ...],
    shards: int = 1,
    **more: Any,
) -> Case:
    masked_folders.write(folder, config, weights(config), shards=shards, turn=turn)
    return Case("text", folder, {"max_new_tokens": 6, **more}, ("ba de gi", "ko"), samplers)


def llamagen(folder: Path, captions: bool = False) -> Case:
    write = (
        tiny_llamagen.saved_with_text
        if captions
        else lambda folder: tiny_llamagen.saved(folder, tiny_llamagen.ar_weights())
    )
    sizes = {k: v for k, v in tiny_llamagen.OPTIONS.items() if k != "dtype"}
    return Case(
        "image", write(folder), sizes, ("w1 w2 w3", "w40") if captions else ("3", "class 7"), CAUSAL
    )


def mar(folder: Path) -> Case:
    """As the published scripts lay it out."""
    path = folder / "mar" / "mar_tiny"
    path.mkdir(parents=True)
    (folder / "vae").mkdir()
    mar_layout.write_trunk(path / "checkpoint-last.pth", mar_layout.trunk_weights())
    mar_layout.write_vae(folder / "vae" / "kl16.ckpt", mar_layout.vae_weights())
    return Case(
        "image",
        path,
        mar_layout.OPTIONS,
        ("3", "class 7"),
        _steps(("mar", "halton", "masked_iterative")),
        folder,
    )


def musicgen(folder: Path, **decoder: Any) -> Case:
    save_quietly(tiny_musicgen.tiny(**decoder), folder)
    tiny_musicgen.tokenizer(folder)
    return Case("speech", folder, {"frames": 3}, ("a slow song", "piano"), CAUSAL)


def musicgen_melody(folder: Path) -> Case:
    tiny_musicgen_melody.written(folder)
    path = tiny_whisper.sounds(folder, tiny_musicgen.RATE)[0]
    heard = {"prompt": "piano", "audio": str(path)}
    return Case("speech", folder, {"frames": 3}, ("a slow song", heard), CAUSAL)


def openvla(folder: Path) -> Case:
    return Case(
        "action",
        tiny_openvla.written(folder),
        {"unnorm_key": "bridge"},
        ("push the red cup", "pull"),
        CAUSAL,
    )


def whisper(folder: Path) -> Case:
    tiny_whisper.written(folder)
    paths = tiny_whisper.sounds(folder)
    prompts = tuple({"prompt": "", "audio": str(path)} for path in paths)
    return Case("text", folder, {"max_new_tokens": 8}, prompts, CAUSAL)


def var(folder: Path, **form: bool) -> Case:
    var_layout.write_var(folder, var_layout.var_weights(**form))
    options = {**var_layout.OPTIONS, "heads": var_layout.HEADS}
    return Case("image", folder, options, ("3", "class 7"), SCALES)


WRITERS: dict[str, Callable[[Path], Case]] = {
    "amused": amused,
    "causal_lm": causal_lm,
    "chameleon": chameleon,
    "chameleon:text": lambda folder: image_text(folder, image_text_folders.chameleon),
    "chameleon:lumina": lambda folder: chameleon(folder, lumina=True),
    "csm": csm,
    "described": described,
    "described:clips": lambda folder: described(folder, tiny_generic.VIDEO),
    "dream": lambda folder: masked_text(
        folder,
        masked_folders.DREAM,
        masked_folders.dream,
        "<|im_end|>",
        ("dream", "maskgit", "fast_dllm"),
    ),
    "emu3": emu3,
    "emu3:text": lambda folder: image_text(folder, image_text_folders.emu3),
    "emu3:clips": lambda folder: emu3(folder, "video"),
    "hmar": hmar,
    "hmar:pair": lambda folder: hmar(folder, pair=True),
    "idefics3": lambda folder: image_text(folder, image_text_folders.idefics3),
    "janus": janus,
    "janus:text": lambda folder: image_text(folder, image_text_folders.janus),
    "llada": lambda folder: masked_text(
        folder,
        masked_folders.LLADA,
        masked_folders.llada,
        "<|eot_id|>",
        ("llada", "maskgit", "fast_dllm"),
    ),
    "llada2": lambda folder: masked_text(
        folder,
        masked_folders.LLADA2,
        masked_folders.llada2,
        "<|role_end|>",
        ("llada2", "maskgit", "fast_dllm"),
        2,
        block_length=4,
    ),
    "llamagen": llamagen,
    "llamagen:captions": lambda folder: llamagen(folder, captions=True),
    "llava": lambda folder: image_text(folder, image_text_folders.llava),
    "llava:next": lambda folder: image_text(folder, image_text_folders.llava_next),
    "mar": mar,
    "musicgen": musicgen,
    "musicgen_melody": musicgen_melody,
    "openvla": openvla,
    "var": var,
    "var:shared": lambda folder: var(folder, shared=True, l2_norm=False),
    "whisper": whisper,
}


SCALE_TABLES = {
    r"^(lvl_1L|attn_bias_for_masking)$": "tables that follow from the scales",
    r"\.zero_k_bias$": "zeros",
    r"ema_vocab_hit_SV$": "a count of the training",
}
# what a file of weights may hold and lack, by design: patterns of keys, and why
PASSED_OVER: dict[str, dict[str, str]] = {
    "chameleon": {
        r"^model\.vqmodel\.": "the encoder of images, which vqgan.ckpt has too",
        r"^(encoder|quantize|quant_conv|post_quant_conv)\.": "the same, the other way round",
        r"^loss\.": "of the training",
    },
    "chameleon:lumina": {r"^loss\.": "of the training"},
    "llamagen": {r"codebook_used$": "a count of the training"},
    "llamagen:captions": {
        r"codebook_used$": "a count of the training",
        r"^(decoder\.(block|final_layer_norm)|lm_head)\.": (
            "of T5 its encoder is enough; keys of the VQ begin otherwise"
        ),
    },
    **dict.fromkeys(("hmar", "var", "var:shared"), SCALE_TABLES),
    "hmar:pair": SCALE_TABLES
    | {r"^(class_emb|pos_|lvl_embed|word_embed)": "the second file holds copies"},
    "mar": {r"^loss\.": "of the training"},
    "openvla": {
        rf"^vision_backbone\.\w+\.(norm|attn_pool|blocks\.{tiny_openvla.BLOCKS - 1})\.": (
            "behind the features, which are those of the last block but one"
        )
    },
}
# how messages call keys that the files have under other names
RENAMES: dict[str, Renames] = {
    "emu3": ((r"^text_model\.lm_head", "lm_head"),),
    "llada": LLADA_KEYS,
    "hmar": (*HMAR_KEYS, *ldm_vae.renames(var_layout.LEVELS)),
    "mar": ldm_vae.renames(mar_layout.LEVELS),
    "var": (*VAR_KEYS, *ldm_vae.renames(var_layout.LEVELS)),
}


# --- ways to spoil them


def rewrite(
    file: Path, change: Callable[[dict[str, torch.Tensor]], object] = lambda tensors: None
) -> None:
    """Lets ``change`` alter the tensors of a file in place, which stays what it is otherwise. In
    pickles it is the mapping that is read."""
    if file.suffix == ".safetensors":
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata()
        tensors = load_file(file)
        change(tensors)
        save_file({k: v.clone().contiguous() for k, v in tensors.items()}, file, metadata)
        return
    found = torch.load(file, weights_only=False)
    wrapper = next((w for w in ("model_ema", *WRAPPERS) if isinstance(found.get(w), Mapping)), None)
    change(found[wrapper] if wrapper else found)
    torch.save(found, file)


def edit(file: Path, change: Callable[[dict], object]) -> None:
    """The same for a JSON object."""
    said = json.loads(file.read_text())
    change(said)
    file.write_text(json.dumps(said))


def _larger_vq(case: Case) -> None:
    from diffusers import VQModel

    config = VQModel.load_config(case.path / "vqvae")
    save_quietly(
        VQModel.from_config({**config, "num_vq_embeddings": 2 * config["num_vq_embeddings"]}),
        case.path / "vqvae",
    )


def _fewer_rows(case: Case) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for key in [k for k in tensors if "generation_embeddings" in k or "vision_head" in k]:
            tensors[key] = tensors[key][:-1]

    rewrite(case.path / "model.safetensors", change)


def _small_melody(case: Case) -> None:
    few = tiny_musicgen.CODES // 2
    small = dict(vocab_size=few, pad_token_id=few, bos_token_id=few)
    tiny_musicgen_melody.written(case.path, **small)
    generation_config = case.path / "generation_config.json"
    edit(generation_config, lambda said: said.update(decoder_start_token_id=few))


def _small_music(case: Case) -> None:
    few = tiny_musicgen.CODES // 2
    musicgen(case.path, vocab_size=few, pad_token_id=few, bos_token_id=few)
    names = ("decoder_start_token_id", "pad_token_id", "bos_token_id")
    edit(case.path / "generation_config.json", lambda said: said.update(dict.fromkeys(names, few)))


def _large_tokenizer(case: Case) -> None:
    tokenizer = tiny_tokenizer(80)
    tokenizer.mask_token = "w0"
    save_quietly(tokenizer, case.path)


def _more_tokens(case: Case) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(case.path)
    tokenizer.add_tokens([f"<more {n}>" for n in range(9)])
    save_quietly(tokenizer, case.path)


def _fewer_codes(case: Case) -> None:
    codes = var_layout.CODES - 4
    for file in case.weights:
        path = case.root / file
        if "quantize.embedding.weight" in torch.load(path):
            torch.save(var_layout.vae_weights(codes=codes), path)


def _without_name(word: str) -> Callable[[Case], None]:
    return lambda case: edit(
        case.path / "config.json", lambda said: said["vocabulary_map"].pop(word)
    )


SEEING = ("chameleon:text", "emu3:text", "idefics3", "janus:text", "llava", "llava:next")
# a vocabulary that is smaller than the codebook (or the tokenizer) that it stands for
SMALLER: dict[str, Callable[[Case], None]] = {
    "amused": _larger_vq,
    **dict.fromkeys(("causal_lm", "dream", "llada", "llada2"), _large_tokenizer),
    **dict.fromkeys(SEEING, _more_tokens),
    **dict.fromkeys(("chameleon", "chameleon:lumina"), _without_name(name_of(CODES - 1))),
    "csm": lambda case: tiny_csm.written(case.path, vocab_size=tiny_csm.CODES // 2),
    "described": lambda case: edit(case.path / "gen.json", lambda said: said["codes"].pop()),
    "described:clips": lambda case: edit(
        case.path / "gen.json", lambda said: said["codes"].update(size=said["codes"]["size"] - 1)
    ),
    **dict.fromkeys(("emu3", "emu3:clips"), _without_name("<|visual token 000047|>")),
    **dict.fromkeys(("hmar", "hmar:pair", "var", "var:shared"), _fewer_codes),
    "janus": _fewer_rows,
    "llamagen": (
        lambda case: (
            tiny_llamagen.saved(case.path, tiny_llamagen.ar_weights(codes=tiny_llamagen.CODES - 4))
            and None
        )
    ),
    "llamagen:captions": lambda case: torch.save(
        tiny_llamagen.ar_weights(text=True, codes=tiny_llamagen.CODES - 4),
        case.path / "t2i_XL_stage1.pt",
    ),
    "musicgen": _small_music,
    "musicgen_melody": _small_melody,
    "openvla": lambda case: edit(
        case.path / "config.json", lambda said: said.update(n_action_bins=200)
    ),
    "whisper": lambda case: tiny_whisper.written(case.path, vocab_size=tiny_whisper.SIZE // 2),
}
NO_VOCABULARY = {"mar": "its tokens are latents, which no codebook names"}
