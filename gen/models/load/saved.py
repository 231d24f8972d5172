"""Record of a saved pipeline, ``gen_pipeline.json``: a folder with one is a model everywhere."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gen.core.errors import GenError
from gen.core.trust import refuse_untrusted

RECORD = "gen_pipeline.json"


@dataclass(frozen=True)
class Saved:
    """Content of a record.

    Attributes:
        folder: folder of the record.
        modality: name of the modality.
        model: path of the model.
        dtype: floating-point type of the saved pipeline.
        options: options of the model's family, paths among them absolute, and the keywords
            ``draft_model``, ``variant`` and ``attn_implementation``.
    """

    folder: Path
    modality: str
    model: Path
    dtype: str
    options: Mapping[str, Any]


def read_saved(folder: Path) -> Saved | None:
    """Read the record of a saved pipeline; None for anything that is no folder with one.

    Raises:
        GenError: the record cannot be read.
    """
    if not os.path.isfile(folder / RECORD):
        return None
    try:
        found = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        options = dict(found["options"])
        for key in found["paths"]:
            options[key] = str(folder / options[key])
        refuse_untrusted({"model_options": options}, str(folder / RECORD))
        return Saved(folder, found["modality"], folder / found["model"], found["dtype"], options)
    except GenError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise GenError(
            f"{folder / RECORD} cannot be read ({type(error).__name__}: {error}); expected the"
            " record that pipe.save_pretrained writes"
        ) from None
