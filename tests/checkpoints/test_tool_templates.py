"""Conversations with tools in chat templates: those that take tools get them as transformers gives
them, all others get the documented prompt; markers of calls are text."""

from __future__ import annotations

import json

import pytest
from tool_models import ADD, NOW, TEMPLATES, TOOLS, save_model, tokenizer_of

import gen
from gen.contracts.condition import Condition
from gen.core.errors import GenError
from gen.models.load.chat import chat_text, own_format
from gen.tokenizers.text.hf_text import HFText

CALL = {"id": "call_abc123", "type": "function",
        "function": {"name": "add", "arguments": '{"a": 1, "b": 20}'}}  # fmt: skip
TURNS = [
    {"role": "user", "content": "1 + 20?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_abc123", "content": "21"},
]


def rendered(tokenizer, turns=TURNS, tools=TOOLS) -> str:
    condition = Condition.of({"messages": turns, "tools": tools})
    text = chat_text(tokenizer, condition.messages, "", condition.tools)
    return tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_templates_that_take_tools_are_known_by_their_format():
    found = {name: own_format(tokenizer_of(name)) for name in TEMPLATES}
    names = {name: form and form.name for name, form in found.items()}
    assert names == {"hermes": "hermes", "mistral": "mistral", "llama3": "llama3",
                     "none": None, "no system turn": None}  # fmt: skip


@pytest.mark.parametrize("name", ["hermes", "mistral", "llama3"])
def test_a_template_of_tools_gets_what_transformers_gives_it(name):
    tokenizer = tokenizer_of(name)
    short = "callabc123"[-9:] if name == "mistral" else "call_abc123"
    call = CALL | {"id": short, "function": {"name": "add", "arguments": {"a": 1, "b": 20}}}
    turns = [TURNS[0], {**TURNS[1], "content": "", "tool_calls": [call]},
             {**TURNS[2], "tool_call_id": short}]  # fmt: skip
    wanted = tokenizer.apply_chat_template(
        turns, tools=TOOLS, add_generation_prompt=True, tokenize=False
    )
    assert rendered(tokenizer) == wanted and "get_weather" in wanted and "21" in wanted
    plain = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert rendered(tokenizer, tools=[]) == plain != wanted


@pytest.mark.parametrize("name", ["none", "no system turn"])
def test_other_templates_get_the_prompt_of_hermes(name):
    text = rendered(tokenizer_of(name))
    head, _, rest = text.partition("\n</tools>")
    listed = [json.loads(line) for line in head.partition("<tools>\n")[2].split("\n") if line]
    assert listed == TOOLS
    said = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 20}}\n</tool_call>'
    assert said in rest and "<tool_response>\n21\n</tool_response>" in rest
    assert text.startswith("<|im_start|>system\n# Tools" if name == "none" else "[INST]# Tools")
    without = rendered(tokenizer_of(name), TURNS[:1], [])
    assert "# Tools" not in without and "1 + 20?" in without  # the control


def test_a_system_turn_keeps_its_text_and_results_of_one_answer_are_one_turn():
    turns = [{"role": "system", "content": "Be brief."}, *TURNS,
             {"role": "tool", "tool_call_id": "b", "content": "22"}]  # fmt: skip
    text = rendered(tokenizer_of("none"), turns)
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    assert text.count("<|im_start|>user") == 2
    both = "<tool_response>\n21\n</tool_response>\n<tool_response>\n22\n</tool_response>"
    assert both in text


def test_markers_of_calls_are_text_though_a_tokenizer_calls_them_special():
    frontend = HFText(tokenizer_of("mistral"))
    text = '[TOOL_CALLS] [{"name": "add"}]'
    ids = frontend.ids(text)
    assert len(ids) == len(text) - len("[TOOL_CALLS]") + 1
    assert frontend.text(ids) == text and frontend.vocabulary().join(ids).decode() == text
    other = frontend.ids("<|turn|>a")  # the control: another special token
    assert frontend.text(other) == "a" and frontend.vocabulary().later[other[0]] is None


WRONG = {
    "tools alone": ({"text": "a", "tools": [NOW]}, "tools came without messages"),
    "arguments": ({"messages": [{**TURNS[1], "tool_calls": [
        {"function": {"name": "f", "arguments": 3}}]}]}, "arguments is 3"),
    "no name": ({"messages": [{**TURNS[1], "tool_calls": [{"function": {}}]}]}, "tool_calls.0 is"),
    "unknown key": ({"messages": [{**TURNS[0], "tool_call": []}]}, "Did you mean 'tool_calls'"),
    "no content": ({"messages": [{"role": "assistant", "content": None}]}, "content is None"),
}  # fmt: skip


@pytest.fixture(scope="module")
def pipe(tmp_path_factory):
    folder = save_model(tmp_path_factory.mktemp("model"), "hermes")
    return gen.load("text", model=folder, device="cpu", max_new_tokens=100)


@pytest.mark.parametrize("case", WRONG)
def test_what_no_template_takes_is_one_error(pipe, case):
    prompt, message = WRONG[case]
    with pytest.raises(GenError, match=message) as caught:
        pipe(prompt)
    assert "\n" not in str(caught.value)


def test_a_call_of_a_pipeline_takes_tools(pipe):
    prompt = {"messages": TURNS, "tools": [ADD]}
    how = {"structured": {"tool_calls": [ADD], "call": "add"}, "seed": 3}
    out = pipe(prompt, **how)
    assert out.texts[0].startswith("<tool_call>") and '"add"' in out.texts[0]
