"""Tools and structured output on the page, and errors at the fields that they are about."""

from __future__ import annotations

import json

import pytest
from chrome import CONTROL, Tab
from live_pages import finished, go, ready, resized, served, states, text, too_wide
from tool_models import TOOLS, save_model

import gen
from gen.constraints.budget import Limits
from gen.engine.engine import Engine

pytestmark = pytest.mark.slow
TASK = "sort 3 1 2 ="


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = save_model(tmp_path_factory.mktemp("model"), "hermes")
    chat = gen.load("text", model=folder, device="cpu", max_new_tokens=160)
    engine = Engine(
        {"text": gen.load("text", device="cpu"), "chat": chat}, "cpu", limits=Limits(seconds=30)
    )
    with served(engine) as address:
        yield address
    engine.close()


@pytest.fixture
def tab(address, tmp_path):
    tab = Tab(tmp_path / "profile", address)
    ready(tab)
    yield tab
    assert tab.logs == []
    tab.close()


def focused(tab: Tab) -> str:
    return tab.value("document.activeElement.id")


def reach(tab: Tab, name: str) -> None:
    """Press Tab until a control has the focus."""
    for _ in range(60):
        tab.press("Tab")
        if focused(tab) == name:
            return
    raise AssertionError(f"{name} was not reached by the Tab key")


def failed(tab: Tab) -> None:
    tab.until(lambda: states(tab) == ["failed"])
    tab.until(lambda: text(tab, ".fault") != "" or text(tab, "#alert") != "")


def test_an_output_obeys_a_rule_that_was_typed(tab, address):
    go(tab, address, modality="text", model="text", prompt=TASK, sampler="autoregressive", seed=0)
    tab.press("Enter", CONTROL)
    finished(tab)
    assert text(tab, ".text") == "1 2 3"  # the control
    tab.click("#rules summary")
    tab.value("document.getElementById('rule').value = 'regex'")
    tab.value("document.getElementById('rule').dispatchEvent(new Event('change'))")
    tab.value("document.getElementById('rule-value').focus()")
    tab.write("9 9( 8)?")
    tab.press("Enter", CONTROL)
    tab.until(lambda: text(tab, ".text") in ("9 9", "9 9 8"))
    finished(tab)
    assert "rules.rule-value=9+9" in tab.value("location.hash")
    tab.click("details.copy summary")
    tab.until(lambda: "structured={'regex': '9 9( 8)?'}" in text(tab, "pre"))


def test_functions_are_called_by_keys_alone(tab, address):
    go(tab, address, modality="text", model="chat", prompt="hi", sampler="autoregressive", seed=1)
    tab.value("document.querySelector('#rules summary').focus()")
    tab.press("Enter")
    reach(tab, "tools-example")
    tab.press("Enter")
    assert focused(tab) == "tools" and "get_weather" in tab.value("tools.value")
    reach(tab, "tool-choice")
    tab.press("ArrowDown")  # from auto to required
    assert tab.value("document.getElementById('tool-choice').value") == "required"
    tab.press("Enter", CONTROL)
    finished(tab)
    names = tab.value("[...document.querySelectorAll('.calls strong')].map((e) => e.textContent)")
    given = tab.value("[...document.querySelectorAll('.calls pre')].map((e) => e.textContent)")
    assert names and set(names) == {"get_weather"}
    assert all(set(json.loads(words)) == {"city", "unit"} for words in given)
    link = tab.value("location.hash")
    tab.send("Page.navigate", url="about:blank")
    tab.send("Page.navigate", url=address + link)
    ready(tab)
    tab.press("Enter", CONTROL)
    finished(tab)
    again = tab.value("[...document.querySelectorAll('.calls pre')].map((e) => e.textContent)")
    assert again == given


def test_a_model_without_a_chat_template_offers_no_tools(tab, address):
    shown = "document.getElementById('tools').checkVisibility()"
    for model, takes in (("text", False), ("chat", True)):
        go(tab, address, modality="text", model=model, prompt=TASK)
        tab.value("document.getElementById('rules').open = true")
        assert tab.value(shown) == takes
        assert ("takes no tools" in tab.value("document.body.innerText")) == (not takes)


