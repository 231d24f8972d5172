"""Who may ask, how much and how fast; what a bad request is told; and that it harms nothing."""

from __future__ import annotations

import dataclasses
import http.client
import json
import re
import socket
import threading
import time
from urllib.parse import quote

import openai
import pytest
from served import Served, serving
from starlette.datastructures import Headers

from gen.core.errors import GenError
from gen.core.registry import registry
from gen.engine.engine import Engine
from gen.serve import connections, guards, run
from gen.serve.api.errors import ApiError
from gen.serve.api.samplers import WORDS, require_served
from gen.serve.app import make_app
from gen.serve.guards import Rates, require_local
from gen.serve.settings import Settings, is_loopback, read_keys, require_key

TASK = {"model": "text", "prompt": "sort 3 1 2 ="}
LONG = {"model": "image", "prompt": "a red circle", "n": 4, "sampler": "autoregressive"}


@pytest.fixture(scope="module")
def server():
    with serving() as made:
        yield made


def with_settings(server: Served, **settings):
    """Serve the same engine in another way."""
    return run.running(make_app(server.engine, Settings(**settings)))


def refused(server: Served, body, path="/v1/completions", method=None, **headers) -> dict:
    status, answer, said = server.ask(path, body, method, **headers)
    error = answer["error"]
    assert 400 <= status < 500 and set(error) == {"message", "type", "param", "code"}, answer
    return {"status": status, "headers": said, **error}


# --- keys and origins


def test_a_key_is_asked_for_everywhere_but_at_the_page_and_health(server):
    with with_settings(server, api_keys=("first", "second")) as port:
        other = Served(server.engine, port)
        for path in ("/v1/models", "/metrics", "/live/modalities"):
            assert refused(other, None, path)["status"] == 401
            assert refused(other, None, path, Authorization="Bearer firs")["status"] == 401
            assert other.ask(path, Authorization="Bearer second")[0] == 200
        assert other.ask("/v1/models", X_Api_Key="first")[0] == 200
        assert [other.ask(path)[0] for path in ("/health", "/", "/openapi.json")] == [200] * 3
        client = other.client(api_key="wrong")
        with pytest.raises(openai.AuthenticationError):
            client.completions.create(**TASK)


@pytest.mark.parametrize(
    "headers", [{"Host": "example.org"}, {"Origin": "http://example.org"}, {"Origin": "null"}]
)
def test_without_a_key_other_sites_are_refused(server, headers):
    error = refused(server, TASK, **headers)
    assert (error["status"], error["param"]) == (403, next(iter(headers)))


ELSEWHERE = [  # PORT is that of the server
    "http://localhost:PORT@example.org",
    "http://localhost:PORT@example.org:PORT",
    "http://user@localhost:PORT",
    "http://example.org#localhost:PORT",
    "http://example.org/localhost:PORT",
    "http://localhost.example.org:PORT",
    "http://localhost:PORT.example.org",
    "http://localhost:PORT/",
    "http://localhost:PORT?",
    "http://localhost\\@example.org:PORT",
    "http://2130706433:PORT",
    "http://localhost:1",  # a page on another port of this machine
    "http://localhost",
    "localhost:PORT",
    "file://localhost:PORT",
    "javascript://localhost:PORT",
    "http://[::1]example.org:PORT",
    "http://localhost:x",
    "",
]


@pytest.mark.parametrize("origin", ELSEWHERE)
def test_an_origin_is_judged_as_a_url(origin):
    headers = {"host": "localhost:8123", "origin": origin.replace("PORT", "8123")}
    with pytest.raises(ApiError, match="Origin is"):
        require_local(Headers(headers))


@pytest.mark.parametrize(
    "host",
    ["localhost:80@example.org", "user@localhost", "localhost:x", "localhost:1:2", "[::1]x", "",
     "localhost/", "localhost.", "example.org", "localhost#", "127.0.0.1.example.org"],
)  # fmt: skip
def test_a_host_is_judged_as_a_url(host):
    with pytest.raises(ApiError, match="Host is"):
        require_local(Headers({"host": host}))


