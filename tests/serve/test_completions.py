"""``/v1/completions`` over a published model: prompts as they are, echoed, and scored as evaluation
harnesses ask for it."""

from __future__ import annotations

import math
import types

import openai
import pytest
import torch
from chat_templates import SIZE, TEMPLATES, byte_tokenizer
from published import save_quietly
from served import serving
from transformers import LlamaConfig, LlamaForCausalLM

import gen
from gen.eval.lm_eval import HarnessModel
from gen.pipeline import scoring

TEXT = "h\u00e9llo w"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random Llama whose tokenizer has a chat template and begins texts with bos."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=SIZE, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=256, initializer_range=0.4,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    save_quietly(LlamaForCausalLM(config), folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATES["chatml"]
    save_quietly(tokenizer, folder)
    return folder


@pytest.fixture(scope="module")
def pipe(folder):
    return gen.load("text", model=folder, device="cpu")


@pytest.fixture(scope="module")
def server(pipe):
    with serving(models={"m": pipe, "zoo": gen.load("text", device="cpu")}) as made:
        yield made


@pytest.fixture(scope="module")
def client(server):
    return server.client()


def distributions(pipe, ids):
    """Log-probabilities of the network after every token, [T, V]."""
    network = pipe.modality.checkpoint.model
    return network(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)


def test_prompts_go_into_no_chat_template(client, pipe):
    how = {"model": "m", "max_tokens": 3, "seed": 1}
    tokenizer = pipe.modality.checkpoint.tokenizer
    for prompt in ("a", " a ", "<s>user:a", ""):
        made = client.completions.create(prompt=prompt, **how)
        ids = tokenizer("" if prompt.startswith("<s>") else prompt)["input_ids"]
        if prompt.startswith("<s>"):  # which is not put before it again
            ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        assert made.usage.prompt_tokens == len(ids)
        alone = pipe({"tokens": ids}, max_new_tokens=3, seed=1)
        assert made.choices[0].text == alone.texts[0]
    said = [{"role": "user", "content": "a"}]
    chat = client.chat.completions.create(messages=said, **how)
    assert chat.usage.prompt_tokens == 20  # the control: a chat goes into it


def test_prompts_are_texts_or_token_ids_or_lists_of_them(client, server):
    how = {"model": "m", "max_tokens": 4, "temperature": 0}
    one = [client.completions.create(prompt=p, **how).choices[0].text for p in ([40, 41], [42])]
    several = client.completions.create(prompt=[[40, 41], [42]], **how)
    assert [c.text for c in several.choices] == one
    assert several.usage.prompt_tokens == 3 and several.usage.completion_tokens == 8
    assert several.usage.prompt_tokens_details.cached_tokens == 0
    assert several.usage.completion_tokens_details.reasoning_tokens == 0
    for prompt in ([], [[]], [-1], [[40], [SIZE]], [[40], "a"], [True]):
        status, body, _ = server.ask("/v1/completions", {"model": "m", "prompt": prompt})
        assert status == 400 and body["error"]["param"].startswith("prompt"), body


