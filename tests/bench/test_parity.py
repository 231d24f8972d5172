"""Parity of tokens in 16-bit types: equal with batch_invariant, other tokens without it, and a file
that resumes."""

import json

import byte_folders
import pytest
import torch

import gen
from gen.bench import parity
from gen.bench.parity import REFERENCE, Setting, Subject, cost_table, share_table
from gen.bench.records import Records, latest
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler

SETTINGS = {
    REFERENCE: [(4, False)],
    "speculative_jacobi window=64": [(6, True)],
    "suffix": [(3, False)],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random Llama whose logits are nearly tied."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=byte_folders.VOCAB, hidden_size=384, intermediate_size=256,
        num_hidden_layers=4, num_attention_heads=3, num_key_value_heads=1,
        max_position_embeddings=1024, initializer_range=0.05, eos_token_id=byte_folders.END,
        bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_folders.byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def measured(model, tmp_path_factory):
    """Arguments of a measurement that was carried out, and its file."""
    out = tmp_path_factory.mktemp("out") / "found.jsonl"
    call = ["measure", "--out", str(out), "--model", str(model), "--dtypes", "bfloat16"]
    call += ["--per-kind", "1", "--max-new-tokens", "16", "--repeats", "1"]
    call += ["--temperatures", "0"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parity, "PUBLISHED", SETTINGS)
        patch.setattr(parity, "COSTS", (REFERENCE, "drafter_invariant"))
        parity.main(call)
        yield call, out


def counts(cell: str) -> list[list[int]]:
    """Equal and compared items with the option, and without it."""
    return [[int(n) for n in part.split(" of ")] for part in cell.split(" / ")]


def test_tokens_are_equal_with_the_option_and_differ_without_it(measured):
    head, *rows = share_table(latest(measured[1])[1])
    assert head[:4] == ["sampler", "temperature", "batch", "order"] and len(head) == 5
    assert [row[0] for row in rows] == [f"`{name}`" for name in SETTINGS]
    found = [counts(row[4]) for row in rows]
    assert all(with_option == [6, 6] for with_option, _ in found)
    # the control: near ties fall otherwise in passes of another shape
    assert any(same < compared for _, (same, compared) in found)


def test_a_second_call_adds_nothing_and_a_killed_one_goes_on(measured):
    call, out = measured
    whole = out.read_bytes()
    parity.main(call)
    assert out.read_bytes() == whole
    cut = out.with_name("cut.jsonl")
    cut.write_bytes(whole[: len(whole) // 2])  # in the middle of a line
    parity.main([str(cut) if x == str(out) else x for x in call])
    made = {json.dumps(what) for what, _ in latest(out)[1]}
    assert {json.dumps(what) for what, _ in latest(cut)[1]} == made


def test_costs_are_measured_for_every_sampler_and_batch(measured, capsys):
    head, *rows = cost_table(latest(measured[1])[1])
    assert head[3:] == ["batch 1", "batch 4", "batch 7"]
    # without drafter_invariant, which needs a draft model
    assert [row[2] for row in rows] == [f"`{REFERENCE}`"]
    parity.main(["table", str(measured[1])])
    assert "| `autoregressive` | 0 | 4 | as given | 6 of 6 / " in capsys.readouterr().out


@pytest.mark.parametrize("modality", parity.COUNTS)
def test_no_sampler_of_same_tokens_is_left_out(modality):
    pipe = gen.load(modality)
    settings = Subject(modality, ()).settings(pipe, full=True)
    named = {setting.sampler.split()[0] for setting in settings}
    for name in (*registry.table("sampler"), *registry.table("preset")):
        if parity.serves(pipe, name, None):
            assert resolve_sampler(name)[0].guarantee != "same_tokens" or name in named
    assert {s.batch for s in settings} == {1, 3, 8} and {s.reversed for s in settings} == {0, 1}


def what(setting: Setting, items: list[int], invariant: bool) -> dict:
    told = {"subject": "it", "dtype": "float16", "most": None}
    return {**told, **vars(setting), "invariant": invariant, "items": items}


def test_the_table_counts_the_items_whose_tokens_are_those_of_the_reference():
    tree = Setting("tree", 2, True)
    found = [
        (what(tree.expected, [0], True), {"tokens": ["a"]}),
        (what(tree.expected, [1], True), {"tokens": ["b"]}),
        (what(tree, [1, 0], True), {"tokens": ["b", "a"]}),
        (what(tree.expected, [0], False), {"tokens": ["a"]}),
        (what(tree, [1, 0], False), {"tokens": ["b", "c"]}),  # 1 has nothing to be compared with
    ]
    _, *rows = share_table(found)
    assert rows == [["`tree`", "usual", "2", "reversed", "2 of 2 / 0 of 1"]]
    assert tree.expected == Setting(REFERENCE)


def test_a_cost_is_the_median_of_ratios_with_its_middle_half():
    told = {"cost": True, "subject": "it", "dtype": "float16", "sampler": "one", "batch": 3}
    took = [(2.0, 1.0), (3.0, 1.0), (1.0, 1.0), (8.0, 2.0), (4.0, 4.0)]
    found = [
        (
            {**told, "repeat": n},
            {
                "with": {"cpu_seconds": a, "passes": 2},
                "without": {"cpu_seconds": b, "passes": 2},
            },
        )
        for n, (a, b) in enumerate(took)
    ]
    assert list(cost_table(found))[1:] == [["it", "float16", "`one`", "2.00 (1.00-3.00)"]]


def test_a_table_is_of_the_newest_setting(tmp_path):
    file = tmp_path / "found.jsonl"
    Records(file, {"source": "old"}).add({"items": [0]}, {"tokens": ["a"]})
    Records(file, {"source": "new"}).add({"items": [1]}, {"tokens": ["b"]})
    assert latest(file) == ({"source": "new"}, [({"items": [1]}, {"tokens": ["b"]})])
