"""The modality contract: the glue between a prompt, a model, a frontend and files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from gen.contracts.frontend import TokenFrontend
from gen.core.errors import GenError
from gen.core.token_space import TokenSpace

if TYPE_CHECKING:
    from gen.bench.oracle import Board


@dataclass(frozen=True)
class Verdict:
    """What a checker says of one medium. ``valid``: it parses as something of this modality's
    language at all."""

    passed: bool
    valid: bool
    detail: str = ""


@dataclass(frozen=True)
class Binding:
    """A modality with a model of its own: the space it generates in, and how conditions become its
    prompt."""

    space: TokenSpace
    prompt: Any  # Callable[[condition], list[int]]
    # list[int], or Callable[[condition], list[int]] where it goes with the condition's prompt
    unconditional: Any

    def without(self, condition: Any) -> list[int]:
        """The prompt that guidance compares a condition's with."""
        return self.unconditional(condition) if callable(self.unconditional) else self.unconditional


def model_key(protocol: str, kind: str, draft: bool = False) -> str:
    """What a modality calls a model: ``causal``, ``masked``, ``causal-latents``, ``causal-draft``
    ..."""
    return "-".join(
        [protocol, *(["latents"] if kind == "latents" else []), *(["draft"] if draft else [])]
    )


def kind_of(sampler: Any, modality: Any) -> str:
    """What a sampler decodes where no model is named: the first of its kinds that the modality has
    a model for."""
    models = getattr(modality, "models", {})
    return next(
        (k for k in sampler.kinds if model_key(sampler.protocol, k) in models), sampler.kinds[0]
    )


def suggested_sampling(modality: Any, kind: str) -> dict[str, Any]:
    """The modality's default law, without what does not apply to latents."""
    sampling = dict(getattr(modality, "default_sampling", {}))
    return (
        sampling
        if kind == "codes"
        else {k: v for k, v in sampling.items() if k in ("temperature", "guidance_scale")}
    )


class Modality(ABC):
    """See the module. ``models``: zoo name by what it is (``model_key``). ``frontends``: zoo name
    by kind. ``default_sampling``: what a user gets who says nothing, as far as it applies to the
    kind."""

    name: ClassVar[str]
    media_kind: ClassVar[str]  # "image" | "audio" | "video" | "data"
    extension: ClassVar[str]
    models: ClassVar[dict[str, str]]
    frontends: ClassVar[dict[str, str]]
    default_sampling: ClassVar[dict[str, Any]]

    @abstractmethod
    def condition(self, prompt: str) -> Any:
        """The typed condition a prompt states; ``str()`` of it is the canonical prompt. Raises
        ``GenError``."""

    def ground(self, condition: Any, seed: int) -> Any:
        """A condition with what it leaves open and a model must be told, decided by an item's
        seed."""
        return condition

    @abstractmethod
    def frontend(self, kind: str, device, dtype, folder: Path | None = None) -> TokenFrontend:
        """The frontend of ``codes`` or ``latents`` in ``folder``, by default the embedded one."""

    @abstractmethod
    def bind(self, config: Any, frontend: TokenFrontend, model_name: str) -> Binding:
        """Raises ``GenError`` if a model with this config cannot serve the modality."""

    @abstractmethod
    def to_codes(self, tokens: Tensor, space: TokenSpace) -> Tensor:
        """Tokens [B, T] -> codes [B, Q, *grid]; latents [B, T, C] -> [B, C, *grid]."""

    @abstractmethod
    def save(self, media: Any, path: Path, info: dict[str, Any]) -> None: ...

    kept: ClassVar[str] = ""  # the extension of what ``keep`` writes, if it is another

    def keep(self, media: Any, path: Path) -> None:
        """Saves what a job starts from, so that it can be read again as it was."""
        self.save(media, path, {})

    also: ClassVar[
        tuple[str, ...]
    ] = ()  # the extensions of further files that a job writes of every medium

    def save_also(self, media: Any, path: Path, info: dict[str, Any]) -> None:
        """Writes one of the further files; the path's extension says which."""
        raise NotImplementedError(
            f"modality {self.name!r} names files {self.also} and does not write them"
        )

    @abstractmethod
    def load(self, path: Path) -> Any: ...

    @abstractmethod
    def check(self, media: Any, prompt: str) -> Verdict:
        """Whether the medium fulfils the prompt, from the medium alone."""

    def prefix(self, media: Any, frontend: TokenFrontend, space: TokenSpace) -> Tensor:
        """The first tokens [k] of something that begins with a medium (or the file at a path).
        Raises ``GenError``."""
        raise GenError(f"modality {self.name!r} cannot be continued")

    # masked models decide how long a row is before they decide what it holds; else its end is an id
    # like any other
    length_first: ClassVar[bool] = True

    def is_path(self, media: Any) -> bool:
        """Whether what came names a file; where media are strings themselves, not every string
        does."""
        return isinstance(media, (str, Path))

    def trim(self, media: Any) -> Any:
        """A medium without the empty end that its fixed length leaves it. More at the end never
        gives less at the front."""
        return media

    def complete(self, media: Any, condition: Any) -> Any:
        """A medium with what of its condition belongs to it."""
        return media

    def lasting(self, frames: int, frontend: TokenFrontend, space: TokenSpace) -> TokenSpace:
        """The space of media of so many frames. Raises ``GenError``."""
        raise GenError(f"media of modality {self.name!r} have one length; frames is {frames}")

    def oracle_bench(self, prompts: int, repeats: int, seed: int) -> list[Board]:
        """What samplers are measured on without a network: tasks whose right answers have a law
        that is known, so many of a kind and so many rows of each. Raises ``GenError``."""
        raise GenError(
            f"modality {self.name!r} has no tasks whose law is known; expected one that has, for"
            " --oracle"
        )

    edited_by: ClassVar[str] = "mask"  # or ``span``

    def edit(
        self, source: Any, where: Any, frontend: TokenFrontend, space: TokenSpace
    ) -> tuple[Tensor, Any]:
        """A canvas [T(, C)] that is empty ``where`` (a mask or a span) to make it anew, and a
        function that lays the result over the original. Raises ``GenError``."""
        raise GenError(f"modality {self.name!r} cannot be edited")
