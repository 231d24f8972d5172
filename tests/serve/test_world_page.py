"""The playable page: its routes, its server, and a browser that plays it."""

from __future__ import annotations

import base64
import http.client
import json

import numpy as np
import pytest
from chrome import Tab

import gen
from gen.modalities.world import board, checker
from gen.play.world import World
from gen.serve.world.server import HOST, make_server, run_in_thread
from gen.serve.world.worlds import MOST_BYTES, Worlds


@pytest.fixture(scope="module")
def pipe():
    return gen.load("world", device="cpu")


@pytest.fixture
def worlds(pipe):
    return Worlds(pipe, most=3)


def ask(worlds: Worlds, path: str, **body) -> dict:
    answer = worlds.answer("POST", f"/world/{path}", json.dumps(body).encode())
    return {"status": answer.status, **json.loads(answer.body)}


def pixels(seen: dict) -> np.ndarray:
    return np.frombuffer(base64.b64decode(seen["frame"]), np.uint8).reshape(*seen["size"], 3)


def test_a_session_plays_the_world_of_its_seed(worlds, pipe):
    session = ask(worlds, "new", seed=3, steps=1)["session"]
    world = World(pipe, 3, 1)
    for action in ("right", "right", "up", "stay"):
        seen = ask(worlds, "step", session=session, action=action)
        assert np.array_equal(pixels(seen), world.step(action))
    back = ask(worlds, "rollback", session=session, k=3)
    assert np.array_equal(pixels(back), world.rollback(3)) and back["count"] == 1


def test_sessions_do_not_mix(worlds):
    first, second = (ask(worlds, "new", seed=s, steps=1)["session"] for s in (1, 2))
    a = ask(worlds, "step", session=first, action="stay")
    b = ask(worlds, "step", session=second, action="stay")
    assert not np.array_equal(pixels(a), pixels(b)) and a["count"] == b["count"] == 1


def test_sessions_are_bounded_and_the_oldest_ends(worlds):
    names = [ask(worlds, "new", seed=s, steps=1)["session"] for s in range(4)]
    assert len(worlds.sessions) == 3
    assert ask(worlds, "step", session=names[0], action="up")["status"] == 400
    assert ask(worlds, "step", session=names[1], action="up")["status"] == 200


@pytest.mark.parametrize(
    "path, body, says",
    [
        ("new", b"{", "expected a JSON object"),
        ("new", b"[" * 5000, "expected a JSON object"),
        ("new", b"[1]", "expected a JSON object"),
        ("new", b'{"seed": -1}', "expected an integer from 0"),
        ("new", b'{"seed": true}', "expected an integer from 0"),
        ("new", b'{"sead": 1}', "Did you mean 'seed'?"),
        ("new", b'{"steps": 3}', "expected a power of two"),
        ("new", b'{"speculate": "all"}', "none or prefetch or joint"),
        ("step", b'{"session": "x", "action": "up"}', "no session 'x'"),
        ("step", b'{"action": "up"}', "session is missing"),
        ("step", b'{"session": SESSION, "action": "rigth"}', "Did you mean 'right'?"),
        ("step", b'{"session": SESSION, "action": 3}', "action"),
        ("rollback", b'{"session": SESSION, "k": 1}', "expected an integer from 0 to 0"),
        ("clip", b'{"session": SESSION, "first": 0, "last": 9}', "expected an integer from 0"),
        ("clip", b'{"session": SESSION, "first": 0, "last": 0, "path": "/"}', "unknown key"),
    ],
)
def test_bad_requests_are_answered_with_400_and_one_message(worlds, path, body, says):
    session = ask(worlds, "new", seed=0, steps=1)["session"]
    body = body.replace(b"SESSION", json.dumps(session).encode())
    answer = worlds.answer("POST", f"/world/{path}", body)
    error = json.loads(answer.body)["error"]
    assert answer.status == 400 and says in error["message"] and "\n" not in error["message"]
    assert error["param"] in error["message"] and error["code"] == "invalid_value"


def test_a_clip_is_the_frames_that_were_asked_for(worlds):
    session = ask(worlds, "new", seed=0, steps=1)["session"]
    for action in ("up", "down", "left"):
        ask(worlds, "step", session=session, action=action)
    body = json.dumps({"session": session, "first": 1, "last": 3}).encode()
    answer = worlds.answer("POST", "/world/clip", body)
    assert (answer.status, answer.kind, answer.body[:6]) == (200, "image/gif", b"GIF89a")


