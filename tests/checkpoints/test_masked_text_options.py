"""Masked language models in their published layout: guidance, newline tokens, token counts
and ends, against loops that are written out from the papers (``published_loops``)."""

from __future__ import annotations

import json

import masked_folders as made
import numpy as np
import published_loops as loops
import pytest
import torch
from masked_folders import DREAM, END, LLADA, MASK, VOCAB

import gen
from gen.core.errors import GenError

T = 12
PROMPTS = ["ba de gi", "ko", "lu ma ne pi ba be"]
TURN, NEWLINE, STOP_NEWLINE = 3, 46, 47
NEWLINES = ("\n", ".\n")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("options")
    found = {
        name: made.write(root / name, config, weights(config), turn=turn, newlines=NEWLINES)
        for name, config, weights, turn in (
            ("llada", LLADA, made.llada, "<|eot_id|>"),
            ("dream", DREAM, made.dream, "<|im_end|>"),
        )
    }
    found["bare"] = made.write(root / "bare", LLADA, made.llada(LLADA))
    return found


def load(folder, **options):
    return gen.load("text", model=folder, dtype="float64", max_new_tokens=T, **options)


def logits_of(pipe, prompt, guidance=1.0, num_masks=None):
    """Guided logits of a canvas; the unconditional branch has ``num_masks`` masks for a prompt."""
    checkpoint, binding, _ = pipe.bound(pipe.model)
    ids, forward = binding.prompt(prompt), checkpoint.adapter("masked").forward
    masks = [MASK] * (len(ids) if num_masks is None else num_masks)

    def logits(canvas):
        cond, uncond = (forward(torch.tensor([p + canvas]), T)[0] for p in (ids, masks))
        out = uncond + guidance * (cond - uncond)
        out[:, MASK] = -torch.inf
        return out

    return logits


def equal(out, row, result):
    """Compare the tokens of a row and the steps of its trace with a loop's."""
    tokens, steps = result
    found = [(step.committed, step.removed) for step in out.traces[row]]
    return out.tokens[row].tolist() == tokens and found == steps


@pytest.mark.parametrize(("cfg_scale", "steps"), [(1.5, 6), (4.0, 12)])
def test_guidance_is_that_of_llada(folders, cfg_scale, steps):
    """As many masks as the prompt has tokens, and u + (cfg_scale + 1) (c - u)."""
    pipe = load(folders["llada"])
    spec = {"name": "llada", "steps": steps, "block_length": 6}
    out = pipe(PROMPTS, sampler=spec | {"cfg_scale": cfg_scale}, trace=True)
    ours = pipe(PROMPTS, sampler=spec, guidance_scale=cfg_scale + 1)
    assert torch.equal(ours.tokens, out.tokens) and out.stats[0].nfe == steps

    def loop(prompt, num_masks=None):
        f = logits_of(pipe, prompt, cfg_scale + 1, num_masks)
        return loops.llada(f, T, MASK, steps=steps, block=6)

    assert all(equal(out, row, loop(prompt)) for row, prompt in enumerate(PROMPTS))
    # the control has one mask for any prompt, which is right for a prompt of one token
    assert not all(equal(out, row, loop(prompt, 1)) for row, prompt in enumerate(PROMPTS))
    assert equal(out, 1, loop(PROMPTS[1], 1))


def test_ends_are_those_of_texts_and_turns_and_can_be_held_back(folders):
    pipe = load(folders["llada"])
    assert pipe.bound(pipe.model)[1].space.ends == (END, TURN)
    spec = {"name": "llada", "steps": T, "block_length": T, "hold_end": True}
    out = pipe(PROMPTS, sampler=spec, trace=True)
    for row, prompt in enumerate(PROMPTS):
        f = logits_of(pipe, prompt)
        assert equal(out, row, loops.llada(f, T, MASK, steps=T, block=T, held=(END, TURN)))


# --- newline tokens and AdaBlock


def delimiters(pipe):
    return pipe.bound(pipe.model)[1].space.delimiters


def test_delimiters_come_from_the_tokenizer(folders):
    assert delimiters(load(folders["llada"])) == (NEWLINE,)
    assert delimiters(load(folders["dream"])) == (NEWLINE, STOP_NEWLINE)
    assert delimiters(load(folders["bare"])) == ()
    assert delimiters(load(folders["bare"], delimiters=["ba", 9, "ba"])) == (6, 9)


