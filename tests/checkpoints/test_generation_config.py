"""What generation_config.json says is the default of a pipeline, and what it makes equals
`generate`."""

from __future__ import annotations

import json
import shutil
import warnings

import pytest
import torch
from language_models import (
    ARCHITECTURES,
    EOS,
    NAMES,
    byte_tokenizer,
    generate,
    reference,
    save,
    states,
)
from same_tokens import SPECS, drafted_by

import gen
from gen.__main__ import main
from gen.config.job import make_job
from gen.contracts.checkpoint import CheckpointFiles
from gen.core.errors import GenError
from gen.core.sampling_params import SamplingParams
from gen.modalities.checkpoints.options import stated_generation
from gen.models.load.generation_config import sampling_of

PROMPTS = ["hello", "what is it", "1 2 3 4"]
PROMPT, LENGTH = PROMPTS[0], 24


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save(tmp_path_factory.mktemp("stated") / "llama", seed=2)


@pytest.fixture
def copied(llama, tmp_path):
    return shutil.copytree(llama, tmp_path / "copy")


def load(folder, **options):
    return gen.load("text", model=folder, device="cpu", **options)


def tokens_of(out, i=0) -> list[int]:
    return out.tokens[i, : out.stats[i].tokens].tolist()


# --- what a file states

