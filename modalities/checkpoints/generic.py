"""Models of image or video codes in ordinary transformers folders, described by a small file
``gen.json`` beside the weights.

    {"modality": "image", "protocol": "masked", "grid": [16, 16],
     "codes": {"start": 0, "size": 1024},          the model's ids of the codes in codebook order;
                                                   or all of them as a list
     "mask_token_id": 1024,                        of masked models
     "condition": {"classes": {"start": 1025, "size": 1000}, "unconditional": 2025},
     "begin": [2026],                              ids between the condition and the codes, or all
                                                   that there is before them
     "frontend": {"folder": "vq", "tokenizer": "vq"},
     "sampling": {"guidance_scale": 3.0}, "fps": 8}

A row is [class, *begin, *codes in raster order]. ``condition``, ``unconditional`` (what stands for
no class in guidance), ``begin``, ``sampling`` and, for pictures, ``fps`` may be left out. MaskGIT (Chang
et al., arXiv 2202.04200) is such a model: BERT over codes with a class in front.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from gen.contracts.checkpoint import Checkpoint, CheckpointFiles, LoadOptions
from gen.contracts.frontend import TokenFrontend
from gen.contracts.modality import Binding
from gen.core.errors import GenError, bad_value, unknown
from gen.core.registry import register, registry
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.modalities.open_vocabulary import FreeImage, FreeVideo
from gen.models.adapters.cache_probe import require_slots
from gen.models.adapters.conditioning import MappedLM, Vocabulary
from gen.models.adapters.language_models import CausalLM
from gen.models.load.pretrained import pretrained
from gen.models.published.mapped_masked import MappedMaskedLM

NAME = "gen.json"
MODALITIES = {"image": FreeImage, "video": FreeVideo}
PROTOCOLS = ("masked", "causal")


@dataclass(frozen=True)
class Description:
    """What ``gen.json`` says. ``codes``: the model's ids in codebook order. ``classes``: the ids of
    the classes, none where there is no condition."""

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

    The file is explained in ``gen.modalities.checkpoints.generic``. A prompt is the number of a
    class, or empty where the model has none.
    """

    modalities = tuple(MODALITIES)
    protocols = PROTOCOLS
    tested = "tiny random BERT and Llama folders against their own classes"

    @classmethod
    def matches(cls, files: CheckpointFiles) -> bool:
        return files.path.is_dir() and files.has(NAME)

    def __init__(self, files: CheckpointFiles, modality: str, how: LoadOptions):
        from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

        d = self.described = read(files.json(NAME), f"{NAME} of {files.name}")
        if d.modality != modality:
            raise GenError(
                f"model {files.name} makes {d.modality}s, says its {NAME}; asked for was"
                f" {modality!r}"
            )
        self.protocols, self.sampling, self.fps = (d.protocol,), d.sampling, d.fps
        self.frontend = _frontend(files, d, how)
        if d.modality == "video":
            self.frame_size = tuple(
                n * f for n, f in zip(d.grid[1:], self.frontend.config.compression[1:], strict=True)
            )
        masked = d.protocol == "masked"
        auto = AutoModelForMaskedLM if masked else AutoModelForCausalLM
        model = pretrained(
            auto,
            files.path,
            device=how.device,
            dtype=how.dtype,
            device_map=how.device_map,
            name=files.name,
            trust_remote_code=how.trust_remote_code,
        )
        config = model.config.get_text_config()
        self.vocabulary = Vocabulary(
            [*d.codes, *([d.mask_token_id] if masked else [])], config.vocab_size
        )
        for said in (*d.classes, *d.begin, *([] if d.unconditional is None else [d.unconditional])):
            if said >= config.vocab_size:
                raise GenError(
                    f"{NAME} of {files.name} names id {said}; expected ids below"
                    f" {config.vocab_size}, the size of the model's vocabulary"
                )
        positions, room = (
            bool(d.classes) + len(d.begin) + math.prod(d.grid),
            getattr(config, "max_position_embeddings", None),
        )
        if room is not None and positions > room:
            raise GenError(
                f"rows of {files.name} have {positions} places, condition included; expected at most"
                f" {room}, all that the model has positions for"
            )
        if masked:
            self.lm = MappedMaskedLM(model, self.vocabulary)
        else:
            require_slots(
                CausalLM(model),
                files.name,
                lambda ids: model(input_ids=ids, use_cache=False).logits,
            )
            self.lm = MappedLM(model, self.vocabulary)
        size = len(d.codes)
        space = TokenSpace.codes(
            d.grid, size, self.vocabulary.size, size if masked else None, self.frontend.codebooks[0]
        )
        self._name = files.name
        self.binding = Binding(space, self.prompt, self.without)
        self.modality = MODALITIES[d.modality](self)

    def prompt(self, condition: int | str) -> list[int]:
        """What stands in front of the codes."""
        own = [self.described.classes[condition]] if self.described.classes else []
        return self.vocabulary.prompt([*own, *self.described.begin])

    def without(self, condition: int | str) -> list[int]:
        """What stands there in the half of guidance that has no condition. Raises ``GenError``
        where nothing does."""
        if self.described.unconditional is None:
            raise GenError(
                f"model {self._name} has no id that stands for no condition; expected"
                f" sampling.guidance_scale 1, or 'unconditional' in its {NAME}"
            )
        return self.vocabulary.prompt([self.described.unconditional, *self.described.begin])

    def condition(self, prompt: str) -> int | str:
        """The number of a class; ``unconditional`` where there are none, for which the prompt may
        be empty too."""
        count = len(self.described.classes)
        if not count:
            if prompt.strip().lower() not in ("", "unconditional"):
                raise GenError(
                    f"the prompt is {prompt!r}; expected none (''): this model takes no condition"
                )
            return "unconditional"
        found = re.fullmatch(r"\s*(?:class\s+)?(\d+)\s*", prompt, re.IGNORECASE)
        if not found or int(found[1]) >= count:
            raise GenError(
                f"the prompt is {prompt!r}; expected the number of a class, such as '207' or 'class"
                f" 207', below {count}"
            )
        return int(found[1])

    def adapter(self, protocol: str) -> MappedMaskedLM | MappedLM:
        return self.lm

    def to_codes(self, tokens: Tensor, space: TokenSpace) -> Tensor:
        """Of all slices of the grid or the first ones."""
        first = tokens.shape[1] // math.prod(space.grid[1:])
        return tokens.view(len(tokens), 1, first, *space.grid[1:])


