"""The recipe of translations: its pairs, its loss, and a quick run of all stages."""

from __future__ import annotations

import json

import pytest
import torch

from gen.modalities.small_language import held_out
from gen.modalities.text import translation
from gen.recipes.text import dag


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dag")
    dag.make_pairs(folder, dag.QUICK, log=lambda text: None)
    return folder


def test_pairs_are_right_and_not_held_out(work):
    data = torch.load(work / "pairs.pt", weights_only=True)
    for source, target, n in zip(data["source"], data["target"], data["lengths"], strict=True):
        digits = translation.Translation(tuple(source[1 : n - 1].tolist()))
        words = " ".join(translation.WORDS[i] for i in target[1 : n - 1])
        assert translation.check(digits, words).passed and not held_out(digits)
        assert source[:n].tolist() == digits.ids() and int(target[n - 1]) == 20


def test_batches_hold_every_pair_once_per_epoch(work):
    batches = dag.batches(work / "pairs.pt", 4, seed=0)
    drawn = [next(batches) for _ in range(16)]
    assert [step for *_, step in drawn] == list(range(16))
    seen = [tuple(row[:n].tolist()) for s, _, k, _ in drawn for row, n in zip(s, k, strict=True)]
    data = torch.load(work / "pairs.pt", weights_only=True)
    every = zip(data["source"], data["lengths"], strict=True)
    assert sorted(seen) == sorted(tuple(row[:n].tolist()) for row, n in every)


def test_the_first_steps_train_words_alone(work):
    torch.manual_seed(0)
    model, loss = dag.new_model(dag.QUICK, dag.LAMBDA), dag.dag_loss(dag.QUICK)
    batches = dag.batches(work / "pairs.pt", 4, seed=0)
    for step in range(4):
        model.zero_grad()
        loss(model, next(batches))[0].backward()
        learns = model.link_query.weight.grad is not None
        assert learns == (step >= dag.QUICK.chain_steps)
        assert model.target.weight.grad is not None


@pytest.mark.slow
def test_all_stages_run(tmp_path):
    dag.main(["all", "--work", str(tmp_path), "--quick"])
    zoo = tmp_path / "zoo"
    result = json.loads((zoo / "evaluation-dag.json").read_text())
    assert result["sources"] == 2 and "joint_viterbi" in result["quality"]
    assert (zoo / "text-dag" / "README.md").is_file() and (zoo / dag.GRAPH_WORDS).is_dir()
