"""Connections are bounded: those that are open, those that nobody reads, and the end of all."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from fastapi import FastAPI
from served import Served, serving
from starlette.responses import StreamingResponse

from gen.serve import connections, run
from gen.serve.api.calls import event_stream
from gen.serve.app import make_app
from gen.serve.connections import Http, Parts
from gen.serve.guards import Guards
from gen.serve.metrics import Metrics
from gen.serve.settings import Settings

TASK = {"model": "text", "prompt": "sort 3 1 2 ="}
LONG = {"model": "image", "prompt": "a red circle", "n": 10, "sampler": "autoregressive"}
PAGE = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def server():
    with serving() as made:
        yield made


def until(true, seconds=60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.02)


def read_all(connection: socket.socket) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65_536):
            parts.append(part)
    return b"".join(parts)


def silent(port: int, requests: int = 400) -> socket.socket:
    """Return a connection whose client asks much and reads nothing."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    connection.connect(("127.0.0.1", port))
    connection.setblocking(False)
    with contextlib.suppress(OSError):
        connection.send(PAGE * requests)
    return connection


# --- answers that nobody reads


def test_a_client_that_reads_nothing_is_cut_off_with_one_line(server, monkeypatch, caplog):
    monkeypatch.setattr(connections, "UNREAD_SECONDS", 0.3)

    def cut() -> list[logging.LogRecord]:
        return [r for r in caplog.records if "read nothing for 0.3 s" in r.getMessage()]

    with run.running(make_app(server.engine)) as port:
        clients = [silent(port) for _ in range(3)]
        slow = socket.create_connection(("127.0.0.1", port), 30)  # control: it reads, slowly
        slow.setblocking(False)
        taken, end = 0, time.monotonic() + 30
        while len(cut()) < len(clients) and time.monotonic() < end:
            with contextlib.suppress(BlockingIOError):
                slow.send(PAGE)
            with contextlib.suppress(BlockingIOError):
                taken += len(slow.recv(20_000))
            time.sleep(0.01)
        assert len(cut()) == len(clients) and not [r for r in caplog.records if r.exc_info]
        assert taken > 100_000 and slow.send(PAGE)
        assert Served(server.engine, port).ask("/health")[0] == 200
        for connection in (*clients, slow):
            connection.close()


def test_crowded_connections_wait_for_their_readers_a_shorter_time():
    state = connections.Connections(4)
    assert state.patience == connections.UNREAD_SECONDS
    state.connections.update(range(4))
    assert state.patience == connections.CROWDED_SECONDS < connections.UNREAD_SECONDS


# --- their number


def test_a_connection_too_many_is_refused_and_taken_later(server, caplog):
    with run.running(make_app(server.engine), most=3) as port:
        held = [socket.create_connection(("127.0.0.1", port), 30) for _ in range(3)]
        other = Served(server.engine, port)
        time.sleep(0.3)
        status, answer, headers = other.ask("/health")
        assert (status, answer["error"]["code"]) == (503, "too_many_connections")
        assert headers["retry-after"] == "1"
        held[0].close()
        until(lambda: other.ask("/health")[0] == 200, 30)
        until(lambda: "connections refused: 3 are open" in caplog.text, 30)
        for connection in held:
            connection.close()


def test_the_limit_of_connections_leaves_handles_for_files(monkeypatch):
    for soft, most in ((256, 96), (100, connections.ACCEPTED), (4_096, 3_936)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert connections.connection_limit() == most


def started(port: int, *words: str, handles: int | None = None) -> subprocess.Popen:
    def limited():
        if handles is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (handles, handles))

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "gen", "serve", "--port", str(port), "--device", "cpu", *words]
    return subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=limited
    )


def up(port: int) -> Served:
    served = Served(None, port)
    for _ in range(600):
        with contextlib.suppress(OSError):
            if served.ask("/health")[0] == 200:
                return served
        time.sleep(0.1)
    raise AssertionError("the server did not come up")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return bound.getsockname()[1]


