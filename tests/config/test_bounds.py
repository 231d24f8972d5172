"""Bounds of what users write: aliases that multiply, endless nesting, huge grids and counts, texts
that no file can hold. Each ends as one error with the limit and the count, before memory is spent.
"""

from __future__ import annotations

import json
import time
import tracemalloc
from itertools import count
from pathlib import Path

import pytest

from gen.config import yaml_text
from gen.config.inputs import iter_rows
from gen.config.job import ITEMS, load_config, make_job
from gen.config.layers import read_yaml
from gen.config.sweep import MOST
from gen.config.yaml_text import ALIASED, DEEPEST, check_bounds, dump_yaml, load_yaml
from gen.core.errors import LONGEST, GenError, bad_value, cut_list, nearest, shown, unknown

RING = "a small blue ring in the centre"
BASE = {"modality": "image", "prompts": [RING], "sampler": "sjd"}
BOMB = "x0: &x0 [aaaa, aaaa]\n" + "".join(
    f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9)}]\n" for i in range(1, 12)
)


def refusal(**keys) -> str:
    with pytest.raises(GenError) as caught:
        make_job({**BASE, **keys}, where="test")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def file_refusal(path: Path, text: str, *overrides: str) -> str:
    path.write_text(text, encoding="utf-8")
    with pytest.raises(GenError) as caught:
        load_config(path, overrides)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
    return str(caught.value)


@pytest.mark.parametrize(
    "use",
    ["name: *x11", "prompts: *x11", "prompts: [{prompt: a, meta: *x11}]", "sweep: {seed: *x11}"],
)
def test_aliases_that_multiply_are_refused_with_the_count_before_values_are_built(tmp_path, use):
    started = time.perf_counter()
    tracemalloc.start()
    text = f"modality: image\nmodel_options:\n{_indented(BOMB)}{use}\n"
    message = file_refusal(tmp_path / "a.yaml", text)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "the aliases stand for" in message and f"at most {ALIASED:,}" in message
    assert "line 9" in message or "line 10" in message
    assert peak < 20e6 and time.perf_counter() - started < 5


def _indented(text: str) -> str:
    return "".join(f"  {line}\n" for line in text.splitlines())


def test_an_alias_of_one_long_text_counts_by_its_characters(tmp_path):
    text = f"a: &a {'y' * 100_000}\nb: [{', '.join(['*a'] * 200)}]\n"
    assert "the aliases stand for" in file_refusal(tmp_path / "a.yaml", text)


def test_aliases_within_the_limit_are_read(tmp_path):
    text = "modality: image\nsampling: &s {top_k: 5}\nprompts: &p [a]\njobs: [{sampling: *s}]\n"
    (tmp_path / "a.yaml").write_text(text)
    assert read_yaml(tmp_path / "a.yaml")["jobs"] == [{"sampling": {"top_k": 5}}]


def test_an_alias_inside_of_itself_is_refused(tmp_path):
    assert "stands inside of itself" in file_refusal(tmp_path / "a.yaml", "name: &a [*a]")


@pytest.mark.parametrize("opening", ["[", "{a: ", "- "])
def test_nesting_without_end_is_refused_with_the_limit(tmp_path, opening):
    message = file_refusal(tmp_path / "a.yaml", "prompts:\n  " + opening * 200_000)
    assert f"at most {DEEPEST}" in message and "line 2" in message
    message = file_refusal(tmp_path / "b.yaml", "modality: image\n", f"prompts={opening * 20_000}")
    assert f"at most {DEEPEST}" in message


def test_nesting_up_to_the_limit_is_read():
    assert load_yaml("[" * DEEPEST + "]" * DEEPEST)
    with pytest.raises(GenError, match="more than 100 deep"):
        load_yaml("[" * (DEEPEST + 1) + "]" * (DEEPEST + 1))


@pytest.mark.parametrize("depth", [101, 600, 900, 200_000])
def test_deep_rows_of_a_table_are_wrong_rows_and_the_others_are_read(tmp_path, depth):
    """600 and 900 are depths that the JSON reader takes and recursive code would not."""
    deep = f'{{"prompt": "a", "meta": {{"a": {"[" * depth}1{"]" * depth}}}}}'
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt": "b"}) + "\n" + deep + "\n")
    first, second = iter_rows(path)
    assert first.error is None and "100 deep" in second.error and len(second.error) < 500


def test_a_row_of_a_job_that_shares_its_parts_counts_all_of_them():
    shared: list = ["x"] * 10
    for _ in range(8):
        shared = [shared] * 10
    started = time.perf_counter()
    message = refusal(prompts=[{"prompt": RING, "meta": {"a": shared}}])
    assert "expected at most 1,000,000" in message and time.perf_counter() - started < 5
    check_bounds({"a": shared[0][0][0][0]}, "the row")  # control: 10,000 values are taken


def test_a_job_of_too_many_items_is_refused_with_the_count():
    started = time.perf_counter()
    assert "test asks for 100,000,000 items" in refusal(num_samples=100_000_000)
    row = {"prompt": RING, "num_samples": ITEMS}
    assert f"asks for {ITEMS + 3:,} items" in refusal(prompts=[row, RING], num_samples=3)
    jobs = [{"sampler": "sjd"}, {"sampler": "maskgit", "num_samples": ITEMS}]
    assert f"{ITEMS:,} of them in jobs.1" in refusal(jobs=jobs)
    assert time.perf_counter() - started < 5
    assert make_job({**BASE, "num_samples": ITEMS}, where="test")


