"""``gen doctor``: a machine that can run gen is told from one that cannot."""

from __future__ import annotations

import json
from importlib import metadata

import pytest
import torch

from gen.__main__ import main
from gen.cli import doctor
from gen.core.versions import installed


def test_doctor_says_usable_here_and_not_usable_when_a_package_is_too_old(capsys, monkeypatch):
    monkeypatch.setattr(
        doctor, "try_import", lambda name: "absent" if name == "torchaudio" else "works"
    )
    code, out = main(["doctor", "--json"]), capsys.readouterr().out
    report = json.loads(out)
    assert (
        code == 0
        and report["usable"]
        and report["devices"][0] == "cpu"
        and report["packages"]["torch"] == torch.__version__
    )
    assert report["writable"] is True
    plain = doctor.installed
    monkeypatch.setattr(
        doctor, "installed", lambda name: "2.0.1" if name == "torch" else plain(name)
    )
    code, out = main(["doctor"]), capsys.readouterr().out
    assert code == 1 and "torch is 2.0.1; expected" in out and "not usable" in out


def test_doctor_tells_an_absent_package_from_a_broken_one(tmp_path, monkeypatch):
    (tmp_path / "brokenpkg.py").write_text(
        "raise OSError('libx.so: cannot open shared object file')"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert doctor.try_import("no_such_package_here") == "absent"
    assert doctor.try_import("json") == "works"
    assert "extension cannot load" in doctor.try_import(
        "brokenpkg"
    ) and "libx.so" in doctor.try_import("brokenpkg")


@pytest.mark.parametrize(
    "found, wanted, fit",
    [
        ("2.13.0+cpu", ">=2.11", True),
        ("2.9", ">=2.11", False),
        ("10.0", ">=9", True),
        ("2.15.0.dev20261101", ">=2.11", True),
        ("2.11.0rc1", ">=2.11", False),
        ("3.0", ">=2.11,!=3.0", False),
    ],
)
def test_versions_are_compared_as_packaging_compares_them(monkeypatch, found, wanted, fit):
    lines = [f"torch{wanted}", 'av>=14; extra == "video"']
    monkeypatch.setattr(doctor, "requires", lambda _: lines)
    monkeypatch.setattr(doctor, "installed", lambda name: found if name == "torch" else None)
    problems: list[str] = []
    assert list(doctor._packages(problems, [])) == ["torch"]
    assert (problems == []) is fit, problems


@pytest.fixture
def uninstalled(monkeypatch):
    """gen without an installed distribution."""
    plain = metadata.distribution

    def distribution(name):
        if name == "gen-toolkit":
            raise metadata.PackageNotFoundError(name)
        return plain(name)

    monkeypatch.setattr(metadata, "distribution", distribution)
    installed.cache_clear()
    yield
    installed.cache_clear()


def test_doctor_reads_the_requirements_of_the_checkout_that_gen_runs_from(
    uninstalled, capsys, monkeypatch
):
    monkeypatch.setattr(doctor, "try_import", lambda name: "works")
    code, report = main(["doctor", "--json"]), json.loads(capsys.readouterr().out)
    assert code == 0 and report["gen"] == "0+unknown"
    assert report["packages"]["torch"] == torch.__version__ and len(report["packages"]) > 10
    assert any("runs from the checkout" in note for note in report["notes"])
    plain = doctor.installed  # control: a package that the checkout requires is too old
    monkeypatch.setattr(
        doctor, "installed", lambda name: "2.0.1" if name == "torch" else plain(name)
    )
    assert main(["doctor"]) == 1 and "torch is 2.0.1; expected" in capsys.readouterr().out


def test_a_copy_that_was_never_installed_is_told_from_a_missing_package(
    uninstalled, monkeypatch, tmp_path
):
    monkeypatch.setattr(doctor, "PROJECT", tmp_path / "pyproject.toml")
    problems: list[str] = []
    assert doctor._packages(problems, []) == {} and "gen is not installed" in problems[0]


@pytest.mark.parametrize(
    "state, resamples, said",
    [
        ("works", True, None),
        ("absent", False, "is refused: pip install"),
        ("absent", True, None),  # scipy resamples
        ("present but its extension cannot load (x)", True, "gen resamples with its Python part"),
        ("present but its extension cannot load (x)", False, "is refused"),
    ],
)
def test_doctor_says_what_torchaudio_can_do(monkeypatch, state, resamples, said):
    monkeypatch.setattr(doctor, "try_import", lambda name: state)
    monkeypatch.setattr(doctor, "_runs", lambda code: resamples)
    notes: list[str] = []
    assert doctor._torchaudio(notes) == state
    assert notes == [] if said is None else said in notes[0]
