"""Checkpoint contract: published models that were not made for gen, one class per family.

A family (``@register("checkpoint", name)``, ``gen.modalities.checkpoints``) matches folders, files
and hub ids. An instance has all that the pipeline needs: adapters of the model, the frontend, the
token space and the prompts. No code of a checkpoint runs unless the user sets
``trust_remote_code``, and a checkpoint is loaded completely or not at all.
"""

from __future__ import annotations

import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gen.contracts.condition import Condition
from gen.contracts.frontend import TokenFrontend
from gen.contracts.modality import Binding, Modality
from gen.core.errors import GenError, unknown
from gen.core.paths import exists, expand_user
from gen.core.registry import registry
from gen.core.token_space import TokenSpace
from gen.models.load.locate import pick_device, zoo
from gen.models.load.peft_adapters import merge
from gen.models.load.quantize import Quantization, quantize
from gen.models.load.routed import route
from gen.models.load.weights import PICKLES

EMBEDDED = "gen_"  # how the model types of gen's own architectures begin
MAPS = ("auto", "balanced", "balanced_low_0", "sequential")  # that accelerate makes itself
CONFIGS = ("config.json", "model_index.json", "gen.json")


class CheckpointFiles:
    """Files of a checkpoint on disk. ``name``: as the user wrote it. ``path``: its folder, or the
    single file of its weights."""

    def __init__(self, name: str | Path, path: Path):
        self.name, self.path = str(name), path

    @classmethod
    def find(cls, name: str | Path) -> CheckpointFiles:
        """Find the checkpoint of a zoo name, folder, file or hub id. A hub id is read from the
        local cache, or downloaded. Raises ``GenError``."""
        if str(name) in zoo():
            return cls(name, zoo()[str(name)])
        path = expand_user(name)
        if exists(path):
            return cls(name, path)
        text = str(name)
        if (
            text.count("/") != 1
            or text.startswith((".", "/", "~"))
            or text.endswith(("/", *PICKLES, ".safetensors"))
        ):
            raise unknown(
                "model", text, zoo(), "the zoo; it is not a folder, a file or a hub id either"
            )
        return cls(name, _fetched(text))

    @property
    def folder(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent

    @cached_property
    def config(self) -> dict[str, Any]:
        """Content of the folder's config.json; empty without one."""
        return {} if self.path.is_file() else self.json("config.json")

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", ""))

    @property
    def embedded(self) -> bool:
        """True for gen's own architectures, and so for all models of the zoo."""
        return self.model_type.startswith(EMBEDDED) or self.name in zoo()

    def json(self, relative: str) -> dict[str, Any]:
        """Read a JSON object of the folder; empty where the file is missing. Raises ``GenError``
        for an unreadable file."""
        path = self.folder / relative
        if not path.is_file():
            return {}
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise GenError(
                f"the config of model {self.name} cannot be read: {relative}: {error}"
            ) from None
        if not isinstance(found, dict):
            raise GenError(
                f"the config of model {self.name} cannot be read: {relative} holds a"
                f" {type(found).__name__}; expected an object"
            )
        return found

    def has(self, *patterns: str) -> bool:
        """Return True if a file of the folder matches one of the globs."""
        return any(next(self.folder.glob(p), None) is not None for p in patterns)

    def file(self, *patterns: str) -> Path:
        """Return the single file of the first glob with a match. Raises ``GenError`` for none and
        for several."""
        for pattern in patterns:
            found = sorted(self.folder.glob(pattern))
            if len(found) > 1:
                raise GenError(
                    f"{self.folder} holds {', '.join(p.name for p in found)}; expected one"
                    f" {pattern}"
                )
            if found:
                return found[0]
        raise GenError(f"model {self.name} has no {' and no '.join(patterns)} in {self.folder}")


def _fetched(name: str) -> Path:
    # heavy, and only hub ids need it
    from huggingface_hub import snapshot_download

    try:
        path = Path(snapshot_download(name, ignore_patterns=[f"*{p}" for p in PICKLES]))
        if next(path.rglob("*.safetensors"), None) is None:
            path = Path(snapshot_download(name))
    except (OSError, ValueError) as error:  # all errors of the hub are one of these
        raise GenError(
            f"model {name!r} is not a local folder, is not in the local cache, and the hub does not"
            f" give it ({' '.join(str(error).split())[:600]}); expected a folder, a file or the id"
            " of a repository"
        ) from None
    return path


@dataclass(frozen=True)
class LoadOptions:
    """Options of loading a checkpoint. ``device_map``: as in accelerate, for models larger than one
    device. ``trust_remote_code``: run code from the folder. ``quantization``: weight-only
    quantisation. ``adapters``: folder of a LoRA adapter, which is merged into the
    weights, or folders by name, of which every row takes its own."""

    device: torch.device
    dtype: torch.dtype
    device_map: str | Mapping[str, Any] | None = None
    trust_remote_code: bool = False
    quantization: Quantization | None = None
    adapters: str | Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        """Raise ``GenError`` for a device map that names a missing device."""
        if isinstance(self.device_map, Mapping):
            for position in self.device_map.values():
                if position != "disk":
                    pick_device(f"cuda:{position}" if isinstance(position, int) else position)
        elif self.device_map is not None and self.device_map not in MAPS:
            raise unknown("device_map", self.device_map, MAPS)

    @property
    def changes_weights(self) -> bool:
        """True where the weights are not used as they are stored."""
        return self.quantization is not None or self.adapters is not None

    def change(self, network: nn.Module, name: str) -> None:
        """Put the adapters on a loaded network, then quantise it.

        Args:
            network: the network.
            name: name of the model in messages.

        Raises:
            GenError: the adapter does not fit, or the weights cannot be quantised.
        """
        if isinstance(self.adapters, Mapping):
            route(network, self.adapters, name)
        elif self.adapters is not None:
            merge(network, self.adapters, name)
        if self.quantization is not None:
            quantize(network, self.quantization, name)


class Checkpoint(ABC):
    """Loaded model of a family.

    Keyword-only arguments of a subclass' ``__init__`` are the options that users may give.

    Attributes:
        modalities: names of the modalities that it can serve.
        protocols: names of the protocols that it serves.
        kind: ``codes`` or ``latents``.
        tested: evidence that its loader works.
        catch_all: True for the family of files that no other family matches.
        accepts: parts of a ``Condition`` that ``parse`` takes.
        most: largest number of media of a part that ``parse`` takes, where there is one.
        modality: modality whose prompts and tokens the checkpoint decides about.
        frontend: frontend of its tokens.
        binding: token space and prompts.
        sampling: default sampling parameters of the family. Where they differ between its
            checkpoints, ``sampling_of`` reads them from the files.
    """

    modalities: ClassVar[tuple[str, ...]]
    protocols: ClassVar[tuple[str, ...]]
    kind: ClassVar[str] = "codes"
    tested: ClassVar[str]
    catch_all: ClassVar[bool] = False
    accepts: ClassVar[frozenset[str]] = frozenset({"text"})
    most: ClassVar[Mapping[str, int]] = {}

    modality: Modality
    frontend: TokenFrontend
    binding: Binding
    sampling: Mapping[str, Any] = {}

    @classmethod
    def sampling_of(cls, files: CheckpointFiles, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the default sampling parameters of a checkpoint; no weights are loaded.

        Args:
            files: files of this family.
            options: options of the family that the user gave.
        """
        return cls.sampling

    @classmethod
    def protocols_of(cls, files: CheckpointFiles) -> tuple[str, ...]:
        """Return the protocols that a checkpoint serves; no weights are loaded."""
        return cls.protocols

    @classmethod
    def serving(cls, modality: str) -> type[Checkpoint]:
        """Return the class that serves one of the modalities: this one, or another of the family
        where their prompts and options have nothing in common."""
        return cls

    @classmethod
    @abstractmethod
    def matches(cls, files: CheckpointFiles) -> bool:
        """Return True for files of this family; reads configs and names only."""

    @abstractmethod
    def __init__(self, files: CheckpointFiles, modality: str, how: LoadOptions):
        """Load model, frontend and prompts. Raises ``GenError``."""

    @abstractmethod
    def adapter(self, protocol: str) -> Any:
        """Return the adapter of the model for one of its protocols."""

    def parse(self, condition: Condition) -> Any:
        """Return the typed condition that all given parts state.

        A family that takes more than text lists the parts in ``accepts`` and overrides this.

        Raises:
            GenError: a part is not taken, or does not parse.
        """
        condition.require(self.accepts, "the model", self.most)
        return self.condition(condition.text or "")

    def condition(self, prompt: str) -> Any:
        """Parse a prompt to a typed condition. Raises ``GenError``."""
        text = prompt.strip()
        if not text:
            raise GenError("the prompt is empty; expected a text")
        return text

    def to_codes(self, tokens: Tensor, space: TokenSpace) -> Tensor:
        """Convert tokens [B, T] in raster order to codes [B, 1, *grid], and latents [B, T, C] to
        [B, C, *grid]. Those of scales may end with any scale."""
        if space.channels:
            return tokens.transpose(1, 2).reshape(len(tokens), space.channels, *space.grid)
        if space.blocks:
            return tokens[:, None]
        return tokens.view(len(tokens), 1, *space.grid)


def published(name: str | Path) -> CheckpointFiles | None:
    """Return the files of a published model, and None for gen's own architectures. Raises
    ``GenError`` if there is no such model."""
    files = CheckpointFiles.find(name)
    return None if files.embedded else files


def family_of(files: CheckpointFiles, modality: str) -> type[Checkpoint]:
    """Return the class of the family that matches the files and serves the modality. Raises
    ``GenError`` with the type of the files and the known families."""
    table: dict[str, type[Checkpoint]] = registry.table("checkpoint")
    known = [name for name, cls in table.items() if not cls.catch_all and cls.matches(files)]
    known = known or [name for name, cls in table.items() if cls.catch_all and cls.matches(files)]
    found = [name for name in known if modality in table[name].modalities]
    if len(found) == 1:
        return table[found[0]].serving(modality)
    kind = (
        files.model_type
        or files.json("model_index.json").get("_class_name")
        or "folder without a type of model"
    )
    if len(found) > 1:
        raise GenError(
            f"model {files.name} could be one of {', '.join(found)}; expected files of one family"
        )
    if known:
        serves = "; ".join(
            f"{name} serves {' and '.join(table[name].modalities)}" for name in known
        )
        raise GenError(f"model {files.name} is a {kind!r}: {serves}; requested was {modality!r}")
    if not files.has(*CONFIGS) and not files.path.is_file():
        raise GenError(
            f"model folder {files.path} has no config.json, no model_index.json and no weights that"
            " a family knows by their names"
        )
    serving = [name for name, cls in table.items() if modality in cls.modalities]
    raise GenError(
        f"model {files.name} is a {kind!r}, which no family recognises; the modality {modality!r}"
        f" has models of its own (gen ls models) and the families {', '.join(serving)}"
    )


def load_checkpoint(
    files: CheckpointFiles, modality: str, how: LoadOptions, options: Mapping[str, Any]
) -> Checkpoint:
    """Load a checkpoint. Raises ``GenError`` for an option that its family does not have."""
    cls = family_of(files, modality)
    for key in options:
        if not options_of(cls):
            raise GenError(
                f"model {files.name} got the option {key!r}; expected none, its family has no"
                " options"
            )
        if key not in options_of(cls):
            raise unknown(f"option of model {files.name}:", key, options_of(cls))
    checkpoint = cls(files, modality, how, **options)
    adapters = [checkpoint.adapter(protocol) for protocol in checkpoint.protocols]
    if how.changes_weights:
        networks = {id(a.model): a.model for a in adapters}
        if len(networks) != 1:
            raise GenError(
                f"model {files.name} has {len(networks)} networks; expected one for quantization"
                " and adapters"
            )
        how.change(adapters[0].model, files.name)
        for adapter in adapters:
            adapter.network_changed()
    return checkpoint


def options_of(cls: type[Checkpoint]) -> dict[str, Any]:
    """Return the options of a family and their defaults."""
    return {
        k: p.default
        for k, p in inspect.signature(cls.__init__).parameters.items()
        if p.kind is p.KEYWORD_ONLY
    }
