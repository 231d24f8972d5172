"""Ten minutes of mixed load on one server: requests, streams, clients that leave, and bad input."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter

import openai
import psutil
import pytest
from served import Served

SECONDS = float(os.environ.get("GEN_SOAK_SECONDS", 600))
CLIENTS = 6
TEXTS = ["sort 3 1 2 =", "shuffle 5 2 8 0 1 =", "3 + 8 + 5 ="]
SETTLED = 0.4  # share of the time after which memory is compared
GROWTH = 1.05

pytestmark = pytest.mark.long


class Load:
    """Clients that send mixed requests until the time is over.

    Attributes:
        outcomes: number of requests by what they ask for and how they ended.
    """

    def __init__(self, served: Served, until: float):
        self.served, self.until = served, until
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.lock = threading.Lock()

    def run(self, number: int) -> None:
        rng, client = random.Random(number), self.served.client(timeout=120)
        kinds = [self.image, self.text, self.stream, self.leave, self.bad, self.motion]
        while time.monotonic() < self.until:
            kind = rng.choice(kinds)
            try:
                ended = kind(client, rng)
            except openai.RateLimitError:
                ended = "429"
            with self.lock:
                self.outcomes[kind.__name__, ended] += 1

    def image(self, client, rng) -> str:
        sampler, seed = rng.choice(["maskgit", "sjd", "next_scale"]), rng.randrange(99)
        made = client.images.generate(
            model="image", prompt="a red circle", extra_body={"sampler": sampler, "seed": seed}
        )
        return "done" if made.data[0].b64_json else "empty"

    def text(self, client, rng) -> str:
        more = {"temperature": rng.random(), "seed": rng.randrange(9), "n": rng.randrange(1, 4)}
        made = client.completions.create(model="text", prompt=rng.choice(TEXTS), **more)
        return "done" if len(made.choices) == more["n"] else "empty"

    def stream(self, client, rng) -> str:
        parts = client.completions.create(model="text", prompt=rng.choice(TEXTS), stream=True)
        return "done" if "".join(p.choices[0].text for p in parts if p.choices) else "empty"

    def leave(self, client, rng) -> str:
        """Close the connection after the first bytes of a stream, or before them."""
        body = b'{"model":"image","prompt":"a red circle","stream":true,"partial_images":3}'
        with socket.create_connection(("127.0.0.1", self.served.port), 30) as sock:
            sock.sendall(
                b"POST /v1/images/generations HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type:"
                b" application/json\r\nContent-Length: %d\r\n\r\n%s"
                % (self.served.port, len(body), body)
            )
            if rng.random() < 0.5:
                sock.recv(100)
        return "left"

    def bad(self, client, rng) -> str:
        body = rng.choice([b"{", b'{"model":"imag","prompt":"x"}', b'{"model":"text","prompt":7}'])
        status = self.served.ask("/v1/completions", body)[0]
        return "refused" if 400 <= status < 500 else str(status)

    def motion(self, client, rng) -> str:
        status, _, _ = self.served.ask("/v1/motions", {"prompt": "walk forward", "seed": 1})
        return "done" if status == 200 else str(status)


def test_ten_minutes_of_mixed_load_leave_memory_flat_and_nothing_behind(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
    words = ["serve", "--port", str(port), "--device", "cpu", "--max-waiting", "64"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, "-m", "gen", *words], env=environment) as server:
        try:
            served, process = Served(None, port), psutil.Process(server.pid)
            for _ in range(600):
                try:
                    served.ask("/health")
                    break
                except OSError:
                    time.sleep(0.1)
            began = time.monotonic()
            load = Load(served, began + SECONDS)
            clients = [threading.Thread(target=load.run, args=(n,)) for n in range(CLIENTS)]
            for client in clients:
                client.start()
            sizes: list[tuple[float, int]] = []
            while any(client.is_alive() for client in clients):
                sizes.append(((time.monotonic() - began) / SECONDS, process.memory_info().rss))
                time.sleep(SECONDS / 200)
            for _ in range(100):  # of clients that left
                health = served.ask("/health")[1]
                if health["waiting"] == health["running"] == 0:
                    break
                time.sleep(0.1)
            print(dict(load.outcomes), [size >> 20 for _, size in sizes[::10]], health)
            fine = {"done", "left", "refused", "429"}
            assert {ended for _, ended in load.outcomes} <= fine
            assert len({kind for kind, ended in load.outcomes if ended != "429"}) == 6
            assert health["waiting"] == health["running"] == 0
            middle = [size for share, size in sizes if SETTLED < share < SETTLED + 0.2]
            last = [size for share, size in sizes if share > 0.8]
            assert sorted(last)[len(last) // 2] < GROWTH * sorted(middle)[len(middle) // 2]
        finally:
            server.terminate()
            assert server.wait(60) == 0
