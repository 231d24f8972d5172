"""Pipelines of text answer the requests of the LM Evaluation Harness."""

from __future__ import annotations

import sys
import types

import families
import pytest
import torch

import gen
from gen.core.errors import GenError
from gen.eval.lm_eval import HarnessModel, harness_model


def requests(*arguments):
    return [types.SimpleNamespace(args=args) for args in arguments]


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    case = families.causal_lm(tmp_path_factory.mktemp("causal"))
    return gen.load("text", model=case.path, dtype="float64", max_new_tokens=6)


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    case = families.WRITERS["llada"](tmp_path_factory.mktemp("masked"))
    return gen.load("text", model=case.path, **case.options), case.prompts


def plain(pipe, ids):
    with torch.no_grad():
        logits = pipe.modality.checkpoint.model(input_ids=torch.tensor([ids])).logits[0]
    return logits.double().log_softmax(-1)


def test_log_likelihoods_are_those_of_the_network(causal):
    harness = HarnessModel(causal)
    tokenizer = causal.modality.checkpoint.tokenizer
    pairs = [("w1 w2", " w3 w4"), ("w1 w2 ", "w3 w4"), ("", "w5 w6"), ("w7", " w8")]
    found = harness.loglikelihood(requests(*pairs))
    for (context, continuation), (score, is_greedy) in zip(pairs, found, strict=True):
        ids = tokenizer(context + continuation)["input_ids"]
        count = len(tokenizer(continuation, add_special_tokens=False)["input_ids"])
        logp = plain(causal, ids)[-count - 1 : -1]
        expected = logp.gather(1, torch.tensor(ids[-count:])[:, None]).sum()
        assert score == pytest.approx(float(expected), abs=1e-9)
        assert is_greedy == bool((logp.argmax(1) == torch.tensor(ids[-count:])).all())
    assert found[0] == found[1]  # a space at the end of a context belongs to the continuation
    whole = harness.loglikelihood_rolling(requests(("w5 w6",)))
    assert whole == [pytest.approx(found[2][0], abs=1e-12)]


def test_greedy_continuations_are_greedy_by_the_log_likelihood(causal):
    harness = HarnessModel(causal)
    (text,) = harness.generate_until(requests(("w1 w2 w3", {"until": [], "max_gen_toks": 3})))
    assert len(text.split()) == 3
    ((_, is_greedy),) = harness.loglikelihood(requests(("w1 w2 w3", " " + text)))
    assert is_greedy
    other = " ".join(["w9", *text.split()[1:]])
    assert not harness.loglikelihood(requests(("w1 w2 w3", " " + other)))[0][1]  # the control


def test_stops_lengths_and_order_of_requests(causal):
    harness = HarnessModel(causal)
    whole = harness.generate_until(requests(("w1 w2", {"until": []}), ("w3", {"until": []})))
    words = whole[0].split()
    assert len(words) == 6
    mixed = harness.generate_until(
        requests(
            ("w1 w2", {"until": [words[2]]}),
            ("w3", {"until": []}),
            ("w1 w2", {"until": [], "max_gen_toks": 2}),
        )
    )
    assert mixed[0] == whole[0][: whole[0].index(words[2])]
    assert mixed[1] == whole[1]
    assert mixed[2].split() == words[:2]


def test_sampled_texts_follow_the_temperature(causal):
    harness = HarnessModel(causal)
    hot = {"until": [], "do_sample": True, "temperature": 5.0}
    contexts = [(f"w{i}", hot) for i in range(4, 10)]
    assert harness.generate_until(requests(*contexts)) == harness.generate_until(
        requests(*contexts)
    )
    cold = harness.generate_until(requests(*((c, {"until": []}) for c, _ in contexts)))
    assert harness.generate_until(requests(*contexts)) != cold
    with pytest.raises(GenError, match="a task sets num_beams; expected until, stop"):
        harness.generate_until(requests(("w1", {"num_beams": 4})))


def test_a_task_may_ask_for_more_tokens_and_rows_end_at_stop_texts(causal, masked, monkeypatch):
    harness, found = HarnessModel(causal), []
    run = type(causal).__call__

    def watched(self, *args, **options):
        found.append(run(self, *args, **options))
        return found[-1]

    monkeypatch.setattr(type(causal), "__call__", watched)
    (long,) = harness.generate_until(requests(("w1", {"max_gen_toks": 9})))
    words = long.split()
    assert len(words) == 9  # the model was loaded with max_new_tokens=6
    limits = {"max_gen_toks": 9, "until": [words[3]]}
    (text,) = harness.generate_until(requests(("w1", limits)))
    first = words.index(words[3])
    assert text.split() == words[:first]
    assert found[-1].stats[0].nfe == first + 1  # with the token that completes the stop
    monkeypatch.setattr(harness, "_ends_at_stops", False)  # control: cut, at the old price
    assert harness.generate_until(requests(("w1", limits))) == [text]
    assert found[-1].stats[0].nfe == 9
    with pytest.raises(GenError, match="asks for 99 new tokens; .* max_new_tokens="):
        HarnessModel(masked[0]).generate_until(requests((masked[1][0], {"max_gen_toks": 99})))


def test_masked_models_generate_and_refuse_log_likelihoods(masked):
    pipe, prompts = masked
    harness = HarnessModel(pipe)
    texts = harness.generate_until(requests((prompts[0], {"until": []})))
    ids = pipe.modality.raw_ids(prompts[0])
    expected = pipe([{"tokens": ids}], "maskgit", temperature=0.0)
    assert texts == expected.media
    with pytest.raises(GenError, match="masked one, which has no log-likelihood"):
        harness.loglikelihood(requests((prompts[0], " w2")))


def test_the_harness_takes_the_model_as_its_own(causal, monkeypatch):
    """A scripted harness: its base class, and a loop over requests."""
    package, api, model = (types.ModuleType(n) for n in ("lm_eval", "lm_eval.api", "model"))

    class LM:
        def __init__(self):
            self.cache_hook = None

    model.LM = LM
    for name, module in (("", package), (".api", api), (".api.model", model)):
        monkeypatch.setitem(sys.modules, f"lm_eval{name}", module)
    made = harness_model(causal, batch_size=2)
    assert isinstance(made, LM) and made.cache_hook is None and made.batch == 2
    assert made.loglikelihood(requests(("w1", " w2"))) == HarnessModel(causal).loglikelihood(
        requests(("w1", " w2"))
    )


def test_without_lm_eval_and_with_other_pipelines_one_error_each(causal, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(GenError, match=r'pip install "gen-toolkit\[lm-eval\]"'):
        harness_model(causal)
    with pytest.raises(GenError, match="expected a published text model"):
        HarnessModel(gen.load("text"))
    monkeypatch.setattr(causal.modality.checkpoint, "chat", True)
    with pytest.raises(GenError, match="loaded with chat=False"):
        HarnessModel(causal)