@pytest.fixture
def server(worlds):
    made = make_server(worlds)
    run_in_thread(made)
    yield made
    made.shutdown()
    made.server_close()


def request(server, method="GET", path="/world", body=None, **headers):
    port = server.server_address[1]
    connection = http.client.HTTPConnection(HOST, port, timeout=30)
    connection.request(method, path, body, {"Host": f"{HOST}:{port}", **headers})
    answer = connection.getresponse()
    return answer.status, answer.read(), dict(answer.getheaders())


def test_the_server_listens_on_the_loopback_interface_alone(server):
    assert server.server_address[0] == "127.0.0.1"


def test_the_page_loads_nothing_from_elsewhere(server):
    status, body, headers = request(server)
    assert status == 200 and b"<canvas" in body
    assert b"http://" not in body and b"https://" not in body and b"src=" not in body
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")


@pytest.mark.parametrize(
    "headers", [{"Host": "example.org"}, {"Origin": "http://example.org"}, {"Origin": "null"}]
)
def test_requests_of_other_pages_are_refused(server, headers):
    assert request(server, "POST", "/world/new", b"{}", **headers)[0] == 403


@pytest.mark.parametrize("path", ["/../pyproject.toml", "/world/../../etc/passwd", "/world.html"])
def test_no_file_can_be_asked_for(server, path):
    assert request(server, path=path)[0] == 404


def test_a_large_request_is_refused_unread(server):
    status, body, _ = request(server, "POST", "/world/new", b" " * (MOST_BYTES + 1))
    assert status == 400 and b"expected up to" in body


MOVES = {"ArrowRight": "right", "ArrowDown": "down", "ArrowLeft": "left", " ": "stay"}


def canvas(tab: Tab) -> np.ndarray:
    """Pixels of the canvas, uint8 [16, 16, 3]."""
    data = tab.value(
        "Array.from(document.querySelector('canvas').getContext('2d')"
        ".getImageData(0, 0, 16, 16).data)"
    )
    return np.array(data, np.uint8).reshape(16, 16, 4)[..., :3]


@pytest.mark.slow
def test_keys_and_buttons_move_the_agent_as_the_simulator_says(server, tmp_path):
    tab = Tab(tmp_path, f"http://{HOST}:{server.server_address[1]}/world")
    try:

        def count() -> int:
            return int(tab.value("Number(document.querySelector('#count')?.textContent ?? -1)"))

        tab.until(lambda: tab.value("typeof session === 'string'") is True)
        start, shown = canvas(tab), []
        assert (checker.read(start[None]).agent >= 0).all()
        actions = [*MOVES, "ArrowRight", "ArrowUp"]
        for n, key in enumerate(actions, 1):
            tab.press(key)
            tab.until(lambda n=n: count() == n and not tab.value("busy"))
            shown.append(canvas(tab))
        tab.click("[data-action=up]")
        tab.until(lambda: count() == len(actions) + 1 and not tab.value("busy"))
        names = [*({**MOVES, "ArrowUp": "up"}[key] for key in actions), "up"]
        clip = np.stack([start, *shown, canvas(tab)])
        numbers = np.array([board.ACTIONS.index(name) for name in names])
        verdict = checker.check(clip, numbers)
        assert verdict.passed, verdict.detail
        # the checker tells: with other actions, the same frames are wrong
        assert not checker.check(clip, np.roll(numbers, 1)).passed
        tab.click("#back")
        tab.until(lambda: count() == len(actions) and not tab.value("busy"))
        assert np.array_equal(canvas(tab), clip[-2])
        assert tab.logs == []
    finally:
        tab.close()


def test_a_session_and_a_clip_are_bounded(worlds, monkeypatch):
    session = ask(worlds, "new", seed=0, steps=1)["session"]
    for _ in range(3):
        assert ask(worlds, "step", session=session, action="up")["status"] == 200
    monkeypatch.setattr("gen.serve.world.worlds.MOST_OF_CLIP", 2)
    body = {"session": session, "first": 0}
    for last, status in ((1, 200), (2, 400)):
        content = json.dumps({**body, "last": last}).encode()
        assert worlds.answer("POST", "/world/clip", content).status == status
    monkeypatch.setattr("gen.serve.world.worlds.MOST_FRAMES", 4)
    answer = ask(worlds, "step", session=session, action="up")
    assert answer["status"] == 400 and answer["error"]["param"] == "session"


def test_a_head_is_answered_without_a_body(server):
    status, body, headers = request(server, "HEAD", "/world")
    assert status == 200 and body == b"" and int(headers["Content-Length"]) > 0
