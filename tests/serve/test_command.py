"""The command: what it refuses at once, and its page as written, against a real process."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from served import Served

from gen.__main__ import main
from gen.cli import serve as command
from gen.core.errors import GenError

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "serve.md").read_text()
GEN = [sys.executable, "-m", "gen"]


def fences(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    "words, says",
    [
        (["--host", "0.0.0.0"], "expected GEN_API_KEY in the environment"),
        (["--port", "99999"], "--port is 99999; expected 0 to 65535"),
        (["--max-rows", "0"], "--max-rows is 0"),
        (["--deadline", "nan"], "deadline is nan"),
        (["--api-key-file", "nowhere"], "API keys nowhere cannot be read"),
        (["--model", "a=image"], "expected ID=MODALITY:PATH"),
        (["--model", "a=imag:image-causal"], "Did you mean 'image'"),
        (["--prot", "1"], "Did you mean '--port'"),
    ],
)
def test_a_wrong_command_says_so_and_does_not_listen(words, says, capsys, monkeypatch):
    monkeypatch.delenv("GEN_API_KEY", raising=False)
    assert main(["serve", *words]) == 2
    assert says in capsys.readouterr().err


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "uvicorn" else name)
    with pytest.raises(GenError, match=r"needs uvicorn.*gen-toolkit\[serve\]"):
        command.require_extra("serve", command.NEEDED)


def test_help_imports_nothing_heavy():
    heavy = "{'torch', 'fastapi', 'uvicorn', 'pydantic'}"
    code = f"from gen.__main__ import main; main(['serve', '--help']); import sys; print({heavy} &"
    code += " set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip().endswith("set()"), done.stderr


@pytest.fixture
def started(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment.pop("GEN_API_KEY", None)
    words = ["serve", "--port", str(port), "--device", "cpu", "--batches", "kept"]
    process = subprocess.Popen([*GEN, *words], env=environment, cwd=tmp_path)
    served = Served(None, port)
    for _ in range(900):
        try:
            served.ask("/health")
            break
        except OSError:
            time.sleep(0.1)
    yield process, served
    process.kill()
    process.wait()


@pytest.mark.slow
def test_the_page_runs_as_written(started, tmp_path, monkeypatch):
    _, served = started
    monkeypatch.chdir(tmp_path)
    line = {"custom_id": "a", "method": "POST", "url": "/v1/images/generations"}
    body = {"prompt": "a red circle", "sampler": {"name": "maskgit", "steps": 4}}
    Path("requests.jsonl").write_text(json.dumps({**line, "body": body}))
    commands = [line for fence in fences("console") for line in fence.splitlines()]
    curl = next(line for line in commands if line.startswith("curl"))
    words = shlex.split(curl.replace("8123", str(served.port)))
    assert json.loads(subprocess.run(words, capture_output=True).stdout)["status"] == "ok"
    space = {}
    blocks = fences("py")
    assert len(blocks) == 5
    for block in (blocks[0], blocks[3]):  # those between need a model that chats
        exec(block.replace("localhost:8123", f"127.0.0.1:{served.port}"), space)
    assert len(space["images"].data) == 2 and Path("a.wav").read_bytes()[:4] == b"RIFF"
    client = space["client"]
    while (batch := client.batches.retrieve(space["batch"].id)).status == "in_progress":
        time.sleep(0.5)
    assert (batch.status, batch.request_counts.completed) == ("completed", 1)
    exec(blocks[4], space)
    assert "/health" in space["app"].openapi()["paths"]
    for address in (f"http://localhost:{served.port}", f"http://127.0.0.1:{served.port}"):
        assert subprocess.run(["curl", "-sf", f"{address}/health"]).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_server_and_its_requests(started, number):
    process, served = started
    body = json.dumps({"prompt": "a red circle", "n": 8, "sampler": "autoregressive"}).encode()
    head = "POST /v1/images/generations HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.sendall(head.encode() + body)
        while served.ask("/health")[1]["running"] == 0:
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(60) == 0
