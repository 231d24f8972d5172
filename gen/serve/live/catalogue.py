"""What the page offers: modalities with examples, their models, and the samplers that suit each."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from gen.contracts.modality import Modality
from gen.core.described import describe_sampler, meanings_of
from gen.core.docstrings import default_of, first_line
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.resolve import protocol_of, resolve_sampler
from gen.core.sampler import Sampler
from gen.engine.engine import Engine
from gen.pipeline.pipeline import Pipeline
from gen.serve.api.samplers import require_served

EXAMPLES = 3
# the order of the page; modalities of plugins follow
ORDER = ("image", "video", "speech", "audio", "motion", "action", "text", "world")
GUARANTEES = ("same_tokens", "same_distribution", "group", "approximate")
SHOWN_SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "guidance_scale", "max_new_tokens"
)  # fmt: skip


def list_modalities(engine: Engine) -> list[dict[str, Any]]:
    """List the modalities of the served models with prompts as examples; loads no weights."""
    served = engine.models.list()
    table = registry.table("modality")
    names = sorted(
        {model.modality for model in served},
        key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name),
    )
    found = []
    for name in names:
        cls: type[Modality] = table[name]
        models = [model for model in served if model.modality == name]
        models.sort(key=lambda model: (model.model is not None, model.id))
        found.append(
            {
                "name": name,
                "about": first_line(cls),
                "examples": _examples(cls),
                "continues": continues(cls),
                "models": [{"id": model.id, "own": model.model is None} for model in models],
            }
        )
    return found


def continues(cls: type[Modality]) -> bool:
    """Return True for a modality whose sounds or clips can be continued."""
    return cls.media_kind in ("audio", "video") and cls.prefix is not Modality.prefix


def _examples(cls: type[Modality]) -> list[str]:
    """Return prompts that a modality is measured with; none where it has none of its own."""
    try:
        return cls().example_prompts(EXAMPLES, 0)
    except GenError:
        return []


def describe_model(engine: Engine, model: str) -> dict[str, Any]:
    """Describe a model: the samplers that suit it, its defaults and what it can start from.

    Args:
        engine: the engine.
        model: id of a served model.

    Raises:
        GenError: an unknown model.
    """
    pipe = engine.models.pipeline(model)
    spec, sampling = pipe.defaults.complete(None, {})
    samplers = [_brief(pipe, name) for name in suitable_samplers(pipe)]
    samplers.sort(key=lambda s: (GUARANTEES.index(s["guarantee"]), s["name"]))
    cells = None
    if pipe.modality.edited_by == "mask" and pipe.modality.media_kind == "image":
        cells = list(pipe.binding(pipe.model_name(spec))[0].space.grid)
    return {
        "id": model,
        "modality": pipe.modality.name,
        "sampler": spec,
        "sampling": {key: sampling.get(key) for key in SHOWN_SAMPLING},
        "samplers": samplers,
        "cells": cells,
        "continues": continues(type(pipe.modality)),
        "texts": pipe.modality.extension == "txt",
        "tools": pipe.modality.tool_format is not None,
    }


def suitable_samplers(pipe: Pipeline) -> list[str]:
    """List the samplers and presets that a pipeline has models for."""
    found = []
    for name in (*registry.table("sampler"), *registry.table("preset")):
        try:
            pipe.model_name(name)
            pipe.draft_names(name)
        except GenError:  # no such model, or no draft model
            continue
        found.append(name)
    return found


def _brief(pipe: Pipeline, name: str) -> dict[str, Any]:
    """Describe a sampler or preset in one line."""
    sampler, _ = resolve_sampler(name)
    preset = registry.table("preset").get(name)
    return {
        "name": name,
        "about": preset.about if preset else first_line(type(sampler)),
        "guarantee": pipe.guarantee(sampler),
        "reference": sampler.reference,
        "paper": preset.paper if preset else next(iter(sampler.papers), ""),
        "edits": registry.get("protocol", protocol_of(name)).edits,
    }


def read_spec(text: str) -> Any:
    """Read a sampler of an address: a name, or a JSON object with a name and parameters.

    Raises:
        GenError: a JSON text that is none.
    """
    if not text.lstrip().startswith("{"):
        return text
    try:
        spec = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GenError(f"the sampler is no JSON object: {error}") from None
    require_served(spec)
    return spec


def describe_parameters(engine: Engine, model: str, spec: Any) -> dict[str, Any]:
    """Describe a sampler of a model: what it promises, and the parameters that have an effect.

    Args:
        engine: the engine.
        model: id of a served model.
        spec: name of a sampler or preset, or a mapping with a name and parameters.

    Raises:
        GenError: an unknown name, parameter or value.
    """
    pipe = engine.models.pipeline(model)
    complete = pipe.defaults.complete_sampler(spec)
    sampler, _ = resolve_sampler(complete)
    about = describe_sampler(complete["name"])
    plain = pipe.defaults.complete_sampler(complete["name"])
    usual, _ = resolve_sampler(plain)
    return {
        **{key: about[key] for key in ("name", "about", "papers")},
        "guarantee": pipe.guarantee(sampler),
        "reference": sampler.reference,
        "params": [
            described
            for f in dataclasses.fields(sampler)
            if (described := _parameter(f, sampler, usual)) is not None
        ],
    }


def _parameter(f: dataclasses.Field, sampler: Sampler, usual: Sampler) -> dict[str, Any] | None:
    """Describe a parameter; None where no part in use reads it."""
    if sampler.unread(f.name):
        return None
    default = getattr_of(usual, f)
    if not isinstance(default, (bool, int, float, str, type(None))):
        return None
    return {
        "name": f.name,
        "default": default,
        "meaning": meanings_of(type(sampler)).get(f.name, ""),
        "options": _options(f),
    }


def getattr_of(sampler: Sampler, f: dataclasses.Field) -> Any:
    """Return the value of a declared field, or its default where the sampler has none."""
    return vars(sampler).get(f.name, default_of(f))


def _options(f: dataclasses.Field) -> list[str]:
    """Return the words that a parameter may be; empty where it is no word."""
    stated: Mapping[str, Any] = f.metadata
    if "kind" in stated:
        return sorted(registry.table(stated["kind"]))
    words = stated.get("also", ()) if stated.get("type") is None else ()
    return [word for word in words if isinstance(word, str)]
