"""Budget of a construction: time, states and memory, checked inside of every loop.

A budget is that of the context (``contextvars``), so that the operations on automata take none as
an argument. Without one the states alone are limited:

    with Budget(Limits(seconds=0.5), "regex"):
        regex("(a{0,100}){0,100}")

Memory is that of the tables of one operation, counted before they are made.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, fields, replace
from typing import Any

from gen.core.errors import GenError, bad_type, bad_value, hint

MEGABYTE = 1_000_000
FLAGS = {
    "seconds": "--constraint-seconds",
    "states": "--constraint-states",
    "megabytes": "--constraint-megabytes",
}


class Unsupported(GenError):
    """Rule that no automaton expresses, or none that is built here."""


class BudgetExceeded(GenError):
    """Rule whose construction took more than its budget.

    Attributes:
        limit: name of the limit, a field of ``Limits``.
    """

    def __init__(self, message: str, limit: str):
        super().__init__(message)
        self.limit = limit

    def __reduce__(self) -> Any:
        return BudgetExceeded, (str(self), self.limit)


def within(where: str, error: GenError) -> GenError:
    """Return an error with what it is about before its message."""
    if isinstance(error, BudgetExceeded):  # about the whole rule
        return error
    kind = Unsupported if isinstance(error, Unsupported) else GenError
    return kind(f"{where}: {error}")


@dataclass(frozen=True)
class Limits:
    """What building one constraint may take.

    Attributes:
        seconds: time.
        states: states of an automaton, also of those that it is made of.
        megabytes: memory of the construction, in millions of bytes.

    Raises:
        GenError: a value is no number above 0.
    """

    seconds: float = 2.0
    states: int = 50_000
    megabytes: float = 256.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not value > 0 or (field.name == "states" and value != int(value)):
                raise bad_value(f"structured.budget.{field.name}", value, "a number above 0")

    def of(self, given: Any, most: Limits | None) -> Limits:
        """Return the limits with those that a rule states as ``budget``.

        Args:
            given: the value of ``budget``; None states none.
            most: the highest that may be stated; None sets no bound.

        Raises:
            GenError: the value is no mapping of limits, or one of them is above its bound.
        """
        if given is None:
            return self
        names = [field.name for field in fields(self)]
        if not isinstance(given, Mapping):
            raise bad_type("structured.budget", given, 'a mapping such as {"seconds": 10}')
        for name, value in given.items():
            if name not in names:
                raise GenError(
                    f"structured.budget has the key {name!r}; expected {', '.join(names)}."
                    f"{hint(name, names)}"
                )
            found = replace(self, **{name: value})
            if most is not None and getattr(found, name) > getattr(most, name):
                bound = f"at most {getattr(most, name):g} here ({FLAGS[name]} of gen serve)"
                raise bad_value(f"structured.budget.{name}", value, bound)
        return replace(self, **given)


class Budget(AbstractContextManager["Budget"]):
    """Budget of one construction; entered, it is that of the context.

    Args:
        limits: what the construction may take.
        what: what is built, for messages: a kind of constraint.
        most: limits that a rule may state at most; None sets no bound.
        interrupted: returns an error that ends the construction, None while it goes on; it is
            asked a few times per second.
    """

    def __init__(
        self,
        limits: Limits,
        what: str = "constraint",
        most: Limits | None = None,
        interrupted: Callable[[], Exception | None] | None = None,
    ):
        self.limits, self.what, self.most = limits, what, most
        self.interrupted = interrupted
        self.seconds = limits.seconds
        self.until = time.monotonic() + self.seconds
        self._asked = 0.0
        self._tokens: list[Token[Budget]] = []

    def __enter__(self) -> Budget:
        self._tokens.append(_BUDGET.set(self))
        return self

    def __exit__(self, *_: object) -> None:
        _BUDGET.reset(self._tokens.pop())

    def part(self, share: float) -> Budget:
        """Return the budget of a part of the construction: a share of the time that is left."""
        part = Budget(self.limits, self.what, self.most, self.interrupted)
        now = time.monotonic()
        part.seconds = share * (self.until - now)
        part.until = now + part.seconds
        return part

    def check(self) -> None:
        """End the construction where its time is over. Raises ``BudgetExceeded``."""
        now = time.monotonic()
        if now > self.until:
            raise self.exceeded("seconds")
        if self.interrupted is not None and now > self._asked + 0.1:
            self._asked = now
            error = self.interrupted()
            if error is not None:
                raise error

    def exceeded(self, limit: str) -> BudgetExceeded:
        """Return the error of a limit. ``limit``: a field of ``Limits``."""
        value = getattr(self.limits, limit)
        units = {"seconds": "seconds", "states": "states", "megabytes": "MB of memory"}
        how = f'"budget": {{"{limit}": N}} beside it, with N above {value:g}'
        if self.most is not None:
            bound = getattr(self.most, limit)
            flag = f"which {FLAGS[limit]} of gen serve raises"
            how = f"{flag}" if bound <= value else f"{how} and at most {bound:g}, {flag}"
        size = f"{value:,g}"
        if limit == "seconds" and self.seconds < value:  # of a part
            size = f"{self.seconds:.2g} of its {size}"
        return BudgetExceeded(
            f"structured.{self.what} takes more than {size} {units[limit]} to build; expected a"
            f" smaller rule (fewer repetitions, alternatives or properties), or a higher limit:"
            f" {how}",
            limit,
        )


_BUDGET: ContextVar[Budget] = ContextVar("budget")
_UNLIMITED = Budget(Limits(math.inf, Limits.states, math.inf))


@contextmanager
def share(part: float) -> Iterator[None]:
    """Leave a share of the time that is left to what is built inside."""
    budget = _BUDGET.get(None)
    if budget is None:
        yield
    else:
        with budget.part(part):
            yield


def check() -> None:
    """End the construction where its time is over. Raises ``BudgetExceeded``."""
    budget = _BUDGET.get(None)
    if budget is not None:
        budget.check()


def require_states(states: int) -> None:
    """Refuse an automaton of too many states, or one whose time is over.

    Raises:
        BudgetExceeded: it has more states than the budget.
    """
    budget = _BUDGET.get(_UNLIMITED)
    if states > budget.limits.states:
        raise budget.exceeded("states")
    budget.check()


def require_bytes(count: float) -> None:
    """Refuse tables of too many bytes before they are made.

    Raises:
        BudgetExceeded: the budget has less memory.
    """
    budget = _BUDGET.get(_UNLIMITED)
    if count > budget.limits.megabytes * MEGABYTE:
        raise budget.exceeded("megabytes")
