"""Samplers and presets, and their resolution from a name with parameters."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import Field, FrozenInstanceError
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from gen.core.errors import GenError, bad_type, bad_value, cut, unknown
from gen.core.params import Parts, Rule, check, declared, params_of, part_kinds, readers
from gen.core.plain import require_plain
from gen.core.registry import registry
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import GUARANTEES, TokenSpace

if TYPE_CHECKING:
    from gen.core.method import Preset
    from gen.core.rng import RNG
    from gen.core.stats import SampleOutput

Callback = Callable[[dict[str, Any]], None]


class Sampler(ABC):
    """Decoding method: a frozen dataclass whose fields are its parameters.

    Attributes:
        protocol: protocol of the model: ``causal``, ``masked`` or ``blocks``.
        kinds: token spaces that the sampler decodes, ``codes`` (tokens) or ``latents``.
        guarantee: guarantee for these parameters, one of ``gen.core.token_space.GUARANTEES``; a
            property where they decide about it.
        reference: sampler that ``guarantee`` is relative to.
        draft_protocol: protocol of the draft model, where it is not the sampler's own.
        papers: arXiv ids of the papers that the sampler implements.
        aliases: other names of parameters -> the parameters' own names.
        spellings: alias -> its values -> the parameter's own values.
        sampling_aliases: names under which a spec accepts sampling parameters as well -> the
            sampling parameter, and the number to add to the value.
        rules: what must hold between the parameters, checked in this order.
        wraps: whether the sampler runs another one, the spec in its parameter ``base``; that one
            then decides about protocol and kinds.
    """

    protocol: ClassVar[str]
    wraps: ClassVar[bool] = False
    kinds: ClassVar[tuple[str, ...]] = ("codes",)
    # abstract, since a sampler without a guarantee must not be made; a subclass overrides the
    # property by a string as well
    guarantee: str = property(  # pyright: ignore[reportAssignmentType]
        abstractmethod(lambda self: "")
    )
    reference: ClassVar[str]
    draft_protocol: ClassVar[str | None] = None
    papers: ClassVar[tuple[str, ...]] = ()
    aliases: ClassVar[Mapping[str, str]] = {}
    spellings: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    sampling_aliases: ClassVar[Mapping[str, tuple[str, float]]] = {}
    rules: ClassVar[tuple[Rule, ...]] = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]  # every subclass is a dataclass

    def __post_init__(self) -> None:
        check(self)

    @property
    def drafted(self) -> bool:
        """True where the sampler needs a draft model. Such a sampler has the parameter
        ``draft_model``: the name of a model, or None for the modality's own."""
        return False

    @property
    def takes_several_drafts(self) -> bool:
        """True where there may be several draft models."""
        return False

    @property
    def draft_names(self) -> tuple[str | None, ...]:
        """Names of the draft models, None for the modality's own; empty where it needs none. The
        ``draft`` of a call is the target of the only one, or one target for each."""
        return (vars(self)["draft_model"],) if self.drafted else ()

    @property
    def timed(self) -> bool:
        """True where a clock decides how many positions are computed at a time."""
        return False

    @property
    def deterministic(self) -> bool:
        """True where a rule chooses the tokens without drawing: no seed changes them."""
        return False

    @property
    def returns_logprobs(self) -> bool:
        """True where every token is drawn from one column of one forward pass, whose
        log-probabilities are returned on request (``SamplingParams.logprobs``)."""
        return self.protocol == "causal" and "codes" in self.kinds

    @property
    def counts_steps(self) -> bool:
        """True where the parameter ``steps``, if there is one, sets the number of steps."""
        return True

    @property
    def reproducible(self) -> bool:
        """True where the same seed always gives the same tokens. A timed sampler does so only if
        the tokens do not depend on the clock."""
        return not self.timed or self.guarantee == "same_tokens"

    @property
    def opens(self) -> bool:
        """True where items may join a run (``begin``) between two forward passes.

        No item may learn from another one then: an item that joins changes no other one's tokens.
        """
        return False

    @property
    def parts(self) -> Parts:
        """The parts in use: ``parts.coupling`` is what the parameter ``coupling`` names."""
        return Parts(self)

    def params_of(self, param: str) -> Any:
        """Make the parameters of the part that ``param`` names: those that the sampler has, and the
        part's own defaults of the others. None for a part that declares none."""
        return params_of(self, param)

    def unread(self, param: str) -> list[tuple[str, str]]:
        """List the parts (kind, name) that read ``param`` if none of them is in use; otherwise
        nothing."""
        kinds = part_kinds(self)
        chosen = {(kind, getattr(self, name)) for name, kind in kinds.items()}
        for owners in self._readers(param, kinds):
            if not any((kind, name) in chosen or (kind, None) in chosen for kind, name in owners):
                return owners
        return []

    def _readers(self, param: str, kinds: Mapping[str, str]) -> list[list[tuple[str, str]]]:
        """List the parts that read ``param``; see ``gen.core.params.readers``."""
        return readers(type(self).__dataclass_fields__[param], kinds)

    @property
    def mixes_sampling(self) -> bool:
        """True where the items of an open run may differ in temperature, top-k, top-p, min-p and
        guidance scale: the sampler reads the target's log-probabilities alone."""
        return False

    @property
    def constraint_refusal(self) -> str:
        """Reason for which the sampler refuses a token space with a constraint; empty where every
        token that it commits is allowed by it.

        Causal targets see to it themselves. A sampler that commits several positions of a canvas
        at a time has to check them one after the other, and says so with an empty reason.
        """
        return "" if self.protocol == "causal" else "it checks no tokens that it commits together"

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
        """Decode every row of the target.

        Args:
            target: model with the conditions of all rows.
            rng: counter-based random numbers.
            draft: target of the draft model, for a sampler that is ``drafted``; a sequence of
                targets where ``draft_names`` has several.
            canvas: [B, T(, C)], for masked samplers only; masked (``TokenSpace.is_masked``) where
                a token is to be generated.
            trace: record every forward pass.
            callback: called once per forward pass with ``{"step", "done", "total"}``.
        """

    def begin(self, target, rng: RNG, *, draft=None, canvas=None, trace: bool = False) -> Any:
        """Begin a run that a search steps (``gen.samplers.engine.stepping.SteppableRun``).

        The arguments are those of a call.

        Raises:
            GenError: the sampler cannot be stepped.
        """
        raise GenError(
            f"sampler {_name_of(self)} cannot be stepped: a search cannot stop it between two"
            " forward passes; expected a causal sampler such as 'autoregressive' or"
            " 'speculative_jacobi', or a masked one such as 'maskgit'"
        )


