"""A gallery in a headless browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import urlencode

import pytest


class Seen:
    """What a browser makes of a page: its document once all scripts have run, and what they
    complained about."""

    def __init__(self, path: Path, words: dict | None = None):
        found = next(
            filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
        )
        if found is None:
            pytest.skip(
                "no chromium, chromium-browser or google-chrome here, so the gallery was not opened"
                " in a browser"
            )
        address = path.resolve().as_uri() + (f"#{urlencode(words)}" if words else "")
        options = (
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            "--virtual-time-budget=20000",
            f"--user-data-dir={path.parent / '.profile'}",
            "--dump-dom",
            address,
        )
        done = subprocess.run([found, *options], capture_output=True, timeout=120, check=True)
        self.dom = done.stdout.decode()
        self.console = re.findall(r"CONSOLE:\d+\] (.*)", done.stderr.decode(errors="replace"))
        self.tiles = re.findall(r'<figure class="tile".*?</figure>', self.dom, re.DOTALL)
        self.items = [int(n) for t in self.tiles for n in re.findall(r'data-index="(\d+)"', t)]

    def faults(self) -> list[str]:
        """What is wrong with the first page of a whole job."""
        note = re.search(r'<p class="none[^>]*role="status"([^>]*)>(.*?)</p>', self.dom)
        return [
            *self.console,
            *([] if "hidden" in note[1] else [note[2]]),
            *([] if len(self.tiles) == 100 else ["not 100 tiles"]),
        ]
