"""Call of the page as Python, as a curl command and as a job file, each to be run as it is."""

from __future__ import annotations

import json
from typing import Any

from gen.config.yaml_text import dump_yaml
from gen.contracts.modality import Modality
from gen.engine.engine import Engine
from gen.serve.live.request import LiveRequest

# endpoints of one answer, by modality or kind of media, and their names of the prompt
ENDPOINTS = {
    "image": ("/v1/images/generations", "prompt"),
    "edit": ("/v1/images/edits", "prompt"),
    "audio": ("/v1/audio/speech", "input"),
    "text": ("/v1/completions", "prompt"),
    "chat": ("/v1/chat/completions", "messages"),
    "motion": ("/v1/motions", "prompt"),
    "action": ("/v1/actions", "prompt"),
}


def copied(request: LiveRequest, engine: Engine, address: str, has_key: bool) -> dict[str, str]:
    """Return the call as ``python``, ``curl`` and ``job``.

    Args:
        request: the call.
        engine: the engine, whose models have names.
        address: address of the server, such as ``http://localhost:8123``.
        has_key: the server asks for an API key; the command takes it from ``GEN_API_KEY``.
    """
    served, modality = (
        engine.models.get(request.model),
        engine.models.pipeline(request.model).modality,
    )
    return {
        "python": _python(request, modality, served.model),
        "curl": _curl(request, modality, address, has_key),
        "job": _job(request, modality, served.model),
    }


def _python(request: LiveRequest, modality: Modality, model: str | None) -> str:
    name = modality.name
    given = repr(name) if model is None else f"{name!r}, model={model!r}"
    words: dict[str, Any] = {}
    if request.sampler is not None:
        words["sampler"] = request.spec
    words |= request.file_names
    words |= {
        "num_samples": request.num_samples,
        "seed": request.seed,
        **request.controls(modality),
    }
    lines = "".join(f"    {key}={value!r},\n" for key, value in words.items())
    return (
        f"import gen\n\npipe = gen.load({given})\n"
        f"out = pipe(\n    {request.condition(modality)!r},\n{lines})\n"
        f"print(out)\nout.save({request.folder!r})\n"
    )


def _curl(request: LiveRequest, modality: Modality, address: str, has_key: bool) -> str:
    path, body, files = _asked(request, modality)
    text = json.dumps(body)
    if files:  # the shell puts the files in
        named = {key: f"$(base64 < {name} | tr -d '\\n')" for key, name in files.items()}
        parts = [f'"{key}": "{content}"' for key, content in named.items()]
        if path == "/live/generate":
            parts = [
                f'"{key}": {{"name": "{files[key]}", "data": "{content}"}}'
                for key, content in named.items()
            ]
        text = f"{_in_heredoc(text)[:-1]}, {', '.join(parts)}}}"
    words = ["curl", "-N"] if path == "/live/generate" else ["curl"]
    words += [f"{address}{path}", "-H 'Content-Type: application/json'"]
    if has_key:
        words.append('-H "Authorization: Bearer $GEN_API_KEY"')
    if path == ENDPOINTS["audio"][0]:
        words.append(f"--output {request.model}.wav")
    end = "END" if files else "'END'"
    return f"{' '.join(words)} -d @- <<{end}\n{text}\nEND\n"


def _asked(request: LiveRequest, modality: Modality) -> tuple[str, dict[str, Any], dict[str, str]]:
    """Return path and body of a request that answers the call, and the files that it reads.

    Calls that no endpoint answers in one response are those of the page itself.
    """
    kind = modality.name if modality.name in ENDPOINTS else modality.media_kind
    condition = request.condition(modality)
    if not isinstance(condition, str):
        kind = "chat"
    files, count = set(request.files), request.num_samples
    more = dict(request.calls)
    if request.structured is not None:
        more["structured"] = request.structured
    if files == {"source", "mask"}:
        kind = "edit"
    answers = kind in ENDPOINTS and "prefix" not in files and (kind != "audio" or count == 1)
    if not answers:
        body: dict[str, Any] = {"model": request.model, "prompt": request.prompt, **more}
        if request.sampler is not None:
            body["sampler"] = dict(request.sampler)
        body |= {"sampling": dict(request.sampling), "seed": request.seed, "num_samples": count}
        return "/live/generate", body, request.file_names
    path, prompt = ENDPOINTS[kind]
    asked = condition if isinstance(condition, str) else condition["messages"]
    body = {"model": request.model, prompt: asked, **more}
    if request.sampler is not None:
        body["sampler"] = request.spec
    body |= {"seed": request.seed, **request.sampling}
    if kind != "audio":
        body["n"] = count
    fields = {"source": "image", "mask": "mask"}
    return path, body, {fields[key]: name for key, name in request.file_names.items()}


def _in_heredoc(text: str) -> str:
    """Return a text whose words the shell leaves as they are."""
    for letter in "\\$`":
        text = text.replace(letter, f"\\{letter}")
    return text


def _job(request: LiveRequest, modality: Modality, model: str | None) -> str:
    tree: dict[str, Any] = {"modality": modality.name}
    if model is not None:
        tree["model"] = model
    if request.sampler is not None:
        tree["sampler"] = request.spec
    if controls := request.controls(modality):
        tree["sampling"] = controls
    tree |= {"prompts": [request.condition(modality)], "num_samples": request.num_samples}
    tree |= {"seed": request.seed, **request.file_names, "out": request.folder}
    return dump_yaml(tree)
