"""Job files and files of prompts of somebody else: read as they say, or refused in one sentence;
nothing in them runs, hangs or is read as something else."""

from __future__ import annotations

import gzip
import io
import json
import random
from pathlib import Path

import pytest
from foreign import with_canary, wrong_of_files

from gen.config.entries import fingerprint
from gen.config.inputs import iter_rows
from gen.config.job import load_config
from gen.config.keys import KEYS
from gen.core.errors import GenError

GOOD = "modality: text\nsampler: fast_dllm\nprompts: ['sort 3 1 2 =']\n"
# values that a key may not expect
VALUES = (
    *("null", "[]", "{}", "''", "-1", "0", "1e400", ".nan", "-.inf", "1e-400", "٣", "true"),
    *("2026-01-01", "!!binary aGk=", '"\\0"', '"\\ud800"', "[[[[[1]]]]]", "{a: {b: {c: 1}}}"),
    *("9" * 400, "'" + "a" * 5000 + "'", "${oc.env:HOME}", "${oc.env:SECRET}", "[1, two, {3: 4}]"),
)
LAUGH = "a0: &a0 [x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
DOCUMENTS = {
    "tag": GOOD + "name: !!python/object/apply:os.system ['touch CANARY']",
    "tag new": GOOD + "name: !!python/object/new:os.system ['touch CANARY']",
    "tag module": GOOD + "name: !!python/module:antigravity ''",
    "tag name": GOOD + "name: !!python/name:os.system ''",
    "own tag": GOOD + "name: !mine a",
    "laughs": GOOD + LAUGH,
    "itself": GOOD + "sampling: &a {b: *a}",
    "deep lists": GOOD + "name: " + "[" * 20_000,
    "deep maps": GOOD + "name: " + "{a: " * 20_000,
    "deep blocks": "\n".join(" " * i + "a:" for i in range(3000)),
    "deep dashes": "- " * 50_000,
    "twice": GOOD + "seed: 1\nseed: 2",
    "merge": GOOD + "<<: {seed: 3}\n",
    "merges": "a: &a {seed: 1}\n" + GOOD + "<<: [*a, *a]",
    "documents": GOOD + "---\n" + GOOD,
    "directive": "%YAML 9.9\n---\n" + GOOD,
    "tab": GOOD + "\tseed: 1",
    "list": "- 1\n- 2",
    "text": "hello",
    "empty": "",
    "nul": GOOD + "\0",
    "long key": "k" * 200_000 + ": 1\n" + GOOD,
    "many keys": GOOD + "".join(f"k{i}: 1\n" for i in range(20_000)),
    "many jobs": GOOD + "jobs:\n" + "- {seed: 1}\n" * 20_000,
    "wide sweep": GOOD + "sweep: {seed: [" + "1, " * 20_000 + "2], batch_size: [1, 2, 3]}",
    "huge samples": GOOD + "num_samples: 1000000000",
    "device file": GOOD.replace("prompts:", "prompts_file: /dev/zero\n#"),
    "missing file": GOOD.replace("prompts:", "prompts_file: /nowhere\n#"),
    "secret file": GOOD + "source: /etc/shadow",
    "long pattern": GOOD.replace("prompts:", "prompts_file: '" + "**/" * 50 + "*.x'\n#"),
    "python file": "import os\nos.system('touch CANARY')\n",
    "html": "<html></html>",
    "utf16": "\ufeffmodality: text",
}


def look(path: Path) -> str:
    """Load a job file; what it says must survive being written and read."""
    job = load_config(path)
    again = path.with_name("again.yaml")
    again.write_text(job.to_yaml(), encoding="utf-8")
    assert fingerprint(load_config(again)) == fingerprint(job)
    return job.name


def wrong_of(inputs: dict[str, str | bytes], folder: Path, read=look, suffix="yaml") -> list[str]:
    """Read all inputs, and return what was wrong with the ends."""
    files = {}
    for name, text in inputs.items():
        data = text if isinstance(text, bytes) else with_canary(text, folder).encode()
        files[name] = f"job.{name.rpartition('.')[2] if '.' in name else suffix}", data
    return wrong_of_files(files, read, folder)


def test_documents_are_read_or_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "hunter2")
    assert not (wrong := wrong_of(DOCUMENTS, tmp_path)), "\n".join(wrong)


def of_keys(keys) -> dict[str, str]:
    return {
        f"{key}: {value[:20]}": "".join(
            line for line in GOOD.splitlines(True) if not line.startswith(f"{key}:")
        )
        + f"{key}: {value}\n"
        for key in keys
        for value in VALUES
        if not (key == "prompts_dataset" and value.startswith(("'a", "9")))
    }


@pytest.mark.slow
def test_every_key_with_every_value_is_read_as_it_says_or_refused(tmp_path):
    inputs = of_keys(k for k in KEYS if k != "prompts_dataset")
    wrong = wrong_of(inputs, tmp_path)
    print(f"{len(inputs)} values of keys")
    assert len(inputs) > 500 and not wrong, "\n".join(wrong[:30])


# --- files of prompts

ROWS = [{"prompt": f"sort {i} 8 9 =", "seed": i} for i in range(6)]
JSONL = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
CSV = b"prompt,seed\n" + b"".join(f'"{r["prompt"]}",{r["seed"]}\n'.encode() for r in ROWS)


def packed(data: bytes) -> bytes:
    return gzip.compress(data)


