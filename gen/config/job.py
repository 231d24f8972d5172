"""Job files: YAML in, a checked `Job` out.

A file holds the keys of ``KEYS``; ``jobs:`` is a list of partial jobs that inherit the others
and run into one folder. Three layers are merged strictly, later ones win: top-level keys, the
entry of ``jobs:``, overrides. So an override reaches every entry (``jobs.1.seed=3`` reaches
one). A typo anywhere is an error with its location and the nearest key: a plain merge would keep
the misspelt key and run another job than the user asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from gen.config.canonical import flat, one_text, plain
from gen.config.condition_rows import row_condition
from gen.config.data_sets import dataset_rows
from gen.config.entries import Entry, Job
from gen.config.foreign import check_column
from gen.config.inputs import ITEMS, Census, file_digest, inline_rows, listed_rows
from gen.config.keys import FILES, PROMPTS
from gen.config.layers import merge_layers, read_yaml
from gen.config.model_options import checked_options
from gen.config.packaged import find_config
from gen.config.prompt_files import prompt_paths
from gen.config.rows import Row, writable
from gen.config.run import RUN, make_run
from gen.config.sampler_spec import every_parameter, refuse_functions
from gen.contracts.checkpoint import WITHOUT_MODEL
from gen.contracts.condition import Condition
from gen.contracts.defaults import Defaults
from gen.core.edit_spec import EDIT_FIELDS, EditSpec
from gen.core.errors import GenError, bad_value, shown, unknown
from gen.core.paths import expand_user, is_file
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.core.trust import refuse_untrusted
from gen.models.load.locate import AUTO, dtype_name, pick_device

DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass
class _Shared:
    """Rows that entries often share.

    Attributes:
        counted: the census by file and column, or by the list.
        loaded: rows and foreign columns of a data set, by its options and column.
        local: models are looked for in the local cache alone.
        note: told how far a long file is.
    """

    counted: dict[Any, Census] = field(default_factory=dict)
    loaded: dict[str, tuple[list[Any], list[str]]] = field(default_factory=dict)
    local: bool = False
    note: Callable[[str], object] = lambda text: None


def load_config(
    path_or_name: str | Path,
    overrides: Sequence[str] = (),
    allow_env: Collection[str] = (),
    trust_job: bool = False,
    local: bool = False,
    note: Callable[[str], object] = lambda text: None,
) -> Job:
    """Load the job of a file, or of a packaged config such as ``image/sjd``.

    Args:
        path_or_name: the file, or the name of a packaged config.
        overrides: ``key=value`` texts; paths in them are relative to the working directory.
        allow_env: names of environment variables that ``${oc.env:NAME}`` may stand for.
        trust_job: accept values of the file that do more than being read (``gen.core.trust``).
        local: look for models in the local cache alone; no connection is opened.
        note: told every few seconds how far a long file of prompts is.

    Raises:
        GenError: for anything doubtful.
    """
    path = find_config(path_or_name)
    tree = read_yaml(path, allow_env)
    refuse_untrusted(tree, str(path_or_name), trust_job)
    return make_job(
        tree,
        overrides,
        where=str(path_or_name),
        base=path.parent,
        name=path.stem,
        allow_env=allow_env,
        local=local,
        note=note,
    )


def make_job(
    tree: Mapping,
    overrides: Sequence[str] = (),
    *,
    where: str,
    base: Path | None = None,
    name: str | None = None,
    allow_env: Collection[str] = (),
    local: bool = False,
    note: Callable[[str], object] = lambda text: None,
) -> Job:
    """Build a job from a tree with the keys of a job file.

    Args:
        tree: the keys of a job file.
        overrides: ``key=value`` texts; paths in them are relative to the working directory.
        where: origin of the tree, for messages.
        base: folder that paths in the tree are relative to.
        name: of the job, if the tree has none.
        allow_env: names of environment variables that an override may refer to.
        local: as of ``load_config``.
        note: as of ``load_config``.

    Raises:
        GenError: for anything doubtful.
    """
    layers = merge_layers(tree, overrides, where, base or Path(), allow_env)
    shared = _Shared(local=local, note=note)
    entries = [
        _resolve(values, locations, location, shared)
        for values, locations, location in layers.entries
    ]
    _check_items(entries, where)
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
    _checked_text(
        "engine_options", run.engine_options, layers.locations.get("engine_options", where)
    )
    _refuse_other_bits(entries if run.deterministic else [], where)
    name = _name(layers.top.get("name"), layers.locations.get("name", where)) or name
    return Job(
        str(name or entries[0].modality),
        _out(layers.top.get("out"), name, layers.locations.get("out", where)),
        entries,
        run,
    )


def _check_items(entries: Sequence[Entry], where: str) -> None:
    """Refuse a job whose plan would not fit into memory."""
    counts = [entry.census.samples(entry.num_samples) for entry in entries]
    if sum(counts) > ITEMS:
        most = max(range(len(counts)), key=counts.__getitem__)
        of_entry = f", {counts[most]:,} of them in jobs.{most}" if len(counts) > 1 else ""
        raise GenError(
            f"{where} asks for {sum(counts):,} items{of_entry}; expected at most {ITEMS:,} in one"
            " job, because a plan lists each of them"
        )


def _refuse_other_bits(entries: list[Entry], where: str) -> None:
    """Refuse, in a deterministic job, parameters that a clock decides, and kernels that a
    compiler makes anew on every machine."""
    for i, entry in enumerate(entries):
        if entry.compile:
            raise GenError(
                f"compile of jobs.{i} in {where} is true, and compiled kernels round differently;"
                " expected false, because deterministic is true"
            )
        if resolve_sampler(entry.sampler, entry.sampling)[0].timed:
            params = flat(entry.sampler, "sampler.")
            timed = [k for k, v in params.items() if v == "auto" or (v and "budget" in k)]
            param = timed[-1] if timed else "sampler"
            raise GenError(
                f"{param} of jobs.{i} in {where} is {params.get(param)!r}, which depends on timing;"
                " expected one that does not, because deterministic is true"
            )


# --- checking


def _resolve(
    values: dict[str, Any], locations: Mapping[str, str], location: str, shared: _Shared
) -> Entry:
    def at(key):
        return locations.get(key, location)

    v = dict(values)
    for key in v:
        if key != "prompts":  # every row has its own check
            _checked_text(key, v[key], at(key))
    if v["modality"] is None:
        raise GenError(
            f"modality is missing in {location}; known: {', '.join(registry.table('modality'))}"
        )
    registry.get("modality", v["modality"], at("modality"))
    if isinstance(v["model"], str) and v["model"].startswith("~"):
        v["model"] = str(expand_user(v["model"]))
    for key in ("model", "device", "dtype"):
        if (not isinstance(v[key], str) and not (key == "model" and v[key] is None)) or v[
            key
        ] == "":
            raise bad_value(key, v[key], "a name", at(key))
    v["model_options"] = _model_options(v, at, shared)
    if not isinstance(v["compile"], bool):
        raise bad_value("compile", v["compile"], "true or false", at("compile"))
    v["dtype"] = dtype_name(v["dtype"])
    if v["dtype"] not in DTYPES:
        raise unknown("dtype", v["dtype"], DTYPES, at("dtype"))
    v["device"] = _device(v["device"], at("device"))
    _check_counts(v, at)
    for key in FILES:
        many = key == "prompts_file" and v[key] is not None and prompt_paths(v[key])
        if v[key] is not None and not many and not is_file(v[key]):
            raise GenError(f"{key} in {at(key)} is not a file: {shown(v[key])}")
    v["format"] = _format(v["format"], v["modality"], at("format"))
    try:
        EditSpec(*(v[k] for k in EDIT_FIELDS))
    except GenError as error:
        raise GenError(f"{error} ({location})") from None
    v["sampler"], v["sampling"], usual = _resolve_sampler(v, locations, location)
    if usual.needs_prompt:
        _require_prompts(v, at("prompts"))
    elif all(v[key] is None for key in PROMPTS):
        v["prompts"] = [""]
    v["dtype"] = v["dtype"] if "dtype" in locations else usual.dtype
    foreign = _rows_of_data_set(v, at, shared)
    entry = Entry(**v | {"prompts": v["prompts"] or []})
    _check_rows(entry, at("prompts"), shared)
    if foreign:
        entry.__dict__["census"] = replace(entry.census, foreign=tuple(foreign))
    return entry


def _require_prompts(v: Mapping[str, Any], where: str) -> None:
    """Raise ``GenError`` for a job without prompts, or with an empty one, for a model that reads
    them."""
    if all(v[key] is None for key in PROMPTS):
        raise bad_value("prompts", None, "at least one prompt", where)
    for i, row in enumerate(v["prompts"] or ()):
        if row == "":
            raise bad_value(f"prompts.{i}", row, "a text that is not empty", where)


def _model_options(
    v: Mapping[str, Any], at: Callable[[str], str], shared: _Shared
) -> dict[str, Any]:
    """Check the options of the model, and return them as plain data."""
    options, where = v["model_options"], at("model_options")
    if v["model"] is not None:
        options = {**options, "local_files_only": True} if shared.local else options
    elif set(options) - WITHOUT_MODEL:
        raise bad_value("model_options", options, "none where no model is named", where)
    return checked_options(options, "model_options", where)


def _check_counts(v: Mapping[str, Any], at: Callable[[str], str]) -> None:
    """Check the keys that are integers."""
    for key, least in (("num_samples", 1), ("seed", 0), ("batch_size", 1), ("trace", 0)):
        if not isinstance(v[key], int) or isinstance(v[key], bool) or v[key] < least:
            raise bad_value(key, v[key], f"an integer of at least {least}", at(key))
        if v[key] >= 2**62:
            raise bad_value(key, v[key], "an integer below 2**62", at(key))


def _rows_of_data_set(v: dict[str, Any], at: Callable[[str], str], shared: _Shared) -> list[str]:
    """Replace ``prompts_dataset`` by its rows, and check ``prompt_column``; return the columns
    that went to ``meta``."""
    options = v.pop("prompts_dataset")
    column = v["prompt_column"] = check_column(v["prompt_column"], at("prompt_column"))
    if v["prompts"] is not None and column is not None:
        raise bad_value("prompt_column", column, "none beside prompts", at("prompt_column"))
    if options is None:
        return []
    where, key = at("prompts_dataset"), one_text([options, column])
    if key not in shared.loaded:
        rows, foreign = dataset_rows(options, column, where)
        named = f"data set {options['path']}"
        shared.loaded[key] = inline_rows(rows, Path(), f"{named} ({where})"), foreign
    v["prompts"], foreign = shared.loaded[key]
    v["prompt_column"] = None  # its rows have the key prompt
    return foreign


def _format(said: Any, modality: str, where: str) -> str | None:
    """Return the extension of media files, None for the modality's own."""
    if said is None:
        return None
    cls = registry.get("modality", modality)
    known = dict.fromkeys((cls.extension, *cls.formats))
    aliases = {"jpeg": "jpg"} if "jpg" in known else {}
    name = said.lower().removeprefix(".") if isinstance(said, str) else said
    name = aliases.get(name, name) if isinstance(name, str) else name
    if not isinstance(name, str) or name not in known:
        raise bad_value("format", said, f"{' or '.join(known)}, for modality {modality}", where)
    return None if name == cls.extension else name


