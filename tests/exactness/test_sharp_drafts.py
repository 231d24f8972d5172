"""Drafts of a sharp distribution, in float32: after the first of several siblings is taken out,
less is left than probabilities can hold, and the next one was drawn from it all the same.

The production code runs on every outcome of its draws. Logits of the draft model lie 60 to 300
apart, and float32 ends at a gap of 103.
"""

from __future__ import annotations

import pytest
import torch
from enumeration import distance, enumerate_distribution
from tabular import PROMPTS, TabularCausal, causal_distribution, causal_target

from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.samplers.causal.shapes.base import TreeBuilder
from gen.samplers.causal.speculative import Speculative
from gen.samplers.verifiers import trees

ROUNDING, WRONG = 1e-5, 1e-3
PLAIN = SamplingParams()
SPACE = TokenSpace.codes((3,), 4, 4)
TREES = {
    "token": {"shape": "chain", "num_speculative_tokens": 3, "verifier": "token"},
    "block": {"shape": "chain", "num_speculative_tokens": 3, "verifier": "block"},
    "rsd_c": {"shape": "branching", "branching": "3-1-2", "verifier": "recursive"},
    "rsd_s": {"shape": "stochastic_beam", "beam_width": 2, "tree_depth": 2},
    "sequoia": {"shape": "optimal", "nodes": 4, "tree_depth": 2, "acceptance_by_rank": "0.5,0.3"},
    "dyspec": {"shape": "best_first", "nodes": 4, "tree_depth": 2},
    "traversal": {"shape": "branching", "branching": "3-1-2", "verifier": "traversal"},
    "mdsd": {"shape": "branching", "branching": "3-1", "draws": "top_and_random"},
}


class InFloat32(TabularCausal):
    """Model in closed form whose logits are float32."""

    dtype = torch.float32

    def forward(self, *args):
        return super().forward(*args).float()

    def forward_tree(self, *args):
        return super().forward_tree(*args).float()

    def after(self, sequence):
        return super().after(sequence).float()


def error(tree: dict, gap: float, spread: float = 1.5) -> float:
    """Return the largest error of a probability over three contexts.

    Args:
        tree: parameters of the sampler.
        gap: largest distance of the draft model's logits, divided by its temperature.
        spread: largest distance of the target's logits.
    """
    params = {"draws": "without_replacement", "verifier": "recursive"} | tree
    sampler = Speculative(**params, draft_temperature=1.5 / gap)
    target, draft = (InFloat32(4, s, low=0.0, spread=x) for s, x in ((0, spread), (5, 1.5)))

    def decode(rng, context):
        small = causal_target(draft, SPACE, PLAIN, context)
        return sampler(causal_target(target, SPACE, PLAIN, context), rng, draft=small).tokens

    found = enumerate_distribution(decode, len(PROMPTS))
    expected = [causal_distribution(target, SPACE, PLAIN, c) for c in range(len(PROMPTS))]
    return max(distance(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("gap", [pytest.param(60, marks=pytest.mark.slow), 110, 300])
@pytest.mark.parametrize("tree", TREES)
def test_sharp_drafts_keep_the_distribution(tree, gap):
    assert error(TREES[tree], gap) < ROUNDING


@pytest.mark.parametrize("tree", ["token", "block", "rsd_c", "traversal"])
def test_a_sharp_target_keeps_its_distribution(tree):
    assert error(TREES[tree], 110, spread=120.0) < ROUNDING


@pytest.mark.parametrize("verifier", ["recursive", "traversal"])
def test_control_what_is_left_judged_as_probabilities_fails(monkeypatch, verifier):
    finish = TreeBuilder.finish

    def in_probabilities(self):
        tree = finish(self)
        q, ids = tree.logq[:, 0].exp(), tree.tokens
        for column in (1, 2):  # the siblings of column 0
            q = q.scatter(1, ids[:, column - 1, None], 0.0)
            total = q.sum(-1, keepdim=True)
            q = torch.where(total > 0, q / total, q)
            tree.logq[:, column] = q.log()
        return tree

    monkeypatch.setattr(TreeBuilder, "finish", in_probabilities)
    assert error({"shape": "branching", "branching": "3-1", "verifier": verifier}, 300) > WRONG


def test_a_residual_of_tails_alone_keeps_its_proportions():
    p = torch.tensor([[0.0, -110.0, -120.0, -130.0]])
    q = torch.tensor([[0.0, -111.0, -120.0, -125.0]])
    rest = trees.log_residual(p, q)  # mass is left at one token, and is 0 as a float32
    assert rest.exp().tolist() == [[0.0, 1.0, 0.0, 0.0]]
    assert trees.log_residual(p, p).tolist() == p.tolist()
