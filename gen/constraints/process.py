"""Constraints that are built in another process, which ends when nobody waits for them any more."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from gen.constraints import worker
from gen.constraints.budget import Budget, Limits
from gen.constraints.build import limits_of, read
from gen.constraints.kind import Context
from gen.constraints.worker import packed, shared
from gen.contracts.constraint import Constraint
from gen.core.worker import Call, Exceeded, Worker

Interrupted = Callable[[], Exception | None]


class BuilderProcess:
    """Process that builds constraints, started when it is first needed.

    Attributes:
        worker: the process. It forks another one for every constraint.
    """

    def __init__(self) -> None:
        self.worker = Worker(f"{worker.__name__}:{worker.prepare.__name__}")

    def start(self) -> None:
        """Start the process where it does not run; it needs some tenths of a second."""
        self.worker.start()

    def build(
        self,
        structured: Mapping[str, Any],
        text: str | None,
        context: Context,
        most: Limits | None,
        interrupted: Interrupted,
    ) -> Constraint:
        """Build a constraint; arguments as of ``gen.constraints.build.built``.

        Args:
            structured: the rule.
            text: the same as JSON; None where it is none.
            context: model and request.
            most: what building may take; None takes the usual limits, and rules may state others.
            interrupted: returns the error that ends the construction, None while it goes on.

        Raises:
            GenError: see there.
        """
        read(structured)
        limits = limits_of(structured, most)
        job = {
            "rule": dict(structured) if text is None else text,
            "context": replace(context, legal=np.zeros((0, 0), bool)),
            "legal": packed(context.legal),
            "most": most,
        }
        data = pickle.dumps(job, pickle.HIGHEST_PROTOCOL)
        function = f"{worker.__name__}:{worker.answer.__name__}"
        with self.worker.connect() as connection:
            try:
                payload = connection.call(
                    Call(function, data, limits.seconds, limits.megabytes), interrupted
                )
            except Exceeded as error:
                name = next(key for key in structured if key != "budget")
                raise Budget(limits, name, most).exceeded(error.limit) from None
        result = _loaded(payload, context)
        if isinstance(result, Exception):
            raise result
        return result

    def close(self) -> None:
        """End the process, and with it all that it builds."""
        self.worker.close()


def _loaded(payload: bytes, context: Context) -> Any:
    """Return a result of ``gen.constraints.worker.dumped``."""
    unpickler = _Unpickler(io.BytesIO(payload))
    unpickler.known = shared(context)
    return unpickler.load()


class _Unpickler(pickle.Unpickler):
    """Unpickler that knows objects by name."""

    known: dict[str, Any]

    def persistent_load(self, pid: str) -> Any:
        return self.known[pid]
