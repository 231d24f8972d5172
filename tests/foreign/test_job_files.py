"""Job files and files of prompts of somebody else: read as they say, or refused in one sentence;
nothing in them runs, hangs or is read as something else."""

from __future__ import annotations

import gzip
import io
import json
import random
import re
from pathlib import Path

import pytest
from bounded import bounded
from foreign import with_canary, wrong_of_files

from gen.config.entries import fingerprint
from gen.config.inputs import iter_rows
from gen.config.job import load_config
from gen.config.keys import KEYS
from gen.config.prompt_files import MOST_LINES
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


# --- files that unpack to more than any memory holds


def packed_lines(path: Path, line: bytes, count: int) -> Path:
    """Write a small file of so many lines."""
    block = gzip.compress(line * 100_000)  # a file of gzip may hold several after each other
    with path.open("wb") as file:
        for _ in range(count // 100_000):
            file.write(block)
    return path


UNPACKED = "prompt_files.MOST_UNPACKED"
BOMBS = {  # ten times what is allowed, in at most a few megabytes; a smaller bound takes less time
    "blank.jsonl.gz": (b"\n", 10 * MOST_LINES, "lines", {}),
    "rows.txt.gz": (b"a\n", 2_000_000, "rows", {"inputs.ITEMS": 200_000}),
    "wide.txt.gz": (
        b"a" * 10_000 + b"\n",
        200_000,
        "unpacks to",
        {"prompt_files.MOST_UNPACKED": 1 << 28},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_of_endless_lines_is_refused_by_its_bound(name, tmp_path, monkeypatch):
    line, count, said, bounds = BOMBS[name]
    path = packed_lines(tmp_path / name, line, count)
    for bound, value in bounds.items():
        monkeypatch.setattr(f"gen.config.{bound}", value)
    assert path.stat().st_size < 30_000_000
    ended = bounded(lambda: rows(path), seconds=300)
    print(f"{name}: {path.stat().st_size:,} bytes, {ended.seconds:.1f} s: {ended.said}")
    assert ended.how == "refused" and re.search(f"{said}.*expected at most", ended.said), ended


def test_a_line_of_gigabytes_is_refused_before_it_is_unpacked(tmp_path):
    block = gzip.compress(b"a" * 100_000_000)
    path = tmp_path / "a.txt.gz"
    path.write_bytes(block * 30)
    ended = bounded(lambda: rows(path), seconds=30, memory=1 << 28)
    assert ended.how == "refused" and "line 1 is longer" in ended.said, ended


def huge_rows(folder: Path) -> dict[str, tuple[Path, str]]:
    """Parquet files of a few kilobytes whose rows take gigabytes."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    found = {
        "one text": (["a" * 1_200_000_000], "row group 0 holds 1,"),
        "a long text": (["a" * 40_000_000, "b"], "a text of 40,000,000 bytes as prompt"),
        "one list": ([[0] * 70_000_000], "70,000,000 values of"),
    }
    for name, (values, said) in found.items():
        columns = {"prompt": values} if name != "one list" else {"prompt": ["a"], "meta": values}
        path = folder / f"{name}.parquet"
        parquet.write_table(arrow.table(columns), path, compression="zstd")
        found[name] = path, said
    return found


@pytest.mark.slow
def test_a_small_parquet_file_of_huge_rows_is_refused_by_its_bound(tmp_path):
    for name, (path, said) in huge_rows(tmp_path).items():
        assert path.stat().st_size < 1_000_000, name
        ended = bounded(lambda path=path: rows(path))
        assert ended.how == "refused" and said in ended.said, (name, ended)


def test_a_text_that_many_rows_share_is_held_once(tmp_path):
    """Three hundred rows of one text of a megabyte: 300 MB where each is decoded."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for name, count in (("a", 300), ("many", 2000)):
        texts = arrow.DictionaryArray.from_arrays([0] * count, ["a" * 1_000_000])
        table = arrow.table({"prompt": texts, "seed": list(range(count))})
        parquet.write_table(table, tmp_path / f"{name}.parquet", store_schema=False)
        assert (tmp_path / f"{name}.parquet").stat().st_size < 3_000_000

    def decoded() -> int:
        with parquet.ParquetFile(tmp_path / "many.parquet") as file:
            return sum(len(b.columns[0].to_pylist()) for b in file.iter_batches(1024))

    ended = bounded(lambda: rows(tmp_path / "a.parquet"), memory=1 << 28)
    assert (ended.how, ended.said) == ("returned", "300"), ended
    assert bounded(decoded, memory=1 << 28).how == "memory"  # the control


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
