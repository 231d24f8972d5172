"""gen, diffusers and transformers import with torchaudio absent, working, or unable to load its
extension."""

import ast
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("gen", "samplers", "tokenizers", "modalities", "recipes")
IMPORT = (ast.Import, ast.ImportFrom)
RESAMPLE = "(waveform, rate, target):\n    return waveform[:, :: rate // target]"
IMPORTS = """
finders = list(sys.meta_path)
import gen
assert sys.modules.get("torchaudio") is None, "import gen must not import torchaudio"
assert sys.meta_path == finders, "import gen must install no import hook"
from gen.models.load.libraries import diffusers
diffusers().VQModel
import transformers.audio_utils
assert not any("gen" in type(f).__module__ for f in sys.meta_path), "the hook stays"
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
@pytest.mark.slow
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


def test_every_package_that_imports_transformers_or_diffusers_looks_after_torchaudio_first():
    found = []
    for path in (p for room in ROOMS for p in sorted((ROOT / room).rglob("*.py"))):
        if path.is_symlink() or (ROOT / "gen" / path.relative_to(ROOT).parts[1]).is_symlink():
            continue
        imports = [n for n in ast.parse(path.read_text()).body if isinstance(n, IMPORT)]
        names = [n.module for n in imports if isinstance(n, ast.ImportFrom)]
        names += [a.name for n in imports if isinstance(n, ast.Import) for a in n.names]
        if any(str(n).partition(".")[0] in ("transformers", "diffusers") for n in names):
            found.append(path)
            inits = [p / "__init__.py" for p in path.parents if p.is_relative_to(ROOT)]
            said = [i.read_text() for i in inits if i.is_file()]
            assert any("torchaudio_compat.ensure()" in text for text in said), path

    assert len(found) > 20


@pytest.mark.slow
def test_a_sound_in_another_rate_is_resampled_or_refused(tmp_path):
    """With the package of the tests, which drops every other sample, and without any."""
    code = """
import numpy as np
from gen.media.audio import read_wav, write_wav
wave = np.linspace(-0.5, 0.5, 64)
write_wav("a.wav", wave, 16000)
assert np.allclose(read_wav("a.wav", 16000), wave, atol=1e-4)
try:
    slow = read_wav("a.wav", 8000)
    assert np.allclose(slow, wave[::2], atol=1e-4) and slow.dtype == np.float32
    print("resampled")
except Exception as error:
    print(error)
"""
    functional = FUNCTIONAL.replace("(waveform):\n    return waveform[::2]", RESAMPLE)
    assert functional != FUNCTIONAL
    folder = install(tmp_path, BROKEN)
    (folder / "torchaudio" / "functional.py").write_text(functional)
    done = python(f"import os; os.chdir({str(tmp_path)!r})\n{code}", folder)
    assert done.stdout.strip() == "resampled", done.stdout + done.stderr
    absent = "import os; sys.modules['torchaudio'] = sys.modules['scipy'] = None\n"
    done = python(f"{absent}os.chdir({str(tmp_path)!r})\n{code}")
    assert "has 16000 samples per second; expected 8000" in done.stdout
    assert 'pip install "gen-toolkit[audio]"' in done.stdout, done.stdout + done.stderr


def test_broken_without_gen(tmp_path):
    """The control: without gen the same package breaks the same import."""
    done = python("import transformers.audio_utils", install(tmp_path, BROKEN))
    assert done.returncode != 0
    assert "OSError: Could not load this library" in done.stderr
