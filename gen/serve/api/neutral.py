"""Fields of OpenAI's chat completions that no model here can honour: their neutral values are
taken, others are refused by name."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from gen.serve.api.fields import Fields, Name, only

TAKEN = "Taken for compatibility; not used."
# values that change nothing, and why there are no others
NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "audio": ((), "answers are texts"),
    "function_call": (("none",), "tools and tool_choice came after it"),
    "functions": (([],), "tools came after them"),
    "modalities": ((["text"],), "answers are texts"),
    "moderation": ((), "nothing is moderated"),
    "prediction": ((), "drafts are a matter of the sampler"),
    "reasoning_effort": (("none",), "models think as long as they do"),
    "service_tier": (("auto", "default"), "there is one tier"),
    "store": ((False,), "answers are not kept"),
    "verbosity": (("medium",), "models write as much as they do"),
    "web_search_options": ((), "nothing is searched"),
}


class NeutralFields(Fields):
    """Fields that are taken where they say nothing."""

    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    moderation: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    service_tier: Any = None
    store: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    metadata: dict[Name, str] | None = Field(None, description=TAKEN, max_length=16)
    prompt_cache_key: Name | None = Field(None, description=TAKEN)
    prompt_cache_retention: Name | None = Field(None, description=TAKEN)

    @model_validator(mode="after")
    def _says_nothing(self) -> NeutralFields:
        for name, (allowed, why) in NEUTRAL.items():
            only(getattr(self, name), allowed, name, why)
        return self
