"""Outputs claim no more than their dtype keeps: in 16 bits the same tokens need passes whose bits
do not depend on what runs beside a token."""

from __future__ import annotations

import pytest
import torch
from served import serving

import gen
from gen.config.job import make_job
from gen.core.resolve import resolve_sampler
from gen.core.token_space import GUARANTEES, kept_guarantee
from gen.jobs.run import run_job
from gen.store.ledger import read_rows

PROMPT, NEW = "sort 3 1 2 =", 4
KEPT = {  # dtype, batch_invariant -> what same_tokens becomes
    ("float32", False): "same_tokens",
    ("bfloat16", False): "same_distribution",
    ("float16", False): "same_distribution",
    ("bfloat16", True): "same_tokens",
    ("float16", True): "same_tokens",
}
SHORT = ("bfloat16", "float16")


def load(dtype: str, invariant: bool = False):
    return gen.load("text", device="cpu", dtype=dtype, batch_invariant=invariant)


@pytest.mark.parametrize(("dtype", "invariant"), KEPT)
def test_the_label_of_an_output_is_what_its_dtype_keeps(dtype, invariant):
    pipe = load(dtype, invariant)
    for sampler in ("autoregressive", "speculative_jacobi", "prompt_lookup"):
        assert resolve_sampler(sampler)[0].guarantee == "same_tokens"
        out = pipe(PROMPT, sampler, max_new_tokens=NEW)
        assert out.guarantee == KEPT[dtype, invariant]
    for sampler in ("speculative", "relaxed_acceptance"):  # weaker labels stay
        label = resolve_sampler(sampler)[0].guarantee
        assert label != "same_tokens" and pipe.guarantee(resolve_sampler(sampler)[0]) == label


@pytest.mark.parametrize("label", GUARANTEES)
def test_no_dtype_strengthens_a_label(label):
    names = list(GUARANTEES)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for invariant in (False, True):
            assert names.index(kept_guarantee(label, dtype, invariant)) >= names.index(label)


@pytest.mark.parametrize("dtype", SHORT)
def test_masked_models_have_no_such_passes_and_keep_the_distribution(dtype):
    out = load(dtype)(PROMPT, "freedave", max_new_tokens=NEW)
    assert out.guarantee == "same_distribution"
    assert load("float32")(PROMPT, "freedave", max_new_tokens=NEW).guarantee == "same_tokens"


@pytest.mark.parametrize(("dtype", "invariant"), [("bfloat16", False), ("bfloat16", True)])
def test_folders_ledgers_and_servers_say_the_same(dtype, invariant, tmp_path):
    label, pipe = KEPT[dtype, invariant], load(dtype, invariant)
    pipe(PROMPT, "prompt_lookup", max_new_tokens=NEW).save(tmp_path / "saved")
    job = {
        "modality": "text", "prompts": [PROMPT], "sampler": "prompt_lookup", "dtype": dtype,
        "device": "cpu", "model_options": {"batch_invariant": invariant},
        "sampling": {"max_new_tokens": NEW}, "out": str(tmp_path / "job"),
    }  # fmt: skip
    assert not run_job(make_job(job, where="a test"))["failed"]
    for folder in ("saved", "job"):
        assert [row["guarantee"] for row in read_rows(tmp_path / folder)] == [label]
    with serving(models={"m": pipe}) as server:
        _, found, _ = server.ask("/live/models/m", None)
        offered = {s["name"]: s["guarantee"] for s in found["samplers"]}
        assert offered["prompt_lookup"] == label and offered["relaxed_acceptance"] == "approximate"
        body = {"model": "m", "prompt": PROMPT, "sampler": "prompt_lookup", "max_tokens": NEW}
        assert server.ask("/v1/completions", body)[1]["choices"][0]["gen"]["guarantee"] == label
