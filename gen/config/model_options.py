"""Options that a model is loaded with, as job files and command lines say them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gen.config.canonical import nested, plain
from gen.config.yaml_text import load_yaml
from gen.contracts.draft_model import draft_name
from gen.core.errors import GenError, bad_type, bad_value

LOADED = (
    "modality",
    "model",
    "device",
    "dtype",
    "compile",
)  # what a loader is told beside the options of a model


def checked_options(options: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    """Return options of a model as plain data.

    Args:
        options: value by key.
        name: what the options are called there.
        where: file or flag that they came from.

    Raises:
        GenError: a token, which is a secret, a key that stands beside the options, or adapters or
            a draft model that are no folders.
    """
    if not isinstance(options.get("token", True), bool):
        raise GenError(
            f"{name}.token is given in {where}, which is no secret; expected true, false or none,"
            " and the token in HF_TOKEN or in the login of hf"
        )
    if own := [k for k in options if k in LOADED]:
        raise GenError(f"{name}.{own[0]} is given in {where}; expected {own[0]} outside {name}")
    try:
        adapter_folders(options.get("adapters"))
        if options.get("draft_model") is not None:
            draft_name(options["draft_model"])
    except GenError as error:
        raise GenError(f"{name}.{error} ({where})") from None
    return plain(options)


def adapter_folders(adapters: Any) -> str | dict[str, str] | None:
    """Return the folder or hub id of an adapter, or several by name. Raises ``WrongType`` for
    anything else."""
    named = adapters if isinstance(adapters, Mapping) and adapters else {"": adapters}
    if adapters is not None and not all(
        isinstance(k, str) and isinstance(v, (str, Path)) and str(v) for k, v in named.items()
    ):
        raise bad_type("adapters", adapters, "the folder of a LoRA adapter, or folders by name")
    if isinstance(adapters, Mapping):
        return {k: str(v) for k, v in adapters.items()}
    return None if adapters is None else str(adapters)


def read_options(texts: Sequence[str], flag: str) -> dict[str, Any]:
    """Read ``KEY=VALUE`` texts, such as ``revision=v1`` or ``adapters.poet=folder``.

    Args:
        texts: the texts.
        flag: flag that they came from.

    Raises:
        GenError: a text of another form, a key that comes twice, and errors of
            ``checked_options``.
    """
    options: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        head, *rest = key.strip().split(".")
        if not equals or not head or not all(rest):
            raise bad_value(flag, text, "KEY=VALUE, such as revision=v1")
        new = nested(rest, load_yaml(value))
        old = options.get(head)
        if isinstance(old, dict) and isinstance(new, dict) and not old.keys() & new.keys():
            new = {**old, **new}
        elif head in options:
            raise GenError(f"{flag} names {key.strip()!r} twice; expected it once")
        options[head] = new
    return checked_options(options, "model_options", flag)
