"""The embedded models that were trained to be decoded in few passes: their figures on held-out
tasks, in a quick form."""

from __future__ import annotations

import statistics

import pytest

import gen
from gen.modalities.text import tasks as text_tasks

COUNT = 100


@pytest.fixture(scope="module")
def tasks():
    return text_tasks.tasks(COUNT, 7, held=True)


def figures(model, sampler, tasks, **sampling):
    out = gen.load("text", model)([str(t) for t in tasks], sampler, seed=0, **sampling)
    right = [text_tasks.check(t, m).passed for t, m in zip(tasks, out.media, strict=True)]
    return statistics.mean(right), statistics.mean(s.nfe for s in out.stats)


def test_the_distilled_model_needs_fewer_passes_for_the_same_answers(tasks):
    plain, passes = figures("text-masked", "fast_dllm", tasks)
    right, fewer = figures("text-masked-fast", "dparallel", tasks)
    assert right >= plain - 0.03 and passes / fewer > 1.4


def test_the_distilled_model_suits_editing(tasks):
    assert figures("text-masked-fast", "llada2", tasks)[0] >= 0.93
    assert figures("text-masked", "llada2", tasks)[0] < 0.5, "the control, trained on masks alone"


def test_the_tuned_attention_makes_two_tokens_a_pass(tasks):
    plain, passes = figures(None, "autoregressive", tasks)
    right, fewer = figures(None, "flexdraft", tasks)
    assert right >= plain - 0.03 and passes / fewer > 2


def test_outputs_of_the_shipped_weights(tasks):
    prompts = ["sort 3 1 2 =", "close ( [ ] { =", "3 + 8 + 5 ="]
    wanted = ["1 2 3", "} )", "11 + 5 = 16"]
    assert gen.load("text", "text-masked-fast")(prompts, "llada2", seed=0).media == wanted
    exact = {"name": "speculative", "drafter": "flexdraft", "verifier": "follow"}
    plain = gen.load("text")(prompts, "autoregressive", seed=0)
    assert gen.load("text")(prompts, exact, seed=0).media == plain.media