def test_echo_scores_every_token_of_the_prompt(client, pipe):
    ids = pipe.modality.raw_ids(TEXT)
    expected = distributions(pipe, ids)
    how = {"model": "m", "prompt": TEXT, "logprobs": 2, "echo": True, "temperature": 0}
    choice = client.completions.create(max_tokens=0, **how).choices[0]
    found = choice.logprobs
    assert (choice.text, choice.finish_reason) == (TEXT, "length")
    assert found.tokens == ["<s>", "h", "bytes:\\xc3", "bytes:\\xa9", *"llo w"]
    assert found.text_offset == [0, 0, 1, 1, 2, 3, 4, 5, 6]
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    own = expected[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert found.token_logprobs[1:] == pytest.approx(own.tolist(), abs=1e-5)
    assert [max(t.values()) for t in found.top_logprobs[1:]] == pytest.approx(
        expected[:-1].amax(1).tolist(), abs=1e-5
    )
    shifted = expected[1:].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert found.token_logprobs[1:] != pytest.approx(shifted.tolist(), abs=0.1)  # the control
    longer = client.completions.create(max_tokens=2, **how).choices[0]
    alone = client.completions.create(model="m", prompt=TEXT, max_tokens=2, temperature=0)
    assert longer.text == TEXT + alone.choices[0].text
    assert longer.logprobs.token_logprobs[: len(ids)] == found.token_logprobs
    assert len(longer.logprobs.tokens) == len(ids) + 2
    assert longer.logprobs.token_logprobs[-2] == pytest.approx(float(expected[-1].max()), abs=1e-5)


@pytest.mark.parametrize("prompts", [["ab", "<s>c"], [[90, 91], [1, 40, 2, 41]]])
def test_echo_of_several_outputs_and_of_streams(client, pipe, prompts):
    how = {"model": "m", "prompt": prompts, "n": 2, "seed": 3, "max_tokens": 2}
    written = pipe.modality.checkpoint.tokenizer.decode
    given = [p if isinstance(p, str) else written(p, skip_special_tokens=True) for p in prompts]
    assert all(given) and given[0] != given[1]
    plain = [c.text for c in client.completions.create(**how).choices]
    made = client.completions.create(**how, echo=True, logprobs=0)
    assert [c.text for c in made.choices] == [given[i // 2] + plain[i] for i in range(4)]
    parts = list(client.completions.create(**how, echo=True, logprobs=0, stream=True))
    for i, choice in enumerate(made.choices):
        own = [p.choices[0] for p in parts if p.choices[0].index == i]
        assert "".join(p.text for p in own) == choice.text
        assert own[-1].logprobs == choice.logprobs and own[-1].finish_reason == "length"


def test_no_tokens_are_made_where_none_are_asked_for(client, server):
    before = server.figures().get('gen_tokens_total{model="m"}', 0.0)
    how = {"model": "m", "prompt": "ab", "max_tokens": 0}
    made = client.completions.create(**how, n=3)
    assert [(c.text, c.finish_reason) for c in made.choices] == [("", "length")] * 3
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (3, 0)
    assert server.figures().get('gen_tokens_total{model="m"}', 0.0) == before
    streamed = list(client.completions.create(**how, echo=True, stream=True))
    assert "".join(p.choices[0].text for p in streamed) == "ab"
    with pytest.raises(openai.BadRequestError, match="top_p") as caught:
        client.completions.create(**how, top_p=7)
    assert caught.value.param == "top_p"
    assert client.completions.create(**{**how, "model": "zoo", "prompt": "sort 2 1 ="}).usage


def test_a_harness_over_http_gets_the_figures_of_the_adapter(client, pipe, folder):
    """The requests of lm_eval's ``local-completions``, and how it reads their answers."""
    harness = HarnessModel(gen.load("text", model=folder, device="cpu", chat=False))
    pairs = [("ab", " cd"), ("The sky", " is"), ("x", "yz\u00e9"), ("a ", "b")]
    requests = [types.SimpleNamespace(args=pair) for pair in pairs]
    tokenizer = pipe.modality.checkpoint.tokenizer
    prompts, lengths = [], []
    for context, continuation in pairs:
        bare = context.rstrip()
        lengths.append(len(tokenizer(bare)["input_ids"]))
        prompts.append(tokenizer(context + continuation)["input_ids"])
    asked = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    answer = client.completions.create(model="m", prompt=prompts, **asked)
    found = []
    for choice, length in zip(answer.choices, lengths, strict=True):
        own = choice.logprobs.token_logprobs[length:-1]
        tops = choice.logprobs.top_logprobs[length:-1]
        is_greedy = all(x == max(t.values()) for x, t in zip(own, tops, strict=True))
        found.append((sum(own), is_greedy))
    assert found == harness.loglikelihood(requests)  # to the last bit
    limits = {"until": ["\n", "q"], "max_gen_toks": 9}
    texts = harness.generate_until(
        [types.SimpleNamespace(args=(context, limits)) for context, _ in pairs]
    )
    prompts = [tokenizer(context)["input_ids"] for context, _ in pairs]
    how = {"stop": ["\n", "q", "</s>"], "max_tokens": 9, "temperature": 0, "seed": 1234}
    answer = client.completions.create(model="m", prompt=prompts, **how)
    assert [c.text for c in answer.choices] == texts


def test_what_cannot_be_scored_is_refused(client, server):
    for how, param in (
        ({"model": "zoo", "prompt": "sort 2 1 =", "echo": True, "logprobs": 1}, "prompt"),
        ({"model": "zoo", "prompt": [1, 2], "echo": True, "logprobs": 1}, "prompt"),
        ({"model": "m", "prompt": "a" * 300, "echo": True, "logprobs": 1}, "prompt"),
        ({"model": "m", "prompt": "a", "echo": True, "extra_body": {"prefix": "b"}}, "prefix"),
        ({"model": "m", "prompt": "a", "suffix": "b"}, "suffix"),
        ({"model": "m", "prompt": "a", "max_tokens": -1}, "max_tokens"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(**how)
        assert caught.value.param == param and caught.value.code, how
    neutral = {"suffix": "", "best_of": 1, "echo": False, "logit_bias": {}, "stop": None}
    made = client.completions.create(model="m", prompt="a", max_tokens=1, **neutral)
    assert len(made.choices) == 1


def test_long_prompts_are_passed_in_parts_and_may_be_given_up(pipe, monkeypatch):
    ids = torch.randint(3, SIZE, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    items = pipe.plan([{"tokens": ids}])
    (whole,) = pipe.prompt_logprobs(items, top=3)
    monkeypatch.setattr(scoring, "MOST_POSITIONS", 33)
    calls = []
    (parts,) = pipe.prompt_logprobs(items, 3, lambda: calls.append(None))
    assert len(calls) == 7 and len(parts) == 200
    assert math.isnan(whole[0].logprob) and math.isnan(parts[0].logprob)
    for one, other in zip(whole[1:], parts[1:], strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert [t for t, _ in one.top] == [t for t, _ in other.top]

    class LeftError(Exception):
        pass

    def leave():
        raise LeftError

    with pytest.raises(LeftError):
        pipe.prompt_logprobs(items, 0, leave)
