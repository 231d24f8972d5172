"""The modality contract: the glue between a prompt, a model, a frontend and files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from gen.contracts.condition import Condition, Prompt
from gen.contracts.frontend import TokenFrontend
from gen.contracts.oracle import Board
from gen.core.edit_spec import EditSpec
from gen.core.errors import GenError
from gen.core.token_space import TokenSpace
from gen.core.tool_calls import ToolFormat

# key of the config of a model of gen's own architectures: what it was trained with
CONDITIONS = "conditions"
# the language of the modality (where there is no key), captions of a tokenizer or of a text
# encoder, media without captions, or no condition
BUILT_IN, CAPTIONS, TEXT_ENCODER, NOTHING = "modality", "captions", "text_encoder", "none"
MEDIA = "media"


@dataclass(frozen=True)
class Verdict:
    """Judgement of a checker about one output.

    Attributes:
        passed: whether it shows what its prompt asks for.
        valid: whether it parses as something of this modality's language at all.
        detail: reason, for people.
    """

    passed: bool
    valid: bool
    detail: str = ""


@dataclass(frozen=True)
class Binding:
    """A modality with one model: the space it generates in, and how conditions become prompts.

    Attributes:
        space: token space of the model.
        prompt: makes token ids, or a prompt with features, from a typed condition.
        unconditional: token ids that guidance compares with, or a function of the condition where
            they go with it.
    """

    space: TokenSpace
    prompt: Callable[[Any], list[int] | Prompt]
    unconditional: list[int] | Callable[[Any], list[int]]

    def without(self, condition: Any) -> list[int]:
        """Return the prompt that guidance compares a condition's prompt with."""
        return self.unconditional(condition) if callable(self.unconditional) else self.unconditional


