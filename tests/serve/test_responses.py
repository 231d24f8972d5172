"""OpenAI's client drives ``/v1/responses``: the answers are those of chats, as items and events."""

from __future__ import annotations

import json

import jsonschema
import openai
import pytest
from served import serving
from tool_models import ADD, NOW, SUM, SUM_TASK, WEATHER, save_agent, save_model

import gen
from gen.serve.api import responses as module
from gen.serve.api.responses import Answers, Kept
from gen.serve.settings import Settings

HOW = {"model": "m", "input": "hi", "max_output_tokens": 40}
SEED = {"extra_body": {"seed": 1}}


def flat(tool):
    """A tool of a chat as responses have it."""
    return {"type": "function", "strict": True, **tool["function"]}


TOOLS = [flat(tool) for tool in (WEATHER, ADD, NOW)]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = save_model(tmp_path_factory.mktemp("model"), "hermes")
    with serving(models={"m": gen.load("text", model=folder, device="cpu")}) as made:
        yield made


@pytest.fixture(scope="module")
def client(server):
    return server.client()


def chat(client, messages, **how):
    made = client.chat.completions.create(
        model="m", messages=messages, seed=1, max_tokens=40, **how
    )
    return made.choices[0].message, made.usage


def test_an_answer_is_that_of_a_chat(client):
    made = client.responses.create(**HOW, **SEED, instructions="be brief")
    said = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    message, usage = chat(client, said)
    assert made.output_text == message.content and made.output_text
    assert made.usage.input_tokens == usage.prompt_tokens
    assert made.usage.output_tokens == usage.completion_tokens == 40
    assert made.usage.input_tokens_details.cached_tokens == 0
    assert made.usage.output_tokens_details.reasoning_tokens == 0
    assert (made.status, made.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert made.output[0].status == "incomplete" and made.gen["seed"] == 1
    other, _ = chat(client, said[1:])
    assert other.content != made.output_text  # the control: instructions count
    parts = [{"type": "input_text", "text": "h"}, {"type": "input_text", "text": "i"}]
    items = [{"role": "system", "content": "be brief"}, {"role": "user", "content": parts}]
    again = client.responses.create(**{**HOW, "input": items}, **SEED)
    assert again.output_text == made.output_text


def test_events_of_a_stream_build_the_same_response(client):
    whole = client.responses.create(**HOW, **SEED)
    events = list(client.responses.create(**HOW, **SEED, stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    kinds = [e.type.removeprefix("response.") for e in events]
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[4:-4] == ["output_text.delta"] * len(deltas) and len(deltas) > 3
    ends = ["output_text.done", "content_part.done", "output_item.done", whole.status]
    assert kinds[-4:] == ends
    assert "".join(deltas) == events[-4].text == whole.output_text
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage == whole.usage
    assert {e.item_id for e in events[3:-2]} == {events[-1].response.output[0].id}
    with client.responses.stream(**{**HOW, "max_output_tokens": 4}, **SEED) as stream:
        seen = [e for e in stream if e.type == "response.output_text.delta"]
    assert seen[-1].snapshot == "".join(e.delta for e in seen)


def test_calls_are_items_whose_arguments_hold_their_schema(client):
    choice = {"type": "function", "name": "add"}
    how = {**HOW, "tools": TOOLS[1:2], "max_output_tokens": 300, **SEED}
    made = client.responses.create(**how, tool_choice=choice, parallel_tool_calls=False)
    (call,) = made.output
    jsonschema.validate(json.loads(call.arguments), TOOLS[1]["parameters"])
    assert (call.type, call.name, call.status, made.status) == (
        ("function_call", "add", "completed", "completed")
    )
    assert call.call_id and call.id != call.call_id and not made.parallel_tool_calls
    assert made.tool_choice.name == "add" and made.tools[0].name == "add"
    none = client.responses.create(**how, tool_choice="none")
    assert [i.type for i in none.output] == ["message"]  # the control


@pytest.mark.slow
def test_streamed_calls_are_those_of_the_whole_response(client):
    how = {**HOW, "tools": TOOLS, "tool_choice": "required", "max_output_tokens": 300, **SEED}
    made = client.responses.create(**how)
    schemas = {tool["name"]: tool.get("parameters", {}) for tool in TOOLS}
    for call in made.output:
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])
    with client.responses.stream(**how) as stream:
        events = list(stream)
        final = stream.get_final_response()
    calls = [(c.name, c.arguments) for c in made.output]
    assert [(i.name, i.arguments) for i in final.output] == calls
    done = [e for e in events if e.type == "response.function_call_arguments.done"]
    deltas = {c.output_index: "" for c in done}
    for e in events:
        if e.type == "response.function_call_arguments.delta":
            deltas[e.output_index] += e.delta
    assert [e.arguments for e in done] == list(deltas.values()) == [a for _, a in calls]


def test_texts_hold_their_form(client):
    schema = {"type": "integer", "minimum": 20, "maximum": 29}
    form = {"type": "json_schema", "name": "number", "schema": schema, "strict": True}
    made = client.responses.create(**HOW, **SEED, text={"format": form})
    assert 20 <= int(made.output_text) <= 29 and made.status == "completed"
    assert made.text.format.schema_ == schema
    how = {**HOW, "max_output_tokens": 400, **SEED}
    made = client.responses.create(**how, text={"format": {"type": "json_object"}})
    assert isinstance(json.loads(made.output_text), dict)
    include = ["message.output_text.logprobs"]
    made = client.responses.create(**HOW, **SEED, include=include, top_logprobs=2)
    found = made.output[0].content[0].logprobs
    assert len(found) == made.usage.output_tokens
    assert all(len(t.top_logprobs) == 2 and t.logprob <= 0 for t in found)
    plain = client.responses.create(**HOW, **SEED)
    assert plain.output[0].content[0].logprobs == []


def test_conversations_go_on_by_the_id_of_a_response(client, server):
    first = client.responses.create(**HOW, **SEED)
    more = {"model": "m", "max_output_tokens": 40, "input": "and now?", **SEED}
    second = client.responses.create(**more, previous_response_id=first.id)
    items = [{"role": "user", "content": "hi"}, *first.output]
    items.append({"role": "user", "content": "and now?"})
    third = client.responses.create(**{**more, "input": items}, store=False)
    assert second.output_text == third.output_text
    assert second.usage.input_tokens == third.usage.input_tokens > 2 * first.usage.input_tokens
    assert second.previous_response_id == first.id
    fresh = client.responses.create(**more)
    assert fresh.usage.input_tokens < second.usage.input_tokens  # the control
    assert client.responses.retrieve(second.id) == second
    for gone in (third.id, "resp_none"):  # one was not stored
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(gone)
    client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**more, previous_response_id=first.id)
    assert (caught.value.param, caught.value.code) == (
        "previous_response_id",
        "previous_response_not_found",
    )
    fourth = client.responses.create(**more, previous_response_id=second.id)  # has it all
    assert fourth.usage.input_tokens > second.usage.input_tokens
    assert server.ask("/v1/responses/resp_none", method="DELETE")[0] == 404