def test_byte_level_newlines_are_found(tmp_path):
    from transformers import Qwen2TokenizerFast

    from gen.modalities.checkpoints.masked_text import newline_tokens
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate([*letters, ".\u010a", "\u010a\u010a", "\u0120a"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n. \u010a\n\u010a \u010a\n\u0120 a\n")
    tokenizer = Qwen2TokenizerFast.from_pretrained(tmp_path)
    found = newline_tokens(tokenizer)
    wanted = {vocab["\u010a"]: "\n", vocab[".\u010a"]: ".\n", vocab["\u010a\u010a"]: "\n\n"}
    assert found == wanted


@pytest.mark.parametrize("name", ["llada", "dream"])
def test_adablock_runs_on_published_families(folders, name):
    """With delimiters of words that these random models say."""
    pipe = load(folders[name])
    plain = {"name": "fast_dllm", "block_length": 8, "conf_threshold": 0.5}
    said = pipe(PROMPTS, sampler=plain)
    common = torch.bincount(said.tokens.flatten(), minlength=VOCAB).topk(3).indices.tolist()
    pipe = load(folders[name], delimiters=common)
    spec = plain | {"name": "adablock", "delimiter_threshold": 0.02}
    out = pipe(PROMPTS, sampler=spec, temperature=1.0, top_p=1.0, trace=True)
    same = []
    for row, prompt in enumerate(PROMPTS):
        for ids, wanted in ((common, True), ((), False)):
            result = loops.adablock(
                logits_of(pipe, prompt),
                T,
                MASK,
                block=8,
                threshold=0.5,
                delimiters=ids,
                delimiter_threshold=0.02,
            )
            if wanted:
                assert equal(out, row, result)
            else:
                same.append(equal(out, row, result))
    assert not all(same), "no delimiter is found here"


def test_adablock_is_refused_without_newline_tokens(folders):
    with pytest.raises(GenError, match="'adaptive', which needs .*this model has none; expected"):
        load(folders["bare"])("ba", sampler="adablock")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("\n", r"delimiters is '\\n'; expected a list"),
        ([VOCAB], "delimiters is 48; expected ids below 48"),
        (["ba de"], "delimiters is 'ba de'; expected a token id, or the text of one token"),
        ([True], "delimiters is True; expected a token id"),
        ([None], "delimiters is None; expected a token id"),
    ],
)
def test_bad_delimiters_are_refused(folders, given, words):
    with pytest.raises(GenError, match=words):
        load(folders["llada"], delimiters=given)


# --- token counts and PC-Sampler


def test_pc_runs_on_published_families(folders, tmp_path):
    counts = {i: 5 + 40 * (i % 7) for i in range(6, 40)}
    total = 4000
    released = {"num_token": total, "p_baseline_dict": {str(i): n for i, n in counts.items()}}
    (tmp_path / "counts.json").write_text(json.dumps(released))
    pipe = load(folders["llada"], token_counts=tmp_path / "counts.json")
    out = pipe(PROMPTS, sampler={"name": "pc", "steps": T, "position_decay": 0.1}, trace=True)
    for row, prompt in enumerate(PROMPTS):
        f = logits_of(pipe, prompt)
        result = loops.pc(f, T, MASK, steps=T, counts=counts, total=total, decay=0.1)
        assert equal(out, row, result)
    with pytest.raises(GenError, match="'position', which needs .*option token_counts"):
        load(folders["llada"])("ba", sampler="pc")


def test_counts_are_read_from_json_and_npy_alike(folders, tmp_path):
    counts = np.zeros(VOCAB)
    counts[[7, 9]] = 30, 10
    np.save(tmp_path / "counts.npy", counts)
    (tmp_path / "counts.json").write_text('{"7": 30, "9": 10}')
    found = []
    for name in ("counts.npy", "counts.json"):
        pipe = load(folders["llada"], token_counts=str(tmp_path / name))
        found.append(pipe.bound(pipe.model)[1].space.rarity)
    assert torch.equal(*found)
    shares = torch.tensor([30 / 40, 10 / 40, 1 / 40])  # a token that never came counts once
    assert torch.allclose(found[0][[7, 9, 8]], -shares.log())


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("gone.json", None, "cannot be read"),
        ("a.json", "[1]", "are not a mapping"),
        ("a.json", "{", "cannot be read"),
        ("a.json", '{"x": 1}', "hold 1 for 'x'; expected a count"),
        ("a.json", '{"48": 1}', "hold 1 for '48'; expected a count of at least 0 for .* below 48"),
        ("a.json", '{"4": -1}', "hold -1 for '4'"),
        ("a.json", '{"4": NaN}', "hold nan for '4'"),
        ("a.json", "{}", "add up to 0"),
        ("a.json", '{"num_token": "x", "p_baseline_dict": {"4": 1}}', "num_token .* is 'x'"),
        ("a.npy", np.ones((2, 2)), "have shape .*2, 2.*; expected at most 48 numbers"),
        ("a.npy", np.ones(49), "have shape .*49"),
        ("a.npy", -np.ones(4), "at least 0"),
        ("a.npy", np.array(["x"]), "dtype"),
    ],
)
def test_bad_counts_are_refused(folders, tmp_path, name, content, words):
    if isinstance(content, str):
        (tmp_path / name).write_text(content)
    elif content is not None:
        np.save(tmp_path / name, content)
    with pytest.raises(GenError, match=words):
        load(folders["llada"], token_counts=tmp_path / name)
