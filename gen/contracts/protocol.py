"""The protocol contract: one way in which a model can be asked for tokens.

A protocol (``@register("protocol", "causal")``, one file in ``gen/models/protocols``) names the
target that samplers see and the adapter that a network is called through, per kind of token. A
sampler declares its protocol by name (``Sampler.protocol``), a published checkpoint those that it
serves (``Checkpoint.protocols``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from gen.core.registry import registry
from gen.models.load.locate import read_config


class ModelProtocol:
    """Base class of protocols; subclasses are declarations and are not instantiated.

    Attributes:
        targets: class of the target by kind, ``codes`` or ``latents``.
        adapters: makes an adapter from a network, by kind.
        left_to_right: positions are decoded in order. Tokens to continue then become the end of
            the prompt; else they are written on a canvas.
        edits: a canvas with masked positions anywhere can be completed; from left to right, tokens
            that are known ahead count for a position once it is reached.
        draws_lengths: lengths of rows can be drawn from one canvas, before anything is decoded.
        replaces_rows: rows that are done may be replaced by the next items. A model whose cache
            cannot do so decodes batch by batch all the same.
        guides: the model takes classifier-free guidance.
        closed_form: last part of the names of the test models in closed form
            (``tests/support/tabular.py``: ``Tabular`` and this).
    """

    targets: ClassVar[Mapping[str, Callable[..., Any]]]
    adapters: ClassVar[Mapping[str, Callable[..., Any]]]
    left_to_right: ClassVar[bool] = False
    edits: ClassVar[bool] = False
    draws_lengths: ClassVar[bool] = False
    replaces_rows: ClassVar[bool] = True
    guides: ClassVar[bool] = True
    closed_form: ClassVar[str]

    @classmethod
    def serves(cls, config: Mapping[str, Any]) -> bool:
        """Return True if an embedded architecture with this config.json is a model of the
        protocol."""
        raise NotImplementedError(f"protocol {cls.__name__} does not say which models serve it")


def model_key(protocol: str, kind: str, draft: bool = False, part: str = "") -> str:
    """Return the key of ``Modality.models`` for a model.

    Args:
        protocol: name of the protocol.
        kind: ``codes`` or ``latents``.
        draft: whether it is a draft model.
        part: part of the condition that the model reads beside a text; "" for a model of texts.

    Returns:
        For instance ``causal``, ``masked-images``, ``causal-latents`` or ``causal-draft``.
    """
    kinds = ["latents"] if kind == "latents" else []
    return "-".join([protocol, *kinds, *([part] if part else []), *(["draft"] if draft else [])])


def protocols_of(name: str | Path) -> tuple[str, ...]:
    """Return the protocols that an embedded or local model serves, as its config.json says."""
    config = read_config(name)
    table = registry.table("protocol")
    return tuple(protocol for protocol, cls in table.items() if cls.serves(config))
