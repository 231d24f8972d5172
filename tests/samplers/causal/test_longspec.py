"""Drafts of a layer over a window and the target's own keys: what is trained is what is decoded,
and what each draft sees.

The controls see a key too many or too few, and must miss.
"""

from __future__ import annotations

import pytest
import torch
from decoding import decode_causal
from trained_drafters import DEPTH, KINDS, LENGTHS, PROMPTS, network, scrambled, target

from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.rng import CounterRNG
from gen.recipes.drafters.data import Batch, Teacher
from gen.recipes.drafters.kind_longspec import LongSpecKind, LongSpecOptions
from gen.samplers.causal.drafters.longspec import LongSpec
from gen.samplers.causal.shapes.base import NodeDrafter
from gen.samplers.causal.shapes.static import Chain

IDS, LENGTH, WRONG = 20, 9, 1e-3
WINDOW = KINDS["longspec"][2]["window"]


class Noted(LongSpec):
    """Nodes that note their distributions, with the tokens that they are about."""

    def begin(self, step, tokens):
        self.tokens = tokens.clone()
        return super().begin(step, tokens)

    def extend(self, step, tree, first):
        made = super().extend(step, tree, first)
        self.seen = getattr(self, "seen", [])
        at = self.tokens, step.start.clone(), tree.tokens.clone(), tree.parents.clone()
        self.seen.append((*at, first, self.known.copy(), made, step.items.tolist()))
        return made


def noted(shape: str) -> tuple[torch.nn.Module, list]:
    of = target(LENGTH, IDS)
    net = scrambled(network("longspec", of))
    nodes = Noted(of, net)
    kind = registry.get("shape", "branching")
    made = kind(registry.params_of("shape", "branching")(branching="2-2-1"))
    made = Chain(None, DEPTH) if shape == "chain" else made
    rule = registry.get("verifier", "recursive")().attach(of)
    draws = "without_replacement" if shape == "tree" else "with_replacement"
    decode_causal(of, CounterRNG([5, 6, 7]), NodeDrafter(nodes, made, draws, rule))
    return net, nodes.seen


def kind_of(window: int = WINDOW, queries: int = 128) -> LongSpecKind:
    of = target(LENGTH, IDS)
    made = Teacher.__new__(Teacher)
    vars(made).update(
        target=of, model=of.model, sampling=of.sampling, layers=(), pipe=None, items=[]
    )
    return LongSpecKind(made, LongSpecOptions(window=window, queries=queries, inner=16))


def batch_of(kind: LongSpecKind, tokens: torch.Tensor) -> Batch:
    return kind.teacher.batch(torch.arange(len(tokens)), tokens)


@torch.no_grad()
def gap(seen: list, net: torch.nn.Module, shift: int = 0, window: int = WINDOW) -> float:
    """Largest difference between decoding and training over all nodes of all rows and steps."""
    worst, count, kind = 0.0, 0, kind_of(window)
    for tokens, start, drafts, parents, first, known, made, items in seen:
        for row in known.nonzero()[0].tolist():
            begun = int(start[row])
            for node in range(first, drafts.shape[1]):
                path, at = [], node
                while at >= 0:
                    path.insert(0, int(drafts[row, at]))
                    at = int(parents[row, at])
                position = begun + len(path)
                if position >= LENGTH:
                    continue
                whole = torch.zeros(3, LENGTH, dtype=torch.long)
                whole[items[row], :position] = torch.tensor(tokens[row, :begun].tolist() + path)
                batch = batch_of(kind, whole)
                hidden = kind.hidden(
                    net, batch, kind.far(batch), torch.tensor([position]), len(path) + 1 + shift
                )
                wanted = kind._logq(hidden.double(), torch.tensor([position]))
                found = made[row, node - first].double()
                worst = max(worst, float((found - wanted[items[row], 0]).abs().max()))
                count += 1
    assert count > 10
    return worst


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_what_is_trained_is_what_is_drafted(shape):
    net, seen = noted(shape)
    assert gap(seen, net) < 1e-5  # log-probabilities of training are float32


@pytest.mark.parametrize("shift", [-1, 1])
def test_control_a_key_of_the_target_too_many_or_too_few(shift):
    net, seen = noted("chain")
    assert gap(seen, net, shift) > WRONG


def test_control_another_window():
    net, seen = noted("chain")
    assert gap(seen, net, window=WINDOW + 1) > WRONG


@torch.no_grad()
def test_a_query_sees_its_window_and_the_keys_behind_its_gap():
    kind, net = kind_of(), scrambled(network("longspec", target(LENGTH, IDS)))
    tokens = torch.randint(0, IDS, (3, LENGTH), generator=torch.Generator().manual_seed(3))
    batch, at, wide = batch_of(kind, tokens), torch.tensor([7]), 4
    given = kind.far(batch)
    plain = kind.hidden(net, batch, given, at, wide)
    for position in range(LENGTH):
        other = tokens.clone()
        other[:, position] = (other[:, position] + 1) % IDS
        changed = Batch(**{**vars(batch), "tokens": other})
        # the tokens of the window are those before position 7
        moved = not torch.equal(kind.hidden(net, changed, given, at, wide), plain)
        assert moved == (7 - WINDOW <= position < 7)
    slots = given[0][0].shape[2]
    for slot in range(slots):
        keys, values = (x.clone() for x in given[0])
        values[:, :, slot] += 1
        made = kind.hidden(net, batch, ((keys, values), given[1]), at, wide)
        moved = (made - plain).abs().amax((1, 2)) > 0
        # the query of position 7 is the token at 6, whose slot is 6 behind the prompt
        assert moved.tolist() == [slot <= n + 6 - wide for n in LENGTHS.tolist()]


def test_the_first_draft_of_all_positions_is_that_of_parts():
    tokens = torch.randint(0, IDS, (3, LENGTH), generator=torch.Generator().manual_seed(3))
    net = scrambled(network("longspec", target(LENGTH, IDS)))
    whole, parts = (kind_of(queries=n) for n in (128, 2))
    batch = batch_of(whole, tokens)
    assert torch.allclose(whole.logq(net, batch), parts.logq(net, batch), atol=1e-6, rtol=0)


def test_a_new_layer_asks_as_the_last_layer_of_the_target_does():
    kind = kind_of()
    net = kind.network()
    last = kind.teacher.model.model.model.layers[-1]
    assert torch.equal(net.far_query.weight.double(), last.self_attn.q_proj.weight.float().double())
    assert len(PROMPTS) == 3


def test_options_out_of_range_are_refused():
    with pytest.raises(GenError, match="expected window, depth and queries above 0"):
        kind_of(window=0)
