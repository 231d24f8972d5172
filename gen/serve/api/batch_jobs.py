"""A batch as a job of ``gen.jobs``: its lines become rows, and its items become responses.

Every output is a row with a seed of its own, so that an item is made once, whatever happens to
server and workers. Lines that ask for the same output share its row.
"""

from __future__ import annotations

import io
import json
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from fastapi.exceptions import RequestValidationError
from PIL import Image
from pydantic import ValidationError
from torch import Tensor

from gen.contracts.condition import Condition
from gen.core.condition_parts import PARTS
from gen.core.edit_spec import EditSpec
from gen.core.errors import GenError, hint, shown
from gen.core.files import put_text
from gen.core.registry import registry
from gen.core.tool_calls import FORMATS
from gen.pipeline.pipeline import Pipeline
from gen.serve.api.calls import Calls, Wanted
from gen.serve.api.echo import usage_details
from gen.serve.api.errors import ApiError, as_api_error, of_validation
from gen.serve.api.fields import Fields
from gen.serve.api.images import EXTENSIONS, ImageRequest
from gen.serve.api.media import as_base64, encoded, given_bytes
from gen.serve.api.motions import ActionRequest, MotionRequest, wanted_action, wanted_motion
from gen.serve.api.shapes import Chats, Completions
from gen.serve.api.speech import SpeechRequest, wanted_speech
from gen.serve.api.texts import (
    ChatRequest,
    CompletionRequest,
    finish_reason,
    wanted_chat,
    wanted_completion,
)
from gen.serve.api.tools import ToolUse
from gen.store.ledger import is_job, read_rows
from gen.store.stored_tokens import load_tokens

MOST_LINES = 50_000
SEEDS = 2**31
TEXTS = {"text": Completions(), "message": Chats()}  # shapes of responses of text
LOCATION = re.compile(r"^rows-\d+\.jsonl, line \d+: ")


@dataclass(frozen=True)
class Endpoint:
    """Endpoint that a line may name.

    Attributes:
        fields: fields of its body.
        kinds: modalities, or kinds of media, that it returns.
        wanted: what a body asks for.
        choices: whether a response has ``choices`` of text, or ``data`` of files.
    """

    fields: type[Fields]
    kinds: tuple[str, ...]
    wanted: Callable[[Any, Any], Wanted]
    choices: bool = False


def _images(body: ImageRequest, modality: Any) -> Wanted:
    body.require_supported()
    return Wanted.of(body, body.model, [body.prompt], n=body.n or 1)


ENDPOINTS = {
    "/v1/images/generations": Endpoint(ImageRequest, ("image",), _images),
    "/v1/completions": Endpoint(CompletionRequest, ("text",), wanted_completion, True),
    "/v1/chat/completions": Endpoint(ChatRequest, ("text",), wanted_chat, True),
    "/v1/audio/speech": Endpoint(SpeechRequest, ("audio",), wanted_speech),
    "/v1/motions": Endpoint(MotionRequest, ("motion",), wanted_motion),
    "/v1/actions": Endpoint(ActionRequest, ("action",), lambda body, modality: wanted_action(body)),
}


@dataclass
class Line:
    """Line of a batch.

    Attributes:
        custom_id: name that its author gave it.
        rows: ids of the rows of its outputs.
        model: id of the model.
        extension: extension of its files.
        form: what its outputs become: text, joints, actions or base64.
        n: outputs of each prompt.
        calls: format in which its texts call functions; empty where they call none.
        deadline: seconds that an output may take.
        error: why it cannot be made.
        status: HTTP status of the error.
    """

    custom_id: str
    rows: list[str]
    model: str = ""
    extension: str = ""
    form: str = ""
    n: int = 1
    calls: str = ""
    deadline: float | None = None
    error: dict[str, Any] | None = None
    status: int = 400


