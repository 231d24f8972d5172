"""The registry: one decorator, discovery by folder, plugins by entry point, clear refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gen.core.errors import GenError
from gen.core.registry import ROOMS, Registry, registry

ROOT = Path(__file__).parents[2]


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


@pytest.mark.parametrize("room", ROOMS)
def test_every_module_of_a_room_registers_something_or_serves_one_that_does(room):
    """A method whose decorator was forgotten would be unreachable."""
    registry.discover()
    named = {
        obj.__module__
        for table in registry._kinds.values()
        for obj in table.values()
        if hasattr(obj, "__module__")
    }
    folder = ROOT / room.replace(".", "/")
    source = {p: p.read_text() for p in sorted(folder.rglob("*.py")) if p.stem != "__init__"}
    assert len(source) > 3
    folders = [ROOT / name for name in ("gen", "samplers", "modalities", "tokenizers", "recipes")]
    everything = "\n".join(p.read_text() for f in folders for p in sorted(f.rglob("*.py")))
    for path, text in source.items():
        package = ".".join([room, *path.parent.relative_to(folder).parts])
        module = f"{package}.{path.stem}"
        imported = f"{module} import" in everything or f"{package} import {path.stem}" in everything
        presets = "preset(" in text  # which are values and do not say where they were made
        assert module in named or imported or presets, (
            f"{module} registers nothing and nobody imports it"
        )


PLUGIN = """
from gen.core.registry import register
from gen.samplers.masked.parts.schedules import linear

register("schedule", "from_plugin")(lambda r, exponent: 1 - r)
"""


@pytest.mark.slow
def test_an_installed_package_can_add_a_schedule(tmp_path):
    (tmp_path / "my_plugin.py").write_text(PLUGIN)
    info = tmp_path / "my_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[gen.plugins]\nmine = my_plugin\n")
    code = (
        "from gen.core.registry import registry; print('from_plugin' in registry.table('schedule'))"
    )

    def ask(path: str) -> str:
        env = {"PYTHONPATH": f"{path}:{ROOT}", "PATH": "/usr/bin:/bin"}
        return subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        ).stdout.strip()

    assert ask(str(tmp_path)) == "True"
    assert ask("") == "False"  # without the package it is not there


def test_a_sampler_whose_module_is_gone_is_listed_without_papers():
    from gen.cli.info import papers

    sampler = registry.get("sampler", "speculative_jacobi")
    assert "2410.01699" in papers(sampler)
    assert papers(type("Typed", (sampler,), {"__module__": "typed_into_a_notebook"})) == []
