"""JSON schemas on folders of language models, causal and masked: every output validates."""

from __future__ import annotations

import json
from pathlib import Path

import byte_folders
import jsonschema
import pytest

import gen
from gen.core.errors import GenError

SCHEMAS = {
    path.stem: json.loads(path.read_text())
    for path in sorted((Path(__file__).parents[1] / "constraints" / "schemas").glob("*.json"))
}
FAST = ["chess_move", "drink", "feature_flag"]
UNSUPPORTED = [name for name in SCHEMAS if name.startswith("unsupported")]
OTHERS = [name for name in SCHEMAS if name not in (*FAST, *UNSUPPORTED)]
SAMPLERS = {
    "causal": {"name": "speculative_jacobi", "window": 8},
    "masked": {"name": "maskgit", "steps": 6},
}
POSITIONS = 256


@pytest.fixture(scope="module")
def pipes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    made = {
        "causal": byte_folders.causal(folder / "causal"),
        "masked": byte_folders.masked(folder / "masked"),
    }
    return {kind: gen.load("text", model=path) for kind, path in made.items()}


def outputs(pipe, kind: str, schema, **more) -> list[str]:
    options = {"max_new_tokens": POSITIONS, "sampler": SAMPLERS[kind], **more}
    return pipe("hello", structured={"json_schema": schema}, num_samples=2, seed=0, **options).media


def require_valid(pipe, kind: str, name: str) -> None:
    for text in outputs(pipe, kind, SCHEMAS[name]):
        jsonschema.Draft202012Validator(SCHEMAS[name]).validate(json.loads(text))


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("name", FAST)
def test_every_output_validates(pipes, kind, name):
    require_valid(pipes[kind], kind, name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("name", OTHERS)
def test_every_output_of_all_schemas_validates(pipes, kind, name):
    require_valid(pipes[kind], kind, name)


@pytest.mark.parametrize("kind", SAMPLERS)
def test_control_a_random_model_alone_does_not_validate(pipes, kind):
    texts = pipes[kind]("hello", max_new_tokens=POSITIONS, sampler=SAMPLERS[kind], seed=0).media
    with pytest.raises((ValueError, jsonschema.ValidationError)):
        jsonschema.validate(json.loads(texts[0]), SCHEMAS["drink"])


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_keywords_are_refused_before_any_forward_pass(pipes, kind, name, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a forward pass ran")

    for pipe in pipes.values():
        monkeypatch.setattr(type(pipe.bound(pipe.model)[0]), "forward", refuse, raising=False)
    with pytest.raises(GenError, match="supported|expected"):
        outputs(pipes[kind], kind, SCHEMAS[name])


@pytest.mark.parametrize("kind", SAMPLERS)
def test_positions_that_no_text_fits_are_refused(pipes, kind):
    with pytest.raises(GenError, match="shortest text"):
        outputs(pipes[kind], kind, SCHEMAS["drink"], max_new_tokens=4)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["autoregressive", "fast_dllm"])
def test_models_of_the_zoo_say_what_their_words_can_spell(sampler):
    """Their words are digits, brackets and names of tasks: no quotes, no braces."""
    pipe, spoken = gen.load("text"), []
    for name in (n for n in SCHEMAS if n not in UNSUPPORTED):
        try:
            out = pipe("sort 3 1 2 =", sampler, structured={"json_schema": SCHEMAS[name]}, seed=0)
        except GenError as error:
            assert "this vocabulary can spell" in str(error), (name, error)
            continue
        spoken.append(name)
        jsonschema.Draft202012Validator(SCHEMAS[name]).validate(json.loads(out.texts[0]))
    assert spoken, "no schema of the set can be spelt"
