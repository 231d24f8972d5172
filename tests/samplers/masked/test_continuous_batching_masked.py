"""A row of a masked model that is done becomes the next item, and nobody's tokens, calls or traces
change by it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import cache_bench as caches
import numpy as np
import pytest
import torch
from closed_form import LeaningMasked, LinearMasked
from continuous import LinearHead
from tabular import TabularCausal, TabularMasked, TokenBuffer
from torch import Tensor

from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.core.stats import SampleOutput
from gen.core.token_space import TokenSpace
from gen.models.targets.block import BlockTarget
from gen.models.targets.cached_masked import CachedMaskedTarget
from gen.models.targets.causal import CausalTarget
from gen.models.targets.latent import MaskedLatentTarget
from gen.models.targets.masked import MaskedTarget
from gen.pipeline.lengths import draw_lengths
from gen.pipeline.pipeline import TURNS, load
from gen.samplers.engine.rows import BatchSlots, RowStore, SlotChange
from gen.samplers.masked.chains import chain as marginal_orders
from gen.testing.specs import SPECS, sampling_for

GRID, T, V, MASK, N = (2, 5), 10, 12, 11, 9  # ids 0-7 are tokens, 8-10 words of conditions
FULL = (1, 4, 8)  # items with nothing to fill: one in the first batch, one that waits, and the last
BLOCKS = {
    "name": "masked_iterative",
    "blocks": "fixed",
    "block_length": 4,
    "order": "raster",
    "schedule": "linear",
    "steps": 8,
    "cache_before": 1,
    "cache_after": 1,
    "cache_radius": 1,
    "cache_warmup": 2,
    "cache_active": 2,
    "cache_window": 5,
}
MORE = {f"cache-{name}": BLOCKS | {"cache": name} for name in registry.table("cache_policy")}
MORE["stop-end"] = {
    "name": "masked_iterative",
    "stop": "end",
    "selector": "threshold",
    "conf_threshold": 0.5,
}
MORE["judge"] = {"name": "guided_diffusion", "judge_top_k": 3, "commit_correction": True}
JOBS = {
    name: spec
    for name, spec in (SPECS | MORE).items()
    if resolve_sampler(spec)[0].protocol == "masked"
}
# those that remember, count, take back or stop; the rest looks at one step alone
TELLING = {
    "masked_iterative",
    "exact_speculative",
    "freedave",
    "adablock",
    "ccd",
    "credit",
    "dcd",
    "dream",
    "eb",
    "klass",
    "llada2",
    "maskgit_remask",
    "prophet",
    "r2",
    "remdm",
    "rcr",
    "window_diffusion",
    "wino",
    "remask-edit",
    "remask-secondary",
    *MORE,
}
MARKED = [pytest.param(name, marks=[] if name in TELLING else [pytest.mark.slow]) for name in JOBS]


class Buffer(TokenBuffer):
    """One that takes calls about some of its rows."""

    some: Tensor | None = None

    def select(self, rows: Tensor | None) -> None:
        self.some = rows

    def write(self, tokens, positions):
        if self.some is None:
            return super().write(tokens, positions)
        self.ids = self.ids.clone()
        self.ids[self.some[:, None], positions] = tokens
        return self.ids[self.some]


class Judge(TabularCausal):
    def new_cache(self, slots: int) -> Buffer:
        return Buffer(slots)


def space(end: bool = False) -> TokenSpace:
    legal = torch.zeros(T, V, dtype=torch.bool)
    legal[:, :8] = True
    return TokenSpace(
        GRID,
        V,
        legal,
        MASK,
        eos_token_id=7 if end else None,
        delimiters=(2, 5),
        rarity=torch.arange(1, V + 1) / 2,
    )


def canvas() -> Tensor:
    out = torch.full((N, T), MASK)
    known = torch.arange(T) * 3 % 7
    out[2, ::3], out[3, :5], out[6, 7:] = known[::3], known[:5], known[7:]
    out[list(FULL)] = known
    return out


def prompts(items: list[int], base: int = 8) -> Tensor:
    return torch.tensor([[base + i % 3, 8 + i // 3 % 3] for i in items])


def decode(
    name: str, items: list[int] | None = None, at_most: int | None = None, **more
) -> tuple[SampleOutput, list[int]]:
    """All items, or some, and how many rows every call of the model was about."""
    items = list(range(N)) if items is None else items
    sampler, sampling = resolve_sampler(JOBS[name], sampling_for(name, JOBS[name]))
    of = space(end=name == "stop-end")

    def make(kind, model):
        return kind(
            model, prompts(items), of, sampling, prompts(items, 9) - 1 if sampling.guided else None
        )

    target = make(MaskedTarget, LeaningMasked(V, 1, spread=2.0))
    draft = make(CausalTarget, Judge(V, 5, low=0.0, spread=2.0)) if sampler.drafted else None
    sizes = counting(target)
    for part in (target, draft):
        if part is not None and at_most:
            assert part.replaces
            part.at_most(at_most)
    return (
        sampler(
            target,
            CounterRNG([31 * i + 7 for i in items]),
            draft=draft,
            canvas=canvas()[items],
            trace=True,
            **more,
        ),
        sizes,
    )


def counting(target) -> list[int]:
    """Notes the rows of every call from now on."""
    sizes: list[int] = []
    for name in ("forward", "part"):
        if call := getattr(target.model, name, None):
            setattr(
                target.model,
                name,
                lambda ids, *rest, call=call, **more: (
                    sizes.append(len(ids) // target.branches),
                    call(ids, *rest, **more),
                )[1],
            )
    return sizes


@cache
def alone(name: str) -> list[SampleOutput]:
    return [decode(name, [i])[0] for i in range(N)]


def same(name: str, out: SampleOutput) -> bool:
    def said(out):
        return [
            (s.nfe, s.tokens, s.tokens_computed, s.acceptance_histogram, s.draft_nfe)
            for s in out.stats
        ]

    return (
        torch.equal(out.tokens, torch.cat([x.tokens for x in alone(name)]))
        and said(out) == [x for one in alone(name) for x in said(one)]
        and out.traces == [x for one in alone(name) for x in one.traces]
    )


# --- an item is what it is alone


@pytest.mark.parametrize("name", MARKED)
@pytest.mark.thinned(9)
def test_tokens_calls_and_traces_are_those_of_each_item_alone(name):
    out, sizes = decode(name, at_most=2)
    assert same(name, out)
    many = "wino" in name or name in (
        "exact_speculative",
        "freedave",
        "assd",
    )  # several canvases per row in one call
    assert many or max(sizes) == 2


@pytest.mark.slow
@pytest.mark.parametrize("at_most", [1, 3, N - 1])
@pytest.mark.parametrize("name", JOBS)
def test_so_they_are_for_every_size(name, at_most):
    assert same(name, decode(name, at_most=at_most)[0])


@pytest.mark.parametrize("at_most", [1, 3])
@pytest.mark.parametrize(
    "name",
    [
        "klass",
        "llada2",
        "wino",
        "credit",
        "maskgit_remask",
        "stop-end",
        "judge",
        "assd",
        "cache-window",
    ],
)
@pytest.mark.thinned(3)
def test_so_they_are_for_one_and_for_three_at_a_time(name, at_most):
    assert same(name, decode(name, at_most=at_most)[0])


@pytest.mark.parametrize("sampling", ["guided", pytest.param("plain", marks=pytest.mark.slow)])
@pytest.mark.parametrize("policy", registry.table("cache_policy"))
@pytest.mark.thinned(3)
def test_networks_with_caches_and_conditions_of_different_lengths(policy, sampling):
    """``test_masked_cache``'s: the canvases are uneven."""

    def make(rows=None):
        return caches.target(
            caches.model("llama"), caches.SAMPLING_CASES[sampling], rows, ragged=True
        )

    few = make()
    few.at_most(2)
    out = caches.decode(few, cache=policy)
    for row in range(caches.ROWS):
        one = caches.decode(make([row]), [row], cache=policy)
        assert (
            torch.equal(out.tokens[row], one.tokens[0]) and out.stats[row].nfe == one.stats[0].nfe
        )


