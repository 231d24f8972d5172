"""A server of the package's models on a free port, and clients of it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from contextlib import contextmanager
from typing import Any

import openai

from gen.engine.engine import Engine
from gen.serve.app import make_app
from gen.serve.run import running
from gen.serve.settings import Settings


class Served:
    """Running server.

    Attributes:
        engine: engine behind it.
        port: its port.
        url: its address.
    """

    def __init__(self, engine: Engine, port: int):
        self.engine, self.port, self.url = engine, port, f"http://127.0.0.1:{port}"

    def client(self, **more: Any) -> openai.OpenAI:
        """Return OpenAI's client, which tries once."""
        return openai.OpenAI(base_url=f"{self.url}/v1", **{**KEYS, **more})

    def async_client(self) -> openai.AsyncOpenAI:
        """Return OpenAI's asynchronous client."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", **KEYS)

    def ask(
        self, path: str, body: Any = None, method: str | None = None, **headers: str
    ) -> tuple[int, Any, dict[str, str]]:
        """Send a request; return status, body and headers of the answer. A body that is no bytes
        goes as JSON."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        named = {k.replace("_", "-"): v for k, v in headers.items()}
        if data is not None:
            named = {"Content-Type": "application/json", **named}
        request = urllib.request.Request(f"{self.url}{path}", data, named, method=method)
        try:
            answer = urllib.request.urlopen(request, timeout=120)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            content = answer.read()
            kind = answer.headers.get("Content-Type", "")
            is_json = kind.startswith("application/json") and method != "HEAD"
            read = json.loads(content) if is_json else content
            return answer.status, read, {k.lower(): v for k, v in answer.headers.items()}

    def figures(self) -> dict[str, float]:
        """Return the figures of ``/metrics`` by name and labels."""
        _, text, _ = self.ask("/metrics")
        lines = [line for line in text.decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


KEYS: dict[str, Any] = {"api_key": "none", "max_retries": 0}


@contextmanager
def serving(settings: Settings | None = None, **engine: Any):
    """Serve the models of the package, or those of ``Engine``'s arguments."""
    made = Engine(**{"device": "cpu", **engine})
    try:
        with running(make_app(made, settings or Settings())) as port:
            yield Served(made, port)
    finally:
        made.close()