STATED = {
    "temperature": ({"do_sample": True, "temperature": 0.3}, {"temperature": 0.3}),
    "a temperature without do_sample": ({"temperature": 0.3}, {"temperature": 0.3}),
    "filters": (
        {"do_sample": True, "top_k": 5, "top_p": 0.8, "min_p": 0.1},
        {"temperature": 1.0, "top_k": 5, "top_p": 0.8, "min_p": 0.1},
    ),
    "greedy": ({"do_sample": False}, {"temperature": 0.0}),
    "greedy, whatever the temperature": (
        {"do_sample": False, "temperature": 0.6, "top_p": 0.9},
        {"temperature": 0.0, "top_p": 0.9},
    ),
    "a penalty": ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    "n-grams": ({"no_repeat_ngram_size": 3}, {"no_repeat_ngram_size": 3}),
    "bad words": ({"bad_words_ids": [[5], [6, 7]]}, {"bad_words": [[5], [6, 7]]}),
    "suppressed tokens": ({"suppress_tokens": [8, 9]}, {"bad_words": [[8], [9]]}),
    "both": (
        {"bad_words_ids": [[5]], "suppress_tokens": [8]}, {"bad_words": [[5], [8]]}
    ),
    "an end is no bad word": ({"bad_words_ids": [[EOS], [5]]}, {"bad_words": [[5]]}),
    "biases": ({"sequence_bias": [[[5], -2.0]]}, {"logit_bias": {5: -2.0}}),
    "lengths": (
        {"max_new_tokens": 30, "min_new_tokens": 4},
        {"max_new_tokens": 30, "min_new_tokens": 4},
    ),
    "a length with the prompt": ({"max_length": 99}, {"max_length": 99}),
    "half of the positions at most": ({"max_new_tokens": 9000}, {"max_new_tokens": 128}),
    "stop texts": ({"stop_strings": ["END", "\n\n"]}, {"stop": ["END", "\n\n"]}),
    "one stop text": ({"stop_strings": "END"}, {"stop": "END"}),
    "nothing": ({}, {"temperature": 1.0}),
    "values that switch off": (
        {"top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0},
        {"top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STATED)
def test_stated_settings_are_the_defaults_of_every_door(copied, case):
    said, expected = STATED[case]
    states(copied, **said)
    expected = {"temperature": 1.0, **expected}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe = load(copied)
    assert pipe.config["sampling"] == expected
    made = pipe.request(PROMPT, "autoregressive", None, 0, {}).sampling
    assert made == SamplingParams(**expected)
    tree = {"modality": "text", "model": str(copied), "prompts": [PROMPT]}
    entry = make_job({**tree, "sampler": "autoregressive"}, where="a test").entries[0]
    assert SamplingParams(**json.loads(json.dumps(entry.sampling))) == made


def test_a_call_and_one_word_come_before_the_file(copied):
    states(copied, do_sample=True, temperature=0.3, top_k=5, max_new_tokens=9)
    pipe = load(copied)
    made = pipe.request(PROMPT, "autoregressive", None, 0, {"temperature": 0.7, "top_k": 0})
    assert (made.sampling.temperature, made.sampling.top_k) == (0.7, 0)
    assert pipe(PROMPT, "autoregressive", seed=0).tokens.shape[1] == 9
    assert pipe(PROMPT, "autoregressive", seed=0, max_new_tokens=4).tokens.shape[1] == 4
    assert load(copied, max_new_tokens=7).config["sampling"].get("max_new_tokens") is None
    off = load(copied, generation_config=False)
    assert off.config["sampling"] == {"temperature": 1.0}
    assert off.model_options["generation_config"] is False
    with pytest.raises(GenError, match="generation_config.*expected true or false"):
        load(copied, generation_config="no")


def test_ends_of_the_file_count_without_its_settings(copied):
    states(copied, eos_token_id=[EOS, 9], temperature=0.2)
    assert load(copied, generation_config=False).bound(str(copied))[1].space.ends == (EOS, 9)


def test_fields_of_config_json_are_no_settings(copied):
    states(copied, "config.json", temperature=0.2, top_k=3, repetition_penalty=1.4)
    assert load(copied).config["sampling"] == {"temperature": 1.0}


def test_the_command_line_and_the_server_take_them(copied, tmp_path):
    from served import serving

    states(copied, do_sample=False, max_new_tokens=6, repetition_penalty=1.4)
    expected = generate(reference(copied), PROMPT)
    text = byte_tokenizer().decode(expected, skip_special_tokens=True)
    out = tmp_path / "out"
    told = ["sample", "text", PROMPT, "--model", str(copied), "--sampler", "autoregressive"]
    assert main([*told, "--device", "cpu", "--out", str(out), "tokens=true"]) == 0
    assert next(out.glob("*.txt")).read_text() == text + "\n"
    with serving(models={"m": load(copied)}) as server:
        body = {"model": "m", "prompt": PROMPT, "sampler": "autoregressive"}
        _, answer, _ = server.ask("/v1/completions", body)
        assert answer["choices"][0]["text"] == text
        assert answer["usage"]["completion_tokens"] == len(expected)
        _, other, _ = server.ask("/v1/completions", {**body, "repetition_penalty": 1.0})
        assert other["choices"][0]["text"] != text


# --- what gen lacks, and what is wrong

MISSING = {
    "typical_p = 0.9": {"typical_p": 0.9},
    "num_beams = 4": {"num_beams": 4},
    "epsilon_cutoff = 0.01": {"epsilon_cutoff": 0.01},
    "eta_cutoff = 0.01": {"eta_cutoff": 0.01},
    "top_h = 0.4": {"top_h": 0.4},
    "forced_eos_token_id = 2": {"forced_eos_token_id": 2},
    "forced_bos_token_id = 1": {"forced_bos_token_id": 1},
    "min_length = 9": {"min_length": 9},
    "penalty_alpha = 0.6": {"penalty_alpha": 0.6},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": [3, 1.2]},
    "sequence_bias = 'of several tokens'": {"sequence_bias": [[[5, 6], -2.0]]},
    "max_time = 3.0": {"max_time": 3.0},
    "num_return_sequences = 3": {"num_return_sequences": 3},
    "watermarking_config": {"watermarking_config": {"bias": 2.0}},
    "chat_format = 'own'": {"chat_format": "own"},
}


@pytest.mark.parametrize("message", MISSING)
def test_a_setting_that_gen_lacks_is_named(copied, message):
    path = states(copied) / "generation_config.json"
    said = {**json.loads(path.read_text()), **MISSING[message]}
    path.write_text(json.dumps(said))
    files = CheckpointFiles.find(copied)
    with pytest.warns(UserWarning, match=f"settings that gen lacks.*{message}"):
        assert stated_generation(files, True) == said
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert stated_generation(files, False) == {}


def test_the_warning_comes_with_the_pipeline(copied):
    states(copied, typical_p=0.9)
    with pytest.warns(UserWarning, match="typical_p = 0.9.*generation_config=False"):
        load(copied)


def test_settings_that_change_no_token_are_not_named(copied):
    quiet = {
        "use_cache": False, "cache_implementation": "hybrid", "length_penalty": 2.0,
        "num_beams": 1, "typical_p": 1.0, "renormalize_logits": True,
        "output_scores": True, "image_token_id": 7, "num_return_sequences": 1,
        "epsilon_cutoff": 0.0, "forced_eos_token_id": None, "return_dict_in_generate": True,
    }  # fmt: skip
    states(copied, **quiet)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(copied).config["sampling"] == {"temperature": 1.0}


WRONG = {
    "temperature is -1": {"temperature": -1},
    "temperature is '0.3'": {"temperature": "0.3"},
    "top_k is -1": {"top_k": -1},
    "top_k is 2.5": {"top_k": 2.5},
    "top_p is 1.5": {"top_p": 1.5},
    "top_p is 0": {"top_p": 0},
    "min_p is 2": {"min_p": 2},
    "repetition_penalty is 0": {"repetition_penalty": 0},
    "no_repeat_ngram_size is -2": {"no_repeat_ngram_size": -2},
    "max_new_tokens is 0": {"max_new_tokens": 0},
    "max_length is 0": {"max_length": 0},
    "min_new_tokens is -3": {"min_new_tokens": -3},
    "do_sample.* is 'yes'": {"do_sample": "yes"},
    "bad_words_ids.* is 5": {"bad_words_ids": 5},
    r"bad_words_ids.* is \[5\]": {"bad_words_ids": [5]},
    r"suppress_tokens.* is \[-1\]": {"suppress_tokens": [-1]},
    "stop_strings is 3": {"stop_strings": 3},
    "sequence_bias.* is": {"sequence_bias": [[5, -2.0]]},
}


@pytest.mark.parametrize("message", WRONG)
def test_an_invalid_value_is_an_error_with_file_and_field(message):
    with pytest.raises(GenError, match=message) as error:
        sampling_of(WRONG[message], "mine")
    assert "generation_config.json of model mine" in str(error.value)


def test_loading_refuses_an_invalid_value_before_any_weights(copied):
    states(copied, top_p=7)
    (copied / "model.safetensors").unlink()
    with pytest.raises(GenError, match="generation_config.json of model .*top_p is 7"):
        load(copied)


# --- tokens equal those of ``generate``


@pytest.mark.parametrize("sampler", ["autoregressive", "speculative_jacobi", "prompt_lookup"])
def test_a_length_counts_the_prompt(copied, sampler):
    states(copied, do_sample=False, max_length=18)
    model, pipe = reference(copied), load(copied)
    expected = [generate(model, p) for p in PROMPTS]
    assert len({len(row) for row in expected}) == 3
    out = pipe(PROMPTS, sampler)
    assert [tokens_of(out, i) for i in range(3)] == expected
    longer = [generate(model, p, max_new_tokens=LENGTH) for p in PROMPTS]
    out = pipe(PROMPTS, sampler, max_new_tokens=LENGTH)
    assert [tokens_of(out, i) for i in range(3)] == longer
    with pytest.raises(GenError, match="max_length is 18 and a prompt has .* tokens"):
        pipe("a prompt that is longer than that", sampler)


def test_the_server_says_that_a_length_was_reached(copied):
    from served import serving

    states(copied, do_sample=False, max_length=13)
    with serving(models={"m": load(copied)}) as server:
        body = {"model": "m", "prompt": PROMPTS[:2], "sampler": "autoregressive"}
        _, answer, _ = server.ask("/v1/completions", body)
        assert [c["finish_reason"] for c in answer["choices"]] == ["length", "length"]
        _, answer, _ = server.ask("/v1/completions", {**body, "max_length": 12})
        assert answer["usage"]["completion_tokens"] == sum(12 - 1 - len(p) for p in PROMPTS[:2])


GREEDY = {
    "plain": {},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "a reward": {"repetition_penalty": 0.8},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": "often"},
    "bad words of two tokens": {"bad_words_ids": "pairs"},
    "suppress_tokens": {"suppress_tokens": "often"},
    "begin_suppress_tokens": {"begin_suppress_tokens": "first"},
    "sequence_bias": {"sequence_bias": "biases"},
    "min_new_tokens": {"min_new_tokens": 15},
    "max_new_tokens": {"max_new_tokens": 7},
    "all": {
        "repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "bad_words_ids": "often",
        "begin_suppress_tokens": "first", "min_new_tokens": 5,
    },
}  # fmt: skip


BLIND = ("follow-superposed",)  # refuses settings that read the tokens before


def settings_of(case: str, free: list[list[int]]) -> dict:
    """Settings of a case, about tokens that a model likes."""
    every = [t for row in free for t in row if t != EOS]
    often = sorted(set(every), key=lambda t: (-every.count(t), t))[:3]
    made = {
        "often": [[t] for t in often],
        "pairs": [list(row[2:4]) for row in free if len(row) > 3],
        "first": [row[0] for row in free if row[0] != EOS],
        "biases": [[[t], -3.0] for t in often],
    }
    found = {k: made.get(v, v) if isinstance(v, str) else v for k, v in GREEDY[case].items()}
    if case == "suppress_tokens":
        found["suppress_tokens"] = often
    return found


def compare(folder, samplers, case, *, prompts=PROMPTS):
    model = reference(folder)
    free = [generate(model, p, do_sample=False, max_new_tokens=LENGTH) for p in prompts]
    states(folder, **{"do_sample": False, "max_new_tokens": LENGTH, **settings_of(case, free)})
    model = reference(folder)
    expected = [generate(model, p) for p in prompts]
    pipe, other = load(folder), {}
    for sampler in samplers:
        out = pipe(prompts, sampler, progress=False)
        found = [tokens_of(out, i) for i in range(len(prompts))]
        if found != expected:
            other[str(sampler)] = found
    assert not other, (expected, other)
    return free, expected


@pytest.mark.parametrize("case", GREEDY)
def test_greedy_answers_are_those_of_generate(copied, case):
    samplers = ("autoregressive", "speculative_jacobi", "prompt_lookup")
    free, expected = compare(copied, samplers, case)
    assert (free == expected) == (case in ("plain", "min_new_tokens"))


@pytest.mark.slow
@pytest.mark.parametrize("case", GREEDY)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_answers_of_architectures_are_those_of_generate(name, case, tmp_path):
    samplers = ("autoregressive", "speculative_jacobi", "suffix")
    compare(save(tmp_path / name, name, seed=1), samplers, case)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_answers_of_every_sampler_are_those_of_generate(name, tmp_path):
    """Each sampler meets all settings at once, and each setting some of the samplers."""
    draft = str(save(tmp_path / "draft", name, seed=1))
    every = [drafted_by(spec, draft) for key, spec in SPECS.items() if key not in BLIND]
    turn = list(ARCHITECTURES).index(name)
    for n, case in enumerate(GREEDY):
        some = every if case == "all" else every[(n + turn) % len(GREEDY) :: len(GREEDY)]
        folder = save(tmp_path / str(n), name, seed=2)
        compare(folder, some, case)
        if case == "all":
            pipe = load(folder)
            for key in BLIND:
                with pytest.raises(GenError, match="sampling parameters that do not look back"):
                    pipe(PROMPTS, drafted_by(SPECS[key], draft))


@pytest.mark.parametrize(
    "said",
    [
        {"temperature": 0.3},
        {"temperature": 1.7},
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"temperature": 0.7, "top_k": 8, "top_p": 0.8, "repetition_penalty": 1.3},
        {"temperature": 1.5, "top_k": 20, "min_p": 0.05, "no_repeat_ngram_size": 2},
    ],
)
def test_draws_come_from_the_distribution_of_generate(copied, said):
    states(copied, **{"do_sample": True, "top_k": 0, "max_new_tokens": 1, **said})
    model, pipe = reference(copied), load(copied)
    ids = byte_tokenizer()(PROMPT, return_tensors="pt").input_ids
    made = model.generate(ids, output_scores=True, return_dict_in_generate=True, pad_token_id=0)
    expected = made.scores[0][0].double().softmax(-1)
    items = pipe.plan([PROMPT])
    request = pipe.request(PROMPT, "autoregressive", None, 0, {})
    prepared = pipe.prepare(request)
    start = torch.zeros(len(items), 1, dtype=torch.long)
    found = prepared.target.predict(start, start).logprobs[0, 0].double().exp()
    assert len(NAMES) <= len(found) == len(expected)
    assert (found - expected).abs().max() < 1e-5
