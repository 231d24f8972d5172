"""The Dockerfile: what it starts exists, and its health check tells a server from none."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path

import pytest
import uvicorn

from gen.cli.parser import build
from gen.engine.engine import Engine
from gen.serve.app import make_app

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text()


def command(instruction: str) -> list[str]:
    """Command of an instruction in its JSON form."""
    joined = TEXT.replace("\\\n", " ")
    found = re.search(rf"^{instruction}\b[^\[]*(\[.*\])$", joined, re.MULTILINE)
    assert found, instruction
    return json.loads(found[1])


def test_the_container_starts_a_command_of_gen_as_a_user_without_rights():
    program, *arguments = command("ENTRYPOINT")
    args = build().parse_args(arguments)
    assert program == "gen" and (args.host, args.port) == ("0.0.0.0", 8123)
    assert re.search(r"^EXPOSE 8123$", TEXT, re.MULTILINE)
    last_stage = TEXT.rpartition("\nFROM ")[2]
    assert re.search(r"^USER [1-9]\d*$", last_stage, re.MULTILINE)


def test_the_extras_that_it_installs_exist():
    extras = re.search(r'pip install "\.\[([\w,]+)\]"', TEXT)
    assert extras
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras[1].split(",")) <= set(project["optional-dependencies"])
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert not {"gen", "samplers", "tokenizers", "modalities", "recipes", "configs"} & set(ignored)


@pytest.mark.slow
def test_the_health_check_tells_a_server_from_none():
    engine = Engine({})
    config = uvicorn.Config(make_app(engine), host="127.0.0.1", port=0, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    program, *arguments = command("HEALTHCHECK")
    assert program == "python"
    check = [sys.executable, *(a.replace("8123", str(port)) for a in arguments)]
    assert subprocess.run(check).returncode == 0
    server.should_exit = True
    thread.join(timeout=30)
    assert subprocess.run(check, capture_output=True).returncode != 0
    engine.close()
