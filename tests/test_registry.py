"""The registry: one decorator, discovery by folder, plugins by entry point, clear refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gen.errors import GenError
from gen.registry import FOLDERS, Registry, registry

ROOT = Path(__file__).parents[1]


def test_an_unknown_name_is_answered_with_the_nearest_and_all():
    with pytest.raises(GenError, match=r"'sdj' in here\. Did you mean 'sjd'\? Known: .*maskgit"):
        registry.get("preset", "sdj", "here")


def test_a_name_cannot_be_taken_twice_but_a_reload_is_no_second_time():
    table = Registry()

    def first(): ...

    table.register("kind", "name")(first)
    table.register("kind", "name")(first)
    with pytest.raises(ValueError, match="registered twice"):
        table.register("kind", "name")(lambda: None)


@pytest.mark.parametrize("folder", [f for f in FOLDERS if f != "gen.models"])
def test_every_module_of_a_room_registers_something_or_serves_one_that_does(folder):
    """A method whose decorator was forgotten would be unreachable."""
    registry.discover()
    named = {
        obj.__module__
        for table in registry._kinds.values()
        for obj in table.values()
        if hasattr(obj, "__module__")
    }
    source = {
        p.stem: p.read_text()
        for p in (ROOT / folder.removeprefix("gen.").replace(".", "/")).glob("*.py")
        if p.stem != "__init__"
    }
    below = [
        p.read_text() for p in (ROOT / folder.removeprefix("gen.").replace(".", "/")).glob("*/*.py")
    ]
    for stem in source:
        module = f"{folder}.{stem}"
        used = any(
            f"{module} import" in text or f"{folder} import {stem}" in text
            for text in (*source.values(), *below)
        )
        presets = 'preset("' in source[stem]  # which are values and do not say where they were made
        assert module in named or used or presets, (
            f"{module} registers nothing and nobody imports it"
        )


PLUGIN = """
from gen.registry import register
from gen.samplers.schedules import linear

register("schedule", "from_plugin")(lambda r, exponent: 1 - r)
"""


@pytest.mark.slow
def test_an_installed_package_can_add_a_schedule(tmp_path):
    (tmp_path / "my_plugin.py").write_text(PLUGIN)
    info = tmp_path / "my_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[gen.plugins]\nmine = my_plugin\n")
    code = "from gen.registry import registry; print('from_plugin' in registry.table('schedule'))"

    def ask(path: str) -> str:
        env = {"PYTHONPATH": f"{path}:{ROOT}", "PATH": "/usr/bin:/bin"}
        return subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        ).stdout.strip()

    assert ask(str(tmp_path)) == "True"
    assert ask("") == "False"  # without the package it is not there


def test_a_sampler_whose_module_is_gone_is_listed_without_papers():
    from gen.cli_info import papers

    sampler = registry.get("sampler", "speculative_jacobi")
    assert "2410.01699" in papers(sampler)
    assert papers(type("Typed", (sampler,), {"__module__": "typed_into_a_notebook"})) == []
