"""Every command and every Python block of the README and the pages in docs/ runs, in one folder per
page.

What takes long runs here with less of everything, one sample of a prompt and of a modality, and in
a longer form under ``-m slow``, where the pages of ``SLOW_PAGES``, commands that start processes
and most configs run at all. Measurements in full are under ``-m long``.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from gen.__main__ import main as gen_main
from gen.config.job import load_config
from gen.config.packaged import find_config
from gen.config.yaml_text import dump_yaml, load_yaml
from gen.core.registry import registry
from gen.core.sampler import _composed
from gen.recipes.acceptance_head import main as acceptance_head_recipe
from gen.recipes.action.camera import main as camera_recipe
from gen.recipes.action.recipe import main as action_recipe
from gen.recipes.audio.recipe import main as audio_recipe
from gen.recipes.common.draft_table import main as draft_table_recipe
from gen.recipes.drafters.recipe import main as drafters_recipe
from gen.recipes.image.captioner import main as image_captioner_recipe
from gen.recipes.image.latents import main as image_latents_recipe
from gen.recipes.image.recipe import main as image_recipe
from gen.recipes.image.scales import main as image_scales_recipe
from gen.recipes.image.scenes import main as image_scenes_recipe
from gen.recipes.motion.recipe import main as motion_recipe
from gen.recipes.speech.recipe import main as speech_recipe
from gen.recipes.speech.translation import main as speech_translation_recipe
from gen.recipes.speed import main as speed_recipe
from gen.recipes.text.adjust import main as adjust_recipe
from gen.recipes.text.certainty import main as certainty_recipe
from gen.recipes.text.dual import main as dual_recipe
from gen.recipes.text.filter import main as text_filter_recipe
from gen.recipes.text.hyperfit import main as hyperfit_recipe
from gen.recipes.text.judge_decoding import main as judge_recipe
from gen.recipes.text.long_answers import main as long_answers_recipe
from gen.recipes.text.recipe import main as text_recipe
from gen.recipes.tree_selector import main as tree_selector_recipe
from gen.recipes.video.recipe import main as video_recipe
from gen.recipes.world.recipe import main as world_recipe

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SLOW_PAGES = (
    "bench",
    "benchmarks-gpu",
    "checkpoints",
    "drafts",
    "editing",
    "image",
    "interop",
    "latents",
    "lattice",
    "masked",
    "motion",
    "own-media",
    "results",
    "sampling",
    "scales",
    "scorers",
    "search",
    "speech",
    "streaming",
    "training",
    "video",
)
ON_PAGES = [
    pytest.param(
        p,
        quick,
        id=f"{p.stem}-{'quick' if quick else 'longer'}",
        marks=[] if quick else [pytest.mark.slow],
    )
    for p in PAGES
    for quick in (True, False)
    if not quick or p.stem not in SLOW_PAGES
]
RECIPES = {
    "gen.recipes.common.draft_table": draft_table_recipe,
    "gen.recipes.image": image_recipe,
    "gen.recipes.image.latents": image_latents_recipe,
    "gen.recipes.image.scales": image_scales_recipe,
    "gen.recipes.image.scenes": image_scenes_recipe,
    "gen.recipes.image.captioner": image_captioner_recipe,
    "gen.recipes.speech": speech_recipe,
    "gen.recipes.video": video_recipe,
    "gen.recipes.motion": motion_recipe,
    "gen.recipes.action": action_recipe,
    "gen.recipes.action.camera": camera_recipe,
    "gen.recipes.text": text_recipe,
    "gen.recipes.text.filter": text_filter_recipe,
    "gen.recipes.text.hyperfit": hyperfit_recipe,
    "gen.recipes.text.adjust": adjust_recipe,
    "gen.recipes.text.certainty": certainty_recipe,
    "gen.recipes.text.dual": dual_recipe,
    "gen.recipes.text.judge_decoding": judge_recipe,
    "gen.recipes.text.long_answers": long_answers_recipe,
    "gen.recipes.acceptance_head": acceptance_head_recipe,
    "gen.recipes.tree_selector": tree_selector_recipe,
    "gen.recipes.drafters": drafters_recipe,
    "gen.recipes.speed": speed_recipe,
    "gen.recipes.world": world_recipe,
    "gen.recipes.audio": audio_recipe,
    "gen.recipes.speech.translation": speech_translation_recipe,
}


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and text of what can be run, in the order of the page."""
    return re.findall(r"^```(bash|python)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def lines_of(block: str) -> list[str]:
    return [
        line.split("  #")[0].strip()
        for line in block.replace("\\\n", " ").splitlines()
        if line.strip() and not line.startswith("#")
    ]


def commands(page: Path) -> list[str]:
    return [
        line for language, block in blocks(page) if language == "bash" for line in lines_of(block)
    ]


def shortened(command: str, quick: bool = True) -> str:
    """The same with one prompt, sample, repeat and value of a sweep. ``quick``: also of several
    samplers the first and the last alone, action chunks in place of images to measure, and no
    further processes: `test_engines_real.py` has two workers, `test_bench_jobs.py` the layouts.
    Training takes four steps: `test_site.py` has the one on own media in full.
    """
    if command.startswith("gen bench jobs"):
        command = (
            f"gen bench jobs --items {0 if quick else 24} --modalities text --prompts 1 --repeats 1"
        )
    elif command.startswith("gen bench") and "--oracle" not in command:
        command = re.sub(
            r"(--sweep \w+=[^ ,]+)[^ ]*",
            r"\1",
            re.sub(r" --(prompts|batch-sizes|repeats) \S+", "", command),
        )
        command = (
            re.sub(
                r"(--samplers \w+),(?:\w+,)*",
                r"\1,",
                command.replace("bench image", "bench action"),
            )
            if quick
            else command
        )
        command = re.sub(r"--inflate \S+", "--inflate 3M", command)
        command += " --prompts 1 --batch-sizes 1 --repeats 1"
    elif command.startswith("gen train"):
        command = re.sub(r" steps=\d+", " steps=4", command)
        command = re.sub(r"drafter.minutes=\S+", "drafter.quick=true", command)
    elif "image.scenes draw " in command:
        command += " --count 40"
    elif command.startswith("gen inflate"):
        command = re.sub(r"--params \S+", "--params 3M", command)
    elif command.startswith("gen run ") and "--dry-run" not in command and "prompts" not in command:
        command += " " + shlex.join(one_of_each(find_config(shlex.split(command)[2])))
        command = re.sub(r" workers=\d+", "", command) if quick else command
    return re.sub(r"(--num-samples|-n) \d+", r"\1 1", command)


def one_job_per_modality(demo: Path) -> None:
    """Leaves the first job of every modality in the copy of the demonstration that a page runs;
    ``-m slow`` runs all."""
    tree, seen = load_yaml(demo.read_text()), set()
    tree["jobs"] = [
        j
        for j in tree["jobs"]
        if not (
            j.get("modality", tree.get("modality")) in seen
            or seen.add(j.get("modality", tree.get("modality")))
        )
    ]
    demo.write_text(dump_yaml(tree))


def one_of_each(config: Path) -> list[str]:
    """Overrides that leave one sample of the first prompt of each job, in two steps where it says
    how many."""
    raw, found = load_yaml(config.read_text()), ["num_samples=1"]
    for i, entry in enumerate(load_config(config).entries if "sweep" not in raw else ()):
        key, said = (f"jobs.{i}.", raw["jobs"][i]) if "jobs" in raw else ("", raw)
        if entry.prompts:
            found.append(f"{key}prompts={json.dumps(entry.prompts[:1])}")
        if "steps" in (said.get("sampler") or ""):
            found.append(f"{key}sampler.steps=2")
    return found


def run(command: str) -> int:
    words = shlex.split(command)
    if words[0] == "gen":
        return gen_main(words[1:])
    if words[:2] == ["python", "-m"] and words[2] in RECIPES:
        RECIPES[words[2]](words[3:])
        return 0
    if (
        words[0] == "make"
    ):  # make test runs this test; that the target exists is what can be asked here
        return (
            0 if re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE) else 1
        )
    if words[0] in ("git", "cd", "source", "."):
        return 0
    raise AssertionError(f"the pages hold a command no test runs: {command}")


