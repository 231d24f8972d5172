"""Media of a folder and their captions: what ``gen encode`` reads.

A caption is the text file ``NAME.txt`` beside a medium, or the field ``text`` (or ``prompt``) of
its row in ``metadata.jsonl`` (or ``.csv``, ``.parquet``), which names the file in ``file_name``, as
in the folders of ``datasets``. Conditions that are media are ``gen.training.pairs``. A folder of
texts holds ``.txt`` files with one text per line, behind its prompt and a tab where it answers one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gen.config.prompt_files import read_values
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
from gen.training.pairs import Pairs, partners_in, partners_of_row

METADATA = "metadata.jsonl"
TABLES = (METADATA, "metadata.csv", "metadata.parquet")
FILE_NAME = "file_name"  # column of a table that names a medium
LINE = ""  # key of a row's file and line, for messages
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
PARTS = {  # part of a condition by extension; a .gif is an image
    f".{suffix}": part
    for part, modality in (("video", "video"), ("audio", "audio"), ("images", "image"))
    for suffix in SUFFIXES[modality]
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
        problem: why the source has no condition that can be used; empty for none.
    """

    name: str
    path: Path
    line: str | None = None
    condition: Parts | None = None
    problem: str = ""


@dataclass(frozen=True)
class Medium:
    """One medium of a source, with its condition (None: unconditional)."""

    media: Any
    condition: Parts | None


@dataclass(frozen=True)
class Found:
    """What a folder holds.

    Attributes:
        sources: media with their conditions, or lines of texts, by name.
        left_out: numbers of files that are neither listed nor read for conditions, by extension.
        pairs: media in the conditions, if there are any.
    """

    sources: list[Source]
    left_out: dict[str, int]
    pairs: Pairs | None = None


