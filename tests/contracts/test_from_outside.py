"""A package of its own with an entry point runs the contract tests of its parts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gen.core.errors import GenError
from gen.testing.contract import cases, check_contract

ROOT = Path(__file__).parents[2]
DRAFTER = '''
from gen.core.registry import register
from gen.samplers.causal.relaxed import JacobiDrafts


@register("drafter", "outside")
class Outside(JacobiDrafts):
    """Drafts as Jacobi does."""
'''
BROKEN = (
    DRAFTER
    + '''
    @classmethod
    def make(cls, sampler, target, draft, verifier):
        """Drafts of torch's global generator, whatever the row and the key."""
        made = super().make(sampler, target, draft, verifier)
        propose = made.propose

        def broken(*args, **options):
            found = propose(*args, **options)
            found.tokens.random_(0, 6)
            return found

        object.__setattr__(made, "propose", broken)
        return made
'''
)
TESTS = """
import pytest
from gen.testing.contract import cases, check_contract

@pytest.mark.parametrize("name", cases("my_gen_parts"))
def test_contract(name):
    check_contract(name)
"""


def installed(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    """Run the tests of a package with this part, as ``pip install`` would leave it."""
    folder.mkdir()
    (folder / "my_gen_parts.py").write_text(source)
    info = folder / "my_gen_parts-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-gen-parts\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[gen.plugins]\nparts = my_gen_parts\n")
    (folder / "test_parts.py").write_text(TESTS)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_parts.py"],
        env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "OMP_NUM_THREADS": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_parts_of_a_package_are_found_and_checked():
    found = cases("gen.samplers.causal.drafters.suffix")
    assert found and all("suffix" in name for name in found)
    check_contract(found[0])
    with pytest.raises(GenError, match="no spec uses a sampler or part of nowhere"):
        cases("nowhere")


@pytest.mark.slow
def test_a_package_outside_runs_the_checks_of_its_parts(tmp_path):
    good = installed(tmp_path / "good", DRAFTER)
    assert good.returncode == 0 and "passed" in good.stdout, good.stdout + good.stderr
    bad = installed(tmp_path / "bad", BROKEN)  # control
    assert bad.returncode == 1 and "failed" in bad.stdout, bad.stdout + bad.stderr
