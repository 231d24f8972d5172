"""Other implementations in the benchmark: the same tokens where the distribution leaves one choice,
the same distribution elsewhere, and forward passes that are counted."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from functools import partial

import masked_folders as made
import pytest
import torch
from tiny_amused import amused_folder

import gen
from gen.__main__ import main
from gen.bench.baselines import reference
from gen.bench.baselines.base import Calls, network, peers_of
from gen.bench.baselines.transformers import Legal, generated, settings
from gen.core.errors import GenError
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.adapters.language_models import CausalLM, MaskedLM

GREEDY = SamplingParams(temperature=0.0)
BLOCK = 8


@pytest.fixture(scope="module")
def pipes():
    """By name: unguided; with ends; with a constraint, ends and guidance."""
    return {name: gen.load(name, dtype="float64") for name in ("action", "text", "motion")}


def items_of(pipe, count: int = 1):
    return pipe.plan(pipe.modality.example_prompts(count, 0), 1, 0)


def peer(pipe, label: str, sampling: SamplingParams, group: str = "all"):
    return next(v for v in peers_of(group, pipe, asdict(sampling)) if v.label == label)


def ours(pipe, items, sampling: SamplingParams, sampler: str = "autoregressive"):
    return pipe.generate(items, sampler, asdict(sampling))


# --- the same tokens


@pytest.mark.parametrize(
    ("name", "sampling"),
    [("action", GREEDY), ("text", GREEDY), ("motion", replace(GREEDY, guidance_scale=1.5))],
)
@pytest.mark.parametrize(
    "label", ["generate (greedy)", "reference (autoregression)", "reference (Jacobi)"]
)
@pytest.mark.thinned(3)
def test_at_temperature_0_tokens_are_those_of_autoregression(pipes, name, sampling, label):
    pipe, other = pipes[name], replace(sampling, guidance_scale=4.0)
    items = items_of(pipe, 2)
    want = ours(pipe, items, sampling)
    found = peer(pipe, label, sampling).make(items)
    assert torch.equal(found.tokens, want.tokens) and [s.tokens for s in found.stats] == [
        s.tokens for s in want.stats
    ]
    assert [pipe.modality.check(m, i.prompt) for m, i in zip(found.media, items, strict=True)] == [
        pipe.modality.check(m, i.prompt) for m, i in zip(want.media, items, strict=True)
    ]
    if name == "motion":  # control: a distribution that differs gives others
        assert not torch.equal(peer(pipe, label, other).make(items).tokens, want.tokens)


def test_control_another_distribution_gives_generate_other_tokens(pipes):
    pipe = pipes["action"]
    items, want = items_of(pipe, 2), ours(pipes["action"], items_of(pipe, 2), GREEDY).tokens
    warm = peer(pipe, "generate (sampling)", SamplingParams(temperature=1.0)).make(items).tokens
    assert not torch.equal(warm, want) and not torch.equal(
        warm, ours(pipe, items, SamplingParams(temperature=1.0)).tokens
    )


@pytest.mark.parametrize("label", ["generate (assisted)", "generate (prompt lookup)"])
@pytest.mark.parametrize("name", ["action", "text"])
def test_drafts_of_generate_change_no_greedy_token(pipes, name, label):
    pipe = pipes[name]
    items = items_of(pipe)
    found = peer(pipe, label, GREEDY).make(items)
    want = ours(pipe, items, GREEDY)
    assert torch.equal(found.tokens, want.tokens) and found.stats[0].nfe <= want.stats[0].nfe
    assert (
        (found.stats[0].draft_nfe or 0) > 0
        if label.endswith("(assisted)")
        else found.stats[0].draft_nfe is None
    )


def test_drafts_of_generate_are_not_offered_under_guidance_where_they_break_the_distribution(pipes):
    pipe, sampling = pipes["action"], replace(GREEDY, guidance_scale=2.0)
    assert (
        peer(pipe, "generate (assisted)", sampling).missing == "not under guidance"
        and peer(pipe, "generate (assisted)", GREEDY).missing is None
    )
    net, draft = (network(pipe, "causal", CausalLM, draft=d) for d in (False, True))
    items = items_of(pipe)
    want = ours(pipe, items, sampling).tokens
    assert torch.equal(generated(pipe, net, items, sampling)[0], want)
    assert not torch.equal(generated(pipe, net, items, sampling, draft)[0], want)


def test_the_half_without_the_condition_stands_where_it_belongs(pipes):
    """Control: without the hook it is counted from zero again behind its cache."""
    pipe, sampling = pipes["motion"], replace(GREEDY, guidance_scale=2.0)
    net, items = network(pipe, "causal", CausalLM), items_of(pipe)
    want = ours(pipe, items, sampling).tokens
    bare = net.module.generate(**(said := settings(net, items, sampling)))[
        :, said["input_ids"].shape[1] :
    ]
    assert torch.equal(generated(pipe, net, items, sampling)[0], want) and not torch.equal(
        bare, want[:, : bare.shape[1]]
    )


# --- the same distribution


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        ("action", SamplingParams(temperature=3.0, top_p=0.95)),
        ("text", SamplingParams(top_k=5)),
        ("motion", SamplingParams(temperature=0.7, guidance_scale=1.5, top_k=50, min_p=0.02)),
    ],
)
def test_the_distribution_of_generate_is_the_samplers(pipes, name, sampling):
    pipe = pipes[name]
    net, items = network(pipe, "causal", CausalLM), items_of(pipe)

    def first(sampling: SamplingParams) -> torch.Tensor:
        said = {**settings(net, items, sampling), "max_new_tokens": 1}
        return (
            net.module.generate(**said, output_scores=True, return_dict_in_generate=True)
            .scores[0][0]
            .double()
            .softmax(-1)
        )

    condition, space = items[0].condition, net.space

    def logits(ids):
        return net.module(input_ids=torch.tensor([ids])).logits[0, -1].detach()

    history = torch.zeros(1, space.length, dtype=torch.long)
    legal = space.apply_constraint(space.legal[None, :1], history, history[:, :1])[0, 0]
    want = sampling(
        logits(net.binding.prompt(condition)),
        logits(net.binding.without(condition)) if sampling.guided else None,
        legal,
    ).exp()
    assert torch.allclose(first(sampling), want, atol=1e-5)
    assert not torch.allclose(
        first(replace(sampling, temperature=2 * sampling.temperature, min_p=0.0, top_k=0)),
        want,
        atol=1e-4,
    )  # control


def test_only_legal_ids_are_left(pipes):
    space = pipes["motion"].bound("motion-causal")[1].space
    processor = Legal(space, 5, torch.device("cpu"))
    whole = ours(pipes["motion"], items_of(pipes["motion"]), GREEDY).tokens
    narrower = []
    for place in (0, 1, 7, 40, 96):
        prompt = torch.cat([torch.zeros(1, 5, dtype=torch.long), whole[:, :place]], 1)
        left = ~processor(prompt, torch.zeros(1, space.vocab_size)).isneginf()
        assert torch.equal(
            left,
            space.apply_constraint(space.legal[None, [place]], whole, torch.tensor([[place]]))[
                :, 0
            ],
        ) and bool(left[0, whole[0, place]])
        narrower.append(int(left.sum()) < int(space.legal[place].sum()))
    assert (
        any(narrower) and len({int(row.sum()) for row in space.legal}) > 1
    )  # control: the rules take something away
    over = processor(
        torch.zeros(1, 5 + space.length, dtype=torch.long), torch.zeros(1, space.vocab_size)
    )
    assert bool((over == 0).all())  # behind the last place nothing is asked


class Table:
    """An item whose distribution is a table: given the id before, of three ids at three
    positions."""

    start, then = (
        torch.tensor([0.6, 0.3, 0.1]),
        torch.tensor([[0.1, 0.2, 0.7], [0.5, 0.25, 0.25], [0.05, 0.9, 0.05]]),
    )

    def __init__(self):
        self.space, self.calls = TokenSpace.codes((3,), 3, 3), 0
        self.legal = self.space.legal

    def after(self, tokens, drafts):
        self.calls += 1
        whole = tokens + drafts
        return torch.stack(
            [
                self.then[whole[n - 1]] if n else self.start
                for n in range(len(tokens), len(whole) + 1)
            ]
        )

    def over(self, tokens):
        return len(tokens) == 3


def far(loop, count: int = 1500) -> float:
    """The total variation between what a loop draws and the distribution."""
    a, b = Table.start, Table.then
    want = (a[:, None, None] * b[:, :, None] * b[None]).flatten()
    generator, seen = torch.Generator().manual_seed(0), torch.zeros(27)
    for _ in range(count):
        x, y, z = loop(Table(), generator)[0]
        seen[9 * x + 3 * y + z] += 1
    return float((seen / count - want).abs().sum() / 2)


def test_the_plain_loops_draw_from_the_distribution():
    assert far(reference.autoregression) < 0.06 and far(reference.jacobi) < 0.06

    def trusting(item, generator):
        """Control: keeps whatever was drafted."""
        tokens, drafts = [], [reference.draw(item.legal[n].double(), generator) for n in range(2)]
        p = item.after(tokens, drafts)
        return [*drafts, reference.draw(p[-1], generator)], []

    assert far(trusting) > 0.15


# --- calls are counted


def test_calls_are_those_of_the_network_and_the_hook_is_gone_afterwards(pipes):
    module = network(pipes["action"], "causal", CausalLM).module
    ids = torch.zeros(2, 5, dtype=torch.long)
    with Calls(module) as calls:
        for _ in range(3):
            module(input_ids=ids)
    module(input_ids=ids)
    assert (calls.n, calls.positions) == (3, 30)
    stats = calls.stats(12, 2)
    assert (stats.nfe, stats.tokens_computed, stats.mean_acceptance_length) == (3, 15, 4.0)
    assert not module._forward_hooks and not module._forward_pre_hooks


def test_the_calls_of_jacobi_are_its_rounds_and_fewer_than_tokens(pipes):
    pipe = pipes["action"]
    items = items_of(pipe, 2)
    plain, fast = (
        peer(pipe, f"reference ({name})", GREEDY).make(items).stats
        for name in ("autoregression", "Jacobi")
    )
    for a, b in zip(plain, fast, strict=True):
        assert b.nfe == sum(b.acceptance_histogram) < a.nfe == 32 and a.acceptance_histogram == []
        assert b.tokens_computed > a.tokens_computed == 39
    item, table = Table(), Table()
    reference.jacobi(item, torch.Generator().manual_seed(0), window=1)
    reference.autoregression(table, torch.Generator().manual_seed(0))
    assert item.calls == table.calls == 3  # control: a window of one place is plain autoregression


def test_guidance_costs_generate_two_calls_per_token_and_a_batched_loop_one(pipes):
    pipe, sampling = pipes["motion"], replace(GREEDY, guidance_scale=1.5)
    items = items_of(pipe)
    want = ours(pipe, items, sampling).stats[0]
    twice, once = (
        peer(pipe, label, sampling).make(items).stats[0]
        for label in ("generate (greedy)", "reference (autoregression)")
    )
    assert (twice.nfe, once.nfe) == (
        2 * want.nfe,
        want.nfe,
    ) and twice.tokens_computed == once.tokens_computed == want.tokens_computed


def test_the_masked_loop_fills_all_places_in_its_steps(pipes):
    pipe = pipes["action"]
    items = items_of(pipe, 2)
    found, want = (
        peer(pipe, "reference (MaskGIT)", SamplingParams(temperature=0.2)).make(items),
        ours(pipe, items, SamplingParams(temperature=0.2), "maskgit"),
    )
    space = network(pipe, "causal", CausalLM).space
    assert (
        [(s.nfe, s.tokens_computed) for s in found.stats]
        == [(s.nfe, s.tokens_computed) for s in want.stats]
        == [(12, 480)] * 2
    )
    assert bool(space.legal[torch.arange(space.length), found.tokens].all())
    assert all(
        pipe.modality.check(m, i.prompt).valid for m, i in zip(found.media, items, strict=True)
    )
    assert peer(pipes["text"], "reference (MaskGIT)", SamplingParams()).missing  # whose rows end
    fewer = reference.looped(
        pipe,
        network(pipe, "masked", MaskedLM),
        SamplingParams(),
        partial(reference.maskgit, steps=4, temperature=1.0),
        items,
    )
    assert [s.nfe for s in fewer[1]] == [4, 4] and bool(
        space.legal[torch.arange(space.length), fewer[0]].all()
    )  # control


# --- rows


def test_peers_are_rows_of_the_same_run_and_those_that_take_one_item_say_so(capsys):
    assert (
        main(
            [
                "bench",
                "action",
                "--samplers",
                "sjd",
                "--peers",
                "transformers,reference",
                "--quick",
                "--batch-sizes",
                "1,2",
                "--json",
            ]
        )
        == 0
    )
    report = json.loads(capsys.readouterr().out)
    rows = {(r["sampler"], r["batch_size"]): r for r in report["table"]}
    assert {
        label for (label, size), r in rows.items() if size == 2 and r["error"] == "batch 1 only"
    } == {
        "generate (assisted)",
        "generate (prompt lookup)",
        "reference (autoregression)",
        "reference (Jacobi)",
        "reference (MaskGIT)",
    }
    assert all(r["error"] is None for (_, size), r in rows.items() if size == 1)
    assert (
        rows["generate (greedy)", 1]["sampling"]["temperature"]
        == 0
        != rows["generate (sampling)", 1]["sampling"]["temperature"]
    )
    assert (
        rows["generate (greedy)", 2]["nfe"] == rows["autoregressive", 2]["nfe"] == 32
        and rows["generate (greedy)", 1]["fewer_passes"] == 1
    )
    assert [r["peer"] for r in report["table"]][:3] == [None, None, "transformers"]
    order = [r["sampler"] for r in report["runs"] if r["batch_size"] == 2]
    assert order[0] == "sjd" and order[-1] == "autoregressive"  # peers take part in the turns


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["action", "--peers", "transfomers"], "Did you mean 'transformers'"),
        (["action", "--peers", "diffusers"], "LLaDA2Pipeline: not for this model"),
        (
            [
                "image",
                "--model",
                "image-masked",
                "--peers",
                "transformers",
                "--samplers",
                "maskgit",
            ],
            "generate .greedy.: not for this model",
        ),
    ],
)
def test_what_cannot_run_is_one_error_if_it_was_named(capsys, argv, says):
    assert main(["bench", *argv, "--quick"]) == 2
    err = capsys.readouterr().err
    assert re.search(says, err) and err.count("\n") == 1


def test_all_peers_leave_rows_with_the_reason(pipes):
    found = {
        v.label: v.missing
        for v in peers_of("all", pipes["motion"], asdict(SamplingParams(guidance_scale=1.5)))
    }
    assert (
        found["LLaDA2Pipeline"] == found["AmusedPipeline"] == "not for this model"
        and found["generate (sampling)"] is None
    )
    assert found == {
        v.label: v.missing
        for v in peers_of(
            "reference,all", pipes["motion"], asdict(SamplingParams(guidance_scale=1.5))
        )
    }
    with pytest.raises(GenError, match="nothing can run"):
        peers_of("diffusers", pipes["motion"], {})
    assert all(v.missing for v in peers_of("diffusers", pipes["motion"], {}, several=True))


# --- diffusers


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    small = {
        **made.LLADA2,
        "num_hidden_layers": 2,
        "num_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "block_length": BLOCK,
    }
    root = tmp_path_factory.mktemp("published")
    return {
        "llada2": made.write(root / "llada2", small, made.llada2(small, seed=1, spread=2.0)),
        "amused": amused_folder(root / "amused"),
    }


def test_the_pipeline_of_llada2_gives_the_presets_tokens_on_the_same_network(folders):
    pipe = gen.load("text", model=folders["llada2"], dtype="float64", max_new_tokens=16)
    items = pipe.plan(["ba de gi ko", "lu ma ne pi be di ko bu du do ba gi"])
    found = peer(pipe, "LLaDA2Pipeline", SamplingParams()).make(items)

    def run(**params):
        return pipe.generate(items, {"name": "llada2", "block_length": BLOCK, **params}, {}).tokens

    assert torch.equal(found.tokens, run()) and not torch.equal(found.tokens, run(threshold=0.1))
    assert (
        all(s.nfe >= 3 for s in found.stats) and len({s.tokens_computed for s in found.stats}) == 2
    )
    assert "guidance" in peer(pipe, "LLaDA2Pipeline", SamplingParams(guidance_scale=2.0)).missing
    assert (
        peer(pipe, "AmusedPipeline", SamplingParams()).missing
        == peer(pipe, "generate (greedy)", SamplingParams()).missing
        == "not for this model"
    )


def test_the_pipeline_of_amused_makes_images_in_the_presets_calls(folders):
    pipe = gen.load("image", model=folders["amused"])
    items = pipe.plan(["a cat", "two dogs"])
    row = peer(pipe, "AmusedPipeline", SamplingParams(guidance_scale=10.0))
    found, again = row.make(items), row.make(items)
    assert (
        torch.equal(found.tokens, again.tokens)
        and found.tokens.shape == (2, 16)
        and int(found.tokens.max()) < 64
    )
    assert (
        [s.nfe for s in found.stats]
        == [s.nfe for s in pipe.generate(items, "amused").stats]
        == [12, 12]
    )
    assert found.media[0].size == pipe.generate(items, "amused").media[0].size
    assert not torch.equal(
        found.tokens, row.make(pipe.plan(["a cat", "two dogs"], seed=1)).tokens
    )  # control: other seeds
    assert "temperature" in peer(pipe, "AmusedPipeline", SamplingParams(temperature=0.5)).missing
