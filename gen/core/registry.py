"""Registry of everything that has a name: samplers, presets, parts, tokenizers, modalities, ...

``@register("sampler", "autoregressive")`` on a class or function is all that adding one takes.
``params`` names the dataclass of the parameters that the object reads (``gen.core.params``).

Discovery is lazy and per kind. The first look-up of a kind imports the packages in ``HOMES`` that
hold it, with their sub-packages, and every entry point of the group ``gen.plugins``. Looking up
samplers therefore imports no tokenizer, no checkpoint family and no network. A module or plugin
that cannot be imported fails every look-up that needs it, with the same message.
"""

from __future__ import annotations

import importlib
import pkgutil
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from gen.core.errors import GenError, bad_type, unknown

T = TypeVar("T")
GROUP = "gen.plugins"
PART_KINDS = (  # parts that samplers are made of
    "coupling",
    "initialiser",
    "drafter",
    "shape",
    "length_policy",
    "verifier",
    "proposer",
    "order",
    "schedule",
    "selector",
    "remasker",
    "stop",
    "block_schedule",
    "cache_policy",
    "aggregation",
)
SAMPLER_KINDS = ("sampler", "preset", *PART_KINDS)
# kind -> modules and packages that hold it. A package that is the home of another kind is skipped
# inside of a larger home: modalities are listed without their checkpoint families.
HOMES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(SAMPLER_KINDS, ("gen.samplers",)),
    "layout": ("gen.contracts.layouts",),
    "constraint": ("gen.constraints",),
    "protocol": ("gen.models.protocols",),
    # networks, layers and tables that belong to a model and draft for its target
    "drafting": ("gen.models.targets",),
    "tokenizer": ("gen.tokenizers",),
    "modality": ("gen.modalities",),
    "scorer": ("gen.samplers.search.scorers", "gen.modalities"),
    "condition_encoder": ("gen.modalities", "gen.modalities.checkpoints"),
    "checkpoint": ("gen.modalities.checkpoints",),
    "metric": ("gen.eval.metrics",),
}


def field_names(cls: Any) -> list[str]:
    """Return the names of a dataclass's fields; none of another class."""
    return [f.name for f in fields(cls)] if is_dataclass(cls) else []


