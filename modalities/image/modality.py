"""Images: 64x64 RGB images of captioned shapes as 16x16 VQ tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from gen.contracts.condition import Condition
from gen.contracts.frontend import require_same_frontend
from gen.contracts.modality import Binding, Modality, Verdict
from gen.core.edit_spec import EditSpec
from gen.core.errors import GenError, cut
from gen.core.registry import register
from gen.core.token_space import TokenSpace
from gen.media.given import GivenMedia
from gen.media.images import FORMATS, as_rgb, read_image, write_image
from gen.modalities.image import captions as shapes
from gen.modalities.image import checker as shapes_check
from gen.modalities.image import instructions
from gen.modalities.image.reading import shape_reader
from gen.models.load.locate import ZOO, read_config
from gen.models.load.networks import config_field
from gen.tokenizers.image.kl import KL
from gen.tokenizers.image.scale_vq import ScaleVQ, scale_space
from gen.tokenizers.image.vq import VQ


def as_image(media: Any) -> Image.Image:
    """Convert to a PIL image: an image becomes RGB; arrays are uint8 [h, w(, 3)], or bool [h, w]
    (true is white).
    """
    if isinstance(media, Image.Image):
        return as_rgb(media)
    array = np.asarray(media)
    if array.dtype == bool:
        array = array.astype(np.uint8) * 255
    if array.dtype != np.uint8 or array.ndim not in (2, 3):
        raise GenError(
            f"the image is {array.dtype} {array.shape}; expected uint8 [h, w, 3] or a bool mask"
            " [h, w]"
        )
    return Image.fromarray(array)


@dataclass(frozen=True)
class Edit:
    """Condition of a changed image.

    Attributes:
        instruction: what changes.
        source: the image, pixels uint8 [64, 64, 3].
        before: caption of the image, as the captioner reads it.
    """

    instruction: instructions.Instruction
    source: GivenMedia
    before: shapes.Caption

    def __str__(self) -> str:
        return f"{self.instruction}: {self.source}"

    @property
    def after(self) -> shapes.Caption:
        """Caption of the changed image."""
        return self.instruction.applied(self.before)

    def pairs(self) -> list[int]:
        """Return the prompt of the changed image."""
        return self.after.pairs()


@register("modality", "image")
class ImageModality(Modality):
    """Captioned shapes (``gen.modalities.image.captions``). The condition is a ``Caption``; a
    model's prompt is its eight slots, each with its location.
    """

    name = "image"
    media_kind = "image"
    extension = "png"
    formats = FORMATS
    models = {
        "causal": "image-causal",
        "masked": "image-masked",
        "causal-draft": "image-draft",
        "causal-latents": "image-causal-latents",
        "causal-latents-draft": "image-causal-latents-draft",
        "masked-latents": "image-mar",
        "scales": "image-scales",
        "scales-draft": "image-scales-draft",
        "refined_scales": "image-scales-masked",
        "masked-images": "image-masked",
        "masked-latents-images": "image-mar",
        "refined_scales-images": "image-scales-masked",
        "causal-images": "image-causal",
        "causal-images-draft": "image-draft",
    }
    frontends = {"codes": "image-vq", "latents": "image-kl"}
    default_sampling = {"guidance_scale": 2.0, "top_k": 100}
    accepts = frozenset({"text", "images"})
    most = {"images": 1}
    slots = shapes.SLOTS
    words = shapes.PAIRS
    unconditional = [0] * shapes.SLOTS  # pair 0: no word, no location

    def prompt_words(self, condition: shapes.Caption | Edit) -> list[int]:
        """Slots of a condition, each in ``range(words)``."""
        return condition.pairs()

    def parse(self, condition: Condition) -> shapes.Caption | Edit:
        """Return the caption that a text states, or the edit that a text and an image state."""
        condition.require(self.accepts, f"modality {self.name!r}", self.most)
        if not condition.images:
            return self.condition(condition.text or "")
        source = condition.media("images", (shapes.IMAGE_SIZE, shapes.IMAGE_SIZE))[0]
        instruction = instructions.parse(condition.text or "")
        edit = Edit(instruction, source, shape_reader().caption(source))
        edit.after.pairs()  # an instruction that names no shape of the image fails here
        return edit

    def condition(self, prompt: str) -> shapes.Caption:
        if prompt.split()[:1] and prompt.split()[0].lower() in instructions.VERBS:
            raise GenError(
                f"{cut(prompt)!r} is an instruction to change an image, and there is none; expected"
                " an image beside it, or a caption such as 'a red circle'"
            )
        try:
            return shapes.parse(prompt)
        except ValueError as error:
            raise GenError(str(error)) from None

    def ground(self, condition: shapes.Caption | Edit, seed: int) -> shapes.Caption | Edit:
        """Draw the words that a caption omits. The models were trained on captions that state
        everything.
        """
        if isinstance(condition, Edit):
            return condition
        return shapes.complete(condition, np.random.default_rng(seed))

    def as_stated(self, condition: shapes.Caption) -> shapes.Caption:
        """Return the caption of the prompt. The models read captions that omit words, less well."""
        return condition.stated if isinstance(condition, shapes.Completed) else condition

    def example_prompts(self, count: int, seed: int) -> list[str]:
        """Held-out captions, to measure with."""
        return [str(c) for c in shapes.captions(count, seed=123 + seed, held=True)]

    def frontend(self, kind="codes", device="cpu", dtype=torch.float32, folder: Path | None = None):
        folder = folder or ZOO / self.frontends[kind]
        is_scales = read_config(folder).get("_class_name") == ScaleVQ.architecture
        cls = KL if kind == "latents" else ScaleVQ if is_scales else VQ
        return cls.from_pretrained(folder, device, dtype)

    def bind(self, config: Any, frontend, model_name: str) -> Binding:
        if config_field(config, "scales"):
            return self._bind_scales(config, frontend, model_name)
        if isinstance(frontend, ScaleVQ):
            raise GenError(
                f"model {model_name} is a {config.model_type!r}, and its frontend codes several"
                f" scales; expected {self.frontends['codes']!r}"
            )
        if frontend.config.kind == "latents":
            return self._bind_latents(config, frontend, model_name)
        for key in ("prefix_length", "codebook_size", "grid"):
            if not hasattr(config, key):
                raise GenError(
                    f"model {model_name} is a {config.model_type!r} without {key!r}; expected a"
                    " model trained on captioned shapes, such as 'image-causal'"
                )
        size, need = frontend.config.codebook_sizes[0], config.codebook_size + self.words
        if (
            config.codebook_size != size
            or config.prefix_length != self.slots
            or config.vocab_size < need
        ):
            raise GenError(
                f"model {model_name} has codebook_size {config.codebook_size}, prefix_length"
                f" {config.prefix_length} and vocab_size {config.vocab_size}; expected {size},"
                f" {self.slots} and at least {need}"
            )
        require_same_frontend(config, frontend, model_name, self.frontends[frontend.config.kind])
        space = TokenSpace.codes(
            tuple(config.grid), size, config.vocab_size, config.mask_token_id, frontend.codebooks[0]
        )

        def shift(slots: list[int]) -> list[int]:
            return [s + size for s in slots]

        return Binding(space, lambda c: shift(self.prompt_words(c)), shift(self.unconditional))

    def _bind_latents(self, config: Any, frontend, model_name: str) -> Binding:
        channels = frontend.config.channels
        require_same_frontend(config, frontend, model_name, self.frontends[frontend.config.kind])
        if (
            config.latent_channels != channels
            or config.prefix_length != shapes.SLOTS
            or config.vocab_size < shapes.PAIRS
        ):
            raise GenError(
                f"model {model_name} has latent_channels {config.latent_channels}, prefix_length"
                f" {config.prefix_length} and vocab_size {config.vocab_size}; expected {channels},"
                f" {shapes.SLOTS} and at least {shapes.PAIRS}"
            )
        return Binding(
            TokenSpace.latents(tuple(config.grid), channels),
            lambda c: c.pairs(),
            [0] * shapes.SLOTS,
        )

    def _bind_scales(self, config: Any, frontend, model_name: str) -> Binding:
        if not isinstance(frontend, ScaleVQ):
            raise GenError(
                f"model {model_name} makes token maps of {len(config.scales)} scales, and its"
                f" frontend {type(frontend).__name__} is no quantiser of scales; expected a"
                f" {ScaleVQ.architecture}, such as 'image-scales-vq', in the field 'frontend' of"
                " its config"
            )
        sides, codes = [list(pair) for pair in frontend.sides], frontend.config.codebook_sizes[0]
        if config.scales != sides or config.codes != codes:
            raise GenError(
                f"model {model_name} has scales {config.scales} of {config.codes} codes; expected"
                f" {sides} of {codes}, those of its frontend"
            )
        require_same_frontend(config, frontend, model_name, "image-scales-vq")
        if config.prefix_length != shapes.SLOTS or config.vocab_size < shapes.PAIRS:
            raise GenError(
                f"model {model_name} has prefix_length {config.prefix_length} and vocab_size"
                f" {config.vocab_size}; expected {shapes.SLOTS} and at least {shapes.PAIRS}"
            )
        space = scale_space(frontend.sides, codes, frontend.codebooks[0])
        return Binding(space, lambda c: c.pairs(), [0] * shapes.SLOTS)

    def to_codes(self, tokens: Tensor, space: TokenSpace) -> Tensor:
        if space.channels:
            return tokens.transpose(1, 2).reshape(len(tokens), space.channels, *space.grid)
        if space.blocks:
            return tokens[:, None]
        return tokens.view(len(tokens), 1, *space.grid)

    def own_edit(self, condition: shapes.Caption | Edit) -> EditSpec | None:
        """Return the source of an edit, and the region of the shape before and after."""
        if not isinstance(condition, Edit):
            return None
        region = instructions.region(condition.before, condition.after)
        return EditSpec(Image.fromarray(condition.source.array), region)

    def save(self, media: Image.Image, path: Path, info: dict[str, Any]) -> None:
        write_image(path, as_image(media), info)

    def load(self, path: Path) -> Image.Image:
        return read_image(path)

    def check(self, media: Image.Image, prompt: str) -> Verdict:
        if media.size != (shapes.IMAGE_SIZE, shapes.IMAGE_SIZE):
            return Verdict(
                False, False, f"the image is {media.size[0]}x{media.size[1]}, expected 64x64"
            )
        return shapes_check.check(np.asarray(media), self.condition(prompt))

    def judge(self, media: Image.Image, condition: Condition) -> Verdict:
        """Judge an image, or an edit: its instruction changes the caption that the checker reads
        from the source."""
        wanted = self.parse(condition)
        if isinstance(wanted, Edit):
            seen = tuple(region.item for region in shapes_check.detect(wanted.source.array))
            wanted = wanted.instruction.applied(shapes.Caption(seen))
        return self.check(media, str(wanted))

    def grade(self, media: Image.Image, prompt: str) -> float:
        """Return the share of the caption's shapes and attributes that an image shows."""
        if media.size != (shapes.IMAGE_SIZE, shapes.IMAGE_SIZE):
            return 0.0
        return shapes_check.grade(np.asarray(media), self.condition(prompt))

    def edit(self, source, where, frontend, space):
        """Prepare inpainting. ``where`` is a mask image: its white parts (above half) are
        regenerated. A cell (4x4 pixels of codes, 8x8 of latents) is regenerated if any of its
        pixels is; other cells keep their pixels. Of scales, these cells are those of the last one
        (``ScaleVQ.regenerated`` says which coarser tokens stay).
        """
        image = self.load(Path(source)) if self.is_path(source) else as_image(source)
        grid = frontend.sides[-1] if isinstance(frontend, ScaleVQ) else space.grid
        side = tuple(g * f for g, f in zip(grid, frontend.config.compression, strict=True))
        marks = (
            np.asarray(
                (self.load(Path(where)) if self.is_path(where) else as_image(where)).convert("L")
            )
            > 127
        )
        pixels = np.asarray(image.convert("RGB"))
        if pixels.shape[:2] != side or marks.shape != side:
            raise GenError(
                f"image and mask are {pixels.shape[:2]} and {marks.shape}; expected both {side}"
            )
        if not marks.any():
            raise GenError("the mask is empty; expected white pixels, which are regenerated")
        h, w = frontend.config.compression
        cells = marks.reshape(grid[0], h, grid[1], w).any((1, 3))
        codes = frontend.encode(frontend.preprocess(pixels)[None])[0].cpu()
        regenerated = torch.from_numpy(cells)
        if space.channels:
            canvas = torch.where(regenerated, float("nan"), codes).flatten(1).T
        elif isinstance(frontend, ScaleVQ):
            again = frontend.regenerated(torch.from_numpy(marks))
            canvas = codes[0].masked_fill(again, space.mask_token_id)
        else:
            canvas = torch.where(regenerated, space.mask_token_id, codes[0]).flatten()
        inside = np.kron(cells, np.ones((h, w), dtype=bool))[..., None]
        return canvas, lambda media: Image.fromarray(
            np.where(inside, np.asarray(media), pixels).astype(np.uint8)
        )