def read(said: Mapping[str, Any], where: str) -> Description:
    """The description that a file holds. Raises ``GenError`` for what is missing, unknown (with the
    nearest name) or of no sense."""
    said = dict(said)
    _keys(
        said,
        where,
        ("modality", "protocol", "grid", "codes", "frontend"),
        ("mask_token_id", "condition", "begin", "sampling", "fps"),
    )
    for key, options in (("modality", MODALITIES), ("protocol", PROTOCOLS)):
        if said[key] not in options:
            raise unknown(key, said[key], options, where)
    axes = 2 if said["modality"] == "image" else 3
    grid = _ids("grid", said["grid"], where)
    if len(grid) != axes or not all(grid):
        raise bad_value(
            "grid",
            said["grid"],
            f"{axes} integers of at least 1, {'slices of time, ' if axes == 3 else ''}rows and"
            " columns",
            where,
        )
    codes, mask = _range("codes", said["codes"], where), said.get("mask_token_id")
    if (mask is not None) != (said["protocol"] == "masked"):
        raise bad_value(
            "mask_token_id", mask, "an id for a masked model, and none for a causal one", where
        )
    if mask is not None and (not _is_id(mask) or mask in codes):
        raise bad_value("mask_token_id", mask, "an id that is no code", where)
    condition = said.get("condition") or {}
    _keys(condition, f"condition in {where}", ("classes",) if condition else (), ("unconditional",))
    free = condition.get("unconditional")
    if free is not None and not _is_id(free):
        raise bad_value("unconditional", free, "an id", where)
    begin = _ids("begin", said.get("begin", []), where)
    if said["protocol"] == "causal" and not condition and not begin:
        raise GenError(
            f"{where} has no condition and no begin; expected at least one id in front of the"
            " codes, at which a causal model says what comes first"
        )
    _keys(said["frontend"], f"frontend in {where}", ("folder", "tokenizer"), ())
    sampling, fps = said.get("sampling", {}), said.get("fps")
    _keys(sampling, f"law in {where}", (), [f.name for f in fields(SamplingParams)])
    SamplingParams(**sampling)
    if (fps is None) != (axes == 2) or (
        fps is not None and (isinstance(fps, bool) or not isinstance(fps, (int, float)) or fps <= 0)
    ):
        raise bad_value("fps", fps, "frames per second for video, and nothing for images", where)
    classes = _range("classes", condition["classes"], where) if condition else ()
    own = {"codes": codes, "classes": classes, "mask_token_id": (mask,), "unconditional": (free,)}
    for name, others in (
        ("classes", ("codes", "mask_token_id")),
        ("unconditional", ("codes", "mask_token_id", "classes")),
    ):
        for other in others:
            if shared := sorted(set(own[name]) & set(own[other]) - {None}):
                raise GenError(
                    f"id {shared[0]} stands for {name} and for {other} in {where}; expected one"
                    " meaning for each id"
                )
    return Description(
        said["modality"],
        said["protocol"],
        grid,
        codes,
        str(said["frontend"]["folder"]),
        said["frontend"]["tokenizer"],
        mask,
        classes,
        free,
        begin,
        dict(sampling),
        fps,
    )


