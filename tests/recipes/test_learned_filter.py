"""The recipe of filters for any modality: labels are what one position per forward pass ends with,
and the preset takes what it writes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gen.pipeline.pipeline import Pipeline
from gen.recipes.learned_filter import QUICK, decoded, decoders, made
from gen.recipes.text.filter import traces_of

POSITIONS = 27  # of a motion


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    return Pipeline("motion")


def test_every_masked_position_of_every_pass_is_labelled(pipe):
    """The last position is final when it alone is masked: T (T + 1) / 2 labels of an output."""
    prompts = pipe.modality.example_prompts(2, 5)
    found = traces_of(pipe, prompts, QUICK, 2, POSITIONS)
    assert len(found.x) == 2 * POSITIONS * (POSITIONS + 1) // 2
    sure = found.c > 1 - 1e-6
    assert found.final[sure].all() and not found.final.all()
    # half as many passes commit two at a time, and fewer positions are seen
    fewer = traces_of(pipe, prompts, QUICK, 2, POSITIONS // 2)
    assert len(fewer.x) < len(found.x)


@pytest.mark.slow
def test_the_preset_takes_the_filter(pipe, tmp_path):
    plan = replace(QUICK, tasks=4, steps=300)
    _, figures = made(pipe, plan, tmp_path)
    assert figures["nats"] < figures["nats_blind"]
    specs = decoders(tmp_path, POSITIONS, ends=False)
    prompts = pipe.modality.example_prompts(2, 0)
    rows = decoded(pipe, prompts, specs, 2)
    assert rows["llada, one position per pass"]["passes"] == POSITIONS
    assert rows["learn2pd, 0.5"]["passes"] < POSITIONS
    # the control: above 1 no proposal is final, so that each pass commits one position
    never = specs["learn2pd, 0.5"] | {"filter_threshold": 1.1}
    assert decoded(pipe, prompts, {"never": never}, 2)["never"]["passes"] == POSITIONS
