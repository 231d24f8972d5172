"""Plan of a job: every item, its shard and its file name, written once before anything is made.

An item is a row of input with a seed of its own. Its id is a digest of everything its output
depends on, so it is the same in every plan that holds it, and an item asked for twice is made
once. A folder whose plan has another fingerprint is refused, with the differences.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Iterable, Iterator
from math import ceil
from pathlib import Path
from typing import Any

from gen.config.canonical import difference
from gen.config.condition_rows import content_of
from gen.config.entries import Entry, Job, fingerprint
from gen.config.inputs import file_digest
from gen.config.rows import Row, located
from gen.core.clock import SteadyClock
from gen.core.edit_spec import MEDIA, EditSpec
from gen.core.errors import GenError
from gen.core.files import TEMPORARY, put, slug, writing
from gen.core.seeds import sample_seeds
from gen.core.versions import installed
from gen.jobs.given import parsed_condition
from gen.jobs.pins import NamedModels, named_models
from gen.store.claims import create
from gen.store.joblog import source_commit
from gen.store.ledger import CONFIG, INPUTS, LOGS, PLAN, SHARDS, is_job, lines_of, read_plan
from gen.store.manifest import shard_of
from gen.store.sealed import Damaged, plan_text

SHARDS_WANTED, LEAST, MOST = (
    64,
    8,
    256,
)  # shards of a large job where nobody says how many items one has, and items of one
NOTED = 3.0  # seconds between two notes
Item = dict[str, Any]


def make_plan(
    job: Job,
    pipe_of: Callable[[Entry], Any],
    models: NamedModels | None = None,
    note: Callable[[str], object] = lambda text: None,
) -> dict[str, Any]:
    """Plan a job. Reads every prompt; a row of a file that cannot be made becomes an item with an
    ``error``.

    Args:
        job: the job.
        pipe_of: pipeline of an entry, or what has its modality.
        models: commits and digests of the models; None finds them.
        note: told how far a long plan is, every ``NOTED`` seconds.

    Raises:
        GenError: for an inline row that cannot be made, and if no row of the job can.
    """
    models = models or named_models(job)
    items: list[Item] = []
    seen: set[str] = set()
    duplicates = 0
    total = sum(entry.census.samples(entry.num_samples) for entry in job.entries)
    clock, noted = SteadyClock(), NOTED
    for e, entry in enumerate(job.entries):
        for item in _items(e, entry, pipe_of(entry).modality, job.run.deterministic):
            if item["id"] in seen:
                duplicates += 1
                continue
            seen.add(item["id"])
            index = len(items)
            if index % 1000 == 0 and clock() > noted:
                note(f"planning: {index:,} of {total:,} items")
                noted = clock() + NOTED
            name = (
                "bad-row"
                if "error" in item
                else f"{slug(str(item.get('input_id') or item['prompt']))}-s{item['seed']}"
            )
            items.append(
                {"id": item.pop("id"), "index": index, **item, "stem": f"{index:06d}-{name}"}
            )
    if items and all("error" in i for i in items):
        raise GenError(
            f"none of the {len(items)} rows is valid; the first error: {items[0]['error']}"
        )
    return {
        "plan": 1,
        "fingerprint": fingerprint(job),
        "made_with": made_with(),
        "weights": models.weights,
        "commits": models.commits,
        "relevant": job.relevant(),
        "labels": job.labels(),
        "duplicates": duplicates,
        "items": items,
        "shards": shards_of(job, len(items)),
    }


def _items(e: int, entry: Entry, modality: Any, deterministic: bool) -> Iterator[Item]:
    whole = {
        k: v for k, v in entry.relevant().items() if k not in ("prompts", "num_samples", "seed")
    }
    if deterministic:
        whole["batch_size"] = entry.batch_size

    identity = _identities(whole)
    start = entry.start
    used: dict[str, int] = {}
    readable: set[str] = set()  # conditions whose media were read
    for row in entry.rows():
        about = {
            "line": row.line,
            **({"condition": row.condition} if row.condition else {}),
            **({"adapter": row.adapter} if row.adapter is not None else {}),
            **({"input_id": row.id} if row.id is not None else {}),
            **({"meta": row.meta} if row.meta else {}),
        }
        overrides = {
            **{k: v for k, v in (("sampler", row.sampler), ("sampling", row.sampling)) if v},
            **row.start,
        }
        try:
            if row.error:
                raise GenError(row.error)
            condition = str(parsed_condition(modality, row.prompt, row.condition, readable))
            if row.start:
                EditSpec(**{**vars(start), **row.start})
        except GenError as error:
            if not entry.prompts_file:
                raise
            where = Path(entry.prompts_file)
            text = str(error) if row.error else located(where, row.line, error, row.origin)
            yield {
                "id": identity("bad", row.line, text),
                "entry": e,
                "prompt": row.prompt,
                "seed": row.seed or entry.seed,
                **about,
                "error": text,
            }
            continue
        content = {k: file_digest(v) if k in MEDIA else v for k, v in overrides.items()}
        if row.adapter is not None:
            content["adapter"] = row.adapter
        if row.condition:
            content["condition"] = content_of(row.condition, file_digest)
        for seed in _seeds_of(row, entry, condition, used):
            yield {
                "id": identity(row.prompt, seed, content),
                "entry": e,
                "prompt": row.prompt,
                "seed": seed,
                **about,
                **({"overrides": overrides} if overrides else {}),
            }


def _identities(whole: dict[str, Any]) -> Callable[..., str]:
    """Return a digest of ``whole`` and further parts, as one list of JSON."""
    encode = json.JSONEncoder(sort_keys=True, ensure_ascii=False).encode
    begun = hashlib.sha256(f"[{encode(whole)}".encode())  # the same for every item

    def identity(*parts: Any) -> str:
        digest = begun.copy()
        digest.update("".join(f", {encode(part)}" for part in parts).encode() + b"]")
        return digest.hexdigest()[:16]

    return identity


def _seeds_of(row: Row, entry: Entry, condition: str, used: dict[str, int]) -> range:
    """Return one seed per sample of a row: from its own seed on, or from the next free one."""
    count = row.num_samples or entry.num_samples
    if row.seed is not None:
        return range(row.seed, row.seed + count)
    return sample_seeds(used, condition, count, entry.seed)


def shards_of(job: Job, count: int) -> list[list[int]]:
    """Split the items into shards: first index and end of each. By default about 64 shards of
    whole microbatches."""
    batch = max(e.batch_size for e in job.entries)
    size = job.run.shard_items or ceil(min(max(count / SHARDS_WANTED, LEAST), MOST) / batch) * batch
    return [[first, min(first + size, count)] for first in range(0, count, size)]


def made_with() -> dict[str, str | None]:
    """Collect the versions of gen, torch, transformers and Python, and gen's commit."""
    found = {
        "gen": installed("gen-toolkit"),
        "torch": installed("torch"),
        "transformers": installed("transformers"),
    }
    return {
        **{name: version or "unknown" for name, version in found.items()},
        "python": platform.python_version(),
        "commit": source_commit(),
    }


