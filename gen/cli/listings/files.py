"""Models and configs that come with gen, as files: nothing heavy is imported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gen.config.packaged import packaged
from gen.core.docstrings import first_sentence
from gen.core.paths import package_folders
from gen.core.tables import EMPTY


def models() -> list[dict[str, Any]]:
    """List the models that come with gen. A folder or hub id of your own goes wherever a name of
    these does."""
    table = []
    for folder in zoo():
        config = _json_of(folder / "config.json")
        size = sum(p.stat().st_size for p in folder.glob("*.safetensors"))
        about = first_sentence(_first_paragraph(_readable(folder / "README.md")))
        kind = (
            config.get("model_type")
            or config.get("_class_name")
            or config.get("frontend_class")
            or EMPTY
        )
        table.append(
            {"name": folder.name, "type": kind, "megabytes": round(size / 1e6, 2), "about": about}
        )
    return table


def configs() -> list[dict[str, Any]]:
    """List the configs that come with gen."""
    table = []
    for name, path in (packaged() | packaged(training=True)).items():
        line = next(
            (x.lstrip("# ").strip() for x in _readable(path).splitlines() if x.startswith("#")), ""
        )
        table.append({"name": name, "about": line})
    return table


def zoo() -> list[Path]:
    """Find the folders of the models that come with gen."""
    roots = [root for root in package_folders("zoo") if root.is_dir()]
    return sorted(f for root in roots for f in root.iterdir() if (f / "config.json").is_file())


def _readable(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _json_of(path: Path) -> dict[str, Any]:
    try:
        return json.loads(_readable(path))
    except ValueError:
        return {}


def _first_paragraph(card: str) -> str:
    """Find the first paragraph of a model card, behind its YAML head and headings."""
    lines = card.splitlines()
    start = next((i for i, line in enumerate(lines) if _is_prose(line)), len(lines))
    end = next((i for i in range(start, len(lines)) if not lines[i].strip()), len(lines))
    return " ".join(lines[start:end])


def _is_prose(line: str) -> bool:
    """Recognise a line of a model card that is neither its YAML head nor a heading."""
    return bool(line.strip()) and line[0] not in "#-|" and ":" not in line.split(" ")[0]
