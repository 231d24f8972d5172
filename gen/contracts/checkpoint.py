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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gen.contracts.condition import Condition
from gen.contracts.frontend import TokenFrontend
from gen.contracts.modality import Binding, Modality
from gen.core.errors import GenError, bad_type, hint, shown, unknown
from gen.core.paths import exists, expand_user
from gen.core.registry import registry
from gen.core.token_space import TokenSpace
from gen.core.tool_calls import ToolFormat
from gen.models.load.fields import check_fields, require_regular
from gen.models.load.generation_config import GENERATION
from gen.models.load.gguf import ENDING as GGUF
from gen.models.load.gguf import GgufFile
from gen.models.load.hub import (
    HUB,
    HUB_KEYWORDS,
    HubOptions,
    in_subfolder,
    require_variant,
    snapshot_of,
)
from gen.models.load.locate import built_in, known_models, packaged_file, pick_device
from gen.models.load.peft_adapters import merge, route
from gen.models.load.pooling import Pooling
from gen.models.load.quantize import Quantization, quantize
from gen.models.load.reads import ENDINGS, Reads, note_file, recording
from gen.models.load.saved import Saved, read_saved
from gen.models.load.tensor_parallel import Ranks, digest_of_files

EMBEDDED = "gen_"  # how the model types of gen's own architectures begin
MAPS = ("auto", "balanced", "balanced_low_0", "sequential")  # that accelerate makes itself
ATTENTIONS = ("sdpa", "eager", "flex_attention")  # those that take a mask of every query and key
NEED_OTHER_MASKS = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
# keywords that a family takes or not (``Checkpoint.takes``)
FROM_PRETRAINED = frozenset({"variant", "device_map", "attn_implementation"})
SPLIT = FROM_PRETRAINED | {"tp"}  # those of networks with a plan of transformers to split them
FILLED = frozenset({"variant", "device_map"})  # those of networks that gen fills itself
PLACEMENT = ("max_memory", "offload_folder", "attn_implementation", "tp")  # fields of LoadOptions
WEIGHTS = ("quantization", "adapters")  # options that change weights; gen's own models take them
# options that change forward passes; gen's own models take them
PASSES = ("sparse_prefill", "batch_invariant", "cuda_graphs")
# options that need no named model
WITHOUT_MODEL = frozenset({"batch_invariant", "cuda_graphs", "draft_model"})
OF_EVERY_FAMILY = (
    *HUB_KEYWORDS, "device_map", "trust_remote_code", *PLACEMENT, *WEIGHTS, *PASSES, "draft_model",
)  # fmt: skip
CONFIGS = ("config.json", "model_index.json", "gen.json")