def test_kept_responses_are_bounded_in_number_and_size(monkeypatch):
    kept = Answers(3)
    for i in range(5):
        kept.put(Kept.of({"id": str(i)}, [{"text": "x" * 100}]))
    assert [i for i in "01234" if i in kept] == ["2", "3", "4"]
    size = kept.nbytes
    kept.drop("3")
    assert kept.nbytes == pytest.approx(size * 2 / 3)
    monkeypatch.setattr(module, "MOST_BYTES", 400)
    kept.put(Kept.of({"id": "a"}, [{"text": "x" * 250}]))
    assert [i for i in "24a" if i in kept] == ["a"] and kept.nbytes <= 400
    kept.put(Kept.of({"id": "b"}, [{"text": "x" * 1000}]))  # alone it is too large
    assert "a" not in kept and "b" not in kept and kept.nbytes == 0


def test_a_server_may_keep_none(client, server):
    with serving(Settings(kept_responses=0), models={"m": server.engine.models.pipeline("m")}) as s:
        made = s.client().responses.create(**HOW, **SEED)
        assert made.store is False and made.output_text
        with pytest.raises(openai.NotFoundError):
            s.client().responses.retrieve(made.id)
        with pytest.raises(openai.BadRequestError) as caught:
            s.client().responses.create(**HOW, store=True)
        assert caught.value.param == "store"


