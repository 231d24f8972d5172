"""The recipe of FlexDraft: its labels, and a folder that a sampler reads."""

from __future__ import annotations

import pytest
import torch

from gen.core.errors import GenError
from gen.pipeline.pipeline import Pipeline
from gen.recipes.drafters.data import Batch
from gen.recipes.drafters.kind_flexdraft import FlexKind, FlexOptions
from gen.recipes.drafters.losses import forward_kl
from gen.recipes.drafters.recipe import main

TOTAL, SIZE = 6, 5


class Table(FlexKind):
    """Kind whose masks behind position t say the distributions of given positions."""

    def __init__(self, table, early):
        self.table, self.early = table, early
        self.options, self.divergence = FlexOptions(depth=3, groups=4), forward_kl

    def all_logq(self, net, batch, groups):
        anchors = torch.arange(min(groups, TOTAL)).expand(len(batch.tokens), -1)
        at = anchors[..., None] + 1 + torch.arange(3) - self.early
        row = torch.arange(len(anchors))[:, None, None]
        return self.table, self.table[row, at.clamp(0, TOTAL - 1)], anchors


def batch():
    generator = torch.Generator().manual_seed(0)
    logp = torch.randn(2, TOTAL, SIZE, generator=generator).log_softmax(-1)
    tokens, lengths = torch.zeros(2, TOTAL, dtype=torch.long), torch.tensor([1, 1])
    prompt = torch.zeros(2, 1, dtype=torch.long)
    return Batch(prompt, lengths, tokens, torch.ones(2, TOTAL), logp, {}, {})


def test_mask_j_is_about_the_jth_token_behind_the_one_that_the_pass_adds():
    given = batch()
    loss, figures = Table(given.logp, 0).loss(None, given)
    assert loss.item() == pytest.approx(0, abs=1e-6)
    assert set(figures) == {"acceptance 1", "acceptance 2", "acceptance 3"}
    assert all(x == pytest.approx(1) for x in figures.values())
    for early in (1, -1):  # the controls are a position off
        assert Table(given.logp, early).loss(None, given)[0].item() > 0.1


def test_a_first_draft_is_looked_up_at_its_own_position():
    given = batch()
    kind = Table(given.logp, 0)
    found, usable = kind.logq(None, given), kind.usable(given)
    assert not usable[:, 0].any() and usable[:, 1:].all()
    assert torch.equal(found[:, 1:], given.logp[:, 1:])


@pytest.mark.slow
def test_the_recipe_makes_a_drafter_for_its_model_alone(tmp_path, capsys):
    call = ["--model", "text-causal", "--kind", "flexdraft", "--quick", "--out", str(tmp_path)]
    assert main([*call, "--options", "layers=2", "rank=2", "depth=3"]) == 0
    spec = {"name": "speculative", "drafter": "flexdraft", "num_speculative_tokens": 3}
    spec["drafter_weights"] = str(tmp_path / "drafter")
    exact = {**spec, "verifier": "follow"}
    pipe = Pipeline("text", dtype="float64")
    plain = pipe(["sort 3 1 2 ="], "autoregressive", seed=3)
    out = pipe(["sort 3 1 2 ="], exact, seed=3)
    assert out.media == plain.media and out.stats[0].draft_nfe is None
    with pytest.raises(GenError, match="drafter"):
        pipe(["sort 3 1 2 ="], exact, temperature=0.5)
