"""The distribution: each part against its definition, the order of the parts, and what it
refuses."""

from __future__ import annotations

import math

import pytest
import torch

from gen.core.errors import GenError
from gen.core.sampling_params import SamplingParams

LOGITS = torch.tensor([2.0, 1.0, 0.5, -1.0, 1.8], dtype=torch.float64)


def probabilities(sampling: SamplingParams, logits=LOGITS, **kwargs) -> list[float]:
    return sampling(logits, **kwargs).exp().tolist()


def kept(sampling: SamplingParams, logits=LOGITS, **kwargs) -> list[int]:
    return [i for i, p in enumerate(probabilities(sampling, logits, **kwargs)) if p > 0]


def test_plain_distribution_is_softmax():
    assert probabilities(SamplingParams()) == pytest.approx(LOGITS.softmax(0).tolist(), abs=1e-16)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(0.5, 3, 0.9, 0.05, 3.0),
        SamplingParams(temperature=0),
        SamplingParams(top_p=0.01),
        SamplingParams(min_p=1),
    ],
)
def test_every_distribution_sums_to_one_in_the_precision_of_the_logits(sampling):
    logits = torch.randn(4, 3, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    out = sampling(logits, logits.flip(0))
    assert out.dtype == torch.float64 and out.shape == logits.shape
    assert (out.exp().sum(-1) - 1).abs().max() < 1e-14
    assert sampling(logits.bfloat16(), logits.flip(0)).dtype == torch.float32


def test_guidance_formula():
    u, s = torch.tensor([0.1, 0.2, -0.3, 0.4, 0.0], dtype=torch.float64), 2.5
    expected = torch.softmax(u + s * (LOGITS - u), 0).tolist()
    assert probabilities(SamplingParams(guidance_scale=s), uncond=u) == pytest.approx(
        expected, abs=1e-15
    )
    assert probabilities(SamplingParams(guidance_scale=0.0), uncond=u) == pytest.approx(
        u.softmax(0).tolist(), abs=1e-15
    )
    assert SamplingParams(guidance_scale=s).guided and not SamplingParams().guided


def test_illegal_ids_have_no_mass():
    legal = torch.tensor([False, True, True, False, True])
    p = probabilities(SamplingParams(), legal=legal)
    rest = LOGITS[legal].softmax(0).tolist()
    assert p == pytest.approx([0, rest[0], rest[1], 0, rest[2]], abs=1e-15)
    assert p[0] == 0.0 and p[3] == 0.0


def test_temperature_zero_is_the_first_legal_argmax():
    assert probabilities(SamplingParams(temperature=0)) == [1, 0, 0, 0, 0]
    legal = torch.tensor([False, True, True, True, True])
    assert probabilities(SamplingParams(temperature=0, top_k=2, top_p=0.3), legal=legal) == [
        0,
        0,
        0,
        0,
        1,
    ]
    ties = torch.zeros(4, dtype=torch.float64)
    assert (
        probabilities(SamplingParams(temperature=0), ties)
        == probabilities(SamplingParams(temperature=0), ties)
        == [1, 0, 0, 0]
    )


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_top_k_keeps_k_whatever_the_ties(k):
    assert len(kept(SamplingParams(top_k=k), torch.zeros(5, dtype=torch.float64))) == k
    assert kept(SamplingParams(top_k=k)) == sorted(LOGITS.topk(k).indices.tolist())


def test_top_k_of_more_than_there_are_keeps_all():
    assert len(kept(SamplingParams(top_k=5))) == len(kept(SamplingParams(top_k=500))) == 5


@pytest.mark.parametrize("p", [1e-9, 0.05, 0.3, 0.5, 0.75, 0.9, 0.999])
def test_top_p_keeps_the_smallest_set_that_reaches_it(p):
    mass = LOGITS.softmax(0)
    ordered = mass.argsort(descending=True).tolist()
    found = kept(SamplingParams(top_p=p))
    assert found == sorted(ordered[: len(found)]) and found
    assert mass[found].sum() >= p
    assert mass[found].sum() - mass[found].min() < p  # without its least likely id it does not


def test_top_p_of_exactly_a_sum_needs_no_further_id():
    assert kept(
        SamplingParams(top_p=0.75), torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64).log()
    ) == [
        0,
        1,
    ]


@pytest.mark.parametrize("floor", [0.01, 0.2, 0.4, 0.9, 1.0])
def test_min_p_is_relative_to_the_largest(floor):
    mass = LOGITS.softmax(0).tolist()
    assert kept(SamplingParams(min_p=floor)) == [
        i for i, x in enumerate(mass) if x >= floor * max(mass)
    ]


def test_order_of_the_parts():
    """Each pair of neighbours, in a case where the other order keeps other ids or gives other
    masses."""
    u = torch.tensor([3.0, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    legal = torch.tensor([False, True, True, True, True])
    # legal ids before top-k: two legal ids are left, though an illegal one is the largest
    assert kept(SamplingParams(top_k=2), legal=legal) == [1, 4]
    # guidance before top-k: it is the guided logits whose largest is kept
    assert kept(SamplingParams(top_k=1, guidance_scale=2.0), uncond=u) == [4]
    # temperature before top-p and min-p: a hot distribution keeps more ids
    assert kept(SamplingParams(top_p=0.6)) == [0, 4] and kept(
        SamplingParams(temperature=4.0, top_p=0.6)
    ) == [0, 1, 4]
    assert kept(SamplingParams(min_p=0.5)) == [0, 4] and kept(
        SamplingParams(temperature=4.0, min_p=0.5)
    ) == [0, 1, 2, 4]
    # top-k before top-p: the mass is that of the ids left
    p = (
        float(LOGITS.softmax(0)[0]) + 0.02
    )  # more than the largest id has among all, less than it has among two
    assert kept(SamplingParams(top_p=p)) == [0, 4] and kept(SamplingParams(top_k=2, top_p=p)) == [0]
    # nothing is warped after the filters: ratios are those of temperature alone
    out = probabilities(SamplingParams(temperature=0.5, top_k=2, top_p=0.99, min_p=0.1))
    assert out[0] / out[4] == pytest.approx(math.exp(2 * (2.0 - 1.8)), rel=1e-12)


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "warm"),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_k", math.nan),
        ("top_k", True),
        ("top_p", 1.1),
        ("top_p", 0),
        ("top_p", -0.5),
        ("top_p", math.nan),
        ("top_p", None),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", math.nan),
        ("min_p", "x"),
        ("guidance_scale", math.nan),
        ("guidance_scale", math.inf),
        ("guidance_scale", -math.inf),
        ("guidance_scale", None),
    ],
)
def test_bad_values_are_refused_in_one_line(param, value):
    with pytest.raises(GenError) as error:
        SamplingParams(**{param: value})
    message = str(error.value)
    assert (
        f"sampling.{param}" in message
        and repr(value) in message
        and "expected" in message
        and "\n" not in message
    )
