"""Every registered layout, on random grids, streams and parameters: there and back, legal ids, and
the arithmetic of known models."""

from __future__ import annotations

import dataclasses
import math
import random
import re
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from gen.contracts.layout_orders import ORDERS, halton_cells
from gen.contracts.layouts import (
    CoarseFirst,
    Delay,
    Depth,
    Flatten,
    FrameBlocks,
    Layout,
    Parallel,
    Raster,
    RasterEol,
    make_layout,
    space,
)
from gen.core.errors import GenError
from gen.core.registry import registry

NAMES = list(registry.table("layout"))
DRAWS = 12  # random layouts per name


def random_params(cls: type[Layout], rng: random.Random) -> dict:
    """Values for every field. A parameter that is not known here fails the test, so that a new one
    is tested too."""
    streams = 1 if cls.one_stream else rng.randint(1, 4)
    grid = tuple(rng.randint(1, 5) for _ in range(rng.randint(1, 3)))
    strides = None
    if rng.random() < 0.6 and "strides" in cls.__dataclass_fields__:
        strides = tuple(2 ** rng.randint(0, 3) for _ in range(streams))
        grid = (8 * rng.randint(1, 3),)
    order = rng.choice(getattr(cls, "ORDERS", [None]))
    known = {
        "sizes": tuple(rng.randint(1, 9) for _ in range(streams)),
        "grid": grid,
        "vocabulary": rng.choice(["shared", "offset"]),
        "order": order,
        "seed": rng.randint(-5, 5) if order == "random" else None,
        "flat": rng.random() < 0.5,
        "delays": tuple(rng.randint(0, 6) for _ in range(streams)),
        "strides": strides,
    }
    return {f.name: known[f.name] for f in dataclasses.fields(cls)}


def random_layouts(name: str) -> list[Layout]:
    """Seeded by the name. Parameters that do not go together, such as frames and a grid of one
    axis, are drawn again."""
    rng, found = random.Random(name), []
    for _ in range(10 * DRAWS):
        try:
            found.append(make_layout(name, **random_params(registry.get("layout", name), rng)))
        except GenError:
            continue
    return found[:DRAWS]


def random_codes(layout: Layout, batch: int, seed: int = 0) -> torch.Tensor | list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    codes = [
        torch.randint(size, (batch, n), generator=draw)
        for size, n in zip(layout.sizes, layout.cells, strict=True)
    ]
    if any(n != math.prod(layout.grid) for n in layout.cells):
        return codes
    return torch.stack(codes, 1).reshape(batch, len(layout.sizes), *layout.grid)


def same(a, b) -> bool:
    if isinstance(a, list):
        return isinstance(b, list) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)


def check_round_trip(there: Layout, back: Layout, batch: int = 3) -> None:
    codes = random_codes(there, batch)
    assert same(codes, back.from_sequence(there.to_sequence(codes))), (
        "the codes came back otherwise"
    )


def check_tables(layout: Layout) -> None:
    """Places and codes correspond one to one, and what is legal is what can be produced."""
    codes = random_codes(layout, 3)
    ids, legal, pairs = layout.to_sequence(codes), layout.legal(), layout.positions
    assert (
        ids.shape == (3, *layout.shape)
        and ids.dtype == torch.long
        and layout.length() == layout.shape[0]
    )
    assert legal.shape == (*layout.shape, layout.vocab_size) and legal.dtype == torch.bool
    assert bool(legal.expand(3, *legal.shape).gather(-1, ids[..., None]).all()), (
        "an id was produced that is not legal"
    )
    pairs, flat = pairs.reshape(-1, 2), legal.reshape(-1, layout.vocab_size)
    special = pairs[:, 0] < 0
    assert sorted(map(tuple, pairs[~special].tolist())) == [
        (q, c) for q, n in enumerate(layout.cells) for c in range(n)
    ]
    widths = torch.tensor(layout.sizes)[pairs[~special, 0]]
    assert torch.equal(flat[~special].sum(1), widths) and not bool(
        flat[~special, layout.code_ids :].any()
    )
    assert bool((flat[special].sum(1) == 1).all()) and not bool(
        flat[special, : layout.code_ids].any()
    )
    first = [
        sum(layout.sizes[:q]) if layout.vocabulary == "offset" else 0
        for q in range(len(layout.sizes))
    ]
    streams = codes if isinstance(codes, list) else codes.flatten(2).unbind(1)
    for n, (q, c) in enumerate(pairs.tolist()):
        if q >= 0:
            assert torch.equal(ids.flatten(1)[:, n], streams[q][:, c] + first[q])
    assert (
        sorted(torch.cat(layout.blocks).tolist()) == list(range(layout.shape[0]))
        and layout.block_of.shape == layout.shape[:1]
    )
    assert layout.steps.shape == layout.level.shape == layout.shape
    steps, level = layout.steps.flatten().tolist(), layout.level.flatten().tolist()
    assert sorted(zip(steps, level, strict=True)) == list(
        zip(steps, level, strict=True)
    )  # read step by step


