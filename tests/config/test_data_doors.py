"""Data sets that others made: foreign columns, the column of the prompts, patterns, compressed
files, and the data sets of ``datasets``."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from gen.config import prompt_files
from gen.config.entries import fingerprint
from gen.config.inputs import iter_rows
from gen.config.job import load_config, make_job
from gen.core.errors import GenError

GENEVAL = [
    {"tag": "single_object", "include": [{"class": "bench", "count": 1}], "prompt": "a red circle"},
    {"tag": "counting", "include": [], "exclude": None, "prompt": "a blue ring", "seed": 4},
]
PARTI = 'Prompt\tCategory\tNote\na red circle\tAbstract\ta "word"\na blue ring\tWorld\t\n'


def jsonl(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def job(path: Path | str, *overrides: str, **keys):
    tree = {"modality": "image", "sampler": "sjd", "prompts_file": str(path), **keys}
    return make_job(tree, overrides, where="test")


def refusal(path, *overrides: str, **keys) -> str:
    with pytest.raises(GenError) as caught:
        job(path, *overrides, **keys)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_foreign_columns_go_to_meta_with_a_note(tmp_path):
    made = job(jsonl(tmp_path / "geneval.jsonl", GENEVAL))
    first, second = made.entries[0].rows()
    assert first.error is None and first.prompt == "a red circle"
    assert first.meta == {"tag": "single_object", "include": [{"class": "bench", "count": 1}]}
    assert second.meta == {"tag": "counting", "include": []} and second.seed == 4
    assert made.notes() == ["columns tag, include, exclude of geneval.jsonl go to meta"]


def test_a_column_that_looks_like_a_misspelt_key_is_named_as_one(tmp_path):
    made = job(jsonl(tmp_path / "a.jsonl", [{"prompt": "a ring", "num_sample": 3}]))
    assert "num_sample (a misspelt num_samples?)" in made.notes()[0]
    assert job(jsonl(tmp_path / "b.jsonl", [{"prompt": "a ring", "seed": 3}])).notes() == []


def test_parameters_of_a_row_stay_strict_and_so_does_a_job_file(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "a ring", "sampler": {"windw": 3}}])
    assert "Did you mean 'window'" in refusal(path)
    with pytest.raises(GenError, match="unknown key 'tag'"):
        make_job({"modality": "image", "prompts": [{"prompt": "a", "tag": 1}]}, where="test")


@pytest.mark.parametrize("name", ["p.tsv", "p.csv", "p.jsonl", "p.parquet"])
def test_the_prompts_may_be_in_another_column(tmp_path, name):
    rows = [{"Prompt": "a red circle", "Category": "Abstract"}, {"Prompt": "a blue ring"}]
    path = tmp_path / name
    if name.endswith("tsv"):
        path.write_text(PARTI)
    elif name.endswith("csv"):
        path.write_text("Prompt,Category\na red circle,Abstract\na blue ring,\n")
    elif name.endswith("parquet"):
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet

        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        jsonl(path, rows)
    said = refusal(path)
    assert "prompt_column=Prompt" in said if name != "p.jsonl" else "no prompt" in said
    made = job(path, "prompt_column=Prompt")
    first, second = made.entries[0].rows()
    assert (first.prompt, second.prompt) == ("a red circle", "a blue ring")
    assert first.meta["Category"] == "Abstract" and not first.error and not second.error
    again = make_job({**made.to_dict()}, where="again")
    assert fingerprint(again) == fingerprint(made) and again.entries == made.entries
    assert "Prompt" in refusal(path, "prompt_column=Promt")


def test_a_column_prompt_beside_the_named_one_goes_to_meta(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "x", "caption": "a ring", "meta": {"a": 1}}])
    (row,) = iter_rows(path, "caption")
    assert row.prompt == "a ring" and row.meta == {"a": 1, "prompt": "x"}


def test_what_json_cannot_hold_becomes_text_or_is_left_out(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import datetime

    import pyarrow.parquet

    rows = [
        {
            "prompt": "a ring",
            "image": {"bytes": b"\x89PNG", "path": None},
            "score": float("nan"),
            "day": datetime.date(2026, 1, 2),
            "meta": "foreign",
        }
    ]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    (row,) = iter_rows(tmp_path / "a.parquet")
    assert row.error is None and row.meta == {"day": "2026-01-02", "meta": "foreign"}


def test_a_pattern_stands_for_all_its_files_in_order(tmp_path):
    jsonl(tmp_path / "b-2.jsonl", [{"prompt": "two", "id": "x"}, {"nothing": 1}])
    jsonl(tmp_path / "b-1.jsonl", [{"prompt": "one", "id": "y"}, {"prompt": "uno", "id": "x"}])
    rows = list(iter_rows(tmp_path / "b-*.jsonl"))
    assert [(r.line, r.prompt) for r in rows] == [(1, "one"), (2, "uno"), (3, "two"), (4, "")]
    assert (
        "b-2.jsonl, line 1" in rows[2].error
        and "b-1.jsonl, line 2 has the same id" in rows[2].error
    )
    assert "b-2.jsonl, line 2: there is no prompt" in rows[3].error
    made = job(tmp_path / "b-*.jsonl")
    (tmp_path / "one.jsonl").write_text((tmp_path / "b-1.jsonl").read_text())
    assert made.entries[0].census.rows == 4
    assert "not a file" in refusal(tmp_path / "c-*.jsonl")
    before = fingerprint(made)
    jsonl(tmp_path / "b-3.jsonl", [{"prompt": "three"}])
    assert fingerprint(job(tmp_path / "b-*.jsonl")) != before


def test_a_file_whose_name_has_the_signs_of_a_pattern_is_that_file(tmp_path):
    jsonl(tmp_path / "a[1].jsonl", [{"prompt": "x"}])
    assert [r.prompt for r in iter_rows(tmp_path / "a[1].jsonl")] == ["x"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.csv", "a.tsv"])
def test_a_compressed_file_gives_the_rows_of_the_plain_one(tmp_path, name):
    text = {
        "a.jsonl": '{"prompt": "é ring", "seed": 3}\n"two"\n',
        "a.txt": "é ring\n\ntwo\n",
        "a.csv": '\ufeffprompt,seed\n"é ""ring""\nx",3\ntwo,\n',
        "a.tsv": "prompt\tseed\né ring\t3\ntwo\t\n",
    }[name]
    (tmp_path / name).write_text(text, newline="")
    with gzip.open(tmp_path / f"{name}.gz", "wt", encoding="utf-8", newline="") as file:
        file.write(text)
    plain, packed = list(iter_rows(tmp_path / name)), list(iter_rows(tmp_path / f"{name}.gz"))
    assert plain == packed and len(plain) == 2 and not any(r.error for r in plain)


def test_a_damaged_compressed_file_is_an_error_with_its_name(tmp_path):
    data = gzip.compress(b"a ring\n" * 1000)
    (tmp_path / "a.txt.gz").write_bytes(data[: len(data) // 2])
    assert "a.txt.gz cannot be read" in refusal(tmp_path / "a.txt.gz")
    (tmp_path / "b.txt.gz").write_bytes(b"no gzip")
    assert "b.txt.gz cannot be read" in refusal(tmp_path / "b.txt.gz")


@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.jsonl.gz"])
def test_a_line_without_end_is_refused_before_it_is_in_memory(tmp_path, monkeypatch, name):
    monkeypatch.setattr(prompt_files, "LONGEST_LINE", 1000)
    write = gzip.open if name.endswith("gz") else open
    with write(tmp_path / name, "wb") as file:
        file.write(b"prompt\n" + b"x" * 100_000)
    assert "longer than 1,000 bytes" in refusal(tmp_path / name)


# --- data sets


@pytest.fixture
def offline(monkeypatch, tmp_path):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    return datasets


def data_set_job(options, *overrides: str, **keys):
    tree = {"modality": "image", "sampler": "sjd", "prompts_dataset": options, **keys}
    return make_job(tree, overrides, where="test")


def test_a_data_set_gives_the_rows_of_its_file(offline, tmp_path):
    (tmp_path / "set").mkdir()
    jsonl(tmp_path / "set" / "train.jsonl", GENEVAL)
    jsonl(tmp_path / "set" / "test.jsonl", GENEVAL[:1])
    made = data_set_job(str(tmp_path / "set"))
    plain = job(tmp_path / "set" / "train.jsonl")
    assert [r.prompt for r in made.entries[0].rows()] == ["a red circle", "a blue ring"]
    assert [r.meta for r in made.entries[0].rows()] == [r.meta for r in plain.entries[0].rows()]
    assert "tag" in made.notes()[0] and made.entries[0].prompts_file is None
    test = data_set_job(
        str(tmp_path / "set"), "prompts_dataset={path: %s, split: test}" % (tmp_path / "set")
    )
    assert test.entries[0].census.rows == 1
    (tmp_path / "job.yaml").write_text(made.to_yaml())
    assert fingerprint(load_config(tmp_path / "job.yaml")) == fingerprint(made)


def test_a_saved_data_set_with_images_leaves_them_out(offline, tmp_path):
    import numpy as np
    from PIL import Image

    image = Image.fromarray(np.zeros((4, 4, 3), np.uint8))
    rows = {"caption": ["a red circle"], "image": [image], "score": [0.5]}
    features = offline.Features(
        {
            "caption": offline.Value("string"),
            "image": offline.Image(),
            "score": offline.Value("float32"),
        }
    )
    offline.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "set"))
    with pytest.raises(GenError, match="prompt_column=caption"):
        data_set_job(str(tmp_path / "set"))
    made = data_set_job({"path": str(tmp_path / "set")}, prompt_column="caption")
    assert made.entries[0].prompts == [{"prompt": "a red circle", "meta": {"score": 0.5}}]
    assert made.notes() == ["columns image, score of the data set go to meta"]


def test_the_revision_reaches_the_hub(offline, monkeypatch):
    seen = {}

    def load_dataset(path, **how):
        seen.update(how, path=path)
        return offline.Dataset.from_list([{"Prompt": "a red circle"}])

    monkeypatch.setattr(offline, "load_dataset", load_dataset)
    options = {"path": "nateraw/parti-prompts", "revision": "abc123", "split": "train[:1]"}
    made = data_set_job(options, prompt_column="Prompt")
    assert seen == options and made.entries[0].prompts == ["a red circle"]


@pytest.mark.parametrize(
    "options, says",
    [
        ({"path": "x", "splt": "train"}, "Did you mean 'split'"),
        ({"split": "train"}, "a path, or"),
        (3, "a path, or"),
        ({"path": 3}, "prompts_dataset.path is 3"),
        ({"path": "x", "revision": ["a"]}, "a text"),
        ("/nowhere/at/all", "cannot be loaded"),
    ],
)
def test_a_wrong_data_set_is_refused_in_one_line(offline, options, says):
    with pytest.raises(GenError) as caught:
        data_set_job(options)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_one_source_of_prompts_is_given(tmp_path):
    jsonl(tmp_path / "a.jsonl", GENEVAL)
    assert "both prompts_file and prompts_dataset" in refusal(
        tmp_path / "a.jsonl", prompts_dataset="x"
    )
    with pytest.raises(GenError, match="prompt_column is 'x'"):
        make_job({"modality": "image", "prompts": ["a"], "prompt_column": "x"}, where="test")