def _device(device: str, where: str) -> str:
    """Return the name of a device; ``auto`` is the kind that this machine has."""
    if device == AUTO:
        return str(pick_device(AUTO))
    try:
        torch.device(device)
    except RuntimeError as error:
        raise bad_value("device", device, "auto, cpu, cuda, cuda:0, mps ...", where) from error
    return device


def _check_rows(entry: Entry, where: str, shared: _Shared) -> None:
    """Check one row of every set of parameters and edits. A wrong one in the job itself is
    refused; of a file, one good row is enough."""
    key = (entry.prompts_file, entry.prompt_column) if entry.prompts_file else id(entry.prompts)
    said = shared.counted.get(key) or entry.said_census(shared.note)
    shared.counted[key] = said
    entry.__dict__["census"] = entry.own_census(said)
    _check_adapters(entry, said.first.values())
    # files of other rows may be there where those of the first one are not
    rows = [replace(row, condition={}) for row in said.first.values()]
    if entry.prompts_file is None and any(not isinstance(p, str) for p in entry.prompts):
        rows += [row for row in listed_rows(entry.prompts) if row.condition]
    errors = [row.error for row in map(entry.row_check(), rows) if row.error]
    if entry.prompts_file is None and errors:
        raise GenError(f"{errors[0]} ({where})")
    if len(errors) == len(rows):
        raise GenError(
            f"{entry.prompts_file} has no valid row; the first error: {said.error or errors[0]}"
        )


