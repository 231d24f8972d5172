"""What a run says: plain lines in pipes, bars in terminals, and what is left reckoned from this run
alone."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time

import pytest
from ledgers import add_rows, write_plan

from gen.jobs.progress.report import Lines, Silent, duration, speed
from gen.jobs.progress.watch import watch
from gen.store.ledger import PLAN, WORK

RUN = """
import sys
from gen.jobs.progress.terminal import for_terminal
p = for_terminal()
p.start(40, 8)
for i in range(4):
    p.batch("sjd", 8)
    p.step({"step": 1, "done": 64, "total": 256})
    if hasattr(p, "live"):
        p.live.refresh()
    if i == 1:
        print("from a library", file=sys.stderr)
    if i == 2:
        p.note("item 00ff failed: boom\\x1b[31m\\nnext")
    p.items(8, failed=int(i == 2), nfe=32.0)
p.close()
print("end", file=sys.stderr)
"""


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def lines(capsys):
    clock = Clock()
    progress = Lines(clock=clock)
    return progress, clock, lambda: capsys.readouterr().err.splitlines()


# --- lines


def test_a_line_says_all_there_is_to_say(lines):
    progress, clock, said = lines
    progress.start(2000, 100)
    progress.batch("sjd", 8)
    clock.now += 10
    progress.items(412, failed=3, nfe=409 * 50.1)
    assert said() == [
        "gen: 2000 items, 100 already done",
        "gen: 512/2000 items, sjd, 41.2 items/s, 50.1 forward passes/item, 3 failed, 0:36 left",
    ]


@pytest.mark.parametrize("every, lines_said", [(5.0, 1 + 6 + 1), (0.0, 1 + 100 + 0)])
def test_lines_come_at_most_every_few_seconds_and_the_last_one_always(capsys, every, lines_said):
    clock = Clock()
    progress = Lines(every, clock)
    progress.start(100)
    for _ in range(100):
        clock.now += 0.32
        progress.items(1)
    progress.close()
    said = capsys.readouterr().err.splitlines()
    assert len(said) == lines_said and said[-1] == "gen: 100/100 items, 3.1 items/s, took 0:32"


def test_a_run_that_ends_early_says_how_far_it_came(lines):
    progress, clock, said = lines
    progress.start(100)
    clock.now += 1
    progress.items(7)
    progress.close()
    assert said()[1:] == ["gen: 7/100 items, 7.0 items/s, 0:13 left"]
    progress.close()
    assert said() == []


def test_what_is_left_comes_from_this_run_and_its_latest_items(lines):
    progress, clock, _ = lines
    progress.start(2000, 1900)
    clock.now += 50  # a model is loaded
    progress.batch("sjd", 1)
    for _ in range(10):
        clock.now += 1
        progress.items(1)
    assert progress.words()["left"] == "1:30 left"
    for _ in range(10):  # twenty items go further back than two minutes: 310 s
        clock.now += 30
        progress.items(1)
    assert progress.words()["rate"] == "15.5 s/item"
    for _ in range(30):  # and these are all within two minutes, or among the last twenty
        clock.now += 5
        progress.items(1)
    assert progress.words()["rate"] == "5 s/item"


def test_items_to_make_again_are_taken_off(lines):
    progress, _, _ = lines
    progress.start(10, 10)
    progress.again(4)
    assert progress.words()["count"] == "6/10 items"


def test_slow_items_show_the_tokens_meanwhile(lines):
    progress, clock, said = lines
    progress.start(3)
    progress.batch("ar", 2)
    clock.now += 31
    progress.step({"step": 9, "done": 90, "total": 4096})
    progress.step({"step": 10, "done": 100, "total": 4096})
    assert said()[1:] == ["gen: 0/3 items, ar, 90/4096 tokens, 2 items at once"]


def test_one_item_is_no_items(lines):
    progress, clock, said = lines
    progress.start(1)
    progress.batch("ar", 1)
    clock.now += 31
    progress.step({"step": 9, "done": 90, "total": 4096})
    progress.items(1)
    _, slow, last = said()
    assert slow == "gen: 0/1 item, ar, 90/4096 tokens, 1 item at once"
    assert last.startswith("gen: 1/1 item, ar, ")


def test_notes_are_one_plain_line(lines):
    progress, _, said = lines
    progress.note("failed:\n\x1b[2J boom\r")
    assert said() == ["gen: failed: [2J boom"]


def test_times_and_rates_are_readable():
    assert [duration(x) for x in (0.4, 36, 3600, 11529, 190_000)] == [
        "0:00",
        "0:36",
        "1:00:00",
        "3:12:09",
        "2 days 4 h",
    ]
    assert [speed(x) for x in (None, 0.04, 1.25, 1234.5)] == [
        "",
        "25 s/item",
        "1.2 items/s",
        "1234 items/s",
    ]


class Gone(io.StringIO):
    def write(self, text):
        raise BrokenPipeError


@pytest.mark.parametrize("kind", ["lines", "bars"])
def test_a_stderr_that_has_gone_away_stops_nothing(monkeypatch, kind):
    from gen.jobs.progress.bars import Bars

    monkeypatch.setattr(sys, "stderr", Gone())
    with pytest.raises(BrokenPipeError):  # what the same words meet elsewhere
        print("x", file=sys.stderr)
    progress = Lines(0) if kind == "lines" else Bars()
    progress.start(3)
    progress.batch("sjd", 3)
    progress.items(3)
    progress.note("x")
    progress.close()
    assert progress.done == 3


# --- terminals


def screen(data: bytes) -> list[str]:
    """What a terminal shows in the end, for the few codes that are expected; any other one is an
    error."""
    rows, y, x = [""], 0, 0
    for code, back, feed, text in re.findall(
        r"\x1b\[([0-9;?]*[A-Za-z])|(\r)|(\n)|([^\x1b\r\n]+)", data.decode()
    ):
        if code.endswith("A"):
            y -= int(code[:-1] or 1)
        elif code == "2K":
            rows[y] = ""
        elif back:
            x = 0
        elif feed:
            y += 1
            rows += [""] * (y + 1 - len(rows))
        elif text:
            rows[y] = rows[y][:x].ljust(x) + text + rows[y][x + len(text) :]
            x += len(text)
        else:
            assert code.endswith("m"), code
    return [r.rstrip() for r in rows]


def in_terminal(columns: int, **environment: str) -> bytes:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    kept = {
        k: v
        for k, v in os.environ.items()
        if k not in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")
    }
    process = subprocess.Popen(
        [sys.executable, "-c", RUN],
        stderr=theirs,
        stdout=subprocess.DEVNULL,
        stdin=theirs,
        env={**kept, "TERM": "xterm-256color", **environment},
    )
    os.close(theirs)
    found = b""
    while True:
        try:
            data = os.read(ours, 1 << 16)
        except OSError:  # the other side is closed
            data = b""
        if not data:
            break
        found += data
    os.close(ours)
    assert process.wait() == 0, found
    return found


@pytest.mark.parametrize("columns, environment", [(100, {}), (100, {"NO_COLOR": "1"}), (44, {})])
def test_a_terminal_gets_one_clean_bar(columns, environment):
    data = in_terminal(columns, **environment)
    shown = screen(data)
    assert shown[:2] == ["from a library", "gen: item 00ff failed: boom [31m next"]
    assert "40/40 items" in shown[2] and "1 failed" in shown[2] and shown[3:] == ["end", ""]
    assert "tokens" in data.decode() and all(len(x) < columns for x in shown)
    assert ("\x1b[36m" in data.decode()) == (not environment) and "\x1b[?25l" not in data.decode()
    assert len(screen(data.replace(b"\x1b[1A", b""))) > len(
        shown
    )  # a bar that is not drawn over itself would show


@pytest.mark.parametrize("columns, environment", [(100, {"TERM": "dumb"}), (30, {})])
def test_a_terminal_that_cannot_draw_gets_lines(columns, environment):
    assert_lines(in_terminal(columns, **environment).replace(b"\r\n", b"\n"))


def test_a_pipe_gets_lines_only_whatever_colours_are_asked_for():
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        capture_output=True,
        env={**os.environ, "FORCE_COLOR": "1"},
        check=True,
    )
    assert_lines(done.stderr)


def assert_lines(data: bytes) -> None:
    said = data.decode().splitlines()
    assert said[:3] == [
        "gen: 40 items, 8 already done",
        "from a library",
        "gen: item 00ff failed: boom [31m next",
    ]
    assert re.fullmatch(
        r"gen: 40/40 items, sjd, \S+ items/s, 4.1 forward passes/item, 1 failed, took 0:0\d",
        said[3],
    ) and said[4:] == ["end"]
    assert b"\x1b" not in data and b"\r" not in data


@pytest.mark.parametrize("width", [1, 9, 20, 40, 59, 60, 80, 101, 160])
def test_bars_are_never_wider_than_the_terminal(width):
    from rich.console import Console

    from gen.jobs.progress.bars import Bars

    console = Console(file=io.StringIO(), width=width, force_terminal=True, legacy_windows=False)
    clock = Clock()
    bars = Bars(console, clock)
    for part in (
        lambda: bars.start(123456, 7),
        lambda: bars.batch("a sampler with quite a long name", 8),
        lambda: bars.step({"step": 1, "done": 3, "total": 0}),
        lambda: bars.items(999, failed=123, nfe=1e6),
    ):
        part()
        clock.now += 7
        drawn = console.render_lines(bars.draw(), pad=False)
        assert 1 <= len(drawn) <= 2 and all(
            sum(s.cell_length for s in row) <= width for row in drawn
        )
    bars.close()


# --- watching


class Heard(Silent):
    def __init__(self):
        self.calls = []

    def start(self, total, done=0, unit="item"):
        self.calls.append(("start", total, done))

    def batch(self, label, rows):
        self.calls.append(("batch", label, rows))

    def items(self, count, *, failed=0, nfe=0.0):
        self.calls.append(("items", count, failed, nfe))

    def again(self, count):
        self.calls.append(("again", count))


def test_a_parent_shows_what_its_workers_write(tmp_path):
    def row(i, status="ok", attempt=1):
        return {
            "id": f"{i:016x}",
            "status": status,
            "attempt": attempt,
            "nfe": 5,
            "sampler": "sjd",
        }

    journal = tmp_path / WORK / "00000.w.jsonl"

    def write(*rows):
        add_rows(journal, rows)

    def plan():
        journal.parent.mkdir()
        write(row(0), row(1, "failed"))
        write_plan(tmp_path / PLAN, 6)

    # what happens between two looks; the job is planned while somebody looks already
    steps = [
        plan,
        lambda: write(row(2), row(3, "failed")),
        lambda: None,
        lambda: write(row(1, "due")),
        lambda: write(row(1, "ok", 2), row(9)),
    ]
    heard, looks = Heard(), iter(steps)

    def stop():
        step = next(looks, None)
        if step:
            step()
        return step is None

    watch(tmp_path, heard, stop, every=0)
    assert heard.calls == [
        ("start", 6, 2),
        ("batch", "sjd", 0),
        ("items", 2, 1, 10),
        ("again", 1),
        ("items", 1, 0, 5),
    ]


def test_a_watch_ends_at_once_when_told_to(tmp_path):
    began = time.monotonic()
    watch(tmp_path, Heard(), lambda: time.monotonic() - began > 0.2, every=60)
    assert time.monotonic() - began < 5
