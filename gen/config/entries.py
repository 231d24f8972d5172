"""Jobs and their entries: checked, with nothing left to guess, and the fingerprint that tells
whether two jobs make the same media.

Nothing here imports torch, so that a folder can be looked at quickly.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from gen.config.canonical import canonical, factored, labels
from gen.config.foreign import note_of
from gen.config.inputs import Census, file_digest, iter_rows, listed_rows, take_census, told
from gen.config.layers import merge_layers, read_yaml
from gen.config.prompt_files import prompt_paths
from gen.config.references import escape
from gen.config.row_check import row_check
from gen.config.rows import Row, located
from gen.config.run import RUN, Run, make_run
from gen.config.yaml_text import dump_yaml
from gen.core.edit_spec import EDIT_FIELDS, MEDIA, EditSpec
from gen.core.errors import GenError

RELEVANT = (
    "modality",
    "model",
    "model_options",
    "sampler",
    "sampling",
    "prompts",
    "num_samples",
    "seed",
    "dtype",
    *EDIT_FIELDS,
)
# model options that say where files and weights lie, and change no media
ELSEWHERE = (
    "device_map",
    "max_memory",
    "offload_folder",
    "tp",
    "cache_dir",
    "local_files_only",
    "token",
)
UNNAMED = ("prompts", *MEDIA)  # too long to tell entries apart by


@dataclass(frozen=True)
class Entry:
    """Sampler of a job with its rows of input.

    Attributes:
        sampler: its name as written, and every parameter.
        sampling: every sampling parameter.
        prompts: rows in the job itself, texts or mappings.
        prompts_file: absolute path of a file of rows.
        prompt_column: column of the file that holds the prompts; None for ``prompt``.
        format: extension of the media files; None for the modality's own.
    """

    modality: str
    model: str | None
    model_options: dict[str, Any]
    sampler: dict[str, Any]
    sampling: dict[str, Any]
    prompts: list[str | dict[str, Any]]
    prompts_file: str | None
    num_samples: int
    seed: int
    source: str | None
    mask: str | None
    span: str | None
    prefix: str | None
    frames: int | None
    device: str
    dtype: str
    compile: bool
    batch_size: int
    trace: int
    format: str | None = None
    prompt_column: str | None = None

    @property
    def start(self) -> EditSpec:
        """The edit of this entry: source, mask, span, prefix and frames."""
        return EditSpec(*(getattr(self, k) for k in EDIT_FIELDS))

    @cached_property
    def census(self) -> Census:
        """Number and digest of all rows, counted once."""
        return self.own_census(self.said_census())

    def said_census(self, note: Callable[[str], object] = lambda text: None) -> Census:
        """Count the rows as written, which is the same for every entry that has them. ``note``:
        told how far a long file is."""
        stamp = self._stamp()
        rows = told(self._said_rows(), Path(self.prompts_file or "prompts").name, note)
        return replace(take_census(rows), stamp=stamp)

    def own_census(self, said: Census) -> Census:
        """Count the rows with the sampler's own names of parameters; a second look is taken only
        if a row uses an alias."""
        check = self.row_check()
        if all(check(row).sampler == row.sampler for row in said.first.values()):
            return said
        return replace(take_census(map(check, self._said_rows())), stamp=said.stamp)

    def rows(self) -> Iterator[Row]:
        """Read every row anew, with the sampler's own names of its parameters. Rows that cannot be
        made have an ``error``.

        Raises:
            GenError: if the file is no longer the one that was counted.
        """
        yield from map(self.row_check(), self._said_rows())
        if (
            self._stamp() != self.census.stamp
            and self.own_census(self.said_census()).sha256 != self.census.sha256
        ):
            raise GenError(
                f"{self.prompts_file} changed while it was being read; run the command again"
            )

    def row_check(self) -> Callable[[Row], Row]:
        """Return the check of this entry's rows (see `gen.config.row_check`)."""
        return row_check(self.sampler, self.sampling, self.start, self.located)

    def relevant(self, digest: Callable[[str], str] = file_digest) -> dict[str, Any]:
        """Collect everything the media depend on. Rows count by their content wherever they come
        from, and so does a source, a mask or a prefix."""
        values = {
            **self.said(),
            "prompts": {"rows": self.census.rows, "sha256": self.census.sha256},
        }
        return canonical(
            values | {k: digest(getattr(self, k)) for k in MEDIA if getattr(self, k) is not None}
        )

    def said(self) -> dict[str, Any]:
        """Collect the relevant keys as written; no file is opened."""
        options = {k: v for k, v in self.model_options.items() if k not in ELSEWHERE}
        own = {"format": self.format} if self.format else {}  # left out, it changes no digest
        return {k: getattr(self, k) for k in RELEVANT} | {"model_options": options} | own

    def _said_rows(self) -> Iterator[Row]:
        return (
            listed_rows(self.prompts)
            if self.prompts_file is None
            else iter_rows(self.prompts_file, self.prompt_column)
        )

    def _stamp(self) -> tuple[int, int] | None:
        """Return the time and size of the files of prompts, which change when they are written
        to."""
        if self.prompts_file is None:
            return None
        try:
            found = [p.stat() for p in prompt_paths(self.prompts_file)]
        except OSError:  # reading it will say so
            return None
        return (max((s.st_mtime_ns for s in found), default=0), sum(s.st_size for s in found))

    def located(self, row: Row, problem: object) -> str:
        """Add the position of a row to a message about it."""
        return (
            f"prompts.{row.line}: {problem}"
            if self.prompts_file is None
            else located(Path(self.prompts_file), row.line, problem, row.origin)
        )


