"""Kinds of drafters in training: which position a label is of, and that what is trained is what is
decoded.

The controls know the sequence too, but say it one position off.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from kind_batches import LENGTH, V, drawn_batch, known_sequence, teacher
from torch import nn
from trained_drafters import DEPTH, NET, network, scrambled, target

from gen.core.errors import GenError
from gen.models.adapters.draft_models import (
    dropping_model,
    exit_model,
    prompt_model,
    repaired_model,
    routed_model,
)
from gen.models.adapters.language_models import CausalLM
from gen.models.targets.causal import CausalTarget
from gen.pipeline.pipeline import load
from gen.recipes.drafters.base import DepthOptions
from gen.recipes.drafters.data import Batch, Teacher
from gen.recipes.drafters.kind_exit import Exit, ExitOptions, TrainedLayer
from gen.recipes.drafters.kind_heads import Hydra, HydraOptions, Medusa
from gen.recipes.drafters.kind_lora_drop import DropOptions, LoraDropKind
from gen.recipes.drafters.kind_parallel import (
    Masked,
    MaskedOptions,
    ParallelOptions,
    Prompt,
)
from gen.recipes.drafters.kind_router import RouterKind, RouterOptions, decided
from gen.recipes.drafters.kind_skip import SkipOptions, SkipRepair
from gen.recipes.drafters.recipe import QUICK, DrafterRecipe
from gen.samplers.causal.drafters.parallel import draft_target

WRONG = 1e-3


class KnowingHeads(nn.Module):
    """Heads that read the number of a state and say what follows it, ``shift`` positions off."""

    def __init__(self, shift: int):
        super().__init__()
        self.shift = shift

    def forward(self, depth, state, embedded):
        ids = state.argmax(-1) + 2 + depth + self.shift
        return 50.0 * torch.eye(V)[ids.clamp_max(V - 1)]


@pytest.mark.parametrize("shift", [0, -1, 1])
@pytest.mark.parametrize("kind", [Medusa, Hydra])
def test_the_label_of_head_k_is_the_token_k_places_behind_the_next(kind, shift):
    made = kind(teacher(), kind.options_type(depth=DEPTH, loss="fkl"))
    loss, figures = made.loss(KnowingHeads(shift), known_sequence())
    assert set(figures) == {f"acceptance {k}" for k in range(DEPTH)}
    right = 1.0 if shift == 0 else 0.0
    assert list(figures.values()) == pytest.approx([right] * DEPTH, abs=1e-6)
    assert (float(loss) < 1e-6) == (shift == 0)


class KnowingModel(nn.Module):
    """A model that reads positions and says what stands behind them, ``shift`` positions off."""

    def __init__(self, shift: int, prompt_length: torch.Tensor):
        super().__init__()
        self.shift, self.length = shift, prompt_length

    def forward(self, input_ids, position_ids, attention_mask, use_cache):
        ids = position_ids - self.length[:, None] + 2 + self.shift
        return SimpleNamespace(logits=50.0 * torch.eye(V)[ids.clamp(0, V - 1)])


@pytest.mark.parametrize("shift", [0, -1, 1])
def test_the_label_of_mask_k_is_the_token_k_places_behind_the_first_draft(shift):
    made = Masked(teacher(), MaskedOptions(depth=DEPTH, groups=4, loss="fkl"))
    batch = known_sequence()
    loss, figures = made.loss(KnowingModel(shift, batch.prompt_length), batch)
    right = 1.0 if shift == 0 else 0.0
    assert list(figures.values()) == pytest.approx([right] * DEPTH, abs=1e-6)
    assert (float(loss) < 1e-6) == (shift == 0)


# --- what is trained is what is decoded


def logprobs_of(draft: CausalTarget, batch: Batch) -> torch.Tensor:
    before = torch.cat([batch.tokens[:, :1], batch.tokens[:, :-1]], 1)
    return draft.predict(before, torch.arange(LENGTH).expand_as(before)).logprobs


def test_the_layer_of_an_exit_is_trained_on_what_it_drafts():
    made, batch = drawn_batch(("model.layers.0",))
    kind = Exit(made, ExitOptions(exit_layer=1))
    own = scrambled(network("exit", made.target))
    logq = kind.logq(TrainedLayer(own), batch)
    of = target(LENGTH, V)
    draft = of.with_model(exit_model(of.model, 1, own))
    assert torch.allclose(logq.double(), logprobs_of(draft, batch), atol=1e-4, rtol=0)
    wrong = of.with_model(of.model.with_layers((0,)))
    assert float((logq - logprobs_of(wrong, batch)).detach().abs().max()) > WRONG


def test_maps_in_the_place_of_layers_are_trained_on_what_they_draft():
    made, batch = drawn_batch()
    kind = SkipRepair(made, SkipOptions(kept_layers="0", rank=4))
    of = target(LENGTH, V)
    plain = of.with_model(of.model.with_layers((0,)))
    skipping = logprobs_of(plain, batch)
    assert torch.allclose(kind.logq(kind.network(), batch).double(), skipping, atol=1e-4, rtol=0)
    net = scrambled(network("skip", made.target))
    logq = kind.logq(net, batch)
    draft = of.with_model(repaired_model(of.model, net))
    assert torch.allclose(logq.double(), logprobs_of(draft, batch), atol=1e-4, rtol=0)
    assert float((logq - skipping).detach().abs().max()) > WRONG


@pytest.mark.parametrize("cycle", [2, 3])
def test_dropped_layers_are_trained_on_what_they_draft(cycle):
    made, batch = drawn_batch()
    kind = LoraDropKind(made, DropOptions(every=2, cycle=cycle, rank=4, alpha=8.0))
    net = scrambled(network("lora_drop", made.target))
    logq, of = kind.logq(net, batch), target(LENGTH, V)
    draft = of.with_model(dropping_model(of.model, net, kind.arguments()))
    assert torch.allclose(logq.double(), logprobs_of(draft, batch), atol=1e-4, rtol=0)
    other = of.with_model(dropping_model(of.model, net, {"every": 2, "cycle": 4}))
    assert float((logq - logprobs_of(other, batch)).detach().abs().max()) > WRONG


def routers(seed: int) -> tuple[Teacher, Batch, RouterKind, nn.Module]:
    made, batch = drawn_batch()
    net = network("router", made.target).double()
    torch.manual_seed(seed)
    for p in net.parameters():
        p.data.copy_(torch.randn(p.shape) * 0.5)
    return made, batch, RouterKind(made, RouterOptions(rank=4)), net


def test_routers_are_trained_on_what_they_draft():
    for seed in range(50):
        _, batch, kind, net = routers(seed)
        logq, probability = kind.routed(net, batch, decided)
        if len({tuple(row) for row in decided(probability).tolist()}) == 3:
            break  # a decision of its own for each prompt
    of = target(LENGTH, V)
    draft = of.with_model(routed_model(of.model, net))
    assert torch.allclose(logq.double(), logprobs_of(draft, batch), atol=1e-4, rtol=0)
    whole = kind.routed(net, batch, torch.ones_like)[0]
    assert torch.allclose(whole, batch.logp, atol=1e-4, rtol=0)
    assert float((whole - logq).detach().abs().max()) > WRONG


def test_a_drawn_decision_has_the_mean_and_the_gradient_of_its_probability():
    kind = routers(0)[2]
    p = torch.tensor([0.1, 0.5, 0.9], dtype=torch.double).repeat(4000, 1).requires_grad_()
    drawn = torch.stack([kind.drawn(column) for column in p.unbind(1)], 1)
    assert set(drawn.detach().round(decimals=9).unique().tolist()) == {0.0, 1.0}
    assert torch.allclose(drawn.mean(0), p[0], atol=0.03)
    drawn.sum().backward()
    assert torch.equal(p.grad, torch.ones_like(p))


def test_the_penalty_is_the_price_of_the_expected_layers():
    _, batch, kind, net = routers(1)

    def loss(penalty: float) -> torch.Tensor:
        made = RouterKind(kind.teacher, RouterOptions(rank=4, penalty=penalty))
        return made.loss(net, batch)[0]  # the same draws, of a fresh generator

    def share() -> torch.Tensor:
        made = RouterKind(kind.teacher, RouterOptions(rank=4))
        return made.routed(net, batch, made.drawn)[1].mean()

    assert abs((loss(0.3) - loss(0.0) - 0.3 * share()).item()) < 1e-6
    gate = net.gates[0].bias
    slopes = [torch.autograd.grad(x, gate)[0] for x in (loss(0.3), loss(0.0), share())]
    assert torch.allclose(slopes[0] - slopes[1], 0.3 * slopes[2], atol=1e-6)
    assert float(slopes[2]) > 0.01
    assert all(p.grad is None for p in kind.teacher.model.model.parameters())


def test_the_gradient_of_a_router_is_that_of_finite_differences():
    _, batch, kind, net = routers(1)
    bias, step = net.gates[0].bias, 1e-4

    def first() -> torch.Tensor:
        return kind.routed(net, batch, decided)[1][:, 0].double().sum()

    slope, before, ends = torch.autograd.grad(first(), bias)[0], bias.detach().clone(), []
    for sign in (1, -1):
        bias.data.copy_(before + sign * step)
        ends.append(float(first()))
    assert abs((ends[0] - ends[1]) / (2 * step) - float(slope)) < 1e-2 * float(slope)


@pytest.mark.parametrize("name", ["masked", "prompt"])
def test_masks_are_trained_on_what_they_draft(name):
    made, batch = drawn_batch()
    if name == "masked":
        net = scrambled(network(name, made.target))
        kind = Masked(made, MaskedOptions(depth=DEPTH, width=32, depth_of_model=1))
        model, masks = CausalLM(net), kind.masks()
    else:
        net = scrambled(network(name, made.target))
        kind = Prompt(made, ParallelOptions(depth=DEPTH))
        model, masks = prompt_model(made.model, net), kind.masks()
    first, further, anchors = kind.all_logq(net, batch, 3)
    for row in range(3):
        for group, anchor in enumerate(anchors[row].tolist()):
            draft = draft_target(target(LENGTH, V), model)
            begun = batch.tokens[:, :anchor]
            tokens = torch.cat(
                [torch.zeros_like(batch.tokens[:, :1]), begun, masks.expand(3, -1)], 1
            )
            tokens = tokens[:, :LENGTH]
            at = torch.arange(tokens.shape[1]).expand_as(tokens)
            found = draft.predict(tokens, at).logprobs[row, anchor:]
            assert torch.allclose(first[row, anchor].double(), found[0], atol=1e-4, rtol=0)
            count = len(found) - 1
            gap = (further[row, group, :count].double() - found[1:]).abs()
            assert count == 0 or float(gap.detach().max()) < 1e-4, (row, anchor)


def test_a_group_of_masks_sees_no_token_behind_it():
    made, batch = drawn_batch()
    kind = Masked(made, MaskedOptions(depth=DEPTH, width=32, depth_of_model=1))
    net = scrambled(network("masked", made.target))
    _, further, anchors = kind.all_logq(net, batch, 3)
    for group in range(3):
        other = batch.tokens.clone()
        column = torch.arange(LENGTH)
        behind = column >= anchors[:, group, None]
        other[behind] = (other[behind] + 1) % V
        kind.generator.manual_seed(23)
        changed = Batch(**{**vars(batch), "tokens": other})
        _, again, same = kind.all_logq(net, changed, 3)
        assert torch.equal(same, anchors)
        assert torch.allclose(again[:, group], further[:, group], atol=1e-9, rtol=0)
        before = (column < anchors[:, group, None]).any(1)
        other = torch.where(behind, batch.tokens, (batch.tokens + 1) % V)
        kind.generator.manual_seed(23)
        _, again, _ = kind.all_logq(net, Batch(**{**vars(batch), "tokens": other}), 3)
        moved = (again[:, group] - further[:, group]).abs().flatten(1).amax(1) > 1e-6
        assert torch.equal(moved, before)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "medusa",
        "hydra",
        "exit",
        "masked",
        "prompt",
        "hidden",
        "longspec",
        "skip",
        "router",
        "lora_drop",
    ],
)
def test_the_recipe_writes_a_drafter_that_a_sampler_reads(tmp_path, name):
    recipe = DrafterRecipe("text-causal", name, tmp_path, QUICK, log=lambda line: None)
    figures = recipe.run()
    assert 0 < figures["alpha"] <= 1 and figures["parameters"] > 0
    spec = recipe.kind.sampler(tmp_path / "drafter")
    assert load("text")("3 + 8 + 5 =", sampler=spec).stats[0].nfe > 0


def test_unknown_options_are_refused():
    with pytest.raises(GenError, match="unknown trunk 'clovr'"):
        Hydra(teacher(), HydraOptions(trunk="clovr"))
    with pytest.raises(GenError, match="option layers came as 'one'"):
        Hydra(teacher(), HydraOptions(layers="one"))
    with pytest.raises(GenError, match="exit_layer is 2"):
        Exit(teacher(), ExitOptions(exit_layer=2)).network()
    with pytest.raises(GenError, match="kept_layers came as '2/2', all layers of the model"):
        SkipRepair(teacher(), SkipOptions(kept_layers="2/2"))
    with pytest.raises(GenError, match="expected rank and cycle above 0"):
        LoraDropKind(teacher(), DropOptions(cycle=0))
    with pytest.raises(GenError, match="expected rank and penalty of at least 0"):
        RouterKind(teacher(), RouterOptions(penalty=-1.0))
    assert target(4, 3).sampling.unfiltered().top_k == 0
    assert DepthOptions().depth == 4 and len(NET.model.layers) == 2
