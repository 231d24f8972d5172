"""One registry for everything that has a name: samplers, presets, couplings, frontends, modalities
...

``@register("sampler", "autoregressive")`` on a class or function is all there is to adding one. The
first look-up of a kind imports every module of the folders that hold it, and every entry point of
the group ``gen.plugins``.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import TypeVar

from gen.core.errors import unknown

T = TypeVar("T")
ROOMS = (  # what look-ups discover, with their sub-folders
    "gen.contracts",
    "gen.models.protocols",
    "gen.models.published",
    "gen.tokenizers",
    "gen.samplers",
    "gen.modalities",
)


class Registry:
    """Names to objects, by kind."""

    def __init__(self) -> None:
        self._kinds: dict[str, dict[str, object]] = {}
        self._discovered = False

    def register(self, kind: str, name: str) -> Callable[[T], T]:
        """A decorator. Raises ``ValueError`` for a name taken by other code, or for an in-tree
        module imported under its bare name (``samplers.x`` instead of ``gen.samplers.x``), which
        would make two copies of every class.
        """

        def add(obj: T) -> T:
            module = getattr(obj, "__module__", "gen.")
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
            return obj

        return add

    def get(self, kind: str, name: str, where: str = ""):
        """The object of that name. Raises ``GenError`` naming the nearest one."""
        table = self.table(kind)
        if name not in table:
            raise unknown(kind, name, table, where)
        return table[name]

    def table(self, kind: str) -> dict[str, object]:
        """All objects of a kind, by name in alphabetical order."""
        self.discover()
        return dict(sorted(self._kinds.get(kind, {}).items()))

    def discover(self) -> None:
        if self._discovered:
            return
        self._discovered = (
            True  # before the imports: a module may look something up while it is being imported
        )
        for room in ROOMS:
            package = importlib.import_module(room)
            for module in pkgutil.walk_packages(package.__path__, f"{room}."):
                if not module.name.rpartition(".")[2].startswith("_"):
                    importlib.import_module(module.name)
        for point in entry_points(group="gen.plugins"):
            point.load()


def origin(obj: object) -> str:
    """Where something was defined, as ``module:name``; plain data stands for itself."""
    if hasattr(obj, "__qualname__"):
        return f"{obj.__module__}:{obj.__qualname__}"
    return repr(obj)


registry = Registry()
register = registry.register
