"""Requests with random heads, encodings, sizes, letters, nesting, ids and addresses."""

from __future__ import annotations

import gzip
import json
import random
import re
import socket
import sys
import time
from pathlib import Path

import pytest
from served import serving
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from gen.serve.run import running
from gen.serve.settings import Settings

REQUESTS = 300
SLOWEST = 3.0  # seconds to an answer, or to the end of the connection where a head is no head
HERE = (str(Path(__file__).parents[2]), sys.prefix, str(Path.home()) + "/")
PATHS_HERE = re.compile("|".join(map(re.escape, HERE)))
TRACES = re.compile(r"Traceback|site-packages|File \"|/usr/lib")
BODIES = {
    "/v1/completions": {"model": "text", "prompt": "sort 3 1 2 =", "max_tokens": 8},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "sort 3 1 2 ="}]},
    "/v1/images/generations": {
        "prompt": "a red circle",
        "sampler": {"name": "maskgit", "steps": 4},
    },
    "/v1/audio/speech": {"input": "three", "model": "speech"},
    "/v1/motions": {"prompt": "walk forward", "model": "motion"},
    "/v1/batches": {"input_file_id": "file-1", "endpoint": "/v1/completions"},
    "/live/generate": {"modality": "text", "prompt": "sort 3 1 2 ="},
}
IDS = ("file-1", "../../etc/passwd", "%2e%2e%2f%2e%2e%2fetc%2fpasswd", "%00", "é" * 300,
       "\U0001f600", "a" * 5_000, "{id}", "..%5c..", "nul\r\nX: y", "0", "-1",
       "file-" + "f" * 64)  # fmt: skip
WITH_IDS = ("/v1/files/{}", "/v1/files/{}/content", "/v1/batches/{}", "/v1/batches/{}/cancel",
            "/v1/videos/{}", "/v1/videos/{}/content", "/v1/models/{}", "/static/{}", "/live/{}",
            "/{}", "//{}//", "/v1/{}?{}={}", "/docs/{}")  # fmt: skip
VALUES = (None, True, -1, 0, 2**70, 1e308, -0.0, "", "\x00", "\ud800", "\u202e\u2028", "x" * 20_000,
          [], [[]], [None] * 300, {}, {"a": {"b": []}}, ["a", 1, None], "../../etc/passwd",
          "file:///etc/passwd", "http://127.0.0.1:9/", list(range(3_000)))  # fmt: skip