def write_plan(folder: Path, plan: dict[str, Any]) -> bool:
    """Write it if there is none; ``False`` if another process was first."""
    with writing(folder / PLAN):
        folder.mkdir(parents=True, exist_ok=True)
        return create(folder / PLAN, plan_text(plan))


def mend_plan(folder: Path, plan: dict[str, Any], damaged: Damaged) -> None:
    """Replace a damaged plan by one that was made again from the job. Raises ``damaged`` where
    the folder does not show that it holds this very job."""
    lines = lines_of(folder, []).values()
    stems = {i["id"]: i["stem"] for i in plan["items"]}
    if not all(_is_of(row, plan, stems) for row in lines):
        raise damaged
    if not lines and plan["fingerprint"] not in _text(folder / CONFIG):
        raise damaged
    put(folder / PLAN, lambda temporary: temporary.write_bytes(plan_text(plan)))


def _is_of(row: dict[str, Any], plan: dict[str, Any], stems: dict[str, str]) -> bool:
    """Return True if a row is of an item of this plan, in the shard that this plan has it in."""
    if row["id"] not in stems:
        return False
    if row["status"] != "ok":
        return True
    shard = f"{SHARDS}/{shard_of(plan, row['index']):05d}.tar"
    name = row.get("member", row["file"])
    return Path(name).stem == stems[row["id"]] and ("member" not in row or row["file"] == shard)