WRONG = {
    "no such role": ({"input": [{"role": "tool", "content": "a"}]}, "input.0.role"),
    "no output": ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input.0.output"),
    "reasoning item": ({"input": [{"type": "reasoning", "id": "a"}]}, "input.0.type"),
    "address": (
        {
            "input": [
                {"role": "user", "content": [{"type": "input_image", "image_url": "http://a"}]}
            ]
        },
        "input",
    ),
    "result of nothing": (
        {"input": [{"type": "function_call_output", "call_id": "a", "output": "b"}] * 1001},
        "input",
    ),
    "background": ({"background": True}, "background"),
    "conversation": ({"conversation": "conv_a"}, "conversation"),
    "truncation": ({"truncation": "auto"}, "truncation"),
    "built-in tool": ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    "choice": ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "ad"}}, "tool_choice"),
    "no tools": ({"tool_choice": "required"}, "tool_choice"),
    "effort": ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
    "verbosity": ({"text": {"verbosity": "low"}}, "text.verbosity"),
    "no schema": (
        {"text": {"format": {"type": "json_schema", "name": "a"}}},
        "text.format.schema",
    ),
    "schema": (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "zzz"}}}},
        "text.format",
    ),
    "limit": ({"max_output_tokens": 0}, "max_output_tokens"),
    "logprobs": ({"top_logprobs": 2}, "top_logprobs"),
    "too long": ({"input": "a" * 5000}, "input"),
    "unknown": ({"max_tokens": 3}, "max_tokens"),
    "options": ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_honoured_is_one_error(server, case):
    change, param = WRONG[case]
    for stream in (False, True):
        if case == "options" and stream:
            continue
        status, body, _ = server.ask("/v1/responses", {**HOW, **change, "stream": stream})
        assert status == 400, body
        assert body["error"]["param"] == param and body["error"]["code"], body


def test_neutral_values_are_taken(client):
    made = client.responses.create(
        **HOW,
        **SEED,
        background=False,
        include=["reasoning.encrypted_content"],
        metadata={"a": "b"},
        parallel_tool_calls=True,
        prompt_cache_key="k",
        reasoning={"effort": None, "summary": "auto"},
        service_tier="auto",
        store=True,
        stream=False,
        text={"format": {"type": "text"}, "verbosity": "medium"},
        tool_choice="auto",
        tools=[],
        top_logprobs=0,
        truncation="disabled",
        user="u",
    )
    assert made.output_text == client.responses.create(**HOW, **SEED).output_text
    assert made.metadata == {"a": "b"} and made.service_tier == "default"


@pytest.fixture(scope="module")
def agent(tmp_path_factory):
    """A model that calls a function three times by itself."""
    folder = save_agent(tmp_path_factory.mktemp("agent"))
    return gen.load("text", model=folder, device="cpu", max_new_tokens=160)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["items", "previous", "stream"])
def test_an_agent_calls_three_times_and_answers(agent, way):
    how = {"model": "m", "tools": [flat(SUM)], "temperature": 0}
    called = []
    with serving(models={"m": agent}) as server:
        client = server.client()

        def ask(**more):
            if way != "stream":
                return client.responses.create(**how, **more)
            with client.responses.stream(**how, **more) as stream:
                return stream.get_final_response()

        items = [{"role": "user", "content": SUM_TASK}]
        made = ask(input=items)
        for _ in range(5):
            calls = [item for item in made.output if item.type == "function_call"]
            if not calls:
                break
            results = []
            for call in calls:
                called.append(json.loads(call.arguments))
                total = str(called[-1]["a"] + called[-1]["b"])
                kind = {"type": "function_call_output", "call_id": call.call_id}
                results.append({**kind, "output": total})
            items += [*made.output, *results]
            if way == "items":
                made = ask(input=items)
            else:
                made = ask(input=results, previous_response_id=made.id)
    assert called == [{"a": 1, "b": 2}, {"a": 3, "b": 3}, {"a": 6, "b": 4}]
    assert (made.output_text, made.status) == ("10", "completed")