class CheckpointFiles:
    """Files of a checkpoint on disk.

    Attributes:
        name: the model as the user wrote it.
        path: folder of the checkpoint, or the single file of its weights.
        commit: commit hash of a repository of the hub.
        saved: record of the saved pipeline that the model is part of; None for any other model.
        gguf: the GGUF file that is the model; None for a model in another format.
    """

    def __init__(
        self,
        name: str | Path,
        path: Path,
        commit: str | None = None,
        saved: Saved | None = None,
        gguf_file: str | None = None,
    ):
        self.name, self.path, self.commit, self.saved = str(name), path, commit, saved
        file = path / gguf_file if gguf_file else path if path.suffix == GGUF else None
        self.gguf = None if file is None else GgufFile(file, self.name)

    @classmethod
    def find(cls, name: str | Path, hub: HubOptions = HUB) -> CheckpointFiles:
        """Find the checkpoint of a zoo name, a name of ``PACKAGED``, a folder, file or hub id. A
        hub id is read from the local cache, or downloaded.

        Args:
            name: the model.
            hub: revision, variant and so on of this very model (``HubOptions.of``).

        Raises:
            NotCached: neither the local cache nor the hub has the repository or revision.
            GenError: there is no such model, or it cannot have one of the options.
        """
        text = str(name)
        own, path = built_in(text), packaged_file(text) or expand_user(name)
        if own is not None or exists(path):
            _require_no_repository(text, hub, own is not None or path.is_file())
            path = in_subfolder(own or path, text, hub.subfolder)
            return cls._in(name, path, hub)
        if (
            text.count("/") != 1
            or text.startswith((".", "/", "~"))
            or text.endswith(("/", GGUF, *ENDINGS))
        ):
            known = "the zoo; it is not a folder, a file or a hub id either"
            raise unknown("model", text, known_models(), known)
        found = snapshot_of(text, hub)
        path = in_subfolder(found.path, text, hub.subfolder)
        files = cls._in(name, path, hub, found.commit)
        variant = files.saved and files.saved.options.get("variant")
        if variant and hub.variant is None:  # its weights may not have been fetched yet
            snapshot_of(text, replace(hub, revision=found.commit, variant=variant))
        return files

    @classmethod
    def _in(
        cls, name: str | Path, path: Path, hub: HubOptions, commit: str | None = None
    ) -> CheckpointFiles:
        """Return the checkpoint of a folder or file, or of the saved pipeline in a folder."""
        require_regular(path, str(name))
        saved, gguf_file = read_saved(path), hub.gguf_file
        if saved is not None:
            path, gguf_file = saved.model, gguf_file or saved.options.get("gguf_file")
        require_variant(path, str(name), hub.variant)
        return cls(name, path, commit, saved, gguf_file)

    @property
    def folder(self) -> Path:
        if self.gguf is not None:
            return self.gguf.path.parent
        return self.path if self.path.is_dir() else self.path.parent

    @cached_property
    def config(self) -> dict[str, Any]:
        """Content of the folder's config.json, or what a GGUF file says; empty without either."""
        if self.gguf is not None:
            return self.gguf.config.to_dict()
        return {} if self.path.is_file() else self.json("config.json")

    @property
    def gguf_keywords(self) -> dict[str, Any]:
        """Keywords of ``pretrained`` and ``tokenizer_of`` for a GGUF file; none without."""
        return {} if self.gguf is None else {"gguf": self.gguf}

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", ""))

    @property
    def is_encoder_decoder(self) -> bool:
        """True for a model whose prompt is read by an encoder of its own."""
        return bool(self.config.get("is_encoder_decoder"))

    @property
    def embedded(self) -> bool:
        """True for gen's own architectures, and so for all models of the zoo."""
        return self.model_type.startswith(EMBEDDED) or built_in(str(self.name)) is not None

    def json(self, relative: str) -> dict[str, Any]:
        """Read a JSON object of the folder; empty where the file is missing. Below a generation
        config is what a GGUF file says. Raises ``GenError`` for an unreadable file."""
        path = self.folder / relative
        stated = self.gguf.generation if self.gguf and relative == GENERATION else {}
        if not path.is_file():
            return stated
        note_file(path)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise GenError(
                f"the config of model {self.name} cannot be read: {relative}: {error}"
            ) from None
        if not isinstance(found, dict):
            raise GenError(
                f"the config of model {self.name} cannot be read: {relative} holds a"
                f" {type(found).__name__}; expected an object"
            )
        check_fields(found, relative, self.name)
        return {**stated, **found}

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
                note_file(found[0])
                return found[0]
        raise GenError(f"model {self.name} has no {' and no '.join(patterns)} in {self.folder}")


def _require_no_repository(name: str, hub: HubOptions, whole: bool) -> None:
    """Raise ``GenError`` for options that need a repository, or a folder where the model is
    ``whole``: of the zoo, or a file."""
    refused = ("revision", "subfolder", "variant", "gguf_file") if whole else ("revision",)
    given = [key for key in refused if key in hub.said]
    if given:
        kind = "of the zoo or a file" if whole else "a local folder"
        raise GenError(
            f"model {name} got the {given[0]} {hub.said[given[0]]!r}, but it is {kind};"
            f" expected no {given[0]}, or the id of a repository"
        )


