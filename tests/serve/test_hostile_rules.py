"""Rules of structured output that would occupy a server: each on a server of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
from contextlib import contextmanager

import psutil
import pytest
from hostile_rules import hostile_rules
from served import Served

RULES = hostile_rules()
PROMPT = {"model": "text", "prompt": "sort 3 1 2 ="}
LARGEST = 1_500_000  # bytes of a rule
SECONDS = 4.0  # 3, of which 2 are the budget, with room for a busy machine
ROOM = 0.05

pytestmark = pytest.mark.slow


@contextmanager
def started(*words: str):
    """Start ``gen serve``; yield its process and a client, once it answers a request of texts."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
    command = [sys.executable, "-m", "gen", "serve", "--port", str(port), "--device", "cpu", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("GEN_API_KEY", None)
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        served = Served(None, port)
        try:
            for _ in range(900):
                try:
                    served.ask("/v1/completions", PROMPT)
                    break
                except OSError:
                    time.sleep(0.1)
            yield psutil.Process(process.pid), process, served
        finally:
            process.kill()


def megabytes(process: psutil.Process) -> float:
    """Return the memory of a server and of the processes that it started."""
    found = 0.0
    for one in (process, *process.children(recursive=True)):
        try:
            found += one.memory_info().rss / 1e6
        except psutil.NoSuchProcess:
            pass  # it ended in between
    return found


def until(happens, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not happens() and time.monotonic() < end:
        time.sleep(0.05)
    return happens()


class Asked(threading.Thread):
    """Request with a rule; ``answer`` is its status and body, ``seconds`` its time."""

    def __init__(self, served: Served, rule: dict, **more: object):
        super().__init__(daemon=True)
        self.served, self.body = served, {**PROMPT, "structured": rule, **more}
        self.answer: tuple[int, object] | None = None
        self.seconds = float("inf")
        self.start()

    def run(self) -> None:
        began = time.monotonic()
        try:
            self.answer = self.served.ask("/v1/completions", self.body)[:2]
        except (OSError, urllib.error.URLError):
            pass  # the server ended first
        self.seconds = time.monotonic() - began


@contextmanager
def busy():
    """Keep a core busy, as the process that builds a rule does, so that times beside both compare
    on a machine that has other work."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


def text_seconds(served: Served, seed: int) -> float:
    began = time.monotonic()
    assert served.ask("/v1/completions", {**PROMPT, "seed": seed})[0] == 200
    return time.monotonic() - began


def engines(rule: dict) -> dict:
    return {**rule, "engine": "auto"} if "json_schema" in rule else rule


@pytest.mark.parametrize("name", RULES)
def test_a_hostile_rule_gets_its_answer_and_harms_nobody(name):
    rule = engines(RULES[name])
    assert len(json.dumps(rule)) < LARGEST
    with started() as (process, server, served):
        with busy():
            usual = [text_seconds(served, seed) for seed in range(20)]
        before = megabytes(process)
        asked, beside = Asked(served, rule), []
        while asked.is_alive() or len(beside) < 5:
            beside.append(text_seconds(served, len(beside)))
        asked.join()
        with busy():
            usual += [text_seconds(served, seed) for seed in range(20)]
        status, body = asked.answer
        assert status in (200, 400), body
        if status == 400:
            assert body["error"]["param"] == "structured" and body["error"]["code"]
        print(name, status, f"{asked.seconds:.2f} s", statistics.median(beside), min(usual))
        assert asked.seconds < SECONDS, (asked.seconds, body)
        assert until(lambda: megabytes(process) < before + 50, 10), megabytes(process) - before
        assert statistics.median(beside) < 2 * statistics.median(usual) + ROOM, (usual, beside)
        # a signal while another such rule is built
        again = Asked(served, {**rule, "budget": {"states": 49_999}})
        time.sleep(0.3)
        every = [process, *process.children(recursive=True)]
        began = time.monotonic()
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
        assert time.monotonic() - began < 5
        again.join(10)
        assert again.answer is None or again.answer[0] in (200, 400, 503)
        assert until(lambda: not any(one.is_running() for one in every[1:]), 10), every


def test_the_limits_of_the_command_are_what_bounds_them():
    """With more time the same rule is built for longer; a client that leaves ends it."""
    limits = ("--constraint-seconds", "40", "--constraint-megabytes", "2000")
    rule = {**RULES["nested_repeats"], "engine": "automaton"}
    with started(*limits) as (process, server, served):
        builder = process.children()
        assert len(builder) == 1
        body = json.dumps({**PROMPT, "structured": rule}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", served.port)) as connection:
            connection.sendall(head.encode() + body)
            time.sleep(4)
            assert builder[0].children()  # long after the usual limit
        assert until(lambda: not builder[0].children(), 10)
        # a deadline ends it too
        asked = Asked(served, {**rule, "max_depth": 2}, deadline=1.5)
        assert until(lambda: bool(builder[0].children()), 20)
        asked.join()
        assert asked.answer[0] == 408 and until(lambda: not builder[0].children(), 10)
        # and a signal
        asked = Asked(served, {**rule, "max_depth": 1})
        assert until(lambda: bool(builder[0].children()), 20)
        working = builder[0].children()
        server.send_signal(signal.SIGTERM)
        assert until(lambda: not working[0].is_running(), 10)
        asked.join(5)
        assert asked.answer[0] == 503 and asked.answer[1]["error"]["code"] == "server_shutting_down"
        assert server.wait(10) == 0
