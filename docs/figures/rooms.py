"""Draw the rooms of gen and the imports between them, from the imports of the code.

    python docs/figures/rooms.py            write docs/images/rooms.svg
    python docs/figures/rooms.py --check    exit with 1 if the file differs from the code

Rooms and their floors are the layers that the import contract in ``pyproject.toml`` declares. An
arrow stands for imports between two rooms, lazy ones included; its width grows with their number.
Red arrows point upwards: the contract lists each with its reason. Arrows to ``core``, which every
room may import, are left out.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import Counter
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docs" / "images" / "rooms.svg"
LINKED = ("samplers", "tokenizers", "modalities", "recipes")  # folders that gen/ links to
WIDTH, ROW, BOX, MARGIN = 1120, 74, 34, 20
COLOURS = {
    "samplers": "#fde68a",
    "tokenizers": "#bbf7d0",
    "modalities": "#fbcfe8",
    "recipes": "#e5e7eb",
    "models": "#bfdbfe",
}


def layers() -> list[list[str]]:
    """Read the floors of the import contract, highest first: [[room, ...], ...]."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]
    contract = next(c for c in tools["importlinter"]["contracts"] if c["type"] == "layers")
    floors = []
    for floor in contract["layers"]:
        rooms = dict.fromkeys(shown(room.strip()) for room in floor.split(":"))
        floors.append([room for room in rooms if room != "gen.__main__"])
    return floors


def shown(room: str) -> str:
    """Return the box of a room: all modalities share one, apart from their checkpoint families."""
    own = ("gen.modalities.checkpoints", "gen.modalities.small_language")
    return "gen.modalities" if room.startswith("gen.modalities.") and room not in own else room


def sources() -> dict[str, Path]:
    """Return every module of the product by its dotted name."""
    roots = [ROOT / "gen", *(ROOT / name for name in LINKED)]
    found = {}
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            if root.name == "gen" and path.relative_to(root).parts[0] in LINKED:
                continue
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts if parts[0] == "gen" else ("gen", *parts))
            found[name.removesuffix(".__init__")] = path
    return found


def room_of(module: str, rooms: list[str]) -> str | None:
    """Return the room that a module lies in, the most specific one, or None."""
    fits = [r for r in rooms if module == r or module.startswith(f"{r}.")]
    return max(fits, key=len, default=None)


def arrows(rooms: list[str]) -> Counter[tuple[str, str]]:
    """Count the imports from one room to another."""
    modules, counts = sources(), Counter()
    for name, path in modules.items():
        start = room_of(name, rooms)
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                targets = [f"{node.module}.{a.name}" for a in node.names]
                targets = [t if t in modules else node.module for t in targets]
            elif isinstance(node, ast.Import):
                targets = [a.name for a in node.names]
            else:
                continue
            for end in {room_of(t, rooms) for t in targets}:
                if start and end and start != end:
                    counts[start, end] += 1
    return counts


def draw() -> str:
    """Return the figure as SVG text."""
    floors = layers()
    rooms = [room for floor in floors for room in floor]
    counts = arrows(rooms)
    centre, boxes = {}, []
    for level, floor in enumerate(floors):
        step = (WIDTH - 2 * MARGIN) / len(floor)
        top = MARGIN + level * ROW
        for number, room in enumerate(floor):
            x = MARGIN + number * step
            centre[room] = (x + step / 2, top)
            label = room.removeprefix("gen.")
            colour = next((c for key, c in COLOURS.items() if label.startswith(key)), "#ffffff")
            width = min(step - 12, 210)
            left = x + step / 2 - width / 2
            boxes.append(
                f'<rect x="{left:.0f}" y="{top}" width="{width:.0f}" height="{BOX}" rx="7"'
                f' fill="{colour}"/><text x="{x + step / 2:.0f}" y="{top + 22}">'
                f"{escape(label)}</text>"
            )
    lines = []
    for (start, end), number in sorted(counts.items()):
        if end == "gen.core":
            continue
        (x1, y1), (x2, y2) = centre[start], centre[end]
        down = y2 > y1
        colour = "#64748b" if down else "#dc2626"
        y1, y2 = (y1 + BOX, y2) if down else (y1, y2 + BOX)
        lines.append(
            f'<path d="M{x1:.0f} {y1} C{x1:.0f} {(y1 + y2) / 2:.0f} {x2:.0f} {(y1 + y2) / 2:.0f}'
            f' {x2:.0f} {y2}" stroke="{colour}" stroke-width="{min(0.5 + number / 12, 4):.1f}">'
            f"<title>{escape(start)} imports {escape(end)}: {number}</title></path>"
        )
    height = 2 * MARGIN + len(floors) * ROW
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
        ' font-family="system-ui, sans-serif" font-size="14">'
        f'<rect width="{WIDTH}" height="{height}" fill="#f8fafc"/>'
        f'<g fill="none" opacity="0.45">{"".join(lines)}</g>'
        f'<g stroke="#334155" text-anchor="middle">{"".join(boxes)}</g>'
        "<style>text{stroke:none;fill:#0f172a}</style></svg>\n"
    )


def main() -> int:
    """Write the figure, or compare it with ``--check``."""
    figure = draw()
    if "--check" in sys.argv[1:]:
        return int(FILE.read_text("utf-8") != figure)
    FILE.write_text(figure, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