@pytest.mark.parametrize("scale", [1.0, 2.0])
@pytest.mark.parametrize(
    "spec", ["mar", {"name": "masked_iterative", "order": "halton", "steps": 3}], ids=str
)
@pytest.mark.thinned(2)
def test_latents_are_those_of_each_item_alone(spec, scale):
    sampler, sampling = resolve_sampler(spec, {"temperature": 0.9, "guidance_scale": scale})
    of, start = TokenSpace.latents(GRID, 2), torch.full((N, T, 2), torch.nan, dtype=torch.float64)
    start[2, ::3], start[3, :5], start[list(FULL)] = 0.5, -1.0, 0.25

    def made(items: list[int], at_most: int = N) -> SampleOutput:
        model = LinearMasked(LinearHead(2, (0.9, 0.6)), memory=0.1)
        target = MaskedLatentTarget(
            model,
            prompts(items) - 7,
            of,
            sampling,
            prompts(items, 9) - 7 if sampling.guided else None,
        )
        target.at_most(at_most)
        return sampler(target, CounterRNG([31 * i + 7 for i in items]), canvas=start[items])

    ones = [made([i]) for i in range(N)]
    for at_most in (1, 2, 3):
        out = made(list(range(N)), at_most)
        assert torch.allclose(out.tokens, torch.cat([x.tokens for x in ones]), rtol=0, atol=1e-12)
        assert [s.nfe for s in out.stats] == [x.stats[0].nfe for x in ones]


