"""The job engine: batches, resume, retries, crashes and full disks, on a pipeline that needs no
model."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from toyjob import (
    Pipe,
    Toy,
    files,
    job,
    leftovers,
    run,
    steady,
    toy,  # noqa: F401  a fixture
)

from gen.config.job import load_config
from gen.core.errors import GenError
from gen.core.files import slug
from gen.core.memory import is_out_of_memory
from gen.core.processes import host, worker_name
from gen.store.ledger import Journal, read_plan, read_rows

pytestmark = pytest.mark.usefixtures("toy")


def traces(out: Path) -> dict:
    return {p.stem: json.loads(p.read_text()) for p in (out / "traces").iterdir()}


# --- the folder


def test_a_job_leaves_media_manifest_config_traces_and_gallery(tmp_path):
    summary, _ = run(tmp_path / "o", num_samples=2, seed=5, trace=2)
    rows = read_rows(tmp_path / "o")
    assert (
        [r["index"] for r in rows] == list(range(6))
        and all(len(r["id"]) == 16 for r in rows)
        and len({r["id"] for r in rows}) == 6
    )
    assert (
        rows[3]["file"] == "000003-beta-s6.txt"
        and rows[3]["seed"] == 6
        and rows[3]["prompt"] == "beta"
    )
    want = (
        "id index modality prompt seed sampler model file sha256 bytes nfe tokens tokens_computed"
        " positions_computed mean_acceptance_length"
    )
    want = set(
        f"{want} draft_acceptance_rate status error guarantee beside_sha256 trace_sha256"
        " attempt seconds batch worker".split()
    )
    assert (
        set(rows[0]) == want
        and rows[0]["guarantee"] == "same_distribution"
        and rows[0]["batch"] == 6
    )
    for row in rows:
        assert (
            hashlib.sha256((tmp_path / "o" / row["file"]).read_bytes()).hexdigest() == row["sha256"]
        )
    steps = [{"window": [0, 1], "accepted": [0], "committed": {"0": 7}, "removed": []}]
    assert traces(tmp_path / "o") == {rows[i]["id"]: steps for i in (0, 1)}
    assert read_plan(tmp_path / "o")["items"][3]["id"] == rows[3]["id"]
    assert load_config(tmp_path / "o/config.yaml") == job(
        tmp_path / "o", num_samples=2, seed=5, trace=2
    )
    assert (
        summary["by_sampler"] == {"sjd": {"items": 6, "nfe": 3, "seconds": 0.5}}
        and summary["failed"] == []
    )
    assert (tmp_path / "o/index.html").read_text() == "6 items"
    assert b"sampling" in files(tmp_path / "o")["000000-alpha-s5.txt"] and not leftovers(
        tmp_path / "o"
    )


def test_several_entries_share_one_folder_and_one_numbering(tmp_path):
    summary, _ = run(tmp_path, jobs=[{"sampler": "sjd"}, {"sampler": "maskgit"}])
    rows = read_rows(tmp_path)
    assert [r["sampler"] for r in rows] == ["sjd"] * 3 + ["maskgit"] * 3 and len(
        {r["file"] for r in rows}
    ) == 6
    assert list(summary["by_sampler"]) == ["sjd", "maskgit"]
    assert set(traces(tmp_path)) == {rows[i]["id"] for i in (0, 3)}


def test_media_do_not_depend_on_the_batch_size(tmp_path):
    made = []
    for size in (1, 2, 8):
        _, pipe = run(tmp_path / str(size), batch_size=size, num_samples=3)
        assert max(map(len, pipe.batches)) == min(size, 9)
        made.append(files(tmp_path / str(size)))
    assert made[0] == made[1] == made[2] and len(made[0]) == 9


@pytest.mark.parametrize(
    "text, want",
    [
        ("A small BLUE ring!", "a-small-blue-ring"),
        ("../../etc/passwd", "etc-passwd"),
        ("☃", "item"),
        ("été", "ete"),
        ("x" * 90, "x" * 40),
        ("a b" * 40, None),
    ],
)
def test_file_names_are_short_and_harmless(text, want):
    got = slug(text)
    assert (
        len(got) <= 40
        and not set(got) - set("abcdefghijklmnopqrstuvwxyz0123456789-")
        and (want is None or got == want)
    )


# --- refusals


def test_a_bad_prompt_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(GenError, match="holds '!'"):
        run(tmp_path / "o", jobs=[{"sampler": "sjd"}, {"prompts": ["fine", "not!"]}])
    assert not (tmp_path / "o").exists()


def test_a_folder_with_another_job_is_refused_with_the_difference(tmp_path):
    run(tmp_path)
    before = files(tmp_path)
    with pytest.raises(GenError, match="seed: was 0, now 7"):
        run(tmp_path, seed=7)
    with pytest.raises(GenError, match="sampler.window: was 16, now 3"):
        run(tmp_path, sampler={"name": "sjd", "window": 3})
    assert files(tmp_path) == before


def test_runtime_keys_may_change_between_runs(tmp_path):  # the negative control of the test above
    run(tmp_path)
    assert run(tmp_path, batch_size=2, trace=0)[0]["skipped"] == 3


def test_a_folder_that_is_no_job_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(GenError, match="not empty"):
        run(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(GenError, match="is a file"):
        run(tmp_path / "thesis.txt")


def test_a_run_refused_by_the_pipeline_leaves_no_job_behind(tmp_path):
    pipe = Pipe()
    pipe.generate = lambda *a, **k: (_ for _ in ()).throw(GenError("no model for that"))
    with pytest.raises(GenError, match="no model"):
        run(tmp_path / "o", pipe)
    assert not (tmp_path / "o").exists()


def test_changed_prompts_are_refused_with_the_first_row_that_is_another(tmp_path):
    run(tmp_path)
    with pytest.raises(GenError, match="prompts.2 was 'gamma', now 'delta'"):
        run(tmp_path, prompts=["alpha", "beta", "delta"])


def test_overwriting_removes_the_other_job_and_nothing_else(tmp_path):
    run(tmp_path, trace=1)
    (tmp_path / "thesis.md").write_text("precious")
    with pytest.raises(GenError, match="overwrite=true"):
        run(tmp_path, seed=7)
    summary, _ = run(tmp_path, seed=7, overwrite=True)
    assert (
        summary["skipped"] == 0
        and sorted(files(tmp_path)) == [r["file"] for r in read_rows(tmp_path)]
        and len(files(tmp_path)) == 3
    )
    assert (tmp_path / "thesis.md").exists() and len(traces(tmp_path)) == 1
    assert run(tmp_path, seed=7, overwrite=True)[0]["skipped"] == 3  # the same job is there already


def test_an_item_asked_for_twice_is_made_once(tmp_path):
    rows = [{"prompt": "alpha", "seed": 3}, {"prompt": "alpha", "seed": 3}, "alpha", "alpha"]
    run(tmp_path, prompts=rows)
    assert [r["seed"] for r in read_rows(tmp_path)] == [3, 0, 1] and read_plan(tmp_path)[
        "duplicates"
    ] == 1


def test_ids_are_the_same_in_every_job_that_holds_the_item(tmp_path):
    run(tmp_path / "a")
    run(tmp_path / "b", prompts=["gamma", "other", "alpha"])
    run(tmp_path / "c", sampler="scd_mc")
    ids = {n: {r["prompt"]: r["id"] for r in read_rows(tmp_path / n)} for n in "abc"}
    assert (
        ids["a"]["alpha"] == ids["b"]["alpha"]
        and ids["a"]["gamma"] == ids["b"]["gamma"]
        and ids["a"]["alpha"] != ids["c"]["alpha"]
    )


# --- resume


def test_resuming_does_nothing_that_is_done(tmp_path):
    run(tmp_path)
    times = {p: p.stat().st_mtime_ns for p in tmp_path.glob("*.txt")}
    summary, pipe = run(tmp_path)
    assert (
        pipe.batches == []
        and summary["skipped"] == 3
        and summary["by_sampler"]["sjd"]["items"] == 3
    )
    assert times == {p: p.stat().st_mtime_ns for p in tmp_path.glob("*.txt")}


@pytest.mark.parametrize(
    "harm",
    [
        lambda p: p.unlink(),
        lambda p: p.write_text("damaged"),
        lambda p: p.write_bytes(p.read_bytes()[:-1]),
    ],
)
def test_missing_and_corrupt_media_are_made_again(tmp_path, harm):
    run(tmp_path)
    good = files(tmp_path)
    harm(tmp_path / "000001-beta-s0.txt")
    _, pipe = run(tmp_path)
    assert pipe.batches == [["beta"]] and files(tmp_path) == good and len(read_rows(tmp_path)) == 3


def test_failed_items_are_rows_and_tried_again_on_request(tmp_path):
    summary, _ = run(tmp_path, Pipe(bad=["beta"]))
    assert [f["index"] for f in summary["failed"]] == [1] and "KeyError" in summary["failed"][0][
        "error"
    ]
    row = read_rows(tmp_path)[1]
    assert (row["status"], row["file"], row["nfe"]) == ("failed", None, None) and len(
        files(tmp_path)
    ) == 2
    summary, pipe = run(tmp_path)
    assert len(summary["failed"]) == 1 and pipe.batches == []  # not without being told to
    summary, pipe = run(tmp_path, retry="failed")
    assert (
        summary["failed"] == []
        and pipe.batches == [["beta"]]
        and [r["attempt"] for r in read_rows(tmp_path)] == [1, 2, 1]
    )
    run(tmp_path / "whole")
    assert files(tmp_path / "whole") == files(tmp_path) and not leftovers(tmp_path)
    assert run(tmp_path, retry="failed")[1].batches == []


def test_an_item_that_cannot_be_encoded_fails_alone(tmp_path):
    pipe = Pipe()
    plain = pipe.generate

    def generate(items, *args, **kwargs):
        out = plain(items, *args, **kwargs)
        out.media = [
            "unsavable" if i.prompt == "beta" else m for i, m in zip(items, out.media, strict=True)
        ]
        return out

    pipe.generate = generate
    summary, _ = run(tmp_path, pipe)
    assert (
        "could not be saved" in summary["failed"][0]["error"]
        and len(files(tmp_path)) == 2
        and not leftovers(tmp_path)
    )


@pytest.mark.parametrize("torn", [b'{"id": "000002", "mod', b'{"id": "000002"}', b"\x00\x00"])
def test_a_cut_last_line_is_named_and_repaired(tmp_path, torn):
    run(tmp_path)
    path = tmp_path / "manifest.jsonl"
    whole = path.read_bytes()
    path.write_bytes(b"".join(whole.splitlines(True)[:2]) + torn)
    with pytest.raises(GenError, match="line 3 is damaged: it is cut"):
        read_rows(tmp_path)
    _, pipe = run(tmp_path)
    assert pipe.batches == [["gamma"]]
    assert [json.loads(line)["index"] for line in path.read_bytes().splitlines()] == [0, 1, 2]


def test_a_broken_line_in_the_middle_is_no_torn_line(
    tmp_path,
):  # the negative control of the test above
    run(tmp_path)
    path = tmp_path / "manifest.jsonl"
    lines = path.read_bytes().splitlines(True)
    path.write_bytes(lines[0] + b"{broken\n" + lines[2])
    with pytest.raises(GenError, match="line 2"):
        read_rows(tmp_path)
    _, pipe = run(tmp_path)
    assert pipe.batches == [["beta"]]


class Killed(BaseException):
    """What no handler catches: as close to kill -9 as one process gets."""


@pytest.mark.parametrize("point", ["os.replace", "os.fsync", "Journal.add", "generate"])
@pytest.mark.parametrize("after", range(7))
@pytest.mark.thinned(3)
def test_killed_anywhere_the_same_command_completes_the_folder(tmp_path, monkeypatch, point, after):
    count = 0

    def dying(function):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count > after:
                raise Killed
            return function(*args, **kwargs)

        return call

    pipe = Pipe()
    with monkeypatch.context() as m:
        if point == "generate":
            pipe.generate = dying(pipe.generate)
        elif point == "Journal.add":
            m.setattr(Journal, "add", dying(Journal.add))
        else:
            m.setattr(os, point.split(".")[1], dying(getattr(os, point.split(".")[1])))
            m.setattr(Path, "unlink", lambda *a, **k: None)  # a killed process tidies nothing up
        try:
            run(tmp_path / "o", pipe, batch_size=1)
        except Killed:
            for row in read_rows(tmp_path / "o") if (tmp_path / "o").is_dir() else []:
                assert (
                    hashlib.sha256((tmp_path / "o" / row["file"]).read_bytes()).hexdigest()
                    == row["sha256"]
                )
        else:
            assert after >= (5 if point == "os.replace" else 3) and point != "os.fsync"
    run(tmp_path / "whole")
    run(tmp_path / "o", batch_size=2)
    assert files(tmp_path / "o") == files(tmp_path / "whole") and not leftovers(tmp_path / "o")
    assert steady(tmp_path / "o") == steady(tmp_path / "whole")


# --- memory and disk


@pytest.mark.parametrize("oom", [torch.OutOfMemoryError, RuntimeError, MemoryError])
def test_running_out_of_memory_halves_the_batch_and_changes_nothing_else(tmp_path, oom):
    summary, pipe = run(tmp_path / "a", Pipe(limit=2, oom=oom), num_samples=3)
    assert summary["failed"] == [] and [len(b) for b in pipe.batches] == [8, 4, 2, 2, 2, 2, 1]
    run(tmp_path / "b", num_samples=3)
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_only_an_item_that_cannot_run_alone_fails(tmp_path):
    summary, _pipe = run(tmp_path, Pipe(limit=0))
    assert len(summary["failed"]) == 3 and "memory" in summary["failed"][0]["error"]


def test_another_error_is_no_lack_of_memory(
    tmp_path,
):  # the negative control: the batch is not halved for good
    _, pipe = run(tmp_path, Pipe(bad=["alpha"]), batch_size=2, num_samples=2)
    assert [len(b) for b in pipe.batches] == [2, 1, 1, 2, 2]


@pytest.mark.parametrize("function", ["replace", "fsync"])
@pytest.mark.parametrize("after", range(9))
def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(
    tmp_path, monkeypatch, function, after
):
    plain, count = getattr(os, function), 0

    def full(*args):
        nonlocal count
        count += 1
        if count > after:
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(*args)

    with monkeypatch.context() as m:
        m.setattr(os, function, full)
        try:
            run(tmp_path / "o", batch_size=2)
        except GenError as error:
            assert (
                "cannot write" in str(error)
                and "No space left" in str(error)
                and "\n" not in str(error)
            )
        else:
            assert function == "replace" and after >= 5
    if not (tmp_path / "o").exists():
        return
    assert not set(leftovers(tmp_path / "o")) - {"_work"}
    for row in read_rows(tmp_path / "o"):
        assert (
            hashlib.sha256((tmp_path / "o" / row["file"]).read_bytes()).hexdigest() == row["sha256"]
        )
    if (tmp_path / "o/manifest.jsonl").exists():
        assert (tmp_path / "o/manifest.jsonl").read_bytes()[-1:] in (b"", b"\n")
    assert run(tmp_path / "o")[0]["by_sampler"]["sjd"]["items"] == 3


def test_a_media_file_that_does_not_fit_is_not_left_under_its_name(tmp_path, monkeypatch):
    def half(self, media, path, info):
        path.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(Toy, "save", half)
        with pytest.raises(GenError, match="000000-alpha-s0.txt: No space left"):
            run(tmp_path / "o")
    assert not (tmp_path / "o").exists()
    run(tmp_path / "o", prompts=["alpha"])
    with monkeypatch.context() as m:  # the same in a folder that holds items already
        m.setattr(Toy, "save", half)
        (tmp_path / "o/000000-alpha-s0.txt").unlink()
        with pytest.raises(GenError, match="No space left"):
            run(tmp_path / "o", prompts=["alpha"])
    assert not files(tmp_path / "o") and leftovers(tmp_path / "o") == ["_work"]


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "f").write_text("")
    with pytest.raises(GenError, match="cannot write"):
        run(tmp_path / "f" / "o")


def test_left_over_temporary_files_go_away(tmp_path):
    run(tmp_path)
    for worker in (f"{host()}-999999999-1", worker_name(), "0badc0de-17-1"):
        (tmp_path / f".tmp-{worker}-1-000001-beta-s0.txt").write_text("half")
    run(tmp_path)
    assert leftovers(tmp_path) == [
        ".tmp-0badc0de-17-1-1-000001-beta-s0.txt"
    ]  # of another machine, which may be writing it


def test_the_summary_counts_what_was_there_before(tmp_path):
    run(tmp_path)
    (tmp_path / "000002-gamma-s0.txt").unlink()
    summary, _ = run(tmp_path)
    assert (summary["items"], summary["skipped"], summary["by_sampler"]["sjd"]["items"]) == (
        3,
        2,
        3,
    )
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