class JobPlan:
    """Rows of a batch in groups, each of which becomes an entry of a job.

    Args:
        calls: what knows the models.
        endpoint: path that all lines name.
    """

    def __init__(self, calls: Calls, endpoint: str):
        self.calls, self.path, self.endpoint = calls, endpoint, ENDPOINTS[endpoint]
        self.groups: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {}
        self.known: dict[str, str] = {}  # what a row asks for, and its id
        self.proven: set[str] = set()  # samplers and their parameters that a model takes
        self.lines: list[Line] = []

    def read(self, content: bytes) -> None:
        """Read the lines of a file.

        Raises:
            ApiError: the file as a whole is no batch.
        """
        try:
            # other ends of lines, such as U+2028, may stand in a text of JSON
            lines = [line for line in content.decode("utf-8-sig").split("\n") if line.strip()]
        except UnicodeDecodeError:
            raise ApiError("the file is no UTF-8", "input_file_id", "invalid_file") from None
        if not 0 < len(lines) <= MOST_LINES:
            message = f"the file has {len(lines)} lines; expected 1 to {MOST_LINES}"
            raise ApiError(message, "input_file_id", "invalid_file")
        seen: set[str] = set()
        for number, text in enumerate(lines, 1):
            custom_id, body = self._parts(text, number, seen)
            try:
                self.lines.append(self._line(custom_id, body))
            except (RequestValidationError, GenError) as error:
                is_field = isinstance(error, RequestValidationError)
                found = of_validation(error) if is_field else as_api_error(error)
                error_line = Line(custom_id, [], error=found.body["error"], status=found.status)
                self.lines.append(error_line)

    def _parts(self, text: str, number: int, seen: set[str]) -> tuple[str, Any]:
        """Return the name and the body of a line. Raises ``ApiError`` for one that is none."""
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            line = None
        where = f"line {number} of the file"
        names = ("custom_id", "method", "url", "body")
        if not isinstance(line, dict) or not isinstance(line.get("custom_id"), str):
            message = f"{where} is {shown(text)}; expected an object of {', '.join(names)}"
            raise ApiError(message, "input_file_id", "invalid_file")
        for name in line:
            if name not in names:
                message = f"{where} has {shown(name)}.{hint(name, names)}"
                raise ApiError(message, "input_file_id", "invalid_file")
        custom_id = line["custom_id"]
        if custom_id in seen or len(custom_id) > 200:
            message = f"{where} has the custom_id {shown(custom_id)} again, or a long one"
            raise ApiError(message, "input_file_id", "duplicate_custom_id")
        seen.add(custom_id)
        if line.get("url") != self.path or line.get("method", "POST") != "POST":
            message = f"{where} is no POST of {self.path}, the endpoint of the batch"
            raise ApiError(message, "input_file_id", "mismatched_endpoint")
        return custom_id, line.get("body")

    def _line(self, custom_id: str, values: Any) -> Line:
        """Return a line whose rows are planned. Raises for a body that cannot be made."""
        try:
            body: Any = self.endpoint.fields.model_validate(values, strict=True)
        except ValidationError as error:
            problems = [{**e, "loc": ("body", *e["loc"])} for e in error.errors()]
            raise RequestValidationError(problems) from None
        served = self.calls.served(body.model, self.endpoint.kinds, self.path)
        pipe = self.calls.engine.models.pipeline(body.model)
        wanted = self.endpoint.wanted(body, pipe.modality)
        refuse_streams(body, wanted)
        form, extension = form_of(body)
        self._require_taken(pipe, wanted)
        seed = secrets.randbelow(SEEDS) if wanted.seed is None else wanted.seed
        entry: dict[str, Any] = {"modality": served.modality, "model": served.model}
        if pipe.model_options:
            entry["model_options"] = pipe.model_options
        dtype = str(pipe.dtype).removeprefix("torch.")
        if dtype != self.calls.engine.models.dtype:
            entry["dtype"] = dtype
        if wanted.sampler is not None:
            entry["sampler"] = wanted.sampler
        if extension != registry.get("modality", served.modality).extension:
            entry["format"] = extension
        rule = wanted.sampling.get("structured") or {}
        calls = rule["format"] if "tool_calls" in rule else ""
        line = Line(custom_id, [], body.model, extension, form, wanted.n, calls)
        line.deadline = wanted.deadline
        for prompt in wanted.prompts:
            for sample in range(wanted.n):
                row = {**row_of(prompt), "seed": seed + sample, "sampling": wanted.sampling}
                if served.adapter is not None:
                    row["adapter"] = served.adapter
                if wanted.start.frames is not None:
                    row["frames"] = wanted.start.frames
                line.rows.append(self._row(entry, row))
        return line

    def _require_taken(self, pipe: Pipeline, wanted: Wanted) -> None:
        """Refuse a sampler or its parameters that would fail the job, and with it all lines.
        Raises ``GenError``."""
        asked = json.dumps([wanted.model, wanted.sampler, wanted.sampling], sort_keys=True)
        if asked in self.proven:
            return
        try:
            pipe.request(wanted.prompts[:1], wanted.sampler, 1, wanted.seed, {**wanted.sampling})
        except GenError as error:
            raise as_api_error(error, wanted.param) from error
        self.proven.add(asked)

    def _row(self, entry: dict[str, Any], row: dict[str, Any]) -> str:
        """Plan a row, or find the one that is the same; return its id."""
        parts = sorted(row.keys() - {"prompt", "seed", "sampling"})
        group = json.dumps([entry, parts], sort_keys=True)
        key = json.dumps([group, row], sort_keys=True)
        if key not in self.known:
            self.known[key] = f"row-{len(self.known)}"
            rows = self.groups.setdefault(group, (entry, []))[1]
            rows.append({"id": self.known[key], **row})
        return self.known[key]

    def write(self, folder: Path, device: str, dtype: str) -> None:
        """Write the job, and what becomes of its items.

        Args:
            folder: folder of the batch.
            device: device of the models.
            dtype: floating-point type of them.
        """
        jobs: list[dict[str, Any]] = []
        for n, (entry, rows) in enumerate(self.groups.values()):
            path = folder / f"rows-{n}.jsonl"
            put_text(path, "".join(json.dumps(row) + "\n" for row in rows))
            jobs.append({**entry, "prompts_file": str(path)})
        job = {
            "jobs": jobs,
            "out": str(folder / "job"),
            "device": device,
            "dtype": dtype,
            "trace": 0,
            "tokens": "text" in self.endpoint.kinds,  # they say why a text ended
        }
        put_text(folder / "job.yaml", yaml.safe_dump(job, sort_keys=False))
        put_text(folder / "lines.json", json.dumps([vars(line) for line in self.lines]))