class Modality(ABC):
    """A kind of media, its prompts, its files and the models that make it.

    Attributes:
        name: name in the registry.
        media_kind: ``image``, ``audio``, ``video`` or ``data``.
        extension: extension of media files.
        formats: extensions that ``save`` writes, if there are more than ``extension``.
        models: zoo name of each model by ``model_key``. A key such as ``causal-images`` is that of
            the model that serves conditions with images.
        frontends: zoo name of each frontend by kind, ``codes`` or ``latents``.
        default_sampling: sampling parameters of a user who gives none, as far as they apply to the
            kind.
        default_samplers: sampler of a user who names none, by ``model_key``; of several models the
            first key counts.
        masked_params: parameters of masked samplers that suit this modality's models, where neither
            the user nor the preset gives them.
        accepts: parts of a ``Condition`` that ``parse`` takes.
        most: largest number of media of a part that ``parse`` takes, where there is one.
        checkpoint: published checkpoint that decides about prompts and tokens, if any.
        kept: extension of what ``keep`` writes, if it is another one than ``extension``.
        also: extensions of further files that a job writes for every output.
        length_first: for masked models, the length of a row is drawn before its tokens; else the
            eos token is a token like any other.
        edited_by: ``mask`` or ``span``, the region of an edit.
        frame_rate: frames per second of clips; files of another rate are resampled.
        rate: samples per second of sounds; files of another rate are resampled.
        needs_prompt: whether a call without a prompt is refused.
    """

    name: ClassVar[str]
    media_kind: ClassVar[str]
    extension: ClassVar[str]
    formats: ClassVar[tuple[str, ...]] = ()
    models: ClassVar[Mapping[str, str]] = {}
    frontends: ClassVar[Mapping[str, str]]
    default_sampling: Mapping[str, Any] = {}
    default_samplers: ClassVar[Mapping[str, str]] = {
        "causal": "speculative_jacobi",
        "causal-latents": "autoregressive",
        "masked": "maskgit",
        "masked-latents": "mar",
        "blocks": "frame_blocks",
        "refined_scales": "next_scale_masked",
        "scales": "next_scale",
    }
    masked_params: Mapping[str, Any] = {}
    accepts: frozenset[str] = frozenset({"text"})
    most: Mapping[str, int] = {}
    checkpoint: Any = None
    kept: ClassVar[str] = ""
    also: ClassVar[tuple[str, ...]] = ()
    length_first: ClassVar[bool] = True
    edited_by: ClassVar[str] = "mask"
    frame_rate: float = 8.0
    rate: int = 0
    needs_prompt: bool = True

    # --- conditions

    @property
    def tool_format(self) -> ToolFormat | None:
        """Format in which answers call functions; None where conversations take no tools."""
        return None

    def parse(self, condition: Condition) -> Any:
        """Return the typed condition that all given parts state.

        Modalities that take text alone implement ``condition``. One that takes more lists the parts
        in ``accepts`` and overrides this.

        Raises:
            GenError: a part is not taken, or does not parse.
        """
        condition.require(self.accepts, f"modality {self.name!r}", self.most)
        return self.condition(condition.text or "")

    def media_part(self, condition: Condition) -> str:
        """Return the part of a condition that decides which of the modality's models serves it: the
        first one that ``models`` has a key for. "" stands for the models of texts."""
        served = {key.rpartition("-")[2] for key in self.models}
        return next((part for part in condition.parts if part in served), "")

    def raw_ids(self, text: str) -> list[int] | None:
        """Return the token ids of a text that goes into no chat template and keeps the white space
        around it; None where the models take no token ids. Raises ``GenError`` for a text without
        tokens."""
        return None

    @abstractmethod
    def condition(self, prompt: str) -> Any:
        """Return the typed condition that a text states; ``str()`` of it is the canonical prompt.

        Raises:
            GenError: the text does not parse.
        """

    def ground(self, condition: Any, seed: int) -> Any:
        """Return the condition with everything that a model must be told.

        Args:
            condition: typed condition, which may leave things open.
            seed: seed of the item, which decides them.
        """
        return condition

    def as_stated(self, condition: Any) -> Any:
        """Return the condition without what ``ground`` decided, if a model can read it: that of an
        edit, whose source decides it, and of a negative prompt.

        Args:
            condition: condition that ``ground`` returned.
        """
        return condition

    def drawn_by(self, condition: Any) -> str:
        """Return what the random numbers of an item depend on, beside its seed: its canonical
        prompt, or a part of it.

        Args:
            condition: condition that ``ground`` returned.
        """
        return str(condition)

    # --- models

    @abstractmethod
    def frontend(
        self,
        kind: str,
        device: torch.device,
        dtype: torch.dtype,
        folder: Path | None = None,
    ) -> TokenFrontend:
        """Load a frontend.

        Args:
            kind: ``codes`` or ``latents``.
            device: device of its weights.
            dtype: floating-point type of its weights.
            folder: folder of its files; None takes the embedded one.
        """

    @abstractmethod
    def bind(self, config: Any, frontend: TokenFrontend, model_name: str) -> Binding:
        """Return the binding of a model with this config.

        Raises:
            GenError: the model cannot serve the modality.
        """

    def sized(self, space: TokenSpace, conditions: list[Any]) -> TokenSpace:
        """Return the token space of a batch whose conditions decide how long outputs are.

        Args:
            space: token space of ``bind``.
            conditions: grounded conditions of the batch.
        """
        return space

    @abstractmethod
    def to_codes(self, tokens: Tensor, space: TokenSpace) -> Tensor:
        """Return what a frontend decodes.

        Args:
            tokens: long [B, T], or latents [B, T, C].
            space: token space of the rows.

        Returns:
            Codes [B, Q, *grid], or latents [B, C, *grid].
        """

    # --- media and files

    @abstractmethod
    def save(self, media: Any, path: Path, info: dict[str, Any]) -> None:
        """Write one output.

        Args:
            media: output of the frontend.
            path: file to write.
            info: facts to write into the file, where its format has room for them.
        """

    def keep(self, media: Any, path: Path) -> None:
        """Write media that a job starts from, so that they can be read again as they were."""
        self.save(media, path, {})

    def save_also(self, media: Any, path: Path, info: dict[str, Any]) -> None:
        """Write one of the further files of an output; the path's extension tells which."""
        raise NotImplementedError(
            f"modality {self.name!r} names files {self.also} and does not write them"
        )

    def still(self, media: Any) -> Any:
        """Draw media as one image (PIL), for modalities whose files take long to write; None where
        the file that ``save`` or ``save_also`` writes can be drawn."""
        return None

    @abstractmethod
    def load(self, path: Path) -> Any:
        """Read media. Raises ``GenError`` for a file that cannot be read."""

    @abstractmethod
    def check(self, media: Any, prompt: str) -> Verdict:
        """Judge whether an output shows what its prompt asks for, from the output alone."""

    def judge(self, media: Any, condition: Condition) -> Verdict:
        """Judge whether an output shows what a condition of any parts asks for; of a text, as
        ``check`` does. Modalities that make media from media override it.

        Raises:
            GenError: the condition does not parse, or cannot be judged.
        """
        return self.check(media, condition.text or "")

    def grade(self, media: Any, prompt: str) -> float:
        """Return how much of its prompt an output shows, 0 to 1; 1 where ``check`` passes."""
        verdict = self.check(media, prompt)
        return 1.0 if verdict.passed else 0.25 * verdict.valid

    def is_path(self, media: Any) -> bool:
        """Return True for the path of a file; a modality of texts overrides it."""
        return isinstance(media, (str, Path))

    def trim(self, media: Any) -> Any:
        """Return media without the empty end that a fixed length leaves.

        More at the end never gives less at the front.
        """
        return media

    def complete(self, media: Any, condition: Any) -> Any:
        """Return media with the parts of the condition that belong to them."""
        return media

    # --- edits, continuations and lengths

    def prefix(self, media: Any, frontend: TokenFrontend, space: TokenSpace) -> Tensor:
        """Return the first tokens [k] of outputs that begin with given media.

        Raises:
            GenError: media of this modality cannot be continued.
        """
        raise GenError(f"modality {self.name!r} cannot be continued")

    def lasting(self, frames: int, frontend: TokenFrontend, space: TokenSpace) -> TokenSpace:
        """Return the token space of media of so many frames.

        Raises:
            GenError: media of this modality have one length, or not this one.
        """
        raise GenError(f"media of modality {self.name!r} have one length; frames is {frames}")

    def edit(
        self, source: Any, where: Any, frontend: TokenFrontend, space: TokenSpace
    ) -> tuple[Tensor, Callable[[Any], Any]]:
        """Return the canvas of an edit, and a function that lays the result over the source.

        Args:
            source: media to edit, or their path.
            where: mask or span of the region that is made anew.
            frontend: frontend of the model.
            space: token space of the model.

        Returns:
            Canvas [T(, C)], masked where tokens are made anew, and the function.

        Raises:
            GenError: media of this modality cannot be edited, or not so.
        """
        raise GenError(f"modality {self.name!r} cannot be edited")

    def own_edit(self, condition: Any) -> EditSpec | None:
        """Return the edit that a condition itself asks for, such as that of an image and an
        instruction; None where generation starts from nothing."""
        return None

    # --- measuring

    def example_prompts(self, count: int, seed: int) -> list[str]:
        """Return prompts to measure with.

        Raises:
            GenError: the modality has none of its own.
        """
        raise GenError(f"modality {self.name!r} has no prompts to measure with")

    def category(self, prompt: str) -> str:
        """Name the category of a prompt, by which benchmarks group their figures."""
        return "all"

    def oracle_bench(self, prompts: int, repeats: int, seed: int) -> list[Board]:
        """Return tasks whose right answers have a known distribution.

        Args:
            prompts: tasks per case.
            repeats: rows per task.
            seed: seed of the tasks.

        Raises:
            GenError: the modality has no such tasks.
        """
        raise GenError(
            f"modality {self.name!r} has no tasks whose distribution is known; expected one that"
            " has, for --oracle"
        )