class Registry:
    """Table of names to objects, by kind."""

    def __init__(self) -> None:
        self._kinds: dict[str, dict[str, Any]] = {}
        self._params: dict[tuple[str, str], type] = {}
        self._discovered: set[str] = set()  # homes, and GROUP for the plugins
        self._complete: set[str] = set()  # those whose import has ended
        self._importing = threading.RLock()
        self._failed: dict[str, str] = {}  # home or GROUP -> message

    def register(self, kind: str, name: str, params: type | None = None) -> Callable[[T], T]:
        """Makes a decorator that adds an object.

        Args:
            kind: the table.
            name: the key in it.
            params: dataclass of the parameters that the object declares (``gen.core.params``).

        Raises:
            ValueError: the name is taken by other code, or an in-tree module was imported under
                its bare name (``samplers.x``), which would make two copies of every class.
        """

        def add(obj: T) -> T:
            module = obj.__module__ if callable(obj) else type(obj).__module__
            if module.split(".")[0] in ("samplers", "tokenizers", "modalities", "recipes"):
                raise ValueError(
                    f"{kind} {name!r} was imported as {module}; import gen.{module} instead"
                )
            table = self._kinds.setdefault(kind, {})
            if name in table and origin(table[name]) != origin(obj):
                raise ValueError(
                    f"{kind} {name!r} is registered twice: {origin(table[name])} and {origin(obj)}"
                )
            table[name] = obj
            if params is not None:
                self._params[kind, name] = params
            return obj

        return add

    def get(self, kind: str, name: str, where: str = "") -> Any:
        """Looks up one object. Raises ``GenError`` that names the nearest known name."""
        for home in HOMES.get(kind, ()):  # a later home need not be imported for it
            self._load(home, lambda home=home: _import_home(home))
            if isinstance(name, str) and name in self._kinds.get(kind, {}):
                return self._kinds[kind][name]
        table = self.table(kind)
        if not isinstance(name, str) or name not in table:
            raise unknown(kind, name, table, where)
        return table[name]

    def build(self, kind: str, spec: Any, where: str, expected: str) -> Any:
        """Creates an object of a registered dataclass.

        Args:
            kind: the table.
            spec: name, or ``{"name": ..., parameter: value}``.
            where: parameter that holds the spec, for messages.
            expected: what else may come, for the message about another type.

        Raises:
            GenError: the spec has another type or no name, the name or a parameter is unknown, or
                a value is bad.
        """
        given = {"name": spec} if isinstance(spec, str) else spec
        if not isinstance(given, Mapping):
            raise bad_type(where, spec, expected)
        values = {key: value for key, value in given.items() if key != "name"}
        if given.get("name") is None:
            raise GenError(f"{where} has no name; expected one of {', '.join(self.table(kind))}")
        make: Callable[..., Any] = self.get(kind, given["name"], where)
        known = field_names(make)
        for key in values:
            if key not in known:
                raise unknown(f"parameter of {kind} {given['name']!r}:", key, known, where)
        try:
            return make(**values)
        except GenError as error:
            raise GenError(f"{error} ({where})") from None

    def table(self, kind: str) -> dict[str, Any]:
        """Lists all objects of a kind, by name in alphabetical order.

        Raises:
            GenError: a module of the kind's homes, or a plugin, cannot be imported.
        """
        self.discover(kind)
        return dict(sorted(self._kinds.get(kind, {}).items()))

    def params_of(self, kind: str, name: str) -> type | None:
        """Finds the dataclass of parameters that a registered object declares, if it has any."""
        self.discover(kind)
        return self._params.get((kind, name))

    def kinds(self) -> list[str]:
        """Lists all kinds, also those of which nothing is registered."""
        self.discover()
        return sorted({*HOMES, *self._kinds})

    def discover(self, kind: str | None = None) -> None:
        """Imports what holds a kind; of ``None`` and of a kind without a home, everything."""
        every = [home for homes in HOMES.values() for home in homes]
        for home in dict.fromkeys(HOMES.get(kind or "", every)):
            self._load(home, lambda home=home: _import_home(home))
        self._load(GROUP, _import_plugins)

    def _load(self, source: str, load: Callable[[], None]) -> None:
        """Runs one import once, and repeats the message of one that has failed."""
        if source in self._failed:
            raise GenError(self._failed[source])
        if source in self._complete:
            return
        # another thread must not see the part of a table that is there already
        with self._importing:
            if source in self._discovered:
                return
            # before the imports: a module may look something up while it is being imported
            self._discovered.add(source)
            try:
                load()
            except BaseException as error:
                self._discovered.discard(source)
                if isinstance(error, GenError):
                    self._failed[source] = str(error)
                raise
            self._complete.add(source)


def _import_home(home: str) -> None:
    """Imports a package with its sub-packages, or a module. Raises ``GenError`` for one that
    fails."""
    for name in (home, *_modules_of(home)):
        try:
            importlib.import_module(name)
        # a module may raise anything
        except (Exception, SystemExit) as error:
            raise GenError(
                f"module {name} cannot be imported: {type(error).__name__}: {error}"
            ) from error


def _modules_of(package: str) -> Iterator[str]:
    """Names of all modules inside of a package, without those of other homes and those whose name
    begins with an underscore."""
    others = {home for homes in HOMES.values() for home in homes} - {package}
    for found in pkgutil.iter_modules(getattr(importlib.import_module(package), "__path__", [])):
        name = f"{package}.{found.name}"
        if found.name.startswith("_") or name in others:
            continue
        yield name
        if found.ispkg:
            yield from _modules_of(name)


def _import_plugins() -> None:
    """Imports every entry point of the group. Raises ``GenError`` that names one that fails."""
    for point in entry_points(group=GROUP):
        try:
            point.load()
        # a plugin may raise anything, or leave
        except (Exception, SystemExit) as error:
            raise GenError(
                f"plugin {point.name!r} ({_package_of(point)}{point.value}) cannot be imported:"
                f" {type(error).__name__}: {error}; repair or uninstall it"
            ) from error


def _package_of(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}, " if point.dist else ""


def origin(obj: Any) -> str:
    """Names where an object was defined, as ``module:name``; plain data stands for itself."""
    if hasattr(obj, "__qualname__"):
        return f"{obj.__module__}:{obj.__qualname__}"
    return repr(obj)


registry = Registry()
register = registry.register
