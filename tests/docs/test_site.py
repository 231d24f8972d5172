"""Documentation site: its navigation, its links and its notebooks."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gen.cli.parser import COMMANDS

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def build(root: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of a checkout; warnings are errors."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True)


@pytest.mark.slow
def test_the_site_builds_without_a_broken_link_or_a_page_outside_the_navigation(tmp_path):
    built = build(ROOT, tmp_path / "site")
    assert built.returncode == 0, built.stderr
    pages = [p.relative_to(ROOT / "docs") for p in (ROOT / "docs").rglob("*.md")]
    assert len(pages) > 20
    for page in pages:
        assert (tmp_path / "site" / page.with_suffix(".html")).is_file()


@pytest.mark.slow
def test_a_broken_link_or_anchor_fails_the_build(tmp_path):
    """Negative control."""
    for name in ("docs", "gen"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("zoo"))
    for room in ("samplers", "tokenizers", "modalities", "configs", "recipes"):
        (tmp_path / room).symlink_to(ROOT / room)
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    with open(tmp_path / "docs" / "index.md", "a") as page:
        page.write("\n[gone](gone.md) [anchor](jobs.md#gone)\n")
    built = build(tmp_path, tmp_path / "site")
    assert built.returncode != 0
    assert "'gone.md'" in built.stderr and "#gone" in built.stderr


def test_the_reference_of_the_command_line_describes_every_command():
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "site" / "hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    page = hooks.on_page_markdown((ROOT / "docs" / "reference" / "cli.md").read_text("utf-8"))
    sections = re.findall(r"^## gen (\S+)$", page, re.MULTILINE)
    assert len(sections) == len(COMMANDS) and "sample" in sections
    assert "`--num-samples`" in page and "%" not in page.replace("95 %", "")
    assert hooks.on_page_markdown("# other page") == "# other page"  # control


def test_the_readme_fits_on_150_lines():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 150


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_runs_and_shows_what_it_showed(notebook, tmp_path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("QUICK", "1")  # training of a few steps
    shown = nbformat.read(notebook, as_version=4)
    fresh = nbformat.read(notebook, as_version=4)
    NotebookClient(
        fresh, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    code = [(a, b) for a, b in zip(shown.cells, fresh.cells, strict=True) if a.cell_type == "code"]
    assert len(code) >= 4
    for before, after in code:
        assert kinds(before) == kinds(after), before.source
    assert any("image/png" in kind for before, _ in code for kind in kinds(before))


@pytest.mark.long
def test_the_notebook_of_own_images_obeys_most_captions_that_it_has_not_seen(tmp_path):
    """In full, which takes the minutes that it states; it asserts the share itself."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(ROOT / "docs" / "notebooks" / "own_images.ipynb", as_version=4)
    assert any('assert QUICK or shares["obeyed"] >= 0.8' in cell.source for cell in notebook.cells)
    where = {"metadata": {"path": tmp_path}}
    NotebookClient(notebook, kernel_name="python3", timeout=None, resources=where).execute()


def kinds(cell) -> list[str]:
    """Kinds of output of a cell, such as ``text/plain`` and ``image/png``, without progress."""
    found = set()
    for output in (o for o in cell.outputs if o.get("name") != "stderr"):
        found |= set(output.get("data", {})) or {output.output_type}
    return sorted(found)
