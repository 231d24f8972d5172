"""``gen bench --inflate`` measures larger models with the forward passes of the small ones."""

from __future__ import annotations

import json
import tempfile

import pytest

from gen.__main__ import main

QUICK = ["--prompts", "1", "--repeats", "1", "--batch-sizes", "1", "--json"]
SAMPLERS = ["--samplers", "speculative_jacobi,maskgit"]


def rows(capsys, *args: str) -> dict:
    assert main(["bench", *args, *QUICK]) == 0
    return json.loads(capsys.readouterr().out)


def test_forward_passes_are_those_of_the_small_model(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    small = rows(capsys, "action", *SAMPLERS)
    both = rows(capsys, "action", *SAMPLERS, "--inflate", "500K,1M")["modalities"]
    assert list(both) == ["action 500K", "action 1M"]
    for name, size in (("action 500K", 500_000), ("action 1M", 1_000_000)):
        counts = both[name]["inflated"]
        assert set(counts) == {"action-causal", "action-masked"}
        assert all(abs(n / size - 1) < 0.02 for n in counts.values())
        for a, b in zip(small["table"], both[name]["table"], strict=True):
            keys = ("sampler", "nfe", "tokens_computed", "acceptance_histogram", "passed")
            assert [a[k] for k in keys] == [b[k] for k in keys]
            assert b["cpu_seconds"] > 0 and b["cpu_speed_up"] > 0
    assert not list(tmp_path.iterdir())  # the models are removed


@pytest.mark.parametrize(
    "args, said",
    [
        (["all", "--inflate", "1M"], "expected one modality"),
        (["action", "--inflate", "much"], "such as 85M"),
        (["action", "--inflate", ","], "separated by commas"),
        (["action", "--inflate", "1K"], "expected at least"),
        (["image", "--inflate", "9M", "--samplers", "next_scale"], "gen_grid_scales"),
    ],
)
def test_bad_input_is_one_clear_error(capsys, args, said):
    assert main(["bench", *args]) != 0
    text = capsys.readouterr().err.strip().splitlines()
    assert len(text) == 1 and said in text[0]