def _text(path: Path) -> str:
    return path.read_text("utf-8", "replace") if path.is_file() else ""


def check_target(folder: Path, job: Job, local: bool = False) -> dict[str, Any] | None:
    """Return the plan of the folder if it holds this very job, None if it is free. Raises
    ``GenError`` for anything else. ``local``: look for models in the local cache alone."""
    if folder.exists() and not folder.is_dir():
        raise GenError(f"out is {str(folder)!r}, which is a file; expected a folder")
    if is_job(folder):
        plan = read_plan(folder)
        if plan["fingerprint"] != fingerprint(job):
            lines = changes(plan, job)
            more = f"; and {len(lines) - 4} more" if len(lines) > 4 else ""
            raise GenError(
                f"{folder} holds a different job ({'; '.join(lines[:4])}{more}). Choose another out"
                " folder, or pass overwrite=true to delete its contents"
            )
        _require_same_models(folder, plan, job, local)
        return plan

    # what a start that was killed leaves: its inputs, its config
    def ours(p):
        return p.name.startswith(TEMPORARY) or p.name in (INPUTS, LOGS, CONFIG)

    if folder.is_dir() and any(not ours(p) for p in folder.iterdir()):
        if is_job(folder):  # somebody began one between the two looks
            return check_target(folder, job, local)
        raise GenError(
            f"{folder} is not empty and has no job; expected a new or empty folder, or one to"
            " resume"
        )
    return None


def _require_same_models(folder: Path, plan: dict[str, Any], job: Job, local: bool) -> None:
    """Raise ``GenError`` for a model of another commit, or with other weights, than in the plan."""
    now = named_models(job, local)
    was = plan.get("commits", {})
    for name, commit in now.commits.items():
        if name in was and was[name] != commit:
            raise GenError(
                f"{folder} was begun with commit {was[name]} of model {name}, and its revision is"
                f" now commit {commit}. gen work {folder} continues with the old commit; otherwise"
                " choose another out folder"
            )
    digests = plan.get("weights", {})
    if other := [name for name in now.weights if digests.get(name) != now.weights[name]]:
        raise GenError(
            f"{folder} was begun with other weights of model {other[0]} (they were"
            f" {str(digests.get(other[0]))[:12]}, now {now.weights[other[0]][:12]}). Choose another"
            " out folder, or bring the weights back"
        )


def changes(plan: dict[str, Any], job: Job) -> list[str]:
    """List what a job would change about a plan; of prompts, the first row that differs."""
    lines = difference(plan["relevant"], job.relevant())
    rows = (
        _other_row(plan["items"], job)
        if any("prompts" in x.partition(": ")[0] for x in lines)
        else None
    )
    return [*lines, rows] if rows else lines


def _other_row(items: Iterable[Item], job: Job) -> str | None:
    was: dict[tuple[int, int], str] = {}
    for item in items:
        was.setdefault((item["entry"], item["line"]), item["prompt"])
    for e, entry in enumerate(job.entries):
        for row in entry.rows():
            old = was.get((e, row.line))
            if old != row.prompt:
                where = (
                    f"line {row.line} of {Path(entry.prompts_file).name}"
                    if entry.prompts_file
                    else f"prompts.{row.line}"
                )
                return f"{where} was {old!r}, now {row.prompt!r}"
    return None
