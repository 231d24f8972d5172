"""Tests use one thread: on a busy machine two of them wait for each other. What stands is taken out
of the way of the garbage collector: libraries put a million objects into memory, and looking
through them takes longer than most tests.
"""

import gc
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

# torch reads it once, for threads that are not this one, such as those of a server
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from gen.pipeline import arguments

# assertions of shared helpers show their values too
SHARED = [path.stem for path in sorted((Path(__file__).parent / "support").glob("*.py"))]
pytest.register_assert_rewrite(*SHARED)
pytest_plugins = ["clock", "leaks", "toyjob", "crashing"]  # options and fixtures that rooms share

torch.set_num_threads(1)
# a call without a seed draws one; here it draws 0, so that a failure can be seen again
arguments.DRAWN_SEEDS = 1
# A shell starts so what runs in the background, and children would inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Leave every n-th case of a ``thinned(n)`` test in the fast tier; the others are slow."""
    seen = Counter()
    for item in items:
        thinned = item.get_closest_marker("thinned")
        if thinned is not None and not item.get_closest_marker("slow"):
            name = item.nodeid.partition("[")[0]
            if seen[name] % thinned.args[0]:
                item.add_marker(pytest.mark.slow)
            seen[name] += 1


@pytest.fixture(scope="module", autouse=True)
def _what_stands_is_no_garbage():
    gc.collect()  # first, so that no garbage stays for good
    gc.freeze()
