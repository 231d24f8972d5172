"""Drafts from transferred hidden states: what is trained is what is decoded, which position a map
is about, and what a pseudo-state sees.

The controls take the state of another position, or let pseudo-states see one that is not theirs.
"""

from __future__ import annotations

import pytest
import torch
from decoding import decode_causal
from trained_drafters import DEPTH, PROMPTS, network, scrambled, target

from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.rng import CounterRNG
from gen.models.draft_heads.layer_maps import TransferMaps
from gen.recipes.drafters.data import Batch, Teacher
from gen.recipes.drafters.kind_hidden import HiddenOptions, HiddenTransfer
from gen.samplers.causal.drafters.hidden_transfer import Hidden
from gen.samplers.causal.shapes.base import NodeDrafter
from gen.samplers.causal.shapes.static import Chain

IDS, LENGTH, WRONG = 20, 12, 1e-3


class Noted(Hidden):
    """Nodes that note their distributions, with the tokens that they are about."""

    def begin(self, step, tokens):
        made = super().begin(step, tokens)
        self.seen = getattr(self, "seen", [])
        if self.known.any():
            at = tokens.clone(), step.start.clone(), self.known.copy()
            self.seen.append((*at, self.logq, step.items.tolist()))
        return made


def noted(shape: str) -> tuple[torch.nn.Module, list]:
    of = target(LENGTH, IDS)
    net = scrambled(network("hidden", of))
    nodes = Noted(of, net, 1)
    kind = registry.get("shape", "branching")
    made = kind(registry.params_of("shape", "branching")(branching="2-2-1"))
    made = Chain(None, DEPTH) if shape == "chain" else made
    rule = registry.get("verifier", "recursive")().attach(of)
    draws = "without_replacement" if shape == "tree" else "with_replacement"
    decode_causal(of, CounterRNG([5, 6, 7]), NodeDrafter(nodes, made, draws, rule))
    return net, nodes.seen


def kind_of(**options) -> HiddenTransfer:
    of = target(LENGTH, IDS)
    made = Teacher.__new__(Teacher)
    vars(made).update(
        target=of, model=of.model, sampling=of.sampling, layers=(), pipe=None, items=[]
    )
    return HiddenTransfer(made, HiddenOptions(depth=DEPTH, layer=1, **options))


@torch.no_grad()
def gap(seen: list, net: torch.nn.Module, shift: int = 0) -> float:
    """Largest difference between decoding and training over all drafts of all rows and steps."""
    worst, count, kind = 0.0, 0, kind_of()
    for tokens, start, known, logq, items in seen:
        for row in known.nonzero()[0].tolist():
            begun = int(start[row])
            whole = torch.zeros(3, LENGTH, dtype=torch.long)
            whole[items[row], :begun] = tokens[row, :begun]
            batch = kind.teacher.batch(torch.arange(3), whole)
            anchor = torch.full((3, 1), begun - 1 + shift).clamp_min(0)
            wanted = kind.transferred(net, batch, anchor, DEPTH)[items[row], 0]
            room = min(DEPTH, LENGTH - begun)
            found = logq[row, :room].double()
            worst = max(worst, float((found - wanted[:room].double()).abs().max()))
            count += 1
    assert count > 8
    return worst


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_what_is_trained_is_what_is_drafted(shape):
    net, seen = noted(shape)
    assert gap(seen, net) < 1e-5  # log-probabilities of training are float32


@pytest.mark.parametrize("shift", [-1, 1])
def test_control_the_state_of_another_position(shift):
    net, seen = noted("chain")
    assert gap(seen, net, shift) > WRONG


class Known(HiddenTransfer):
    """Transfers that know a sequence 1, 2, 3 ..., ``shift`` positions off."""

    shift = 0

    def transferred(self, net, batch, anchors, depth):
        behind = anchors[..., None] + torch.arange(1, depth + 1) + 1 + self.shift
        return torch.eye(IDS).log()[behind.clamp(0, IDS - 1)]


@pytest.mark.parametrize("shift", [0, -1, 1])
def test_the_label_of_map_k_is_the_token_k_places_behind_the_next(shift):
    kind = kind_of(loss="fkl")
    kind.__class__ = Known
    kind.shift = shift
    tokens = torch.arange(1, LENGTH + 1).repeat(3, 1)
    logp = torch.eye(IDS).log()[tokens]
    batch = Batch(PROMPTS, torch.tensor([4, 3, 4]), tokens, torch.ones(3, LENGTH), logp, {}, {})
    loss, figures = kind.loss(None, batch)
    right = 1.0 if shift == 0 else 0.0
    assert list(figures.values()) == pytest.approx([right] * DEPTH, abs=1e-6)
    assert (float(loss) < 1e-6) == (shift == 0)


@torch.no_grad()
def test_a_pseudo_state_sees_its_anchor_and_what_stands_before():
    kind, net = kind_of(), scrambled(network("hidden", target(LENGTH, IDS)))
    tokens = torch.randint(0, IDS, (3, LENGTH), generator=torch.Generator().manual_seed(3))
    batch = kind.teacher.batch(torch.arange(3), tokens)
    anchors = torch.tensor([[4, 2]]).expand(3, -1)
    plain = kind.transferred(net, batch, anchors, DEPTH)
    alone = kind.transferred(net, batch, anchors[:, 1:], DEPTH)
    assert torch.allclose(plain[:, 1:], alone, atol=1e-6, rtol=0)
    for position in range(LENGTH):
        other = tokens.clone()
        other[:, position] = (other[:, position] + 1) % IDS
        changed = kind.teacher.batch(torch.arange(3), other)
        made = kind.transferred(net, changed, anchors, DEPTH)
        moved = (made - plain).abs().amax((0, 2, 3)) > 1e-6
        # the state that token t is drawn from is that of token t - 1
        assert moved.tolist() == [position < 4, position < 2]


def test_new_maps_repeat_the_state():
    net = TransferMaps(16, DEPTH)
    state = torch.randn(2, 5, 16)
    assert torch.equal(net(state), state[:, :, None].expand(-1, -1, DEPTH, -1))


def test_a_layer_out_of_range_is_refused():
    kind = kind_of()
    kind.layer = 2
    with pytest.raises(GenError, match="layer is 2; expected from 1 to 1"):
        kind.network()
    with pytest.raises(GenError, match="expected depth and groups above 0"):
        kind_of(groups=0)
