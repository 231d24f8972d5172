"""Job files: YAML in, a checked `Job` out, and the fingerprint that says whether two jobs make the same media.

A file holds the keys of ``KEYS``; ``jobs:`` is a list of partial jobs that inherit the others and run into one folder.
Three layers are merged strictly, later ones win: top-level keys, the entry of ``jobs:``, overrides. So an override
reaches every entry (``jobs.1.seed=3`` reaches one). A typo anywhere is an error that names the place and the nearest
key: a plain merge would keep the misspelt key and run something the user did not ask for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from gen.errors import GenError, bad_value, unknown
from gen.layers import merge_layers, read_yaml
from gen.start import MEDIA, START, Start

RELEVANT = ("modality", "model", "model_options", "sampler", "law", "prompts", "num_samples", "seed", "dtype", *START)
DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Entry:
    """One sampler over one list of prompts. ``sampler``: its name as written and every knob; ``law``: every knob."""

    modality: str
    model: str | None
    model_options: dict[str, Any]
    sampler: dict[str, Any]
    law: dict[str, Any]
    prompts: list[str]
    num_samples: int
    seed: int
    source: str | None
    mask: str | None
    span: str | None
    prefix: str | None
    frames: int | None
    device: str
    dtype: str
    batch_size: int
    trace: int

    @property
    def start(self) -> Start:
        return Start(*(getattr(self, k) for k in START))

    def relevant(self) -> dict[str, Any]:
        """What the media depend on. A source, a mask or a prefix counts by its content, not by its path."""
        values = {k: getattr(self, k) for k in RELEVANT}
        values["model_options"] = {k: v for k, v in self.model_options.items() if k != "device_map"}
        for key in MEDIA:
            if values[key] is not None:
                path = Path(values[key])
                values[key] = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else f"missing {path}"
        return _canonical(values)


@dataclass(frozen=True)
class Job:
    """A checked job: everything said, nothing left to guess."""

    name: str
    out: str
    entries: list[Entry] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The tree of a job file that loads to this job: what all entries share at the top, the rest under ``jobs``."""
        trees = [asdict(e) for e in self.entries]
        shared = {k: v for k, v in trees[0].items() if all(_canonical(t[k]) == _canonical(v) for t in trees)}
        tree = {"name": self.name, "out": self.out, **{k: v for k, v in shared.items() if v is not None}}
        if len(trees) > 1:
            tree["jobs"] = [{k: v for k, v in t.items() if k not in shared} for t in trees]
        return tree

    def to_yaml(self) -> str:
        from omegaconf import OmegaConf

        return OmegaConf.to_yaml(OmegaConf.create(_escape(self.to_dict())))

    def labels(self) -> list[str]:
        """One name per entry: the sampler's, with the knobs that tell entries of one sampler apart, and the modality where a job has
        several."""
        unsaid = ("prompts", *MEDIA)  # too long for a name
        flats = [{k: v for k, v in _flat(e.relevant()).items() if k not in unsaid} for e in self.entries]
        several = len({e.modality for e in self.entries}) > 1
        labels = []
        for e, mine in zip(self.entries, flats, strict=True):
            same = lambda o, e=e: (o.sampler["name"], o.modality) == (e.sampler["name"], e.modality)
            twins = [f for o, f in zip(self.entries, flats, strict=True) if same(o)]
            parts = []
            if len(twins) > 1 and len({f.get("model") for f in twins}) == len(twins):  # then the model says it all
                parts += [e.model] if e.model else []
            else:
                differing = [k for k in mine if k != "sampler.name" and any(f.get(k) != mine[k] for f in twins)]
                parts += [f"{k.removeprefix('sampler.').removeprefix('law.')}={mine[k]}" for k in differing]
            labels.append(" ".join([e.sampler["name"], *parts, *([f"modality={e.modality}"] if several else [])]))
        return labels


