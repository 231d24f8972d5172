"""What a sampler is, what a preset is, and how a name with knobs becomes one of them."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from gen.core.errors import GenError, bad_value, unknown
from gen.core.registry import registry
from gen.core.rng import RNG
from gen.core.sampling_params import SamplingParams
from gen.core.stats import SampleOutput
from gen.core.token_space import GUARANTEES

Callback = Callable[[dict[str, Any]], None]


class Sampler(ABC):
    """A decoding method: a frozen dataclass whose fields are its knobs.

    ``protocol``: the model it needs, ``causal`` or ``masked``. ``kinds``: what it decodes,
    ``codes`` (ids) or ``latents``. ``drafted``: whether it needs a draft model; such a sampler has
    the knob ``draft_model``, a model's name or None for the modality's own; ``draft_protocol``: of
    that model, where it is another one than the sampler's. ``reference``: what ``guarantee`` is
    relative to. ``aliases``: other names of knobs -> their own; ``spellings``: of some of those,
    the values that they take -> the knob's own.
    """

    protocol: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]] = ("codes",)
    reference: ClassVar[str]
    draft_protocol: ClassVar[str | None] = None
    aliases: ClassVar[Mapping[str, str]] = {}
    spellings: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    @property
    @abstractmethod
    def guarantee(self) -> str:
        """One of ``gen.core.token_space.GUARANTEES``, for these knobs."""

    @property
    def drafted(self) -> bool:
        return False

    @property
    def timed(self) -> bool:
        """Whether a clock decides how many places are computed at a time."""
        return False

    @property
    def reproducible(self) -> bool:
        """Whether a seed means the same tokens every time: where a clock has a say, only if the
        tokens do not depend on what it decides."""
        return not self.timed or self.guarantee == "same_tokens"

    @abstractmethod
    def __call__(
        self,
        target,
        rng: RNG,
        *,
        draft=None,
        canvas=None,
        trace: bool = False,
        callback: Callback | None = None,
    ) -> SampleOutput:
        """Decodes every row of the target.

        ``draft``: the target of the draft model, for a sampler that is ``drafted``. ``canvas`` [B,
        T(, C)] (masked samplers only) is empty (``TokenSpace.is_empty``) where a token is wanted.
        ``callback`` is called once per forward call with ``{"step", "done", "total"}``.
        """


@dataclass(frozen=True)
class Preset:
    """A paper's name for a sampler with knobs, and a law where the method implies one. ``aliases``:
    what the paper itself calls a knob, where that is another one than the sampler's aliases say.
    ``paper``: an arXiv number, or where it was published; empty for what is no paper's.
    """

    name: str
    sampler: str
    params: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    about: str = ""
    aliases: dict[str, str] = field(default_factory=dict)
    paper: str = ""


def params(sampler: type[Sampler]) -> dict[str, Any]:
    """A sampler's knobs and their defaults."""
    return {f.name: f.default for f in dataclasses.fields(sampler)}


def resolve_sampler(
    spec: str | Mapping[str, Any] | Sampler,
    sampling: Mapping[str, Any] | SamplingParams | None = None,
    where: str = "",
) -> tuple[Sampler, SamplingParams]:
    """The sampler and law that a name, ``{"name": ..., knob: value}`` or a sampler stands for.

    A knob may go by one of its ``aliases``. Raises ``GenError`` for an unknown name, knob or law
    key (with the nearest one), for a knob under two names, for a bad value, and for a law that
    contradicts the preset's.
    """
    said = (
        dataclasses.asdict(sampling)
        if isinstance(sampling, SamplingParams)
        else dict(sampling or {})
    )
    for key in said:
        if key not in SamplingParams.__dataclass_fields__:
            raise unknown("law key", key, SamplingParams.__dataclass_fields__, where)
    if isinstance(spec, Sampler):
        return spec, SamplingParams(**said)
    given = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = given.pop("name", None)
    if not isinstance(name, str):
        raise GenError(
            "the sampler has no name; expected one of"
            f" {', '.join([*registry.table('sampler'), *registry.table('preset')])}"
        )
    samplers, presets = registry.table("sampler"), registry.table("preset")
    if name not in samplers and name not in presets:
        raise unknown("sampler", name, [*samplers, *presets], where)
    if name in presets:
        preset: Preset = presets[name]
        for key, value in preset.sampling.items():
            if said.setdefault(key, value) != value:
                raise GenError(
                    f"sampling.{key} is {said[key]!r}; the preset {name!r} means {value!r}"
                )
        cls = samplers[preset.sampler]
        given = {**preset.params, **_own_names(given, cls, preset.aliases, name, where)}
    else:
        cls = samplers[name]
        given = _own_names(given, cls, {}, name, where)
    for key in given:
        if key not in cls.__dataclass_fields__:
            raise unknown(f"knob of sampler {name!r}:", key, cls.__dataclass_fields__, where)
    try:
        return cls(**given), SamplingParams(**said)
    except GenError as error:
        raise GenError(f"{error} ({where})") if where else error from None


def _own_names(
    given: Mapping[str, Any], cls: type[Sampler], aliases: Mapping[str, str], name: str, where: str
) -> dict[str, Any]:
    """Knobs under their own names and with their own values. ``aliases``: those that go before the
    sampler's."""
    found: dict[str, tuple[str, Any]] = {}
    position = f" in {where}" if where else ""
    for key, value in given.items():
        own = key if key in cls.__dataclass_fields__ else {**cls.aliases, **aliases}.get(key, key)
        if own in found:
            raise GenError(
                f"sampler {name!r} got {found[own][0]!r} and {key!r}{position}, which are one knob,"
                f" {own}; expected one of them"
            )
        if own != key and key in cls.spellings:
            if not isinstance(value, str) or value not in cls.spellings[key]:
                raise bad_value(
                    f"sampler.{key}",
                    value,
                    f"one of {', '.join(cls.spellings[key])}; the knob itself is {own}",
                    where,
                )
            value = cls.spellings[key][value]
        found[own] = key, value
    return {own: value for own, (_, value) in found.items()}


def describe_guarantee(sampler: Sampler) -> str:
    return f"{GUARANTEES[sampler.guarantee]} ({sampler.reference})"
