"""Lines of a batch as they are planned: what is wrong with one is the matter of that line."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from gen.engine.engine import Engine
from gen.serve.api import batches
from gen.serve.api.batch_jobs import JobPlan, results
from gen.serve.api.batches import Folder
from gen.serve.api.calls import Calls
from gen.serve.api.errors import ApiError
from gen.serve.metrics import Metrics
from gen.serve.settings import Settings

URL = "/v1/completions"
TASK = {"model": "text", "prompt": "sort 3 1 2 ="}


@pytest.fixture(scope="module")
def calls():
    engine = Engine(device="cpu")
    yield Calls(engine, Settings(), Metrics(engine))
    engine.close()


def line(n: int, body: dict) -> bytes:
    whole = {"custom_id": f"line {n}", "method": "POST", "url": URL, "body": body}
    return json.dumps(whole, ensure_ascii=False).encode()


def planned(calls: Calls, content: bytes) -> JobPlan:
    plan = JobPlan(calls, URL)
    plan.read(content)
    return plan


WRONG = {  # the parameter, and what is wrong about it
    "sampler": {"sampler": "sdj"},
    "sampler.name": {"sampler": {}},
    "sampler.window": {"sampler": {"name": "sjd", "window": -1}},
    "temperature": {"temperature": -1},
    "model": {"model": "txt"},
    "temprature": {"temprature": 1},
    "stream": {"stream": True},
}


def test_a_wrong_line_fails_alone(calls):
    wrong = [line(n, {**TASK, **body}) for n, body in enumerate(WRONG.values())]
    plan = planned(calls, b"\n".join([line(100, TASK), *wrong, line(101, {**TASK, "seed": 1})]))
    good = [one for one in plan.lines if one.error is None]
    assert [one.custom_id for one in good] == ["line 100", "line 101"]
    found = [one for one in plan.lines if one.error is not None]
    assert [one.error["param"] for one in found] == list(WRONG)
    assert [one.status for one in found] == [404 if p == "model" else 400 for p in WRONG]
    # the job holds nothing that is wrong
    assert sum(len(rows) for _, rows in plan.groups.values()) == 2


def test_the_parameters_of_a_line_are_kept_as_they_came(calls):
    body = {**TASK, "max_tokens": 3, "temperature": 0.5, "stop": ["3"]}
    plan = planned(calls, b"\n".join([line(1, body), line(2, {**body, "seed": 7})]))
    rows = [row for _, rows in plan.groups.values() for row in rows]
    assert len(rows) == 2
    for row in rows:
        assert row["sampling"]["max_new_tokens"] == 3 and row["sampling"]["temperature"] == 0.5


def test_a_text_of_a_line_may_hold_other_ends_of_lines(calls):
    bodies = [{**TASK, "user": f"a{mark}b"} for mark in ("\u2028", "\u2029", "\x85")]
    content = b"\r\n".join(line(n, body) for n, body in enumerate(bodies)) + b"\n\n"
    plan = planned(calls, content)
    assert [(one.custom_id, one.error) for one in plan.lines] == [
        (f"line {n}", None) for n in range(3)
    ]


def test_a_file_may_begin_with_a_byte_order_mark(calls):
    assert len(planned(calls, b"\xef\xbb\xbf" + line(1, TASK)).lines) == 1
    for content in (line(1, TASK) + b"\n\xef\xbb\xbf" + line(2, TASK), line(1, TASK)[:-1]):
        with pytest.raises(ApiError):  # control: elsewhere it is none, and what is no JSON is told
            planned(calls, content)


def test_a_line_that_took_longer_than_its_deadline_is_an_error(calls, tmp_path, monkeypatch):
    plan = planned(calls, b"\n".join([line(1, {**TASK, "deadline": 2}), line(2, TASK)]))
    plan.write(tmp_path, "cpu", "float32")
    row = {"status": "ok", "seconds": 3.0, "modality": "text", "tokens": 3, "sampler": "sjd"}
    row |= {"file": "a.txt", "tokens_file": "a.npz"}
    rows = [{**row, "input_id": name} for name in plan.known.values()]
    tokens = SimpleNamespace(tokens=torch.tensor([1, 2, 3]))
    monkeypatch.setattr("gen.serve.api.batch_jobs.load_tokens", lambda path: tokens)
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "a.txt").write_text("1 2 3")
    monkeypatch.setattr("gen.serve.api.batch_jobs.is_job", lambda folder: True)
    monkeypatch.setattr("gen.serve.api.batch_jobs.read_rows", lambda folder: rows)
    (late, first), (fine, second) = results(calls, tmp_path, "")
    assert not late and first["response"]["status_code"] == 408
    error = first["response"]["body"]["error"]
    assert (error["param"], error["code"]) == ("deadline", "deadline_exceeded")
    assert fine and second["response"]["status_code"] == 200  # control: it has no deadline


def test_the_output_of_a_batch_is_kept_however_many_files_there_are(tmp_path, monkeypatch):
    monkeypatch.setattr(batches, "MOST_FILES", 2)
    folder = Folder(tmp_path)
    for _ in range(2):
        folder.require_room()
        folder.add_file(b"x", "a", "batch")
    with pytest.raises(ApiError) as refused:  # an upload
        folder.require_room()
    assert (refused.value.param, refused.value.code) == ("file", "too_many_files")
    meta = folder.add_file(b"made", "b", "batch_output")
    assert (folder.file(meta["id"]) / "content").read_bytes() == b"made"
