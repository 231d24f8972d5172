"""Emu3: one causal model of words, images and clips (Wang et al., "Emu3: Next-Token Prediction is
All You Need", arXiv 2409.18869).

An image of H x W codes is

    bos, words, boi, "H*W", img, then H rows of (W codes, eol), and then eof eoi eos

of which the rows are generated; the closing ids carry no information. In a prompt of a text about
images, each image stands so with its closing ids. The unconditional branch of classifier-free
guidance has a negative prompt in place of the words. Codes are named ids of the vocabulary
("<|visual token 000123|>"). They are read from the config's ``vocabulary_map``, and need not be
consecutive.

Clips are T frames of codes, each of H rows as above and then eof: row ends and frame ends follow
the paper. The spelling of a clip's size was not published with Emu3. The default "T*H*W" is that of
the authors' later code for frames (UniVLA), whose rows have no ends. ``meta`` changes it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import transformers
from torch import Tensor

from gen.contracts.checkpoint import FROM_PRETRAINED, Checkpoint, CheckpointFiles, LoadOptions
from gen.contracts.layout_orders import PlanEntry
from gen.contracts.layouts import Layout, make_layout, space
from gen.contracts.modality import Binding
from gen.core.errors import GenError, bad_value
from gen.core.registry import register
from gen.core.token_space import TokenSpace
from gen.modalities.checkpoints.image_text import TokenisedImages
from gen.modalities.checkpoints.options import require_multiple
from gen.modalities.open_vocabulary import FreeImage, FreeVideo
from gen.models.adapters.conditioning import MappedLM, Vocabulary
from gen.models.load.locate import readable
from gen.models.load.pretrained import pretrained, tokenizer_of
from gen.tokenizers.image.emu3_vq import Emu3VQ
from gen.tokenizers.video.video_vq import VideoVQ

CODE = re.compile(r"<\|visual token (\d+)\|>")
EOL = "<|extra_200|>"  # only the config's map and the tokenizer name the row end so
SPECIALS = {
    "bos_token": "<|extra_203|>",
    "boi_token": "<|image start|>",
    "image_wrapper_token": "<|image token|>",
    "eof_token": "<|extra_201|>",
}
# suffix of every prompt, and the negative prompt of guidance, in the released scripts
SUFFIX = " masterpiece, film grained, best quality."
NEGATIVE = (
    "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits,"
    " cropped, worst quality, low quality, normal quality, jpeg artifacts, signature, watermark,"
    " username, blurry."
)
SIZE = {"image": (720, 720), "video": (256, 256)}  # pixels
META = {"image": "{height}*{width}", "video": "{frames}*{height}*{width}"}
FRAMES, FPS = 32, 24


@dataclass(frozen=True, kw_only=True)
class FramesOfRows(Layout):
    """Layout of clips: row by row with a row end after each row and a frame end after each frame, T
    (H (W + 1) + 1) ids.
    """

    one_stream = True
    specials = ("eol", "eof")

    @property
    def sequence_grid(self) -> tuple[int, ...]:
        frames, height, width = self.grid
        return frames, height * (width + 1) + 1

    def plan(self) -> list[list[PlanEntry]]:
        frames, height, width = self.grid

        def row(r):
            return [(0, r * width + x) for x in range(width)] + ["eol"]

        def frame(t):
            return [p for r in range(height) for p in row(t * height + r)] + ["eof"]

        return [[p] for t in range(frames) for p in frame(t)]


@cache
def layout_of(codes: int, grid: tuple[int, ...]) -> Layout:
    """Layout of an image's grid (H, W) or a clip's (T, H, W)."""
    if len(grid) == 3:
        return FramesOfRows(sizes=(codes,), grid=grid)
    return make_layout("raster_eol", sizes=(codes,), grid=grid)


def codes_of(vocabulary_map: Mapping[str, int] | None, codes: int, name: str) -> list[int]:
    """Model id of every code, in the codebook's order.

    Args:
        vocabulary_map: the config's token string -> id.
        codes: codes of the autoencoder.
        name: the checkpoint, for messages.

    Raises:
        GenError: the map lacks codes or has too many.
    """
    code_to_id = {
        int(m[1]): i for word, i in (vocabulary_map or {}).items() if (m := CODE.fullmatch(word))
    }
    missing = [k for k in range(codes) if k not in code_to_id]
    if missing or len(code_to_id) > codes or EOL not in (vocabulary_map or {}):
        lacks = (
            f"lacks {len(missing)} of the codes, code {missing[0]} first"
            if missing
            else f"has {len(code_to_id)} codes or no {EOL!r}"
        )
        raise GenError(
            f"the vocabulary_map of {name} {lacks}; expected '<|visual token 000000|>' to"
            f" {codes - 1} and the row end {EOL!r}"
        )
    return [code_to_id[k] for k in range(codes)]


class Emu3Video(FreeVideo):
    """Clips of one size, which can be continued."""

    def layout(self, sizes, grid):
        return layout_of(*sizes, tuple(grid))

    def whole_frames(self, media: Any, frontend) -> np.ndarray:
        clip = super().whole_frames(media, frontend)
        if clip.shape[1:3] != self.checkpoint.frame_size or not len(clip):
            raise GenError(
                f"the clip to continue has {len(clip)} frames of {clip.shape[1:3]} pixels in"
                f" whole codes; expected at least one of {self.checkpoint.frame_size}"
            )
        return clip


@register("checkpoint", "emu3")
class Emu3(Checkpoint):
    """Emu3 in the layout of transformers (`Emu3-Gen-hf`, `Emu3-Chat-hf`): images and clips from
    text, and text about images of any size.

    Args:
        height: pixels (720; clips 256).
        width: pixels (720; clips 256).
        frames: frames of a clip (32).
        fps: frames per second of a clip (24).
        suffix: text after every prompt.
        negative: prompt that guidance compares with.
        meta: spelling of the size, with {frames}, {height} and {width} in codes, and {fps}.
    """

    takes = FROM_PRETRAINED
    runs_from_disk = False
    modalities = ("image", "video", "text")
    protocols = ("causal",)
    sampling = {"temperature": 1.0, "guidance_scale": 3.0, "top_k": 2048}
    tested = (
        "tiny random folders against transformers' Emu3ForConditionalGeneration, its processor and"
        " its `generate`, for images and for text; the prompt format of clips is unpublished, so"
        " theirs is a guess"
    )

    @classmethod
    def serving(cls, modality: str) -> type[Checkpoint]:
        return Emu3Text if modality == "text" else cls

    @classmethod
    def matches(cls, files: CheckpointFiles) -> bool:
        return files.model_type in ("emu3", "Emu3")

    def __init__(
        self,
        files: CheckpointFiles,
        modality: str,
        load: LoadOptions,
        *,
        height: int | None = None,
        width: int | None = None,
        frames: int | None = None,
        fps: float | None = None,
        suffix: str = SUFFIX,
        negative: str = NEGATIVE,
        meta: str | None = None,
    ):
        require_layout(files)
        clip_option = frames if fps is None else fps
        if modality == "image" and clip_option is not None:
            raise bad_value("frames or fps", clip_option, "none: an image has no frames")
        require_range(files)
        with readable("model", files.name):
            config = transformers.Emu3Config.from_dict(files.config)
        vq, video = config.vq_config, modality == "video"
        default_height, default_width = SIZE[modality]
        self.frame_size = (
            default_height if height is None else height,
            default_width if width is None else width,
        )
        self.fps = FPS if fps is None else fps
        clip = (FRAMES if frames is None else frames,) if video else ()
        self._grid = grid_of(
            (*clip, *self.frame_size),
            vq.temporal_downsample_factor,
            2 ** (len(vq.channel_multiplier) - 1),
        )
        self._meta = size_text(META[modality] if meta is None else meta, self._grid, self.fps)
        layout = layout_of(vq.codebook_size, self._grid)
        self._suffix, self._length = suffix, layout.length()
        self._room = config.text_config.max_position_embeddings
        self._read_vocabulary(files, config, load, video)
        # too long a negative prompt fails here, before the weights are read
        unconditional = self.prompt(negative, suffix="")

        self.model = pretrained(
            transformers.Emu3ForConditionalGeneration,
            files.path,
            **load.pretrained_keywords,
            name=files.name,
        )
        self.frontend = (VideoVQ if video else Emu3VQ)(self.model.model.vqmodel)
        self.binding = Binding(
            space(layout, codebook=self.frontend.codebooks[0]), self.prompt, unconditional
        )
        self.modality = Emu3Video(self) if video else FreeImage(self)

    def _read_vocabulary(
        self,
        files: CheckpointFiles,
        config: transformers.Emu3Config,
        load: LoadOptions,
        video: bool,
    ) -> None:
        """Load the tokenizer and find the ids of codes, row ends and, for clips, frame ends."""
        ids = [
            *codes_of(config.vocabulary_map, config.vq_config.codebook_size, files.name),
            config.vocabulary_map[EOL],
        ]
        self._tokenizer = tokenizer_of(
            files.path, name=files.name, trust_remote_code=load.trust_remote_code
        )
        self._special = specials_of(self._tokenizer, config.vocabulary_map, files.name)
        if video:
            ids.append(self._tokenizer.convert_tokens_to_ids(self._special["eof_token"]))
        self.vocabulary = Vocabulary(ids, config.text_config.vocab_size)

    def prompt(self, condition: str, suffix: str | None = None) -> list[int]:
        """Ids before the first code. ``suffix`` replaces the checkpoint's own suffix."""
        s = self._special
        suffix = self._suffix if suffix is None else suffix
        text = (
            f"{s['bos_token']}{condition}{suffix}"
            f"{s['boi_token']}{self._meta}{s['image_wrapper_token']}"
        )
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) + self._length > self._room:
            raise GenError(
                f"a prompt of {len(ids)} tokens and {self._length} positions make"
                f" {len(ids) + self._length}; expected at most {self._room}, the positions of"
                " the model"
            )
        return self.vocabulary.prompt(ids)

    def adapter(self, protocol: str) -> MappedLM:
        return MappedLM(self.model, self.vocabulary)

    def to_codes(self, tokens: Tensor, space: TokenSpace) -> Tensor:
        """Codes of an image, or of all frames of a clip or the first ones."""
        first = tokens.shape[1] // math.prod(space.grid[1:])
        return layout_of(
            *self.frontend.config.codebook_sizes, (first, *self._grid[1:])
        ).from_sequence(tokens)


