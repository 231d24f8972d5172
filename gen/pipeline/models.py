"""Models of a modality: found by name, loaded when first needed, bound to their frontends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gen.contracts.checkpoint import (
    Checkpoint,
    CheckpointFiles,
    LoadOptions,
    family_of,
    load_checkpoint,
    options_of,
)
from gen.contracts.frontend import TokenFrontend, codebook_digest
from gen.contracts.modality import Binding, Modality, kind_of
from gen.contracts.protocol import model_key
from gen.core.errors import GenError, bad_value
from gen.core.registry import registry
from gen.core.sampler import Sampler
from gen.models.load.libraries import transformers
from gen.models.load.locate import (
    ZOO,
    config_field,
    locate,
    model_kind,
    pick_device,
    pick_dtype,
    read_config,
    readable,
)
from gen.models.zoo import load_lm


class ModalityModels:
    """A modality, its models and its frontends.

    Attributes:
        modality: the modality, or the published checkpoint's view of it.
        model: name of the model as the user wrote it; None for the modality's own models.
        model_options: options of the model that were given, as plain data.
        device: device of models and frontends.
        dtype: floating-point type of models.
        compile: whether forward passes go through ``torch.compile``.
        negative_condition: condition that guidance leads away from; None for the model's
            unconditional prompt.
    """

    def __init__(
        self,
        modality: str | Modality,
        model: str | Path | None = None,
        device: str | torch.device = "cpu",
        dtype: str | torch.dtype = "float32",
        device_map: str | Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
        compile: bool = False,
        **options: Any,
    ):
        self.modality: Modality = (
            registry.get("modality", modality)() if isinstance(modality, str) else modality
        )
        self._load_options = LoadOptions(
            pick_device(device), pick_dtype(dtype), device_map, trust_remote_code
        )
        if not isinstance(compile, bool):
            raise bad_value("compile", compile, "true or false")
        self.device, self.dtype = self._load_options.device, self._load_options.dtype
        self.compile = compile
        self.model = None if model is None else str(model)
        self.negative_condition: Any = None
        self._options = options
        loading = (("device_map", device_map), ("trust_remote_code", trust_remote_code))
        explicit = {**{k: v for k, v in loading if v}, **options}
        self.model_options = {k: str(v) if isinstance(v, Path) else v for k, v in explicit.items()}
        self._checkpoints: dict[str, Checkpoint | None] = {}
        self._frontends: dict[str, TokenFrontend] = {}
        self._loaded: dict[str, tuple[Any, Binding, TokenFrontend]] = {}
        checkpoint = None if self.model is None else self._published(self.model)
        if checkpoint is not None:
            self.modality = checkpoint.modality
        elif self.model_options:
            raise GenError(
                f"model {self.model or 'of the zoo'} came with the options"
                f" {', '.join(self.model_options)}; expected none: they are for published"
                " checkpoints"
            )
        elif self.model is not None:
            read_config(self.model)  # an unknown name fails here, not after the first batch

    def _published(self, name: str) -> Checkpoint | None:
        """Return the published checkpoint of that name; None for gen's own architectures.

        A draft model gets those options that its family has.
        """
        if name not in self._checkpoints:
            files, options = CheckpointFiles.find(name), self._options
            if not files.embedded and name != self.model:
                known = options_of(family_of(files, self.modality.name))
                options = {k: v for k, v in options.items() if k in known}
            self._checkpoints[name] = (
                None
                if files.embedded
                else load_checkpoint(files, self.modality.name, self._load_options, options)
            )
        return self._checkpoints[name]

    def _serves(self, name: str) -> tuple[tuple[str, ...], str]:
        """Return the protocols and the kind of a model."""
        checkpoint = self._published(name)
        if checkpoint is not None:
            return checkpoint.protocols, checkpoint.kind
        return model_protocols(name), model_kind(name)

    def frontend(self, kind: str = "codes", name: str | None = None) -> TokenFrontend:
        """Return a frontend, loaded once.

        Args:
            kind: ``codes`` or ``latents``.
            name: name of an embedded frontend; None for the modality's own.
        """
        usual = self.modality.frontends[kind]
        name = name or usual
        if name not in self._frontends:
            folder = self._beside(name) or (None if name == usual else ZOO / name)
            self._frontends[name] = self.modality.frontend(
                kind, self.device, self.frontend_dtype, folder
            )
        return self._frontends[name]

    @property
    def frontend_dtype(self) -> torch.dtype:
        """Floating-point type of frontends: never bfloat16.

        bfloat16 does not hold a codebook to the last of its float16 bits, by which models know
        their codebook.
        """
        return torch.float32 if self.dtype == torch.bfloat16 else self.dtype

    def _beside(self, name: str) -> Path | None:
        """Return the folder of that name beside the model's own, if there is one.

        A model trained elsewhere brings its frontend and draft model along.
        """
        beside = Path(self.model or "").expanduser().resolve().parent / name
        return beside if self.model and beside.is_dir() else None

    def kind(self, sampler: Sampler) -> str:
        """Return the kind of token that a sampler decodes: ``codes`` or ``latents``."""
        return (
            kind_of(sampler, self.modality) if self.model is None else self._serves(self.model)[1]
        )

    def model_name(self, sampler: Sampler) -> str:
        """Return the name of the model that serves a sampler.

        Raises:
            GenError: the model is of another protocol or kind, or the modality has none.
        """
        if self.model is None:
            return self._default(model_key(sampler.protocol, self.kind(sampler)))
        protocols, kind = self._serves(self.model)
        if sampler.protocol not in protocols or kind not in sampler.kinds:
            raise GenError(
                f"model {self.model} is a {' and '.join(protocols)} one of {kind}, but the"
                f" sampler needs a {sampler.protocol} one of {' or '.join(sampler.kinds)}"
            )
        return self.model

    def draft_name(self, sampler: Sampler) -> str:
        """Return the name of a sampler's draft model: its own, or the modality's.

        The modality's is taken from beside the model, if it lies there.
        """
        other = sampler.draft_protocol
        name = sampler.draft_model or self._default(
            model_key(other or sampler.protocol, self.kind(sampler), draft=not other)
        )
        if sampler.draft_model and other and other not in self._serves(name)[0]:
            raise GenError(
                f"draft model {name} is a {' and '.join(self._serves(name)[0])} one; expected a"
                f" {other} one"
            )
        return name if sampler.draft_model else str(self._beside(name) or name)

    def _default(self, key: str) -> str:
        """Return the modality's model of a key."""
        if key not in self.modality.models:
            raise GenError(
                f"modality {self.modality.name!r} has no {key} model; it has"
                f" {', '.join(self.modality.models)}"
            )
        return self.modality.models[key]

    def bound(self, name: str) -> tuple[Any, Binding, TokenFrontend]:
        """Return a model, its binding to the modality, and the frontend it was trained with."""
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        model, binding, frontend = self._loaded[name]
        if self.negative_condition is not None:
            binding = replace(binding, unconditional=binding.prompt(self.negative_condition))
        return model, binding, frontend

    def _load(self, name: str) -> tuple[Any, Binding, TokenFrontend]:
        """Load a model by name."""
        checkpoint = self._published(name)
        if checkpoint is not None:
            return checkpoint, checkpoint.binding, checkpoint.frontend
        model = load_lm(name, self.device, self.dtype)
        # a foreign config class: the key is there where the recipe wrote it
        frontend = self.frontend(model_kind(name), config_field(model.config, "frontend"))
        return model, self.modality.bind(model.config, frontend, name), frontend

    def binding(self, name: str) -> tuple[Binding, TokenFrontend]:
        """Return the binding and the frontend of a model, for reading tokens.

        Of an embedded model nothing but its config is loaded.
        """
        if name in self._loaded or self._published(name) is not None:
            return self.bound(name)[1:]
        with readable("model", name):
            # the registry has imported the embedded architectures
            config = transformers().AutoConfig.from_pretrained(locate(name))
        frontend = self.frontend(model_kind(name), config_field(config, "frontend"))
        return self.modality.bind(config, frontend, name), frontend


def model_protocols(name: str | Path) -> tuple[str, ...]:
    """Return the protocols that an embedded or local model serves, as its config.json says."""
    config = read_config(name)
    table = registry.table("protocol")
    return tuple(protocol for protocol, cls in table.items() if cls.serves(config))


def same_frontend(a: TokenFrontend, b: TokenFrontend) -> bool:
    """Return True if two frontends give tokens the same meaning."""
    return a is b or (
        type(a) is type(b)
        and a.config == b.config
        and codebook_digest(a.fingerprint) == codebook_digest(b.fingerprint)
    )
