"""Base classes of samplers."""

from __future__ import annotations

import dataclasses
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import Field, FrozenInstanceError
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from gen.core.errors import GenError
from gen.core.params import Parts, Rule, check, declared, params_of, part_kinds, readers
from gen.core.registry import registry

if TYPE_CHECKING:
    from gen.core.rng import RNG
    from gen.core.stats import SampleOutput
    from gen.core.token_space import TokenSpace

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


def draft_models(value: Any) -> tuple[str, ...]:
    """Read the value of a ``draft_model``: the names in it, a list or joined by commas."""
    names = value if isinstance(value, (list, tuple)) else str(value or "").split(",")
    return tuple(name.strip() for name in names if name.strip())
