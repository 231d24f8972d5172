"""Bodies: what they may hold is judged by their bytes, and large ones hold nobody up."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time

import psutil
import pytest
from served import serving

from gen.serve.api import bodies, calls
from gen.serve.api.bodies import BLOCK, LARGE, MOST_VALUES, parsed, require_measure
from gen.serve.api.errors import ApiError
from gen.serve.api.fields import require_finite
from gen.serve.api.samplers import require_served

TASK = {"model": "text", "prompt": "sort 3 1 2 ="}
MOST_SECONDS = 1.0  # in which a body of 16 MB is refused, as docs/serve.md says
ROOM = 4  # on a machine that does other things


@pytest.fixture(scope="module")
def server():
    with serving() as made:
        yield made


# --- measured as bytes


def ids(count: int) -> bytes:
    return b"[" + b",".join([b"1"] * count) + b"]"


@pytest.mark.parametrize(
    "body",
    [
        ids(MOST_VALUES + 1),
        b"[" + b",".join([b"[]"] * MOST_VALUES) + b"]",
        b'{"a":"\\"","b":' + ids(MOST_VALUES + 1) + b"}",  # an escaped quotation mark ends no text
        b'{"a":"\\\\","b":' + ids(MOST_VALUES + 1) + b"}",  # one behind an escaped backslash does
        b'{"a":"' + b"x" * (BLOCK - 5) + b'","b":' + ids(MOST_VALUES + 1) + b"}",  # at a block
        b"[" * LARGE,
    ],
)
def test_a_body_of_too_many_values_is_refused_unparsed(body, monkeypatch):
    monkeypatch.setattr(json, "loads", lambda text: pytest.fail("it was parsed"))
    with pytest.raises(ApiError) as refused:
        parsed(body)
    assert refused.value.param == "body" and refused.value.code


@pytest.mark.parametrize(
    "value",
    [
        list(range(MOST_VALUES - 2)),
        {"a": ",[{" * MOST_VALUES},  # marks in a text count for nothing
        {"a": '",' * MOST_VALUES, "b": "\\" * MOST_VALUES},
        {'"' * n: ["\\", "]", '"[', {}] for n in range(200)},
        [[[[n] * 50] * 20] for n in range(100)],
    ],
)
def test_control_other_large_bodies_are_parsed(value):
    body = json.dumps(value, ensure_ascii=False).encode()
    assert len(body) > LARGE
    require_measure(body)
    assert parsed(body) == value == parsed(b"\xef\xbb\xbf" + body)


def test_json_is_text_in_utf_8():
    for body in ('{"a": 1}'.encode("utf-16"), b'{"a": "\xff"}', b"{", b"", b"1" * 5_000):
        with pytest.raises(ApiError) as refused:
            parsed(body)
        assert refused.value.param == "body" and refused.value.code


def calls_of(function) -> int:
    """Return the number of Python functions that a call enters."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_a_list_of_ids_is_checked_as_an_array():
    assert calls_of(lambda: require_finite([*range(50_000), None, True], "prompt")) < 1_000
    mixed = [1.5, "a"] * 25_000  # control: values of several kinds are looked at one by one
    assert calls_of(lambda: require_finite(mixed, "prompt")) > 50_000
    for value in ([1] * 9 + [float("nan")], [1.5] * 9 + [float("inf")], ["a"] * 9 + ["\ud800"]):
        with pytest.raises(ApiError):
            require_finite(value, "prompt")


def test_a_sampler_of_many_values_is_refused_before_it_is_looked_at():
    deep: dict = {"name": "best_of"}
    for _ in range(9):
        deep = {"name": "best_of", "base": deep, "n": [1] * 150}
    for spec in ({"name": "sjd", "window": [1] * 2_000}, deep):
        with pytest.raises(ApiError, match="more than 1024 values") as refused:
            require_served(spec)
        assert refused.value.param == "sampler"


# --- read by the routes


def test_every_endpoint_of_json_reads_it_so(server):
    paths = server.ask("/openapi.json")[1]["paths"]
    content = {
        p: m["post"]["requestBody"]["content"]
        for p, m in paths.items()
        if "post" in m and "requestBody" in m["post"]
    }
    asked = [path for path, kinds in content.items() if "application/json" in kinds]
    asked.remove("/v1/files")  # without a folder it refuses before it reads
    assert len(asked) >= 8
    for path in asked:
        status, answer, _ = server.ask(path, ids(MOST_VALUES + 1))
        assert (status, answer["error"]["code"]) == (413, "too_many_values"), path
        status, answer, _ = server.ask(path, b"{}", Content_Type="text/plain")
        assert (status, answer["error"]["param"]) == (415, "Content-Type"), path


def test_large_bodies_are_read_in_a_thread_and_small_ones_at_once(server, monkeypatch):
    read, seen = bodies.parsed, []

    def noted(body):
        seen.append((len(body) >= LARGE, threading.current_thread().name))
        return read(body)

    monkeypatch.setattr(bodies, "parsed", noted)
    large = json.dumps(TASK).encode() + b" " * LARGE
    assert [server.ask("/v1/completions", body)[0] for body in (TASK, large)] == [200, 200]
    (_, small_one), (_, large_one) = seen
    assert [is_large for is_large, _ in seen] == [False, True] and small_one != large_one


