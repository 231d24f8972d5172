"""Adapters of a served model are further models, whose requests share its batches."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import openai
import pytest
import torch
from families import WRITERS
from peft_folders import loaded, write_adapters
from served import serving

from gen.constraints.budget import Limits
from gen.core.errors import GenError
from gen.engine.engine import Engine
from gen.serve.run import make_engine

ASKED = [("tiny", "w1 w2"), ("tiny:poet", "w1 w2"), ("tiny:short", "w1 w2"), ("tiny:poet", "w9")]


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    (root / "model").mkdir()
    made = WRITERS["causal_lm"](root / "model")
    return made, {k: str(v) for k, v in write_adapters(made, root, poet=3, short=5).items()}


@pytest.fixture(scope="module")
def pipes(case):
    """Pipelines by the id of a served model, each of which has its adapter alone."""
    made, folders = case
    alone = {f"tiny:{name}": loaded(made, adapters=folder) for name, folder in folders.items()}
    return {"tiny": loaded(made), **alone}


def test_rows_of_one_batch_have_the_tokens_of_their_adapter_alone(case, pipes):
    made, folders = case
    engine = Engine({"tiny": loaded(made, adapters=folders)}, max_rows=3)
    try:
        for sampler in ("autoregressive", "speculative_jacobi"):
            tickets = [
                engine.submit(model, prompt, sampler, seed=n % 3, temperature=1.0)
                for n, (model, prompt) in enumerate(ASKED * 3)
            ]
            found = [ticket.result(timeout=120).tokens for ticket in tickets]
            for n, (model, prompt) in enumerate(ASKED * 3):
                want = pipes[model](prompt, sampler, seed=n % 3, temperature=1.0).tokens
                assert torch.equal(found[n], want), (sampler, model, prompt)
            assert not torch.equal(found[0], found[5])  # control: adapters do something
        assert engine.stats.nfe["tiny"] > engine.stats.steps["tiny"]  # rows did share passes
        assert set(engine.stats.nfe) == {"tiny"}
        with pytest.raises(GenError, match="which names an adapter; expected the model 'tiny'"):
            engine.submit("tiny:poet", "w1", adapter="short")
        by_word = engine.submit("tiny", "w1 w2", seed=1, adapter="poet").result(timeout=120)
        by_model = engine.submit("tiny:poet", "w1 w2", seed=1).result(timeout=120)
        assert torch.equal(by_word.tokens, by_model.tokens)
    finally:
        engine.close()


def test_clients_name_an_adapter_as_a_model(case, pipes):
    made, folders = case
    with serving(models={"tiny": loaded(made, adapters=folders)}) as server:
        client = server.client()
        parents = {m.id: (m.model_extra or {}).get("parent") for m in client.models.list()}
        assert parents == {"tiny": None, "tiny:poet": "tiny", "tiny:short": "tiny"}
        assert client.models.retrieve("tiny:poet").gen["modality"] == "text"

        def ask(n):
            model, prompt = ASKED[n % len(ASKED)]
            return client.completions.create(model=model, prompt=prompt, seed=n, max_tokens=4)

        with ThreadPoolExecutor(4) as threads:
            answers = list(threads.map(ask, range(8)))
        for n, answer in enumerate(answers):
            model, prompt = ASKED[n % len(ASKED)]
            want = pipes[model](prompt, seed=n, max_new_tokens=4, temperature=1.0)
            assert answer.choices[0].text == want.media[0] and answer.model == model
        how = {"prompt": "w1 w2 w3", "max_tokens": 0, "echo": True, "logprobs": 0}
        scores = {}
        for model, pipe in pipes.items():  # prompts are scored by the adapter too
            made = client.completions.create(model=model, **how).choices[0]
            items = pipe.plan([{"tokens": pipe.modality.raw_ids("w1 w2 w3")}])
            (alone,) = pipe.prompt_logprobs(items)
            scores[model] = [token.logprob for token in alone[1:]]
            assert made.logprobs.token_logprobs[1:] == pytest.approx(scores[model], abs=1e-5)
        assert scores["tiny"] != pytest.approx(scores["tiny:poet"], abs=1e-3)  # the control
        with pytest.raises(openai.NotFoundError, match="Did you mean 'tiny:poet'"):
            client.completions.create(model="tiny:pout", prompt="w1")


def args_of(*models, options=(), **more):
    usual = {"device": "cpu", "dtype": None, "max_rows": None, "max_waiting": None}
    usual["limits"] = Limits()
    return SimpleNamespace(model=list(models), model_option=list(options), **{**usual, **more})


def test_options_of_the_command_reach_the_model_that_they_name(case, tmp_path):
    made, folders = case
    asked = [f"mine:adapters.{name}={folder}" for name, folder in folders.items()]
    asked += ["mine:max_new_tokens=5"]
    engine = make_engine(args_of(f"mine=text:{made.path}", "plain=text:text-causal", options=asked))
    try:
        assert [m.id for m in engine.models.list()] == ["mine", "mine:poet", "mine:short", "plain"]
        assert engine.models.pipeline("mine:poet") is engine.models.pipeline("mine")
        assert engine.models.pipeline("plain").model_options == {}
    finally:
        engine.close()
    for option, said in (
        ("mine", "expected ID:KEY=VALUE"),
        ("mien:revision=v1", "Did you mean 'mine'"),
        ("mine:revision=v1", "expected no revision"),
        ("mine:revison=v1", "revison"),
        ("mine:token=hf_secret", "expected true, false or none"),
        ("mine:dtype=float16", "expected dtype outside"),
    ):
        with pytest.raises(GenError) as error:
            make_engine(args_of(f"mine=text:{made.path}", options=[option]))
        assert said in str(error.value) and "hf_secret" not in str(error.value)


def test_a_saved_pipeline_is_served_in_its_dtype(case, tmp_path):
    pipe = loaded(case[0])
    folder = pipe.save_pretrained(tmp_path / "saved")
    engine = make_engine(args_of(f"mine=text:{folder}"))
    try:
        made = engine.submit("mine", "w1 w2", seed=2).result(timeout=60)
        assert engine.models.pipeline("mine").dtype == torch.float64
        assert torch.equal(made.tokens, pipe("w1 w2", seed=2).tokens)
    finally:
        engine.close()