def find_sources(
    folder: str | Path, modality: str, labels: str = "", given: str | None = None
) -> Found:
    """List the media of a folder and its subfolders, by name.

    Args:
        folder: the media.
        modality: their modality.
        labels: where labels are that stand for captions: ``folders``, the name of the folder that a
            medium lies in, or a field of the rows of the table; empty for captions.
        given: folder of media of the same names, which stand in the conditions; it may be
            ``folder``. None for those that rows of the table state, if they do.

    Raises:
        GenError: no folder, no medium of the modality in it, or conditions that cannot be read or
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
    for key, value in (("labels", labels), ("given", given)):
        if value and modality in ("text", "action"):
            raise bad_value(key, value, f"none for modality {modality!r}")
    if modality == "text":
        return Found([s for path in media for s in _lines(path, root)], counted(others))
    rows = _rows(root, [p.relative_to(root).as_posix() for p in media])
    captions = _labels(root, media, rows, labels) if labels else _captions(root, media, rows)
    pairs = _pairs(root, media, rows, given) if modality != "action" else None
    sources = [
        Source(n, p, condition=captions[n])
        for p, n in ((p, p.relative_to(root).as_posix()) for p in media)
    ]
    read = {*(root / name for name in TABLES), *(path.with_suffix(".txt") for path in media)}
    if pairs is not None:
        sources = _paired(sources, pairs)
        used = {path.resolve() for path in pairs.files}
        read |= {path for path in others if path.resolve() in used}
    return Found(sources, counted([path for path in others if path not in read]), pairs)


def _pairs(
    root: Path, media: list[Path], rows: dict[str, Parts], given: str | None
) -> Pairs | None:
    """Return the media in the conditions of others; None where there are none.

    Raises:
        GenError: both a folder and rows of the table state them.
    """
    stated = {}
    for name, row in rows.items():
        try:
            stated[name] = partners_of_row(row, root)
        except GenError as error:
            raise GenError(f"{row[LINE]}: {error}") from None
    if given is not None:
        if any(stated.values()):
            raise GenError(
                f"given is {given!r}, and rows of the table in {root} state conditions, too;"
                " expected one of both"
            )
        return partners_in(Path(given), root, media, PARTS)
    if not any(stated.values()):
        return None
    partners = {path for found in stated.values() for _, path in found}
    names = [(p.relative_to(root).as_posix(), str(p.absolute())) for p in media]
    mine = {n: stated.get(n, []) for n, path in names if n in rows or path not in partners}
    return Pairs.of(mine, f"expected image, audio or video in its row of the table in {root}")


def _paired(sources: list[Source], pairs: Pairs) -> list[Source]:
    """Return the sources that are no condition of another one, with their partners."""
    out = []
    for source in sources:
        if source.name in pairs.problems:
            out.append(replace(source, problem=pairs.problems[source.name][1]))
        elif source.name in pairs.partners:
            parts = {pairs.part: [pairs.partners[source.name]]}
            out.append(replace(source, condition={**(source.condition or {}), **parts}))
    return out


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


def _captions(root: Path, media: list[Path], rows: dict[str, Parts]) -> dict[str, Parts | None]:
    """Find the caption of every medium by its name. A row of the table comes first."""
    found: dict[str, Parts | None] = {}
    for path in media:
        name, beside = path.relative_to(root).as_posix(), path.with_suffix(".txt")
        found[name] = None
        if name in rows:
            text = _text_of(rows[name], CAPTION_KEYS)
            found[name] = None if text is None else {"text": text}
        elif beside.is_file():
            found[name] = {"text": " ".join(_text(beside).split())}
    return found


def _labels(
    root: Path, media: list[Path], rows: dict[str, Parts], labels: str
) -> dict[str, Parts | None]:
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
        if not any((root / name).is_file() for name in TABLES):
            raise GenError(
                f"labels is {labels!r}, and there is no {root / METADATA} with such a field;"
                f" expected it, or {FOLDERS!r}"
            )
        stated = {n: _text_of(row, (labels,)) or "" for n, row in rows.items()}
    found = {n: " ".join(stated.get(n, "").replace("_", " ").split()) for n in names}
    if not any(found.values()):
        fields = f"rows of {METADATA} with this field"
        raise bad_value("labels", labels, "subfolders" if labels == FOLDERS else fields)
    return {n: {"text": label} if label else None for n, label in found.items()}


def _text_of(row: Parts, keys: tuple[str, ...]) -> str | None:
    """Return the caption of a row, or the label of a field, which may be a number.

    Raises:
        GenError: it is no text.
    """
    text = next((row[key] for key in keys if row.get(key) is not None), None)
    if keys != CAPTION_KEYS and isinstance(text, (int, float)):
        text = str(text)
    if text is not None and not isinstance(text, str):
        raise GenError(f"{row[LINE]} has the text {shown(text)}; expected a text")
    return text


def _rows(root: Path, names: Iterable[str]) -> dict[str, Parts]:
    """Read the table of a folder: its rows by the names of their files, with ``LINE``.

    Raises:
        GenError: two tables, one that cannot be read, or a row of a file that is not there.
    """
    tables, known = [root / name for name in TABLES if (root / name).is_file()], {*names}
    if len(tables) > 1:
        raise GenError(f"{root} holds {' and '.join(p.name for p in tables)}; expected one table")
    found: dict[str, Parts] = {}
    for path in tables:
        for number, row, _, error in read_values(path, FILE_NAME):
            where = f"{path}, line {number}"
            if error is not None:
                raise GenError(f"{where} is {error}")
            if not isinstance(row, dict) or not isinstance(row.get(FILE_NAME), str):
                raise GenError(f"{where} is {shown(row)}; expected a {FILE_NAME}")
            found[row[FILE_NAME]] = {**row, LINE: where}
        lost = [name for name in found if name not in known]
        if lost:
            raise GenError(
                f"{path} names {plural(len(lost), 'file')} that are not there:"
                f" {', '.join(cut_list(lost, 3))}"
            )
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise GenError(f"the caption {path} cannot be read: {error}") from None


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
