"""Load on a server of this machine: many clients, some of them hostile, and a restart.

    python tests/support/load.py --requests 2000 --clients 200

starts ``gen serve`` on a free port of the loopback interface, and goes through

1. *alone*: one client sends every distinct request once; its answers are the reference;
2. *load*: ``--clients`` clients send ``--requests`` of them in random order, whole and as streams.
   Beside them others read slowly, leave in the middle, send half a body, a slow head, a wrong key
   or garbage;
3. *bounds*: more outputs are asked for than may wait: 429, and an answer at a later try;
4. *restart*: the server is killed in the middle of a batch and started again;
5. *drain*: SIGTERM while streams run.

It prints a table in Markdown and, with ``--out``, writes the figures as JSON. It exits with 1 if an
answer is wrong. Every phase is bounded in time, and the server is ended behind it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx
import psutil

KEY = "the-key-of-the-load"
PHASE_SECONDS = 1500.0  # at most, of one phase
REQUEST_SECONDS = 600.0  # at most, of one request
IDLE_SECONDS = 15.0  # of rest before memory is read: pages of ended requests go back within 1 s
TEXTS = ("sort 3 1 2 =", "shuffle 5 2 8 0 1 =", "3 + 8 + 5 =", "sort 9 4 6 1 =")
TEXT_SAMPLERS: tuple[Any, ...] = (
    "autoregressive",
    "prompt_lookup",
    "suffix",
    {"name": "speculative_jacobi", "window": 8},
    "token_recycling",
    "llada",
    "best_of",
)
IMAGES = ("a red circle", "a small blue ring in the centre", "a large green square")
Request = tuple[str, dict[str, Any]]  # path and body


def distinct_requests() -> list[Request]:
    """List the requests of the load: texts, images, sounds and motions of mixed sizes."""
    texts: list[Request] = []
    for number, (prompt, sampler) in enumerate((p, s) for p in TEXTS for s in TEXT_SAMPLERS):
        body: dict[str, Any] = {"model": "text", "prompt": prompt, "sampler": sampler}
        body |= {"seed": number, "n": 1 + number % 3, "temperature": 0.5 * (number % 3)}
        texts.append(("/v1/completions", body))
    pattern = {"structured": {"regex": "[0-9 ]{3,9}"}, "seed": 5}
    texts.append(("/v1/completions", {"model": "text", "prompt": TEXTS[0], **pattern}))
    media: list[Request] = [
        ("/v1/images/generations", {"prompt": prompt, "sampler": sampler, "seed": seed})
        for seed, (prompt, sampler) in enumerate(
            zip(IMAGES * 2, ("maskgit", "sjd", "next_scale") * 2, strict=True)
        )
    ]
    media += [("/v1/audio/speech", {"input": text, "seed": 2}) for text in ("three", "one two")]
    media += [("/v1/motions", {"prompt": "walk forward", "seed": seed}) for seed in (1, 2)]
    return texts + media


def answer_of(path: str, content: bytes) -> Any:
    """Return what an answer says, without its id and the time it was made at."""
    if path == "/v1/audio/speech":
        return content
    body = json.loads(content)
    if path == "/v1/completions":
        return [(c["index"], c["text"], c["finish_reason"]) for c in body["choices"]]
    return [{k: v for k, v in entry.items() if k != "gen"} for entry in body["data"]]


async def streamed(answer: httpx.Response, pause: float = 0.0) -> list[tuple[int, str, str]]:
    """Read the stream of a completion, an event per ``pause`` seconds; return its choices."""
    texts: Counter[int] = Counter()
    parts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    async for line in answer.aiter_lines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise ValueError(event["error"]["message"])
        for choice in event["choices"]:
            texts[choice["index"]] += 1
            parts[choice["index"]] = parts.get(choice["index"], "") + choice["text"]
            if choice["finish_reason"]:
                reasons[choice["index"]] = choice["finish_reason"]
        await asyncio.sleep(pause)
    return [(i, parts[i], reasons[i]) for i in sorted(parts)]


class Server:
    """``gen serve`` in a process of its own.

    Args:
        folder: folder of batches and of the log.
        port: port of the loopback interface.
        max_waiting: outputs that may wait.
    """

    def __init__(self, folder: Path | None, port: int, max_waiting: int = 400):
        self.folder, self.port, self.url = folder, port, f"http://127.0.0.1:{port}"
        self.max_waiting = max_waiting
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process and wait until it answers."""
        assert self.folder is not None
        words = [
            "--port",
            str(self.port),
            "--device",
            "cpu",
            "--max-waiting",
            str(self.max_waiting),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GEN_API_KEY": KEY}
        with open(self.folder / "serve.log", "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gen", "serve", *words, "--batches", self.folder / "kept"],
                env=environment,
                stdout=log,
                stderr=log,
            )
        until = time.monotonic() + 120
        while time.monotonic() < until and self.process.poll() is None:
            try:
                httpx.get(f"{self.url}/health", timeout=5)
                return
            except httpx.TransportError:
                time.sleep(0.1)
        raise RuntimeError("the server did not start; its log is " + str(self.folder / "serve.log"))

    def stop(self, number: int, seconds: float = 60.0) -> int:
        """Send a signal, wait for the end, and return the exit status."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(seconds)

    @property
    def memory(self) -> int:
        """Resident bytes."""
        assert self.process is not None
        return psutil.Process(self.process.pid).memory_info().rss


@contextmanager
def server_in(folder: Path, max_waiting: int):
    """Yield a running server, whose process is killed behind it."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
    server = Server(folder, port, max_waiting)
    try:
        server.start()
        yield server
    finally:
        if server.process is not None and server.process.poll() is None:
            server.process.kill()
            server.process.wait()


