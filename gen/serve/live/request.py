"""Call as the page asks for it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi.exceptions import RequestValidationError

from gen.contracts.modality import Modality
from gen.core.edit_spec import EditSpec
from gen.core.errors import GenError, bad_value, shown, unknown
from gen.core.sampling_params import SamplingParams
from gen.engine.engine import Engine
from gen.serve.api.bodies import parsed, validated
from gen.serve.api.errors import ApiError, of_validation
from gen.serve.api.fields import MOST_LOGPROBS, MOST_TOKENS, require_finite
from gen.serve.api.samplers import require_served
from gen.serve.api.tools import ToolFields, ToolUse
from gen.serve.live.media import read_file

MOST_SAMPLES = 8
MOST_PREVIEWS = 64
LONGEST_PROMPT = 20_000  # characters
LARGEST_SEED = 2**31 - 1
# sampling parameters, and the most that a request may ask for
LIMITS = {
    **dict.fromkeys(("max_new_tokens", "min_new_tokens", "max_length"), MOST_TOKENS),
    "logprobs": MOST_LOGPROBS,
}
# starts of a call, and the names of their files in the copied call
FILES = ("source", "mask", "prefix")
KEYS = (
    "model", "prompt", "sampler", "sampling", "seed", "num_samples", "partial_images",
    "structured", *ToolFields.model_fields, *FILES,
)  # fmt: skip


@dataclass(frozen=True)
class LiveRequest:
    """Call that the page asks for.

    Attributes:
        model: id of a served model.
        prompt: the prompt.
        sampler: sampler with its parameters, ``{"name": ...}``; None for the model's own.
        sampling: sampling parameters that differ from the model's.
        seed: seed of the first output.
        num_samples: outputs.
        partial_images: previews of each image.
        structured: rule that the output obeys.
        calls: functions that the output may call, fields of ``ToolFields``.
        files: files to edit or to continue, each with ``name`` and ``data`` (base64).

    Raises:
        GenError: a value of another type or range.
    """

    model: str
    prompt: str
    sampler: Mapping[str, Any] | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    num_samples: int = 1
    partial_images: int = 16
    structured: Mapping[str, Any] | None = None
    calls: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, dict[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, longest in (("model", 200), ("prompt", LONGEST_PROMPT)):
            value = vars(self)[name]
            if not isinstance(value, str) or len(value) > longest:
                raise bad_value(name, value, f"a text of at most {longest} characters")
        for name, least, most in (
            ("seed", 0, LARGEST_SEED),
            ("num_samples", 1, MOST_SAMPLES),
            ("partial_images", 0, MOST_PREVIEWS),
        ):
            value = vars(self)[name]
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise bad_value(name, value, f"an integer from {least} to {most}")
        if self.sampler is not None and not isinstance(self.sampler, Mapping):
            raise bad_value("sampler", self.sampler, "an object with a name and parameters")
        require_served(self.sampler)
        if not isinstance(self.sampling, Mapping):
            raise bad_value("sampling", self.sampling, "an object of sampling parameters")
        for name in self.sampling:
            if name not in SamplingParams.__dataclass_fields__:
                raise unknown("sampling parameter", name, SamplingParams.__dataclass_fields__)
        for name, value in self.sampling.items():
            if not isinstance(value, (int, float)) or not math.isfinite(value):
                raise bad_value(f"sampling.{name}", value, "a finite number")
            if value > LIMITS.get(name, math.inf):
                raise bad_value(f"sampling.{name}", value, f"at most {LIMITS[name]}")
        if self.structured is not None and not isinstance(self.structured, Mapping):
            raise bad_value("structured", self.structured, "an object such as {'regex': '[a-z]+'}")
        for name, file in self.files.items():
            if not isinstance(file, Mapping) or not all(
                isinstance(file.get(key), str) for key in ("name", "data")
            ):
                raise bad_value(name, file, "an object with the texts name and data")

    @classmethod
    def read(cls, asked: Mapping[str, Any]) -> LiveRequest:
        """Return the call of a JSON object. Raises ``GenError`` for what it cannot be."""
        for name in asked:
            if name not in KEYS:
                raise unknown("key", name, KEYS)
        for name in ("model", "prompt"):
            if name not in asked:
                raise GenError(f"{name} is missing; expected model and prompt")
        files = {name: asked[name] for name in FILES if asked.get(name) is not None}
        calls = {k: asked[k] for k in ToolFields.model_fields if asked.get(k) is not None}
        plain = {k: v for k, v in asked.items() if k not in (*FILES, *calls) and v is not None}
        return cls(**plain, calls=calls, files=files)

    def use(self, modality: Modality) -> ToolUse | None:
        """Return what the output may call; None for nothing. Raises ``ApiError``."""
        try:
            return validated(ToolFields, dict(self.calls)).tool_use(modality)
        except RequestValidationError as error:
            raise of_validation(error) from None

    def condition(self, modality: Modality) -> str | dict[str, Any]:
        """Return the prompt: to a model with a chat template, as a message of the user."""
        if modality.tool_format is None:
            return self.prompt
        use = self.use(modality)
        told = {} if use is None else {"tools": list(use.tools)}
        return {"messages": [{"role": "user", "content": self.prompt}], **told}

    def controls(self, modality: Modality) -> dict[str, Any]:
        """Return the sampling parameters, rules included. Raises ``ApiError`` for two rules."""
        use, rule = self.use(modality), self.structured
        if use is not None and rule is not None:
            message = "structured and tools are both given; expected one of them"
            raise ApiError(message, "structured", "invalid_value")
        rule = rule if use is None else use.rule()
        return {**self.sampling, **({} if rule is None else {"structured": rule})}

    def start(self, engine: Engine) -> EditSpec:
        """Return what the call starts from. Raises ``GenError`` for a file that is unreadable."""
        modality = engine.models.pipeline(self.model).modality
        return EditSpec(
            **{name: read_file(modality, file, name) for name, file in self.files.items()}
        )

    @property
    def spec(self) -> str | dict[str, Any] | None:
        """Sampler as short as it can be written."""
        if self.sampler is None:
            return None
        spec = dict(self.sampler)
        return spec["name"] if set(spec) == {"name"} else spec

    @property
    def folder(self) -> str:
        """Folder of the outputs in the copied call; other calls have other ones."""
        told = json.dumps([vars(self)[key] for key in self.__dataclass_fields__], sort_keys=True)
        name = "" if self.sampler is None else f"-{self.sampler.get('name')}"
        return f"out/{self.model}{name}-{hashlib.sha256(told.encode()).hexdigest()[:6]}"

    @property
    def file_names(self) -> dict[str, str]:
        """Names of the files in the copied call."""
        return {
            name: f"{name}.{file['name'].rpartition('.')[2]}" for name, file in self.files.items()
        }


def read_object(content: bytes) -> dict[str, Any]:
    """Return the JSON object of a body. Raises ``GenError`` for anything else."""
    value = parsed(content)
    if not isinstance(value, dict):
        raise GenError(f"the body is {shown(value)}; expected a JSON object")
    require_finite(value, "body")
    return value
