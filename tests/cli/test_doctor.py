"""``gen doctor``: a machine that can run gen is told from one that cannot."""

from __future__ import annotations

import json

import pytest
import torch

from gen.__main__ import main
from gen.cli import doctor


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
        ("2.13.0+cpu", ">=2.11,<2.14", True),
        ("2.14.0", ">=2.11,<2.14", False),
        ("2.9", ">=2.11", False),
        ("5.0", "", True),
        ("10.0", ">=9", True),
    ],
)
def test_versions_are_compared_as_numbers(found, wanted, fit):
    assert doctor.fits(found, wanted) is fit
