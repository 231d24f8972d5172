"""SIGTERM ends a run, also where its interrupt got lost."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import pytest

from gen.core.interrupts import terminable
from gen.jobs.signals import stoppable


def test_an_interrupt_that_somebody_catches_ends_the_run_that_begins_afterwards():
    """As libraries do that catch everything while they import others."""
    with terminable():
        with stoppable() as stop:  # the control
            assert not stop()
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
        with pytest.raises(KeyboardInterrupt), stoppable():
            raise AssertionError("the run began")
    with terminable(), stoppable() as stop:  # of the next command
        assert not stop()
