"""SPEED-Bench's protocol: figures by category, entropy and concurrency."""

from __future__ import annotations

import json

import pytest

from gen.__main__ import main
from gen.bench.speed import ENTROPIES, Cost, footing, lengths, speculative_names, throughput
from gen.core.registry import registry


def cost(sampler="speculative", size=1, category="math", repeat=0, **more) -> Cost:
    usual = {"entropy": "low", "nfe": 2, "draft_nfe": 6, "tokens": 6, "seconds": 0.5}
    return Cost(sampler, size, category, repeat=repeat, **{**usual, **more})


def test_lengths_are_tokens_per_pass_and_speeds_medians_of_repeats():
    costs = [cost("autoregressive", nfe=6, draft_nfe=0, seconds=1.0)]
    costs += [cost(repeat=n, seconds=s) for n, s in enumerate((0.5, 0.25, 3.0))]
    costs += [cost(category="coding", entropy="high", nfe=6, repeat=n) for n in range(3)]
    rows = {r["sampler"]: r for r in footing(costs)}
    assert rows["autoregressive"]["acceptance_length"] == 1
    assert rows["speculative"]["acceptance_length"] == 36 / 24
    assert rows["speculative"]["draft_passes"] == 36 / 24
    # 12 tokens in 1.0, 0.75 and 3.5 seconds
    assert rows["speculative"]["tokens_per_second"] == 12
    assert rows["speculative"]["faster"] == 2
    found = lengths(costs)["speculative"]
    assert found == {"math": 3, "coding": 1, "low": 3, "high": 1}
    assert throughput(costs)["speculative"]["math"] == {1: 12}


def test_the_protocol_compares_what_drafts():
    presets = registry.table("preset")
    names = speculative_names()
    assert {"speculative", "spectr", "traversal"} <= set(names)
    assert not any(presets[n].sampler == "masked_iterative" for n in names if n in presets)


def test_the_text_modality_has_categories(capsys):
    line = ["bench", "text", "--protocol", "speed", "--prompts", "1", "--repeats", "1"]
    assert main([*line, "--batch-sizes", "2", "--samplers", "rsd_c", "--json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert list(report["prompts"]) == ["coding", "math", "rag", "reasoning", "writing"]
    modality = registry.get("modality", "text")()
    for category, (prompt,) in report["prompts"].items():
        assert modality.category(prompt) == category
    assert set(report["acceptance"]["rsd_c"]) == {*report["prompts"], *ENTROPIES}
    assert set(report["acceptance"]["autoregressive"].values()) == {1.0}
    rows = {(r["concurrency"], r["sampler"]) for r in report["table"]}
    assert rows == {(2, "autoregressive"), (2, "rsd_c")} and len(report["table"]) == 2
    assert all(r["draft_passes"] > 0 for r in report["table"] if r["sampler"] == "rsd_c")
    assert "tokens per pass" in err and "high entropy" in err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["all"], "gen bench all is given with --protocol speed"),
        (["text", "--oracle"], "--oracle is given with --protocol speed"),
        (["text", "--peers", "all"], "--peers is given with --protocol speed"),
    ],
)
def test_flags_of_the_usual_protocol_are_refused(argv, says, capsys):
    assert main(["bench", *argv, "--protocol", "speed"]) != 0
    assert says in capsys.readouterr().err
