"""``value_head``: rewards that a small trained network predicts from unfinished outputs."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import gen
from gen.core.errors import GenError
from gen.recipes.value_head import main as recipe
from gen.samplers.search.scorers.value_head import HeadFacts, HeadNet, read_head, write_head

BASE = {"name": "maskgit", "steps": 4}
PROMPTS = ["shuffle 4 2 9 5 =", "3 + 8 + 5 =", "insert 7 in 3 1 2 ="]
ARGUMENTS = ["text", "--scorer", "digit_count", "--sampler", json.dumps(BASE), "--count", "160"]


@pytest.fixture(scope="module")
def text():
    return gen.load("text")


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    path = tmp_path_factory.mktemp("heads") / "digits.safetensors"
    assert recipe([*ARGUMENTS, "--out", str(path)]) == 0
    return path


def steered(head, **more):
    value = {"name": "value_head", "path": str(head)}
    return {"name": "svdd", "m": 3, "alpha": 0.0, "base": BASE, "scorer": "digit_count",
            "value": value, **more}  # fmt: skip


def test_a_head_explains_most_of_a_reward_that_tokens_tell(tmp_path, capsys):
    assert recipe([*ARGUMENTS, "--out", str(tmp_path / "a")]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["explained_half"] > 0.5 and figures["explained_finished"] > 0.5
    assert figures["seconds_training"] < 60


def test_control_a_head_of_shuffled_rewards_explains_nothing(tmp_path, capsys, monkeypatch):
    from gen.recipes import value_head

    judged = value_head.rewards_of

    def shuffled(*args):
        return np.random.default_rng(0).permutation(judged(*args))

    monkeypatch.setattr(value_head, "rewards_of", shuffled)
    assert recipe([*ARGUMENTS, "--out", str(tmp_path / "a")]) == 0
    assert json.loads(capsys.readouterr().out)["explained_finished"] < 0.3


def test_the_recipe_makes_the_same_head_again(head, tmp_path):
    assert recipe([*ARGUMENTS, "--out", str(tmp_path / "again")]) == 0
    one, other = load_file(head), load_file(tmp_path / "again")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[k], other[k]) for k in one)
    assert {x.dtype for x in one.values()} == {torch.float16}
    assert head.stat().st_size < 300_000


def test_a_head_steers_a_search_and_judges_the_same_alone_and_in_a_batch(text, head):
    out = text(PROMPTS, steered(head), seed=1, progress=False)
    alone = text(PROMPTS[1], steered(head), seed=1, progress=False)
    assert torch.equal(out.tokens[1], alone.tokens[0])
    scores = [[round(c.score, 4) for c in row] for row in out.candidates]
    assert len({s for row in scores for s in row}) > 3  # predictions, not counts
    plain = text(PROMPTS, steered(head, m=1), seed=1, progress=False)
    base = text(PROMPTS, BASE, seed=1, progress=False)
    assert torch.equal(plain.tokens, base.tokens)


def test_a_head_of_another_reward_or_model_is_refused(text, head, tmp_path):
    with pytest.raises(GenError, match=r"is of reward .*digit_count.*expected .*bracket_depth"):
        text(PROMPTS, steered(head, scorer="bracket_depth"), seed=1, progress=False)
    causal = {"name": "best_of", "n": 2, "scorer": {"name": "value_head", "path": str(head)}}
    with pytest.raises(GenError, match=r"is of model \w+; expected \w+ \(text-causal\)"):
        text(PROMPTS, causal, seed=1, progress=False)
    net, facts = read_head(str(head))
    write_head(tmp_path / "other", net, replace(facts, codebook="another"))
    with pytest.raises(GenError, match=r"is of codebook another"):
        text(PROMPTS, steered(tmp_path / "other"), seed=1, progress=False)


def test_control_the_head_itself_as_the_reward_is_taken(text, head):
    spec = {"name": "best_of", "n": 3, "base": BASE}
    scorer = {"name": "value_head", "path": str(head)}
    out = text(PROMPTS, {**spec, "scorer": scorer}, seed=1, progress=False)
    assert all(np.isfinite(c.score) for row in out.candidates for c in row)


def test_a_file_that_is_no_head_is_one_error(text, tmp_path):
    with pytest.raises(GenError, match=r"value_head\.path is '/no/such'"):
        text(PROMPTS, steered("/no/such"), seed=1, progress=False)
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(GenError, match="cannot be read as a value head"):
        text(PROMPTS, steered(tmp_path / "text"), seed=1, progress=False)


def test_what_is_undecided_is_not_read(head):
    net, _ = read_head(str(head))
    tokens = torch.randint(10, (2, len(net.at)), generator=torch.Generator().manual_seed(0))
    prompt = torch.zeros(2, 3, dtype=torch.long)
    known = torch.arange(len(net.at)) < 3
    other = torch.where(known, tokens, 7)
    read = [net(t.where(known, net.undecided), prompt) for t in (tokens, other)]
    assert torch.equal(*read)
    assert not torch.equal(net(tokens, prompt), net(other, prompt))


def test_bad_arguments_of_the_recipe_are_named(tmp_path):
    rest = ["--out", str(tmp_path / "x")]
    with pytest.raises(GenError, match=r"Did you mean 'digit_count'"):
        recipe(["text", "--scorer", "digit_cuont", *rest])
    with pytest.raises(GenError, match="no JSON"):
        recipe(["text", "--scorer", "{name", *rest])
    with pytest.raises(GenError, match="makes latents"):
        recipe(["image", "--scorer", "red_area", "--sampler", "mar", *rest])
    with pytest.raises(GenError, match=r"all \d+ rewards are 0; expected a reward that tells"):
        recipe(["action", "--scorer", f"{__file__}:nothing", "--count", "20", *rest])
    assert not (tmp_path / "x").exists()


def nothing(media, prompt):
    """Reward that tells nothing apart."""
    return 0.0


def test_facts_are_those_of_the_weights_the_codebook_and_the_reward(text):
    named = HeadFacts.of(text, "text-masked", {"name": "digit_count"})
    assert named == HeadFacts.of(text, "text-masked", "digit_count")
    assert named != HeadFacts.of(text, "text-causal", "digit_count")
    assert HeadNet(7, 4, 2).undecided == 7