# --- and a batch stays full


@pytest.mark.parametrize("name", ["maskgit", "klass", "eb", "ccd", "stop-end", "judge"])
@pytest.mark.thinned(3)
def test_uneven_rows_take_fewer_calls_of_the_model_than_batch_by_batch(name):
    """Also than batches of items that have something to fill."""
    (out, sizes), nfe = (
        decode(name, at_most=2),
        [x.stats[0].nfe for i, x in enumerate(alone(name)) if i not in FULL],
    )
    assert len(sizes) < sum(max(nfe[i : i + 2]) for i in range(0, len(nfe), 2))
    assert sum(sizes) == sum(nfe) == sum(s.nfe for s in out.stats)
    assert sizes == sorted(sizes, reverse=True), (
        "a batch that is not full is one for which nobody waits"
    )


@pytest.mark.parametrize("name", ["fast_dllm", "maskgit_remask", "assd", "judge"])
def test_the_callback_speaks_of_all_items(name):
    said = []
    out, _sizes = decode(
        name,
        at_most=2,
        callback=lambda info: said.append(
            info | {"tokens": info["tokens"].clone(), "known": info["known"].clone()}
        ),
    )
    assert [x["step"] for x in said] == list(range(1, len(said) + 1)) and {
        x["total"] for x in said
    } == {N * T}
    given = canvas() != MASK
    for info in said:
        known, filled = info["known"], info["tokens"] != MASK
        assert info["done"] == int(filled.sum()) and bool((known | ~given).all()), (
            "what is given is known"
        )
        assert torch.equal(info["tokens"][known], out.tokens[known]), (
            "what is known does not change"
        )
    assert not bool((said[0]["known"] & ~given)[3:].any()), "nothing is known of items that wait"
    assert said[-1]["done"] == N * T and bool(said[-1]["known"].all())


# --- what a row that begins anew remembers


def test_memory_gives_its_start_where_a_row_began_anew_until_it_is_set_again():
    memory, start = RowStore(), torch.full((3,), -1)
    second = SlotChange(fresh=np.array([False, True, False]))
    others = SlotChange(fresh=np.array([True, False, True]))
    assert torch.equal(memory.get("x", start), start) and memory.get("x") is None
    memory.update(x=torch.tensor([1, 2, 3]), y=torch.tensor([[1, 1], [2, 2], [3, 3]]))
    memory.follow(second)
    assert memory.get("x", start).tolist() == [1, -1, 3] and memory.get("y", start[:, None])[
        :, 0
    ].tolist() == [1, -1, 3]
    memory["x"] = torch.tensor([4, 5, 6])
    assert memory.get("x", start).tolist() == [4, 5, 6] and memory.get("y", start[:, None])[
        :, 0
    ].tolist() == [1, -1, 3]
    memory.follow(others)
    memory.follow(SlotChange(np.array([0, 1])))
    assert memory.get("x", start[:2]).tolist() == [-1, 5] and memory.get("y", start[:2, None])[
        :, 0
    ].tolist() == [-1, -1]


