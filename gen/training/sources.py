"""Media of a folder and their captions: what ``gen encode`` reads.

A caption is the text file ``NAME.txt`` beside a medium, or the field ``text`` (or ``prompt``) of
its row in ``metadata.jsonl``, which names the file in ``file_name``, as in the folders of
``datasets``. A folder of texts holds ``.txt`` files with one text per line, behind its prompt and a
tab where it answers one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gen.contracts.modality import Modality
from gen.core.errors import GenError, bad_value, cut_list, shown
from gen.core.tables import plural
from gen.media.audio import read_wav
from gen.media.bounds import load_array, require_bytes
from gen.media.containers import existing_file, require_package
from gen.media.motion.bvh import read_bvh
from gen.media.video import read_video
from gen.modalities.action.modality import ActionChunk
from gen.modalities.action.tasks import STATE_KEY, TASK_KEY

METADATA = "metadata.jsonl"
CAPTION_KEYS = ("text", "prompt")
FOLDERS = "folders"  # labels that are the names of folders
SOUNDS = (*"wav flac mp3 ogg oga opus m4a aac aif aiff mka".split(),)
SUFFIXES = {
    "image": (*"png webp jpg jpeg bmp tif tiff gif ppm pgm jp2 avif".split(),),
    "speech": SOUNDS,
    "audio": SOUNDS,
    "video": ("mp4", "gif", "mkv", "webm", "mov", "m4v", "avi", "webp"),
    "motion": ("npz", "bvh"),
    "action": ("npz", "npy", "parquet"),
    "text": ("txt",),
}
Parts = dict[str, Any]  # parts of a condition, as plain data


@dataclass(frozen=True)
class Source:
    """One file, or one line of a text file.

    Attributes:
        name: path below the folder, with ``#N`` behind it for line N, from 1.
        path: file.
        line: the line of a text file; None for a whole file.
        condition: parts of the condition that the folder states, or None.
    """

    name: str
    path: Path
    line: str | None = None
    condition: Parts | None = None


@dataclass(frozen=True)
class Medium:
    """One medium of a source, with its condition (None: unconditional)."""

    media: Any
    condition: Parts | None


def find_sources(folder: str | Path, modality: str, labels: str = "") -> list[Source]:
    """List the media of a folder and its subfolders, by name.

    Args:
        folder: the media.
        modality: their modality.
        labels: where labels are that stand for captions: ``folders``, the name of the folder that a
            medium lies in, or a field of the rows of ``metadata.jsonl``; empty for captions.

    Raises:
        GenError: no folder, no medium of the modality in it, or captions that cannot be read or
            name files that are not there.
    """
    root = Path(folder)
    if not root.is_dir():
        raise GenError(f"{folder} is no folder; expected a folder of media")
    media, others = _split(root, modality)
    if not media:
        counts = counted(others)
        held = f"{plural(len(others), 'file')} ({spelled_counts(counts)})" if others else "nothing"
        raise GenError(
            f"{folder} holds {held}; expected media of modality {modality!r}:"
            f" .{', .'.join(SUFFIXES[modality])}"
        )
    if labels and modality in ("text", "action"):
        raise bad_value("labels", labels, f"none for modality {modality!r}")
    if modality == "text":
        return [s for path in media for s in _lines(path, root)]
    captions = _labels(root, media, labels) if labels else _captions(root, media)
    return [
        Source(n, p, condition=captions[n])
        for p, n in ((p, p.relative_to(root).as_posix()) for p in media)
    ]


def left_out(folder: str | Path, modality: str) -> dict[str, int]:
    """Count the files of a folder that ``find_sources`` neither lists nor reads for their captions,
    by extension."""
    root = Path(folder)
    media, others = _split(root, modality)
    captions = {root / METADATA, *(path.with_suffix(".txt") for path in media)}
    return counted([path for path in others if path not in captions])


def counted(files: Iterable[Path]) -> dict[str, int]:
    """Count files by extension, most frequent first; "" stands for files without one."""
    return dict(Counter(path.suffix.lower() for path in files).most_common())


def spelled_counts(counts: dict[str, int]) -> str:
    """Spell counts such as ``2 .heic, 1 without an extension``."""
    return ", ".join(f"{n} {suffix or 'without an extension'}" for suffix, n in counts.items())


def _split(root: Path, modality: str) -> tuple[list[Path], list[Path]]:
    """Return the media of a folder and all other files, by name. Hidden ones are in neither."""
    files = sorted(
        p
        for p in root.rglob("*")
        if p.is_file() and not any(x.startswith(".") for x in p.relative_to(root).parts)
    )
    media = [p for p in files if p.suffix.lower().removeprefix(".") in SUFFIXES[modality]]
    return media, sorted(set(files) - set(media))


def _lines(path: Path, root: Path) -> Iterator[Source]:
    name = path.relative_to(root).as_posix()
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise GenError(f"the text {path} cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        prompt, tab, text = line.rpartition("\t")
        if line.strip():
            condition = {"text": prompt.strip()} if tab and prompt.strip() else None
            yield Source(f"{name}#{number}", path, text.strip(), condition)


def _captions(root: Path, media: list[Path]) -> dict[str, Parts | None]:
    """Find the condition of every medium by its name. ``metadata.jsonl`` comes first."""
    names = [p.relative_to(root).as_posix() for p in media]
    found: dict[str, Parts | None] = dict.fromkeys(names)
    for path, name in zip(media, names, strict=True):
        beside = path.with_suffix(".txt")
        if beside.is_file():
            found[name] = {"text": " ".join(_text(beside).split())}
    if (root / METADATA).is_file():
        found.update(_stated(root, names))
    return found


def _labels(root: Path, media: list[Path], labels: str) -> dict[str, Parts | None]:
    """Find the label of every medium by its name. Underscores stand for spaces.

    Raises:
        GenError: no medium has one.
    """
    names = [p.relative_to(root).as_posix() for p in media]
    if labels == FOLDERS:
        stated = {
            n: p.parent.name if p.parent != root else "" for n, p in zip(names, media, strict=True)
        }
    else:
        if not (root / METADATA).is_file():
            raise GenError(
                f"labels is {labels!r}, and there is no {root / METADATA} with such a field;"
                f" expected it, or {FOLDERS!r}"
            )
        stated = {n: (c or {}).get("text", "") for n, c in _stated(root, names, (labels,)).items()}
    found = {n: " ".join(stated.get(n, "").replace("_", " ").split()) for n in names}
    if not any(found.values()):
        fields = f"rows of {METADATA} with this field"
        raise bad_value("labels", labels, "subfolders" if labels == FOLDERS else fields)
    return {n: {"text": label} if label else None for n, label in found.items()}


def _stated(
    root: Path, names: Iterable[str], keys: tuple[str, ...] = CAPTION_KEYS
) -> dict[str, Parts | None]:
    """Read ``metadata.jsonl``. Raises ``GenError`` for a row of a file that is not there."""
    stated, known = _metadata(root / METADATA, keys), {*names}
    lost = [name for name in stated if name not in known]
    if lost:
        raise GenError(
            f"{root / METADATA} names {plural(len(lost), 'file')} that are not there:"
            f" {', '.join(cut_list(lost, 3))}"
        )
    return stated


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise GenError(f"the caption {path} cannot be read: {error}") from None


def _metadata(path: Path, keys: tuple[str, ...]) -> dict[str, Parts | None]:
    """Read captions, or labels of a field, which may be numbers."""
    found: dict[str, Parts | None] = {}
    for number, line in enumerate(_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise GenError(f"{path}, line {number} is no JSON: {error}") from None
        if not isinstance(row, dict) or not isinstance(row.get("file_name"), str):
            raise GenError(f"{path}, line {number} is {shown(row)}; expected a file_name")
        text = next((row[key] for key in keys if row.get(key) is not None), None)
        if keys != CAPTION_KEYS and isinstance(text, (int, float)):
            text = str(text)
        if text is not None and not isinstance(text, str):
            raise GenError(f"{path}, line {number} has the text {shown(text)}; expected a text")
        found[row["file_name"]] = None if text is None else {"text": text}
    return found


def read_source(
    source: Source,
    modality: Modality,
    horizon: int = 0,
    resize: bool = False,
    rate: int = 0,
    skeleton: dict[str, str] | None = None,
) -> list[Medium]:
    """Read the media of one source.

    Args:
        source: the file or line.
        modality: modality that reads it.
        horizon: steps of a chunk of actions.
        resize: read clips of any size, and mix the channels of sounds.
        rate: samples per second of sounds; 0 for that of the modality.
        skeleton: joint of a BVH file for every joint of gen's; None finds them by usual names.

    Returns:
        One medium; several chunks of an episode of actions, one behind the other.

    Raises:
        GenError: the file cannot be read.
    """
    if source.line is not None:
        return [Medium(source.line, source.condition)]
    suffix = source.path.suffix.lower()
    if suffix == ".npy":
        return _chunks(_array(source.path), None, source, horizon)
    if suffix == ".parquet":
        return _episode(source, horizon)
    if resize and modality.media_kind == "video":
        media = read_video(source.path, fps=modality.frame_rate)
    elif skeleton is not None and suffix == ".bvh":
        media = read_bvh(source.path, skeleton)
    elif rate and modality.media_kind == "audio":
        media = read_wav(source.path, rate, mix=resize)
    else:
        media = modality.load(source.path)
    if isinstance(media, ActionChunk):
        return [Medium(media.action, _observed(media.situation.state, media.situation.task))]
    return [Medium(media, source.condition)]


def _observed(state: Any, task: Any) -> Parts:
    numbers = np.asarray(state, np.float32).tolist()
    return {"observation": {STATE_KEY: numbers, TASK_KEY: str(task)}}


def _array(path: Path) -> np.ndarray:
    try:
        array = load_array(path)
    except (OSError, ValueError, EOFError) as error:
        raise GenError(f"the array {path} cannot be read: {error}") from None
    if array.ndim != 2 or not np.issubdtype(array.dtype, np.number):
        raise GenError(
            f"the array {path} is {array.dtype} {array.shape}; expected numbers [steps, dimensions]"
        )
    return array


def _chunks(
    actions: np.ndarray, conditions: list[Parts] | None, source: Source, horizon: int
) -> list[Medium]:
    """Cut an episode [T, D] into whole chunks; what is left at its end is dropped."""
    if len(actions) < horizon:
        raise GenError(
            f"{source.path} has {plural(len(actions), 'step')}; expected at least {horizon}, one"
            " chunk"
        )
    starts = range(0, len(actions) - horizon + 1, horizon)
    return [
        Medium(actions[i : i + horizon], conditions[i] if conditions else source.condition)
        for i in starts
    ]


def _episode(source: Source, horizon: int) -> list[Medium]:
    """Read an episode of LeRobot's layout: ``action``, ``observation.state`` and ``task``."""
    parquet = require_package("pyarrow.parquet", '"gen-toolkit[parquet]"', "a Parquet file")
    path = existing_file(source.path, "table")
    try:
        with parquet.ParquetFile(path) as file:
            names, groups = file.schema_arrow.names, file.metadata.num_row_groups
            said = f"{file.metadata.num_rows:,} rows"
            size = sum(file.metadata.row_group(i).total_byte_size for i in range(groups))
            require_bytes(f"the table {path}", size, said)
            wanted = [n for n in ("action", STATE_KEY, TASK_KEY) if n in names]
            columns = file.read(columns=wanted).to_pydict() if wanted else {}
    except GenError:
        raise
    except Exception as error:  # a damaged table may raise anything
        raise GenError(f"the table {source.path} cannot be read: {error}") from None
    if "action" not in columns:
        raise GenError(f"the table {path} has the columns {', '.join(names)}; expected 'action'")
    conditions = None
    if STATE_KEY in columns and TASK_KEY in columns:
        pairs = zip(columns[STATE_KEY], columns[TASK_KEY], strict=True)
        conditions = [_observed(state, task) for state, task in pairs]
    try:
        actions = np.asarray(columns["action"], np.float64)
    except (TypeError, ValueError):
        actions = np.zeros(0)
    if actions.ndim != 2 or not np.isfinite(actions).all():
        raise GenError(f"action of the table {path} is no list of finite numbers in every row")
    return _chunks(actions, conditions, source, horizon)
