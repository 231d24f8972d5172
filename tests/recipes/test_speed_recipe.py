"""The recipe that measures speed on models of random weights says what it saw, and only that."""

from __future__ import annotations

import json
import xml.etree.ElementTree as xml

import pytest
import torch

from gen.core.errors import GenError
from gen.recipes import speed


@pytest.mark.slow
def test_every_model_batch_and_sampler_is_a_row_and_an_image(tmp_path, capsys):
    assert speed.main(["--quick", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "speed.json").read_text())["found"]
    assert [(r["rows"], r["sampler"]) for r in found] == [
        (n, s) for n in (1, 2) for s in speed.samplers(speed.WINDOWS)
    ]
    for row in found:
        base = next(
            r for r in found if r["rows"] == row["rows"] and r["sampler"] == "autoregressive"
        )
        assert (
            base["nfe"] == 16
            and row["fewer_calls"] == base["nfe"] / row["nfe"]
            and row["faster"] == base["seconds"] / row["seconds"]
        )
        assert (
            abs(row["tokens_per_second"] * row["seconds"] - 16 * row["rows"]) < 1e-6
            and 0 <= row["outside_forward"] < 1
        )
    assert (tmp_path / "speed.md").read_text().strip() in capsys.readouterr().out
    images = sorted(tmp_path.glob("profile-*.svg"))
    assert len(images) == len(found) and all(len(xml.parse(p).getroot()) > 10 for p in images)


def test_the_calls_made_again_without_the_loop_are_those_of_the_loop():
    size = speed.TINY["tiny"]
    arm = speed.Arm(
        speed.make(size, torch.device("cpu"), torch.float64),
        size,
        3,
        {"name": "speculative_jacobi", "window": 16},
        {"temperature": 0.05},
        False,
    )
    arm.run(0, note=True)
    calls = len(arm.calls)
    made = []
    forward = speed.CausalLM.forward
    try:
        speed.CausalLM.forward = lambda self, *a, **k: (
            made.append(len(a[0])),
            forward(self, *a, **k),
        )[1]
        arm.bare()
    finally:
        speed.CausalLM.forward = forward
    assert made == [len(tokens) for tokens, _ in arm.calls] and calls >= arm.nfe > 1


def test_a_model_of_another_name_is_refused(tmp_path):
    with pytest.raises(GenError, match="--models names 9B; expected some of 300M, 1B, 7B"):
        speed.main(["--models", "300M,9B", "--out", str(tmp_path)])
