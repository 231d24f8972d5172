"""Models of a modality: found by name, loaded when first needed, bound to their frontends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch

from gen.config.model_options import adapter_folders
from gen.constraints.builder import ConstraintBuilder
from gen.contracts.checkpoint import (
    OF_EVERY_FAMILY,
    PASSES,
    PLACEMENT,
    WEIGHTS,
    WITHOUT_MODEL,
    Checkpoint,
    CheckpointFiles,
    LoadOptions,
    family_of,
    load_checkpoint,
    options_of,
)
from gen.contracts.defaults import Defaults, own_sampling
from gen.contracts.draft_model import DraftModel
from gen.contracts.frontend import TokenFrontend, Vocabulary, codebook_digest
from gen.contracts.modality import Binding, Modality
from gen.contracts.modality_of import require_modality
from gen.contracts.protocol import model_key, protocols_of
from gen.core.errors import GenError, bad_value, hint
from gen.core.registry import registry
from gen.core.resolve import SamplerSpec, protocol_of, resolve_sampler, takes_kinds
from gen.modalities.own_captions import modality_of_model
from gen.models.adapters.batch_invariant import Product
from gen.models.adapters.captured import Captured
from gen.models.load.hub import HUB_KEYWORDS, HubOptions
from gen.models.load.libraries import LOADING, transformers
from gen.models.load.locate import (
    AUTO,
    DTYPES,
    ZOO,
    dtype_name,
    locate,
    model_kind,
    pick_device,
    pick_dtype,
    read_config,
    readable,
    stored_dtype,
)
from gen.models.load.networks import config_field
from gen.models.load.quantize import Quantization
from gen.models.load.saved import Saved
from gen.models.load.tensor_parallel import Ranks, own_device
from gen.models.zoo import load_lm
from gen.pipeline.arguments import check_loading
from gen.pipeline.passes import one_of

LOAD_KEYWORDS = ("model", "device", "dtype", "torch_dtype", "compile", *OF_EVERY_FAMILY)


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with paths as texts."""
    return {k: str(v) if isinstance(v, Path) else v for k, v in options.items()}


