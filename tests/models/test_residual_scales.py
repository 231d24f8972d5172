"""Quantiser of next-scale models, and the adapter that runs them scale by scale."""

from __future__ import annotations

import pytest
import torch
from tabular_scales import quantiser
from tiny_scales import tiny_model, tiny_vq
from torch import Tensor

from gen.core.errors import GenError
from gen.models.adapters.scales import ScalesLM
from gen.models.nets import residual_scales
from gen.models.nets.residual_scales import ResidualScales, phi_index

SIDES = ((1, 1), (2, 2), (4, 4))
PUBLISHED = {
    5: [0, 1, 2, 2, 3],
    6: [0, 0, 1, 2, 3, 3],
    7: [0, 0, 1, 2, 2, 3, 3],
    10: [0, 0, 1, 1, 1, 2, 2, 3, 3, 3],
    13: [0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3],
    14: [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3],
}


@pytest.mark.parametrize("scales", PUBLISHED)
def test_the_shared_convolutions_are_the_published_ones(scales):
    assert phi_index(scales, 4) == PUBLISHED[scales]


@pytest.mark.parametrize("shared", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("scales", range(2, 15))
def test_scales_share_the_nearest_convolution(scales, shared):
    found = phi_index(scales, shared)
    margin = 1 / 12 if shared == 4 else 1 / (2 * shared)
    step = 0.0 if shared == 1 else (1 - 2 * margin) / (shared - 1)
    for k, chosen in enumerate(found):
        distances = [abs(margin + j * step - k / (scales - 1)) for j in range(shared)]
        assert distances[chosen] == pytest.approx(min(distances), abs=1e-12)
    assert found == sorted(found) and set(found) <= set(range(shared))
    if shared > 2:  # control: the ticks of another number of convolutions give others
        assert found != phi_index(scales, 1) or scales == 1


def ids_of(quantize: ResidualScales, batch: int = 3, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = batch, sum(quantize.lengths)
    return torch.randint(len(quantize.embedding.weight), size, generator=generator)


def test_both_routes_from_codes_to_the_sum_are_equal_to_the_bit():
    """All at once, and scale by scale with the inputs of the next one."""
    quantize = quantiser(SIDES, 9)
    ids, f_hat, inputs = ids_of(quantize), quantize.zeros(3), []
    for scale, part in enumerate(ids.split(quantize.lengths, 1)):
        if scale:
            inputs.append(quantize.down(f_hat, scale).flatten(2).transpose(1, 2))
        f_hat = quantize.add(f_hat, part, scale)
        assert torch.equal(quantize.decode(ids[:, : sum(quantize.lengths[: scale + 1])]), f_hat)
    assert torch.equal(quantize.inputs(ids), torch.cat(inputs, 1))
    other = ids.clone()
    other[:, 0] = (other[:, 0] + 1) % 9
    assert not torch.equal(quantize.decode(other), f_hat)  # control


def test_control_another_convolution_makes_another_sum(monkeypatch):
    ids = ids_of(quantiser(SIDES, 9))
    right = quantiser(SIDES, 9).decode(ids)
    monkeypatch.setattr(residual_scales, "phi_index", lambda scales, shared: [0] * scales)
    assert not torch.allclose(quantiser(SIDES, 9).decode(ids), right)


def test_sum_and_residual_make_the_map_at_every_scale():
    quantize = quantiser(SIDES, 9)
    f = torch.randn(2, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ids, r, f_hat = quantize.encode(f), f, quantize.zeros(2)
    for scale, part in enumerate(ids.split(quantize.lengths, 1)):
        z = quantize.down(r, scale).flatten(2).transpose(1, 2)
        distance = (z[:, :, None] - quantize.embedding.weight).pow(2).sum(-1)
        assert torch.equal(distance.argmin(-1), part)
        r = r - quantize.up(quantize.embedding(part), scale)
        f_hat = quantize.add(f_hat, part, scale)
        assert (f_hat + r - f).abs().max() < 1e-13
    assert r.abs().max() > 0.1  # the codes alone do not make it


def planted(plant: bool) -> tuple[ResidualScales, Tensor]:
    """A quantiser with phi = id and a map whose residual at the last scale is in its codebook."""
    quantize = ResidualScales(SIDES, 21, 3, rho=0.0).double().requires_grad_(False)
    generator = torch.Generator().manual_seed(2)

    def codes(count: int, size: float) -> Tensor:
        return size * torch.randn(count, 3, dtype=torch.float64, generator=generator)

    coarse, middle, fine = codes(1, 1000.0), codes(4, 30.0), codes(16, 1.0)
    quantize.embedding.weight[:1], quantize.embedding.weight[1:5] = coarse, middle
    quantize.embedding.weight[5:] = 1e6  # no map is near
    cells = fine.T.reshape(1, 3, 2, 2, 2, 2)
    cells = (cells - cells.mean((3, 5), keepdim=True)).reshape(1, 3, 4, 4)  # zero area means
    f = quantize.up(coarse[None], 0) + quantize.up(middle[None], 1) + cells
    r = f
    for scale, part in enumerate(quantize.encode(f).split(quantize.lengths, 1)[:2]):
        r = r - quantize.up(quantize.embedding(part), scale)
    if plant:
        quantize.embedding.weight[5:] = r.flatten(2)[0].T
    return quantize, f


@pytest.mark.parametrize("plant", [True, False])
def test_residuals_in_the_codebook_leave_no_error(plant):
    quantize, f = planted(plant)
    ids, r = quantize.encode(f), f
    for scale, part in enumerate(ids.split(quantize.lengths, 1)):
        r = r - quantize.up(quantize.embedding(part), scale)
    assert (float(r.abs().max()) == 0.0) == plant  # the control has other codes
    assert (float((quantize.decode(ids) - f).abs().max()) < 1e-12) == plant


def test_wrong_maps_and_scales_are_refused():
    quantize = quantiser(SIDES, 9)
    with pytest.raises(GenError, match=r"sides \(5, 4\); expected \(4, 4\)"):
        quantize.encode(torch.zeros(1, 3, 5, 4, dtype=torch.float64))
    with pytest.raises(GenError, match="from small to large"):
        ResidualScales(((2, 2), (1, 1)), 9, 3)


# --- the adapter


def model_of(markov: bool):
    return tiny_model(tiny_vq(), markov).double()


def stepped(model, words: Tensor, ids: Tensor, hidden: Tensor | None = None) -> Tensor:
    """Logits [B, T, V] scale by scale."""
    lm = ScalesLM(model)
    state, f_hat = lm.begin(words, torch.tensor([words.shape[1]])), model.quantize.zeros(len(ids))
    sizes, out = model.quantize.lengths, []
    for scale, part in enumerate(ids.split(sizes, 1)):
        maps = model.quantize.down(f_hat, scale).flatten(2).transpose(1, 2)
        if hidden is None:
            out.append(lm.fill(state, maps, scale))
        else:
            out.append(lm.refine(state, maps, part, hidden.split(sizes, 1)[scale], scale))
        f_hat = model.quantize.add(f_hat, part, scale)
    return torch.cat(out, 1)


@pytest.mark.parametrize("refine", [False, True])
@pytest.mark.parametrize("markov", [False, True])
@torch.no_grad()
def test_scale_by_scale_against_a_cache_is_one_block_causal_pass(markov, refine):
    if refine and not markov:
        with pytest.raises(GenError, match="does not refine"):
            ScalesLM(model_of(False)).refine(None, None, None, None, 0)
        return
    model = model_of(markov)
    ids, words = ids_of(model.quantize), torch.randint(9, (3, 8))
    hidden = torch.rand(ids.shape) < 0.5 if refine else None
    found, whole = stepped(model, words, ids, hidden), model(words, ids, hidden)
    assert (found - whole).abs().max() < 1e-10
    model.config.markov = not markov
    assert (found - model(words, ids, hidden)).abs().max() > 1e-3  # control: another mask


@torch.no_grad()
def test_rows_that_repeat_have_the_logits_of_their_rows():
    model = model_of(True)
    lm, maps = ScalesLM(model), torch.zeros(3, 1, 8, dtype=torch.float64)
    words = torch.randint(9, (3, 8))
    rows = torch.tensor([2, 0, 2])
    whole, fresh = (lm.begin(words, torch.tensor([8])) for _ in range(2))
    logits = lm.fill(whole, maps, 0)
    for state in (whole, fresh):  # one whose condition was read, one whose was not
        assert torch.allclose(lm.fill(state.select(rows), maps, 0), logits[rows], atol=1e-12)
    assert not torch.allclose(logits[0], logits[2], atol=1e-3)  # control
    with pytest.raises(GenError, match="expected 8"):
        lm.begin(words[:, :5], torch.tensor([5]))


@pytest.mark.parametrize("markov", [False, True])
@torch.no_grad()
def test_only_a_markov_model_forgets_how_a_sum_came_about(markov):
    """Two histories whose sums differ by a pattern of zero area means at the next scale."""
    model = model_of(markov)
    lm, quantize, words = ScalesLM(model), model.quantize, torch.randint(9, (1, 8))
    checks = torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64).repeat(2, 2)
    logits, maps = [], []
    for history in (0, 1):
        state, zeros = lm.begin(words, torch.tensor([8])), quantize.zeros(1)
        f_hat = quantize.add(zeros, torch.tensor([[history]]), 0)
        for scale, total in enumerate((zeros, f_hat, torch.ones_like(zeros) + history * checks)):
            maps.append(quantize.down(total, scale).flatten(2).transpose(1, 2))
            found = lm.fill(state, maps[-1], scale)
        logits.append(found)
    assert torch.allclose(maps[2], maps[5], atol=1e-15) and not torch.allclose(maps[1], maps[4])
    assert torch.allclose(*logits, atol=1e-12) == markov  # the other one sees the earlier keys


@torch.no_grad()
def test_masked_tokens_reach_no_position():
    model = model_of(True)
    quantize, words = model.quantize, torch.randint(9, (2, 8))
    ids = ids_of(quantize, 2)
    hidden = torch.rand(ids.shape, generator=torch.Generator().manual_seed(3)) < 0.5
    hidden[:, -1] = True
    other = ids.clone()
    last = slice(sum(quantize.lengths[:-1]), None)  # of which no later scale reads the tokens
    other[:, last] = torch.where(hidden, (ids + 1) % 9, ids)[:, last]
    found = stepped(model, words, other, hidden)
    assert torch.equal(found, stepped(model, words, ids, hidden))
    known = torch.where(hidden, ids, (ids + 1) % 9)
    assert not torch.equal(found, stepped(model, words, known, hidden))  # known tokens do
    maps = [quantize.own(x[:, last], hidden[:, last], 3) for x in (ids, other)]
    leaking = [quantize.own(x[:, last], hidden[:, last], 3, leak=True) for x in (ids, other)]
    assert torch.equal(*maps) and not torch.allclose(*leaking)  # control: the published form