def check_refusals(layout: Layout) -> None:
    """A wrong id at any place is refused under the name of that place, and so is a wrong length."""
    ids, flat = (
        layout.to_sequence(random_codes(layout, 2)),
        layout.legal().reshape(-1, layout.vocab_size),
    )
    for n in range(len(flat)):
        position = n if len(layout.shape) == 1 else divmod(n, layout.shape[1])
        allowed = flat[n].nonzero().flatten().tolist()
        for wrong in (-1, layout.vocab_size, allowed[0] - 1, allowed[-1] + 1):
            bad = ids.clone()
            bad.flatten(1)[1, n] = wrong
            said = (
                rf"the token id at position {re.escape(str(position))} of row 1 is {wrong};"
                rf" expected {allowed[0]}\b"
            )
            with pytest.raises(GenError, match=said):
                layout.from_sequence(bad)
    for bad in (ids[:, :-1], torch.cat([ids, ids[:, :1]], 1), ids[0]):
        with pytest.raises(GenError, match=r"the shape of ids is .*; expected \[B, "):
            layout.from_sequence(bad)
    with pytest.raises(GenError, match="expected a tensor of integers"):
        layout.from_sequence(ids.float())


@pytest.mark.parametrize("name", NAMES)
def test_properties(name):
    layouts = random_layouts(name)
    assert len(layouts) == DRAWS
    for layout in layouts:
        check_round_trip(layout, layout)
        check_tables(layout)
        again = dataclasses.replace(layout)
        assert again == layout and torch.equal(again.positions, layout.positions)
        check_round_trip(layout, layout, batch=0)
    check_refusals(layouts[0])
    check_refusals(layouts[1])


@pytest.mark.parametrize("name", NAMES)
def test_codes_out_of_range_are_refused(name):
    layout = random_layouts(name)[0]
    for wrong in (-1, layout.sizes[0]):
        codes = random_codes(layout, 2)
        (codes[0] if isinstance(codes, list) else codes.flatten(2)[:, 0])[1, 0] = wrong
        with pytest.raises(
            GenError,
            match=rf"stream 0, cell 0 of row 1 is {wrong}; expected 0 to {layout.sizes[0] - 1}",
        ):
            layout.to_sequence(codes)


@pytest.mark.parametrize("name", NAMES)
def test_token_space(name):
    for layout in random_layouts(name):
        if len(layout.shape) > 1:
            with pytest.raises(GenError, match="one token per position"):
                space(layout)
            continue
        plain, masked = (
            space(layout),
            space(layout, layout.vocab_size, vocab_size=layout.vocab_size + 3),
        )
        assert (
            plain.length == math.prod(plain.grid) == layout.length()
            and plain.vocab_size == layout.vocab_size
        )
        assert torch.equal(plain.legal, layout.legal()) and plain.mask_token_id is None
        assert masked.vocab_size == layout.vocab_size + 3 and not bool(
            masked.legal[:, masked.mask_token_id :].any()
        )
        with pytest.raises(GenError, match="mask_token_id is .*; expected at least"):
            space(layout, layout.vocab_size - 1)
        with pytest.raises(GenError, match="vocab_size is .*; expected at least"):
            space(layout, layout.vocab_size, vocab_size=layout.vocab_size)


