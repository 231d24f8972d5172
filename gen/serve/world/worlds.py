"""Routes of the playable page: sessions of worlds, and the answers to requests.

No HTTP here: ``Worlds.answer`` takes method, path and body, so that any server can mount it. A
session belongs to one tab of a browser. Requests name sessions and actions alone; no route reads or
writes a file that a request names.

    GET  /world            the page
    POST /world/new        {"seed", "steps", "speculate"} -> session and first frame
    POST /world/step       {"session", "action"} -> next frame
    POST /world/rollback   {"session", "k"} -> frame before the last k actions
    POST /world/clip       {"session", "first", "last"} -> GIF of these frames
"""

from __future__ import annotations

import base64
import json
import re
import secrets
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gen.core.errors import GenError, bad_value, shown, unknown
from gen.core.params import check_field
from gen.media.video import write_gif
from gen.modalities.world.modality import FPS, SCALE
from gen.pipeline.pipeline import Pipeline
from gen.play.world import World
from gen.samplers.worlds.next_frame import PREFETCH, NextFrame

MOST_SESSIONS = 32  # the one that was used longest ago ends when another begins
MOST_FRAMES = 4_096  # of one session, as of a clip of the API
MOST_OF_CLIP = 1_024  # frames of a GIF
MOST_BYTES = 4096  # of a request
LARGEST_SEED = 2**31 - 1
# the parameter that a message is about
ABOUT = re.compile(r"(?:sampler\.)?(\w+) (?:is|has) |unknown key '(\w+)'|(?:unknown|no) (\w+) ")
STATUS_KINDS = {403: "permission_error", 404: "not_found_error"}
PAGE = Path(__file__).with_name("world.html")


@dataclass(frozen=True)
class Answer:
    """Answer to a request: status, content type and body."""

    status: int
    kind: str
    body: bytes

    @classmethod
    def of(cls, value: Mapping[str, Any], status: int = 200) -> Answer:
        """Return an answer of JSON."""
        return cls(status, "application/json", json.dumps(value).encode())

    @classmethod
    def refusal(cls, message: str, param: str, code: str, status: int = 400) -> Answer:
        """Return an answer of an error, as the API has them."""
        kind = STATUS_KINDS.get(status, "invalid_request_error")
        error = {"message": message, "type": kind, "param": param, "code": code}
        return cls.of({"error": error}, status)


@dataclass
class Session:
    """World of one tab, which one request at a time plays."""

    world: World
    lock: threading.Lock = field(default_factory=threading.Lock)


