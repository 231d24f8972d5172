"""Bars of a terminal: one of items and, under it, one of the tokens of the current microbatch."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gen.jobs.progress.report import Tally, one_line

LABEL, BAR, GAP = (
    24,
    (8, 32),
    2,
)  # columns: of the sampler's name at most, of a bar at least and at most, between two things
LABELLED = 60  # a narrower terminal goes without the name
SPARED = (
    "forwards",
    "rate",
    "left",
    "failed",
)  # what a narrow terminal goes without, first one first


class Stream:
    """Text stream that may go away, as a terminal does when its connection ends; later writes
    are lost, and nothing else."""

    def __init__(self, stream: Any):
        self.stream = stream

    def write(self, text: str) -> int:
        try:
            return self.stream.write(text)
        except (OSError, ValueError):
            return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class Bars(Tally):
    """``console``: a rich one; by default one on stderr. What is printed meanwhile stands above the
    bars."""

    def __init__(self, console: Any = None, clock: Callable[[], float] = time.monotonic):
        super().__init__(clock)
        if console is None:
            console = Console(file=Stream(sys.stderr), highlight=False)
            console.show_cursor = lambda show=True: (
                False
            )  # a killed process would leave the terminal without one
        self.console, self.live = console, None

    def start(self, total: int, done: int = 0, unit: str = "item") -> None:
        self.close()
        super().start(total, done, unit)
        # stdout is left alone where it goes elsewhere: what is redirected comes out on the console
        self.live = Live(
            get_renderable=self.draw,
            console=self.console,
            refresh_per_second=4,
            redirect_stdout=bool(sys.stdout and sys.stdout.isatty()),
        )
        self.live.start(refresh=True)

    def note(self, text: str) -> None:
        self.console.print(Text(f"gen: {one_line(text)}"), soft_wrap=True)

    def close(self) -> None:
        if self.live is not None:
            live, self.live, self.inner = self.live, None, {}  # the last image has one line
            live.stop()

    def draw(self) -> Any:
        """Draw one or two lines, never wider than the terminal."""
        lines = [(self.label, self.done, self.total, self.words(), "cyan")]
        if self.inner:
            info = self.inner
            said = {
                "count": f"{info['done']}/{info['total']} tokens",
                "forwards": f"{info['step']} forward pass{'es' * (info['step'] != 1)}",
                "rate": f"{self.at_once} at once" if self.at_once else "",
            }
            lines.append(
                (
                    "",
                    info["done"],
                    info["total"],
                    {k: v for k, v in said.items() if v},
                    "bright_black",
                )
            )
        width = self.console.width - 1  # a full last column makes some terminals wrap
        label = min(len(self.label), LABEL) if width >= LABELLED else 0
        room = width - (label + GAP if label else 0)
        texts = [self._fit(words, room - BAR[0] - GAP) for *_, words, _ in lines]
        widest = max(t.cell_len for t in texts)
        bar = (
            min(BAR[1], room - GAP - widest) // 4 * 4
        )  # in steps, so that it keeps still while numbers grow
        table = Table.grid(padding=(0, GAP, 0, 0), pad_edge=False)
        for size in (
            ([label] if label else []) + ([bar] if bar >= BAR[0] else []) + [min(widest, room)]
        ):
            table.add_column(width=size, no_wrap=True, overflow="ellipsis")
        for (name, done, total, _, colour), text in zip(lines, texts, strict=True):
            table.add_row(
                *([self._plain(name)] if label else []),
                *([self._bar(done, total, bar, colour)] if bar >= BAR[0] else []),
                text,
            )
        return table

    def _fit(self, words: dict[str, str], room: int) -> Any:
        """Format as many of the words as there is room for; the count always."""
        styles = {"failed": "bold red"}
        for spared in ("", *SPARED):
            words = {k: v for k, v in words.items() if k != spared}
            text = Text("  ").join(Text(v, style=styles.get(k, "")) for k, v in words.items())
            if text.cell_len <= room:
                break
        return text

    @staticmethod
    def _plain(text: str) -> Any:
        return Text(one_line(text), style="bold")

    @staticmethod
    def _bar(done: float, total: float, width: int, colour: str) -> Any:
        return ProgressBar(
            total=max(total, 1),
            completed=done,
            width=width,
            complete_style=colour,
            finished_style=colour,
        )