def test_the_own_page_may_ask(server):
    assert server.ask("/v1/models", Origin=server.url, Host=f"localhost:{server.port}")[0] == 200
    for host in ("localhost:8123", "127.0.0.1:8123", "[::1]:8123", "LOCALHOST:8123"):
        require_local(Headers({"host": host}))
        for origin in ("http://localhost:8123", "http://127.0.0.1:8123", "http://[::1]:8123"):
            require_local(Headers({"host": host, "origin": origin}))
    require_local(Headers({"host": "localhost", "origin": "http://localhost:80"}))
    twice = [(b"host", b"localhost"), (b"origin", b"http://localhost"), (b"origin", b"null")]
    with pytest.raises(ApiError):
        require_local(Headers(raw=twice))


def test_pages_of_other_origins_ask_by_option_alone(server):
    page = "http://localhost:3000"
    asked = {"Origin": page, "Access-Control-Request-Method": "POST"}
    assert server.ask("/v1/completions", method="OPTIONS", **asked)[0] == 403
    with with_settings(server, cors=(page,)) as port:
        other = Served(server.engine, port)
        status, _, headers = other.ask("/v1/completions", method="OPTIONS", **asked)
        assert (status, headers["access-control-allow-origin"]) == (200, page)
        status, _, headers = other.ask("/v1/completions", TASK, Origin=page)
        assert (status, headers["access-control-allow-origin"]) == (200, page)
        for wrong in ("http://localhost:3001", "http://localhost:3000@example.org"):
            status, _, headers = other.ask("/v1/completions", TASK, Origin=wrong)
            assert status == 403 and "access-control-allow-origin" not in headers
    with with_settings(server, cors=(page,), api_keys=("key",)) as port:
        other = Served(server.engine, port)  # a browser asks first without a key
        assert other.ask("/v1/models", method="OPTIONS", **asked)[0] == 200
        assert other.ask("/v1/models", Origin=page)[0] == 401
    for wrong in ("*", "localhost:3000", "http://localhost:3000/", "http://a@b"):
        with pytest.raises(GenError, match="expected an origin"):
            Settings(cors=(wrong,))


def test_a_head_is_answered_as_a_get_without_its_body(server):
    for path in ("/", "/health", "/v1/models", "/openapi.json", "/metrics", "/v1/nothing"):
        status, body, headers = server.ask(path, method="GET")
        found = server.ask(path, method="HEAD")
        assert found[0] == status and found[1] == b""
        assert found[2]["content-type"] == headers["content-type"]
        assert int(found[2]["content-length"]) > 0 < len(body)


def test_other_machines_need_a_key(tmp_path):
    with pytest.raises(GenError, match="GEN_API_KEY"):
        require_key("0.0.0.0", ())
    require_key("0.0.0.0", ("key",))
    for host in ("127.0.0.1", "localhost", "::1"):
        require_key(host, ())
    assert not is_loopback("example.org") and not is_loopback("localhost.example.org")
    (tmp_path / "keys").write_text("one\n\n two \n")
    assert read_keys(tmp_path / "keys", {"GEN_API_KEY": "three"}) == ("one", "two", "three")
    assert read_keys(None, {}) == ()
    for text in ("", "a b\n", "\u00fc\n"):
        (tmp_path / "keys").write_text(text)
        with pytest.raises(GenError):
            read_keys(tmp_path / "keys", {})


# --- rates, sizes, pace


def test_a_bucket_empties_and_fills_again():
    rates = Rates(2)
    assert [rates.wait("a", 0), rates.wait("a", 0)] == [0, 0]
    assert rates.wait("a", 0) == 30 and rates.wait("b", 0) == 0
    assert rates.wait("a", 29) > 0 and rates.wait("a", 60) == 0


def test_more_requests_than_the_rate_are_told_when_to_come_again(server):
    with with_settings(server, rate=2) as port:
        other = Served(server.engine, port)
        assert [other.ask("/v1/models")[0] for _ in range(2)] == [200, 200]
        error = refused(other, None, "/v1/models")
        assert (error["status"], error["code"]) == (429, "rate_limit_exceeded")
        assert 1 <= int(error["headers"]["retry-after"]) <= 30
        assert other.ask("/health")[0] == 200


