"""Chat templates that somebody made to harm: each renders, or is refused in one sentence, within
bounds of time and memory, and none of them runs anything."""

from __future__ import annotations

import time

import jinja2
import pytest
from bounded import bounded
from byte_folders import byte_tokenizer, causal
from foreign import TURNS, each, require_held, texts_of, with_canary

import gen
from gen.models.load import bounded_text, text_worker
from gen.models.load.chat import chat_text, render

GOOD = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
MEMORY = (
    "{{ 'a' * 20000000000 }}",
    "{{ 'a' * 200000000 * 1000 }}",
    "{{ ('a' * 1000) * 1000 * 1000 * 1000 }}",
    "{{ [0] * 10**10 }}",
    "{{ (range(99999)|list) * 100000 }}",
    "{{ '%1000000000d' % 3 }}",
    "{{ '%*d' % (1000000000, 3) }}",
    "{{ '{:1000000000}'.format(3) }}",
    "{{ '{0:>{1}}'.format('a', 1000000000) }}",
    "{{ 'a'|center(1000000000) }}",
    "{{ 'a'.ljust(1000000000) }}",
    "{{ 'a'.zfill(10**10) }}",
    "{{ 'a\\tb'.expandtabs(1000000000) }}",
    "{{ ('a' * 100000)|replace('a', 'b' * 100000) }}",
    "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "{{ ('a' * 100000).join(['b'] * 100000) }}",
    "{{ ('a\\n' * 1000000)|indent(100000) }}",
    "{{ 'a b ' * 100000000 | wordwrap(1) }}",
    "{{ messages|tojson(indent=1000000000) }}",
    "{{ messages|pprint * 10**9 }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ 10 ** 1000000000 }}",
    "{{ (2 ** 100000000)|string }}",
    "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}"
    "{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=[0]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}"
    "{% endfor %}",
    "{{ lipsum(n=100000) }}",
    "{{ dict.fromkeys(range(99999)|list * 10000) }}",
    "{{ ('a' * 10**8)|urlencode * 50 }}",
    "{{ ('<' * 10**8)|escape|length * 9 }}",
    "{{ 'a'.encode('utf-16') * 10**9 }}",
)
TIME = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}",
    "{% for i in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% set ns = namespace(n=0) %}{% for i in range(99999) %}{% for j in range(99999) %}"
    "{% set ns.n = ns.n + 1 %}{% endfor %}{% endfor %}",
    "{{ (range(99999)|list * 900)|sort|length }}",
    "{{ (range(99999)|list * 900)|unique|list|length }}",
    "{{ (range(99999)|map('string')|list)|join|length }}" * 300,
    "{% for i in range(99999) %}{% for m in messages %}{{ m|tojson }}{{ messages|tojson }}"
    "{% endfor %}{% endfor %}",
    "{{ ('a' * 30000000)|wordcount }}" * 50,
    "{{ (3 ** 3000000)|string|length }}",
    "{{ 7 ** 30000000 % 11 }}",
    "{{ ('a' * 100000000).count('aaaaaaaaaaaaaab') }}" * 90,
)
COMPILING = (
    "{" * 5000,
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ " + "[" * 100_000,
    "{{ " + "-" * 100_000 + "1 }}",
    "{{ " + "not " * 50_000 + "1 }}",
    "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "{% for a in [1] %}" * 2000,
    "{{ x" + ".a" * 50_000 + " }}",
    "{{ 1" + " + 1" * 50_000 + " }}",
    "{{ 'a'" + " ~ 'a'" * 100_000 + " }}",
    "{{ x" + "|upper" * 20_000 + " }}",
    "{# " * 100_000,
    "{% set " + "a, " * 50_000 + "b = 1 %}",
)
RUNNING = (
    "{{ cycler.__init__.__globals__.os.system('touch CANARY') }}",
    "{{ lipsum.__globals__['os'].popen('touch CANARY').read() }}",
    "{{ joiner.__init__.__globals__.os.system('touch CANARY') }}",
    "{{ namespace.__init__.__globals__.os.system('touch CANARY') }}",
    "{{ raise_exception.__globals__['__builtins__']['open']('CANARY', 'w') }}",
    "{{ strftime_now.__globals__['__builtins__']['open']('CANARY', 'w') }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__.__subclasses__()|list }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.cycler.__init__.__globals__.os.system('touch CANARY') }}",
    "{{ ''|attr('__class__')|attr('__mro__') }}",
    "{{ (cycler|attr('__init__')|attr('__globals__'))['os'].system('touch CANARY') }}",
    "{{ messages|map(attribute='__class__')|list }}",
    "{{ [lipsum]|map(attribute='__globals__.os')|list }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(lipsum) }}",
    "{{ '{x.__class__}'.format_map({'x': lipsum}) }}",
    "{% set f = '{0.__globals__}'.format %}{{ f(lipsum) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.system('touch CANARY') }}",
    "{% extends '/etc/passwd' %}",
    "{% set x = messages.append %}{{ x(1) }}",
    "{{ messages.clear() }}",
    "{{ messages[0].update(role=lipsum.__globals__) }}",
    "{{ dict.__class__.__base__.__subclasses__() }}",
    "{{ namespace(__class__=1) }}",
    "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
    "{{ loop.__init__ }}{% for i in [1] %}{{ loop.__init__.__globals__ }}{% endfor %}",
    "{{ caller.__globals__ }}",
    "{% call(x) lipsum() %}{{ x.__globals__ }}{% endcall %}",
    "{{ strftime_now('%Y' * 1000000)|length }}",
    "{{ raise_exception(lipsum) }}",
    "{{ raise_exception('a' * 1000000) }}",
)
ODD = (
    "",
    "\0",
    "{{ '\\ud800' }}",
    "{{ nothing }}",
    "{{ nothing.at.all }}",
    "{{ 1 / 0 }}",
    "{{ messages[99] }}",
    "{{ messages + 1 }}",
    "{{ 'a' in 1 }}",
    "{% endfor %}",
    "{% break %}",
    "{% generation %}a{% endgeneration %}",
    "{{ strftime_now(1) }}",
    "{{ tojson }}",
    "{% set messages = 1 %}{{ messages|tojson }}",
    "{{ lipsum|tojson }}",
    "{{ [lipsum, cycler]|tojson }}",
    "{% set l = [] %}{{ l|tojson }}",
)
KINDS = {"memory": MEMORY, "time": TIME, "compiling": COMPILING, "running": RUNNING, "odd": ODD}
ENDED = ("memory", "time")  # kinds that mostly end at a bound


def rendering(template: str):
    def call() -> str:
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = template
        return render(tokenizer, TURNS)

    return call


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_templates_are_held(kind, tmp_path):
    calls = {
        t[:60] + str(n): rendering(with_canary(t, tmp_path)) for n, t in enumerate(KINDS[kind])
    }
    ends = each(calls)
    for name, ended in ends.items():
        require_held(name, ended, tmp_path)
    if kind in ENDED:
        over = [ended for ended in ends.values() if "takes more than" in ended.said]
        assert len(over) > len(ends) // 2
    assert "refused" in {ended.how for ended in ends.values()}


def test_there_are_more_than_a_hundred_of_them():
    assert sum(map(len, KINDS.values())) > 100


def test_a_bound_names_the_template_and_a_good_one_renders_behind_it():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = GOOD
    assert render(tokenizer, TURNS) == tokenizer.apply_chat_template(TURNS, tokenize=False)
    tokenizer.chat_template = MEMORY[0]
    began = time.monotonic()
    with pytest.raises(gen.GenError, match=r"template of the model takes more than 256 MB"):
        render(tokenizer, TURNS)
    assert time.monotonic() - began < 10
    tokenizer.chat_template = GOOD
    assert chat_text(tokenizer, "a", "") == "<user>a"


def test_a_conversation_is_rendered_once(monkeypatch):
    tokenizer, calls = byte_tokenizer(), []
    tokenizer.chat_template = GOOD + "{# once #}"
    made = bounded_text.BoundedCalls.__call__

    def counted(self, function, data):
        calls.append(data)
        return made(self, function, data)

    monkeypatch.setattr(bounded_text.BoundedCalls, "__call__", counted)
    for _ in range(3):
        chat_text(tokenizer, "a", "")
    assert len(calls) == 3  # two forms of contents that the template may take, and the text
    chat_text(tokenizer, "b", "")
    assert len(calls) == 4


@pytest.mark.slow
def test_a_model_with_such_a_template_is_refused(tmp_path):
    folder = causal(tmp_path / "m")
    for template in (MEMORY[0], TIME[0], RUNNING[0]):
        (folder / "chat_template.jinja").write_text(with_canary(template, tmp_path))
        ended = bounded(texts_of(folder))
        require_held(template, ended, tmp_path)
        assert ended.how == "refused" and "the chat template of the model" in ended.said


# controls


@pytest.mark.slow
def test_control_without_bounds_templates_hang_and_take_all_memory(monkeypatch):
    def unbounded(self, function, data):
        return getattr(text_worker, function)(data)

    monkeypatch.setattr(bounded_text.BoundedCalls, "__call__", unbounded)
    ends = [bounded(rendering(t + " "), seconds=4).how for t in (MEMORY[0], TIME[0])]
    assert ends == ["memory", "hung"]


def test_control_a_template_outside_of_the_sandbox_is_seen(tmp_path):
    template = jinja2.Environment().from_string(with_canary(RUNNING[0], tmp_path))
    ended = bounded(template.render)
    with pytest.raises(AssertionError, match="was executed"):
        require_held("control", ended, tmp_path)
