"""Counts that no memory holds: every count of a sampler and of a call is refused with its bound
before anything is allocated, or does not matter."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch
from bounded import bounded
from foreign import SECONDS, require_held

import gen
from gen.core import counts
from gen.core.counts import BYTES, require_counts
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.core.token_space import TokenSpace
from gen.pipeline import arguments, prompted

HUGE = 10**9
CAPTION = "a small blue ring in the centre"
# what a sampler decodes here, the first that it can
TASKS = (
    ("text", None, "3 + 8"),
    ("text", "text-dag", "translate: seven two"),
    ("image", None, CAPTION),
    ("video", None, "a red square moves right"),
    ("world", None, "right down"),
)
OWN = {"atts": {"threshold": 0.5, "base": "autoregressive"}}
ELSEWHERE = {"masked_window"}  # needs a model that was trained for it
# they bound time, which the caller has, and are read up to what there is
CALLS = {
    "num_samples": "num_samples is", "n": "num_samples is", "num_return_sequences": "num_samples",
    "max_new_tokens": "max_new_tokens is", "min_new_tokens": "min_new_tokens is",
    "max_length": "", "logprobs": "", "batch_size": "", "top_k": "", "no_repeat_ngram_size": "",
}  # fmt: skip


def counts_of(cls) -> list[str]:
    return [f.name for f in dataclasses.fields(cls) if f.metadata.get("type") is int]


@pytest.fixture(scope="module")
def pipes():
    return [(gen.load(name, model=model), prompt) for name, model, prompt in TASKS]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(registry.table("sampler")) - ELSEWHERE))
def test_counts_of_samplers_are_held(pipes, name, tmp_path):
    spec = {"name": name, **OWN.get(name, {})}
    pipe = prompt = None
    for pipe, prompt in pipes:
        began = time.monotonic()
        try:
            pipe(prompt, sampler=spec, seed=0)
            seconds = SECONDS + 3 * (time.monotonic() - began)  # some have large models here
            break
        except gen.GenError:
            continue
    else:
        pytest.fail(f"nothing here decodes with {name}")
    for param in counts_of(registry.get("sampler", name)):
        for value in (HUGE, 2**62):
            given = {**spec, param: value}
            ended = bounded(lambda: pipe(prompt, sampler=given, seed=0) and 1, seconds)
            require_held((name, param, value), ended, tmp_path, seconds)
            assert "out of memory" not in ended.said, (name, param, ended)


@pytest.mark.slow
@pytest.mark.parametrize("param", CALLS)
def test_counts_of_calls_are_held(pipes, param, tmp_path):
    model = gen.load("text")
    said = CALLS[param]
    for value in (10**6, HUGE, 2**61):
        ended = bounded(lambda: model("3 + 8", seed=0, **{param: value}) and 1)
        if param == "n" and "and sampler" in ended.said:
            continue
        require_held((param, value), ended, tmp_path)
        assert "out of memory" not in ended.said
        assert not said or value < HUGE or "expected at most" in ended.said or said in ended.said


def declared() -> list[tuple[str, str]]:
    """List samplers and their parameters that say what one more takes."""
    return [
        (name, f.name)
        for name, cls in registry.table("sampler").items()
        for f in dataclasses.fields(cls)
        if f.metadata.get("each")
    ]


def space(length: int = 8, size: int = 100) -> TokenSpace:
    return TokenSpace((length,), size, torch.ones(length, size, dtype=torch.bool))


def test_a_count_is_refused_with_its_bound_from_the_first_one_that_does_not_fit():
    free = 2e6
    row = 4096 + 8 * 8 + 8 * 100
    bound = int(free / 2 / row)
    require_counts(resolve_sampler({"name": "beam_search", "num_beams": bound})[0], space(), free)
    with pytest.raises(gen.GenError, match=f"sampler.num_beams is {bound + 1}; expected at most"):
        sampler = resolve_sampler({"name": "beam_search", "num_beams": bound + 1})[0]
        require_counts(sampler, space(), free)


def test_counts_of_a_search_multiply_with_those_of_its_base():
    def spec(n: int) -> dict:
        return {"name": "best_of", "n": n, "base": {"name": "beam_search", "num_beams": 10}}

    free = 2e6
    require_counts(resolve_sampler(spec(10))[0], space(), free)
    with pytest.raises(gen.GenError, match=r"sampler.base.num_beams is 10; expected at most 2"):
        require_counts(resolve_sampler(spec(100))[0], space(), free)


def test_samplers_that_make_rows_say_so():
    found = declared()
    assert len(found) > 25
    kinds = {registry.get("sampler", n).__dataclass_fields__[p].metadata["each"] for n, p in found}
    assert kinds == set(BYTES)
    for name in ("num_beams", "particles", "num_drafts", "n", "nodes", "steps"):
        assert name in {param for _, param in found}


def test_memory_that_is_free_is_the_least_of_what_bounds_it():
    def limited() -> float:
        return counts.free_bytes()

    ended = bounded(limited, memory=1 << 30)
    assert ended.how == "returned" and 0 < int(ended.said) <= 1 << 30
    assert counts.free_bytes() > 1 << 30  # control


# control


@pytest.mark.slow
def test_control_without_the_rule_counts_take_all_memory(pipes, monkeypatch):
    monkeypatch.setattr(prompted, "require_counts", lambda *_: None)
    monkeypatch.setattr(arguments, "require_count", lambda *_: None)
    pipe, prompt = pipes[0]
    for spec in ({"name": "beam_search", "num_beams": HUGE}, {"name": "best_of", "n": HUGE}):
        ended = bounded(lambda: pipe(prompt, sampler=spec, seed=0), seconds=6)
        assert ended.how in ("hung", "memory", "died") or "out of memory" in ended.said, ended
    assert bounded(lambda: pipe(prompt, n=10**6, seed=0), seconds=6).how in ("hung", "memory")
