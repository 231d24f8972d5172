"""The recipe of filters for any modality: labels are what one position per forward pass ends with,
and the preset takes what it writes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gen.pipeline.pipeline import Pipeline
from gen.recipes.learned_filter import QUICK, decoded, decoders, made, main
from gen.recipes.text.filter import ONE_AT_A_TIME, traces_of

POSITIONS = 16  # of a text


def test_every_masked_position_of_every_pass_is_labelled():
    """The first of T passes sees T positions and the last one: T (T + 1) / 2 labels."""
    pipe = Pipeline("text")
    prompts = pipe.modality.example_prompts(2, 5)
    found = traces_of(pipe, prompts, QUICK, 2, POSITIONS)
    assert len(found.x) == len(found.final) == 2 * POSITIONS * (POSITIONS + 1) // 2
    assert found.final[found.c > 1 - 1e-6].all()
    # the control: with half as many passes two are committed at a time, and fewer are seen
    fewer = traces_of(pipe, prompts, QUICK, 2, POSITIONS // 2)
    assert len(fewer.x) < len(found.x)


@pytest.mark.slow
def test_the_preset_takes_the_filter_of_a_modality(tmp_path):
    pipe = Pipeline("motion")
    space = pipe.bound(pipe.model_name(ONE_AT_A_TIME))[1].space
    _, figures = made(pipe, replace(QUICK, tasks=4, steps=300), tmp_path)
    assert figures["nats"] < figures["nats_blind"]
    specs = decoders(tmp_path, space.length, space.eos_token_id is not None)
    # the control: above 1 no proposal counts as final, so that each pass commits one position
    specs["never"] = specs["learn2pd, 0.5"] | {"filter_threshold": 1.1}
    rows = dict(decoded(pipe, pipe.modality.example_prompts(2, 0), specs, 2))
    one = rows[f"llada, {space.length} passes"]
    assert one["same"] == 1 and rows["learn2pd, 0.5"]["passes"] < one["passes"]
    assert rows["learn2pd, 0.5"]["passes"] < rows["never"]["passes"]


@pytest.mark.slow
def test_the_command_writes_a_filter_with_a_card(tmp_path, capsys):
    main(["action", "--out", str(tmp_path / "f"), "--quick", "--passes", "8", "--prompts", "2"])
    card, shown = (tmp_path / "f" / "README.md").read_text(), capsys.readouterr().out
    assert "| llada, 8 passes | " in card and "| learn2pd, 0.9 | " in card
    assert "| llada, 32 passes" not in card, "no decoder takes more passes than the traced one"
    assert card.endswith(shown.split("\n", 1)[1][-200:]) and "--passes 8 --tasks 2" in card
