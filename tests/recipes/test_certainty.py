"""Certainty-forcing distillation: its masks, its corruption, its losses in closed form, and a short
run of the recipe. The recipe of ADJUST's layer beside it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from gen.pipeline.pipeline import Pipeline
from gen.recipes.common.grid_models import Shape
from gen.recipes.text import adjust, certainty
from gen.recipes.text.certainty import (
    QUICK,
    certainty_loss,
    certainty_losses,
    committed,
    complementary,
    corrupted,
    mean_at,
)

ROWS, LENGTH, SIZE = 64, 12, 9
SHAPE = Shape((LENGTH,), 2, SIZE, 3)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- masks


@pytest.mark.parametrize("block", [3, 4, 5, 12, 32])
def test_complementary_masks_partition_one_block(block):
    first, second = complementary((ROWS, LENGTH), block, seeded())
    number, seen = torch.arange(LENGTH) // block, set()
    for row in range(ROWS):
        inside = first[row] ^ second[row]
        later = first[row] & second[row]
        (active,) = number[inside].unique().tolist()
        seen.add(active)
        assert torch.equal(inside, number == active), "exactly one of the two masks it"
        assert torch.equal(later, number > active), "nothing of later blocks is known"
    assert seen == set(number.tolist())


def test_a_block_is_sometimes_masked_as_a_whole():
    first, second = complementary((2000, 4), 4, seeded())
    assert bool(first.all(1).any()) and bool(second.all(1).any())


# --- wrong tokens


def test_corruption_changes_visible_positions_alone():
    codes = torch.randint(SIZE, (ROWS, LENGTH), generator=seeded(1))
    hidden = torch.rand(ROWS, LENGTH, generator=seeded(2)) < 0.5
    wrong = corrupted(codes, hidden, 0.5, SIZE, seeded(3))
    assert torch.equal(wrong[hidden], codes[hidden])
    share = (wrong != codes)[~hidden].double().mean()
    assert 0.1 < share < 0.25, "half of 0.5 on average, less what is right by chance"
    assert int(wrong.max()) < SIZE and int(wrong.min()) >= 0
    assert torch.equal(corrupted(codes, hidden, 0.0, SIZE, seeded(3)), codes)


def test_tokens_are_committed_by_confidence_inside_the_block():
    logits = 2 * torch.randn(ROWS, LENGTH, SIZE, generator=seeded(1))
    inside = torch.arange(LENGTH).expand(ROWS, -1) < 8
    tokens, known = committed(logits, inside, seeded(2))
    assert torch.equal(tokens, logits.argmax(-1)) and not known[:, 8:].any()
    top = logits.softmax(-1).amax(-1)
    for row in range(ROWS):
        yes, no = top[row, :8][known[row, :8]], top[row, :8][~known[row, :8]]
        assert not len(yes) or not len(no) or yes.min() > no.max()
    counts = known.sum(1)
    assert counts.min() == 0 and counts.max() == 8, "thresholds differ between rows"


# --- losses


def case(seed: int = 0):
    generator = seeded(seed)
    logits = torch.randn(ROWS, LENGTH, SIZE, dtype=torch.float64, generator=generator)
    codes = torch.randint(SIZE, (ROWS, LENGTH), generator=generator)
    hidden = torch.rand(ROWS, LENGTH, generator=generator) < 0.5
    counted = torch.rand(ROWS, LENGTH, generator=generator) < 0.8
    return logits.requires_grad_(), codes, hidden, counted


def test_the_entropy_has_no_gradient_where_no_likeliest_token_is_right():
    logits, codes, hidden, counted = case()
    wrong = (logits.argmax(-1) + 1) % SIZE
    _, entropy, _ = certainty_losses(logits, wrong, hidden, counted, 0.5)
    (gradient,) = torch.autograd.grad(entropy, logits)
    assert entropy.item() == 0 and not gradient.any()
    # with right ones it does, and there alone
    _, entropy, _ = certainty_losses(logits, codes, hidden, counted, 0.5)
    (gradient,) = torch.autograd.grad(entropy, logits)
    right = (logits.argmax(-1) == codes) & hidden & counted
    assert torch.equal(gradient.abs().sum(-1) > 0, right) and right.any()


def test_the_losses_are_those_of_plain_sums():
    logits, codes, hidden, counted = case(1)
    logits = logits.detach()
    found = certainty_losses(logits, codes, hidden, counted, 0.5)
    ce, entropy, edits, masked, visible = 0.0, 0.0, 0.0, 0, 0
    for row in range(ROWS):
        for i in range(LENGTH):
            if not counted[row, i]:
                continue
            nats = -float(logits[row, i].log_softmax(-1)[codes[row, i]])
            p = (logits[row, i] / 0.5).softmax(-1)
            masked, visible = masked + int(hidden[row, i]), visible + int(~hidden[row, i])
            ce, edits = ce + nats * bool(hidden[row, i]), edits + nats * bool(~hidden[row, i])
            if hidden[row, i] and int(logits[row, i].argmax()) == int(codes[row, i]):
                entropy += -float((p * p.log()).sum())
    wanted = ce / masked, entropy / masked, edits / visible
    assert [x.item() for x in found] == pytest.approx(wanted, rel=1e-12)


class Fixed(torch.nn.Module):
    """Network whose logits are the same for every canvas."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(LENGTH, SIZE + 4, generator=seeded(5)))

    def forward(self, input_ids, **options):
        self.ids = input_ids
        return SimpleNamespace(logits=self.table.expand(len(input_ids), -1, -1))


