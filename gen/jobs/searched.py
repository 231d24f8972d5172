"""Searches in a job folder: what the row of an item says about them, and the file of their
candidates.

A row has the record ``search``: level, score and weight of every candidate that is shown, one list
each, and how many there were. The candidates' media are thumbnails on one sheet beside the output,
``<stem>.search.png``, or excerpts of their texts in the record. A large search is thinned out: at
most ``LEVELS`` levels, evenly spaced, of ``WIDTH`` candidates each, those on the path to the output
among them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from PIL import Image

from gen.core.files import Puts
from gen.gallery.media import DRAW, kind_of
from gen.pipeline.candidates import CandidateOutput
from gen.store.ledger import Row

LEVELS, WIDTH = 8, 16  # levels, and candidates of each, that are shown
CELL = 128  # pixels of the longer side of a thumbnail
COLUMNS = 8  # thumbnails in a row of a sheet
EXCERPT = 160  # characters of a text
GREY = (128, 128, 128)
ENDING = "search.png"
DIGITS = 6  # of a score; its last bits need not be the same on every machine


def shown_candidates(
    candidates: Sequence[CandidateOutput],
) -> list[tuple[CandidateOutput, int | None]]:
    """Choose the candidates to show, each with the number of the shown one that it came of.

    Args:
        candidates: those of one item, level by level.
    """
    levels: dict[int, list[int]] = {}
    for number, candidate in enumerate(candidates):
        levels.setdefault(candidate.level, []).append(number)
    names = sorted(levels)
    if len(names) > LEVELS:
        last = len(names) - 1
        names = [names[round(k * last / (LEVELS - 1))] for k in range(LEVELS)]
    kept: dict[int, int] = {}  # number among all candidates -> number among those shown
    found: list[tuple[CandidateOutput, int | None]] = []
    for level in names:
        for number in _kept_of(levels[level], candidates):
            above = _ancestor(number, candidates, levels)
            while above is not None and candidates[above].level not in names:
                above = _ancestor(above, candidates, levels)
            kept[number] = len(found)
            found.append((candidates[number], None if above is None else kept.get(above)))
    return found


def _kept_of(level: list[int], candidates: Sequence[CandidateOutput]) -> list[int]:
    """Return the first candidates of a level, those that were chosen among them."""
    if len(level) <= WIDTH:
        return level
    chosen = [n for n in level if candidates[n].chosen][:WIDTH]
    rest = [n for n in level if n not in chosen]
    return sorted([*chosen, *rest[: WIDTH - len(chosen)]])


def _ancestor(
    number: int, candidates: Sequence[CandidateOutput], levels: dict[int, list[int]]
) -> int | None:
    """Return the candidate that another one goes on from, both as numbers among all of them."""
    candidate = candidates[number]
    above = levels.get(candidate.level - 1, [])
    parent = candidate.parent
    return above[parent] if parent is not None and 0 <= parent < len(above) else None


def search_record(candidates: Sequence[CandidateOutput], passes: int, stem: str) -> dict[str, Any]:
    """Return the record of a search in the row of an item, without the sizes of its sheet.

    Args:
        candidates: those of the item, level by level.
        passes: forward passes of all of them.
        stem: name of the item's files.
    """
    shown = shown_candidates(candidates)
    record: dict[str, Any] = {
        "candidates": len(candidates),
        "levels": len({c.level for c in candidates}),
        "passes": passes,
        "level": [c.level for c, _ in shown],
        "parent": [parent for _, parent in shown],
        "score": [_rounded(c.score) for c, _ in shown],
        "chosen": [number for number, (c, _) in enumerate(shown) if c.chosen],
    }
    if any(c.weight is not None for c, _ in shown):
        record["weight"] = [_rounded(c.weight) for c, _ in shown]
    if any(c.label for c, _ in shown):
        record["label"] = [c.label for c, _ in shown]
    if all(isinstance(c.media, str) for c, _ in shown):
        record["text"] = [_excerpt(c.media) for c, _ in shown]
    else:
        record["sheet"] = f"{stem}.{ENDING}"
    return record


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")


def _excerpt(text: str) -> str:
    return text if len(text) <= EXCERPT else f"{text[:EXCERPT]}…"


def thumbnail(media: Any, modality: Any) -> Image.Image | None:
    """Draw a candidate's media small; None where the modality writes no file that can be drawn.

    An image is itself, a sound its spectrogram, a video or the film of a motion its middle frame.
    """
    drawn = modality.still(media)
    if drawn is None:
        drawn = _drawn_file(media, modality)
    if drawn is not None:
        drawn = drawn.convert("RGB")
        drawn.thumbnail((CELL, CELL))
    return drawn


def _drawn_file(media: Any, modality: Any) -> Image.Image | None:
    """Write media to a file and draw it; None where the modality writes none that can be drawn."""
    endings = [e for e in (modality.extension, *modality.also) if kind_of(f"x.{e}")]
    if not endings:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"candidate.{endings[0]}")
        save = modality.save if endings[0] == modality.extension else modality.save_also
        save(media, path, {})
        drawn = DRAW[kind_of(path.name)](path)
        drawn.load()
    return drawn


def draw_sheet(
    shown: Sequence[CandidateOutput], modality: Any
) -> tuple[Image.Image, list[int]] | None:
    """Draw the thumbnails of candidates as one image; return it with the width and height of a
    cell, or None where none can be drawn.

    Args:
        shown: the candidates; the k-th has row k // ``COLUMNS`` and column k % ``COLUMNS``.
        modality: writes and draws their media.
    """
    drawn = [thumbnail(candidate.media, modality) for candidate in shown]
    sizes = [image.size for image in drawn if image is not None]
    if not sizes:
        return None
    width, height = (max(size[axis] for size in sizes) for axis in (0, 1))
    rows = -(-len(drawn) // COLUMNS)
    sheet = Image.new("RGB", (width * min(COLUMNS, len(drawn)), height * rows), GREY)
    for number, image in enumerate(drawn):
        if image is not None:
            left, top = number % COLUMNS * width, number // COLUMNS * height
            sheet.paste(image, (left + (width - image.width) // 2, top))
    return sheet, [width, height]


def load_shown(out: Any) -> None:
    """Decode the candidates of an output that its job folder shows."""
    for row in getattr(out, "candidates", None) or ():
        for candidate, _ in shown_candidates(row):
            with suppress(Exception):  # raised again where its item is saved
                _ = candidate.media


def save_search(out: Any, i: int, row: Row, modality: Any, stem: Path, puts: Puts) -> list[Path]:
    """Add the record of item i's search to its row, and write the sheet of its candidates.

    Args:
        out: output of a pipeline.
        i: number of the item in it.
        row: row of the item, which gets ``search`` and, with a sheet, one more of ``also``.
        modality: writes and draws media.
        stem: path of the item's files without their endings.
        puts: where the sheet is written.

    Returns:
        The temporary path of the sheet, if there is one.
    """
    candidates = (getattr(out, "candidates", None) or {i: ()})[i]
    if not candidates:
        return []
    record = row["search"] = search_record(candidates, out.stats[i].nfe, stem.name)
    if "sheet" not in record:
        return []
    shown = [candidate for candidate, _ in shown_candidates(candidates)]
    sheet = draw_sheet(shown, modality)
    if sheet is None:
        del record["sheet"]
        return []
    image, record["cell"] = sheet
    row["also"] = [*row.get("also", ()), record["sheet"]]
    path = stem.with_name(record["sheet"])
    return [puts.add(path, lambda temporary: image.save(temporary, format="PNG"))]