def _check_adapters(entry: Entry, rows: Iterable[Row]) -> None:
    """Raise ``GenError`` for a row with an adapter that the job does not name, before any work: one
    misspelt name is as wrong in a file as in the job itself."""
    adapters = entry.model_options.get("adapters")
    for row in rows:
        if row.adapter is None:
            continue
        try:
            if not isinstance(adapters, Mapping):
                raise GenError(
                    f"adapter is {row.adapter!r}, and the job has no adapters by name; expected"
                    f" model_options.adapters.{row.adapter}: folder"
                )
            if row.adapter not in adapters:
                raise unknown("adapter", row.adapter, adapters)
        except GenError as error:
            raise GenError(entry.located(row, error)) from None


def _resolve_sampler(
    values: Mapping[str, Any], locations: Mapping[str, str], location: str
) -> tuple[dict, dict, Defaults]:
    """Resolve every parameter of the sampler, under the name the user wrote, and every sampling
    parameter. What the job does not say is the default of its modality or model, which come
    too."""
    refuse_functions(values["sampler"], locations.get("sampler", location))
    try:
        defaults = Defaults.named(values["modality"], values["model"], values["model_options"])
        node, sampling = defaults.complete(
            values["sampler"], values["sampling"], _media_part(values)
        )
        sampler, full = resolve_sampler(node, sampling)
    except GenError as error:
        text = str(error)  # with the location that set the key the message is about
        deepest = sorted(locations, key=lambda k: -k.count("."))
        named = [locations[k] for k in deepest if "." in k and k.rpartition(".")[2] in text]
        raise GenError(
            f"{text} ({named[0] if named else locations.get('sampler', location)})"
        ) from error
    return every_parameter(node["name"], sampler), plain(full.to_dict()), defaults


