"""Searches in a gallery: the candidates of an item with their scores, a strip where all of them
were drawn at once and a tree where a search decided between them on the way.

Everything comes from the record ``search`` of an item's row and from the sheet of thumbnails beside
its output. Positions of a tree are numbers of pixels, so it is drawn without a script.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from gen.gallery.media import PREVIEW, Files, Row

COLUMNS = 8  # thumbnails in a row of a sheet
LARGEST, WIDEST = 96, 144  # pixels of a thumbnail's longer side on the page; of a wide one
TEXT = (150, 46)  # pixels of a candidate that is a text
CAPTION, GAP_X, GAP_Y = 20, 44, 14  # pixels below and between candidates of a tree
LISTS = ("level", "parent", "score")  # of a record, one entry per candidate
Values = dict[str, Any]


def search_card(files: Files, row: Row) -> Values | None:
    """Return the candidates of an item as a page shows them; None for a row without a search.

    Args:
        files: files of the job folder.
        row: row of the item.
    """
    record = row.get("search")
    if not isinstance(record, dict) or row.get("status") != "ok":
        return None
    lists = [record.get(name) for name in LISTS]
    if not all(isinstance(x, list) and len(x) == len(lists[0] or ()) for x in lists):
        return None
    nodes = [_node(record, number) for number in range(len(record["level"]))]
    sheet = _sheet(files, record, len(nodes))
    is_tree = len({node["level"] for node in nodes}) > 1
    size = TEXT if sheet is None else sheet["size"]
    card: Values = {
        "facts": _facts(record, len(nodes)),
        "nodes": nodes,
        "sheet": sheet,
        "tree": is_tree,
        "size": size,
        "edges": [],
        "levels": [],
    }
    return {**card, **_placed(nodes, size)} if is_tree else card


def _node(record: Values, number: int) -> Values:
    """Return one candidate: its level, words and score."""
    score, weights, words = record["score"][number], record.get("weight"), record.get("label")
    texts = record.get("text")
    weight = weights[number] if isinstance(weights, list) else None
    return {
        "number": number,
        "level": record["level"][number],
        "parent": record["parent"][number],
        "score": "–" if score is None else f"{score:.3g}",
        "weight": "" if weight is None else f"{weight:.2g}",
        "label": str(words[number]) if isinstance(words, list) else "",
        "text": str(texts[number]) if isinstance(texts, list) else "",
        "chosen": number in record.get("chosen", ()),
    }


def _facts(record: Values, shown: int) -> str:
    """Say how large the search was, and what of it is shown."""
    count, levels = record.get("candidates", shown), record.get("levels", 1)
    said = f"{count:,} candidate{'' if count == 1 else 's'}"
    said += f" on {levels:,} levels" if levels > 1 else ""
    if shown == count:
        return said
    kept = len(set(record["level"]))
    part = f"{shown:,} of them" + (f" on {kept} levels" if levels > kept else "")
    return f"{said} · {part} shown"


def _sheet(files: Files, record: Values, count: int) -> Values | None:
    """Return the sheet of thumbnails: its address, its size, that of a cell and of a cell on the
    page; None where there is none."""
    name, cell = record.get("sheet"), record.get("cell")
    if not isinstance(name, str) or not isinstance(cell, list):
        return None
    if name in files.media:
        address = quote(name)
    elif name in files.previews:
        address = f"{PREVIEW}/{quote(name)}"
    else:
        return None
    width, height = cell
    scale = (WIDEST if width > 1.5 * height else LARGEST) / max(width, height)
    return {
        "source": address,
        "cell": (width, height),
        "whole": (width * min(COLUMNS, count), height * -(-count // COLUMNS)),
        "at": [(n % COLUMNS * width, n // COLUMNS * height) for n in range(count)],
        "size": (round(width * scale), round(height * scale)),
        "pixels": scale >= 1,
    }


def _placed(nodes: list[Values], size: tuple[int, int]) -> Values:
    """Arrange the candidates of a tree, a column per level, and the edges between them."""
    width, height = size[0] + GAP_X, size[1] + CAPTION + GAP_Y
    columns = sorted({node["level"] for node in nodes})
    filled = dict.fromkeys(columns, 0)
    for node in nodes:
        level = node["level"]
        node["left"], node["top"] = columns.index(level) * width, filled[level] * height
        filled[level] += 1
    edges = []
    for node in nodes:
        parent = node["parent"]
        if isinstance(parent, int) and 0 <= parent < len(nodes):
            above = nodes[parent]
            start = above["left"] + size[0], above["top"] + size[1] // 2
            end = node["left"], node["top"] + size[1] // 2
            middle = (start[0] + end[0]) / 2
            bend = f"C{middle:g} {start[1]} {middle:g} {end[1]} {end[0]} {end[1]}"
            path = f"M{start[0]} {start[1]}{bend}"
            edges.append((path, node["chosen"] and above["chosen"]))
    return {
        "edges": sorted(edges, key=lambda edge: edge[1]),  # those of the output on top
        "levels": [(level, columns.index(level) * width) for level in columns],
        "width": len(columns) * width - GAP_X,
        "height": max(filled.values()) * height - GAP_Y,
    }