def test_wrong_keys_count_as_requests_of_their_address(server):
    with with_settings(server, rate=3, api_keys=("right",)) as port:
        other = Served(server.engine, port)
        wrong = [other.ask("/v1/models", Authorization=f"Bearer {n}")[0] for n in range(5)]
        assert wrong == [401, 401, 401, 429, 429]
        assert other.ask("/v1/models")[0] == 429
        right = [other.ask("/v1/models", Authorization="Bearer right")[0] for _ in range(4)]
        assert right == [200, 200, 200, 429]  # a right key has its own bucket


def test_the_bodies_of_all_requests_are_bounded_together(server, monkeypatch):
    monkeypatch.setattr(guards, "MOST_HELD", 2_000_000)
    with with_settings(server, max_body=1_000_000) as port:
        other = Served(server.engine, port)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type:"
        head += b" application/json\r\nContent-Length: 900000\r\n\r\n"
        held = [socket.create_connection(("127.0.0.1", port), 30) for _ in range(3)]
        for connection in held[:2]:
            connection.sendall(head + b" " * 800_000)
        time.sleep(0.3)
        assert other.ask("/v1/completions", TASK)[0] == 200  # control
        held[2].sendall(head + b" " * 900_000)
        assert b" 429 " in held[2].recv(1_000) + held[2].recv(1_000)
        for connection in held:
            connection.close()
        until(
            lambda: (
                other.ask("/v1/completions", json.dumps(TASK).encode() + b" " * 900_000)[0] == 200
            )
        )


def test_a_large_body_is_refused_with_or_without_its_length(server):
    prompt = json.dumps({**TASK, "prompt": "x" * 50_000_000}).encode()
    assert refused(server, prompt)["status"] == 413
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    pieces = (prompt[n : n + 2**20] for n in range(0, len(prompt), 2**20))
    connection.request("POST", "/v1/completions", pieces, encode_chunked=True, headers={
        "Transfer-Encoding": "chunked", "Content-Type": "application/json"
    })  # fmt: skip
    answer = connection.getresponse()
    assert answer.status == 413 and json.loads(answer.read())["error"]["code"]
    assert server.ask("/v1/completions", TASK)[0] == 200


def read_all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(65_536):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.slow
def test_slow_clients_are_cut_off_and_others_are_served(server, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_SECONDS", 1.0)
    with with_settings(server, body_timeout=1.0) as port:
        other = Served(server.engine, port)
        slow = [socket.create_connection(("127.0.0.1", port), 30) for _ in range(40)]
        began = time.monotonic()
        for n, connection in enumerate(slow[:20]):
            connection.sendall(b"POST /v1/completions HT"[: n + 1])  # a head without an end
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n"
        head += b"Content-Type: application/json\r\n\r\n{"
        for connection in slow[20:]:
            connection.sendall(head)  # a body without an end
        assert other.ask("/v1/completions", TASK)[0] == 200
        assert all(read_all(connection) == b"" for connection in slow[:20])
        answers = [read_all(connection) for connection in slow[20:]]
        assert all(b" 408 " in a and b"request_timeout" in a for a in answers)
        assert time.monotonic() - began < 20
        assert other.ask("/v1/completions", TASK)[0] == 200


@pytest.mark.slow
def test_a_full_queue_is_told_when_to_come_again():
    with serving(max_waiting=4, max_rows=1) as small:
        client = small.client(timeout=60)
        with pytest.raises(openai.BadRequestError, match="at most 4"):
            client.post("/images/generations", cast_to=object, body={**LONG, "n": 5})
        waiting = []

        def ask():
            waiting.append(small.ask("/v1/images/generations", LONG)[0])

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(waiting) in ([200, 429, 429], [200, 200, 429])


# --- clients that leave, and deadlines


def rows(server: Served) -> float:
    found = server.figures()
    return sum(v for k, v in found.items() if k.startswith(("gen_items_running", "gen_items_wait")))


def until(true, seconds=60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.02)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_rows(server, stream):
    body = json.dumps({**LONG, "n": 8, "stream": stream, "partial_images": 3 * stream}).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), 30)
    head = "POST /v1/images/generations HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    before = server.figures().get('gen_requests_total{model="image",state="cancelled"}', 0)
    connection.sendall(head.encode() + body)
    until(lambda: rows(server) == 8)
    if stream:
        connection.recv(100)
    connection.close()
    until(lambda: rows(server) == 0, 30)
    found = server.figures()
    assert found['gen_requests_total{model="image",state="cancelled"}'] == before + 1
    assert server.ask("/v1/completions", TASK)[0] == 200