def fingerprint(job: Job) -> str:
    """The sha256 of everything the media depend on; where and in which batches they are made does not count."""
    text = json.dumps([e.relevant() for e in job.entries], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def difference(was: Job, now: Job) -> list[str]:
    """``seed: was 0, now 7`` for every relevant key that two jobs do not share."""
    a, b = ([_flat(e.relevant()) for e in j.entries] for j in (was, now))
    if len(a) != len(b):
        return [f"jobs: was {len(a)}, now {len(b)}"]
    lines = []
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        prefix = f"jobs.{i}." if len(a) > 1 else ""
        keys = [k for k in {**x, **y} if x.get(k, "unset") != y.get(k, "unset")]
        lines += [f"{prefix}{k}: was {_short(x.get(k, 'unset'))}, now {_short(y.get(k, 'unset'))}" for k in keys]
    return lines


def load_config(path_or_name: str | Path, overrides: Sequence[str] = ()) -> Job:
    """The job of a file, or of a packaged config such as ``image/sjd``. Raises ``GenError`` for anything doubtful."""
    path = find_config(path_or_name)
    return make_job(read_yaml(path), overrides, where=str(path_or_name), base=path.parent, name=path.stem)


def make_job(
    tree: Mapping, overrides: Sequence[str] = (), *, where: str, base: Path | None = None, name: str | None = None
) -> Job:
    """The job of a tree with the layout of a file. Paths in it are relative to ``base``, those in overrides to the
    working directory."""
    top, layers = merge_layers(tree, overrides, where, base or Path())
    entries = [_resolve(values, places, place) for values, places, place in layers]
    for i, entry in enumerate(entries):
        twin = next((j for j in range(i) if entries[j].relevant() == entry.relevant()), None)
        if twin is not None:
            raise GenError(f"jobs.{twin} and jobs.{i} in {where} are the same job; expected them to differ")
    name = top.get("name") or name or entries[0].modality
    return Job(str(name), _out(top.get("out"), name, where), entries)


def stored_job(folder: Path) -> Job:
    """The job of a folder, as its ``config.yaml`` holds it: already resolved, so no sampler or model is looked up."""
    path = folder / "config.yaml"
    top, layers = merge_layers(read_yaml(path), (), str(path), folder)
    names = [f.name for f in fields(Entry)]
    return Job(str(top.get("name")), str(top.get("out")), [Entry(**{k: v[k] for k in names}) for v, _, _ in layers])


def packaged() -> dict[str, Path]:
    """Configs that come with gen: ``image/sjd`` -> its file."""
    import gen

    found: dict[str, Path] = {}
    for root in (Path(p) / "configs" for p in reversed(list(gen.__path__))):
        for path in sorted(root.rglob("*.yaml")):
            found[path.relative_to(root).with_suffix("").as_posix()] = path
    return dict(sorted(found.items()))


def find_config(path_or_name: str | Path) -> Path:
    """A path if there is such a file, else a packaged config (``configs/`` in front and ``.yaml`` behind may stay)."""
    path = Path(path_or_name)
    if path.is_file():
        return path
    if path.is_dir() and (path / "config.yaml").is_file():
        raise GenError(f"{path} is a job folder; its config is {path / 'config.yaml'}")
    known = packaged()
    name = path.as_posix().removeprefix("configs/").removesuffix(".yaml")
    if name not in known:
        raise unknown("config", str(path_or_name), known, "the working directory and the packaged configs")
    return known[name]


# ------------------------------------------------------------------------------------------------------ checking


def _resolve(values: dict[str, Any], places: Mapping[str, str], place: str) -> Entry:
    from gen.registry import registry

    at = lambda key: places.get(key, place)
    v = dict(values)
    if v["modality"] is None:
        raise GenError(f"modality is missing in {place}; known: {', '.join(registry.table('modality'))}")
    registry.get("modality", v["modality"], at("modality"))
    for key in ("model", "device", "dtype"):
        if not isinstance(v[key], str) and not (key == "model" and v[key] is None) or v[key] == "":
            raise bad_value(key, v[key], "a name", at(key))
    if v["model_options"] and v["model"] is None:
        raise bad_value("model_options", v["model_options"], "none where no model is named", at("model_options"))
    v["model_options"] = _plain(v["model_options"])
    if v["dtype"] not in DTYPES:
        raise unknown("dtype", v["dtype"], DTYPES, at("dtype"))
    _check_device(v["device"], at("device"))
    for key, least in (("num_samples", 1), ("seed", 0), ("batch_size", 1), ("trace", 0)):
        if not isinstance(v[key], int) or isinstance(v[key], bool) or v[key] < least:
            raise bad_value(key, v[key], f"an integer of at least {least}", at(key))
    if v["seed"] >= 2**62:
        raise bad_value("seed", v["seed"], "an integer below 2**62", at("seed"))
    try:
        Start(*(v[k] for k in START))
    except GenError as error:
        raise GenError(f"{error} ({place})") from None
    v["prompts"] = _prompts(v["prompts"], v.pop("prompts_file"), at)
    v["sampler"], v["law"] = _resolve_sampler(v["sampler"], v["law"], places, place)
    return Entry(**v)


def _check_device(device: str, where: str) -> None:
    import torch

    try:
        torch.device(device)
    except RuntimeError as error:
        raise bad_value("device", device, "cpu, cuda, cuda:0, mps ...", where) from error


def _prompts(prompts: Any, file: str | None, at) -> list[str]:
    where = at("prompts" if file is None else "prompts_file")
    if file is not None:
        try:
            prompts = [line.strip() for line in Path(file).read_text("utf-8").splitlines() if line.strip()]
        except UnicodeDecodeError as error:
            raise GenError(f"prompts_file {file} is no UTF-8 text") from error
        where = file
    if isinstance(prompts, str):
        prompts = [prompts]
    if not isinstance(prompts, list) or not prompts:
        raise bad_value("prompts", prompts, "at least one prompt", where)
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, str) or not prompt.strip():
            raise bad_value(
                f"prompts.{i}", prompt, "a text that is not empty (quote it if YAML reads it otherwise)", where
            )
    return prompts


