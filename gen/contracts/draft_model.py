"""The draft model that a model is loaded with: a smaller model, or the folder of a trained drafter.

It belongs to the pipeline, as adapters do: samplers that draft and name no draft model take it, and
a request that names no sampler drafts with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gen.contracts.checkpoint import CheckpointFiles
from gen.core.errors import GenError, bad_type
from gen.core.registry import registry
from gen.core.resolve import preset_of, sampler_class
from gen.models.draft_heads import DRAFTER
from gen.models.load.hub import HUB, HubOptions

# sampler that drafts, by ``model_key`` of the model that is drafted for
DRAFTING = {"causal": "speculative", "causal-latents": "continuous_speculative"}


@dataclass(frozen=True)
class DraftModel:
    """Draft model by name.

    Attributes:
        name: zoo name, folder or hub id.
        kind: kind of a trained drafter; None for a model.
        vocab_size: token ids of a model of gen's own architectures; None for any other.
        depth: drafts in a row that a trained drafter makes; None where any number will do.
    """

    name: str
    kind: str | None = None
    vocab_size: int | None = None
    depth: int | None = None

    @classmethod
    def find(cls, name: str | Path, hub: HubOptions = HUB) -> DraftModel:
        """Find a draft model; no weights are loaded.

        Args:
            name: zoo name, folder or hub id.
            hub: hub options of the pipeline.

        Raises:
            GenError: there is no such model, or it is a drafter of no kind.
            WrongType: the name is none.
        """
        text = draft_name(name)
        files = CheckpointFiles.find(text, hub.of(text, main=False))
        config = files.config
        size = config.get("vocab_size") if files.embedded else None
        if config.get("model_type") != DRAFTER:
            return cls(text, vocab_size=size)
        kind, net = config.get("kind"), config.get("net")
        if not isinstance(kind, str) or not isinstance(net, Mapping):
            raise GenError(f"the config of drafter {text} cannot be read: it states no kind")
        return cls(text, kind, depth=net.get("depth"))

    @property
    def model(self) -> str | None:
        """Name of the model; None for a trained drafter."""
        return self.name if self.kind is None else None

    @staticmethod
    def drafters(draft: DraftModel | None) -> dict[str, str]:
        """Return the folders of trained drafters by kind, that of this one or none."""
        return {} if draft is None or draft.kind is None else {draft.kind: draft.name}

    def completed(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        """Return the spec of a sampler with the trained drafter, where it leaves the drafter
        open."""
        preset = preset_of(spec)
        stated = {*spec, *(preset.params if preset else ())}
        is_open = not stated & {"drafter", "draft_model", "drafter_weights"}
        if self.kind is None or not is_open or not drafts(spec):
            return dict(spec)
        length = "num_speculative_tokens"
        more = {} if self.depth is None or stated & {"shape", length} else {length: self.depth}
        return {**spec, "drafter": self.kind, **more}


def drafts(spec: Mapping[str, Any]) -> bool:
    """Return True for the sampler whose drafters include trained ones, and for its presets."""
    return sampler_class(spec) is registry.table("sampler")[DRAFTING["causal"]]


def draft_name(value: Any) -> str:
    """Return the name of a draft model. Raises ``WrongType`` for what can be none."""
    if not isinstance(value, (str, Path)) or not str(value):
        raise bad_type("draft_model", value, "a zoo name, a folder or a hub id")
    return str(value)
