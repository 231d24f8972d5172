"""Models whose prompts a modality's checker knows: those of gen's own architectures that were
trained with conditions of the modality's language, and no others."""

from __future__ import annotations

from gen.contracts.checkpoint import CheckpointFiles
from gen.contracts.modality import BUILT_IN, CONDITIONS
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
        files = CheckpointFiles.find(model, HubOptions(local_files_only=True))
        foreign = not files.embedded
        if files.embedded and files.config.get(CONDITIONS, BUILT_IN) != BUILT_IN:
            return f"{ADVICE}: {model} was trained on media of its own"
    except NotCached:
        foreign = True
    except GenError:
        return f"{ADVICE}: {model} is not found here, so the language of its prompts is unknown"
    return f"{ADVICE}: {model} is a published checkpoint" if foreign else None