@dataclass(frozen=True)
class Job:
    """A checked job with nothing left to guess."""

    name: str
    out: str
    entries: list[Entry] = field(default_factory=list)
    run: Run = field(default_factory=Run)

    def relevant(self) -> dict[str, Any]:
        """Collect everything the media and the folder depend on: the tree of the fingerprint,
        which a plan keeps."""
        digest = cache(file_digest)  # entries often start from the same files

        def batch(e):
            return {"batch_size": e.batch_size} if self.run.deterministic else {}

        return {
            "entries": [{**e.relevant(digest), **batch(e)} for e in self.entries],
            **self.run.counted(),
        }

    def to_dict(self) -> dict[str, Any]:
        """Build the tree of a job file that loads to this job: shared keys at the top, the rest
        under ``jobs``."""
        shared, rest = factored([_entry_tree(e) for e in self.entries])
        tree = {
            "name": self.name,
            "out": self.out,
            **self.run.said(),
            **{k: v for k, v in shared.items() if v is not None},
        }
        return {**tree, "jobs": rest} if len(rest) > 1 else tree

    def notes(self) -> list[str]:
        """List what users should know about the input: columns that went to ``meta``."""
        found = []
        for e in self.entries:
            if e.census.foreign:
                source = Path(e.prompts_file).name if e.prompts_file else "the data set"
                found.append(note_of(list(e.census.foreign), source))
        return list(dict.fromkeys(found))

    def to_yaml(self) -> str:
        """Format the job as a job file."""
        return dump_yaml(escape(self.to_dict()))

    def labels(self) -> list[str]:
        """Name the entries (see `gen.config.canonical.labels`)."""
        return labels(
            [
                canonical({k: v for k, v in e.said().items() if k not in UNNAMED})
                for e in self.entries
            ]
        )


def fingerprint(job: Job) -> str:
    """Digest everything the media and the folder depend on, as sha256. Devices and batches do
    not count, unless the job is ``deterministic``."""
    return hashlib.sha256(
        json.dumps(job.relevant(), sort_keys=True, ensure_ascii=False).encode()
    ).hexdigest()


def stored_job(folder: Path) -> Job:
    """Read the job of a folder from its ``config.yaml``: already resolved, so no sampler, model
    or file is looked up."""
    path = folder / "config.yaml"
    layers = merge_layers(read_yaml(path), (), str(path), folder)
    entries = [
        Entry(**{f.name: v[f.name] for f in fields(Entry)} | {"prompts": v["prompts"] or []})
        for v, _, _ in layers.entries
    ]
    run = make_run({k: v for k, v in layers.top.items() if k in RUN}, layers.locations, str(path))
    return Job(str(layers.top.get("name")), str(layers.top.get("out")), entries, run)


def _entry_tree(entry: Entry) -> dict[str, Any]:
    tree = {f.name: getattr(entry, f.name) for f in fields(entry)}
    del tree["prompts" if entry.prompts_file is not None else "prompts_file"]  # one of them is said
    return tree
