"""Counts of an engine, for monitoring."""

from __future__ import annotations

import threading
from collections import Counter

from gen.engine.ticket import Ticket


class EngineStats:
    """Counts of an engine since it began, by the id of the model.

    Attributes:
        waiting: items that wait for a row.
        running: items that have a row.
        nfe: forward passes of items.
        steps: forward passes of batches; nfe / steps is the mean number of rows.
        tokens: tokens of finished items.
        drafted: drafts that were verified.
        accepted: drafts that were accepted.
        requests: requests that ended, by (model, state).
    """

    def __init__(self) -> None:
        self.waiting: Counter[str] = Counter()
        self.running: Counter[str] = Counter()
        self.nfe: Counter[str] = Counter()
        self.steps: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.drafted: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()
        self.requests: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def add(self, model: str, **counts: int) -> None:
        """Add to counts of a model, named as the attributes are."""
        with self._lock:
            for name, count in counts.items():
                vars(self)[name][model] += count

    def move(self, ticket: Ticket, waiting: int = 0, running: int = 0) -> None:
        """Add to the items of a ticket that wait and that have a row."""
        with self._lock:
            ticket.waiting += waiting
            ticket.running += running
            self.waiting[ticket.model] += waiting
            self.running[ticket.model] += running

    def settle(self, ticket: Ticket) -> None:
        """Count no item of a ticket as waiting or running any more."""
        self.move(ticket, -ticket.waiting, -ticket.running)

    def ended(self, ticket: Ticket) -> None:
        """Count a request that ended."""
        self.settle(ticket)
        with self._lock:
            self.requests[ticket.model, ticket.state] += 1
