"""Models in several processes: tokens and passes of one process, and ranks that differ are told."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest
import split_run
import torch
from published import save_quietly, tiny_tokenizer
from small_llama import small_llama
from tiny_checkpoints import SHAPE

import gen
from gen.config.job import make_job
from gen.core.errors import GenError
from gen.jobs.run import run_job
from gen.models.adapters.language_models import CausalLM
from gen.models.adapters.lead import Follower, Lead
from gen.models.load.tensor_parallel import LAUNCHED, Ranks, digest_of_files

SECONDS = 400
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
ALONE = "this process is alone; expected several: torchrun --nproc-per-node 2"
DIFFER = "the 2 processes of a model with tp differ in {}; expected the same calls"


def make_models(folder):
    """Save every kind of model, and some that ranks cannot share."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {**SHAPE, "num_attention_heads": 4, "max_position_embeddings": 256}
    grouped = {**shape, "num_key_value_heads": 2}
    wanted = {
        "llama": ("llama", grouped),
        "other": ("llama", grouped),
        split_run.DRAFT: ("llama", grouped),
        "one_head": ("llama", {**shape, "num_key_value_heads": 1}),
        "qwen3": ("qwen3", {**grouped, "head_dim": 16}),
        "gemma3": ("gemma3_text", {**grouped, "head_dim": 8, "sliding_window": 256}),
        "phi3": ("phi3", grouped),
        "gpt_neox": ("gpt_neox", shape),
        "gpt2": ("gpt2", {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, **ENDS}),
    }
    for number, (name, (kind, keys)) in enumerate(wanted.items()):
        torch.manual_seed(number)
        config = AutoConfig.for_model(kind, **keys)
        save_quietly(AutoModelForCausalLM.from_config(config).double(), folder / name)
        tiny_tokenizer().save_pretrained(folder / name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("split")
    make_models(path)
    return path


def environment():
    """Variables of a process that another one starts, on the CPU."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def free_port():
    with closing(socket.create_server(("127.0.0.1", 0))) as bound:
        return bound.getsockname()[1]


def launcher(*command):
    """Command line of two processes of a program."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    return [*torchrun, "--master-port", str(free_port()), *map(str, command)]


def launch(*command):
    """Run a program in two processes."""
    done = subprocess.run(
        launcher(*command), env=environment(), capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def ranks(folder):
    """What each of two processes drew and refused."""
    launch(split_run.__file__, folder)
    return [json.loads((folder / f"rank-{r}.json").read_text()) for r in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", split_run.KINDS)
def test_two_processes_draw_what_one_draws_with_every_sampler(folder, ranks, kind):
    one = split_run.drawn(folder, kind)
    assert len({str(tokens) for tokens, _ in one.values()}) > 1  # samplers draw in their own ways
    assert ranks[0][kind] == one
    assert ranks[1][kind] == one


@pytest.mark.slow
@pytest.mark.parametrize(
    "what, said",
    [
        ("seeds", DIFFER.format("the inputs of a forward pass")),
        ("last", DIFFER.format("the tokens that they drew")),
        ("temperature", DIFFER.format("the inputs of a forward pass")),
        ("prompts", DIFFER.format("the inputs of a forward pass")),
        ("files", DIFFER.format("the files of the model")),
        ("count", "tp is 3, and there are 2 processes; expected tp=2"),
        ("heads", "has 1 key-value heads; expected a multiple of 2, the number of processes"),
        ("no plan", "transformers has no plan that splits a 'gpt2'"),
    ],
)
def test_processes_that_differ_and_models_that_do_not_split_are_refused_on_every_rank(
    ranks, what, said
):
    for rank in ranks:
        assert said in rank["errors"][what]


@pytest.mark.slow
def test_calls_without_a_seed_draw_one_for_all_processes(ranks):
    assert ranks[0]["seeds"] == ranks[1]["seeds"]


JOB = """
modality: text
model: {model}
model_options: {{max_new_tokens: 20}}
dtype: float64
device: cpu
sampling: {{temperature: 0.8}}
num_samples: 2
batch_size: 3
prompts: [w1 w2 w3, w5, w9 w8 w7 w6 w5, w3 w3]
jobs:
  - {{sampler: autoregressive}}
  - {{sampler: {{name: speculative_jacobi, window: 6}}}}
  - {{sampler: {{name: speculative, draft_model: {draft}, shape: beam, verifier: follow}}}}
"""


def items(folder):
    """Texts, and passes of the items, of a job."""
    rows = [json.loads(line) for line in (folder / "manifest.jsonl").read_text().splitlines()]
    texts = {p.name: p.read_text() for p in folder.glob("*.txt")}
    return texts, {row["id"]: (row["status"], row["nfe"]) for row in rows}


@pytest.mark.slow
def test_a_job_of_two_processes_with_one_model_makes_what_one_process_makes(folder, tmp_path):
    config = tmp_path / "job.yaml"
    config.write_text(JOB.format(model=folder / "qwen3", draft=folder / split_run.DRAFT))
    one, two = tmp_path / "one", tmp_path / "two"
    gen_run = ("-m", "gen", "run", config)
    subprocess.run([sys.executable, *gen_run, f"out={one}"], env=environment(), check=True)
    launch(*gen_run, f"out={two}", "model_options.tp=2")
    assert items(one) == items(two)
    assert len(items(one)[0]) == 24


@contextmanager
def serving(model, *before, options=()):
    """Serve a model; yield the port."""
    port, flags = free_port(), []
    for option in ("max_new_tokens=20", *options):
        flags += ["--model-option", f"mine:{option}"]
    serve = ("-m", "gen", "serve", "--port", str(port), "--model", f"mine=text:{model}", *flags)
    command = [*before, *serve, "--device", "cpu", "--dtype", "float64"]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert next(line for line in process.stdout if "Ctrl-C" in line)
        yield port
    finally:
        process.terminate()
        process.wait(60)


def answers(port):
    """Texts of requests that come at once."""

    def ask(number):
        body = {"model": "mine", "prompt": f"w{number} w7", "seed": number, "n": 1 + number % 3}
        url = f"http://127.0.0.1:{port}/v1/completions"
        data = json.dumps({**body, "temperature": 0.9, "max_tokens": 12}).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            return [choice["text"] for choice in json.load(answer)["choices"]]

    with ThreadPoolExecutor(6) as pool:
        return list(pool.map(ask, range(12)))


@pytest.mark.slow
def test_a_server_of_two_processes_with_one_model_answers_as_one_process(folder):
    with serving(folder / "qwen3", sys.executable) as port:
        one = answers(port)
    with serving(folder / "qwen3", *launcher(), options=["tp=2"]) as port:
        assert answers(port) == one
    assert len({str(texts) for texts in one}) == len(one)


# --- without other processes


def test_a_process_alone_is_told_how_to_start_several(folder, monkeypatch, tmp_path):
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(GenError, match=ALONE):
        split_run.load(folder, "llama", tp=2)
    job = {"modality": "text", "model": str(folder / "llama"), "model_options": {"tp": 2}}
    with pytest.raises(GenError, match="this process is alone; torchrun"):
        run_job(make_job({**job, "prompts": ["w1"], "out": str(tmp_path / "out")}, where="here"))


@pytest.mark.parametrize("value", [1, 0, False, "two", 2.0])
def test_other_values_are_refused(value):
    with pytest.raises(GenError, match=r"tp is .*; expected 'auto', true, or the number of"):
        Ranks.of(value)


@pytest.fixture
def launched(monkeypatch):
    """Variables of a process that torchrun started as one of two."""
    values = ("0", "0", "2", "127.0.0.1", "1")
    for name, value in zip(LAUNCHED, values, strict=True):
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    "more, said",
    [
        ({"device_map": "auto"}, "tp and device_map are given; expected one of them"),
        ({"quantization": "int8"}, "tp and quantization are given"),
        ({"adapters": "folder"}, "tp and adapters are given"),
        ({"compile": True}, "tp and compile are given"),
        ({"sparse_prefill": 0.5}, "tp and sparse_prefill are given"),
    ],
)
def test_options_that_need_whole_weights_are_refused(folder, launched, more, said):
    with pytest.raises(GenError, match=said):
        split_run.load(folder, "llama", tp=2, **more)


def test_models_that_nothing_splits_are_refused(launched, folder, tmp_path):
    with pytest.raises(GenError, match="got the options tp; expected none"):
        gen.load("text", model="text-causal", tp=2)
    from tiny_whisper import written

    with pytest.raises(GenError, match="expected none: nothing says how to split its network"):
        gen.load("text", model=written(tmp_path / "whisper"), tp=2)


def test_files_of_other_bytes_have_another_digest(folder):
    files = [[folder / name / "model.safetensors"] for name in ("llama", "llama", "other")]
    one, same, other = map(digest_of_files, files)
    assert one == same != other


class Line:
    """Messages that another object in this process receives."""

    def __init__(self):
        from threading import RLock

        self.lock, self.sent, self.count = RLock(), [], 0

    def send(self, message):
        self.sent.append(message)

    def number(self):
        self.count += 1
        return self.count

    def drop_with(self, cache, number):
        pass


def steps(model):
    """Call a model and its cache in all ways of a decoding loop; return the cache."""
    tokens, at = torch.arange(8, 20).view(3, 4), torch.arange(4).expand(3, 4)
    cache = model.new_cache(16)
    model.forward(tokens, at, cache)
    model.forward(tokens[:, :2], at[:, :2] + 4, cache, keep=1)
    parents = torch.tensor([[-1, -1, 0]]).expand(3, 3)
    depth = torch.tensor([[6, 7, 7, 8]]).expand(3, 4)
    model.forward_tree(tokens, depth, parents, cache)
    cache.commit_path(torch.tensor([[0, 2]] * 3), torch.tensor([2, 1, 0]))
    cache.copy_rows(torch.tensor([0]), torch.tensor([2]))
    cache.keep(torch.tensor([2, 0]))
    cache.select(torch.tensor([1]))
    model.forward(tokens[:1, :1], at[:1, :1] + 8, cache)
    return cache


@pytest.mark.parametrize("skipped", [None, "keep", "commit_path", "copy_rows", "select", "forward"])
def test_a_follower_repeats_the_calls_of_models_and_caches(skipped):
    network = small_llama(32)
    leading, line = CausalLM(network), Line()
    leading.lead = Lead(line, 0)
    mine = steps(leading)
    follower = Follower(Line(), torch.device("cpu"))
    follower.models[0] = CausalLM(network)
    try:
        for call in line.sent:
            if call.name != skipped:
                follower.repeat(call)
        (theirs,) = follower.caches.values()
        pairs = zip(mine.buffers(), theirs.buffers(), strict=True)
        same = all(torch.equal(a, b) for ours, own in pairs for a, b in zip(ours, own, strict=True))
    except (RuntimeError, ValueError, IndexError):  # shapes of rows that are no longer there
        same = False
    assert same == (skipped is None)


def test_another_network_of_a_led_model_is_refused():
    leading = CausalLM(small_llama(32))
    assert leading.with_layers([0]) is not None
    leading.lead = Lead(Line(), 0)
    with pytest.raises(GenError, match="expected another sampler"):
        leading.with_layers([0])
