"""Decoding of stored tokens: the frontend, the token space, and the function that lays an edit over
its source.

A `Decoder` serves the tokens of one model. It does with them what the pipeline did after sampling,
in the same order, so that with the same frontend, type and device the media are the same bit for
bit. Of gen's own models only the config is read; a published checkpoint is loaded whole, since its
frontend is a part of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gen.core.errors import GenError
from gen.core.files import sha256
from gen.core.trust import refuse_untrusted
from gen.jobs.given import parsed_condition
from gen.models.load.locate import locate, zoo
from gen.pipeline.control import with_output
from gen.pipeline.lengths import without_eos
from gen.pipeline.pipeline import Pipeline
from gen.store.ledger import INPUTS
from gen.store.stored_tokens import StoredTokens, facts_of

FITTING = (
    "modality",
    "kind",
    "codebook_sizes",
    "channels",
    "compression",
    "grid",
    "rate",
)  # what codes and media have of a frontend
KEY = (
    "modality",
    "model",
    "model_options",
    "dtype",
    "device",
    "frontend",
)  # tokens that share these share a decoder


def decoder_key(meta: dict[str, Any]) -> tuple[str, ...]:
    """Return what tokens must share to share a decoder."""
    return tuple(repr(meta[k]) for k in KEY)


class Decoder:
    """``folder``: of the job, where media that items started from may lie. ``frontend``: another
    one, by zoo name or folder; ``model``, ``device``, ``dtype``: in place of those the tokens were
    made with.

    ``note``: what is to be said about it, or nothing. Raises ``GenError`` if anything does not fit.
    """

    def __init__(
        self,
        meta: dict[str, Any],
        folder: Path,
        *,
        frontend: str | None = None,
        model: str | None = None,
        device: str | None = None,
        dtype: str | None = None,
        trust_remote_code: bool = False,
    ):
        self.folder, made = folder, meta["frontend"]
        options = {
            k: v for k, v in meta["model_options"].items() if k != "trust_remote_code"
        }  # a file cannot allow this, only the user
        if meta["model_options"].get("trust_remote_code") and not trust_remote_code:
            raise GenError(
                f"the tokens were made by {meta['model']} with trust_remote_code; pass"
                " --trust-remote-code to run its code again"
            )
        refuse_untrusted({"model_options": options}, f"the tokens of {folder}")
        if trust_remote_code:
            options["trust_remote_code"] = True
        name = model or meta["model"]
        named = None if name in zoo() else name
        self.pipe = Pipeline(
            meta["modality"],
            named,
            device=device or meta["device"],
            dtype=dtype or meta["dtype"],
            **options,
        )
        binding, self.own = self.pipe.binding(name)
        self.space = binding.space
        facts = facts_of(self.own)
        if facts["digest"] != made.get("digest"):
            differs = dtype not in (None, meta["dtype"])
            other_dtype = ", or leave --dtype out: another type may round it" * differs
            raise GenError(
                f"the frontend of {name} has codebook {facts['digest']}, the tokens were made with"
                f" {made.get('digest')} "
                f"({made.get('name')}); pass the folder of the model of the tokens with --model"
                + other_dtype
            )
        facts = self._choose(frontend, facts, str(made.get("name")))
        self.facts = {
            "frontend": self.name,
            "digest": facts["digest"],
            "weights": frontend and weights_of(frontend),
            "dtype": str(self.pipe.dtype).removeprefix("torch."),
            "device": str(self.pipe.device),
        }
        self._overlay: tuple[Any, Callable[[Any], Any]] = (None, lambda media: media)

    def _choose(
        self, frontend: str | None, facts: dict[str, Any], made_with: str
    ) -> dict[str, Any]:
        """Take the model's own frontend, or the named one if it fits; return its facts."""
        self.frontend, self.name, self.note = self.own, made_with, ""
        if frontend is not None:
            self.frontend, self.name = self._other(frontend), frontend
            other = facts_of(self.frontend)
            require_fit(other, facts, frontend, made_with)
            if other["digest"] != facts["digest"]:
                self.note = (
                    f"frontend {frontend} has codebook {other['digest']}, the tokens were made with"
                    f" {facts['digest']} ({made_with}): it reads them as if they were its"
                    " own, as asked for"
                )
            facts = other
        return facts

    def _other(self, name: str) -> Any:
        where, modality = locate(name, "frontend"), self.pipe.modality
        if modality.checkpoint is None:
            return modality.frontend(
                "latents" if self.space.channels else "codes",
                self.pipe.device,
                self.pipe.frontend_dtype,
                where,
            )
        return type(self.own).from_pretrained(where, self.pipe.device, self.own.fingerprint.dtype)

    def medium(self, stored: StoredTokens) -> Any:
        """Decode an item's tokens. Raises ``GenError`` for tokens of another space, and for an
        edit that cannot be made again."""
        meta, modality = stored.meta, self.pipe.modality
        space = with_output(self.space, **meta.get("output", {}))
        if stored.tokens.shape != (
            shape := (space.length, *[space.channels] * bool(space.channels))
        ):
            raise GenError(
                f"the tokens have shape {tuple(stored.tokens.shape)}; expected {shape}, the"
                f" positions of model {meta['model']}"
            )
        parsed = parsed_condition(modality, meta["prompt"], meta.get("given"))
        condition = modality.ground(parsed, meta["seed"])
        if "source" in meta["start"]:
            condition = modality.as_stated(condition)
        if str(condition) != meta["condition"]:
            raise GenError(
                f"prompt and seed give {str(condition)!r}, but the output was made for"
                f" {meta['condition']!r}; it cannot be reproduced"
            )
        own = modality.own_edit(condition)
        if own is None:
            overlay = self._lay_over(meta["start"])
        else:
            overlay = modality.edit(own.source, own.mask, self.own, self.space)[1]
        if "frames" in meta["start"]:
            space = modality.lasting(meta["start"]["frames"], self.own, space)
        if meta["protocol"] == "masked" and modality.length_first:
            space = without_eos(space)
        tokens = stored.tokens.to(self.pipe.device)
        return overlay(modality.complete(self.pipe.decode(tokens, space, self.frontend), condition))

    def _lay_over(self, start: dict[str, Any]) -> Callable[[Any], Any]:
        """Return the function that lays an edited output over its source; the last one is kept,
        since items of an edit follow one another."""
        if "source" not in start:
            return lambda media: media
        if self._overlay[0] != start:
            source, where = (
                self._given(start, "source"),
                (self._given(start, "mask") if "mask" in start else start["span"]),
            )
            self._overlay = start, self.pipe.modality.edit(source, where, self.own, self.space)[1]
        return self._overlay[1]

    def _given(self, start: dict[str, Any], key: str) -> Any:
        """Return a source that the item started from: a text, or an unchanged file, at its old
        path or in the job's own folder."""
        said = start[key]
        if "text" in said:
            return said["text"]
        if "path" not in said:
            raise GenError(
                f"the edit cannot be reproduced: its {key} was a {said.get('unsaved')} in memory,"
                " and no file"
            )
        positions = [Path(said["path"]), self.folder / INPUTS / Path(said["path"]).name]
        path = next((p for p in positions if p.is_file()), None)
        if path is None:
            raise GenError(
                f"the edit cannot be reproduced: its {key} {said['path']} no longer exists"
            )
        if sha256(path) != said["sha256"]:
            raise GenError(
                f"the edit cannot be reproduced: its {key} {path} has changed (its sha256 differs)"
            )
        return path


def require_fit(new: dict[str, Any], old: dict[str, Any], name: str, made_with: str) -> None:
    """Raise ``GenError`` for a frontend that takes other codes, or makes media of another size."""
    for key in FITTING:
        if new.get(key) != old.get(key):
            raise GenError(
                f"frontend {name} has {key} {new.get(key)}; expected {old.get(key)}, as the one"
                f" that the tokens were made with ({made_with})"
            )


def weights_of(name: str) -> str:
    """Digest a frontend's folder, so that one that was trained further is not taken for the
    same."""
    where, digest = locate(name, "frontend"), hashlib.sha256()
    for path in sorted(Path(where).glob("*")) if isinstance(where, Path) else ():
        if path.suffix in (".json", ".safetensors", ".pth", ".bin", ".pt"):
            digest.update(f"{path.name} {sha256(path)}\n".encode())
    return digest.hexdigest()[:16]
