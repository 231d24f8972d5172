"""aMUSEd: images from text by masked decoding of all codes at once (arXiv 2401.01808)."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from gen.contracts.checkpoint import Checkpoint, CheckpointFiles, LoadOptions
from gen.contracts.modality import Binding
from gen.core.errors import GenError, bad_value
from gen.core.registry import register
from gen.core.token_space import TokenSpace
from gen.modalities.checkpoints.options import require_multiple
from gen.modalities.open_vocabulary import FreeImage
from gen.models.adapters.conditioning import Conditions
from gen.models.load.libraries import diffusers
from gen.models.load.pretrained import pretrained, tokenizer_of
from gen.models.published.amused import AmusedLM
from gen.tokenizers.image.unit_vq import UnitVQ

PIPELINES = ("AmusedPipeline", "AmusedImg2ImgPipeline", "AmusedInpaintPipeline")
PARTS = {
    "transformer": "UVit2DModel",
    "vqvae": "VQModel",
    "text_encoder": "CLIPTextModelWithProjection",
    "tokenizer": "CLIPTokenizer",
    "scheduler": "AmusedScheduler",
}
MICRO = 5  # numbers of an image's micro-conditioning: its size, its crop, its aesthetic score


@register("checkpoint", "amused")
class Amused(Checkpoint):
    """aMUSEd 256 and 512, and models fine-tuned from them, as diffusers folders.

    The preset ``amused`` takes the steps of diffusers' pipeline. The autoencoder runs in single
    precision where its config asks for it.

    Args:
        height: pixels of an image, by default those of training.
        width: pixels of an image, by default those of training.
        aesthetic_score: score that the prompts ask for, about 1 to 10.
    """

    takes = frozenset({"variant"})
    modalities = ("image",)
    protocols = ("masked",)
    sampling = {"guidance_scale": 10.0}
    tested = (
        "tiny random weights against diffusers' UVit2DModel, AmusedScheduler and AmusedPipeline"
    )

    @classmethod
    def matches(cls, files: CheckpointFiles) -> bool:
        return (
            files.path.is_dir() and files.json("model_index.json").get("_class_name") in PIPELINES
        )

    def __init__(
        self,
        files: CheckpointFiles,
        modality: str,
        load: LoadOptions,
        *,
        height: int | None = None,
        width: int | None = None,
        aesthetic_score: float = 6.0,
    ):
        configs = _configs(files)
        if (
            isinstance(aesthetic_score, bool)
            or not isinstance(aesthetic_score, (int, float))
            or not 0 <= aesthetic_score <= 100
        ):
            raise bad_value("aesthetic_score", aesthetic_score, "a number from 0 to 100")
        single = load.dtype == torch.float16 and configs["vqvae"].get("force_upcast", False)
        self.frontend = UnitVQ.from_pretrained(
            files.path / "vqvae", load.device, torch.float32 if single else load.dtype
        )
        transformer = pretrained(
            diffusers().UVit2DModel,
            files.path / "transformer",
            **load.pretrained_keywords,
            name=f"{files.name}/transformer",
        )
        c, mask = transformer.config, configs["scheduler"].get("mask_token_id")
        codes = self.frontend.config.codebook_sizes[0]
        _require_match(files.name, c, codes, mask)
        encoder = _Clip(files, load, c.cond_embed_dim, c.encoder_hidden_size)
        factor = self.frontend.factor
        step = factor * (2 if c.downsample else 1)
        sides = {"height": height, "width": width}
        sides = {k: c.sample_size * factor if v is None else v for k, v in sides.items()}
        for name, side in sides.items():
            require_multiple(name, side, step)
        grid = sides["height"] // factor, sides["width"] // factor
        self.lm = AmusedLM(transformer, Conditions(encoder), grid, mask, factor, aesthetic_score)
        space = TokenSpace.codes(grid, codes, self.lm.vocab_size, codes, self.frontend.codebooks[0])
        self.binding = Binding(space, self.lm.prompt, self.lm.prompt(""))
        self.modality = FreeImage(self)

    def adapter(self, protocol: str) -> AmusedLM:
        return self.lm


class _Clip:
    """CLIP text encoder: a text -> ``pooled`` [D], its projected vector, and ``states`` [L, D'],
    the states before the last layer.

    Texts are padded, and truncated, to one length. Padding is attended to, as in training.
    """

    def __init__(self, files: CheckpointFiles, load: LoadOptions, pooled: int, states: int):
        self.tokenizer = tokenizer_of(files.path / "tokenizer", name=f"{files.name}/tokenizer")
        self.model = pretrained(
            transformers.CLIPTextModelWithProjection,
            files.path / "text_encoder",
            **load.pretrained_keywords,
            name=f"{files.name}/text_encoder",
        )
        c, self.length = self.model.config, self.tokenizer.model_max_length
        if (c.projection_dim, c.hidden_size) != (pooled, states):
            raise GenError(
                f"the text encoder of {files.name} gives vectors of {c.projection_dim} and"
                f" states of {c.hidden_size}; expected {pooled} and {states}, the sizes that"
                " the transformer takes"
            )
        if self.length > c.max_position_embeddings:
            raise GenError(
                f"the tokenizer of {files.name} makes texts of {self.length} tokens; expected"
                f" at most {c.max_position_embeddings}, the positions of the text encoder"
            )
        if len(self.tokenizer) > c.vocab_size:
            raise GenError(
                f"the tokenizer of {files.name} has {len(self.tokenizer)} ids; expected at most"
                f" {c.vocab_size}, the vocabulary of the text encoder"
            )

    def __call__(self, text: str) -> dict[str, Tensor]:
        ids = self.tokenizer(
            text, return_tensors="pt", padding="max_length", truncation=True, max_length=self.length
        )["input_ids"]
        out = self.model(ids.to(self.model.device), output_hidden_states=True)
        return {"pooled": out.text_embeds[0], "states": out.hidden_states[-2][0]}


def _require_match(name: str, c: Any, codes: int, mask: Any) -> None:
    """Check that transformer, autoencoder and scheduler belong together.

    Args:
        name: the checkpoint, for messages.
        c: config of the transformer.
        codes: codes of the autoencoder.
        mask: the scheduler's mask_token_id.

    Raises:
        GenError: they differ in their codes, mask or micro-conditioning.
    """
    if codes != c.codebook_size:
        raise GenError(
            f"model {name} has a codebook_size of {c.codebook_size} and its vqvae"
            f" {codes} codes; expected equal numbers"
        )
    if isinstance(mask, bool) or not isinstance(mask, int) or not codes <= mask < c.vocab_size:
        raise GenError(
            f"the scheduler of {name} has the mask_token_id {mask!r}; expected an id"
            f" from {codes} to {c.vocab_size - 1}, where the transformer has no codes"
        )
    if c.micro_cond_embed_dim != MICRO * c.micro_cond_encode_dim:
        raise GenError(
            f"the transformer of {name} has micro_cond_embed_dim"
            f" {c.micro_cond_embed_dim}; expected {MICRO} times {c.micro_cond_encode_dim}"
        )


def _configs(files: CheckpointFiles) -> dict[str, dict[str, Any]]:
    """Read the configs of the parts.

    Raises:
        GenError: a part is missing, or is of another class.
    """
    lacking = [part for part in PARTS if not (files.path / part).is_dir()]
    if lacking:
        raise GenError(
            f"model {files.name} lacks the folder {' and the folder '.join(lacking)}; expected"
            f" {', '.join(PARTS)}"
        )
    index = files.json("model_index.json")
    for part, expected in PARTS.items():
        entry = index.get(part)
        if (
            isinstance(entry, list)
            and len(entry) == 2
            and part != "tokenizer"
            and entry[1] != expected
        ):
            raise GenError(f"the {part} of {files.name} is a {entry[1]!r}; expected {expected!r}")
    return {
        "vqvae": files.json("vqvae/config.json"),
        "scheduler": files.json("scheduler/scheduler_config.json"),
    }
