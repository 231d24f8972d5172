"""LlamaGen: images of ImageNet classes or of captions, code by code in raster order (arXiv
2406.06525).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from gen.contracts.checkpoint import Checkpoint, CheckpointFiles, LoadOptions
from gen.contracts.condition import CONDITION, ConditionEncoder, Prompt
from gen.contracts.modality import Binding
from gen.core.errors import GenError
from gen.core.registry import register
from gen.core.token_space import TokenSpace
from gen.modalities.checkpoints.caption_cleaning import cleaned
from gen.modalities.checkpoints.options import class_number, require_multiple
from gen.modalities.open_vocabulary import FreeImage
from gen.models.load.locate import quiet, readable
from gen.models.load.pretrained import tokenizer_of
from gen.models.load.reads import note_folder, note_network
from gen.models.load.weights import PICKLES, Weights, fill, weight_files, without_storage
from gen.models.published.llamagen import DROP, LlamaGen, LlamaGenLM, Sizes, grid_of, sizes_of
from gen.tokenizers.image.llamagen_vq import LlamaGenVQ

SIDES = ("height", "width")
ENDINGS = (*PICKLES, ".safetensors")
NAME = re.compile(r"[ct]2i_.*(" + "|".join(map(re.escape, ENDINGS)) + ")")
SIDE = re.compile(r"[_-](256|384|512)(?:$|[_.-])")  # pixels, in names of files and folders
# where the published scripts put the text encoder, and beside the weights
T5_FOLDERS = (
    "t5-ckpt/flan-t5-xl",
    "flan-t5-xl",
    "t5",
)
# sampling of the published scripts
SAMPLING = {
    "c2i": {"guidance_scale": 4.0, "top_k": 2000},
    "t2i": {"guidance_scale": 7.5, "top_k": 1000},
}


@register("checkpoint", "llamagen")
class LlamaGenImages(Checkpoint):
    """LlamaGen B to 3B, of classes (c2i) and of captions (t2i), with its VQ autoencoder.

    A prompt is the number of a class, or a caption. The autoencoder runs in single precision at
    least, as in the published scripts.

    Args:
        ar: file name of the model, where a folder holds several.
        vq: file or folder of the autoencoder, by default ``vq_ds*.pt`` in the folder.
        t5: folder of the text encoder (flan-t5-xl), by default ``t5-ckpt/flan-t5-xl`` or
            ``flan-t5-xl`` beside the model.
        heads: attention heads, needed where the width is not a published one.
        height: pixels of an image. The default is square and read from the name (_256, _384, _512).
            Sizes that a model was not trained on are possible and seldom good.
        width: pixels of an image, as ``height``.
    """

    takes = frozenset({"device_map"})
    modalities = ("image",)
    protocols = ("causal",)
    tested = "tiny random weights in the published layouts against a plain forward"

    @classmethod
    def matches(cls, files: CheckpointFiles) -> bool:
        if NAME.fullmatch(files.path.name):
            return files.path.is_file()
        if files.path.is_file():
            return files.path.suffix in ENDINGS and _holds_model(files.path)
        # folders that huggingface_hub saved from the published classes
        if files.config.get("model_type") in SAMPLING:
            return True
        return bool(_candidates(files.path)) or (
            not files.config and not files.has("model_index.json") and _holds_model(files.path)
        )

    @classmethod
    def sampling_of(cls, files: CheckpointFiles, options: Mapping[str, Any]) -> Mapping[str, Any]:
        weights = Weights(_model_file(files, options.get("ar")))
        heads = files.config.get("n_head") if options.get("heads") is None else options["heads"]
        return SAMPLING["c2i" if sizes_of(weights.shapes, heads, files.name).classes else "t2i"]

    def __init__(
        self,
        files: CheckpointFiles,
        modality: str,
        load: LoadOptions,
        *,
        ar: str | None = None,
        vq: str | Path | None = None,
        t5: str | Path | None = None,
        heads: int | None = None,
        height: int | None = None,
        width: int | None = None,
    ):
        file = _model_file(files, ar)
        weights = Weights(file)
        sizes = sizes_of(
            weights.shapes, files.config.get("n_head") if heads is None else heads, files.name
        )
        kind = "c2i" if sizes.classes else "t2i"
        self.frontend = LlamaGenVQ.from_pretrained(
            _vq_file(files, vq, kind), load.device, torch.promote_types(load.dtype, torch.float32)
        )
        codes = self.frontend.config.codebook_sizes[0]
        if codes != sizes.vocab_size:
            raise GenError(
                f"model {files.name} has a vocabulary of {sizes.vocab_size} ids and its VQ"
                f" {codes} codes; expected equal numbers"
            )
        trained = grid_of(weights.shapes, sizes) or math.isqrt(files.config.get("block_size", 0))
        grid = _grid(files, file, height, width, self.frontend.factor, trained)
        encoder = (
            CaptionEncoder(_t5_folder(files, t5), load, sizes, files.name)
            if sizes.caption
            else None
        )
        model = without_storage(lambda: LlamaGen(sizes, grid[1]))
        fill(
            model,
            weights,
            drop=DROP,
            **load.fill_keywords,
            name=files.name,
        )
        self.encoder = encoder
        self.lm = LlamaGenLM(model)
        space = TokenSpace.codes(grid, codes, codes, codebook=self.frontend.codebooks[0])
        if encoder:
            self.binding = Binding(space, self._caption_prompt, self.lm.no_caption())
        else:
            self.binding = Binding(space, self.lm.class_prompt, self.lm.class_prompt(None))
        self.sampling = SAMPLING[kind]
        # the name of a folder may have said the size, and a copy has another name
        self.settled = {s: n * self.frontend.factor for s, n in zip(SIDES, grid, strict=True)}
        self.modality = FreeImage(self)

    def condition(self, prompt: str) -> int | str:
        """Number of a class, or a caption."""
        if self.encoder is not None:
            return super().condition(prompt)
        return class_number(prompt, self.lm.sizes.classes)

    def _caption_prompt(self, caption: str) -> Prompt:
        """Return the prompt of a caption: its features at all positions."""
        return Prompt([CONDITION] * self.lm.sizes.prompt, caption, self.encoder)

    def adapter(self, protocol: str) -> LlamaGenLM:
        return self.lm


@register("condition_encoder", "llamagen_t5")
class CaptionEncoder(ConditionEncoder):
    """T5 encoder: a caption -> its last states, {"features": [n, width]}, n at most the positions
    of the condition.

    Padding would not change the states, so there is none here.
    """

    def __init__(self, folder: Path, load: LoadOptions, sizes: Sizes, name: str):
        self.tokenizer, self.most = tokenizer_of(folder, name=folder), sizes.prompt
        note_folder(folder)
        with readable("text encoder", folder), quiet():
            model, info = transformers.T5EncoderModel.from_pretrained(
                folder,
                dtype=load.dtype,
                output_loading_info=True,
                local_files_only=True,
                ignore_mismatched_sizes=True,
            )
        # published folders include the decoder
        unexpected = [
            k for k in info["unexpected_keys"] if not k.startswith(("decoder.", "lm_head."))
        ]
        wrong = sorted(
            str(k) for k in [*info["missing_keys"], *info["mismatched_keys"], *unexpected]
        )
        if wrong:
            raise GenError(
                f"text encoder {folder} has {len(wrong)} tensors that are missing, unexpected"
                f" or of another shape: {', '.join(wrong[:8])}"
            )
        if model.config.d_model != sizes.caption:
            raise GenError(
                f"text encoder {folder} has width {model.config.d_model}; expected"
                f" {sizes.caption}, the width that model {name} was trained with"
            )
        self.model = model.to(load.device).eval().requires_grad_(False)
        note_network(self.model)

    def encode(self, caption: str) -> dict[str, Tensor]:
        """Return the features of a caption."""
        ids = self.tokenizer(
            cleaned(caption), truncation=True, max_length=self.most, return_tensors="pt"
        )["input_ids"]
        return {"features": self.model(input_ids=ids.to(self.model.device)).last_hidden_state[0]}


def _holds_model(path: Path) -> bool:
    """Return whether one file of weights, or the one of a folder, has the keys of a model."""
    try:
        file = weight_files(path)[0]
        shapes = Weights(file).shapes
    except GenError:
        return False
    return "tok_embeddings.weight" in shapes and any(k.startswith("cls_embedding.") for k in shapes)


def _candidates(folder: Path) -> list[Path]:
    return [p for p in sorted(folder.iterdir()) if NAME.fullmatch(p.name)]


def _model_file(files: CheckpointFiles, ar: str | None) -> Path:
    if files.path.is_file():
        if ar is not None:
            raise GenError(
                f"model {files.name} is one file and got the option ar={ar!r}; expected a"
                " folder, or no such option"
            )
        return files.path
    candidates = _candidates(files.path)
    if ar is not None:
        if not (files.path / ar).is_file():
            listing = ", ".join(p.name for p in candidates) or "no file such as c2i_B_256.pt"
            raise GenError(f"ar is {ar!r}, which is not in {files.path}; expected {listing}")
        return files.path / ar
    if len(candidates) > 1:
        raise GenError(
            f"{files.path} holds {', '.join(p.name for p in candidates)}; expected the path of"
            " one, or its name as the option ar"
        )
    return candidates[0] if candidates else weight_files(files.path)[0]


def _vq_file(files: CheckpointFiles, vq: str | Path | None, kind: str) -> Path:
    if vq is None:
        candidates = [
            p
            for p in sorted(files.folder.iterdir())
            if p.suffix in ENDINGS and re.fullmatch(rf"vq_ds\d+(_{kind})?", p.stem)
        ]
        if len(candidates) == 1:
            return candidates[0]
        listing = " and ".join(p.name for p in candidates) or f"no vq_ds16_{kind}.pt"
        raise GenError(
            f"model {files.name} has {listing} beside it in {files.folder}; expected one VQ, or"
            " the option vq with the path of one"
        )
    for path in (files.folder / vq, Path(vq).expanduser()):
        if path.exists():
            return path
    raise GenError(
        f"vq is {str(vq)!r}, which exists neither in {files.folder} nor as a path; expected a"
        " file or folder"
    )


def _t5_folder(files: CheckpointFiles, t5: str | Path | None) -> Path:
    if t5 is None:
        candidates = [files.folder / f for f in T5_FOLDERS if (files.folder / f).is_dir()]
        if not candidates:
            raise GenError(
                f"model {files.name} takes captions and has no text encoder in {files.folder}"
                f" ({', '.join(T5_FOLDERS)}); expected the option t5 with the folder of a T5"
                " encoder such as flan-t5-xl"
            )
        return candidates[0]
    for path in (files.folder / t5, Path(t5).expanduser()):
        if path.is_dir():
            return path
    raise GenError(
        f"t5 is {str(t5)!r}, which exists neither in {files.folder} nor as a path; expected a"
        " folder"
    )


def _grid(
    files: CheckpointFiles, file: Path, height: Any, width: Any, stride: int, trained: int
) -> tuple[int, int]:
    """Rows and columns of codes.

    Args:
        files: the checkpoint.
        file: weights, whose name may state the pixels.
        height: pixels, or None.
        width: pixels, or None.
        stride: pixels per code.
        trained: side of the grid that the weights or the config state, 0 if neither does.
    """
    if height is None and width is None:
        named_side = (
            SIDE.search(file.stem) or SIDE.search(files.folder.name) if not trained else None
        )
        if not trained and not named_side:
            raise GenError(
                f"no name and no config states the size that {files.name} was trained for;"
                " expected a name such as c2i_B_256.pt, or the options height and width"
            )
        height = width = trained * stride if trained else int(named_side[1])
    for name, value in (("height", height), ("width", width)):
        if value is not None:
            require_multiple(name, value, stride, "pixels, ")
    height, width = height or width, width or height
    return height // stride, width // stride
