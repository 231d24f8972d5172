"""``gen sample -o FILE``: media as files of the given name, or on stdout, without a job folder."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from gen.config.entries import Job
from gen.core.errors import GenError
from gen.core.files import writing
from gen.store.ledger import read_rows
from gen.store.shard_reader import Members

STDOUT = "-"


def file_names(file: str, count: int) -> list[Path]:
    """Return the names of the files: ``ring.png``, or ``ring-0.png``, ``ring-1.png`` of several.

    Raises:
        GenError: a file that exists, or a folder that does not.
    """
    path = Path(file)
    if file == STDOUT:
        return []
    if not path.suffix:
        raise GenError(f"-o is {file!r}; expected a name with an extension, or - for stdout")
    if not path.parent.is_dir():
        raise GenError(f"-o is {file!r}; expected a name in a folder that exists")
    names = [path]
    if count > 1:
        names = [path.with_name(f"{path.stem}-{i}{path.suffix}") for i in range(count)]
    for name in names:
        if name.exists():
            raise GenError(f"{name} exists already; expected an unused name")
    return names


@contextmanager
def job_folder(out: str | None) -> Iterator[str]:
    """Yield the folder of a job that makes single files: the user's own, or a temporary one."""
    if out is not None:
        yield out
        return
    with TemporaryDirectory(prefix="gen-") as temporary:
        yield os.path.join(temporary, "job")


def write_files(job: Job, names: list[Path]) -> int:
    """Copy the media of a finished job to their names, or to stdout if there are none.

    Returns:
        Number of media written.
    """
    rows = [r for r in read_rows(Path(job.out)) if r["status"] == "ok"]
    with Members(Path(job.out)) as members:
        for i, row in enumerate(rows):
            with members.path(row) as source:
                if source is None:
                    raise GenError(f"the output of item {row['index']} is missing in {job.out}")
                if not names:
                    sys.stdout.flush()
                    sys.stdout.buffer.write(source.read_bytes())
                    sys.stdout.buffer.flush()
                    continue
                with writing(names[i]), source.open("rb") as data, names[i].open("xb") as file:
                    shutil.copyfileobj(data, file)
            print(names[i])
    return len(rows)


def print_texts(folder: str) -> None:
    """Print the texts of a finished job."""
    rows = [r for r in read_rows(Path(folder)) if r["status"] == "ok"]
    with Members(Path(folder)) as members:
        for row in rows:
            with members.path(row) as source:
                if source is not None:
                    print(source.read_text(encoding="utf-8").removesuffix("\n"))