def prompt_files() -> dict[str, bytes]:
    whole = {"a.jsonl": JSONL, "a.csv": CSV, "a.tsv": CSV.replace(b",", b"\t"), "a.txt": b"x\ny\n"}
    found = {
        "deep.jsonl": b"[" * 1_000_000,
        "digits.jsonl": b'{"prompt": "a", "seed": ' + b"9" * 100_000 + b"}",
        "infinite.jsonl": b'{"prompt": "a", "seed": 1e999}',
        "nan.jsonl": b'{"prompt": "a", "meta": {"a": NaN}}',
        "pair.jsonl": b'{"prompt": "\\ud800"}',
        "twice.jsonl": b'{"prompt": "a", "prompt": "b"}',
        "list.jsonl": b'["a", "b"]',
        "id.jsonl": b'{"prompt": "a", "id": {"a": []}}',
        "nul.jsonl": b'{"prompt": "a\\u0000b"}',
        "line.jsonl": b'{"prompt": "' + b"a" * 40_000_000 + b'"}',
        "text.jsonl": b"hello",
        "image.jsonl": b'{"prompt": "", "image": "/dev/zero"}',
        "data.jsonl": b'{"prompt": "", "image": "data:;base64,%%%"}',
        "sampler.jsonl": b'{"prompt": "a", "sampler": {"name": "x"}}',
        "wide.jsonl": json.dumps({"prompt": "a", **{f"k{i}": i for i in range(50_000)}}).encode(),
        "quote.csv": b'prompt\n"' + b"a\n" * 100_000,
        "field.csv": b'prompt\n"' + b"a" * 20_000_000 + b'"\n',
        "columns.csv": b"prompt," + b",".join(b"c%d" % i for i in range(20_000)) + b"\nx\n",
        "same.csv": b"prompt,prompt\na,b\n",
        "sames.csv": b",".join(b"c%d" % i for i in range(60_000)) + b",c59999\na\n",
        "sames.jsonl": b"{" + b"".join(b'"k%d": 1, ' % i for i in range(60_000)) + b'"k59999": 1}',
        "none.csv": b"a,b\n1,2\n",
        "nul.csv": b"prompt\na\0b\n",
        "latin.csv": b"prompt\n\xe9\xff\n",
        "yaml.csv": b'prompt,meta\na,"!!python/object/apply:os.system [touch CANARY]"\n',
        "formula.csv": b"prompt\n=cmd|' /C calc'!A0\n",
        "digits.csv": "prompt,seed\na,٣\n".encode(),
        "empty.csv": b"",
        "bom.csv": b"\xef\xbb\xbf" + CSV,
        "blank.txt": b"\n" * 3_000_000,
        "nul.txt": b"\0" * 1000,
        "empty.txt": b"",
        "wrong.bin": b"a",
        "cut.gz": packed(JSONL)[:40],
        "noise.parquet": random.Random(5).randbytes(4000),
        "magic.parquet": b"PAR1" + bytes(100) + b"\xff\xff\xff\x7fPAR1",
        "empty.parquet": b"",
    }
    for name, data in whole.items():
        dice = random.Random(name)
        for number in range(6):
            flipped = bytearray(data)
            flipped[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
            found[f"flip{number}{name}"] = bytes(flipped)
    return found


def parquet_files() -> dict[str, bytes]:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    out = io.BytesIO()
    columns = {k: [r[k] for r in ROWS] for k in ROWS[0]}
    parquet.write_table(arrow.table(columns), out)
    data, dice, found = out.getvalue(), random.Random(6), {}
    for number in range(30):
        flipped = bytearray(data)
        flipped[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        found[f"flip{number}.parquet"] = bytes(flipped)
    return found | {f"cut{n}.parquet": data[:n] for n in (3, 40, len(data) // 2, len(data) - 5)}


def rows(path: Path) -> int:
    return len([row.error for row in iter_rows(path)])


@pytest.mark.slow
@pytest.mark.parametrize("make", [prompt_files, parquet_files])
def test_files_of_prompts_are_read_or_refused(make, tmp_path):
    inputs = make()
    wrong = wrong_of(inputs, tmp_path, rows)
    print(f"{len(inputs)} {make.__name__}")
    assert not wrong, "\n".join(wrong)


# --- controls


def test_without_its_guard_a_tag_runs(tmp_path, monkeypatch):
    import yaml

    def unsafe(text: str, Loader: type) -> object:
        return yaml.UnsafeLoader(text).get_single_data()

    monkeypatch.setattr("gen.config.yaml_text.yaml.load", unsafe)
    assert any("executed" in w for w in wrong_of({"tag": DOCUMENTS["tag"]}, tmp_path))


@pytest.mark.slow
def test_without_its_guard_the_laughs_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("gen.config.yaml_text.find_problem", lambda text: None)
    monkeypatch.setattr("gen.config.layers.load_yaml", lambda text: len(json.dumps(_loaded(text))))
    assert wrong_of({"laughs": DOCUMENTS["laughs"]}, tmp_path)


def _loaded(text: str):
    import yaml

    return yaml.load(text, Loader=yaml.CSafeLoader)


def test_an_internal_error_is_seen(tmp_path):
    def broken(path: Path) -> None:
        raise ZeroDivisionError

    assert wrong_of({"text": "hello"}, tmp_path, broken)
    assert GenError is not ZeroDivisionError
