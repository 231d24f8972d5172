"""Files of tokens: the sampler's result for one item, from which its output can be made again
without a model.

An ``.npz`` holds ``tokens`` int32 [T], or ``latents`` float32 or float64 [T, D], of the whole
row, its end included, and ``meta``, a JSON text: the model of the token ids, the frontend that
reads them, prompt, seed and edit. There is no pickle and no date in it: the same tokens make the
same file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gen.contracts.frontend import TokenFrontend, codebook_digest
from gen.core.edit_spec import MEDIA
from gen.core.errors import GenError
from gen.core.files import sha256
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.core.versions import installed
from gen.media.npz import read_npz, write_npz
from gen.models.load.locate import read_config
from gen.pipeline.output import PipelineOutput

VERSION = 1
NEEDED = {
    **dict.fromkeys(
        (
            "modality",
            "model",
            "kind",
            "protocol",
            "dtype",
            "device",
            "array",
            "prompt",
            "condition",
        ),
        str,
    ),
    "seed": int,
    **dict.fromkeys(("model_options", "start", "frontend"), dict),
}
KINDS = {str: "a text", int: "an integer", dict: "an object"}
ARRAYS = {"codes": "tokens", "latents": "latents"}
FLOATS = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class StoredTokens:
    """Tokens long [T] or latents [T, D], as the sampler left them, and their ``meta`` (see the
    module)."""

    tokens: Tensor
    meta: dict[str, Any]


def save_tokens(path: Path, out: PipelineOutput, i: int) -> None:
    """Write the tokens of item ``i``. Raises ``GenError`` for an output that does not name its
    frontend."""
    row = out.tokens[i].detach().cpu()
    latents = row.is_floating_point()
    item = out.items[i]
    if latents:
        array = row.numpy() if row.dtype in (torch.float32, torch.float64) else row.float().numpy()
    else:
        array = row.to(torch.int32).numpy()
    meta = {
        **out.origin,
        "array": str(row.dtype).removeprefix("torch."),
        "prompt": item.prompt,
        "seed": item.seed,
        "condition": str(item.condition),
    }
    if item.given is not None:
        parts = item.given.to_dict()
        parts.pop("text", None)
        if parts:
            meta["given"] = parts
    write_npz(
        path,
        {
            ARRAYS[out.origin["kind"]]: array,
            "meta": json.dumps(meta, ensure_ascii=False, sort_keys=True, default=str),
        },
    )


def load_tokens(path: Path) -> StoredTokens:
    """Read a file of tokens. Raises ``GenError`` for another or a damaged file, or one of a
    later gen."""
    try:
        meta = json.loads(str(read_npz(path, ("meta",))["meta"]))
    except ValueError as error:
        if isinstance(error, GenError):
            raise
        raise GenError(f"{path} is not a token file: its meta is not JSON ({error})") from None
    if not isinstance(meta, dict) or not isinstance(meta.get("version"), int):
        raise GenError(
            f"{path} is not a token file: its meta names no version; expected one that a job with"
            " tokens: true wrote"
        )
    if meta["version"] > VERSION:
        raise GenError(
            f"{path} is a file of tokens of version {meta['version']}; expected at most {VERSION},"
            " as this gen writes it"
        )
    for key, kind in NEEDED.items():
        if not isinstance(meta.get(key), kind) or isinstance(meta[key], bool):
            raise GenError(
                f"{path} is not a token file: {key} is {meta.get(key)!r}; expected {KINDS[kind]}"
            )
    if meta["kind"] not in ARRAYS:
        raise GenError(
            f"{path} is not a token file: kind is {meta['kind']!r}; expected {' or '.join(ARRAYS)}"
        )
    latents = meta["kind"] == "latents"
    array = read_npz(path, (ARRAYS[meta["kind"]],))[ARRAYS[meta["kind"]]]
    right = (
        array.ndim == 2 and array.dtype in (np.float32, np.float64) and meta["array"] in FLOATS
        if latents
        else array.ndim == 1 and array.dtype == np.int32
    )
    if not right or not array.size:
        expected = "float32 or float64 [T, C]" if latents else "int32 [T]"
        raise GenError(f"{path} holds an array of {array.dtype} {array.shape}; expected {expected}")
    return StoredTokens(
        torch.from_numpy(array).to(FLOATS[meta["array"]] if latents else torch.long), meta
    )


def origin_of(out: PipelineOutput) -> dict[str, Any]:
    """Collect the facts that the files of all items of an output share."""
    if out.frontend is None:
        raise GenError(
            "an output without its frontend has no tokens to store; expected one that a pipeline"
            " made"
        )
    modality = out.served
    return {
        "version": VERSION,
        "gen": installed("gen-toolkit") or "unknown",
        "modality": out.modality,
        "model": out.model,
        "model_options": dict(out.model_options),
        "kind": "latents" if out.tokens.is_floating_point() else "codes",
        "protocol": resolve_sampler(out.spec)[0].protocol,
        "dtype": str(out.dtype).removeprefix("torch."),
        "device": out.device.type,
        "grid": list(out.grid),
        "start": start_facts(out.start, modality),
        **output_facts(out),
        "frontend": {
            "name": frontend_name(out.model, modality, out.frontend),
            **facts_of(out.frontend),
        },
    }


def output_facts(out: PipelineOutput) -> dict[str, Any]:
    """Collect what sampling parameters say about the positions and the end of each row.

    Returns:
        ``{"output": {...}}``, or nothing where positions and ends are those of the model.
    """
    sampling = out.sampling.to_dict()
    said: dict[str, Any] = {k: sampling[k] for k in ("stop", "stop_token_ids") if k in sampling}
    if out.sampling.max_new_tokens is not None:
        said["positions"] = out.tokens.shape[1]
    return {"output": said} if said else {}


def facts_of(frontend: TokenFrontend) -> dict[str, Any]:
    """Collect the facts that codes must fit, and the digest that tells one codebook from
    another, as plain JSON data."""
    config = frontend.config
    names = [name for name, cls in registry.table("tokenizer").items() if cls is type(frontend)]
    facts = {
        "class": names[0] if names else type(frontend).__name__,
        "modality": config.modality,
        "kind": config.kind,
        "codebook_sizes": list(config.codebook_sizes),
        "compression": list(config.compression),
        "channels": config.channels,
    }
    if frontend.grid:
        facts["grid"] = list(frontend.grid)
    if frontend.rate:
        facts["rate"] = frontend.rate
    return {**facts, "digest": codebook_digest(frontend.fingerprint)}


def frontend_name(model: str, modality: Any, frontend: TokenFrontend) -> str:
    """Return the folder name of an embedded model's frontend; a published checkpoint's own is
    part of it."""
    if modality.checkpoint is not None:
        return f"the frontend of {model}"
    kind = "latents" if frontend.config.kind == "latents" else "codes"
    return str(read_config(model).get("frontend") or modality.frontends[kind])


def start_facts(start: Any, modality: Any) -> dict[str, Any]:
    """Collect the facts of an edit: files by path and sha256, texts as they are; a sample in
    memory is only noted."""
    facts: dict[str, Any] = {
        k: getattr(start, k) for k in ("span", "frames") if getattr(start, k) is not None
    }
    for key in MEDIA:
        medium = getattr(start, key)
        if medium is None:
            continue
        if modality.is_path(medium):
            facts[key] = {"path": str(medium), "sha256": sha256(Path(medium))}
        else:
            facts[key] = (
                {"text": medium} if isinstance(medium, str) else {"unsaved": type(medium).__name__}
            )
    return facts
