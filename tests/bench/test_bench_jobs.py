"""The benchmark of the job layer: both arms make the same, its clocks are off again afterwards, and
its memory meter sees a leak."""

from __future__ import annotations

import argparse
import json
from importlib import import_module

import pytest

from gen.bench.jobs.clock import PARTS, Clock, Marks, resident
from gen.bench.jobs.cost import (
    beside,
    beside_table,
    by_job,
    by_loop,
    layer,
    layer_table,
    ready,
    run_once,
)
from gen.bench.run import bench
from gen.core.errors import GenError
from gen.pipeline.pipeline import load

LEAK = 1 << 20  # bytes per item


def arguments(**keys) -> argparse.Namespace:
    usual = dict.fromkeys(
        "samplers sweep oracle gallery items prompts repeats modalities out".split()
    )
    return argparse.Namespace(
        **{**usual, "modality": "jobs", "seed": 0, "quick": True, "markdown": False, **keys}
    )


@pytest.mark.parametrize("layout", ["files", "shards"])
def test_every_part_is_measured_and_every_item_made_once(layout):
    found = layer(layout, 40)
    whole, half, rest = found["whole"], found["stopped"], found["resumed"]
    assert (
        whole["made"] == whole["there"] == 40
        and found["again"]["made"] == 0
        and found["again"]["there"] == 40
    )
    assert half["made"] >= 20 and half["made"] + rest["made"] == 40 and rest["there"] == 40
    parts = whole["parts"]
    assert (
        parts["encode"]["calls"] == 40
        and parts["commit"]["calls"] == parts["journal"]["calls"] == 5
    )
    assert ("tar" in parts, "preview" in parts) == (layout == "shards",) * 2
    assert {"plan", "publish", "gallery", "fsync"} <= set(parts) and "encode" not in found["again"][
        "parts"
    ]
    assert (
        0 < parts["encode"]["seconds"] <= parts["commit"]["seconds"]
        and parts["plan"]["seconds"] < whole["seconds"]
    )
    assert [made for made, _ in whole["marks"]] == [8, 16, 24, 32, 40]
    table = layer_table(layout, found)
    assert "40 items" in table and "encode" in table and "resumed with" in table


def test_clocks_are_off_again_also_after_an_error():
    pipe, clock = ready(), Clock()
    named = [
        (import_module(m), path)
        for positions in PARTS.values()
        for m, _, path in (p.partition(":") for p in positions)
    ]

    def find():
        return [
            getattr(getattr(o, p.partition(".")[0]), p.partition(".")[2])
            if "." in p
            else getattr(o, p)
            for o, p in named
        ]

    before = find()
    with pytest.raises(ZeroDivisionError), clock.running(pipe.modality):
        assert all(a is not b for a, b in zip(before, find(), strict=True)) and "save" in vars(
            pipe.modality
        )
        raise ZeroDivisionError
    assert all(a is b for a, b in zip(before, find(), strict=True)) and "save" not in vars(
        pipe.modality
    )


def test_the_memory_meter_sees_a_pipeline_that_hoards(tmp_path):
    class Hoarder(type(ready())):
        hoard = []

        def generate(self, items, *args, **kwargs):
            self.hoard.append(b"\1" * (LEAK * len(items)))
            return super().generate(items, *args, **kwargs)

    kept = (72 * LEAK) // 3  # of what 72 items leak, between the first mark and the last
    run_once("files", 8, tmp_path / "warm", ready())
    assert run_once("files", 80, tmp_path / "plain", ready())["growth"] < kept
    assert run_once("files", 80, tmp_path / "leak", Hoarder("image"))["growth"] > kept
    assert resident() > 80 * LEAK


def test_marks_are_set_whenever_so_many_more_items_are_there():
    marks = Marks(10)
    for count in (8, 8, 8, 30):
        marks.items(count)
    assert (
        [made for made, _ in marks.marks] == [16, 24, 54]
        and marks.growth is not None
        and marks.first >= 0
    )
    assert Marks(10).growth is None


@pytest.mark.slow
def test_both_arms_make_the_same_microbatches_with_the_same_forward_passes():
    found = beside("action", 9, 1)
    run = found["runs"][0]
    assert run["job"]["nfe"] == run["loop"]["nfe"] > 0
    assert set(found["share"]) == {"seconds", "cpu"} and {
        "plan",
        "commit",
        "gallery",
        "encode",
    } <= set(found["parts"])
    assert (
        found["generate"] > 0
        and found["share"]["cpu"]["encode"] > 0
        and "action" in beside_table({"action": found})
    )


@pytest.mark.slow
def test_another_microbatch_shows_in_the_forward_passes(tmp_path):
    pipe = load("action")
    made = by_job(pipe, "action", pipe.modality.example_prompts(9, 0), 0, tmp_path / "job")
    assert sum(len(items) for items, *_ in made["batches"]) == 9
    assert by_loop(pipe, made["batches"][:1], tmp_path / "loop")["nfe"] != made["nfe"]


def test_the_command_writes_all_it_measured(tmp_path, capsys):
    assert (
        bench(arguments(items=0, modalities="action", prompts=2, out=str(tmp_path / "b.json"))) == 0
    )
    tree = json.loads((tmp_path / "b.json").read_text())
    assert (
        tree["modalities"]["action"]["items"] == 2
        and tree["layouts"] == {}
        and tree["machine"]["threads"] >= 1
    )
    assert "action" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_measures_the_layers_in_processes_of_their_own(tmp_path, capsys):
    assert bench(arguments(modalities="none", out=str(tmp_path / "b.json"))) == 0
    layouts = json.loads((tmp_path / "b.json").read_text())["layouts"]
    assert set(layouts) == {"files", "shards"} and all(
        v["whole"]["made"] == 200 for v in layouts.values()
    )
    assert "layout shards, 200 items" in capsys.readouterr().out


@pytest.mark.parametrize(
    "keys", [{"samplers": "sjd"}, {"items": -1}, {"prompts": 0}, {"modalities": "imagge"}]
)
def test_what_makes_no_sense_is_refused(keys):
    with pytest.raises(GenError, match="--samplers|--items|--prompts|image"):
        bench(arguments(**keys))
