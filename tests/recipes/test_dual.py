"""The dual stream: its mask table against the rule, and its two losses."""

from __future__ import annotations

import pytest
import torch

from gen.pipeline.pipeline import Pipeline
from gen.recipes.common.grid_models import Run, Shape, new_lm
from gen.recipes.text import dual
from gen.recipes.text.dual import dual_inputs, dual_loss, dual_stream, masked_positions

PREFIX, LENGTH, BLOCK, ROWS = 2, 6, 3, 40
SHAPE = Shape((LENGTH,), PREFIX, 5, 3)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(block: int = BLOCK):
    masked = masked_positions((ROWS, LENGTH), block, seeded())
    return masked, dual_stream(masked, PREFIX, block)


def net():
    torch.manual_seed(0)
    model = new_lm(SHAPE, Run(0, 32, 2, tied=True)).double().eval()
    with torch.no_grad():  # an untrained mask is like any other token
        model.model.embed_tokens.weight.mul_(20)
    return model


@pytest.mark.parametrize("block", [1, 2, 3, 4, 6])
def test_every_block_has_masks_and_drafting_rows_have_the_last_ones(block):
    masked, _ = drawn(block)
    for at in range(0, LENGTH, block):
        part = masked[:, at : at + block]
        assert part.any(1).all()
        first = part[: ROWS // 2].long()
        assert torch.equal(first, first.sort(1).values), "masks behind the known tokens"
    ordered = masked[ROWS // 2 :, :block].long()
    assert block == 1 or not torch.equal(ordered, ordered.sort(1).values)


@pytest.mark.parametrize("block", [2, 3, 6])
def test_the_mask_table_is_the_rule(block):
    masked, layout = drawn(block)
    for row in range(ROWS):
        order, hidden = layout.order[row].tolist(), masked[row].tolist()
        # known tokens first, then masks, block by block
        wanted = sorted(range(LENGTH), key=lambda t: (t // block, hidden[t], t))
        assert order == wanted
        assert layout.masked[row].tolist() == [hidden[t] for t in order]
        for q in range(PREFIX + 2 * LENGTH):
            for k in range(PREFIX + 2 * LENGTH):
                if q < PREFIX + LENGTH:
                    rule = k <= q
                elif k < PREFIX:
                    rule = True
                else:
                    mine = order[q - PREFIX - LENGTH] // block
                    if k < PREFIX + LENGTH:
                        rule = (k - PREFIX) // block < mine
                    else:
                        rule = k <= q and order[k - PREFIX - LENGTH] // block == mine
                assert bool(layout.sees[row, q, k]) == rule, (row, q, k)


def test_a_mask_sees_all_known_tokens_of_its_block_and_no_answer_at_a_mask():
    masked, layout = drawn()
    for row in range(ROWS):
        order = layout.order[row]
        for column in layout.masked[row].nonzero()[:, 0].tolist():
            sees = layout.sees[row, PREFIX + LENGTH + column]
            block = int(order[column]) // BLOCK
            inside = torch.arange(block * BLOCK, (block + 1) * BLOCK)
            seen = set(order[sees[PREFIX + LENGTH :]].tolist())
            assert set(inside[~masked[row, inside]].tolist()) <= seen <= set(inside.tolist())
            clean = set(sees[PREFIX : PREFIX + LENGTH].nonzero()[:, 0].tolist())
            assert clean == set(range(block * BLOCK)), "x0 of earlier blocks alone"


def test_a_block_counts_by_one_over_its_share_of_masks():
    layout = drawn()[1]
    number = layout.order // BLOCK
    for at in range(LENGTH // BLOCK):
        total = (layout.weight * (number == at)).sum(1)
        assert torch.allclose(total, torch.full((ROWS,), float(BLOCK)))
    assert not layout.weight[~layout.masked].any()


def logits_of(model, words, codes, layout):
    inputs = dual_inputs(SHAPE, words, codes, layout)
    inputs["attention_mask"] = inputs["attention_mask"].double()
    with torch.no_grad():
        return model(**inputs).logits


def test_the_causal_stream_is_the_causal_model_whatever_xt_holds():
    model, (_, layout) = net(), drawn()
    words = torch.randint(3, (ROWS, PREFIX), generator=seeded(1))
    codes = torch.randint(5, (ROWS, LENGTH), generator=seeded(2))
    found = logits_of(model, words, codes, layout)
    ids = torch.cat([SHAPE.codes + words, codes], 1)
    with torch.no_grad():
        causal = model(input_ids=ids, use_cache=False).logits
    assert torch.allclose(found[:, : PREFIX + LENGTH], causal, atol=1e-9, rtol=0)
    inputs = dual_inputs(SHAPE, words, codes, layout)
    inputs["input_ids"][:, PREFIX + LENGTH :] = 0
    inputs["attention_mask"] = inputs["attention_mask"].double()
    with torch.no_grad():
        other = model(**inputs).logits
    assert torch.allclose(other[:, : PREFIX + LENGTH], causal, atol=1e-9, rtol=0)
    # and the masks do depend on what xt holds
    assert not torch.allclose(other[:, PREFIX + LENGTH :], found[:, PREFIX + LENGTH :])


def test_answers_at_masks_do_not_reach_the_masks_of_their_block():
    model, (masked, layout) = net(), drawn(LENGTH)
    words = torch.randint(3, (ROWS, PREFIX), generator=seeded(1))
    codes = torch.randint(5, (ROWS, LENGTH), generator=seeded(2))
    changed = torch.where(masked, (codes + 1) % 5, codes)
    one, other = (logits_of(model, words, c, layout)[:, -LENGTH:] for c in (codes, changed))
    assert torch.allclose(one, other, atol=1e-9, rtol=0)
    known = torch.where(masked, codes, (codes + 1) % 5)
    rows = (~masked).any(1)
    different = (logits_of(model, words, known, layout)[:, -LENGTH:] - one).abs().amax((1, 2))
    assert (different[rows] > 1e-6).all() and not different[~rows].any()


def test_the_loss_is_half_of_both():
    model = net().float()
    words = torch.randint(3, (ROWS, PREFIX), generator=seeded(1))
    codes = torch.randint(5, (ROWS, LENGTH), generator=seeded(2))
    total, figures = dual_loss(SHAPE, BLOCK, seeded(3))(Wrapped(model), (words, codes))
    assert total.item() == pytest.approx((figures["causal"] + figures["masked"]) / 2, rel=1e-6)


class Wrapped:
    """Network that takes masks of any dtype."""

    def __init__(self, model):
        self.model = model

    def __call__(self, attention_mask, **options):
        return self.model(attention_mask=attention_mask.float(), **options)


@pytest.mark.slow
def test_the_recipe_makes_a_model_that_drafts_for_itself(tmp_path):
    dual.main(["all", "--work", str(tmp_path), "--quick"])
    spec = {"name": "speculative", "drafter": "dual_stream", "num_speculative_tokens": 5}
    pipe = Pipeline("text", tmp_path / "zoo" / "text-dual", dtype="float64")
    plain = pipe(["sort 3 1 2 ="], "autoregressive", temperature=0.0)
    out = pipe(["sort 3 1 2 ="], spec, temperature=0.0)
    assert out.media == plain.media and out.stats[0].nfe <= plain.stats[0].nfe
    # the same model decodes with masks in a window, and its text comes in parts
    whole = pipe(["sort 3 1 2 ="], "wedlm", seed=1)
    parts = [chunk.media for chunk in pipe.stream(["sort 3 1 2 ="], "wedlm", seed=1)]
    assert "".join(parts) == whole.media[0]