def module_of(block: str) -> str:
    """Name of the module that a block is, if its first line names a file."""
    file = re.match(r"# ((?:samplers|tokenizers|modalities)/\S+)\.py\n", block)
    return f"gen.{file[1].replace('/', '.')}" if file else "gen_docs"


def execute(block: str, page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a block as a module that later blocks of the page can import."""
    module = ModuleType(module_of(block))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    parent, _, name = module.__name__.rpartition(".")
    if parent:
        package = sys.modules.get(parent) or ModuleType(parent)
        monkeypatch.setitem(sys.modules, parent, package)
        monkeypatch.setattr(package, name, module, raising=False)
    exec(compile(block, str(page), "exec", dont_inherit=True), vars(module))


@contextmanager
def separate_registry() -> Iterator[None]:
    """Let a page register what it likes; other tests do not see it."""
    registry.discover()
    before = registry._kinds, registry._params
    registry._kinds = {kind: dict(table) for kind, table in registry._kinds.items()}
    registry._params = dict(registry._params)
    _composed.cache_clear()
    try:
        yield
    finally:
        registry._kinds, registry._params = before
        _composed.cache_clear()


@pytest.mark.parametrize(("page", "quick"), ON_PAGES)
def test_every_command_and_python_block_of_a_page_runs_in_its_order(
    page, quick, tmp_path, monkeypatch
):
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    one_job_per_modality(tmp_path / "configs" / "demo.yaml")
    monkeypatch.chdir(tmp_path)
    with separate_registry():
        run_blocks(page, quick, monkeypatch)


def run_blocks(page: Path, quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the blocks of a page in their order, every command once."""
    done = set()
    for language, block in blocks(page):
        if language == "python":
            source = re.sub(r"num_samples=\d+", "num_samples=2", block) if quick else block
            execute(source, page, monkeypatch)
            continue
        for command in (shortened(line, quick) for line in lines_of(block)):
            if command not in done:
                assert run(command) == 0, command
            done.add(command)


@pytest.mark.long
def test_the_measuring_commands_run_in_full(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = [c for page in PAGES for c in commands(page) if c.startswith("gen bench")]
    assert found
    for command in found:
        assert run(command) == 0, command


def test_the_pages_hold_commands_at_all():
    """Negative control: were the blocks not found, the tests above would pass without running
    anything."""
    assert sum(len(commands(p)) for p in PAGES) > 15
    with pytest.raises(AssertionError, match="no test runs"):
        run("rm -rf x")


def test_a_block_that_names_a_file_is_its_module():
    assert module_of("# samplers/causal/x.py\nimport gen\n") == "gen.samplers.causal.x"
    assert module_of("import gen  # samplers/causal/x.py\n") == "gen_docs"  # control
    names = [module_of(b) for p in PAGES for kind, b in blocks(p) if kind == "python"]
    assert len({n for n in names if n != "gen_docs"}) >= 8


def test_what_a_page_registers_is_taken_back(monkeypatch):
    block = (
        "from gen.core.registry import register\n@register('order', 'of_a_page')\ndef f(step): ..."
    )
    with separate_registry():
        execute(block, ROOT / "README.md", monkeypatch)
        assert "of_a_page" in registry.table("order")  # control
    assert "of_a_page" not in registry.table("order")


@pytest.mark.slow
def test_the_demonstration_runs_with_one_sample_of_each_job(tmp_path):
    demo = ROOT / "configs" / "demo.yaml"
    assert gen_main(["run", str(demo), *one_of_each(demo), f"out={tmp_path / 'out'}"]) == 0


# those of gen train run in tests/training
CONFIGS = sorted(p for p in (ROOT / "configs").glob("*/*.yaml") if p.parent.name != "train")


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(
            p, id=str(p.relative_to(ROOT)), marks=[pytest.mark.slow] if (i + 2) % 48 else []
        )
        for i, p in enumerate(CONFIGS)
    ],
)
def test_every_config_runs_in_its_quick_form(config, tmp_path):
    assert gen_main(["run", str(config), *one_of_each(config), f"out={tmp_path / 'out'}"]) == 0
    assert (tmp_path / "out" / "index.html").is_file()
    assert gen_main(["status", str(tmp_path / "out")]) == 0


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
