"""The page on the architecture shows the code as it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "figures" / "rooms.py"


def check(script: Path) -> int:
    """Compare the figure beside a script with the imports of its tree."""
    return subprocess.run([sys.executable, str(script), "--check"], timeout=120).returncode


def test_the_figure_shows_the_imports_of_today():
    assert check(SCRIPT) == 0, "run: python docs/figures/rooms.py"


def test_control_another_import_is_seen(tmp_path):
    for name in ("gen", "samplers", "tokenizers", "modalities", "recipes", "docs/images"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text("utf-8"), "utf-8")
    script = tmp_path / "docs" / "figures" / "rooms.py"
    script.parent.mkdir()
    script.write_text(SCRIPT.read_text("utf-8"), "utf-8")
    (tmp_path / "gen" / "cli").mkdir()
    (tmp_path / "gen" / "cli" / "a.py").write_text("import os\n")
    subprocess.run([sys.executable, str(script)], check=True, timeout=120)
    assert check(script) == 0
    (tmp_path / "gen" / "cli" / "a.py").write_text("from gen.jobs.run import run_job\n")
    assert check(script) == 1
