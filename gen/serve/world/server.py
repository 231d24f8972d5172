"""HTTP server of the playable page, for the same machine alone."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from gen.core.errors import GenError
from gen.serve.world.worlds import MOST_BYTES, Answer, Worlds

HOST = "127.0.0.1"
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline';"
        " connect-src 'self'; img-src 'self' blob: data:"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class PageServer(ThreadingHTTPServer):
    """Server of the routes of ``worlds``."""

    daemon_threads = True

    def __init__(self, worlds: Worlds, port: int):
        self.worlds = worlds
        super().__init__((HOST, port), Handler)


class Handler(BaseHTTPRequestHandler):
    """Handler of one connection.

    Requests that other pages send through the browser are refused: the header ``Host`` must name
    this machine, and ``Origin`` this server.
    """

    server: PageServer
    protocol_version = "HTTP/1.1"
    timeout = 60  # seconds that a silent connection is kept

    def do_GET(self) -> None:
        """Answer a GET."""
        path = urlsplit(self.path).path
        self._send(self._refusal() or self.server.worlds.answer("GET", path))

    def do_HEAD(self) -> None:
        """Answer a HEAD as a GET, without the body."""
        self.do_GET()

    def do_POST(self) -> None:
        """Answer a POST, and use the time until the next request."""
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdigit() or int(length) > MOST_BYTES:
            self.close_connection = True
            error = f"a request of {length or 'no stated'} bytes; expected up to {MOST_BYTES}"
            return self._send(Answer.refusal(error, "Content-Length", "request_too_large"))
        body, path = self.rfile.read(int(length)), urlsplit(self.path).path
        refusal = self._refusal()
        self._send(refusal or self.server.worlds.answer("POST", path, body))
        self.wfile.flush()
        if refusal is None and path == "/world/step":
            self.server.worlds.after(body)
        return None

    def _refusal(self) -> Answer | None:
        """Return the answer to a request that does not come from the page itself."""
        port = self.server.server_address[1]
        here = {f"{name}:{port}" for name in (HOST, "localhost")}
        origin = self.headers.get("Origin")
        if self.headers.get("Host") in here and origin in (
            None,
            *(f"http://{name}" for name in here),
        ):
            return None
        message = f"a request from elsewhere; expected http://{HOST}"
        return Answer.refusal(message, "Origin", "forbidden_origin", 403)

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.kind)
        self.send_header("Content-Length", str(len(answer.body)))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the page shows errors itself."""


def make_server(worlds: Worlds, port: int = 0) -> ThreadingHTTPServer:
    """Return a server on the loopback interface.

    Args:
        worlds: sessions and routes.
        port: port; 0 takes a free one.

    Raises:
        GenError: the port is taken or not allowed.
    """
    try:
        return PageServer(worlds, port)
    except (OSError, OverflowError) as error:
        raise GenError(f"port {port} cannot be used ({error}); expected a free one") from None


def run_in_thread(server: ThreadingHTTPServer) -> threading.Thread:
    """Serve in a thread that ends with the process, or with ``server.shutdown()``."""
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    return thread
