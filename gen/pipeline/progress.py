"""Progress bar of a call."""

from __future__ import annotations

import sys
from typing import Any, Literal, Self

from tqdm.auto import tqdm

from gen.core.errors import bad_type
from gen.core.sampler import Callback

Progress = bool | Literal["auto"]
DELAY = 0.5  # seconds; a call that is over before shows no bar
FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"


class ProgressBar:
    """Bar over the items of a call; it moves with every forward pass.

    Args:
        progress: True, False, or ``auto`` for a bar in terminals and notebooks only.
        items: number of items of the call.

    Raises:
        WrongType: another value came for ``progress``.
    """

    def __init__(self, progress: Progress, items: int):
        if not isinstance(progress, (bool, str)) or progress not in (True, False, "auto"):
            raise bad_type("progress", progress, "True, False or 'auto'")
        self._done = 0
        self._passes = 0
        self._bar: Any = None
        if progress is True or (progress == "auto" and _watched()):
            self._bar = tqdm(
                total=items,
                desc=f"{items} item{'s' if items > 1 else ''}",
                bar_format=FORMAT,
                delay=DELAY if progress == "auto" else 0,
                leave=progress is True,
            )

    def following(self, callback: Callback | None, items: int) -> Callback | None:
        """Return a callback that moves the bar and then calls another one.

        Args:
            callback: the callback of the user.
            items: items of the batch that it watches.
        """
        if self._bar is None:
            return callback

        def follow(info: dict[str, Any]) -> None:
            self._passes += 1
            self._bar.set_postfix_str(f"{self._passes} passes", refresh=False)
            self._move(self._done + items * info["done"] / max(1, info["total"]))
            if callback:
                callback(info)

        return follow

    def finish(self, items: int) -> None:
        """Count the items of a batch as done."""
        self._done += items
        if self._bar is not None:
            self._move(self._done)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def _move(self, done: float) -> None:
        self._bar.update(done - self._bar.n)


def _watched() -> bool:
    """Return True in a terminal and in a notebook."""
    notebook = tqdm.__module__.endswith("notebook") or "ipykernel" in sys.modules
    return notebook or (sys.stderr is not None and sys.stderr.isatty())