@dataclass(frozen=True)
class LoadOptions:
    """Options of loading a checkpoint.

    Attributes:
        device_map: placement as in accelerate, for models larger than one device.
        trust_remote_code: run code from the folder.
        hub: revision, variant and so on of the main model.
        max_memory: most memory of each device, as in accelerate; needs a ``device_map``.
        offload_folder: folder of the weights that the device map leaves on disk.
        attn_implementation: implementation of attention in transformers, one of ``ATTENTIONS``;
            None is the choice of transformers.
        quantization: weight-only quantisation.
        adapters: folder of a LoRA adapter, which is merged into the weights, or folders by name,
            of which every row takes its own.
        tp: tensor parallelism over the processes of a launcher: ``auto``, true or their number.
    """

    device: torch.device
    dtype: torch.dtype
    device_map: str | Mapping[str, Any] | None = None
    trust_remote_code: bool = False
    hub: HubOptions = HUB
    max_memory: Mapping[int | str, int | str] | None = None
    offload_folder: str | Path | None = None
    attn_implementation: str | None = None
    quantization: Quantization | None = None
    adapters: str | Mapping[str, str] | None = None
    tp: Any = None

    def __post_init__(self) -> None:
        """Raise ``GenError`` for a device map that names a missing device, and for values that do
        not fit each other."""
        if isinstance(self.device_map, Mapping):
            for position in self.device_map.values():
                if position != "disk":
                    pick_device(f"cuda:{position}" if isinstance(position, int) else position)
        elif self.device_map is not None and self.device_map not in MAPS:
            raise unknown("device_map", self.device_map, MAPS)
        if self.max_memory is not None:
            _check_memory(self.max_memory, self.device_map)
        if self.offload_folder is not None:
            if not isinstance(self.offload_folder, (str, Path)) or not str(self.offload_folder):
                raise bad_type("offload_folder", self.offload_folder, "a folder")
            if self.device_map is None:
                raise GenError(
                    "offload_folder is given without a device_map; expected both, since the device"
                    " map says which weights are on disk"
                )
        attention = self.attn_implementation
        if attention in NEED_OTHER_MASKS:
            raise GenError(
                f"attn_implementation is {attention!r}, which takes no masks of every query and"
                " key, and samplers need such masks; expected one of"
                f" {', '.join(ATTENTIONS)}"
            )
        if attention is not None and attention not in ATTENTIONS:
            raise unknown("attn_implementation", attention, ATTENTIONS)
        for key in ("device_map", "quantization", "adapters"):
            if self.tp is not None and getattr(self, key) is not None:
                raise GenError(f"tp and {key} are given; expected one of them")

    def beside(self, name: str) -> LoadOptions:
        """Return the options of a model beside the main one, such as a draft model, whose weights
        on disk get a folder of their own. Every process has the whole of it."""
        folder = self.offload_folder
        folder = None if folder is None else Path(folder) / name.strip("/").replace("/", "--")
        hub = self.hub.of(name, main=False)
        return replace(self, hub=hub, offload_folder=folder, tp=None)

    @property
    def ranks(self) -> Ranks | None:
        """Processes that hold the model together; None where each has one of its own."""
        return None if self.tp is None else Ranks.of(self.tp)

    @property
    def fill_keywords(self) -> dict[str, Any]:
        """Keywords of ``fill``: device, dtype and placement."""
        return {
            "device": self.device,
            "dtype": self.dtype,
            "device_map": self.device_map,
            "max_memory": self.max_memory,
            "offload_folder": self.offload_folder,
        }

    @property
    def pretrained_keywords(self) -> dict[str, Any]:
        """Keywords of ``pretrained`` for the model of a family: device, dtype, placement and what
        else was given of ``FROM_PRETRAINED``."""
        given = {
            "variant": self.hub.variant,
            "max_memory": None if self.max_memory is None else dict(self.max_memory),
            "offload_folder": self.offload_folder,
            "attn_implementation": self.attn_implementation,
            "ranks": self.ranks,
        }
        return {
            "device": self.device,
            "dtype": self.dtype,
            "device_map": self.device_map,
            **{k: v for k, v in given.items() if v is not None},
        }

    @property
    def changes_weights(self) -> bool:
        """True where the weights are not used as they are stored."""
        return self.quantization is not None or self.adapters is not None

    def change(self, network: nn.Module, name: str, seen: Sequence[Any]) -> None:
        """Put the adapters on a loaded network, then quantise it.

        Args:
            network: the network.
            name: name of the model in messages.
            seen: adapters of the network, which know its output heads.

        Raises:
            GenError: the adapter does not fit, or the weights cannot be quantised.
        """
        if isinstance(self.adapters, Mapping):
            route(network, self.adapters, name, self.hub)
        elif self.adapters is not None:
            merge(network, self.adapters, name, self.hub)
        if self.quantization is not None:
            heads = [head for adapter in seen for head in adapter.output_heads]
            quantize(network, self.quantization, name, heads)


