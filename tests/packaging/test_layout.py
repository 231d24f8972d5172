"""The four rooms live beside ``gen`` and are linked into it, and nothing at the root shadows an
installed package."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("samplers", "tokenizers", "modalities", "configs", "recipes")
HIDDEN = {"out", "build", "dist"}
BINARY = {
    ".safetensors", ".png", ".gif", ".mp4", ".wav", ".npy", ".npz", ".pt", ".jpg", ".webp", ".zip",
}  # fmt: skip
MAX_COLUMNS, MAX_FUNCTION_LINES, MAX_FILE_LINES = 100, 60, 600


def tracked() -> list[Path]:
    """The files of the project: what git knows or would add, or every file of an unpacked
    archive."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode == 0:
        paths = [ROOT / line for line in listed.stdout.splitlines()]
    else:
        paths = []
        for folder, names, files in os.walk(ROOT):
            names[:] = [
                n
                for n in names
                if not n.startswith((".", "__")) and n not in HIDDEN and ".egg" not in n
            ]
            paths += [Path(folder, f) for f in files]
    return [p for p in paths if p.is_file() and not p.is_symlink()]


@pytest.mark.parametrize("room", ROOMS)
def test_link(room):
    link = ROOT / "gen" / room
    assert link.is_symlink() and os.readlink(link) == f"../{room}"
    assert link.resolve() == (ROOT / room).resolve() and link.is_dir()


@pytest.mark.parametrize("room", ["tokenizers", "configs", "recipes"])
def test_no_init(room):
    """An ``__init__`` in tokenizers/ would hide the installed tokenizers from transformers when run
    from the root."""
    assert not list((ROOT / room).glob("__init__.py*"))


def test_imports_from_the_root():
    code = """
import tokenizers, gen.tokenizers
assert hasattr(tokenizers, "Tokenizer"), tokenizers
assert not hasattr(gen.tokenizers, "Tokenizer")
import gen.samplers.causal.autoregressive
try:
    import samplers.causal.autoregressive
except ValueError as error:
    print(error)
"""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert (
        "import gen.samplers.causal.autoregressive instead" in done.stdout
    )  # one copy of every class, or none


def sizes(text: str) -> list[str]:
    """Describe what is too long in a source: lines, functions, the file itself."""
    lines = text.splitlines()
    found = [
        f"line {n} has {len(line)} columns"
        for n, line in enumerate(lines, 1)
        if len(line) > MAX_COLUMNS
    ]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                found.append(f"{node.name} has {length} lines")
    if len(lines) > MAX_FILE_LINES:
        found.append(f"the file has {len(lines)} lines")
    return found


def test_sources_are_short():
    sources = {p.relative_to(ROOT): p.read_text() for p in tracked() if p.suffix == ".py"}
    assert len(sources) > 10
    found = {p: sizes(text) for p, text in sources.items()}
    assert {str(p): long for p, long in found.items() if long} == {}


def test_what_is_too_long_would_be_found():
    """The controls: each is found one step beyond its limit, and not at it."""
    body = "    x = 1\n"
    assert sizes("x" * MAX_COLUMNS) == [] and sizes("x" * (MAX_COLUMNS + 1))
    assert sizes("def f():\n" + body * (MAX_FUNCTION_LINES - 1)) == []
    assert sizes("def f():\n" + body * MAX_FUNCTION_LINES) == ["f has 61 lines"]
    assert sizes("x = 1\n" * MAX_FILE_LINES) == []
    assert sizes("x = 1\n" * (MAX_FILE_LINES + 1)) == ["the file has 601 lines"]


def foreign(text: str) -> list[str]:
    """What belongs to a machine or a tracker and not to the project. Spelt so that this file does
    not match."""
    words = (
        "/" + "work/",
        "/" + "tmp/venv",
        "/" + "root/",
        r"\b[Ii]ssue" + r" #\d",
        "bash" + "_jobs",
    )
    return re.findall("|".join(words), text)


def test_no_foreign_paths():
    assert foreign("see /" + "work/x and issue" + " #3") == ["/" + "work/", "issue" + " #3"]
    found = {
        p.relative_to(ROOT): foreign(p.read_text()) for p in tracked() if p.suffix not in BINARY
    }
    assert {p: words for p, words in found.items() if words} == {}