METHODS = ("POST", "GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "BREW", "post", "CONNECT")


def heads(draw: random.Random) -> list[bytes]:
    """Return header lines that may be wrong."""
    kinds = [
        b"Content-Type: " + draw.choice([b"text/plain", b"application/json; charset=utf-16", b"",
                                         b"multipart/form-data", b"application/xml", b"\xff"]),
        b"Content-Encoding: " + draw.choice([b"gzip", b"br", b"identity", b"nothing"]),
        b"Origin: " + draw.choice([b"null", b"http://evil.example", b"http://localhost:1@a.b",
                                   b"http://[::1", b"http://127.0.0.1.a.b", b"\xe9"]),
        b"Host: " + draw.choice([b"", b"a.b", b"localhost:99999", b"[::1]", b"127.0.0.1 ,a"]),
        b"Authorization: " + draw.choice([b"Bearer", b"Basic \xff\xfe", b"Bearer " + b"k" * 9_000]),
        b"Accept: " + draw.choice([b"text/html", b"*/*;q=x", b"\x7f"]),
        b"Expect: 100-continue",
        b"Range: bytes=9999999999-1",
        b"X-Long: " + b"x" * draw.choice([10, 9_000, 40_000]),
        b"Connection: upgrade\r\nUpgrade: websocket",
        b"Transfer-Encoding: " + draw.choice([b"chunked", b"gzip, chunked", b"x"]),
        b"Content-Length: " + draw.choice([b"-1", b"1e9", b"99999999999999999999", b"3", b" "]),
        b"no colon",
        b": no name",
    ]  # fmt: skip
    return draw.sample(kinds, draw.choice([0, 0, 1, 1, 2]))


def mutated(draw: random.Random, value: object, depth: int = 0) -> object:
    """Return a JSON value with some parts replaced."""
    if draw.random() < 0.25 or depth > 4:
        return draw.choice(VALUES)
    if isinstance(value, dict):
        return {
            k: mutated(draw, v, depth + 1) if draw.random() < 0.4 else v for k, v in value.items()
        }
    return [mutated(draw, v, depth + 1) for v in value] if isinstance(value, list) else value


def content(draw: random.Random, body: dict) -> bytes:
    """Return bytes of a body: JSON with wrong values, nesting or encoding, or none at all."""
    deep = draw.choice([50, 5_000, 200_000])
    text = json.dumps(mutated(draw, body))
    whole = json.dumps(body)
    return draw.choice([
        text.encode(), text.encode(), text.encode(), whole.encode("utf-16"),
        b"\xef\xbb\xbf" + whole.encode(), gzip.compress(whole.encode()), b"[" * deep,
        b'{"prompt":' * deep, (whole[:-1] + ',"prompt":1e999}').encode(),
        whole[: len(whole) // 2].encode(), whole.encode() + b"\x00" * 20, b"", b"\xff\xfe\xfd",
        ('{"a":"' + "y" * 17_000_000 + '"}').encode(), (whole[:-1] + ',"seed":NaN}').encode(),
        b"--x\r\nContent-Disposition: form-data; name=file\r\n\r\nz",
        b"[" + b"1," * 400_000 + b"1]",
    ])  # fmt: skip


def request_of(draw: random.Random, port: int) -> bytes:
    """Return the bytes of one request."""
    path = draw.choice(list(BODIES))
    body = content(draw, BODIES[path])
    method = "POST" if draw.random() < 0.7 else draw.choice(METHODS)
    if draw.random() < 0.3:
        path = draw.choice(WITH_IDS).replace("{}", draw.choice(IDS))
        method = draw.choice(METHODS)
        body = draw.choice([b"", body])
    named = heads(draw)
    lines = [f"{method} {path} HTTP/1.1".encode("utf-8", "surrogatepass")]
    for line in (b"Host: 127.0.0.1:%d" % port, b"Content-Type: application/json",
                 b"Content-Length: %d" % len(body)):  # fmt: skip
        if not any(own.startswith(line.split(b" ")[0]) for own in named):
            lines.append(line)
    return b"\r\n".join([*lines, *named, b"Connection: close", b"", b""]) + body


def answer_to(port: int, request: bytes, seconds: float = 20.0) -> tuple[bytes, float]:
    """Send the bytes of a request; return those of the answer, and the seconds to its first."""
    with socket.create_connection(("127.0.0.1", port), seconds) as sock:
        began, first, parts = time.monotonic(), 0.0, []
        try:
            sock.sendall(request)
        except OSError:
            pass  # the answer came before the body was sent
        try:
            while part := sock.recv(1 << 16):
                first = first or time.monotonic() - began
                parts.append(part)
        except OSError:
            pass
        return b"".join(parts), first or time.monotonic() - began


def faults(answer: bytes, seconds: float) -> list[str]:
    """Return what is wrong with an answer."""
    found = []
    status = answer[9:12].decode("latin-1")
    if answer and not (answer.startswith(b"HTTP/1.") and status.isdigit()):
        found.append("no HTTP")
    elif status.startswith("5"):
        found.append(f"status {status}")
    if seconds > SLOWEST:
        found.append(f"{seconds:.1f} s")
    said = answer.decode("utf-8", "replace")
    if PATHS_HERE.search(said) or TRACES.search(said):
        found.append("a path of the machine")
    return found


@pytest.mark.slow
def test_no_random_request_finds_a_fault(tmp_path):
    with serving(Settings(batches=tmp_path, deadline=60, body_timeout=0.5)) as server:
        for path, body in BODIES.items():
            server.ask(path, body)  # models are loaded when they are first asked for
        found, statuses = [], {}
        for number in range(REQUESTS):
            request = request_of(random.Random(number), server.port)
            answer, seconds = answer_to(server.port, request)
            if wrong := faults(answer, seconds):
                found.append((number, wrong, request[:300], answer[:300]))
            status = answer[9:12].decode()
            statuses[status] = statuses.get(status, 0) + 1
        assert not found
        assert len(statuses) >= 6 and statuses["200"] >= 5, statuses  # they reach many places
        assert server.ask("/v1/completions", BODIES["/v1/completions"])[0] == 200


def test_control_faults_are_found():
    def slow(request):
        time.sleep(SLOWEST + 0.5)
        return PlainTextResponse("late")

    def leaking(request):
        return PlainTextResponse(f"{__file__} is not to be found", 404)

    def failing(request):
        raise RuntimeError("a fault")

    routes = [Route(f"/{made.__name__}", made) for made in (slow, leaking, failing)]
    with running(Starlette(routes=routes)) as port:
        found = {}
        for name in ("slow", "leaking", "failing", "unknown"):
            request = f"GET /{name} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode()
            found[name] = faults(*answer_to(port, request))
    assert found["failing"] == ["status 500"] and found["leaking"] == ["a path of the machine"]
    assert len(found["slow"]) == 1 and found["slow"][0].endswith(" s") and not found["unknown"]