def refuse_streams(body: Any, wanted: Wanted) -> None:
    """Refuse what a line cannot ask for. Raises ``ApiError``."""
    fields = type(body).model_fields
    if ("stream" in fields and body.stream) or ("stream_format" in fields and body.stream_format):
        raise ApiError("a line of a batch cannot stream", "stream", "unsupported_value")
    if wanted.compute is not None or (isinstance(body, CompletionRequest) and body.echo):
        message = "a line of a batch cannot echo or score its prompt"
        raise ApiError(message, "echo" if body.echo else "max_tokens", "unsupported_value")
    if wanted.start != EditSpec(frames=wanted.start.frames):
        message = "a line of a batch cannot edit or continue media"
        raise ApiError(message, "prefix", "unsupported_value")
    if wanted.sampling.get("logprobs") is not None:
        message = "a line of a batch cannot return log-probabilities"
        raise ApiError(message, "logprobs", "unsupported_value")


def form_of(body: Any) -> tuple[str, str]:
    """Return what the outputs of a body become, and the extension of their files."""
    if isinstance(body, ImageRequest):
        return "base64", EXTENSIONS[body.output_format or "png"]
    if isinstance(body, SpeechRequest):
        if body.format == "pcm":
            message = "a line of a batch cannot be pcm; expected wav, flac or mp3"
            raise ApiError(message, "response_format", "unsupported_value")
        return "base64", body.format
    if isinstance(body, MotionRequest):
        if body.response_format not in (None, "joints", "npz"):
            message = f"response_format is {body.response_format}; expected joints or npz"
            raise ApiError(message, "response_format", "unsupported_value")
        return body.response_format or "joints", "npz"
    if isinstance(body, ActionRequest):
        return "action", "npz"
    return "message" if isinstance(body, ChatRequest) else "text", "txt"


def row_of(prompt: Any) -> dict[str, Any]:
    """Return the prompt and the further parts of a condition as a row of input."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    given = Condition.of(prompt)
    found: dict[str, Any] = {"prompt": given.text or ""}
    for part in given.parts:
        value = getattr(given, part)
        if part == "observation":
            found[part] = {k: plain_medium(v) for k, v in value.items()}
        elif part != "text":
            found[part] = [plain_medium(v) for v in value]
    return found


def plain_medium(value: Any) -> Any:
    """Return bytes and images as base64; anything else as it is."""
    if isinstance(value, Image.Image):
        file = io.BytesIO()
        value.save(file, "PNG")
        value = file.getvalue()
    return {"base64": as_base64(value)} if isinstance(value, bytes) else value


def results(calls: Calls, folder: Path, failure: str) -> Iterator[tuple[bool, dict[str, Any]]]:
    """Yield whether each line succeeded, and its line of the output or error file.

    Args:
        calls: what knows the models, whose tokenizers count the tokens of prompts.
        folder: folder of the batch.
        failure: message of items that are not there.
    """
    asked = _asked(folder)
    job = folder / "job"
    rows = (
        {row["input_id"]: row for row in read_rows(job) if "input_id" in row} if is_job(job) else {}
    )
    for values in json.loads((folder / "lines.json").read_text(encoding="utf-8")):
        line = Line(**values)
        error, status = line.error, line.status if line.error else 200
        data, prompt, reason = [], 0, None
        try:
            if not error and line.form in TEXTS:
                prompt, reason = _texts(calls, line, asked)
            data = (
                []
                if error
                else [_output(job, rows, name, line, failure, reason) for name in line.rows]
            )
        except GenError as problem:
            found = as_api_error(problem)
            error, status = found.body["error"], found.status
        name = secrets.token_hex(12)
        head = {"id": f"batch_req_{name}", "custom_id": line.custom_id}
        body = {"error": error} if error else _body(line, data)
        if not error and line.form in TEXTS:
            made = sum(choice["gen"]["tokens"] for choice in data)
            body = {**body, "usage": usage_details(prompt, made)}
        response = {"status_code": status, "request_id": f"req_{name}", "body": body}
        yield not error, {**head, "response": response, "error": None}


def _asked(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the rows of a batch by id, with the sampler of their group."""
    found: dict[str, dict[str, Any]] = {}
    for group in yaml.safe_load((folder / "job.yaml").read_text(encoding="utf-8"))["jobs"]:
        for text in Path(group["prompts_file"]).read_text(encoding="utf-8").split("\n"):
            if text:
                row = json.loads(text)
                found[row["id"]] = {**row, "sampler": group.get("sampler")}
    return found


