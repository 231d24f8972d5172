"""OpenAI's client calls functions: forced calls hold their schemas whatever the weights, streamed
or not, in three formats and through the default prompt; what cannot be is one error."""

from __future__ import annotations

import json
from contextlib import ExitStack
from functools import cache

import jsonschema
import openai
import pytest
from served import serving
from tool_models import (
    ADD,
    NOW,
    SUM,
    SUM_TASK,
    TEMPLATES,
    TOOLS,
    WEATHER,
    function,
    save_agent,
    save_model,
)

import gen
from gen.constraints.budget import Limits

ASK = [{"role": "user", "content": "hi"}]
FORMATS = ["hermes", "mistral", "llama3", "none"]


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Servers by the template of the one model that they serve, made when asked for."""
    with ExitStack() as stack:

        @cache
        def of(name):
            folder = save_model(tmp_path_factory.mktemp(name), name)
            pipe = gen.load("text", model=folder, device="cpu", max_new_tokens=160)
            models = {name: pipe, "text": gen.load("text", device="cpu")}
            return stack.enter_context(serving(models=models, limits=Limits(seconds=30)))

        yield of


@pytest.fixture(scope="module")
def server(servers):
    return servers("hermes")


@pytest.fixture(scope="module")
def client(server):
    return server.client()


def schema_of(name: str) -> dict:
    found = {t["function"]["name"]: t["function"] for t in TOOLS}[name]
    return found.get("parameters", {"type": "object", "maxProperties": 0})


def require_valid(calls) -> None:
    assert calls
    for call in calls:
        assert call.type == "function" and call.id
        jsonschema.validate(json.loads(call.function.arguments), schema_of(call.function.name))
    assert len({call.id for call in calls}) == len(calls)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("model", FORMATS)
def test_forced_calls_hold_their_schemas(servers, model):
    client = servers(model).client()
    how = {"model": model, "messages": ASK, "tools": TOOLS}
    named = {"type": "function", "function": {"name": "add"}}
    made = client.chat.completions.create(**how, tool_choice=named, n=3, seed=1)
    for choice in made.choices:
        require_valid(choice.message.tool_calls)
        assert [c.function.name for c in choice.message.tool_calls] == ["add"]
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
    made = client.chat.completions.create(**how, tool_choice="required", n=3, seed=1)
    for choice in made.choices:
        require_valid(choice.message.tool_calls)
    # the control: the same weights without tools write no JSON
    made = client.chat.completions.create(model=model, messages=ASK, seed=1, max_tokens=40)
    assert made.choices[0].message.tool_calls is None
    assert "{" not in made.choices[0].message.content[:1]


@pytest.mark.thinned(4)
@pytest.mark.parametrize("model", FORMATS)
def test_a_stream_parser_reads_what_a_whole_answer_has(servers, model):
    client = servers(model).client()
    how = {"model": model, "messages": ASK, "tools": TOOLS, "tool_choice": "required", "seed": 3}
    whole = client.chat.completions.create(**how).choices[0]
    with client.chat.completions.stream(**how) as stream:
        events = list(stream)
    final = stream.get_final_completion().choices[0]
    assert final.finish_reason == whole.finish_reason == "tool_calls"
    assert final.message.content is None and whole.message.content is None
    said = [(c.function.name, c.function.arguments) for c in final.message.tool_calls]
    assert said == [(c.function.name, c.function.arguments) for c in whole.message.tool_calls]
    deltas = [e for e in events if e.type == "tool_calls.function.arguments.delta"]
    done = [e for e in events if e.type == "tool_calls.function.arguments.done"]
    assert len(done) == len(said) and len(deltas) > len(done)
    assert "".join(e.arguments_delta for e in deltas) == "".join(a for _, a in said)


def test_parallel_calls_may_be_forbidden(client):
    how = {"model": "hermes", "messages": ASK, "tools": [NOW], "tool_choice": "required", "n": 8}
    several = client.chat.completions.create(**how, seed=0)
    counts = {len(c.message.tool_calls) for c in several.choices}
    one = client.chat.completions.create(**how, seed=0, parallel_tool_calls=False)
    assert {len(c.message.tool_calls) for c in one.choices} == {1} and max(counts) > 1


def test_auto_answers_in_text_and_in_its_schema(client):
    how = {"model": "hermes", "messages": ASK, "tools": TOOLS, "seed": 0, "max_tokens": 40}
    made = client.chat.completions.create(**how).choices[0]
    assert made.message.tool_calls is None and made.message.content
    assert made.finish_reason in ("length", "stop")
    schema = {"name": "n", "schema": {"type": "integer", "minimum": 20, "maximum": 29}}
    form = {"type": "json_schema", "json_schema": schema}
    made = client.chat.completions.create(**how, response_format=form, n=8)
    for choice in made.choices:
        if choice.message.tool_calls:
            require_valid(choice.message.tool_calls)
        else:
            assert 20 <= json.loads(choice.message.content) <= 29
            assert choice.finish_reason == "stop"


def test_tools_that_may_not_be_called_change_nothing(client):
    how = {"model": "hermes", "messages": ASK, "seed": 5, "max_tokens": 20}
    plain = client.chat.completions.create(**how)
    none = client.chat.completions.create(**how, tools=TOOLS, tool_choice="none")
    empty = client.chat.completions.create(**how, tools=[], parallel_tool_calls=False)
    told = client.chat.completions.create(**how, tools=TOOLS)
    for made in (none, empty):
        assert made.choices[0].message.content == plain.choices[0].message.content
        assert made.usage.prompt_tokens == plain.usage.prompt_tokens
    assert told.usage.prompt_tokens > plain.usage.prompt_tokens  # the control


def looped(client, model: str, steps: int = 3) -> list[dict]:
    """An agent loop: functions are called, and their results sent back."""
    functions = {
        "get_weather": lambda city, unit: f"{city}: 20 {unit}",
        "add": lambda a, b: str(a + b),
        "now": lambda: "noon",
    }
    messages = list(ASK)
    for step in range(steps):
        made = client.chat.completions.create(
            model=model, messages=messages, tools=TOOLS, tool_choice="required", seed=step
        )
        answer = made.choices[0].message
        messages.append(answer.model_dump())  # as agents send it, with all its keys
        for call in answer.tool_calls:
            result = functions[call.function.name](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    made = client.chat.completions.create(
        model=model, messages=messages, tools=TOOLS, tool_choice="none", max_tokens=8
    )
    messages.append(made.choices[0].message.model_dump())
    return messages


@pytest.mark.thinned(4)
@pytest.mark.parametrize("model", FORMATS)
def test_an_agent_loop_of_three_calls(servers, model):
    client = servers(model).client()
    messages = looped(client, model)
    assert sum(m["role"] == "tool" for m in messages) >= 3
    assert messages[-1]["role"] == "assistant" and messages[-1]["content"] is not None


WRONG = {
    "unknown function": (
        {"tool_choice": {"type": "function", "function": {"name": "ad"}}},
        ("tool_choice", "Did you mean 'add'"),
    ),
    "required of nothing": ({"tools": [], "tool_choice": "required"}, ("tool_choice", "none")),
    "twice": ({"tools": [ADD, ADD]}, ("tools", "twice")),
    "custom": ({"tools": [{"type": "custom", "custom": {}}]}, ("tools.0.custom", "custom")),
    "no object": (
        {"tools": [{**NOW, "function": {"name": "f", "parameters": {"type": "array"}}}]},
        ("tools", "JSON schema of an object"),
    ),
    "name": ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, ("tools.0", "a b")),
    "structured too": ({"structured": {"regex": "a"}}, ("tools", "both given")),
    "schema": (
        {"tools": [function("f", a={"type": "string", "contentMediaType": 3, "patternx": 1,
                                    "format": "no-such"})]},
        ("tools", "parameters of function 'f'"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_called_is_one_error(server, case):
    change, (param, words) = WRONG[case]
    body = {"model": "hermes", "messages": ASK, "tools": TOOLS, "max_tokens": 60, **change}
    status, answer, _ = server.ask("/v1/chat/completions", body)
    error = answer["error"]
    assert status == 400 and error["param"].startswith(param) and error["code"]
    assert words in error["message"]


def test_a_model_without_a_chat_template_takes_no_tools(client):
    how = {"model": "text", "messages": [{"role": "user", "content": "sort 3 1 2 ="}]}
    with pytest.raises(openai.BadRequestError, match="takes no tools") as caught:
        client.chat.completions.create(**how, tools=TOOLS)
    assert (caught.value.param, caught.value.code) == ("tools", "unsupported_value")
    made = client.chat.completions.create(**how, tools=TOOLS, tool_choice="none", seed=0)
    assert made.choices[0].message.content == "1 2 3"


TURNS = {
    "result without its id": ({"role": "tool", "content": "1"}, "tool_call_id"),
    "calls of the user": (
        {"role": "user", "content": "", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        ]},
        "tool_calls",
    ),
    "answer of nothing": ({"role": "assistant"}, "content"),
    "id of a user": ({"role": "user", "content": "a", "tool_call_id": "b"}, "tool_call_id"),
}  # fmt: skip


@pytest.mark.parametrize("case", TURNS)
def test_turns_that_lack_something_are_one_error(server, case):
    turn, key = TURNS[case]
    body = {"model": "hermes", "messages": [*ASK, turn]}
    status, answer, _ = server.ask("/v1/chat/completions", body)
    assert status == 400 and answer["error"]["param"] == f"messages.1.{key}"
    assert answer["error"]["code"] in ("invalid_value", "missing_parameter")


def test_all_templates_are_tried():
    assert {*FORMATS, "no system turn"} == set(TEMPLATES)
    assert WEATHER in TOOLS


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_that_decides_itself_calls_three_times_and_answers(tmp_path, streamed):
    pipe = gen.load("text", model=save_agent(tmp_path / "m"), device="cpu", max_new_tokens=160)
    messages, calls = [{"role": "user", "content": SUM_TASK}], []
    with serving(models={"m": pipe}) as server:
        client = server.client()
        how = {"model": "m", "messages": messages, "tools": [SUM], "temperature": 0}
        for _ in range(4):
            if streamed:
                with client.chat.completions.stream(**how) as stream:
                    choice = stream.get_final_completion().choices[0]
            else:
                choice = client.chat.completions.create(**how).choices[0]
            messages.append(choice.message.model_dump())
            if choice.finish_reason != "tool_calls":
                break
            for call in choice.message.tool_calls:
                given = json.loads(call.function.arguments)
                calls.append((call.function.name, given["a"], given["b"]))
                result = str(given["a"] + given["b"])
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        assert calls == [("add", 1, 2), ("add", 3, 3), ("add", 6, 4)]
        assert (choice.finish_reason, choice.message.content) == ("stop", "10")
        # the control: where nothing may be called, the same conversation begins with no call
        made = client.chat.completions.create(
            **how | {"messages": messages[:1]}, tool_choice="none"
        )
        assert made.choices[0].message.tool_calls is None
