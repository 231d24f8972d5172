"""The way from a call to tokens, and on to a file, stays short enough to be read.

A stop is a function of the product that is on the call stack when a landmark is reached: something
that has to happen to make an image. Constructors, properties, nested functions, and private helpers
that stand in the file of their caller are read along with it and are no stops. Models are loaded
before, and modules imported.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import CodeType, FrameType

import pytest

import gen

ROOT = Path(gen.__file__).resolve().parents[1]
ROOMS = ("gen", "samplers", "tokenizers", "modalities")
PAGE = ROOT / "docs" / "architecture.md"
MOST_STOPS, MOST_FILES = 25, 16
TOKENS = {
    "ImageModality.condition": "the prompt is parsed",
    "resolve_sampler": "the sampler and its parameters are known",
    "PromptedModels.target": "model, condition and sampling parameters are put together",
    "LeanLlama.run": "the network runs",
    "SamplingParams.__call__": "logits become a distribution",
    "Gumbel.step": "drafts are judged",
    "CounterRNG.categorical": "a token is drawn",
}
FILE = {
    "VQ.decode": "tokens become pixels",
    "RGB.postprocess": "pixels become an image",
    "ImageModality.save": "the image becomes a file",
}
Stop = tuple[str, str]  # function, file


def file_of(code: CodeType) -> str | None:
    """Return the file of a function of the product, relative to the repository."""
    try:
        path = Path(code.co_filename).resolve().relative_to(ROOT)
    except ValueError:
        return None
    return str(path) if path.parts[0] in ROOMS and path.suffix else None


def stops_of(frame: FrameType) -> list[Stop]:
    """Return the stops on the call stack of a frame, outermost first."""
    found: list[Stop] = []
    caller = None
    stack = []
    while frame is not None:
        stack.append(frame)
        frame = frame.f_back
    for frame in reversed(stack):
        code, file = frame.f_code, file_of(frame.f_code)
        if file is None:
            continue
        helper = code.co_name.startswith("_") and code.co_name != "__call__" and file == caller
        caller = file
        if not helper and "<locals>" not in code.co_qualname and code.co_name != "__init__":
            found.append((code.co_qualname, file))
    return found


def walk(work, landmarks) -> tuple[list[Stop], set[str]]:
    """Run something; return its stops in the order of their first visit, and the landmarks seen."""
    stops: dict[Stop, None] = {}
    seen: set[str] = set()

    def look(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_qualname in landmarks and file_of(frame.f_code):
            seen.add(frame.f_code.co_qualname)
            stops.update(dict.fromkeys(stops_of(frame)))

    sys.setprofile(look)
    try:
        work()
    finally:
        sys.setprofile(None)
    return list(stops), seen


@pytest.fixture(scope="module")
def pipe():
    loaded = gen.load("image")
    loaded("a red circle")  # loads the model
    return loaded


@pytest.fixture(scope="module")
def way(pipe):
    """Stops and landmarks on the way to tokens."""
    return walk(lambda: pipe("a small blue ring"), TOKENS)


def test_the_way_to_tokens_is_short(way):
    stops, seen = way
    stops = [("load", "gen/pipeline/pipeline.py"), *stops]
    listing = "\n".join(f"{n:3} {name:40} {file}" for n, (name, file) in enumerate(stops, 1))
    print(listing)
    assert seen == set(TOKENS), f"landmarks that were not reached: {set(TOKENS) - seen}"
    assert len(stops) <= MOST_STOPS, f"{len(stops)} stops:\n{listing}"
    assert len({file for _, file in stops}) <= MOST_FILES, f"too many files:\n{listing}"


def listed() -> list[Stop]:
    """Return the stops that the page on the architecture lists."""
    rows = re.findall(r"^\| \d+ \| `([\w.]+)` \| `([\w/.]+)` \|", PAGE.read_text("utf-8"), re.M)
    return [(name, file) for name, file in rows]


def test_the_page_lists_the_stops_of_today(pipe, way, tmp_path):
    stops, _ = way
    out = pipe("a small blue ring")
    bound = pipe.bound(out.model)

    def to_file():
        media = pipe.decode(out.tokens[0], bound[1].space, bound[2])
        pipe.modality.save(media, tmp_path / "a.png", {})

    to_tokens = [("load", "gen/pipeline/pipeline.py"), *stops]
    of_today = [*to_tokens, *walk(to_file, FILE)[0]]
    assert listed() == of_today
    assert listed()[:-1] != of_today  # control: a row less is seen


def test_a_prompt_is_parsed_once(pipe):
    parsed = []
    original = pipe.modality.condition
    pipe.modality.condition = lambda prompt: parsed.append(prompt) or original(prompt)
    try:
        few = {"name": "maskgit", "steps": 2}
        pipe(["a red circle", "a small blue ring"], few, num_samples=2, batch_size=1)
        assert parsed == ["a red circle", "a small blue ring"]
        pipe.plan("a red circle")  # control: the count sees a further parse
        assert len(parsed) == 3
    finally:
        del pipe.modality.condition


def test_the_way_from_tokens_to_a_file_is_short(pipe, tmp_path):
    out = pipe("a small blue ring")
    bound = pipe.bound(out.model)

    def work():
        media = pipe.decode(out.tokens[0], bound[1].space, bound[2])
        pipe.modality.save(media, tmp_path / "a.png", {})

    stops, seen = walk(work, FILE)
    print(*stops, sep="\n")
    assert seen == set(FILE) and len(stops) <= 6


def test_control_a_longer_way_is_seen(pipe, way):
    short, _ = way
    planned, _ = walk(lambda: list(pipe.plan("a red circle")), TOKENS)
    assert ("PreparedModels.run", "gen/pipeline/prompted.py") in short
    assert ("PreparedModels.run", "gen/pipeline/prompted.py") not in planned and planned
