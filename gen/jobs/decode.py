"""``gen decode``: media out of the tokens that a job kept, by the frontend they were made with or
by another one.

What comes out is a folder like a job's: media with their sidecars, journals while it is at work, a
manifest, a gallery. Its plan says what it was decoded from and with; it has no shards and no
config, so nothing is ever sampled into it. The same command again makes what is missing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gen.core.errors import GenError, describe
from gen.core.files import TEMPORARY, put, put_text, sha256, writing
from gen.core.printable import printable
from gen.core.processes import worker_name
from gen.gallery import write as gallery
from gen.jobs.decoder import Decoder, decoder_key
from gen.jobs.plan import write_plan
from gen.jobs.progress.report import Silent
from gen.jobs.progress.terminal import for_terminal
from gen.jobs.writer import info_of
from gen.store.ledger import (
    RUNTIME,
    Journal,
    Row,
    is_job,
    read_json,
    read_plan,
    read_rows,
    require_job,
)
from gen.store.manifest import damaged, digest_of, mend, publish, remove_job
from gen.store.shard_reader import Members
from gen.store.stored_tokens import StoredTokens, load_tokens

GONE = (
    "member",
    "shard_sha256",
    "shard_bytes",
    "tokens_file",
    "also",
    "search",  # its candidates kept no tokens
    "beside_sha256",
    "trace_sha256",
)  # of a row: where its parts lie in the source


def decode_folder(
    folder: str | Path,
    out: str | Path,
    *,
    frontend: str | None = None,
    model: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    force: bool = False,
    trust_remote_code: bool = False,
    progress: Silent | None = None,
) -> dict[str, Any]:
    """Make the media of all finished items of a job again, into the folder ``out``.

    ``frontend``: zoo name or folder of another one; by default the one the tokens were made with.
    ``model``: where the model that they are of lies now. ``device``, ``dtype``: by default those of
    the job. ``force``: replace what was decoded into ``out`` otherwise.

    Returns ``folder``, ``gallery``, ``items``, ``made``, ``skipped``, ``identical`` (media equal to
    the originals, to the byte), ``failed`` (id, prompt, error) and ``notes``. Raises ``GenError``
    if the job kept no tokens, if the frontend does not fit, or if ``out`` holds something else.
    """
    progress, source, out = progress or Silent(), require_job(folder), Path(out)
    plan, rows = read_plan(source), read_rows(source)
    require_tokens(source, plan, rows, frontend)
    making = Making(source, frontend, model, device, dtype, trust_remote_code)
    making.prepare(rows)
    own = plan_of(
        source,
        plan,
        {"frontend": frontend, "weights": making.weights, "model": model, "dtype": dtype},
    )
    open_target(out, own, force)
    for damage in mend(out):
        progress.note(f"{damage.path}, line {damage.line} was damaged; its item is decoded again")
    before, bad = {r["id"]: r for r in read_rows(out)}, damaged(out, own)
    due = [r for r in rows if not is_there(before.get(r["id"]), r, bad)]
    journal = Journal(out, 0, worker_name())
    progress.start(len(rows), len(rows) - len(due))
    try:
        label = None
        for row in due:
            if row["sampler"] != label:
                progress.batch(label := row["sampler"], 1)
            new = making.make(row, out) if row["status"] == "ok" else stripped(row)
            journal.add([{**new, "attempt": before.get(row["id"], {}).get("attempt", 0) + 1}])
            if new["status"] != "ok" == row["status"]:
                progress.note(f"item {new['id']} failed: {new['error']}")
            progress.items(1)
        publish(out, own)
    finally:
        progress.close()
        making.files.close()
    with writing(out):
        page = gallery.write_gallery(out)
    return summary_of(source, out, page, plan, rows, due, making.notes)


def is_there(found: Row | None, row: Row, bad: Callable[[Row], bool]) -> bool:
    """Return True if a row of the source has its output already; a row that failed there needs
    none."""
    if found is None or row["status"] != "ok":
        return found is not None and stripped(found) == stripped(row)
    return (
        found["status"] == "ok" and found.get("source_sha256") == row["sha256"] and not bad(found)
    )


def stripped(row: Row) -> Row:
    """Copy a row without the parts that belong to the source."""
    return {k: v for k, v in row.items() if k not in (*GONE, "attempt")}


def summary_of(
    source: Path,
    out: Path,
    page: Path,
    plan: dict[str, Any],
    rows: list[Row],
    due: list[Row],
    notes: list[str],
) -> dict[str, Any]:
    """Build the summary that `decode_folder` returns."""
    never, wanted = (
        [r for r in rows if r["status"] != "ok"],
        {r["id"] for r in rows if r["status"] == "ok"},
    )
    found = [r for r in read_rows(out) if r["id"] in wanted]
    good = [r for r in found if r["status"] == "ok"]
    failed = [{k: r[k] for k in ("id", "prompt", "error")} for r in found if r["status"] != "ok"]
    made = sum(r["id"] in wanted for r in due) - len(failed)
    waiting, total = len(plan["items"]) - len(rows), len(plan["items"])
    if waiting:
        notes = [
            *notes,
            (
                f"{waiting} of {total} items of {source} are not made yet; the same command later"
                " decodes them"
            ),
        ]
    if never:
        notes = [*notes, f"{len(never)} items of {source} failed there and have no tokens"]
    return {
        "folder": str(out),
        "gallery": str(page),
        "items": len(found),
        "made": made,
        "skipped": len(found) - made - len(failed),
        "identical": sum(r["sha256"] == r["source_sha256"] for r in good),
        "failed": failed,
        "notes": notes,
    }


class Making:
    """Decoding of rows one after another; of several models' tokens, the decoder of the last one
    is kept."""

    def __init__(
        self,
        source: Path,
        frontend: str | None,
        model: str | None,
        device: str | None,
        dtype: str | None,
        trust_remote_code: bool,
    ):
        self.source, self.weights, self.notes, self.files = source, None, [], Members(source)
        self.said = {
            "frontend": frontend,
            "model": model,
            "device": device,
            "dtype": dtype,
            "trust_remote_code": trust_remote_code,
        }
        self._key, self._decoder = None, None

    def prepare(self, rows: list[Row]) -> None:
        """Load the decoder of the first item, so that a misfit is reported before anything is
        written."""
        problem = None
        for row in rows:
            if row["status"] == "ok":
                try:
                    stored = self.tokens(row)
                except GenError as error:
                    problem = problem or error
                else:
                    self.decoder(stored)
                    return
        raise problem

    def tokens(self, row: Row) -> StoredTokens:
        """Read the tokens of a row. Raises ``GenError`` if they are missing."""
        with self.files.path(row, row["tokens_file"]) as path:
            if path is None:
                raise GenError(f"the file of its tokens, {row['tokens_file']}, is missing")
            return load_tokens(path)

    def decoder(self, stored: StoredTokens) -> Decoder:
        """Return the decoder of these tokens, made anew if the last one does not serve them."""
        if (key := decoder_key(stored.meta)) != self._key:
            self._decoder = None  # so that two checkpoints are never in memory
            self._decoder, self._key = Decoder(stored.meta, self.source, **self.said), key
            self.weights = self._decoder.facts["weights"]
            self.notes += [n for n in [self._decoder.note] if n and n not in self.notes]
        return self._decoder

    def make(self, row: Row, out: Path) -> Row:
        """Write output, further files and sidecar of an item into ``out`` and return its new
        row; a failed row has its error."""
        base = stripped(row)

        def failed(error):
            return {
                **base,
                "file": None,
                "sha256": None,
                "bytes": None,
                "status": "failed",
                "error": error,
            }

        try:
            stored = self.tokens(row)
        except GenError as problem:
            return failed(str(problem))
        decoder = self.decoder(stored)
        try:
            media = decoder.medium(stored)
        except Exception as problem:  # what a frontend may raise is open
            return failed(describe(problem))
        modality, name = decoder.pipe.modality, Path(row.get("member") or row["file"]).name
        with self.files.path(row, f"{Path(name).stem}.json") as path:
            recipe = read_json(path).get("job") if path else None
        info = info_of(row, recipe)
        if decoder.frontend is not decoder.own:
            info["decoded_with"] = decoder.name
        also = [f"{Path(name).stem}.{extension}" for extension in modality.also]
        try:
            for further in also:
                put(out / further, lambda temporary: modality.save_also(media, temporary, info))
            put(out / name, lambda temporary: modality.save(media, temporary, info))
        except GenError:
            raise  # a full disk is not a matter of one item
        except Exception as problem:
            for further in also:
                (out / further).unlink(missing_ok=True)
            return failed(f"could not be saved: {describe(problem)}")
        new = {
            **base,
            "file": name,
            "sha256": sha256(out / name),
            "bytes": (out / name).stat().st_size,
            **({"also": also} if also else {}),
            "decoded_with": {k: v for k, v in decoder.facts.items() if v is not None},
            "source_sha256": row["sha256"],
        }
        about = {k: v for k, v in new.items() if k not in RUNTIME}
        sidecar = out / f"{Path(name).stem}.json"
        put_text(sidecar, json.dumps({**about, "job": recipe}, ensure_ascii=False, indent=1) + "\n")
        return {**new, "beside_sha256": digest_of([*(out / n for n in also), sidecar])}


def require_tokens(
    source: Path, plan: dict[str, Any], rows: list[Row], frontend: str | None
) -> None:
    """Raises ``GenError`` if there is nothing to decode, or if one frontend is named for media of
    several modalities."""
    if "decoded_from" in plan:
        raise GenError(
            f"{source} was itself decoded, from {plan['decoded_from']['folder']}, and keeps no"
            " tokens; decode that folder"
        )
    good = [r for r in rows if r["status"] == "ok"]
    if not good:
        raise GenError(f"{source} has no finished items; expected at least one")
    bare = [r for r in good if not r.get("tokens_file")]
    if bare:
        which = (
            "keeps no tokens"
            if len(bare) == len(good)
            else f"keeps no tokens of {len(bare)} items, {bare[0]['id']} first"
        )
        raise GenError(
            f"{source} {which}; run the job with tokens: true to be able to decode it again"
        )
    several = sorted({r["modality"] for r in good})
    if frontend is not None and len(several) > 1:
        raise GenError(
            f"{source} holds media of {', '.join(several)}, and frontend {frontend} is of one of"
            " them; expected a job of one modality"
        )


def plan_of(source: Path, plan: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Build the plan of the target folder: the items of the source, and a fingerprint that no
    job has. The device does not count."""
    said = {"frontend": "its own", **{k: v for k, v in settings.items() if v is not None}}
    relevant = {**plan["relevant"], "layout": "files", "decoded_with": said}
    mark = hashlib.sha256(
        json.dumps([plan["fingerprint"], said], sort_keys=True).encode()
    ).hexdigest()
    origin = {"folder": str(source.absolute()), "fingerprint": plan["fingerprint"]}
    return {**plan, "fingerprint": mark, "relevant": relevant, "decoded_from": origin, "shards": []}


