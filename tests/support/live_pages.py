"""A server whose page is open in a browser, and what the page says."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlencode

import uvicorn
from chrome import Tab

from gen.engine.engine import Engine
from gen.serve.app import make_app
from gen.serve.settings import Settings


@contextmanager
def served(engine: Engine, settings: Settings | None = None) -> Iterator[str]:
    """Address of a server on a free port."""
    app = make_app(engine, settings or Settings())
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    server.should_exit = True
    thread.join(timeout=30)


def ready(tab: Tab) -> None:
    tab.until(lambda: tab.value("document.documentElement?.dataset.ready") == "yes", 90)


def go(tab: Tab, address: str, **call) -> None:
    """Open the link of a call."""
    tab.send("Page.navigate", url="about:blank")
    tab.send("Page.navigate", url=f"{address}#{urlencode(call, doseq=True)}")
    ready(tab)


def resized(tab: Tab, width: int, height: int = 900) -> None:
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    tab.send("Emulation.setDeviceMetricsOverride", **metrics)


def text(tab: Tab, selector: str) -> str:
    return tab.value(f"document.querySelector({selector!r})?.textContent ?? ''")


def states(tab: Tab) -> list[str]:
    return tab.value("[...document.querySelectorAll('.lane')].map((lane) => lane.dataset.state)")


def finished(tab: Tab, lanes: int = 1) -> None:
    tab.until(lambda: states(tab) == ["done"] * lanes, 90)
    tab.until(lambda: tab.value("!document.getElementById('generate').disabled"))


def too_wide(tab: Tab) -> list[str]:
    """Elements that reach beyond 390 pixels, but for those that scroll by themselves."""
    return tab.value(
        "[...document.querySelectorAll('body *')].filter((e) => !e.closest('.scroll, pre, .skip,"
        " .visually-hidden') && e.getBoundingClientRect().right > 391)"
        ".map((e) => e.outerHTML.slice(0, 90))"
    )