# --- controls: the checks above can fail


@pytest.mark.parametrize(
    "right, wrong", [((0, 1, 2), (0, 2, 1)), ((0, 1, 2), (1, 1, 2)), ((0, 0, 2), (0, 1, 2))]
)
def test_a_wrong_inverse_table_breaks_the_round_trip(right, wrong):
    """Delays off by one on the way back, with the same number of steps and the legal ids of the
    right ones."""
    there, other = (Delay(sizes=(9, 9, 9), grid=(7,), delays=d) for d in (right, wrong))
    back = dataclasses.replace(there)
    back.__dict__["_tables"] = there._tables._replace(code=other._tables.code)
    check_round_trip(there, there)
    with pytest.raises(AssertionError, match="came back otherwise"):
        check_round_trip(there, back)
    with pytest.raises(
        GenError, match="the token id at position"
    ):  # honest tables of wrong delays are refused before
        other.from_sequence(there.to_sequence(random_codes(there, 3)))


def test_wrong_legal_ids_are_found():
    layout = Parallel(sizes=(4, 6), grid=(5,))
    layout.__dict__["_tables"] = layout._tables._replace(high=layout._tables.high + 1)
    with pytest.raises(AssertionError):
        check_tables(layout)


@pytest.mark.parametrize(
    "plan", [[[(0, 0)], [(0, 1)]], [[(0, 0), (0, 1)], [(0, 1), (0, 2)]], [[(0, 0), (0, 1), (1, 2)]]]
)
def test_a_plan_has_to_hold_every_code_once(plan):
    class Broken(Raster):
        def plan(self):
            return plan

    with pytest.raises(ValueError, match="every code once"):
        Broken(sizes=(4,), grid=(3,)).length()


# --- one stream

GRIDS = [(1,), (7,), (8, 8), (5, 7), (3, 4, 4), (2, 5, 3)]


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("order", ORDERS)
def test_orders_are_permutations(order, grid):
    assert sorted(ORDERS[order](grid, 3)) == list(range(math.prod(grid)))


@pytest.mark.parametrize("grid", GRIDS)
def test_snake_goes_from_neighbour_to_neighbour(grid):
    cells = [
        torch.tensor(torch.unravel_index(torch.tensor(c), grid)) for c in ORDERS["snake"](grid)
    ]
    assert all(int((a - b).abs().sum()) == 1 for a, b in pairwise(cells))


