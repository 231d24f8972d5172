"""New methods are one file: dropped into a copy of the tree, a selector, a drafter and a verifier
are listed, documented, have contract specs and run, without another edit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SELECTOR = '''
"""Every position above a probability of its own."""
from dataclasses import dataclass
from gen.core.method import SEQUENTIAL, Limit, method
from gen.core.params import Params, number
from gen.core.registry import register

@dataclass(frozen=True)
class DroppedParams(Params):
    """``dropped_threshold``: a new parameter."""
    dropped_threshold: float = number(0.4)

{declare}@method("dropped_in", paper="2601.00001", title="A Dropped Paper", about="a new file",
{declare}        params={{"selector": "dropped_selector"}},
{declare}        limit=Limit(SEQUENTIAL, {{"dropped_threshold": 1.1}}))
{declare}@register("selector", "dropped_selector", params=DroppedParams)
def dropped_selector(step):
    """Takes what reaches the new threshold."""
    return step.eligible & (step.confidence >= step.params.dropped_threshold)
'''
DRAFTER = '''
"""Jacobi drafts under another name."""
from gen.core.registry import register
from gen.samplers.causal.relaxed import JacobiDrafts

{declare}@register("drafter", "dropped_drafter")
class Dropped(JacobiDrafts):
    """Drafts as Jacobi does."""
'''
VERIFIER = '''
"""Half of the excess passes."""
from dataclasses import dataclass
import torch
from gen.core.registry import register
from gen.samplers.verifiers.relaxed.base import Relaxed, draft_logp

{declare}@register("verifier", "dropped_verifier")
@dataclass(frozen=True)
class Dropped(Relaxed):
    """Credits a draft with a multiple of its mass."""
    relaxation: float = 0.5

    def credit(self, proposal, logp):
        return draft_logp(proposal, logp) + torch.tensor(1.0 + self.relaxation).log()

    def excess(self, p, q):
        return self.relaxation * p
'''
FILES = {
    "samplers/masked/methods/dropped_in.py": SELECTOR,
    "samplers/causal/drafters/dropped_drafter.py": DRAFTER,
    "samplers/verifiers/relaxed/dropped_verifier.py": VERIFIER,
}
REPORT = """
import json
from gen.testing.specs import SPECS, sampling_for
from gen.cli.listings.methods import parts, presets
from gen.core.resolve import resolve_sampler
from docs import tables

mine = [name for name in SPECS if "dropped" in name]
for name in mine:
    from test_contracts import CHECKS, bench, model_for  # heavy; the control has none

    sampler, sampling = resolve_sampler(SPECS[name], sampling_for(name))
    CHECKS[0](bench(sampler.protocol, model_for(sampler)), sampler, sampling)
pages = "".join(make() for make in tables.TABLES.values())
print(json.dumps({
    "listed": [row["name"] for row in (*parts(), *presets()) if "dropped" in row["name"]],
    "documented": sorted({word for word in pages.split("`") if word.startswith("dropped")}),
    "specs": mine,
}))
"""


def report_of(folder: Path, declare: str) -> dict[str, list[str]]:
    """Copies the tree, drops the files in, and says where they appear."""
    for room in ("samplers", "modalities", "tokenizers", "configs", "recipes", "docs"):
        shutil.copytree(ROOT / room, folder / room)
    shutil.copytree(
        ROOT / "gen",
        folder / "gen",
        symlinks=True,
        ignore=shutil.ignore_patterns("zoo"),
    )
    (folder / "gen" / "zoo").symlink_to(ROOT / "gen" / "zoo")
    for name, source in FILES.items():
        (folder / name).write_text(source.format(declare=declare).lstrip())
    paths = (folder, ROOT / "tests" / "support", ROOT / "tests" / "contracts")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", REPORT],
        env={**os.environ, "PYTHONPATH": ":".join(map(str, paths))},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_selector_a_drafter_and_a_verifier_are_one_file_each(tmp_path):
    found = report_of(tmp_path, "")
    names = ["dropped_drafter", "dropped_in", "dropped_selector", "dropped_verifier"]
    assert sorted(found["listed"]) == names
    assert set(names) <= set(found["documented"])
    assert {
        "dropped_in",
        "selector-dropped_selector-whole",
        "selector-dropped_selector-fixed",
        "drafter-dropped_drafter",
        "dropped_verifier-maximal",
        "dropped_verifier-model",
    } <= set(found["specs"])


def test_control_without_their_declarations_they_appear_nowhere(tmp_path):
    assert report_of(tmp_path, "# ") == {"listed": [], "documented": [], "specs": []}


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from docs import tables

    return tables


def test_the_tables_of_the_pages_are_up_to_date(tables):
    for name in tables.PAGES:
        text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert tables.fill(text) == text, f"docs/{name}; run: python docs/tables.py"
        stale = text.replace("| `token` | exact", "| `tokens`").replace("| KLASS: ", "| KLAS: ")
        stale = stale.replace("| `best_of` |", "| `best` |")
        assert tables.fill(stale) == text != stale  # the control