def test_deadlines_are_told_apart(server):
    error = refused(server, {**LONG, "deadline": 0.05}, "/v1/images/generations")
    assert (error["status"], error["code"]) == (408, "deadline_exceeded")
    assert error["headers"]["x-should-retry"] == "false"
    assert refused(server, {**TASK, "deadline": 1e9})["param"] == "deadline"
    with with_settings(server, deadline=0.05) as port:
        other = Served(server.engine, port)
        assert other.ask("/v1/images/generations", LONG)[0] == 504
    until(lambda: rows(server) == 0)


# --- bad requests

BAD = {  # message or code, and the body
    "invalid_json": b'{"model": "text", "prompt": ',
    "the body is \\[\\]": b"[]",
    "nests more than 64": b"[" * 100_000,
    "body is no JSON": b"[" * 1_500,
    "prompt is missing": {"model": "text"},
    "prompt is 3": {**TASK, "prompt": 3},
    "n is 'two'; expected a valid integer": {**TASK, "n": "two"},
    "n is 1000; expected less than or equal": {**TASK, "n": 1000},
    "Did you mean 'temperature'": {**TASK, "temprature": 1},
    "temperature is nan": b'{"prompt": "sort 3 1 2 =", "temperature": NaN}',
    "sampler.window is inf": b'{"prompt": "a", "sampler": {"name": "sjd", "window": 1e999}}',
    "temperature is -1": {**TASK, "temperature": -1},
    "seed is -1": {**TASK, "seed": -1},
    "Did you mean 'sjd'": {**TASK, "sampler": "sdj"},
    "'windw'. Did you mean 'window'": {**TASK, "sampler": {"name": "sjd", "windw": 1}},
    "at most 1024 in a request": {**TASK, "sampler": {"name": "sjd", "window": 10**9}},
    "at most 64 in a request": {**TASK, "sampler": {"name": "best_of", "n": 10**6}},
    "from 1 to 32768": {**TASK, "max_tokens": 10**9},
    "expected a text, and no name of a file": {**TASK, "prefix": "/etc/passwd.txt"},
    "half of a surrogate": b'{"prompt": "\\ud800"}',
    "outside of? the|is outside": {**TASK, "prompt": "<script>alert(1)</script>"},
    "samplers such as best_of search": {**TASK, "best_of": 3},
    "sampler.name is missing": {**TASK, "sampler": {}},
    "sampler.name is None": {**TASK, "sampler": {"name": None}},
    "cannot be parsed at position 0": {**TASK, "structured": {"regex": "("}},
}


@pytest.mark.parametrize("says", BAD)
def test_bad_requests_are_told_what_was_expected(server, says):
    error = refused(server, BAD[says])
    assert error["param"] and error["code"]
    assert re.search(says, f"{error['code']} {error['message']}"), error
    assert "\n" not in error["message"] and len(error["message"]) < 2000


