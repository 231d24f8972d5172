"""What tests leave behind in the registry fails the module that left it, not those after it."""

import inspect
from pathlib import Path

import pytest

from gen.core.registry import registry

TESTS = Path(__file__).parents[1]


def registered_by_tests() -> set[tuple[str, str]]:
    """Return kind and name of registered objects whose code is under ``tests``."""
    found = set()
    for kind, table in registry._kinds.items():
        for name, entry in table.items():
            made = entry if inspect.isclass(entry) or inspect.isfunction(entry) else type(entry)
            try:
                file = inspect.getfile(made)
            except TypeError:  # built into Python
                continue
            if TESTS in Path(file).parents:
                found.add((kind, name))
    return found


@pytest.fixture(scope="module", autouse=True)
def _registry_is_left_as_found():
    before = registered_by_tests()
    yield
    left = registered_by_tests() - before
    for kind, name in left:
        del registry._kinds[kind][name]
    assert not left, f"left in the registry: {sorted(left)}"
