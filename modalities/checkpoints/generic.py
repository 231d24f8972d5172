"""Models of image or video codes in ordinary transformers folders, described by a small file
``gen.json`` beside the weights.

    {"modality": "image", "protocol": "masked", "grid": [16, 16],
     "codes": {"start": 0, "size": 1024},          the model's ids of the codes in codebook order;
                                                   or all of them as a list
     "mask_token_id": 1024,                        of masked models
     "condition": {"classes": {"start": 1025, "size": 1000}, "unconditional": 2025},
     "begin": [2026],                              ids between the condition and the codes
     "frontend": {"folder": "vq", "tokenizer": "vq"},
     "sampling": {"guidance_scale": 3.0}, "fps": 8}

A sequence is [class, *begin, *codes in raster order]. The keys ``condition``, ``unconditional``
(the id of "no class" in classifier-free guidance), ``begin``, ``sampling`` and, for images, ``fps``
are optional. MaskGIT (Chang et al., arXiv 2202.04200) is such a model: BERT over codes with a class
in front.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import transformers
from torch import Tensor

from gen.contracts.checkpoint import FROM_PRETRAINED, Checkpoint, CheckpointFiles, LoadOptions
from gen.contracts.frontend import TokenFrontend
from gen.contracts.modality import Binding
from gen.core.errors import GenError, bad_value, unknown
from gen.core.registry import register, registry
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.modalities.checkpoints.options import class_number, is_integer
from gen.modalities.open_vocabulary import FreeImage, FreeVideo
from gen.models.adapters.cache_probe import require_slots
from gen.models.adapters.conditioning import MappedLM, Vocabulary
from gen.models.adapters.language_models import CausalLM
from gen.models.load.networks import config_field
from gen.models.load.pretrained import pretrained
from gen.models.published.mapped_masked import MappedMaskedLM

NAME = "gen.json"
MODALITIES = {"image": FreeImage, "video": FreeVideo}
PROTOCOLS = ("masked", "causal")


@dataclass(frozen=True)
class Description:
    """Contents of ``gen.json``.

    Attributes:
        modality: ``image`` or ``video``.
        protocol: ``masked`` or ``causal``.
        grid: codes along (time,) rows and columns.
        codes: model ids of the codes, in codebook order.
        folder: folder of the frontend, beside the weights.
        tokenizer: registered name of the frontend.
        mask_token_id: model id of the mask, for masked models.
        classes: model ids of the classes; empty without a condition.
        unconditional: model id of "no class".
        begin: model ids between the condition and the codes.
        sampling: default sampling parameters.
        fps: frames per second of clips.
    """

    modality: str
    protocol: str
    grid: tuple[int, ...]
    codes: tuple[int, ...]
    folder: str
    tokenizer: str
    mask_token_id: int | None = None
    classes: tuple[int, ...] = ()
    unconditional: int | None = None
    begin: tuple[int, ...] = ()
    sampling: dict[str, Any] = field(default_factory=dict)
    fps: float | None = None


@register("checkpoint", "described")
class Described(Checkpoint):
    """Masked (BERT-like) and causal transformers models of image or video codes, described by a
    file gen.json in their folder.

    ``gen.modalities.checkpoints.generic`` explains the file. A prompt is the number of a class, or
    empty where the model has no classes.
    """

    takes = FROM_PRETRAINED
    modalities = tuple(MODALITIES)
    protocols = PROTOCOLS
    tested = "tiny random BERT and Llama folders against their own classes"

    @classmethod
    def matches(cls, files: CheckpointFiles) -> bool:
        return files.path.is_dir() and files.has(NAME)

    @classmethod
    def sampling_of(cls, files: CheckpointFiles, options: Mapping[str, Any]) -> Mapping[str, Any]:
        return described(files).sampling

    @classmethod
    def protocols_of(cls, files: CheckpointFiles) -> tuple[str, ...]:
        return (described(files).protocol,)

    def __init__(self, files: CheckpointFiles, modality: str, load: LoadOptions):
        d = self.described = described(files)
        if d.modality != modality:
            raise GenError(
                f"model {files.name} makes {d.modality}s according to its {NAME}; expected"
                f" {modality}s, which were asked for"
            )
        self.protocols, self.sampling, self.fps = (d.protocol,), d.sampling, d.fps
        self.frontend = _frontend(files, d, load)
        if d.modality == "video":
            self.frame_size = tuple(
                n * f for n, f in zip(d.grid[1:], self.frontend.config.compression[1:], strict=True)
            )
        self._name = files.name
        self.lm = self._load(files, load)
        size = len(d.codes)
        space = TokenSpace.codes(
            d.grid,
            size,
            self.vocabulary.size,
            size if d.protocol == "masked" else None,
            self.frontend.codebooks[0],
        )
        self.binding = Binding(space, self.prompt, self.unconditional)
        self.modality = MODALITIES[d.modality](self)

    def _load(self, files: CheckpointFiles, load: LoadOptions) -> MappedMaskedLM | MappedLM:
        """Load the weights and check that the model has the ids and positions of gen.json."""
        d = self.described
        masked = d.protocol == "masked"
        model = pretrained(
            transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM,
            files.path,
            **load.pretrained_keywords,
            name=files.name,
            trust_remote_code=load.trust_remote_code,
        )
        config = model.config.get_text_config()
        mask = [d.mask_token_id] if masked else []
        self.vocabulary = Vocabulary([*d.codes, *mask], config.vocab_size)
        for i in (*d.classes, *d.begin, *([] if d.unconditional is None else [d.unconditional])):
            if i >= config.vocab_size:
                raise GenError(
                    f"{NAME} of {files.name} names id {i}; expected ids below"
                    f" {config.vocab_size}, the size of the model's vocabulary"
                )
        positions = bool(d.classes) + len(d.begin) + math.prod(d.grid)
        # configs of models without learned positions may lack this field
        room = config_field(config, "max_position_embeddings")
        if room is not None and positions > room:
            raise GenError(
                f"sequences of {files.name} have {positions} positions, condition included;"
                f" expected at most {room}, the positions of the model"
            )
        if masked:
            return MappedMaskedLM(model, self.vocabulary)
        require_slots(
            CausalLM(model), files.name, lambda ids: model(input_ids=ids, use_cache=False).logits
        )
        return MappedLM(model, self.vocabulary)

    def prompt(self, condition: int | str) -> list[int]:
        """Ids before the codes: the condition's class, if there are classes, and ``begin``."""
        d = self.described
        return self.vocabulary.prompt([*([d.classes[condition]] if d.classes else []), *d.begin])

    def unconditional(self, condition: int | str) -> list[int]:
        """Ids before the codes in the unconditional branch of guidance.

        Raises:
            GenError: the model has no id of "no class".
        """
        if self.described.unconditional is None:
            raise GenError(
                f"model {self._name} has no id that stands for no condition; expected"
                f" sampling.guidance_scale 1, or 'unconditional' in its {NAME}"
            )
        return self.vocabulary.prompt([self.described.unconditional, *self.described.begin])

    def condition(self, prompt: str) -> int | str:
        """Number of a class; ``unconditional`` for models without classes, which take an empty
        prompt as well.
        """
        if self.described.classes:
            return class_number(prompt, len(self.described.classes))
        if prompt.strip().lower() not in ("", "unconditional"):
            raise GenError(
                f"the prompt is {prompt!r}; expected none (''): this model takes no condition"
            )
        return "unconditional"

    def adapter(self, protocol: str) -> MappedMaskedLM | MappedLM:
        return self.lm

    def to_codes(self, tokens: Tensor, space: TokenSpace) -> Tensor:
        """Codes of all slices of the grid or the first ones."""
        first = tokens.shape[1] // math.prod(space.grid[1:])
        return tokens.view(len(tokens), 1, first, *space.grid[1:])


