"""Check of a job folder by the modality's checker, with verdicts for the gallery."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from gen.core.errors import GenError
from gen.core.files import put, writing
from gen.eval.folders import JobFolder, digest
from gen.eval.metric import make_metric
from gen.eval.metrics.checker import shares, verdicts_of
from gen.eval.run import EVAL, Measurement, measured
from gen.eval.stamps import settings_stamp
from gen.eval.threads import one_thread
from gen.gallery import write as gallery_page
from gen.store.ledger import CHECK
from gen.store.sealed import seal


def check_folder(folder: str | Path, workers: int = 1) -> dict[str, Any]:
    """Check every output of a folder with the modality's checker, from the files alone; write
    ``check.json`` and the gallery.

    Args:
        folder: job folder.
        workers: processes.

    Returns:
        ``items`` (judged ones), the shares ``passed`` and ``valid``, both ``by_sampler`` as well,
        ``failed`` (items that are not both), ``broken`` (number of outputs that are missing,
        altered or unreadable; they count as not valid) and ``unjudged`` (items of models without a
        checker, by reason).

    Raises:
        GenError: the folder has no items.
    """
    job = JobFolder(folder)
    if not job.rows:
        raise GenError(f"{folder} has no items yet; expected a manifest with at least one")
    for name in dict.fromkeys(row["modality"] for row in job.rows):
        job.modality(name)  # an unknown one fails before anything is read
    metric = make_metric("checker", {})
    out = job.path / EVAL / f"checker-{digest(settings_stamp(metric))}"
    try:
        with one_thread():
            # every file is read again: an earlier verdict does not see a damaged disk
            shards = measured(Measurement(metric, job, out), workers, fresh=True)
    finally:
        job.close()
    verdicts: dict[str, dict[str, Any]] = {}
    unjudged: dict[str, int] = {}
    broken: dict[str, str] = {}
    for shard in shards:
        for group in shard.groups:
            verdicts |= verdicts_of(shard.state(group))
        for _, reason, count in shard.skipped:
            unjudged[reason] = unjudged.get(reason, 0) + count
        broken |= shard.broken
    for name, detail in broken.items():
        verdicts[name] = {"passed": False, "valid": False, "detail": detail}
    rows = [row for row in job.rows if row["id"] in verdicts]
    ordered = {row["id"]: verdicts[row["id"]] for row in rows}
    put(job.path / CHECK, lambda temporary: temporary.write_bytes(seal(ordered)))
    with writing(job.path):
        gallery_page.write_gallery(job.path)
    return _report(rows, ordered, len(broken), unjudged)


def _report(
    rows: list[dict[str, Any]],
    verdicts: dict[str, dict[str, Any]],
    broken: int,
    unjudged: dict[str, int],
) -> dict[str, Any]:
    by_sampler: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_sampler[row["sampler"]].append(verdicts[row["id"]])
    failed = [
        {"id": r["id"], "prompt": r["prompt"], "file": r["file"], **verdicts[r["id"]]}
        for r in rows
        if not (verdicts[r["id"]]["passed"] and verdicts[r["id"]]["valid"])
    ]
    return {
        **_shares(list(verdicts.values())),
        "broken": broken,
        "unjudged": unjudged,
        "by_sampler": {name: _shares(found) for name, found in by_sampler.items()},
        "failed": failed,
    }


def _shares(verdicts: list[dict[str, Any]]) -> dict[str, Any]:
    found = shares(verdicts) if verdicts else {"passed": None, "valid": None}
    return {"items": len(verdicts), **found}
