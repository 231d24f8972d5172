"""The registry: one decorator, discovery by folder, plugins by entry point, clear refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from crashing import register_crash
from leaks import registered_by_tests

from gen.core.errors import GenError
from gen.core.registry import HOMES, Registry, registry

ROOT = Path(__file__).parents[2]
ROOMS = (
    "gen.models.published",
    "gen.contracts",
    "gen.constraints",
    "gen.eval",
    "gen.samplers",
    "gen.tokenizers",
    "gen.modalities",
)


# networks without a family, since another part of the system is not part of gen: the autoencoder of
# Oasis, the language model and the video encoder of VATT, the vocoder of DASpeech
ALONE = {f"gen.models.published.{name}" for name in ("oasis", "vatt", "daspeech")}


def test_an_unknown_name_is_answered_with_the_nearest_and_all():
    with pytest.raises(GenError, match=r"'sdj' in here\. Did you mean 'sjd'\? Known: .*halton"):
        registry.get("preset", "sdj", "here")


def test_a_name_cannot_be_taken_twice_but_a_reload_is_no_second_time():
    table = Registry()

    def first(): ...

    table.register("kind", "name")(first)
    table.register("kind", "name")(first)
    with pytest.raises(ValueError, match="registered twice"):
        table.register("kind", "name")(lambda: None)


def test_every_home_is_inside_of_a_room():
    assert all(
        home.startswith((*ROOMS, "gen.models")) for homes in HOMES.values() for home in homes
    )


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
        presets = (
            "preset(" in text or "method(" in text
        )  # which are values and do not say where they were made
        assert module in named or imported or presets or module in ALONE, (
            f"{module} registers nothing and nobody imports it"
        )


PLUGIN = """
from gen.core.registry import register
from gen.samplers.masked.parts.schedules import linear

register("schedule", "from_plugin")(lambda r, exponent: 1 - r)
"""


def install(folder: Path, source: str) -> None:
    """Writes a package with the entry point ``mine`` of the group ``gen.plugins``."""
    (folder / "my_plugin.py").write_text(source)
    info = folder / "my_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[gen.plugins]\nmine = my_plugin\n")


def python(code: str, *path: Path, check: bool = True) -> str:
    """Runs code in a process of its own, and returns what it prints."""
    env = {**os.environ, "PYTHONPATH": ":".join(map(str, (*path, ROOT)))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 or not check, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_an_installed_package_can_add_a_schedule(tmp_path):
    install(tmp_path, PLUGIN)
    code = (
        "from gen.core.registry import registry; print('from_plugin' in registry.table('schedule'))"
    )
    assert python(code, tmp_path) == "True"
    assert python(code) == "False"  # without the package it is not there


LOOK_TWICE = """
from gen.core.errors import GenError
from gen.core.registry import registry
for kind in ("schedule", "schedule", "layout"):
    try:
        print(len(registry.table(kind)) > 0)
    except GenError as error:
        print(error)
"""


def test_a_plugin_that_cannot_be_imported_is_named_by_every_look_up(tmp_path):
    install(tmp_path, PLUGIN + "\nraise RuntimeError('no licence')\n")
    message = (
        "plugin 'mine' (my-plugin 1.0, my_plugin) cannot be imported: RuntimeError: no licence;"
        " repair or uninstall it"
    )
    assert python(LOOK_TWICE, tmp_path).splitlines() == [message] * 3


def test_a_module_that_cannot_be_imported_is_named_by_every_look_up(tmp_path):
    """Kinds whose homes lie elsewhere are still listed."""
    broken = tmp_path / "broken_home"
    broken.mkdir()
    (broken / "__init__.py").write_text("")
    (broken / "part.py").write_text("import a_package_that_is_not_there\n")
    code = (
        "from gen.core.registry import HOMES\n"
        "HOMES['schedule'] = (*HOMES['schedule'], 'broken_home')\n" + LOOK_TWICE
    )
    message = (
        "module broken_home.part cannot be imported: ModuleNotFoundError: No module named"
        " 'a_package_that_is_not_there'"
    )
    assert python(code, tmp_path).splitlines() == [message, message, "True"]
    (broken / "part.py").write_text("")  # and with a module that can be, all are
    assert python(code, tmp_path).splitlines() == ["True"] * 3


HEAVY = ("transformers", "diffusers", "gen.models.nets", "gen.models.published", "gen.tokenizers")


@pytest.mark.slow
def test_listing_samplers_imports_no_model():
    code = (
        "import sys; from gen.__main__ import main; main(['ls', {!r}]);"
        f" print('imported', *[m for m in {HEAVY} if m in sys.modules])"
    )
    assert python(code.format("samplers")).splitlines()[-1] == "imported"
    assert "transformers" in python(code.format("families")).splitlines()[-1]  # the control


def test_listing_samplers_imports_little_beside_torch():
    """Time follows the modules: the bound is on what is imported beside torch."""
    code = (
        "import sys, torch; before = set(sys.modules)\n"
        "from gen.__main__ import main; main(['ls', 'samplers'])\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    modules = python(code).splitlines()[-1].split()
    foreign = {m.partition(".")[0] for m in modules} - {"gen"}
    assert foreign <= {"safetensors", "torch"}
    parts = {m for m in modules if m.startswith("torch.")}  # the class of block masks
    assert parts <= {"torch.nn.attention._utils", "torch.nn.attention.flex_attention"}
    assert any(m.startswith("gen.samplers.") for m in modules)  # control
    assert not any(m.startswith(("gen.modalities.", "gen.models.published.")) for m in modules)


def test_samplers_say_which_papers_they_implement():
    assert "2410.01699" in registry.get("sampler", "speculative_jacobi").papers


def test_what_tests_register_is_seen_until_it_is_taken_back():
    before = registered_by_tests()
    with pytest.MonkeyPatch.context() as patch:
        register_crash(patch)
        assert registered_by_tests() - before == {("modality", "crash")}
    assert registered_by_tests() == before