def described(files: CheckpointFiles) -> Description:
    """Read the gen.json of a folder. Raises ``GenError`` as ``read`` does."""
    return read(files.json(NAME), f"{NAME} of {files.name}")


def read(contents: Mapping[str, Any], where: str) -> Description:
    """Check the contents of a gen.json.

    Args:
        contents: the parsed file.
        where: the file, for messages.

    Raises:
        GenError: a key is missing, unknown (with the nearest name) or has an impossible value.
    """
    contents = dict(contents)
    _require_keys(
        contents,
        where,
        ("modality", "protocol", "grid", "codes", "frontend"),
        ("mask_token_id", "condition", "begin", "sampling", "fps"),
    )
    for key, options in (("modality", MODALITIES), ("protocol", PROTOCOLS)):
        if contents[key] not in options:
            raise unknown(key, contents[key], options, where)
    axes = 2 if contents["modality"] == "image" else 3
    grid = _ids("grid", contents["grid"], where)
    if len(grid) != axes or not all(grid):
        raise bad_value(
            "grid",
            contents["grid"],
            f"{axes} integers of at least 1, {'slices of time, ' if axes == 3 else ''}rows and"
            " columns",
            where,
        )
    ids = _described_ids(contents, where)
    _require_keys(contents["frontend"], f"frontend in {where}", ("folder", "tokenizer"), ())
    sampling, fps = contents.get("sampling", {}), contents.get("fps")
    _require_keys(sampling, f"sampling in {where}", (), [f.name for f in fields(SamplingParams)])
    SamplingParams(**sampling)
    is_rate = isinstance(fps, (int, float)) and not isinstance(fps, bool) and fps > 0
    if not (is_rate if axes == 3 else fps is None):
        raise bad_value("fps", fps, "frames per second for video, and nothing for images", where)
    return Description(
        modality=contents["modality"],
        protocol=contents["protocol"],
        grid=grid,
        folder=str(contents["frontend"]["folder"]),
        tokenizer=contents["frontend"]["tokenizer"],
        sampling=dict(sampling),
        fps=fps,
        **ids,
    )


