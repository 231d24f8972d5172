"""Chameleon (arXiv 2405.09818), Anole (arXiv 2407.06135), Lumina-mGPT (arXiv 2408.02657) and
Lumina-mGPT 2.0 (arXiv 2507.17801): one causal model of words and codes. A prompt is

    chameleon         bos, words, sep, boi                          then H W codes row by row
    lumina, lumina2   bos, template with words, sep, boi, h, w      then H rows of (W codes, row
                      end)

with h and w ids that say how many times 32 pixels the sides are. The closing id says nothing and is
not generated. The unconditional half of guidance is bos, boi, and boi, h, w: as in the published
samplers, and as what Lumina was trained on without words begins.

Which of the three a folder is: ``lumina`` and ``lumina2`` have a class with XLLMX in its name, or
their training's settings (``z_loss_weight``, ``mask_image_logits``) in their config; ``lumina2``
has a vocabulary of more than 155000 ids besides. All else is ``chameleon``.

The id of a code is found by its name ("IMGIMG", then A for 0 to J for 9, then "Z") in the config's
``vocabulary_map``, or the tokenizer. Where neither names all codes, those of ``lumina2`` begin at
155000, as in its published sampler. Other specials are the tokenizer's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gen.contracts.checkpoint import Checkpoint, CheckpointFiles, LoadOptions
from gen.contracts.frontend import TokenFrontend
from gen.contracts.layouts import make_layout, space
from gen.contracts.modality import Binding
from gen.core.errors import GenError, bad_value, unknown
from gen.core.registry import register
from gen.core.token_space import TokenSpace
from gen.modalities.open_vocabulary import FreeImage
from gen.models.adapters.conditioning import Vocabulary
from gen.models.load.weights import Weights
from gen.models.published.chameleon import IMAGES, ChameleonLM, language_model, model_weights
from gen.tokenizers.image.chameleon_vq import Below, ChameleonVQ
from gen.tokenizers.image.vq import VQ

NAMED = re.compile(r"IMGIMG([A-J]+)Z")
DIGITS = str.maketrans("ABCDEFGHIJ", "0123456789")
FIRST = 155000  # the id of code 0 of Lumina-mGPT 2.0
BOI, EOI, SEP, ROW_END, SIZE = (
    "<racm3:break>",
    "<eoss>",
    "<reserved08706>",
    "<reserved08799>",
    "<reserved{:05d}>",
)
STEP = 32  # pixels that one step of a size id stands for; its name has the number 8800 + steps
TEMPLATE = "Generate an image of {width}x{height} according to the following prompt:\n{text}"
TRAINING = ("z_loss_weight", "mask_image_logits")


@dataclass(frozen=True)
class Variant:
    """``sampling``: of the published sampler. ``vq``: where the autoencoder of pictures is looked for.
    ``side``: of pictures, in pixels. ``rows``: whether rows have ends and prompts say the size."""

    sampling: Mapping[str, Any]
    vq: tuple[str, ...]
    side: int
    rows: bool


META = ("vqgan.safetensors", "vqgan.ckpt", "tokenizer/vqgan.safetensors", "tokenizer/vqgan.ckpt")
MOVQ = ("movqgan_270M.safetensors", "movqgan_270M.ckpt", "movqgan/270M/movqgan_270M.ckpt")
VARIANTS = {
    "chameleon": Variant(
        {"guidance_scale": 3.0, "temperature": 0.7, "top_p": 0.9}, META, 512, False
    ),
    "lumina": Variant({"guidance_scale": 4.0, "top_k": 2000}, META, 768, True),
    "lumina2": Variant({"guidance_scale": 4.0, "top_k": 4096}, MOVQ, 768, True),
}


@register("checkpoint", "chameleon")
class Chameleon(Checkpoint):
    """Chameleon, Anole, Lumina-mGPT and Lumina-mGPT 2.0: pictures after words.

    ``height``, ``width``: of pictures, in pixels (chameleon 512, lumina 768: its checkpoints of 512
    and 1024 need them said). ``variant``: chameleon, lumina or lumina2, by default what the config
    says (see the module). ``vq``: the file or folder of the autoencoder of pictures, by default
    Meta's ``vqgan.ckpt`` in the folder or its ``tokenizer``, for lumina2 ``movqgan_270M.ckpt``; a
    folder of ``diffusers.VQModel`` does as well. The autoencoder runs in single precision at least,
    as in the published scripts. Meta's own Chameleon was released untrained for pictures; Anole is
    the same model with its codes trained.
    """

    modalities = ("image",)
    protocols = ("causal",)
    tested = (
        "tiny random folders against transformers' model and head, and its `generate`; the image"
        " tokenizers against diffusers"
    )

    @classmethod
    def matches(cls, files: CheckpointFiles) -> bool:
        return files.model_type == "chameleon" or (
            files.has("models/*/consolidated*.pth") and files.has("tokenizer/vqgan.*")
        )

    def __init__(
        self,
        files: CheckpointFiles,
        modality: str,
        how: LoadOptions,
        *,
        height: int | None = None,
        width: int | None = None,
        variant: str | None = None,
        vq: str | Path | None = None,
    ):
        if files.model_type != "chameleon":
            raise GenError(
                f"model {files.name} is in the layout of Meta's own code; expected that of"
                " transformers, such as leloy/Anole-7b-v0.1-hf"
            )
        if variant is not None and variant not in VARIANTS:
            raise unknown("variant", variant, VARIANTS)
        variant = variant or variant_of(files.config)
        self.variant = VARIANTS[variant]
        self._tokenizer = _tokenizer(files)
        weights = model_weights(files.folder)
        self.frontend = _frontend(files, vq, self.variant, weights, how)
        size, compression = self.frontend.config.codebook_sizes[0], self.frontend.config.compression
        pixels = {
            name: self.variant.side if n is None else n
            for name, n in (("height", height), ("width", width))
        }
        self._grid = tuple(
            _cells(name, n, c, STEP if self.variant.rows else c)
            for (name, n), c in zip(pixels.items(), compression, strict=True)
        )
        self._before, self._after, self._template = self._specials(files, pixels)
        ids = code_ids(
            files.config.get("vocabulary_map") or {},
            self._tokenizer.get_vocab(),
            size,
            variant,
            files.name,
        )
        if self.variant.rows:
            ids += self._ids([ROW_END], files.name)
        self._room, self._words = (
            files.config.get("max_position_embeddings", 4096),
            files.config.get("vocab_size", 65536),
        )
        self.vocabulary = Vocabulary(ids, self._words)
        self._layout = make_layout(
            "raster_eol" if self.variant.rows else "raster", sizes=(size,), grid=self._grid
        )
        self._taken = {*ids, *self._ids([BOI, EOI, SEP], files.name)}
        self.sampling = dict(self.variant.sampling)
        model = language_model(
            weights,
            files.config,
            files.name,
            device=how.device,
            dtype=how.dtype,
            device_map=how.device_map,
        )
        self.lm = ChameleonLM(model, self.vocabulary)
        unconditional = self._after[1:] if self.variant.rows else self._before + self._after[1:]
        self.binding = Binding(
            space(self._layout, codebook=self.frontend.codebooks[0]),
            self.prompt,
            self.vocabulary.prompt(unconditional),
        )
        self.modality = FreeImage(self)

    def _specials(
        self, files: CheckpointFiles, pixels: Mapping[str, int]
    ) -> tuple[list[int], list[int], str]:
        """The ids before the words, those after them, and what the words are put into."""
        said = files.json("tokenizer_config.json")
        bos = next(
            (_content(said[k]) for k in ("bos_token", "eos_token") if said.get(k)), "<s>"
        )  # a tokenizer without the one begins with the other
        sizes = (
            [SIZE.format(8800 + n // STEP) for n in pixels.values()] if self.variant.rows else []
        )
        ids = self._ids([bos, SEP, BOI, *sizes], files.name)
        return ids[:1], ids[1:], TEMPLATE if self.variant.rows else "{text}"

    def _ids(self, names: list[str], model: str) -> list[int]:
        missing = [n for n in names if self._tokenizer.token_to_id(n) is None]
        if missing:
            raise GenError(
                f"the tokenizer of {model} has no {', '.join(missing)}; expected the one that the"
                " model was trained with"
            )
        return [self._tokenizer.token_to_id(n) for n in names]

    def prompt(self, text: str) -> list[int]:
        """The ids before the first code. Raises ``GenError`` for text that holds the names of
        specials, and for more than the model has room for."""
        height, width = (
            g * c for g, c in zip(self._grid, self.frontend.config.compression, strict=True)
        )
        words = self._tokenizer.encode(
            self._template.format(text=text, height=height, width=width), add_special_tokens=False
        ).ids
        if found := self._taken.intersection(words):
            raise GenError(
                f"the prompt {text!r} holds {self._tokenizer.id_to_token(min(found))!r}, a part of"
                " pictures; expected words"
            )
        if max(words, default=0) >= self._words:
            raise GenError(
                f"the tokenizer makes id {max(words)} of the prompt {text!r}; expected ids below"
                f" {self._words}, those of the model"
            )
        ids = self._before + words + self._after
        if (need := len(ids) + self._layout.length()) > self._room:
            raise GenError(
                f"a prompt of {len(ids)} ids and a picture of {self._layout.length()} make {need};"
                f" expected at most {self._room}, the positions that the model has"
            )
        return self.vocabulary.prompt(ids)

    def adapter(self, protocol: str) -> ChameleonLM:
        return self.lm

    def to_codes(self, tokens: Tensor, space: TokenSpace) -> Tensor:
        return self._layout.from_sequence(tokens)


def variant_of(config: Mapping[str, Any]) -> str:
    """What a config.json says that a folder is; see the module."""
    if not any("XLLMX" in name for name in config.get("architectures") or ()) and not any(
        key in config for key in TRAINING
    ):
        return "chameleon"
    return "lumina2" if config.get("vocab_size", 0) > FIRST else "lumina"


def code_ids(
    vocabulary_map: Mapping[str, int],
    tokens: Mapping[str, int],
    count: int,
    variant: str,
    name: str,
) -> list[int]:
    """The model's id of every code, in the codebook's order. Raises ``GenError`` where names are
    missing."""
    named = _named(vocabulary_map) or _named(tokens)
    if all(code in named for code in range(count)):
        if len(named) > count:
            raise GenError(
                f"the vocabulary of {name} names {len(named)} codes, the autoencoder has {count};"
                " expected as many"
            )
        return [named[code] for code in range(count)]
    if variant == "lumina2":
        return list(range(FIRST, FIRST + count))
    lacking = next(code for code in range(count) if code not in named)
    raise GenError(
        f"the vocabulary of {name} names {len(named)} codes and lacks code {lacking}, the"
        f" autoencoder has {count}; expected as many, by names such as IMGIMGBAZ"
    )


def _named(names: Mapping[str, int]) -> dict[int, int]:
    return {
        int(match[1].translate(DIGITS)): i
        for name, i in names.items()
        if (match := NAMED.fullmatch(name))
    }


def _cells(name: str, pixels: Any, compression: int, step: int) -> int:
    """How many codes a side of so many pixels has."""
    if not isinstance(pixels, int) or isinstance(pixels, bool) or pixels < 1 or pixels % step:
        raise bad_value(name, pixels, f"a multiple of {step}")
    return pixels // compression


def _content(token: Any) -> str:
    """A special token's string, written alone or with its properties."""
    return str(token["content"] if isinstance(token, Mapping) else token)


