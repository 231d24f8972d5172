"""Resolution of samplers and presets from a name with parameters."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gen.core.errors import GenError, bad_type, bad_value, cut, unknown
from gen.core.params import part_kinds
from gen.core.plain import require_plain
from gen.core.registry import registry
from gen.core.sampler import Sampler
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import GUARANTEES

if TYPE_CHECKING:
    from gen.core.method import Preset

SamplerSpec = str | Mapping[str, Any] | Sampler


def spell(sampler: SamplerSpec, where: str = "") -> dict[str, Any]:
    """Return a sampler as ``{"name": ..., parameter: value}``; ``where`` is its location.

    Raises:
        GenError: the class of a sampler object is not registered, or a value of another type came.
    """
    if isinstance(sampler, str):
        return {"name": sampler}
    if isinstance(sampler, Mapping):
        return dict(sampler)
    if not isinstance(sampler, Sampler):
        expected = "a name, {'name': ..., parameter: value} or a sampler"
        raise bad_type(where or "sampler", sampler, expected)
    names = [name for name, cls in registry.table("sampler").items() if cls is type(sampler)]
    if not names:
        raise GenError(f"{type(sampler).__name__} is not registered as a sampler")
    return {"name": names[0], **dataclasses.asdict(sampler)}


def sampler_class(sampler: SamplerSpec, where: str = "") -> type[Sampler]:
    """Return the class of a sampler or preset; ``where`` is the location of the spec, for messages.

    Raises:
        GenError: the name is unknown, or there is none.
    """
    if isinstance(sampler, Sampler):
        return type(sampler)
    name = spell(sampler, where).get("name")
    samplers, presets = registry.table("sampler"), registry.table("preset")
    if not isinstance(name, str):
        owner = f"the sampler in {where}" if where else "the sampler"
        raise GenError(f"{owner} has no name; expected one of {', '.join([*samplers, *presets])}")
    if name not in samplers and name not in presets:
        raise unknown("sampler", name, [*samplers, *presets], where)
    return samplers[presets[name].sampler if name in presets else name]


def innermost(sampler: SamplerSpec) -> SamplerSpec:
    """Return the spec that decodes: of a sampler that wraps another one, the innermost base."""
    while (cls := sampler_class(sampler)).wraps:
        preset = preset_of(sampler)
        stated = {**params(cls), **(preset.params if preset else {}), **spell(sampler)}
        sampler = stated["base"]
    return sampler


def protocol_of(sampler: SamplerSpec) -> str:
    """Return the protocol of the model that a sampler or preset decodes with."""
    sampler = innermost(sampler)
    return sampler.protocol if isinstance(sampler, Sampler) else sampler_class(sampler).protocol


def takes_kinds(sampler: SamplerSpec) -> tuple[str, ...]:
    """Return the kinds of token that a sampler or preset decodes, the preferred one first."""
    sampler = innermost(sampler)
    kinds = sampler_class(sampler).kinds
    preset = preset_of(sampler)
    return preset.kinds if preset is not None and preset.kinds else kinds


def preset_of(sampler: SamplerSpec) -> Preset | None:
    """Return the preset that a sampler was named as; None for a plain sampler."""
    if isinstance(sampler, Sampler):
        return None
    name = spell(sampler).get("name")
    return registry.table("preset").get(name) if isinstance(name, str) else None


def parameter_names(sampler: type[Sampler]) -> list[str]:
    """Return the names of the parameters of a sampler; class attributes are none."""
    return [f.name for f in dataclasses.fields(sampler)]


def accepted_names(spec: SamplerSpec) -> set[str]:
    """Return the names under which a spec takes parameters: the parameters' own and others."""
    cls, preset = sampler_class(spec), preset_of(spec)
    others = {*cls.aliases, *cls.sampling_aliases, *(preset.aliases if preset else ())}
    return {*parameter_names(cls), *others}


def params(sampler: type[Sampler]) -> dict[str, Any]:
    """Return the parameters of a sampler and their defaults."""
    return {f.name: f.default for f in dataclasses.fields(sampler)}


def resolve_sampler(
    spec: str | Mapping[str, Any] | Sampler,
    sampling: Mapping[str, Any] | SamplingParams | None = None,
    where: str = "",
) -> tuple[Sampler, SamplingParams]:
    """Make a sampler and its sampling parameters from a user's spec.

    Args:
        spec: a name, ``{"name": ..., parameter: value}`` or a sampler. A parameter may go by one of
            its ``aliases``.
        sampling: sampling parameters, or some of them by name.
        where: location of the spec, for messages.

    Raises:
        GenError: an unknown name, parameter or sampling key (with the nearest one), a parameter
            under two names, a bad value, or a sampling key that contradicts the preset's.

    Warns:
        a parameter that only unused parts read.
    """
    explicit = _explicit_sampling(sampling, where)
    if isinstance(spec, Sampler):
        return spec, require_answerable(spec, SamplingParams(**explicit))
    sampler_class(spec, where)  # an unknown name fails here
    given = {"name": spec} if isinstance(spec, str) else dict(spec)
    _require_plain(given, where)
    name: str = given.pop("name")
    samplers, presets = registry.table("sampler"), registry.table("preset")
    if name in presets:
        preset: Preset = presets[name]
        for key, value in preset.sampling.items():
            if explicit.setdefault(key, value) != value:
                raise GenError(
                    f"sampling.{key} is {explicit[key]!r}; the preset {name!r} means {value!r}"
                )
        cls = samplers[preset.sampler]
        _take_sampling(given, cls, explicit)
        implied = preset.params
        given = _own_names(given, cls, preset.aliases, name, where)
    else:
        cls, implied = samplers[name], {}
        _take_sampling(given, cls, explicit)
        given = _own_names(given, cls, {}, name, where)
    fields = parameter_names(cls)
    for key in given:
        if key not in fields:
            raise unknown(f"parameter of sampler {name!r}:", key, fields, where)
    if cls.wraps:
        base = {**params(cls), **implied, **given}["base"]
        inner = resolve_sampler(base, explicit, f"{where}.base" if where else "sampler.base")
        explicit = inner[1].keywords()
    try:
        sampler = cls(**{**implied, **given})
        _warn_of_unread(sampler, {k: v for k, v in given.items() if v != implied.get(k)}, where)
        return sampler, require_answerable(sampler, SamplingParams(**explicit))
    except GenError as error:
        raise GenError(f"{error} ({where})") if where else error from None


