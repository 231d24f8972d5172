"""Trunks of Hydra heads in training: which position a label is of, what a position sees, and that
the distributions that are trained are those that are drafted from.

The controls know the sequence too, but say it one position off, or change what a position sees.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from kind_batches import LENGTH, V, drawn_batch, known_sequence, teacher
from torch import nn
from trained_drafters import DEPTH, KINDS, network, scrambled, target
from unrolled_drafts import nodes_of, noted

from gen.core.errors import GenError
from gen.models.draft_heads.entries import later
from gen.pipeline.pipeline import load
from gen.recipes.drafters.kind_heads import Hydra, HydraOptions
from gen.recipes.drafters.recipe import QUICK, DrafterRecipe
from gen.samplers.causal.shapes.static import Chain

TRUNKS = ("clover", "chimera")


def kind_of(name: str, **options) -> Hydra:
    layers = "0" if len(KINDS[name][1]) == 2 else ""
    return Hydra(teacher(), HydraOptions(depth=DEPTH, trunk=name, layers=layers, **options))


class KnowingTrunk(nn.Module):
    """A trunk that reads the number of a state and says what follows it, ``shift`` positions
    off."""

    def __init__(self, shift: int):
        super().__init__()
        self.shift = shift

    def forward(self, states, embedding, unrolls):
        ids = [later(states, k).argmax(-1) + 2 + k + self.shift for k in range(unrolls)]
        return [torch.eye(V)[one.clamp_max(V - 1)] for one in ids]


@pytest.mark.parametrize("shift", [0, -1, 1])
@pytest.mark.parametrize("name", TRUNKS)
def test_the_label_of_depth_k_is_the_token_k_positions_behind_the_next(name, shift):
    made = Hydra(teacher(), HydraOptions(depth=DEPTH, trunk=name, loss="fkl"))
    made.teacher.model = SimpleNamespace(
        embedded=lambda ids, at: torch.zeros(*ids.shape, 16), output_weight=50.0 * torch.eye(V)
    )
    batch = replace(known_sequence(), prompt_states={"model.norm": torch.zeros(2, 2, 16)})
    loss, figures = made.loss(KnowingTrunk(shift), batch)
    right = 1.0 if shift == 0 else 0.0
    assert list(figures.values()) == pytest.approx([right] * DEPTH, abs=1e-6)
    assert (float(loss) < 1e-6) == (shift == 0)


@pytest.mark.parametrize("k", range(DEPTH))
@pytest.mark.parametrize("name", TRUNKS)
def test_a_position_sees_nothing_behind_what_is_known_when_it_is_drafted(name, k):
    """Depth k drafts position t from tokens before t and hidden states up to t - 1 - k."""
    kind, t = kind_of(name), 5
    made, batch = drawn_batch(kind.teacher.layers)
    net, later_on = scrambled(network(name, made.target)), torch.arange(LENGTH)

    def said(tokens_from: int, states_from: int) -> torch.Tensor:
        tokens = torch.where(later_on >= tokens_from, (batch.tokens + 1) % V, batch.tokens)
        moved = (later_on >= states_from).float()[:, None]
        states = {name: x + moved for name, x in batch.states.items()}
        changed = replace(batch, tokens=tokens, states=states)
        return kind.every_logq(net, changed, k + 1)[k][:, t - 1 - k].detach()

    plain = said(LENGTH, LENGTH)
    assert torch.equal(said(t, t - k), plain)
    assert float((said(LENGTH, t - 1 - k) - plain).abs().max()) > 1e-3
    assert float((said(t - 1, LENGTH) - plain).abs().max()) > 1e-3


@pytest.mark.parametrize("name", TRUNKS)
def test_a_trunk_is_trained_on_what_it_drafts(name):
    kind = kind_of(name)
    made, _ = drawn_batch(kind.teacher.layers)
    net = scrambled(network(name, target(LENGTH, V)))
    nodes = nodes_of(noted(net, kind.teacher.layers, Chain(None, DEPTH), "with_replacement"), DEPTH)
    worst = wrong = 0.0
    for item, begun, path, _, drafted in nodes:
        known = torch.tensor([*begun, *path])
        tokens = torch.zeros(1, LENGTH, dtype=torch.long)
        tokens[0, : len(known)] = known
        batch = made.batch(torch.tensor([item]), tokens)
        at, k = len(known), len(path)
        said = kind.every_logq(net, batch, DEPTH)[k][0].detach()
        worst = max(worst, float((said[at - 1 - k] - drafted).abs().max()))
        wrong = max(wrong, float((said[at - 2 - k] - drafted).abs().max()))
    assert worst < 1e-4 and wrong > 1e-3


def test_embeddings_of_another_width_than_the_states_are_refused():
    made = teacher()
    made.model = SimpleNamespace(
        input_embeddings=nn.Embedding(V, 8), output_weight=torch.zeros(V, 16)
    )
    with pytest.raises(GenError, match="hydra with trunk=clover needs embeddings as wide as"):
        Hydra(made, HydraOptions(trunk="clover"))


@pytest.mark.slow
@pytest.mark.parametrize("name", TRUNKS)
def test_the_recipe_writes_a_trunk_that_a_sampler_reads(tmp_path, name):
    recipe = DrafterRecipe("text-causal", "hydra", tmp_path, QUICK, {"trunk": name})
    assert 0 < recipe.run()["alpha"] <= 1
    spec = recipe.kind.sampler(tmp_path / "drafter")
    assert spec["num_speculative_tokens"] == HydraOptions().depth
    assert load("text")("3 + 8 + 5 =", sampler=spec).stats[0].draft_nfe is not None
    with pytest.raises(GenError, match="was trained for temperature 1"):
        load("text")("3 + 8 + 5 =", sampler=spec, temperature=0.5)
