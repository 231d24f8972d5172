"""A request switches on none of the powers that a word of the owner allows
(``gen.core.trust.POWERS``): what it asks for is refused, and nothing is run or asked."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from powers import INPUTS, Canary
from served import Served, serving

PROMPTS = {"messages": [{"role": "user", "content": "sort 3 1 2 ="}], "prompt": "sort 3 1 2 =",
           "input": "sort 3 1 2 ="}  # fmt: skip


@pytest.fixture(scope="module")
def server():
    with serving() as made:
        yield made


@pytest.fixture
def place(tmp_path):
    """A canary, trees of all inputs with the power that each uses, and a socket that nobody may
    speak to."""
    canary, own, pickled = (tmp_path / name for name in ("canary", "own.py", "own.pkl"))
    own.write_text(f"open({str(canary)!r}, 'w')\ndef reward(media, prompt):\n    return 1.0\n")
    pickled.write_bytes(pickle.dumps(Canary(canary)))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        words = {"CANARY": canary, "OWN.py": own, "MODEL": tmp_path, "PICKLE": pickled,
                 "ADDRESS": f"http://127.0.0.1:{listener.getsockname()[1]}/a.json"}  # fmt: skip
        trees = []
        for name, texts in INPUTS.items():
            for text in texts:
                for word, value in words.items():
                    text = text.replace(word, str(value))
                trees.append((name, yaml.safe_load(text)))
        yield canary, trees, listener


def endpoints(server: Served) -> dict[str, set[str]]:
    """Return the fields of every endpoint that takes JSON."""
    described = server.ask("/openapi.json")[1]
    found = {}
    for path, methods in described["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        schema = content.get("application/json", {}).get("schema", {})
        if "$ref" in schema and "{" not in path:
            named = schema["$ref"].rpartition("/")[2]
            found[path] = set(described["components"]["schemas"][named]["properties"])
    return found


def bodies(fields: set[str], tree: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the forms in which a request could ask for what a job file asks for."""
    plain = {name: value for name, value in PROMPTS.items() if name in fields}
    yield {**plain, **tree}
    yield {**plain, "model": str(tree.get("model", "MODEL")), **tree.get("model_options", {})}
    yield {**plain, "extra_body": tree}
    yield {**plain, "sampler": {"name": "best_of", **tree, **tree.get("model_options", {})}}
    if isinstance(tree.get("sampler"), dict):
        yield {**plain, "sampler": tree["sampler"]}


def wrong_of(server: Served, place: tuple, path: str, fields: set[str]) -> tuple[int, list[str]]:
    """Send every input in every form to an endpoint; return their number, and what was wrong."""
    canary, trees, listener = place
    count, wrong = 0, []
    for name, tree in trees:
        for body in bodies(fields, tree):
            count += 1
            status, answer, _ = server.ask(path, body)
            if not 400 <= status < 500 or set(answer) != {"error"}:
                wrong.append(f"{name} at {path}: {status} {str(answer)[:200]} for {body}")
            if canary.exists():
                wrong.append(f"{name} at {path}: was executed")
                canary.unlink()
    with pytest.raises(BlockingIOError):  # nobody connected
        listener.accept()
    return count, wrong


def test_a_request_switches_on_no_power(server, place):
    wrong = wrong_of(server, place, "/v1/completions", {"prompt"})[1]
    assert not wrong, "\n".join(wrong[:9])


@pytest.mark.slow
def test_no_endpoint_gives_a_power_to_a_request(server, place):
    found, count, wrong = endpoints(server), 0, []
    for path, fields in found.items():
        told = wrong_of(server, place, path, fields)
        count, wrong = count + told[0], wrong + told[1]
    print(f"{count} requests to {len(found)} endpoints")
    assert len(found) >= 9 and count > 1000 and not wrong, "\n".join(wrong[:9])


@pytest.mark.slow
def test_without_its_guard_a_request_runs_code(server, place, monkeypatch):
    canary, trees, _ = place
    body = {"model": "text", "prompt": PROMPTS["prompt"], "max_tokens": 4}
    sampler = dict(trees)["import paths"]["jobs"][0]["sweep"]["sampler.scorer"][0]
    body |= {"sampler": {"name": "best_of", "n": 2, "scorer": sampler}}
    assert server.ask("/v1/completions", body)[0] == 400 and not Path(canary).exists()
    monkeypatch.setattr("gen.serve.api.fields.require_served", lambda spec: None)
    server.ask("/v1/completions", body)
    assert canary.exists()
