"""Batches: job folders under the folder of the server, made exactly once whatever ends it."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import openai
import pytest
from openai.types.chat import ChatCompletion
from served import Served, serving
from tool_models import TOOLS, save_model

import gen
from gen.serve.api import batches
from gen.serve.api.batches import Batches
from gen.serve.api.media import encoded
from gen.serve.settings import Settings
from gen.store.ledger import MANIFEST, read_rows

pytestmark = pytest.mark.slow
IMAGES = "/v1/images/generations"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("batches")


@pytest.fixture(scope="module")
def client(folder):
    with serving(Settings(batches=folder)) as made:
        yield made.client()


def lines(url: str, bodies) -> bytes:
    rows = [
        {"custom_id": f"line {n}", "method": "POST", "url": url, "body": body}
        for n, body in enumerate(bodies)
    ]
    return "\n".join(map(json.dumps, rows)).encode()


def begun(client, url: str, bodies):
    file = client.files.create(file=("../../lines.jsonl", lines(url, bodies)), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=url, completion_window="24h", metadata={"a": "b"}
    )


def ended(client, batch, seconds=240):
    end = time.monotonic() + seconds
    while (found := client.batches.retrieve(batch.id)).status in ("in_progress", "cancelling"):
        assert time.monotonic() < end, found
        time.sleep(0.2)
    return found


def read(client, file_id) -> dict[str, dict]:
    text = client.files.content(file_id).text
    found = [json.loads(line) for line in text.splitlines()]
    assert len({line["custom_id"] for line in found}) == len(found)
    return {line["custom_id"]: line["response"]["body"] for line in found}


def test_lines_of_text_are_what_clients_parse(folder, tmp_path):
    model = save_model(tmp_path / "model", "hermes")
    chat, url = [{"role": "user", "content": "hi"}], "/v1/chat/completions"
    forms = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": [1]}}}
    bodies = [
        {"model": "m", "messages": chat, "seed": 1, "max_tokens": 3},
        {"model": "m", "messages": chat, "seed": 1, "max_tokens": 3, "response_format": forms},
        {"model": "m", "messages": chat, "seed": 1, "tools": TOOLS, "tool_choice": "required"},
        {"model": "m", "messages": chat, "seed": 2, "n": 2},
    ]
    pipe = gen.load("text", model=model, device="cpu", max_new_tokens=160)
    with serving(Settings(batches=tmp_path / "batches"), models={"m": pipe}) as server:
        client = server.client()
        batch = ended(client, begun(client, url, bodies))
        assert batch.request_counts.completed == len(bodies), read(client, batch.error_file_id)
        made = read(client, batch.output_file_id)
        for n, body in enumerate(bodies):
            batched = ChatCompletion.model_validate(made[f"line {n}"], strict=True)
            alone = client.chat.completions.create(**body)
            assert batched.usage == alone.usage and batched.usage.prompt_tokens > 0
            assert set(batched.model_fields_set) == set(alone.model_fields_set)
            for one, other in zip(batched.choices, alone.choices, strict=True):
                assert one.finish_reason == other.finish_reason
                assert one.message.content == other.message.content
                calls = [c.function for c in one.message.tool_calls or []]
                assert calls == [c.function for c in other.message.tool_calls or []]
    reasons = [made[f"line {n}"]["choices"][0]["finish_reason"] for n in range(3)]
    assert reasons == ["length", "stop", "tool_calls"]


def test_a_batch_makes_what_calls_make_and_tells_what_failed(client):
    sampler = {"name": "maskgit", "steps": 6}
    bodies = [
        {"prompt": "a red circle", "seed": 3, "n": 2, "sampler": sampler},
        {"prompt": "a red circle", "seed": 4, "sampler": sampler},  # the second of the first
        {"prompt": "a red zebra", "seed": 1},
        {"prompt": "a red circle", "temprature": 1},
        {"prompt": "a red circle", "stream": True},
        {"prompt": "a red circle", "sampler": {"name": "best_of", "scorer": "os:system"}},
    ]
    batch = ended(client, begun(client, IMAGES, bodies))
    counts = batch.request_counts
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 6, 2, 4)
    assert batch.metadata == {"a": "b"}
    good, bad = read(client, batch.output_file_id), read(client, batch.error_file_id)
    alone = gen.load("image", device="cpu")("a red circle", sampler, num_samples=2, seed=3)
    files = [encoded(alone.served, media, "png") for media in alone.media]
    made = [base64.b64decode(d["b64_json"]) for d in good["line 0"]["data"]]
    assert made == files
    assert base64.b64decode(good["line 1"]["data"][0]["b64_json"]) == files[1]
    assert [d["gen"]["seed"] for d in good["line 0"]["data"]] == [3, 4]
    said = [bad[f"line {n}"]["error"]["message"] for n in range(2, 6)]
    wanted = ("zebra", "Did you mean 'temperature'", "cannot stream", "cannot name files or code")
    assert all(want in text for want, text in zip(wanted, said, strict=True)), said


@pytest.mark.parametrize(
    "url, bodies",
    [
        ("/v1/completions", [{"prompt": ["sort 3 1 2 =", "reverse 5 6 7 ="], "seed": 1}]),
        ("/v1/chat/completions", [{"messages": [{"role": "user", "content": "sort 3 1 2 ="}]}]),
        ("/v1/audio/speech", [{"input": "three seven", "voice": "high", "seed": 1}]),
        ("/v1/motions", [{"prompt": "a person walks forward", "seed": 1}]),
        ("/v1/actions", [{"prompt": "reach", "seed": 1, "n": 2}]),
    ],
)
def test_every_endpoint_has_batches(client, url, bodies):
    batch = ended(client, begun(client, url, bodies))
    assert batch.request_counts.completed == len(bodies), read(client, batch.error_file_id)
    body = read(client, batch.output_file_id)["line 0"]
    if url == "/v1/audio/speech":
        alone = gen.load("speech", device="cpu")("three seven, high voice", seed=1)
        file = encoded(alone.served, alone.media[0], "wav")
        assert base64.b64decode(body["data"][0]["b64_json"]) == file
    if url == "/v1/completions":
        assert [c["text"] for c in body["choices"]] == ["1 2 3", "7 6 5"]
        assert {c["finish_reason"] for c in body["choices"]} == {"stop"}
    assert all(x["gen"]["nfe"] > 0 for x in body.get("data") or body["choices"])


def test_what_is_wrong_with_a_line_is_no_matter_of_the_others(client, monkeypatch):
    """Samplers, rules and prompts that nothing can make, each in a group of rows of its own; and
    the outputs can be read although no file may be uploaded any more."""
    task = {"prompt": "sort 3 1 2 =", "seed": 1}
    bodies = [
        {**task, "user": "a\u2028b"},
        {**task, "sampler": "sdj"},
        {**task, "sampler": {}},
        {**task, "structured": {"regex": "("}},
        {**task, "stop_token_ids": [9999]},
        {**task, "sampler": "sjd", "prompt": "sort zebra ="},
        {**task, "deadline": 1e-9},
        {**task, "stop": "3", "max_tokens": 1},
    ]
    content = "\n".join(
        json.dumps(
            {"custom_id": f"line {n}", "method": "POST", "url": "/v1/completions", "body": body},
            ensure_ascii=False,
        )
        for n, body in enumerate(bodies)
    )
    file = client.files.create(file=("a", b"\xef\xbb\xbf" + content.encode()), purpose="batch")
    monkeypatch.setattr(batches, "MOST_FILES", 1)
    with pytest.raises(openai.BadRequestError, match="expected some to be deleted"):
        client.files.create(file=("a", b"x"), purpose="batch")
    made = {"endpoint": "/v1/completions", "completion_window": "24h"}
    batch = ended(client, client.batches.create(input_file_id=file.id, **made))
    good, bad = read(client, batch.output_file_id), read(client, batch.error_file_id)
    assert good.keys() == {"line 0", "line 7"}
    assert [good[name]["choices"][0]["text"] for name in ("line 0", "line 7")] == ["1 2 3", "1"]
    params = [bad[f"line {n}"]["error"]["param"] for n in range(1, 7)]
    assert params == [
        "sampler", "sampler.name", "structured", "stop_token_ids", "prompt", "deadline",
    ]  # fmt: skip


def test_a_file_that_is_no_batch_is_refused(client):
    good = lines(IMAGES, [{"prompt": "a red circle"}])
    for content, code in (
        (b"\xff\xfe", "invalid_file"),
        (b"\n\n", "invalid_file"),
        (b"[]", "invalid_file"),
        (good.replace(b"POST", b"GET"), "mismatched_endpoint"),
        (good + b"\n" + good, "duplicate_custom_id"),
        (good.replace(b"custom_id", b"id"), "invalid_file"),
    ):
        file = client.files.create(file=("a", content), purpose="batch")
        with pytest.raises(openai.BadRequestError) as caught:
            client.batches.create(input_file_id=file.id, endpoint=IMAGES, completion_window="24h")
        assert caught.value.code == code
        assert client.files.delete(file.id).deleted
    for name in ("../../batches", "file-" + "0" * 32, "..", "batch_" + "0" * 32):
        with pytest.raises(openai.NotFoundError):
            client.get(f"/files/{name}", cast_to=object)
        with pytest.raises(openai.NotFoundError):
            client.get(f"/batches/{name}", cast_to=object)


MANY = [{"prompt": "a red circle", "seed": n, "sampler": "autoregressive"} for n in range(400)]


@pytest.mark.parametrize("seconds", [0, 0.3, 1, 2.5, 4])
def test_a_batch_can_be_given_up(client, seconds):
    batch = begun(client, IMAGES, MANY)
    time.sleep(seconds)  # before its process begins, while it starts, while it decodes
    assert client.batches.cancel(batch.id).status == "cancelling"
    done = ended(client, batch)
    assert done.status == "cancelled" and done.request_counts.completed < 400


def test_a_batch_that_is_given_up_just_before_its_process_begins_makes_nothing(client, monkeypatch):
    begin = Batches._process

    def cancelled_first(self, name, folder):
        self.cancel(name)
        return begin(self, name, folder)

    monkeypatch.setattr(Batches, "_process", cancelled_first)
    done = ended(client, begun(client, IMAGES, MANY))
    assert done.status == "cancelled" and done.request_counts.completed == 0


def test_without_a_folder_there_are_no_batches():
    with serving() as served, pytest.raises(openai.NotFoundError, match="--batches FOLDER"):
        served.client().files.list()


# --- the end of the server


def command(folder: Path, port: int) -> subprocess.Popen:
    words = ["serve", "--port", str(port), "--device", "cpu", "--batches", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "gen", *words], env=environment)


def up(port: int) -> Served:
    served = Served(None, port)
    for _ in range(600):
        try:
            if served.ask("/health")[0] == 200:
                return served
        except OSError:
            time.sleep(0.1)
    raise AssertionError("the server did not come up")


def wait_for_rows(job: Path, count: int, seconds=180) -> None:
    end = time.monotonic() + seconds
    while not ((job / "plan.json").is_file() and len(read_rows(job)) >= count):
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture
def free_port():
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return bound.getsockname()[1]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_every_item_is_made_once_although_the_server_ends(tmp_path, number, free_port):
    count = 40
    sampler = {"name": "maskgit", "steps": 6}
    bodies = [{"prompt": "a red circle", "seed": n, "sampler": sampler} for n in range(count)]
    first = command(tmp_path, free_port)
    try:
        client = up(free_port).client()
        batch = begun(client, IMAGES, bodies)
        job = tmp_path / "batches" / batch.id / "job"
        wait_for_rows(job, 8)
    finally:
        first.send_signal(number)
        code = first.wait(60)
    assert code == (-signal.SIGKILL if number == signal.SIGKILL else 0)
    if number == signal.SIGTERM:  # it has told its job to stop
        assert len(read_rows(job)) < count
    second = command(tmp_path, free_port)
    try:
        client = up(free_port).client()
        done = ended(client, batch)
        assert (done.status, done.request_counts.completed) == ("completed", count)
        found = read(client, done.output_file_id)
        assert [found[f"line {n}"]["data"][0]["gen"]["seed"] for n in range(count)] == [
            *range(count)
        ]
    finally:
        second.terminate()
        assert second.wait(60) == 0
    rows = [json.loads(line) for line in (job / MANIFEST).read_text().splitlines()]
    made = Counter(row["input_id"] for row in rows)
    assert len(made) == count and set(made.values()) == {1}
    assert len(list(job.glob("*.png"))) == count
