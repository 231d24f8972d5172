"""Counter-based draws: the same for an item wherever it is, different for all else, distributed as
they should be."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from recording import TraceRecorder

from gen.bench.estimate.count import Meter
from gen.bench.estimate.host_waits import HostWaits
from gen.core import rng as rng_module
from gen.core.rng import CounterRNG, item_key

CHI2_99 = 148.2  # the 0.999 quantile of chi-square with 99 degrees of freedom
GOLDEN_KEY = 116608659933618294
GOLDEN_SHARED = [
    [3037399295283563, 2883633268123305, 2844746136988928],
    [3712608293135424, 8555993280713296, 2700638537969460],
]
GOLDEN_ROUND = [
    [629226277104187, 5689151733435002, 3148337900139190],
    [3374252248146649, 2775041409200420, 8880731631269826],
]
GOLDEN_IDS = [[832, 515, 46], [579, 706, 599]]


def grid(rows: int, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(rows), torch.arange(positions).expand(rows, positions)


def chi_square(cells: torch.Tensor, bins: int = 100) -> float:
    counts = torch.bincount(cells.flatten(), minlength=bins).double()
    expected = cells.numel() / bins
    return float(((counts - expected) ** 2 / expected).sum())


def all_three(rng: CounterRNG, rows, positions, purpose, round) -> list[torch.Tensor]:
    """What the three methods answer; the distribution differs by id, and neither by row nor by
    place."""
    logp = torch.linspace(0, 2, 16, dtype=torch.float64).log_softmax(0).expand(*positions.shape, 16)
    on = torch.ones_like(positions, dtype=torch.bool)
    return [
        rng.uniform(rows, positions, purpose, round),
        rng.flip(torch.full(positions.shape, 0.5), rows, positions, purpose, round, on),
        rng.categorical(logp, rows, positions, purpose, round, on),
    ]


@pytest.mark.parametrize("shared", [False, True])
def test_an_item_draws_the_same_in_every_batch(shared):
    keys = [item_key("prompt", i) for i in range(6)]
    rows, positions = grid(6, 40)
    round = None if shared else torch.tensor([0, 3, 1, 0, 7, 2])
    whole = all_three(CounterRNG(keys), rows, positions, "token", round)
    for order in ([4], [5, 0, 3], [1, 2, 3, 4, 5, 0]):
        part = CounterRNG([keys[i] for i in order])
        at = None if shared else round[order]
        alone = all_three(part, torch.arange(len(order)), positions[: len(order)], "token", at)
        for a, b in zip(whole, alone, strict=True):
            assert torch.equal(a[order], b)
    # some rows of the batch, some places
    some = torch.tensor([5, 2])
    part = all_three(
        CounterRNG(keys), some, positions[some, 7:9], "token", None if shared else round[some]
    )
    for a, b in zip(whole, part, strict=True):
        assert torch.equal(a[some, 7:9], b)


def test_everything_that_names_a_decision_matters():
    rows, positions = grid(1, 64)

    def ask(key=5, shift=0, purpose="token", round=0):
        return CounterRNG([key]).uniform(
            rows, positions + shift, purpose, None if round is None else torch.tensor([round])
        )

    asked = [
        ask(),
        ask(key=6),
        ask(shift=64),
        ask(purpose="accept"),
        ask(round=1),
        ask(round=None),
        ask(key=2**64 - 6),
    ]
    assert torch.equal(asked[0], ask())
    for a, b in itertools.combinations(asked, 2):
        assert not set(a.flatten().tolist()) & set(b.flatten().tolist())
        assert abs(float(torch.corrcoef(torch.cat([a, b]))[0, 1])) < 0.5


def test_methods_and_ids_do_not_share_noise():
    """The noise of ids, of coins and of plain numbers of one decision: no value occurs twice."""
    rows, positions = grid(3, 50)
    rng = CounterRNG([1, 2, 3])
    uniform = rng.uniform(rows, positions, "token", None).flatten()
    assert len(uniform.unique()) == 150
    flat = torch.zeros(3, 50, 7, dtype=torch.float64)
    winner = rng.categorical(flat, rows, positions, "token", None, positions >= 0)
    low = (uniform < 0.5).reshape(3, 50)
    assert (
        2 < float(winner[low].double().mean()) < 4 and 2 < float(winner[~low].double().mean()) < 4
    )


@pytest.mark.parametrize("axis", ["positions", "keys", "rounds"])
def test_uniform_and_independent_along_every_axis(axis):
    n = 100_000
    if axis == "positions":
        u = CounterRNG([123]).uniform(
            torch.tensor([0]), torch.arange(n)[None], "token", torch.tensor([4])
        )[0]
    elif axis == "keys":
        u = CounterRNG(range(n)).uniform(torch.arange(n), torch.full((n, 1), 9), "token", None)[
            :, 0
        ]
    else:
        rows = torch.zeros(n, dtype=torch.long)
        u = CounterRNG([123]).uniform(rows, torch.full((n, 1), 9), "accept", torch.arange(n))[:, 0]
    assert float(u.min()) > 0 and float(u.max()) < 1
    assert chi_square((u * 100).long()) < CHI2_99
    assert (
        chi_square((u[:-1] * 10).long() * 10 + (u[1:] * 10).long()) < CHI2_99
    )  # neighbours in pairs
    ordered = u.sort().values
    ks = float((ordered - (torch.arange(n) + 0.5) / n).abs().max())
    assert ks < 1.95 / math.sqrt(n)  # the 0.999 quantile


def test_the_chi_square_test_would_see_a_bad_stream():
    u = (torch.arange(100_000) * 0.6180339887) % 1
    assert chi_square((u[:-1] * 10).long() * 10 + (u[1:] * 10).long()) > CHI2_99
    assert chi_square((torch.linspace(0, 1, 100_000)[:-1] ** 1.1 * 100).long()) > CHI2_99


def test_categorical_frequencies():
    n, p = 200_000, torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0], dtype=torch.float64)
    logp = p.log().expand(1, n, 5)
    positions = torch.arange(n)[None]
    ids = CounterRNG([42]).categorical(
        logp, torch.tensor([0]), positions, "token", None, positions >= 0
    )[0]
    found = torch.bincount(ids, minlength=5) / n
    assert found[4] == 0
    assert (
        float(((found - p)[:4] ** 2 / p[:4]).sum() * n) < 16.3
    )  # chi-square, 3 degrees of freedom, 0.999


def test_flip_frequencies_and_certainties():
    n = 100_000
    rows, positions = torch.tensor([0]), torch.arange(n)[None]

    def flip(p):
        return CounterRNG([8]).flip(
            torch.full((1, n), p), rows, positions, "accept", torch.tensor([0]), positions >= 0
        )

    assert abs(float(flip(0.3).double().mean()) - 0.3) < 0.005
    assert not bool(flip(0.0).any()) and bool(flip(1.0).all())


def test_noise_without_a_round_couples_distributions():
    """Asked again with a slightly different distribution, shared noise nearly always gives the same
    id; other rounds do not."""
    n = 20_000
    rows, positions = torch.tensor([0]), torch.arange(n)[None]
    one = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64).log().expand(1, n, 3)
    two = torch.tensor([0.31, 0.31, 0.38], dtype=torch.float64).log().expand(1, n, 3)

    def ask(logp, round):
        return CounterRNG([3]).categorical(logp, rows, positions, "token", round, positions >= 0)

    assert float((ask(one, None) == ask(two, None)).double().mean()) > 0.95
    assert (
        float((ask(one, torch.tensor([0])) == ask(two, torch.tensor([1]))).double().mean()) < 0.45
    )


def test_item_keys():
    keys = {item_key("image", f"prompt {i}", seed) for i in range(50) for seed in range(50)}
    assert len(keys) == 2500 and all(0 <= k < 2**63 for k in keys)
    assert item_key("ab", "c") != item_key("a", "bc") and item_key(1) != item_key("1")


def test_the_stream_never_changes():
    """Seeds are part of job files and manifests: these numbers may not change."""
    assert item_key("image", "a small blue ring", 1849) == GOLDEN_KEY
    rng, rows, positions = (
        CounterRNG([GOLDEN_KEY, 7]),
        torch.tensor([0, 1]),
        torch.tensor([[0, 5, 255], [1, 2, 3]]),
    )

    def units(*args):
        return (rng.uniform(rows, positions, *args) * 2**53).long().tolist()

    assert units("token", None) == GOLDEN_SHARED
    assert units("accept", torch.tensor([0, 12])) == GOLDEN_ROUND
    on = positions >= 0
    flat = torch.zeros(2, 3, 1000)
    assert rng.categorical(flat, rows, positions, "token", None, on).tolist() == GOLDEN_IDS


def views(rows: int) -> torch.Tensor:
    """Log-probabilities [rows, 4, 16] that are a part of a larger window."""
    noise = torch.randn(rows, 9, 16, generator=torch.Generator().manual_seed(rows))
    return noise.double().log_softmax(-1)[:, 2:6]


def drawn_beside_an_accelerator(rows: int) -> tuple[torch.Tensor, int]:
    logp, (row, positions) = views(rows), grid(rows, 4)
    on = torch.ones(rows, 4, dtype=torch.bool)
    with HostWaits(), Meter() as meter:
        ids = CounterRNG(range(rows)).categorical(logp, row, positions, "token", None, on)
    return ids, meter.kernels.total()


@pytest.mark.parametrize("piece", [1, 70, 1 << 22])
def test_an_accelerator_draws_from_views_what_a_cpu_draws(piece, monkeypatch):
    row, positions = grid(12, 4)
    on = torch.ones(12, 4, dtype=torch.bool)
    expected = CounterRNG(range(12)).categorical(views(12), row, positions, "token", None, on)
    monkeypatch.setitem(rng_module.PIECE, False, piece)
    assert not views(12).is_contiguous()
    assert torch.equal(drawn_beside_an_accelerator(12)[0], expected)


def test_draws_that_were_recorded_follow_new_keys():
    (rows, positions), rng = grid(3, 4), CounterRNG([1, 2, 3])
    with HostWaits() as meter:
        rng.uniform(rows, positions, "token", None)
        draw = TraceRecorder(meter).record(lambda x: rng.uniform(*x, "token", None), [*grid(3, 4)])
        before, _, after = draw(), rng.put([1], [7]), draw()
    for drawn, keys in ((before, [1, 2, 3]), (after, [1, 7, 3])):
        assert torch.equal(drawn, CounterRNG(keys).uniform(rows, positions, "token", None))


def test_an_accelerator_launches_as_much_for_many_rows_as_for_two(monkeypatch):
    few, many = (drawn_beside_an_accelerator(rows)[1] for rows in (2, 64))
    assert few == many
    monkeypatch.setitem(rng_module.PIECE, False, 64)  # a row at a time
    assert drawn_beside_an_accelerator(64)[1] > 20 * many