@pytest.mark.slow
def test_clients_that_never_read_and_few_handles_leave_a_server_that_answers():
    port = free_port()
    process = started(port, handles=256)
    clients: list[socket.socket] = []
    try:
        served = up(port)
        for _ in range(260):
            with contextlib.suppress(OSError):
                clients.append(silent(port))

        def answers() -> bool:
            try:
                return served.ask("/health")[0] == 200
            except OSError:
                return False

        until(answers, 90)
        assert all(answers() or time.sleep(0.1) or answers() for _ in range(10))
    finally:
        process.terminate()
        log = process.communicate(timeout=60)[1]
        for connection in clients:
            connection.close()
    assert process.returncode == 0
    lines = log.splitlines()
    assert "Traceback" not in log and len(lines) < 2 * len(clients)
    assert any("read nothing for" in line for line in lines)
    assert any("connections refused" in line for line in lines)


# --- the parts of a body


def chunked(port: int, sizes: list[int]) -> bytes:
    body = json.dumps({**TASK, "user": "x" * 100}).encode()
    body += b" " * (sum(sizes) - len(body))
    parts, at = [], 0
    for size in sizes:
        parts.append(b"%x\r\n%s\r\n" % (size, body[at : at + size]))
        at += size
    with socket.create_connection(("127.0.0.1", port), 30) as connection:
        with contextlib.suppress(ConnectionError):
            head = POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
            connection.sendall(head + b"".join(parts) + b"0\r\n\r\n")
        return read_all(connection)


def test_a_body_in_too_many_parts_is_refused(server):
    answer = chunked(server.port, [1] * 60_000)
    assert not answer or (b" 413 " in answer and b"too_many_parts" in answer)
    assert b" 200 " in chunked(server.port, [100] * 600)  # control: as many bytes in fewer parts
    assert b" 200 " in chunked(server.port, [1] * 200)  # control: few parts


def test_parts_are_counted_for_each_request():
    connection = Parts()
    one = POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * connections.MOST_PARTS
    connection.receive_data(one)
    for _ in range(connections.MOST_PARTS + 1):
        connection.next_event()
    connection.receive_data(b"1\r\nx\r\n")
    with pytest.raises(connections.h11.RemoteProtocolError):
        connection.next_event()
    assert connection.refusal.code == "too_many_parts" and connection.refusal.status == 413


def test_what_is_no_http_is_told_so(server):
    with socket.create_connection(("127.0.0.1", server.port), 30) as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert b" 400 " in head and (error["param"], error["code"]) == ("body", "invalid_http")


# --- the end of the server


class Asked(threading.Thread):
    """Request in a thread; what came, and whether it came whole."""

    def __init__(self, port: int, path: str, body: dict):
        super().__init__()
        self.port, self.path, self.body = port, path, body
        self.status, self.after, self.said, self.is_whole = 0, None, b"", False
        self.start()

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        head = {"Content-Type": "application/json"}
        connection.request("POST", self.path, json.dumps(self.body), head)
        answer = connection.getresponse()
        self.status, self.after = answer.status, answer.getheader("Retry-After")
        with contextlib.suppress(http.client.IncompleteRead):
            self.said = answer.read()
            self.is_whole = True


def endless(engine) -> FastAPI:
    """Return an application whose requests are never done."""
    app = FastAPI()
    app.add_middleware(Guards, settings=Settings(), metrics=Metrics(engine))

    async def parts():
        yield b"data: {}\n\n"
        await asyncio.sleep(60)

    @app.post("/whole")
    async def whole() -> None:
        await asyncio.sleep(60)

    @app.post("/sound")
    async def sound() -> StreamingResponse:
        return StreamingResponse(parts(), media_type="audio/wav")

    for path in ("/events", "/live/events"):
        app.post(path)(lambda: event_stream(parts()))
    return app


def test_a_request_that_is_not_done_at_the_end_is_told_so(server, monkeypatch, caplog):
    monkeypatch.setattr(connections, "LAST_SECONDS", 0.2)
    with run.running(endless(server.engine)) as port:
        asked = [Asked(port, path, {}) for path in ("/whole", "/events", "/live/events", "/sound")]
        until(lambda: all(thread.status == 200 for thread in asked[1:]))
    for thread in asked:
        thread.join()
    whole, events, called, sound = asked
    assert (whole.status, whole.after) == (503, "5")
    assert json.loads(whole.said)["error"]["code"] == "server_shutting_down"
    assert json.loads(events.said.split(b"data: ")[2])["error"]["code"] == "server_shutting_down"
    assert b"event: error\ndata: " in called.said and b"server_shutting_down" in called.said
    assert events.is_whole and called.is_whole
    assert not sound.is_whole  # control: a part is not taken for the whole
    assert not [r for r in caplog.records if r.exc_info and "CancelledError" not in str(r.exc_info)]