def _resolve_sampler(node: dict, law: dict, places: Mapping[str, str], place: str) -> tuple[dict, dict]:
    """Every knob of the sampler, under the name the user wrote, and every knob of the law."""
    from gen.sampling import resolve_sampler

    try:
        sampler, full = resolve_sampler(node, law)
    except GenError as error:
        text = str(error)  # said in the place that set the key the message is about
        named = [p for k, p in places.items() if "." in k and k.split(".")[1] in text]
        raise GenError(f"{text} ({named[0] if named else places.get('sampler', place)})") from error
    knobs = {f.name: _plain(getattr(sampler, f.name)) for f in fields(sampler)} if is_dataclass(sampler) else {}
    return {"name": node["name"], **knobs}, {k: _plain(v) for k, v in asdict(full).items()}


def _out(out: Any, name: object, where: str) -> str:
    if out is None:
        return f"out/{name}"
    if not isinstance(out, str) or not out.strip():
        raise bad_value("out", out, "a folder", where)
    return out


# ------------------------------------------------------------------------------------------------------- plain data


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


def _canonical(value: Any) -> Any:
    """Plain data in which 2 and 2.0 are one number, as they are to every knob."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {str(k): _canonical(v) for k, v in value.items()}
    return [_canonical(v) for v in value] if isinstance(value, (list, tuple)) else value


def _flat(tree: Mapping, prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in tree.items():
        out.update(_flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value})
    return out


def _escape(value: Any) -> Any:
    """``${`` in a prompt is text, not an interpolation."""
    if isinstance(value, str):
        return value.replace("${", "\\${")
    if isinstance(value, Mapping):
        return {k: _escape(v) for k, v in value.items()}
    return [_escape(v) for v in value] if isinstance(value, Iterable) else value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
