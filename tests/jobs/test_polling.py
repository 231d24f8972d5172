"""Somebody who looks at a folder while workers fill it sees whole files only, and no row without
its file."""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
import time

import pytest
from crashing import Pipe, fork, job, wait

from gen.core import files
from gen.jobs import worker, writer
from gen.jobs.run import run_job

pytestmark = pytest.mark.usefixtures("ground")
PROMPTS = [f"prompt {i}" for i in range(150)]
ITEMS = 300


class Reader:
    """Looks at a folder again and again: at its manifest, the rows beside its tars, and every file
    under its final name."""

    def __init__(self, folder, changing=("manifest.jsonl", "config.yaml", "index.html")):
        self.folder, self.changing = folder, changing
        self.files: dict[
            str, tuple
        ] = {}  # name -> what it was when it was first seen: inode, size, digest
        self.wrong: list[str] = []
        self.polls, self.sizes = 0, set()

    def until(self, over) -> Reader:
        while not over():
            self.poll()
        self.poll()
        return self

    def poll(self) -> None:
        self.polls += 1
        for folder in (self.folder, self.folder / "shards", self.folder / "traces"):
            for entry in os.scandir(folder) if folder.is_dir() else ():
                name = os.path.relpath(entry.path, self.folder)
                if (
                    entry.is_file()
                    and not entry.name.startswith(".tmp-")
                    and name not in self.changing
                ):
                    self._same(name)
        rows = self._rows("manifest.jsonl")
        if [r["index"] for r in rows] != sorted({r["index"] for r in rows}):
            self.wrong.append("the manifest is out of order, or holds an item twice")
        self.sizes.add(len(rows))
        tables = [n for n in self.files if n.startswith("shards/") and n.endswith(".jsonl")]
        for row in [*rows, *(r for n in tables for r in self._rows(n))]:
            self._look(row)

    def _rows(self, name):
        try:
            lines = (self.folder / name).read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        rows = []
        for line in lines:
            try:
                rows.append(json.loads(line))
            except ValueError:
                self.wrong.append(f"{name} holds a torn line")
        return rows

    def _look(self, row) -> None:
        for name in (row["file"], *(row.get("also") or ()), row.get("member", "")):
            if name.startswith(".tmp-"):
                self.wrong.append(f"{name} is a temporary name")
        tar = "member" in row
        if not self._same(row["file"]):
            self.wrong.append(f"{row['file']} has a row and is missing")
        elif self.files[row["file"]][2] != row["shard_sha256" if tar else "sha256"]:
            self.wrong.append(f"{row['file']} is not what its row says")
        elif tar and self.files[row["file"]][3].get(row["member"]) != row["sha256"]:
            self.wrong.append(f"{row['member']} is not what its row says")
        for name in () if tar else row["also"]:
            if not self._same(name):
                self.wrong.append(f"{name} belongs to a row and is missing")

    def _same(self, name) -> bool:
        """Whether there is such a file. Remembers what it is, and finds out if it was something
        else before."""
        path = self.folder / name
        try:
            with path.open("rb") as file:
                stat, data = os.fstat(file.fileno()), None
                now = stat.st_ino, stat.st_size
                if name in self.files and self.files[name][:2] == now:
                    return True
                data = file.read()
        except FileNotFoundError:
            return False
        digest = hashlib.sha256(data).hexdigest()
        if name in self.files and self.files[name][2] != digest:
            self.wrong.append(f"{name} has changed")
        self.files[name] = *now, digest, members(path) if name.endswith(".tar") else {}
        return True


def members(path):
    with tarfile.open(path) as archive:
        return {m.name: hashlib.sha256(archive.extractfile(m).read()).hexdigest() for m in archive}


def watched(folder, layout, disturb=lambda: None, items=ITEMS):
    """Two workers make a job while a reader, another process, polls; what the reader has to say."""

    def make():
        worker.PUBLISH_EVERY, worker.PUBLISH_SHARE = 0.02, 1
        disturb()
        keys = {
            "prompts": PROMPTS[: items // 2],
            "num_samples": 2,
            "layout": layout,
            "batch_size": 3,
            "shard_items": 6,
        }
        run_job(job(folder, **keys), load=Pipe(delay=0.002).load)

    def look():
        reader = Reader(folder).until((folder.parent / "over").exists)
        return reader.wrong, reader.polls, reader.sizes

    eye = fork(look)
    ended = [wait(child) for child in [fork(make), fork(make)]]
    time.sleep(0.05)
    (folder.parent / "over").touch()
    how, said = wait(eye)
    assert how == "done", said
    return ended, *said


@pytest.mark.parametrize("layout", ["files", "shards"])
@pytest.mark.thinned(2)
def test_a_reader_never_sees_a_partial_file_or_a_row_without_its_file(ground, layout):
    ended, wrong, polls, sizes = watched(ground / "o", layout)
    assert [e.how for e in ended] == ["done", "done"], ended
    assert not wrong, wrong[:9]
    between = [n for n in sizes if 0 < n < ITEMS]
    assert polls > 20 and len(between) >= 2 and ITEMS in sizes, (polls, sizes)


def in_place(self, fence=None):
    """What `gen.core.files.Puts.commit` must not be."""
    for temporary, path in self._files:
        data = temporary.read_bytes()
        with path.open("wb", buffering=0) as file:
            file.write(data[: len(data) // 2])
            time.sleep(0.005)
            file.write(data[len(data) // 2 :])
    self.drop()
    return True


def rows_first(self, out, batch, keep):
    """What `gen.jobs.writer.Writer._commit` must not be."""
    puts = files.Puts(self._syncs)
    self._add([self._save(out, i, w, puts, []) for i, w in enumerate(batch)])
    time.sleep(0.03)
    puts.commit()


def test_the_reader_sees_files_that_are_written_in_place(ground):
    _, wrong, _, _ = watched(
        ground / "o", "files", lambda: setattr(files.Puts, "commit", in_place), items=60
    )
    assert any("has changed" in w for w in wrong)


def test_the_reader_sees_rows_that_come_before_their_files(ground):
    _, wrong, _, _ = watched(
        ground / "o", "files", lambda: setattr(writer.Writer, "_commit", rows_first), items=60
    )
    assert any("has a row and is missing" in w for w in wrong)