class ModalityModels:
    """A modality, its models and its frontends.

    Attributes:
        modality: the modality, or the published checkpoint's view of it.
        model: name of the model as the user wrote it; None for the modality's own models.
        model_options: options of the model that were given, as plain data, without the token.
            Of a model of the hub, ``revision`` is the commit that was loaded.
        compile: whether forward passes go through ``torch.compile``.
        sparse_prefill: how prompts skip layers of the model; None where they do not.
        batch_invariant: whether the bits of forward passes are kept from depending on what runs
            beside a token.
        cuda_graphs: whether forward passes are captured as CUDA graphs.
        negative_condition: condition that guidance leads away from; None for the model's
            unconditional prompt.
        draft_model: draft model of samplers that name none; None for the modality's own.
    """

    def __init__(
        self,
        modality: str | Modality,
        model: str | Path | None = None,
        device: str | torch.device = AUTO,
        dtype: str | torch.dtype | None = None,
        device_map: str | Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
        compile: bool = False,
        quantization: Any = None,
        adapters: str | Path | Mapping[str, str | Path] | None = None,
        sparse_prefill: Any = None,
        batch_invariant: bool = False,
        cuda_graphs: bool = False,
        **options: Any,
    ):
        flags = dict(compile=compile, trust_remote_code=trust_remote_code)
        flags |= dict(batch_invariant=batch_invariant, cuda_graphs=cuda_graphs)
        plain = dict(device=device, dtype=dtype, device_map=device_map, adapters=adapters)
        check_loading(modality, model, flags, plain | options | {"sparse_prefill": sparse_prefill})
        self._asked = modality
        self.modality: Modality = (
            registry.get("modality", modality)() if isinstance(modality, str) else modality
        )
        self.model = None if model is None else str(model)
        picked = own_device(pick_device(device), options.get("tp"))
        self._files: dict[str, CheckpointFiles] = {}
        hub = HubOptions.among(options)
        if saved := self._saved(hub):
            options = {**saved.options, **options}
            dtype = saved.dtype if dtype is None else dtype
            hub = HubOptions.among(options)
        options = {k: v for k, v in options.items() if k not in HUB_KEYWORDS}
        draft = options.pop("draft_model", None)
        self.draft_model = None if draft is None else DraftModel.find(draft, hub)
        placement = {k: options.pop(k, None) for k in PLACEMENT}
        self._load_options = LoadOptions(
            picked,
            torch.float32,
            device_map,
            trust_remote_code,
            hub,
            **placement,
            quantization=Quantization.of(quantization),
            adapters=adapter_folders(adapters),
        )
        self._choose_dtype(dtype or "float32")
        self.compile, self.batch_invariant = compile, batch_invariant
        self.cuda_graphs = cuda_graphs
        ways = (sparse_prefill, compile, batch_invariant, cuda_graphs)
        self.sparse_prefill = one_of(picked, placement["tp"], *ways)
        self.negative_condition: Any = None
        self._options = options
        loading = self._loading() | placement
        self.model_options = _plain({k: v for k, v in loading.items() if v} | hub.said | options)
        # what samplers learned of each model and want to know in the next call
        self._learned: dict[str, dict[Any, Any]] = {}
        self.constraints = ConstraintBuilder()
        self._forget()
        self._attach()

    def _loading(self) -> dict[str, Any]:
        """Return the options of loading that a model gets besides those of its placement."""
        how = self._load_options
        return {
            "device_map": how.device_map,
            "trust_remote_code": how.trust_remote_code,
            "quantization": how.quantization and how.quantization.plain,
            "adapters": how.adapters,
            "draft_model": self.draft_model and self.draft_model.name,
            "sparse_prefill": self.sparse_prefill and self.sparse_prefill.plain,
            "batch_invariant": self.batch_invariant,
            "cuda_graphs": self.cuda_graphs,
        }

    def _choose_dtype(self, dtype: str | torch.dtype) -> None:
        """Set the dtype of models by its name, or ``auto``."""
        chosen = self._dtype_of(dtype, self._load_options.device)
        self._load_options = replace(self._load_options, dtype=chosen)

    def _saved(self, hub: HubOptions) -> Saved | None:
        """Return the record of the saved pipeline that the model is; None for any other model.

        Raises:
            GenError: the model cannot be found, or a saved model of gen's own architectures is one
                of another modality.
        """
        if self.model is None:
            return None
        self._files[self.model] = CheckpointFiles.find(self.model, hub.of(self.model))
        files, asked = self._files[self.model], self.modality_name()
        if files.saved and files.embedded and files.saved.modality != asked:
            raise GenError(
                f"{self.model} is a saved pipeline of modality {files.saved.modality!r}; expected"
                f" one of {asked!r}"
            )
        return files.saved

    def _dtype_of(self, dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
        """Return the dtype of a name; ``auto`` is the one that a published model is stored in.

        The files of gen's own models hold float16 to be small; they were trained in float32.
        """
        if dtype != AUTO:
            return pick_dtype(dtype)
        if self.model is None:
            return torch.float32
        files = self.files(self.model)
        return torch.float32 if files.embedded else stored_dtype(files.config, device)

    def files(self, name: str) -> CheckpointFiles:
        """Return the files of a model, found once: a branch that moves later changes nothing."""
        if name not in self._files:
            hub = self._load_options.hub.of(name, name == self.model)
            self._files[name] = CheckpointFiles.find(name, hub)
        return self._files[name]

    @property
    def commits(self) -> dict[str, str]:
        """Commit hashes of the models of the hub that were found by now, by hub id."""
        return {n: f.commit for n, f in self._files.items() if f.commit is not None}

    def _local(self, name: str) -> str:
        """Return the name of a model, or the folder of one that lies in a repository, a subfolder
        or a saved pipeline."""
        inside = name == self.model and self._load_options.hub.subfolder
        found = self._files.get(name)
        if name in self.commits or inside or (found and found.saved):
            return str(self.files(name).path)
        return name

    def _forget(self) -> None:
        """Drop all models and frontends that were loaded."""
        self._checkpoints: dict[str, Checkpoint | None] = {}
        self._frontends: dict[str, TokenFrontend] = {}
        self._loaded: dict[str, tuple[Any, Binding, TokenFrontend]] = {}
        self._vocabularies: dict[str, Vocabulary | None] = {}
        self._products: dict[str, Product] = {}  # of batch-invariant models
        self._captured: dict[str, Captured] = {}

    def _attach(self) -> None:
        """Load a published model, and check the name of another one.

        Raises:
            GenError: the model is unknown, belongs to another modality or takes no options.
        """
        checkpoint = None if self.model is None else self._published(self.model)
        if self.model in self.commits:
            self.model_options["revision"] = self._pinned().revision
        others = [k for k in self.model_options if k not in self._allowed()]
        if checkpoint is not None:
            self.modality = checkpoint.modality
        elif others:
            raise GenError(
                f"model {self.model or 'of the zoo'} got the options {', '.join(others)}; expected"
                f" none: they are for published checkpoints.{hint(others[0], LOAD_KEYWORDS)}"
            )
        elif self.model is not None:
            config = read_config(self._local(self.model))  # an unknown name fails here
            files = self.files(self.model)
            require_modality(self.modality, self.model, files)
            self.modality = modality_of_model(self.modality, self.model, config, files.folder)
        if self.draft_model is not None:
            self._check_draft(self.draft_model)

    def _allowed(self) -> set[str]:
        """Return the options that a model of gen's own architectures may get: those of its
        repository and of ``from_pretrained``, and without a model those of a draft model's
        repository."""
        refused = {"variant", "gguf_file"}
        if self.model is None:
            refused |= {"subfolder"}
            refused |= {"revision"} if isinstance(self._load_options.hub.revision, str) else set()
        changing = {*WEIGHTS, *PASSES, *PLACEMENT, "device_map"} - {"tp"}
        allowed = {*HUB_KEYWORDS, *WITHOUT_MODEL} - refused
        return allowed | set(changing if self.model is not None else ())

    def _check_draft(self, draft: DraftModel) -> None:
        """Raise ``GenError`` for a draft model of another modality or of other tokens."""
        if draft.kind is None and self.files(draft.name).embedded:
            require_modality(self.modality, draft.name, self.files(draft.name), "draft_model")
        size = None if self.model is None else self.files(self.model).config.get("vocab_size")
        if None not in (size, draft.vocab_size) and size != draft.vocab_size:
            said = f"draft_model {draft.name} has {draft.vocab_size} token ids"
            raise GenError(f"{said}; expected {size}, those of model {self.model}")

    @property
    def device(self) -> torch.device:
        """Device of models and frontends."""
        return self._load_options.device

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of models."""
        return self._load_options.dtype

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The published model; None for gen's own architectures."""
        return None if self.model is None else self._published(self.model)

    @property
    def ranks(self) -> Ranks | None:
        """Processes that hold the model together; None where it is whole in this one."""
        return None if self.checkpoint is None else self.checkpoint.ranks

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Names of the adapters that prompts may choose; none where one is merged."""
        adapters = self._load_options.adapters
        return tuple(adapters) if isinstance(adapters, Mapping) else ()

    def modality_name(self) -> str:
        """Return the name by which the modality is loaded again."""
        return self._asked if isinstance(self._asked, str) else self._asked.name

    def family_options(self) -> dict[str, Any]:
        """Return the options of the model's family that were given."""
        return dict(self._options)

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{type(self).__name__}({self.modality.name!r}, model={self.model!r},"
            f" device={str(self.device)!r}, dtype={dtype!r})"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return what a worker process needs to load the same models again, without weights."""
        state = vars(self).copy()
        for key in ("modality", "_checkpoints", "_frontends", "_loaded", "_products", "_captured"):
            del state[key]
        state["_load_options"] = replace(self._load_options, hub=self._pinned())
        state["_files"] = {}
        return state

    def _pinned(self) -> HubOptions:
        """Return the hub options with the commits of all models that were found by now."""
        return self._load_options.hub.pinned(self.commits, self.model)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        asked = self._asked
        self.modality = registry.get("modality", asked)() if isinstance(asked, str) else asked
        self._forget()
        self._attach()

    def __copy__(self) -> Self:
        """Return a view that shares everything that is loaded."""
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        return other

    def to(
        self,
        *targets: str | torch.device | torch.dtype,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
    ) -> Self:
        """Move the pipeline to a device or another dtype; return it.

        Its models are loaded again where they are next needed, from their files.

        Args:
            targets: device, dtype or both, in any order.
            device: the device, by name.
            dtype: the dtype, by name.

        Raises:
            GenError: an unknown device or dtype, or a model that lies on several devices.
        """
        for target in targets:
            spelled = target if isinstance(target, str) else None
            is_dtype = isinstance(target, torch.dtype) or dtype_name(spelled or "") in DTYPES
            if (dtype if is_dtype else device) is not None:
                raise bad_value("to", target, "one device and one dtype")
            device, dtype = (device, target) if is_dtype else (target, dtype)
        for key in ("device_map", "tp"):
            if getattr(self._load_options, key) is not None:
                raise GenError(f"{key} has placed the model; expected a pipeline on one device")
        to_device = self.device if device is None else pick_device(device)
        to_dtype = self.dtype if dtype is None else self._dtype_of(dtype, to_device)
        if (to_device, to_dtype) != (self.device, self.dtype):
            with LOADING:
                self._load_options = replace(self._load_options, device=to_device, dtype=to_dtype)
                self._forget()
                self._attach()
        return self

    @property
    def defaults(self) -> Defaults:
        """Sampler and parameters of a request that names none."""
        served = ((), None) if self.model is None else self.serves(self.model)
        usual = self.modality.default_sampling
        if self.model is not None and self.files(self.model).embedded:
            usual = own_sampling(usual, self.files(self.model).config)
        found = Defaults.of(self.modality, usual, *served)
        return replace(found, draft=self.draft_model)

    @property
    def config(self) -> dict[str, Any]:
        """Facts about the pipeline as plain data; no weights are loaded for it."""
        sampler, sampling = self.defaults.complete(None, {})
        model = self.model_name(sampler)
        protocols, kind = self.serves(model)
        return {
            "modality": self.modality.name,
            "model": model,
            "protocols": list(protocols),
            "kind": kind,
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "compile": self.compile,
            "model_options": dict(self.model_options),
            "sampler": sampler,
            "sampling": sampling,
        }

    @property
    def components(self) -> dict[str, Any]:
        """Network and frontend of the default sampler's model, and all others loaded by now."""
        name = self.model_name(self.defaults.complete_sampler(None))
        model, _, frontend = self.bound(name)
        others = {n: found[0] for n, found in self._loaded.items() if n != name}
        return {"model": model, "frontend": frontend, **others}

    def _published(self, name: str) -> Checkpoint | None:
        """Return the published checkpoint of that name; None for gen's own architectures.

        A draft model gets those options that its family has.
        """
        if name in self._checkpoints:
            return self._checkpoints[name]
        with LOADING:
            if name not in self._checkpoints:
                files, options, how = self.files(name), self._options, self._load_options
                if name != self.model:  # an adapter belongs to the model that it was trained for
                    how = replace(how, adapters=None)
                if not files.embedded and name != self.model:
                    family = family_of(files, self.modality.name)
                    options = {k: v for k, v in options.items() if k in options_of(family)}
                    how = how.beside(name)
                self._checkpoints[name] = (
                    None
                    if files.embedded
                    else load_checkpoint(files, self.modality.name, how, options)
                )
            return self._checkpoints[name]

    def serves(self, name: str) -> tuple[tuple[str, ...], str]:
        """Return the protocols and the kind of a model."""
        checkpoint = self._published(name)
        if checkpoint is not None:
            return checkpoint.protocols, checkpoint.kind
        return protocols_of(self._local(name)), model_kind(self._local(name))

    def frontend(self, kind: str = "codes", name: str | None = None) -> TokenFrontend:
        """Return a frontend, loaded once.

        Args:
            kind: ``codes`` or ``latents``.
            name: name of an embedded frontend; None for the modality's own.
        """
        usual = self.modality.frontends[kind]
        name = name or usual
        with LOADING:
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
        if not self.model:
            return None
        beside = Path(self._local(self.model)).expanduser().resolve().parent / name
        return beside if beside.is_dir() else None

    def model_name(self, sampler: SamplerSpec, part: str = "") -> str:
        """Return the name of the model that serves a sampler or preset.

        Args:
            sampler: the sampler.
            part: part of the conditions that decides which of the modality's models serves them.

        Raises:
            GenError: the model is of another protocol or kind, or the modality has none.
        """
        protocol, kinds = protocol_of(sampler), takes_kinds(sampler)
        if self.model is None:
            kind = self.defaults.kind(sampler, part)
            return self._default(model_key(protocol, kind, part=part), part)
        protocols, kind = self.serves(self.model)
        if protocol not in protocols or kind not in kinds:
            raise GenError(
                f"model {self.model} is a {' and '.join(protocols)} one of {kind}, but the"
                f" sampler needs a {protocol} one of {' or '.join(kinds)}; samplers that suit the"
                f" model: {', '.join(_suitable(protocols, kind))}"
            )
        return self.model

    def draft_names(self, sampler: SamplerSpec, part: str = "") -> list[str]:
        """Return the names of a sampler's draft models: its own, or the modality's.

        A sampler that names none has the one that the pipeline was loaded with, or the modality's,
        which is taken from beside the model, if it lies there. ``part``: as of ``model_name``.
        """
        resolved = resolve_sampler(sampler)[0]
        other, found = resolved.draft_protocol, []
        own = None if self.draft_model is None else self.draft_model.model
        for name in (own if name is None else name for name in resolved.draft_names):
            if name is None:
                kind = self.defaults.kind(sampler, part)
                key = model_key(other or resolved.protocol, kind, not other, part)
                usual = self._default(key, part)
                found.append(str(self._beside(usual) or usual))
                continue
            if other and other not in self.serves(name)[0]:
                raise GenError(
                    f"draft model {name} is a {' and '.join(self.serves(name)[0])} one; expected"
                    f" a {other} one"
                )
            found.append(name)
        return found

    def _default(self, key: str, part: str = "") -> str:
        """Return the modality's model of a key."""
        if key not in self.modality.models:
            has = [k for k in self.modality.models if not part or part in k.split("-")] or ["none"]
            given = f" for conditions with {part}" if part else ""
            raise GenError(
                f"modality {self.modality.name!r} has no {key} model; it has"
                f" {', '.join(has)}{given}"
            )
        return self.modality.models[key]

    def bound(self, name: str) -> tuple[Any, Binding, TokenFrontend]:
        """Return a model, its binding to the modality, and the frontend it was trained with."""
        found = self._loaded.get(name)
        if found is None:
            with LOADING:
                if name not in self._loaded:
                    self._loaded[name] = self._load(name)
                found = self._loaded[name]
        model, binding, frontend = found
        if self.negative_condition is not None:
            binding = replace(binding, unconditional=binding.prompt(self.negative_condition))
        return model, binding, frontend

    def _load(self, name: str) -> tuple[Any, Binding, TokenFrontend]:
        """Load a model by name."""
        checkpoint = self._published(name)
        if checkpoint is not None:
            return checkpoint, checkpoint.binding, checkpoint.frontend
        where = self._local(name)
        is_main = name == self.model  # a draft model beside it is small, and stays whole
        more = self._load_options.pretrained_keywords if is_main else {}
        model = load_lm(where, **{"device": self.device, "dtype": self.dtype, **more})
        if is_main and self._load_options.changes_weights:
            kinds = [registry.get("protocol", x).adapters for x in protocols_of(where)]
            seen = [adapters[model_kind(where)](model) for adapters in kinds]
            self._load_options.change(model, name, seen)
        # a foreign config class: the key is there where the recipe wrote it
        frontend = self.frontend(model_kind(where), config_field(model.config, "frontend"))
        return model, self.modality.bind(model.config, frontend, name), frontend

    def binding(self, name: str) -> tuple[Binding, TokenFrontend]:
        """Return the binding and the frontend of a model, for reading tokens.

        Of an embedded model nothing but its config is loaded.
        """
        if name in self._loaded or self._published(name) is not None:
            return self.bound(name)[1:]
        where = self._local(name)
        with readable("model", name):
            # the registry has imported the embedded architectures
            config = transformers().AutoConfig.from_pretrained(locate(where))
        frontend = self.frontend(model_kind(where), config_field(config, "frontend"))
        return self.modality.bind(config, frontend, name), frontend


def _suitable(protocols: tuple[str, ...], kind: str) -> list[str]:
    """Return names of samplers and presets for a model, at most eight, plain samplers first."""
    names = [*registry.table("sampler"), *registry.table("preset")]
    found = [n for n in names if protocol_of(n) in protocols and kind in takes_kinds(n)]
    return [*found[:8], "..."] if len(found) > 8 else found


def same_frontend(a: TokenFrontend, b: TokenFrontend) -> bool:
    """Return True if two frontends give tokens the same meaning."""
    return a is b or (
        type(a) is type(b)
        and a.config == b.config
        and codebook_digest(a.fingerprint) == codebook_digest(b.fingerprint)
    )
