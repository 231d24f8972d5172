"""Fields of requests that several endpoints share, checked by pydantic.

gen's own parameters stand beside OpenAI's, as ``extra_body`` of the client sends them. An unknown
field is refused with the nearest name, and NaN and infinity wherever they stand.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import cache
from types import NoneType
from typing import Annotated, Any

from annotated_types import MaxLen
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    model_validator,
)

from gen.core.errors import hint, listed, shown
from gen.core.sampling_params import SAMPLING_FIELDS
from gen.serve.api.errors import ApiError
from gen.serve.api.samplers import require_served

DEEPEST = 64  # lists and objects in each other
MOST_TOKENS = 32_768  # of an output
MOST_LOGPROBS = 20  # of a token
MOST_PROMPTS = 2_048  # of a request
MOST_FRAMES = 4_096  # of a clip or motion
Text = Annotated[str, StringConstraints(max_length=100_000)]
TokenIds = Annotated[list[int], Field(max_length=100_000, fail_fast=True)]
Word = Annotated[list[int], Field(max_length=32, fail_fast=True)]
Name = Annotated[str, StringConstraints(max_length=200)]


def _form(given: Any) -> str:
    """Return which form of ``Prompts`` a value has by its first element."""
    first = given[0] if isinstance(given, list) and given else ""
    if isinstance(first, list):
        return "lists of ids"
    if isinstance(first, int):
        return "token ids"
    return "some texts" if isinstance(given, list) else "a text"


Prompts = Annotated[
    Annotated[Text, Tag("a text")]
    | Annotated[list[Text], Field(max_length=MOST_PROMPTS, fail_fast=True), Tag("some texts")]
    | Annotated[TokenIds, Tag("token ids")]
    | Annotated[
        list[TokenIds], Field(max_length=MOST_PROMPTS, fail_fast=True), Tag("lists of ids")
    ],
    Discriminator(_form),
]


class Fields(BaseModel):
    """Body of a request: no field may be unknown, and no value of another type."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known_and_finite(cls, values: Any) -> Any:
        """Refuse unknown fields, long lists, NaN and infinity. Raises ``ApiError``."""
        if isinstance(values, Mapping):
            longest = _longest(cls)
            for name, value in values.items():
                if name not in longest:
                    known = sorted(longest)
                    message = f"unknown parameter {shown(name)}.{hint(name, known)}{listed(known)}"
                    raise ApiError(message, str(name)[:100], "unknown_parameter")
                if isinstance(value, list | Mapping) and len(value) > longest[name]:
                    message = f"{name} has {len(value)} entries; expected at most {longest[name]}"
                    raise ApiError(message, name, "invalid_value")
                if type(value) not in (int, bool, NoneType):
                    require_finite(value, name)
        return values


@cache
def _longest(cls: type[BaseModel]) -> dict[str, float]:
    """Return the names of fields in requests, and the most entries of each."""
    return {
        field.alias or name: min(
            (m.max_length for m in field.metadata if isinstance(m, MaxLen)), default=math.inf
        )
        for name, field in cls.model_fields.items()
    }


def require_finite(value: Any, name: str, depth: int = 0) -> None:
    """Refuse NaN, infinity, deep nesting and half surrogate pairs. Raises ``ApiError``."""
    param = name.partition(".")[0]
    if depth > DEEPEST:
        message = f"{param} nests more than {DEEPEST} lists and objects"
        raise ApiError(message, param, "invalid_value")
    if isinstance(value, float) and not math.isfinite(value):
        raise ApiError(f"{name} is {value}; expected a finite number", name, "invalid_value")
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            message = f"{name} holds half of a surrogate pair; expected text in Unicode"
            raise ApiError(message, name, "invalid_value") from None
    if isinstance(value, Mapping) and not (_is_plain(value) and _is_plain(value.values())):
        for key, inner in value.items():
            require_finite(key, param, depth + 1)
            require_finite(inner, f"{name}.{key}"[:200], depth + 1)
    elif isinstance(value, list) and not _is_plain(value):
        for n, inner in enumerate(value):
            require_finite(inner, f"{name}.{n}"[:200], depth + 1)


def _is_plain(values: Collection[Any]) -> bool:
    """Return True for values that are fine at a glance, such as a list of ids: one pass of C each
    for their types, and for texts and fractions."""
    kinds = set(map(type, values)) - {int, bool, NoneType}
    if kinds == {str}:
        return all(map(str.isascii, (v for v in values if type(v) is str)))
    if kinds == {float}:
        return all(map(math.isfinite, (v for v in values if type(v) is float)))
    return not kinds


class SamplerFields(Fields):
    """Parameters of gen that every endpoint takes: the sampler, its seed, and the deadline."""

    sampler: Name | dict[str, Any] | None = Field(
        None, description="Sampler or preset, or an object of its name and parameters."
    )
    seed: int | None = Field(None, description="Seed of the first output of every prompt.")
    deadline: float | None = Field(
        None, gt=0, description="Seconds after which the request fails (504)."
    )
    user: Name | None = Field(None, description="Taken for compatibility; not used.")
    safety_identifier: Name | None = Field(None, description="Taken for compatibility; not used.")
    temperature: float | None = Field(None, description="Divisor of the logits.")
    top_p: float | None = Field(None, description="Mass of the most probable tokens that stay.")
    top_k: int | None = Field(None, description="Number of most probable tokens that stay.")
    min_p: float | None = Field(None, description="Least probability, relative to the largest.")
    guidance_scale: float | None = Field(None, description="Weight of classifier-free guidance.")
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    logit_bias: dict[str, float] | None = Field(None, max_length=1024)
    bad_words: list[Name | Word] | None = Field(None, max_length=1024)

    def chosen_sampler(self) -> str | dict[str, Any] | None:
        """Return the sampler. Raises ``ApiError`` for one that names files or code."""
        if self.sampler is not None:
            require_served(self.sampler)
        return self.sampler

    def sampling(self) -> dict[str, Any]:
        """Return the sampling parameters that came."""
        values = {name: getattr(self, name) for name in SAMPLING_FIELDS if name in self._names()}
        return {name: value for name, value in values.items() if value is not None}

    def _names(self) -> set[str]:
        return set(type(self).model_fields)


def only(value: Any, allowed: tuple[Any, ...], param: str, why: str) -> None:
    """Refuse a value of a field of OpenAI's that gen cannot honour. Raises ``ApiError``."""
    if value is not None and value not in allowed:
        expected = " or ".join(map(shown, allowed)) or "nothing"
        message = f"{param} is {shown(value)}, and {why}; expected {expected}"
        raise ApiError(message, param, "unsupported_value")