def test_without_entropy_and_edits_the_loss_is_cross_entropy_at_masked_positions():
    model = Fixed()
    words = torch.zeros(ROWS, 2, dtype=torch.long)
    codes = torch.randint(SIZE, (ROWS, LENGTH), generator=seeded(6))
    plan, plain = replace(QUICK, edit=0.0, block=LENGTH), replace(QUICK.first, beta=0.0)
    total, _ = certainty_loss(SHAPE, plan, plain, seeded(7))(model, (words, codes))
    hidden = model.ids[:, 2:] == SHAPE.mask
    assert torch.equal(hidden[:ROWS], ~hidden[ROWS:]), "both copies, with complementary masks"
    logits = model.table.expand(2 * ROWS, -1, -1)[hidden]
    wanted = F.cross_entropy(logits, codes.repeat(2, 1)[hidden])
    assert total.item() == pytest.approx(wanted.item(), rel=1e-6)
    more, _ = certainty_loss(SHAPE, plan, QUICK.first, seeded(7))(model, (words, codes))
    assert more.item() > total.item()


def test_half_of_the_rows_show_what_the_model_commits_on_a_masked_block():
    model = Fixed()
    words = torch.zeros(ROWS, 2, dtype=torch.long)
    codes = torch.randint(SIZE, (ROWS, LENGTH), generator=seeded(6))
    plan = replace(QUICK, wrong=0.0, block=4)
    wrong = {}
    for own in (False, True):
        stage = replace(QUICK.second, own=own)
        certainty_loss(SHAPE, plan, stage, seeded(7))(model, (words, codes))
        canvas, answers = model.ids[:, 2:], codes.repeat(2, 1)
        wrong[own] = (canvas != SHAPE.mask) & (canvas != answers)
        likeliest = model.table[:, :SIZE].argmax(-1).expand_as(canvas)
        assert torch.equal(canvas[wrong[own]], likeliest[wrong[own]])
    assert not wrong[False].any(), "the control: every visible token is right"
    assert wrong[True][::2].any() and not wrong[True][1::2].any()
    blocks = wrong[True].view(2 * ROWS, -1, 4).any(-1).sum(1)
    assert blocks.max() == 1, "errors are in the block at work alone"


def test_a_mean_of_no_positions_is_zero():
    assert mean_at(torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool)).item() == 0


# --- ADJUST's states


def test_masked_states_are_random_in_one_half_and_uncertain_positions_in_the_other():
    codes = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    entropy = torch.rand(ROWS, LENGTH, generator=seeded(1))
    masked = adjust.masked_states(codes, entropy, seeded(2))
    assert int(masked.sum(1).min()) >= 1
    for row in range(ROWS // 2, ROWS):
        inside, outside = entropy[row][masked[row]], entropy[row][~masked[row]]
        assert not len(outside) or inside.min() > outside.max()
    sorted_too = [
        bool((entropy[r][masked[r]].min() > entropy[r][~masked[r]].max()) | masked[r].all())
        for r in range(ROWS // 2)
        if not masked[r].all()
    ]
    assert not all(sorted_too)


def test_revealing_draws_the_most_certain_masked_position():
    logprobs = torch.randn(ROWS, LENGTH, SIZE, generator=seeded(3)).log_softmax(-1)
    canvas = torch.full((ROWS, LENGTH), SIZE)
    masked = torch.rand(ROWS, LENGTH, generator=seeded(4)) < 0.5
    masked[0] = False
    after, left = adjust.reveal(logprobs, canvas, masked, seeded(5))
    entropy = adjust.entropy_of(logprobs)
    assert torch.equal(after[0], canvas[0]) and not left[0].any()
    for row in range(1, ROWS):
        (position,) = (masked[row] & ~left[row]).nonzero()[:, 0].tolist()
        assert entropy[row, position] == entropy[row][masked[row]].min()
        assert after[row, position] < SIZE and int((after[row] != SIZE).sum()) == 1


# --- the recipes


@pytest.mark.slow
def test_the_recipe_makes_a_model_that_decodes(tmp_path):
    certainty.main(["all", "--work", str(tmp_path), "--quick"])
    out = Pipeline("text", tmp_path / "zoo" / "text-masked-fast")(["sort 3 1 2 ="], "dparallel")
    assert out.media == ["1 2 3"]
    figures = (tmp_path / "evaluation-certainty.json").read_text()
    assert '"before"' in figures and '"llada2"' in figures


@pytest.mark.slow
def test_the_recipe_makes_a_layer_for_its_model(tmp_path):
    adjust.main(["all", "--work", str(tmp_path), "--quick"])
    layer = tmp_path / "zoo" / "text-adjust"
    assert "positions per forward pass" in (layer / "README.md").read_text()
    spec = {"name": "adjust", "adjust_layer": str(layer), "adjust_commits": 4}
    out = Pipeline("text")(["sort 3 1 2 ="], spec)
    assert out.media == ["1 2 3"] and out.stats[0].nfe == 4