def _check_memory(memory: Any, device_map: Any) -> None:
    """Raise ``GenError`` for a ``max_memory`` that accelerate would not take or not read."""
    if not isinstance(memory, Mapping) or not all(
        isinstance(k, (int, str)) and isinstance(v, (int, str)) for k, v in memory.items()
    ):
        raise bad_type("max_memory", memory, "a mapping such as {0: '20GiB', 'cpu': '60GiB'}")
    if not isinstance(device_map, str):
        raise GenError(
            f"max_memory is given with {'a' if device_map else 'no'} device_map that lists modules;"
            if device_map
            else "max_memory is given without a device_map;"
            f" expected a device_map of {', '.join(MAPS)}"
        )


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
        takes: those of ``FROM_PRETRAINED`` that loading honours.
        runs_from_disk: whether a device map may leave all modules on disk; False where the network
            reads weights beside its modules.
        default_samplers: sampler of a user who names none, by ``model_key``, where it is another
            one than the modality's. Drafts cost time where few are accepted, and how many are is
            known of models alone that were measured.
        modality: modality whose prompts and tokens the checkpoint decides about.
        frontend: frontend of its tokens.
        binding: token space and prompts.
        sampling: default sampling parameters of the family. Where they differ between its
            checkpoints, ``sampling_of`` reads them from the files.
        needs_prompt: whether a call without a prompt is refused.
        settled: options whose values were taken from the names of files or folders.
        reads: what loading it read.
        ranks: processes that hold its network together; None where it is whole in this one.
        tool_format: format in which answers call functions; None where they call none.
        pooling: how the model embeds texts; None where it is no embedding model.
    """

    modalities: ClassVar[tuple[str, ...]]
    protocols: ClassVar[tuple[str, ...]]
    kind: ClassVar[str] = "codes"
    tested: ClassVar[str]
    catch_all: ClassVar[bool] = False
    accepts: ClassVar[frozenset[str]] = frozenset({"text"})
    most: ClassVar[Mapping[str, int]] = {}
    takes: ClassVar[frozenset[str]] = frozenset()
    runs_from_disk: ClassVar[bool] = True
    default_samplers: ClassVar[Mapping[str, str]] = {"causal": "autoregressive"}

    modality: Modality
    frontend: TokenFrontend
    binding: Binding
    sampling: Mapping[str, Any] = {}
    settled: Mapping[str, Any] = {}
    needs_prompt: bool = True
    reads: Reads
    ranks: Ranks | None = None
    tool_format: ToolFormat | None = None
    pooling: Pooling | None = None

    @classmethod
    def sampling_of(cls, files: CheckpointFiles, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the default sampling parameters of a checkpoint of these files; no weights are
        loaded. ``options``: options of the family that the user gave."""
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

        A family that takes more than text lists the parts in ``accepts`` and overrides this. Raises
        ``GenError`` for a part that is not taken, or does not parse.
        """
        condition.require(self.accepts, "the model", self.most)
        return self.condition(condition.text or "")

    def raw_ids(self, text: str) -> list[int] | None:
        """See ``Modality.raw_ids``."""
        return None

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


def published(name: str | Path, hub: HubOptions = HUB) -> CheckpointFiles | None:
    """Return the files of a published model, and None for gen's own architectures. ``hub``: as of
    ``CheckpointFiles.find``. Raises ``GenError`` if there is no such model."""
    files = CheckpointFiles.find(name, hub)
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
    stated = files.model_type or files.json("model_index.json").get("_class_name")
    kind = stated or "folder without a type of model"
    if len(found) > 1:
        raise GenError(
            f"model {files.name} could be one of {', '.join(found)}; expected files of one family"
        )
    if known:
        serves = "; ".join(
            f"{name} serves {' and '.join(table[name].modalities)}" for name in known
        )
        raise GenError(
            f"model {files.name} is a {shown(kind)}: {serves}; requested was {modality!r}"
        )
    if not files.has(*CONFIGS) and not files.path.is_file():
        raise GenError(
            f"model folder {files.path} has no config.json, no model_index.json and no weights that"
            " a family knows by their names"
        )
    serving = [name for name, cls in table.items() if modality in cls.modalities]
    kind = shown(kind) + (", an encoder-decoder model" if files.is_encoder_decoder else "")
    raise GenError(
        f"model {files.name} is a {kind}, which no family recognises; the modality {modality!r}"
        f" has models of its own (gen ls models) and the families {', '.join(serving)}"
    )


def load_checkpoint(
    files: CheckpointFiles, modality: str, how: LoadOptions, options: Mapping[str, Any]
) -> Checkpoint:
    """Load a checkpoint. Raises ``GenError`` for an option that its family does not have."""
    cls = family_of(files, modality)
    _require_taken(cls, files, how)
    for key in options:
        if not options_of(cls):
            raise GenError(
                f"model {files.name} got the option {key!r}; expected none, its family has no"
                f" options.{hint(key, OF_EVERY_FAMILY)}"
            )
        if key not in options_of(cls):
            known = [*options_of(cls), *OF_EVERY_FAMILY]
            raise unknown(f"option of model {files.name}:", key, known)
    with recording() as reads:
        checkpoint = cls(files, modality, how, **options)
    checkpoint.reads, checkpoint.ranks = reads, how.ranks
    if checkpoint.ranks is not None:
        checkpoint.ranks.agree("the files of the model", digest_of_files(reads.files))
    if checkpoint.ranks is not None or how.changes_weights:
        adapters = [checkpoint.adapter(protocol) for protocol in checkpoint.protocols]
        networks = {id(a.model): a.model for a in adapters}
        if len(networks) != 1:
            raise GenError(
                f"model {files.name} has {len(networks)} networks; expected one for tp,"
                " quantization and adapters"
            )
        if checkpoint.ranks is not None:
            checkpoint.ranks.watch(adapters[0].model)
        how.change(adapters[0].model, files.name, adapters)
        for adapter in adapters:
            adapter.network_changed()
    return checkpoint


def _require_taken(cls: type[Checkpoint], files: CheckpointFiles, how: LoadOptions) -> None:
    """Raise ``GenError`` for a keyword of ``from_pretrained`` that the family does not honour."""
    given = {
        "variant": how.hub.variant,
        "device_map": how.device_map,
        "attn_implementation": how.attn_implementation,
        "tp": how.tp,
    }
    reasons = {
        "variant": "its weights have names of their own",
        "device_map": "models of this family run on one device",
        "attn_implementation": "its attention is gen's own, which has one implementation",
        "tp": "nothing says how to split its network",
    }
    for key, value in given.items():
        if value is not None and key not in cls.takes:
            table: dict[str, type[Checkpoint]] = registry.table("checkpoint")
            taking = sorted(name for name, other in table.items() if key in other.takes)
            own = "" if key in ("variant", "tp") else ", and the models that come with gen"
            raise GenError(
                f"model {files.name} got the {key} {value!r}; expected none: {reasons[key]}."
                f" Families that take it: {', '.join(taking)}{own}"
            )
    positions = set(how.device_map.values()) if isinstance(how.device_map, Mapping) else set()
    if positions == {"disk"} and not cls.runs_from_disk:
        raise GenError(
            f"device_map leaves all modules of model {files.name} on disk, and its network reads"
            " weights beside its modules; expected at least the embedding of the tokens in memory"
        )


def options_of(cls: type[Checkpoint]) -> dict[str, Any]:
    """Return the options of a family and their defaults."""
    return {
        k: p.default
        for k, p in inspect.signature(cls.__init__).parameters.items()
        if p.kind is p.KEYWORD_ONLY
    }
