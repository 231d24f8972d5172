"""Media files are opened in ``gen.media`` alone, so that every door reads the same pixels."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("gen", "samplers", "tokenizers", "modalities", "recipes")
OPENERS = {("Image", "open"), ("av", "open"), ("wave", "open"), ("sf", "read"), ("plt", "imread")}
PACKAGES = {"soundfile", "av", "cv2", "imageio", "torchcodec", "skimage", "librosa", "audioread"}
CALLED = {"soundfile_module", "av_module"}
# the server reads the header or the samples of a file that it has just written
OWN = {("gen/serve/api/speech.py", "wave.open"), ("gen/serve/api/videos.py", "av_module")}


def opened(text: str) -> Iterator[str]:
    """Names by which a source opens media files."""
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            names = [node.func.id]
            names += [a.value for a in node.args[:1] if isinstance(a, ast.Constant)]
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and (node.value.id, node.attr) in OPENERS
        ):
            yield f"{node.value.id}.{node.attr}"
        for name in map(str, names):
            if name in CALLED or name.partition(".")[0] in PACKAGES:
                yield name


def sources() -> list[Path]:
    return [
        path
        for room in ROOMS
        for path in sorted((ROOT / room).rglob("*.py"))
        if not (ROOT / "gen" / path.relative_to(ROOT).parts[1]).is_symlink()
    ]


def test_media_are_opened_in_one_room():
    found = {
        (path.relative_to(ROOT).as_posix(), name)
        for path in sources()
        for name in opened(path.read_text())
    }
    inside = {name for path, name in found if path.startswith("gen/media/")}
    assert {"Image.open", "av.open", "soundfile_module"} <= inside  # control
    assert {(p, n) for p, n in found if not p.startswith("gen/media/")} == OWN


def test_another_opener_would_be_found():
    text = (
        "from PIL import Image\nimport soundfile\nfrom av import container\n"
        "def f(p):\n    av = import_module('cv2')\n    return Image.open(p), av_module()\n"
    )
    assert set(opened(text)) == {"soundfile", "av", "cv2", "Image.open", "av_module"}
