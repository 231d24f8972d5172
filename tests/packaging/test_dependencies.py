"""Dependencies: what the product imports is declared, versions have no upper bound, and private
names of transformers stay in one module."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import lru_cache
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from gen.models.load.transformers_compat import TESTED

ROOT = Path(__file__).parents[2]
ROOMS = ("gen", "samplers", "tokenizers", "modalities", "recipes")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMPAT = ROOT / "gen" / "models" / "load" / "transformers_compat.py"
# private or undocumented names of transformers that the product uses
PRIVATE = re.compile(
    r"_eos_token_tensor|_pad_token_tensor|\._attn_implementation|\"_no_split_modules|"
    r"_is_user_defined|CacheLayerMixin$|MODEL_FOR_\w+_MAPPING|\.f_locals|transformers\.cache_utils"
    r" import .*Layer"
)
# distributions whose module has another name, also where they are not installed
NAMES = {"av": "av", "submitit": "submitit", "ray": "ray", "torchaudio": "torchaudio"}


def sources() -> list[Path]:
    return [
        path
        for room in ROOMS
        for path in sorted((ROOT / room).rglob("*.py"))
        if not (ROOT / "gen" / path.relative_to(ROOT).parts[1]).is_symlink()
    ]


def foreign_imports(text: str) -> Iterator[tuple[str, bool]]:
    """Top-level names of the third-party modules that a source imports, and whether every process
    that imports the file needs them."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
            "import_module",
            "require_package",
        ):
            names = [a.value for a in node.args[:1] if isinstance(a, ast.Constant)]
        for name in names:
            top = name.partition(".")[0]
            if top not in sys.stdlib_module_names and top != "gen":
                yield top, node in tree.body


installed = lru_cache(packages_distributions)  # reads the files of every distribution


def distribution(module: str) -> str:
    """The distribution of a module; its own name where it is not installed."""
    found = installed().get(module, [NAMES.get(module, module)])
    return canonicalize_name(found[0])


def declared(lines: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(line).name) for line in lines}


REQUIRED = declared(PROJECT["dependencies"])
OPTIONAL = set().union(*map(declared, PROJECT["optional-dependencies"].values()))


@pytest.fixture(scope="module")
def imported() -> dict[str, bool]:
    """Distributions that the product imports -> True where a file needs one at its top."""
    found: dict[str, bool] = {}
    for path in sources():
        for module, at_top in foreign_imports(path.read_text()):
            name = distribution(module)
            found[name] = found.get(name, False) or at_top
    assert len(found) > 15
    return found


def test_every_import_is_declared(imported):
    # a user who makes a Gradio app of a pipeline, or compares with llama.cpp, has the package
    brought = {"gradio", "xllamacpp"}
    assert set(imported) - REQUIRED - OPTIONAL == brought


def test_imports_at_the_top_of_a_file_need_no_extra(imported):
    engines = {"ray", "submitit"}  # their files are imported for their engines alone
    served = declared(PROJECT["optional-dependencies"]["serve"])  # those of gen serve, too
    assert {n for n, at_top in imported.items() if at_top} - REQUIRED - engines - served == set()


def test_every_requirement_is_imported(imported):
    # transformers loads weights over several devices with accelerate, and both are imported
    assert REQUIRED - set(imported) == set()


def test_an_undeclared_import_would_be_found():
    text = "import yaml\nfrom nltk.corpus import x\ndef f():\n    import lxml.etree\n"
    assert dict(foreign_imports(text)) == {"yaml": True, "nltk": True, "lxml": False}
    assert distribution("yaml") == "pyyaml" and distribution("PIL") == "pillow"
    assert "nltk" not in REQUIRED | OPTIONAL
    assert dict(foreign_imports('import_module("av")')) == {"av": False}


def test_versions_have_a_lower_bound_and_no_upper_one():
    assert PROJECT["requires-python"] == ">=3.11"
    for line in PROJECT["dependencies"]:
        assert [s.operator for s in Requirement(line).specifier] == [">="], line


def test_the_tested_transformers_are_allowed_and_installed():
    oldest, newest = map(Version, TESTED)
    (wanted,) = (Requirement(d) for d in PROJECT["dependencies"] if d.startswith("transformers"))
    assert oldest <= newest and oldest in wanted.specifier and newest in wanted.specifier
    assert wanted.specifier == Requirement(f"transformers>={TESTED[0]}").specifier


def test_constraints_are_exact_versions_of_what_is_installed():
    lines = [x for x in (ROOT / "constraints.txt").read_text().splitlines() if x[0] != "#"]
    for line in map(Requirement, lines):
        (exact,) = line.specifier
        assert exact.operator == "==" and exact.version == version(line.name), line.name
    assert f"transformers=={TESTED[1]}" in lines


def test_private_names_of_transformers_are_in_one_module():
    found = {
        str(path.relative_to(ROOT)): names
        for path in sources()
        if path != COMPAT and (names := PRIVATE.findall(path.read_text()))
    }
    assert found == {}


def test_a_private_name_would_be_found():
    assert len(set(PRIVATE.findall(COMPAT.read_text()))) >= 6
    assert PRIVATE.findall("pad = config._pad_token_tensor") == ["_pad_token_tensor"]
