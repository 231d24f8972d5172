"""``/v1/files`` and ``/v1/batches``: folders below the one that the server was given.

    files/<file id>/     meta.json, content
    batches/<batch id>/  batch.json, job.yaml, rows-0.jsonl, lines.json, job/ (a job folder), log

Ids are made by the server, and a request names nothing else. One job runs at a time, as a process
of its own; a batch that was cut off goes on when the server starts again.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import re
import secrets
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from gen.core.errors import GenError, shown, unknown
from gen.core.files import put_text
from gen.jobs.signals import STOPPED
from gen.serve.api.batch_jobs import ENDPOINTS, JobPlan, results
from gen.serve.api.bodies import BodyRoute
from gen.serve.api.calls import Calls
from gen.serve.api.errors import LOG, ApiError
from gen.serve.api.fields import Fields, Name
from gen.serve.api.forms import body_of, form_schema
from gen.serve.api.videos import page
from gen.serve.settings import KEY_VARIABLE
from gen.store.ledger import is_job, read_rows

FILE_ID, BATCH_ID = re.compile(r"file-[0-9a-f]{32}"), re.compile(r"batch_[0-9a-f]{32}")
MOST_FILES, MOST_BATCHES = 2_000, 1_000
TRIES = 3  # of a job whose process dies
GRACE = 20  # seconds that a job has to finish a microbatch when the server ends
OPEN = ("in_progress", "cancelling")
Limit = Annotated[int, Query(ge=1, le=100)]


class FileRequest(Fields):
    """Body of ``/v1/files``, a form."""

    file: str = Field(description="File of a form: a request per line.")
    purpose: Literal["batch"]


class BatchRequest(Fields):
    """Body of ``/v1/batches``."""

    input_file_id: Name
    endpoint: Name
    completion_window: Literal["24h"] = "24h"
    metadata: dict[Name, Name] | None = Field(None, max_length=64)


class Folder:
    """Files and batches on disk.

    Args:
        root: the folder.
    """

    def __init__(self, root: Path):
        self.files, self.batches = root / "files", root / "batches"
        for folder in (self.files, self.batches):
            folder.mkdir(parents=True, exist_ok=True)

    def require_room(self) -> None:
        """Refuse an upload while there are too many files. Raises ``ApiError``."""
        if sum(1 for _ in self.files.iterdir()) >= MOST_FILES:
            message = f"there are {MOST_FILES} files; expected some to be deleted first"
            raise ApiError(message, "file", "too_many_files")

    def add_file(self, content: bytes, name: str, purpose: str) -> dict[str, Any]:
        """Keep a file, of a batch that is done too, however many there are."""
        meta = {
            "id": f"file-{secrets.token_hex(16)}",
            "object": "file",
            "bytes": len(content),
            "created_at": int(time.time()),
            "filename": name[:200],
            "purpose": purpose,
            "status": "processed",
        }
        folder = self.files / meta["id"]
        folder.mkdir()
        (folder / "content").write_bytes(content)
        put_text(folder / "meta.json", json.dumps(meta))  # last: with it the file is there
        return meta

    def file(self, name: str) -> Path:
        """Return the folder of a file. Raises ``ApiError`` for an unknown one."""
        return self._folder(self.files, FILE_ID, name, "file", "meta.json")

    def batch(self, name: str) -> Path:
        """Return the folder of a batch. Raises ``ApiError`` for an unknown one."""
        return self._folder(self.batches, BATCH_ID, name, "batch", "batch.json")

    def _folder(self, root: Path, pattern: re.Pattern, name: str, what: str, sign: str) -> Path:
        if not pattern.fullmatch(name) or not (root / name / sign).is_file():
            raise ApiError(f"there is no {what} {shown(name)}", f"{what}_id", "not_found", 404)
        return root / name

    def all_of(self, root: Path, sign: str) -> list[dict[str, Any]]:
        """List what is there, oldest first."""
        found = [read(path / sign) for path in root.iterdir() if (path / sign).is_file()]
        return sorted(found, key=lambda entry: (entry["created_at"], entry["id"]))


def read(path: Path) -> dict[str, Any]:
    """Read a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


