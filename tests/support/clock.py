"""Bounds of time for the slow tier: what a clock leaves out is skipped and named, never failed.

``--clock`` bounds a session and ``--folder-clock`` each folder of it, in seconds of each test
process. ``--turn N`` begins with folder N, and in each folder with module N, so that what is left
out differs from turn to turn.
"""

import time
from collections import Counter, defaultdict

import pytest

STARTED = pytest.StashKey[float]()
SPENT = pytest.StashKey[Counter]()  # seconds of each folder


def pytest_addoption(parser):
    group = parser.getgroup("clock")
    group.addoption("--clock", type=float, help="seconds after which no further test begins")
    group.addoption("--folder-clock", type=float, help="the same for the tests of each folder")
    group.addoption("--turn", type=int, default=0, help="folder and module that come first")


def pytest_configure(config):
    config.stash[STARTED] = time.monotonic()
    config.stash[SPENT] = Counter()


def rotated(groups, turn):
    """Begins with group ``turn``, counted around."""
    first = turn % max(len(groups), 1)
    return groups[first:] + groups[:first]


def grouped(items, key):
    """Lists of the items that share a key, in the order of their first ones."""
    groups = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return list(groups.values())


@pytest.hookimpl(trylast=True)  # what is deselected has no turn
def pytest_collection_modifyitems(config, items):
    turn = config.option.turn
    if turn:
        folders = rotated(grouped(items, lambda item: item.path.parent), turn)
        items[:] = [
            item
            for folder in folders
            for module in rotated(grouped(folder, lambda item: item.path), turn)
            for item in module
        ]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    begun = time.monotonic()
    try:
        return (yield)
    finally:
        item.config.stash[SPENT][item.path.parent] += time.monotonic() - begun


@pytest.hookimpl(tryfirst=True)  # before any fixture
def pytest_runtest_setup(item):
    option, stash, folder = item.config.option, item.config.stash, item.path.parent
    session = time.monotonic() - stash[STARTED]
    for clock, seconds in ((option.clock, session), (option.folder_clock, stash[SPENT][folder])):
        if clock is not None and seconds >= clock:
            name = folder.relative_to(item.config.rootpath)
            pytest.skip(f"no time left after {clock:.0f} s for {name}")