class Load:
    """Clients of one server, and what became of their requests.

    Args:
        server: the server.
        seed: seed of the order of requests.

    Attributes:
        reference: answers of requests that were alone, by number of the request.
        outcomes: number of requests by kind and by how they ended.
        wrong: what was wrong with an answer.
        seconds: durations of requests by phase.
    """

    def __init__(self, server: Server, seed: int = 0):
        self.server, self.rng = server, random.Random(seed)
        self.requests = distinct_requests()
        self.reference: list[Any] = []
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.seconds: dict[str, list[float]] = {"alone": [], "load": []}
        headers = {"Authorization": f"Bearer {KEY}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=50)
        self.client = httpx.AsyncClient(
            base_url=server.url, headers=headers, timeout=REQUEST_SECONDS, limits=limits
        )

    async def send(self, number: int, stream: bool = False, pause: float = 0.0) -> Any:
        """Send a request, again while the server is full; return what its answer says."""
        path, body = self.requests[number]
        until = time.monotonic() + REQUEST_SECONDS
        while True:
            if stream and path == "/v1/completions":
                asked = self.client.stream("POST", path, json={**body, "stream": True})
            else:
                asked = self.client.stream("POST", path, json=body)
            async with asked as answer:
                if answer.status_code == 200:
                    if stream and path == "/v1/completions":
                        return await streamed(answer, pause)
                    return answer_of(path, await answer.aread())
                content = await answer.aread()
                if answer.status_code != 429 or time.monotonic() > until:
                    raise ValueError(f"{answer.status_code}: {content[:200]!r}")
                self.outcomes["429, sent again"] += 1
                wait = float(answer.headers["Retry-After"])
            await asyncio.sleep(min(wait, 5.0) * (0.5 + self.rng.random()))

    async def check(self, kind: str, number: int, **how: Any) -> None:
        """Send a request and compare its answer with the one that it has alone."""
        began = time.monotonic()
        try:
            answer = await self.send(number, **how)
        except (ValueError, KeyError, httpx.HTTPError) as error:
            self.wrong.append(f"{kind} {self.requests[number]}: {type(error).__name__} {error}")
            self.outcomes[f"{kind}: failed"] += 1
            return
        if kind != "slow reader":
            self.seconds["load"].append(time.monotonic() - began)
        same = answer == self.reference[number]
        if not same:
            self.wrong.append(f"{kind} {self.requests[number]}: another answer")
        self.outcomes[f"{kind}: {'as alone' if same else 'another answer'}"] += 1

    async def alone(self) -> None:
        """Send every request twice, one after the other; time the second turn."""
        for turn in range(2):
            for number in range(len(self.requests)):
                began = time.monotonic()
                answer = await self.send(number)
                if turn == 0:
                    self.reference.append(answer)
                    continue
                self.seconds["alone"].append(time.monotonic() - began)
                if answer != self.reference[number]:
                    self.wrong.append(f"alone {self.requests[number]}: another answer")

    async def loaded(self, requests: int, clients: int) -> None:
        """Send ``requests`` requests from ``clients`` clients, with hostile ones beside them."""
        numbers = [self.rng.randrange(len(self.requests)) for _ in range(requests)]
        hostile = [self.leaver, self.half_body, self.slow_head, self.wrong_key, self.garbage]

        async def client() -> None:
            while numbers:
                number, turn = numbers.pop(), len(numbers)
                if turn % 20 == 0:
                    await self.check("slow reader", number, stream=True, pause=0.3)
                else:
                    kind = "stream" if turn % 2 else "whole"
                    await self.check(kind, number, stream=kind == "stream")

        async def enemy(number: int) -> None:
            while numbers:
                act = hostile[number % len(hostile)]
                try:
                    ended = await asyncio.wait_for(act(), 90)
                except (OSError, TimeoutError, httpx.HTTPError) as error:
                    ended = type(error).__name__
                self.outcomes[f"{act.__name__.replace('_', ' ')}: {ended}"] += 1
                await asyncio.sleep(0.5)

        tasks = [client() for _ in range(clients)] + [enemy(n) for n in range(2 * len(hostile))]
        async with asyncio.timeout(PHASE_SECONDS):
            await asyncio.gather(*tasks)

    async def leaver(self) -> str:
        """Leave a stream after its first bytes, or before them."""
        body = {"prompt": "a red circle", "stream": True, "partial_images": 3, "n": 2}
        path = "/v1/images/generations"
        async with self.client.stream("POST", path, json=body) as answer:
            if answer.status_code == 429:
                return "429"
            if self.rng.random() < 0.7:
                async for _ in answer.aiter_bytes():
                    break
        return "left"

    async def _raw(self, *parts: bytes, pause: float = 0.0, wait: float = 60.0) -> bytes:
        """Send parts on a connection of its own; return the first bytes that come back."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        try:
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(pause)
            return await asyncio.wait_for(reader.read(200), wait)
        except (ConnectionResetError, BrokenPipeError):
            return b""
        finally:
            writer.close()

    def _head(self, path: str, length: int, key: str = KEY) -> bytes:
        return (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.server.port}\r\n"
            f"Authorization: Bearer {key}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {length}\r\n\r\n"
        ).encode()

    async def half_body(self) -> str:
        """Send half of a body and wait: 408 after the server's time."""
        came = await self._raw(self._head("/v1/completions", 4_000), b"{" * 2_000)
        return came[9:12].decode() or "closed"

    async def slow_head(self) -> str:
        """Send a head a byte per second: the connection is closed."""
        head = self._head("/v1/completions", 10)
        came = await self._raw(*(head[i : i + 1] for i in range(30)), pause=1.0)
        return came[9:12].decode() or "closed"

    async def wrong_key(self) -> str:
        """Send a wrong key: 401."""
        came = await self._raw(self._head("/v1/completions", 2, "wrong"), b"{}")
        return came[9:12].decode()

    async def garbage(self) -> str:
        """Send what is no HTTP, or no JSON: 400."""
        head = self._head("/v1/completions", 9)
        parts = self.rng.choice([(b"\x00\xffgarbage\r\n\r\n",), (head, b"[[[[{\xff\xff\x00}")])
        return (await self._raw(*parts))[9:12].decode()

    async def bounds(self) -> None:
        """Ask for more outputs than may wait: some get 429, and all an answer at a later try."""
        before = self.outcomes["429, sent again"]
        images = [n for n, (path, _) in enumerate(self.requests) if "images" in path]
        texts = [n for n, (path, body) in enumerate(self.requests) if body.get("n") == 3]
        numbers = images + [self.rng.choice(texts) for _ in range(self.server.max_waiting)]
        async with asyncio.timeout(PHASE_SECONDS):
            await asyncio.gather(*(self.check("bounds", number) for number in numbers))
        if self.outcomes["429, sent again"] == before:
            self.wrong.append("bounds: no request was refused with 429")

    async def restart(self, lines: int) -> None:
        """Kill the server in the middle of a batch, start it again and read the batch's outputs."""
        texts = [n for n, (path, _) in enumerate(self.requests) if path == "/v1/completions"]
        numbers = [texts[i % len(texts)] for i in range(lines)]
        asked = [
            {"custom_id": str(i), "method": "POST", "url": self.requests[n][0]}
            | {"body": self.requests[n][1]}
            for i, n in enumerate(numbers)
        ]
        content = "\n".join(json.dumps(line) for line in asked).encode()
        files = {"file": ("lines.jsonl", content), "purpose": (None, "batch")}
        file = (await self.client.post("/v1/files", files=files)).raise_for_status().json()["id"]
        body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = (await self.client.post("/v1/batches", json=body)).raise_for_status().json()["id"]
        killed, until = False, time.monotonic() + PHASE_SECONDS
        while time.monotonic() < until:
            found = (await self.client.get(f"/v1/batches/{batch}")).raise_for_status().json()
            if not killed and found["request_counts"]["completed"] >= lines // 4:
                killed = found["status"] == "in_progress"
                self.server.stop(signal.SIGKILL)
                self.server.start()
            elif found["status"] in ("completed", "failed", "expired", "cancelled"):
                break
            await asyncio.sleep(0.05)
        output = (await self.client.get(f"/v1/files/{found['output_file_id']}/content")).text
        answers = {int(x["custom_id"]): x for x in map(json.loads, output.splitlines())}
        same = sum(
            answer_of("/v1/completions", json.dumps(answers[i]["response"]["body"]).encode())
            == self.reference[n]
            for i, n in enumerate(numbers)
            if i in answers
        )
        how = "across a restart" if killed else "that ended before the restart"
        self.outcomes[f"line of a batch {how}: as alone"] += same
        if same != lines or len(output.splitlines()) != lines or not killed:
            self.wrong.append(f"batch {how}: {same} of {lines} lines are right")

    async def drain(self, streams: int) -> None:
        """Send SIGTERM while streams run: each ends whole or with an error, and the server too."""
        ended: Counter[str] = Counter()

        async def one(number: int) -> None:
            body = {"prompt": IMAGES[number % 3], "sampler": "sjd", "n": 4, "seed": number}
            path = "/v1/images/generations"
            try:
                answer = await self.client.post(path, json=body)
            except httpx.HTTPError as error:
                ended[type(error).__name__] += 1
                return
            told = answer.status_code in (429, 503) and "Retry-After" in answer.headers
            ended[f"{answer.status_code}{' with Retry-After' if told else ''}"] += 1

        tasks = [asyncio.create_task(one(n)) for n in range(streams)]
        await asyncio.sleep(2)
        began = time.monotonic()
        status = await asyncio.to_thread(self.server.stop, signal.SIGTERM)
        took = time.monotonic() - began
        await asyncio.wait(tasks, timeout=30)
        for how, count in ended.items():
            self.outcomes[f"drain: {how}"] += count
        if (
            set(ended) - {"200", "429 with Retry-After", "503 with Retry-After"}
            or status != 0
            or took > 20
        ):
            self.wrong.append(f"drain: {dict(ended)}, exit status {status} after {took:.1f} s")

    async def settled(self, idle: float = 0.0) -> None:
        """Wait until nothing waits or runs, and ``idle`` seconds longer."""
        for _ in range(600):
            health = (await self.client.get("/health")).json()
            if health["waiting"] == health["running"] == 0:
                await asyncio.sleep(idle)
                return
            await asyncio.sleep(0.1)
        self.wrong.append(f"rows are stuck: {health}")


async def run(args: argparse.Namespace, server: Server) -> dict[str, Any]:
    """Go through all phases; return the figures."""
    load = Load(server)
    async with load.client:
        await load.alone()
        await load.loaded(min(args.requests // 4, 300), args.clients)  # memory of many connections
        await load.settled(IDLE_SECONDS)
        load.outcomes.clear()
        load.seconds["load"].clear()
        before, began = server.memory, time.monotonic()
        await load.loaded(args.requests, args.clients)
        seconds = time.monotonic() - began
        await load.settled(IDLE_SECONDS)
        after = server.memory
        await load.bounds()
        await load.restart(args.lines)
        await load.drain(16)
    return {
        "requests": args.requests,
        "clients": args.clients,
        "seconds": seconds,
        "memory_before": before,
        "memory_after": after,
        "latency": {phase: percentiles(times) for phase, times in load.seconds.items()},
        "outcomes": dict(sorted(load.outcomes.items())),
        "wrong": load.wrong,
    }


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Return p50 and p99 of durations."""
    return {"p50": median(seconds), "p99": quantiles(seconds, n=100, method="inclusive")[-1]}


def table(found: dict[str, Any]) -> str:
    """Return the figures as tables in Markdown."""
    grown = found["memory_after"] / found["memory_before"] - 1
    latency = found["latency"]
    lines = ["| clients | requests | p50 | p99 |", "| --- | --- | --- | --- |"]
    for phase, clients in (("alone", 1), ("load", found["clients"])):
        times = latency[phase]
        number = len(distinct_requests()) if clients == 1 else found["requests"]
        lines.append(f"| {clients} | {number} | {times['p50']:.2f} s | {times['p99']:.2f} s |")
    lines += ["", "| kind of request: how it ended | number |", "| --- | --- |"]
    lines += [f"| {how} | {count} |" for how, count in found["outcomes"].items()]
    lines += ["", f"{found['requests'] / found['seconds']:.1f} requests/s; memory of the server"]
    lines[-1] += f" {found['memory_before'] >> 20} MiB before, {found['memory_after'] >> 20} MiB"
    lines[-1] += f" after ({grown:+.1%}); wrong answers: {len(found['wrong'])}"
    return "\n".join([*lines, *found["wrong"][:20]])


def main(words: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--lines", type=int, default=200, help="lines of the batch")
    parser.add_argument("--max-waiting", type=int, default=400, help="outputs that may wait")
    parser.add_argument("--out", type=Path, help="file of the figures, JSON")
    args = parser.parse_args(words)
    with (
        tempfile.TemporaryDirectory() as folder,
        server_in(Path(folder), args.max_waiting) as server,
    ):
        found = asyncio.run(run(args, server))
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1))
    print(table(found))
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