class Worlds:
    """Sessions of the playable page.

    Args:
        pipe: pipeline that all sessions share.
        most: sessions that are kept.
    """

    def __init__(self, pipe: Pipeline, most: int = MOST_SESSIONS):
        self.pipe, self.most = pipe, most
        self.sessions: OrderedDict[str, Session] = OrderedDict()
        self._lock = threading.Lock()
        self.routes: dict[tuple[str, str], Callable[[dict[str, Any]], Answer]] = {
            ("POST", "/world/new"): self._new,
            ("POST", "/world/step"): self._step,
            ("POST", "/world/rollback"): self._rollback,
            ("POST", "/world/clip"): self._clip,
        }

    def answer(self, method: str, path: str, body: bytes = b"") -> Answer:
        """Answer a request; bad input is answered with 400 and one message.

        Args:
            method: GET or POST.
            path: path without a query.
            body: JSON object of a POST.
        """
        if method == "GET" and path in ("/", "/world"):
            return Answer(200, "text/html; charset=utf-8", PAGE.read_bytes())
        route = self.routes.get((method, path))
        if route is None:
            message = f"no page {shown(path)}; expected /world"
            return Answer.refusal(message, "path", "not_found", 404)
        try:
            return route(_object(body))
        except GenError as error:
            about = ABOUT.match(str(error))
            param = "body" if about is None else about[about.lastindex or 0]
            return Answer.refusal(str(error), param, "invalid_value")

    def after(self, body: bytes) -> None:
        """Make frames ahead for the session of a step that was answered, where it wants them."""
        try:
            session = self._session(_object(body))
        except GenError:
            return
        if session.world.sampler.speculate == PREFETCH and session.lock.acquire(blocking=False):
            try:
                session.world.ahead()
            finally:
                session.lock.release()

    def _new(self, asked: dict[str, Any]) -> Answer:
        _keys(asked, (), ("seed", "steps", "speculate"))
        seed = asked.get("seed", 0)
        _integer("seed", seed, 0, LARGEST_SEED)
        fields = NextFrame.__dataclass_fields__
        values = {k: asked.get(k, fields[k].default) for k in ("steps", "speculate")}
        for name, value in values.items():
            check_field(fields[name], value)
        world = World(self.pipe, seed, **values)
        name = secrets.token_urlsafe(16)
        with self._lock:
            self.sessions[name] = Session(world)
            while len(self.sessions) > self.most:
                self.sessions.popitem(last=False)
        return Answer.of({"session": name, "names": world.action_names, **_seen(world)})

    def _step(self, asked: dict[str, Any]) -> Answer:
        _keys(asked, ("session", "action"))
        session = self._session(asked)
        with session.lock:
            if len(session.world.frames) >= MOST_FRAMES:
                raise GenError(f"session has {MOST_FRAMES} frames; expected a new one")
            began = time.perf_counter()
            session.world.step(asked["action"])
            milliseconds = 1000 * (time.perf_counter() - began)
            return Answer.of({"milliseconds": milliseconds, **_seen(session.world)})

    def _rollback(self, asked: dict[str, Any]) -> Answer:
        _keys(asked, ("session", "k"))
        session = self._session(asked)
        with session.lock:
            session.world.rollback(asked["k"])
            return Answer.of(_seen(session.world))

    def _clip(self, asked: dict[str, Any]) -> Answer:
        _keys(asked, ("session", "first", "last"))
        session = self._session(asked)
        with session.lock:
            count = len(session.world.frames)
            _integer("first", asked["first"], 0, count - 1)
            most = min(count, asked["first"] + MOST_OF_CLIP)
            _integer("last", asked["last"], asked["first"], most - 1)
            frames = np.stack(session.world.frames[asked["first"] : asked["last"] + 1])
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "clip.gif"
            write_gif(path, frames, FPS, scale=SCALE)
            return Answer(200, "image/gif", path.read_bytes())

    def _session(self, asked: Mapping[str, Any]) -> Session:
        """Return the session of a request."""
        name = asked.get("session")
        with self._lock:
            if not isinstance(name, str) or name not in self.sessions:
                raise GenError(
                    f"no session {shown(name)}: it ended, or never began; expected one of"
                    " /world/new"
                )
            self.sessions.move_to_end(name)
            return self.sessions[name]


def _object(body: bytes) -> dict[str, Any]:
    """Read a JSON object. Raises ``GenError`` for anything else."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise GenError(
            f"the body is {shown(body.decode(errors='replace'))}; expected a JSON object"
        )
    return value


def _keys(asked: Mapping[str, Any], needed: tuple[str, ...], free: tuple[str, ...] = ()) -> None:
    """Refuse keys that are missing or unknown. Raises ``GenError``."""
    for name in needed:
        if name not in asked:
            raise GenError(f"{name} is missing; expected {', '.join(needed)}")
    for name in asked:
        if name not in (*needed, *free):
            raise unknown("key", name, (*needed, *free))


def _integer(name: str, value: Any, least: int, most: int) -> None:
    """Refuse what is no integer in a range. Raises ``GenError``."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise bad_value(name, value, f"an integer from {least} to {most}")


def _seen(world: World) -> dict[str, Any]:
    """Return what the page shows of a world."""
    frame = world.frames[-1]
    return {
        "frame": base64.b64encode(frame.tobytes()).decode(),
        "size": list(frame.shape[:2]),
        "count": len(world.actions),
        "ready": world.ready,
        "hits": world.hits,
        "misses": world.misses,
        "passes": world.passes,
    }
