"""Pipeline called as in diffusers: guidance of 1 and less is none, and scripts find their names."""

from __future__ import annotations

import pytest
import torch

import gen
from gen.core.errors import GenError


def test_the_first_lines_of_a_script_for_diffusers_run(capsys):
    call = gen.load("text", device="cpu").as_diffusers()
    assert call.to("cpu", torch.float32) is call
    call.set_progress_bar_config(disable=True)
    call("sort 3 1 2 =")
    assert not capsys.readouterr().err
    call.set_progress_bar_config()
    call("sort 3 1 2 =")
    assert "passes" in capsys.readouterr().err  # control
    assert call.components["model"] is call.pipe.components["model"]
    assert call.config["model"] == "text-causal"


def test_a_guidance_scale_of_0_is_no_guidance_as_in_diffusers():
    pipe = gen.load("text", device="cpu")
    call = pipe.as_diffusers()

    def made(**sampling):
        call("sort 3 1 2 =", generator=torch.Generator().manual_seed(0), **sampling)
        return call.output

    for scale in (0, 0.5, 1):
        assert made(guidance_scale=scale).sampling.guidance_scale == 1
    assert made(guidance_scale=0).texts == made().texts == ["1 2 3"]
    assert made(guidance_scale=1.5).sampling.guidance_scale == 1.5  # control
    with pytest.raises(GenError, match="guidance_scale is -1"):
        made(guidance_scale=-1)
