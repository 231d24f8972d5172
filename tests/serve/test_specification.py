"""Requests drawn from the OpenAPI specification: no answer is a fault of the server."""

from __future__ import annotations

import random
import warnings

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from served import serving

from gen.serve.settings import Settings

pytestmark = pytest.mark.slow
EXAMPLES = 40
# what makes a request of an endpoint a right one
GOOD = {
    "/v1/images/generations": {"model": "image", "prompt": "a red circle"},
    "/v1/audio/speech": {"model": "speech", "input": "three seven"},
    "/v1/completions": {"model": "text", "prompt": "sort 3 1 2 ="},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "sort 3 1 2 ="}]},
    "/v1/responses": {"model": "text", "input": "sort 3 1 2 ="},
    "/v1/motions": {"model": "motion", "prompt": "a person walks forward"},
    "/v1/actions": {"model": "action", "prompt": "reach"},
    "/v1/videos": {"model": "video", "prompt": "a red square moves right"},
}
# values that are right for JSON and may be wrong for a sampler
EDGES = {
    "temperature": [0, 1e-300, 1e300, -1],
    "top_k": [0, 1, 10**9, 2**70],
    "top_p": [0, 1e-9, 2],
    "guidance_scale": [0, 1e300, -1e300],
    "repetition_penalty": [0, 1e-300, 1e300],
    "presence_penalty": [1e300, -1e300],
    "no_repeat_ngram_size": [1, 10**9],
    "logit_bias": [{"1": 1e308}, {"-1": 2}, {"99999999999999": 1}],
    "bad_words": [[[]], [""], [[10**12]], [[-1]]],
    "seed": [2**62, 2**64, -1],
    "max_tokens": [1, 10**9],
    "sampler": [
        "autoregressive", "joint_viterbi", "next_scale", "beam", {}, {"name": None},
        {"name": "sjd", "window": 10**12}, {"name": "maskgit", "steps": 10**9},
        {"name": "best_of", "n": 10**6}, {"name": ["sjd"]}, {"name": "best_of", "base": "best_of"},
        {"name": "best_of", "scorer": {"name": "value_head", "path": "/etc/passwd"}},
    ],
    "structured": [{"regex": "(a{1000}){1000}"}, {"json_schema": {"$ref": "file:///etc"}}, {}],
    "frames": [1, 10**9],
    "stream": [True],
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(Settings(batches=tmp_path_factory.mktemp("kept"), deadline=120)) as made:
        yield made


def nearly_right(body, path: str):
    """Leave a part of the fields of a body, make the request right, and some values extreme."""
    if path not in GOOD or not isinstance(body, dict):
        return body
    draw = random.Random(repr(body))
    kept = {key: value for key, value in body.items() if draw.random() < 0.25}
    kept.update({k: v for k, v in GOOD[path].items() if draw.random() < 0.95})
    for key, values in EDGES.items():
        if draw.random() < 0.1:
            kept[key] = draw.choice(values)
    kept.pop("deadline", None)
    return kept


def test_no_request_is_answered_with_a_fault_of_the_server(server):
    warnings.simplefilter("ignore")
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    seen: dict[tuple[str, int], int] = {}
    for result in schema.get_all_operations():
        operation = result.ok()

        @given(case=operation.as_strategy())
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def run(case):
            case.body = nearly_right(case.body, operation.path)
            answer = case.call(timeout=180)
            key = operation.label, answer.status_code
            seen[key] = seen.get(key, 0) + 1
            assert answer.status_code < 500, (case.body, answer.text)
            if answer.status_code >= 400:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

        run()
    right = {label.split()[1] for label, status in seen if status == 200}
    assert right >= GOOD.keys(), seen  # the control: right requests were among them
    assert server.ask("/v1/completions", GOOD["/v1/completions"])[0] == 200
