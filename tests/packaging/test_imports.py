"""Imports: no circles between files, lazy ones included, and few imports inside functions, each
with its reason beside it.

The layers themselves are a contract of import-linter (``make check``)."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_LINES = 6000  # that one has to be ready to step into from a causal method
METHOD = re.compile(r'^@register\("(sampler|drafter)"', re.MULTILINE)  # what declares one
ROOMS = ("gen", "samplers", "tokenizers", "modalities", "recipes")
MOST = 26  # imports inside functions, in the whole product

# a file imports another one inside a function although that one imports it, each for a reason
DECLARED = {
    ("gen.pipeline.output", "gen.jobs.run"),  # an output is saved as the job that makes it
    ("gen.pipeline.output", "gen.store.stored_tokens"),  # and says where its tokens come from
    ("gen.pipeline.pipeline", "gen.interop.diffusers"),  # the same pipeline with another call
    ("gen.modalities.motion.modality", "gen.modalities.motion.sequence"),  # drives a pipeline
}


def sources() -> dict[str, Path]:
    """The product's files by module name."""
    found = {}
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if room != "gen" or not any((ROOT / "gen" / p).is_symlink() for p in parts[1:2]):
                name = ".".join(parts if room == "gen" else ("gen", *parts))
                found[name.removesuffix(".__init__")] = path
    return found


def imports(tree: ast.AST, known: Iterable[str]) -> Iterator[str]:
    """The modules of the product that a file imports, at its top, in functions and for types."""
    yield from imports_of(ast.walk(tree), known)


def imports_of(nodes: Iterable[ast.AST], known: Iterable[str]) -> Iterator[str]:
    """The modules of the product that some statements import."""
    for node in nodes:
        names = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{a.name}" for a in node.names]
        for name in names:
            while name not in known and "." in name:
                name = name.rpartition(".")[0]
            if name in known and name != "gen":
                yield name


def at_import(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run as a module is imported: those of functions and types do not."""
    for node in body:
        if isinstance(node, ast.If):
            for_types = "TYPE_CHECKING" in ast.unparse(node.test)
            yield from at_import(node.orelse if for_types else [*node.body, *node.orelse])
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
            yield from at_import(getattr(node, "body", []))


def closure(module: str, files: dict[str, Path]) -> dict[str, int]:
    """The modules that are imported with one, itself included, and the lines of each."""
    lines, todo = {}, [module]
    while todo:
        text = files[name := todo.pop()].read_text()
        lines[name] = text.count("\n")
        found = imports_of(at_import(ast.parse(text).body), files)
        todo += {*found} - {*lines, *todo}
    return lines


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that reach each other (Tarjan's strongly connected components)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        number[module] = low[module] = len(number)
        stack.append(module)
        for other in graph.get(module, ()):
            if other not in number:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], number[other])
        if low[module] == number[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1:
                found.append(sorted(group))

    for module in graph:
        if module not in number:
            visit(module)
    return found


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    files = sources()
    assert len(files) > 200
    return {
        module: set(imports(ast.parse(path.read_text()), files)) - {module}
        for module, path in files.items()
    }


def test_no_circles(graph):
    open_circles = {m: {o for o in graph[m] if (m, o) not in DECLARED} for m in graph}
    assert circles(open_circles) == []


def test_declared_arrows_exist(graph):
    assert {(m, o) for m, o in DECLARED if o not in graph.get(m, ())} == set()


def test_a_circle_would_be_found(graph):
    """The control: one more arrow, from the bottom to the top."""
    wrong = {**graph, "gen.core.errors": {"gen.jobs.run"}}
    assert any({"gen.core.errors", "gen.jobs.run"} <= set(c) for c in circles(wrong))
    lazy = ast.parse("def f():\n    from gen.jobs import run")
    assert list(imports(lazy, {"gen.jobs.run"})) == ["gen.jobs.run"]


def test_what_a_causal_method_imports_is_short():
    files = sources()
    rooms = ("gen.samplers.causal.", "gen.samplers.latent.")
    methods = [m for m in files if m.startswith(rooms) and METHOD.search(files[m].read_text())]
    lines = {method: sum(closure(method, files).values()) for method in methods}
    assert len(methods) > 20
    assert {method: n for method, n in lines.items() if n > MOST_LINES} == {}


def test_an_import_at_the_top_would_be_counted(tmp_path):
    """The control: types and functions are not counted, everything else is, at any distance."""
    files = {name: tmp_path / name for name in ("gen.a", "gen.b", "gen.c", "gen.d", "gen.e")}
    for path in files.values():
        path.write_text("x = 1\n")
    files["gen.a"].write_text(
        "if TYPE_CHECKING:\n    from gen.c import x\nelse:\n    from gen.b import x\n"
        "def f():\n    from gen.d import x\n"
    )
    files["gen.b"].write_text("try:\n    import gen.e\nexcept ImportError:\n    pass\n")
    assert closure("gen.a", files) == {"gen.a": 6, "gen.b": 4, "gen.e": 1}


def inside_functions(text: str) -> list[tuple[int, bool]]:
    """The lines of imports inside functions, and whether a comment gives the reason, on the line or
    on the one above."""
    if not re.search(r"(^[ \t]+|[:;][ \t]*)(import|from)\b", text, re.MULTILINE):
        return []  # most files; the walk is long
    lines, found = text.splitlines(), set()
    for function in ast.walk(ast.parse(text)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    around = lines[node.lineno - 1 : node.end_lineno]
                    above = lines[node.lineno - 2].strip()
                    said = any("  # " in x for x in around) or above.startswith("#")
                    found.add((node.lineno, said))
    return sorted(found)


def test_imports_inside_functions_are_few_and_have_reasons():
    found = {m: inside_functions(p.read_text()) for m, p in sources().items()}
    bare = {m: [n for n, said in lines if not said] for m, lines in found.items()}
    assert {m: lines for m, lines in bare.items() if lines} == {}
    assert sum(map(len, found.values())) <= MOST


def test_an_import_without_a_reason_would_be_found():
    text = "def f():\n    import a\n    import b  # heavy\n\n    # optional\n    import c\n"
    assert inside_functions(text) == [(2, False), (3, True), (6, True)]


@pytest.mark.parametrize("argv", [["--help"], ["ls", "--help"], ["ls", "configs"]])
def test_help_imports_nothing_heavy(argv):
    code = (
        "import sys; from gen.__main__ import main; main(sys.argv[1:]);"
        "print(*[m for m in ('torch', 'transformers', 'numpy', 'yaml') if m in sys.modules],"
        " file=sys.stderr)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *argv]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 0 and done.stderr.strip() == ""