def _keys(found: Any, where: str, needed: Any, more: Any) -> None:
    if not isinstance(found, Mapping):
        raise GenError(
            f"{where} is a {type(found).__name__}; expected an object with"
            f" {', '.join([*needed, *more])}"
        )
    for key in found:
        if key not in (*needed, *more):
            raise unknown("key", key, (*needed, *more), where)
    if lacking := [k for k in needed if k not in found]:
        raise GenError(f"{where} lacks {', '.join(lacking)}")


def _is_id(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= 0


def _ids(name: str, found: Any, where: str) -> tuple[int, ...]:
    if not isinstance(found, list) or not all(map(_is_id, found)):
        raise bad_value(name, found, "a list of integers of at least 0", where)
    return tuple(found)


def _range(name: str, found: Any, where: str) -> tuple[int, ...]:
    """Ids from {"start", "size"} or a list."""
    if not isinstance(found, Mapping):
        ids = _ids(name, found, where)
    else:
        _keys(found, f"{name} in {where}", ("start", "size"), ())
        start, size = found["start"], found["size"]
        if not _is_id(start) or not _is_id(size):
            raise bad_value(name, found, "integers of at least 0", where)
        ids = tuple(range(start, start + size))
    if not ids:
        raise bad_value(name, found, "at least one id", where)
    return ids


def _frontend(files: CheckpointFiles, d: Description, how: LoadOptions) -> TokenFrontend:
    cls, folder = (
        registry.get("tokenizer", d.tokenizer, f"{NAME} of {files.name}"),
        files.path / d.folder,
    )
    if not folder.is_dir():
        raise GenError(
            f"{NAME} of {files.name} names the frontend folder {d.folder!r}, which is not there;"
            " expected one beside the weights"
        )
    frontend = cls.from_pretrained(folder, how.device, how.dtype)
    c = frontend.config
    if (c.modality, c.kind, len(c.codebook_sizes)) != (d.modality, "codes", 1):
        raise GenError(
            f"the frontend {d.tokenizer!r} of {files.name} makes {c.kind} of {c.modality} in"
            f" {len(c.codebook_sizes)} streams; expected codes of {d.modality} in one stream"
        )
    if c.codebook_sizes[0] != len(d.codes):
        raise GenError(
            f"{NAME} of {files.name} has {len(d.codes)} codes, its frontend {c.codebook_sizes[0]};"
            " expected as many"
        )
    return frontend