class Batches:
    """Batches of a folder and the thread that runs their jobs.

    Args:
        calls: what knows the models.
        root: the folder.
    """

    def __init__(self, calls: Calls, root: Path):
        self.calls, self.folder = calls, Folder(root)
        self.waiting: queue.Queue[str | None] = queue.Queue()
        self.lock = threading.RLock()
        self.running: tuple[str, subprocess.Popen[bytes]] | None = None
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self._work, name="gen-batches", daemon=True)

    def start(self) -> None:
        """Start the thread, first with the batches that were cut off."""
        for batch in self.folder.all_of(self.folder.batches, "batch.json"):
            if batch["status"] in OPEN:
                self.waiting.put(batch["id"])
        self.thread.start()

    def stop(self) -> None:
        """End the running job after its microbatch, and the thread; the next server goes on."""
        self.stopping.set()
        self.waiting.put(None)
        with self.lock:
            if self.running is not None:
                self.running[1].terminate()
        self.thread.join(GRACE)
        with self.lock:
            if self.running is not None:
                self.running[1].kill()

    def create(self, body: BatchRequest) -> dict[str, Any]:
        """Plan a batch and let it wait for its turn. Raises ``ApiError``."""
        if body.endpoint not in ENDPOINTS:
            error = unknown("endpoint", body.endpoint, ENDPOINTS)
            raise ApiError(str(error), "endpoint", "unsupported_value")
        if sum(1 for _ in self.folder.batches.iterdir()) >= MOST_BATCHES:
            message = f"there are {MOST_BATCHES} batches; expected another folder"
            raise ApiError(message, "input_file_id", "too_many_batches")
        content = (self.folder.file(body.input_file_id) / "content").read_bytes()
        plan = JobPlan(self.calls, body.endpoint)
        plan.read(content)
        now = int(time.time())
        batch = {
            "id": f"batch_{secrets.token_hex(16)}",
            "object": "batch",
            "endpoint": body.endpoint,
            "errors": None,
            "input_file_id": body.input_file_id,
            "completion_window": body.completion_window,
            "status": "in_progress",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "in_progress_at": now,
            "metadata": body.metadata,
            "request_counts": {"total": len(plan.lines), "completed": 0, "failed": 0},
        }
        folder = self.folder.batches / batch["id"]
        folder.mkdir()
        models = self.calls.engine.models
        plan.write(folder, str(models.device), str(models.dtype).removeprefix("torch."))
        self._save(batch)  # last: with it the batch is there
        self.waiting.put(batch["id"])
        return batch

    def get(self, name: str) -> dict[str, Any]:
        """Return a batch with its counts so far. Raises ``ApiError`` for an unknown one."""
        folder = self.folder.batch(name)
        batch = read(folder / "batch.json")
        if batch["status"] in OPEN and is_job(folder / "job"):
            lines = json.loads((folder / "lines.json").read_text(encoding="utf-8"))
            with suppress(GenError):
                done = {
                    r["input_id"]: r["status"] for r in read_rows(folder / "job") if "input_id" in r
                }
                states = [[done.get(row) for row in line["rows"]] for line in lines if line["rows"]]
                whole = [state for state in states if None not in state]
                made = sum(all(s == "ok" for s in state) for state in whole)
                counts = {"completed": made, "failed": len(whole) - made}
                batch["request_counts"] = {**batch["request_counts"], **counts}
        return batch

    def cancel(self, name: str) -> dict[str, Any]:
        """Give a batch up; what is made already becomes its output. Raises ``ApiError``."""
        with self.lock:
            batch = read(self.folder.batch(name) / "batch.json")
            if batch["status"] not in OPEN:
                message = f"the batch is {batch['status']}; expected in_progress"
                raise ApiError(message, "batch_id", "batch_not_running", 409)
            batch |= {"status": "cancelling", "cancelling_at": int(time.time())}
            self._save(batch)
            if self.running is not None and self.running[0] == name:
                self.running[1].terminate()
            return batch

    def _save(self, batch: dict[str, Any]) -> None:
        put_text(self.folder.batches / batch["id"] / "batch.json", json.dumps(batch))

    def _work(self) -> None:
        while not self.stopping.is_set() and (name := self.waiting.get()) is not None:
            try:
                self._run(name)
            except Exception:
                LOG.exception("batch %s failed", name)
                with suppress(Exception):
                    self._end(name, "failed", "the server failed")

    def _run(self, name: str) -> None:
        """Run the job of a batch to its end, and write what came of it."""
        folder = self.folder.batch(name)
        code = STOPPED
        for _ in range(TRIES):
            if self.stopping.is_set():
                return
            if self._is_cancelled(folder):
                break
            has_rows = any(folder.glob("rows-*.jsonl"))
            code = self._process(name, folder) if has_rows else 0
            if code in (0, 1, 2) or (code == STOPPED and self.stopping.is_set()):
                break
        if self.stopping.is_set() and code not in (0, 1, 2):
            return
        cancelled = self._is_cancelled(folder)
        said = (folder / "log").read_text(errors="replace").strip() if code == 2 else ""
        message = said.splitlines()[-1].removeprefix("gen: ") if said else "the item was not made"
        message = message.partition("the first error: ")[2] or message
        died = code not in (0, 1, 2)
        self._end(name, "cancelled" if cancelled else "failed" if died else "completed", message)

    def _is_cancelled(self, folder: Path) -> bool:
        return read(folder / "batch.json")["status"] == "cancelling"

    def _process(self, name: str, folder: Path) -> int:
        """Run ``gen run`` in a process of its own; return its exit code."""
        command = [sys.executable, "-m", "gen", "run", str(folder / "job.yaml"), "--quiet"]
        environment = {k: v for k, v in os.environ.items() if k != KEY_VARIABLE}
        with open(folder / "log", "wb") as log:
            with self.lock:  # a cancellation before it found no process to end
                if self.stopping.is_set() or self._is_cancelled(folder):
                    return STOPPED
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,  # Ctrl-C is for the server, which passes it on
                )
                self.running = name, process
            code = process.wait()
            with self.lock:
                self.running = None
        return 128 - code if code < 0 else code

    def _end(self, name: str, status: str, failure: str) -> None:
        """Write the output and the errors of a batch, and how it ended."""
        folder = self.folder.batch(name)
        found: dict[bool, list[str]] = {True: [], False: []}
        for is_good, line in results(self.calls, folder, failure):
            found[is_good].append(json.dumps(line) + "\n")
        with self.lock:
            batch = read(folder / "batch.json")
            for is_good, key in ((True, "output"), (False, "error")):
                if found[is_good]:
                    content = "".join(found[is_good]).encode()
                    meta = self.folder.add_file(content, f"{name}_{key}.jsonl", "batch_output")
                    batch[f"{key}_file_id"] = meta["id"]
            counts = {"completed": len(found[True]), "failed": len(found[False])}
            batch["request_counts"] |= counts
            batch |= {"status": status, f"{status}_at": int(time.time())}
            self._save(batch)


