"""A hundred bad inputs of the kinds that people give: each ends as one line and exit code 2."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from gen.__main__ import main

HEAD = "modality: image\nsampler: sjd\n"
RING = f"{HEAD}prompts: [a red circle]\n"
DEEP = "[" * 200_000
BOMB = "x0: &x0 [a]\n" + "".join(
    f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
# content of a job file, and a word of the answer
FILES = [
    ("", "expected keys"),
    ("3", "expected keys"),
    ("- a", "a list"),
    ("\x00", "valid job file"),
    ("a: [", "valid job file"),
    ("a: {b", "valid job file"),
    ("\ta: 1", "valid job file"),
    ("seed: 1\nseed: 2", "comes twice"),
    ("sampling: {top_k: 1, top_k: 2}", "comes twice"),
    ("--- 1\n--- 2", "single document"),
    ("a: *b", "alias"),
    ("a: &a [*a]", "inside of itself"),
    ("a: !!python/object/apply:os.system [ls]", "python/object"),
    ("seed: " + "9" * 5000, "4300 digits"),
    (DEEP, "100 deep"),
    ("a: " + DEEP, "100 deep"),
    ("- " * 200_000, "100 deep"),
    (f"{HEAD}name: *x11\n".replace(HEAD, HEAD + BOMB), "10,000,000"),
    (f"{BOMB}{HEAD}prompts: *x11", "10,000,000"),
    (f"{BOMB}{HEAD}prompts: [{{prompt: a, meta: *x11}}]", "10,000,000"),
    (RING + "num_samples: 100000000", "100,000,000 items"),
    (RING + "num_samples: 1.5", "num_samples is 1.5"),
    (RING + "num_samples: '2'", "num_samples is '2'"),
    (RING + "num_samples: true", "num_samples is True"),
    (RING + f"sweep: {{seed: {list(range(200))}, trace: {list(range(200))}}}", "40000 entries"),
    (RING + "sweep: [1]", "sweep is [1]"),
    (RING + "sweep: {seed: 1}", "sweep.seed is 1"),
    (RING + "sweep: {sede: [1]}", "Did you mean 'seed'"),
    (RING + "sede: 1", "Did you mean 'seed'"),
    (RING + "seed: -1", "seed is -1"),
    (RING + "seed: null", "seed is None"),
    (RING + f"seed: {2**62}", "below 2**62"),
    (RING + "modality: [1]", "unknown modality"),
    (RING + "modality: {a: 1}", "unknown modality"),
    (RING + "modality: imge", "Did you mean 'image'"),
    (RING + "modality: null", "modality is missing"),
    (RING + "sampler: [sjd]", "sampler is ['sjd']"),
    (RING + "sampler: {window: {a: 1}}", "window"),
    (RING + "sampler: {name: [1]}", "no name"),
    (RING + "sampler: {name: sjd, coupling: [1]}", "coupling"),
    (RING + "sampler: {name: sjd, init: {a: 1}}", "init"),
    (RING + "sampler: {name: sjd, aliases: 3}", "'aliases'"),
    (RING + "sampler: {name: sjd, spellings: x}", "'spellings'"),
    (RING + "sampler: {name: sjd, windw: 3}", "Did you mean 'window'"),
    (RING + "sampling: [1]", "sampling is [1]"),
    (RING + "sampling: {top_kk: 1}", "Did you mean 'top_k'"),
    (RING + "sampling: {temperature: hot}", "temperature"),
    (RING + "sampling: {temperature: .nan}", "temperature"),
    (RING + "sampling: {top_p: 2}", "top_p"),
    (RING + "device: nowhere", "device"),
    (RING + "device: [cpu]", "device is ['cpu']"),
    (RING + "dtype: float7", "unknown dtype"),
    (RING + "compile: 1", "compile is 1"),
    (RING + "batch_size: 0", "batch_size is 0"),
    (RING + "trace: x", "trace is 'x'"),
    (RING + "format: gif", "png or webp or jpg"),
    (RING + "format: [png]", "png or webp or jpg"),
    (RING + "layout: folders", "unknown layout"),
    (RING + "engine: [local]", "unknown engine"),
    (RING + "workers: 0", "workers is 0"),
    (RING + "tokens: 1", "tokens is 1"),
    (RING + "retry: some", "unknown retry"),
    (RING + "name: [1]", "name is [1]"),
    (RING + "name: ''", "name is ''"),
    (RING + "name: .nan", "name is nan"),
    (RING + "out: 3", "out is 3"),
    (RING + "out: ''", "out is ''"),
    (RING + "out: ~nobody-of-that-name/x", "begins with ~"),
    (RING + "name: ${oc.env:HOME}", "--allow-env HOME"),
    (RING + "name: ${nowhere}", "a key that is set"),
    (RING + "name: ${", "expected ${KEY}"),
    (RING + "name: ${oc.decode:1}", "no other function"),
    (RING + "jobs: {}", "jobs is {}"),
    (RING + "jobs: [1]", "jobs.0 is 1"),
    (RING + "jobs: [{}, {}]", "same job"),
    (RING + "jobs: [{workers: 3}]", "a key of the whole run"),
    (RING + "source: nowhere.png\nmask: nowhere.png", "not a file"),
    (RING + f"source: {'a' * 5000}\nspan: '1:2'", "not a file"),
    (RING + "frames: 0", "frames is 0"),
    (RING + "span: 3", "span"),
    (RING + "prompt_column: x", "none beside prompts"),
    (HEAD, "prompts is None"),
    (HEAD + "prompts: []", "at least one prompt"),
    (HEAD + "prompts: 3", "at least one prompt"),
    (HEAD + "prompts: ['']", "prompts.0"),
    (HEAD + "prompts: [false]", "quote it"),
    (HEAD + "prompts: [{prompt: a, sede: 1}]", "Did you mean 'seed'"),
    (HEAD + "prompts: [{prompt: [a]}]", "prompt is ['a']"),
    (HEAD + "prompts: [{seed: 1}]", "no prompt"),
    (HEAD + "prompts: [{prompt: a, id: x}, {prompt: b, id: x}]", "is a duplicate"),
    (HEAD + "prompts_file: nowhere.txt", "not a file"),
    (HEAD + "prompts_file: '*.nothing'", "not a file"),
    (HEAD + "prompts_file: [a]", "a path"),
    (HEAD + "prompts_dataset: {pth: x}", "a path, or"),
]
# a file of prompts: name, content, and a word of the answer
TABLES = [
    ("p.txt", b"", "is empty"),
    ("p.txt", b"\xff\xfe\x00", "no UTF-8"),
    ("p.json", b"[]", ".jsonl"),
    ("p.jsonl", b"{", "no JSON"),
    ("p.jsonl", b'{"prompt": "a", "meta": ' + b"[" * 200_000, "100 deep"),
    ("p.jsonl", b'{"prompt": "a", "seed": ' + b"1" * 5000 + b"}", "no JSON"),
    ("p.jsonl", b'{"Prompt": "a"}', "no prompt"),
    ("p.csv", b"Prompt\na\n", "prompt_column=Prompt"),
    ("p.csv", b"prompt,prompt\na,b\n", "comes twice"),
    ("p.csv", b'prompt\n"a', "never closed"),
    ("p.csv", b"prompt,seed\na\n", "number of cells is 1"),
    ("p.parquet", b"PAR1", "not a readable Parquet"),
    ("p.txt.gz", b"no gzip", "cannot be read"),
    ("p.txt.gz", gzip.compress(b"a ring\n" * 100)[:20], "cannot be read"),
]
COMMANDS = [
    (["sample"], "required: MODALITY"),
    (["sample", "image", "a red circle", "--seed", "x"], "--seed"),
    (["sample", "image", "a red circle", "-n", "0"], "num_samples is 0"),
    (["sample", "image", "a red circle", "seed"], "KEY=VALUE"),
    (["sample", "image", "a red circle", "=3"], "no key"),
    (["sample", "image", "a red circle", "-o", "x.tiff"], "png or webp or jpg"),
    (["run", "nowhere.yaml"], "unknown config"),
    (["run", "."], "unknown config"),
    (["show", "nowhere"], "unknown config or sampler"),
    (["status", "."], "expected a folder"),
    (["export", ".", "--parquet", "a"], "expected a folder"),
    (["export", "nowhere", "--dataset", "a"], "is not a folder"),
    (["cp", "image/sjd", "taken.yaml"], "exists"),
]


def answer(capsys, *argv: str) -> str:
    """Return the one line on stderr; an exit code other than 2 fails the test."""
    code = main(list(argv))
    out, err = capsys.readouterr()
    assert (code, out) == (2, ""), err
    assert err.startswith("gen: ") and err.count("\n") == 1 and len(err) < 4200
    assert "internal error" not in err and "Traceback" not in err
    return err


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.delenv("GEN_DEBUG", raising=False)
    monkeypatch.chdir(tmp_path)


def test_there_are_a_hundred():
    assert len(FILES) + len(TABLES) + len(COMMANDS) >= 100


@pytest.mark.parametrize("text, says", FILES, ids=range(len(FILES)))
def test_a_bad_job_file_is_one_line(capsys, text, says):
    keys = [line.partition(":")[0] for line in text.splitlines()]
    if len(text) < 6000 and text.startswith(HEAD):
        # a later line of the table stands for the key, where the head has it as well
        lines = {k: line for k, line in zip(keys, text.splitlines(), strict=True)}
        text = "\n".join(lines.values())
    Path("job.yaml").write_text(text, encoding="utf-8")
    assert says in answer(capsys, "run", "job.yaml", "--dry-run")


@pytest.mark.parametrize("name, data, says", TABLES, ids=range(len(TABLES)))
def test_a_bad_file_of_prompts_is_one_line(capsys, name, data, says):
    Path(name).write_bytes(data)
    Path("job.yaml").write_text(f"{HEAD}prompts_file: {name}\n")
    assert says in answer(capsys, "run", "job.yaml", "--dry-run")


@pytest.mark.parametrize("argv, says", COMMANDS, ids=range(len(COMMANDS)))
def test_a_bad_command_is_one_line(capsys, argv, says):
    Path("taken.yaml").write_text("mine")
    assert says in answer(capsys, *argv)
    assert [p.name for p in Path().iterdir()] == ["taken.yaml"]
