"""Action chunks: saved statistics, three kinds of codes, and ids that always make a whole chunk."""

from __future__ import annotations

import contextlib
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from gen.contracts.frontend import codebook_digest
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.recipes.common.codebooks import Chain
from gen.tokenizers.action.base import ActionFrontend, ActionStatistics
from gen.tokenizers.action.bins import ActionBins
from gen.tokenizers.action.fast import ActionFast, ExactLength, cosines
from gen.tokenizers.action.rvq import ActionAutoencoder, ActionRVQ

H, D = 16, 2
NAMES = ("action_bins", "action_fast", "action_rvq")
SPANS = np.array([0.4, 30.0])  # physical units of the two dimensions


def reaches(n: int, seed: int) -> np.ndarray:
    """Minimum-jerk movements from somewhere to somewhere by way of somewhere else, begun and ended
    at any time: float64 [n, H, D]."""
    rng = np.random.default_rng(seed)
    start, via, goal = rng.uniform(-1, 1, (3, n, 1, D))
    times = np.sort(rng.uniform(-0.3, 1.3, (n, 2, 3, 1)), 2)

    def share(a, b):
        return np.clip((np.linspace(0, 1, H)[:, None] - a) / np.maximum(b - a, 0.4), 0, 1)

    s, t = (
        10 * u**3 - 15 * u**4 + 6 * u**5
        for u in (share(times[:, :1, 0], times[:, :1, 1]), share(times[:, 1:, 1], times[:, 1:, 2]))
    )
    return (start + (via - start) * s + (goal - via) * t) * SPANS / 3 + (1.0, 0.0)


TRAINING = reaches(2000, 0)
STATISTICS = ActionStatistics.from_data(TRAINING)
SIGNALS = torch.from_numpy(STATISTICS.normalise(reaches(64, 1)))  # float64 [64, H, D]