OF_NOTHING = {"input_file_id": "x", "endpoint": "y"}
SENT = {  # the param, the code, and what is sent: path, body, method and headers
    "path": ("not_found", "/v1/nothing", None, None, {}),
    "method": ("method_not_allowed", "/v1/completions", None, "PUT", {}),
    "Host": ("forbidden_origin", "/v1/models", None, None, {"Host": "example.org"}),
    "Origin": ("forbidden_origin", "/v1/models", None, None, {"Origin": "http://example.org"}),
    "Content-Type": ("unsupported_media_type", "/v1/motions", b"{}", None, {"Content_Type": "a/b"}),
    "body": ("invalid_json", "/v1/motions", b"{", None, {}),
    "file_id": ("not_found", "/v1/files/x", None, None, {}),
    "batch_id": ("not_found", "/v1/batches/x", None, None, {}),
    "video_id": ("not_found", "/v1/videos/x", None, None, {}),
    "limit": ("invalid_value", "/v1/videos?limit=0", None, None, {}),
    "after": ("not_found", "/v1/videos?after=x", None, None, {}),
    "purpose": ("missing_parameter", "/v1/files", {"file": "x"}, None, {}),
    "endpoint": ("unsupported_value", "/v1/batches", OF_NOTHING, None, {}),
    "model": ("model_not_found", "/v1/models/x", None, None, {}),
    "messages": ("invalid_value", "/v1/chat/completions", {"messages": []}, None, {}),
    "observations": ("missing_parameter", "/v1/actions", {}, None, {}),
    "session": ("invalid_value", "/world/step", {}, None, {}),
    "prompt": ("invalid_value", "/live/generate", {"model": "text", "prompt": "zebra"}, None, {}),
}  # fmt: skip


def test_every_error_names_what_it_is_about_and_why(server, tmp_path):
    with with_settings(server, batches=tmp_path) as port:
        other = Served(server.engine, port)
        for param, (code, path, body, method, headers) in SENT.items():
            error = refused(other, body, path, method, **headers)
            assert (error["param"], error["code"]) == (param, code)


def test_errors_of_a_form_and_of_a_key_name_it_too(server):
    form = {"Content_Type": "multipart/form-data"}
    error = refused(server, b"x", "/v1/images/edits", **form)
    assert (error["param"], error["code"]) == ("body", "invalid_body")
    with with_settings(server, api_keys=("key",)) as port:
        error = refused(Served(server.engine, port), None, "/v1/models")
    assert (error["param"], error["code"]) == ("Authorization", "invalid_api_key")


def test_parameters_are_named(server):
    named = {
        "top_p": {"top_p": 2},
        "top_k": {"top_k": -1},
        "structured": {"structured": {"regex": "("}},
        "min_new_tokens": {"min_new_tokens": 30_000},
        "logit_bias": {"logit_bias": {"9999": 1}},
        "bad_words": {"bad_words": [[9999]]},
        "deadline": {"deadline": 1e9},
        "temperature": {"temperature": -1},
        "sampler.window": {"sampler": {"name": "sjd", "window": -1}},
        "sampler.windw": {"sampler": {"name": "sjd", "windw": 1}},
        "sampler": {"sampler": "sdj"},
        "stop_token_ids": {"stop_token_ids": [999]},
        "prompt": {"prompt": "sort zebra ="},
        "temprature": {"temprature": 1},
    }
    found = {name: refused(server, {**TASK, **body})["param"] for name, body in named.items()}
    assert found == {name: name for name in named}
    assert refused(server, {**TASK, "model": "txt"}) | {"headers": 0, "message": 0} == {
        "status": 404, "type": "invalid_request_error", "param": "model",
        "code": "model_not_found", "headers": 0, "message": 0,
    }  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/nothing", "/../pyproject.toml", "/static/../app.py"])
def test_unknown_paths_and_methods_are_errors_of_the_same_shape(server, path):
    assert refused(server, None, path)["status"] == 404
    assert refused(server, None, "/v1/completions")["status"] == 405


IMAGE = "iVBORw0KGgoAAAANSUhEUg"


@pytest.mark.parametrize(
    "image", ["/etc/passwd", "http://of_minehost/a.png", "file:///etc/passwd", "data:image/png,x",
              "data:;base64,====", IMAGE, ""],
)  # fmt: skip
def test_media_are_bytes_and_never_paths_or_addresses(server, image):
    body = {"prompt": "make the circle blue", "image": image}
    error = refused(server, body, "/v1/images/edits")
    assert error["status"] == 400 and error["param"] == "image"
    url = [{"type": "image_url", "image_url": {"url": image}}]
    body = {"messages": [{"role": "user", "content": url}]}
    assert refused(server, body, "/v1/chat/completions")["status"] == 400
    body = {"observations": {"observation.image": image, "task": "reach"}}
    assert refused(server, body, "/v1/actions")["status"] == 400