def _require_plain(given: Mapping[str, Any], where: str) -> None:
    """Raise ``GenError`` for a value of a spec that is no plain data."""
    for key, value in given.items():
        require_plain(f"{where or 'sampler'}.{cut(str(key))}", value)


def require_answerable(sampler: Sampler, sampling: SamplingParams) -> SamplingParams:
    """Return the sampling parameters. Raises ``GenError`` for those that the sampler cannot
    answer."""
    if sampling.logprobs is not None and not sampler.returns_logprobs:
        raise GenError(
            f"sampling.logprobs is {sampling.logprobs}, and sampler {type(sampler).__name__} draws"
            " no token from the distribution of the next one; expected a causal sampler of tokens"
            " such as 'autoregressive' or 'speculative_jacobi'"
        )
    return sampling


def implied_sampling(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters that a spec states: those of its preset, and those that it
    has under a name of ``Sampler.sampling_aliases``. An unknown sampler implies none."""
    presets, given = registry.table("preset"), dict(spec)
    preset: Preset | None = presets.get(given.get("name", ""))
    found = {} if preset is None else dict(preset.sampling)
    name = given.get("name") if preset is None else preset.sampler
    cls = registry.table("sampler").get(name) if isinstance(name, str) else None
    if cls is not None:
        _take_sampling(given, cls, found)
        if cls.wraps:
            base = {**params(cls), **(preset.params if preset else {}), **given}["base"]
            found = {**implied_sampling(spell(base)), **found}
    return found


def _take_sampling(given: dict[str, Any], cls: type[Sampler], sampling: dict[str, Any]) -> None:
    """Move what ``given`` has under a name of ``sampling_aliases`` to the sampling parameters.

    Raises:
        GenError: the value is no number, or the sampling parameter has another value.
    """
    for alias, (key, offset) in cls.sampling_aliases.items():
        if alias not in given:
            continue
        value = given.pop(alias)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise bad_value(f"sampler.{alias}", value, "a number")
        meant = value + offset
        if sampling.setdefault(key, meant) != meant:
            raise GenError(
                f"sampling.{key} is {sampling[key]!r}, and sampler.{alias} {value!r} means"
                f" {meant!r}; expected one of them"
            )


def _explicit_sampling(
    sampling: Mapping[str, Any] | SamplingParams | None, where: str
) -> dict[str, Any]:
    """Return the sampling parameters that came. Raises ``GenError`` for an unknown key."""
    if isinstance(sampling, SamplingParams):
        return sampling.keywords()
    for key in sampling or {}:
        if key not in SamplingParams.__dataclass_fields__:
            raise unknown("sampling key", key, SamplingParams.__dataclass_fields__, where)
    return dict(sampling or {})


def _warn_of_unread(sampler: Sampler, given: Mapping[str, Any], where: str) -> None:
    """Warn of changed parameters that no part in use reads."""
    used = {kind: getattr(sampler, name) for name, kind in part_kinds(sampler).items()}
    fields = type(sampler).__dataclass_fields__
    for key, value in given.items():
        owners = sampler.unread(key) if value != fields[key].default else []
        if owners:
            kinds = dict.fromkeys(kind for kind, _ in owners)
            warnings.warn(
                f"sampler.{key} is {value!r}{f' in {where}' if where else ''} but has no"
                f" effect: it belongs to {', '.join(f'{k} {n!r}' for k, n in owners)}; here"
                f" {', '.join(f'{k} is {used[k]!r}' for k in kinds)}",
                stacklevel=3,
            )


def _own_names(
    given: Mapping[str, Any], cls: type[Sampler], aliases: Mapping[str, str], name: str, where: str
) -> dict[str, Any]:
    """Translate aliases and spellings of parameters. ``aliases``: those of the preset, which
    override the sampler's."""
    found: dict[str, tuple[str, Any]] = {}
    position = f" in {where}" if where else ""
    for key, value in given.items():
        own = key if key in parameter_names(cls) else {**cls.aliases, **aliases}.get(key, key)
        if own in found:
            raise GenError(
                f"sampler {name!r} got {found[own][0]!r} and {key!r}{position}, which are names"
                f" of the same parameter, {own}; expected one of them"
            )
        if own != key and key in cls.spellings:
            if not isinstance(value, str) or value not in cls.spellings[key]:
                raise bad_value(
                    f"sampler.{key}",
                    value,
                    f"one of {', '.join(cls.spellings[key])}; the parameter itself is {own}",
                    where,
                )
            value = cls.spellings[key][value]
        found[own] = key, value
    return {own: value for own, (_, value) in found.items()}


def describe_guarantee(sampler: Sampler, kept: str | None = None) -> str:
    """Describe a sampler's guarantee, or the one that its outputs keep, with the reference."""
    return f"{GUARANTEES[kept or sampler.guarantee]} ({sampler.reference})"
