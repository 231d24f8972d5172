"""Models whose prompts a modality's checker knows: gen's own architectures, and no others."""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from gen.contracts.checkpoint import published
from gen.core.errors import GenError
from gen.models.load.locate import zoo

ADVICE = "no checker for this model"


def no_checker(model: str | None) -> str | None:
    """Return the reason why no checker knows the prompts of a model, or None where one does.

    Nothing is downloaded: a hub id counts as gen's own only if its config is in the local cache.

    Args:
        model: name that the job gave; None for the modality's own models.
    """
    if model is None or model in zoo():
        return None
    if Path(model).expanduser().exists() or not _is_hub_id(model):
        try:
            foreign = published(model) is not None
        except GenError:
            return f"{ADVICE}: {model} is not found here, so the language of its prompts is unknown"
    else:
        foreign = not _cached_type(model).startswith("gen_")
    return f"{ADVICE}: {model} is a published checkpoint" if foreign else None


def _is_hub_id(model: str) -> bool:
    return model.count("/") == 1 and not model.startswith((".", "/", "~"))


def _cached_type(model: str) -> str:
    found = try_to_load_from_cache(model, "config.json")
    if not isinstance(found, str):
        return ""
    try:
        return str(json.loads(Path(found).read_text(encoding="utf-8")).get("model_type", ""))
    except (OSError, ValueError):
        return ""
