"""Job files: YAML in, a checked `Job` out, and the fingerprint that says whether two jobs make the
same media.

A file holds the keys of ``KEYS``; ``jobs:`` is a list of partial jobs that inherit the others and
run into one folder. Three layers are merged strictly, later ones win: top-level keys, the entry of
``jobs:``, overrides. So an override reaches every entry (``jobs.1.seed=3`` reaches one). A typo
anywhere is an error that names the place and the nearest key: a plain merge would keep the misspelt
key and run something the user did not ask for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from gen.config.canonical import canonical, difference, escape, factored, labels, one_text, plain
from gen.config.inputs import Census, Row, file_digest, iter_rows, listed_rows, located, take_census
from gen.config.layers import FILES, merge_layers, read_yaml
from gen.config.rows import row_check
from gen.config.run import RUN, Run, make_run
from gen.core.edit_spec import EDIT_FIELDS, MEDIA, EditSpec
from gen.core.errors import GenError, bad_value, unknown

__all__ = [
    "Entry",
    "Job",
    "Run",
    "difference",
    "find_config",
    "fingerprint",
    "load_config",
    "make_job",
    "packaged",
    "stored_job",
]

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
UNNAMED = ("prompts", *MEDIA)  # too long to tell entries apart by
LOADED = (
    "modality",
    "model",
    "device",
    "dtype",
    "compile",
)  # what a loader is told beside the options of a model's family
DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Entry:
    """One sampler over its rows of input. ``sampler``: its name as written and every knob; ``sampling``:
    every knob. ``prompts``: rows said in the job itself, texts or mappings; ``prompts_file``: the
    absolute path of a file of them."""

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

    @property
    def start(self) -> EditSpec:
        return EditSpec(*(getattr(self, k) for k in EDIT_FIELDS))

    @cached_property
    def census(self) -> Census:
        """What one look at all rows tells: how many, and their digest. Taken once."""
        return self.own_census(self.said_census())

    def said_census(self) -> Census:
        """Of the rows as they were said, which is the same for every entry that has them."""
        stamp = self._stamp()
        return replace(take_census(self._said_rows()), stamp=stamp)

    def own_census(self, said: Census) -> Census:
        """Another one only where rows call knobs by other names than the sampler does: both names
        are one knob, and count as one."""
        check = self.row_check()
        if all(check(row).sampler == row.sampler for row in said.first.values()):
            return said
        return replace(take_census(map(check, self._said_rows())), stamp=said.stamp)

    def rows(self) -> Iterator[Row]:
        """Every row, read anew each time, with the sampler's own names of its knobs; those that
        cannot be made have an ``error``.

        Raises ``GenError`` if the file is no longer the one that was counted.
        """
        yield from map(self.row_check(), self._said_rows())
        if (
            self._stamp() != self.census.stamp
            and self.own_census(self.said_census()).sha256 != self.census.sha256
        ):
            raise GenError(
                f"{self.prompts_file} has changed while it was read; give the same command again"
            )

    def row_check(self) -> Callable[[Row], Row]:
        """See `gen.config.rows`."""
        return row_check(self.sampler, self.sampling, self.start, self._located)

    def relevant(self, digest: Callable[[str], str] = file_digest) -> dict[str, Any]:
        """What the media depend on. Rows count by their content wherever they come from; so does a
        source, a mask or a prefix."""
        values = {
            **self.said(),
            "prompts": {"rows": self.census.rows, "sha256": self.census.sha256},
        }
        return canonical(
            values | {k: digest(getattr(self, k)) for k in MEDIA if getattr(self, k) is not None}
        )

    def said(self) -> dict[str, Any]:
        """What counts, as it was said: no file is opened."""
        options = {k: v for k, v in self.model_options.items() if k != "device_map"}
        return {k: getattr(self, k) for k in RELEVANT} | {"model_options": options}

    def _said_rows(self) -> Iterator[Row]:
        return (
            listed_rows(self.prompts) if self.prompts_file is None else iter_rows(self.prompts_file)
        )

    def _stamp(self) -> tuple[int, int] | None:
        """Of a file of prompts: another one where it was written to."""
        try:
            about = Path(self.prompts_file or "").stat()
        except OSError:  # reading it will say so
            return None
        return (about.st_mtime_ns, about.st_size) if self.prompts_file is not None else None

    def _located(self, row: Row, problem: object) -> str:
        return (
            f"prompts.{row.line}: {problem}"
            if self.prompts_file is None
            else located(Path(self.prompts_file), row.line, problem)
        )


@dataclass(frozen=True)
class Job:
    """A checked job: everything said, nothing left to guess."""

    name: str
    out: str
    entries: list[Entry] = field(default_factory=list)
    run: Run = field(default_factory=Run)

    def relevant(self) -> dict[str, Any]:
        """What the media and the folder depend on: the tree that the fingerprint is of, and that a
        plan keeps."""
        digest = cache(file_digest)  # entries often start from the same files

        def batch(e):
            return {"batch_size": e.batch_size} if self.run.deterministic else {}

        return {
            "entries": [{**e.relevant(digest), **batch(e)} for e in self.entries],
            **self.run.counted(),
        }

    def to_dict(self) -> dict[str, Any]:
        """The tree of a job file that loads to this job: what all entries share at the top, the
        rest under ``jobs``."""
        shared, rest = factored([_entry_tree(e) for e in self.entries])
        tree = {
            "name": self.name,
            "out": self.out,
            **self.run.said(),
            **{k: v for k, v in shared.items() if v is not None},
        }
        return {**tree, "jobs": rest} if len(rest) > 1 else tree

    def to_yaml(self) -> str:
        from omegaconf import OmegaConf

        return OmegaConf.to_yaml(OmegaConf.create(escape(self.to_dict())))

    def labels(self) -> list[str]:
        """One name per entry: the sampler's, with the knobs that tell entries of one sampler apart,
        and the modality where a job has several."""
        return labels(
            [
                canonical({k: v for k, v in e.said().items() if k not in UNNAMED})
                for e in self.entries
            ]
        )


def fingerprint(job: Job) -> str:
    """The sha256 of everything the media and the folder depend on; where and in which batches they
    are made does not count, unless the job is to be ``deterministic``."""
    return hashlib.sha256(
        json.dumps(job.relevant(), sort_keys=True, ensure_ascii=False).encode()
    ).hexdigest()


def load_config(path_or_name: str | Path, overrides: Sequence[str] = ()) -> Job:
    """The job of a file, or of a packaged config such as ``image/sjd``. Raises ``GenError`` for
    anything doubtful."""
    path = find_config(path_or_name)
    return make_job(
        read_yaml(path), overrides, where=str(path_or_name), base=path.parent, name=path.stem
    )


def make_job(
    tree: Mapping,
    overrides: Sequence[str] = (),
    *,
    where: str,
    base: Path | None = None,
    name: str | None = None,
) -> Job:
    """The job of a tree with the layout of a file. Paths in it are relative to ``base``, those in
    overrides to the working directory."""
    layers = merge_layers(tree, overrides, where, base or Path())
    counted: dict[Any, Census] = {}  # entries often share their rows
    entries = [
        _resolve(values, locations, location, counted)
        for values, locations, location in layers.entries
    ]
    first: dict[str, int] = {}
    digest = cache(file_digest)
    for i, entry in enumerate(entries if len(entries) > 1 else ()):
        twin = first.setdefault(one_text(entry.relevant(digest)), i)
        if twin != i:
            counted_how = (
                " (counted after its sweep)" if len(entries) > len(tree.get("jobs", [{}])) else ""
            )
            raise GenError(
                f"jobs.{twin} and jobs.{i}{counted_how} in {where} are the same job; expected them"
                " to differ"
            )
    run = make_run({k: v for k, v in layers.top.items() if k in RUN}, layers.locations, where)
    _refuse_other_bits(entries if run.deterministic else [], where)
    name = layers.top.get("name") or name or entries[0].modality
    return Job(
        str(name),
        _out(layers.top.get("out"), name, layers.locations.get("out", where)),
        entries,
        run,
    )


def _refuse_other_bits(entries: list[Entry], where: str) -> None:
    """Of a deterministic job: what a clock decides, and kernels that a compiler makes anew on every
    machine."""
    from gen.core.sampler import resolve_sampler

    for i, entry in enumerate(entries):
        if entry.compile:
            raise GenError(
                f"compile of jobs.{i} in {where} is true, and compiled kernels round in their own"
                " way; expected false, because deterministic is true"
            )
        if resolve_sampler(entry.sampler, entry.sampling)[0].timed:
            param = next(k for k, v in entry.sampler.items() if v == "auto")
            raise GenError(
                f"sampler.{param} of jobs.{i} in {where} is 'auto', which a clock decides; expected"
                " a number, because deterministic is true"
            )


def stored_job(folder: Path) -> Job:
    """The job of a folder, as its ``config.yaml`` holds it: already resolved, so no sampler, model
    or file is looked up."""
    path = folder / "config.yaml"
    layers = merge_layers(read_yaml(path), (), str(path), folder)
    entries = [
        Entry(**{f.name: v[f.name] for f in fields(Entry)} | {"prompts": v["prompts"] or []})
        for v, _, _ in layers.entries
    ]
    run = make_run({k: v for k, v in layers.top.items() if k in RUN}, layers.locations, str(path))
    return Job(str(layers.top.get("name")), str(layers.top.get("out")), entries, run)


def packaged() -> dict[str, Path]:
    """Configs that come with gen: ``image/sjd`` -> its file."""
    import gen

    found: dict[str, Path] = {}
    for root in (Path(p) / "configs" for p in reversed(list(gen.__path__))):
        for path in sorted(root.rglob("*.yaml")):
            found[path.relative_to(root).with_suffix("").as_posix()] = path
    return dict(sorted(found.items()))


def find_config(path_or_name: str | Path) -> Path:
    """A path if there is such a file, else a packaged config (``configs/`` in front and ``.yaml``
    behind may stay)."""
    path = Path(path_or_name)
    if path.is_file():
        return path
    if path.is_dir() and (path / "config.yaml").is_file():
        raise GenError(f"{path} is a job folder; its config is {path / 'config.yaml'}")
    known = packaged()
    name = path.as_posix().removeprefix("configs/").removesuffix(".yaml")
    if name not in known:
        raise unknown(
            "config", str(path_or_name), known, "the working directory and the packaged configs"
        )
    return known[name]


# --- checking


def _resolve(
    values: dict[str, Any], locations: Mapping[str, str], location: str, counted: dict[Any, Census]
) -> Entry:
    from gen.core.registry import registry

    def at(key):
        return locations.get(key, location)

    v = dict(values)
    if v["modality"] is None:
        raise GenError(
            f"modality is missing in {location}; known: {', '.join(registry.table('modality'))}"
        )
    registry.get("modality", v["modality"], at("modality"))
    for key in ("model", "device", "dtype"):
        if (not isinstance(v[key], str) and not (key == "model" and v[key] is None)) or v[
            key
        ] == "":
            raise bad_value(key, v[key], "a name", at(key))
    if v["model_options"] and v["model"] is None:
        raise bad_value(
            "model_options", v["model_options"], "none where no model is named", at("model_options")
        )
    v["model_options"] = plain(v["model_options"])
    if own := [k for k in v["model_options"] if k in LOADED]:
        raise GenError(
            f"model_options.{own[0]} came in {at('model_options')}; expected {own[0]} as a key of"
            " its own"
        )
    if not isinstance(v["compile"], bool):
        raise bad_value("compile", v["compile"], "true or false", at("compile"))
    if v["dtype"] not in DTYPES:
        raise unknown("dtype", v["dtype"], DTYPES, at("dtype"))
    _check_device(v["device"], at("device"))
    for key, least in (("num_samples", 1), ("seed", 0), ("batch_size", 1), ("trace", 0)):
        if not isinstance(v[key], int) or isinstance(v[key], bool) or v[key] < least:
            raise bad_value(key, v[key], f"an integer of at least {least}", at(key))
    if v["seed"] >= 2**62:
        raise bad_value("seed", v["seed"], "an integer below 2**62", at("seed"))
    for key in FILES:
        if v[key] is not None and not Path(v[key]).is_file():
            raise GenError(f"{key} in {at(key)} is no file: {v[key]}")
    try:
        EditSpec(*(v[k] for k in EDIT_FIELDS))
    except GenError as error:
        raise GenError(f"{error} ({location})") from None
    if v["prompts"] is None and v["prompts_file"] is None:
        raise bad_value("prompts", None, "at least one prompt", at("prompts"))
    v["sampler"], v["sampling"] = _resolve_sampler(v["sampler"], v["sampling"], locations, location)
    entry = Entry(**v | {"prompts": v["prompts"] or []})
    _check_rows(entry, at("prompts"), counted)
    return entry


def _check_device(device: str, where: str) -> None:
    import torch

    try:
        torch.device(device)
    except RuntimeError as error:
        raise bad_value("device", device, "cpu, cuda, cuda:0, mps ...", where) from error


def _check_rows(entry: Entry, where: str, counted: dict[Any, Census]) -> None:
    """One row of every set of knobs and starts. A wrong one in the job itself is refused; of a
    file, one good row is enough."""
    key = entry.prompts_file or id(entry.prompts)
    said = counted[key] = counted.get(key) or entry.said_census()
    entry.__dict__["census"] = entry.own_census(said)
    errors = [row.error for row in map(entry.row_check(), said.first.values()) if row.error]
    if entry.prompts_file is None and errors:
        raise GenError(f"{errors[0]} ({where})")
    if len(errors) == len(said.first):
        raise GenError(
            f"{entry.prompts_file} holds no row that can be made; the first one:"
            f" {said.error or errors[0]}"
        )


def _resolve_sampler(
    node: dict, sampling: dict, locations: Mapping[str, str], location: str
) -> tuple[dict, dict]:
    """Every knob of the sampler, under the name the user wrote, and every knob of the law."""
    from gen.core.sampler import resolve_sampler

    try:
        sampler, full = resolve_sampler(node, sampling)
    except GenError as error:
        text = str(error)  # said in the place that set the key the message is about
        named = [p for k, p in locations.items() if "." in k and k.split(".")[1] in text]
        raise GenError(
            f"{text} ({named[0] if named else locations.get('sampler', location)})"
        ) from error
    params = (
        {f.name: plain(getattr(sampler, f.name)) for f in fields(sampler)}
        if is_dataclass(sampler)
        else {}
    )
    return {"name": node["name"], **params}, {k: plain(v) for k, v in asdict(full).items()}


def _out(out: Any, name: object, where: str) -> str:
    if out is None:
        return f"out/{name}"
    if not isinstance(out, str) or not out.strip():
        raise bad_value("out", out, "a folder", where)
    return out


def _entry_tree(entry: Entry) -> dict[str, Any]:
    tree = {f.name: getattr(entry, f.name) for f in fields(entry)}
    del tree["prompts" if entry.prompts_file is not None else "prompts_file"]  # one of them is said
    return tree
