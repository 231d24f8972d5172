"""Chromium driven over its debugging pipe: real keys, and what the page says of itself."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
KEYS = {
    **{"ArrowUp": 38, "ArrowDown": 40, "ArrowLeft": 37, "ArrowRight": 39, " ": 32},
    **{"Tab": 9, "Enter": 13, "Escape": 27, "Delete": 46},
}
TEXTS = {" ": " ", "Enter": "\r"}  # what keys write
# middle of an element, and whether the element is on top there, at the next frame
MIDDLE = """(selector) => new Promise((done) => requestAnimationFrame(() => {
  const e = document.querySelector(selector);
  e.scrollIntoView({block: 'center', behavior: 'instant'});
  const b = e.getBoundingClientRect(), x = b.x + b.width / 2, y = b.y + b.height / 2;
  const top = document.elementFromPoint(x, y);
  done([x, y, e.contains(top) || e.closest('label')?.contains(top) === true]);
}))"""
ALT, CONTROL, META, SHIFT = 1, 2, 4, 8


class Tab:
    """A tab of a headless browser. Skips the test where there is no browser."""

    def __init__(self, folder: Path, address: str):
        found = next(filter(None, map(shutil.which, NAMES)), None)
        if found is None:
            pytest.skip(f"no {' or '.join(NAMES)} here, so the page was not opened in a browser")
        read_here, write_there = os.pipe()
        read_there, write_here = os.pipe()
        # the browser reads commands from descriptor 3 and answers on 4
        shell = f'exec 3<&{read_there} 4>&{write_there}; exec "$0" "$@"'
        options = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe")
        # without it, a browser drops the keys and clicks that come before the page's first paint
        options += ("--allow-pre-commit-input",)
        self.process = subprocess.Popen(
            ["bash", "-c", shell, found, *options, f"--user-data-dir={folder}", "about:blank"],
            pass_fds=(read_there, write_there),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_there)
        os.close(write_there)
        self.to, self.back = os.fdopen(write_here, "wb", 0), os.fdopen(read_here, "rb", 0)
        self.number, self.session, self.rest = 0, None, b""
        self.logs: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime"):
            self.send(f"{domain}.enable")
        self.send("Page.navigate", url=address)

    def send(self, method: str, **params: Any) -> dict:
        """Send a command and return its result."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        self.to.write(json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.rest:
                part = self.back.read(1 << 16)
                assert part, "the browser has ended"
                self.rest += part
            line, _, self.rest = self.rest.partition(b"\0")
            answer = json.loads(line)
            if answer.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
                self.logs.append(json.dumps(answer["params"]))
            if answer.get("id") == self.number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def value(self, expression: str) -> Any:
        """Evaluate JavaScript, a promise included."""
        result = self.send(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, holds: Callable[[], bool], seconds: float = 30) -> None:
        """Wait until something holds."""
        end = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > end:
                raise AssertionError(
                    f"nothing of it within {seconds} s; the page says:\n{self.words}"
                )
            time.sleep(0.02)

    @property
    def words(self) -> str:
        """Text that the page shows."""
        return self.value("document.body?.innerText ?? ''")

    def press(self, key: str, modifiers: int = 0) -> None:
        """Press and release a key, as a keyboard does."""
        code = "Space" if key == " " else key
        about = {"key": key, "code": code, "windowsVirtualKeyCode": KEYS[key]}
        about["modifiers"] = modifiers
        writes = {"text": TEXTS[key]} if key in TEXTS and not modifiers else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", **about, **writes)
        self.send("Input.dispatchKeyEvent", type="keyUp", **about)

    def write(self, text: str) -> None:
        """Write a text where the focus is."""
        self.send("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        """Press the left button in the middle of an element, once it keeps still and is on top."""
        found: list[float] = []

        def keeps_still() -> bool:
            nonlocal found
            before, found = found, self.value(f"({MIDDLE})({selector!r})")
            return found == before and found[2]

        self.until(keeps_still)
        x, y, _ = found
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def drag(self, selector: str, first: tuple[float, float], last: tuple[float, float]) -> None:
        """Draw with the left button over an element, from one place to another.

        Args:
            selector: selector of the element.
            first: place where the button goes down, as shares of width and height.
            last: place where it goes up.
        """
        left, top, width, height = self.value(
            f"(() => {{ const e = document.querySelector({selector!r});"
            " e.scrollIntoView({block: 'center', behavior: 'instant'});"
            " const b = e.getBoundingClientRect(); return [b.x, b.y, b.width, b.height]; })()"
        )
        steps = [("mousePressed", 0.0), *(("mouseMoved", i / 8) for i in range(9))]
        for kind, at in [*steps, ("mouseReleased", 1.0)]:
            x, y = (a + (b - a) * at for a, b in zip(first, last, strict=True))
            where = {"x": left + x * width, "y": top + y * height, "button": "left"}
            self.send("Input.dispatchMouseEvent", type=kind, **where, buttons=1, clickCount=1)

    def look(self, path: Path, width: int = 1000, height: int = 760, dark: bool = False) -> None:
        """Write a screenshot of a window of this size."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1}
        self.send("Emulation.setDeviceMetricsOverride", mobile=width < 600, **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        time.sleep(0.3)
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        """End the browser."""
        self.send("Browser.close")
        self.process.wait(timeout=30)
        self.to.close()
        self.back.close()