def test_nobody_sits_who_has_nothing_to_fill():
    class Rows:
        items, rows, device = 6, 2, torch.device("cpu")

        def __init__(self):
            self.seen = []

        def replace(self, rows, items):
            return self.seen.append((rows.tolist(), items.tolist()))

        def keep(self, rows):
            return self.seen.append(rows.tolist())

    target, follower = Rows(), Rows()
    unfinished = np.array([False, True, False, True, False, True])
    slots = BatchSlots(target, unfinished, [follower])
    assert slots.rows.tolist() == [3, 1] and target.seen == [([True, False], [3])]
    assert follower.seen == target.seen, "who follows does so from the start"
    assert slots.retire(np.array([False, False])) is None
    change = slots.retire(np.array([True, True]))
    assert slots.rows.tolist() == [5] == slots.items.tolist()
    assert change.source.tolist() == [0] and change.fresh.tolist() == [True]
    assert target.seen[-2:] == [[0], ([True], [5])] == follower.seen[-2:]
    slots.retire(np.array([True]))
    assert not len(slots.rows)


@pytest.mark.parametrize(
    "name", ["selector-klass-fixed", "credit", "selector-coherent-fixed", "remask-edit", "maskgit"]
)
def test_control_parts_that_remember_another_item_are_found(name, monkeypatch):
    assert same(name, decode(name, at_most=2)[0])
    follow = RowStore.follow
    monkeypatch.setattr(
        RowStore, "follow", lambda self, change: follow(self, SlotChange(change.source))
    )
    assert not same(name, decode(name, at_most=2)[0])


@pytest.mark.parametrize("name", ["maskgit", "halton", "dream", "assd", "stop-prophet"])
def test_control_steps_that_go_on_counting_are_found(name, monkeypatch):
    retire = BatchSlots.retire

    def forgetful(self, done):
        change = retire(self, done)
        return change and SlotChange(change.source)

    monkeypatch.setattr(BatchSlots, "retire", forgetful)
    assert not same(name, decode(name, at_most=2)[0])


@pytest.mark.parametrize(
    ("name", "owner", "method", "wrong"),
    [
        ("maskgit", MaskedTarget, "replace", lambda self, rows, items: None),
        ("cache-freecache", CachedMaskedTarget, "_reset_rows", lambda self, rows: None),
        ("judge", CausalTarget, "_reset_rows", lambda self, rows: None),
    ],
    ids=["conditions", "cache", "judge"],
)
def test_control_a_target_that_keeps_what_was_another_items_is_found(
    name, owner, method, wrong, monkeypatch
):
    monkeypatch.setattr(owner, method, wrong)
    assert not same(name, decode(name, at_most=2)[0])


def test_control_drafts_from_another_items_distribution_are_found(monkeypatch):
    draft = marginal_orders.draft

    def forgetful(run):
        first = not int(run.batch.num_steps)
        begins = run.batch.memory["begins"]
        run.batch.memory["begins"] = begins if first else torch.zeros_like(begins)
        return draft(run)

    monkeypatch.setattr(marginal_orders, "draft", forgetful)
    assert not same("assd", decode("assd", at_most=2)[0])


# --- what cannot be, and what the pipeline makes of it


def test_targets_say_which_rows_cannot_be_replaced():
    lengths = torch.tensor([1, 2] * 3)
    of = MaskedTarget(
        TabularMasked(V), prompts(list(range(6))), space(), SamplingParams(), prompt_length=lengths
    )
    assert not of.replaces, "a model of one length takes conditions of two batch by batch at best"
    with pytest.raises(ValueError, match="takes no calls about some of its rows"):
        of.at_most(2)
    assert MaskedTarget(
        TabularMasked(V), prompts(list(range(6))), space(), SamplingParams()
    ).replaces
    assert not BlockTarget.replaces.fget(of)