NAMED = [
    {"name": "best_of", "scorer": "{file}:reward"},
    {"name": "best_of", "scorer": "os:system"},
    {"name": "best_of", "base": {"name": "best_of", "scorer": "{file}:reward"}},
    {"name": "svdd", "value": "{file}:reward"},
    {"name": "best_of", "scorer": {"name": "value_head", "path": "{folder}"}},
    {"name": "best_of", "scorer": {"name": "log_likelihood", "model": "org/model"}},
    {"name": "speculative", "draft_model": "{folder}"},
    {"name": "speculative", "draft_model": ["org/model"]},
    {"name": "speculative", "draft_model": "of_mine"},
    {"name": "speculative", "drafter_weights": "of_mine"},
    {"name": "sjd", "table": "of_mine"},
    {"name": "deepprune", "judge": "of_mine"},
    {"name": "deepprune", "judge": "{folder}"},
    {"name": "atts", "calibration": "of_mine"},
    {"name": "learn2pd", "filter": "../of_mine"},
]


@pytest.mark.parametrize("spec", NAMED)
def test_samplers_name_no_files_and_no_code(spec, tmp_path, monkeypatch):
    (tmp_path / "of_mine").mkdir()
    ran = tmp_path / "ran"
    (tmp_path / "reward.py").write_text(f"open({str(ran)!r}, 'w')\ndef reward(m, p): return 1.0\n")
    monkeypatch.chdir(tmp_path)
    text = json.dumps(spec).replace("{file}", str(tmp_path / "reward.py"))
    with pytest.raises(GenError, match="expected a registered name or a model of the package"):
        require_served(json.loads(text.replace("{folder}", str(tmp_path / "of_mine"))))
    assert not ran.exists()


def test_the_page_runs_no_code_that_a_request_names(server, tmp_path):
    ran = tmp_path / "ran"
    (tmp_path / "reward.py").write_text(f"open({str(ran)!r}, 'w')\ndef reward(m, p): return 1.0\n")
    spec = {"name": "best_of", "scorer": f"{tmp_path}/reward.py:reward"}
    address = f"/live/sampler?model=image&spec={quote(json.dumps(spec))}"
    assert server.ask(address)[0] == 400
    body = {"model": "image", "prompt": "a red circle", "sampler": spec}
    assert [server.ask(f"/live/{name}", body)[0] for name in ("generate", "copy")] == [400, 400]
    assert not ran.exists()


def test_control_samplers_of_the_package_are_taken():
    for spec in (
        "sjd",
        {"name": "speculative", "draft_model": "image-draft", "draws": "ranks"},
        {"name": "layer_skip", "kept_layers": "1/2"},
        {"name": "sjd", "window": "auto", "init": "model"},
        {"name": "best_of", "n": 4, "scorer": "checker", "base": {"name": "maskgit", "steps": 8}},
        {"name": "deepprune", "judge": "prefix"},
    ):
        require_served(spec)


def test_every_text_parameter_that_is_empty_by_default_takes_names_of_the_package_alone():
    """The registries' own parameters: none of them may let a request name a folder."""
    tried = 0
    for name, cls in registry.table("sampler").items():
        for field in dataclasses.fields(cls):
            if field.name in WORDS or field.default not in (None, ""):
                continue
            with pytest.raises(GenError, match="expected a registered name"):
                require_served({"name": name, field.name: "somewhere"})
            tried += 1
    assert tried > 20


def test_the_server_lives_on(server):
    assert server.ask("/health")[0] == 200
    assert server.ask("/v1/completions", TASK)[1]["choices"][0]["text"] == "1 2 3"
    assert rows(server) == 0


def test_the_server_that_is_closed_refuses():
    engine = Engine(device="cpu")
    with run.running(make_app(engine)) as port:
        served = Served(engine, port)
        engine.close()
        assert served.ask("/v1/completions", TASK)[0] >= 400
