"""Chameleon (arXiv 2405.09818), Anole (arXiv 2407.06135), Lumina-mGPT (arXiv 2408.02657) and
Lumina-mGPT 2.0 (arXiv 2507.17801): one causal model of words and image codes.

A prompt is

    chameleon         bos, words and images, sep, boi               then H W codes row by row
    lumina, lumina2   bos, template with words, sep, boi, h, w      then H rows of (W codes, row
                      end)

with h and w ids that give the sides in units of 32 pixels. The closing id carries no information
and is not generated. The unconditional branch of classifier-free guidance is bos, boi for
chameleon, and boi, h, w for lumina: the published samplers use these, and Lumina's training without
words begins so.

An image among the words is boi, the codes of the image as the folder's image processor crops it,
eoi. It stands where the words have "<image>", or else before them. Texts about images have the
prompts of transformers' processor. Lumina's checkpoints take words alone, and make images alone.

The folder's config decides the variant. ``lumina`` and ``lumina2`` have a class with XLLMX in its
name, or settings of their training (``z_loss_weight``, ``mask_image_logits``). ``lumina2`` also has
a vocabulary of more than 155000 ids. Every other folder is ``chameleon``.

The id of a code is found by its name ("IMGIMG", then A for 0 to J for 9, then "Z") in the config's
``vocabulary_map``, or in the tokenizer. Where neither names all codes, those of ``lumina2`` begin
at 155000, as in its published sampler. Other special tokens are the tokenizer's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import ChameleonForConditionalGeneration

from gen.contracts.checkpoint import FROM_PRETRAINED, Checkpoint, CheckpointFiles, LoadOptions
from gen.contracts.condition import Condition
from gen.contracts.constraint import AutomatonConstraint
from gen.contracts.frontend import TokenFrontend
from gen.contracts.layouts import make_layout, space
from gen.contracts.modality import Binding
from gen.contracts.row_constraint import RowConstraint
from gen.core.errors import GenError, unknown
from gen.core.registry import register
from gen.core.token_space import TokenSpace
from gen.media.given import GivenMedia
from gen.modalities.checkpoints.image_text import (
    KEPT_IDS,
    Question,
    TokenisedImages,
    image_processor_of,
)
from gen.modalities.checkpoints.options import require_multiple
from gen.modalities.media_tokens import Recent
from gen.modalities.open_vocabulary import FreeImage
from gen.models.adapters.conditioning import Vocabulary
from gen.models.adapters.language_models import CausalLM
from gen.models.load.bounded_text import bounded_rules, require_readable_rules
from gen.models.load.weights import Weights
from gen.models.published.chameleon import IMAGES, ChameleonLM, language_model, model_weights
from gen.tokenizers.image.chameleon_vq import Below, ChameleonVQ
from gen.tokenizers.image.vq import VQ
from gen.tokenizers.text.segments import SegmentedText, SegmentKind, as_png, segment_automaton
from tokenizers import Tokenizer

NAMED = re.compile(r"IMGIMG([A-J]+)Z")
DIGITS = str.maketrans("ABCDEFGHIJ", "0123456789")
FIRST = 155000  # id of code 0 of Lumina-mGPT 2.0
IMAGE = "<image>"  # in words, the position of an image
TEXT = frozenset({"text"})
BOI, EOI, SEP, ROW_END, SIZE = (
    "<racm3:break>",
    "<eoss>",
    "<reserved08706>",
    "<reserved08799>",
    "<reserved{:05d}>",
)
STEP = 32  # pixels per step of a size id, whose name holds the number 8800 + steps
TEMPLATE = "Generate an image of {width}x{height} according to the following prompt:\n{text}"
TRAINING = ("z_loss_weight", "mask_image_logits")


@dataclass(frozen=True)
class Variant:
    """Constants of one variant.

    Attributes:
        sampling: parameters of the published sampler.
        vq: paths at which the image autoencoder is looked for.
        side: default pixels of an image's side.
        rows: rows have ends, and prompts state the size.
    """

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
    """Chameleon and Anole: images or text from text and images; Lumina-mGPT and Lumina-mGPT 2.0:
    images from text.

    The autoencoder runs in single precision at least, as in the published scripts. Meta released
    Chameleon untrained for images; Anole is the same model with its codes trained.

    Args:
        height: pixels of an image (chameleon 512, lumina 768). Lumina's checkpoints of 512 and 1024
            need it set.
        width: pixels of an image, as ``height``.
        release: chameleon, lumina or lumina2. The default is read from the config (see the module).
        vq: file or folder of the image autoencoder, or a folder of ``diffusers.VQModel``. The
            default is Meta's ``vqgan.ckpt`` in the folder or in its ``tokenizer``, and for lumina2
            ``movqgan_270M.ckpt``.
    """

    accepts = frozenset({"text", "images"})
    takes = FROM_PRETRAINED
    modalities = ("image", "text")
    protocols = ("causal",)
    tested = (
        "tiny random folders against transformers' model, head and processor, and its `generate`,"
        " for images and for text; the image tokenizers against diffusers"
    )

    @classmethod
    def serving(cls, modality: str) -> type[Checkpoint]:
        return ChameleonText if modality == "text" else cls

    @classmethod
    def matches(cls, files: CheckpointFiles) -> bool:
        return files.model_type == "chameleon" or (
            files.has("models/*/consolidated*.pth") and files.has("tokenizer/vqgan.*")
        )

    @classmethod
    def sampling_of(cls, files: CheckpointFiles, options: Mapping[str, Any]) -> Mapping[str, Any]:
        return VARIANTS[_variant(files, options.get("release"))].sampling

    def __init__(
        self,
        files: CheckpointFiles,
        modality: str,
        load: LoadOptions,
        *,
        height: int | None = None,
        width: int | None = None,
        release: str | None = None,
        vq: str | Path | None = None,
    ):
        require_layout(files)
        variant = _variant(files, release)
        self.variant = VARIANTS[variant]
        self._files, self._tokenizer = files, _tokenizer(files)
        self._codes = Recent(KEPT_IDS)
        weights = model_weights(files.folder, load.hub.variant)
        self.frontend = _frontend(files, vq, self.variant, weights, load)
        pixels = {
            name: self.variant.side if n is None else n
            for name, n in (("height", height), ("width", width))
        }
        self._grid = tuple(
            _cells(name, n, c, STEP if self.variant.rows else c)
            for (name, n), c in zip(pixels.items(), self.frontend.config.compression, strict=True)
        )
        self._before, self._after, self._template = self._specials(files, pixels)
        self._read_vocabulary(files, variant)
        self.sampling = dict(self.sampling_of(files, {"release": variant}))
        model = language_model(
            weights,
            files.config,
            files.name,
            **load.fill_keywords,
            attn_implementation=load.attn_implementation,
        )
        self.lm = ChameleonLM(model, self.vocabulary)
        unconditional = self._after[1:] if self.variant.rows else self._before + self._after[1:]
        self.binding = Binding(
            space(self._layout, codebook=self.frontend.codebooks[0]),
            self.prompt,
            self.vocabulary.prompt(unconditional),
        )
        self.modality = FreeImage(self)

    def _read_vocabulary(self, files: CheckpointFiles, variant: str) -> None:
        """Find the ids of codes and row ends, and lay the codes out as a sequence."""
        size = self.frontend.config.codebook_sizes[0]
        names_to_ids = files.config.get("vocabulary_map") or {}
        ids = code_ids(names_to_ids, self._tokenizer.get_vocab(), size, variant, files.name)
        if self.variant.rows:
            ids += self._ids([ROW_END], files.name)
        self._room = files.config.get("max_position_embeddings", 4096)
        self._words = files.config.get("vocab_size", 65536)
        self.vocabulary = Vocabulary(ids, self._words)
        self._layout = make_layout(
            "raster_eol" if self.variant.rows else "raster", sizes=(size,), grid=self._grid
        )
        self._image_tokens = {*ids, *self._ids([BOI, EOI, SEP], files.name)}

    def _specials(
        self, files: CheckpointFiles, pixels: Mapping[str, int]
    ) -> tuple[list[int], list[int], str]:
        """Ids before the words, ids after them, and the template of the words."""
        tokenizer_config = files.json("tokenizer_config.json")
        # tokenizers without a bos token begin texts with the eos token
        bos = next(
            (
                _content(tokenizer_config[k])
                for k in ("bos_token", "eos_token")
                if tokenizer_config.get(k)
            ),
            "<s>",
        )
        sizes = (
            [SIZE.format(8800 + n // STEP) for n in pixels.values()] if self.variant.rows else []
        )
        ids = self._ids([bos, SEP, BOI, *sizes], files.name)
        return ids[:1], ids[1:], TEMPLATE if self.variant.rows else "{text}"

    def _ids(self, names: list[str], model: str) -> list[int]:
        missing = [n for n in names if self._tokenizer.token_to_id(n) is None]
        if missing:
            raise GenError(
                f"the tokenizer of {model} has no {', '.join(missing)}; expected the tokenizer"
                " of the model's training"
            )
        return [self._tokenizer.token_to_id(n) for n in names]

    def parse(self, condition: Condition) -> str | Question:
        """Return the prompt that a text states, with images if there are any. Raises ``GenError``
        as ``prompt`` does, and for images where the model takes words alone."""
        condition.require(TEXT if self.variant.rows else self.accepts, "the model")
        text = self.condition(condition.text or "")
        if not condition.images:
            return text
        question = Question(text, condition.media("images"))
        self.prompt(question)  # what the tokenizer or the image processor refuses fails here
        return question

    @cached_property
    def _processor(self) -> Any:
        """Image processor of the folder."""
        return image_processor_of(self._files)

    def _image_ids(self, image: GivenMedia) -> tuple[int, ...]:
        """Ids of an image: boi, its codes row by row, eoi."""
        return self._codes.of(image.digest, lambda: self._encoded(image))

    def _encoded(self, image: GivenMedia) -> tuple[int, ...]:
        codebook = self.frontend.codebooks[0]
        pixels = self._processor(images=[Image.fromarray(image.array)], return_tensors="pt")
        codes = self.frontend.encode(pixels["pixel_values"].to(codebook))
        boi, eoi = self._ids([BOI, EOI], self._files.name)
        return boi, *self.vocabulary.ids[codes.flatten().cpu()].tolist(), eoi

    def _illustrated(self, words: list[int], images: Sequence[GivenMedia]) -> list[int]:
        """Put images among the ids of words. Raises ``GenError`` where there are not as many as
        positions of images."""
        token = self._tokenizer.token_to_id(IMAGE)
        if words.count(token) not in (0, len(images)):
            raise GenError(
                f"the prompt has {words.count(token)} positions of images ({IMAGE!r}), and the"
                f" condition has {len(images)} images; expected one image for each position"
            )
        if token not in words:
            return [i for image in images for i in self._image_ids(image)] + words
        following = iter(images)
        parts = [self._image_ids(next(following)) if i == token else (i,) for i in words]
        return [i for part in parts for i in part]

    def prompt(self, condition: str | Question) -> list[int]:
        """Ids before the first code.

        Raises:
            GenError: the text holds names of special tokens, there are not as many images as
                positions of images, or the prompt is too long for the model.
        """
        text, images = (
            (condition.said, condition.images)
            if isinstance(condition, Question)
            else (condition, ())
        )
        height, width = (
            g * c for g, c in zip(self._grid, self.frontend.config.compression, strict=True)
        )
        words = self._tokenizer.encode(
            self._template.format(text=text, height=height, width=width), add_special_tokens=False
        ).ids
        if specials := self._image_tokens.intersection(words):
            raise GenError(
                f"the prompt {text!r} holds {self._tokenizer.id_to_token(min(specials))!r}, a"
                " token of images; expected words"
            )
        if max(words, default=0) >= self._words:
            raise GenError(
                f"the tokenizer gives the prompt {text!r} the id {max(words)}; expected ids"
                f" below {self._words}, the vocabulary of the model"
            )
        if images or self._tokenizer.token_to_id(IMAGE) in words:
            words = self._illustrated(words, images)
        ids = self._before + words + self._after
        if (need := len(ids) + self._layout.length()) > self._room:
            raise GenError(
                f"a prompt of {len(ids)} tokens and an image of {self._layout.length()} make"
                f" {need}; expected at most {self._room}, the positions of the model"
            )
        return self.vocabulary.prompt(ids)

    def adapter(self, protocol: str) -> ChameleonLM:
        return self.lm

    def to_codes(self, tokens: Tensor, space: TokenSpace) -> Tensor:
        return self._layout.from_sequence(tokens)


class ChameleonText(TokenisedImages):
    """Text about images.

    Args:
        max_new_tokens: as of ``ImageText``.
        chat: as of ``ImageText``.
        generation_config: as of ``ImageText``.
        interleaved: answers may hold images, which stand in the text as Markdown
            (``gen.tokenizers.text.segments``). The default is text alone.
    """

    network = ChameleonForConditionalGeneration

    def __init__(
        self,
        files: CheckpointFiles,
        modality: str,
        load: LoadOptions,
        *,
        max_new_tokens: int | None = None,
        chat: bool | None = None,
        generation_config: bool = True,
        interleaved: bool = False,
    ):
        options = {"max_new_tokens": max_new_tokens, "generation_config": generation_config}
        super().__init__(files, modality, load, chat=chat, **options)
        self._interleaved = interleaved
        if interleaved:
            self._allow_images(files, load)

    def _allow_images(self, files: CheckpointFiles, load: LoadOptions) -> None:
        """Let answers hold images: a frontend and a token space of both.

        Raises:
            GenError: the folder has no image decoder, or an answer has no room for an image.
        """
        weights = model_weights(files.folder, load.hub.variant)
        images = _frontend(files, None, VARIANTS["chameleon"], weights, load)
        names, vocabulary = files.config.get("vocabulary_map") or {}, self.tokenizer.get_vocab()
        count, space = images.config.codebook_sizes[0], self.binding.space
        codes = code_ids(names, vocabulary, count, "chameleon", files.name)
        side = self.model.config.vq_config.resolution
        grid = tuple(side // c for c in images.config.compression)
        kind = SegmentKind(
            "image", vocabulary[BOI], vocabulary[EOI], tuple(codes), grid, images, as_png
        )
        if space.length < kind.count + 2:
            raise GenError(
                f"max_new_tokens is {space.length}, and an image takes {kind.count + 2} tokens;"
                " expected at least as many, or interleaved=False"
            )
        ends = self.frontend.ends
        words = set(range(space.vocab_size)) - {kind.begin, kind.end, *codes, *ends}
        automaton = segment_automaton(space.vocab_size, words, ends, [kind])
        self.frontend = SegmentedText(self.tokenizer, space.vocab_size, ends, [kind], load.device)
        space = replace(
            space,
            legal=torch.ones_like(space.legal),
            constraint=RowConstraint(AutomatonConstraint(automaton), space.length),
        )
        self.binding = replace(self.binding, space=space)

    def adapter(self, protocol: str) -> CausalLM:
        if not self._interleaved:
            return super().adapter(protocol)
        size = self.binding.space.vocab_size
        return ChameleonLM(self.model, Vocabulary(range(size), size))

    @classmethod
    def matches(cls, files: CheckpointFiles) -> bool:
        return Chameleon.matches(files)

    def require(self, files: CheckpointFiles) -> None:
        require_layout(files)
        if (variant := variant_of(files.config)) != "chameleon":
            raise GenError(
                f"model {files.name} is a {variant}, which has no image encoder and makes images"
                " alone; expected modality 'image', or Chameleon or Anole"
            )

    def load(self, files: CheckpointFiles, load: LoadOptions) -> Any:
        return language_model(
            model_weights(files.folder, load.hub.variant),
            files.config,
            files.name,
            **load.fill_keywords,
            attn_implementation=load.attn_implementation,
            reads_images=True,
        )

    def illegal(self) -> Sequence[int]:
        return self.model.model.vocabulary_mapping.image_tokens


def require_layout(files: CheckpointFiles) -> None:
    """Raise ``GenError`` for a folder that is not in the layout of transformers."""
    if files.model_type != "chameleon":
        raise GenError(
            f"model {files.name} is in the layout of Meta's own code; expected the layout"
            " of transformers, such as leloy/Anole-7b-v0.1-hf"
        )


def _variant(files: CheckpointFiles, said: str | None) -> str:
    """Return the variant that the user named, or the one of the config.

    Raises:
        GenError: the variant is unknown.
    """
    if said is not None and said not in VARIANTS:
        raise unknown("release", said, VARIANTS)
    return said or variant_of(files.config)


def variant_of(config: Mapping[str, Any]) -> str:
    """Variant of a folder, read from its config.json (see the module)."""
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
    """Model id of every code, in the codebook's order.

    Args:
        vocabulary_map: the config's token string -> id.
        tokens: the tokenizer's token string -> id.
        count: codes of the autoencoder.
        variant: key of ``VARIANTS``.
        name: the checkpoint, for messages.

    Raises:
        GenError: code names are missing or too many.
    """
    named = _named(vocabulary_map) or _named(tokens)
    if all(code in named for code in range(count)):
        if len(named) > count:
            raise GenError(
                f"the vocabulary of {name} names {len(named)} codes and the autoencoder has"
                f" {count}; expected equal numbers"
            )
        return [named[code] for code in range(count)]
    if variant == "lumina2":
        return list(range(FIRST, FIRST + count))
    lacking = next(code for code in range(count) if code not in named)
    raise GenError(
        f"the vocabulary of {name} names {len(named)} codes and lacks code {lacking}; expected"
        f" names such as IMGIMGBAZ for all {count} codes of the autoencoder"
    )


def _named(names: Mapping[str, int]) -> dict[int, int]:
    return {
        int(match[1].translate(DIGITS)): i
        for name, i in names.items()
        if (match := NAMED.fullmatch(name))
    }


def _cells(name: str, pixels: Any, compression: int, step: int) -> int:
    """Codes along a side of ``pixels`` pixels."""
    require_multiple(name, pixels, step)
    return pixels // compression


def _content(token: Any) -> str:
    """String of a special token, which config files write bare or with its properties."""
    return str(token["content"] if isinstance(token, Mapping) else token)


def _tokenizer(files: CheckpointFiles):
    """Load the tokenizer from its own file: the class that tokenizer_config.json names would apply
    Llama's rules for spaces.
    """
    path = files.file("tokenizer.json", "text_tokenizer.json", "tokenizer/text_tokenizer.json")
    require_readable_rules(path, files.name)
    try:
        tokenizer = bounded_rules(Tokenizer.from_file(str(path)), files.name)
    except GenError:
        raise
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
    load: LoadOptions,
) -> TokenFrontend:
    image_weights = Below(weights, IMAGES)
    dtype = torch.promote_types(load.dtype, torch.float32)
    location = files.folder if vq is None else Path(vq).expanduser()
    if vq is not None and not location.exists():
        raise GenError(
            f"vq is {str(vq)!r}, which does not exist; expected the file or folder of an image"
            f" autoencoder, such as {variant.vq[1]}"
        )
    if (
        vq is not None
        and location.is_dir()
        and CheckpointFiles(location, location).config.get("_class_name") == "VQModel"
    ):
        return VQ.from_pretrained(location, load.device, dtype)
    file = next((location / p for p in variant.vq if (location / p).is_file()), None)
    if vq is None and file is None:
        if "decoder.conv_in.weight" in image_weights:
            return ChameleonVQ.of(image_weights, files.name, load.device, dtype)
        raise GenError(
            f"model {files.name} has no image decoder (folders of transformers hold the encoder"
            f" only); expected {variant.vq[1]} or {variant.vq[0]} in {files.folder}, or vq=..."
        )
    return ChameleonVQ.from_pretrained(
        file or location, load.device, dtype, None if variant.vq is MOVQ else image_weights
    )
