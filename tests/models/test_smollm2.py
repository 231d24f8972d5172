"""A published model with its published weights: SmolLM2-135M-Instruct, 4.5 bits a weight."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from served import serving
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import gen
from gen.__main__ import main as gen_main
from gen.cli.parser import parse
from gen.models.load.gguf import GgufFile
from gen.models.load.locate import packaged_file

pytestmark = pytest.mark.slow
pytest.importorskip("gguf", reason="make test-quantization has gguf")
try:
    FILE = packaged_file("smollm2")
except gen.GenError as error:
    pytest.skip(f"make test-quantization has it: {error}", allow_module_level=True)

README = Path(__file__).parents[2] / "README.md"
FRANCE = "What is the capital of France?"
QUESTIONS = [FRANCE, "Name a colour.", "Write two sentences about rain."]
ANSWER = "The capital of France is Paris."
HOW = {"sampler": "autoregressive", "seed": 0, "temperature": 0}


@pytest.fixture(scope="module")
def pipe():
    return gen.load("text", model="smollm2", dtype="float32", max_new_tokens=24)


@pytest.fixture(scope="module")
def answers(pipe):
    return pipe(QUESTIONS, **HOW)


def greedy(model, prompt: list[int]) -> list[int]:
    """Answer of transformers, without the prompt."""
    found = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=24)
    return found[0, len(prompt) :].tolist()


def test_it_answers_in_its_chat_template_and_stops_at_its_end(pipe, answers):
    assert answers.media[0] == ANSWER and answers.stats[0].nfe == 8  # seven tokens and the end
    checkpoint = pipe.modality.checkpoint
    turns = checkpoint.tokenizer.decode(checkpoint.prompt(FRANCE))
    assert turns.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert turns.endswith(f"<|im_start|>user\n{FRANCE}<|im_end|>\n<|im_start|>assistant\n")
    ends = [checkpoint.tokenizer.decode([i]) for i in checkpoint.frontend.ends]
    assert "<|im_end|>" in ends
    plain = gen.load("text", model="smollm2", max_new_tokens=8, chat=False)
    assert plain(FRANCE, **HOW).media[0] != ANSWER  # control: the template matters


def test_weights_and_tokens_are_those_of_transformers_alone(pipe, answers):
    own = GgufFile(FILE, "smollm2")
    alone = AutoModelForCausalLM.from_pretrained(
        FILE.parent, dtype=torch.float32, **{k: v for k, v in own.keywords.items() if k != "config"}
    )
    weights = pipe.modality.checkpoint.model.state_dict()
    assert all(torch.equal(x, weights[key]) for key, x in alone.state_dict().items())
    tokenizer = AutoTokenizer.from_pretrained(FILE.parent, gguf_file=FILE.name)
    for question, tokens in zip(QUESTIONS, answers.tokens, strict=True):
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        want = greedy(alone, prompt)
        assert tokens[: len(want)].tolist() == want
    alone.lm_head.weight.data.neg_()
    assert greedy(alone, prompt) != want  # control


def test_speculative_samplers_give_the_same_tokens(pipe, answers):
    for sampler in ("speculative_jacobi", {"name": "speculative", "drafter": "prompt_lookup"}):
        again = pipe(QUESTIONS, **{**HOW, "sampler": sampler})
        assert torch.equal(again.tokens, answers.tokens), sampler


def test_a_saved_pipeline_answers_the_same_elsewhere(pipe, answers, tmp_path):
    saved = pipe.save_pretrained(tmp_path / "saved")
    assert not list(saved.rglob("*.gguf"))
    assert "license: apache-2.0" in (saved / "README.md").read_text()
    again = gen.load(saved)(QUESTIONS, **HOW)
    assert torch.equal(again.tokens, answers.tokens) and again.media == answers.media
    model, tokenizer = (x.from_pretrained(saved) for x in (AutoModelForCausalLM, AutoTokenizer))
    chat = [{"role": "user", "content": FRANCE}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(greedy(model, prompt), skip_special_tokens=True) == ANSWER
    assert 2 in GenerationConfig.from_pretrained(saved).eos_token_id


def test_it_is_served_with_chats_and_streams(pipe):
    with serving(models={"smollm2": pipe}) as served:
        client = served.client()
        ask = {
            "model": "smollm2",
            "messages": [{"role": "user", "content": FRANCE}],
            "temperature": 0,
        }
        answer = client.chat.completions.create(**ask).choices[0]
        assert answer.message.content == ANSWER and answer.finish_reason == "stop"
        parts = client.chat.completions.create(**ask, stream=True)
        assert "".join(x.choices[0].delta.content or "" for x in parts if x.choices) == ANSWER


def test_the_command_line_answers_and_says_nothing_else(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "gen", "sample", "text", FRANCE, "--model", "smollm2",
         "sampling.temperature=0", "--out", str(tmp_path / "out"), "--quiet"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    (file,) = (tmp_path / "out").glob("*.txt")
    assert file.read_text().strip() == ANSWER


def test_the_commands_of_the_readme_answer(capsys, monkeypatch, tmp_path):
    block = re.search(
        r"^```sh\n(make smollm2.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE
    )
    make, sample, serve = (line.split("  #")[0].split() for line in block[1].splitlines())
    assert re.search(rf"^{make[1]}:", (README.parent / "Makefile").read_text(), re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    words = shlex.split(" ".join(sample))
    assert gen_main([*words[1:], "sampling.temperature=0", "--quiet"]) == 0
    assert any(file.read_text().strip() == ANSWER for file in tmp_path.rglob("*.txt"))
    args = parse(serve[1:])
    assert args.parser.prog == "gen serve" and args.model == ["chat=text:smollm2"]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_batches_windows_and_trees_change_no_token_in_bfloat16(temperature):
    pipe = gen.load("text", model="smollm2", dtype="bfloat16", batch_invariant=True)
    call = {"seed": 0, "temperature": temperature, "max_new_tokens": 12}
    plain = pipe(QUESTIONS, sampler="autoregressive", batch_size=1, **call).tokens
    window = {"name": "speculative_jacobi", "window": 8}
    for sampler in ("prompt_lookup", "suffix", "token_recycling", window):
        alone = pipe(QUESTIONS, sampler=sampler, batch_size=1, **call).tokens
        assert torch.equal(alone, plain), sampler
        made = pipe(QUESTIONS[::-1], sampler=sampler, **call).tokens.flip(0)
        assert torch.equal(made, plain), sampler
