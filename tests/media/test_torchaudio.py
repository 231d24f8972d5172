"""gen, diffusers and transformers import with torchaudio absent, working, or unable to load its
extension."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMPORTS = """
import gen
assert sys.modules.get("torchaudio") is None, "import gen must not import torchaudio"
from diffusers import VQModel
import transformers.audio_utils
"""
PACKAGE = """
from . import _extension
from . import functional
__version__ = "2.11.0"
"""
FUNCTIONAL = """
from torchaudio._extension import _IS_TORCHAUDIO_EXT_AVAILABLE, fail_if_no_align

def resample(waveform):
    return waveform[::2]

@fail_if_no_align
def forced_align():
    return "aligned"
"""
WORKING = """
_IS_TORCHAUDIO_EXT_AVAILABLE = True
fail_if_no_align = lambda function: function
"""
BROKEN = """
raise OSError("Could not load this library: _torchaudio.abi3.so")
"""


def install(folder: Path, extension: str) -> Path:
    """A package that transformers takes for an installed torchaudio, with the real one's order of
    imports."""
    for name, text in {
        "torchaudio/__init__.py": PACKAGE,
        "torchaudio/functional.py": FUNCTIONAL,
        "torchaudio/_extension/__init__.py": extension,
        "torchaudio-2.11.0.dist-info/METADATA": (
            "Metadata-Version: 2.1\nName: torchaudio\nVersion: 2.11.0\n"
        ),
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def python(code: str, *path: Path) -> subprocess.CompletedProcess:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join(str(p) for p in (*path, ROOT))
    return subprocess.run(
        [sys.executable, "-c", "import sys\n" + code],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )


# where it is not installed, every other test imports all three without it
@pytest.mark.parametrize(
    "name",
    [pytest.param("torchaudio", marks=[] if find_spec("torchaudio") else [pytest.mark.slow])],
)
def test_absent(name):
    done = python(f"sys.modules['{name}'] = None" + IMPORTS)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "extension",
    [
        pytest.param(WORKING, id="working", marks=pytest.mark.slow),
        pytest.param(BROKEN, id="broken"),
    ],
)
def test_present(extension, tmp_path):
    done = python(
        IMPORTS
        + """
import torchaudio
available = transformers.audio_utils.is_torchaudio_available()
print(available, torchaudio._extension._IS_TORCHAUDIO_EXT_AVAILABLE)
print(torchaudio.functional.resample([1, 2, 3, 4]))
try:
    print(torchaudio.functional.forced_align())
except RuntimeError as error:
    print(error)
""",
        install(tmp_path, extension),
    )
    assert done.returncode == 0, done.stderr
    available, resampled, aligned = done.stdout.splitlines()
    assert available == f"True {extension is WORKING}"
    assert resampled == "[1, 3]"  # the Python part works either way
    if extension is WORKING:
        assert aligned == "aligned"
    else:  # and what needs the extension says so
        assert (
            aligned.startswith("forced_align needs torchaudio's extension")
            and "_torchaudio.abi3.so" in aligned
        )


def test_broken_without_gen(tmp_path):
    """The control: without gen the same package breaks the same import."""
    done = python("import transformers.audio_utils", install(tmp_path, BROKEN))
    assert done.returncode != 0
    assert "OSError: Could not load this library" in done.stderr