def _media_part(values: Mapping[str, Any]) -> str:
    """Return the part of the first row's condition that decides which model serves a job."""
    first = next(iter(values["prompts"] or ()), None)
    if values["model"] is not None or not isinstance(first, Mapping):
        return ""
    parts = row_condition(first, Path())
    if isinstance(parts.get("observation"), str):  # a file, which is read with its row
        parts.pop("observation")
    return registry.get("modality", values["modality"])().media_part(Condition(**parts))


def _name(name: Any, where: str) -> str | None:
    if name is None:
        return None
    if isinstance(name, bool) or not isinstance(name, (str, int)) or not str(name).strip():
        raise bad_value("name", name, "a text that is not empty", where)
    return _checked_text("name", str(name), where)


def _checked_text(key: str, value: Any, where: str) -> Any:
    """Return a value as it is. Raises ``GenError`` for a text that UTF-8 cannot hold."""
    if isinstance(value, Mapping):
        for inner, one in value.items():
            _checked_text(f"{key}.{inner}", one, where)
    elif isinstance(value, str) and not writable(value):
        raise bad_value(key, value, "text in UTF-8", where)
    return value


def _out(out: Any, name: object, where: str) -> str:
    if out is None:
        return f"out/{name}"
    if not isinstance(out, str) or not out.strip():
        raise bad_value("out", out, "a folder", where)
    _checked_text("out", out, where)
    return str(expand_user(out)) if out.startswith("~") else out