@pytest.mark.parametrize("kind", ["text/plain", "application/json; charset=latin-1", "image/png"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/images/edits", "/live/generate"])
def test_a_wrong_content_type_is_named(server, kind, path):
    status, answer, _ = server.ask(path, json.dumps(TASK).encode(), Content_Type=kind)
    error = answer["error"]
    assert (status, error["param"], error["code"]) == (
        415,
        "Content-Type",
        "unsupported_media_type",
    )
    assert kind in error["message"]


@pytest.mark.parametrize(
    "name, value",
    [
        ("prompt", [1] * 100_001),
        ("prompt", ["a"] * 2_049),
        ("logit_bias", {str(n): 1 for n in range(1_025)}),
        ("bad_words", [[1]] * 1_025),
        ("bad_words", [[1] * 33]),
        ("stop_token_ids", [1] * 1_025),
        ("stop", ["a"] * 65),
        ("sampler", {"name": "sjd", "window": [1] * 2_000}),
    ],
)
def test_long_lists_are_refused_by_their_name(server, name, value):
    status, answer, _ = server.ask("/v1/completions", {**TASK, name: value})
    assert (status, answer["error"]["param"].partition(".")[0]) == (400, name)


SIZE = 15_000_000


def test_forms_that_do_not_arrive_take_no_handles(server):
    """A form is read when it is whole; its files would take a handle each from 1 MB on."""
    part = b'--b\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n'
    head = b"POST /v1/images/edits HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3000000\r\n"
    head += b"Content-Type: multipart/form-data; boundary=b\r\n\r\n"
    handles = psutil.Process()
    before = handles.num_fds()
    held = [socket.create_connection(("127.0.0.1", server.port), 30) for _ in range(8)]
    for connection in held:
        connection.sendall(head + part + b"x" * 2_000_000)
    time.sleep(0.5)
    assert handles.num_fds() <= before + 2 * len(held)  # both ends of the connections
    form = part + b"x" * 2_000_000 + b"\r\n--b--\r\n"  # control: a whole one is read
    status, answer, _ = server.ask(
        "/v1/images/edits", form, Content_Type="multipart/form-data; boundary=b"
    )
    assert (status, answer["error"]["param"]) == (400, "prompt")
    for connection in held:
        connection.close()


def test_the_characters_of_all_prompts_are_bounded_together(server, monkeypatch):
    monkeypatch.setattr(calls, "MOST_TEXT", 120)
    turn = {"role": "user", "content": "sort 3 1 2 ="}
    for path, body, param in (
        ("/v1/completions", {"prompt": ["sort 3 1 2 ="] * 11}, "prompt"),
        ("/v1/completions", {"prompt": "x" * 121}, "prompt"),
        ("/v1/chat/completions", {"messages": [{**turn, "content": "x" * 121}]}, "messages"),
    ):
        status, answer, _ = server.ask(path, body)
        assert (status, answer["error"]["param"]) == (400, param)
        assert "characters; expected at most 120" in answer["error"]["message"]
    assert server.ask("/v1/completions", {"prompt": ["sort 3 1 2 ="] * 10})[0] == 200  # control


def many(part: bytes) -> bytes:
    """Return nearly 16 MB of one value after another."""
    return b",".join([part] * (SIZE // (len(part) + 1)))


HOSTILE = {  # the path, and what is before and behind, and in between
    "ids": ("/v1/completions", b'{"prompt":[%s]}', lambda: many(b"1")),
    "texts": ("/v1/completions", b'{"prompt":[%s]}', lambda: many(b'"a"')),
    "one text": ("/v1/completions", b'{"prompt":"%s"}', lambda: b"a" * SIZE),
    "lists": ("/v1/completions", b'{"prompt":[%s]}', lambda: many(b"[]")),
    "fields": ("/v1/completions", b"{%s}", lambda: many(b'"k":1')),
    "a sampler": ("/v1/completions", b'{"sampler":{"window":[%s]}}', lambda: many(b"1")),
    "a schema": ("/v1/completions", b'{"structured":{"json_schema":[%s]}}', lambda: many(b"1")),
    "messages": ("/v1/chat/completions", b'{"messages":[%s]}', lambda: many(b'{"role":"user"}')),
    "levels": ("/v1/completions", b"%s", lambda: b"[" * SIZE),
    "digits": ("/v1/completions", b'{"seed":%s}', lambda: b"1" * SIZE),
    "escapes": ("/v1/completions", b'{"prompt":"%s"}', lambda: b"\\" * (SIZE // 2 * 2)),
    "an observation": ("/v1/actions", b'{"observations":{"a":[%s]}}', lambda: many(b"1")),
    "a call": ("/live/generate", b'{"sampler":{"window":[%s]}}', lambda: many(b"1")),
    "an image": ("/v1/images/edits", b'{"prompt":"a","image":"%s"}', lambda: b"a" * SIZE),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_body_of_16_mb_is_refused_soon_and_others_are_served_meanwhile(server, kind):
    path, around, inside = HOSTILE[kind]
    body = around % inside()
    waits, over = [], threading.Event()

    def look():
        while not over.wait(0.02):
            began = time.monotonic()
            assert server.ask("/health")[0] == 200
            waits.append(time.monotonic() - began)

    looking = threading.Thread(target=look)
    looking.start()
    began = time.monotonic()
    status, answer, _ = server.ask(path, body)
    seconds = time.monotonic() - began
    over.set()
    looking.join()
    assert status in (400, 413) and answer["error"]["param"] and answer["error"]["code"]
    assert seconds < ROOM * MOST_SECONDS and max(waits) < ROOM * MOST_SECONDS