def test_a_fresh_target_of_another_distribution_has_the_same_items():
    of = MaskedTarget(TabularMasked(V), prompts(list(range(N))), space(), SamplingParams())
    of.at_most(3)
    of.replace(torch.tensor([False, True, False]))
    other = of.with_params(SamplingParams(temperature=0.5))
    assert (
        (of.prompt[1] == prompts([3])[0]).all()
        and other.rows == 3
        and other.items == N
        and torch.equal(other.prompt, prompts([0, 1, 2]))
    )


@pytest.mark.parametrize("at_most", [1, 2, 3, N])
def test_lengths_are_drawn_with_no_more_rows_at_a_time(at_most):
    where = replace(space(end=True), grid=(T // 2, 2))

    def of():
        return MaskedTarget(
            TabularMasked(V, low=0.0), prompts(list(range(N))), where, SamplingParams()
        )

    rng, start = CounterRNG(range(N)), where.empty(N)
    target = of()
    sizes = counting(target)
    drawn, positions = draw_lengths(target, rng, start, at_most)
    whole, same_places = draw_lengths(of(), rng, start)
    assert (
        torch.equal(drawn, whole)
        and positions == same_places
        and max(sizes) == at_most
        and sum(sizes) == N
    )
    assert len({int((row == 7).sum()) for row in drawn}) > 1


@pytest.mark.parametrize(
    "sampler",
    [
        "fast_dllm",
        {"name": "guided_diffusion", "judge_top_k": 2},
        {"name": "fast_dllm", "cache": "dual"},
    ],
    ids=str,
)
def test_a_pipeline_makes_the_same_media_whatever_the_batch_size(sampler):
    pipe = load("text", dtype="float64")
    tasks = ["sort 3 1 2 =", "3 + 8 + 5 =", "shuffle 4 0 7 5 ="]
    made = {size: pipe(tasks, sampler, num_samples=2, batch_size=size) for size in (1, 2, 6)}
    assert made[1].media == made[2].media == made[6].media
    assert len({tuple(s.nfe for s in out.stats) for out in made.values()}) == 1
    assert pipe.turns(sampler) == TURNS and pipe.turns("frame_blocks") == 1


@pytest.mark.parametrize("replaces", [True, False])
def test_parts_of_media_are_told_with_the_number_of_their_item(replaces, monkeypatch):
    pipe = load("speech")
    items, parts = pipe.plan(pipe.modality.example_prompts(2, 0)), {}
    if not replaces:
        monkeypatch.setattr(MaskedTarget, "replaces", False)
    out = pipe.generate(
        items,
        {"name": "maskgit", "steps": 1},
        on_chunk=lambda row, media, preview=False: parts.setdefault(row, []).append(media),
        max_batch=1,
    )
    assert all(
        np.array_equal(np.concatenate(parts[row]), out.media[row]) for row in range(2)
    ) and not np.array_equal(*out.media)


def test_what_cannot_be_replaced_comes_batch_by_batch(monkeypatch):
    pipe = load("text", dtype="float64")
    items = pipe.plan(["sort 3 1 2 =", "3 + 8 + 5 ="], 2)
    usual = pipe.generate(items, "fast_dllm", max_batch=2)
    monkeypatch.setattr(MaskedTarget, "replaces", False)
    rows = []
    monkeypatch.setattr(
        BatchSlots,
        "__init__",
        lambda self, target, *rest, was=BatchSlots.__init__: (
            rows.append(target.items),
            was(self, target, *rest),
        )[1],
    )
    out = pipe.generate(items, "fast_dllm", max_batch=2)
    assert (
        rows == [2, 2]
        and out.media == usual.media
        and out.spec == usual.spec == {"name": "fast_dllm"}
        and out.items == usual.items
    )
