"""Actions through the pipeline, the command line and a policy: bins, FAST ids, situations,
observations; on models that the recipe makes in its quick form."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from calls import only
from quick_models import quickly_trained

import gen
from gen.__main__ import main
from gen.core.errors import GenError
from gen.core.rng import CounterRNG
from gen.interop.lerobot import Policy
from gen.media.npz import read_npz, write_npz
from gen.media.video import read_video
from gen.modalities.action import tasks as tabletop_tasks
from gen.modalities.action import world as tabletop
from gen.modalities.action.modality import ActionChunk, ActionModality, Situation
from gen.recipes.action import recipe as action_recipe

PROMPTS = ["reach", "push the block", "avoid the wall", "reach from 0.20 0.30"]
JACOBI = {"name": "speculative_jacobi", "window": 16}
MASKGIT = {"name": "maskgit", "steps": 4}
STATE = np.array([0.2, 0.3, 0.6, 0.5, 0, 0, 0], np.float32)
SEEN = {"observation.state": STATE, "task": "reach"}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return quickly_trained(action_recipe, tmp_path_factory.mktemp("action"))


@pytest.fixture(scope="module")
def pipes(work):
    return {
        k: gen.load("action", work / "zoo" / f"action-{k}", dtype="float64")
        for k in ("causal", "masked", "fast")
    }


@pytest.fixture(scope="module")
def wild(work):
    """A model of FAST ids with random weights, which prefers some ids by far and knows nothing of
    chunks."""
    pipe = gen.load("action", work / "zoo" / "action-fast")
    model, generator = pipe.bound(pipe.model)[0], torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    return pipe


# --- chunks


@pytest.mark.parametrize("kind", ["causal", "fast"])
def test_jacobi_gives_the_tokens_of_autoregression(kind, pipes):
    pipe = pipes[kind]
    for sampling in ({}, only(temperature=1.0, guidance_scale=2.0)):
        plain, jacobi = (
            pipe(PROMPTS, s, **sampling, num_samples=2, seed=1) for s in ("autoregressive", JACOBI)
        )
        assert torch.equal(plain.tokens, jacobi.tokens) and np.array_equal(
            plain.media, jacobi.media
        )
        assert sum(s.nfe for s in jacobi.stats) < sum(s.nfe for s in plain.stats)
    assert not torch.equal(
        plain.tokens, pipe(PROMPTS, JACOBI, **sampling, num_samples=2, seed=3).tokens
    )  # control
    if kind == "fast":
        assert len({s.tokens for s in plain.stats}) > 1  # rows end apart


def test_every_sample_of_fast_ids_is_a_whole_chunk(wild):
    n, hot = 300, {"temperature": 2.0}
    out = wild("reach", "autoregressive", **only(**hot), num_samples=n, batch_size=150)
    assert all(
        m.action.shape == (16, 2) and m.action.dtype == np.float32 and np.isfinite(m.action).all()
        for m in out.media
    )
    assert len({s.tokens for s in out.stats}) > 5
    assert len(np.unique(out.tokens[:, 0])) > 20  # not one and the same over again
    sampler, sampling = wild.resolve("autoregressive", hot)
    items = wild.plan("reach", n)
    _, binding, frontend = wild.bound(wild.model)
    lengths = torch.cat([frontend.symbol_lengths, torch.zeros(1000)])

    def decode(space):
        tokens = sampler(
            wild.target(sampler, sampling, items, space=space),
            CounterRNG([wild.draw_key(i) for i in items]),
        ).tokens
        spoken = (tokens != space.eos_token_id).long().cumprod(1)
        return float(((lengths[tokens] * spoken).sum(1) == 32).double().mean())

    assert decode(binding.space) == 1.0
    assert decode(replace(binding.space, constraint=None)) < 0.2  # control: without the rule


def test_fast_ids_are_refused_where_places_are_filled_in_any_order(pipes, work, tmp_path):
    with pytest.raises(
        GenError, match="action-fast is a causal one of codes, but the sampler needs a masked one"
    ):
        pipes["fast"]("reach", "maskgit")
    for name in ("action-fast", "action-fast-ids"):
        shutil.copytree(work / "zoo" / name, tmp_path / name)
    config = json.loads((tmp_path / "action-fast" / "config.json").read_text())
    (tmp_path / "action-fast" / "config.json").write_text(json.dumps({**config, "causal": False}))
    with pytest.raises(
        GenError,
        match=(
            "a masked one of ids whose number differs from chunk to chunk; expected a causal one,"
            " or bins"
        ),
    ):
        gen.load("action", tmp_path / "action-fast")("reach", "maskgit")
    (tmp_path / "action-fast" / "config.json").write_text(
        json.dumps({**config, "codebook_size": 99})
    )
    with pytest.raises(GenError, match="has codebook_size 99"):
        gen.load("action", tmp_path / "action-fast")("reach")
    with pytest.raises(
        GenError, match="draft model .*action-draft was trained on the tokens of another frontend"
    ):
        pipes["fast"]("reach", "speculative")


@pytest.mark.parametrize(
    ("kind", "sampler"),
    [
        ("causal", "distance"),
        ("causal", "typical"),
        ("causal", "scd_mc"),
        ("causal", "speculative"),
        ("fast", "typical"),
        ("fast", "scd_gs"),
        ("masked", MASKGIT),
        ("masked", "halton"),
        ("masked", {"name": "maskgit_remask", "steps": 4}),
        ("masked", {"name": "ddvla", "steps": 4}),
    ],
    ids=lambda x: x if isinstance(x, str) else x["name"],
)
@pytest.mark.thinned(6)
def test_samplers_make_chunks_under_guidance_too(kind, sampler, pipes):
    sharp = {"temperature": 0.05}  # untrained models are nearly uniform
    plain, same, guided = (
        pipes[kind](PROMPTS[:3], sampler, **only(**{**sharp, **more}), seed=2)
        for more in ({}, {"guidance_scale": 1.0}, {"guidance_scale": 4.0})
    )
    for out in (plain, guided):
        assert all(m.action.shape == (16, 2) and np.isfinite(m.action).all() for m in out.media)
    assert torch.equal(plain.tokens, same.tokens) and not torch.equal(plain.tokens, guided.tokens)


def test_bins_of_neighbours_pass_for_each_other_by_distance_alone(pipes):
    sampling = {"temperature": 1.0}

    def calls(sampler):
        return sum(
            s.nfe
            for s in pipes["causal"](PROMPTS[:2], sampler, **only(**sampling), num_samples=4).stats
        )

    assert calls("distance") < calls("speculative")


def test_chunks_have_one_length_and_no_prefix(pipes):
    for start, words in (
        ({"frames": 16}, "have one length; frames is 16"),
        ({"prefix": np.zeros((4, 2))}, "'action' cannot be continued"),
    ):
        with pytest.raises(GenError, match=words):
            pipes["causal"]("reach", **start)
    with pytest.raises(GenError, match="'action'"):
        pipes["masked"]("reach", MASKGIT, source=np.zeros((16, 2)), span="2:3")


# --- situations


def test_what_a_task_leaves_open_the_seed_decides(pipes):
    pipe = pipes["causal"]

    def states(seed, n=3):
        return np.stack([m.situation.state for m in pipe(PROMPTS, num_samples=n, seed=seed).media])

    first = states(0)
    assert np.array_equal(first, states(0)) and np.array_equal(first[1::3], states(1, 1))
    assert len(np.unique(first, axis=0)) == len(first) and not np.array_equal(first, states(5))
    for prompt, group in zip(PROMPTS, first.reshape(4, 3, 7), strict=True):
        assert bool(tabletop_tasks.solvable(group, prompt.split()[0]).all())
    assert (
        np.allclose(first[9:, :2], [0.2, 0.3]) and len(np.unique(first[9:, 2:4], axis=0)) == 3
    )  # said; left open
    said = str(tabletop_tasks.described(first[0]))
    assert np.allclose(pipe(said, seed=77).media[0].situation.state, first[0])
    with pytest.raises(GenError, match="outside"):
        pipe("grasp the block")
    with pytest.raises(
        GenError, match="cannot be solved in one chunk: the goal has to be 0.20 to 0.60 metres"
    ):
        pipe("reach from 0.20 0.30 to 0.21 0.30")


def test_the_words_of_a_situation_say_its_task_and_numbers():
    words = Situation(tabletop_tasks.parse("reach"), STATE).words()
    assert words == [
        1,
        24,
        34,
        64,
        54,
        0,
        0,
        0,
    ]  # kinds are 1 to 3, then centimetres; what is not there is 0
    push = Situation(
        tabletop_tasks.parse("push the block"), np.float32([0.2, 0.3, 0.6, 0.5, 0.4, 0.4, 0])
    ).words()
    assert push[0] == 2 and push[1:5] == words[1:5] and push[5:] == [44, 44, 0]
    assert (
        ActionModality.unconditional == [0] * 8
        and max(Situation(tabletop_tasks.parse("reach"), np.ones(7)).words()) < ActionModality.words
    )


# --- files


def test_a_command_writes_chunks_with_the_keys_of_data_sets_and_a_film(work, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = work / "zoo" / "action-causal"
    command = [
        "sample",
        "action",
        "reach",
        "--num-samples",
        "2",
        "--seed",
        "0",
        "--model",
        str(model),
        "--out",
    ]
    assert [main([*command, out]) for out in ("E", "F")] == [0, 0]
    rows, again = (
        [json.loads(line) for line in Path(f, "manifest.jsonl").read_text().splitlines()]
        for f in "EF"
    )
    assert [r["sha256"] for r in rows] == [r["sha256"] for r in again] and rows[0][
        "sha256"
    ] != rows[1]["sha256"]
    made = gen.load("action", model)("reach", num_samples=2).media
    keys = ("action", "action_is_pad", "observation.state", "task", "prompt", "seed")
    for row, chunk in zip(rows, made, strict=True):
        found = read_npz(Path("E", row["file"]), keys)
        assert found["action"].dtype == found["observation.state"].dtype == np.float32 and found[
            "action"
        ].shape == (16, 2)
        assert np.array_equal(found["action"], chunk) and np.array_equal(
            found["observation.state"], chunk.situation.state
        )
        assert (
            found["action_is_pad"].dtype == bool
            and found["action_is_pad"].shape == (16,)
            and not found["action_is_pad"].any()
        )
        assert (found["task"], found["prompt"], found["seed"]) == ("reach", "reach", row["seed"])
        assert [Path(n).suffix for n in row["also"]] == [".mp4"] and len(
            read_video(Path("E", row["also"][0]))
        ) >= 16
        read = ActionModality().load(Path("E", row["file"]))
        assert np.array_equal(read, chunk) and str(read.situation) == str(chunk.situation)
    assert main(["check", "E"]) == 0
    assert Path("E/index.html").read_text().count("<video") >= 2


def test_the_checker_rolls_a_chunk_out_from_its_own_state(tmp_path):
    modality = ActionModality()
    states = tabletop_tasks.states("push", 2, 0, held=False)
    chunk = ActionChunk(
        tabletop.demonstrate(states[0]),
        Situation(tabletop_tasks.parse("push the block"), states[0]),
    )
    modality.save(chunk, tmp_path / "a.npz", {})
    assert modality.check(modality.load(tmp_path / "a.npz"), "push the block").passed
    other = ActionChunk(chunk.action, replace(chunk.situation, state=states[1]))
    assert not modality.check(other, "push the block").passed  # control
    write_npz(tmp_path / "b.npz", {"root": np.zeros((40, 3))})
    with pytest.raises(GenError, match="has no 'action'; it has root"):
        modality.load(tmp_path / "b.npz")


# --- policies


@pytest.mark.parametrize(
    ("kind", "sampler"), [("causal", JACOBI), ("fast", "autoregressive"), ("masked", MASKGIT)]
)
def test_an_episode_is_the_same_again_after_a_reset(kind, sampler, pipes):
    policy = Policy(pipes[kind], sampler, n_action_steps=8, seed=3)

    def episode(policy):
        policy.reset()
        state, actions = STATE, []
        for _ in range(12):
            actions.append(policy.select_action({"observation.state": state, "task": "reach"}))
            state = np.float32(tabletop.step(state, actions[-1])[0])
        return np.stack(actions)

    first = episode(policy)
    assert first.shape == (12, 2) and first.dtype == np.float32
    assert np.array_equal(first, episode(policy))
    assert not np.array_equal(
        first, episode(Policy(pipes[kind], sampler, n_action_steps=8, seed=30))
    )  # control


def test_a_chunk_is_used_up_before_the_next_is_predicted(pipes):
    policy = Policy(pipes["causal"], JACOBI, n_action_steps=5)
    chunks = [Policy(pipes["causal"], JACOBI, seed=k).predict_action_chunk(SEEN) for k in range(2)]
    assert (
        chunks[0].shape == (16, 2) and chunks[0].dtype == np.float32 and not np.array_equal(*chunks)
    )
    taken = np.stack([policy.select_action(SEEN) for _ in range(10)])
    assert np.array_equal(taken, np.concatenate([c[:5] for c in chunks]))
    whole = Policy(pipes["causal"], JACOBI)
    assert np.array_equal(np.stack([whole.select_action(SEEN) for _ in range(16)]), chunks[0])
    moved = {**SEEN, "observation.state": STATE + np.float32([0.1, 0, 0, 0, 0, 0, 0])}
    assert not np.array_equal(
        Policy(pipes["causal"], JACOBI).predict_action_chunk(moved), chunks[0]
    )
    out = pipes["causal"](
        str(tabletop_tasks.described(STATE)), JACOBI
    )  # a policy is the pipeline with the state that it sees
    assert np.array_equal(out.media[0].situation.state, STATE)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"observation.state": np.full(7, np.nan, np.float32)}, "gripper_x is nan"),
        ({"observation.state": STATE[:6]}, "expected 7 numbers"),
        ({"observation.state": STATE + 1}, "0 to 1 metres"),
        ({"observation.state": "here"}, "expected 7 numbers"),
        ({"task": 3}, "task is 3"),
        ({"task": "reech"}, "Did you mean 'reach'"),
        ({"task": "push the block"}, "block_x"),
        ({"observation.state": None}, "expected 7 numbers"),
    ],
)
def test_an_observation_without_sense_is_an_error_and_never_an_action(change, words, pipes):
    policy = Policy(pipes["causal"], JACOBI)
    for act in (policy.predict_action_chunk, policy.select_action):
        with pytest.raises(GenError, match=words):
            act({**SEEN, **change})
    assert policy.select_action(SEEN).shape == (2,)  # and what makes sense goes on
    for key in SEEN:
        with pytest.raises(GenError, match=f"the observation has no '{key}'"):
            policy.predict_action_chunk({k: v for k, v in SEEN.items() if k != key})


def test_policies_that_cannot_work_are_refused_before_the_first_action(pipes):
    for params, words in (
        ({"n_action_steps": 0}, "n_action_steps is 0"),
        ({"n_action_steps": 2.0}, "at least 1"),
        ({"n_action_steps": True}, "at least 1"),
        ({"seed": -1}, "seed is -1"),
        ({"sampler": "jacoby"}, "jacoby"),
        ({"temprature": 1}, "temprature"),
        ({"sampler": "maskgit"}, "the sampler needs a masked one"),
    ):
        with pytest.raises(GenError, match=words):
            Policy(pipes["causal"], **params)
    with pytest.raises(GenError, match="takes observations, such as 'action'; got 'image'"):
        Policy(gen.load("image"))
    with pytest.raises(GenError, match="n_action_steps is 17; expected at most 16"):
        Policy(pipes["causal"], JACOBI, n_action_steps=17).select_action(SEEN)


def test_predictions_that_are_not_finite_are_an_error(pipes, monkeypatch):
    frontend = pipes["causal"].bound(pipes["causal"].model)[2]
    monkeypatch.setattr(frontend, "postprocess", lambda x: np.full((16, 2), np.nan, np.float32))
    with pytest.raises(GenError, match="NaN or inf"):
        Policy(pipes["causal"], JACOBI).select_action(SEEN)


# --- the recipe


def test_training_sees_whole_chunks_and_words_of_situations(work):
    bins, fast = (
        torch.load(folder / "tokens.pt", weights_only=True) for folder in (work, work / "fast")
    )
    assert (
        torch.equal(bins["slots"], fast["slots"])
        and int(bins["slots"].max()) < ActionModality.words
    )
    frontends = (
        action_recipe.ActionBins.from_pretrained(work / "frontend"),
        action_recipe.ActionFast.from_pretrained(work / "fast" / "frontend"),
    )
    chunks = [
        f.decode(d["codes"].long().view(len(d["codes"]), 1, *f.grid))
        for f, d in zip(frontends, (bins, fast), strict=True)
    ]
    assert float((chunks[0] - chunks[1]).abs().max()) < 0.2 and len(chunks[0]) == 200
    data = tabletop_tasks.episodes(200, 1, held=False)
    assert not any(map(tabletop_tasks.held_out, data.states))
    said = [Situation(t, s).words() for t, s in zip(data.tasks, data.states, strict=True)]
    assert bins["slots"].tolist() == said