WRONG = {
    "prompt": ({"model": "text", "prompt": "sort zebra ="}, "prompt", "zebra"),
    "rule": (
        {"model": "text", "rules.rule": "regex", "rules.rule-value": "("},
        "rule-value",
        "cannot be parsed",
    ),
    "no JSON": (
        {"model": "text", "rules.rule": "json_schema", "rules.rule-value": "{"},
        "rule-value",
        "no JSON",
    ),
    "top_p": ({"model": "text", "sampling.top_p": "7"}, "sampling-top_p", "at most 1"),
    "tools": (
        {"model": "chat", "rules.tools": '[{"type": "function", "function": {"name": "a b"}}]'},
        "tools",
        "a b",
    ),
    "schema of a function": (
        {"model": "chat", "rules.tools": json.dumps([{"type": "function", "function": {
            "name": "f", "parameters": {"type": "string"}}}])},
        "tools",
        "JSON schema of an object",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("width", [1280, 390])
def test_an_error_stands_at_its_field_which_has_the_focus(tab, address, case, width):
    call, field, words = WRONG[case]
    resized(tab, width)
    usual = {"modality": "text", "prompt": TASK, "sampler": "autoregressive", "seed": 0}
    go(tab, address, **usual | call)
    tab.click("#generate")
    tab.until(lambda: text(tab, ".fault") != "")
    assert words in text(tab, ".fault") and focused(tab) == field
    told = "document.activeElement.getAttribute('aria-describedby').split(' ').at(-1)"
    assert tab.value(told) == tab.value("document.querySelector('.fault').id")
    assert tab.value("document.activeElement.getAttribute('aria-invalid')") == "true"
    box = tab.value("(({top, bottom}) => [top, bottom])"
                    "(document.activeElement.getBoundingClientRect())")  # fmt: skip
    assert box[0] >= 0 and box[1] <= 900  # in sight
    assert text(tab, "#alert") == ""
    tab.write("1")
    assert (
        text(tab, ".fault") == "" and tab.value("document.querySelector('[aria-invalid]')") is None
    )


def test_an_error_of_a_parameter_stands_at_its_field(tab, address):
    go(tab, address, modality="text", model="text", prompt=TASK, sampler="speculative_jacobi")
    tab.value("document.querySelector('.sampler details').open = true")
    tab.value("document.querySelector('[data-param=window]').select()")
    tab.write("100000")
    tab.press("Tab")
    tab.until(lambda: "at most 1024" in text(tab, ".sampler .fault"))
    assert tab.value("document.activeElement.dataset.param") == "window"
    assert text(tab, "#alert") == ""
    tab.value("document.querySelector('[data-param=window]').select()")
    tab.write("4")
    assert text(tab, ".fault") == ""
    tab.press("Enter", CONTROL)
    finished(tab)


def test_what_is_about_no_field_stands_below_the_form(tab, address):
    go(tab, address, modality="text", model="text", prompt=TASK, sampler="autoregressive")
    tab.value("(() => { window.fetch = () => Promise.reject(new Error('no network')); })()")
    tab.click("#generate")
    tab.until(lambda: states(tab) == ["failed"])
    assert "no network" in text(tab, ".lane .state") and text(tab, ".fault") == ""


def test_rules_and_calls_fit_the_width_of_a_phone(tab, address):
    resized(tab, 390, 844)
    call = {"rules.tools": json.dumps(TOOLS), "rules.tool-choice": "required", "seed": 1}
    go(tab, address, modality="text", model="chat", prompt="hi", sampler="autoregressive", **call)
    tab.click("#generate")
    finished(tab)
    tab.value("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    tab.until(lambda: tab.value("document.querySelector('.copy pre') !== null"))
    assert tab.value("document.querySelectorAll('.calls li').length") >= 1
    assert too_wide(tab) == [] and tab.value("document.documentElement.scrollWidth") == 390
    tab.value("document.querySelector('.calls').style.width = '400px'")
    assert too_wide(tab)  # the control