def existing(batches: Batches | None) -> Batches:
    """Return the batches. Raises ``ApiError`` where the server has no folder for them."""
    if batches is None:
        message = "the server keeps no files; expected gen serve --batches FOLDER"
        raise ApiError(message, "path", "no_batches", 404)
    return batches


def file_router(batches: Batches | None) -> APIRouter:
    """Return the routes of files; they refuse without a folder."""
    router = APIRouter(tags=["batches"])

    def store() -> Batches:
        return existing(batches)

    @router.post("/v1/files", openapi_extra=form_schema(FileRequest, ("file",)))
    async def upload(request: Request) -> dict[str, Any]:
        """Keep a file of requests, one JSON object per line."""
        kept = store()
        body, files = await body_of(request, FileRequest, ("file",))
        content = files["file"][0] if files.get("file") else body.file.encode()
        await run_in_threadpool(kept.folder.require_room)
        return await run_in_threadpool(kept.folder.add_file, content, "input.jsonl", body.purpose)

    @router.get("/v1/files")
    async def several_files(
        limit: Limit = 20, after: str | None = None, order: Literal["asc", "desc"] = "desc"
    ) -> dict[str, Any]:
        """List the files."""
        folder = store().folder
        found = await run_in_threadpool(folder.all_of, folder.files, "meta.json")
        return page(found, limit, after, order)

    @router.get("/v1/files/{file_id}")
    async def file(file_id: str) -> dict[str, Any]:
        """Describe a file."""
        return read(store().folder.file(file_id) / "meta.json")

    @router.get("/v1/files/{file_id}/content", response_class=Response)
    async def content(file_id: str) -> Response:
        """Return the content of a file."""
        path = store().folder.file(file_id) / "content"
        held = await asyncio.to_thread(path.read_bytes)
        return Response(held, media_type="application/jsonl")

    @router.delete("/v1/files/{file_id}")
    async def delete_file(file_id: str) -> dict[str, Any]:
        """Delete a file; batches that were made of it keep what they need."""
        await run_in_threadpool(shutil.rmtree, store().folder.file(file_id))
        return {"id": file_id, "object": "file", "deleted": True}

    return router


def batch_router(batches: Batches | None) -> APIRouter:
    """Return the routes of batches; they refuse without a folder."""
    router = APIRouter(tags=["batches"], route_class=BodyRoute)

    def store() -> Batches:
        return existing(batches)

    @router.post("/v1/batches")
    async def create(body: BatchRequest) -> dict[str, Any]:
        """Begin a batch of requests that wait for nobody."""
        return await run_in_threadpool(store().create, body)

    @router.get("/v1/batches")
    async def several(limit: Limit = 20, after: str | None = None) -> dict[str, Any]:
        """List the batches, newest first."""
        folder = store().folder
        found = await run_in_threadpool(folder.all_of, folder.batches, "batch.json")
        return page(found, limit, after, "desc")

    @router.get("/v1/batches/{batch_id}")
    async def one(batch_id: str) -> dict[str, Any]:
        """Tell how far a batch is."""
        return await run_in_threadpool(store().get, batch_id)

    @router.post("/v1/batches/{batch_id}/cancel")
    async def cancel(batch_id: str) -> dict[str, Any]:
        """Give a batch up."""
        return await run_in_threadpool(store().cancel, batch_id)

    return router
