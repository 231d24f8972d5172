"""What generation starts from, files of arrays, further files of a medium in jobs, and which
samplers a model serves."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from ledgers import write_rows
from toyjob import PROMPTS, Pipe, Toy, leftovers, run

from gen.__main__ import main
from gen.config.job import make_job
from gen.contracts.protocol import protocols_of
from gen.core.edit_spec import EDIT_FIELDS, MEDIA, EditSpec
from gen.core.errors import GenError
from gen.core.resolve import resolve_sampler
from gen.media.npz import read_npz, write_npz
from gen.pipeline.pipeline import Pipeline
from gen.store.ledger import Journal, read_rows

# --- starts


@pytest.mark.parametrize(
    ("start", "words"),
    [
        ({"source": "a.png"}, "editing needs a source and one of mask and span; got source"),
        ({"mask": "m.png"}, "got mask"),
        ({"span": "2:3"}, "got span"),
        ({"source": "a", "mask": "m", "span": "2:3"}, "got source, mask, span"),
        ({"mask": "m", "span": "2:3"}, "got mask, span"),
        (
            {"source": "a", "span": "2:3", "prefix": "b"},
            "source and prefix are both given",
        ),
        ({"source": "a", "span": "2:3", "frames": 8}, "an edit keeps its length"),
        ({"source": "a", "span": ""}, "span is ''; expected text such as '20:60'"),
        ({"source": "a", "span": " "}, "expected text"),
        ({"source": "a", "span": 3}, "span is 3"),
        ({"source": "a", "span": ["2:3"]}, "expected text"),
        ({"frames": 0}, "frames is 0; expected an integer of at least 1"),
        ({"frames": -4}, "at least 1"),
        ({"frames": 4.0}, "frames is 4.0"),
        ({"frames": True}, "frames is True"),
        ({"frames": "8"}, "frames is '8'"),
    ],
)
def test_starts_that_contradict_themselves_are_refused_in_python_and_in_job_files(
    start, words, tmp_path
):
    with pytest.raises(GenError, match=words):
        EditSpec(**start)
    for name in MEDIA:
        if name in start:
            (tmp_path / start[name]).write_text("there")
    with pytest.raises(GenError, match=f"{words}.*a test"):
        make_job(
            {"modality": "image", "prompts": ["a red circle"], **start},
            where="a test",
            base=tmp_path,
        )


def test_starts_that_make_sense_are_taken(tmp_path):
    medium = np.zeros((4, 4), bool)  # whose truth is nobody's question
    for start in (
        {},
        {"source": medium, "mask": medium},
        {"source": "a", "span": "2:3"},
        {"prefix": medium},
        {"frames": 8},
        {"prefix": "a", "frames": 8},
    ):
        assert {
            k: getattr(EditSpec(**start), k)
            for k in EDIT_FIELDS
            if getattr(EditSpec(**start), k) is not None
        }.keys() == start.keys()
    (tmp_path / "a").write_text("there")
    job = make_job(
        {"modality": "image", "prompts": ["a red circle"], "prefix": "a", "frames": 8},
        where="a test",
        base=tmp_path,
    )
    assert job.entries[0].start == EditSpec(prefix=str(tmp_path / "a"), frames=8)
    assert '"frames": 8' in json.dumps(job.to_dict())


def test_a_start_counts_by_the_content_of_its_files(tmp_path):
    from gen.config.entries import fingerprint

    for name, text in (("a", "one"), ("b", "one"), ("c", "two")):
        (tmp_path / name).write_text(text)

    def of(**start):
        return fingerprint(
            make_job(
                {"modality": "image", "prompts": ["a red circle"], **start},
                where="a test",
                base=tmp_path,
            )
        )

    assert of(prefix="a") == of(prefix="b") != of(prefix="c")
    assert (
        len(
            {
                of(),
                of(frames=8),
                of(frames=12),
                of(source="a", span="2:3"),
                of(source="a", span="2:4"),
            }
        )
        == 5
    )


# --- arrays


def test_files_of_arrays_depend_on_what_they_hold_alone(tmp_path, monkeypatch):
    import time

    arrays = {
        "x": np.arange(12.0).reshape(3, 4),
        "flags": np.array([True, False]),
        "said": "zwölf 🚶",
        "n": np.array(7),
    }

    def other(path):
        return zipfile.ZipFile(path, "w").writestr(
            "x.npy", b"x"
        )  # control: a writer that looks at the clock

    write_npz(tmp_path / "a.npz", arrays)
    other(tmp_path / "c")
    monkeypatch.setattr(
        zipfile.time, "localtime", lambda *_: time.struct_time((2031, 5, 6, 7, 8, 10, 0, 0, 0))
    )
    write_npz(tmp_path / "b.npz", arrays)
    other(tmp_path / "d")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    assert (tmp_path / "c").read_bytes() != (tmp_path / "d").read_bytes()
    found = read_npz(tmp_path / "a.npz", tuple(arrays))
    for name, array in arrays.items():
        assert np.array_equal(found[name], array) and found[name].dtype == np.asarray(array).dtype
    with np.load(tmp_path / "a.npz") as plain:  # numpy reads it as its own
        assert plain.files == list(arrays)


def test_files_that_hold_no_arrays_are_one_clear_line(tmp_path):
    path = tmp_path / "a.npz"
    write_npz(path, {"x": np.random.default_rng(0).normal(size=400)})
    whole = path.read_bytes()
    assert len(read_npz(path, ("x",))["x"]) == 400
    with pytest.raises(GenError, match=r"a.npz has no 'y'; it has x$"):
        read_npz(path, ("x", "y"))
    with pytest.raises(GenError, match="b.npz does not exist, or is no regular file"):
        read_npz(tmp_path / "b.npz", ("x",))
    flipped = [
        whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :] for at in range(40, 400, 24)
    ]
    for data in (b"", b"hello", whole[:200], whole[:-10], *flipped):
        path.write_bytes(data)
        with pytest.raises(GenError, match=r"a.npz cannot be read as an .npz file"):
            read_npz(path, ("x",))
    np.save(tmp_path / "one.npy", np.zeros(3))
    np.savez(tmp_path / "objects.npz", x=np.array([1, {}], object))
    with pytest.raises(GenError, match="cannot be read as an .npz file"):
        read_npz(tmp_path / "one.npy", ("x",))
    with pytest.raises(GenError, match="objects.npz, array x.npy holds Python objects"):
        read_npz(tmp_path / "objects.npz", ("x",))
    with pytest.raises(GenError, match="or is no regular file; expected an .npz file$"):
        read_npz(tmp_path, ("x",))


# --- further files of a medium


class Company(Toy):
    """One that writes two further files. ``bad``: their extension that cannot be written;
    ``problem``: what it raises."""

    also = ("log", "csv")
    bad: tuple = ()
    problem: type = ValueError

    def save_also(self, media, path, info):
        if path.suffix[1:] in self.bad and media.startswith("beta"):
            raise self.problem("no room for this")
        path.write_text(f"{media} as {path.suffix}")


def company(**params):
    pipe = Pipe()
    pipe.modality = type("Company", (Company,), params)()
    return pipe


def names(out: Path) -> list[str]:
    return sorted(p.name for p in out.iterdir() if p.suffix in (".txt", ".log", ".csv"))


@pytest.mark.usefixtures("toy")
def test_further_files_stand_beside_a_medium_before_its_row_does(tmp_path, monkeypatch):
    seen, add = [], Journal.add

    def watched(self, rows):
        seen.extend(
            all((tmp_path / "a" / n).is_file() for n in (row["file"], *row.get("also", ())))
            for row in rows
        )
        add(self, rows)

    monkeypatch.setattr(Journal, "add", watched)
    summary, _ = run(tmp_path / "a", company())
    rows = read_rows(tmp_path / "a")
    assert seen == [True] * 3 and not summary["failed"]
    assert (
        rows[0]["also"] == ["000000-alpha-s0.log", "000000-alpha-s0.csv"]
        and rows[0]["file"] == "000000-alpha-s0.txt"
    )
    assert names(tmp_path / "a") == sorted(
        n for r in rows for n in (r["file"], *r["also"])
    ) and not leftovers(tmp_path / "a")
    assert (tmp_path / "a" / rows[1]["also"][0]).read_text().endswith("as .log")
    again, pipe = run(tmp_path / "a", company())
    assert again["skipped"] == 3 and not pipe.batches
    monkeypatch.setattr(Journal, "add", add)
    run(tmp_path / "b")  # control: a modality without any
    assert all("also" not in r for r in read_rows(tmp_path / "b"))


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("bad", [("log",), ("csv",)])
def test_a_further_file_that_cannot_be_written_is_one_failed_item(bad, tmp_path):
    summary, _ = run(tmp_path / "a", company(bad=bad))
    rows = read_rows(tmp_path / "a")
    assert [r["status"] for r in rows] == ["ok", "failed", "ok"] and len(summary["failed"]) == 1
    assert (
        "could not be saved: ValueError: no room for this" in rows[1]["error"]
        and rows[1]["file"] is None
        and "also" not in rows[1]
    )
    assert (
        not [n for n in names(tmp_path / "a") if n.startswith("000001")]
        and len(names(tmp_path / "a")) == 6
    )
    assert not leftovers(tmp_path / "a")
    mended, pipe = run(tmp_path / "a", company(), retry="failed")
    assert not mended["failed"] and pipe.batches == [["beta"]] and len(names(tmp_path / "a")) == 9


@pytest.mark.usefixtures("toy")
def test_a_medium_that_cannot_be_saved_leaves_no_further_files(tmp_path):
    def save(self, media, path, info):
        if media.startswith("beta"):
            raise ValueError("no such format")
        Toy.save(self, media, path, info)

    run(tmp_path / "a", company(save=save))
    assert [r["status"] for r in read_rows(tmp_path / "a")] == ["ok", "failed", "ok"]
    assert (
        not [n for n in names(tmp_path / "a") if n.startswith("000001")]
        and len(names(tmp_path / "a")) == 6
    )


@pytest.mark.usefixtures("toy")
def test_a_new_job_that_fails_at_once_takes_its_further_files_back(tmp_path):
    def refuse(self, media, path, info):
        raise GenError("the wrong kind of medium")

    with pytest.raises(GenError, match="wrong kind"):
        run(tmp_path / "a", company(save=refuse))
    assert not (tmp_path / "a").exists()
    late = company(bad=("csv",), problem=GenError)
    with pytest.raises(GenError, match="no room"):  # control: with an item done, what is done stays
        run(tmp_path / "b", late)
    assert [r["index"] for r in read_rows(tmp_path / "b")] == [
        0
    ] and "000000-alpha-s0.log" in names(tmp_path / "b")


def test_a_modality_that_names_files_and_does_not_write_them_says_so():
    from gen.modalities.image.modality import ImageModality

    lazy = type("Lazy", (ImageModality,), {"also": ("log",)})()
    with pytest.raises(
        NotImplementedError, match=r"names files \('log',\) and does not write them"
    ):
        lazy.save_also(None, Path("a.log"), {})


def test_a_page_shows_the_further_file_that_can_be_seen(tmp_path):
    from PIL import Image

    from gen.gallery.write import write_gallery

    row = {
        "id": "000000",
        "modality": "toy",
        "prompt": PROMPTS[0],
        "seed": 0,
        "sampler": "sjd",
        "model": "m",
        "file": "a.npz",
        "status": "ok",
        "nfe": 3,
    }
    (tmp_path / "a.npz").write_bytes(b"numbers")
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")

    def page(**more) -> str:
        write_rows(tmp_path / "manifest.jsonl", [{**row, **more}])
        return write_gallery(tmp_path).read_text()

    shown = page(also=["a.bvh", "a.png"])
    assert 'src="a.png"' in shown and 'class="box" href="a.npz"' not in shown
    for also in ({}, {"also": ["missing.png"]}, {"also": ["a.bvh"]}):  # controls
        plain = page(**also)
        assert 'class="box" href="a.npz"' in plain and 'src="a.png"' not in plain
    (tmp_path / "out").mkdir()
    assert "secret" not in page(also=["../secret.png"])  # a manifest shows nothing from elsewhere


# --- what a model serves


@pytest.mark.parametrize(
    ("config", "served", "refused"),
    [
        ({}, {"causal": "autoregressive"}, "maskgit"),
        ({"causal": True}, {"causal": "sjd"}, "frame_blocks"),
        ({"causal": False}, {"masked": "halton"}, "sjd"),
        ({"causal": False, "block_length": 64}, {"blocks": "frame_blocks"}, "maskgit"),
        (
            {"causal": False, "block_length": 64, "whole": True},
            {"blocks": "frame_blocks", "masked": "maskgit"},
            "autoregressive",
        ),
    ],
)
def test_a_model_serves_the_samplers_that_its_config_says(config, served, refused, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gen_grid_llama", **config}))
    assert protocols_of(tmp_path) == tuple(served)
    pipe = Pipeline("video", tmp_path)
    for name in served.values():
        assert pipe.model_name(resolve_sampler(name)[0]) == str(tmp_path)
    with pytest.raises(
        GenError, match=f"is a {' and '.join(served)} one of codes, but the sampler needs a"
    ):
        pipe.model_name(resolve_sampler(refused)[0])


def test_the_command_line_says_what_a_start_lacks(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.png").write_bytes(b"")
    for words, said in (
        (["--source", "a.png"], "one of mask and span"),
        (["--span", "2:3"], "got span"),
        (["--frames", "0"], "frames is 0"),
        (["--source", "b.png", "--span", "2:3"], "is not a file"),
    ):
        assert main(["sample", "image", "a red circle", *words, "--out", "o"]) == 2
        assert said in capsys.readouterr().err and not Path("o").exists()