@pytest.mark.slow
def test_requests_that_are_not_done_at_the_end_are_told_so(server, monkeypatch, caplog):
    monkeypatch.setattr(connections, "LAST_SECONDS", 0.05)
    stream = {**LONG, "stream": True, "partial_images": 3}
    call = {"model": "image", "prompt": "a red circle", "num_samples": 8}
    with run.running(make_app(server.engine)) as port:
        paths = ("/v1/images/generations", "/v1/images/generations", "/live/generate")
        bodies = (LONG, stream, {**call, "sampler": {"name": "autoregressive"}})
        short = Asked(port, "/v1/completions", TASK)  # control: what is done in time is whole
        short.join()
        # rows are shared with requests enough that none is done before all have begun
        asked, others = [], [Asked(port, paths[0], LONG) for _ in range(8)]
        for path, body in zip(paths, bodies, strict=True):
            asked.append(Asked(port, path, body))
            until(lambda: path == paths[0] or asked[-1].status == 200)
    for thread in (*asked, *others):
        thread.join()
    whole, streamed, called = asked
    assert short.status == 200 and short.is_whole
    assert (whole.status, whole.after) == (503, "5")
    assert json.loads(whole.said)["error"]["code"] == "server_shutting_down"
    last = json.loads(streamed.said.strip().rpartition(b"data: ")[2])
    assert streamed.is_whole and last["error"]["code"] == "server_shutting_down"
    name, _, data = called.said.strip().rpartition(b"\n\n")[2].partition(b"\n")
    assert called.is_whole and name == b"event: error"
    assert json.loads(data.removeprefix(b"data: "))["code"] == "server_shutting_down"
    assert not [record for record in caplog.records if record.exc_info]
    until(lambda: server.ask("/health")[1]["running"] == 0)


def test_a_request_that_does_not_let_go_is_told_by_its_connection(server, monkeypatch):
    """A thread cannot be cancelled: the request is answered although its work goes on."""
    monkeypatch.setattr(connections, "LAST_SECONDS", 0.2)
    monkeypatch.setattr(connections, "TOLD_SECONDS", 0.2)
    app, release = make_app(server.engine), threading.Event()
    app.get("/stuck")(lambda: release.wait(30))
    with run.running(app) as port:
        found: list[tuple] = []
        other = Served(server.engine, port)
        asking = threading.Thread(target=lambda: found.append(other.ask("/stuck")))
        asking.start()
        time.sleep(0.5)
        threading.Timer(2.0, release.set).start()
    asking.join()
    status, answer, headers = found[0]
    assert (status, headers["retry-after"]) == (503, "5")
    assert answer["error"]["code"] == "server_shutting_down"


@pytest.mark.slow
def test_a_signal_ends_a_server_whose_requests_are_told(tmp_path):
    port = free_port()
    process = started(port, "--max-rows", "1")
    try:
        served = up(port)
        asked = [Asked(port, "/v1/images/generations", LONG) for _ in range(12)]
        until(lambda: served.ask("/health")[1]["waiting"] > 100, 60)
        process.send_signal(signal.SIGTERM)
        log = process.communicate(timeout=60)[1]
        for thread in asked:
            thread.join()
        assert {(a.status, a.after, a.is_whole) for a in asked} == {(503, "5", True)}
        assert process.returncode == 0 and "Traceback" not in log
    finally:
        process.kill()
        process.wait()


def test_a_second_request_on_a_connection_is_answered(server):
    """The control of all of these: what keeps to the bounds is served, one after another."""
    with socket.create_connection(("127.0.0.1", server.port), 30) as connection:
        connection.sendall(PAGE * 3 + PAGE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        assert read_all(connection).count(b"HTTP/1.1 200") == 4
    assert issubclass(Http, connections.H11Protocol)