def rewrite(folder, **keys) -> None:
    """Changes the config of a saved frontend; what is set to ``...`` is taken out."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **keys}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


@pytest.fixture(scope="module")
def fast():
    return ActionFast.train(TRAINING, vocab_size=256, statistics=STATISTICS, dtype=torch.float64)


@pytest.fixture(scope="module")
def rvq():
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = ActionAutoencoder(D, stride=4, stages=2, codebook_size=64, width=32)
    chain, data = (
        Chain(list(model.tables), 40, 150, generator),
        torch.from_numpy(STATISTICS.normalise(TRAINING)).float(),
    )
    optimiser = torch.optim.Adam(model.parameters(), 4e-3)
    for step in range(200):
        x = data[torch.randint(len(data), (64,), generator=generator)]
        z = model.encode_continuous(x)
        quantised, loss = chain(z.flatten(0, 1))
        loss = loss + F.mse_loss(model.decode_continuous(quantised.view_as(z)), x)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        chain.on_step(step)
    return ActionRVQ(model, H, STATISTICS, dtype=torch.float64)


@pytest.fixture(scope="module")
def frontends(fast, rvq):
    return {
        "action_bins": ActionBins(64, H, D, STATISTICS, dtype=torch.float64),
        "action_fast": fast,
        "action_rvq": rvq,
    }


def test_normalised_actions_lie_in_the_unit_range_and_come_back():
    inside = np.clip(TRAINING, STATISTICS.low, STATISTICS.high)
    y = STATISTICS.normalise(inside)
    assert y.min() == -1 and y.max() == 1
    assert np.allclose(STATISTICS.unnormalise(y), inside, rtol=0, atol=1e-12)
    assert np.array_equal(
        STATISTICS.unnormalise([-1.0, 1.0]), [STATISTICS.low[0], STATISTICS.high[1]]
    )  # the ends to the last bit
    assert ActionStatistics.from_dict(json.loads(json.dumps(STATISTICS.to_dict()))) == STATISTICS


def test_quantiles_hold_the_share_they_say_and_what_lies_beyond_is_clipped():
    for quantiles, share in (((0.01, 0.99), 0.02), ((0.1, 0.9), 0.2), ((0, 1), 0)):
        s = ActionStatistics.from_data(list(TRAINING), quantiles)
        beyond = (np.less(TRAINING, s.low) | np.greater(TRAINING, s.high)).mean((0, 1))
        assert np.allclose(beyond, share, atol=2e-3)
    far = np.array([[1e6, -1e6]])
    assert np.array_equal(STATISTICS.normalise(far), [[1, -1]])
    assert np.array_equal(
        STATISTICS.unnormalise(STATISTICS.normalise(far)), [[STATISTICS.high[0], STATISTICS.low[1]]]
    )


def test_statistics_belong_to_the_frontend_and_never_to_the_chunk(frontends):
    chunk, centre = reaches(1, 5)[0], np.array([1.0, 0.0])
    half = centre + (chunk - centre) / 2
    for frontend in frontends.values():
        near, small = (frontend.preprocess(c).numpy() for c in (chunk, half))
        assert not np.allclose(near, small, atol=0.05)
        assert np.allclose(STATISTICS.unnormalise(small), half, atol=1e-9)

    def per_chunk(c):
        return ActionStatistics.from_data([c], (0, 1)).normalise(
            c
        )  # control: the size of the movement is lost

    assert np.allclose(per_chunk(chunk), per_chunk(half))


def test_a_constant_dimension_comes_back_exactly_and_one_that_hardly_varies_is_refused():
    data = np.stack([np.linspace(-1, 1, 500), np.full(500, 0.1)], -1)[None]
    s = ActionStatistics.from_data(data)
    assert (s.normalise(data)[..., 1] == 0).all() and (
        s.unnormalise(np.random.default_rng(0).uniform(-1, 1, (50, 2)))[:, 1] == 0.1
    ).all()
    data[0, 7, 1] = 1.0  # a gripper that closes once
    with pytest.raises(GenError, match=r"dimension 1 .* use quantiles \(0, 1\)"):
        ActionStatistics.from_data(data)
    assert ActionStatistics.from_data(data, (0, 1)).high[1] == 1.0


def test_bad_statistics_and_bad_data_are_refused():
    for low, high in (
        ([0.0], [1.0, 2.0]),
        ([1.0], [0.0]),
        ([float("nan")], [1.0]),
        ([0.0], [float("inf")]),
        ([], []),
        ("a", [1.0]),
        ([None], [1.0]),
        ([True], [1.0]),
        ([-1e308], [1e308]),
    ):
        with pytest.raises(GenError, match="expected"):
            ActionStatistics(low, high)
    for actions in (
        [],
        np.zeros((3, 4)),
        np.zeros((2, 0, 3)),
        [np.zeros((3, 2)), np.zeros((3, 4))],
        np.full((1, 2, 2), np.nan),
        [[["a"]]],
        np.zeros((1, 2, 2), complex),
        [[[1.0, 2.0], [1.0]]],
    ):
        with pytest.raises(GenError, match="expected"):
            ActionStatistics.from_data(actions)
    with pytest.raises(GenError, match="quantiles"):
        ActionStatistics.from_data(TRAINING, (0.9, 0.1))


@pytest.mark.parametrize(
    "name, error", [("action_bins", 1 / 64), ("action_fast", 0.03), ("action_rvq", 0.1)]
)
def test_real_chunks_survive(name, error, frontends):
    frontend, physical = frontends[name], np.clip(reaches(64, 1), STATISTICS.low, STATISTICS.high)
    again = np.stack([frontend.postprocess(x) for x in frontend.decode(frontend.encode(SIGNALS))])
    assert again.dtype == np.float32 and again.shape == physical.shape

    def off(a, b):
        return float(
            np.square(STATISTICS.normalise(a) - STATISTICS.normalise(b)).mean() ** 0.5
        )  # of half the range

    assert off(again, physical) < error
    assert (
        off(again, np.roll(physical, 1, 0)) > 0.3
    )  # control: another chunk's codes are another chunk


@pytest.mark.parametrize("name", NAMES)
def test_codes_have_the_stated_shape_and_range_and_do_not_depend_on_the_batch(name, frontends):
    frontend = frontends[name]
    codes = frontend.encode(SIGNALS)
    assert codes.dtype == torch.long and codes.shape == (
        len(SIGNALS),
        len(frontend.config.codebook_sizes),
        *frontend.grid_for(tuple(SIGNALS.shape)),
    )
    assert int(codes.min()) >= 0 and all(
        int(codes[:, q].max()) < n for q, n in enumerate(frontend.config.codebook_sizes)
    )
    assert torch.equal(codes, torch.cat([frontend.encode(x[None]) for x in SIGNALS]))
    assert torch.allclose(frontend.decode(codes)[3], frontend.decode(codes[3:4])[0], atol=1e-12)
    assert [len(t) for t in frontend.codebooks] == (
        [] if frontend.config.kind == "ids" else list(frontend.config.codebook_sizes)
    )
    assert float(frontend.decode(codes).abs().max()) <= 1


@pytest.mark.parametrize("name", NAMES)
def test_a_frontend_that_is_saved_and_loaded_is_the_same(name, frontends, tmp_path):
    frontend = frontends[name]
    frontend.save_pretrained(tmp_path / "f")
    assert json.loads((tmp_path / "f/config.json").read_text())["frontend_class"] == name
    codes = frontend.encode(SIGNALS)
    for cls in (type(frontend), registry.get("tokenizer", name), ActionFrontend):
        again = cls.from_pretrained(tmp_path / "f", "cpu", torch.float64)
        assert (
            type(again) is type(frontend)
            and again.config == frontend.config
            and again.statistics == STATISTICS
        )
        assert codebook_digest(again.fingerprint) == codebook_digest(frontend.fingerprint)
        assert torch.equal(again.encode(SIGNALS), codes) and torch.equal(
            again.decode(codes), frontend.decode(codes)
        )
    half = type(frontend).from_pretrained(tmp_path / "f", torch.device("cpu"), torch.float16)
    assert codebook_digest(half.fingerprint) == codebook_digest(frontend.fingerprint)
    x = half.decode(half.encode(SIGNALS.half()))
    assert (
        x.dtype == half.preprocess(TRAINING[0]).dtype == torch.float16
        and half.postprocess(x[0]).dtype == np.float32
    )
    low, high = STATISTICS.low, STATISTICS.high
    rewrite(
        tmp_path / "f", statistics={"low": [low[0] - 1e-3, low[1]], "high": high}
    )  # other statistics would move the arm elsewhere
    assert codebook_digest(
        ActionFrontend.from_pretrained(tmp_path / "f").fingerprint
    ) != codebook_digest(frontend.fingerprint)


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_without_statistics_or_with_anything_amiss_is_refused(name, frontends, tmp_path):
    folder, cls = tmp_path / "f", type(frontends[name])
    cases = {
        "no statistics": {"statistics": ...},
        "statistics is": {"statistics": {"low": [0.0]}},
        "lacks 'horizon'": {"horizon": ...},
        "horizon is": {"horizon": 0},
        "2 dimensions|size mismatch": {"dimensions": 3},
        "Did you mean 'horizon'": {"horizen": 3},
        f"expected '{name}'": {"frontend_class": "vq"},
    }
    for message, keys in cases.items():
        frontends[name].save_pretrained(folder)
        cls.from_pretrained(folder)
        rewrite(folder, **keys)
        with pytest.raises(GenError, match=message):
            cls.from_pretrained(folder)
    for other, message in (
        (folder, "expected an action tokenizer"),
        (tmp_path / "nowhere", "nowhere"),
        ("some/body", "not a folder on this machine"),
    ):
        with pytest.raises(GenError, match=message):
            ActionFrontend.from_pretrained(other)
    (folder / "config.json").write_text("[1]")
    with pytest.raises(GenError, match="expected a mapping"):
        cls.from_pretrained(folder)


@pytest.mark.parametrize("name", NAMES)
def test_wrong_chunks_signals_and_codes_are_refused(name, frontends):
    frontend = frontends[name]
    nan, ragged = np.full((H, D), 0.5), [[0.0, 0.0]] * (H - 1) + [[0.0]]
    nan[3, 1] = np.nan
    with pytest.raises(GenError, match=r"nan at \(3, 1\); expected finite"):
        frontend.preprocess(nan)
    for bad in (
        nan * np.inf,
        nan[:-1],
        nan[:, :1],
        np.zeros((1, H, D)),
        "chunk",
        None,
        ragged,
        np.zeros((H, D), bool),
    ):
        with pytest.raises(GenError, match="expected"):
            frontend.preprocess(bad)
    for bad in (SIGNALS[0], SIGNALS[:, :-1], SIGNALS * 3, SIGNALS * np.nan, SIGNALS.long()):
        with pytest.raises(GenError, match="expected"):
            frontend.encode(bad)
    codes = frontend.encode(SIGNALS)
    fewer = codes[..., :1] if name == "action_fast" else codes[..., :-1]
    for bad in (codes - 1000, codes + 1000, codes[:, 0], fewer, codes.double(), codes[:0]):
        with pytest.raises(GenError, match="expected"):
            frontend.decode(bad)
    for call, bad in ((frontend.grid_for, (H + 1, D)), (frontend.postprocess, SIGNALS)):
        with pytest.raises(GenError, match="expected"):
            call(bad)


def test_wrong_arguments_are_refused():
    given = {"bins": 8, "horizon": H, "dimensions": D, "statistics": STATISTICS}
    wrong = {
        "horizon": 0,
        "dimensions": 3,
        "statistics": None,
        "bins": 1,
        "device": "tpu9",
        "dtype": torch.int64,
    }
    for key, value in [*wrong.items(), ("bins", 2.0), ("dtype", "float31")]:
        with pytest.raises(GenError, match=key):
            ActionBins(**{**given, key: value})
    with pytest.raises(
        GenError, match="1024 bins are too fine for torch.bfloat16"
    ):  # it could not tell them apart
        ActionBins(**{**given, "bins": 1024, "dtype": torch.bfloat16})
    assert ActionBins(**{**given, "bins": 1024}).bins == 1024


@pytest.mark.parametrize("bins", [2, 7, 256])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_bins_move_nothing_by_more_than_half_of_one_and_know_their_own_codes(bins, dtype):
    frontend = ActionBins(bins, H, D, STATISTICS, dtype=dtype)
    x = (
        torch.rand(200, H, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        .mul(2)
        .sub(1)
        .to(dtype)
    )
    x[0, 0], x[0, 1] = -1, 1
    codes = frontend.encode(x)
    assert int(codes.min()) == 0 and int(codes.max()) == bins - 1
    assert (
        float((frontend.decode(codes).double() - x.double()).abs().max())
        <= 1 / bins + torch.finfo(dtype).eps
    )
    assert torch.equal(frontend.encode(frontend.decode(codes)), codes)
    assert frontend.codebooks[0].shape == (bins, 1) and bool(
        (frontend.codebooks[0].diff(dim=0) > 0).all()
    )
    assert bool((codes.flatten()[x.flatten().argsort()].diff() >= 0).all())


def test_decoding_is_the_inverse_of_the_rounded_frequencies(fast):
    assert torch.allclose(cosines(H) @ cosines(H).T, torch.eye(H, dtype=torch.float64), atol=1e-12)
    n = torch.einsum("kt,btd->bkd", cosines(H), SIGNALS).mul(fast.scale).round()
    codes = fast.encode(SIGNALS)
    assert torch.equal(
        fast.coefficients(codes), n.long()
    )  # lowest frequency first, all dimensions of it together
    assert torch.allclose(
        fast.decode(codes), (cosines(H).T @ n / fast.scale).clamp(-1, 1), atol=1e-12
    )


def test_no_chunk_has_a_coefficient_without_an_id(fast):
    sign = (
        cosines(H)[:, :, None].sign().expand(-1, -1, D)
    )  # the chunk in [-1, 1] with the largest coefficient of each frequency
    noise = (
        torch.rand(
            500, H, D, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
        ).round()
        * 2
        - 1
    )
    for x in (sign, -sign, noise):
        n = torch.einsum("kt,btd->bkd", cosines(H), x).mul(fast.scale)
        assert float(n.abs().max()) <= fast.reach
        assert torch.equal(fast.coefficients(fast.encode(x)), n.round().long())
    assert (
        int(fast.coefficients(fast.encode(torch.ones(1, H, D)))[0, 0, 0]) == fast.reach
    )  # and none is there in vain


def test_ids_say_how_many_coefficients_they_stand_for(fast):
    codes = fast.encode(SIGNALS)[:, 0]
    over = (codes == fast.eos_token_id).cumsum(1) > 0
    assert torch.equal(fast.symbol_lengths[codes].sum(1), torch.full((len(codes),), fast.total))
    assert (
        bool((codes[over] == fast.eos_token_id).all())
        and fast.symbol_lengths[fast.eos_token_id] == 0
    )
    assert len(fast.symbol_lengths) == fast.vocab_size == 256 and fast.config.kind == "ids"
    assert (fast.symbol_lengths == 1).nonzero().flatten().tolist() == list(
        range(2 * fast.reach + 1)
    )  # every single integer is one


def test_smooth_chunks_take_few_ids_and_rough_ones_do_not(fast):
    def count(x):
        return float((fast.encode(x) != fast.eos_token_id).sum(-1).double().mean())

    noise = (
        torch.rand(
            64, H, D, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
        ).round()
        * 2
        - 1
    )
    assert count(SIGNALS) < fast.total / 3 and count(noise) > fast.total * 2 / 3


def test_ids_of_the_wrong_number_of_coefficients_are_refused_and_ids_after_the_end_say_nothing(
    fast,
):
    codes = fast.encode(SIGNALS[:3])
    whole = fast.decode(codes)
    counts = (codes != fast.eos_token_id).sum(-1)[:, 0]
    noisy = torch.where(torch.arange(fast.total) > counts[:, None, None], 5, codes)
    assert torch.equal(fast.decode(noisy), whole) and not torch.equal(noisy, codes)
    assert torch.equal(fast.decode(codes[..., : int(counts.max())]), whole)
    last = int(fast.symbol_lengths[codes[1, 0, counts[1] - 1]])
    for row, position, id_, came in (
        (1, counts[1] - 1, fast.eos_token_id, fast.total - last),
        (2, counts[2], 0, fast.total + 1),
    ):
        bad = codes.clone()
        bad[row, 0, position] = id_
        with pytest.raises(
            GenError, match=rf"row {row}: .* {came} coefficients .* expected {fast.total}"
        ):
            fast.decode(bad)


def test_training_is_repeatable_and_refuses_what_it_cannot_use(fast, tmp_path):
    def again(chunks):
        return ActionFast.train(chunks, vocab_size=256, statistics=STATISTICS).fingerprint

    assert torch.equal(again(TRAINING), fast.fingerprint) and not torch.equal(
        again(TRAINING[:1000]), fast.fingerprint
    )
    params = (
        {"vocab_size": 2 * fast.reach + 1},
        *({"scale": x} for x in (0, "10", 1e6, float("nan"))),
    )
    for chunks, param in (
        *((TRAINING[:50], k) for k in params),
        (TRAINING[0], {}),
        ([], {}),
        (np.full((2, H, D), np.nan), {}),
    ):
        with pytest.raises(GenError, match="expected"):
            ActionFast.train(chunks, **param)
    fast.save_pretrained(tmp_path / "f")
    rewrite(tmp_path / "f", scale=20.0)
    for message in ("161 integers -80 to 80", "cannot be read from tokenizer.json"):
        with pytest.raises(GenError, match=message):
            ActionFast.from_pretrained(tmp_path / "f")
        (tmp_path / "f/tokenizer.json").write_text("{}")


def drawn(rule, vocab: int, rows: int, length: int, seed: int) -> torch.Tensor:
    """Ids [rows, 1, length], each uniform over what the rule allows after those before it."""
    generator = torch.Generator().manual_seed(seed)
    history = torch.randint(
        -vocab, 2 * vocab, (rows, length), generator=generator
    )  # what is not drawn yet must not matter
    for n in range(length):
        legal = rule(history, torch.full((rows, 1), n))[:, 0]
        several = legal.sum(1) > 1
        history[:, n] = legal.byte().argmax(1)
        history[several, n] = (
            torch.rand(int(several.sum()), vocab, generator=generator)
            .mul_(legal[several])
            .argmax(1)
        )
    return history[:, None]


def decodable(frontend, codes: torch.Tensor) -> float:
    """The share of rows that decode."""
    good = 0
    for row in codes:
        with contextlib.suppress(GenError):
            good += frontend.decode(row[None]).shape == (1, H, D)
    return good / len(codes)


def test_every_sequence_drawn_by_the_rule_decodes_and_few_others_do(fast):
    codes = drawn(fast.constraint.legal, fast.vocab_size, 10_000, fast.total, 0)
    x = fast.decode(codes)
    assert x.shape == (10_000, H, D) and bool(x.isfinite().all())
    assert len(torch.unique(codes[:, 0], dim=0)) > 9_990

    def anything(history, positions):
        return torch.ones(len(history), 1, fast.vocab_size, dtype=torch.bool)

    assert decodable(fast, drawn(anything, fast.vocab_size, 1000, fast.total, 0)) < 0.05
    ends = torch.arange(fast.vocab_size) == fast.eos_token_id

    def late(history, positions):
        return (
            fast.constraint.remaining(history, positions)[..., None] > 0
        ) != ends  # lets ids through that are too long

    assert decodable(fast, drawn(late, fast.vocab_size, 1000, fast.total, 0)) < 0.5


def test_the_rule_is_what_it_says_place_by_place():
    lengths, total, end = torch.tensor([1, 1, 2, 5, 0, 0]), 6, 5
    rule = ExactLength(lengths, total, end)
    history = torch.tensor(
        [[3, 0, 5, 5, 5, 5], [2, 2, 2, 5, 5, 5], [3, 3, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]]
    )
    positions = torch.arange(7).expand(4, -1)
    got = rule.legal(history, positions)
    for row in range(4):
        for n in range(7):
            r = total - sum(int(lengths[i]) for i in history[row, :n])
            expected = (
                [i == end for i in range(6)]
                if r == 0
                else [0 < v <= (5 if r < 0 else r) for v in lengths.tolist()]
            )
            assert got[row, n].tolist() == expected, (row, n, r)
    some = torch.tensor([[4, 1], [0, 6], [2, 2], [5, 3]])  # any places in any order
    assert torch.equal(rule.legal(history, some), got.gather(1, some[..., None].expand(-1, -1, 6)))


def test_ids_at_or_after_a_place_do_not_matter_and_those_before_do(fast):
    rule, history = fast.constraint, fast.encode(SIGNALS)[:, 0]
    position = torch.full((len(history), 1), 2)
    other = history.clone()
    other[:, 2:] = torch.tensor([-1, fast.vocab_size + 7])[torch.arange(fast.total - 2) % 2]
    assert torch.equal(rule.legal(history, position), rule.legal(other, position))
    other[:, 1] = int(fast.symbol_lengths.argmax())  # a long one
    assert not torch.equal(rule.legal(history, position), rule.legal(other, position))
    assert torch.equal(
        rule.legal(history, position), rule.legal(history[:, :2], position)
    )  # nor need they be there
    legal = rule.legal(history, torch.arange(fast.total).expand_as(history))
    assert bool(
        legal.gather(-1, history[..., None]).all()
    )  # what a chunk is made of may stand where it stands


def test_a_rule_that_could_leave_nothing_is_refused():
    for lengths, total, end in (
        ([2, 3, 0], 6, 2),
        ([1, 2, 0], 0, 2),
        ([1, 2, 0], 6, 1),
        ([1, 2, 0], 6, 3),
        ([1, -2, 0], 6, 2),
        ([[1, 0]], 6, 1),
    ):
        with pytest.raises(GenError, match="expected"):
            ExactLength(torch.tensor(lengths), total, end)
    assert ExactLength(torch.tensor([1, 2, 0]), 6, 2).to("cpu").total == 6


def test_later_stages_correct_earlier_ones(rvq):
    z, codes = rvq.model.encode_continuous(SIGNALS).detach(), rvq.encode(SIGNALS)
    errors = [
        float((z - sum(t[codes[:, q]] for q, t in enumerate(rvq.codebooks[:n]))).square().mean())
        for n in range(3)
    ]
    assert errors[2] < errors[1] / 2 < errors[0] / 4
    assert min(len(codes[:, q].unique()) for q in range(2)) > 16


def test_the_gradient_goes_straight_through_the_codes(rvq):
    x = SIGNALS[:2].clone().requires_grad_()
    rvq.model(x).square().sum().backward()
    assert float(x.grad.abs().max()) > 0
    assert torch.allclose(
        rvq.decode(rvq.encode(SIGNALS)),
        rvq.model(SIGNALS).detach().clamp(-1, 1),
        rtol=0,
        atol=1e-12,
    )


def test_weights_that_are_missing_or_of_another_size_are_refused(rvq, tmp_path):
    for folder in ("f", "g"):
        rvq.save_pretrained(tmp_path / folder)
    rewrite(tmp_path / "g", codebook_size=32)
    (tmp_path / "f/model.safetensors").unlink()
    for folder in ("f", "g"):
        with pytest.raises(GenError, match="cannot be read"):
            ActionRVQ.from_pretrained(tmp_path / folder)
    with pytest.raises(GenError, match="multiple of the stride 4"):
        ActionRVQ(rvq.model, 18, STATISTICS)
    whole = ActionRVQ(ActionAutoencoder(D, stride=H, stages=3), H, STATISTICS)
    assert whole.encode(SIGNALS.float()).shape == (
        64,
        3,
        1,
    )  # one code of each stage for all of a chunk