def open_target(out: Path, plan: dict[str, Any], force: bool) -> None:
    """Write the plan into the target folder. Raises ``GenError`` if it holds anything but this
    very decoding."""
    if out.exists() and not out.is_dir():
        raise GenError(f"out is {str(out)!r}, which is a file; expected a folder")
    if is_job(out):
        there = read_plan(out)
        if "decoded_from" not in there:
            raise GenError(
                f"{out} holds a job of its own; expected a new or empty folder, or one that gen"
                " decode wrote"
            )
        if there["fingerprint"] == plan["fingerprint"] and not force:
            return
        if not force:

            def origin(p):
                return (
                    p["decoded_from"]["folder"],
                    json.dumps(p["relevant"]["decoded_with"], sort_keys=True),
                )

            raise GenError(
                f"{out} holds media decoded from {origin(there)[0]} with {origin(there)[1]}; this"
                f" command decodes {origin(plan)[0]} with {origin(plan)[1]}. Choose another folder,"
                " or pass --force to replace it"
            )
        remove_job(out, there)
    elif out.is_dir() and any(not p.name.startswith(TEMPORARY) for p in out.iterdir()):
        raise GenError(
            f"{out} is not empty and has no decoded media; expected a new or empty folder"
        )
    write_plan(out, plan)
    if read_plan(out)["fingerprint"] != plan["fingerprint"]:
        raise GenError(f"another decoding began in {out} at the same moment; choose another folder")


def decode(args: argparse.Namespace) -> int:
    """Carry out ``gen decode DIR --out D``; return 1 if an item failed."""
    how = ("frontend", "model", "device", "dtype", "force", "trust_remote_code")
    summary = decode_folder(
        args.folder, args.out, **{k: getattr(args, k) for k in how}, progress=for_terminal()
    )
    for note in summary["notes"]:
        print(f"gen: {printable(note)}", file=sys.stderr)
    good = summary["items"] - len(summary["failed"])
    print(
        f"{summary['made']} media decoded from stored tokens, {summary['skipped']} already there; "
        f"{summary['identical']} of {good} equal the originals to the byte"
    )
    print(f"gallery: {summary['gallery']}")
    if summary["failed"]:
        first = summary["failed"][0]
        print(
            f"gen: {len(summary['failed'])} of {summary['items']} items failed ({first['id']}:"
            f" {printable(first['error'])})",
            file=sys.stderr,
        )
    return 1 if summary["failed"] else 0
