"""Fields of chat completions: neutral values change nothing, others are refused by name, and
answers have every field that OpenAI's types read."""

from __future__ import annotations

import json

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from served import serving
from tool_models import save_model

import gen
from gen.constraints.budget import Limits

ROOMY = Limits(seconds=30)  # whatever else runs, the automaton of a rule is built
ASK = [{"role": "user", "content": "hi"}]
NEUTRAL = {
    "tools": [[], None],
    "tool_choice": ["none", "auto", None],
    "parallel_tool_calls": [False, True, None],
    "store": [False, None],
    "metadata": [{}, {"a": "b" * 400}, None],
    "user": ["someone", None],
    "safety_identifier": ["someone", None],
    "n": [1, None],
    "modalities": [["text"], None],
    "audio": [None],
    "logit_bias": [{}, None],
    "logprobs": [False, None],
    "top_logprobs": [0, None],
    "stop": [[], None],
    "service_tier": ["auto", "default", None],
    "response_format": [{"type": "text"}, None],
    "functions": [[], None],
    "function_call": ["none", None],
    "prediction": [None],
    "moderation": [None],
    "prompt_cache_key": ["a", None],
    "prompt_cache_retention": ["24h", "in_memory", None],
    "reasoning_effort": ["none", None],
    "verbosity": ["medium", None],
    "web_search_options": [None],
    "presence_penalty": [0, None],
    "frequency_penalty": [0.0, None],
    "top_p": [1, None],
    "temperature": [1, None],
    "stream": [False, None],
    "stream_options": [None],
}
OTHERS = {
    "store": True,
    "modalities": ["text", "audio"],
    "audio": {"voice": "alloy", "format": "wav"},
    "top_logprobs": 2,
    "service_tier": "flex",
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "prediction": {"type": "content", "content": "a"},
    "moderation": {"model": "m"},
    "reasoning_effort": "high",
    "verbosity": "low",
    "web_search_options": {},
    "tool_choice": "required",
    "response_format": {"type": "json_schema"},
    "metadata": {str(n): "a" for n in range(17)},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = save_model(tmp_path_factory.mktemp("model"), "hermes")
    pipe = gen.load("text", model=folder, device="cpu", max_new_tokens=48)
    with serving(models={"m": pipe}, limits=ROOMY) as made:
        yield made


@pytest.fixture(scope="module")
def client(server):
    return server.client()


def answered(server, **fields):
    body = {"model": "m", "messages": ASK, "seed": 1, "max_tokens": 8, **fields}
    status, answer, _ = server.ask("/v1/chat/completions", body)
    return status, answer


def test_every_field_of_the_client_has_a_neutral_value():
    from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming

    known = set(CompletionCreateParamsNonStreaming.__annotations__)
    told = {"messages", "model", "seed", "max_tokens", "max_completion_tokens"}
    assert known - told - {"prompt_cache_options"} <= set(NEUTRAL)


def test_neutral_values_change_nothing(server):
    plain = answered(server)[1]["choices"][0]["message"]
    for name, values in NEUTRAL.items():
        for value in values:
            status, answer = answered(server, **{name: value})
            assert status == 200, (name, value, answer)
            assert answer["choices"][0]["message"] == plain, (name, value)
    other = answered(server, temperature=3)[1]["choices"][0]["message"]
    assert other != plain  # the control


@pytest.mark.parametrize("name", OTHERS)
def test_other_values_are_refused_by_name(server, name):
    status, answer = answered(server, **{name: OTHERS[name]})
    error = answer["error"]
    assert status == 400 and error["param"] == name and error["code"], error
    assert name in error["message"]


def test_answers_have_the_fields_that_clients_read(server, client):
    _, answer = answered(server)
    made = ChatCompletion.model_validate(answer, strict=True)
    fields = set(ChatCompletion.model_fields) - {"metadata", "moderation"}
    assert fields <= made.model_fields_set
    assert made.service_tier == "default" and made.system_fingerprint.startswith("gen-")
    assert {"content", "refusal", "role"} <= made.choices[0].message.model_fields_set
    usage = made.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == 0
    assert usage.completion_tokens_details.reasoning_tokens == 0
    body = {"model": "m", "messages": ASK, "stream": True, "max_tokens": 8}
    stream = client.chat.completions.create(**body, stream_options={"include_usage": True})
    parts = [ChatCompletionChunk.model_validate(part.model_dump()) for part in stream]
    assert {p.system_fingerprint for p in parts} == {made.system_fingerprint}
    assert parts[-1].usage.prompt_tokens_details == usage.prompt_tokens_details


def test_a_message_of_no_text_goes_through_the_template(server):
    empty = [{"role": "user", "content": ""}]
    status, answer = answered(server, messages=empty)
    assert status == 200 and answer["usage"]["prompt_tokens"] == len(
        "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"
        .replace("<|im_start|>", "S").replace("<|im_end|>", "E")
    )  # fmt: skip
    assert answered(server, messages=[{"role": "user", "content": []}])[0] == 200


def test_a_json_object_of_any_keys(client):
    how = {"model": "m", "messages": ASK, "n": 6, "seed": 0, "max_tokens": 40}
    made = client.chat.completions.create(**how, response_format={"type": "json_object"})
    found = [json.loads(choice.message.content) for choice in made.choices]
    assert all(isinstance(value, dict) for value in found) and any(found)
    assert {choice.finish_reason for choice in made.choices} == {"stop"}
    free = client.chat.completions.create(**how)  # the control
    assert not any(choice.message.content.startswith("{") for choice in free.choices)


def test_json_that_fills_its_positions_is_over_and_a_text_is_not(client):
    def reason(schema, most):
        form = {"name": "a", "schema": schema}
        made = client.chat.completions.create(
            model="m", messages=ASK, max_tokens=most, seed=0,
            response_format={"type": "json_schema", "json_schema": form},
        )  # fmt: skip
        return made.choices[0].finish_reason

    assert reason({"const": [1, 2]}, 5) == "stop"
    made = client.chat.completions.create(model="m", messages=ASK, max_tokens=5, seed=0)
    assert made.choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError, match="max_new_tokens"):
        reason({"const": [1, 2]}, 4)


@pytest.mark.parametrize("form", [{"type": "json_object"}, {"type": "xml"}])
def test_two_rules_or_an_unknown_one_are_refused(server, form):
    status, answer = answered(server, response_format=form, structured={"regex": "a"})
    assert status == 400 and answer["error"]["param"].startswith("response_format")
