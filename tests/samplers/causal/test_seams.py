"""Seams of the engine that no sampler uses yet: trees of drafts, hidden states, forked rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from decoding import decode_causal
from small_llama import small_llama
from tabular import TabularCausal, causal_target

from gen.core.errors import GenError
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.adapters.language_models import CausalLM
from gen.models.adapters.slot_cache import SlotCache
from gen.models.targets.causal import CausalTarget
from gen.samplers.causal.autoregressive import _NoDrafts
from gen.samplers.engine.draft import tree_positions
from gen.samplers.engine.rows import BatchSlots, RowStore

V, LENGTH, EXACT = 24, 12, 1e-9
NET = small_llama(V)
PROMPTS, UNCOND = torch.arange(12).view(3, 4), torch.zeros(3, 4, dtype=torch.long)
SPACE = TokenSpace.codes((LENGTH,), V, 20)

# a chain, a star and a tree with two branches of two depths: parent of each of five drafts
PARENTS = torch.tensor([[-1, 0, 1, 2, 3], [-1, -1, -1, -1, -1], [-1, -1, 0, 0, 2]])
DRAFTS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3], [5, 8, 9, 7, 9]])
COMMITTED = torch.tensor([[7, 11], [2, 3], [19, 0]])  # tokens before the tree


def target(scale: float, rows: list[int] | None = None) -> CausalTarget:
    rows = [0, 1, 2] if rows is None else rows
    lengths = torch.tensor([4, 3, 4])[rows]
    return CausalTarget(
        CausalLM(NET),
        PROMPTS[rows],
        SPACE,
        SamplingParams(guidance_scale=scale),
        UNCOND[rows, :3] if scale != 1 else None,
        lengths,
    )


def positions_of(start: int, count: int, rows: int = 3) -> torch.Tensor:
    return torch.arange(start, start + count).expand(rows, -1)


def plain(scale: float, row: int, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities [V'] after committed tokens, by one call without any cache before it."""
    given = torch.tensor([[0, *tokens]])
    return target(scale, [row]).predict(given, positions_of(0, len(tokens) + 1, 1)).logprobs[0, -1]


def begun(scale: float, first_is_tree: bool) -> CausalTarget:
    """A target that has seen all but the last of the committed tokens."""
    of = target(scale)
    if not first_is_tree:
        given = torch.cat([COMMITTED[:, :1], COMMITTED[:, :1]], 1)
        of.predict(given, positions_of(0, 2))
    return of


def path_to(row: int, draft: int) -> list[int]:
    path = []
    while draft >= 0:
        path.insert(0, draft)
        draft = int(PARENTS[row, draft])
    return path


@pytest.mark.parametrize("first_is_tree", [False, True])
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_each_node_of_a_tree_has_the_logits_of_its_path(scale, first_is_tree):
    """The rows of the batch have different trees."""
    of = begun(scale, first_is_tree)
    committed = COMMITTED[:, :0] if first_is_tree else COMMITTED
    start = torch.full((3,), committed.shape[1])
    last = committed[:, -1:] if committed.shape[1] else torch.zeros(3, 1, dtype=torch.long)
    positions = tree_positions(start, PARENTS)
    output = of.predict(torch.cat([last, DRAFTS], 1), positions, PARENTS)
    assert output.logprobs.shape[:2] == (3, 6)
    for row in range(3):
        for draft in range(-1, 5):
            path = DRAFTS[row, path_to(row, draft)].tolist()
            expected = plain(scale, row, [*committed[row].tolist(), *path])
            found = output.logprobs[row, draft + 1]
            assert torch.allclose(found, expected, atol=EXACT, rtol=0), (row, draft)


def continued(scale: float) -> float:
    """Error of the step after a committed path, against a computation from the beginning."""
    of = begun(scale, False)
    positions = tree_positions(torch.full((3,), 2), PARENTS)
    of.predict(torch.cat([COMMITTED[:, -1:], DRAFTS], 1), positions, PARENTS)
    # paths of different lengths: three drafts of the chain, none of the star, two of the tree
    path, count = torch.tensor([[0, 1, 2], [4, 0, 0], [0, 2, 4]]), torch.tensor([3, 0, 3])
    of.commit_path(path, count)
    bonus, start = torch.tensor([[13], [14], [15]]), 2 + count + 1
    found = of.predict(torch.cat([bonus, bonus], 1), start[:, None].expand(-1, 2)).logprobs[:, -1]
    worst = 0.0
    for row in range(3):
        drafts = DRAFTS[row, path[row, : int(count[row])]].tolist()
        expected = plain(scale, row, [*COMMITTED[row].tolist(), *drafts, int(bonus[row])])
        worst = max(worst, float((found[row].exp() - expected.exp()).abs().max()))
    return worst


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_a_committed_path_is_what_a_chain_would_have_left(scale):
    assert continued(scale) < EXACT


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_control_a_path_that_is_not_committed_is_found(monkeypatch, scale):
    monkeypatch.setattr(SlotCache, "commit_path", lambda self, nodes, count: None)
    assert continued(scale) > 1e-3


def test_control_a_tree_taken_for_a_chain_is_found(monkeypatch):
    tree = SlotCache.tree
    monkeypatch.setattr(
        SlotCache,
        "tree",
        lambda self, positions, parents, dtype: tree(
            self, positions, torch.arange(-1, 4).expand(3, -1), dtype
        ),
    )
    with pytest.raises(AssertionError):
        test_each_node_of_a_tree_has_the_logits_of_its_path(1.0, False)


class Chains(TabularCausal):
    """Model that takes no trees."""

    forward_tree = None


