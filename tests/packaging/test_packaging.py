"""A wheel holds every file of ``gen`` and of the rooms linked into it."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("samplers", "tokenizers", "modalities", "configs", "recipes")


def files_of_the_package() -> set[str]:
    """Every file under gen/, links followed, as a path inside the wheel."""
    found = set()
    for folder, names, files in os.walk(ROOT / "gen", followlinks=True):
        names[:] = [n for n in names if n != "__pycache__"]
        found |= {
            Path(folder, f).relative_to(ROOT).as_posix() for f in files if not f.startswith(".")
        }
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> set[str]:
    """The names inside a wheel built from a copy of the sources: a build leaves folders behind."""
    try:
        major = int(version("setuptools").split(".")[0])
    except PackageNotFoundError:
        major = 0
    if major < 77:
        pytest.skip("building offline needs setuptools 77 or newer; it comes with the extra 'test'")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for folder in ("gen", *ROOMS):
        shutil.copytree(
            ROOT / folder,
            source / folder,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, source)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        out,
        source,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = out.glob("*.whl")
    return set(zipfile.ZipFile(file).namelist())


@pytest.mark.slow
def test_holds_every_file(wheel):
    files = files_of_the_package()
    assert len(files) > 20
    assert files - wheel == set()


@pytest.mark.parametrize(
    "name",
    [
        "gen/__main__.py",
        "gen/py.typed",
        "gen/media/torchaudio_compat.py",
        "gen/models/adapters/slot_cache.py",
        "gen/samplers/engine/causal_loop.py",
        "gen/tokenizers/image/vq.py",
        "gen/modalities/image/modality.py",
        "gen/recipes/image/recipe.py",
        "gen/configs/demo.yaml",
    ],
)
def test_holds(wheel, name):
    assert name in wheel


def test_holds_the_models(wheel):
    weights = {n for n in wheel if n.startswith("gen/zoo/") and n.endswith(".safetensors")}
    assert weights
    for name in weights:
        assert f"{Path(name).parent.as_posix()}/config.json" in wheel


def test_nothing_at_the_top(wheel):
    """The rooms are inside ``gen``: a top-level ``tokenizers`` would replace the installed package
    of that name."""
    tops = {n.split("/")[0] for n in wheel}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"gen"}


def test_no_second_source_of_packages():
    """torchaudio's wheels do not fit every torch, so it is asked for by name and never by
    default."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not any(
        "torchaudio" in d
        for d in project["dependencies"] + project["optional-dependencies"]["test"]
    )
    extras = project["optional-dependencies"]
    assert [name for name in extras if any("torchaudio" in d for d in extras[name])] == [
        "torchaudio"
    ]