def test_too_many_entries_are_refused_before_one_is_looked_at(tmp_path):
    text = "modality: image\njobs:\n" + "".join(f"- {{seed: {i}}}\n" for i in range(MOST + 1))
    message = file_refusal(tmp_path / "a.yaml", text)
    assert "has 10,001 entries; expected at most 10,000" in message
    with pytest.raises(GenError, match="modality is missing"):  # control: no more than are taken
        make_job({"jobs": [{"seed": i} for i in range(MOST)]}, where="test")


def test_a_long_file_is_read_with_notes(tmp_path, monkeypatch):
    (tmp_path / "long.txt").write_text("".join(f"{RING} {i}\n" for i in range(4000)))
    monkeypatch.setattr("gen.config.inputs.SteadyClock", lambda: count(0.0, 2.0).__next__)
    base, notes = {k: v for k, v in BASE.items() if k != "prompts"}, []
    tree = {**base, "prompts_file": str(tmp_path / "long.txt")}
    make_job(tree, where="test", note=notes.append)
    assert notes == ["reading long.txt: 2,000 rows"]  # 4 s after the begin
    assert make_job(tree, where="test")  # control: nobody listens


def test_grids_of_several_entries_count_together():
    jobs = [{"sweep": {"seed": list(range(6000))}}, {"sweep": {"seed": list(range(6000, 12_000))}}]
    message = refusal(jobs=jobs)
    assert "12,000 entries" in message and "at most 10,000" in message


@pytest.mark.parametrize("key", ["name", "out", "model", "device", "source", "mask", "prefix"])
def test_half_a_surrogate_pair_is_refused(key):
    assert key in refusal(**{key: "a\ud800"})


def test_a_path_that_no_system_takes_is_no_file():
    assert "is not a file" in refusal(source="a" * 5000, span="1:2")


def test_numbers_dates_and_spans_are_read_as_people_write_them():
    texts = ["1e-4", "20:50", "2026-01-01", "=", "010", "0x1f", "1_000", ".5", "yes", "~"]
    values = [0.0001, "20:50", "2026-01-01", "=", 8, 31, 1000, 0.5, True, None]
    assert [load_yaml(t) for t in texts] == values
    strings = [*texts, " a ", "a\nb", "\x85", "\u2028", "é", "<<", "x " * 300]
    assert load_yaml(dump_yaml(strings)) == strings
    plain = {"a": [1, 1.5, 1e-7, 1e22, float("inf"), None, True, {"b": []}]}
    assert load_yaml(dump_yaml(plain)) == plain


def test_no_tag_makes_an_object():
    with pytest.raises(GenError, match="python/object"):
        load_yaml("a: !!python/object/apply:os.system [true]")


def test_the_bounds_hold_without_the_parser_in_c(monkeypatch):
    import yaml

    class Plain(yaml.SafeLoader):
        yaml_implicit_resolvers = yaml_text._Loader.yaml_implicit_resolvers

    monkeypatch.setattr(yaml_text, "_Loader", Plain)
    for text in (BOMB, "[" * 200_000, "a: 1\na: 2"):
        with pytest.raises(GenError, match="line"):
            load_yaml(text)


# --- messages


def test_a_message_shows_200_characters_of_a_value_at_most():
    for value in ("x" * 100_000, ["y" * 1000] * 1000, {i: i for i in range(10**5)}, 10**5000):
        assert len(shown(value)) <= LONGEST + 3
        assert len(str(bad_value("prompt", value, "a text"))) < LONGEST + 60
    assert shown("short") == "'short'" and shown([1, "a"]) == "[1, 'a']"
    assert cut_list([str(i) for i in range(3000)])[-1] == "and 2,990 more"
    assert cut_list(["a"] * 10) == ["a"] * 10


def test_a_message_lists_40_names_at_most_and_says_where_all_are():
    message = str(unknown("config", "x", [f"image/{i}" for i in range(120)]))
    assert "and 80 more (gen ls configs)" in message and message.count("image/") == 40
    assert "Known" not in str(unknown("key", "x", []))


@pytest.mark.parametrize(
    "got, options, near",
    [
        ("smple", ["sample"], "sample"),
        ("sdj", ["sjd", "asd"], "sjd"),
        ("rai", ["ray", "local"], "ray"),
        ("jacobi", ["speculative_jacobi"], "speculative_jacobi"),
        ("image/sjdd", ["image/cspd", "image/sjd"], "image/sjd"),
        ("imgae/sjd", ["image/sjd"], "image/sjd"),
        ("hundred", ["three"], None),
        ("dances", ["waves"], None),
        ("big", ["ring"], None),
        ("nope", ["prophet"], None),
        ("streams", ["dream"], None),
        ("image/nope", ["image/cspd"], None),
    ],
)
def test_a_suggestion_is_a_likely_one(got, options, near):
    assert nearest(got, options) == near