@pytest.mark.parametrize("side", [8, 9, 12, 16])
def test_halton_spreads(side):
    """The first quarter of the cells lies in all quadrants, about evenly. That of rows lies in two
    of them."""

    def quadrants(order):
        first = torch.tensor(order)[: side * side // 4]
        return torch.bincount(
            (first // side >= side / 2) * 2 + (first % side >= side / 2).long(), minlength=4
        ).tolist()

    hit = quadrants(halton_cells((side, side)))
    assert min(hit) > 0 and max(hit) <= 2 * min(hit) + 2
    assert quadrants(range(side * side))[2:] == [0, 0]


def test_random_is_one_order_per_seed():
    def order(seed):
        return Raster(sizes=(4,), grid=(6, 6), order="random", seed=seed).positions[:, 1].tolist()

    assert order(1) == order(1) != order(2)
    assert order(0)[:8] == [17, 16, 31, 6, 32, 28, 19, 27]  # pinned: models are trained on it
    with pytest.raises(GenError, match="seed is None; expected an integer"):
        order(None)
    with pytest.raises(GenError, match="no use for it"):
        Raster(sizes=(4,), grid=(2,), seed=1)


def test_rows_end_with_an_id_of_their_own():
    """Emu3: an image of 16 x 16 pixels on the grid 8 x 8 is 8 * (8 + 1) ids."""
    layout = RasterEol(sizes=(64,), grid=(8, 8))
    assert layout.length() == 72 == layout.length((4, 17)) and layout.special_ids == {"eol": 64}
    ids = layout.to_sequence(torch.arange(64).reshape(1, 1, 8, 8)).reshape(8, 9)
    assert (
        torch.equal(ids[:, :8], torch.arange(64).reshape(8, 8)) and ids[:, 8].tolist() == [64] * 8
    )
    assert RasterEol(sizes=(64,), grid=(3, 4, 5)).length() == 3 * 4 * 6
    assert space(layout).grid == (8, 9)


def test_frames_are_blocks():
    layout = FrameBlocks(sizes=(9,), grid=(3, 2, 4))
    assert [b.tolist() for b in layout.blocks] == [list(range(8 * t, 8 * t + 8)) for t in range(3)]
    assert int(layout.block_of[15]) == 1 and int(layout.block_of[16]) == 2
    codes = random_codes(layout, 2)
    assert torch.equal(layout.to_sequence(codes), codes.flatten(1))
    assert torch.equal(
        layout.to_sequence(codes), Raster(sizes=(9,), grid=(3, 2, 4)).to_sequence(codes)
    )
    assert len(Raster(sizes=(9,), grid=(3, 2, 4)).blocks) == 24
    with pytest.raises(GenError, match="frames and at least one axis"):
        FrameBlocks(sizes=(9,), grid=(8,))


# --- several streams


def test_delays_make_steps():
    """MusicGen: 11 frames of 2 streams with the delays (0, 1) are 12 steps."""
    layout = Delay(sizes=(8, 8), grid=(11,), delays=(0, 1))
    codes = random_codes(layout, 2)
    ids = layout.to_sequence(codes)
    assert layout.shape == (12, 2) and layout.special_ids == {"pad": 8}
    assert torch.equal(ids[:, :11, 0], codes[:, 0]) and torch.equal(ids[:, 1:, 1], codes[:, 1])
    assert ids[:, 11, 0].tolist() == ids[:, 0, 1].tolist() == [8, 8]
    assert Delay(sizes=(8,) * 9, grid=(60,), delays=(0, *range(8, 16))).length() == 75  # Dia
    together = Delay(sizes=(8, 8), grid=(11,), delays=(0, 0))
    assert torch.equal(
        together.to_sequence(codes), Parallel(sizes=(8, 8), grid=(11,)).to_sequence(codes)
    )


@pytest.mark.parametrize("streams, frames", [(2, 11), (4, 5), (4, 9), (3, 30)])
def test_delay_is_that_of_musicgen(streams, frames):
    """transformers puts a column of pads before the first step, which it starts from."""
    from transformers.models.musicgen.modeling_musicgen import MusicgenForCausalLM

    layout = Delay(sizes=(8,) * streams, grid=(frames,), delays=tuple(range(streams)))
    codes = random_codes(layout, 2)
    like = SimpleNamespace(num_codebooks=streams, config=SimpleNamespace(audio_channels=1))
    started = torch.cat([torch.full((2, streams, 1), 8), codes], 2).reshape(2 * streams, -1)
    _, theirs = MusicgenForCausalLM.build_delay_pattern_mask(like, started, 8, frames + streams)
    assert torch.equal(theirs.reshape(2, streams, -1)[..., 1:].mT, layout.to_sequence(codes))


def test_flat_steps_are_the_same_ids():
    for cls, params in ((Parallel, {}), (Delay, {"delays": (0, 2, 1)})):
        for vocabulary in ("shared", "offset"):
            steps, flat = (
                cls(sizes=(5, 3, 4), grid=(6,), vocabulary=vocabulary, flat=f, **params)
                for f in (False, True)
            )
            codes = random_codes(steps, 2)
            assert torch.equal(steps.to_sequence(codes).flatten(1), flat.to_sequence(codes))
            assert torch.equal(steps.legal().flatten(0, 1), flat.legal())
            empty = flat.positions[:, 0] < 0
            assert bool(flat.legal()[empty, -1].all()) and int(flat.legal()[empty].sum()) == int(
                empty.sum()
            )


def test_depth_is_time_major_and_knows_its_levels():
    depth, flat = (cls(sizes=(4, 6, 5), grid=(7,), vocabulary="offset") for cls in (Depth, Flatten))
    codes = random_codes(depth, 2)
    assert torch.equal(depth.to_sequence(codes), flat.to_sequence(codes))
    assert torch.equal(
        depth.to_sequence(codes), codes.mT.flatten(1) + torch.tensor([0, 4, 10]).repeat(7)
    )
    assert (
        depth.steps.tolist() == [t for t in range(7) for _ in range(3)]
        and depth.level.tolist() == [0, 1, 2] * 7
    )
    assert space(depth).grid == (7, 3)
    images = Depth(sizes=(4, 6), grid=(2, 3))  # streams of an image: depth within every cell
    assert images.shape == (12,) and images.from_sequence(
        images.to_sequence(random_codes(images, 2))
    ).shape == (2, 2, 2, 3)


def test_streams_of_unequal_stride():
    """SNAC: 1 + 2 + 4 + 8 ids per coarse frame. With three streams, the order of 7 that language
    models of speech use."""
    snac = Flatten(sizes=(16,) * 4, grid=(24,), strides=(8, 4, 2, 1))
    frames = snac.positions[:, 0].reshape(3, 15)
    assert [row.bincount().tolist() for row in frames] == [[1, 2, 4, 8]] * 3
    three = Flatten(sizes=(99, 99, 99), grid=(8,), strides=(4, 2, 1))
    ids = three.to_sequence(
        [torch.tensor([[0, 1]]), torch.tensor([[10, 11, 12, 13]]), torch.arange(20, 28)[None]]
    )
    assert ids.tolist() == [[0, 10, 20, 21, 11, 22, 23, 1, 12, 24, 25, 13, 26, 27]]
    begins = snac.positions[:, 1] * torch.tensor([8, 4, 2, 1])[snac.positions[:, 0]]
    assert torch.equal(
        begins, begins.sort().values
    )  # no code stands before one that begins earlier
    coarse = CoarseFirst(sizes=(16,) * 4, grid=(24,), strides=(8, 4, 2, 1))
    codes = random_codes(coarse, 2)
    assert torch.equal(
        coarse.to_sequence(codes), torch.cat(codes, 1)
    ) and coarse.steps.bincount().tolist() == [3, 6, 12, 24]
    with pytest.raises(GenError, match=r"grid is \(20,\); expected one axis, a multiple"):
        Flatten(sizes=(16,) * 4, grid=(20,), strides=(8, 4, 2, 1))
    with pytest.raises(GenError, match="expected a list of 4 streams"):
        snac.to_sequence(torch.zeros(1, 4, 24, dtype=torch.long))


@pytest.mark.parametrize(
    "name, params, said",
    [
        ("delya", {}, "Did you mean 'delay'"),
        ("delay", {"sizes": (4,), "grid": (3,), "delay": (0,)}, "Did you mean 'delays'"),
        ("delay", {"sizes": (4,), "grid": (3,)}, "layout 'delay' lacks delays"),
        (
            "delay",
            {"sizes": (4, 4), "grid": (3,), "delays": (0,)},
            "expected a list of 2 integers, one per stream",
        ),
        ("delay", {"sizes": (4, 4), "grid": (3,), "delays": (0, -1)}, "at least 0"),
        (
            "raster",
            {"sizes": (4,), "grid": (3,), "order": "snaek"},
            "unknown order 'snaek'. Did you mean 'snake'",
        ),
        (
            "flatten",
            {"sizes": (4,), "grid": (3,), "order": "time-major"},
            "Did you mean 'time_major'",
        ),
        ("depth", {"sizes": (4,), "grid": (3,), "vocabulary": "ofset"}, "Did you mean 'offset'"),
        ("raster", {"sizes": (4, 4), "grid": (3,)}, "expected one stream"),
        ("raster", {"sizes": (4,), "grid": 3}, "grid is 3; expected a list of integers"),
        ("raster", {"sizes": (0,), "grid": (3,)}, "at least 1"),
        ("raster", {"sizes": (4,), "grid": ()}, "at least 1"),
    ],
)
def test_bad_params_are_named(name, params, said):
    with pytest.raises(GenError, match=re.escape(said)):
        make_layout(name, **params)
