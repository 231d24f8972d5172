"""Names of samplers and modalities as the source files declare them, without an import of torch.

A mistyped name is answered at once. The registry decides wherever torch is imported already, and
where plugins are installed, whose names only an import tells.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from importlib.metadata import entry_points

from gen.core.errors import unknown
from gen.core.paths import package_folders
from gen.core.registry import GROUP

# by kind: the folder, and calls whose first text is a name
DECLARED = {
    "modality": ("modalities", r'register\(\s*"modality",\s*"([^"]+)"'),
    "sampler": (
        "samplers",
        r'(?:register\(\s*"(?:sampler|preset)",|\bmethod\(|\bPreset\()\s*"([^"]+)"',
    ),
}


@cache
def source_names(kind: str) -> frozenset[str]:
    """Find the names of a kind in the source files; ``sampler`` includes presets."""
    folder, pattern = DECLARED[kind]
    files = (path for root in package_folders(folder) for path in root.rglob("*.py"))
    texts = [path.read_text(encoding="utf-8") for path in files]
    names = {name for text in texts for name in re.findall(pattern, text)}
    if kind == "sampler":  # rows of tables of presets
        tables = (text.partition("\npresets(")[2] for text in texts)
        names |= {name for table in tables for name in re.findall(r"(?m)^    (\w+)=\{$", table)}
    return frozenset(names)


def check_name(kind: str, name: str | None, where: str = "the command line") -> None:
    """Refuse an unknown name, if that can be told without an import of torch.

    Raises:
        GenError: for an unknown name, with the nearest one.
    """
    if name is None or "torch" in sys.modules or entry_points(group=GROUP):
        return
    names = source_names(kind)
    if name not in names:
        raise unknown(kind, name, names, where)