def _texts(
    calls: Calls, line: Line, asked: Mapping[str, dict[str, Any]]
) -> tuple[int, Callable[[Tensor, int], str]]:
    """Return the tokens of the prompts of a line, and what says why an output ended."""
    pipe, prompt = calls.engine.models.pipeline(line.model), 0
    for name in line.rows[:: line.n]:
        row = asked[name]
        parts = {part: _medium_of(row[part]) for part in row.keys() & set(PARTS)}
        request = pipe.request(
            [{"text": row["prompt"], **parts}], row["sampler"], 1, 0, dict(row["sampling"])
        )
        prompt += sum(pipe.prompt_lengths(request.items, request.spec))
    model = pipe.model_name(request.spec, pipe.part_of(request.items))
    return prompt, partial(finish_reason, pipe, model, request.sampling)


def _medium_of(value: Any) -> Any:
    """Return the bytes that ``plain_medium`` wrote, in lists too; anything else as it is."""
    if isinstance(value, list):
        return [_medium_of(v) for v in value]
    is_bytes = isinstance(value, dict) and set(value) == {"base64"}
    return given_bytes(value["base64"], "media") if is_bytes else value


def _body(line: Line, data: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the body of the response of a line."""
    if line.form in TEXTS:
        shape, now = TEXTS[line.form], int(time.time())
        choices = [{"index": i, **choice} for i, choice in enumerate(data)]
        head = {"id": f"{shape.prefix}-{secrets.token_hex(12)}", "object": shape.name}
        return {**head, "created": now, "model": line.model, **shape.head(), "choices": choices}
    indexed = [{"index": i, **entry} for i, entry in enumerate(data)]
    return {"object": "list", "model": line.model, "data": indexed}


def _output(
    job: Path,
    rows: Mapping[str, dict[str, Any]],
    name: str,
    line: Line,
    failure: str,
    reason: Callable[[Tensor, int], str] | None,
) -> dict[str, Any]:
    """Return one output of a line, of a text with the ``reason`` that it ended for. Raises
    ``ApiError`` for an item that failed."""
    row = rows.get(name)
    if row is None or row["status"] != "ok":
        message = failure if row is None else str(row["error"])
        raise as_api_error(GenError(LOCATION.sub("", message)), "prompt")
    if line.deadline is not None and row["seconds"] > line.deadline:
        late = f"the output took {row['seconds']:.3g} seconds; expected at most {line.deadline:g}"
        raise ApiError(late, "deadline", "deadline_exceeded", 408, "timeout_error")
    modality = registry.get("modality", row["modality"])()
    media = modality.load(job / row["file"])
    names = ("seed", "nfe", "guarantee", "tokens", "draft_acceptance_rate", "seconds")
    info = {key: row.get(key) for key in names} | {"sampler": row["sampler"]}
    if reason is not None:
        tokens = load_tokens(job / row["tokens_file"]).tokens
        use = ToolUse(FORMATS[line.calls], ()) if line.calls else None
        shape = TEXTS[line.form] if use is None else Chats(use)
        said = shape.whole(media, reason(tokens, row["tokens"]))
        return {**said, "logprobs": None, "gen": info}
    if line.form == "joints":
        return {"joints": media.joints.astype(float).round(5).tolist(), "gen": info}
    if line.form == "action":
        return {"action": media.action.tolist(), "gen": info}
    # written again, a file holds no facts about this machine
    return {"b64_json": as_base64(encoded(modality, media, line.extension)), "gen": info}