def _name_of(sampler: Sampler) -> str:
    """Return the name of a sampler in the registry, or that of its class."""
    known = registry.table("sampler").items()
    return next((n for n, cls in known if cls is type(sampler)), type(sampler).__name__)


def require_constraint_kept(sampler: Sampler, space: TokenSpace) -> None:
    """Refuse a sampler that cannot keep the constraint of a token space.

    Raises:
        GenError: there is a constraint, and the sampler has a ``constraint_refusal``.
    """
    if space.constraint is not None and sampler.constraint_refusal:
        raise GenError(
            f"sampler {_name_of(sampler)} refuses the constraint of the token space:"
            f" {sampler.constraint_refusal}; expected a sampler that keeps it, such as"
            " masked_iterative, or no constraint"
        )


class _ComposedFields:
    """Descriptor that stands for the fields of a ``PartSampler`` in the dataclass protocol."""

    def __get__(self, instance: object, cls: type[PartSampler]) -> dict[str, Field[Any]]:
        return _composed(cls, len(registry._params))[0]


class PartSampler(Sampler):
    """Sampler made of registered parts.

    Its parameters are its own, declared as those of a dataclass, and, flat beside them, those that
    its possible parts declare. ``dataclasses.fields``, ``asdict`` and ``replace`` know all of them,
    including those of a part that a plugin registers later.

    Attributes:
        own: fields of the sampler itself, by name; some of them name parts.
    """

    own: ClassVar[dict[str, Field[Any]]] = {}
    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    else:
        __dataclass_fields__ = _ComposedFields()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # its annotations in a dataclass of their own, which knows nothing of parts
        stated = inspect.get_annotations(cls)
        body = {name: vars(cls)[name] for name in stated if name in vars(cls)}
        body |= {"__annotations__": stated, "__module__": cls.__module__}
        stating = dataclasses.dataclass(type(cls.__name__, (), body))
        cls.own = {}
        bases: tuple[Any, ...] = (*cls.__mro__[:0:-1], stating)
        for base in bases:
            if "own" in vars(base):
                cls.own |= base.own
            elif "__dataclass_fields__" in vars(base):
                cls.own |= {f.name: f for f in dataclasses.fields(base)}
        for name, f in cls.own.items():
            setattr(cls, name, f.default)

    def __init__(self, **values: Any) -> None:
        fields = type(self).__dataclass_fields__
        for name in values:
            if name not in fields:
                raise TypeError(f"{type(self).__name__} has no parameter {name!r}")
        for name, f in fields.items():
            object.__setattr__(self, name, values.get(name, f.default))
        self.__post_init__()

    def _readers(self, param: str, kinds: Mapping[str, str]) -> list[list[tuple[str, str]]]:
        if param in self.own:
            return super()._readers(param, kinds)
        return [_composed(type(self), len(registry._params))[1][param]]

    def __setattr__(self, name: str, value: Any) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def __repr__(self) -> str:
        values = ", ".join(f"{k}={getattr(self, k)!r}" for k in type(self).__dataclass_fields__)
        return f"{type(self).__qualname__}({values})"

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), *(getattr(self, k) for k in type(self).__dataclass_fields__)))


@lru_cache(maxsize=64)
def _composed(
    cls: type[PartSampler], declarations: int
) -> tuple[dict[str, Field], dict[str, list[tuple[str, str]]]]:
    """Collect the fields of a sampler and of all its possible parts.

    Args:
        cls: the sampler.
        declarations: number of registered parts, the key of the cache: it changes when parts are
            registered.

    Returns:
        The fields by name, and the parts (kind, name) that declare those of parts.

    Raises:
        GenError: a part declares a parameter of the sampler itself.
    """
    found, readers_of = dict(cls.own), {}
    kinds = [f.metadata["kind"] for f in cls.own.values() if "kind" in f.metadata]
    for name, (f, owners) in declared(kinds).items():
        if name in found:
            raise GenError(
                f"{' '.join(map(repr, owners[0]))} declares {name}, which is a parameter of the"
                " sampler itself; expected another name"
            )
        found[name], readers_of[name] = f, owners
    return found, readers_of


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


def draft_models(value: Any) -> tuple[str, ...]:
    """Read the value of a ``draft_model``: the names in it, a list or joined by commas."""
    names = value if isinstance(value, (list, tuple)) else str(value or "").split(",")
    return tuple(name.strip() for name in names if name.strip())


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
