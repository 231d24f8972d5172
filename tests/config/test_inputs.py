"""Rows of input: every kind of it gives the same rows and fingerprint, and a wrong row is named
while the others stay."""

from __future__ import annotations

import json
import sys
import time
import tracemalloc
from pathlib import Path

import pytest
import yaml

import gen.core.resolve
from gen.config.canonical import flat
from gen.config.entries import Job, fingerprint
from gen.config.inputs import iter_rows, rows_digest, take_census, write_rows
from gen.config.job import load_config, make_job
from gen.core.errors import GenError

ROWS = [
    {"prompt": "a red circle"},
    {
        "prompt": "a blue, small ring",
        "id": "007",
        "seed": 5,
        "num_samples": 2,
        "sampler": {"window": 8},
        "sampling": {"guidance_scale": 2.0},
    },
    {
        "prompt": "a \u2028 green \u2603",
        "sampling": {"top_k": 3, "temperature": 1e-4},
        "meta": {"kind": "x", "no": "12"},
        "frames": 4,
    },
]
DOTTED = [flat(r) for r in ROWS]
COLUMNS = list(dict.fromkeys(k for r in DOTTED for k in r))
BASE = {"modality": "image", "sampler": "sjd"}


def jsonl(path: Path, rows) -> Path:
    path.write_text(
        "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), encoding="utf-8"
    )
    return path


def csv(path: Path, rows=DOTTED) -> Path:
    import csv

    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return path


def parquet(path: Path, rows) -> Path:
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    from pyarrow import parquet

    parquet.write_table(
        pyarrow.Table.from_pylist(
            [{k: r.get(k) for k in dict.fromkeys(k for r in rows for k in r)} for r in rows]
        ),
        path,
    )
    return path


def job(*overrides: str, **keys) -> Job:
    return make_job({**BASE, **keys}, overrides, where="test")


def of(path: Path) -> Job:
    return job(prompts_file=str(path))


def trees(path_or_job) -> list[dict]:
    rows = path_or_job.entries[0].rows() if isinstance(path_or_job, Job) else iter_rows(path_or_job)
    return [r.tree() for r in rows]