class Emu3Text(TokenisedImages):
    """Text about images; options as of ``ImageText``."""

    network = transformers.Emu3ForConditionalGeneration

    @classmethod
    def matches(cls, files: CheckpointFiles) -> bool:
        return Emu3.matches(files)

    def require(self, files: CheckpointFiles) -> None:
        require_layout(files)


def grid_of(shape: tuple[int, ...], frames: int, side: int) -> tuple[int, ...]:
    """Grid of codes of (frames,) height and width.

    Args:
        shape: (frames,) height and width of the media.
        frames: frames per code.
        side: pixels per code along a side.

    Raises:
        GenError: a size is no multiple of its step.
    """
    names, steps = ("frames", "height", "width")[-len(shape) :], (frames, side, side)[-len(shape) :]
    for name, size, step in zip(names, shape, steps, strict=True):
        require_multiple(name, size, step)
    return tuple(size // step for size, step in zip(shape, steps, strict=True))


def require_layout(files: CheckpointFiles) -> None:
    """Raise ``GenError`` for a folder that is not in the layout of transformers."""
    if files.model_type == "Emu3":
        raise GenError(
            f"model {files.name} is in the layout of BAAI's own code, whose tokenizer is"
            " code and whose frontend is a separate model; expected the layout of"
            " transformers, such as BAAI/Emu3-Gen-hf"
        )


def require_range(files: CheckpointFiles) -> None:
    """Check that pixels have the range [-1, 1], as in every published frontend of the family.

    Raises:
        GenError: the range is another one.
    """
    preprocessing = {
        **files.json("processor_config.json").get("image_processor", {}),
        **files.json("preprocessor_config.json"),
    }
    for key in ("image_mean", "image_std"):
        if key in preprocessing and not np.allclose(np.atleast_1d(preprocessing[key]), 0.5):
            raise GenError(
                f"the images of {files.name} have the {key} {preprocessing[key]}; expected 0.5"
                " for every channel"
            )


def specials_of(tokenizer: Any, vocabulary_map: Mapping[str, int], name: str) -> dict[str, str]:
    """Strings of the special tokens.

    Raises:
        GenError: the tokenizer splits one of them, or gives it another id than the config.
    """
    specials = {key: getattr(tokenizer, key, None) or default for key, default in SPECIALS.items()}
    for key, word in specials.items():
        ids = tokenizer(word, add_special_tokens=False)["input_ids"]
        if (
            len(ids) != 1
            or ids[0] != vocabulary_map.get(word, ids[0])
            or tokenizer.convert_ids_to_tokens(ids[0]) != word
        ):
            raise GenError(
                f"the tokenizer of {name} makes {ids} of {word!r} ({key}); expected one id,"
                f" {vocabulary_map.get(word, 'its own')}"
            )
    return specials


def size_text(meta: str, grid: tuple[int, ...], fps: float) -> str:
    """Text of the prompt that states the size.

    Raises:
        GenError: the template has other fields.
    """
    try:
        return meta.format(
            fps=fps, **dict(zip(("frames", "height", "width")[-len(grid) :], grid, strict=True))
        )
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise GenError(
            f"meta is {meta!r} ({error!r}); expected text with {{height}}, {{width}} and, for"
            " clips, {frames} and {fps}"
        ) from None
