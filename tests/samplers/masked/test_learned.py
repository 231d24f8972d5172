"""The trained filter of Learn2PD: what it reads, learns and commits, and where it is found; and the
presets ``learn2pd`` and ``window_diffusion``.

What can be learned is shown on the oracle of text tasks, a masked model whose distribution is that
of the right answers: one place per call is always right."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace

import cache_bench as caches
import numpy as np
import pytest
import torch
from masked_bench import MASK, MODEL, POSITIONS, ROWS, SPACE, canvas, check_given, check_rows
from masked_steps import always, changed
from quick_models import quickly_trained
from selector_states import SUREST, states
from tabular import masked_target

import gen
from gen.core.errors import GenError
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.modalities.text.oracle import Oracle
from gen.modalities.text.parallel import accuracy
from gen.modalities.text.tasks import random_task
from gen.models.load.locate import ZOO
from gen.recipes.text import filter as recipe
from gen.recipes.text import recipe as text_recipe
from gen.recipes.text.filter import FilterPlan, Traces, separation, trained, watched
from gen.samplers.masked.methods.learn2pd import Learned, PositionFilter, features

R = 2
OPS = ("shuffle", "replace", "remove", "reverse", "sort")
WANTED = (canvas() == MASK).sum(1).tolist()


def oracle_traces(seed: int, n: int = 10) -> Traces:
    tasks = tasks_of(seed, n)
    oracle = Oracle(tasks)
    sampler, sampling = resolve_sampler({"name": "llada", "steps": oracle.length})
    return watched(oracle.target(tasks, sampling), CounterRNG(range(len(tasks))), sampler, R)


def tasks_of(seed: int, n: int) -> list:
    rng = np.random.default_rng(seed)
    return [random_task(rng, [op], [4]) for op in OPS for _ in range(n)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """``fine``: a filter that has learned. ``shuffled``: from labels that are other places' labels.
    ``raw``: one that was never trained."""
    at, seen = tmp_path_factory.mktemp("filters"), oracle_traces(0)
    plan = FilterPlan(steps=300, batch=256)
    other = torch.randperm(len(seen.final), generator=torch.Generator().manual_seed(0))
    for name, labels in (("fine", seen.final), ("shuffled", seen.final[other])):
        trained(
            Traces(seen.x, seen.c, labels), R, plan, at / f"{name}-work", log=lambda line: None
        ).save_pretrained(at / name)
    torch.manual_seed(5)
    raw = PositionFilter(R, 16)
    with torch.no_grad():
        for weight in raw.parameters():
            weight.mul_(6)
    raw.save_pretrained(at / "raw")
    return at


def learned(folder, threshold: float = 0.5, **params):
    base = {
        "name": "masked_iterative",
        "selector": "learned",
        "filter": str(folder),
        "filter_threshold": threshold,
        **SUREST,
    }
    return resolve_sampler(base | params)[0]


def decode(sampler, rows=range(ROWS), space=SPACE, **kwargs):
    target = masked_target(MODEL, space, SamplingParams(), [r % 3 for r in rows])
    return sampler(
        target, CounterRNG([31 * r + 7 for r in rows]), canvas=canvas()[list(rows)], **kwargs
    )


# --- what it reads


def plain(step, b: int, i: int) -> list[float]:
    """The features of one place, from their description."""
    opened, masked = step.open[b].tolist(), step.masked[b].tolist()
    c = [math.exp(x) for x in step.logp[b].tolist()]

    def of(n: int) -> list[float]:
        if not 0 <= n < len(c) or not opened[n]:
            return [0.0] * 6
        if not masked[n]:
            return [1.0] * 6
        p = sorted(step.logprobs[b, n].exp().tolist(), reverse=True)
        bits = -sum(x * math.log(x) for x in p if x > 0)
        return [
            1.0,
            0.0,
            c[n],
            max(0.0, -math.log10(1 - c[n] + 1e-5) / 5),
            math.exp(-bits),
            p[0] - p[1],
        ]

    around = [of(n) for n in range(i - R, i + R + 1)]
    block = [n for n in range(len(c)) if opened[n]]
    empty = [c[n] for n in block if masked[n]]
    whole = [1 - len(empty) / len(block), sum(empty) / len(empty), min(empty), max(empty)]
    return [values[channel] for channel in range(6) for values in around] + whole


def check_features(read) -> int:
    compared = 0
    for seed in range(2):
        for step in states(seed, learned("x"), steps=2):
            x = read(step, R)
            for b, i in step.eligible.nonzero().tolist():
                assert x[b, i].tolist() == pytest.approx(plain(step, b, i), abs=1e-9)
                compared += 1
    return compared


def beyond_the_block(step, radius):
    """As if the block were all there is."""
    return features(changed(step, open=torch.ones_like(step.open)), radius)


def test_a_filter_reads_what_its_module_says():
    assert check_features(features) > 100
    with pytest.raises(AssertionError):
        check_features(beyond_the_block)
    with pytest.raises(AssertionError):
        check_features(lambda step, radius: features(step, radius).flip(0))  # the row of another


def test_only_the_block_at_work_is_read():
    for step in states(1, learned("x"), steps=2):
        x = features(step, R)
        assert x.min() >= 0 and x.max() <= 1
        out = ~step.open
        sampling, masked, logp = (
            step.logprobs.clone(),
            step.masked ^ out,
            torch.where(out, -0.1, step.logp),
        )
        sampling[out] = sampling.flip(-1)[out]
        other = changed(
            step, logprobs=sampling, raw_logprobs=always(sampling), masked=masked, logp=logp
        )
        assert torch.equal(features(other, R)[step.eligible], x[step.eligible])
        inside = changed(step, logp=step.logp - 0.5)  # the control: in the block it is
        assert not torch.equal(features(inside, R)[step.eligible], x[step.eligible])


# --- what it learns


def test_traces_say_whether_a_proposal_is_what_stands_there_in_the_end():
    sampler = resolve_sampler({"name": "llada", "steps": POSITIONS})[0]

    def target():
        return masked_target(MODEL, SPACE, SamplingParams(), [r % 3 for r in range(3)])

    seen = watched(target(), CounterRNG(range(3)), sampler, R)
    out, final, c = sampler(target(), CounterRNG(range(3)), trace=True), [], []
    states_ = torch.full((3, POSITIONS), MASK)
    for step in range(POSITIONS):  # one place each
        sampling = target().predict(states_).logprobs
        sure, ids = sampling.max(-1)
        empty = states_ == MASK
        final, c = [*final, (ids == out.tokens)[empty]], [*c, sure.exp()[empty]]
        for row in range(3):
            for position, token in out.traces[row][step].committed.items():
                states_[row, position] = token
    assert (
        torch.equal(seen.final, torch.cat(final))
        and torch.allclose(seen.c, torch.cat(c))
        and seen.x.shape == (3 * 210, 6 * 5 + 4)
    )
    assert 0.05 < seen.final.double().mean() < 0.95


def test_a_filter_learns_which_proposals_are_final_better_than_their_confidence_says(folders):
    unseen = oracle_traces(1, 8)

    def check(name: str) -> None:
        found = separation(PositionFilter.from_pretrained(folders / name), unseen)
        assert found["nats"] < 0.6 * found["nats_blind"]
        precision, recall = found["judged"]["filter, 0.9"]
        _, by_confidence = found["judged"]["confidence, 0.9"]
        assert precision > 0.97 and recall > by_confidence

    check("fine")
    for control in ("shuffled", "raw"):
        with pytest.raises(AssertionError):
            check(control)


def test_decoding_with_it_is_right_in_fewer_calls(folders):
    tasks = tasks_of(2, 4)

    def spec(name, t):
        return {
            "name": "learn2pd",
            "filter": str(folders / name),
            "filter_threshold": t,
        }

    one, calls = accuracy({"name": "llada", "steps": 4}, tasks, [0])
    assert (one, calls) == (1.0, 4.0)

    def check(name: str) -> None:
        found = [accuracy(spec(name, t), tasks, [0]) for t in (0.5, 0.8, 0.9, 0.96)]
        assert any(right == 1 and n < 0.6 * calls for right, n in found)

    check("fine")
    with pytest.raises(AssertionError):
        check("shuffled")


# --- what it commits


@pytest.mark.parametrize("blocks", ["whole", "fixed"])
def test_a_threshold_above_one_means_one_place_per_call_and_zero_one_call_per_block(
    folders, blocks
):
    params = {"blocks": blocks, "block_length": 7}
    one = decode(
        resolve_sampler({"name": "llada", "steps": POSITIONS, **params})[0], [0, 1, 5], trace=True
    )
    never = decode(learned(folders / "raw", 1.01, **params), [0, 1, 5], trace=True)
    assert torch.equal(never.tokens, one.tokens) and [s.nfe for s in never.stats] == [
        WANTED[r] for r in (0, 1, 5)
    ]
    assert [[s.committed for s in t] for t in never.traces] == [
        [s.committed for s in t] for t in one.traces
    ]
    always = decode(learned(folders / "raw", 0, **params))
    length = 7 if blocks == "fixed" else POSITIONS
    assert [s.nfe for s in always.stats] == [
        len({n // length for n in range(POSITIONS) if row[n]}) for row in canvas() == MASK
    ]
    between = [
        s.nfe for s in decode(learned(folders / "raw", 0.5, **params), [0, 1, 5]).stats
    ]  # the control: the filter is asked
    assert [s.nfe for s in never.stats] != between != [always.stats[r].nfe for r in (0, 1, 5)]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"blocks": "fixed", "block_length": 6},
        {"confidence_on": "shaped", "proposer": "categorical"},
    ],
)
def test_a_row_is_decoded_the_same_in_any_batch(folders, params, monkeypatch):
    check_rows(learned(folders / "raw", **params))
    check_given(learned(folders / "raw", **params))
    own = PositionFilter.probability
    monkeypatch.setattr(
        PositionFilter,
        "probability",
        lambda self, step: own(self, step) - own(self, step)[step.eligible].mean() + 0.5,
    )
    with pytest.raises(AssertionError):  # the control: judged by what others are like
        check_rows(learned(folders / "raw", **params))


def test_the_highest_score_is_always_selected_and_nothing_else_below_the_threshold(
    folders,
):
    beside = alone = 0
    for seed in range(4):
        sampler = learned(folders / "raw", 0.6)
        select = Learned(sampler)
        for step in states(seed, sampler, steps=2):
            chosen, q = (
                select(step),
                PositionFilter.from_pretrained(folders / "raw", dtype=torch.float64).probability(
                    step
                ),
            )
            assert not bool((chosen & ~step.eligible).any()) and bool(
                (q.isfinite() == step.eligible).all()
            )
            for b in range(len(step.rows)):
                positions = [i for i, e in enumerate(step.eligible[b].tolist()) if e]
                if not positions:
                    continue
                best = max(positions, key=lambda i: (float(step.score[b, i]), -i))
                expected = {best} | {i for i in positions if q[b, i] >= 0.6}
                assert set(chosen[b].nonzero()[:, 0].tolist()) == expected
                beside, alone = beside + (len(expected) > 1), alone + (q[b, best] < 0.6)
    assert beside > 10 and alone > 10


# --- where it is found


def test_it_is_read_once_per_call_of_the_sampler(folders, monkeypatch):
    read, own = [], PositionFilter.from_pretrained.__func__
    monkeypatch.setattr(
        PositionFilter,
        "from_pretrained",
        classmethod(lambda cls, *args: read.append(args) or own(cls, *args)),
    )
    sampler = learned(folders / "raw", 1.01)
    assert max(s.nfe for s in decode(sampler).stats) == POSITIONS and len(read) == 1
    shutil.copytree(folders / "fine", folders / "moved")
    moved = learned(folders / "moved", 0.5)
    first = decode(moved)
    shutil.copytree(
        folders / "raw", folders / "moved", dirs_exist_ok=True
    )  # nothing is remembered between calls
    assert not torch.equal(first.tokens, decode(moved).tokens) and len(read) == 3


def test_a_folder_holds_all_of_a_filter(folders, tmp_path):
    fine = PositionFilter.from_pretrained(folders / "fine")
    fine.save_pretrained(tmp_path / "again")
    again = PositionFilter.from_pretrained(tmp_path / "again", dtype=torch.float64)
    x = torch.rand(50, 34, dtype=torch.float64)
    assert (
        torch.allclose(again(x).float(), fine(x.float()), atol=1e-4)
        and not again.layers[0].weight.requires_grad
    )
    assert sorted(p.name for p in (tmp_path / "again").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


def test_an_embedded_filter_goes_by_its_name(folders, tmp_path, monkeypatch):
    shutil.copytree(folders / "fine", tmp_path / "zoo" / "shape-filter")
    shutil.copytree(ZOO / "text-words", tmp_path / "zoo" / "text-words")
    monkeypatch.setattr("gen.models.load.locate.ZOO", tmp_path / "zoo")
    assert torch.equal(
        decode(learned("shape-filter")).tokens, decode(learned(folders / "fine")).tokens
    )
    for name, said in {
        "shape-filtre": (
            "unknown filter 'shape-filtre' in the zoo; it is not a folder .* Did you mean"
            " 'shape-filter'. Known: shape-filter$"
        ),
        "": (
            "sampler.filter is '', where selector is 'learned'; expected a folder with a trained"
            " filter, or one of shape-filter$"
        ),
    }.items():
        with pytest.raises(GenError, match=said):
            decode(learned(name))
    with pytest.raises(
        GenError,
        match=(
            "the config of filter text-words is .*; expected model_type 'position_filter', radius"
            " and hidden"
        ),
    ):
        decode(learned("text-words"))


def test_what_is_no_filter_is_refused_in_one_line(folders, tmp_path):
    def broken(name: str, change) -> str:
        shutil.copytree(folders / "raw", tmp_path / name)
        change(tmp_path / name)
        return str(tmp_path / name)

    usual = {"model_type": "position_filter", "radius": R, "hidden": 16}

    def config(**values):
        return lambda at: (at / "config.json").write_text(json.dumps(usual | values))

    for folder, said in {
        str(tmp_path / "nowhere"): "unknown filter",
        broken(
            "weightless", lambda at: (at / "model.safetensors").unlink()
        ): "the weights of filter .* cannot be read",
        broken(
            "cut", lambda at: (at / "model.safetensors").write_bytes(b"12345678")
        ): "the weights of filter .* cannot be read",
        broken("wider", config(hidden=17)): "the weights of filter .* cannot be read",
        broken("negative", config(radius=-1)): "expected model_type 'position_filter'",
        broken("other", config(model_type="llama")): "expected model_type 'position_filter'",
    }.items():
        with pytest.raises(GenError, match=said) as error:
            decode(learned(folder))
        assert "\n" not in str(error.value)
    decode(learned(broken("whole", config())))  # the control


@pytest.mark.parametrize(
    ("param", "value", "said"),
    [
        ("filter", 3, "sampler.filter is 3; expected a folder"),
        (
            "filter_threshold",
            -0.1,
            "sampler.filter_threshold is -0.1; expected a number of at least 0",
        ),
    ],
)
def test_parameters_are_checked(param, value, said):
    with pytest.raises(GenError, match=said):
        resolve_sampler({"name": "learn2pd", param: value})


# --- the presets


def test_learn2pd_is_for_rows_that_end(folders):
    sampler, _ = resolve_sampler(
        {"name": "learn2pd", "filter": str(folders / "raw"), "threshold": 0.4}
    )
    assert (sampler.filter_threshold, sampler.conf_threshold) == (0.4, 0.9) and resolve_sampler(
        "learn2pd"
    )[0].filter == "text-filter"
    with pytest.raises(
        GenError,
        match="sampler.stop is 'end', which needs an id that ends a row .*; this model has none",
    ):
        decode(sampler)
    ending, filled = (
        replace(SPACE, eos_token_id=2),
        replace(sampler, stop="filled", filter_threshold=1.01, order="raster"),
    )
    stops = replace(filled, stop="end")
    whole, short = (decode(s, [0, 5], ending) for s in (filled, stops))
    for a, b in zip(whole.tokens, short.tokens, strict=True):
        assert torch.equal(ending.before_end(a), ending.before_end(b))
    assert (
        all(a.nfe <= b.nfe for a, b in zip(short.stats, whole.stats, strict=True))
        and short.stats[0].nfe < whole.stats[0].nfe
    )


def windowed(net, sampling="plain", **params):
    sampler, _ = resolve_sampler({"name": "window_diffusion", **params})
    return sampler(
        caches.target(net, caches.SAMPLING_CASES[sampling]),
        CounterRNG([31 * r + 7 for r in range(caches.ROWS)]),
        canvas=caches.canvas(),
    )


@pytest.mark.parametrize("name", ["llama", "grid_shifted"])
def test_a_window_over_all_places_that_is_refreshed_every_call_is_no_cache(name):
    net = caches.model(name)
    none = windowed(net, cache="none")
    found = windowed(net, cache_refresh=1)
    assert torch.equal(found.tokens, none.tokens) and [s.nfe for s in found.stats] == [
        s.nfe for s in none.stats
    ]
    assert not torch.equal(
        windowed(net, cache_refresh=1, cache_window=2).tokens, none.tokens
    )  # the control: what is far is missing
    usual = windowed(net)
    assert all(
        a.tokens_computed < b.tokens_computed
        for a, b in zip(usual.stats, none.stats, strict=True)
        if b.nfe > 1
    )
    assert [s.nfe for s in usual.stats] == [s.nfe for s in none.stats]


def test_as_published_it_is_exact_for_one_layer_if_the_window_covers_the_canvas():
    """There, keys say nothing about other places, so that what the window keeps is never stale."""
    net = caches.model("llama", layers=1)
    assert torch.equal(windowed(net).tokens, windowed(net, cache="none").tokens)
    assert not torch.equal(windowed(net, cache_window=2).tokens, windowed(net, cache="none").tokens)


# --- the recipe


def test_the_recipe_makes_a_filter_that_learn2pd_takes(tmp_path, monkeypatch):
    work = quickly_trained(text_recipe, tmp_path)
    assert (
        work / "zoo" / "text-filter" / "model.safetensors"
    ).is_file()  # the recipe of text ends with these stages
    recipe.main(["all", "--work", str(work), "--quick"])
    card = (work / "zoo" / "text-filter" / "README.md").read_text()
    assert (
        "| filter, 0.96 |" in card
        and "| learn2pd, 0.96 |" in card
        and "| llada, one position per pass |" in card
    )
    pipe = gen.load("text", work / "zoo" / "text-masked")
    spec = {
        "name": "learn2pd",
        "filter": str(work / "zoo" / "text-filter"),
        "filter_threshold": 0.5,
    }
    out = pipe(["sort 3 1 2 =", "copy 1 2"], spec)
    assert pipe("copy 1 2", spec).media == out.media[1:] and all(
        1 <= s.nfe <= 16 for s in out.stats
    )
    with pytest.raises(GenError, match="unknown model"):
        recipe.main(["traces", "--work", str(tmp_path / "empty"), "--quick"])