KINDS = {
    "iterable": lambda folder: job(prompts=(dict(r) for r in ROWS)),
    "yaml": lambda folder: load_config(
        (
            (folder / "a.yaml").write_text(yaml.safe_dump({**BASE, "prompts": ROWS})),
            folder / "a.yaml",
        )[1]
    ),
    "dotted": lambda folder: job(prompts=DOTTED),
    "jsonl": lambda folder: of(jsonl(folder / "a.jsonl", ROWS)),
    "dotted jsonl": lambda folder: of(jsonl(folder / "b.JSONL", DOTTED)),
    "csv": lambda folder: of(csv(folder / "a.csv")),
    "parquet": lambda folder: of(parquet(folder / "a.parquet", DOTTED)),
    "nested parquet": lambda folder: of(parquet(folder / "b.parquet", ROWS)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_input_gives_the_same_rows_and_fingerprint(kind, tmp_path):
    made, same = KINDS[kind](tmp_path), job(prompts=ROWS)
    assert trees(made) == ROWS and fingerprint(made) == fingerprint(same)
    assert made.entries[0].relevant()["prompts"] == {
        "rows": 3,
        "sha256": rows_digest(same.entries[0].rows()),
    }


def test_plain_prompts_are_the_same_as_text_list_iterable_and_jsonl(tmp_path):
    prompts = ["a red circle", "a blue ring, in the centre"]
    (tmp_path / "a.txt").write_bytes(
        b"\xef\xbb\xbf" + f"\n{prompts[0]}\r\n\n  {prompts[1]}".encode()
    )
    kinds = [
        of(tmp_path / "a.txt"),
        of(jsonl(tmp_path / "a.jsonl", prompts)),
        job(prompts=iter(prompts)),
        job(prompts=tuple(prompts)),
    ]
    assert {fingerprint(k) for k in kinds} == {fingerprint(job(prompts=prompts))}
    assert [r.line for r in kinds[0].entries[0].rows()] == [2, 4] and kinds[2].entries[
        0
    ].prompts == prompts


@pytest.mark.parametrize(
    "row, key, value",
    [
        (0, "prompt", "another"),
        (1, "id", "7"),
        (1, "seed", 6),
        (1, "num_samples", 1),
        (2, "sampling", {}),
        (1, "sampler", {"window": 9}),
        (2, "meta", {"kind": "y"}),
        (2, "frames", 5),
    ],
)
def test_every_cell_counts(tmp_path, row, key, value):  # the negative control of the tests above
    changed = [{**r, key: value} if i == row else r for i, r in enumerate(ROWS)]
    assert fingerprint(of(jsonl(tmp_path / "a.jsonl", changed))) != fingerprint(job(prompts=ROWS))
    assert fingerprint(of(jsonl(tmp_path / "a.jsonl", ROWS[::-1]))) != fingerprint(
        job(prompts=ROWS)
    )


def test_a_changed_file_is_another_job_and_a_rewritten_one_is_not(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", ROWS)
    was = of(path)
    mark, rows = fingerprint(was), was.entries[0].rows()
    path.write_text(path.read_text())
    assert fingerprint(of(path)) == mark and len(list(rows)) == 3
    rows = was.entries[0].rows()
    jsonl(path, [*ROWS, "one more"])
    assert fingerprint(of(path)) != mark
    with pytest.raises(GenError, match="a.jsonl changed while it was being read"):
        list(rows)


def test_rows_written_down_read_back_as_the_same_rows(tmp_path):
    made = job(prompts=ROWS)
    write_rows(made.entries[0].rows(), tmp_path / "a.jsonl")
    assert trees(tmp_path / "a.jsonl") == ROWS and rows_digest(
        iter_rows(tmp_path / "a.jsonl")
    ) == rows_digest(made.entries[0].rows())
    (tmp_path / "bad.jsonl").write_text('"good"\n{')
    with pytest.raises(GenError, match="bad.jsonl, line 2"):
        write_rows(iter_rows(tmp_path / "bad.jsonl"), tmp_path / "b.jsonl")
    assert not (tmp_path / "b.jsonl").exists()


def test_rows_of_a_job_are_written_in_its_config_and_a_file_as_its_path(tmp_path):
    (tmp_path / "config.yaml").write_text(job(prompts=ROWS).to_yaml(), encoding="utf-8")
    assert load_config(tmp_path / "config.yaml").entries == job(prompts=ROWS).entries
    path = jsonl(tmp_path / "a.jsonl", ROWS)
    made = load_config(
        (
            (tmp_path / "b.yaml").write_text(
                "modality: image\nsampler: sjd\nprompts_file: a.jsonl"
            ),
            tmp_path / "b.yaml",
        )[1]
    )
    assert f"prompts_file: {path}\n" in made.to_yaml() and "prompts:" not in made.to_yaml()


# --- wrong rows

WRONG = [
    ("{", "no JSON (Expecting property name"),
    ("[1]", "the row is [1]"),
    ("3", "the row is 3"),
    ("{}", "there is no prompt"),
    ('{"prompt": 3}', "prompt is 3"),
    ('" "', "prompt is ' '"),
    ('{"prompt": "a", "seed": "x"}', "seed is 'x'"),
    ('{"prompt": "a", "seed": -1}', "seed is -1"),
    ('{"prompt": "a", "seed": true}', "seed is True"),
    ('{"prompt": "a", "num_samples": 0}', "num_samples is 0"),
    ('{"prompt": "a", "frames": 0}', "frames is 0"),
    ('{"prompt": "a", "id": "first"}', "id 'first' is a duplicate; line 1 has the same id"),
    ('{"prompt": "a", "id": []}', "id is []"),
    ('{"prompt": "a", "prompt": "b"}', "key 'prompt' comes twice"),
    ('{"prompt": "\\ud800"}', "surrogate"),
    ('{"prompt": "a", "meta": {"x": NaN}}', "NaN"),
    ('{"prompt": "a", "sampler": "sjd"}', "sampler is 'sjd'"),
    ('{"prompt": "a", "sampler": {"name": "sjd"}}', "sampler.name is given"),
    ('{"prompt": "a", "sampling.top_kk": 1}', "Did you mean 'top_k'?"),
    (
        '{"prompt": "a", "sampling.top_k": 1, "sampling": {"top_k": 1}}',
        "sampling.top_k is given twice",
    ),
    ('{"prompt": "a", "source": 3}', "source is 3"),
    ('{"prompt": "a", "sampler.": 1}', "unknown key"),
    ("[" * 5000, "no JSON"),
    ('{"seed": ' + "1" * 5000 + "}", "no JSON"),
]
OF_AN_ENTRY = [
    ('{"prompt": "a", "sampler.windw": 8}', "Did you mean 'window'?"),
    ('{"prompt": "a", "sampler.window": 0}', "window is 0"),
    ('{"prompt": "a", "sampling.top_p": 2}', "sampling.top_p is 2"),
    ('{"prompt": "a", "source": "absent.png"}', "source is not a file"),
    ('{"prompt": "a", "prefix": "absent.png"}', "prefix is not a file"),
    ('{"prompt": "a", "span": "1:2"}', "got span"),
]


@pytest.mark.parametrize("text, words", WRONG + OF_AN_ENTRY)
def test_a_wrong_row_of_a_file_is_named_with_its_line_and_the_others_go_on(tmp_path, text, words):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "before", "id": "first"}\n\n' + text + '\n{"prompt": "after"}\n')
    made = of(path)
    before, wrong, after = made.entries[0].rows()
    assert (
        wrong.error.startswith("p.jsonl, line 3: ")
        and words in wrong.error
        and len(wrong.error) < 500
        and "\n" not in wrong.error
    )
    assert (before.prompt, after.prompt, before.error, after.error) == (
        "before",
        "after",
        None,
        None,
    )
    path.write_text(
        '{"prompt": "before", "id": "first"}\n\n{"prompt": "mended"}\n{"prompt": "after"}\n'
    )
    assert fingerprint(of(path)) != fingerprint(made) and not any(
        r.error for r in of(path).entries[0].rows()
    )  # control


@pytest.mark.parametrize(
    "got, words",
    [
        (3, "prompts.1 is 3"),
        ({}, "there is no prompt"),
        ({"prompt": "a", "sede": 1}, "'seed'"),
        ({"prompt": "b", "id": "x"}, "prompts.0 has the same id"),
        ({"prompt": "a", "sampler.windw": 8}, "'window'"),
        ({"prompt": "a", "prefix": "no.png"}, "prefix is not a file"),
        ({"prompt": "a", "meta": {"x": object()}}, "no plain data"),
    ],
)
def test_a_wrong_row_of_the_job_itself_is_refused_at_once(got, words):
    with pytest.raises(GenError) as caught:
        job(prompts=[{"prompt": "fine", "id": "x"}, got])
    assert (
        words in str(caught.value)
        and "prompts.1" in str(caught.value)
        and "test" in str(caught.value)
    )


def test_bytes_that_are_no_text_spoil_their_own_line(tmp_path):
    for name, head in (("a.txt", b""), ("a.csv", b"prompt\n"), ("a.jsonl", b"")):
        quote = b'"' if name == "a.jsonl" else b""
        (tmp_path / name).write_bytes(
            head + b"\n".join(quote + x + quote for x in (b"one", b"caf\xe9", "caf\xe9".encode()))
        )
        rows = list(iter_rows(tmp_path / name))
        assert [r.prompt for r in rows if not r.error] == ["one", "caf\xe9"]
        assert (
            f"{name}, line {len(head.splitlines()) + 2}: no UTF-8 text" in rows[1].error
            and "\\xe9" in rows[1].raw
        )


def test_rows_of_a_table_with_other_cells_than_the_header_are_wrong(tmp_path):
    (tmp_path / "a.csv").write_text(
        'prompt,seed\none,1\ntwo\nthree,3,3\n\n"fo\nur",\nfive,x\nsix,7.0\n"a"b,1\n'
    )
    rows = list(iter_rows(tmp_path / "a.csv"))
    assert [(r.line, r.prompt, r.seed) for r in rows if not r.error] == [
        (2, "one", 1),
        (6, "fo\nur", None),
        (9, "six", 7),
    ]
    assert (
        "line 3: the number of cells is 1; expected 2" in rows[1].error
        and "line 4: the number of cells is 3" in rows[2].error
    )
    assert "line 8: seed is 'x'" in rows[4].error and "line 10: no CSV" in rows[6].error


def test_cells_are_read_as_yaml_only_where_they_are_parameters(tmp_path):
    head = "prompt,id,span,source,sampler.x,sampler.y,sampler.z,sampler.w,meta.n"
    (tmp_path / "a.csv").write_text(f"{head}\n12,07,1:2,s,1e-4,true,null,abc,3\n")
    assert trees(tmp_path / "a.csv") == [
        {
            "prompt": "12",
            "id": "07",
            "source": str(tmp_path / "s"),
            "span": "1:2",
            "sampler": {"x": 1e-4, "y": True, "z": None, "w": "abc"},
            "meta": {"n": "3"},
        }
    ]


@pytest.mark.parametrize(
    "name, text, words",
    [
        ("a.csv", "prompt,sampler.\na,1\n", "unknown key 'sampler.'"),
        ("a.csv", "prompt,sampling.top_kk\na,1\n", "Did you mean 'top_k'?"),
        ("a.csv", "seed\n1\n", "no column 'prompt'"),
        ("a.csv", "prompt,prompt\na,b\n", "comes twice"),
        ("a.csv", "", "at least one prompt"),
        ("a.csv", "prompt\n", "at least one prompt"),
        ("a.csv", 'prompt\na\n"b\nc\n', "line 3: a quote is opened and never closed"),
        ("a.txt", "\n \n", "at least one prompt"),
        ("a.jsonl", "", "at least one prompt"),
        ("a.jsonl", "{\n[\n", "no valid row; the first error: a.jsonl, line 1"),
        ("a.jsonl", '{"prompt": "a", "sampler.windw": 1}', "no valid row"),
        ("a.json", "a", ".txt, .jsonl, .csv, .tsv, .parquet"),
        ("prompts", "a", ".txt, .jsonl, .csv, .tsv, .parquet"),
        ("a.parquet", "no table", "not a readable Parquet file"),
    ],
)
def test_a_file_of_no_use_is_refused_as_a_whole(tmp_path, name, text, words):
    if name == "a.parquet":
        pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    (tmp_path / name).write_text(text)
    with pytest.raises(GenError) as caught:
        of(tmp_path / name)
    assert (
        words in str(caught.value)
        and str(tmp_path / name) in str(caught.value)
        and "\n" not in str(caught.value)
    )


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(GenError, match=r'pip install "gen-toolkit\[parquet\]"'):
        of(tmp_path / "a.parquet")


# --- rows and their entry


def test_media_of_a_row_are_relative_to_its_file_and_count_by_their_content(tmp_path):
    for folder, content in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.png").write_bytes(content)
        jsonl(tmp_path / folder / "p.jsonl", [{"prompt": "a", "source": "x.png", "mask": "x.png"}])
    made = [of(tmp_path / f / "p.jsonl") for f in "abc"]
    assert next(made[0].entries[0].rows()).start == {
        "source": str(tmp_path / "a/x.png"),
        "mask": str(tmp_path / "a/x.png"),
    }
    assert fingerprint(made[0]) == fingerprint(made[1]) != fingerprint(made[2])


def test_two_names_of_one_parameter_are_one_row(tmp_path):
    own = job(sampler="llada2", prompts=[{"prompt": "a", "sampler": {"block_steps": 4}}])
    said = job(sampler="llada2", prompts=[{"prompt": "a", "sampler": {"num_inference_steps": 4}}])
    assert next(said.entries[0].rows()).sampler == {"block_steps": 4} and fingerprint(
        said
    ) == fingerprint(own)
    write_rows(said.entries[0].rows(), tmp_path / "a.jsonl")
    assert fingerprint(
        job(sampler="llada2", prompts_file=str(tmp_path / "a.jsonl"))
    ) == fingerprint(own)


def test_rows_that_say_the_same_are_checked_once(tmp_path, monkeypatch):
    made = of(
        jsonl(
            tmp_path / "a.jsonl",
            [{"prompt": f"a {i}", "seed": i, "sampler.window": 1 + i % 3} for i in range(300)],
        )
    )
    calls, resolve = [], gen.core.resolve.resolve_sampler
    monkeypatch.setattr(
        gen.core.resolve, "resolve_sampler", lambda *a: calls.append(a) or resolve(*a)
    )
    assert len(list(made.entries[0].rows())) == 300 and len(calls) == 3


def test_thousands_of_rows_are_read_quickly_and_counted_once(tmp_path, monkeypatch):
    path = jsonl(
        tmp_path / "a.jsonl",
        [
            {"prompt": f"a red circle {i}", "seed": i, "sampling.guidance_scale": 1 + i % 4}
            for i in range(3_000)
        ],
    )
    start = time.perf_counter()
    made = of(path)
    assert time.perf_counter() - start < 2  # 0.2 s on one idle core
    monkeypatch.setattr("gen.config.entries.iter_rows", None)  # so that another look would fail
    assert made.entries[0].relevant()["prompts"]["rows"] == 3_000 and fingerprint(
        made
    ) == fingerprint(made)


def test_a_file_is_not_held_as_a_whole(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", ["x" * 8000 + str(i) for i in range(250)])

    def peak(read) -> int:
        tracemalloc.start()
        try:
            read(iter_rows(path))
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert (
        peak(take_census) < path.stat().st_size / 8 and peak(list) > path.stat().st_size
    )  # control: a list holds them all
