"""Models whose prompts a modality's checker knows: gen's own architectures, and no others."""

from __future__ import annotations

from gen.contracts.checkpoint import published
from gen.core.errors import GenError
from gen.models.load.hub import HubOptions, NotCached
from gen.models.load.locate import zoo

ADVICE = "no checker for this model"


def no_checker(model: str | None) -> str | None:
    """Return the reason why no checker knows the prompts of a model, or None where one does.

    Nothing is downloaded: a hub id counts as gen's own only if it is in the local cache.

    Args:
        model: name that the job gave; None for the modality's own models.
    """
    if model is None or model in zoo():
        return None
    try:
        foreign = published(model, HubOptions(local_files_only=True)) is not None
    except NotCached:
        foreign = True
    except GenError:
        return f"{ADVICE}: {model} is not found here, so the language of its prompts is unknown"
    return f"{ADVICE}: {model} is a published checkpoint" if foreign else None
