"""Folders of GenEval: images out in its layout, its detector's verdicts in.

    OUT/00000/metadata.jsonl        one line: the prompt, its tag and what it asks for
    OUT/00000/samples/00000.png     images of that prompt
    OUT/00001/...

A prompt is numbered by its first item in the plan, and an image by its item among those of the
prompt, so a verdict finds its item again. GenEval's ``evaluate_images.py OUT --outfile
results.jsonl`` writes the verdicts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gen.core.errors import GenError
from gen.core.files import put, put_text, writing
from gen.eval.folders import Broken, JobFolder, kind_of_file
from gen.media.images import read_image

SAMPLE = re.compile(r"(\d+)/samples/(\d+)\.png$")


def metadata_of(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return GenEval's metadata of an item: its ``meta`` and its prompt. Raises ``GenError``
    without a tag."""
    meta = item.get("meta") or {}
    if not isinstance(meta.get("tag"), str):
        raise GenError(
            f"item {item['id']} has no tag in its meta; expected prompts of GenEval's"
            " evaluation_metadata.jsonl"
        )
    return {**meta, "prompt": item["prompt"]}


def numbers_of(job: JobFolder) -> dict[str, tuple[int, int]]:
    """Number the items of a plan: prompt and sample by the id of the item."""
    prompts: dict[str, int] = {}
    samples: dict[int, int] = {}
    found: dict[str, tuple[int, int]] = {}
    for item in job.plan["items"]:
        key = json.dumps(metadata_of(item), sort_keys=True)
        prompt = prompts.setdefault(key, len(prompts))
        samples[prompt] = samples.get(prompt, -1) + 1
        found[item["id"]] = prompt, samples[prompt]
    return found


def write_geneval(folder: str | Path, out: str | Path) -> dict[str, int]:
    """Write the images of a job in GenEval's layout.

    Args:
        folder: job folder of images whose prompts carry GenEval's metadata.
        out: new folder, or one that this call wrote; images that are there are replaced.

    Returns:
        Numbers of ``prompts``, ``images`` and ``broken`` items, which have no image.

    Raises:
        GenError: no images, or a prompt without a tag.
    """
    job, out = JobFolder(folder), Path(out).expanduser()
    names = [r.get("member") or r.get("file") or "" for r in job.rows if r["status"] == "ok"]
    if not names or any(kind_of_file(name) != "image" for name in names):
        raise GenError(f"GenEval judges images; {job.path} holds other media, or none yet")
    numbers = numbers_of(job)
    if out.is_dir() and any(not p.name.isdigit() for p in out.iterdir()):
        raise GenError(f"{out} holds other files; expected a new folder, or one of GenEval's")
    prompts, images, broken = set(), 0, 0
    try:
        for row in job.rows:
            prompt, sample = numbers[row["id"]]
            target = out / f"{prompt:05d}"
            with writing(target):
                (target / "samples").mkdir(parents=True, exist_ok=True)
            if prompt not in prompts:
                text = json.dumps(metadata_of(row), ensure_ascii=False)
                put_text(target / "metadata.jsonl", text + "\n")
                prompts.add(prompt)
            try:
                with job.media(row) as path:
                    rgb = read_image(path)
            except (Broken, GenError, OSError):
                broken += 1
                continue
            put(target / "samples" / f"{sample:05d}.png", lambda to, rgb=rgb: rgb.save(to))
            images += 1
    finally:
        job.close()
    return {"prompts": len(prompts), "images": images, "broken": broken}


def read_verdicts(path: str | Path) -> dict[tuple[int, int], dict[str, Any]]:
    """Read GenEval's ``results.jsonl``: the verdicts by number of prompt and sample.

    Raises:
        GenError: no such file, or a line without filename, tag and correct.
    """
    path = Path(path).expanduser()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise GenError(f"geneval.results is {path}, which cannot be read: {error}") from None
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            verdict = json.loads(line)
            match = SAMPLE.search(verdict["filename"].replace("\\", "/"))
            correct, tag = verdict["correct"], verdict["tag"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise GenError(
                f"{path}, line {number} is not a verdict of GenEval ({type(error).__name__}:"
                f" {error}); expected filename, tag and correct"
            ) from None
        if match is None or not isinstance(correct, bool):
            raise GenError(
                f"{path}, line {number}: filename is {verdict['filename']!r} and correct is"
                f" {correct!r}; expected .../00000/samples/00000.png and true or false"
            )
        found[int(match[1]), int(match[2])] = {"tag": tag, "correct": correct}
    return found