def _tokenizer(files: CheckpointFiles):
    """The tokenizer as its file has it: the class that tokenizer_config.json names would put
    Llama's rules for spaces in the place of its own."""
    from tokenizers import Tokenizer

    path = files.file("tokenizer.json", "text_tokenizer.json", "tokenizer/text_tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise GenError(
            f"the tokenizer {path} cannot be read: {' '.join(str(error).split())[:200]}"
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _frontend(
    files: CheckpointFiles,
    vq: str | Path | None,
    variant: Variant,
    weights: Weights,
    how: LoadOptions,
) -> TokenFrontend:
    own = Below(weights, IMAGES)
    dtype = torch.promote_types(how.dtype, torch.float32)
    where = files.folder if vq is None else Path(vq).expanduser()
    if vq is not None and not where.exists():
        raise GenError(
            f"vq is {str(vq)!r}, which is not there; expected the file or folder of an autoencoder"
            f" of pictures, such as {variant.vq[1]}"
        )
    if (
        vq is not None
        and where.is_dir()
        and CheckpointFiles(where, where).config.get("_class_name") == "VQModel"
    ):
        return VQ.from_pretrained(where, how.device, dtype)
    found = next((where / p for p in variant.vq if (where / p).is_file()), None)
    if vq is None and found is None:
        if "decoder.conv_in.weight" in own:
            return ChameleonVQ.of(own, files.name, how.device, dtype)
        raise GenError(
            f"model {files.name} has no decoder of pictures (folders of transformers have an"
            f" encoder only); expected {variant.vq[1]} or {variant.vq[0]} in {files.folder}, or"
            " vq=..."
        )
    return ChameleonVQ.from_pretrained(
        found or where, how.device, dtype, None if variant.vq is MOVQ else own
    )
