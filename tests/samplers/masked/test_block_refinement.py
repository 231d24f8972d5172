"""The preset ``llada2`` against ``LLaDA2Pipeline`` and ``BlockRefinementScheduler`` of diffusers,
on the same weights, id for id.

Their ``num_inference_steps`` is at most ``gen_length``, and their ``max_post_steps`` allows one
call more than it says. What lies behind ``gen_length`` in the last block is no place at all here,
but takes part in the counts there: a call may commit nothing else, and edit. So texts end with a
block here, or nothing is edited.
"""

from __future__ import annotations

import random

import masked_folders as made
import pytest
import torch
from masked_folders import END, LLADA2, MASK, WORDS

import gen

B = 8
SMALL = {
    **LLADA2,
    "num_hidden_layers": 2,
    "num_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
}
SEEDS = range(3)
USUAL = {
    "num_inference_steps": B + 1,
    "max_post_steps": 17,
}  # as many calls as the pipeline makes of its own accord


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Texts of so many places by this repository, and the pipeline of diffusers with the same
    module."""
    from diffusers import BlockRefinementScheduler, LLaDA2Pipeline

    weights = made.llada2(SMALL, seed=1, spread=2.0)
    weights["lm_head.weight"][END, 0] = 1  # so that some texts end
    folder = made.write(tmp_path_factory.mktemp("published") / "llada2", SMALL, weights)
    pipes = {
        n: gen.load("text", model=folder, dtype="float64", max_new_tokens=n, block_length=B)
        for n in (11, 12, 16)
    }
    other = LLaDA2Pipeline(
        model=pipes[12].bound(str(folder))[0].model,
        scheduler=BlockRefinementScheduler(block_length=B),
        tokenizer=None,
    )
    other.set_progress_bar_config(disable=True)
    return pipes, other


def prompt(seed: int, length: int | None = None) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(length or draw.randint(1, 2 * B)))


def texts(*lengths: int) -> list[str]:
    """Some prompts, of so many ids or of any number."""
    return [prompt(s, lengths[s % len(lengths)] if lengths else None) for s in SEEDS]


def ours(both, prompts: list[str], positions: int = 12, **params):
    return both[0][positions](
        prompts, sampler={"name": "llada2", "block_length": B, **params}, trace=True
    )


def theirs(both, prompts: list[str], positions: int = 12, **params) -> list[list[int]]:
    """One at a time: rows of a batch wait for each other there."""
    pipes, other = both
    binding = pipes[positions].bound(pipes[positions].model)[1]
    params = {"eos_early_stop": False, "num_inference_steps": B + 1, "temperature": 0.0, **params}

    def run(ids):
        return (
            other(
                input_ids=ids,
                gen_length=positions,
                block_length=B,
                mask_token_id=MASK,
                output_type="seq",
                **params,
            )
            .sequences[0]
            .tolist()
        )

    return [run(torch.tensor([binding.prompt(text)])) for text in prompts]


def edits(out) -> int:
    return sum(len(step.removed) for trace in out.traces for step in trace)


@pytest.mark.parametrize(
    ("threshold", "editing", "positions", "lengths"),
    [
        (0.7, 0.5, 12, (4, 12)),
        (0.4, 0.3, 11, (5, 13)),
        (0.25, 0.2, 16, (8, 16)),
        (0.0, 0.15, 12, (12, 4)),
    ],
)
@pytest.mark.thinned(2)
def test_the_preset_is_the_pipeline_of_diffusers(both, threshold, editing, positions, lengths):
    """For prompts that end with a block and inside of one."""
    prompts, params = texts(*lengths), {"threshold": threshold}
    out = ours(both, prompts, positions, editing_threshold=editing, **params, **USUAL)
    assert out.tokens.tolist() == theirs(
        both, prompts, positions, editing_threshold=editing, **params
    )
    assert edits(out) and out.tokens.tolist() != theirs(
        both, prompts, positions, editing_threshold=None, **params
    )  # control: no edits


@pytest.mark.parametrize("threshold", [0.5, 0.2])
def test_last_blocks_may_be_cut_short_where_nothing_is_edited(both, threshold):
    out = ours(both, texts(), 11, threshold=threshold, remasker="none", num_inference_steps=B + 1)
    wanted = theirs(both, texts(), 11, threshold=threshold, editing_threshold=None)
    assert out.tokens.tolist() == wanted
    assert any((len(t.split()) + 11) % B for t in texts())
    assert (
        wanted
        != ours(
            both, texts(), 11, threshold=0.05, remasker="none", num_inference_steps=B + 1
        ).tokens.tolist()
    )  # control


@pytest.mark.parametrize(("steps", "editing"), [(1, 0.2), (2, None), (3, 0.2), (5, None), (8, 0.2)])
@pytest.mark.thinned(2)
def test_the_preset_counts_steps_as_the_scheduler_does(both, steps, editing):
    """Of blocks that end with the text. Fewer steps commit more places in each, and when they are
    used up nothing is edited any more."""
    prompts, params = texts(4, 12), {"threshold": 0.6, "num_inference_steps": steps}
    out = ours(
        both,
        prompts,
        **params,
        **(
            {"editing_threshold": editing, "max_post_steps": 17}
            if editing
            else {"remasker": "none"}
        ),
    )
    wanted = theirs(both, prompts, editing_threshold=editing, **params)
    assert out.tokens.tolist() == wanted
    assert wanted != theirs(
        both, prompts, editing_threshold=editing, threshold=0.6
    )  # control: more steps


def test_calls_after_the_last_mask_are_as_many_and_one(both):
    params, found = {"threshold": 0.0, "editing_threshold": 0.05}, {}

    def run(calls):
        return ours(
            both, texts(4, 12), num_inference_steps=B + 1, max_post_steps=calls, **params
        ).tokens.tolist()

    for most in (0, 2):
        found[most] = theirs(both, texts(4, 12), max_post_steps=most, **params)
        assert run(most + 1) == found[most] != run(most)  # control: as many as it says
    assert found[0] != found[2]


def test_another_parameter_is_another_text(both):
    """The controls; and a batch with a cache of blocks gives what the pipeline gives for each
    row."""
    usual, prompts = {"threshold": 0.3, "editing_threshold": 0.2, **USUAL}, texts(4, 12)
    wanted = theirs(both, prompts, threshold=0.3, editing_threshold=0.2)
    assert (
        ours(both, prompts, **usual).tokens.tolist()
        == ours(both, prompts, **usual, cache="dual").tokens.tolist()
        == wanted
    )
    for params in (
        {"threshold": 0.9},
        {"editing_threshold": 0.6},
        {"remasker": "none"},
        {"align_blocks": False},
        {"order": "entropy", "threshold": 0.9},
    ):
        assert ours(both, prompts, **usual | params).tokens.tolist() != wanted, params


def test_an_early_end_is_the_pipelines(both):
    """Up to the end; behind it the pipeline leaves masks, and the sampler fills these with ends.
    Without edits: there those may go on in front of the end."""
    ended, prompts = 0, [prompt(s) for s in range(8)]
    out = ours(
        both, prompts, num_inference_steps=B + 1, threshold=0.2, remasker="none", stop="end"
    ).tokens.tolist()
    other = theirs(
        both, prompts, threshold=0.2, editing_threshold=None, eos_early_stop=True, eos_token_id=END
    )
    for mine, their in zip(out, other, strict=True):
        upto = mine.index(END) + 1 if END in mine else len(mine)
        assert mine[:upto] == their[:upto] and MASK not in mine
        ended += upto < len(mine)
    assert ended


def test_padding_is_no_place_to_the_module(both):
    """The pipeline says with zeros and ones what is padding. Whole blocks of it move a text, and
    change nothing else."""
    pipes, other = both
    ids = torch.tensor([pipes[12].bound(pipes[12].model)[1].prompt(prompt(3))])
    padded, real = (
        torch.nn.functional.pad(x, (B, 0), value=v)
        for x, v in ((ids, 7), (torch.ones_like(ids), 0))
    )

    def run(**more):
        return other(
            gen_length=12,
            block_length=B,
            mask_token_id=MASK,
            output_type="seq",
            num_inference_steps=B + 1,
            eos_early_stop=False,
            **more,
        ).sequences

    assert torch.equal(run(input_ids=padded, attention_mask=real), run(input_ids=ids))
    assert not torch.equal(
        run(input_ids=padded), run(input_ids=ids)
    )  # control: padding that is seen