def _described_ids(contents: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Fields of a ``Description`` that hold model ids. No id may have two meanings."""
    codes, mask = _id_range("codes", contents["codes"], where), contents.get("mask_token_id")
    if (mask is not None) != (contents["protocol"] == "masked"):
        raise bad_value(
            "mask_token_id", mask, "an id for a masked model, and none for a causal one", where
        )
    if mask is not None and (not is_integer(mask) or mask in codes):
        raise bad_value("mask_token_id", mask, "an id that is not a code", where)
    condition = contents.get("condition") or {}
    _require_keys(
        condition, f"condition in {where}", ("classes",) if condition else (), ("unconditional",)
    )
    unconditional = condition.get("unconditional")
    if unconditional is not None and not is_integer(unconditional):
        raise bad_value("unconditional", unconditional, "an id", where)
    begin = _ids("begin", contents.get("begin", []), where)
    if contents["protocol"] == "causal" and not condition and not begin:
        raise GenError(
            f"{where} has no condition and no begin; expected at least one id before the codes,"
            " from which a causal model predicts the first one"
        )
    classes = _id_range("classes", condition["classes"], where) if condition else ()
    meanings = {
        "codes": codes,
        "classes": classes,
        "mask_token_id": (mask,),
        "unconditional": (unconditional,),
    }
    for name, others in (
        ("classes", ("codes", "mask_token_id")),
        ("unconditional", ("codes", "mask_token_id", "classes")),
    ):
        for other in others:
            if shared := sorted(set(meanings[name]) & set(meanings[other]) - {None}):
                raise GenError(
                    f"id {shared[0]} stands for {name} and for {other} in {where}; expected one"
                    " meaning for each id"
                )
    return {
        "codes": codes,
        "mask_token_id": mask,
        "classes": classes,
        "unconditional": unconditional,
        "begin": begin,
    }


def _require_keys(mapping: Any, where: str, needed: Sequence[str], optional: Sequence[str]) -> None:
    if not isinstance(mapping, Mapping):
        raise GenError(
            f"{where} is a {type(mapping).__name__}; expected an object with"
            f" {', '.join([*needed, *optional])}"
        )
    for key in mapping:
        if key not in (*needed, *optional):
            raise unknown("key", key, (*needed, *optional), where)
    if missing := [k for k in needed if k not in mapping]:
        raise GenError(f"{where} lacks {', '.join(missing)}")


def _ids(name: str, value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(map(is_integer, value)):
        raise bad_value(name, value, "a list of integers of at least 0", where)
    return tuple(value)


def _id_range(name: str, value: Any, where: str) -> tuple[int, ...]:
    """Ids from {"start", "size"} or a list."""
    if not isinstance(value, Mapping):
        ids = _ids(name, value, where)
    else:
        _require_keys(value, f"{name} in {where}", ("start", "size"), ())
        start, size = value["start"], value["size"]
        if not is_integer(start) or not is_integer(size):
            raise bad_value(name, value, "integers of at least 0", where)
        ids = tuple(range(start, start + size))
    if not ids:
        raise bad_value(name, value, "at least one id", where)
    return ids


def _frontend(files: CheckpointFiles, d: Description, load: LoadOptions) -> TokenFrontend:
    cls = registry.get("tokenizer", d.tokenizer, f"{NAME} of {files.name}")
    folder = files.path / d.folder
    if not folder.is_dir():
        raise GenError(
            f"{NAME} of {files.name} names the frontend folder {d.folder!r}, which does not exist;"
            " expected one beside the weights"
        )
    frontend = cls.from_pretrained(folder, load.device, load.dtype)
    c = frontend.config
    if (c.modality, c.kind, len(c.codebook_sizes)) != (d.modality, "codes", 1):
        raise GenError(
            f"the frontend {d.tokenizer!r} of {files.name} makes {c.kind} of {c.modality} in"
            f" {len(c.codebook_sizes)} streams; expected codes of {d.modality} in one stream"
        )
    if c.codebook_sizes[0] != len(d.codes):
        raise GenError(
            f"{NAME} of {files.name} has {len(d.codes)} codes and its frontend"
            f" {c.codebook_sizes[0]}; expected equal numbers"
        )
    return frontend
