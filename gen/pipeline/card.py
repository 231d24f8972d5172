"""Model card of a saved pipeline. A license is copied from the source, never invented."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCardData

from gen.contracts.checkpoint import Checkpoint, CheckpointFiles
from gen.core.errors import GenError
from gen.core.resolve import describe_guarantee, resolve_sampler
from gen.core.token_space import GUARANTEES
from gen.pipeline.models import ModalityModels

TASKS = {
    "action": "robotics",
    "audio": "text-to-audio",
    "image": "text-to-image",
    "speech": "text-to-speech",
    "text": "text-generation",
    "video": "text-to-video",
}
FIELDS = ("license", "license_name", "license_link", "language", "datasets", "pipeline_tag")


def card_of(pipe: ModalityModels, name: str, model: Any, source: CheckpointFiles) -> str:
    """Return the text of README.md.

    Args:
        pipe: the pipeline.
        name: model that is saved.
        model: the same, loaded.
        source: files that it was loaded from.
    """
    said = _front_matter(source.folder / "README.md")
    if source.gguf is not None and source.gguf.license is not None:
        said.setdefault("license", source.gguf.license)
    data = {key: said[key] for key in FIELDS if key in said}
    task = _task(pipe.modality_name(), model)
    if task is not None:
        data.setdefault("pipeline_tag", task)
    if not Path(name).expanduser().exists() and name.count("/") == 1:
        data["base_model"] = name
    told = said.get("tags")
    tags = ["gen", pipe.modality_name(), *(told if isinstance(told, list) else [])]
    front = ModelCardData(library_name="gen", tags=list(dict.fromkeys(map(str, tags))), **data)
    sampler = pipe.defaults.complete_sampler(None)
    default = resolve_sampler(sampler)[0]
    guarantee = describe_guarantee(default, pipe.guarantee(default))
    protocols = model.protocols if isinstance(model, Checkpoint) else pipe.serves(name)[0]
    license_note = (
        "" if "license" in data else "\nThe source of the weights states no license in its card.\n"
    )
    meanings = "\n".join(f"* `{key}`: {value}." for key, value in GUARANTEES.items())
    label = sampler["name"] if isinstance(sampler, Mapping) else sampler
    return f"""---
{front.to_yaml()}
---

# {Path(name).name}

A pipeline of gen: modality `{pipe.modality_name()}`,
protocols {", ".join(protocols)}.
{license_note}
## Use

```python
import gen

pipe = gen.load("FOLDER")  # this folder
out = pipe("a prompt", seed=0)
```

## What samplers do to the distribution

Every sampler of gen states one guarantee, relative to the model's reference sampler:

{meanings}

The default sampler here is `{label}`: {guarantee}. `out.guarantee` names the guarantee of a call.
"""


def _task(modality: str, model: Any) -> str | None:
    """Return the hub's name of the task of a model; None where the hub has none."""
    if modality == "text" and isinstance(model, Checkpoint):
        if "images" in model.accepts:
            return "image-text-to-text"
        if "text" not in model.accepts:
            return "automatic-speech-recognition" if "audio" in model.accepts else None
    return TASKS.get(modality)


def _front_matter(path: Path) -> dict[str, Any]:
    """Return the fields at the head of a card; empty without any. Raises ``GenError``."""
    if not path.is_file():
        return {}
    try:
        _, _, rest = path.read_text(encoding="utf-8").partition("---\n")
        head, found, _ = rest.partition("\n---")
        fields = yaml.safe_load(head) if found else None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise GenError(f"the card {path} cannot be read: {' '.join(str(error).split())}") from None
    return fields if isinstance(fields, dict) else {}