def test_a_model_that_takes_chains_alone_says_so():
    of = causal_target(Chains(5), TokenSpace.codes((3,), 5, 5), SamplingParams(), [0])
    with pytest.raises(GenError, match="draft is a tree, and Chains"):
        of.predict(torch.zeros(1, 2, dtype=torch.long), positions_of(0, 2, 1), torch.tensor([[-1]]))


# --- hidden states


class Reading(_NoDrafts):
    """Autoregression that reads the hidden states of two layers."""

    needs = frozenset({"hidden_states"})
    hidden_layers = ("model.layers.0", "model.norm")

    def __init__(self):
        super().__init__()
        self.states = []

    def verify(self, step, draft, output):
        self.states.append(output.hidden_states)
        return super().verify(step, draft, output)


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_a_method_gets_the_hidden_states_it_needs(scale):
    drafter, keys = Reading(), CounterRNG([3, 14, 15])
    out = decode_causal(target(scale), keys, drafter)
    expected = resolve_sampler("autoregressive")[0](target(scale), CounterRNG([3, 14, 15]))
    assert torch.equal(out.tokens, expected.tokens) and len(drafter.states) == LENGTH
    for row in range(3):
        prompt = PROMPTS[row, : int(target(1.0).prompt_length[row])].tolist()
        ids = torch.tensor([[*prompt, *out.tokens[row].tolist()]])
        with torch.no_grad():
            whole = NET(ids, output_hidden_states=True).hidden_states
        for n, states in enumerate(drafter.states):
            at = len(prompt) - 1 + n
            assert set(states) == set(Reading.hidden_layers)
            for name, layer in (("model.layers.0", 1), ("model.norm", 2)):
                found = states[name][row, -1]
                assert torch.allclose(found, whole[layer][0, at], atol=1e-6, rtol=0), (row, n)


def test_nobody_pays_for_hidden_states_that_nobody_needs():
    assert target(1.0).predict(COMMITTED[:, :1], positions_of(0, 1)).hidden_states is None


def test_what_a_model_cannot_give_is_refused_in_one_line():
    class Other(Reading):
        needs = frozenset({"hidden_state"})

    class Layer(Reading):
        hidden_layers = ("model.layer.0",)

    tabular = causal_target(TabularCausal(5), TokenSpace.codes((3,), 5, 5), SamplingParams(), [0])
    for drafter, of, message in (
        (Reading(), tabular, "Reading needs hidden_states, and TabularCausal gives logits alone"),
        (Other(), target(1.0), "hidden_states"),
        (Layer(), target(1.0), "model.layers.0"),
    ):
        with pytest.raises(GenError, match=message) as caught:
            decode_causal(of, CounterRNG([1]), drafter)
        assert "\n" not in str(caught.value)


# --- forked rows


def decode_forked(scale: float, fork_at: int | None, prune_at: int | None = None):
    """Decode by hand, with rows that fork: tokens of the rows, and (item, branch) of each."""
    of, rng = target(scale), CounterRNG([3, 14, 15])
    store = RowStore()
    slots = BatchSlots(of, followers=[store])
    store["tokens"] = torch.zeros(3, LENGTH, dtype=torch.long)
    branches = np.zeros(3, dtype=np.int64)
    draws = rng.of_branches(slots.items, branches)
    last = torch.zeros(3, 1, dtype=torch.long)
    for n in range(LENGTH):
        row = None
        if n == fork_at:
            row, branches = np.array([0, 1, 1, 1, 2, 2, 2]), np.array([0, 0, 1, 2, 0, 1, 2])
        if n == prune_at:
            row = (branches != 1).nonzero()[0]
            branches = branches[row]
        if row is not None:
            last = slots.continue_as(row, slots.items[row]).follow(last)
            draws = rng.of_branches(slots.items, branches)
        rows = torch.arange(len(slots))
        positions = torch.full((len(slots), 1), n)
        logprobs = of.predict(last, positions).logprobs
        on = torch.ones_like(positions, dtype=torch.bool)
        last = draws.categorical(logprobs, rows, positions, "token", None, on)
        store["tokens"][:, n] = last[:, 0]
    return store["tokens"], list(zip(slots.items.tolist(), branches.tolist(), strict=True))


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_branch_0_of_a_forked_row_goes_on_and_the_others_draw_anew(scale):
    whole, _ = decode_forked(scale, None)
    expected = resolve_sampler("autoregressive")[0](target(scale), CounterRNG([3, 14, 15]))
    assert torch.equal(whole, expected.tokens)
    tokens, rows = decode_forked(scale, 4)
    assert rows == [(0, 0), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]
    for row, (item, branch) in zip(tokens, rows, strict=True):
        assert torch.equal(row[:4], whole[item, :4])
        assert torch.equal(row, whole[item]) == (branch == 0)
    assert len(tokens.unique(dim=0)) == len(rows)


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_pruned_rows_leave_and_the_others_go_on(scale):
    forked, names = decode_forked(scale, 4)
    tokens, rows = decode_forked(scale, 4, 7)
    assert rows == [name for name in names if name[1] != 1]
    for row, name in zip(tokens, rows, strict=True):
        assert torch.equal(row, forked[names.index(name)])


@pytest.mark.parametrize("what", ["cache", "rng"])
def test_control_a_fork_that_leaves_something_behind_is_found(monkeypatch, what):
    if what == "cache":
        # every row gets the keys and values of the first one
        keep = SlotCache.keep
        monkeypatch.setattr(SlotCache, "keep", lambda self, rows: keep(self, rows * 0))
    else:
        of_branches = CounterRNG.of_branches
        monkeypatch.setattr(
            CounterRNG,
            "of_branches",
            lambda self, items, branches: of_branches(self, items, branches * 0),
        )
    with pytest.raises(AssertionError):
        test_branch_0_of_a_forked_row_goes_on_and_the_others_draw_anew(1.0)
