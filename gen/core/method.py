"""Method cards: the one declaration of a published method.

    @method(
        "klass",
        paper="2511.05664",
        title="KLASS: KL-Guided Fast Inference in Masked Diffusion Models",
        params={"selector": "klass", ...},
        limit=Limit(SEQUENTIAL, {"kl_threshold": 0}),
    )
    @register("selector", "klass", params=KlassParams)
    def klass(step): ...

From it come the preset, its row in ``gen ls presets``, its row in the tables of the documentation
and its case in the contract tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gen.core.errors import unknown
from gen.core.params import check_field
from gen.core.registry import field_names, register

T = TypeVar("T")
SEQUENTIAL = "one position per forward pass"
GREEDY_DECODING = "greedy decoding"


@dataclass(frozen=True)
class Limit:
    """Values at which a method becomes a simpler one.

    Attributes:
        equals: what it becomes: ``SEQUENTIAL``, ``GREEDY_DECODING``, or the name of a preset.
        params: the values, over those of the preset.
        preset: the values of the simpler preset that go with them, such as no blocks.
        note: the values in words, where they depend on the number of positions.
    """

    equals: str
    params: Mapping[str, Any] = field(default_factory=dict)
    preset: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Preset:
    """Name of a published method: a sampler with parameters.

    Attributes:
        sampler: name of the sampler.
        params: parts and values.
        sampling: sampling parameters that the method implies.
        about: one line that says what it does.
        aliases: names that the paper itself gives to parameters, where they are not the sampler's.
        paper: arXiv id, or where else it was published; empty for what is not.
        title: the paper's title.
        limit: where it becomes a simpler method, if anywhere.
        example: parameters for the contract tests, of twelve positions, over those of ``params``.
        kinds: kinds of token that the method decodes, where they are not the sampler's.
    """

    name: str
    sampler: str
    params: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    about: str = ""
    aliases: dict[str, str] = field(default_factory=dict)
    paper: str = ""
    title: str = ""
    limit: Limit | None = None
    example: dict[str, Any] = field(default_factory=dict)
    kinds: tuple[str, ...] = ()


def method(
    name: str,
    *,
    about: str,
    sampler: str = "masked_iterative",
    params: Mapping[str, Any] | None = None,
    sampling: Mapping[str, Any] | None = None,
    paper: str = "",
    title: str = "",
    limit: Limit | None = None,
    aliases: Mapping[str, str] | None = None,
    example: Mapping[str, Any] | None = None,
    kinds: tuple[str, ...] = (),
) -> Callable[[T], T]:
    """Registers a method as a preset; see ``Preset`` for the arguments.

    Returns:
        a decorator that changes nothing, for the rule of the method.
    """
    register("preset", name)(
        Preset(
            name,
            sampler,
            dict(params or {}),
            dict(sampling or {}),
            about,
            dict(aliases or {}),
            paper,
            title,
            limit,
            dict(example or {}),
            kinds,
        )
    )
    return lambda rule: rule


def presets(sampler: str, cls: Any, **table: Mapping[str, Any]) -> None:
    """Registers the presets of a sampler from one table.

    Args:
        sampler: name of the sampler.
        cls: its class, a dataclass whose parameters are its own: those of parts in other files are
            not known when it is imported.
        table: by the name of the preset, its parameters and further fields of ``Preset``.

    Raises:
        GenError: a row names no parameter of the sampler, or a value that it does not take.
    """
    for name, row in table.items():
        card = {key: value for key, value in row.items() if key in Preset.__dataclass_fields__}
        params = {key: value for key, value in row.items() if key not in card}
        for key, value in params.items():
            if key not in field_names(cls):
                raise unknown(f"parameter of sampler {sampler!r}:", key, field_names(cls), name)
            f = cls.__dataclass_fields__[key]
            if "kind" not in f.metadata:  # parts of other files are not registered yet
                check_field(f, value)
        register("preset", name)(Preset(name, sampler, params, **card))
