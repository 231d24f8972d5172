"""Folders and files of models that somebody damaged or made to harm: each decodes as it did, or is
refused in one sentence, within bounds of time and memory."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import struct
from pathlib import Path

import byte_folders
import pytest
from bounded import bounded

import gen
from gen.contracts import checkpoint
from gen.models.load import pretrained

VALUES = (
    None, True, -1, 0, 1, 7, 10**9, 10**30, 1.5, float("nan"), float("inf"), "", "x", "../..", [],
    [1], {}, {"a": 1}, [[]], "\ud800",
)  # fmt: skip
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = byte_folders.causal(tmp_path_factory.mktemp("model") / "good")
    texts_of(made)()  # what loading imports is imported once, before processes are forked
    return made


def texts_of(folder: Path):
    def call():
        pipe = gen.load("text", model=folder, max_new_tokens=4)
        return pipe(["abc"], seed=0).media

    return call


def paths_of(node: object, above: tuple = ()):
    """Yield the paths of all values of a JSON tree, of the first entry of lists."""
    entries = node.items() if isinstance(node, dict) and len(node) < 40 else ()
    for key, value in entries:
        yield (*above, key)
        yield from paths_of(value, (*above, key))
        if isinstance(value, list) and value:
            yield from paths_of(value[0], (*above, key, 0))


def with_value(data: object, path: tuple, value: object) -> object:
    data = at = copy.deepcopy(data)
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return data


def ended_with(folder: Path, target: Path, change, **limits):
    """Copy the folder, change the copy, and load it and decode in a process of its own."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder, target)
    change(target)
    return bounded(texts_of(target), **limits)


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_no_value_of_a_field_is_an_internal_error(folder, tmp_path, file):
    rng, data = random.Random(file), json.loads((folder / file).read_text())
    seen = []
    for path in paths_of(data):
        for value in rng.sample(VALUES, 4):
            text = json.dumps(with_value(data, path, value))
            ended = ended_with(folder, tmp_path / "bad", lambda d: (d / file).write_text(text))
            assert ended.how in ("returned", "refused"), (file, path, value, ended)
            assert "\n" not in ended.said
            seen.append(ended.how)
    assert {"returned", "refused"} <= set(seen) or file != "config.json"


@pytest.mark.parametrize(
    "field, value, said",
    [
        ("num_hidden_layers", 10**9, "is 1000000000; expected at most 21, the tensors"),
        ("intermediate_size", 10**9, "is 1000000000; expected at most 264, the longest side"),
        ("max_position_embeddings", [64], "expected an integer of at least 1"),
        (
            "hidden_size",
            "32",
            "hidden_size in config.json of model .* is '32'; expected an integer",
        ),
        ("eos_token_id", [1, "x"], "expected a token id or a list of them"),
        ("model_type", {}, "model_type in config.json of model .* is {}; expected a text"),
    ],
)
def test_a_wrong_field_is_named_with_its_file_and_value(folder, tmp_path, field, value, said):
    data = json.loads((folder / "config.json").read_text())
    shutil.copytree(folder, tmp_path / "bad")
    (tmp_path / "bad" / "config.json").write_text(json.dumps({**data, field: value}))
    with pytest.raises(gen.GenError, match=said):
        texts_of(tmp_path / "bad")()


@pytest.mark.slow
def test_control_without_the_checks_fields_hang_and_fail(folder, tmp_path, monkeypatch):
    data = json.loads((folder / "config.json").read_text())
    for module in (checkpoint, pretrained):
        monkeypatch.setattr(module, "check_fields", lambda *_: None)
    monkeypatch.setattr(pretrained, "check_sizes", lambda *_: None)
    found = {}
    for field, value in (("num_hidden_layers", 10**9), ("max_position_embeddings", {"a": 1})):
        text = json.dumps({**data, field: value})
        change = lambda d, text=text: (d / "config.json").write_text(text)  # noqa: E731
        found[field] = ended_with(folder, tmp_path / "bad", change, seconds=3).how
    assert found == {"num_hidden_layers": "hung", "max_position_embeddings": "failed"}


@pytest.mark.parametrize("name", ["../good/model.safetensors", "/etc/passwd", "", ".", "..", 7])
def test_an_index_names_files_beside_it_alone(folder, tmp_path, name):
    def change(target: Path) -> None:
        (target / "model.safetensors").rename(target / "part.safetensors")
        index = {"metadata": {}, "weight_map": {"model.norm.weight": name}}
        (target / "model.safetensors.index.json").write_text(json.dumps(index))

    ended = ended_with(folder, tmp_path / "bad", change)
    assert ended.how == "refused" and "expected the name of a file beside it" in ended.said


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "any.txt"])
def test_pipes_and_devices_in_a_folder_are_not_read(folder, tmp_path, name):
    def pipe(target: Path) -> None:
        (target / name).unlink(missing_ok=True)
        os.mkfifo(target / name)

    def device(target: Path) -> None:
        (target / name).unlink(missing_ok=True)
        (target / name).symlink_to("/dev/zero")

    for change in (pipe, device):
        ended = ended_with(folder, tmp_path / "bad", change)
        assert ended.how == "refused" and f"{name} of model" in ended.said, ended


def header(change):
    """Return a change of the header of a folder's safetensors."""

    def changed(target: Path) -> None:
        path = target / "model.safetensors"
        raw = path.read_bytes()
        (size,) = struct.unpack_from("<Q", raw)
        path.write_bytes(change(json.loads(raw[8 : 8 + size]), raw[8 + size :], raw))

    return changed


def encoded(said: dict, body: bytes) -> bytes:
    text = json.dumps(said).encode()
    return struct.pack("<Q", len(text)) + text + body


def first_is(**values):
    def change(said: dict, body: bytes, raw: bytes) -> bytes:
        key = next(key for key in said if key != "__metadata__")
        return encoded({**said, key: {**said[key], **values}}, body)

    return change


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        lambda said, body, raw: struct.pack("<Q", 2**62) + raw[8:],
        lambda said, body, raw: struct.pack("<Q", 0) + raw[8:],
        lambda said, body, raw: b"",
        lambda said, body, raw: raw[: len(raw) // 2],
        lambda said, body, raw: struct.pack("<Q", 10**5) + b"[" * 10**5 + body,
        lambda said, body, raw: encoded(said, b"\xff" * len(body)),
        first_is(shape=[10**9, 10**9]),
        first_is(shape=[-1, 3]),
        first_is(data_offsets=[0, 2**60]),
        first_is(dtype="F8_X"),
    ],
)
def test_damaged_weights_are_refused(folder, tmp_path, change):
    assert ended_with(folder, tmp_path / "bad", header(change)).how == "refused"
